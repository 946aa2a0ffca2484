"""Losses of the heads and of the backbone, in chunks of the sequence: no batch's logits ever exist whole.

Shapes: B rows, T tokens, D model, M heads, V' tokens that are scored. A sum over positions is taken chunk
by chunk, and the gradient of a chunk in the same pass, so that its logits are neither kept nor computed
again.

Position s is where the model's own prediction of token s + 1 is made. Head m stands at s - 1 - m and predicts
the same token; all heads and the model that teaches them are compared there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from medusa_jax import heads
from medusa_jax.config import MedusaConfig
from medusa_jax.heads import HeadParams
from medusa_jax.linear import dropped, over_leading, project

F32 = jnp.dtype(jnp.float32)
TOP = 5  # accuracies are counted for the 1 to 5 likeliest tokens

# A product that adds to logits: x [..., d] and a table [V', d].
Term = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class Batch:
    """Packed rows, all [B, T]. Documents in a row have segments 1, 2, ...; 0 is padding."""

    tokens: Any  # int32
    segments: Any  # int32
    positions: Any  # int32, from 0 in every document
    labels: Any  # bool: the token is to be predicted


@flax.struct.dataclass
class Scores:
    """Sums over labelled positions; divide by `count`."""

    loss: jax.Array  # cross-entropy, or divergence
    hits: jax.Array  # [TOP]: the token was among the k + 1 likeliest
    count: jax.Array


# ------------------------------------------------------------------------------------------- chunks


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_over_chunks(
    fn: Callable[..., Any], size: int, xs: Any, shared: Any, fixed_xs: Any, fixed: Any
) -> Any:
    """The sum over chunks of `size` positions of fn(xs, shared, fixed_xs, fixed) -> (loss, metrics).

    xs and fixed_xs hold arrays [B, T, ...], of which fn gets [B, size, ...]; T is padded with zeros, so fn
    must give positions of weight zero no loss. Gradients reach xs and shared. They are taken in the forward
    pass: a second one would compute all logits again.
    """
    chunks = _split((xs, fixed_xs), size)

    def body(total: Any, chunk: Any) -> Any:
        return jax.tree.map(jnp.add, total, fn(chunk[0], shared, chunk[1], fixed)), None

    first = jax.tree.map(lambda leaf: leaf[0], chunks)
    zeros = _zeros(jax.eval_shape(fn, first[0], shared, first[1], fixed))
    return jax.lax.scan(body, zeros, chunks)[0]


def _forward(fn: Callable[..., Any], size: int, xs: Any, shared: Any, fixed_xs: Any, fixed: Any) -> Any:
    chunks = _split((xs, fixed_xs), size)
    with_gradients = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)

    def body(total: Any, chunk: Any) -> Any:
        result, (into_xs, into_shared) = with_gradients(chunk[0], shared, chunk[1], fixed)
        return jax.tree.map(jnp.add, total, (result, into_shared)), into_xs

    first = jax.tree.map(lambda leaf: leaf[0], chunks)
    zeros = _zeros((jax.eval_shape(fn, first[0], shared, first[1], fixed), shared))
    (result, into_shared), into_xs = jax.lax.scan(body, zeros, chunks)
    return result, (_join(into_xs, xs), into_shared)


def _backward(fn: Callable[..., Any], size: int, gradients: Any, cotangent: Any) -> Any:
    del fn, size
    into_xs, into_shared = jax.tree.map(lambda leaf: leaf * cotangent[0].astype(leaf.dtype), gradients)
    return into_xs, into_shared, None, None


sum_over_chunks.defvjp(_forward, _backward)


def _split(arrays: Any, size: int) -> Any:
    """[B, T, ...] -> [chunks, B, size, ...], zeros behind."""

    def one(array: jax.Array) -> jax.Array:
        short = -array.shape[1] % size
        padded = jnp.pad(array, [(0, 0), (0, short), *[(0, 0)] * (array.ndim - 2)])
        return padded.reshape(array.shape[0], -1, size, *array.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(one, arrays)


def _join(chunks: Any, like: Any) -> Any:
    """What `_split` does, undone."""

    def one(chunk: jax.Array, whole: jax.Array) -> jax.Array:
        return chunk.swapaxes(0, 1).reshape(whole.shape[0], -1, *whole.shape[2:])[:, : whole.shape[1]]

    return jax.tree.map(one, chunks, like)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


# ------------------------------------------------------------------------------------ cross-entropy


def logits_of(terms: list[Term]) -> jax.Array:
    """float32 logits [..., V'] of products that add up."""
    first, *rest = [project(x, table, F32) for x, table in terms]
    return sum(rest, first)


def cross_entropy(
    logits: jax.Array, target: jax.Array, weight: jax.Array, teacher: jax.Array | None, softness: float
) -> tuple[jax.Array, Scores]:
    """Weighted sum of cross-entropies with a token, a teacher's distribution, or a mixture of both.

    logits, teacher [..., V'] float32; target [...] int32, an index of V' or -1 for a token that is not
    scored; weight [...] float32, zero where nothing is to be learnt. softness is the teacher's share. Hits
    and count take every position of positive weight, so a token that is not scored is a miss.
    """
    scored = target >= 0
    at_target = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    loss = jnp.where(scored, normaliser - at_target, 0.0)
    if softness:
        assert teacher is not None
        share = jax.nn.softmax(teacher, axis=-1)
        loss = (1 - softness) * loss + softness * (normaliser - jnp.sum(share * logits, axis=-1))
    better = jnp.sum(logits > at_target[..., None], axis=-1)
    counted = weight > 0
    tops = over_leading(jnp.arange(1, TOP + 1), better[..., None])
    found = (better[..., None] < tops) & (scored & counted)[..., None]
    axes = tuple(range(counted.ndim))
    scores = Scores(
        jnp.sum(jnp.where(counted, loss, 0.0)),
        jnp.sum(found, axis=axes).astype(F32),
        jnp.sum(counted).astype(F32),
    )
    return jnp.sum(loss * weight), jax.tree.map(jax.lax.stop_gradient, scores)


# -------------------------------------------------------------------------------------------- heads


def shift(x: jax.Array, by: int) -> jax.Array:
    """x [B, T, ...] moved towards the end by `by` positions (if negative, the beginning), zeros behind."""
    T = x.shape[1]
    before, behind = (by, 0) if by > 0 else (0, -by)
    padded = jnp.pad(x, [(0, 0), (before, behind), *[(0, 0)] * (x.ndim - 2)])
    return padded[:, behind : behind + T]


def head_targets(batch: Batch, num_heads: int) -> tuple[jax.Array, jax.Array]:
    """At each position s: the token s + 1, [B, T] int32, and whether head m learns it, [B, T, M] bool.

    It does when the token is labelled and lies in the same document as the head's own position.
    """
    wanted, segment = shift(batch.labels, -1), shift(batch.segments, -1)
    reach = [shift(batch.segments, m + 1) == segment for m in range(num_heads)]
    return shift(batch.tokens, -1), jnp.stack(reach, axis=-1) & (wanted & (segment > 0))[..., None]


def head_states(
    params: HeadParams, config: MedusaConfig, hidden: jax.Array, embedded: jax.Array | None
) -> list[jax.Array]:
    """What each head makes of hidden states [B, T, D], M x [B, T, D], each at the position s it predicts at.

    embedded [B, T, D]: the tokens' embeddings, for conditioned heads: they read the path's true tokens.
    """
    states = []
    for m in range(config.num_heads):
        path = hidden[:, :, None]  # read by conditioned heads only
        if config.conditioned:
            assert embedded is not None
            path = jnp.stack([shift(embedded, -1 - i) for i in range(m + 1)], axis=2)
        states.append(shift(heads.state(params, config, hidden, m, path), m + 1))
    return states


def heads_loss(
    params: HeadParams,
    config: MedusaConfig,
    hidden: jax.Array,
    embedded: jax.Array | None,
    batch: Batch,
    tables: Callable[[jax.Array], list[Term]],
    teacher: list[Term] | None,
    weights: jax.Array,
    softness: float = 0.0,
    chunk: int = 128,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Scores]:
    """Sum over heads m and positions of weights[m] x cross-entropy with the token at offset m + 2.

    hidden [B, T, D]: after the final norm. tables(z) gives the products of the unembedding shared by the
    heads, frozen here; heads with their own train it. teacher: the products of the model's own logits, at
    every position, for softness > 0. weights [M] float32: decay^m over the number of labelled positions of
    the whole step. Scores are stacked over heads. rate: dropout of the heads' input, with `key`.
    Cai et al. 2024 (arXiv 2401.10774), section 2.2.1; with distributions as labels, Hinton et al. 2015.
    """
    given = dropped(hidden, rate, key) if rate and key is not None else hidden
    states = head_states(params, config, given, embedded)
    target, learns = head_targets(batch, config.num_heads)
    if params.token_map is not None:
        target = _index_in(params.token_map, config.vocab_size)[target]
    frozen: Any = [tables(z) for z in states]
    fixed = [[table for _, table in terms] for terms in frozen]
    xs = [[x for x, _ in terms] for terms in frozen]
    fixed_xs = {"target": target, "weight": learns * weights[None, None], "teacher": None}
    if softness:
        assert teacher is not None
        fixed_xs["teacher"] = [jax.lax.stop_gradient(x) for x, _ in teacher]
        fixed.append([table for _, table in teacher])
    shared = params.layers.get("unembedding")

    def score(xs: Any, shared: Any, fixed_xs: Any, fixed: Any) -> Any:
        taught = None
        if softness:
            taught = logits_of(list(zip(fixed_xs["teacher"], fixed[-1], strict=True)))
        total, all_scores = jnp.float32(0), []
        for m in range(config.num_heads):
            terms = list(zip(xs[m], fixed[m], strict=True))
            if shared is not None:
                terms = [(xs[m][0], shared[m])]
            loss, scores = cross_entropy(
                logits_of(terms), fixed_xs["target"], fixed_xs["weight"][..., m], taught, softness
            )
            total += loss
            all_scores.append(scores)
        return total, jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_scores)

    return sum_over_chunks(score, chunk, xs, shared, fixed_xs, jax.lax.stop_gradient(fixed))


def _index_in(token_map: jax.Array, vocab_size: int) -> jax.Array:
    """[V] int32: where each token stands in a draft vocabulary, -1 for those outside."""
    nowhere = jnp.full((vocab_size,), -1, jnp.int32)
    return nowhere.at[token_map].set(jnp.arange(token_map.shape[0], dtype=jnp.int32))
