"""Steps that choose what they read: what is chosen, that texts stay the same, what is foretold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_propose import B, setting
from test_replay import PROMPTS, guessing

from infer import drafting, measuring
from medusa_jax import SamplingParams, propose, selection
from medusa_jax.decode import Plan
from medusa_jax.propose import EMPTY, Layout
from medusa_jax.selection import Selection
from medusa_jax.tree import Tree

WIDE = Tree.from_paths(
    [*Tree.dense((4, 2, 2)).paths, (0,) * 4, (0,) * 5, (0, 0, 0, 1)]  # three heads; lookup goes deeper
)
RATES = {path: 0.8 ** (len(path) + sum(path)) for path in WIDE.paths}
LOOKED_UP = (0.5, 0.9)


def chosen_of(nodes, tree=WIDE):
    few = Tree.grow({path: RATES[path] for path in tree.paths}, nodes)
    return few, Selection(tree, tuple(RATES[path] for path in tree.paths), LOOKED_UP)


# ---------------------------------------------------------------------------------- what is proposed


def test_around_widens_a_tree_and_gives_lookup_its_chain():
    rates = {(0,): 0.5, (1,): 0.3, (2,): 0.2, (0, 0): 0.4, (0, 1): 0.05, (0, 0, 0): 0.04}
    made = Selection.around(Tree.grow(rates, 4), rates, (0.7,), 7)
    # Three guesses come no deeper than three.
    assert made.tree == Tree.from_paths(rates)
    assert made.rates == tuple(rates[path] for path in made.tree.paths)
    np.testing.assert_allclose(np.exp(made.log_lookup), 0.7, rtol=1e-6)  # the last rate goes on
    made = Selection.around(Tree.grow(rates, 6), rates, (0.7,), 7)
    assert set(made.tree.paths) == {*rates, *((0,) * length for length in range(1, 6))}
    assert made.log_rates[0] == 0
    assert made.log_rates[-1] == -np.inf


def test_nothing_is_chosen_where_there_is_nothing_to_choose_from():
    rates = {(0,): 0.5, (1,): 0.3}
    assert Selection.around(Tree.grow(rates, 3), rates, None, 7) is None
    assert Selection.around(Tree.grow(rates, 3), rates, (0.8,), 1) is None
    assert Selection.around(Tree.grow(rates, 2), rates, None, 7).tree == Tree.grow(rates, 3)


# ------------------------------------------------------------------------------------ what is chosen


def slow_promise(s, draft, layout, row):
    """Log probability of every node's path: of a head's guess its own, of lookup's the measured one."""
    made = [0.0]
    rates = [*LOOKED_UP, *[LOOKED_UP[-1]] * 9]
    for node in range(1, WIDE.nodes):
        token, parent = int(draft.tokens[row, node]), int(WIDE.parent[node])
        at, depth = int(layout.scores_of[parent]), int(WIDE.depth[node])
        looked_up = bool(draft.certain[row, layout.list_of[parent]]) and WIDE.rank[node] == 0
        if token == EMPTY:
            edge = -np.inf
        elif looked_up:
            edge = np.log(rates[depth - 1])
        else:
            scores = np.asarray(draft.scores[row, at], np.float64)
            place = token
            if s.params.token_map is not None:
                place = np.asarray(s.params.token_map).tolist().index(token)
            edge = scores[place] - np.log(np.exp(scores).sum())
        made.append(made[parent] + edge)
    return np.array(made)


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize(("draft", "lookup"), [(None, False), (None, True), (np.arange(0, 24, 2), True)])
@pytest.mark.parametrize("nodes", [1, 2, 6, 11])
def test_the_most_promising_nodes_are_read(conditioned, draft, lookup, nodes):
    s = setting(conditioned=conditioned, draft=draft, lookup=lookup)
    s = dataclasses.replace(s, noise=jnp.zeros_like(s.noise), scale=jnp.ones_like(s.scale))
    _, choice = chosen_of(nodes)
    layout = Layout.of(WIDE, s.config)
    arrays = (s.embedding, s.unembedding, s.hidden, s.root, s.scale, s.noise, s.found)
    drafted = jax.jit(functools.partial(propose.propose, WIDE, s.config, log_lookup=choice.log_lookup))(
        s.params, *arrays
    )
    warm = jnp.arange(B) % 2 == 1
    after, read = jax.jit(selection.read, static_argnums=(0, 2))(choice, drafted, nodes, warm)
    seen = set()
    for row in range(B):
        expected = slow_promise(s, drafted, layout, row)
        np.testing.assert_allclose(drafted.promise[row], expected, rtol=1e-4, atol=1e-5)
        if warm[row]:
            there = np.asarray(drafted.tokens[row]) != EMPTY
            expected = np.where(there, np.log([1.0, *RATES.values()]), -np.inf)
        order = np.argsort(-expected, kind="stable")[:nodes]
        own = np.asarray(read[row]).tolist()
        assert own[0] == 0
        assert set(own) == set(order.tolist())
        seen.add(tuple(sorted(own)))
        for place, node in enumerate(own):
            assert after.places(jnp.full((B,), node))[row] == place
            if node and drafted.tokens[row, node] != EMPTY:
                assert WIDE.parent[node] in own[:place]  # a tree, parents first
        rest = sorted(set(range(WIDE.nodes)) - set(own))
        assert all(token == EMPTY for token in np.asarray(after.tokens[row])[rest])
        np.testing.assert_array_equal(after.tokens[row, read[row]], drafted.tokens[row, read[row]])
    assert len(seen) > 1 or nodes < 3  # rows differ


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("lookup", [False, True])
def test_texts_are_those_of_plain_decoding(conditioned, lookup):
    lm = guessing(conditioned, 100)
    tree = WIDE if lookup else WIDE.cut(2)
    few, choice = chosen_of(5, tree)
    params = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=3),
        SamplingParams(max_new_tokens=40, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=40, temperature=0.7, top_k=20, seed=9),
    ]
    prompts = [PROMPTS[number % 2] for number in range(4)]
    found = []
    for plan in (Plan.plain(), Plan(few, lm.heads[0], lookup, choice)):
        lm.plan = plan
        for batch in (1, 3):
            jobs = [lm.job(lm.encode(p, raw=True), own) for p, own in zip(prompts, params, strict=True)]
            done = lm.complete(prompts, jobs, batch)
            found.append([one.token_ids for one in done])
    assert found[0] == found[1] == found[2] == found[3]
    guessed = sum(one.stats.new_tokens - one.stats.steps for one in done)
    assert guessed > 0
    assert all(len(one.stats.hits_by_node) == tree.nodes for one in done)
    assert all(sum(one.stats.hits_by_node[1:]) == one.stats.new_tokens - one.stats.steps for one in done)


def test_typical_texts_do_not_depend_on_their_neighbours():
    lm = guessing(True, None)
    few, choice = chosen_of(6, WIDE)
    lm.plan = Plan(few, lm.heads[0], True, choice)
    params = [
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=s, acceptance="typical") for s in range(3)
    ]
    ids = [lm.encode(PROMPTS[seed % 2], raw=True) for seed in range(3)]
    alone = []
    for text, own in zip(ids, params, strict=True):
        alone += [one.token_ids for one in lm.complete([""], [lm.job(text, own)], 1)]
    jobs = [lm.job(text, own) for text, own in zip(ids, params, strict=True)]
    assert [one.token_ids for one in lm.complete([""] * 3, jobs, 3)] == alone


# ---------------------------------------------------------------------------------- what is foretold


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize(("conditioned", "draft"), [(False, None), (True, 100)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calibration_foretells_each_step(lookup, conditioned, draft, temperature):
    lm = guessing(conditioned, draft)
    lm.use(None)
    answers, jobs = [], []
    for number, prompt in enumerate(PROMPTS):
        ids = lm.encode(prompt, raw=True)
        params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=number)
        job = lm.job(ids, params)
        lm.complete([prompt], [job], 1)
        answers.append(measuring.Answer([*ids, *job.token_ids], len(ids), number))
        jobs.append((ids, params))
    name = "both" if lookup else "heads"
    rows = measuring.ranks(lm, answers, temperature)[name]
    drafted = drafting.Drafted.along(lm, answers, rows, [3, 6], name, temperature)
    rates = measuring.rates(rows)
    looked_up = drafted.lookup_rates(rows, range(len(rows)))
    assert lookup or not looked_up
    assert looked_up or not lookup or temperature  # two sampled texts never say the same words twice
    guessed = 0
    for nodes in (3, 6):
        plan = drafted.plan(rates, looked_up, nodes)
        lm.plan = plan
        for number, (ids, params) in enumerate(jobs):
            job = lm.job(ids, params)
            lm.complete([""], [job], 1)
            assert [*ids, *job.token_ids] == answers[number].ids
            assert drafted.steps(plan, number) == len(job.accepted())
            guessed += len(job.token_ids) - len(job.accepted())
    assert guessed > 0


def test_lookup_rates_count_what_stands_where_steps_begin():
    """Ten places without a match, ten where both guesses are right, ten where the first one is."""
    right = np.ones((30, 3), bool)
    right[20:, 2] = False
    found = np.arange(30) >= 10
    own = drafting.Guesses(right, right, np.zeros((30, 3), np.float32), found)
    lm = guessing(False, None)
    drafted = drafting.Drafted(Tree.chain(2), lm.heads[0], "both", 0.0, [own])
    rows = [np.full((30, 2), 5)]  # nothing is accepted: a step at each place
    rates = drafted.lookup_rates(rows, [0])
    assert rates == pytest.approx((1.0, 0.5))
    assert dataclasses.replace(drafted, name="heads").lookup_rates(rows, [0]) == ()
