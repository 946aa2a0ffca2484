"""Medusa decoding against plain decoding: every tree, source of guesses and acceptance rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from medusa_jax import MedusaLM, SamplingParams, heads
from medusa_jax.config import MedusaConfig
from medusa_jax.tree import Tree

PROMPTS = ["Rain falls on the plain", "A leap year has one day more", "The quick brown fox " * 3, "x"]
TREES = {
    "chain": Tree.chain(3),
    "dense": Tree.dense((3, 2, 2)),
    "sparse": Tree.from_paths([(0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 0, 0)]),
}


def make_heads(base, kind, *, num_heads=3, num_layers=1, draft=None, own=False, seed=1):
    """Heads of a tiny model: "fresh" ones, or "random" ones, conditioned or not."""
    config = MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=base.config.hidden_size,
        vocab_size=base.config.vocab_size,
        conditioned="conditioned" in kind,
        own_unembedding=own,
        draft_vocab_size=draft,
    )
    table = base.params.get("lm_head", base.params["model"]["embed_tokens"])["weight"]
    token_map = None if draft is None else jnp.arange(draft, dtype=jnp.int32)[::-1] + 3
    made = heads.init(config, table, jnp.float32, token_map)
    if "fresh" not in kind:
        rng = np.random.default_rng(seed)
        layers = jax.tree.map(
            lambda leaf: leaf + jnp.asarray(rng.standard_normal(leaf.shape) * 0.2, leaf.dtype), made.layers
        )
        made = dataclasses.replace(made, layers=layers)
    return config, made


_MODELS = {}


def model(kind, tree, lookup=False, **options):
    """The tiny model with heads and a plan; made once for each combination."""
    key = (kind, tree, lookup, tuple(sorted(options.items())))
    if key not in _MODELS:
        base = tiny.lm(end_tokens=())
        made = None if kind == "none" else make_heads(base, kind, **options)
        lm = MedusaLM(base.config, base.params, base.tokenizer, {"eos_token_id": []}, heads=made)
        lm.use(TREES.get(tree, tree), lookup=lookup)
        _MODELS[key] = lm
    return _MODELS[key]


SOURCES = [
    ("fresh", "dense", False),
    ("random", "sparse", True),
    ("random conditioned", "sparse", True),
    ("random conditioned", "dense", False),
    ("none", "chain", True),
]


@pytest.mark.parametrize(("kind", "tree", "lookup"), SOURCES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, temperature=0.8, seed=5),
        SamplingParams(max_new_tokens=40, temperature=0.5, seed=9, top_p=0.9, top_k=20),
        SamplingParams(max_new_tokens=40, repetition_penalty=1.5),
        SamplingParams(max_new_tokens=40, temperature=0.6, seed=2, repetition_penalty=1.2),
    ],
)
def test_exact_gives_the_plain_text(kind, tree, lookup, params):
    plain = tiny.lm(end_tokens=())
    lm = model(kind, tree, lookup)
    expected = plain.generate(PROMPTS[:2], params, raw=True, batch_size=1)
    got = lm.generate(PROMPTS[:2], params, raw=True, batch_size=1)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    for one in got:
        assert sum(one.stats.accepted_by_depth) == one.stats.steps
        emitted = sum((d + 1) * n for d, n in enumerate(one.stats.accepted_by_depth))
        assert emitted == one.stats.new_tokens == 40
        assert not one.stats.lossy
