"""infer.calibrate: the tree it finds where it is known, what it writes, its resumption, what it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from matplotlib.image import imread

from infer import calibrate, measuring, timing
from medusa_jax import MedusaLM, SamplingParams, UserError, calibration, heads, replay
from medusa_jax import text as text_module
from medusa_jax.config import MedusaConfig
from medusa_jax.decode import Plan
from medusa_jax.selection import WIDER
from medusa_jax.tree import Tree, load_tree
from medusa_jax.tree_choice import MARGIN
from medusa_jax.weights.head_files import save_heads


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    lm = tiny.lm()
    model = tiny.write_folder(folder / "model", lm)
    config = MedusaConfig(2, 1, 32, lm.config.vocab_size)
    made = heads.init(config, lm.params["lm_head"]["weight"], np.float32)
    save_heads(folder / "heads", config, made.layers)
    prompts = folder / "prompts.jsonl"
    lines = ["What is rain?", "Who is the fox?", "the dog and the dog and the dog", "How are you?"]
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return model, folder / "heads", prompts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trees"


@pytest.fixture
def times(monkeypatch):
    """A step costs as much as the table says, by batch and nodes; the sides timed are noted."""
    table, timed = {1: {}, 4: {}}, []

    def alternate(sides, rounds):
        found = {}
        for name, work in sides.items():
            side = work if isinstance(work, timing.Decoding) else None
            if side is not None:
                timed.append((side._batch, side._engine.plan.tree.nodes))
            batch, nodes = timed[-1] if side is not None else (timed[-1][0], int(name))
            found[name] = table[batch].get(nodes, 1.0) * (measuring.STEPS if side is None else 1)
        return found

    monkeypatch.setattr(timing, "alternate", alternate)
    return table, timed


def flags(files, output, *more):
    model, made, prompts = map(str, files)
    given = ["--model", model, "--heads", made, "--prompts", prompts, "--output", str(output)]
    return [*given, "--max-new-tokens", "24", "--sizes", "1", "4", "8", *more]


# ----------------------------------------------------------------------- where the best tree is known

CYCLE, FIRST, FILLERS = 120, 100, range(300, 306)
# Ranks of the true tokens in the lists of two heads, a tenth of all places each; 6 is not in the lists.
KNOWN = [(0, 0), (0, 0), (0, 0), (0, 1), (0, 6), (1, 0), (1, 0), (1, 2), (2, 6), (6, 6)]


@pytest.fixture(scope="module")
def known():
    """A model that counts round a cycle of tokens, and heads that list the true ones at ranks we set."""
    random = np.random.default_rng(0)
    pattern = np.array(KNOWN * (CYCLE // len(KNOWN)))
    random.shuffle(pattern)
    base = tiny.lm(hidden_size=128, num_hidden_layers=1, end_tokens=())
    V, at = base.config.vocab_size, np.arange(CYCLE)
    embedding, table = np.zeros((2, V, 128), np.float32)
    own = np.zeros((2, V, 128), np.float32)
    embedding[FIRST + at, at] = 1
    table[FIRST + (at + 1) % CYCLE, at] = 1
    for m in range(2):
        for place, rank in enumerate(pattern[:, m]):
            own[m, list(FILLERS), place] = np.arange(6, 0, -1)
            own[m, FIRST + (place + 2 + m) % CYCLE, place] = 6.5 - rank
    params = {"model": dict(base.params["model"]), "lm_head": {"weight": np.asarray(table)}}
    silent = jax.tree.map(np.zeros_like, params["model"]["layers_0"])  # the hidden state is the embedding's
    params["model"]["layers_0"] = silent
    params["model"]["embed_tokens"] = {"weight": embedding}
    config = MedusaConfig(2, 1, 128, V, own_unembedding=True)
    made = heads.init(config, np.asarray(table), np.float32)
    made = dataclasses.replace(made, layers=dict(made.layers) | {"unembedding": own})
    lm = MedusaLM(base.config, params, base.tokenizer, {"eos_token_id": []}, heads=(config, made))
    return lm, pattern


def journal(tmp_path):
    return measuring.Journal(tmp_path / "journal", "test")


def test_known_probabilities_give_the_known_tree_and_tokens_per_step(known, tmp_path):
    lm, pattern = known
    params = SamplingParams(max_new_tokens=90)
    jobs = [lm.job([FIRST + start], params) for start in range(0, 60, 3)]
    lm.use(None)
    answers = measuring.answers(lm, jobs, journal(tmp_path))
    assert answers[1].ids == [FIRST + (3 + i) % CYCLE for i in range(91)]
    found = measuring.ranks(lm, answers, 0.0)["heads"]
    places = (3 + np.arange(88)) % CYCLE
    np.testing.assert_array_equal(found[1][:88], pattern[places])
    # (0,) .5, (1,) .3, (0, 0) .3, (1, 0) .2, then (0, 1), (1, 2) and (2,) .1: the best five nodes.
    rates = measuring.rates(found)
    best = Tree.grow(rates, 5)
    assert best.paths == ((0,), (1,), (0, 0), (1, 0))
    assert best.expected_tokens(rates) == pytest.approx(2.3, rel=0.07)
    # On other texts, decoded: within 7 % of what was promised.
    promised = measuring.tokens_per_step(found, [5])[5]
    lm.use(best)
    held_out = [lm.job([FIRST + start], params) for start in range(61, 120, 3)]
    done = lm.complete([""] * len(held_out), held_out, 4)
    decoded = sum(one.stats.new_tokens for one in done) / sum(one.stats.steps for one in done)
    assert decoded == pytest.approx(promised, rel=0.07)
    assert decoded > 2


def test_places_amid_what_a_step_accepts_do_not_count():
    """Where steps jump over the places that the second path is right at, it is worth nothing."""
    miss = replay.MISS
    rows = [np.array([[0, 0, 0], [1, 1, miss], [1, miss, miss], [2, 0, miss]] * 30)]
    assert replay.hit_rates(rows)[1,] == 0.5
    rates = measuring.rates(rows)
    assert (1,) not in rates
    assert rates[0, 0, 0] == pytest.approx(1.0, abs=0.05)
    assert measuring.tokens_per_step(rows, [1, 4]) == {1: 1.0, 4: 4.0}


def test_products_of_single_rates_miss_what_hangs_together():
    rows = [np.array([[0, 0], [1, 1]] * 50)]
    joint = replay.hit_rates(rows)
    assert joint == {(0,): 0.5, (1,): 0.5, (0, 0): 0.5, (1, 1): 0.5}
    measured = measuring.rates([one.repeat(3, 0) for one in rows])
    products = measuring.single_products([one.repeat(3, 0) for one in rows], [(0,), (0, 0), (0, 1)])
    assert products[1] == pytest.approx(products[2], abs=0.03)
    assert measured[0, 0] == pytest.approx(2 * products[1], abs=0.06)


def test_trees_are_judged_on_answers_that_they_were_not_grown_on():
    """Each answer has ranks of its own: what its own tree would promise is not there for others."""
    rows = [np.full((40, 2), 3 + number) for number in range(5)]
    assert Tree.grow(measuring.rates(rows), 6).max_depth == 1
    assert measuring.tokens_per_step(rows, [1, 2, 11]) == {1: 1.0, 2: 1.0, 11: 1.0}
    assert measuring.tokens_per_step(rows[:1], [11])[11] > 2


# ---------------------------------------------------------------------------------------- the program


def test_the_tree_it_writes_is_the_fastest_nested_and_found_by_auto(files, tmp_path, times, cache, capsys):
    table, timed = times
    output = tmp_path / "tree.json"
    more = ("--max-nodes", "8", "--batch-size", "1", "4", "--temperature", "0.8")
    # One row: larger trees pay as far as they guess more; four: twice the cost, nothing pays.
    table |= {1: {1: 1.0, 4: 1.0, 8: 1.0}, 4: {1: 1.0, 4: 1.6, 8: 5.0}}
    assert calibrate.run(flags(files, output, *more)) == 0
    found = json.loads(output.read_text())
    gains = {int(n): gain for n, gain in found["sources"]["both"]["tokens_per_step"].items()}
    sizes = sorted(gains)
    assert sizes[0] == 1
    assert gains[1] == 1.0
    best = max(sizes, key=lambda n: gains[n])
    assert gains[best] > MARGIN  # or the test would show little
    assert found["chosen"] == {"cpu": {"1": best, "4": 1}}
    # At four rows the largest is far from paying, and is not waited for.
    assert found["step_seconds"]["cpu"]["4"].keys() == {"1", "4"}
    assert [nodes for batch, nodes in timed if batch == 1] == sizes
    tree, _ = load_tree(output)
    assert tree.nodes == best
    for fields in found["sources"].values():
        whole = Tree.from_paths(fields["paths"])
        own = dict(zip(whole.paths, fields["hit_rates"], strict=True))
        assert whole.nodes <= round(WIDER * 8)
        assert set(Tree.grow(own, 4).paths) <= set(whole.paths)
        assert len(fields["products_of_single_rates"]) == whole.nodes - 1
    assert found["prompts"]["count"] == 4
    assert not list(tmp_path.glob("*.journal"))
    for picture in ("tree.png", "tree-curves.png"):
        image = imread(tmp_path / picture)
        assert min(image.shape[:2]) > 60
        assert image[..., :3].std() > 0.02  # not blank
    (kept,) = cache.iterdir()
    assert str(kept) in capsys.readouterr().err
    lm = MedusaLM.load(files[0], heads=files[1])
    assert (lm.plan.tree, lm.plan.lookup, lm.plan.heads) == (tree, True, lm.heads[0])
    assert set(lm.plan.proposed.paths) > set(tree.paths)  # a step chooses
    assert lm.plan_for(4) == Plan.plain()
    # A tree that is named is read as it is.
    assert MedusaLM.load(files[0], heads=files[1], tree=str(output)).plan == Plan(tree, lm.heads[0], True)


def test_a_later_run_adds_its_batches(files, tmp_path, times, cache):
    table, _ = times
    table |= {1: {1: 1.0, 4: 1.0, 8: 1.0}, 4: {1: 2.0, 4: 20.0, 8: 40.0}}
    output = tmp_path / "tree.json"
    more = ("--no-png", "--max-nodes", "8", "--temperature", "0.8")
    calibrate.run(flags(files, output, *more))
    first = json.loads(output.read_text())
    calibrate.run(flags(files, output, *more, "--batch-size", "4"))
    found = json.loads(output.read_text())
    assert found["chosen"]["cpu"] == first["chosen"]["cpu"] | {"4": 1}
    assert found["paths"] == first["paths"] != []  # the tree that the file stands for is the smallest batch's
    seconds = found["step_seconds"]["cpu"]
    assert [seconds[batch]["1"] for batch in ("1", "4")] == [1.0, 2.0]
    assert json.loads(next(cache.iterdir()).read_text())["step_seconds"]["cpu"] == seconds


def test_no_cache_and_no_picture(files, tmp_path, cache):
    calibrate.run(flags(files, tmp_path / "tree.json", "--no-png", "--no-cache", "--rounds", "0"))
    assert sorted(path.name for path in tmp_path.iterdir() if path != cache.parent) == ["tree.json"]
    assert not cache.exists()
    found = json.loads((tmp_path / "tree.json").read_text())
    assert (found["step_seconds"], found["chosen"]) == ({}, {})
    fields = found["sources"]["both"]
    rates = {tuple(path): rate for path, rate in zip(fields["paths"], fields["hit_rates"], strict=True)}
    assert [tuple(path) for path in found["paths"]] == list(Tree.grow(rates, 64).paths)  # --max-nodes


def test_one_node_is_plain_decoding(files, tmp_path):
    output = tmp_path / "tree.json"
    calibrate.run(flags(files, output, "--no-png", "--rounds", "0", "--max-nodes", "1"))
    found = json.loads(output.read_text())
    assert found["paths"] == []
    assert found["sources"]["both"]["tokens_per_step"] == {"1": 1.0}


def test_a_cache_that_cannot_be_written_loses_nothing(files, tmp_path, cache, monkeypatch, capsys):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    calibrate.run(flags(files, tmp_path / "tree.json", "--no-png", "--rounds", "0"))
    assert (tmp_path / "tree.json").exists()
    assert "note: not kept for --tree auto" in capsys.readouterr().err


def test_answers_that_all_repeat_themselves_are_said_to_mislead(files, tmp_path, monkeypatch, capsys):
    def run(loops):
        monkeypatch.setattr(text_module, "looping", loops)
        calibrate.run(flags(files, tmp_path / "tree.json", "--no-png", "--rounds", "0"))
        told = json.loads((tmp_path / "tree.json").read_text())["prompts"]["looping"]
        return told, capsys.readouterr().err

    told, printed = run(lambda ids: True)
    assert told == 4
    assert "warning: all of the 4 answers repeat themselves" in printed
    told, printed = run(lambda ids, seen=[]: seen.append(1) or len(seen) == 1)
    assert told == 1
    assert "4 answers, 1 that repeat themselves left out" in printed
    assert "warning: 3 answers say little" in printed


def test_an_interrupted_run_goes_on(files, tmp_path, times, monkeypatch):
    whole, output = tmp_path / "whole.json", tmp_path / "tree.json"
    more = ("--temperature", "0.8", "--no-png", "--batch-size", "1", "4")
    assert calibrate.run(flags(files, whole, *more)) == 0
    timed = times[1]
    with monkeypatch.context() as patch:

        class Interrupted(timing.Decoding):
            def __init__(self, lm, plan, batch, **given):
                if batch == 4:
                    raise KeyboardInterrupt
                super().__init__(lm, plan, batch, **given)

        patch.setattr(timing, "Decoding", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrate.run(flags(files, output, *more))
    assert not output.exists()
    path = tmp_path / "tree.json.journal"
    lines = path.read_text().splitlines()
    assert len(lines) == 6  # what it belongs to, four answers, the times of one batch
    kept = [lines[0], *lines[1:3], lines[5]]
    path.write_text("\n".join(kept) + '\n{"answer": 3, "ids": [1, 2')  # two answers lost, one torn
    asked, complete = [], MedusaLM.complete
    monkeypatch.setattr(
        MedusaLM,
        "complete",
        lambda self, p, jobs, *rest: (asked.extend(jobs), complete(self, p, jobs, *rest))[1],
    )
    timed.clear()
    assert calibrate.run(flags(files, output, *more)) == 0
    assert len(asked) == 2
    assert {batch for batch, _ in timed} == {4}
    assert json.loads(output.read_text()) == json.loads(whole.read_text())
    assert not path.exists()


@pytest.mark.parametrize("content", ["something else\n", "", "\x00"])
def test_a_journal_of_other_settings_is_refused(files, tmp_path, content):
    (tmp_path / "tree.json.journal").write_text(content)
    with pytest.raises(UserError, match=r"tree.json.journal: answers to other prompts .* remove it"):
        calibrate.run(flags(files, tmp_path / "tree.json", "--no-png"))


@pytest.mark.parametrize(
    "more",
    [["--sizes", "0"], ["--max-nodes", "0"], ["--rounds", "-1"], ["--sources", "heads", "--heads", "none"]],
)
def test_bad_flags(files, tmp_path, more):
    with pytest.raises(SystemExit) as error:
        calibrate.run(flags(files, tmp_path / "tree.json", *more))
    assert error.value.code == 2


def test_mistakes_are_found_before_any_work(files, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate.cli, "load_model", None)
    with pytest.raises(UserError, match="nowhere is no folder"):
        calibrate.run(flags(files, tmp_path / "nowhere" / "tree.json"))
    monkeypatch.setattr(calibrate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="drawing needs matplotlib"):
        calibrate.run(flags(files, tmp_path / "tree.json", "--png", "a.png"))


def test_without_heads_lookup_is_what_is_calibrated(files, tmp_path, times, cache):
    table, _ = times
    table |= {1: {1: 1.0}}
    output = tmp_path / "tree.json"
    given = [*flags(files, output, "--no-png"), "--heads", "none"]
    assert calibrate.run(given) == 0
    found = calibration.read(output)
    assert (found.source, list(found.sources), found.heads) == ("lookup", ["lookup"], None)
    with pytest.raises(UserError, match="--sources heads: there are none"):
        calibrate.run([*flags(files, output), "--heads", "auto", "--sources", "heads"])
