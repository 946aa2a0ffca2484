"""infer.benchmark without a model: arithmetic on a recorded run, suites, sides, reports and plots."""

import dataclasses
import gzip
import json

import numpy as np
import pytest
import recorded
import tiny
from recorded import HOST, PLAIN_STEP, PREFILL, TREE_STEP

from infer import benchmark
from infer.benchmarking import figures, plots, report, sides, suites
from medusa_jax import UserError

ACCEPTED = ([1, 3, 2, 1], [2, 2, 2, 2, 2])  # tokens of each step: the last one of the first ran no forward


def plain_and_tree():
    """Two questions: seven tokens and ten."""
    plain, tree = [], []
    for question, lengths in enumerate(ACCEPTED):
        ones = [1] * sum(lengths)
        plain += recorded.unit("p", question, [recorded.answer(question, ones, PLAIN_STEP)]).answers
        tree += recorded.unit("m", question, [recorded.answer(question, lengths, TREE_STEP)]).answers
    return plain, tree


# The arithmetic


def test_totals_of_a_recorded_run():
    plain, tree = plain_and_tree()
    found = figures.totals(tree)
    forwards = 3 + 5
    wall = 2 * (PREFILL + HOST) + forwards * TREE_STEP
    assert found["new_tokens"] == 17
    assert found["steps"] == 9
    assert found["tokens_per_step"] == pytest.approx(17 / 9)
    assert found["tokens_per_forward"] == pytest.approx(15 / 8)  # of two tokens each prefill chose one
    assert found["step_seconds"] == pytest.approx(TREE_STEP)
    assert found["wall_seconds"] == pytest.approx(wall)
    assert found["tokens_per_second"] == pytest.approx(17 / wall)
    assert found["first_token_seconds_quartiles"] == pytest.approx([PREFILL] * 3)
    assert figures.totals(plain)["tokens_per_step"] == 1
    assert figures.totals(plain)["step_seconds"] == pytest.approx(PLAIN_STEP)


def test_speedup_is_tokens_per_step_over_overhead():
    plain, tree = plain_and_tree()
    found = figures.compare(tree, plain)
    plain_wall, wall = 2 * (PREFILL + HOST) + 15 * PLAIN_STEP, 2 * (PREFILL + HOST) + 8 * TREE_STEP
    assert found["speedup"] == pytest.approx(plain_wall / wall)
    assert found["overhead"] == pytest.approx(TREE_STEP / PLAIN_STEP)
    assert found["check"]["tokens_per_forward_over_overhead"] == pytest.approx(15 / 8 / 1.5)
    assert found["decode_speedup"] == pytest.approx((15 * PLAIN_STEP + 2 * HOST) / (8 * TREE_STEP + 2 * HOST))
    assert found["check"]["holds"]
    low, high = found["speedup_interval"]
    assert low <= found["speedup"] <= high
    slow = [dataclasses.replace(one, wall_seconds=one.wall_seconds + 0.1) for one in tree]
    assert not figures.compare(slow, plain)["check"]["holds"]  # time that no step accounts for


def test_a_batch_shares_its_time_out():
    rows = [recorded.answer(number, lengths, TREE_STEP) for number, lengths in enumerate(ACCEPTED)]
    unit = recorded.unit("m", 0, rows, rows=2)
    assert unit.wall_seconds == pytest.approx(2 * PREFILL + 5 * TREE_STEP + HOST)
    assert sum(one.wall_seconds for one in rows) == pytest.approx(unit.wall_seconds)
    long, short = rows[1].wall_seconds - PREFILL, rows[0].wall_seconds - PREFILL
    assert long / short == pytest.approx(5 / 3)
    assert figures.totals(rows)["step_seconds"] == pytest.approx(TREE_STEP)


def test_one_token_answers_have_no_step_time():
    one = [recorded.unit("m", 0, [recorded.answer(0, [1], TREE_STEP)]).answers[0]]
    found = figures.totals(one) | figures.compare(one, one)
    assert found["step_seconds"] is None
    assert found["overhead"] is None
    assert found["check"] is None
    assert found["speedup"] == pytest.approx(1)
    assert found["speedup_interval"] is None


def test_an_interval_narrows_with_more_questions():
    def width(count):
        spread = np.random.default_rng(0).uniform(0.5, 1.5, count)
        plain = [recorded.answer(i, [1] * 50, PLAIN_STEP) for i in range(count)]
        tree = [recorded.answer(i, [1] * 50, PLAIN_STEP * factor) for i, factor in enumerate(spread)]
        for one in [*plain, *tree]:
            one.wall_seconds = one.decode_seconds
        low, high = figures.speedup(tree, plain)[1]
        return high - low

    assert width(400) < width(25) / 2


def test_loops_are_counted_and_left_out_on_both_sides():
    plain, tree = plain_and_tree()
    loop = recorded.answer(2, [1] * 40, PLAIN_STEP, loop=True)
    straight = recorded.answer(2, [4] * 10, TREE_STEP)
    plain += recorded.unit("p", 2, [loop]).answers
    tree += recorded.unit("m", 2, [straight]).answers
    found = figures.summary(tree, plain)
    assert found["all"]["answers"] == 3
    assert found["all"]["looping_share"] == 0
    assert found["not_looping"]["answers"] == 2
    assert found["not_looping"]["tokens_per_step"] == pytest.approx(17 / 9)
    assert figures.totals(plain)["looping_share"] == pytest.approx(1 / 3)


def test_categories_add_up_and_depths_are_counted():
    plain, tree = plain_and_tree()
    tree[1].category = plain[1].category = "math"
    found = figures.summary(tree, plain)
    assert list(found["categories"]) == ["writing", "math"]
    parts = [part["all"] for part in found["categories"].values()]
    assert sum(part["new_tokens"] for part in parts) == found["all"]["new_tokens"]
    assert parts[1]["tokens_per_step"] == 2
    assert found["accepted_by_depth"] == [1, 6, 1]


def test_the_first_difference():
    plain, tree = plain_and_tree()
    assert figures.first_differences(tree, plain) == {}
    tree[0].ids = [*tree[0].ids[:3], 99, *tree[0].ids[4:]]
    tree[1].ids = tree[1].ids[:-2]
    assert figures.first_differences(tree, plain) == {(0, 0, 0): 3, (0, 1, 0): 8}


def test_log_likelihood_weighs_tokens_alike():
    found = figures.log_likelihood([[-1.0], [-2.0, -3.0, -4.0]])
    assert found["mean_log_likelihood"] == pytest.approx(-2.5)
    assert found["quartiles"][1] == pytest.approx(-2.0)


# Reports and plots


def test_spec_bench_answers():
    _, tree = plain_and_tree()
    again = [dataclasses.replace(one, round=1) for one in tree]
    second = dataclasses.replace(tree[0], turn=1, text="more")
    lines = report.spec_bench("m", [tree[0], second, tree[1], *again], 5.0).splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["question_id"] for one in found] == [0, 1]
    choice = found[0]["choices"][0]
    assert choice["turns"] == ["text 0", "more"]
    assert choice["new_tokens"] == [7, 7]
    assert choice["decoding_steps"] == [4, 4]
    assert choice["accept_lengths"] == [1, 3, 2, 1] * 2
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    assert choice["wall_time"] == pytest.approx([PREFILL + HOST + 3 * TREE_STEP] * 2)
    assert found[0].keys() >= {"category", "answer_id", "model_id", "tstamp"}


def test_the_report_names_what_it_measured():
    results = recorded.run({"auto": 8, "2x3x2": 21})
    side = results["sides"]["medusa-auto-t0-b1"]
    difference = {"question": 3, "turn": 0, "position": 4, "token": 5, "plain": 6, "near_tie": True}
    side["identity"] = {"compared": 32, "identical": 31, "differences": [difference | {"margin": 2e-4}]}
    side["quality"] = {"mean_log_likelihood": -1.5, "quartiles": [-2.0, -1.5, -1.0]}
    text = report.markdown(results)
    assert f"{side['all']['speedup']:.2f}" in text
    assert "31 of 32 answers identical" in text
    assert "margin 0.0002, a near-tie" in text
    assert "-1.5000" in text
    assert "| Medusa, tree 2x3x2 | 21 |" in text
    assert "Answers that do not loop" in text
    assert "roleplay" in text
    assert "head 4" in text


def pixels(path):
    image = pytest.importorskip("matplotlib.image")
    return image.imread(path)[..., :3]


def test_every_plot_is_drawn_and_none_is_blank(tmp_path):
    pytest.importorskip("matplotlib")
    made = plots.draw(recorded.run({"4": 5, "auto": 8, "mc_sim_7b_63": 64}, (1, 4), per_category=2), tmp_path)
    assert [path.stem for path in made] == list(plots.PICTURES)
    for path in made:
        shown = pixels(path)
        height, width, _ = shown.shape
        assert min(height, width) > 500
        ink = np.any(shown < 0.95, axis=-1)
        assert 0.005 < ink.mean() < 0.6
        assert ink.any(axis=1).mean() > 0.5  # over the whole height, not in a corner
        for edge in (ink[0], ink[-1], ink[:, 0], ink[:, -1]):
            assert not edge.any(), f"{path.name}: something is cut off"


def test_plots_without_data_are_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    results = recorded.run({"auto": 8}, per_category=1)
    del results["accuracy"]
    made = plots.draw(results, tmp_path)
    assert [path.stem for path in made] == ["speedup_by_category", "acceptance_by_depth"]


# Suites


def test_published_suites_are_parsed_from_package_and_hub(tmp_path, monkeypatch):
    records = {
        "mt-bench": {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]},
        "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        "gsm8k": {"id": "t-1", "prompt": "How many?", "expected": "3"},
    }
    for name, record in records.items():
        path = tmp_path / suites.PUBLISHED[name].wheel.filename
        data = (json.dumps(record) + "\n").encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    monkeypatch.setattr(suites, "fetch", lambda what: tmp_path / what.filename)
    mt, code, maths = (suites.load(name).questions[0] for name in records)
    assert mt == suites.Question(81, "writing", ("First?", "Second?"))
    assert suites.load("mt-bench", turns=1).questions[0].turns == ("First?",)
    assert code.category == "coding"
    assert "```python\ndef f():\n```" in code.turns[0]
    assert maths == suites.Question("t-1", "math_reasoning", ("How many?",))

    hub = tmp_path / "hub.jsonl"
    hub.write_text(json.dumps({"question_id": 9, "category": "stem", "prompt": ["A?", "B?"]}) + "\n")

    def gone(_):
        raise UserError("MT-Bench questions: the package index cannot be reached")

    monkeypatch.setattr(suites, "fetch", gone)
    monkeypatch.setattr(suites, "_from_hub", lambda repo, file: hub)
    found = suites.load("mt-bench")
    assert found.questions == (suites.Question(9, "stem", ("A?", "B?")),)
    assert found.source == "hub data set HuggingFaceH4/mt_bench_prompts"
    with pytest.raises(UserError, match="package index cannot be reached"):
        suites.load("mt-bench", source="package")


def test_both_sources_out_of_reach_are_both_named(monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    def gone(*_, **__):
        raise errors.LocalEntryNotFoundError("offline")

    def refused(_):
        raise UserError("GSM8K problems: no pip")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", gone)
    monkeypatch.setattr(suites, "fetch", refused)
    with pytest.raises(UserError, match=r"no pip; and hub data set openai/gsm8k: .*offline.*file of prompts"):
        suites.load("gsm8k")


def test_the_facts_of_the_packages():
    for suite in suites.PUBLISHED.values():
        assert len(suite.wheel.sha256) == len(suite.wheel.wheel_sha256) == 64
        assert suite.wheel.kept_in.startswith("questions/")
        assert "--suite" in suite.wheel.instead


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "a", "category": "x"},
        {"messages": [{"role": "user", "content": "b"}], "category": "y"},
        {"turns": ["c", "d"], "category": "x", "question_id": "q"},
        {"prompt": "e", "category": "x"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = suites.load(str(path)).questions
    assert [one.id for one in found] == [0, 1, "q", 3]
    assert found[1].turns == ([{"role": "user", "content": "b"}],)
    assert found[2].turns == ("c", "d")
    # Of every category alike, in the file's order.
    assert [one.id for one in suites.load(str(path), limit=2).questions] == [0, 1]
    assert [one.id for one in suites.load(str(path), limit=3).questions] == [0, 1, "q"]
    assert suites.load(str(path)).digest() != suites.load(str(path), limit=3).digest()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no prompts in it"),
        ("{", "line 1: not valid JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected {"prompt": text}'),
        ('{"prompt": " "}', "line 1: expected texts that are not empty"),
        ('{"turns": []}', "line 1: expected texts"),
        ('{"prompt": "a", "category": 3}', "line 1: expected a text as category"),
        (
            '{"prompt": "a", "question_id": 1}\n{"prompt": "b", "question_id": 1}',
            "question_id 1 occurs twice",
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path, text, told):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        suites.load(str(path))
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["mtbench", "gone.jsonl", "/nowhere/x"])
def test_an_unknown_suite(name):
    with pytest.raises(UserError, match=r"no such file|neither one of mt-bench, humaneval, gsm8k, synthetic"):
        suites.load(name)


def test_synthetic_prompts_have_their_length_and_seed():
    suite = suites.synthetic(tiny.tokenizer(), 3, 50, 1)
    assert [len(one.ids) for one in suite.questions] == [50] * 3
    assert len({one.ids for one in suite.questions}) == 3
    assert suite.fixed
    assert suite == suites.synthetic(tiny.tokenizer(), 3, 50, 1)
    assert suite.digest() != suites.synthetic(tiny.tokenizer(), 3, 50, 2).digest()


# Sides


def test_every_combination_is_a_side_once():
    found = sides.every_side(
        sides.MODES, ["auto", "a/t.json", "b/t.json"], ["exact", "typical"], [0, 0.7], [1, 4]
    )
    assert len(found) == 2 * (1 + 3 + 1 + 6)
    assert list(found)[:2] == ["plain-t0-b1", "medusa-auto-t0-b1"]
    assert {"medusa-t-t0-b1", "medusa-t-t0-b1x", "medusa-auto-typical-t0.7-b4"} <= found.keys()
    assert len(set(sides.labels(found).values()) - {"plain"}) >= len(found) - 8
    one = sides.every_side(sides.MODES, ["auto"], ["exact"], [0], [1])
    assert list(sides.labels(one).values()) == ["plain", "Medusa"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--modes", "plain,fast"], "--modes: 'fast', expected plain or medusa"),
        (["--acceptance", "exact", "lossy"], "--acceptance: 'lossy', expected exact, rejection, typical"),
        (["--temperature", "0,warm"], "--temperature: 'warm', expected 0 or a positive number"),
        (["--temperature", "nan"], "--temperature: 'nan'"),
        (["--batch-size", "1,0"], "--batch-size: '0', expected a whole number"),
        (["--batch-size", "1,,2"], "--batch-size: ''"),
        (["--tree", "auto,9x9x9x9"], "--tree: tree 9x9x9x9"),
        (["--tree", "nothing"], "--tree: tree 'nothing'"),
        (["--batch-size", ",".join(map(str, range(1, 70)))], "138 sides, expected at most 64"),
        (["--accuracy", "--temperature", "0.7"], "--temperature must have 0 in it"),
        (["--seed", "-1"], "seed is -1"),
        (["--top-p", "2"], "top_p is 2.0"),
    ],
)
def test_bad_values(tmp_path, flags, told):
    with pytest.raises(UserError) as caught:
        benchmark.run(["--suite", "synthetic", "--output", str(tmp_path / "o"), *flags])
    assert told in str(caught.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("flags", [["--limit", "0"], ["--turns", "3"], ["--rounds", "0"], ["--suite"]])
def test_bad_flags(tmp_path, flags):
    with pytest.raises(SystemExit) as caught:
        benchmark.run(["--suite", "synthetic", "--output", str(tmp_path), *flags])
    assert caught.value.code == 2


def test_an_output_that_is_a_file(tmp_path):
    (tmp_path / "o").write_text("")
    with pytest.raises(UserError, match=r"--output .*/o: is a file, expected a folder"):
        benchmark.run(["--suite", "synthetic", "--output", str(tmp_path / "o")])


def test_plots_need_matplotlib_and_say_so_first(tmp_path, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(benchmark.cli, "load_model", lambda *given: pytest.fail("read before it was said"))
    with pytest.raises(UserError, match="nowhere"):
        benchmark.run(["--suite", str(tmp_path / "nowhere.jsonl"), "--output", str(tmp_path / "o")])
    assert "note: no plots without matplotlib: pip install 'medusa-jax[plot]'" in capsys.readouterr().err
