"""That `rejection` is lossless: by exact enumeration, and by counting what real steps emit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax import backbone, decode, heads, sampling, verify
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.propose import EMPTY, Draft, Layout
from medusa_jax.selection import Selection
from medusa_jax.tree import Tree

# ------------------------------------------------------------------------------- exact enumeration

RANKS, ROWS, LENGTH = 4, 3000, 4
TREES = {
    "dense": Tree.dense((4, 2, 2)),
    "sparse": Tree.from_paths(
        [(0,), (2,), (3,), (0, 1), (0, 3), (2, 0), (3, 2), (0, 1, 0), (2, 0, 1), (2, 0, 3)]
    ),
    "late": Tree.from_paths([(1,), (3,), (1, 0), (3, 3), (1, 0, 2)]),  # first ranks are missing
    "chain": Tree.chain(3),
}


def draws(q, certain, short):
    """All ordered lists [P, R] without replacement, and how likely each is under q [C, V]: [C, P].

    A certain token comes first. Once q has no mass left the list goes on with the first tokens that are not
    in it, as a sort of -inf does; `short`: with nothing. Returns the lists of each law, [C, P, R].
    """
    C, V = q.shape
    lists = np.array([x for x in itertools.permutations(range(V), RANKS) if certain in (EMPTY, x[0])])
    P = len(lists)
    tokens, weight = np.tile(lists, (C, 1, 1)), np.ones((C, P))
    left = np.tile(q[:, None], (1, P, 1))
    for rank in range(RANKS):
        x, total = lists[:, rank], left.sum(-1)
        first = [min(set(range(V)) - set(entries[:rank])) for entries in lists]
        if rank > 0 or certain == EMPTY:
            dead = total == 0
            weight *= np.where(dead, x == first, left[:, np.arange(P), x] / np.where(dead, 1, total))
            tokens[:, :, rank] = np.where(dead & short, EMPTY, x)
        left[:, np.arange(P), x] = 0
    return tokens, weight


@functools.cache
def programs(residual):
    """Acceptance probabilities by hand, and the step's own code; traced anew for another `residual`."""

    def chances(p, q, guesses, certain, in_tree):
        found = []
        for rank in range(RANKS):
            x, sure, kid = guesses[:, rank], certain & (rank == 0), in_tree[:, rank]
            there = x != EMPTY
            accept = jnp.where(kid & there, verify.accept_probability(p, q, x, sure), 0)
            left, thinned = residual(p, q, x, sure)
            p = jnp.where((kid & there)[:, None], left, p)
            q = jnp.where(there[:, None], thinned, q)
            found.append(accept)
        return jnp.stack(found, axis=1)

    def siblings(*args):
        return verify.siblings(*args)

    return jax.jit(chances), jax.jit(siblings)


def by_rows(program, *args):
    """Call a program on ROWS rows at a time, so that it is compiled once."""
    n = len(args[0])
    args = [np.concatenate([x, np.repeat(x[:1], -n % ROWS, axis=0)]) for x in args]
    parts = [program(*(x[i : i + ROWS] for x in args)) for i in range(0, len(args[0]), ROWS)]
    return jax.tree.map(lambda *x: np.concatenate(x)[:n], *parts)


def one_node(p, q, in_tree, certain, short, forgetful):
    """Where a node leads under laws p, q [C, V]: to the child of a rank with a token, [C, R, V], or to a
    last token, [C, V].

    Each outcome is brought about in `verify.siblings` by uniform numbers just above the acceptance
    probabilities, to reject, and just below, to accept. forgetful: ranks outside the tree stay in q.
    """
    (C, V), (lists, weight) = p.shape, draws(q, certain, short)
    P = lists.shape[1]
    lists, weight = lists.reshape(-1, RANKS), weight.reshape(-1)
    keep = weight > 0
    law = np.repeat(np.arange(C), P)[keep]
    lists, weight = lists[keep], weight[keep]
    guesses = np.where(in_tree, lists, EMPTY) if forgetful else lists
    sure = np.full(len(lists), certain != EMPTY)
    args = (p[law].astype(np.float32), q[law].astype(np.float32), guesses.astype(np.int32), sure)
    args = (*args, np.tile(in_tree, (len(lists), 1)))
    chances, siblings = programs(verify.residual)
    a = by_rows(chances, *args)
    reject, accept = np.minimum(a + 1e-5, (a + 1) / 2), np.maximum(a - 1e-5, a / 2)
    to_child, last = np.zeros((C, RANKS, V)), np.zeros((C, V))
    for outcome in [*np.flatnonzero(in_tree), RANKS]:
        chance = np.prod(1.0 - a[:, :outcome], axis=1) * (a[:, outcome] if outcome < RANKS else 1)
        uniforms = np.where(np.arange(RANKS) < outcome, reject, accept)
        taken, left = by_rows(siblings, *args, uniforms)
        likely = np.all(1 - a[:, :outcome] > 1e-6, axis=1) & (
            outcome == RANKS or a[:, outcome % RANKS] > 1e-6
        )
        assert np.all(taken[likely] == (outcome if outcome < RANKS else -1))
        if outcome < RANKS:
            there = lists[:, outcome] != EMPTY
            np.add.at(to_child, (law[there], outcome, lists[there, outcome]), (weight * chance)[there])
        else:
            np.add.at(last, law, (weight * chance)[:, None] * left)
    return to_child, last


def target(p, depth, length):
    """The law of the next tokens after each context of `depth` tokens: [V ** depth, V ** length]."""
    if length == 0:
        return np.ones((len(p[0][0]) ** depth, 1))
    here = p[depth]
    after = target(p, depth + 1, length - 1).reshape(*here.shape, -1)
    return (here[:, :, None] * after).reshape(len(here), -1)


def emitted(tree, p, q, certain, length, short, forgetful=False, node=0):
    """The law of the first tokens that a step emits, going on by p where it emits fewer."""
    depth, kids = int(tree.depth[node]), np.full(RANKS, -1)
    kids[: tree.width] = tree.children[node]
    if length == 0 or kids.max() < 0:
        return target(p, depth, length)
    sure = certain[depth] if node in tree.spine else EMPTY
    to_child, last = one_node(p[depth], q[depth], kids >= 0, sure, short, forgetful)
    C, V = last.shape
    law = last[:, :, None] * target(p, depth + 1, length - 1).reshape(C, V, -1)
    for rank in np.flatnonzero(kids >= 0):
        below = emitted(tree, p, q, certain, length - 1, short, forgetful, kids[rank])
        law += to_child[:, rank, :, None] * below.reshape(C, V, -1)
    return law.reshape(C, -1)


def laws(kind, V, seed):
    """Target and draft laws p, q: one for each context of 0, 1, ... tokens."""
    rng = np.random.default_rng(seed)
    p = [rng.dirichlet(np.full(V, 0.7), V**depth) for depth in range(LENGTH)]
    q = [np.tile(rng.dirichlet(np.full(V, 0.7), 1), (V**depth, 1)) for depth in range(LENGTH)]
    if kind == "conditioned":
        q = [rng.dirichlet(np.full(V, 0.7), V**depth) for depth in range(LENGTH)]
    if kind == "zeros":
        p, q = ([x * (rng.random(x.shape) < 0.6) + 1e-9 for x in both] for both in (p, q))
        p, q = ([x * (x > 1e-3 * x.max(-1, keepdims=True)) for x in both] for both in (p, q))
    if kind == "equal":
        q = p
    if kind == "disjoint":
        p, q = ([x * (np.arange(V) % 2 == side) for x in both] for side, both in enumerate((p, q)))
    if kind == "draft vocabulary":
        q = [x * (np.arange(V) < 2) for x in q]
    p, q = ([x / x.sum(-1, keepdims=True) for x in both] for both in (p, q))
    return p, [0 * x for x in q] if kind == "no heads" else q


def error(tree, V, kind, certain=False, short=False, seed=0, **options):
    """The largest difference between what is emitted and the target."""
    p, q = laws(kind, V, seed)
    sure = [(seed + 2 * depth) % V if certain else EMPTY for depth in range(LENGTH)]
    law = emitted(tree, p, q, sure, LENGTH, short, **options)
    assert abs(law.sum() - 1) < 1e-5
    return np.abs(law - target(p, 0, LENGTH)).max()


KINDS = ["independent", "conditioned", "zeros", "equal", "disjoint", "draft vocabulary", "no heads"]
CASES = [
    (tree, V, kind, certain)
    for i, kind in enumerate(KINDS)
    for certain in (False, True)
    for j, (tree, V) in enumerate([("sparse", 5), ("dense", 4), ("late", 5), ("chain", 4), ("late", 6)])
    if j < 1 or (i + j + certain) % 3 == 0
]


@pytest.mark.parametrize(("tree", "V", "kind", "certain"), CASES)
def test_what_is_emitted_follows_the_target_exactly(tree, V, kind, certain):
    for seed, short in ((V, False), (V + 1, True)):
        assert error(TREES[tree], V, kind, certain, short, seed) < 1e-6


@pytest.mark.parametrize("tree", ["dense", "sparse"])
def test_without_the_residual_it_would_not(tree, monkeypatch):
    assert error(TREES[tree], 4, "conditioned") < 1e-6
    monkeypatch.setattr(verify, "residual", lambda p, q, x, certain: (p, verify.without(q, x)))
    assert error(TREES[tree], 4, "conditioned") > 1e-3


@pytest.mark.parametrize("tree", ["sparse", "late"])
def test_it_matters_that_ranks_outside_the_tree_leave_the_draft(tree):
    assert error(TREES[tree], 4, "conditioned") < 1e-6
    assert error(TREES[tree], 4, "conditioned", forgetful=True) > 1e-3


def test_a_single_guess_is_judged_by_the_classic_rule():
    """Accepted with min(1, p/q), else max(0, p - q): Leviathan et al. 2023 and Chen et al. 2023."""
    rng, V, n = np.random.default_rng(0), 6, 200
    p, q = rng.dirichlet(np.ones(V), (2, n)).astype(np.float32)
    x, u = rng.integers(0, V, n).astype(np.int32), rng.random(n).astype(np.float32)
    no, yes = np.zeros(n, bool), np.ones((n, 1), bool)
    taken, left = jax.jit(verify.siblings)(p, q, x[:, None], no, yes, u[:, None])
    at = np.arange(n), x
    np.testing.assert_array_equal(np.asarray(taken) == 0, u < np.minimum(1, p[at] / q[at]))
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum(-1, keepdims=True)
    expected = np.where((np.asarray(taken) < 0)[:, None], residual, p)
    np.testing.assert_allclose(left, expected, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------- counting what is emitted

VOCAB, N, BATCH, SLOTS, TEMPERATURE = 6, 200_000, 20_000, 16, 0.9
# 0.999 quantiles of chi-square by degrees of freedom.
QUANTILES = {2: 13.82, 15: 37.70, 35: 66.62}
TEXT = [1, 2, 3, 1, 2]  # the last token is the root
PLAN_TREE = Tree.from_paths([(0,), (2,), (0, 0), (0, 2), (2, 1)])


def chi_square(counts, p):
    """The statistic of counts under law p, and its degrees of freedom."""
    there = p > 0
    assert counts[~there].sum() == 0
    expected = p[there] * counts.sum()
    assert expected.min() > 10
    return float(np.sum((counts[there] - expected) ** 2 / expected)), int(there.sum()) - 1


@functools.cache
def base():
    """A model of six tokens whose laws differ by context."""
    fields = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8}
    config = ModelConfig.from_hf(fields | sizes)
    params = jax.jit(lambda: backbone.init(config, jax.random.key(3), jnp.dtype("float32")))()
    params = jax.tree.map(lambda x: x * 20 if x.ndim == 2 else x, params)
    params["lm_head"]["weight"] = params["lm_head"]["weight"] * 0.8
    return config, params


@functools.cache
def logits_of_two():
    """The model's logits after TEXT and each next token, [V, 2, V]."""
    config, params = base()
    tokens = jnp.array([[*TEXT, x] for x in range(VOCAB)])
    n = tokens.shape[1]

    @jax.jit
    def program(params):
        positions = jnp.tile(jnp.arange(n), (VOCAB, 1))
        hidden, _ = backbone.forward(params, config, tokens, positions, jnp.tri(n, dtype=bool), None)
        return backbone.unembed(params, config, hidden[:, -2:])

    return np.asarray(program(params), np.float64)


def next_two(top_k=0):
    """The target law of the two tokens after TEXT, [V * V]."""
    x = logits_of_two() / TEMPERATURE
    x = np.where(x >= np.sort(x, axis=-1)[..., [-top_k]], x, -np.inf)  # 0: the smallest, so all
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    return (p[0, 0][:, None] * p[:, 1]).reshape(-1)


@functools.cache
def after_reading():
    """BATCH rows that have read TEXT but for its last token, which comes next."""
    config, params = base()
    known = len(TEXT)
    text = jnp.array(TEXT + [0] * (SLOTS - known), jnp.int32)

    @jax.jit
    def program(params):
        state = decode.empty(config, 1, SLOTS, jnp.dtype("float32"))
        state = state.replace(tokens=text[None], known=jnp.array([known - 1]), limit=jnp.array([SLOTS - 4]))
        state, _ = decode.prefill(params, state, config=config, chunk=8, fresh=True)
        state = state.replace(tokens=text[None], known=jnp.array([known]), active=jnp.array([True]))
        return jax.tree.map(lambda x: jnp.repeat(x, BATCH, axis=0), state)

    return program(params)


def two_steps(kind, *, lookup, top_k=0, n=N, reads=None):
    """Counts [V * V] of the first two tokens that n rows with seeds of their own emit in two steps."""
    config, params = base()
    made = head_config = None
    if kind != "none":
        token_map = jnp.array([5, 1, 2, 0]) if kind == "draft vocabulary" else None
        size = None if token_map is None else len(token_map)
        head_config = MedusaConfig(2, 1, config.hidden_size, VOCAB, kind == "conditioned", False, size)
        made = heads.init(head_config, backbone.unembedding_table(params), "float32", token_map)
        rng = np.random.default_rng(5)
        noisy = {k: np.float32(x + 0.3 * rng.normal(size=x.shape)) for k, x in made.layers.items()}
        made = made.replace(layers=noisy)
    plan, known = decode.Plan(PLAN_TREE, head_config, lookup), len(TEXT)
    if reads is not None:
        rates = tuple(0.9 ** (1 + sum(path) + len(path)) for path in PLAN_TREE.paths)
        few = Tree.grow(dict(zip(PLAN_TREE.paths, rates, strict=True)), reads)
        plan = dataclasses.replace(plan, tree=few, selection=Selection(PLAN_TREE, rates, (0.8,)))

    @jax.jit
    def step(state, seeds):
        rows = sampling.RowSampling.greedy(BATCH).replace(
            temperature=jnp.full(BATCH, TEMPERATURE),
            top_k=jnp.full(BATCH, top_k),
            acceptance=jnp.full(BATCH, sampling.REJECTION),
            seed=seeds,
        )
        return decode.step(params, made, state.replace(sampling=rows), config, plan)

    counts, guessed = np.zeros(VOCAB**2), 0
    for i in range(0, n, BATCH):
        seeds = np.arange(i, i + BATCH, dtype=np.uint32)
        first = step(after_reading(), seeds)
        guessed += int(np.sum(np.asarray(first.known) - known - 1))
        tokens = np.asarray(step(first, seeds).tokens)[:, known : known + 2]
        counts += np.bincount(tokens @ [VOCAB, 1], minlength=VOCAB**2)
    assert guessed > 0.1 * n
    return counts


@pytest.mark.parametrize(
    ("kind", "lookup", "top_k"),
    [("independent", False, 0), ("conditioned", True, 0), ("draft vocabulary", True, 4), ("none", True, 0)],
)
@pytest.mark.parametrize("reads", [None, 4])
def test_real_steps_follow_the_target(kind, lookup, top_k, reads):
    counts = two_steps(kind, lookup=lookup, top_k=top_k, reads=reads)
    statistic, freedom = chi_square(counts, next_two(top_k))
    assert statistic < QUANTILES[freedom]


def test_real_steps_would_not_without_the_residual(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, q, x, certain: (p, verify.without(q, x)))
    statistic, freedom = chi_square(two_steps("independent", lookup=True, n=BATCH), next_two())
    assert statistic > 2 * QUANTILES[freedom]


@pytest.mark.parametrize("shared", [False, True])
def test_draft_and_residual_noise_are_different(shared, monkeypatch):
    """With one noise for both, p = (.2, .4, .4) under q = (.7, .1, .2) comes out as (.200, .434, .366)."""
    if shared:
        monkeypatch.setattr(sampling, "RESIDUAL_STREAM", sampling.DRAFT_STREAM)
    tree, config = Tree.chain(1), MedusaConfig(1, 0, 3, 3)
    p, q = jnp.array([0.2, 0.4, 0.4]), jnp.array([0.7, 0.1, 0.2])
    rows = sampling.RowSampling.greedy(N)
    rows = rows.replace(temperature=jnp.ones(N), acceptance=jnp.full(N, sampling.REJECTION))

    @jax.jit
    def program(seeds):
        positions = jnp.full((N, 1), 7)
        noise = sampling.gumbel(seeds, positions, 3, sampling.DRAFT_STREAM)
        scores = jnp.tile(jnp.log(q), (N, 1, 1))
        guess = jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)
        draft = Draft(
            tokens=jnp.concatenate([jnp.zeros_like(guess), guess], axis=1),
            lists=jnp.stack([guess, jnp.full_like(guess, EMPTY)], axis=1),
            certain=jnp.zeros((N, 2), bool),
            scores=scores,
        )
        verdict = verify.verify(
            tree,
            Layout.of(tree, config),
            draft,
            None,
            jnp.tile(jnp.log(p), (N, 2, 1)),
            rows.replace(seed=seeds),
            positions[:, 0],
            jnp.zeros((N, 2, 3)),
            lambda: jnp.zeros((N, 3), bool),
        )
        return jnp.where(verdict.accepted == 1, guess[:, 0], verdict.chosen)

    counts = np.bincount(program(jnp.arange(N, dtype=jnp.uint32)), minlength=3)
    statistic, freedom = chi_square(counts, np.asarray(p, np.float64))
    if shared:
        np.testing.assert_allclose(counts / N, [0.2, 0.434, 0.366], atol=0.005)
        assert statistic > 10 * QUANTILES[freedom]
    else:
        assert statistic < QUANTILES[freedom]
