"""The compiled programs of a model; the only file of the library that jits and donates."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import decode, replay, sampling, sharding
from medusa_jax.backbone import Params
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.decode import DecodeState, Plan, Report, Request
from medusa_jax.heads import HeadParams
from medusa_jax.tree import Tree

# XLA may fetch an array onto the chip, have it updated there and copy it back whole. Shards of a cache are
# small enough for that, and 0.5, its default for bytes used over bytes copied, just lets it pass: read once,
# copied twice. What is only read once has 1.
_SEVERAL_TPUS: dict[str, str | bool] = {"xla_tpu_msa_inefficient_use_to_copy_ratio": "0.75"}


def compiler_options(mesh: jax.sharding.Mesh | None) -> dict[str, str | bool] | None:
    """XLA's options for programs on this mesh; no compiler but the TPU's knows these.

    A TPU compiler that does not know one refuses to compile, and names it.
    """
    return _SEVERAL_TPUS if sharding.spans_tpus(mesh) else None


@dataclasses.dataclass
class Programs:
    """The compiled programs of one model on one mesh, one for each combination of static shapes.

    A prompt, a length, a temperature, a seed or a limit never adds one: those are traced.
    """

    config: ModelConfig
    dtype: jnp.dtype
    params: Params  # shapes, dtypes and shardings
    heads: HeadParams | None = None  # likewise
    mesh: jax.sharding.Mesh | None = None
    compiled: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)
    locks: dict[tuple[Any, ...], threading.Lock] = dataclasses.field(default_factory=dict)

    def state_shape(self, batch: int, slots: int) -> DecodeState:
        """Shapes and shardings of a state."""
        shapes = jax.eval_shape(partial(decode.empty, self.config, batch, slots, self.dtype))
        return sharding.with_shardings(shapes, sharding.state_shardings(shapes, self.config, self.mesh))

    def _get(self, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        """The program of `key`, compiled when it is first asked for (by any thread)."""
        with self.locks.setdefault(key, threading.Lock()):
            if key not in self.compiled:
                self.compiled[key] = build().compile(compiler_options=compiler_options(self.mesh))
            return self.compiled[key]

    def _out(self, state: DecodeState, *, with_report: bool) -> Any:
        """Output shardings: a state comes out as it went in, a report whole on every device."""
        if self.mesh is None:
            return None
        kept = jax.tree.map(lambda leaf: leaf.sharding, state)
        return (kept, sharding.replicated(self.mesh)) if with_report else kept

    def empty(self, batch: int, slots: int) -> Callable[[], DecodeState]:
        """() -> an empty state."""

        def build() -> Any:
            make = partial(decode.empty, self.config, batch, slots, self.dtype)
            out = self._out(self.state_shape(batch, slots), with_report=False)
            return jax.jit(make, out_shardings=out).lower()

        return self._get(("empty", batch, slots), build)

    def start(self, slots: int) -> Callable[[DecodeState, Request], DecodeState]:
        """(state of one row: donated, request) -> state."""

        def build() -> Any:
            state = self.state_shape(1, slots)
            out = self._out(state, with_report=False)
            return jax.jit(decode.start, donate_argnames="state", out_shardings=out).lower(
                state, jax.eval_shape(partial(_blank_request, slots))
            )

        return self._get(("start", slots), build)

    def prefill(
        self, slots: int, chunk: int, fresh: bool
    ) -> Callable[[Params, DecodeState], tuple[DecodeState, Report]]:
        """(params, state of one row: donated) -> state, report."""

        def build() -> Any:
            state = self.state_shape(1, slots)
            program = partial(decode.prefill, config=self.config, chunk=chunk, fresh=fresh)
            out = self._out(state, with_report=True)
            return jax.jit(program, donate_argnames="state", out_shardings=out).lower(self.params, state)

        return self._get(("prefill", slots, chunk, fresh), build)

    def run(self, batch: int, slots: int, plan: Plan) -> Callable[..., tuple[DecodeState, Report]]:
        """(params, heads, state: donated, max_steps int32, stop_early bool) -> state, report."""

        def build() -> Any:
            state = self.state_shape(batch, slots)
            program = partial(decode.run, config=self.config, plan=plan, shapes=state)
            out = self._out(state, with_report=True)
            scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
            heads = None if plan.heads is None else self.heads
            return jax.jit(program, donate_argnames="state", out_shardings=out).lower(
                self.params, heads, state, *scalars
            )

        return self._get(("run", batch, slots, plan), build)

    def replay(self, length: int, heads: MedusaConfig | None, depth: int) -> Callable[..., Any]:
        """(params, heads, tokens [length] int32, seed uint32, temperature float32) -> see `replay.replay`."""

        def build() -> Any:
            program = partial(replay.replay, config=self.config, heads_config=heads, depth=depth)
            given = None if heads is None else self.heads
            tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
            scalars = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
            return jax.jit(program).lower(self.params, given, tokens, *scalars)

        return self._get(("replay", length, heads, depth), build)

    def drafts(self, length: int, tree: Tree, heads: MedusaConfig, lookup: bool) -> Callable[..., Any]:
        """(params, heads, tokens [length] int32, seed uint32, temperature float32) -> see `replay.drafts`."""

        def build() -> Any:
            program = partial(replay.drafts, config=self.config, heads_config=heads, tree=tree, lookup=lookup)
            tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
            scalars = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
            return jax.jit(program).lower(self.params, self.heads, tokens, *scalars)

        return self._get(("drafts", length, tree, heads, lookup), build)

    def log_probs(self, length: int) -> Callable[..., jax.Array]:
        """(params, tokens [length] int32) -> see `replay.log_probs`."""

        def build() -> Any:
            tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
            return jax.jit(partial(replay.log_probs, config=self.config)).lower(self.params, tokens)

        return self._get(("log_probs", length), build)

    def logits_at(self, length: int) -> Callable[..., jax.Array]:
        """(params, tokens [length] int32, place int32) -> see `replay.logits_at`."""

        def build() -> Any:
            tokens, place = jax.ShapeDtypeStruct((length,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
            return jax.jit(partial(replay.logits_at, config=self.config)).lower(self.params, tokens, place)

        return self._get(("logits_at", length), build)

    def insert(self, batch: int, slots: int) -> Callable[[DecodeState, np.int32, DecodeState], DecodeState]:
        """(state: donated, row int32, state of one row) -> state."""

        def build() -> Any:
            state, single = self.state_shape(batch, slots), self.state_shape(1, slots)
            out = self._out(state, with_report=False)
            return jax.jit(decode.insert, donate_argnames="state", out_shardings=out).lower(
                state, jax.ShapeDtypeStruct((), jnp.int32), single
            )

        return self._get(("insert", batch, slots), build)

    def stop_rows(self, batch: int, slots: int) -> Callable[[DecodeState, np.ndarray], DecodeState]:
        """(state: donated, keep [B] bool) -> state."""

        def build() -> Any:
            state = self.state_shape(batch, slots)
            out = self._out(state, with_report=False)
            return jax.jit(decode.stop_rows, donate_argnames="state", out_shardings=out).lower(
                state, jax.ShapeDtypeStruct((batch,), jnp.bool_)
            )

        return self._get(("stop_rows", batch, slots), build)

    def grow(self, slots: int, larger: int) -> Callable[[DecodeState], DecodeState]:
        """(state of one row) -> the same with `larger` slots."""

        def build() -> Any:
            out = self._out(self.state_shape(1, larger), with_report=False)
            return jax.jit(partial(decode.grow, slots=larger), out_shardings=out).lower(
                self.state_shape(1, slots)
            )

        return self._get(("grow", slots, larger), build)


def _blank_request(slots: int) -> Request:
    zero = jnp.int32(0)
    return Request(
        tokens=jnp.zeros((slots,), jnp.int32),
        known=zero,
        cached=zero,
        limit=zero,
        sampling=sampling.RowSampling.greedy(1),
        end_tokens=jnp.full((decode.MAX_END_TOKENS,), -1, jnp.int32),
    )
