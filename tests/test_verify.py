"""Acceptance against brute force; that `rejection` is lossless is in test_rejection.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax import heads, propose, sampling, verify
from medusa_jax.config import MedusaConfig
from medusa_jax.propose import EMPTY, Draft, Layout
from medusa_jax.sampling import EXACT, REJECTION, TYPICAL, RowSampling
from medusa_jax.tree import Tree

V = 6
TREE = Tree.from_paths(
    [(0,), (1,), (2,), (4,), (0, 0), (0, 1), (0, 3), (2, 0), (2, 1), (0, 0, 0), (0, 0, 1), (2, 1, 0)]
)


@st.composite
def trees(draw):
    """Prefix-closed trees, ranks with gaps."""
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8))
    return Tree.from_paths({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})


def bare(tokens):
    """A draft of which only the tokens count."""
    B = len(tokens)
    return Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        lists=jnp.full((B, 1, 1), EMPTY),
        certain=jnp.zeros((B, 1), bool),
        scores=jnp.zeros((B, 0, 1)),
    )


def tokens_near(rng, tree, choice, hit):
    """Tokens [B, N] that equal the parent's choice [B, N] with probability `hit`; others: any, or EMPTY."""
    tokens = rng.integers(EMPTY, V, choice.shape)
    return np.where(rng.random(choice.shape) < hit, choice[:, tree.parent], tokens)


def token_near(rng, tree, node, tokens, wanted, hit):
    """A token that no sibling before has in tokens [N]: the wanted one with probability `hit`, or EMPTY."""
    siblings = [tokens[c] for c in tree.children[tree.parent[node]] if 0 < c < node]
    others = [*sorted(set(range(V)) - set(siblings)), EMPTY]
    return wanted if wanted in others and rng.random() < hit else rng.choice(others)


def path_of(tree, node):
    """Nodes below the root down to a node."""
    return [int(a) for a in np.flatnonzero(tree.ancestors[node])[1:]]


# -------------------------------------------------------------------------------------------- greedy


@settings(deadline=None, max_examples=12, derandomize=True)
@given(trees(), st.integers(0, 999), st.sampled_from([0, 0.5, 0.8, 1]))
def test_greedy_equals_a_search_over_all_paths(tree, seed, hit):
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 3, (100, tree.nodes, V)).astype(np.float32)  # ties: the first token wins
    choice = np.argmax(logits, axis=-1)
    tokens = tokens_near(rng, tree, choice, hit)
    verdict = jax.jit(functools.partial(verify.greedy, tree))(bare(tokens), logits)
    for b in range(len(tokens)):
        best = 0
        for node in range(1, tree.nodes):
            path = path_of(tree, node)
            whole = all(tokens[b, a] == choice[b, tree.parent[a]] for a in path)
            if whole and len(path) > tree.depth[best]:
                best = node
        assert (verdict.node[b], verdict.accepted[b]) == (best, tree.depth[best])
        assert verdict.chosen[b] == choice[b, best]
    if hit == 1:
        assert np.all(np.asarray(verdict.accepted) == tree.max_depth)


def test_deepest_prefers_depth_then_weight_then_order():
    tree = Tree.dense((2, 2))  # root, two children, then the grandchildren (0,0) (0,1) (1,0) (1,1)
    matches = np.array(
        [
            [1, 0, 0, 1, 1, 1, 1],  # grandchildren without their parents
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 1, 1, 0],
            [1, 1, 0, 0, 1, 1, 1],
        ],
        bool,
    )
    weight = jnp.asarray(np.tile([9, 1, 2, 3, 4, 5, 6], (4, 1)), jnp.float32)
    for given_weight, nodes in ((None, [0, 1, 4, 4]), (weight, [0, 2, 5, 4])):
        node, depth = verify.deepest(tree, jnp.asarray(matches), given_weight)
        assert node.tolist() == nodes
        assert depth.tolist() == tree.depth[nodes].tolist()


def test_empty_nodes_never_match_and_token_zero_does():
    tree = Tree.chain(2)
    for temperature in (0.0, 1.0):
        for choice in (0, V - 1):  # -1 as an index would be the last entry
            logits = jnp.tile(jnp.where(jnp.arange(V) == choice, 90.0, 0.0), (4, 3, 1))
            tokens = np.array(
                [[1, EMPTY, EMPTY], [1, choice, EMPTY], [1, EMPTY, choice], [1, choice, choice]]
            )
            for rule in (EXACT, REJECTION, TYPICAL):
                verdict = judge(tree, bare(tokens), logits, make_rows(4, temperature, rule))
                # Nothing was drawn from these lists: to `rejection` no node holds a guess.
                none = temperature and rule == REJECTION
                assert verdict.accepted.tolist() == ([0, 0, 0, 0] if none else [0, 1, 0, 2])
                assert verdict.chosen.tolist() == [choice] * 4


# --------------------------------------------------------------------------------------------- exact


def make_rows(n, temperature=1.0, acceptance=EXACT, **values):
    made = RowSampling.greedy(n).__dict__
    values |= {"temperature": temperature, "acceptance": acceptance}
    values.setdefault("seed", np.arange(n))
    return RowSampling(
        **made | {k: jnp.broadcast_to(jnp.asarray(v, made[k].dtype), n) for k, v in values.items()}
    )


def judge(tree, draft, logits, rows, known=None, seen=None, config=None):
    """`verify` with the noise that decoding gives it."""
    B = logits.shape[0]
    known = jnp.full((B,), 9) if known is None else known
    seen = jnp.zeros((B, V), bool) if seen is None else seen
    return judges(tree, config)(draft, logits, rows, known, seen)


@functools.cache
def judges(tree, config):
    def program(draft, logits, rows, known, seen):
        positions = known[:, None] + jnp.arange(tree.max_depth + 1)[None]
        noise = sampling.gumbel(rows.seed, positions, V)
        layout = Layout.of(tree, config)
        return verify.verify(tree, layout, draft, None, logits, rows, known, noise, lambda: seen)

    return jax.jit(program)


def slow_law(logits, rows, b, seen):
    """log p [V] after penalty, temperature, top-k, top-p and min-p, -inf where nothing is left; NumPy."""
    penalty, temperature = float(rows.repetition_penalty[b]), float(rows.temperature[b])
    x = np.asarray(logits, np.float64)
    x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    if temperature == 0:
        return np.where(np.arange(V) == np.argmax(x), 0, -np.inf)
    x = x / temperature
    if (k := int(rows.top_k[b])) > 0:
        x = np.where(x >= np.sort(x)[::-1][min(k, V) - 1], x, -np.inf)
    p = np.exp(x - x.max()) / np.sum(np.exp(x - x.max()))
    order = np.argsort(-p, kind="stable")
    if rows.top_p[b] < 1:
        cut = int(np.sum(np.cumsum(p[order]) < float(rows.top_p[b]))) + 1
        x[order[cut:]] = -np.inf
    return np.where(x >= x.max() + np.log(max(float(rows.min_p[b]), 1e-300)), x, -np.inf)


def mixed_rows(rng, B, rules):
    return make_rows(
        B,
        rng.choice([0, 0.7, 1, 1.5], B),
        rng.choice(rules, B),
        top_k=rng.choice([0, 2, 4], B),
        top_p=rng.choice([1, 0.6, 0.9], B),
        min_p=rng.choice([0, 0.1], B),
        repetition_penalty=rng.choice([1, 1.7], B),
        seed=rng.integers(0, 2**32, B),
    )


def test_exact_goes_where_the_models_own_choices_go():
    """The reference chooses at every node, by the text that leads there, and then compares."""
    rng, B = np.random.default_rng(0), 300
    logits = rng.normal(0, 2, (B, TREE.nodes, V)).astype(np.float32)
    rows, known = mixed_rows(rng, B, [EXACT]), rng.integers(3, 99, B)
    seen = rng.random((B, V)) < 0.2
    noise = np.asarray(sampling.gumbel(rows.seed, jnp.asarray(known)[:, None] + jnp.arange(4)[None], V))
    tokens, choice = np.zeros((B, TREE.nodes), int), np.zeros((B, TREE.nodes), int)
    for b in range(B):
        used = np.tile(seen[b], (TREE.nodes, 1))
        for node in range(TREE.nodes):
            if node:
                wanted = choice[b, TREE.parent[node]]
                tokens[b, node] = token_near(rng, TREE, node, tokens[b], wanted, 0.5)
                used[node] = used[TREE.parent[node]]
                if tokens[b, node] != EMPTY:
                    used[node, tokens[b, node]] = True
            law = slow_law(logits[b, node], rows, b, used[node])
            choice[b, node] = np.argmax(law + noise[b, TREE.depth[node]])
    verdict = judge(TREE, bare(tokens), jnp.asarray(logits), rows, jnp.asarray(known), jnp.asarray(seen))
    for b in range(B):
        node = 0
        while hits := [c for c in TREE.children[node] if c > 0 and tokens[b, c] == choice[b, node]]:
            node = hits[0]
        assert (verdict.node[b], verdict.accepted[b]) == (node, TREE.depth[node])
        assert verdict.chosen[b] == choice[b, node]
    assert np.bincount(verdict.accepted, minlength=4).min() > 10  # every outcome was there


# ------------------------------------------------------------------------- heads with any given laws


def toy_heads(depths):
    """Heads whose scores at each depth are given: `hidden` holds them one after the other."""
    config = MedusaConfig(depths, 0, depths * V, V, own_unembedding=True)
    params = heads.init(config, jnp.zeros((V, depths * V)), "float32")
    return config, params.replace(
        layers=params.layers | {"unembedding": jnp.eye(depths * V).reshape(depths, V, -1)}
    )


@functools.cache
def toy_proposals(tree):
    config, params = toy_heads(tree.max_depth)
    tables = [jnp.zeros((V, depths * V)) for depths in (tree.max_depth,) * 2]
    return jax.jit(functools.partial(propose.propose, tree, config, params, *tables))


def toy_draft(tree, scores, rows, known, found=None):
    """A draft by scores [B, depth, V], under the noise that each row's rule asks for."""
    B = scores.shape[0]
    positions = known[:, None] + jnp.arange(tree.max_depth)[None]
    by_rule = {
        EXACT: sampling.gumbel(rows.seed, positions, V),
        REJECTION: sampling.gumbel(rows.seed, positions, V, sampling.DRAFT_STREAM),
    }
    noise = sum(
        ((rows.acceptance == rule) & (rows.temperature > 0))[:, None, None] * g for rule, g in by_rule.items()
    )
    scale = 1 / jnp.where(rows.temperature > 0, rows.temperature, 1)
    found = jnp.full((B, tree.max_depth), EMPTY) if found is None else found
    root = jnp.zeros((B,), jnp.int32)
    return toy_proposals(tree)(scores.reshape(B, -1), root, scale, noise, found)


def test_rows_of_all_kinds_get_along():
    """Each row of a batch gets what it gets alone."""
    rng, B = np.random.default_rng(1), 48
    tree = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 0)])
    config = toy_heads(3)[0]
    rows, known = mixed_rows(rng, B, [EXACT, REJECTION, TYPICAL]), jnp.asarray(rng.integers(3, 99, B))
    scores = jnp.asarray(rng.normal(0, 1, (B, 3, V)), jnp.float32)
    found = jnp.asarray(np.where(rng.random((B, 1)) < 0.5, rng.integers(0, V, (B, 3)), EMPTY), jnp.int32)
    draft = toy_draft(tree, scores, rows, known, found)
    logits = scores[:, tree.depth % 3] + jnp.asarray(rng.normal(0, 0.5, (B, tree.nodes, V)), jnp.float32)
    seen = jnp.asarray(rng.random((B, V)) < 0.2)
    whole = judge(tree, draft, logits, rows, known, seen, config)
    for b in range(B):
        mine = jax.tree.map(lambda x: x[b : b + 1], (draft, logits, rows, known, seen))  # noqa: B023
        alone = judge(tree, *mine, config)
        for name in ("node", "accepted", "chosen"):
            assert getattr(alone, name)[0] == getattr(whole, name)[b], (b, name)
    assert len(set(np.asarray(whole.accepted).tolist())) == 4


def test_coupled_guesses_are_accepted_more_often_than_the_likeliest():
    """Three siblings, T = 1, q = p with an error of 1 in the logits; losslessness does not depend on it."""
    tree, config, n = Tree.dense((3,)), toy_heads(1)[0], 400
    rng = np.random.default_rng(2)
    target = np.repeat(rng.normal(0, 1.0, (40, V)), n, axis=0)
    guessed = jnp.asarray(target + np.repeat(rng.normal(0, 1, (40, V)), n, axis=0), jnp.float32)[:, None]
    logits = jnp.asarray(np.repeat(target[:, None], tree.nodes, axis=1), jnp.float32)
    known = jnp.full((40 * n,), 5)
    rates = {}
    for name, rule in (("coupled", EXACT), ("top-k", TYPICAL), ("drawn", REJECTION)):
        rows = make_rows(40 * n, 1.0, rule)
        draft = toy_draft(tree, guessed, rows, known)  # `typical` ranks without noise
        judged = make_rows(40 * n, 1.0, REJECTION if rule == REJECTION else EXACT)
        rates[name] = float(judge(tree, draft, logits, judged, known, config=config).accepted.mean())
    assert rates["coupled"] > rates["drawn"] + 0.005
    assert rates["drawn"] > rates["top-k"] + 0.05
    assert rates["coupled"] > 0.9


# ------------------------------------------------------------------------------------------- typical


def test_typical_equals_the_published_rule():
    rng, B = np.random.default_rng(3), 300
    logits = rng.normal(0, 1.5, (B, TREE.nodes, V)).astype(np.float32)
    temperature = rng.choice([0.5, 1.0, 1.5], B)
    epsilon, delta = rng.choice([0.09, 0.3, 0.6], B), rng.choice([0.3, 0.9], B)
    tokens = rng.integers(EMPTY, V, (B, TREE.nodes))
    # top-k and top-p are no part of the rule.
    rows = make_rows(B, temperature, TYPICAL, top_k=1, top_p=0.1, epsilon=epsilon, delta=delta)
    verdict = judge(TREE, bare(tokens), jnp.asarray(logits), rows)
    x = logits.astype(np.float64) / temperature[:, None, None]
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    threshold = np.minimum(epsilon[:, None], delta[:, None] * np.exp(np.sum(p * np.log(p), axis=-1)))
    skipped = 0
    for b in range(B):
        options = [(0, 0.0, 0)]
        for node in range(1, TREE.nodes):
            path = path_of(TREE, node)
            its = [p[b, TREE.parent[a], tokens[b, a]] if tokens[b, a] != EMPTY else 0 for a in path]
            if all(value > threshold[b, TREE.parent[a]] for value, a in zip(its, path, strict=True)):
                options.append((len(path), float(np.sum(np.log(its))), -node))
        length, likelihood, _ = max(options)
        if sum(abs(o[1] - likelihood) < 1e-5 for o in options if o[0] == length) > 1:
            skipped += 1  # two equally likely ones: duplicates
            continue
        node = -max(options)[2]
        assert (verdict.node[b], verdict.accepted[b]) == (node, TREE.depth[node])
        assert verdict.chosen[b] == np.argmax(logits[b, node])
    assert skipped < B / 4
    assert np.bincount(verdict.accepted, minlength=3)[:3].min() > 10


def test_typical_is_strict_and_counts_likelihood():
    sure = jnp.tile(jnp.where(jnp.arange(V) == 2, 200.0, 0.0), (2, 2, 1))  # p(2) is 1, the entropy 0
    rows = make_rows(2, 1.0, TYPICAL, epsilon=jnp.array([1.0, 0.999]), delta=1.0)
    assert judge(Tree.chain(1), bare(np.array([[0, 2]] * 2)), sure, rows).accepted.tolist() == [0, 1]
    # Two paths of equal length: 0.3 * 0.9 beats 0.4 * 0.5, though 0.4 is the likelier start.
    tree = Tree.dense((2, 1))
    laws = np.full((1, 5, V), 1e-9)
    laws[0, 0, [0, 1]] = 0.4, 0.3
    laws[0, 1, 3], laws[0, 2, 4] = 0.5, 0.9
    laws[0, :, 5] = 1 - laws.sum(-1)
    tokens = np.array([[0, 0, 1, 3, 4]])
    verdict = judge(tree, bare(tokens), jnp.log(jnp.asarray(laws, jnp.float32)), make_rows(1, 1.0, TYPICAL))
    assert (int(verdict.node[0]), int(verdict.accepted[0])) == (4, 2)


@pytest.mark.parametrize("rule", [EXACT, REJECTION, TYPICAL])
def test_all_rules_are_greedy_at_temperature_zero(rule):
    rng, B = np.random.default_rng(4), 64
    logits = jnp.asarray(rng.normal(0, 1, (B, TREE.nodes, V)), jnp.float32)
    choice, tokens = np.argmax(logits, axis=-1), np.zeros((B, TREE.nodes), int)
    for b in range(B):
        for node in range(1, TREE.nodes):
            tokens[b, node] = token_near(rng, TREE, node, tokens[b], choice[b, TREE.parent[node]], 0.5)
    expected = verify.greedy(TREE, bare(tokens), logits)
    assert len(set(expected.accepted.tolist())) == 4
    for warm in (0.0, 1.0):  # a warm row in the batch takes the other branch
        got = judge(TREE, bare(tokens), logits, make_rows(B, np.where(np.arange(B) == 0, warm, 0), rule))
        for name in ("node", "accepted", "chosen"):
            np.testing.assert_array_equal(getattr(got, name)[1:], getattr(expected, name)[1:])
