"""What --tree auto decodes with: by faked times, by the cache's calibrations, and in a loaded model."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tiny

from medusa_jax import MedusaLM, SamplingParams, UserError, calibration, heads, tree_choice
from medusa_jax.calibration import Calibration, Source
from medusa_jax.config import MedusaConfig
from medusa_jax.decode import Plan
from medusa_jax.tree import Tree
from medusa_jax.tree_choice import AutoTree
from medusa_jax.weights.fingerprint import fingerprint
from medusa_jax.weights.head_files import open_heads, save_heads

HEADS = MedusaConfig(2, 1, 32, 400)
RATES = {(0,): 0.5, (1,): 0.2, (0, 0): 0.3, (0, 1): 0.1, (2,): 0.05, (0, 0, 0): 0.2, (0, 0, 0, 0): 0.1}
GAINS = {1: 1.0, 2: 1.5, 4: 1.9, 8: 2.2}
BOTH = {"both": Source(RATES, GAINS), "heads": Source({(0,): 0.4, (0, 0): 0.2}, {1: 1.0, 2: 1.4})}
# Relative to a plain step of one row; the more rows, the more a node costs.
TIMES = {
    1: {1: 1.0, 2: 1.02, 4: 1.1, 8: 1.2},
    4: {1: 1.1, 2: 1.2, 4: 1.4, 8: 2.0},
    16: {1: 2.0, 2: 2.5, 4: 4.5},
    64: {1: 6.0, 2: 8.8, 4: 20.0},
}


def timed(**fields):
    return Calibration("both", BOTH, {"cpu": TIMES}, device="cpu", **fields)


def auto(**fields):
    given = {"heads": HEADS, "lookup": None, "device": "cpu", "accelerator": False}
    return AutoTree(**(given | fields))


@pytest.mark.parametrize(
    ("batch", "nodes"),
    # A batch takes the times of the next measured one above, at most twice as large.
    [(1, 8), (2, 4), (3, 4), (4, 4), (8, 2), (12, 2), (16, 2), (33, 1), (64, 1)],
)
def test_the_size_follows_from_gain_and_cost_at_each_batch(batch, nodes):
    found = auto(remembered=(timed(),)).choose(batch)
    assert found.plan.tree == Tree.grow(RATES, nodes)
    # 64 rows: 1.5 / 8.8 is 2 % above 1 / 6, less than a tree has to promise.
    assert found.note == (
        f"batch {batch}: on this device no tree pays, as calibrated; decoding plainly" if nodes == 1 else None
    )
    if nodes == 1:
        assert found.plan == Plan.plain()


def test_a_batch_that_was_not_timed_goes_by_the_next_source_or_the_assumed_size():
    chain = Calibration("both", {"both": Source({(0,): 0.9, (0, 0): 0.8})}, {"cpu": {8: {1: 1.0, 3: 1.1}}})
    few = dataclasses.replace(timed(), step_seconds={"cpu": {1: TIMES[1]}})
    choose = auto(remembered=(few,), shipped=chain).choose
    assert choose(1).plan.tree.nodes == 8
    assert choose(8).plan.tree == Tree.chain(2)
    assert choose(4).plan.tree == Tree.chain(2)
    assert choose(2).plan.tree == Tree.grow(RATES, 4)  # as ASSUMED, in the form of the first one
    assert choose(256).plan == Plan.plain()
    assert "expected to pay" in (choose(256).note or "")


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [(True, {1: 64, 2: 64, 4: 32, 8: 16, 16: 16, 32: 8, 1000: 8}), (False, {1: 8, 2: 4, 4: 4, 8: 1, 64: 1})],
)
def test_sizes_without_any_times(accelerator, expected):
    four = dataclasses.replace(HEADS, num_heads=4)
    choose = auto(heads=four, accelerator=accelerator, device="other").choose
    assert {batch: choose(batch).plan.tree.nodes for batch in expected} == expected
    assert choose(1).plan.lookup
    assert choose(1).plan.heads == four


def test_times_of_another_device_do_not_count():
    assert auto(remembered=(timed(),), device="cpu bfloat16").choose(64).note is not None
    assert auto(remembered=(timed(),), device="TPU v4", accelerator=True).choose(64).plan.tree.nodes == 8


def test_the_nearest_temperature_of_the_same_kind_counts():
    def of(temperature, path):
        return Calibration(
            "both", {"both": Source({path: 0.9})}, {"cpu": {1: {1: 1.0, 2: 1.0}}}, temperature=temperature
        )

    kept = (of(0.0, (0,)), of(0.1, (1,)), of(1.0, (2,)))
    choose = auto(remembered=kept).choose
    assert [choose(1, t).plan.tree.paths[0][0] for t in (0.0, 0.04, 0.3, 0.8, 2.0)] == [0, 1, 1, 2, 2]
    assert auto(remembered=kept[1:]).choose(1, 0.0).plan.tree.paths == ((1,),)  # better than none


def test_lookup_follows_the_calibration_unless_it_is_given():
    kept = (timed(),)
    assert auto(remembered=kept).choose(1).plan.lookup
    alone = dataclasses.replace(timed(), source="heads")
    plan = auto(remembered=(alone,)).choose(1).plan
    assert (plan.lookup, plan.heads) == (False, HEADS)
    assert plan.tree == Tree.chain(2)  # all there is; 1.6 tokens at the cost of 4 nodes are the best of them
    assert auto(remembered=(alone,), lookup=True).choose(1).plan.tree == Tree.grow(RATES, 8)
    assert not auto(remembered=kept, lookup=False).choose(1).plan.lookup
    # Where only rates of both together are known, heads alone get them as deep as they reach.
    only = dataclasses.replace(timed(), sources={"both": BOTH["both"]})
    assert auto(remembered=(only,), lookup=False).choose(1).plan.tree == Tree.grow(RATES, 8).cut(2)


def test_without_heads_lookup_is_on_where_a_step_of_eight_nodes_costs_one():
    assert auto(heads=None, accelerator=True).choose(1).plan == Plan(Tree.chain(7), None, True)
    assert auto(heads=None).choose(1) == tree_choice.Choice(Plan.plain())
    assert auto(heads=None, lookup=True).choose(1).plan == Plan(Tree.chain(7), None, True)
    assert auto(heads=None, lookup=False, accelerator=True).choose(1).plan == Plan.plain()
    kept = Calibration("lookup", {"lookup": Source({(0,): 0.4, (0, 0): 0.3})}, {"cpu": {1: {1: 1.0, 3: 1.1}}})
    assert auto(heads=None, remembered=(kept,)).choose(1).plan == Plan(Tree.chain(2), None, True)
    assert auto(heads=None, remembered=(kept,)).choose(8).plan == Plan.plain()


# ------------------------------------------------------------------------------------ the user's cache


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choice")
    lm = tiny.lm()
    model = tiny.write_folder(folder / "model", lm)
    other = tiny.write_folder(folder / "other", tiny.lm(1))
    config = MedusaConfig(2, 1, 32, lm.config.vocab_size)
    made = heads.init(config, lm.params["lm_head"]["weight"], np.float32)
    save_heads(folder / "heads", config, made.layers)
    layers = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.01, made.layers)
    save_heads(folder / "trained", config, layers)
    return model, other, folder / "heads", folder / "trained"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trees"


def kept(files, **changed):
    """A calibration as `infer.calibrate` writes it."""
    tree = Tree.grow(RATES, 5)
    measured = {
        "paths": [list(path) for path in tree.paths],
        "hit_rates": [RATES[path] for path in tree.paths],
        "tokens_per_step": {"1": 1.0, "4": 1.9},
    }
    return {
        "format": "medusa-jax-tree",
        "paths": [],
        "hit_rates": [],
        "source": "both",
        "sources": {"both": measured},
        "step_seconds": {"cpu": {"1": {"1": 1.0, "4": 1.2}, "2": {"1": 1.0, "4": 2.5}}},
        "temperature": 0.0,
        "device": "cpu",
        "model_fingerprint": fingerprint(tiny.lm().params),
        "heads_fingerprint": calibration.heads_fingerprint(open_heads(files[2])),
    } | changed


def remember(result):
    path = calibration.place(result)
    calibration.write(path, result)
    return path


def test_a_calibration_in_the_cache_is_found_and_decodes(files):
    remember(kept(files))
    lm = MedusaLM.load(files[0], heads=files[2])
    assert lm.plan.tree == Tree.grow(RATES, 4)
    assert lm.plan_for(2) == Plan.plain()
    assert lm.warnings == ["batch 2: on this device no tree pays, as calibrated; decoding plainly"]
    prompts, params = ["What is rain?", "Who is the fox?"], SamplingParams(max_new_tokens=8)
    auto = lm.generate(prompts, params, batch_size=2)
    compiled = set(lm.programs.compiled)
    assert ("run", 2, 128, Plan.plain()) in compiled
    # It is the very program of plain decoding: that compiles nothing more.
    lm.use(None)
    plain = lm.generate(prompts, params, batch_size=2)
    assert set(lm.programs.compiled) == compiled
    assert [one.token_ids for one in auto] == [one.token_ids for one in plain]
    lm.use("auto")
    assert lm.plan.tree == Tree.grow(RATES, 4)
    (single,) = lm.generate(prompts[:1], params)
    assert len(single.stats.hits_by_node) == lm.plan.proposed.nodes > 4
    assert single.token_ids == plain[0].token_ids
    assert "".join(lm.stream(prompts[0], params)) == single.text


@pytest.mark.parametrize(
    ("which", "changed"),
    [
        ((1, 2), {}),  # another model
        ((0, 3), {}),  # other heads, or trained further
        ((0, None), {}),
        ((0, 2), {"heads_fingerprint": None}),
        ((0, 2), {"device": "TPU v4"}),
        ((0, 2), {"device": "cpu bfloat16"}),
        ((0, 2), {"model_fingerprint": None}),
    ],
)
def test_a_calibration_of_anything_else_is_not_taken(files, which, changed):
    remember(kept(files, **changed))
    model, own = (None if i is None else files[i] for i in which)
    lm = MedusaLM.load(model, heads=own)
    assert lm.warnings == []
    assert lm.plan.tree == (
        Tree.single() if own is None else Tree.grow(tree_choice.assumed(HEADS).sources["both"].rates, 8)
    )


def test_the_newest_counts_and_others_stay(files):
    path = remember(kept(files))
    os.utime(path, (1, 1))
    second = kept(files, temperature=0.7)
    second["sources"]["both"]["tokens_per_step"] = {"1": 1.0, "4": 1.0}
    assert remember(second) != path
    lm = MedusaLM.load(files[0], heads=files[2])
    assert lm.plan_for(1).tree.nodes == 4
    assert lm.plan_for(1, 0.7) == Plan.plain()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[[0], [0, 0, 0]]", "without its parent"),
        ({"sources": {"both": {"paths": [[0]], "hit_rates": [2]}}}, "expected 0 to 1"),
        ({"sources": {"both": 3}}, "expected an object, found int"),
        ({"sources": {"heads": {"paths": [], "hit_rates": []}}}, "\"source\" is 'both'"),
        ({"step_seconds": {"cpu": {"1": {"4": 1.0}}}}, "without the time of plain decoding"),
        ({"step_seconds": {"cpu": {"1": {"1": -1.0}}}}, "expected numbers above 0"),
        ({"step_seconds": {"cpu": {"one": {"1": 1.0}}}}, "not a number from 1 on"),
        ({"step_seconds": 7}, "expected an object, found int"),
        ({"temperature": "hot"}, "\"temperature\" is 'hot'"),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_note(files, content, message):
    good = kept(files)
    path = calibration.place(good)
    path.parent.mkdir(parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(good | content))
    lm = MedusaLM.load(files[0], heads=files[2])
    assert lm.plan.tree.nodes == 8
    (line,) = lm.warnings
    assert line.startswith(f"{path}: ")
    assert message in line
    assert line.endswith("; this calibration is ignored")


def test_a_damaged_file_beside_the_heads_is_an_error(files, tmp_path):
    beside = tmp_path / "heads"
    beside.mkdir()
    for part in files[2].iterdir():
        (beside / part.name).write_bytes(part.read_bytes())
    (beside / "tree.json").write_text(json.dumps(kept(files) | {"step_seconds": 7}))
    with pytest.raises(UserError, match="step_seconds: expected an object"):
        MedusaLM.load(files[0], heads=beside)
    (beside / "tree.json").write_text(json.dumps(kept(files)))
    lm = MedusaLM.load(files[0], heads=beside)
    assert (lm.plan.tree, lm.plan_for(2)) == (Tree.grow(RATES, 4), Plan.plain())
    (beside / "tree.json").write_text("[[0], [1]]")  # a tree without rates holds for every batch
    lm = MedusaLM.load(files[0], heads=beside)
    assert lm.plan_for(1) == lm.plan_for(64)
    assert lm.plan.tree.paths == ((0,), (1,))


def test_a_tree_by_hand_is_the_same_for_every_batch(files):
    remember(kept(files))
    lm = MedusaLM.load(files[0], heads=files[2], tree="2x1")
    assert lm.plan_for(1) == lm.plan_for(64) == lm.plan
    assert lm.plan.tree == Tree.dense((2, 1))
    with pytest.raises(UserError, match="loaded with it"):
        lm.use("auto")


def test_the_fingerprint_of_heads_is_that_of_their_values(files, tmp_path):
    opened = open_heads(files[2])
    layers, _ = opened.read(np.float32)
    assert calibration.heads_fingerprint(opened) != calibration.heads_fingerprint(open_heads(files[3]))
    rounded = {name: value.astype(jax.numpy.bfloat16) for name, value in layers.items()}
    save_heads(tmp_path / "rounded", opened.config, rounded)
    again = open_heads(tmp_path / "rounded")
    assert again.dtype != opened.dtype
    assert calibration.heads_fingerprint(again) == calibration.heads_fingerprint(opened)


def test_times_of_other_batches_and_devices_are_kept(files, tmp_path):
    path = tmp_path / "tree.json"
    result = kept(files)
    assert calibration.earlier_times(result, path) == {}
    calibration.write(path, result)
    assert calibration.earlier_times(kept(files, device="TPU v4"), path) == result["step_seconds"]
    for changed in ({"heads_fingerprint": "x"}, {"source": "heads"}, {"temperature": 1.0}):
        assert calibration.earlier_times(kept(files) | changed, path) == {}
    other = fingerprint(tiny.lm(1).params)
    assert calibration.earlier_times(kept(files, model_fingerprint=other), path) == {}
