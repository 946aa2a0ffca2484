"""Candidates: one ranked list for each inner node of a tree, from heads and from lookup.

The lists of one depth are made together, from the tokens of the depth above. Independent heads give all
parents of a depth the same list, conditioned heads one to each; lookup puts its token first in the lists
along the tree's spine (the path of all first ranks), without repeating it.

Shapes: B batch, N nodes, n parents of one depth, R ranks, V vocabulary, V' tokens that the heads score.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import heads, sampling
from medusa_jax.config import MedusaConfig
from medusa_jax.tree import Tree

EMPTY = -1  # the token of a node that has none; it never matches and is never used as an index
MATCHES = (2, 5)  # shortest and longest run of tokens that lookup compares


@flax.struct.dataclass
class Draft:
    """What was proposed. Lists and scores are those of the inner nodes, several of which may share one.

    `Layout` says which list and which scores a node's children were taken from. promise and place are there
    where a step reads only some of the nodes (see `selection`).
    """

    tokens: jax.Array  # [B, N] int32: the tree, EMPTY at empty nodes
    lists: jax.Array  # [B, lists, R] int32, EMPTY where a list is shorter
    certain: jax.Array  # [B, lists] bool: the first entry is lookup's, not drawn from the heads
    scores: jax.Array  # [B, scores, V'] float32: log q up to a constant, at the row's temperature
    promise: jax.Array | None = None  # [B, N] float32: log of the estimate that a node's whole path is right
    place: jax.Array | None = None  # [B, N] int32: where a node that is read stands in the forward

    def places(self, node: jax.Array) -> jax.Array:
        """Where nodes [B, ...] stand in the forward; anywhere for those that are not read."""
        if self.place is None:
            return node
        return jnp.take_along_axis(self.place, node.reshape(node.shape[0], -1), axis=1).reshape(node.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the lists of a tree's depths stand in a `Draft`; static."""

    parents: tuple[np.ndarray, ...]  # by depth (from 0): the nodes there that have children
    list_of: np.ndarray  # [N] the list of each node's children (0 for leaves)
    scores_of: np.ndarray  # [N] the scores behind that list, -1 without heads

    @classmethod
    def of(cls, tree: Tree, config: MedusaConfig | None) -> Layout:
        """The layout of a tree filled by these heads."""
        list_of, scores_of = np.zeros(tree.nodes, np.int32), np.full(tree.nodes, -1, np.int32)
        parents, lists, scores = [], 0, 0
        for depth in range(tree.max_depth):
            here = np.unique(tree.parent[tree.depth == depth + 1])
            parents.append(here)
            list_of[here] = lists + np.arange(len(here))
            lists += len(here)
            if config is not None and depth < config.num_heads:
                scores_of[here] = scores + (np.arange(len(here)) if config.conditioned else 0)
                scores += len(here) if config.conditioned else 1
        return cls(tuple(parents), list_of, scores_of)


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Values and indices [..., min(k, V)] of the largest of scores [..., V], largest first, then the first.

    The k largest lie in the k blocks with the largest maxima, so only those are searched: a top-k over a
    whole vocabulary is a full sort on TPU, and a gather of all scores where the vocabulary is sharded. Of a
    matrix XLA takes it shard by shard and then over the shards' results; of more dimensions it sorts.
    """
    *leading, V = scores.shape
    rows = scores.reshape(-1, V)
    if sampling.block_size(V) == 1:
        values, at = jax.lax.top_k(rows, min(k, V))
    else:
        blocks = sampling.in_blocks(rows)
        size = blocks.shape[-1]
        # In their own order, so that of equal scores the first is found, and the padding last: never used.
        best = jnp.sort(jax.lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)  # [rows, k]
        inside = jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(-1, k * size)
        values, at = jax.lax.top_k(inside, k)
        at = jnp.take_along_axis(best, at // size, axis=-1) * size + at % size
    shape = (*leading, at.shape[-1])
    return values.reshape(shape), at.reshape(shape)


def lookup(tokens: jax.Array, known: jax.Array, length: int) -> jax.Array:
    """What followed the last place where the text's end stood before: [B, length] int32, EMPTY without one.

    tokens [B, S], known [B]: the text. The longest match counts, 5 tokens down to 2; of equally long ones
    the latest. A continuation that reaches the text's end goes round: a text that repeats itself goes on so.
    """
    shortest, longest = MATCHES

    def one(row: jax.Array, known: jax.Array) -> jax.Array:
        S = row.shape[0]
        end = known - 1
        slot = jnp.arange(S)
        run = jnp.ones((S,), bool)
        matched = jnp.zeros((S,), jnp.int32)
        for back in range(longest):
            here = jnp.roll(row, back) == row[jnp.maximum(end - back, 0)]
            run = run & here & (slot >= back) & (slot < end)
            matched = matched + run
        # Longest first, then latest. Both fit: matched <= 5.
        best = jnp.argmax(jnp.where(matched >= shortest, matched * S + slot, -1))
        period = jnp.maximum(end - best, 1)
        following = row[best + 1 + jnp.arange(length) % period]
        return jnp.where(matched[best] >= shortest, following, EMPTY)

    return jax.vmap(one)(tokens, known)


def put_first(
    lists: jax.Array, first: jax.Array, values: jax.Array | None = None, value: jax.Array | float = 0.0
) -> tuple[jax.Array, jax.Array | None]:
    """lists [B, n, R] with first [B, n] moved or put to their head; EMPTY changes nothing.

    values [B, n, R] of the lists' entries are moved with them, behind the one that `first` then has.
    """
    R = lists.shape[-1]
    found = lists == first[..., None]
    # Entries before its old place move down by one; without an old place the last entry falls out.
    place = jnp.where(jnp.any(found, axis=-1), jnp.argmax(found, axis=-1), R - 1)
    moves = (jnp.arange(R)[None, None] <= place[..., None]) & (first != EMPTY)[..., None]

    def move(entries: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.where(moves, jnp.concatenate([head[..., None], entries[..., :-1]], axis=-1), entries)

    moved = (
        None if values is None else move(values, jnp.broadcast_to(value, first.shape).astype(values.dtype))
    )
    return move(lists, first), moved


def propose(
    tree: Tree,
    config: MedusaConfig | None,
    params: heads.HeadParams | None,
    embedding: jax.Array,
    unembedding: jax.Array,
    hidden: jax.Array,
    root: jax.Array,
    scale: jax.Array,
    noise: jax.Array,
    found: jax.Array,
    log_lookup: np.ndarray | None = None,
) -> Draft:
    """Fill a tree.

    hidden [B, D]: the state that chose the root [B]. embedding, unembedding [V, D]: the model's tables.
    scale [B]: one over the temperature. noise [B, at least min(depth, M), V']: added to the scaled scores
    before they are ranked. found [B, depth]: lookup's continuation of the root, EMPTY where there is none.
    log_lookup [depth]: log of the rate at which its tokens are right; with it the draft has promises, for
    which a head's guess counts with the head's own probability.
    """
    B = root.shape[0]
    layout = Layout.of(tree, config)
    R = max(tree.width, 1)
    tokens = jnp.full((B, tree.nodes), EMPTY, jnp.int32).at[:, 0].set(root)
    promise = None if log_lookup is None else jnp.zeros((B, tree.nodes), jnp.float32)
    lists, certain, scores = [], [], []
    path = embedding[root][:, None, None]  # [B, parents of this depth, depth + 1, D]
    together = _score_together(tree, config, params, unembedding, hidden)
    together = None if together is None else together * scale[:, None, None]
    for depth, parents in enumerate(layout.parents):
        n = len(parents)
        ranked = jnp.full((B, 1, R), EMPTY, jnp.int32)
        likely = None if promise is None else jnp.full((B, 1, R), -jnp.inf, jnp.float32)
        if config is not None and depth < config.num_heads:
            assert params is not None
            if together is None:
                z = jnp.broadcast_to(hidden[:, None], (B, n if config.conditioned else 1, hidden.shape[-1]))
                z = heads.state(params, config, z, depth, path)
                scored = heads.logits(params, config, z, depth, unembedding) * scale[:, None, None]
            else:
                scored = together[:, depth, None]
            values, best = top_k(scored + noise[:, depth, None], R)
            ranked = best if params.token_map is None else params.token_map[best]
            # Heads that score fewer than R tokens leave the end of the list empty.
            short = [(0, 0), (0, 0), (0, R - ranked.shape[-1])]
            ranked = jnp.pad(ranked, short, constant_values=EMPTY)
            if likely is not None:
                # Rows with noise do not use their promises.
                total = jnp.sum(jnp.exp(scored - values[..., :1]), axis=-1, keepdims=True)
                likely = jnp.minimum(values - values[..., :1] - jnp.log(total), 0)
                likely = jnp.pad(likely, short, constant_values=-jnp.inf)
            scores.append(scored)
        first = jnp.full((B, n), EMPTY, jnp.int32)
        on_spine = np.flatnonzero(parents == tree.spine[depth])
        if on_spine.size:
            first = first.at[:, on_spine[0]].set(found[:, depth])
        ranked = jnp.broadcast_to(ranked, (B, n, R)).astype(jnp.int32)
        likely = None if likely is None else jnp.broadcast_to(likely, (B, n, R))
        ranked, likely = put_first(ranked, first, likely, 0.0 if log_lookup is None else log_lookup[depth])
        lists.append(ranked)
        certain.append(first != EMPTY)
        children = np.flatnonzero(tree.depth == depth + 1)
        own = np.searchsorted(parents, tree.parent[children])
        tokens = tokens.at[:, children].set(ranked[:, own, tree.rank[children]])
        if promise is not None and likely is not None:
            above = promise[:, tree.parent[children]]
            promise = promise.at[:, children].set(above + likely[:, own, tree.rank[children]])
        if config is not None and config.conditioned and depth + 1 < min(config.num_heads, tree.max_depth):
            inner = layout.parents[depth + 1]
            above = path[:, np.searchsorted(parents, tree.parent[inner])]
            own = embedding[jnp.maximum(tokens[:, inner], 0)]  # what an empty node guesses is never reached
            path = jnp.concatenate([above, own[:, :, None]], axis=2)
    empty_scores = jnp.zeros((B, 0, 1 if config is None else config.scored), jnp.float32)
    return Draft(
        tokens=tokens,
        lists=jnp.concatenate([*lists, jnp.full((B, 1, R), EMPTY, jnp.int32)], axis=1),
        certain=jnp.concatenate([*certain, jnp.zeros((B, 1), bool)], axis=1),
        scores=jnp.concatenate([*scores, empty_scores], axis=1),
        promise=promise,
    )


def _score_together(
    tree: Tree,
    config: MedusaConfig | None,
    params: heads.HeadParams | None,
    unembedding: jax.Array,
    hidden: jax.Array,
) -> jax.Array | None:
    """Scores [B, depths, V'] of all heads in one product, so that a table they share is read once.

    None where that cannot be: heads that wait for the tokens above, or have tables of their own.
    """
    if config is None or params is None or tree.max_depth == 0:
        return None
    if config.conditioned or config.own_unembedding:
        return None
    depths = range(min(config.num_heads, tree.max_depth))
    z = jnp.stack([heads.state(params, config, hidden, m, hidden[:, None]) for m in depths], axis=1)
    return heads.logits(params, config, z, 0, unembedding)
