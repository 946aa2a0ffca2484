"""The loop of a run: batches in, steps, validation, checkpoints, and what happens when it is told to stop.

The host reads a step's metrics while the next one runs, and fetches the next batch meanwhile.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import sharding
from medusa_jax.errors import UserError
from train import pipeline
from train.checkpoints import Checkpoints
from train.hidden import HiddenStates
from train.loss import Batch, Scores
from train.programs import Programs
from train.report import Report, scores_of, values_of
from train.step import Frozen, Metrics, TrainState

TERMINATED = 128 + signal.SIGTERM  # exit status of a run that a signal ended in good order


class DivergedError(RuntimeError):
    """A loss that is not finite."""


@dataclasses.dataclass
class Feed:
    """Rows as the programs take them: microbatches over the mesh, with their hidden states if stored."""

    programs: Programs
    stored: HiddenStates | None

    def put(self, batch: Mapping[str, np.ndarray], *leading: int) -> tuple[Batch, Any]:
        """Rows of this process as arrays [*leading, T] (leading: of all processes together)."""
        hidden = None if self.stored is None else self.stored.rows(batch["row"])
        arrays = Batch(batch["tokens"], batch["segments"], batch["positions"], batch["labels"])
        return jax.tree.map(lambda array: self._one(array, leading), (arrays, hidden))

    def _one(self, array: np.ndarray, leading: tuple[int, ...]) -> jax.Array:
        mesh = self.programs.plan.mesh
        local = (*leading[:-1], leading[-1] // jax.process_count())
        array = array.reshape(*local, *array.shape[1:])
        if mesh is None:
            return jnp.asarray(array)
        spread = sharding.batch_sharding(mesh, len(leading))
        return jax.make_array_from_process_local_data(spread, array, (*leading, *array.shape[len(leading) :]))


class Stop:
    """SIGTERM (preempted machines get it) and Ctrl-C end a run after the step in flight, with a checkpoint.

    A second signal ends it at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._came)
        return self

    def _came(self, number: int, _: Any) -> None:
        self.signal = number
        for one, before in self._before.items():
            signal.signal(one, before if callable(before) else signal.SIG_DFL)

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def asked(self, step: int) -> bool:
        """Whether to stop before this step; all processes agree."""
        if jax.process_count() == 1:
            return self.signal is not None
        from jax.experimental import multihost_utils

        told = multihost_utils.process_allgather(np.int32(self.signal or 0)) if step % 8 == 0 else np.zeros(1)
        if np.any(told):
            self.signal = int(np.max(told))
        return bool(np.any(told))


@dataclasses.dataclass
class Loop:
    """A run on its way. `last_values` are those of the last validation."""

    programs: Programs
    frozen: Frozen
    data: pipeline.Prepared
    feed: Feed
    checkpoints: Checkpoints
    report: Report
    last_values: dict[str, float] = dataclasses.field(default_factory=dict)
    values_at: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)  # by step
    began: float = 0.0  # on the clock of time.perf_counter, the time of the runs before a resumption included

    def run(self, state: TrainState, saved: Mapping[str, Any] | None, stop: Stop) -> TrainState | None:
        """Train to the last step; None when a signal came. saved: of the checkpoint that the state is from.

        Raises DivergedError when a loss is not finite; the checkpoints before stay.
        """
        plan, options = self.programs.plan, self.programs.plan.config.run
        order = pipeline.batches(
            self.data,
            plan.config.optimizer.batch_size,
            seed=options.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        first, fingerprint = int(state.step), self.data.fingerprint()
        if saved is not None:
            if saved["rows"] != fingerprint:
                raise UserError(
                    f"--resume: checkpoint {first} was trained on other data; "
                    "it needs the same files, options and chat template"
                )
            order.set_state(saved["data"])
        key = self.programs.key()
        rows = (plan.microbatches, plan.config.optimizer.batch_size // plan.microbatches)
        pending: _Pending | None = None
        began = 0.0
        fetched = next(order) if first < plan.steps else None
        for step in range(first, plan.steps):
            assert fetched is not None
            here, position = fetched, order.get_state()  # a checkpoint after this step goes on from here
            batch, hidden = self.feed.put(here, *rows)
            program = self.programs.step(step >= plan.joint_from)
            if pending is None:
                began = time.perf_counter()  # compiled by now
            state, metrics = program(state, self.frozen, batch, hidden, key)
            if step + 1 < plan.steps:
                fetched = next(order)
            if pending is not None:
                began, _ = self._read(pending, began)
            pending = _Pending(step + 1, metrics, here)
            last = step + 1 == plan.steps
            stopping = stop.asked(step + 1)
            saves = last or stopping or (step + 1) % options.save_every == 0
            if saves or (options.evaluate_every and (step + 1) % options.evaluate_every == 0):
                metrics = {"training": self._read(pending, began)[1]}
                pending = None
                value = None
                if not stopping and (
                    last or (options.evaluate_every and (step + 1) % options.evaluate_every == 0)
                ):
                    value = self.validate(state, step + 1)
                if value is not None:
                    metrics["validation"] = self.last_values
                if saves or value is not None:
                    run = {"data": position, "options": plan.config.flat(), "values": self.last_values}
                    run["rows"] = fingerprint
                    run["seconds"] = time.perf_counter() - self.began
                    self.checkpoints.save(state, run, value, metrics, wait=stopping or last)
            if stopping and not last:
                return None
        return state

    def _read(self, pending: _Pending, began: float) -> tuple[float, dict[str, float]]:
        """Report a step that has been dispatched; returns the time at which it was done, and its values."""
        metrics = jax.device_get(pending.metrics)
        now = time.perf_counter()
        if not metrics.finite:
            size = self.programs.plan.config.optimizer.batch_size
            where = pipeline.position(self.data, pending.batch["row"], (pending.step - 1) * size)
            kept = self.checkpoints.latest()
            rest = f"the last checkpoint is of step {kept}" if kept else "there is no checkpoint yet"
            raise DivergedError(f"step {pending.step}: the loss is not finite, at {where}; {rest}")
        plan = self.programs.plan
        tokens = plan.config.optimizer.batch_size * plan.config.data.sequence_length
        due = pending.step % plan.config.run.log_every == 0 or pending.step in (1, plan.steps)
        values = values_of(metrics)
        self.report.step(pending.step, values, tokens / max(now - began, 1e-9), log=due)
        return now, values

    def validate(self, state: TrainState, step: int) -> float | None:
        """The weighted loss over the documents held out; None where there are none."""
        if self.data.validation is None:
            return None
        plan = self.programs.plan
        rows = plan.config.optimizer.microbatch or plan.config.optimizer.batch_size
        program = self.programs.evaluate(rows)
        total: tuple[Scores, Scores] | None = None
        shares = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        # Stored hidden states of validation's rows lie behind training's.
        for batch in pipeline.validation_batches(
            self.data.validation, rows, first_row=self.data.rows, **shares
        ):
            scores = program(state.trained, self.frozen, *self.feed.put(batch, rows))
            total = scores if total is None else jax.tree.map(jnp.add, total, scores)
        assert total is not None
        heads, model = jax.device_get(total)
        values = scores_of(heads, model)
        decay = plan.config.loss.decay
        loss = sum(decay**m * values[f"head{m}/loss"] for m in range(plan.heads.num_heads))
        loss += values.get("model/loss", 0.0)
        self.last_values = self.values_at[step] = {"loss": loss, **values}
        self.report.validation(step, self.last_values)
        return loss


@dataclasses.dataclass
class _Pending:
    """A step whose metrics have not been read."""

    step: int
    metrics: Metrics
    batch: Mapping[str, np.ndarray]
