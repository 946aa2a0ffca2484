"""From token ids to text as it comes: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
_LAST_BYTE = "<0xFF>"  # in vocabularies that fall back to bytes; never part of a valid character


class TextStream:
    """Turns tokens into pieces of text that can be shown at once.

    Joined, the pieces and the rest that `finish` gives equal the tokenizer's decoding of all tokens, up to
    the stop string that is complete first (of several that end at the same character, the longest). Held
    back is what a later token could still change: a character whose bytes are incomplete, text that may
    turn out to be the beginning of a stop string, and characters spelt in byte tokens as long as more
    bytes may follow: decoders show a run of byte tokens with an invalid one as replacement characters only.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False  # a stop string was completed by the last token pushed
        self.ids: list[int] = []
        self._window = 0  # decoding starts here: a few tokens back, since some decoders look at neighbours
        self._read = 0  # tokens before this one are wholly decoded
        self._held = ""  # decoded, but possibly the beginning of a stop string
        byte: Any = tokenizer.convert_tokens_to_ids(_LAST_BYTE)
        known = byte is not None and tokenizer.convert_ids_to_tokens(byte) == _LAST_BYTE
        self._byte: list[Any] = [byte] if known else []

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain. Nothing after `stopped`."""
        if self.stopped:
            return ""
        self.ids.append(token)
        now, new = self._undecided()
        # A replacement character at the end is most often a character whose last bytes are to come.
        whole = new.rstrip(REPLACEMENT)
        if self._stop(self._held + whole):
            return self._held
        if not new or whole != new or not self._is_settled(now):
            return ""
        self._window, self._read = self._read, len(self.ids)
        text = self._held + new
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back so far, once no more tokens will come."""
        if self.stopped:
            return ""
        text = self._held + self._undecided()[1]
        self._window, self._read = self._read, len(self.ids)
        if not self._stop(text):
            self._held = text
        text, self._held = self._held, ""
        return text

    def _undecided(self) -> tuple[str, str]:
        """The decoding of the tokens from the window on, and the part of it that is new."""
        done = self._decode(self.ids[self._window : self._read])
        now = self._decode(self.ids[self._window :])
        return now, now[len(done) :]

    def _is_settled(self, now: str) -> bool:
        """Whether `now` stays as it is when a byte token follows."""
        return not self._byte or self._decode(self.ids[self._window :] + self._byte).startswith(now)

    def _stop(self, text: str) -> bool:
        """Whether `text` holds a stop string; if so, what comes before it is held from now on.

        Nothing follows a stop string, so that text which more tokens could change is final too.
        """
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, text[: min(found)[1]]
        return self.stopped


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def looping(ids: Sequence[int], length: int = 10, times: int = 3) -> bool:
    """Whether any run of `length` ids occurs more than `times` times: the model repeats itself."""
    seen: Counter[tuple[int, ...]] = Counter(tuple(ids[i : i + length]) for i in range(len(ids) - length + 1))
    return any(count > times for count in seen.values())
