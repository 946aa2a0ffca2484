"""What a run would take: memory of each device, how batches are made up, and time; for --dry-run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.pipeline import Prepared
from train.programs import Programs
from train.setup import Plan
from train.step import Metrics, TrainState

STEPS = 2  # timed after a first one


def lines(plan: Plan, data: Prepared) -> Iterator[str]:
    """One fact a line. The last, the time, comes from steps on blank weights, so it needs the memory."""
    o, length = plan.config.optimizer, plan.config.data.sequence_length
    rows = o.batch_size // plan.microbatches
    yield (
        f"batch: {o.batch_size} rows of {length} tokens = {o.batch_size * length:,} tokens a step, "
        f"{plan.microbatches} microbatches of {rows} rows on {_devices(plan)}"
    )
    passes = plan.steps * o.batch_size / data.rows
    yield f"steps: {plan.steps:,}, {passes:.2f} passes over {data.rows:,} rows"
    if plan.joint_from < plan.steps:
        yield f"the backbone learns from step {plan.joint_from + 1} on"
    programs = Programs(plan)
    trained, frozen = programs.state.trained, programs.frozen
    yield f"trained: {_count(trained.heads):,} parameters of heads" + (
        f", {_count(trained.backbone):,} of the backbone" if trained.backbone is not None else ""
    )
    program = programs.step(plan.joint_from < plan.steps)
    memory = program.memory_analysis()
    parts = {"frozen weights": _bytes(frozen), "trained weights": _bytes(trained)}
    parts["optimizer"] = _bytes((programs.state.heads_optimizer, programs.state.backbone_optimizer))
    if memory is not None:
        parts["activations and logits"] = memory.temp_size_in_bytes
    told = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in parts.items())
    yield f"memory of each device: {sum(parts.values()) / 1e9:.3f} GB ({told})"
    if plan.stored:
        everything = data.rows + (0 if data.validation is None else len(data.validation))
        size = everything * length * plan.model.hidden_size * 2
        yield f"hidden states on disk: {size / 1e9:.2f} GB, computed once before the first step"
    seconds = _seconds(programs, program)
    rate = o.batch_size * length / seconds
    whole = _duration(seconds * plan.steps)
    yield f"time: {seconds:.2f} s a step ({rate:,.0f} tokens/s), about {whole} in all"


def _seconds(programs: Programs, program: Any) -> float:
    plan = programs.plan
    rows = plan.config.optimizer.batch_size // plan.microbatches
    state: TrainState = _blank(programs.state)
    frozen = _blank(programs.frozen)
    batch, hidden = _blank(programs.rows(plan.microbatches, rows))
    ones = jax.tree.map(jnp.ones_like, (batch.segments, batch.labels))
    batch = batch.replace(segments=ones[0], labels=ones[1])
    key = programs.key()
    times = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        state, metrics = program(state, frozen, batch, hidden, key)
        _wait(metrics)
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def _wait(metrics: Metrics) -> None:
    jax.block_until_ready(metrics)


def _blank(shapes: Any) -> Any:
    """Zeros of these shapes on their devices."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)


def _bytes(shapes: Any) -> float:
    """Of one device."""

    def one(leaf: Any) -> float:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return float(np.prod(shape)) * leaf.dtype.itemsize

    return sum(map(one, jax.tree.leaves(shapes)))


def _count(shapes: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def _devices(plan: Plan) -> str:
    if plan.mesh is None:
        return "1 device"
    return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.shape.items() if size > 1) or "1 device"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
