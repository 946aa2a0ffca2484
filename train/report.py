"""What a run tells: a bar on the terminal, lines of JSON in a file, curves for TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer import cli
from train.loss import TOP
from train.step import Metrics

LOG = "log.jsonl"


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
        import tensorboardX

        self._log = (folder / LOG).open("a")
        self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"))
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
        accuracies = [f"{values[name]:.2f}" for name in values if name.endswith("/top1")]
        told = f"loss {values['loss']:.3f}, top-1 {' '.join(accuracies)}, {tokens_per_second:,.0f} tokens/s"
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
        accuracies = ", ".join(f"{values[n]:.3f}" for n in values if n.endswith("/top1"))
        self.note(f"step {step}: validation loss {values['loss']:.4f}, top-1 {accuracies}")

    def note(self, text: str) -> None:
        """A line for the person at the terminal."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            cli.note(text)

    def _write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        self._log.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._log.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.close()
            self._board.close()
