"""Candidates against slow references: ranking, lookup, and how a tree is filled from both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax import heads, propose
from medusa_jax.config import MedusaConfig
from medusa_jax.propose import EMPTY, Layout
from medusa_jax.sampling import SMALL
from medusa_jax.tree import Tree

# ------------------------------------------------------------------------------------------- ranking


@pytest.mark.parametrize("k", [1, 2, 12])
@pytest.mark.parametrize(
    "size",
    [1, 5, 12, 1000, SMALL, SMALL + 1, SMALL + 15, SMALL + 16, 5000, 8192, 49152],
)
def test_top_k_equals_sorting(size, k):
    rng = np.random.default_rng(size)
    scores = rng.standard_normal((8, size)).astype(np.float32)
    scores[1] = np.sort(scores[1])  # the largest stand together
    scores[2] = np.sort(scores[2])[::-1]
    scores[3] = rng.integers(0, 3, size)  # ties
    scores[4] = 0
    scores[5, rng.random(size) < 0.9] = -np.inf
    scores[6] = -np.inf
    scores[6, -1] = 1  # the rest of its block is padding, which is -inf too
    scores[7] = -np.inf
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    values, got = jax.jit(propose.top_k, static_argnums=1)(scores.reshape(2, 4, size), k)
    np.testing.assert_array_equal(got.reshape(8, -1), expected)
    np.testing.assert_array_equal(values.reshape(8, -1), np.take_along_axis(scores, expected, axis=-1))


def put_first_slowly(entries, first):
    """The list with `first` at its head, as long as before."""
    if first == EMPTY:
        return entries
    return [first, *(entry for entry in entries if entry != first)][: len(entries)]


jit_put_first = jax.jit(propose.put_first)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.lists(st.integers(0, 6), max_size=4, unique=True), st.integers(EMPTY, 6))
def test_put_first_moves_or_puts(entries, first):
    entries = entries + [EMPTY] * (4 - len(entries))
    got, _ = jit_put_first(jnp.array([[entries]]), jnp.array([[first]]))
    assert got[0, 0].tolist() == put_first_slowly(entries, first)


# -------------------------------------------------------------------------------------------- lookup

SLOTS, LENGTH = 16, 6


def lookup_slowly(text, length):
    """The continuation of the longest, then latest, earlier place where the text's end stands."""
    for size in (5, 4, 3, 2):
        for end in range(len(text) - 1, size - 1, -1):  # an earlier place ends before the text does
            if size <= len(text) and text[end - size : end] == text[-size:]:
                return [text[end:][i % len(text[end:])] for i in range(length)]
    return [EMPTY] * length


jit_lookup = jax.jit(functools.partial(propose.lookup, length=LENGTH))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.lists(st.integers(0, 1), max_size=SLOTS) | st.lists(st.integers(0, 3), max_size=SLOTS),
    st.integers(0, 3),
)
def test_lookup_equals_searching(text, behind):
    slots = text + [behind] * (SLOTS - len(text))
    found = jit_lookup(jnp.array([slots], jnp.int32), jnp.array([len(text)], jnp.int32))
    assert found[0].tolist() == lookup_slowly(text, LENGTH)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], [EMPTY] * 6),
        ([1], [EMPTY] * 6),
        ([1, 1], [EMPTY] * 6),
        ([1, 1, 1], [1] * 6),
        ([1, 2, 3, 4, 5], [EMPTY] * 6),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2]),  # goes round
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4, 1, 2]),  # the latest
        ([9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], [3, 5, 1, 2, 4, 9]),  # the longest, though not the latest
        ([0, 0, 7, 0, 0], [7, 0, 0, 7, 0, 0]),  # token 0 is a token
        ([1, 2, *range(5, 17), 1, 2], [5, 6, 7, 8, 9, 10]),  # all slots are text
    ],
)
def test_lookup_examples(text, expected):
    slots = jnp.array([text + [0] * (SLOTS - len(text))], jnp.int32)
    assert jit_lookup(slots, jnp.array([len(text)], jnp.int32))[0].tolist() == expected
    assert lookup_slowly(text, 6) == expected


# ------------------------------------------------------------------------------------- whole drafts

V, D, B = 30, 8, 6
TREES = {
    "single": Tree.single(),
    "chain": Tree.chain(5),
    "dense": Tree.dense((3, 2, 2)),
    "sparse": Tree.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (4, 1), (0, 0, 0), (0, 0, 0, 1)]),
    "off spine": Tree.from_paths([(1,), (2,), (1, 0), (1, 0, 0)]),
}
DRAFT = np.array([29, 3, 17, 8, 0, 11, 4, 25], np.int32)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything that `propose` reads, with random numbers in it."""

    config: MedusaConfig | None
    params: heads.HeadParams | None
    embedding: jax.Array
    unembedding: jax.Array
    hidden: jax.Array
    root: jax.Array
    scale: jax.Array
    noise: jax.Array
    found: jax.Array

    def draft(self, tree):
        arrays = [getattr(self, name) for name in NAMES]
        return program(tree, self.config)(self.params, *arrays)


@functools.cache
def program(tree, config):
    return jax.jit(functools.partial(propose.propose, tree, config))


NAMES = ("embedding", "unembedding", "hidden", "root", "scale", "noise", "found")


def setting(num_heads=3, *, conditioned=False, own=False, draft=None, lookup=False, fresh=False, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    embedding, unembedding = normal(V, D), normal(V, D)
    config = params = None
    if num_heads:
        size = None if draft is None else len(draft)
        config = MedusaConfig(num_heads, 1, D, V, conditioned, own, size)
        params = heads.init(config, unembedding, "float32", None if draft is None else jnp.asarray(draft))
        if not fresh:
            noisy = jax.tree.map(lambda x: x + 0.5 * normal(*x.shape), params.layers)
            params = dataclasses.replace(params, layers=noisy)
    found = jnp.asarray(rng.integers(0, V, (B, 8)), jnp.int32)
    found = jnp.where((jnp.arange(B) % 3 == 2)[:, None] | (not lookup), EMPTY, found)
    warm = jnp.arange(B) % 2
    noise = jnp.asarray(rng.gumbel(size=(B, num_heads, config.scored if config else 1)), jnp.float32)
    return Setting(
        config=config,
        params=params,
        embedding=embedding,
        unembedding=unembedding,
        hidden=normal(B, D),
        root=jnp.asarray(rng.integers(0, V, B), jnp.int32),
        scale=1 + 0.5 * warm.astype(jnp.float32),
        noise=noise * warm[:, None, None],
        found=found,
    )


def slow_scores(s, depth, row, path):
    """log q [V'] of the head of this depth after the tokens of a path (the root first)."""
    at = jnp.stack([s.embedding[max(token, 0)] for token in path])
    z = heads.state(s.params, s.config, s.hidden[row], depth, at)
    return np.asarray(heads.logits(s.params, s.config, z, depth, s.unembedding) * s.scale[row])


def slow_list(s, scores, depth, row, on_spine, width):
    """The ranked list of a node's children."""
    entries = []
    if scores is not None:
        order = np.argsort(-(scores + np.asarray(s.noise[row, depth])), kind="stable")
        entries = [int(i) if s.params.token_map is None else int(s.params.token_map[i]) for i in order]
    entries = entries[:width] + [EMPTY] * (width - len(entries))
    return put_first_slowly(entries, int(s.found[row, depth]) if on_spine else EMPTY)


SETTINGS = [
    ("chain", {"num_heads": 0, "lookup": True}),
    ("sparse", {"num_heads": 0}),
    ("single", {}),
    ("chain", {}),
    ("dense", {"lookup": True}),
    ("dense", {"num_heads": 2, "own": True}),
    ("sparse", {"draft": DRAFT, "lookup": True}),
    ("sparse", {"conditioned": True, "lookup": True}),
    ("sparse", {"conditioned": True, "draft": DRAFT[:3], "lookup": True}),  # lists are longer than that
    ("dense", {"conditioned": True, "own": True, "draft": DRAFT}),
    ("off spine", {"conditioned": True, "lookup": True}),
]


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_a_draft_equals_the_reference(name, options):
    tree, s = TREES[name], setting(**options)
    draft, layout = jax.device_get(s.draft(tree)), Layout.of(tree, s.config)
    inner = sorted(set(tree.parent[1:].tolist()))
    num_heads = s.config.num_heads if s.config else 0
    for row in range(B):
        assert draft.tokens[row, 0] == s.root[row]
        for node in inner:
            above = [int(a) for a in np.flatnonzero(tree.ancestors[node])]
            depth = int(tree.depth[node])
            path = [int(draft.tokens[row, a]) for a in above]
            scores = slow_scores(s, depth, row, path) if depth < num_heads else None
            on_spine = above == tree.spine[: depth + 1].tolist()
            at = layout.list_of[node]
            if scores is None:
                assert layout.scores_of[node] == -1
            else:
                np.testing.assert_allclose(
                    draft.scores[row, layout.scores_of[node]], scores, rtol=1e-4, atol=1e-4
                )
            expected = slow_list(s, scores, depth, row, on_spine, tree.width)
            if min(path) >= 0:
                assert draft.lists[row, at].tolist() == expected
            found = on_spine and int(s.found[row, depth]) != EMPTY
            assert bool(draft.certain[row, at]) == found
            for rank, child in enumerate(tree.children[node]):
                if child >= 0:
                    assert draft.tokens[row, child] == draft.lists[row, at, rank]


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_siblings_differ_and_tokens_exist(name, options):
    tree, s = TREES[name], setting(**options, seed=1)
    draft = jax.device_get(s.draft(tree))
    allowed = set(range(V)) if s.params is None or s.params.token_map is None else set(DRAFT.tolist())
    for row in range(B):
        looked_up = {int(token) for token in s.found[row]} - {EMPTY}
        for entries in draft.lists[row]:
            real = [int(entry) for entry in entries if entry != EMPTY]
            assert len(set(real)) == len(real)
            assert set(real) <= allowed | looked_up
            assert EMPTY not in entries[: len(real)]  # all of it at the end
        assert set(draft.tokens[row, 1:].tolist()) <= allowed | looked_up | {EMPTY}


def test_lookup_runs_down_the_spine():
    s = setting(lookup=True, num_heads=2)
    tree = TREES["chain"]
    draft = jax.device_get(s.draft(tree))
    for row in range(B):
        found = s.found[row, : tree.max_depth].tolist()
        if found[0] != EMPTY:
            assert draft.tokens[row, 1:].tolist() == found  # below the heads too
        else:
            assert draft.tokens[row, 1:3].min() >= 0
            assert draft.tokens[row, 3:].tolist() == [EMPTY] * 3  # neither heads nor a match


def test_lookup_does_not_repeat_what_the_heads_say():
    plain = setting()
    tree = Tree.dense((4,))
    heads_say = np.asarray(plain.draft(tree).tokens[:, 1:])
    for place in range(4):
        found = plain.found.at[:, 0].set(heads_say[:, place])
        got = np.asarray(dataclasses.replace(plain, found=found).draft(tree).tokens[:, 1:])
        expected = np.concatenate([heads_say[:, [place]], np.delete(heads_say, place, axis=1)], axis=1)
        np.testing.assert_array_equal(got, expected)


def test_only_conditioned_lists_depend_on_the_parent():
    tree = Tree.dense((3, 3))
    for conditioned in (False, True):
        s = setting(conditioned=conditioned)
        other = dataclasses.replace(s, root=(s.root + 1) % V)
        lists, moved = s.draft(tree).lists, other.draft(tree).lists
        second = np.asarray(lists[:, 1:4])  # those of the root's three children
        assert np.any(second != second[:, :1]) == conditioned
        assert np.any(np.asarray(lists) != np.asarray(moved)) == conditioned


def test_fresh_heads_propose_what_the_model_itself_would():
    tree = Tree.dense((4, 2, 3))
    for options in ({}, {"own": True}, {"conditioned": True}):
        s = setting(fresh=True, **options)
        base = np.asarray(s.hidden @ s.unembedding.T) * np.asarray(s.scale)[:, None]
        draft, layout = s.draft(tree), Layout.of(tree, s.config)
        for node in sorted(set(tree.parent[1:].tolist())):
            order = np.argsort(-(base + np.asarray(s.noise[:, tree.depth[node]])), axis=-1)[:, :4]
            np.testing.assert_array_equal(draft.lists[:, layout.list_of[node]], order)


def test_rows_do_not_see_each_other():
    tree, s = TREES["sparse"], setting(conditioned=True, lookup=True)
    whole = s.draft(tree)
    for row in range(B):
        one = {
            name: getattr(s, name)[row : row + 1] for name in ("hidden", "root", "scale", "noise", "found")
        }
        alone = dataclasses.replace(s, **one).draft(tree)
        np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row])
        np.testing.assert_array_equal(alone.lists[0], whole.lists[row])
