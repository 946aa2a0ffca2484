"""Prefill, step and the generation loop; the only file of the library that jits and donates.

A batch is a set of rows, each with its own text. A row's life: `start` writes its prompt, `prefill`
reads it chunk by chunk and chooses the first token, `run` steps until it is finished, `insert` puts
another prefilled request in its place. All of them are pure functions of a `DecodeState`; `Programs`
compiles them, once for each shape.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import backbone, cache, sampling, sharding
from medusa_jax.backbone import Params
from medusa_jax.config import ModelConfig

MAX_END_TOKENS = 8
MAX_CHUNK = 512  # prompt tokens a prefill reads at once: bounds the attention scores to [chunk, S + chunk]


@flax.struct.dataclass
class DecodeState:
    """Everything that changes while a batch decodes. B rows, S slots.

    Row b's text is tokens[b, :known[b]], of which the first cache.lengths[b] are in the cache. While a
    row decodes known = lengths + 1: the last token (the root of the next step) is emitted, not yet read.
    """

    cache: cache.KVCache
    tokens: jax.Array  # [B, S] int32, prompt and answer
    known: jax.Array  # [B] int32
    prompt: jax.Array  # [B] int32, tokens that are prompt
    limit: jax.Array  # [B] int32, known may not pass it
    active: jax.Array  # [B] bool: still decoding
    steps: jax.Array  # [B] int32
    sampling: sampling.RowSampling
    end_tokens: jax.Array  # [B, MAX_END_TOKENS] int32, padded with -1


@flax.struct.dataclass
class Report:
    """What the host reads after a run; separate buffers, so that the state can be donated meanwhile."""

    tokens: jax.Array  # [B, S]
    known: jax.Array  # [B]
    active: jax.Array  # [B]
    steps: jax.Array  # [B]


def empty(config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> DecodeState:
    """A state whose rows are all free."""
    zeros = jnp.zeros((batch,), jnp.int32)
    return DecodeState(
        cache=cache.allocate(config, batch, slots, dtype),
        tokens=jnp.zeros((batch, slots), jnp.int32),
        known=zeros,
        prompt=zeros,
        limit=zeros,
        active=jnp.zeros((batch,), bool),
        steps=zeros,
        sampling=sampling.RowSampling.greedy(batch),
        end_tokens=jnp.full((batch, MAX_END_TOKENS), -1, jnp.int32),
    )


@flax.struct.dataclass
class Request:
    """What `start` writes into the single row of a state; all traced."""

    tokens: jax.Array  # [S] int32, the text, zero behind
    known: jax.Array  # int32, its length
    cached: jax.Array  # int32: the first tokens that the row's cache holds already
    limit: jax.Array  # int32, the length at which the row ends
    sampling: sampling.RowSampling  # of one row
    end_tokens: jax.Array  # [MAX_END_TOKENS] int32


def start(state: DecodeState, request: Request) -> DecodeState:
    """Give a one-row state a text to read; what its cache holds of it is kept."""
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, lengths=request.cached[None]),
        tokens=request.tokens[None],
        known=request.known[None],
        prompt=request.known[None],
        limit=request.limit[None],
        active=jnp.zeros((1,), bool),
        steps=jnp.zeros((1,), jnp.int32),
        sampling=request.sampling,
        end_tokens=request.end_tokens[None],
    )


def _emit(state: DecodeState, chosen: jax.Array, rows: jax.Array) -> DecodeState:
    """Append token chosen[b] to the text of each row in `rows` [B] bool, and end rows that are finished."""
    slot = jnp.arange(state.tokens.shape[1])[None]
    write = rows[:, None] & (slot == state.known[:, None])
    known = state.known + rows
    ended = jnp.any(chosen[:, None] == state.end_tokens, axis=-1) | (known >= state.limit)
    return dataclasses.replace(
        state,
        tokens=jnp.where(write, chosen[:, None], state.tokens),
        known=known,
        active=jnp.where(rows, ~ended, state.active),
        steps=state.steps + rows,
    )


def prefill(
    params: Params, state: DecodeState, *, config: ModelConfig, chunk: int, fresh: bool
) -> tuple[DecodeState, Report]:
    """Read the next `chunk` tokens of each row's text that are not in the cache yet.

    A row whose text is then read to its end gets its first new token. `fresh`: all caches are empty.
    Only the last token's logits are computed. Requires lengths + chunk <= S (see `slots_for`).
    """
    lengths = state.cache.lengths
    tokens = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (chunk,)))(state.tokens, lengths)
    counts = jnp.clip(state.known - lengths, 0, chunk)
    positions = lengths[:, None] + jnp.arange(chunk)[None]
    causal = jnp.tri(chunk, dtype=bool)
    hidden, new = backbone.forward(params, config, tokens, positions, causal, None if fresh else state.cache)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)  # [B, 1, D]
    logits = backbone.unembed(params, config, last)
    state = dataclasses.replace(state, cache=cache.commit(state.cache, new, None, counts))

    def seen() -> jax.Array:
        return sampling.history_mask(state.tokens, state.known, config.vocab_size)[:, None]

    chosen = sampling.choose(logits, state.known[:, None], state.sampling, seen)
    done = (counts > 0) & (state.cache.lengths == state.known)
    state = _emit(state, chosen[:, 0], done)
    return state, report(state)


def step(params: Params, state: DecodeState, config: ModelConfig) -> DecodeState:
    """One forward over each active row's last token, and the choice of the next."""
    root = jnp.take_along_axis(state.tokens, state.cache.lengths[:, None], axis=1)
    relation = jnp.ones((1, 1), bool)
    lengths = state.cache.lengths
    hidden, new = backbone.forward(params, config, root, lengths[:, None], relation, state.cache)
    logits = backbone.unembed(params, config, hidden)

    def seen() -> jax.Array:
        text = sampling.history_mask(state.tokens, lengths, config.vocab_size)
        return sampling.node_history(text, root, relation)

    chosen = sampling.choose(logits, state.known[:, None], state.sampling, seen)
    counts = state.active.astype(jnp.int32)
    # The accepted path is node 0. Written as a function of the choice it puts the cache's write after all
    # of its reads: without an order between them XLA:CPU copies the whole cache first.
    path = jnp.minimum(chosen, 0)
    state = dataclasses.replace(state, cache=cache.commit(state.cache, new, path, counts))
    return _emit(state, chosen[:, 0], state.active)


def run(
    params: Params,
    state: DecodeState,
    max_steps: jax.Array,
    stop_early: jax.Array,
    *,
    config: ModelConfig,
    shapes: DecodeState,
) -> tuple[DecodeState, Report]:
    """Step until no row is active, or `max_steps` were made, or (`stop_early`) a row has ended.

    shapes: shapes and shardings of the state, whose cache keeps its layout around the loop.
    """
    before = jnp.sum(state.active)

    def go_on(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        steps, state = carry
        running = jnp.sum(state.active)
        return (steps < max_steps) & (running > 0) & ~(stop_early & (running < before))

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        steps, state = carry
        state = step(params, state, config)
        keys = sharding.keep_layout(state.cache.keys, shapes.cache.keys)
        values = sharding.keep_layout(state.cache.values, shapes.cache.values)
        kept = dataclasses.replace(state.cache, keys=keys, values=values)
        return steps + 1, dataclasses.replace(state, cache=kept)

    _, state = jax.lax.while_loop(go_on, body, (jnp.int32(0), state))
    return state, report(state)


def report(state: DecodeState) -> Report:
    """Copies of what the host wants to see."""
    return Report(tokens=state.tokens, known=state.known, active=state.active, steps=state.steps)


def insert(state: DecodeState, row: jax.Array, single: DecodeState) -> DecodeState:
    """Put the one-row state `single` (of the same S) in place of row `row`; other rows are untouched."""

    def put(batch: jax.Array, one: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(batch, one.astype(batch.dtype), row, axis=0)

    return jax.tree.map(put, state, single)


def stop_rows(state: DecodeState, keep: jax.Array) -> DecodeState:
    """End the rows whose `keep` [B] is false (the host found a stop string)."""
    return dataclasses.replace(state, active=state.active & keep)


def grow(state: DecodeState, *, slots: int) -> DecodeState:
    """The same state with more slots a row."""
    tokens = jnp.pad(state.tokens, ((0, 0), (0, slots - state.tokens.shape[1])))
    return dataclasses.replace(state, cache=cache.grow(state.cache, slots), tokens=tokens)


# ---------------------------------------------------------------------------------------------- sizes


def bucket(n: int, least: int) -> int:
    """The next power of two from `least` on, above 2,048 the next multiple of 1,024."""
    size = least
    while size < n:
        size = size * 2 if size < 2048 else size + 1024
    return size


def chunk_for(tokens: int) -> int:
    """The width of the prefill program for a text of `tokens` unread tokens."""
    return min(bucket(tokens, 16), MAX_CHUNK)


def slots_for(cached: int, unread: int, limit: int) -> int:
    """S, so that neither a padded chunk of the prompt nor the token at `limit` is written past the end."""
    chunk = chunk_for(unread)
    return bucket(max(cached + -(-unread // chunk) * chunk, limit + 1), 128)


# ------------------------------------------------------------------------------------------- programs


@dataclasses.dataclass
class Programs:
    """The compiled programs of one model on one mesh, one for each combination of static shapes.

    A prompt, a length, a temperature, a seed or a limit never adds one: those are traced.
    """

    config: ModelConfig
    dtype: jnp.dtype
    params: Params  # shapes, dtypes and shardings
    mesh: jax.sharding.Mesh | None = None
    compiled: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)
    locks: dict[tuple[Any, ...], threading.Lock] = dataclasses.field(default_factory=dict)

    def state_shape(self, batch: int, slots: int) -> DecodeState:
        """Shapes and shardings of a state."""
        shapes = jax.eval_shape(partial(empty, self.config, batch, slots, self.dtype))
        return sharding.with_shardings(shapes, sharding.state_shardings(shapes, self.config, self.mesh))

    def _get(self, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        """The program of `key`, compiled when it is first asked for (by any thread)."""
        with self.locks.setdefault(key, threading.Lock()):
            if key not in self.compiled:
                self.compiled[key] = build().compile()
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
            make = partial(empty, self.config, batch, slots, self.dtype)
            out = self._out(self.state_shape(batch, slots), with_report=False)
            return jax.jit(make, out_shardings=out).lower()

        return self._get(("empty", batch, slots), build)

    def start(self, slots: int) -> Callable[[DecodeState, Request], DecodeState]:
        """(state of one row: donated, request) -> state."""

        def build() -> Any:
            state = self.state_shape(1, slots)
            out = self._out(state, with_report=False)
            return jax.jit(start, donate_argnames="state", out_shardings=out).lower(
                state, jax.eval_shape(partial(_blank_request, slots))
            )

        return self._get(("start", slots), build)

    def prefill(
        self, slots: int, chunk: int, fresh: bool
    ) -> Callable[[Params, DecodeState], tuple[DecodeState, Report]]:
        """(params, state of one row: donated) -> state, report."""

        def build() -> Any:
            state = self.state_shape(1, slots)
            program = partial(prefill, config=self.config, chunk=chunk, fresh=fresh)
            out = self._out(state, with_report=True)
            return jax.jit(program, donate_argnames="state", out_shardings=out).lower(self.params, state)

        return self._get(("prefill", slots, chunk, fresh), build)

    def run(
        self, batch: int, slots: int
    ) -> Callable[[Params, DecodeState, np.int32, np.bool_], tuple[DecodeState, Report]]:
        """(params, state: donated, max_steps int32, stop_early bool) -> state, report."""

        def build() -> Any:
            state = self.state_shape(batch, slots)
            program = partial(run, config=self.config, shapes=state)
            out = self._out(state, with_report=True)
            scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
            return jax.jit(program, donate_argnames="state", out_shardings=out).lower(
                self.params, state, *scalars
            )

        return self._get(("run", batch, slots), build)

    def insert(self, batch: int, slots: int) -> Callable[[DecodeState, np.int32, DecodeState], DecodeState]:
        """(state: donated, row int32, state of one row) -> state."""

        def build() -> Any:
            state, single = self.state_shape(batch, slots), self.state_shape(1, slots)
            out = self._out(state, with_report=False)
            return jax.jit(insert, donate_argnames="state", out_shardings=out).lower(
                state, jax.ShapeDtypeStruct((), jnp.int32), single
            )

        return self._get(("insert", batch, slots), build)

    def stop_rows(self, batch: int, slots: int) -> Callable[[DecodeState, np.ndarray], DecodeState]:
        """(state: donated, keep [B] bool) -> state."""

        def build() -> Any:
            state = self.state_shape(batch, slots)
            out = self._out(state, with_report=False)
            return jax.jit(stop_rows, donate_argnames="state", out_shardings=out).lower(
                state, jax.ShapeDtypeStruct((batch,), jnp.bool_)
            )

        return self._get(("stop_rows", batch, slots), build)

    def grow(self, slots: int, larger: int) -> Callable[[DecodeState], DecodeState]:
        """(state of one row) -> the same with `larger` slots."""

        def build() -> Any:
            out = self._out(self.state_shape(1, larger), with_report=False)
            return jax.jit(partial(grow, slots=larger), out_shardings=out).lower(self.state_shape(1, slots))

        return self._get(("grow", slots, larger), build)


def _blank_request(slots: int) -> Request:
    zero = jnp.int32(0)
    return Request(
        tokens=jnp.zeros((slots,), jnp.int32),
        known=zero,
        cached=zero,
        limit=zero,
        sampling=sampling.RowSampling.greedy(1),
        end_tokens=jnp.full((MAX_END_TOKENS,), -1, jnp.int32),
    )
