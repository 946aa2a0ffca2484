"""infer.calibrate: the tree it writes, its resumption, and what it refuses."""

import json

import numpy as np
import pytest
import tiny

from infer import calibrate
from medusa_jax import MedusaLM, UserError, heads
from medusa_jax.config import MedusaConfig
from medusa_jax.tree import load_tree
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


def flags(files, output, *more):
    model, made, prompts = map(str, files)
    given = ["--model", model, "--heads", made, "--prompts", prompts, "--output", str(output)]
    return [*given, "--max-new-tokens", "24", "--rounds", "0", "--sizes", "1", "4", "8", *more]


def test_the_tree_it_writes_is_measured_nested_and_usable(files, tmp_path):
    output = tmp_path / "tree.json"
    assert calibrate.run(flags(files, output, "--max-nodes", "8", "--rounds", "1")) == 0
    found = json.loads(output.read_text())
    tree, rates = load_tree(output)
    assert tree.nodes <= 8
    assert rates is not None
    assert max(rates.values()) == max(rate for path, rate in rates.items() if len(path) == 1)
    gains = found["tokens_per_step"]["both"]
    sizes = sorted(map(int, gains))
    assert sizes[0] == 1
    assert gains["1"] == 1.0
    assert [gains[str(n)] for n in sizes] == sorted(gains[str(n)] for n in sizes)
    assert found["chosen"].keys() == {"1"}
    assert min(found["step_seconds"]["1"].values()) > 0
    lm = MedusaLM.load(files[0], heads=files[1], tree=str(output))
    assert lm.plan.tree == tree
    assert not list(tmp_path.glob("*.answers"))


def test_answers_of_an_interrupted_run_are_kept(files, tmp_path, monkeypatch):
    whole, output = tmp_path / "whole.json", tmp_path / "tree.json"
    assert calibrate.run(flags(files, whole, "--temperature", "0.8")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            calibrate.run(flags(files, output, "--temperature", "0.8"))
    journal = tmp_path / "tree.json.answers"
    lines = journal.read_text().splitlines()
    assert len(lines) == 5
    journal.write_text("\n".join(lines[:3]) + "\n[3, [1, 2")  # the last ones lost, one torn
    asked = []
    complete = MedusaLM.complete
    monkeypatch.setattr(
        MedusaLM,
        "complete",
        lambda self, p, jobs, *rest: (asked.extend(jobs), complete(self, p, jobs, *rest))[1],
    )
    assert calibrate.run(flags(files, output, "--temperature", "0.8")) == 0
    assert len(asked) == 2
    assert json.loads(output.read_text()) == json.loads(whole.read_text())


def test_answers_of_other_settings_are_refused(files, tmp_path):
    (tmp_path / "tree.json.answers").write_text("something else\n")
    with pytest.raises(UserError, match=r"tree.json.answers: answers to other prompts"):
        calibrate.run(flags(files, tmp_path / "tree.json"))


@pytest.mark.parametrize("more", [["--sizes", "0"], ["--max-nodes", "0"], ["--rounds", "-1"]])
def test_bad_numbers(files, tmp_path, more):
    with pytest.raises(SystemExit) as error:
        calibrate.run(flags(files, tmp_path / "tree.json", *more))
    assert error.value.code == 2
