"""From token ids to text as it comes: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns tokens into pieces of text that can be shown at once.

    Joined, the pieces and the rest that `finish` gives equal the tokenizer's decoding of all tokens, up to
    the first stop string. A character whose bytes are still incomplete is held back, and so is text that
    may yet turn out to be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False  # a stop string was completed by the last token pushed
        self.ids: list[int] = []
        self._window = 0  # decoding starts here: a few tokens back, since some decoders look at neighbours
        self._read = 0  # tokens before this one are wholly decoded
        self._held = ""  # decoded, but possibly the beginning of a stop string

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain. Nothing after `stopped`."""
        if self.stopped:
            return ""
        self.ids.append(token)
        done = self._decode(self.ids[self._window : self._read])
        now = self._decode(self.ids[self._window :])
        # A replacement character at the end is most often a character whose last bytes are to come.
        if len(now) <= len(done) or now.endswith(REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self.ids)
        return self._release(now[len(done) :], final=False)

    def finish(self) -> str:
        """The text held back so far, once no more tokens will come."""
        if self.stopped:
            return ""
        done = self._decode(self.ids[self._window : self._read])
        now = self._decode(self.ids[self._window :])
        self._window = self._read = len(self.ids)
        return self._release(now[len(done) :], final=True)

    def _release(self, new: str, *, final: bool) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
