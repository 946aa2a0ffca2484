"""python -m medusa_jax.convert: every kind of heads into every other. Names and shapes are docs/formats.md's.

What each project's files look like is spelt out here once more, by hand, in `SPELLED` and `GOLDEN`.
"""

import dataclasses
import json
import pickletools
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from medusa_jax import checkpoint, convert, sharding
from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError
from medusa_jax.weights import fingerprint, head_check, head_targets, lazy, shipped
from medusa_jax.weights.head_files import layer_shapes, open_heads, save_heads

M, D = 3, 32
V = tiny.config().vocab_size
F32, F16, BF16 = (np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("models") / "untied", tiny.lm())


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory) -> Path:
    lm = tiny.lm(tie_word_embeddings=True)
    return tiny.write_folder(tmp_path_factory.mktemp("models") / "tied", lm)


def table_of(folder: Path) -> np.ndarray:
    tensors = load_file(folder / "model.safetensors")
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


def values(dtype=F32, seed=0, **fields):
    """A configuration, random parameters of its heads, and a token_map if it has a draft vocabulary."""
    sizes = {"num_heads": M, "num_layers": 1, "hidden_size": D, "vocab_size": V}
    config = MedusaConfig(**(sizes | fields))
    rng = np.random.default_rng(seed)
    layers = {n: (rng.normal(size=s) / 5).astype(dtype) for n, s in layer_shapes(config).items()}
    size = config.draft_vocab_size
    return config, layers, None if size is None else rng.permutation(V)[:size].astype(np.int32)


def own(folder: Path, made=None, metadata=None, **fields) -> Path:
    """Heads in this project's format."""
    config, layers, token_map = made or values(**fields)
    save_heads(folder, config, layers, token_map, {"base_model": "org/base"} | (metadata or {}))
    return folder


def same(a, b) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def same_heads(folder, config, layers, token_map=None, dtype=None, **sizes) -> None:
    opened = open_heads(folder, **sizes)
    assert opened.config == config
    read, tokens = opened.read(opened.dtype if dtype is None else dtype)
    assert set(read) == set(layers)
    for name, array in layers.items():
        same(read[name], array)
    assert (tokens is None) == (token_map is None)
    if token_map is not None:
        same(tokens, token_map)


def run(*args, status: int = 0) -> None:
    assert convert.run([str(a) for a in args]) == status


def fails(*args, parts=()) -> str:
    """The conversion is refused in one line that holds `parts`, and leaves no target."""
    parent = Path(args[1]).parent
    before = sorted(parent.iterdir()) if parent.is_dir() else None
    with pytest.raises(UserError) as caught:
        convert.run([str(a) for a in args])
    message = str(caught.value)
    assert "\n" not in message
    assert ".partial" not in message, message
    for part in parts:
        assert part in message, message
    assert (sorted(parent.iterdir()) if parent.is_dir() else None) == before
    return message


# The layouts, by hand


def spell_v1(layers, L, prefix=""):
    named = {}
    for h in range(len(layers["bias"])):
        for n in range(L):
            named[f"{prefix}{h}.{n}.linear.weight"] = layers["weight"][h, n]
            named[f"{prefix}{h}.{n}.linear.bias"] = layers["bias"][h, n]
        if "unembedding" in layers:
            named[f"{prefix}{h}.{L}.weight"] = layers["unembedding"][h]
    return named


def spell_vllm(layers, L, table=None, token_map=None):
    named = {}
    for h in range(len(layers["bias"])):
        for n in range(L):
            named[f"blocks.{h}.layers.{n}.weight"] = layers["weight"][h, n]
            named[f"blocks.{h}.layers.{n}.bias"] = layers["bias"][h, n]
        if "unembedding" in layers:
            named[f"lm_heads.{h}.weight"] = layers["unembedding"][h]
    if table is not None:
        named["lm_head.weight"] = table
    if token_map is not None:
        named["token_map"] = token_map.astype(np.int64)
    return named


def write(folder: Path, name: str, tensors, config=None) -> Path:
    folder.mkdir(parents=True)
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


V1 = "medusa_lm_head.safetensors"
BASE = {"base_model_name_or_path": "org/base"}
COUNTS = {"medusa_num_heads": M, "medusa_num_layers": 1}
VLLM = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": D,
    "vocab_size": V,
    "truncated_vocab_size": V,
    "num_heads": M,
    "num_hidden_layers": 1,
    "medusa_fc_bias": True,
    "original_lm_head": False,
    "torch_dtype": "float32",
}


def backbone():
    return {
        "model.embed_tokens.weight": np.ones((V, D), np.float32),
        "model.norm.weight": np.ones(D, np.float32),
    }


def source(kind: str, folder: Path, layers, L: int = 1, table=None) -> Path:
    """Heads as a project other than ours would have written them."""
    counts = COUNTS | {"medusa_num_layers": L}
    if kind in ("reference v1", "reference v2"):
        version = {"version": "2"} if kind.endswith("2") else {}
        return write(folder, V1, spell_v1(layers, L), BASE | counts | version)
    if kind == "v1.0":
        config = {"model_type": "llama", "_name_or_path": "org/base"} | counts
        return write(folder, "model.safetensors", backbone() | spell_v1(layers, L, "medusa_head."), config)
    if kind == "mlc":
        sizes = {"hidden_size": D, "vocab_size": V}
        return write(folder, "model.safetensors", spell_v1(layers, L, "medusa_head."), counts | sizes)
    if kind == "modelopt":
        config = {"medusa": {"num_medusa_heads": M, "num_medusa_layers": L}}
        return write(folder, "model.safetensors", backbone() | spell_v1(layers, L, "medusa_heads."), config)
    config = VLLM | {"num_hidden_layers": L, "original_lm_head": table is not None}
    return write(folder, "model.safetensors", spell_vllm(layers, L, table), config)


KINDS = {
    "reference v1": "first implementation v1",
    "v1.0": "first implementation v1.0, a whole model",
    "mlc": "MLC-LLM",
    "modelopt": "ModelOpt",
    "vllm": "vLLM",
}


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("L", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_source(tmp_path, capsys, kind, L, dtype):
    config, layers, _ = values(dtype, own_unembedding=True, num_layers=L)
    folder = source(kind, tmp_path / "source", layers, L)
    run(folder, tmp_path / "target", "--to", "medusa-jax")
    same_heads(tmp_path / "target", config, layers)
    err = capsys.readouterr().err
    assert f"source: {KINDS[kind]}, {M} heads of {L} layer" in err
    assert str(dtype) in err
    assert "note" not in err


def test_sources_that_share(tmp_path, model, capsys):
    config, layers, _ = values()
    v2 = source("reference v2", tmp_path / "v2", layers)
    run(v2, tmp_path / "a", "--to", "medusa-jax", "--model", model)
    same_heads(tmp_path / "a", config, layers)
    assert "note" not in capsys.readouterr().err
    vllm = source("vllm", tmp_path / "vllm", layers, table=table_of(model))
    run(vllm, tmp_path / "b", "--to", "orbax", "--model", model)
    same_heads(tmp_path / "b", config, layers)
    assert "note" not in capsys.readouterr().err
    run(vllm, tmp_path / "c", "--to", "orbax")
    same_heads(tmp_path / "c", config, layers)
    assert "--model would check" in capsys.readouterr().err
    fails(v2, tmp_path / "d", "--to", "orbax", parts=["vocabulary", "--model"])
    # Another table than the model's: every head gets it.
    other = source("vllm", tmp_path / "other", layers, table=table_of(model) + 1)
    run(other, tmp_path / "e", "--to", "medusa-jax", "--model", model)
    tables = np.stack([table_of(model) + 1] * M)
    same_heads(
        tmp_path / "e", dataclasses.replace(config, own_unembedding=True), layers | {"unembedding": tables}
    )
    assert "is not the model's" in capsys.readouterr().err


def listing(file: Path) -> dict[str, tuple]:
    with safe_open(file, "np") as handle:
        return {n: (*handle.get_slice(n).get_shape(), handle.get_slice(n).get_dtype()) for n in handle.keys()}  # noqa: SIM118


GOLDEN_V1 = {
    "0.0.linear.weight": (D, D, "F32"),
    "0.0.linear.bias": (D, "F32"),
    "0.1.weight": (V, D, "F32"),
    "1.0.linear.weight": (D, D, "F32"),
    "1.0.linear.bias": (D, "F32"),
    "1.1.weight": (V, D, "F32"),
}
GOLDEN_V2 = {name: shape for name, shape in GOLDEN_V1.items() if "linear" in name}
GOLDEN_VLLM = {
    "blocks.0.layers.0.weight": (D, D, "F32"),
    "blocks.0.layers.0.bias": (D, "F32"),
    "lm_heads.0.weight": (V, D, "F32"),
    "blocks.1.layers.0.weight": (D, D, "F32"),
    "blocks.1.layers.0.bias": (D, "F32"),
    "lm_heads.1.weight": (V, D, "F32"),
}
TWO = {"medusa_num_heads": 2, "medusa_num_layers": 1}
VLLM_TWO = VLLM | {"num_heads": 2}
SHARED_VLLM = {n: s for n, s in GOLDEN_VLLM.items() if "lm_heads" not in n} | {
    "lm_head.weight": (V, D, "F32")
}
GOLDEN = {
    # target, own unembedding, further flags: weights files, tensors, config.json
    ("reference", True): ([V1, "medusa_lm_head.pt"], GOLDEN_V1, BASE | TWO | {"transformers_version": ...}),
    ("reference", False): ([V1], GOLDEN_V2, BASE | TWO | {"transformers_version": ..., "version": "2"}),
    ("reference", False, "--reference-generation", "v1"): (
        [V1, "medusa_lm_head.pt"],
        GOLDEN_V1,
        BASE | TWO | {"transformers_version": ...},
    ),
    ("vllm", True): (["model.safetensors"], GOLDEN_VLLM, VLLM_TWO),
    ("vllm", False): (["model.safetensors"], SHARED_VLLM, VLLM_TWO | {"original_lm_head": True}),
    ("tgi", True): ([V1], GOLDEN_V1, BASE | TWO),
    ("tgi", False): ([V1], GOLDEN_V2, BASE | TWO | {"version": "2"}),
    ("tgi", False, "--reference-generation", "v1"): ([V1], GOLDEN_V1, BASE | TWO),
    ("trtllm", True): (
        [V1, "medusa_lm_head.pt"],
        GOLDEN_V1,
        BASE | TWO | {"num_medusa_heads": 2, "num_medusa_layers": 1},
    ),
    ("trtllm", False): (
        [V1, "medusa_lm_head.pt"],
        GOLDEN_V1,
        BASE | TWO | {"num_medusa_heads": 2, "num_medusa_layers": 1},
    ),
    ("medusa-jax", False): (
        ["heads.safetensors"],
        {"layers.weight": (2, 1, D, D, "F32"), "layers.bias": (2, 1, D, "F32")},
        None,
    ),
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_golden(tmp_path, model, key):
    to, has_own, *flags = key
    files, tensors, config = GOLDEN[key]
    heads = own(tmp_path / "heads", own_unembedding=has_own, num_heads=2)
    run(heads, tmp_path / "target", "--to", to, "--model", model, *flags)
    names = sorted(p.name for p in (tmp_path / "target").iterdir())
    assert names == sorted([*files, "README.md", "config.json"])
    assert listing(tmp_path / "target" / files[0]) == tensors
    found = json.loads((tmp_path / "target/config.json").read_text())
    if config is not None:
        assert {n: ... if config.get(n) is ... else v for n, v in found.items()} == config
        assert [type(v) for n, v in sorted(found.items()) if config[n] is not ...] == [
            type(v) for n, v in sorted(config.items()) if v is not ...
        ]


def test_golden_of_a_draft_vocabulary(tmp_path, model):
    """Only vLLM has a way to say it."""
    for has_own in (True, False):
        made = values(own_unembedding=has_own, draft_vocab_size=50)
        heads, target = own(tmp_path / f"heads{has_own}", made), tmp_path / f"vllm{has_own}"
        run(heads, target, "--to", "vllm", "--model", model, "--check")
        tensors = listing(target / "model.safetensors")
        table = "lm_heads.1.weight" if has_own else "lm_head.weight"
        assert tensors["token_map"] == (50, "I64")
        assert tensors[table] == (50, D, "F32")
        assert len(tensors) == 1 + 2 * M + (M if has_own else 1)
        config = json.loads((target / "config.json").read_text())
        assert config["truncated_vocab_size"] == 50
        assert config["vocab_size"] == V
        run(target, tmp_path / f"back{has_own}", "--to", "medusa-jax", "--model", model)
        same_heads(tmp_path / f"back{has_own}", *made)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("to", ["reference", "vllm", "tgi", "trtllm", "orbax", "medusa-jax"])
def test_round_trip(tmp_path, model, to, L, dtype):
    """There and back, bit for bit, by way of each format; and from each into vLLM's by hand."""
    made = values(dtype, own_unembedding=True, num_layers=L)
    heads = own(tmp_path / "heads", made)
    run(heads, tmp_path / "there", "--to", to, "--check")
    run(tmp_path / "there", tmp_path / "back", "--to", "medusa-jax", "--check")
    same_heads(tmp_path / "back", *made)
    run(tmp_path / "there", tmp_path / "vllm", "--to", "vllm")
    found = load_file(tmp_path / "vllm/model.safetensors")
    expected = spell_vllm(made[1], L)
    assert set(found) == set(expected)
    for name, array in expected.items():
        same(found[name], array)


@pytest.mark.parametrize("to", ["reference", "vllm", "tgi", "orbax", "medusa-jax", "hf"])
def test_round_trip_of_shared(tmp_path, model, to):
    made = values(BF16)
    heads = own(tmp_path / "heads", made)
    run(heads, tmp_path / "there", "--to", to, "--model", model, "--check")
    run(tmp_path / "there", tmp_path / "back", "--to", "medusa-jax", "--model", model)
    same_heads(tmp_path / "back", *made)


@pytest.mark.parametrize("fields", [{"conditioned": True}, {"conditioned": True, "draft_vocab_size": 9}])
@pytest.mark.parametrize("to", ["orbax", "medusa-jax", "hf"])
def test_conditioned_heads_stay_at_home(tmp_path, model, to, fields):
    made = values(**fields)
    heads = own(tmp_path / "heads", made)
    run(heads, tmp_path / "there", "--to", to, "--model", model, "--check")
    run(tmp_path / "there", tmp_path / "back", "--to", "orbax")
    same_heads(tmp_path / "back", *made)


def test_metadata_goes_along(tmp_path, model):
    kept = {
        "step": 700,
        "metrics": {"loss": 1.25},
        fingerprint.KEY: fingerprint.fingerprint(tiny.lm().params),
    }
    heads = own(tmp_path / "heads", metadata=kept)
    run(heads, tmp_path / "orbax", "--to", "orbax")
    run(tmp_path / "orbax", tmp_path / "back", "--to", "medusa-jax")
    assert open_heads(tmp_path / "orbax").metadata == open_heads(heads).metadata
    assert open_heads(tmp_path / "back").metadata == {"base_model": "org/base", **kept}


def test_a_converted_checkpoint_on_a_mesh(tmp_path):
    _, layers, _ = made = values(own_unembedding=True)
    run(own(tmp_path / "heads", made), tmp_path / "orbax", "--to", "orbax")
    for axes in ({"fsdp": 2, "tensor": 4}, {"tensor": 2}):
        mesh = sharding.make_mesh(axes)
        placed = dict.fromkeys(layers, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
        placed["bias"] = sharding.replicated(mesh)
        restored, _ = checkpoint.restore_head_checkpoint(tmp_path / "orbax", F32, placed)
        for name, array in layers.items():
            assert restored[name].sharding == placed[name]
            same(restored[name], array)


def test_of_a_sharded_checkpoint(tmp_path):
    """What training wrote from eight devices."""
    config, layers, _ = made = values(own_unembedding=True, num_layers=2)
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 4})
    spec = PartitionSpec(None, None, "fsdp")
    placed = {n: jax.device_put(a, NamedSharding(mesh, spec)) for n, a in layers.items()}
    checkpoint.save_head_checkpoint(tmp_path / "orbax", config, placed)
    run(tmp_path / "orbax", tmp_path / "back", "--to", "medusa-jax", "--check")
    same_heads(tmp_path / "back", *made)


# Counting, padding, tying


def test_tensors_count(tmp_path, capsys):
    """The published medusa-vicuna-7b-v1.3 says 2 heads and holds 5."""
    made = values(F16, own_unembedding=True, num_heads=5)
    folder = source("reference v1", tmp_path / "source", made[1])
    (folder / "config.json").write_text(json.dumps(BASE | {"medusa_num_heads": 2, "medusa_num_layers": 1}))
    run(folder, tmp_path / "vllm", "--to", "vllm")
    assert "medusa_num_heads is 2, but the tensors hold 5 heads" in capsys.readouterr().err
    assert json.loads((tmp_path / "vllm/config.json").read_text())["num_heads"] == 5
    same_heads(tmp_path / "vllm", *made)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_heads": 4}, "num_heads is 4, but the tensors hold 3"),
        ({"num_hidden_layers": 32}, "num_hidden_layers is 32, but the tensors hold 1"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, but the tensors hold 3"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"vocab_size": "DROP"}, "vocab_size is 32001"),
        ({"truncated_vocab_size": 5}, "truncated_vocab_size is 5"),
        ({"medusa_fc_bias": False}, "medusa_fc_bias is not true, but the tensors hold biases"),
        ({"medusa_fc_bias": "DROP"}, "medusa_fc_bias is not true"),
        ({"hidden_size": 7}, "hidden_size is 7"),
    ],
)
def test_what_vllm_would_get_wrong(tmp_path, capsys, change, part):
    made = values(own_unembedding=True)
    folder = source("vllm", tmp_path / "source", made[1])
    config = {n: v for n, v in (VLLM | change).items() if v != "DROP"}
    (folder / "config.json").write_text(json.dumps(config))
    run(folder, tmp_path / "target", "--to", "medusa-jax")
    assert part in capsys.readouterr().err
    same_heads(tmp_path / "target", *made)


def test_vllm_without_biases(tmp_path, capsys):
    """Such as the published abhigoyal/vllm-medusa-vicuna-7b-v1.3, whose biases were lost."""
    config, layers, _ = values(own_unembedding=True)
    tensors = {n: t for n, t in spell_vllm(layers, 1).items() if "bias" not in n}
    settings = {n: v for n, v in VLLM.items() if n != "medusa_fc_bias"} | {"truncated_vocab_size": None}
    folder = write(tmp_path / "source", "model.safetensors", tensors, settings)
    run(folder, tmp_path / "target", "--to", "medusa-jax")
    assert "note" not in capsys.readouterr().err
    same_heads(tmp_path / "target", config, layers | {"bias": np.zeros_like(layers["bias"])})


def test_vllm_tables(tmp_path, model):
    _, layers, token_map = values(own_unembedding=True, draft_vocab_size=50)
    # A table longer than token_map is row-sliced by it; names may have a prefix.
    full = np.random.default_rng(1).normal(size=(M, V, D)).astype(F32)
    tensors = spell_vllm(layers | {"unembedding": full}, 1, token_map=token_map)
    tensors = {f"medusa_heads.{n}" if n != "token_map" else n: t for n, t in tensors.items()}
    folder = write(tmp_path / "long", "model.safetensors", tensors, VLLM | {"truncated_vocab_size": 50})
    opened = open_heads(folder, hidden_size=D, vocab_size=V)
    assert opened.warnings == []
    read, tokens = opened.read(F32)
    same(tokens, token_map)
    same(read["unembedding"], full[:, token_map])
    # lm_heads.0 stands for lm_head where one is shared; more than one is a contradiction.
    shared = {n: t for n, t in spell_vllm(layers, 1, token_map=None).items() if "lm_heads" not in n}
    one = write(
        tmp_path / "one",
        "model.safetensors",
        shared | {"lm_heads.0.weight": table_of(model)},
        VLLM | {"original_lm_head": True},
    )
    run(one, tmp_path / "back", "--to", "medusa-jax", "--model", model)
    assert not open_heads(tmp_path / "back").config.own_unembedding
    two = write(
        tmp_path / "two",
        "model.safetensors",
        shared | {f"lm_heads.{h}.weight": full[h] for h in range(M)},
        VLLM | {"original_lm_head": True},
    )
    fails(two, tmp_path / "x", "--to", "orbax", parts=["original_lm_head", "there are 3"])
    none = write(tmp_path / "none", "model.safetensors", shared, VLLM)
    fails(none, tmp_path / "x", "--to", "orbax", parts=["neither lm_heads.0.weight nor lm_head.weight"])


@pytest.mark.parametrize("kind", ["reference v1", "vllm", "mlc"])
def test_padding_is_cut(tmp_path, model, capsys, kind):
    config, layers, _ = values(own_unembedding=True)
    rows = -(-V // 256) * 256
    padded = np.zeros((M, rows, D), F32)
    padded[:, :V] = layers["unembedding"]
    folder = source(kind, tmp_path / "source", layers | {"unembedding": padded})
    run(folder, tmp_path / "target", "--to", "vllm", "--model", model, "--check")
    assert f"the last {rows - V} are padding" in capsys.readouterr().err
    same_heads(tmp_path / "target", config, layers, vocab_size=V)
    odd = source(kind, tmp_path / "odd", layers | {"unembedding": padded[:, : V + 1]})
    fails(odd, tmp_path / "x", "--to", "vllm", "--model", model, parts=[f"{V + 1} tokens", f"has {V}"])


def test_tied_layers(tmp_path, capsys):
    config, layers, _ = values(own_unembedding=True, num_layers=3)
    tied = {n: np.repeat(a[:, :1], 3, axis=1) if n != "unembedding" else a for n, a in layers.items()}
    for name, given, said in (("tied", tied, True), ("free", layers, False)):
        run(source("reference v1", tmp_path / name, given, 3), tmp_path / f"{name}2", "--to", "trtllm")
        assert ("copies of one" in capsys.readouterr().err) == said
        same_heads(tmp_path / f"{name}2", config, given)


def test_modelopt_fp8(tmp_path, capsys):
    """FP8 weights are multiplied by their scales."""
    config, layers, _ = values(own_unembedding=True)
    fp8 = np.dtype(ml_dtypes.float8_e4m3fn)
    tensors, expected = backbone(), {n: np.empty(a.shape, F32) for n, a in layers.items()}
    expected["bias"] = layers["bias"]
    for name, array in spell_v1(layers, 1, "medusa_heads.").items():
        h = int(name.split(".")[1])
        if name.endswith("bias"):
            tensors[name] = array
            continue
        scale = np.float32(0.37 + h)
        tensors[name] = (array / scale).astype(fp8)
        tensors[name.replace("weight", "weight_scale")] = np.array(scale)
        tensors[name.replace("weight", "input_scale")] = np.array([np.float32(9)])
        value = tensors[name].astype(F32) * scale
        if "linear" in name:
            expected["weight"][h, 0] = value
        else:
            expected["unembedding"][h] = value
    config_json = {"medusa": {"num_medusa_heads": M, "num_medusa_layers": 1}}
    folder = write(tmp_path / "source", "model.safetensors", tensors, config_json)
    run(folder, tmp_path / "target", "--to", "trtllm", "--dtype", "bfloat16", "--check")
    assert "FP8 weights are multiplied" in capsys.readouterr().err
    same_heads(tmp_path / "target", config, {n: a.astype(BF16) for n, a in expected.items()})
    bad = {n: t for n, t in tensors.items() if n != "medusa_heads.1.0.linear.weight_scale"}
    folder = write(tmp_path / "bad", "model.safetensors", bad, config_json)
    fails(folder, tmp_path / "x", "--to", "vllm", parts=["medusa_heads.1.0.linear.weight_scale"])


# What runtimes cannot express


REFUSED = [
    ({"conditioned": True}, ["reference", "vllm", "tgi", "trtllm"], [], ["conditioned", "only independent"]),
    ({"draft_vocab_size": 50}, ["reference", "tgi", "trtllm"], [], ["50 tokens", "--expand-vocabulary"]),
    ({"num_layers": 2}, ["tgi"], [], ["one residual layer", "these have 2"]),
    ({"num_layers": 0}, ["reference"], [], ["without residual layers"]),
    (
        {"own_unembedding": True},
        ["reference", "tgi"],
        ["--reference-generation", "v2"],
        ["head 0", "not the model's"],
    ),
]


@pytest.mark.parametrize(("fields", "targets", "flags", "parts"), REFUSED)
def test_refused(tmp_path, model, fields, targets, flags, parts):
    heads = own(tmp_path / "heads", **fields)
    for to in targets:
        fails(heads, tmp_path / "x", "--to", to, "--model", model, *flags, parts=parts)


def test_what_needs_a_model(tmp_path):
    heads = own(tmp_path / "heads")
    for to, *flags in (("vllm",), ("trtllm",), ("reference", "--reference-generation", "v1"), ("hf",)):
        fails(heads, tmp_path / "x", "--to", to, *flags, parts=["--model"])
    fails(
        own(tmp_path / "d", draft_vocab_size=9),
        tmp_path / "x",
        "--to",
        "tgi",
        "--expand-vocabulary",
        parts=["--model"],
    )
    layers = values(own_unembedding=True)[1]
    nameless = write(tmp_path / "nameless", V1, spell_v1(layers, 1))
    fails(nameless, tmp_path / "x", "--to", "tgi", parts=["base_model_name_or_path", "--base-name"])
    run(nameless, tmp_path / "x", "--to", "tgi", "--base-name", "org/mine")
    assert json.loads((tmp_path / "x/config.json").read_text())["base_model_name_or_path"] == "org/mine"


def test_sizes_are_checked(tmp_path, model):
    heads = own(tmp_path / "heads", hidden_size=D + 2)
    fails(heads, tmp_path / "x", "--to", "orbax", "--model", model, parts=[f"hidden size {D + 2}", f"is {D}"])
    heads = own(tmp_path / "heads2", vocab_size=V + 1)
    fails(
        heads, tmp_path / "x", "--to", "orbax", "--model", model, parts=[f"vocabulary of {V + 1}", f"is {V}"]
    )


def test_tied_embeddings_give_the_embedding(tmp_path, tied_model):
    heads = own(tmp_path / "heads", num_heads=2)
    run(heads, tmp_path / "vllm", "--to", "vllm", "--model", tied_model, "--check")
    found = load_file(tmp_path / "vllm/model.safetensors")
    same(found["lm_head.weight"], load_file(tied_model / "model.safetensors")["model.embed_tokens.weight"])
    run(heads, tmp_path / "trt", "--to", "trtllm", "--model", tied_model, "--check")
    found = load_file(tmp_path / "trt" / V1)
    for h in range(2):
        same(found[f"{h}.1.weight"], table_of(tied_model))


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("to", ["reference", "tgi", "trtllm", "vllm", "medusa-jax"])
def test_expanded_vocabulary(tmp_path, model, to, has_own):
    _, layers, token_map = made = values(draft_vocab_size=50, own_unembedding=has_own)
    heads = own(tmp_path / "heads", made)
    run(heads, tmp_path / "x", "--to", to, "--model", model, "--expand-vocabulary", "--check")
    opened = open_heads(tmp_path / "x", hidden_size=D, vocab_size=V)
    assert opened.config.draft_vocab_size is None
    assert opened.config.own_unembedding == (has_own or to == "trtllm")
    if opened.config.own_unembedding:
        tables = np.stack([table_of(model)] * M)
        if has_own:
            tables[:, token_map] = layers["unembedding"]
        same(opened.read(F32)[0]["unembedding"], tables)


def test_own_tables_that_are_the_models_can_be_shared(tmp_path, model):
    made = values()
    heads = own(tmp_path / "heads", made)
    run(heads, tmp_path / "trt", "--to", "trtllm", "--model", model)
    v2 = ("--reference-generation", "v2")
    run(tmp_path / "trt", tmp_path / "tgi", "--to", "tgi", "--model", model, *v2, "--check")
    assert listing(tmp_path / "tgi" / V1).keys() == spell_v1(made[1], 1).keys()
    fails(tmp_path / "trt", tmp_path / "x", "--to", "tgi", *v2, parts=["--model would check"])


# Element types


def test_dtype(tmp_path, capsys):
    config, layers, _ = values(own_unembedding=True)
    heads = own(tmp_path / "heads", (config, layers, None))
    for dtype in (BF16, F16):
        run(heads, tmp_path / str(dtype), "--to", "vllm", "--dtype", dtype, "--check")
        streams = capsys.readouterr()
        assert f"rounded from float32 to {dtype}" in streams.err
        assert 1e-5 < float(streams.out.split()[4]) < 0.5
        same_heads(tmp_path / str(dtype), config, {n: a.astype(dtype) for n, a in layers.items()})
    large = layers | {"weight": layers["weight"] * 1e6}
    heads = own(tmp_path / "large", (config, large, None))
    fails(heads, tmp_path / "x", "--to", "vllm", "--dtype", "float16", parts=["infinite", "float16"])
    run(heads, tmp_path / "y", "--to", "vllm", "--dtype", "bfloat16")


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Orbax's threads, after a failure
@pytest.mark.parametrize("to", ["reference", "vllm", "orbax", "medusa-jax"])
def test_values_that_are_not_finite(tmp_path, model, to):
    for value in (np.nan, np.inf):
        config, layers, _ = values(BF16, own_unembedding=True)
        layers["unembedding"][1, 2, 3] = value
        heads = own(tmp_path / f"heads{value}", (config, layers, None))
        fails(heads, tmp_path / "x", "--to", to, parts=["not numbers"])


# The written .pt file


def test_pt_is_what_torch_writes(tmp_path):
    """Its parts, and a pickle that asks for nothing but tensors."""
    heads = own(tmp_path / "heads", own_unembedding=True, dtype=BF16)
    run(heads, tmp_path / "target", "--to", "reference")
    with zipfile.ZipFile(tmp_path / "target/medusa_lm_head.pt") as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names[:2] == ["medusa_lm_head/data.pkl", "medusa_lm_head/byteorder"]
        assert names[-1] == "medusa_lm_head/version"
        assert archive.read("medusa_lm_head/version") == b"3\n"
        pickled = archive.read("medusa_lm_head/data.pkl")
        for info in archive.infolist():
            with archive.open(info) as member:
                assert member._fileobj.tell() % 64 == 0  # where torch's own files have their data
    asked = {arg for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}
    assert asked == {"torch BFloat16Storage", "torch._utils _rebuild_tensor_v2", "collections OrderedDict"}


# hf


def test_hf_writes_the_model_and_its_heads(tmp_path, tied_model):
    made = values()
    heads = own(tmp_path / "heads", made)
    target = tmp_path / "target"
    run(heads, target, "--to", "hf", "--model", tied_model, "--check")
    before, after = load_file(tied_model / "model.safetensors"), load_file(target / "model.safetensors")
    assert set(before) == set(after)
    for name, array in before.items():
        same(after[name], array)
    assert "lm_head.weight" not in after
    same_heads(target / "heads", *made)
    # The whole folder is a source too, and brings its model.
    run(target, tmp_path / "vllm", "--to", "vllm", "--check")
    same(load_file(tmp_path / "vllm/model.safetensors")["lm_head.weight"], table_of(tied_model))
    text = (target / "README.md").read_text()
    assert "--model THIS_FOLDER --heads THIS_FOLDER/heads" in text
    lm = convert_loads(target)
    assert lm.heads is not None


def convert_loads(folder: Path):
    from medusa_jax import MedusaLM

    return MedusaLM.load(folder, heads=folder / "heads", dtype="float32")


def test_hf_of_a_whole_medusa_model(tmp_path, model):
    config, layers, _ = values(own_unembedding=True)
    tensors = load_file(model / "model.safetensors") | spell_v1(layers, 1, "medusa_head.")
    folder = tmp_path / "source"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")
    run(folder, tmp_path / "target", "--to", "hf", "--dtype", "bfloat16", "--check")
    found = load_file(tmp_path / "target/model.safetensors")
    assert set(found) == set(load_file(model / "model.safetensors"))
    same(found["model.norm.weight"], tensors["model.norm.weight"].astype(BF16))
    same_heads(tmp_path / "target/heads", config, {n: a.astype(BF16) for n, a in layers.items()})


def test_a_run(tmp_path, model, tied_model, capsys):
    """A run's output: heads, the model if it was trained too, checkpoints."""
    config, layers, _ = made = values()
    run_folder = tmp_path / "run"
    step = lambda n: checkpoint.save_head_checkpoint(  # noqa: E731
        run_folder / "checkpoints" / str(n),
        config,
        {k: a + n for k, a in layers.items()},
        metadata={"step": n},
    )
    step(9), step(10)
    run(run_folder, tmp_path / "a", "--to", "medusa-jax")
    assert open_heads(tmp_path / "a").metadata == {"step": 10}
    same_heads(tmp_path / "a", config, {k: a + 10 for k, a in layers.items()})
    own(run_folder / "heads", made)
    run(run_folder, tmp_path / "b", "--to", "medusa-jax")
    same_heads(tmp_path / "b", *made)
    # A trained model is the one that the heads belong to, not the one that the run began with.
    tiny.write_folder(run_folder / "model", tiny.lm(seed=1))
    capsys.readouterr()
    run(run_folder, tmp_path / "c", "--to", "vllm", "--check")
    assert str(run_folder / "model") in capsys.readouterr().err
    same(load_file(tmp_path / "c/model.safetensors")["lm_head.weight"], table_of(run_folder / "model"))
    run(run_folder, tmp_path / "d", "--to", "tgi")
    found = json.loads((tmp_path / "d/config.json").read_text())
    assert found["base_model_name_or_path"] == str(run_folder / "model")
    run(run_folder, tmp_path / "e", "--to", "hf")
    same(table_of(tmp_path / "e"), table_of(run_folder / "model"))


def test_heads_that_come_with_the_package(tmp_path, monkeypatch):
    made = values(own_unembedding=True)
    folder = own(tmp_path / "package/medusa", made)
    monkeypatch.setattr(shipped, "folder", lambda kind: folder.parent / kind)
    run("medusa", tmp_path / "x", "--to", "vllm")
    same_heads(tmp_path / "x", *made)
    fails("conditioned", tmp_path / "y", "--to", "orbax", parts=["no such file or folder"])
    monkeypatch.chdir(tmp_path)
    own(tmp_path / "medusa", other := values(seed=1, own_unembedding=True))
    run("medusa", tmp_path / "z", "--to", "orbax")
    same_heads(tmp_path / "z", *other)


# --check


def sabotage(monkeypatch, name: str, change) -> None:
    """Make a runtime's plan slip."""
    right = head_targets.PLANS[name]
    monkeypatch.setitem(head_targets.PLANS, name, lambda request: change(right(request)))


def with_config(**changes):
    def change(plan):
        config = json.loads(plan.texts["config.json"])
        config = {n: v for n, v in (config | changes).items() if v != "DROP"}
        return dataclasses.replace(plan, texts=plan.texts | {"config.json": json.dumps(config)})

    return change


def with_tensor(name, value):
    def change(plan):
        tensors = {
            file: {n: value(t) if n == name else t for n, t in held.items()}
            for file, held in plan.tensors.items()
        }
        return dataclasses.replace(plan, tensors=tensors)

    return change


def renamed(old, new):
    def change(plan):
        tensors = {f: {n.replace(old, new): t for n, t in held.items()} for f, held in plan.tensors.items()}
        return dataclasses.replace(plan, tensors=tensors)

    return change


def transposed(tensor):
    return lazy.of_array(np.ascontiguousarray(np.asarray(tensor).T))


def nudged(tensor):
    array = np.array(tensor)
    array[0] += 1e-4
    return lazy.of_array(array)


SLIPS = [
    ("vllm", with_config(medusa_fc_bias=False)),
    ("vllm", with_config(original_lm_head=True)),
    ("vllm", with_config(num_heads=2)),
    ("vllm", with_config(vocab_size="DROP")),
    ("vllm", with_config(num_attention_heads=8)),
    ("vllm", with_config(architectures=["LlamaForCausalLM"])),
    ("vllm", renamed("lm_heads.1", "lm_heads.01")),
    ("vllm", with_tensor("blocks.1.layers.0.weight", transposed)),
    ("vllm", with_tensor("lm_heads.2.weight", nudged)),
    ("tgi", with_config(architectures=["x"])),
    ("tgi", with_config(medusa_num_heads=4)),
    ("tgi", renamed("2.1.weight", "2.1.wieght")),
    ("tgi", with_tensor("0.0.linear.bias", nudged)),
    ("trtllm", with_config(num_medusa_heads="DROP")),
    ("trtllm", with_config(num_medusa_layers=2)),
    ("trtllm", with_tensor("1.0.linear.weight", transposed)),
    ("reference", with_tensor("1.0.linear.weight", transposed)),
    ("reference", with_config(version="2")),
    ("reference", renamed("0.0.linear.bias", "0.0.bias")),
]


@pytest.mark.parametrize(("to", "slip"), SLIPS, ids=range(len(SLIPS)))
def test_check_finds_slips(tmp_path, monkeypatch, capsys, to, slip):
    heads = own(tmp_path / "heads", own_unembedding=True)
    run(heads, tmp_path / "right", "--to", to, "--check")
    sabotage(monkeypatch, to, slip)
    run(heads, tmp_path / "wrong", "--to", to, "--check", status=1)
    assert "check failed: " in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heads", "right"]


@pytest.mark.parametrize("to", ["vllm", "trtllm"])
def test_check_finds_what_rounding_would_hide(tmp_path, monkeypatch, to):
    """A lost bias of ordinary size changes logits by less than a step of bfloat16 would."""
    config, layers, _ = values(own_unembedding=True)
    layers["bias"] *= 1e-3
    heads = own(tmp_path / "heads", (config, layers, None))
    names = {"vllm": "blocks.0.layers.0.bias", "trtllm": "0.0.linear.bias"}
    sabotage(monkeypatch, to, with_tensor(names[to], lambda t: lazy.zeros(t.shape, t.dtype)))
    run(heads, tmp_path / "wrong", "--to", to, "--check", "--dtype", "bfloat16", status=1)


@pytest.mark.parametrize("to", ["orbax", "medusa-jax"])
def test_check_finds_slips_of_our_own(tmp_path, monkeypatch, to):
    heads = own(tmp_path / "heads", own_unembedding=True, num_layers=2)
    real = lazy.Stack.blocks
    monkeypatch.setattr(
        lazy.Stack, "blocks", lambda self, *a: ((p, b + (p[-1] == slice(0, D))) for p, b in real(self, *a))
    )
    run(heads, tmp_path / "wrong", "--to", to, "--check", status=1)
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


@pytest.mark.parametrize("to", ["vllm", "trtllm", "tgi", "orbax", "hf"])
def test_check_with_a_wide_model(tmp_path, model, to, capsys):
    """bfloat16 heads of a float32 model: its unembedding is rounded where it is copied, and only there."""
    heads = own(tmp_path / "heads", dtype=BF16)
    run(heads, tmp_path / "x", "--to", to, "--model", model, "--check")
    rounded = "the model's unembedding is rounded from float32 to bfloat16" in capsys.readouterr().err
    assert rounded == (to in ("vllm", "trtllm"))


def test_checked_logits_are_the_heads(tmp_path, model):
    """What --check computes is what decoding computes."""
    from medusa_jax import heads as heads_module

    for fields in (
        {"own_unembedding": True},
        {"conditioned": True, "num_layers": 2},
        {"draft_vocab_size": 9},
    ):
        config, layers, token_map = made = values(**fields)
        folder = own(tmp_path / str(fields), made)
        opened, table = open_heads(folder), lazy.of_array(table_of(model))
        sides = head_check._Sides(opened, table, head_check.READERS["medusa-jax"](folder), F32)
        states, path = (jnp.asarray(x, jnp.float32) for x in sides.inputs)
        placed = jax.tree.map(jnp.asarray, layers)
        tokens = None if token_map is None else jnp.asarray(token_map)
        params = heads_module.attach(config, placed, jnp.asarray(table_of(model)), tokens)
        for m in range(M):
            z = heads_module.state(params, config, states, m, path)
            ours = heads_module.logits(params, config, z, m, jnp.asarray(table_of(model)))
            np.testing.assert_allclose(sides.got(m), ours, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(sides.wanted(m), ours, rtol=1e-4, atol=1e-5)
