"""infer.benchmark on a tiny model: what a run leaves behind, its resumption, forwards over its answers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from infer import benchmark
from infer.benchmarking import measure, scores
from infer.benchmarking.journal import Answer, Journal
from medusa_jax import MedusaLM, UserError, backbone, heads, sampling
from medusa_jax.config import MedusaConfig
from medusa_jax.weights.head_files import save_heads

QUESTIONS = (
    {"prompt": "What is rain?", "category": "weather"},
    {"turns": ["the dog and the dog and the dog", "How are you?"], "category": "animals"},
    {"prompt": "Who is the fox?", "category": "animals"},
)
SIDES = ("plain-t0-b1", "medusa-2x2-t0-b1", "plain-t0.8-b1", "medusa-2x2-typical-t0.8-b1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    lm = tiny.lm()
    model = tiny.write_folder(folder / "model", lm)
    config = MedusaConfig(2, 1, 32, lm.config.vocab_size)
    made = heads.init(config, lm.params["lm_head"]["weight"], np.float32)
    save_heads(folder / "heads", config, made.layers)
    suite = folder / "own.jsonl"
    suite.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    return model, folder / "heads", suite


def flags(files, output, *more):
    model, made, suite = map(str, files)
    given = ["--model", model, "--heads", made, "--suite", suite, "--output", str(output)]
    given += ["--tree", "2x2", "--max-new-tokens", "20", "--turns", "2"]
    return [*given, "--temperature", "0,0.8", "--acceptance", "typical", *more]


@pytest.fixture(scope="module")
def output(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("output") / "run"
    more = "--modes", "plain,medusa", "--accuracy"
    assert benchmark.run(flags(files, folder, *more)) == 0
    return folder


@pytest.fixture(scope="module")
def results(output):
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def lm(files):
    return MedusaLM.load(files[0], heads=files[1])


def units(folder):
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if "block" in line]


# What a run leaves behind


def test_all_files_are_there(output):
    names = {path.name for path in output.iterdir()}
    assert names >= {"results.json", "results.md", "accuracy.json", "journal.jsonl", "head_accuracy.png"}
    assert names >= {"speedup_by_category.png", "acceptance_by_depth.png"}
    assert {path.stem for path in (output / "answers").iterdir()} == set(SIDES)
    text = (output / "results.md").read_text()
    assert "(speedup_by_category.png)" in text
    assert "python -m infer.benchmark --model" in text


def test_greedy_answers_are_plain_decodings(results, files):
    side = results["sides"]["medusa-2x2-t0-b1"]
    assert side["identity"] == {"compared": 4, "identical": 4, "differences": []}
    assert side["nodes"] == 7
    assert "identity" not in results["sides"]["medusa-2x2-typical-t0.8-b1"]  # lossy: it has no reason to be


def test_answers_are_those_of_the_library(output, files):
    lm = MedusaLM.load(files[0], heads="none")
    wanted = lm.generate([QUESTIONS[0]["prompt"]], measure.SamplingParams(max_new_tokens=20))[0]
    first = json.loads((output / "answers" / "medusa-2x2-t0-b1.jsonl").read_text().splitlines()[0])
    assert first["choices"][0]["turns"] == [wanted.text]
    assert first["choices"][0]["new_tokens"] == [len(wanted.token_ids)]
    assert sum(first["choices"][0]["accept_lengths"]) == len(wanted.token_ids)


def test_sides_take_turns_and_another_one_begins_each_time(output):
    order = [(one["block"], one["turn"], one["side"]) for one in units(output) if one["side"] in SIDES[:2]]
    assert order == [
        (0, 0, SIDES[0]), (0, 0, SIDES[1]),
        (1, 0, SIDES[1]), (1, 0, SIDES[0]), (1, 1, SIDES[1]), (1, 1, SIDES[0]),
        (2, 0, SIDES[0]), (2, 0, SIDES[1]),
    ]  # fmt: skip


def test_figures_come_from_the_journal(output, results):
    for name in SIDES:
        own = [one for one in units(output) if one["side"] == name]
        found = results["sides"][name]["all"]
        assert found["wall_seconds"] == pytest.approx(sum(one["wall_seconds"] for one in own))
        assert found["new_tokens"] == sum(len(a["ids"]) for one in own for a in one["answers"])
    assert results["sides"][SIDES[0]]["all"]["tokens_per_step"] == 1
    assert list(results["sides"][SIDES[1]]["categories"]) == ["weather", "animals"]


def test_lossy_texts_are_scored_beside_sampled_ones(output, results, lm):
    told = {name: side.get("quality") for name, side in results["sides"].items()}
    assert told[SIDES[0]] is told[SIDES[1]] is None  # greedy
    # The rule takes what is likely, at a temperature at which sampling does not.
    assert told[SIDES[3]]["mean_log_likelihood"] > told[SIDES[2]]["mean_log_likelihood"]
    first = next(one for one in units(output) if one["side"] == SIDES[2])["answers"][0]
    prompt = lm.encode(QUESTIONS[0]["prompt"])
    wanted = np.asarray(jax.nn.log_softmax(logits_along([*prompt, *first["ids"]])))[len(prompt) - 1 : -1]
    wanted = wanted[np.arange(len(first["ids"])), first["ids"]]
    assert scores.log_probs(lm, prompt, first["ids"]) == pytest.approx(wanted, abs=1e-4)


def logits_along(ids):
    """Logits [T, V] behind each token, in one unpadded forward."""
    lm, T = tiny.lm(), len(ids)

    @jax.jit
    def forward(params, tokens):
        causal = jnp.tri(T, dtype=bool)
        hidden, _ = backbone.forward(params, lm.config, tokens, jnp.arange(T)[None], causal, None)
        return backbone.unembed(params, lm.config, hidden)[0]

    return np.asarray(forward(lm.params, jnp.array([ids])))


def test_untrained_heads_repeat_the_models_token(output, results):
    """Head m says again what the model said, so it is right where the token m + 1 places on is the same."""
    answers = [a["ids"] for one in units(output) if one["side"] == SIDES[0] for a in one["answers"]]
    for m, top in enumerate(results["accuracy"]["top"]):
        same = [ids[i + 1 + m] == ids[i] for ids in answers for i in range(len(ids) - 1 - m)]
        assert results["accuracy"]["places"][m] == len(same)
        assert top[0] == pytest.approx(np.mean(same))
        assert top == sorted(top)
        assert len(top) == 10
    assert json.loads((output / "accuracy.json").read_text()) == results["accuracy"]


def test_a_second_turn_follows_plains_answer(files, output, lm):
    from infer.benchmarking import sides, suites

    suite = suites.load(str(files[2]), turns=2)
    asking = measure.Asking(lm, suite, measure.SamplingParams(max_new_tokens=20))
    every = sides.every_side(sides.MODES, ["2x2"], ["typical"], [0.0, 0.8], [1])
    head = json.loads((output / "journal.jsonl").read_text().split("\n")[0])
    journal = Journal(output, head["settings"])
    found = [measure.prompts(asking, every, journal, name)[0, 1, 1] for name in SIDES]
    assert found[0] == found[1]
    assert found[2] == found[3] != found[0]
    said = next(one.text for one in journal.answers(SIDES[2]) if one.key == (0, 1, 0))
    messages = [{"role": "user", "content": QUESTIONS[1]["turns"][0]}]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "How are you?"}]
    assert found[3] == lm.encode(messages)


def test_margins(lm):
    text = lm.encode("What is rain?")
    logits = logits_along(text)[-1]
    assert scores.margin(lm, text, 5, 9, 0.0, 0) == pytest.approx(abs(logits[5] - logits[9]), abs=1e-4)
    seed, place = jnp.array([3], jnp.uint32), jnp.array([[len(text)]])
    noisy = logits / 0.5 + np.asarray(sampling.gumbel(seed, place, lm.config.vocab_size))[0, 0]
    assert scores.margin(lm, text, 5, 9, 0.5, 3) == pytest.approx(abs(noisy[5] - noisy[9]), abs=1e-4)


# Resumption


def test_an_interrupted_run_goes_on(files, output, tmp_path, monkeypatch):
    made, real = [], measure._unit

    def counted(lm, name, block, turn, *rest):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append((name, block, turn))
        return real(lm, name, block, turn, *rest)

    monkeypatch.setattr(measure, "_unit", counted)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(flags(files, tmp_path, "--no-plots"))
    journal = tmp_path / "journal.jsonl"
    with journal.open("a") as file:
        file.write('{"side": "plain-t0-b1", "bl')  # it was being written
    before = units_of(journal)
    assert before == made

    monkeypatch.setattr(measure, "_unit", lambda *args: (made.append(args[1:4]), real(*args))[1])
    assert benchmark.run(flags(files, tmp_path, "--no-plots")) == 0
    assert len(made) == len(set(made)) == 16  # nothing twice
    ids = [[a["ids"] for a in one["answers"]] for one in units(tmp_path)]
    assert ids == [[a["ids"] for a in one["answers"]] for one in units(output)]
    assert not list(tmp_path.glob("*.png"))

    monkeypatch.setattr(measure, "_unit", lambda *_: pytest.fail("a finished run measures nothing"))
    assert benchmark.run(flags(files, tmp_path, "--no-plots")) == 0


def units_of(journal):
    lines = [json.loads(line) for line in journal.read_text().split("\n")[1:-1]]
    return [(one["side"], one["block"], one["turn"]) for one in lines if "block" in one]


def test_a_difference_is_reported_with_its_margin(files, output, tmp_path):
    lines = (output / "journal.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        one = json.loads(line)
        if (one.get("side"), one.get("block")) == (SIDES[1], 0):
            right = one["answers"][0]["ids"][1]
            one["answers"][0]["ids"][1] = (right + 1) % 300 + 3
            lines[number] = json.dumps(one)
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    assert benchmark.run(flags(files, tmp_path, "--no-plots")) == 0
    found = json.loads((tmp_path / "results.json").read_text())["sides"][SIDES[1]]["identity"]
    assert found["identical"] == 3
    (difference,) = found["differences"]
    assert (difference["question"], difference["position"], difference["plain"]) == (0, 1, right)
    assert difference["margin"] > scores.NEAR_TIE
    assert not difference["near_tie"]
    assert "3 of 4 answers identical" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--seed", "1"], "other settings (seed: 0, now 1)"),
        (["--max-new-tokens", "9"], "other settings (max_new_tokens: 20, now 9)"),
        (["--limit", "2"], "other settings (questions: "),
        (["--tree", "4"], "other settings (sides: "),
    ],
)
def test_a_journal_of_other_settings_is_refused(files, output, more, told):
    before = (output / "journal.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        benchmark.run(flags(files, output, *more))
    assert told in str(caught.value)
    assert "choose another --output" in str(caught.value)
    assert (output / "journal.jsonl").read_bytes() == before


def test_a_broken_journal_is_refused(tmp_path):
    (tmp_path / "journal.jsonl").write_text("hello\n")
    with pytest.raises(UserError, match=r"journal.jsonl: not a benchmark's journal"):
        Journal(tmp_path, {})
    head = {"format": "medusa-jax-benchmark-1", "settings": {}}
    (tmp_path / "journal.jsonl").write_text(json.dumps(head) + '\n{"side": 3}\n')
    with pytest.raises(UserError, match=r"journal.jsonl, line 2: not readable"):
        Journal(tmp_path, {})


# Batches, synthetic prompts, what needs heads


def test_batches_of_synthetic_prompts_have_a_fixed_length(files, tmp_path):
    model, made, _ = map(str, files)
    given = ["--model", model, "--heads", made, "--suite", "synthetic", "--output", str(tmp_path)]
    given += ["--limit", "4", "--prompt-tokens", "30", "--max-new-tokens", "12", "--batch-size", "2"]
    assert benchmark.run([*given, "--tree", "2x2", "--no-plots", "--rounds", "2"]) == 0
    found = units(tmp_path)
    assert len(found) == 2 * 2 * 2
    answers = [Answer(**one) for unit in found for one in unit["answers"]]
    assert {len(one.ids) for one in answers} == {12}
    assert {one.round for one in answers} == {0, 1}
    for unit in found:
        shares = sum(one["wall_seconds"] for one in unit["answers"])
        assert shares == pytest.approx(unit["wall_seconds"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["sides"]["medusa-2x2-t0-b2"]["identity"]["identical"] == 8
    assert len((tmp_path / "answers" / "plain-t0-b2.jsonl").read_text().splitlines()) == 4


def test_what_needs_heads_says_so(files, tmp_path):
    model, _, suite = map(str, files)
    given = ["--model", model, "--suite", suite, "--output", str(tmp_path / "o")]
    with pytest.raises(UserError, match="needs guesses: give --heads or --lookup on"):
        benchmark.run(given)
    with pytest.raises(UserError, match="--accuracy measures heads, and there are none"):
        benchmark.run([*given, "--accuracy", "--modes", "plain"])
    assert not (tmp_path / "o").exists()


def test_a_question_that_does_not_fit(files, tmp_path):
    model, made, _ = map(str, files)
    suite = tmp_path / "long.jsonl"
    suite.write_text(json.dumps({"turns": ["a", "b c " * 60], "question_id": "deep"}) + "\n")
    given = ["--model", model, "--heads", made, "--suite", str(suite), "--turns", "2"]
    with pytest.raises(
        UserError, match=r"question deep: its turns may need \d+ tokens, the model's context has 512"
    ):
        benchmark.run([*given, "--max-new-tokens", "400", "--output", str(tmp_path / "o")])
