"""Timings of steps on the machine at hand: sides that take turns, each judged by its median."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from medusa_jax import MedusaLM
from medusa_jax.decode import Plan

Work = Callable[[], Any]


def alternate(sides: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Median seconds of each side; one untimed round, then the sides take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            began = time.perf_counter()
            work()
            if number:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


class Decoding:
    """Work of `steps` steps behind a prompt of 64 tokens, 256 slots."""

    def __init__(
        self,
        lm: MedusaLM,
        plan: Plan,
        batch: int = 1,
        steps: int = 16,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> None:
        state = lm.programs.empty(batch, 256)()
        tokens = np.random.default_rng(0).integers(100, 40000, (batch, 256))
        sampling = dataclasses.replace(
            state.sampling,
            temperature=jnp.full((batch,), temperature, jnp.float32),
            top_p=jnp.full((batch,), top_p, jnp.float32),
            seed=jnp.arange(batch, dtype=jnp.uint32),
        )
        self._state = dataclasses.replace(
            state,
            tokens=jnp.asarray(tokens, jnp.int32),
            limit=jnp.full((batch,), 240, jnp.int32),
            sampling=sampling,
        )
        self._batch, self._steps = batch, steps
        self._engine = lm.engine_for(plan)

    def __call__(self) -> None:
        """Go back to the prompt's end and decode."""
        # What lies in the cache behind a length is garbage by definition.
        state = dataclasses.replace(
            self._state,
            cache=dataclasses.replace(self._state.cache, lengths=jnp.full((self._batch,), 64, jnp.int32)),
            known=jnp.full((self._batch,), 65, jnp.int32),
            active=jnp.ones((self._batch,), bool),
        )
        self._state, report = self._engine.run(state, self._steps)
        report.known.block_until_ready()

    def text(self) -> np.ndarray:
        """Decode, and give the tokens [batch, 256]."""
        self()
        return np.asarray(self._state.tokens)
