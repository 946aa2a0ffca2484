"""python -m train, whole: convergence, resumption, signals, meshes, what it leaves, and what it refuses."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
import yaml

from medusa_jax import MedusaLM, SamplingParams, UserError
from medusa_jax.tree import Tree
from medusa_jax.weights.head_files import open_heads
from train import __main__ as train
from train import loop, start
from train.hidden import HiddenStates
from train.report import Report

ONE = ["--mesh", "data=1"]
SMALL = [
    "--sequence-length", "48", "--batch-size", "8", "--steps", "6", "--num-heads", "2", "--loss-chunk", "16",
    "--evaluate-every", "3", "--save-every", "3", "--log-every", "1", "--warmup-steps", "2",
    "--validation", "0.1", "--heads-dtype", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", tiny.lm())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rng = np.random.default_rng(0)
    words = " ".join(tiny.SENTENCES[:3]).split()
    with path.open("w") as file:
        for _ in range(60):
            asked, told = (" ".join(rng.choice(words, int(rng.integers(2, 8)))) for _ in range(2))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def flags(model, data, output, *more):
    return ["--model", str(model), "--data", str(data), "--output", str(output), *SMALL, *ONE, *more]


def arrays_of(output):
    """The finished heads, and the model if it was trained."""
    opened = open_heads(output / "heads", hidden_size=32, vocab_size=tiny.config().vocab_size)
    found = dict(opened.read(np.float32)[0])
    if (output / "model").exists():
        from safetensors.numpy import load_file

        found |= load_file(output / "model" / "model.safetensors")
    return found


def assert_equal(left, right, atol=0.0):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=atol, rtol=0, err_msg=name)


def logged(output):
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


# -------------------------------------------------------------------------------------- what it leaves


def test_a_run_leaves_heads_a_log_and_its_settings(model, data, tmp_path):
    output = tmp_path / "run"
    assert train.run(flags(model, data, output, "--draft-vocab-size", "100", "--soft-labels", "0.5")) == 0
    settings = yaml.safe_load((output / "config.yaml").read_text())
    assert settings["steps"] == 6
    assert settings["soft_labels"] == 0.5
    log = logged(output)
    assert [line["step"] for line in log if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in log if line["kind"] == "validation"] == [3, 6]
    for line in log:
        assert {"loss", "head0/loss", "head1/loss", "head0/top1", "head1/top5"} <= line.keys()
    assert any((output / "tensorboard").iterdir())
    card = (output / "heads" / "README.md").read_text()
    assert str(data) in card
    assert "| head 1 |" in card
    lm = MedusaLM.load(model, heads=output / "heads")
    assert not lm.warnings
    plain = tiny.lm().generate("What is rain?", SamplingParams(max_new_tokens=20))[0]
    assert lm.generate("What is rain?", SamplingParams(max_new_tokens=20))[0].token_ids == plain.token_ids
    sizes = {"hidden_size": 32, "vocab_size": tiny.config().vocab_size}
    kept = open_heads(output / "checkpoints" / "6", **sizes)
    done = open_heads(output / "heads", **sizes)
    assert kept.config == done.config
    assert (
        kept.metadata.keys() == done.metadata.keys() == {"base_model", "model_fingerprint", "step", "metrics"}
    )
    assert kept.metadata["step"] == 6
    by_kind = {line["kind"]: line for line in log}  # the last of each
    for kind, named in (("train", "training"), ("validation", "validation")):
        assert by_kind[kind] | kept.metadata["metrics"][named] == by_kind[kind]
    best = min((line for line in log if line["kind"] == "validation"), key=lambda line: line["loss"])
    assert done.metadata["step"] == best["step"]
    assert best | done.metadata["metrics"]["validation"] == best


def test_untrained_heads_begin_as_the_model(model, data, tmp_path):
    output = tmp_path / "run"
    train.run(flags(model, data, output, "--steps", "1", "--learning-rate", "1e-12"))
    assert max(float(np.abs(array).max()) for array in arrays_of(output).values()) < 1e-9


def test_convergence_on_a_periodic_language(tmp_path):
    """Model and heads learn a sentence that goes round; then most of a tree's guesses are right."""
    lm = tiny.lm(hidden_size=64, intermediate_size=96, head_dim=16)
    model = tiny.write_folder(tmp_path / "model", lm)
    sentence = "Rain falls on the plain, on the hills and on the roofs of the town. "
    data = tmp_path / "text.jsonl"
    with data.open("w") as file:
        for start in [at for at in range(len(sentence)) if sentence[at - 1] == " "] * 3:
            file.write(json.dumps({"text": (sentence * 9)[start : start + 8 * len(sentence)]}) + "\n")
    output = tmp_path / "run"
    common = ["--data", str(data), "--sequence-length", "192", "--log-every", "100", *ONE]
    common += ["--batch-size", "8"]
    common += ["--num-heads", "3", "--learning-rate", "3e-3", "--loss-chunk", "64", "--evaluate-every", "0"]
    first = ["--model", str(model), "--backbone", "full", "--steps", "100", "--heads-dtype", "float32"]
    assert train.run([*first, *common, "--output", str(output), "--validation", "0.1"]) == 0
    # Of a row held out, the first words come before anything that tells them.
    train_line, held_out = logged(output)[-2:]
    assert min(train_line[f"head{m}/top1"] for m in range(3)) > 0.95
    assert min(held_out[f"head{m}/top1"] for m in range(3)) > 0.9
    lm = MedusaLM.load(output / "model", heads=output / "heads", tree=Tree.chain(3), lookup="off")
    done = lm.generate(sentence, SamplingParams(max_new_tokens=60), raw=True)[0]
    assert done.stats.tokens_per_step > 3
    assert done.text.startswith("Rain falls on the plain")


# ------------------------------------------------------------------------------------------ resumption


@pytest.fixture(scope="module")
def unbroken(model, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken") / "run"
    assert train.run(flags(model, data, output)) == 0
    return output


def stop_after(monkeypatch, step):
    monkeypatch.setattr(
        loop.Stop, "asked", lambda self, now: now == step and setattr(self, "signal", 15) is None
    )


@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_equals_an_unbroken_one(model, data, unbroken, tmp_path, monkeypatch, step):
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        assert train.run(flags(model, data, output)) == 143
    assert not (output / "heads").exists()
    assert train.run(flags(model, data, output, "--resume")) == 0
    assert_equal(arrays_of(output), arrays_of(unbroken))
    mine = {line["step"]: line["loss"] for line in logged(output) if line["kind"] == "train"}
    theirs = {line["step"]: line["loss"] for line in logged(unbroken) if line["kind"] == "train"}
    assert mine == theirs


@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "fsdp=8", "data=4"])
def test_a_mesh_changes_nothing_and_a_run_goes_on_on_another(
    model, data, unbroken, tmp_path, monkeypatch, mesh
):
    whole = tmp_path / "whole"
    assert train.run(flags(model, data, whole, "--mesh", mesh)) == 0
    assert_equal(arrays_of(whole), arrays_of(unbroken), atol=1e-5)
    output = tmp_path / "broken"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert train.run(flags(model, data, output)) == 143
    assert train.run(flags(model, data, output, "--resume", "--mesh", mesh)) == 0
    assert_equal(arrays_of(output), arrays_of(unbroken), atol=1e-5)


def test_lora_on_int8_resumes_on_a_mesh(model, data, tmp_path, monkeypatch):
    kind = [
        "--backbone",
        "lora",
        "--lora-rank",
        "4",
        "--int8",
        "--model-loss",
        "teacher",
        "--heads-first",
        "0.3",
    ]
    whole = tmp_path / "whole"
    assert train.run(flags(model, data, whole, *kind)) == 0
    output = tmp_path / "broken"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train.run(flags(model, data, output, *kind)) == 143
    assert train.run(flags(model, data, output, *kind, "--resume", "--mesh", "data=2,fsdp=2,tensor=2")) == 0
    # Weights reach 20 here, and Adam's first steps divide small differences by small ones.
    assert_equal(arrays_of(output), arrays_of(whole), atol=2e-4)


def test_stored_hidden_states_give_nearly_the_same_heads(model, data, unbroken, tmp_path):
    output, shared = tmp_path / "run", tmp_path / "hidden"
    stored = ["--stored-hidden", "--stored-hidden-folder", str(shared)]
    assert train.run(flags(model, data, output, *stored)) == 0
    assert_equal(arrays_of(output), arrays_of(unbroken), atol=2e-3)  # stored in bfloat16
    before = (shared / "hidden.bin").stat().st_mtime_ns
    assert train.run(flags(model, data, tmp_path / "again", *stored, "--num-layers", "2")) == 0
    assert (shared / "hidden.bin").stat().st_mtime_ns == before
    int8 = ["--stored-hidden", "--int8", "--conditioned"]
    assert train.run(flags(model, data, tmp_path / "int8", *int8)) == 0
    assert max(line["loss"] for line in logged(tmp_path / "int8")) < 100
    with pytest.raises(UserError, match="hidden states of another model or other data"):
        train.run(flags(model, data, tmp_path / "other", *stored, "--sequence-length", "40"))


def test_hidden_states_belong_to_the_whole_model(data, tmp_path):
    """The same weights turned by other angles have other states."""
    shared = ["--stored-hidden", "--stored-hidden-folder", str(tmp_path / "hidden"), "--steps", "1"]
    models = [tiny.write_folder(tmp_path / name, tiny.lm()) for name in ("a", "b")]
    path = models[1] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 77.0}))
    assert train.run(flags(models[0], data, tmp_path / "first", *shared)) == 0
    with pytest.raises(UserError, match="hidden states of another model"):
        train.run(flags(models[1], data, tmp_path / "second", *shared))


def test_a_store_that_lost_its_states_begins_anew(tmp_path):
    def compute(numbers):
        return np.ones((len(numbers), 8, 2), np.float32)

    HiddenStates(tmp_path, "of", (4, 8, 2)).fill(compute, 2)
    assert HiddenStates(tmp_path, "of", (4, 8, 2)).done == 4
    with (tmp_path / "hidden.bin").open("r+b") as file:
        file.truncate(9)
    for _ in range(2):  # an interruption before anything is computed changes nothing
        assert HiddenStates(tmp_path, "of", (4, 8, 2)).done == 0
    (tmp_path / "hidden.json").write_text('{"fingerprint": "of", "shape": [4, 8, 2], "done": "x"}')
    with pytest.raises(UserError, match="another model or other data"):
        HiddenStates(tmp_path, "of", (4, 8, 2))
    with pytest.raises(UserError, match="cannot be written"):
        HiddenStates(tmp_path / "hidden.bin", "of", (4, 8, 2))


def test_a_log_that_cannot_be_written_ends_the_run(tmp_path):
    report = Report(tmp_path, 2, 0, quiet=False)
    report._log.close()
    report._log = Path("/dev/full").open("w")  # noqa: SIM115 - the report closes it
    with pytest.raises(UserError, match=r"the log cannot be written \(No space"):
        report.validation(1, {"loss": 1.0})
    report.close()


def test_a_resumed_log_has_each_step_once(tmp_path):
    lines = [json.dumps({"step": step, "kind": "train"}) + "\n" for step in (1, 2, 3, 4)]
    (tmp_path / "log.jsonl").write_text("".join(lines) + '{"step": 5, "ki')
    Report(tmp_path, 6, 2, quiet=False).close()
    assert (tmp_path / "log.jsonl").read_text() == "".join(lines[:2])


def test_an_output_that_cannot_be_made_is_told_before_weights_are_read(model, data, monkeypatch):
    monkeypatch.setattr(start, "read_model", lambda *given: pytest.fail("read"))
    for output in ("/proc/none", "/dev/null/x"):
        with pytest.raises(UserError, match=f"--output {output}: cannot be made"):
            train.run(flags(model, data, output))


def command(model, data, output, *more, prelude=""):
    argv = flags(model, data, output, *more)
    code = "from infer import cli\nfrom train.__main__ import run\n" + prelude
    code += f"\ncli.main(lambda _: run({argv!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=tiny.ROOT, env=tiny.environment(), stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(model, data, tmp_path, number, status):
    output = tmp_path / "run"
    process = command(
        model, data, output, "--steps", "100000", "--save-every", "100000", "--evaluate-every", "0"
    )
    deadline = time.monotonic() + 240
    while not (output / "log.jsonl").exists() or not (output / "log.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == status, told
    assert "--resume goes on" in told.splitlines()[-1]
    assert [entry.name for entry in (output / "checkpoints").iterdir() if entry.name.isdigit()]


def test_kill_9_in_the_middle_of_a_save(model, data, unbroken, tmp_path):
    """The second checkpoint is written but has not got its name when the process dies."""
    prelude = """
import os, signal
from orbax.checkpoint._src.path import atomicity
before, count = atomicity.AtomicRenameTemporaryPath.finalize, []
async def finalize(self, *args, **kwargs):
    if self.get_final().name == "6":
        os.kill(os.getpid(), signal.SIGKILL)
    return await before(self, *args, **kwargs)
atomicity.AtomicRenameTemporaryPath.finalize = finalize
"""
    output = tmp_path / "run"
    process = command(model, data, output, prelude=prelude)
    told = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGKILL, told
    left = [entry.name for entry in (output / "checkpoints").iterdir()]
    assert "3" in left
    assert "6" not in left
    assert any("tmp" in name for name in left)
    assert train.run(flags(model, data, output, "--resume")) == 0
    # The first part ran with another number of devices, whose products round differently.
    assert_equal(arrays_of(output), arrays_of(unbroken), atol=1e-6)
    assert not any("tmp" in entry.name for entry in (output / "checkpoints").iterdir())


def test_two_processes_train_as_one(model, data, unbroken, tmp_path):
    output = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [
        command(
            model, data, output, "--mesh", "data=2", "--distributed", "--coordinator", f"localhost:{port}",
            "--processes", "2", "--process", str(number),
        )
        for number in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=240)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert_equal(arrays_of(output), arrays_of(unbroken), atol=1e-5)
    assert len([line for line in logged(output) if line["kind"] == "train"]) == 6


# -------------------------------------------------------------------------------------------- mistakes


def test_a_loss_that_is_not_finite_stops_the_run(model, data, tmp_path, monkeypatch):
    output = tmp_path / "run"
    with pytest.raises(
        loop.DivergedError, match=r"step \d+: the loss is not finite, at .*chats.jsonl, line .*checkpoint"
    ) as e:
        train.run(
            flags(
                model,
                data,
                output,
                "--learning-rate",
                "1000",
                "--num-layers",
                "8",
                "--clip",
                "0",
                "--save-every",
                "1",
                "--steps",
                "20",
            )
        )
    assert "\n" not in str(e.value)
    assert [entry.name for entry in (output / "checkpoints").iterdir() if entry.name.isdigit()]


def test_a_used_output_is_refused_without_resume(model, data, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="is not empty; --resume"):
        train.run(flags(model, data, tmp_path))
    with pytest.raises(UserError, match="is a file"):
        train.run(flags(model, data, tmp_path / "x"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--batch-size", "5000"], "batch_size is 5000, and 2 epochs"),
        (["--num-layers", "0"], "nothing to learn"),
        (["--heads", "no/such/heads"], "no/such/heads"),
        (["--mesh", "fsdp=3"], "does not divide"),
    ],
)
def test_mistakes_before_any_work(model, data, tmp_path, more, expected):
    given = flags(model, data, tmp_path / "run", *more)
    if "5000" in more:
        at = given.index("--steps")
        given[at : at + 2] = []
    with pytest.raises(UserError, match=expected):
        train.run(given)
    assert not (tmp_path / "run").exists()


def test_resuming_with_other_options_is_refused(model, data, unbroken, tmp_path):
    import shutil

    shutil.copytree(unbroken, tmp_path / "run")
    output = tmp_path / "run"
    before = (output / "config.yaml").read_text()
    for more, message in [
        (["--num-heads", "3"], "num_heads is 3, but the run was begun with 2"),
        (["--learning-rate", "0.5"], "learning_rate is 0.5, but the run was begun with"),
        (["--steps", "1"], "has made 6 steps already, more than 1"),
    ]:
        with pytest.raises(UserError, match=message):
            train.run(flags(model, data, output, "--resume", *more))
        assert (output / "config.yaml").read_text() == before
    (output / "config.yaml").unlink()
    with pytest.raises(UserError, match="checkpoint"):
        train.run(flags(model, data, output, "--resume", "--num-heads", "3"))


def test_dry_run_says_what_it_takes(model, data, tmp_path, capsys):
    output = tmp_path / "run"
    assert train.run(flags(model, data, output, "--dry-run", "--microbatch", "4")) == 0
    told = capsys.readouterr().out
    assert "8 rows of 48 tokens = 384 tokens a step, 2 microbatches of 4 rows" in told
    assert "memory of each device:" in told
    assert "time:" in told
    assert not output.exists()
