"""What heads and lookup would have guessed along a known text: ranks of the true tokens, at every place.

One forward over the text measures what decoding it would take a forward a step for. In a tree that decodes
this text greedily, a node matches if and only if its tokens are the text's, so the rank of the true token in
the list of the true path is all that any tree needs: `accepted` walks a tree over it.

Shapes: B texts, T tokens of a text, D model, M heads, V' tokens that the heads score, P depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import backbone, heads, propose, sampling
from medusa_jax.backbone import Params, over_leading
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.heads import HeadParams
from medusa_jax.tree import RankPath, Tree

BUCKET = 64  # texts are padded to multiples of it, and so many places' logits exist at a time
MISS = np.iinfo(np.int32).max  # the rank of a token that is in no list


def padded(ids: Sequence[int]) -> np.ndarray:
    """The ids of a text as programs over known texts take them: zeros behind, up to a multiple of BUCKET."""
    made = np.zeros((-(-len(ids) // BUCKET) * BUCKET,), np.int32)
    made[: len(ids)] = ids
    return made


def states(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Hidden states [T, D] after the final norm along one text [T]."""
    T = tokens.shape[0]
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    return backbone.forward(params, config, tokens[None], positions, jnp.tri(T, dtype=bool), None)[0][0]


def log_probs(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Log-probability [T] of each token's successor at temperature 1; tokens [T], a multiple of BUCKET."""
    hidden = states(params, config, tokens)
    following = jnp.roll(tokens, -1).reshape(-1, BUCKET)

    def part(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        some, wanted = given
        log_p = jax.nn.log_softmax(backbone.unembed(params, config, some[None])[0], axis=-1)
        return jnp.take_along_axis(log_p, wanted[:, None], axis=-1)[:, 0]

    return jax.lax.map(part, (hidden.reshape(-1, BUCKET, hidden.shape[-1]), following)).reshape(-1)


def logits_at(params: Params, tokens: jax.Array, place: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Logits [V] of the token behind tokens[place]; tokens [T]."""
    return backbone.unembed(params, config, states(params, config, tokens)[place][None, None])[0, 0]


def replay(
    params: Params,
    made: HeadParams | None,
    tokens: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    *,
    config: ModelConfig,
    heads_config: MedusaConfig | None,
    depth: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Ranks of the true and of lookup's tokens in the heads' lists [T, M] (see `head_ranks`), and `lookups`.

    tokens [T]: one text, answered with this seed and temperature, zeros behind it.
    """
    T = tokens.shape[0]
    found = lookups(tokens, depth)
    if made is None or heads_config is None:
        return None, None, found
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    hidden = states(params, config, tokens)[None]
    embedding = params["model"]["embed_tokens"]["weight"]
    unembedding = backbone.unembedding_table(params)

    def noise(ahead: int) -> jax.Array:
        drawn = sampling.gumbel(seed[None], positions + ahead, config.vocab_size)
        drawn = drawn if made.token_map is None else drawn[..., made.token_map]
        return jnp.where(temperature > 0, drawn, 0)

    scale = jnp.where(temperature > 0, 1 / jnp.where(temperature > 0, temperature, 1), 1.0)
    true, looked = head_ranks(
        made, heads_config, embedding, unembedding, tokens[None], hidden, found[None], scale, noise
    )
    return true[0], looked[0], found


def head_ranks(
    params: HeadParams,
    config: MedusaConfig,
    embedding: jax.Array,
    unembedding: jax.Array,
    tokens: jax.Array,
    hidden: jax.Array,
    found: jax.Array,
    scale: jax.Array | float = 1.0,
    noise: Callable[[int], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Ranks in the heads' lists, [B, T, M] each: of the true tokens, and of lookup's.

    tokens [B, T]; hidden [B, T, D] after the final norm; found [B, T, M or more] as `lookups` gives it.
    scale: one over the temperature; noise(n) [B, T, V'] is added to the scaled scores of the tokens n places
    ahead, as `propose` ranks guesses.
    Entry [t, m] is about the token t + 2 + m, as head m at t guesses it after the true tokens t + 1 to
    t + 1 + m. MISS where that lies behind the text or outside the draft vocabulary.
    """
    T = tokens.shape[1]
    true, looked = [], []
    for m in range(config.num_heads):
        following = [jnp.roll(tokens, -1 - i, axis=1) for i in range(m + 2)]
        path = jnp.stack([embedding[following[i]] for i in range(m + 1)], axis=2)
        z = heads.state(params, config, hidden, m, path)
        scores = heads.logits(params, config, z, m, unembedding) * scale
        if noise is not None:
            scores = scores + noise(m + 2)
        inside = jnp.arange(T)[None] + 2 + m < T
        true.append(jnp.where(inside, _rank(scores, following[m + 1], params, config), MISS))
        looked.append(_rank(scores, found[..., m], params, config))
    return jnp.stack(true, axis=-1), jnp.stack(looked, axis=-1)


def _rank(scores: jax.Array, token: jax.Array, params: HeadParams, config: MedusaConfig) -> jax.Array:
    """How many of scores [..., V'] come before that of token [...]; of equal ones those before it."""
    place = token
    if params.token_map is not None:
        nowhere = jnp.full((config.vocab_size,), -1, jnp.int32)
        place = nowhere.at[params.token_map].set(jnp.arange(config.scored, dtype=jnp.int32))[token]
        place = jnp.where(token >= 0, place, -1)
    own = jnp.take_along_axis(scores, jnp.maximum(place, 0)[..., None], axis=-1)
    earlier = over_leading(jnp.arange(scores.shape[-1]), scores) < place[..., None]
    rank = jnp.sum((scores > own) | ((scores == own) & earlier), axis=-1)
    return jnp.where(place >= 0, rank, MISS).astype(jnp.int32)


def lookups(tokens: jax.Array, depth: int) -> jax.Array:
    """Lookup's guesses after each token's successor, [T, depth] int32, EMPTY without one.

    tokens [T]. Entry [t] follows the text up to t + 1, the root of the step whose hidden state stands at t.
    """
    T = tokens.shape[0]
    known = jnp.minimum(jnp.arange(T) + 2, T)
    return jax.lax.map(lambda length: propose.lookup(tokens[None], length[None], depth)[0], known)


def combined_ranks(
    tokens: np.ndarray,
    true: np.ndarray | None,
    looked: np.ndarray | None,
    found: np.ndarray | None,
    depth: int,
) -> np.ndarray:
    """Ranks of the true tokens in the lists of heads and lookup together, [T, depth]; MISS where in none.

    tokens [T]; true and looked [T, M] as `head_ranks` gives them, None without heads; found [T, depth] of
    `lookups`, None without. Lookup's token comes first along the path of first ranks, as in
    `propose.put_first`.
    """
    T = len(tokens)
    ranks = np.full((T, depth), MISS, np.int64)
    on_spine = np.ones((T,), bool)
    M = 0 if true is None else true.shape[1]
    for d in range(depth):
        target = np.full((T,), -1, np.int64)
        target[: max(T - 2 - d, 0)] = tokens[2 + d :]
        rank = np.full((T,), MISS, np.int64)
        if true is not None and d < M:
            rank = true[:, d].astype(np.int64)
        if found is not None:
            guess = found[:, d]
            here = on_spine & (guess != propose.EMPTY)
            behind = np.full((T,), MISS, np.int64)
            if looked is not None and d < M:
                behind = looked[:, d].astype(np.int64)
            pushed = np.where((rank < MISS) & (behind > rank), rank + 1, rank)
            rank = np.where(here, np.where(guess == target, 0, pushed), rank)
        rank = np.where(target >= 0, rank, MISS)
        ranks[:, d] = rank
        on_spine &= rank == 0
    return ranks


def drafts(
    params: Params,
    made: HeadParams,
    tokens: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    *,
    config: ModelConfig,
    heads_config: MedusaConfig,
    tree: Tree,
    lookup: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a step at each place of a text would propose: tokens [T, U], their promise [T, U], found [T].

    tokens [T], a multiple of BUCKET: one text, answered with this seed and temperature. Entry [t] follows the
    root t + 1. tree: of U nodes. In the promise lookup's guesses count as certain; found: whether it has any.
    """
    T, depth = tokens.shape[0], tree.max_depth
    found = lookups(tokens, depth) if lookup else jnp.full((T, depth), propose.EMPTY, jnp.int32)
    embedding = params["model"]["embed_tokens"]["weight"]
    unembedding = backbone.unembedding_table(params)
    scale = jnp.where(temperature > 0, 1 / jnp.where(temperature > 0, temperature, 1), 1.0)

    def part(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, root, looked, place = given
        ahead = place[:, None] + 2 + jnp.arange(heads_config.num_heads)[None]
        noise = sampling.gumbel(jnp.broadcast_to(seed, place.shape), ahead, config.vocab_size)
        noise = noise if made.token_map is None else noise[..., made.token_map]
        draft = propose.propose(
            tree,
            heads_config,
            made,
            embedding,
            unembedding,
            hidden,
            root,
            jnp.broadcast_to(scale, place.shape),
            jnp.where(temperature > 0, noise, 0),
            looked,
            np.zeros(depth, np.float32),
        )
        assert draft.promise is not None
        return draft.tokens, draft.promise

    given = states(params, config, tokens), jnp.roll(tokens, -1), found, jnp.arange(T, dtype=jnp.int32)
    parts = [value.reshape(-1, BUCKET, *value.shape[1:]) for value in given]
    drafted, promise = jax.lax.map(part, tuple(parts))
    has = jnp.any(found != propose.EMPTY, axis=-1)
    return drafted.reshape(T, -1), promise.reshape(T, -1), has


def hit_rates(ranks: Sequence[np.ndarray], ranks_kept: int = 10) -> dict[RankPath, float]:
    """For each path of ranks the share of places where all of its guesses are right; input of `Tree.grow`.

    ranks: [places, depth] of each text, all places counted alike.
    """
    counts: dict[RankPath, int] = {}
    places = 0
    for rows in ranks:
        places += len(rows)
        good = rows < ranks_kept
        reach = np.cumprod(good, axis=1).sum(axis=1)
        for row, length in zip(rows.tolist(), reach.tolist(), strict=True):
            for d in range(1, length + 1):
                path = tuple(row[:d])
                counts[path] = counts.get(path, 0) + 1
    return {path: count / max(places, 1) for path, count in counts.items()}


def accepted(tree: Tree, ranks: np.ndarray) -> list[int]:
    """Guesses that each step accepts when the tree decodes a text with these ranks [places, depth].

    The first place is that of the first step; each step goes on behind what it accepted. Tokens per step are
    len(ranks) over the number of steps.
    """
    paths = set(tree.paths)
    steps, at = [], 0
    while at < len(ranks):
        row, depth = ranks[at].tolist(), 0
        while depth < min(len(row), tree.max_depth, len(ranks) - at - 1) and tuple(row[: depth + 1]) in paths:
            depth += 1
        steps.append(depth)
        at += depth + 1
    return steps


def expected(tree: Tree, rates: Mapping[RankPath, float]) -> float:
    """Expected tokens of a step: the root and every node's probability of being right."""
    return 1.0 + sum(rates.get(path, 0.0) for path in tree.paths)
