"""What was measured so far, on disk: a line for each unit of work, so that an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_jax import UserError
from medusa_jax.errors import shown

NAME = "journal.jsonl"
FORMAT = "medusa-jax-benchmark-1"
Key = tuple[int, int | str, int]  # round, question, turn


@dataclasses.dataclass
class Answer:
    """One answer of one side. Seconds are wall-clock and without compilation.

    accepted: for each step the tokens that it emitted, its own included. decode_seconds: how long the row was
    decoding, beside its neighbours. wall_seconds: its share of its unit's wall-clock time (see `Unit.of`).
    """

    question: int | str
    category: str
    turn: int
    ids: list[int]
    text: str
    finish: str
    accepted: list[int]
    prefill_seconds: float
    decode_seconds: float
    wall_seconds: float = 0.0
    round: int = 0

    @property
    def key(self) -> Key:
        """Which answer it is: equal for all sides."""
        return self.round, self.question, self.turn

    @property
    def steps(self) -> int:
        """Steps: one for each token that the model chose, with the guesses behind it."""
        return len(self.accepted)

    @property
    def forwards(self) -> int:
        """Steps that ran: one that begins with the last token has nothing left to do."""
        return self.steps - (self.accepted[-1] == 1)


@dataclasses.dataclass
class Unit:
    """A batch of prompts that one side answered at one go. block: which batch, across rounds."""

    side: str
    block: int
    turn: int
    wall_seconds: float
    answers: list[Answer]

    @classmethod
    def of(cls, side: str, block: int, turn: int, wall_seconds: float, answers: list[Answer]) -> Unit:
        """A unit, its time shared out: to each answer its prefill, the rest by how long each row decoded.

        Prompts are read one after the other, and rows decode side by side; so the shares of any set of
        answers add up to the time that it took.
        """
        prefill = sum(one.prefill_seconds for one in answers)
        decode = sum(one.decode_seconds for one in answers)
        rest = max(wall_seconds - prefill, 0.0)
        for one in answers:
            part = one.decode_seconds / decode if decode else 1 / len(answers)
            one.wall_seconds = one.prefill_seconds + rest * part
        return cls(side, block, turn, wall_seconds, answers)


class Journal:
    """The units of a run, kept in FOLDER/journal.jsonl as they are finished."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open or begin it. Raises UserError when it is of other settings, broken, or cannot be written."""
        self.path = folder / NAME
        self.settings = settings
        self.units: dict[tuple[str, int, int], Unit] = {}
        self.compile_seconds: dict[str, float] = {}
        head = {"format": FORMAT, "settings": settings}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text("utf-8") if self.path.exists() else ""
            # What is behind the last line feed was being written.
            first, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
            if first:
                self._check(first, json.loads(json.dumps(head)))
                for number, line in enumerate(lines, 2):
                    self._take(number, line)
            else:
                first = json.dumps(head)
            kept = "".join(f"{line}\n" for line in [first, *lines])
            if kept != text:
                self.path.write_text(kept, "utf-8")
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output {folder}: cannot be written ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: not UTF-8 ({error.reason}); remove it to start anew") from None

    def _check(self, first: str, head: Mapping[str, Any]) -> None:
        try:
            found = json.loads(first)
            theirs, ours = dict(found["settings"]), head["settings"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: not a benchmark's journal; choose another --output") from None
        if found.get("format") != FORMAT:
            raise UserError(f"{self.path}: its format is {shown(found.get('format'))}, expected {FORMAT}")
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise UserError(
                    f"{self.path}: was measured with other settings ({name}: {shown(theirs.get(name))}, "
                    f"now {shown(ours.get(name))}); choose another --output, or remove it to start anew"
                )

    def _take(self, number: int, line: str) -> None:
        try:
            record = json.loads(line)
            if "compile_seconds" in record:
                self._compiled(record["side"], record["compile_seconds"])
                return
            answers = [Answer(**one) for one in record.pop("answers")]
            unit = Unit(**record, answers=answers)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{self.path}, line {number}: not readable; remove it to start anew") from None
        self.units[unit.side, unit.block, unit.turn] = unit

    def _compiled(self, side: str, seconds: float) -> None:
        self.compile_seconds[side] = self.compile_seconds.get(side, 0.0) + seconds

    def add(self, unit: Unit) -> None:
        """Keep a finished unit."""
        self.units[unit.side, unit.block, unit.turn] = unit
        self._write(dataclasses.asdict(unit))

    def compiled(self, side: str, seconds: float) -> None:
        """Keep what a side's compilation and warm-up took."""
        self._compiled(side, seconds)
        self._write({"side": side, "compile_seconds": seconds})

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None

    def answers(self, side: str) -> list[Answer]:
        """All answers of a side, by block and turn."""
        units = sorted((unit for unit in self.units.values() if unit.side == side), key=_order)
        return [one for unit in units for one in unit.answers]


def _order(unit: Unit) -> tuple[int, int]:
    return unit.block, unit.turn
