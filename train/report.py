"""What a run tells: a bar on the terminal, lines of JSON in a file, curves for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infer import cli
from medusa_jax.errors import UserError, write_atomically
from train.loss import TOP
from train.step import Metrics

LOG, BOARD = "log.jsonl", "tensorboard"


def values_of(metrics: Metrics) -> dict[str, float]:
    """Means and shares of one step's sums, by the names used in every log."""
    values = {"loss": float(metrics.loss), "learning_rate": float(metrics.learning_rate)}
    values["gradient_norm"] = float(metrics.gradient)
    values |= scores_of(metrics.heads, metrics.model)
    if float(metrics.model.count):
        values["divergence"] = float(metrics.divergence)
    return values


def scores_of(heads: Any, model: Any) -> dict[str, float]:
    """Mean loss and top-1 to top-5 accuracy of each head, and of the model where it is trained."""
    values = {}
    for m in range(len(heads.count)):
        count = max(float(heads.count[m]), 1.0)
        values[f"head{m}/loss"] = float(heads.loss[m]) / count
        values |= {f"head{m}/top{k + 1}": float(heads.hits[m][k]) / count for k in range(TOP)}
    if float(model.count):
        values["model/loss"] = float(model.loss) / float(model.count)
        values["model/top1"] = float(model.hits[0]) / float(model.count)
    return values


class Report:
    """Writes to all three. In a run of several processes only the first does."""

    def __init__(self, folder: Path, steps: int, done: int, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        self._bar: Any = None
        self._log: Any = None
        self._board: Any = None
        if quiet:
            return
        from tensorboardX.event_file_writer import EventsWriter

        self._folder = folder
        with self._writing():
            _cut(folder / LOG, done)
            self._log = (folder / LOG).open("a")
            # Not SummaryWriter: its thread dies with a full disk, and the run would wait for it for ever.
            (folder / BOARD).mkdir(exist_ok=True)
            self._board = EventsWriter(str(folder / BOARD / "events"))
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, TextColumn("{task.fields[told]}"), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("training", total=steps, completed=done, told="")

    def step(self, step: int, values: Mapping[str, float], tokens_per_second: float, *, log: bool) -> None:
        """One step's values; the bar shows them all, the files every so often (`log`)."""
        if self._quiet:
            return
        told = f"loss {values['loss']:.3f}, {_accuracies(values, 2)}, {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, told=told)
        elif log:
            cli.note(f"step {step} of {self._steps}: {told}")
        if log:
            self._write(step, "train", dict(values) | {"tokens_per_second": tokens_per_second})

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Values over the documents held out."""
        if self._quiet:
            return
        self._write(step, "validation", values)
        self.note(f"step {step}: validation loss {values['loss']:.4f}, {_accuracies(values, 3)}")

    def note(self, text: str) -> None:
        """A line for the person at the terminal."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            cli.note(text)

    def _write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]  # generated
        from tensorboardX.summary import scalar

        with self._writing():
            self._log.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self._log.flush()
            for name, value in values.items():
                told = scalar(f"{kind}/{name}", value)
                self._board.write_event(Event(wall_time=time.time(), step=step, summary=told))
            self._board.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A UserError where the disk refuses."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self._folder}: the log cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            for file in (self._log, self._board):
                with contextlib.suppress(OSError):  # what could not be written was said when it happened
                    file.close()


def _cut(path: Path, done: int) -> None:
    """Leave out what a run that was killed told of steps behind its last checkpoint: they are made again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line
            if json.loads(line)["step"] <= done:
                kept.append(line)
    write_atomically(path, "".join(kept).encode())


def _accuracies(values: Mapping[str, float], places: int) -> str:
    """Top-1 of the heads, and of the model where it learns too."""
    of = {name: f"{value:.{places}f}" for name, value in values.items() if name.endswith("/top1")}
    heads = " ".join(value for name, value in of.items() if name.startswith("head"))
    others = [f", {name.removesuffix('/top1')}'s {value}" for name, value in of.items() if name[:4] != "head"]
    return f"top-1 {heads}{''.join(others)}"
