"""Heads as files: published formats, this project's own, Orbax. Nothing here touches the network."""

import errno
import importlib
import json
import pickle
import resource
import sys
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from medusa_jax import checkpoint, heads, sharding
from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError
from medusa_jax.weights import head_files, medusa_formats
from medusa_jax.weights.head_files import open_heads, save_heads

M, L, D, V = 3, 2, 6, 11
BF16 = np.dtype(ml_dtypes.bfloat16)
SIZES = {"hidden_size": D, "vocab_size": V}
SMALL = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def published(own: bool = True, prefix: str = "", dtype=np.float32, sizes=(M, L, D, V)):
    """The tensors of one generation: every element of every tensor has its own value (in float32)."""
    M, L, D, V = sizes
    start = 0

    def fresh(*shape):
        nonlocal start
        start += 1000
        return (start + np.arange(np.prod(shape)).reshape(shape)).astype(dtype)

    tensors = {}
    for h in range(M):
        for layer in range(L):
            tensors[f"{prefix}{h}.{layer}.linear.weight"] = fresh(D, D)
            tensors[f"{prefix}{h}.{layer}.linear.bias"] = fresh(D)
        if own:
            tensors[f"{prefix}{h}.{L}.weight"] = fresh(V, D)
    return tensors


def write(folder: Path, tensors, config=None, name: str = medusa_formats.SAFETENSORS) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def same(a, b) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def check_values(layers, tensors, own: bool, prefix: str = "", dtype=np.float32) -> None:
    assert set(layers) == {"weight", "bias"} | ({"unembedding"} if own else set())
    for h in range(M):
        for layer in range(L):
            same(layers["weight"][h, layer], tensors[f"{prefix}{h}.{layer}.linear.weight"].astype(dtype))
            same(layers["bias"][h, layer], tensors[f"{prefix}{h}.{layer}.linear.bias"].astype(dtype))
        if own:
            same(layers["unembedding"][h], tensors[f"{prefix}{h}.{L}.weight"].astype(dtype))


def fails(*parts: str, heads, **sizes) -> str:
    with pytest.raises(UserError) as caught:
        open_heads(heads, **(SIZES | sizes)).read(np.float32)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


# Published generations


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("own", [True, False])
def test_heads_only(tmp_path, own, dtype):
    tensors = published(own, dtype=dtype)
    config = {"medusa_num_heads": M, "medusa_num_layers": L, "base_model_name_or_path": "org/base"}
    folder = write(tmp_path / "heads", tensors, config | ({} if own else {"version": "2"}))
    for path in (folder, str(folder), folder / medusa_formats.SAFETENSORS):
        opened = open_heads(path, **SIZES)
        assert opened.config == MedusaConfig(M, L, D, V, own_unembedding=own)
        assert opened.kind == f"first implementation {'v1' if own else 'v2'}"
        assert opened.metadata == {"base_model": "org/base"}
        assert opened.warnings == []
        assert opened.dtype == dtype
        layers, token_map = opened.read(np.float32)
        assert token_map is None
        check_values(layers, tensors, own)
    check_values(opened.read(BF16)[0], tensors, own, dtype=BF16)
    with pytest.raises(UserError, match="float64"):
        opened.read(np.float64)


@pytest.mark.parametrize("own", [True, False])
def test_values_mean_the_published_function(tmp_path, own):
    """Read from the file and run: x + SiLU(x W^T + b) and x U^T, by NumPy. A transposed matrix fails here."""
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=t.shape).astype(np.float32) for n, t in published(own).items()}
    table, x = rng.normal(size=(V, D)).astype(np.float32), rng.normal(size=(2, D)).astype(np.float32)
    opened = open_heads(write(tmp_path / "heads", tensors), **SIZES)
    layers, token_map = opened.read(np.float32)
    params = heads.attach(opened.config, jax.tree.map(jnp.asarray, layers), jnp.asarray(table), token_map)
    path = jnp.zeros((2, M, D))
    for h in range(M):
        z = x
        for layer in range(L):
            y = z @ tensors[f"{h}.{layer}.linear.weight"].T + tensors[f"{h}.{layer}.linear.bias"]
            z = z + y / (1 + np.exp(-y))
        expected = z @ (tensors[f"{h}.{L}.weight"] if own else table).T
        got = heads.state(params, opened.config, jnp.asarray(x), h, path)
        scores = heads.logits(params, opened.config, got, h, jnp.asarray(table))
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


def base_model():
    return {
        "model.embed_tokens.weight": np.ones((V, D), np.float32),
        "lm_head.weight": np.ones((V, D), np.float32),
    }


MODEL_CONFIG = {"model_type": "llama", "_name_or_path": "org/base", "medusa_num_heads": M}


def test_in_a_model(tmp_path):
    tensors = published(prefix="medusa_head.")
    folder = write(tmp_path / "model", base_model() | tensors, MODEL_CONFIG, "model.safetensors")
    for path in (folder, folder / "model.safetensors"):
        opened = open_heads(path, **SIZES)
        assert opened.config == MedusaConfig(M, L, D, V, own_unembedding=True)
        assert opened.kind == "first implementation v1.0, a whole model"
        assert opened.metadata == {"base_model": "org/base"}
        assert opened.warnings == []
        check_values(opened.read(np.float32)[0], tensors, True, "medusa_head.")


def write_shards(folder: Path):
    tensors = published(prefix="medusa_head.")
    names = list(tensors)
    shards = {
        "model-1.safetensors": base_model(),
        "model-2.safetensors": {n: tensors[n] for n in names[:4]} | {"model.norm.weight": np.ones(D)},
        "model-3.safetensors": {n: tensors[n] for n in names[4:]},
    }
    for file, held in shards.items():
        write(folder, held, MODEL_CONFIG, file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors, index


def test_in_a_sharded_model(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tensors, index = write_shards(folder)
    read = []
    real = head_files.SafetensorsCheckpoint.read
    monkeypatch.setattr(
        head_files.SafetensorsCheckpoint, "read", lambda s, n, i=None: read.append(n) or real(s, n, i)
    )
    (folder / "model-1.safetensors").unlink()  # holds no heads: not looked at
    check_values(open_heads(folder, **SIZES).read(np.float32)[0], tensors, True, "medusa_head.")
    assert sorted(read) == sorted(tensors)
    (folder / "model-3.safetensors").unlink()
    fails("model-3.safetensors", "no such file", heads=folder)
    write(folder, published(prefix="medusa_head."), name="model-3.safetensors")
    fails("medusa_head.", "is also in", heads=folder)
    del index["weight_map"]["medusa_head.0.0.linear.bias"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails("medusa_head.0.0.linear.bias", heads=folder)


def test_tensors_count_not_the_config(tmp_path):
    """The published medusa-vicuna-7b-v1.3 says 2 heads and holds 5."""
    tensors = published(sizes=(5, 1, D, V))
    config = {"medusa_num_heads": 2, "medusa_num_layers": 3, "version": "2"}
    opened = open_heads(write(tmp_path / "heads", tensors, config), **SIZES)
    assert (opened.config.num_heads, opened.config.num_layers) == (5, 1)
    heads, layers, version = opened.warnings
    assert "medusa_num_heads is 2, but the tensors hold 5" in heads
    assert "medusa_num_layers is 3, but the tensors hold 1" in layers
    assert "version 2" in version
    layers, _ = opened.read(np.float32)
    same(layers["unembedding"][4], tensors["4.1.weight"])


def test_no_residual_layers(tmp_path):
    tensors = published(sizes=(2, 0, D, V))
    opened = open_heads(write(tmp_path / "heads", tensors), **SIZES)
    assert opened.config == MedusaConfig(2, 0, D, V, own_unembedding=True)
    layers, _ = opened.read(np.float32)
    same(layers["unembedding"][1], tensors["1.0.weight"])
    assert layers["weight"].shape == (2, 0, D, D)


@pytest.mark.parametrize(
    "config", ["", "{", "[1]", "\xff\xfe", '{"medusa_num_heads": "three"}', '{"medusa_num_heads": [3]}', "{}"]
)
def test_nonsense_in_the_config(tmp_path, config):
    folder = write(tmp_path / "heads", published())
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    if config.startswith("{") and len(config) > 1:
        opened = open_heads(folder, **SIZES)
        assert opened.config.num_heads == M
        assert len(opened.warnings) == ("three" in config or "[3]" in config)
    else:
        fails("config.json", "JSON", heads=folder)


@pytest.mark.parametrize("value", [True, 3.5, None, -1])
def test_odd_counts_are_warnings(tmp_path, value):
    folder = write(tmp_path / "heads", published(sizes=(1, L, D, V)), {"medusa_num_heads": value})
    assert f"is {value!r}" in open_heads(folder, **SIZES).warnings[0]


def test_of_another_model(tmp_path):
    folder = write(tmp_path / "heads", published())
    fails("hidden size 6", "model's is 8", "0.0.linear.weight", heads=folder, hidden_size=8)
    for size in (10, 12):
        fails(
            "0.2.weight", "11 tokens", f"vocabulary has {size}", "no padding", heads=folder, vocab_size=size
        )
    shared = write(tmp_path / "shared", published(own=False))
    fails("hidden size 6", heads=shared, hidden_size=4)
    assert open_heads(shared, hidden_size=D, vocab_size=99).config.vocab_size == 99


def test_gaps(tmp_path):
    tensors = published()
    no_head = {n: t for n, t in tensors.items() if not n.startswith("1.")}
    fails("head 2", "no tensor of head 1", heads=write(tmp_path / "a", no_head))
    no_layer = {n: t for n, t in tensors.items() if ".0.linear" not in n}
    fails("residual layer 1", "layer 0", heads=write(tmp_path / "b", no_layer))
    huge = tensors | {"99999.0.linear.weight": np.zeros((D, D), np.float32)}
    fails("head 99999", heads=write(tmp_path / "c", huge))
    no_bias = {n: t for n, t in tensors.items() if "bias" not in n}
    fails("6 missing tensors", "0.0.linear.bias", heads=write(tmp_path / "d", no_bias))
    one_own = {n: t for n, t in tensors.items() if n not in ("1.2.weight", "2.2.weight")}
    fails("2 missing tensors: 1.2.weight, 2.2.weight", heads=write(tmp_path / "e", one_own))
    other = {"heads.0.weight": np.zeros((D, D), np.float32)}
    fails("no Medusa heads", "heads.0.weight", heads=write(tmp_path / "f", other))
    fails("no Medusa heads", "nothing", heads=write(tmp_path / "g", {}))
    transposed = tensors | {f"{h}.{L}.weight": np.zeros((D, V), np.float32) for h in range(M)}
    fails("0.2.weight is [6, 11], expected [11, 6]", heads=write(tmp_path / "h", transposed))


@st.composite
def mutations(draw, names):
    return draw(st.sampled_from(["drop", "rename", "double", "misshape", "retype"])), draw(
        st.sampled_from(sorted(names))
    )


def mutate(tensors, kind: str, name: str, data):
    """Tensors that must be refused, and the name that the message must hold."""
    tensors = dict(tensors)
    array = tensors.pop(name)
    if kind == "drop":
        return tensors, name
    if kind == "rename":
        new = data.draw(st.sampled_from(["x.", "0", "medusa_heads."]).map(lambda p: p + name))
        return tensors | {new: array}, name
    if kind == "double":
        return tensors | {name: array, "0" + name: array}, "0" + name
    if kind == "misshape":
        shape = data.draw(st.sampled_from([(*array.shape, 1), (array.size,) * 1, (), (0,), (3, 3)]))
        if shape == array.shape:
            shape = (1,)
        return tensors | {name: np.zeros(shape, array.dtype)}, name
    dtype = data.draw(st.sampled_from([np.float64, np.int32, np.uint8, np.bool_]))
    return tensors | {name: array.astype(dtype)}, name


@pytest.mark.parametrize("own", [True, False])
@SMALL
@given(data=st.data())
def test_malformed_is_refused_by_name(tmp_path, own, data):
    tensors = published(own)
    kind, name = data.draw(mutations(tensors))
    bad, named = mutate(tensors, kind, name, data)
    fails(named, heads=write(tmp_path / "heads", bad))


@SMALL
@given(data=st.data())
def test_malformed_in_a_model(tmp_path, data):
    tensors = published(prefix="medusa_head.")
    kind = data.draw(st.sampled_from(["drop", "misshape", "retype"]))
    bad, named = mutate(tensors, kind, data.draw(st.sampled_from(sorted(tensors))), data)
    fails(named, heads=write(tmp_path / "model", base_model() | bad, MODEL_CONFIG, "model.safetensors"))


@SMALL
@given(cut=st.floats(0, 1, exclude_max=True), model=st.booleans())
def test_truncated(tmp_path, cut, model):
    name = "model.safetensors" if model else medusa_formats.SAFETENSORS
    folder = write(tmp_path / f"heads{model}", published(prefix="medusa_head." if model else ""), {}, name)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(cut * len(content))])
    fails(name, heads=folder)


# Pickles


def test_pt_without_torch(tmp_path, monkeypatch):
    (tmp_path / medusa_formats.PICKLE).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    for path in (tmp_path, tmp_path / medusa_formats.PICKLE):
        fails('pip install "medusa-jax[torch]"', "safetensors", medusa_formats.PICKLE, heads=path)
    tensors = published()
    write(tmp_path, tensors)  # the twin is enough
    check_values(open_heads(tmp_path, **SIZES).read(np.float32)[0], tensors, True)


def test_pt_with_an_unsafe_torch(tmp_path, monkeypatch):
    old = type(sys)("torch")
    old.__version__ = "2.5.1+cpu"  # type: ignore[attr-defined]
    (tmp_path / medusa_formats.PICKLE).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", old)
    fails("2.5.1", "safely", heads=tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("legacy", [False, True])
def test_pt(tmp_path, kind, legacy):
    torch = importlib.import_module("torch")
    tensors = published()
    state = {n: torch.tensor(t).to(getattr(torch, kind)) for n, t in tensors.items()}
    torch.save(state, tmp_path / medusa_formats.PICKLE, _use_new_zipfile_serialization=not legacy)
    opened = open_heads(tmp_path, **SIZES)
    assert opened.kind == "first implementation v1"
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    assert opened.dtype == dtype
    check_values(opened.read(dtype)[0], tensors, True, dtype=dtype)


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.torch
@pytest.mark.parametrize("plain", [True, False])
def test_a_malicious_pickle_is_refused(tmp_path, plain):
    torch = importlib.import_module("torch")
    trap, file = tmp_path / "trap", tmp_path / medusa_formats.PICKLE
    state = {"0.0.linear.weight": Evil(trap)}
    file.write_bytes(pickle.dumps(state)) if plain else torch.save(state, file)
    fails("refused", str(file), heads=tmp_path)
    assert not trap.exists()
    torch.load(file, weights_only=False) if not plain else pickle.loads(file.read_bytes())
    assert trap.exists(), "the trap works"


@pytest.mark.torch
@pytest.mark.parametrize("value", [[], {"a": 1}, {1: None}, {"heads": {}}, "sparse", "int", "cut", "empty"])
def test_pt_of_other_things(tmp_path, value):
    torch = importlib.import_module("torch")
    file = tmp_path / medusa_formats.PICKLE
    state = {n: torch.tensor(t) for n, t in published().items()}
    if value == "sparse":
        value = state | {"0.0.linear.weight": torch.eye(D).to_sparse()}
    elif value == "int":
        value = state | {"0.0.linear.weight": torch.ones(D, D, dtype=torch.complex32)}
    torch.save(state if isinstance(value, str) else value, file)
    if value == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif value == "empty":
        file.write_bytes(b"")
    fails(str(file), heads=tmp_path)


# Our own format and Orbax


def made(dtype=np.float32, **fields):
    config = MedusaConfig(**({"num_heads": M, "num_layers": L, "hidden_size": D, "vocab_size": V} | fields))
    rng = np.random.default_rng(1)
    shapes = head_files.layer_shapes(config)
    layers = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    scored = config.draft_vocab_size
    token_map = None if scored is None else rng.permutation(V)[:scored].astype(np.int32)
    return config, layers, token_map


VARIANTS = [
    {},
    {"own_unembedding": True},
    {"conditioned": True, "draft_vocab_size": 5},
    {"conditioned": True, "own_unembedding": True, "draft_vocab_size": 5, "num_layers": 0},
]
# Orbax's threads find its event loop closed after a failure.
ORBAX_LOOP = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SAVERS = {"own": save_heads, "orbax": checkpoint.save_head_checkpoint}


@pytest.mark.parametrize("fields", VARIANTS)
def test_shapes_are_those_of_the_module(fields):
    config, _, token_map = made(**fields)
    fresh = jax.eval_shape(
        lambda: heads.init(config, jnp.zeros((V, D)), jnp.float32, None if token_map is None else token_map)
    )
    assert {n: a.shape for n, a in fresh.layers.items()} == head_files.layer_shapes(config)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("fields", VARIANTS)
@pytest.mark.parametrize("saver", SAVERS)
def test_round_trip(tmp_path, saver, fields, dtype):
    config, layers, token_map = made(dtype, **fields)
    metadata = {"base_model": "org/base", "step": 7, "losses": [1.5, None]}
    folder = tmp_path / "new" / "heads"
    given_layers = jax.tree.map(jnp.asarray, layers) if fields else layers
    SAVERS[saver](folder, config, given_layers, token_map, metadata)
    assert [p.name for p in folder.parent.iterdir()] == ["heads"]
    opened = open_heads(folder, **SIZES)
    assert opened.kind == {"own": "medusa-jax-heads", "orbax": "Orbax heads"}[saver]
    assert (opened.config, opened.metadata, opened.warnings) == (config, metadata, [])
    assert opened.dtype == dtype
    for wanted in (dtype, np.dtype(np.float32), BF16):
        read, tokens = opened.read(wanted)
        assert set(read) == set(layers)
        for name, array in layers.items():
            same(read[name], array.astype(wanted))
        if token_map is None:
            assert tokens is None
        else:
            same(tokens, token_map)
    if saver == "own":
        assert open_heads(folder / "heads.safetensors", **SIZES).kind == opened.kind


@pytest.mark.parametrize("saver", SAVERS)
def test_of_another_model_own(tmp_path, saver):
    config, layers, _ = made()
    SAVERS[saver](tmp_path / "heads", config, layers)
    assert open_heads(tmp_path / "heads", **SIZES).metadata == {}
    fails("hidden size 6", "is 8", heads=tmp_path / "heads", hidden_size=8)
    fails("vocabulary of 11", "is 12", heads=tmp_path / "heads", vocab_size=12)


@pytest.mark.parametrize("saver", SAVERS)
def test_misfits_are_not_written(tmp_path, saver):
    save, target = SAVERS[saver], tmp_path / "heads"
    config, layers, token_map = made(draft_vocab_size=5)
    for bad, tokens in (
        ({"weight": layers["weight"]}, token_map),
        (layers | {"bias": layers["bias"][..., :-1]}, token_map),
        (layers | {"extra": layers["bias"]}, token_map),
        (layers | {"bias": layers["bias"].astype(np.float64)}, token_map),
        (layers, None),
        (layers, token_map[:-1]),
        (layers, token_map.astype(np.int64)),
        (layers, np.full(5, 3, np.int32)),
        (layers, np.array([0, 1, 2, 3, V], np.int32)),
        (layers, np.array([0, 1, 2, 3, -1], np.int32)),
    ):
        with pytest.raises(UserError, match="heads for"):
            save(target, config, bad, tokens)
    with pytest.raises(UserError, match="token_map"):
        save(target, made()[0], layers, token_map)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saver", SAVERS)
def test_targets(tmp_path, saver):
    save, (config, layers, _) = SAVERS[saver], made()
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", config, layers)
    open_heads(tmp_path / "empty", **SIZES)
    with pytest.raises(UserError, match="not empty"):
        save(tmp_path / "empty", config, layers)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="not a folder"):
        save(tmp_path / "file", config, layers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file"]


@ORBAX_LOOP
@pytest.mark.parametrize("saver", SAVERS)
def test_a_full_disk_leaves_nothing(tmp_path, saver):
    """Files larger than a limit cannot be written, as on a disk that fills up half way."""
    config, layers, _ = made(hidden_size=40)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="cannot be written") as caught:
            SAVERS[saver](tmp_path / "heads", config, layers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    SAVERS[saver](tmp_path / "heads", config, layers)
    open_heads(tmp_path / "heads", hidden_size=40, vocab_size=V)


@ORBAX_LOOP
@pytest.mark.parametrize("saver", SAVERS)
def test_an_interrupted_write_leaves_nothing(tmp_path, saver, monkeypatch):
    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    config, layers, _ = made()
    if saver == "own":
        monkeypatch.setattr(head_files, "write_safetensors", stop)
    else:
        ocp = importlib.import_module("orbax.checkpoint")
        monkeypatch.setattr(ocp.JsonCheckpointHandler, "async_save", stop)
    with pytest.raises(KeyboardInterrupt):
        SAVERS[saver](tmp_path / "heads", config, layers)
    assert list(tmp_path.iterdir()) == []


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    raw = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v != "DROP"}
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "medusa-jax-head"}, "medusa-jax-heads"),
        ({"version": 2}, "version is 2"),
        ({"version": "DROP"}, "version is None"),
        ({"num_heads": "DROP"}, "num_heads"),
        ({"num_haeds": 3}, "num_haeds"),
        ({"num_heads": "3"}, "num_heads"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": M + 1}, "layers.weight"),
        ({"num_heads": 10**15}, "num_heads"),
        ({"num_layers": L - 1}, "layers.weight"),
        ({"conditioned": 1}, "conditioned"),
        ({"conditioned": False}, "mixer_0_weight"),
        ({"own_unembedding": True}, "unembedding"),
        ({"draft_vocab_size": None}, "token_map"),
        ({"draft_vocab_size": 4}, "token_map"),
        ({"draft_vocab_size": 99}, "draft_vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"metadata": []}, "metadata"),
        ({"base_model": 5}, "base_model"),
    ],
)
def test_nonsense_in_our_config(tmp_path, changes, named):
    config, layers, token_map = made(conditioned=True, draft_vocab_size=5)
    save_heads(tmp_path / "heads", config, layers, token_map)
    edit(tmp_path / "heads", **changes)
    fails(named, heads=tmp_path / "heads")


@SMALL
@given(data=st.data())
def test_malformed_own(tmp_path, data):
    config, layers, token_map = made(conditioned=True, own_unembedding=True, draft_vocab_size=5)
    folder = tmp_path / "heads"
    if not folder.exists():
        save_heads(folder, config, layers, token_map)
    tensors = {"layers." + name: array for name, array in layers.items()} | {"token_map": token_map}
    kind, name = data.draw(mutations(tensors))
    bad, named = mutate(tensors, kind, name, data)
    if name == "token_map" and bad.get(name) is not None and bad[name].dtype == np.int32:
        bad[name] = bad[name][:-1] if bad[name].ndim else bad[name]
    if (
        all(bad.get(n) is not None and bad[n].dtype == t.dtype for n, t in tensors.items())
        and kind == "retype"
    ):
        return  # the token map retyped as what it is
    save_file(bad, folder / "heads.safetensors")
    fails(named, heads=folder)


def test_token_map_values(tmp_path):
    config, layers, token_map = made(draft_vocab_size=5)
    save_heads(tmp_path / "heads", config, layers, token_map)
    named = {"layers." + name: array for name, array in layers.items()}
    for bad in ([0, 1, 2, 3, V], [0, -1, 2, 3, 4], [0, 1, 2, 3, 1]):
        save_file(named | {"token_map": np.array(bad, np.int32)}, tmp_path / "heads/heads.safetensors")
        fails("token_map", heads=tmp_path / "heads")


def test_truncated_own(tmp_path):
    config, layers, _ = made()
    save_heads(tmp_path / "heads", config, layers)
    file = tmp_path / "heads/heads.safetensors"
    content = file.read_bytes()
    for size in (0, 5, 200, len(content) - 1):
        file.write_bytes(content[:size])
        fails("heads.safetensors", heads=tmp_path / "heads")
    file.unlink()
    fails("heads.safetensors", "no such file", heads=tmp_path / "heads")


def test_orbax_is_quiet_and_sharded(tmp_path, capfd, caplog, recwarn):
    config, layers, token_map = made(BF16, hidden_size=8, conditioned=True, draft_vocab_size=5)
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 4})
    columns = NamedSharding(mesh, PartitionSpec(None, None, "fsdp", "tensor"))
    shardings = dict.fromkeys(layers, sharding.replicated(mesh)) | {"weight": columns}
    placed = {name: jax.device_put(array, shardings[name]) for name, array in layers.items()}
    folder = tmp_path / "heads"
    checkpoint.save_head_checkpoint(folder, config, placed, token_map)
    same(open_heads(folder, hidden_size=8, vocab_size=V).read(BF16)[0]["weight"], layers["weight"])
    other = sharding.make_mesh({"tensor": 2})
    shardings = dict.fromkeys(layers, sharding.replicated(other)) | {
        "weight": NamedSharding(other, PartitionSpec(None, None, None, "tensor"))
    }
    for dtype in (BF16, np.dtype(np.float32)):
        restored, tokens = checkpoint.restore_head_checkpoint(folder, dtype, shardings)
        for name, array in layers.items():
            assert restored[name].sharding == shardings[name]
            same(restored[name], array.astype(dtype))
        same(tokens, token_map)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert [w for w in recwarn if "orbax" in str(w.filename)] == []


@ORBAX_LOOP
def test_broken_orbax(tmp_path):
    config, layers, _ = made()
    folder = tmp_path / "heads"
    save = lambda: checkpoint.save_head_checkpoint(folder, config, layers)  # noqa: E731
    save()
    with pytest.raises(UserError, match="not an Orbax checkpoint"):
        checkpoint.open_head_checkpoint(tmp_path)
    for victim in ("config/metadata", "heads/manifest.ocdbt", "heads/_METADATA"):
        kept = (folder / victim).read_bytes()
        for content in (b"", kept[: len(kept) // 2], b"[1]"):
            (folder / victim).write_bytes(content)
            fails(str(folder), heads=folder)
        (folder / victim).unlink()
        fails(str(folder), heads=folder)
        (folder / victim).write_bytes(kept)
    same(open_heads(folder, **SIZES).read(np.float32)[0]["weight"], layers["weight"])
    stored = folder / "config/metadata"
    right = stored.read_text()
    for change, named in (
        ({"num_layers": L + 1}, "layers.weight"),
        ({"own_unembedding": True}, "unembedding"),
    ):
        stored.write_text(json.dumps(json.loads(right) | change))
        fails(named, heads=folder)
    stored.write_text(right)
    (folder / "heads").rename(folder / "params")
    fails("not of heads", heads=folder)


# Finding them


def test_what_is_not_heads(tmp_path):
    fails("empty", heads="")
    fails("no heads", "medusa_lm_head", heads=tmp_path)
    fails("no such file", heads=tmp_path / "none")
    fails("no such file", heads="./none")
    fails("no such file", heads="org/none.safetensors")
    fails("no such file", heads="org/none/file.gguf")
    fails("not a hub id", heads="nothing")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    fails("not a file of heads", heads=tmp_path / "x.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    fails("pytorch_model.bin", "not read", heads=tmp_path)
    folder = write(tmp_path / "model", base_model(), MODEL_CONFIG, "model.safetensors")
    fails("without Medusa heads", heads=folder)
    config, layers, _ = made()
    save_heads(tmp_path / "own", config, layers)
    (tmp_path / "own/config.json").unlink()
    fails("heads.safetensors", "config.json", heads=tmp_path / "own")


class Hub:
    """Stands for `snapshot_download`: copies what the patterns allow, or raises."""

    def __init__(self, files: Path | None, cache: Path) -> None:
        self.files, self.cache, self.calls, self.raises = files, cache, [], None

    def __call__(self, repo, *, revision, allow_patterns, ignore_patterns):
        self.calls.append((repo, revision, tuple(allow_patterns), ignore_patterns))
        if self.raises:
            raise self.raises
        self.cache.mkdir(exist_ok=True)
        for file in self.files.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (self.cache / file.name).write_bytes(file.read_bytes())
        return str(self.cache)


def test_hub(tmp_path, monkeypatch):
    tensors = published()
    hub = Hub(write(tmp_path / "repo", tensors, {"medusa_num_heads": M}), tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    (hub.files / medusa_formats.PICKLE).write_bytes(b"x")
    (hub.files / "README.md").write_bytes(b"x")
    opened = open_heads("org/heads@abc", **SIZES)
    check_values(opened.read(np.float32)[0], tensors, True)
    assert [call[:2] for call in hub.calls] == [("org/heads", "abc")] * 2  # first for heads beside a model
    assert sorted(p.name for p in hub.cache.iterdir()) == ["config.json", medusa_formats.SAFETENSORS]
    # Only a pickle there: fetched in a third call.
    (hub.files / medusa_formats.SAFETENSORS).unlink()
    (hub.cache / medusa_formats.SAFETENSORS).unlink()
    monkeypatch.setitem(sys.modules, "torch", None)
    fails("medusa-jax[torch]", heads="org/heads")
    assert [call[1] for call in hub.calls] == ["abc"] * 2 + [None] * 3
    (hub.files / medusa_formats.PICKLE).unlink()
    (hub.cache / medusa_formats.PICKLE).unlink()
    fails("org/heads", "no heads", heads="org/heads")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (errors.LocalEntryNotFoundError("offline"), "hub cannot be reached"),
        (errors.HFValidationError("bad"), "not a valid hub id"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (ConnectionError("no route"), "hub cannot be reached"),
    ],
)
def test_hub_errors(tmp_path, monkeypatch, error, part):
    hub = Hub(None, tmp_path / "cache")
    hub.raises = error
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    fails("org/heads", part, heads="org/heads")
