"""Acceptance: how far down the tree of guesses the model agrees, and what it says next.

`exact`: the model makes its own choice, arg-max(log p + g) with the noise of the row's seed and the token's
position, and goes on to the child with that token. The text is that of plain sampling, token for token.

`rejection`: guesses were drawn from the heads without replacement; one is accepted with min(1, p/q), and the
target becomes the residual max(0, p - q) after each that is not (Leviathan et al. 2023, arXiv 2211.17192,
Chen et al. 2023, arXiv 2302.01318; siblings without replacement as in Jeon et al. 2024, arXiv 2402.14160).
Lossless in distribution.

`typical`: a guess is accepted if p > min(epsilon, delta exp(-entropy)) (Cai et al. 2024, arXiv 2401.10774,
section 2.3.1). Lossy.

At temperature 0 all three are the greedy rule. Shapes: B batch, N nodes, R ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from medusa_jax import sampling
from medusa_jax.propose import EMPTY, Draft, Layout
from medusa_jax.sampling import REJECTION, TYPICAL, RowSampling
from medusa_jax.tree import Tree


@flax.struct.dataclass
class Verdict:
    """The outcome of a step, for each row."""

    node: jax.Array  # [B] int32: the deepest accepted node
    accepted: jax.Array  # [B] int32: its depth, the number of guesses accepted
    chosen: jax.Array  # [B] int32: the model's next token after it, the root of the next step


def verify(
    tree: Tree,
    layout: Layout,
    draft: Draft,
    token_map: jax.Array | None,
    logits: jax.Array,
    rows: RowSampling,
    known: jax.Array,
    noise: jax.Array,
    seen: Callable[[], jax.Array],
) -> Verdict:
    """Judge a draft by the model's logits [B, N, V], of the nodes that were read (see `Draft.places`).

    known [B]: tokens of the text with the root, so that a child of the root has position known. noise
    [B, depths + 1, V]: Gumbel noise of positions known, known + 1, ...; read by warm rows only. seen() gives
    the tokens [B, V] of the text with the root, for the repetition penalty.
    """
    plain = jnp.all((rows.temperature == 0) & (rows.repetition_penalty == 1))
    return jax.lax.cond(
        plain,
        lambda: greedy(tree, draft, logits),
        lambda: _careful(tree, layout, draft, token_map, logits, rows, known, noise, seen),
    )


def deepest(tree: Tree, matches: jax.Array, weight: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The deepest node whose whole path matches, and its depth; matches [B, N].

    Of equally deep ones the one with the largest `weight` [B, N], else the first.
    """
    ancestors = jnp.asarray(tree.ancestors)[None]
    whole = jnp.all(matches[:, None, :] | ~ancestors, axis=-1)
    depth = jnp.where(whole, jnp.asarray(tree.depth)[None], -1)
    best = depth == jnp.max(depth, axis=-1, keepdims=True)
    node = jnp.argmax(best if weight is None else jnp.where(best, weight, -jnp.inf), axis=-1)
    return node.astype(jnp.int32), jnp.asarray(tree.depth)[node].astype(jnp.int32)


def _at(values: jax.Array, node: jax.Array) -> jax.Array:
    """values [B, N, ...] at node [B]."""
    index = node.reshape(-1, *([1] * (values.ndim - 1)))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def greedy(tree: Tree, draft: Draft, logits: jax.Array) -> Verdict:
    """All nodes at once: a node matches if its token is its parent's most likely next one."""
    choice = sampling.argmax(logits)  # [B, N]
    matches = (draft.tokens == _of_parents(tree, draft, choice)).at[:, 0].set(True)
    node, accepted = deepest(tree, matches)
    return Verdict(node, accepted, _at(choice, draft.places(node)))


def _of_parents(tree: Tree, draft: Draft, values: jax.Array) -> jax.Array:
    """values [B, nodes read] of each node's parent: [B, N]."""
    if draft.place is None:
        return values[:, tree.parent]
    return jnp.take_along_axis(values, draft.place[:, tree.parent], axis=1)


def typical(tree: Tree, draft: Draft, logits: jax.Array, rows: RowSampling) -> Verdict:
    """The published rule: entropy in natural units by log-softmax in float32, the next root greedy."""
    warm = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    log_p = jax.nn.log_softmax(logits / warm[:, None, None], axis=-1)  # [B, N, V]
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(jnp.isfinite(log_p), log_p, 0), axis=-1)
    threshold = jnp.minimum(rows.epsilon[:, None], rows.delta[:, None] * jnp.exp(-entropy))  # [B, N]
    guess = jnp.maximum(draft.tokens, 0)
    above = draft.places(jnp.broadcast_to(jnp.asarray(tree.parent), guess.shape))
    its = jax.vmap(lambda row, parent, at: row[parent, at])(log_p, above, guess)  # log p under the parent
    accept = (draft.tokens != EMPTY) & (jnp.exp(its) > _of_parents(tree, draft, threshold))
    its = its.at[:, 0].set(0)
    likelihood = jnp.sum(jnp.where(jnp.asarray(tree.ancestors)[None], its[:, None, :], 0), axis=-1)
    node, accepted = deepest(tree, accept.at[:, 0].set(True), likelihood)
    return Verdict(node, accepted, sampling.argmax(_at(logits, draft.places(node))))


def residual(p: jax.Array, q: jax.Array, x: jax.Array, certain: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is left of target p and draft q, both [B, V] with sum 1, when guess x [B] was not accepted.

    p becomes max(0, p - q), or loses x if the guess was certain (its q is a point mass); q loses x. Both
    come out with sum 1; a q without mass stays zero, and then p - q is p.
    """
    is_x = jnp.arange(p.shape[-1])[None] == x[:, None]
    left = jnp.where(certain[:, None], jnp.where(is_x, 0, p), jnp.maximum(p - q, 0))
    total = jnp.sum(left, axis=-1, keepdims=True)
    # Rounding alone can leave nothing: then p and q agree, x had to be accepted, and any law will do.
    p = jnp.where(total > 0, left / jnp.where(total > 0, total, 1), p)
    return p, without(q, x)


def without(q: jax.Array, x: jax.Array) -> jax.Array:
    """q [B, V] with x [B] removed, sum 1 again (or zero everywhere)."""
    q = jnp.where(jnp.arange(q.shape[-1])[None] == x[:, None], 0, q)
    total = jnp.sum(q, axis=-1, keepdims=True)
    return jnp.where(total > 0, q / jnp.where(total > 0, total, 1), 0)


def accept_probability(p: jax.Array, q: jax.Array, x: jax.Array, certain: jax.Array) -> jax.Array:
    """min(1, p(x) / q(x)) [B]; of a certain guess p(x)."""
    at = jnp.maximum(x, 0)[:, None]
    p_x = jnp.take_along_axis(p, at, axis=1)[:, 0]
    q_x = jnp.where(certain, 1.0, jnp.take_along_axis(q, at, axis=1)[:, 0])
    return jnp.where(q_x > 0, jnp.minimum(1.0, p_x / jnp.where(q_x > 0, q_x, 1)), 0.0)


def siblings(
    p: jax.Array,
    q: jax.Array,
    guesses: jax.Array,
    certain: jax.Array,
    in_tree: jax.Array,
    uniforms: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Try one node's children in the order of their ranks: (rank accepted [B], -1 for none; p left [B, V]).

    p, q [B, V]: laws of the target and of the heads. guesses [B, R]: the whole list, EMPTY behind its end;
    in_tree [B, R]: which of them are children. A guess that is not in the tree is not tried, but it was
    drawn, so q loses it all the same. uniforms [B, R] in [0, 1).
    """

    def one(rank: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        p, q, taken = carry
        x, sure = guesses[:, rank], certain & (rank == 0)
        tried = (taken < 0) & in_tree[:, rank] & (x != EMPTY)
        accept = tried & (uniforms[:, rank] < accept_probability(p, q, x, sure))
        left, thinned = residual(p, q, x, sure)
        open_ = (taken < 0) & ~accept & (x != EMPTY)
        p = jnp.where((tried & ~accept)[:, None], left, p)
        q = jnp.where(open_[:, None], thinned, q)
        return p, q, jnp.where(accept, rank, taken)

    taken = jnp.full(p.shape[:1], -1, jnp.int32)
    p, _, taken = jax.lax.fori_loop(0, guesses.shape[1], one, (p, q, taken))
    return taken, p


def _careful(
    tree: Tree,
    layout: Layout,
    draft: Draft,
    token_map: jax.Array | None,
    logits: jax.Array,
    rows: RowSampling,
    known: jax.Array,
    noise: jax.Array,
    seen: Callable[[], jax.Array],
) -> Verdict:
    """Walk down from the root, one depth after the other, as long as any row goes on.

    Only the nodes that are reached cost a choice: filters over all of [B, N, V] would cost more than the
    forward on a CPU.
    """
    V = logits.shape[-1]
    warm = rows.temperature > 0
    rejecting = warm & (rows.acceptance == REJECTION)
    children = jnp.asarray(tree.children)

    def reject(node: jax.Array, tempered: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The child taken [B] (-1: none) and the model's token where none is."""
        p = jax.nn.softmax(sampling.filter_logits(tempered[:, None], rows)[:, 0], axis=-1)
        index = jnp.asarray(layout.scores_of)[node]
        if draft.scores.shape[1]:
            scores = _at(draft.scores, jnp.maximum(index, 0))
            q = jnp.where((index >= 0)[:, None], jax.nn.softmax(scores, axis=-1), 0)
            q = q if token_map is None else jnp.zeros_like(p).at[:, token_map].set(q)
        else:
            q = jnp.zeros_like(p)
        guesses = _at(draft.lists, jnp.asarray(layout.list_of)[node])
        certain = _at(draft.certain, jnp.asarray(layout.list_of)[node])
        # A certain guess is visited first, and is no draw from the heads.
        uniforms = sampling.uniform(rows.seed, position, guesses.shape[1])
        kids = children[node]  # [B, R]
        in_tree = (kids >= 0) & (jnp.take_along_axis(draft.tokens, jnp.maximum(kids, 0), axis=1) != EMPTY)
        taken, left = siblings(p, q, guesses, certain, in_tree, uniforms)
        child = jnp.where(taken >= 0, _at(kids, jnp.maximum(taken, 0)), -1)
        g = sampling.gumbel(rows.seed, position[:, None], V, sampling.RESIDUAL_STREAM)[:, 0]
        return child, sampling.argmax(jnp.log(left) + g)

    def descend(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        depth, node, alive, accepted, chosen, used = carry
        here = sampling.penalise(
            _at(logits, draft.places(node))[:, None], used[:, None], rows.repetition_penalty
        )
        tempered = sampling.temper(here, rows)
        its_noise = jax.lax.dynamic_index_in_dim(noise, depth, axis=1)
        choice = sampling.pick(here, tempered, rows, its_noise)[:, 0]
        kids = children[node]
        their_tokens = jnp.take_along_axis(draft.tokens, jnp.maximum(kids, 0), axis=1)
        hits = (kids >= 0) & (their_tokens == choice[:, None])
        child = jnp.where(jnp.any(hits, axis=-1), _at(kids, jnp.argmax(hits, axis=-1)), -1)
        child, choice = jax.lax.cond(
            jnp.any(rejecting),
            lambda: jax.tree.map(
                lambda a, b: jnp.where(rejecting, a, b),
                reject(node, tempered[:, 0], known + depth),
                (child, choice),
            ),
            lambda: (child, choice),
        )
        goes_on = alive & (child >= 0)
        chosen = jnp.where(alive & ~goes_on, choice, chosen)
        node = jnp.where(goes_on, child, node)
        token = _at(draft.tokens, node)
        used = used | (goes_on[:, None] & (jnp.arange(V)[None] == token[:, None]))
        return depth + 1, node, goes_on, accepted + goes_on, chosen, used

    B = logits.shape[0]
    zero = jnp.zeros((B,), jnp.int32)
    start = (jnp.int32(0), zero, jnp.ones((B,), bool), zero, zero, seen())
    _, node, _, accepted, chosen, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), descend, start)
    walked = Verdict(node, accepted, chosen)
    loose = warm & (rows.acceptance == TYPICAL)
    return jax.lax.cond(
        jnp.any(loose),
        lambda: jax.tree.map(lambda a, b: jnp.where(loose, a, b), typical(tree, draft, logits, rows), walked),
        lambda: walked,
    )
