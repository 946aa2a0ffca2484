"""Ranks along a known text say what decoding it accepts: any tree, both kinds of heads, lookup, sampling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from medusa_jax import MedusaLM, SamplingParams, heads, replay
from medusa_jax.config import MedusaConfig
from medusa_jax.tree import Tree

PROMPTS = ["What is rain?", "the dog and the dog and the"]
TREES = [
    Tree.chain(2),
    Tree.dense((24, 2)),  # untrained heads hit that one now and then
    Tree.dense((3, 2)),
    Tree.grow({(0,): 0.5, (1,): 0.3, (0, 0): 0.3, (1, 0): 0.2, (2,): 0.2}, 6),
]


def guessing(conditioned, draft, scale=0.3):
    plain = tiny.lm()
    config = MedusaConfig(2, 1, 32, plain.config.vocab_size, conditioned, False, draft)
    table = plain.params["lm_head"]["weight"]
    kept = None if draft is None else jnp.arange(0, draft * 2, 2, dtype=jnp.int32)
    made = heads.init(config, table, jnp.float32, kept)
    keys = iter(jax.random.split(jax.random.key(7), 20))
    layers = jax.tree.map(lambda a: scale * jax.random.normal(next(keys), a.shape), made.layers)
    made = dataclasses.replace(made, layers=layers)
    return MedusaLM(plain.config, plain.params, plain.tokenizer, {"eos_token_id": [2]}, heads=(config, made))


def measured(lm, ids, start, seed, temperature, lookup):
    config, made = lm.heads
    padded = np.zeros((-(-len(ids) // 64) * 64,), np.int32)
    padded[: len(ids)] = ids
    program = lm.programs.replay(len(padded), config, 3)
    true, looked, found = map(
        np.array, program(lm.params, made, padded, np.uint32(seed), np.float32(temperature))
    )
    n = len(ids)
    parts = (true[:n], looked[:n], found[:n]) if lookup else (true[:n], None, None)
    return replay.combined_ranks(padded[:n], *parts, 3 if lookup else 2)[start - 1 : n - 1]


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize(("conditioned", "draft"), [(False, None), (True, 100)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_accepts_what_decoding_does(lookup, conditioned, draft, temperature):
    lm = guessing(conditioned, draft)
    seen = 0
    for tree in TREES:
        lm.use(tree, lookup=lookup)
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=number)
            ids = lm.encode(prompt, raw=True)
            job = lm.job(ids, params)
            lm.complete([prompt], [job], 1)
            ranks = measured(lm, [*ids, *job.token_ids], len(ids), number, temperature, lookup)
            assert replay.accepted(tree, ranks) == [guesses for _, guesses in job.accepted()]
            seen += sum(guesses for _, guesses in job.accepted())
    assert seen > 2


def test_rates_are_joint_and_grow_the_best_tree():
    rows = np.array([[0, 0], [0, 1], [1, 0], [replay.MISS, 0], [0, replay.MISS]])
    rates = replay.hit_rates([rows])
    assert rates == {(0,): 0.6, (0, 0): 0.2, (0, 1): 0.2, (1,): 0.2, (1, 0): 0.2}
    tree = Tree.grow(rates, 3)
    assert replay.expected(tree, rates) == pytest.approx(1.8)


def test_steps_of_a_tree_over_ranks():
    tree = Tree.from_paths([(0,), (0, 0)])
    rows = np.array([[0, 0], [5, 0], [9, 9], [0, 1], [0, 0], [0, 0]])
    # The last step has one token to go: what lies behind the text is not accepted.
    assert replay.accepted(tree, rows) == [2, 1, 0]
    assert replay.accepted(Tree.single(), rows) == [0] * 6
