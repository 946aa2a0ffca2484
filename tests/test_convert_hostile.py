"""Conversion against broken files, full disks, interrupts, a hub; its memory; descriptions, fingerprints."""

import contextlib
import errno
import importlib
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tiny
from huggingface_hub import errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_convert import BF16, F32, KINDS, D, M, V, fails, model, own, run, source, values  # noqa: F401

from medusa_jax import checkpoint, convert
from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError
from medusa_jax.weights import conversion, fingerprint, lazy

SMALL = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
ORBAX_LOOP = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
WEIGHTS = {"reference v1": "medusa_lm_head.safetensors", "medusa-jax": "heads.safetensors"}


def prepared(folder: Path, kind: str) -> Path:
    """Heads of a kind and the file that holds them; written anew, as examples break them."""
    layers = values(own_unembedding=True)[1]
    if kind == "medusa-jax":
        with contextlib.suppress(UserError):  # there from the example before
            own(folder, own_unembedding=True)
    elif not folder.exists():
        source(kind, folder, layers)
    return folder / WEIGHTS.get(kind, "model.safetensors")


def convert_or_line(folder: Path, target: Path) -> str | None:
    """Convert with --check. None when it worked; else the one line that says why not; no target is left."""
    try:
        status = convert.run([str(folder), str(target), "--to", "vllm", "--check"])
    except UserError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert ".partial" not in message
        assert not target.exists()
        assert not list(target.parent.glob(".*.partial"))
        return message
    assert status == 0
    for file in target.iterdir():
        file.unlink()
    target.rmdir()
    return None


@pytest.mark.parametrize("kind", [*KINDS, "medusa-jax"])
@SMALL
@given(data=st.data())
def test_malformed_tensors(tmp_path, kind, data):
    file = prepared(tmp_path / "source", kind)
    good = load_file(file)
    heads = sorted(name for name in good if not name.startswith("model."))
    name = data.draw(st.sampled_from(heads))
    array = good[name]
    change = data.draw(
        st.sampled_from(["drop", "double", "misshape", "retype", "rename", "truncate", "scramble"])
    )
    bad = {n: a for n, a in good.items() if n != name}
    if change == "double":
        number = next(part for part in name.split(".") if part.isdigit()) if kind != "medusa-jax" else ""
        second = name.replace(number, "0" + number, 1) if number else name + "0"
        bad |= {name: array, second: array}
    elif change == "misshape":
        shapes = [(*array.shape, 1), (array.size,), (), (0,), (3, 3), array.shape[::-1]]
        shape = data.draw(st.sampled_from([s for s in shapes if s != array.shape]))
        bad[name] = np.zeros(shape, array.dtype)
    elif change == "retype":
        bad[name] = array.astype(data.draw(st.sampled_from([np.float64, np.int32, np.uint8, np.bool_])))
    elif change == "rename":
        bad[data.draw(st.sampled_from([name + "x", "x." + name, name.upper()]))] = array
    elif change in ("truncate", "scramble"):
        bad = good
    try:
        save_file(bad, file)
        if change == "truncate":
            content = file.read_bytes()
            file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        elif change == "scramble":
            content = bytearray(file.read_bytes())
            at = data.draw(st.integers(0, min(len(content) - 1, 2000)))
            content[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
            file.write_bytes(content)
        message = convert_or_line(file.parent, tmp_path / "target")
        # A flat matrix of zeros has the values of no other shape; only scrambled bytes may still be heads.
        assert message is not None or change == "scramble"
    finally:
        save_file(good, file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [*KINDS, "medusa-jax"])
@SMALL
@given(data=st.data())
def test_nonsense_in_the_config(tmp_path, kind, data):
    """Where fields contradict tensors the tensors win, with a warning; otherwise there is one line."""
    folder = prepared(tmp_path / "source", kind).parent
    file = folder / "config.json"
    good = file.read_text()
    raw = json.loads(good)
    for name in data.draw(st.lists(st.sampled_from(sorted(raw)), max_size=3)):
        raw[name] = data.draw(JSON)
    if data.draw(st.booleans()):
        raw[
            data.draw(
                st.sampled_from(["num_heads", "version", "vocab_size", "original_lm_head", "medusa", "x"])
            )
        ] = data.draw(JSON)
    try:
        file.write_text(json.dumps(raw))
        convert_or_line(folder, tmp_path / "target")
    finally:
        file.write_text(good)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": 1' + "0" * 5000 + "}"])
def test_config_that_is_no_object(tmp_path, text):
    folder = prepared(tmp_path / "source", "vllm").parent
    (folder / "config.json").write_text(text)
    fails(folder, tmp_path / "x", "--to", "tgi", parts=["config.json", "JSON"])


def test_two_kinds_of_names(tmp_path):
    layers = values(own_unembedding=True)[1]
    folder = source("modelopt", tmp_path / "source", layers)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"0.0.linear.weight": layers["weight"][0, 0]}, folder / "model.safetensors")
    fails(folder, tmp_path / "x", "--to", "vllm", parts=["'0.0.linear.weight' is no name of ModelOpt's"])


def test_tensorrt_llm_checkpoints_are_named(tmp_path):
    tensors = {"medusa_heads.0.medusa_layers.0.linear.weight": np.ones((D, D), np.float32)}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source/model.safetensors")
    fails(tmp_path / "source", tmp_path / "x", "--to", "vllm", parts=["TensorRT-LLM's converter wrote this"])


TOKENS = [
    (np.arange(50, dtype=np.int64) % 49, "names token 0 more than once"),
    (np.full(50, -1, np.int64), "token_map[0] is -1"),
    (np.arange(V, V + 50), "the vocabulary has"),
    (np.array([2**40] * 50), "the vocabulary has"),
    (np.zeros((50, 1), np.int64), "token_map is int64 [50, 1]"),
    (np.zeros(50, np.float32), "token_map is float32"),
]


@pytest.mark.parametrize(("tokens", "part"), TOKENS, ids=range(len(TOKENS)))
def test_nonsense_in_a_token_map(tmp_path, tokens, part):
    layers = values(own_unembedding=True, draft_vocab_size=50)[1]
    folder = source("vllm", tmp_path / "source", layers)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"token_map": tokens}, folder / "model.safetensors")
    fails(folder, tmp_path / "x", "--to", "vllm", parts=[part])


def test_wrong_sources_and_targets(tmp_path, model):  # noqa: F811
    heads = own(tmp_path / "heads", own_unembedding=True)
    for name, parts in (
        (tmp_path / "none", ["no such file"]),
        ("./none", ["no such file"]),
        ("nothing", ["not a hub id"]),
        ("", ["empty"]),
        (model, ["a model without Medusa heads"]),
        ("a\0b", ["not a name a file can have"]),
        ("/dev/null", ["no such file"]),
    ):
        fails(name, tmp_path / "x", "--to", "vllm", parts=parts)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    fails(heads, tmp_path / "full", "--to", "vllm", parts=["exists and is not empty"])
    fails(heads, tmp_path / "full/file", "--to", "orbax", parts=["exists and is not a folder"])
    fails(heads, tmp_path / "full/file/x", "--to", "orbax", parts=["cannot be written"])
    fails(heads, tmp_path / "x" / ("n" * 300), "--to", "orbax", parts=[])
    assert not (tmp_path / "x").exists()
    fails(heads, tmp_path / "x", "--to", "vllm", "--model", tmp_path / "none", parts=["no such file"])
    run(heads, tmp_path / "deep/er/target", "--to", "vllm")
    (tmp_path / "empty").mkdir()
    for to in ("orbax", "vllm", "medusa-jax"):
        (tmp_path / f"empty-{to}").mkdir()
        run(heads, tmp_path / f"empty-{to}", "--to", to)


def test_a_target_that_cannot_be_written(tmp_path, monkeypatch):
    heads = own(tmp_path / "heads", own_unembedding=True)

    def refuse(self, *_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    fails(heads, tmp_path / "x", "--to", "vllm", parts=["x: cannot be written (Permission denied)"])


@ORBAX_LOOP
@pytest.mark.parametrize("to", ["reference", "vllm", "tgi", "trtllm", "hf", "orbax", "medusa-jax"])
def test_a_full_disk_leaves_nothing(tmp_path, model, to):  # noqa: F811
    """Files larger than a limit cannot be written, as on a disk that fills up half way."""
    heads = own(tmp_path / "heads", own_unembedding=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        fails(heads, tmp_path / "new/x", "--to", to, "--model", model, parts=["cannot be written"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


@pytest.mark.parametrize("to", ["reference", "vllm", "hf", "medusa-jax"])
def test_an_interrupt_leaves_nothing(tmp_path, model, monkeypatch, to):  # noqa: F811
    heads = own(tmp_path / "heads", own_unembedding=True)
    real, count = lazy.Lazy.finite, 0

    def finite(self, label):
        part = real(self, label)

        def read(start, stop):
            nonlocal count
            count += 1
            if count == 5:
                raise KeyboardInterrupt
            return part.read(start, stop)

        return lazy.Lazy(part.shape, part.dtype, read)

    monkeypatch.setattr(lazy.Lazy, "finite", finite)
    with pytest.raises(KeyboardInterrupt):
        convert.run([str(heads), str(tmp_path / "new/x"), "--to", to, "--model", str(model)])
    assert count == 5
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


@ORBAX_LOOP
def test_an_interrupt_leaves_nothing_of_orbax(tmp_path, monkeypatch):
    """Arrays are read on Orbax's threads; an interrupt comes where the main thread waits for them."""
    heads = own(tmp_path / "heads", own_unembedding=True)

    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    ocp = importlib.import_module("orbax.checkpoint")
    monkeypatch.setattr(ocp.JsonCheckpointHandler, "async_save", stop)
    with pytest.raises(KeyboardInterrupt):
        convert.run([str(heads), str(tmp_path / "new/x"), "--to", "orbax"])
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


# The fingerprint


def params(seed=0, dtype=F32):
    """A nested dict as of a model; large enough for blocks of quantised types."""
    rng = np.random.default_rng(seed)
    made = {"embed_tokens": rng.normal(size=(300, 256)), "norm": 1 + rng.normal(size=256) / 10}
    for layer in range(6):
        made[f"layers_{layer}"] = {
            "q_proj": rng.normal(size=(256, 256)) / 16,
            "down_proj": rng.normal(size=(256, 512)) / 22,
            "input_layernorm": 1 + rng.normal(size=256) / 10,
        }
    import jax

    return {"model": jax.tree.map(lambda a: {"weight": a.astype(dtype)}, made)}


def leaves(tree, change):
    import jax

    return jax.tree.map(change, tree)


def test_fingerprints_of_copies_match():
    import gguf

    first = params()
    known = json.loads(json.dumps(fingerprint.fingerprint(first)))
    assert len(json.dumps(known)) < 10_000
    copies = {"itself": first}
    for dtype in (BF16, np.dtype(np.float16)):
        copies[str(dtype)] = leaves(first, lambda a, dtype=dtype: a.astype(dtype))
    for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"):
        kind = gguf.GGMLQuantizationType[name]
        for dtype in (F32, BF16):
            quantised = leaves(
                first,
                lambda a, kind=kind, dtype=dtype: (
                    a if a.ndim == 1 else gguf.dequantize(gguf.quantize(a, kind), kind).astype(dtype)
                ),
            )
            copies[f"{name} {dtype}"] = quantised
    prints = {name: fingerprint.fingerprint(copy) for name, copy in copies.items()}
    for name, found in prints.items():
        assert fingerprint.matches(known, found), name
        assert fingerprint.matches(found, known), name
        assert fingerprint.matches(found, prints["bfloat16"]), name
        assert not fingerprint.matches(found, fingerprint.fingerprint(params(1))), name


def test_fingerprints_of_others_do_not_match():
    import jax

    first = params()
    known = fingerprint.fingerprint(first)
    rng = np.random.default_rng(5)
    tuned = leaves(first, lambda a: (a + 0.03 * a.std() * rng.normal(size=a.shape)).astype(F32))
    assert not fingerprint.matches(known, fingerprint.fingerprint(tuned))
    norms = leaves(first, lambda a: a * np.float32(1.03) if a.ndim == 1 else a)
    assert not fingerprint.matches(known, fingerprint.fingerprint(norms))
    longer = {"model": first["model"] | {"layers_6": first["model"]["layers_0"]}}
    assert not fingerprint.matches(known, fingerprint.fingerprint(longer))
    # With an unembedding or without: a tied model's files may hold a copy.
    twice = first | {"lm_head": first["model"]["embed_tokens"]}
    assert fingerprint.matches(known, fingerprint.fingerprint(twice))
    other = first | {"lm_head": params(3)["model"]["embed_tokens"]}
    assert not fingerprint.matches(fingerprint.fingerprint(twice), fingerprint.fingerprint(other))
    for nonsense in (
        {},
        {"version": 1},
        known | {"matrices": 5},
        known | {"vectors": {"a": "?"}},
        known | {"version": 2},
    ):
        assert not fingerprint.matches(known, nonsense)
        assert not fingerprint.matches(nonsense, nonsense)
    assert fingerprint.matches(known, fingerprint.fingerprint(jax.tree.map(jax.numpy.asarray, first)))


def test_fingerprint_of_files_and_of_sharded_arrays(tmp_path, model):  # noqa: F811
    from medusa_jax import sharding
    from medusa_jax.weights import checkpoints
    from medusa_jax.weights import params as weights

    opened = checkpoints.open_model(model)
    known = fingerprint.fingerprint(opened.source)
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 2})
    shapes = weights.abstract_params(opened.config, BF16)
    placed = weights.load_params(
        opened.source, opened.config, BF16, sharding.param_shardings(shapes, opened.config, mesh)
    )
    assert fingerprint.matches(known, fingerprint.fingerprint(placed))


def test_heads_of_another_model(tmp_path, model, capsys):  # noqa: F811
    for seed, warned in ((0, False), (1, True)):
        metadata = {fingerprint.KEY: fingerprint.fingerprint(tiny.lm(seed=seed).params)}
        heads = own(tmp_path / f"heads{seed}", metadata=metadata)
        run(heads, tmp_path / f"x{seed}", "--to", "vllm", "--model", model)
        assert ("trained on another model than this one (org/base)" in capsys.readouterr().err) == warned
        run("--describe", heads, "--model", model)
        assert ("trained on another model" in capsys.readouterr().out) == warned


# --describe


@pytest.mark.parametrize("kind", [*KINDS, "medusa-jax", "reference v2", "orbax"])
def test_describe(tmp_path, capsys, kind):
    config, layers, _ = values(own_unembedding=kind != "reference v2")
    if kind == "orbax":
        checkpoint.save_head_checkpoint(tmp_path / "h", config, layers, metadata={"step": 7})
    elif kind == "reference v2":
        source(kind, tmp_path / "h", layers)
    else:
        prepared(tmp_path / "h", kind)
    run("--describe", tmp_path / "h")
    out, err = capsys.readouterr()
    assert err == ""
    first, *lines = out.splitlines()
    name = {**KINDS, "medusa-jax": "medusa-jax-heads", "orbax": "Orbax heads"}.get(
        kind, "first implementation v2"
    )
    assert first.startswith(str(tmp_path / "h"))
    assert first.endswith(f": {name}")
    found = {line[:16].strip(): line[16:] for line in lines}
    assert found["heads"] == "3"
    assert found["layers"] == "1 residual layer a head"
    assert found["hidden size"] == "32"
    assert found["dtype"] == "float32"
    assert found["problems"] == "none found"
    if kind == "reference v2":
        assert found["unembedding"] == "the model's, shared"
        assert found["vocabulary"] == "not told: the model's"
    else:
        assert found["unembedding"] == f"one for each head, {V} x 32"
        assert found["vocabulary"] == str(V)
        assert found["parameters"] == f"{M * (D * D + D + V * D):,}"


def test_describe_finds_problems(tmp_path, capsys):
    _, layers, _ = values(own_unembedding=True, num_layers=2)
    layers["weight"][:, 1] = layers["weight"][:, 0]
    layers["bias"][:, 1] = layers["bias"][:, 0]
    layers["bias"][2] = np.nan
    folder = source("reference v1", tmp_path / "h", layers, 2)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"medusa_num_layers": 1}))
    run("--describe", folder)
    problems = [line[16:] for line in capsys.readouterr().out.splitlines() if line.startswith("problems")]
    assert len(problems) == 4
    assert "medusa_num_layers is 1, but the tensors hold 2" in problems[0]
    assert problems[1:] == ["bias of head 2 holds values that are infinite or not numbers"] * 2 + [
        "the 2 layers of each head are copies of one"
    ]


def test_describe_shows_strangers_text_safely(tmp_path, capsys):
    folder = prepared(tmp_path / "h", "vllm").parent
    raw = json.loads((folder / "config.json").read_text()) | {"note": "\x1b[2J" + "x" * 1000, "deep": [[[]]]}
    (folder / "config.json").write_text(json.dumps(raw))
    run("--describe", folder)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 400


# The program


def command(*args, **kwargs):
    line = [sys.executable, "-m", "medusa_jax.convert", *map(str, args)]
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tiny.ROOT,
        env=tiny.environment(),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "SOURCE and TARGET are needed"),
        (["a"], "SOURCE and TARGET are needed"),
        (["a", "b"], "--to is needed: one of orbax, reference"),
        (["a", "b", "--to", "onnx"], "invalid choice"),
        (["a", "b", "--to", "vllm", "--reference-generation", "v1"], "is for --to reference and tgi"),
        (["a", "--describe", "b"], "--describe PATH takes no SOURCE"),
        (["a", "b", "--to", "vllm", "--dtype", "int8"], "invalid choice"),
    ],
)
def test_wrong_flags(capsys, args, part):
    with pytest.raises(SystemExit) as caught:
        convert.run(args)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


def test_exit_statuses(tmp_path):
    heads = own(tmp_path / "heads", own_unembedding=True)
    good = command(heads, tmp_path / "x", "--to", "vllm", "--check")
    bad = command("--describe", tmp_path / "none")
    out, err = good.communicate()
    assert (good.returncode, out) == (0, "largest difference in logits: 0 (at most 1e-05 is right)\n")
    assert err.splitlines()[-1].startswith(f"wrote {tmp_path / 'x'}: vllm")
    out, err = bad.communicate()
    assert (bad.returncode, out, err) == (2, "", f"error: {tmp_path / 'none'}: no such file or folder\n")


def test_ctrl_c_while_writing(tmp_path):
    """The partial folder is taken away, and nothing else is said."""
    heads = own(tmp_path / "heads", own_unembedding=True)
    slow = (
        "import sys, time\n"
        "from medusa_jax import convert\n"
        "from medusa_jax.weights import lazy\n"
        "from infer import cli\n"
        "real = lazy.byte_blocks\n"
        "def blocks(array):\n"
        "    for block in real(array):\n"
        "        time.sleep(0.2)\n"
        "        yield block\n"
        "lazy.byte_blocks = blocks\n"
        "cli.main(convert.run)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, heads, tmp_path / "x", "--to", "vllm"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tiny.ROOT,
        env=tiny.environment(),
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob(".*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


# The hub


class Api:
    """Stands for `HfApi`."""

    def __init__(self, files=(), error=None) -> None:
        self.files, self.error, self.calls = list(files), error, []

    def __call__(self):
        return self

    def whoami(self):
        if self.error:
            raise self.error
        return {"name": "me"}

    def create_repo(self, repo, exist_ok):
        self.calls.append(("create", repo, exist_ok))

    def list_repo_files(self, repo):
        return self.files

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.calls.append(("upload", repo_id, sorted(p.name for p in Path(folder_path).iterdir())))
        return f"https://hub/{repo_id}"


def test_push(tmp_path, monkeypatch, capsys):
    heads = own(tmp_path / "heads", own_unembedding=True)
    api = Api(["README.md", "medusa_lm_head.safetensors"])
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    run(heads, tmp_path / "a", "--to", "tgi", "--push-to-hub", "me/heads")
    names = ["README.md", "config.json", "medusa_lm_head.safetensors"]
    assert api.calls == [("create", "me/heads", True), ("upload", "me/heads", names)]
    assert capsys.readouterr().out == "https://hub/me/heads\n"
    api.files.append("model.safetensors")
    with pytest.raises(UserError, match=r"already holds model.safetensors"):
        convert.run([str(heads), str(tmp_path / "b"), "--to", "tgi", "--push-to-hub", "me/heads"])
    assert len(api.calls) == 3


@pytest.mark.parametrize(
    ("repo", "error", "part"),
    [
        ("me/heads", errors.LocalTokenNotFoundError("no token"), "not logged in"),
        ("me/heads", ConnectionError("no route"), "hub cannot be reached"),
        ("heads", None, "expected org/name"),
        ("me/he ads", None, "not a valid hub id"),
    ],
)
def test_push_is_refused_before_any_work(tmp_path, monkeypatch, repo, error, part):
    heads = own(tmp_path / "heads", own_unembedding=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api(error=error))
    fails(heads, tmp_path / "x", "--to", "tgi", "--push-to-hub", repo, parts=[part])


# Memory


PEAK = """\
import sys
from pathlib import Path

from medusa_jax import checkpoint, convert
from medusa_jax.config import MedusaConfig
from medusa_jax.weights.head_files import open_heads

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

import orbax.checkpoint, infer.cli, ml_dtypes
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is resident now
before = status("VmRSS")
assert convert.run(sys.argv[1:]) == 0
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Heads of 6 x 17 MB, lazily made: more than a conversion may hold."""
    rows = 16_500
    config = MedusaConfig(6, 1, hidden_size=512, vocab_size=rows, own_unembedding=True)
    block = np.random.default_rng(0).normal(size=(rows, 512)).astype(BF16)
    table = lazy.of_array(block)
    layers = {
        "weight": np.ones((6, 1, 512, 512), BF16),
        "bias": np.ones((6, 1, 512), BF16),
        "unembedding": lazy.Stack((6,), (rows, 512), BF16, [table] * 6),
    }
    folder = tmp_path_factory.mktemp("large") / "heads"
    conversion.save_heads(folder, config, layers, metadata={"base_model": "org/base"})
    return folder


@NEEDS_PROC
@pytest.mark.parametrize(
    "flags", [["reference"], ["vllm", "--check"], ["orbax"], ["vllm", "--dtype", "float32"]]
)
def test_peak_memory(tmp_path, large, flags):
    """The bound asked for is the largest tensor (a head's table, 17 MB) plus 200 MB; this is far below it.

    Orbax keeps what it has compressed until it is written, and its largest tensor is that of all heads.
    """
    command_line = [sys.executable, "-c", PEAK, str(large), str(tmp_path / "x"), "--to", *flags]
    done = subprocess.run(
        command_line, capture_output=True, text=True, check=False, cwd=tiny.ROOT, env=tiny.environment()
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1])
    assert peak < (130e6 if "orbax" in flags else 60e6), f"peak {peak / 1e6:.0f} MB"
