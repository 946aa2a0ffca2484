"""Prefill, step and the generation loop, as pure functions of a `DecodeState`.

A batch is a set of rows, each with its own text. A row's life: `start` writes its prompt, `prefill`
reads it chunk by chunk and chooses the first token, `run` steps until it is finished, `insert` puts
another prefilled request in its place. `programs.Programs` compiles them, once for each shape.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from medusa_jax import backbone, cache, propose, sampling, selection, sharding, verify
from medusa_jax.backbone import Params
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.heads import HeadParams
from medusa_jax.propose import Draft, Layout
from medusa_jax.selection import Selection
from medusa_jax.tree import Tree

MAX_END_TOKENS = 8
NO_ROOT = -1
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
    limit: jax.Array  # [B] int32, known may not pass it
    active: jax.Array  # [B] bool: still decoding
    broken: jax.Array  # [B] bool: the model gave logits that are not finite
    hidden: jax.Array  # [B, D] the state that chose the last token, which the heads guess from
    # [B, S] int32: where a step's root stands, the deepest node of the proposed tree that was emitted;
    # -1 elsewhere.
    step_nodes: jax.Array
    sampling: sampling.RowSampling
    end_tokens: jax.Array  # [B, MAX_END_TOKENS] int32, padded with -1


@flax.struct.dataclass
class Report:
    """What the host reads after a run; separate buffers, so that the state can be donated meanwhile."""

    tokens: jax.Array  # [B, S]
    known: jax.Array  # [B]
    active: jax.Array  # [B]
    broken: jax.Array  # [B]
    step_nodes: jax.Array  # [B, S]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step guesses, and from what: static, so another plan is another program.

    tree: the nodes that a step reads. With a selection it is as many of those of a larger tree, chosen anew
    by each row at each step.
    """

    tree: Tree
    heads: MedusaConfig | None = None
    lookup: bool = False
    selection: Selection | None = None

    @classmethod
    def plain(cls) -> Plan:
        """One node: token by token."""
        return cls(Tree.single())

    @property
    def proposed(self) -> Tree:
        """The tree of all guesses; its nodes are those of statistics and of `step_nodes`."""
        return self.tree if self.selection is None else self.selection.tree

    @functools.cached_property
    def layout(self) -> Layout:
        """Where the lists of the proposed nodes come from."""
        return Layout.of(self.proposed, self.heads)


def empty(config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> DecodeState:
    """A state whose rows are all free."""
    zeros = jnp.zeros((batch,), jnp.int32)
    return DecodeState(
        cache=cache.allocate(config, batch, slots, dtype),
        tokens=jnp.zeros((batch, slots), jnp.int32),
        known=zeros,
        limit=zeros,
        active=jnp.zeros((batch,), bool),
        broken=jnp.zeros((batch,), bool),
        hidden=jnp.zeros((batch, config.hidden_size), dtype),
        step_nodes=jnp.full((batch, slots), NO_ROOT, jnp.int32),
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
        limit=request.limit[None],
        active=jnp.zeros((1,), bool),
        broken=jnp.zeros((1,), bool),
        step_nodes=jnp.full_like(state.step_nodes, NO_ROOT),
        sampling=request.sampling,
        end_tokens=request.end_tokens[None],
    )


def _emit(state: DecodeState, tokens: jax.Array, counts: jax.Array, rows: jax.Array) -> DecodeState:
    """Append tokens[b, :counts[b]] [B, P] to the text of each row in `rows` [B] bool.

    A row ends, in the midst of them too, at an end token or at its limit. The last of the tokens, if it is
    reached, is the root of the next step. P slots from `known` on are written, which must exist.
    """
    order = jnp.arange(tokens.shape[1])[None]
    ends = jnp.any(tokens[:, :, None] == state.end_tokens[:, None, :], axis=-1)
    ends = (ends | (state.known[:, None] + order + 1 >= state.limit[:, None])) & (order < counts[:, None])
    ended = jnp.any(ends, axis=-1)
    emitted = jnp.where(ended, jnp.argmax(ends, axis=-1) + 1, counts)
    emitted = jnp.where(rows, emitted, 0).astype(jnp.int32)
    write = jax.vmap(lambda row, block, at: jax.lax.dynamic_update_slice(row, block, (at,)))
    new_root = (order == counts[:, None] - 1) & (order < emitted[:, None])
    return dataclasses.replace(
        state,
        tokens=write(state.tokens, tokens, state.known),
        step_nodes=write(state.step_nodes, jnp.where(new_root, 0, NO_ROOT), state.known),
        known=state.known + emitted,
        active=jnp.where(rows, ~ended, state.active),
    )


def _end_broken(state: DecodeState, logits: jax.Array, rows: jax.Array) -> DecodeState:
    """End each row in `rows` [B] whose choice was made from logits [B, V] that are not finite."""
    # A sum keeps NaN and infinity; a maximum on a CPU does not.
    broken = rows & ~jnp.isfinite(jnp.sum(logits, axis=-1))
    return dataclasses.replace(state, broken=state.broken | broken, active=state.active & ~broken)


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
    state = dataclasses.replace(state, hidden=last[:, 0])
    state = _emit(state, chosen, jnp.ones_like(counts), done)
    state = _end_broken(state, logits[:, 0], done)
    return state, report(state)


def step(
    params: Params, heads: HeadParams | None, state: DecodeState, config: ModelConfig, plan: Plan
) -> DecodeState:
    """Propose a tree of guesses behind each row's last token, check it in one forward, keep what holds.

    Plain decoding is the plan of one node. Every active row emits at least one token.
    """
    tree, lengths = plan.proposed, state.cache.lengths
    root = jnp.take_along_axis(state.tokens, lengths[:, None], axis=1)[:, 0]
    noise = _noise(state, tree, config.vocab_size)
    with jax.named_scope("propose"):
        draft = _propose(params, heads, state, plan, root, noise)
        tokens, depth, ancestors = draft.tokens, jnp.asarray(tree.depth)[None], jnp.asarray(tree.ancestors)
        if plan.selection is not None:
            warm = state.sampling.temperature > 0
            draft, nodes = selection.read(plan.selection, draft, plan.tree.nodes, warm)
            tokens = jnp.take_along_axis(draft.tokens, nodes, axis=1)
            depth, ancestors = depth[0, nodes], ancestors[nodes[:, :, None], nodes[:, None, :]]
    with jax.named_scope("forward"):
        positions = lengths[:, None] + depth
        hidden, new = backbone.forward(params, config, tokens, positions, ancestors, state.cache)
        logits = backbone.unembed(params, config, hidden)  # [B, nodes read, V]

    def seen() -> jax.Array:
        return sampling.history_mask(state.tokens, state.known, config.vocab_size)

    with jax.named_scope("verify"):
        token_map = None if heads is None else heads.token_map
        verdict = verify.verify(
            tree, plan.layout, draft, token_map, logits, state.sampling, state.known, noise, seen
        )
        path = jnp.asarray(tree.node_paths)[verdict.node]  # [B, P], repeats its last node
        guesses = jnp.take_along_axis(draft.tokens, path, axis=1)
        order = jnp.arange(tree.max_depth + 1)[None]
        chosen = verdict.chosen[:, None]
        # A guess stands one place further in the path than in the text: the path begins with the root.
        tokens = jnp.where(order == verdict.accepted[:, None], chosen, jnp.roll(guesses, -1, axis=1))
    with jax.named_scope("commit"):
        # A path that depends on the choice puts the cache's write after all of its reads: without an order
        # between them XLA:CPU copies the whole cache first. With one node the choice must be named for it.
        path = path + jnp.minimum(chosen, 0)
        place = draft.places(verdict.node)[:, None]
        after = _emit(state, tokens, verdict.accepted + 1, state.active)
        at_node = jnp.take_along_axis(logits, place[..., None], axis=1)[:, 0]
        after = _end_broken(after, at_node, state.active)
        emitted = after.known - state.known
        moved = (emitted > 0)[:, None]
        kept = jnp.take_along_axis(hidden, place[..., None], axis=1)[:, 0]
        last = jnp.take_along_axis(path, jnp.minimum(emitted, verdict.accepted)[:, None], axis=1)
        at_root = moved & (jnp.arange(after.tokens.shape[1])[None] == lengths[:, None])
        return dataclasses.replace(
            after,
            cache=cache.commit(state.cache, new, draft.places(path), emitted),
            hidden=jnp.where(moved, kept, state.hidden),
            step_nodes=jnp.where(at_root, last, after.step_nodes),
        )


def _noise(state: DecodeState, tree: Tree, vocab_size: int) -> jax.Array:
    """Gumbel noise [B, depth + 1, V] of the next positions' choices; zero when no row samples."""
    positions = state.known[:, None] + jnp.arange(tree.max_depth + 1)[None]
    return jax.lax.cond(
        jnp.any(state.sampling.temperature > 0),
        lambda: sampling.gumbel(state.sampling.seed, positions, vocab_size),
        lambda: jnp.zeros((*positions.shape, vocab_size), jnp.float32),
    )


def _propose(
    params: Params,
    heads: HeadParams | None,
    state: DecodeState,
    plan: Plan,
    root: jax.Array,
    noise: jax.Array,
) -> Draft:
    """The tree's tokens; see `propose.propose`."""
    rows, tree = state.sampling, plan.proposed
    warm = rows.temperature > 0
    if plan.lookup:
        found = propose.lookup(state.tokens, state.known, tree.max_depth)
    else:
        found = jnp.full((root.shape[0], tree.max_depth), propose.EMPTY, jnp.int32)
    embedding = params["model"]["embed_tokens"]["weight"]
    unembedding = backbone.unembedding_table(params)
    depths = 0 if plan.heads is None else min(plan.heads.num_heads, tree.max_depth)
    rejecting = warm & (rows.acceptance == sampling.REJECTION)
    positions = state.known[:, None] + jnp.arange(depths)[None]
    # `exact` ranks guesses under the noise that will choose, `rejection` draws them by noise of their own.
    ranking = jax.lax.cond(
        jnp.any(rejecting),
        lambda: jnp.where(
            rejecting[:, None, None],
            sampling.gumbel(rows.seed, positions, noise.shape[-1], sampling.DRAFT_STREAM),
            noise[:, :depths],
        ),
        lambda: noise[:, :depths],
    )
    ranking = jnp.where((warm & (rows.acceptance != sampling.TYPICAL))[:, None, None], ranking, 0)
    if heads is not None and heads.token_map is not None:
        ranking = ranking[:, :, heads.token_map]
    scale = jnp.where(warm, 1 / jnp.where(warm, rows.temperature, 1), 1.0)
    log_lookup = None if plan.selection is None else plan.selection.log_lookup
    return propose.propose(
        tree, plan.heads, heads, embedding, unembedding, state.hidden, root, scale, ranking, found, log_lookup
    )


def run(
    params: Params,
    heads: HeadParams | None,
    state: DecodeState,
    max_steps: jax.Array,
    stop_early: jax.Array,
    *,
    config: ModelConfig,
    plan: Plan,
    shapes: DecodeState,
) -> tuple[DecodeState, Report]:
    """Step until no row is active, or `max_steps` were made, or (`stop_early`) a row has ended.

    shapes: shapes and shardings of the state. Its cache keeps its layout around the loop, its hidden state
    its sharding.
    """
    before = jnp.sum(state.active)

    def go_on(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        steps, state = carry
        running = jnp.sum(state.active)
        return (steps < max_steps) & (running > 0) & ~(stop_early & (running < before))

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        steps, state = carry
        # Heads are split by input column. Left to itself the partitioner would split the hidden state that
        # they read like them, through the loop every layer's activations too, and gather those at each use.
        state = dataclasses.replace(state, hidden=_keep_sharding(state.hidden, shapes.hidden))
        state = step(params, heads, state, config, plan)
        keys = sharding.keep_layout(state.cache.keys, shapes.cache.keys)
        values = sharding.keep_layout(state.cache.values, shapes.cache.values)
        kept = dataclasses.replace(state.cache, keys=keys, values=values)
        return steps + 1, dataclasses.replace(state, cache=kept)

    _, state = jax.lax.while_loop(go_on, body, (jnp.int32(0), state))
    return state, report(state)


def _keep_sharding(array: jax.Array, shape: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """The array, split over the devices as a program's argument of this shape is."""
    return array if shape.sharding is None else jax.lax.with_sharding_constraint(array, shape.sharding)


def report(state: DecodeState) -> Report:
    """Copies of what the host wants to see."""
    return Report(
        tokens=state.tokens,
        known=state.known,
        active=state.active,
        broken=state.broken,
        step_nodes=state.step_nodes,
    )


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
    more = ((0, 0), (0, slots - state.tokens.shape[1]))
    return dataclasses.replace(
        state,
        cache=cache.grow(state.cache, slots),
        tokens=jnp.pad(state.tokens, more),
        step_nodes=jnp.pad(state.step_nodes, more, constant_values=NO_ROOT),
    )


# ---------------------------------------------------------------------------------------------- sizes


def bucket(n: int, least: int) -> int:
    """The next power of two from `least` on, above 2,048 the next multiple of 1,024."""
    if n > 2048:
        return -(-n // 1024) * 1024
    return max(least, 1 << (n - 1).bit_length())


def rows_for(n: int) -> int:
    """The next number from n on that is a power of two or three halves of one."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def chunk_for(tokens: int) -> int:
    """The width of the prefill program for a text of `tokens` unread tokens."""
    return min(rows_for(max(tokens, 16)), MAX_CHUNK)


def slots_for(cached: int, unread: int, limit: int, depth: int) -> int:
    """S, so that no write reaches past the end: no padded chunk of the prompt and, at the limit, no path.

    depth: the deepest guess of the tree.
    """
    chunk = chunk_for(unread)
    return bucket(max(cached + -(-unread // chunk) * chunk, limit + depth + 1), 128)
