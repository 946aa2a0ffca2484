"""Documents -> token ids, and which of them the model must produce.

Labelled is what the model writes: the text of each answer and the token that ends it, nothing before and
nothing behind. No text is searched for. The chat template is asked for the text before the answer, generation
prompt included, and for the text with the answer; how it ends an answer is seen on a placeholder in the
answer's place.

A labelled answer stands behind exactly the ids that generation would see. Two things could spoil that:

* A template that rewrites what came before (Qwen3 drops earlier thinking, Mistral moves the system message)
  writes an answer or its prompt otherwise once the chat goes on.
* The whole text is tokenized at once, so a token may reach over the beginning of an answer: a newline that
  ends the prompt and one that begins the answer.

An answer that either happens to gets a sequence of its own, the conversation up to it, in which the answer's
tokens begin anew where the prompt's end. So every answer is labelled, in one sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from medusa_jax.completion import messages_of, render
from medusa_jax.errors import UserError, shown
from medusa_jax.text import REPLACEMENT
from train.conversations import Document

_CHUNK = 64  # documents that are tokenized in one call, by all cores
_CONTEXT = 8  # tokens before an answer that are decoded with it, as some decoders look at neighbours
_MARK = "medusaXanswerX"
# Put before an answer that is tokenized alone, so that nothing is added to it as to the beginning of a text.
_ANCHORS = ("", "\n", ".", "a")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A sequence of n tokens."""

    ids: np.ndarray  # int32 [n]
    labels: np.ndarray  # bool [n]: the model must produce this token
    where: str = ""  # file and line of its document


@dataclasses.dataclass(frozen=True)
class _Turn:
    """An answer, and the text that generation would see before it."""

    prompt: str
    answer: str  # up to and including what ends it

    @property
    def text(self) -> str:
        return self.prompt + self.answer


def encode(document: Document, tokenizer: Any, *, system: str | None = None) -> list[Encoded]:
    """The sequences of a document: one, unless the template rewrites history; none without a label.

    system: the system message of chats without one; "" removes the template's own. Raises UserError naming
    the document when the template refuses it, or when the labelled tokens do not decode to the answers.
    """
    return next(encode_all([document], tokenizer, system=system))


def encode_all(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    system: str | None = None,
    problems: list[str] | None = None,
) -> Iterator[list[Encoded]]:
    """`encode` for many documents, faster. With `problems`, an error is added to it and gives no sequence."""
    encoder = _Encoder(tokenizer, system)
    remaining = iter(documents)
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        errors: dict[int, UserError] = {}
        turns: list[list[_Turn]] = []
        for number, document in enumerate(chunk):
            try:
                turns.append(encoder.turns(document))
            except UserError as error:
                errors[number] = error
                turns.append([])
        texts = [of_one[-1].text if of_one else "" for of_one in turns]
        for number, (document, whole) in enumerate(zip(chunk, encoder.tokenized(texts), strict=True)):
            made: list[Encoded] = []
            try:
                if number in errors:
                    raise errors[number]
                if document.text is not None:
                    made = encoder.plain(document)
                elif turns[number]:
                    made = encoder.sequences(turns[number], whole, document.where)
            except UserError as error:
                told = UserError(f"{document.where}: {error}")
                if problems is None:
                    raise told from None
                problems.append(str(told))
            yield made


@dataclasses.dataclass(frozen=True)
class _Tokenized:
    """A text's ids, and where its added tokens are: (index, character at which it begins)."""

    text: str
    ids: list[int]
    added: list[tuple[int, int]]


class _Encoder:
    """A tokenizer and what is asked of it again and again."""

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._added = {id: str(token).strip() for id, token in tokenizer.added_tokens_decoder.items()}
        names = sorted({*self._added.values(), *tokenizer.all_special_tokens}, key=len, reverse=True)
        self._end = re.compile("|".join(re.escape(name) for name in names if name.strip()) or r"(?!)")
        self._piece = functools.lru_cache(maxsize=4096)(self._ids)

    # ---------------------------------------------------------------------------------- template

    def _render(self, messages: Sequence[dict[str, str]], prompt: bool) -> str:
        """The text of messages; with `prompt`, up to where an answer begins."""
        return render(self._tokenizer, messages, prompt) if messages else ""

    def turns(self, document: Document) -> list[_Turn]:
        """The answers that have a text, in their order."""
        if not document.messages:
            return []
        if not self._tokenizer.chat_template:
            raise UserError('this model has no chat template; its training data must be {"text": ...}')
        own = document.messages[0]["role"] == "system"
        messages = messages_of(document.messages, None if own else self._system)
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        made = []
        for number in numbers:
            content, cut = messages[number]["content"], document.open_end and number == numbers[-1]
            if cut:  # perhaps within a character
                content = content.rstrip(REPLACEMENT)
            if content.strip():  # an empty answer is a failed request, nothing to be learnt
                made.append(self._turn(messages[:number], content, cut))
        return made

    def _turn(self, before: list[dict[str, str]], content: str, cut: bool) -> _Turn:
        """The answer `content` to the messages before it; `cut`: without what ends it."""
        mark = _MARK
        while any(mark in message["content"] for message in before):
            mark += "X"
        prompt = self._render(before, True)
        whole = self._render([*before, {"role": "assistant", "content": content}], False)
        marked = self._render([*before, {"role": "assistant", "content": mark}], False)
        if marked.count(mark) != 1:
            raise UserError(
                f"the model's chat template shows an answer {marked.count(mark)} times, expected once"
            )
        lead, tail = marked.split(mark)
        # What the template puts between prompt and answer. Nothing where it does not continue the prompt, as
        # DeepSeek-R1's, whose prompts end in "<think>" and whose finished turns hold no thought.
        lead = lead[len(prompt) :] if lead.startswith(prompt) else ""
        if lead.strip() and prompt == self._render(before, False):
            prompt, lead = prompt + lead, ""  # it knows no generation prompt: this is the header
        body = ""
        if whole.startswith(prompt) and whole.endswith(tail) and len(whole) >= len(prompt) + len(tail):
            body = whole[len(prompt) : len(whole) - len(tail)]
        # White space around an answer is the template's affair. Anything else that it changes (it drops an
        # earlier thought, or puts an empty one before an answer that begins with its own) is not what the
        # model wrote: then the answer stands as it is.
        said, opening = content.strip(), "".join(lead.split()[:1])
        kept = body.startswith(lead) and body[len(lead) :].strip() == said
        if opening and said.startswith(opening):
            kept = False
        if not kept and body.strip() != said:
            body = content if opening else lead + content
        end = self._end.search(tail)
        return _Turn(prompt, body if cut or end is None else body + tail[: end.end()])

    # ------------------------------------------------------------------------------------- tokens

    def _ids(self, text: str, special: bool = False) -> list[int]:
        # verbose: whether it is too long for the model is not the tokenizer's to say, rows are cut anyway.
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def tokenized(self, texts: list[str]) -> list[_Tokenized]:
        """Whole texts. No special token is added: templates write their own, as for generation."""
        fast = bool(self._tokenizer.is_fast)
        made = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        found = []
        for row, text in enumerate(texts):
            ids, added = list(made["input_ids"][row]), []
            for index, token in enumerate(ids if fast else []):
                if token in self._added:
                    begin, end = made["offset_mapping"][row][index]
                    # Byte tokens may be added tokens too: "<0x0A>", where the text has a newline.
                    if text[begin:end].strip() == self._added[token]:
                        added.append((index, begin))
            found.append(_Tokenized(text, ids, added))
        return found

    def _boundary(self, whole: _Tokenized, end: int) -> int | None:
        """How many of the ids are those of text[:end] tokenized alone; None when a token reaches over `end`.

        Texts are split at added tokens before anything else is done, so only the part from the last one on
        has to be tokenized again.
        """
        index, begin = next((at for at in reversed(whole.added) if at[1] < end), (0, 0))
        piece = self._piece(whole.text[begin:end])
        found = index + len(piece)
        return found if whole.ids[index:found] == piece else None

    def sequences(self, turns: list[_Turn], whole: _Tokenized, where: str) -> list[Encoded]:
        """Sequences in which every answer is labelled once. whole: the text up to the last answer."""
        made = []
        while turns:
            *turns, last = turns
            if whole.text != last.text:
                whole = self.tokenized([last.text])[0]
            start = self._boundary(whole, len(last.prompt))
            ids = whole.ids
            if start is None:
                prompt = self._ids(last.prompt)
                start, ids = len(prompt), prompt + self._continuation(prompt, last.answer)
                whole = _Tokenized(
                    last.prompt, prompt, [at for at in whole.added if at[1] < len(last.prompt)]
                )
            labels = np.zeros(len(ids), bool)
            labels[start:] = True
            self._check(ids, start, len(ids), last.answer)
            left = []
            for turn in turns:
                span = self._span(whole, turn)
                if span is None:
                    left.append(turn)
                else:
                    labels[slice(*span)] = True
                    self._check(ids, *span, turn.answer)
            turns = left
            made.append(Encoded(np.array(ids, np.int32), labels, where))
        return made[::-1]

    def _span(self, whole: _Tokenized, turn: _Turn) -> tuple[int, int] | None:
        """Where an earlier answer's tokens are; None if its prompt or it has others when it is the last."""
        if not whole.text.startswith(turn.text):
            return None
        start, end = self._boundary(whole, len(turn.prompt)), self._boundary(whole, len(turn.text))
        return None if start is None or end is None else (start, end)

    def _continuation(self, prompt: list[int], answer: str) -> list[int]:
        """The ids of an answer by itself, behind those of its prompt."""
        for anchor in _ANCHORS:
            before, both = self._ids(anchor), self._ids(anchor + answer)
            ids = both[len(before) :]
            if both[: len(before)] == before and self._spelt(prompt + ids, len(prompt)) == answer:
                return ids
        raise UserError(f"no tokens for the answer {shown(answer)} behind its prompt")

    def _spelt(self, ids: list[int], start: int) -> str | None:
        """The text of ids[start:]; None if it changes the text before."""

        def decoded(part: list[int]) -> str:
            return self._tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        context = max(0, start - _CONTEXT)
        before, both = decoded(ids[context:start]), decoded(ids[context:])
        return both[len(before) :] if both.startswith(before) else None

    def _check(self, ids: list[int], start: int, end: int, answer: str) -> None:
        """Raises UserError unless the tokens spell the answer."""
        found = self._spelt(ids[:end], start)
        if found == answer:
            return
        # Normalisers may compose characters, and SentencePiece puts a space before a text's first word.
        if found is None or _plain(found) != _plain(answer):
            raise UserError(f"the tokens of the answer {shown(answer)} spell {shown(found)}")

    def plain(self, document: Document) -> list[Encoded]:
        """A plain text, begun as the tokenizer begins a text."""
        assert document.text is not None
        if not document.text.strip():
            return []
        ids = self._ids(document.text, special=True)
        return [Encoded(np.array(ids, np.int32), np.ones(len(ids), bool), document.where)]


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).lstrip(" ")
