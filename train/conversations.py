"""Files of training data -> documents, every record checked before anything else is done.

Four kinds of record, told apart by their fields, one a line or all in one JSON array:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}   (ShareGPT)
    {"prompt": "...", "completion": "..."}
    {"text": "..."}                                                 (all of it is learnt)

What python -m train.distill writes is the first kind, with `finish_reason` and `looping`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa_jax.errors import BYTE_ORDER_MARK, UserError, json_lines, require_file, shown, user_path

_NUMBERS_SHOWN = 10  # of the lines that are wrong besides the first
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")  # JSON's

_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = _ROLES | {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")
_EXPECTED = 'one of "messages", "conversations", "prompt" with "completion", "text"'


@dataclasses.dataclass(frozen=True)
class Document:
    """One record: chat messages, or a plain text.

    messages: perhaps a system message, then the user's and the assistant's in turn; none for a conversation
    without a question. open_end: the last answer was cut off, so nothing that ends an answer follows it.
    where: the file, and the line or record. Documents of one group belong together: one conversation spread
    over records, or answers to the same question.
    """

    messages: list[dict[str, str]] | None
    text: str | None
    open_end: bool
    where: str
    group: str


def read(
    path: Path, *, skip_bad: bool = False, drop_looping: bool = False, counts: Counter[str] | None = None
) -> list[Document]:
    """Read a file of training data (.json, .jsonl, either with .gz behind).

    The whole file is checked: UserError names the first mistake and the other lines that have one. skip_bad
    leaves such records out instead, drop_looping those marked as looping; both are added to `counts`, as
    "bad" and "looping". A file without any usable record is an error.
    """
    path = user_path(path)
    require_file(path)
    documents: list[Document] = []
    problems: dict[int, str] = {}
    unit, found, looping = "line", 0, 0
    for unit, number, value in _values(path):
        found += 1
        where = f"{path}, {unit} {number:,}"
        try:
            if isinstance(value, UserError):
                raise value
            document, loops = _document(value, where)
        except UserError as error:
            problems[number] = f"{where}: {error}"
            continue
        if loops and drop_looping:
            looping += 1
        else:
            documents.append(document)
    if problems and (not skip_bad or not documents):
        raise UserError(_report(problems, unit))
    if not found:
        raise UserError(
            f"{path}: no records in it; expected JSON lines or a JSON array, each with {_EXPECTED}"
        )
    if counts is not None:
        counts.update(bad=len(problems), looping=looping)
    return documents


def _report(problems: dict[int, str], unit: str) -> str:
    """One line: the first problem, and where the others are."""
    (_, first), *others = problems.items()
    if not others:
        return first
    numbers = ", ".join(f"{number:,}" for number, _ in others[:_NUMBERS_SHOWN])
    more = ", ..." if len(others) > _NUMBERS_SHOWN else ""
    return f"{first} (and {len(others):,} other {unit}{'s' * (len(others) > 1)}: {numbers}{more})"


# -------------------------------------------------------------------------------------------- files


def _values(path: Path) -> Iterator[tuple[str, int, Any]]:
    """("line" or "record", its number from 1, its JSON value or the UserError it gives)."""
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as opened:
            file: Any = opened
            start = file.peek(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
            if start.startswith(b"["):
                yield from _records(file.read())
            else:
                yield from (("line", number, value) for number, value in json_lines(file))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _records(data: bytes) -> Iterator[tuple[str, int, Any]]:
    """The values of a JSON array, one by one. Nothing can be read behind a place where its JSON is broken."""
    # Bytes that are no UTF-8 become half surrogate pairs: they are found in the record that has them.
    text = data.removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
    decoder = json.JSONDecoder()
    at, number = _past_space(text, text.index("[") + 1), 0
    closed = text.startswith("]", at)
    while not closed:
        number += 1
        try:
            value, at = decoder.raw_decode(text, at)
            at = _past_space(text, at)
            closed = text.startswith("]", at)
            if not closed and not text.startswith(",", at):
                raise json.JSONDecodeError("expected ',' or ']'", text, at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip())
            problem = "the file ends inside the array" if cut else error.msg
            where = f"line {error.lineno:,}, column {error.colno:,}"
            yield "record", number, UserError(f"not valid JSON ({problem}, at {where})")
            return
        except RecursionError:
            yield "record", number, UserError("not valid JSON (nested too deeply)")
            return
        except ValueError as error:
            yield "record", number, UserError(f"not valid JSON ({error})")
            return
        yield "record", number, value
        if not closed:
            at = _past_space(text, at + 1)
    rest = text[_past_space(text, at + 1) :]
    if rest:
        found = UserError(f"{shown(rest[:40])} behind the JSON array, expected the end of the file")
        yield "record", number + 1, found


def _past_space(text: str, at: int) -> int:
    found = _WHITE_SPACE.match(text, at)
    return found.end() if found else at


# ------------------------------------------------------------------------------------------ records


def _document(record: Any, where: str) -> tuple[Document, bool]:
    """The document of a record, and whether it is marked as looping. Raises UserError without `where`."""
    if not isinstance(record, dict):
        raise UserError(f"found {_kind(record)}, expected an object with {_EXPECTED}")
    kinds = [name for name in ("messages", "conversations", "text") if name in record]
    if "prompt" in record and "completion" in record:
        kinds.append("prompt")
    if len(kinds) != 1:
        named = " and ".join(f'"{kind}"' for kind in kinds) or f"fields {shown(list(record))}"
        raise UserError(f"found {named}, expected {_EXPECTED}")
    reason, looping = record.get("finish_reason"), record.get("looping")
    if reason is not None and not isinstance(reason, str):
        raise UserError(f'"finish_reason" is {shown(reason)}, expected "stop" or "length"')
    if looping is not None and not isinstance(looping, bool):
        raise UserError(f'"looping" is {shown(looping)}, expected true or false')
    if kinds == ["text"]:
        text = _text(record["text"], '"text"')
        return Document(None, text, reason == "length", where, text), bool(looping)
    if kinds == ["prompt"]:
        question, answer = _text(record["prompt"], '"prompt"'), _text(record["completion"], '"completion"')
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    elif kinds == ["messages"]:
        messages = _messages(record["messages"], '"messages"', ("role", "content"), _ROLES)
    else:
        fields = ("from", "value")
        messages = _messages(record["conversations"], '"conversations"', fields, _SHAREGPT_ROLES)
    group = next((message["content"] for message in messages if message["role"] == "user"), "")
    identity = record.get("id")
    if kinds == ["conversations"] and isinstance(identity, str):
        group = identity.rpartition("_")[0] or identity  # a long conversation: abc_0, abc_19, ...
    return Document(messages, None, reason == "length", where, group), bool(looping)


def _messages(turns: Any, field: str, names: tuple[str, str], roles: dict[str, str]) -> list[dict[str, str]]:
    """Checked messages; of ShareGPT without the answers that no question stands before."""
    if not isinstance(turns, list):
        raise UserError(f"{field} is {_kind(turns)}, expected a list")
    role_name, text_name = names
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns, 1):
        label = f"message {number} of {field}"
        if not isinstance(turn, dict) or any(name not in turn for name in names):
            found = f"fields {shown(list(turn))}" if isinstance(turn, dict) else _kind(turn)
            raise UserError(f'{label}: found {found}, expected {{"{role_name}": text, "{text_name}": text}}')
        given = turn[role_name]
        role = roles.get(given) if isinstance(given, str) else None
        if role is None:
            raise UserError(f'{label}: "{role_name}" is {shown(given)}, expected {_listed(list(roles))}')
        text = _text(turn[text_name], f'{label}: "{text_name}"')
        before = messages[-1]["role"] if messages else None
        if before in (None, "system") and role == "assistant" and roles is _SHAREGPT_ROLES:
            continue
        allowed = {None: ["system", "user"], "user": ["assistant"]}.get(before, ["user"])
        if role not in allowed:
            behind = f" after {before}" if before else ""
            raise UserError(f'{label}: "{role_name}" is {shown(given)}{behind}, expected {_listed(allowed)}')
        messages.append({"role": role, "content": text})
    # A system message alone asks nothing.
    return messages if any(message["role"] == "user" for message in messages) else []


def _text(value: Any, label: str) -> str:
    """A text that tokenizers take. Raises UserError for anything else, half a surrogate pair included."""
    if not isinstance(value, str):
        raise UserError(f"{label} is {_kind(value)}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{label} is not valid Unicode (at character {error.start + 1:,})") from None
    return value


def _kind(value: Any) -> str:
    """A value of the wrong type in a message."""
    if value is None or isinstance(value, bool | int | float | str):
        return shown(value)
    return "an object" if isinstance(value, dict) else "a list"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
