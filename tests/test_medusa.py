"""Medusa decoding against plain decoding: every tree, source of guesses and acceptance rule."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from medusa_jax import MedusaLM, SamplingParams, heads
from medusa_jax.config import MedusaConfig
from medusa_jax.tree import Tree
from medusa_jax.weights import head_files

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


@pytest.mark.parametrize(
    ("kind", "options"),
    [("random", {"draft": 96}), ("random conditioned", {}), ("random", {"own": True, "num_layers": 2})],
)
@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2"])
def test_heads_from_files_give_the_plain_text(tmp_path, kind, options, mesh):
    """Saved, loaded with the model, on one device and on a mesh."""
    base = tiny.lm(end_tokens=())
    folder = tiny.write_folder(tmp_path / "model", base, {"eos_token_id": []})
    config, made = make_heads(base, kind, **options)
    token_map = None if made.token_map is None else np.asarray(made.token_map)
    layers = jax.tree.map(np.asarray, made.layers)
    head_files.save_heads(tmp_path / "heads", config, layers, token_map)
    lm = MedusaLM.load(folder, heads=tmp_path / "heads", tree="2x2x1", dtype="float32", mesh=mesh)
    assert lm.plan.heads == config
    assert lm.plan.lookup
    for params in (SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=0.9)):
        expected = base.generate(PROMPTS, params, raw=True, batch_size=2)
        got = lm.generate(PROMPTS, params, raw=True, batch_size=2)
        assert [one.token_ids[:20] for one in got] == [one.token_ids for one in expected]


def test_rows_of_a_medusa_batch_equal_their_single_runs():
    """Rows accept different counts, end at different times and are refilled; rules and limits are mixed."""
    lm = model("random", "sparse", True)
    params = [
        SamplingParams(max_new_tokens=25),
        SamplingParams(max_new_tokens=7, temperature=0.9, seed=4),
        SamplingParams(max_new_tokens=31, temperature=0.8, seed=5, acceptance="rejection"),
        SamplingParams(max_new_tokens=18, temperature=0.7, seed=6, acceptance="typical"),
    ]
    single = [lm.generate([p], own, raw=True)[0] for p, own in zip(PROMPTS, params, strict=True)]
    for batch_size in (2, 3, 4):
        together = lm.generate(PROMPTS, params, raw=True, batch_size=batch_size)
        assert [one.token_ids for one in together] == [one.token_ids for one in single]
        assert [one.stats.accepted_by_depth for one in together] == [
            one.stats.accepted_by_depth for one in single
        ]
    assert [one.stats.lossy for one in single] == [False, False, False, True]
    assert [len(one.token_ids) for one in single] == [25, 7, 31, 18]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 11])
def test_limits_cut_an_accepted_path_exactly(limit):
    """A text that repeats itself is guessed whole; the limit falls inside accepted paths."""
    lm = model("none", "chain", True)
    prompt = "Rain Rain Rain Rain Rain Rain"
    params = SamplingParams(max_new_tokens=limit, repetition_penalty=0.3)
    (got,) = lm.generate([prompt], params, raw=True)
    (plain,) = tiny.lm(end_tokens=()).generate([prompt], params, raw=True)
    assert got.token_ids == plain.token_ids
    assert len(got.token_ids) == limit
    if limit == 11:
        assert got.stats.steps < 8  # or nothing was accepted, and the test would show little


@pytest.mark.parametrize("which", range(2, 9))
def test_an_end_token_or_stop_string_inside_an_accepted_path_ends_there(which):
    lm = copy.copy(model("none", "chain", True))
    prompt = "Rain Rain Rain Rain Rain Rain"
    params = SamplingParams(max_new_tokens=12, repetition_penalty=0.3)
    (full,) = lm.generate([prompt], params, raw=True)
    lm.end_tokens = (full.token_ids[which],)
    (ended,) = lm.generate([prompt], params, raw=True)
    cut = full.token_ids.index(full.token_ids[which]) + 1
    assert (ended.token_ids, ended.finish_reason) == (full.token_ids[:cut], "stop")
    lm.end_tokens = ()
    stop = full.text[: which + 1]
    (stopped,) = lm.generate([prompt], dataclasses.replace(params, stop=(stop,)), raw=True)
    assert stopped.text == ""
    assert "".join(lm.stream(prompt, dataclasses.replace(params, stop=(stop,)), raw=True)) == ""
    assert sum(stopped.stats.accepted_by_depth) == stopped.stats.steps
