"""Reading and writing checkpoints: medusa_jax.weights.params and .hf."""

import errno
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from medusa_jax.config import ModelConfig, read_config
from medusa_jax.errors import UserError
from medusa_jax.weights import checkpoints, hf
from medusa_jax.weights import params as weights
from medusa_jax.weights.source import TensorInfo

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
EMBED, HEAD = weights.EMBEDDING, weights.UNEMBEDDING


def make_config(**changes) -> ModelConfig:
    fields = {
        "model_type": "llama",
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 3e-4,
    }
    return ModelConfig.from_hf(fields | changes)


CONFIG = make_config()


def make_arrays(config=CONFIG, dtype: np.dtype = F32, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = weights.expected_shapes(config)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(folder: Path, arrays: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A checkpoint folder made by the safetensors library, not by the code under test."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(arrays, folder / hf.SINGLE)
        return folder
    names = list(arrays)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: arrays[n] for n in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder: Path, config=CONFIG, dtype: np.dtype = F32, shardings=None):
    return weights.flatten(weights.load_params(hf.SafetensorsCheckpoint(folder), config, dtype, shardings))


def names_in(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir()]


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def assert_same(loaded, arrays) -> None:
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype, name
        assert loaded[name].shape == array.shape, name
        assert bits(loaded[name]) == bits(array), name


def shardings_for(config, rows: int = 4, columns: int = 2):
    """Every matrix over rows, output projections over columns, replicated over what is left."""
    mesh = jax.make_mesh((rows, columns), ("r", "c"), axis_types=(AxisType.Auto,) * 2)

    def spec(name, shape):
        if len(shape) == 1:
            return PartitionSpec()
        return PartitionSpec(None, "r") if "o_proj" in name or "down" in name else PartitionSpec("r")

    shapes = weights.expected_shapes(config)
    return weights.unflatten({n: NamedSharding(mesh, spec(n, s)) for n, s in shapes.items()})


class CountingSource:
    """Arrays in memory as a TensorSource that counts how often every element is read."""

    path = "counted"

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.reads = {name: np.zeros(a.shape, int) for name, a in arrays.items()}
        self.calls: dict[str, int] = dict.fromkeys(arrays, 0)

    def infos(self):
        return {name: TensorInfo(a.shape, a.dtype) for name, a in self.arrays.items()}

    def read(self, name, index=None):
        at = ... if index is None else index
        self.reads[name][at] += 1
        self.calls[name] += 1
        return self.arrays[name][at].copy()


# Names and shapes


def test_paths_follow_the_names():
    path = ("model", "layers_0", "self_attn", "q_proj", "weight")
    assert weights.to_path("model.layers.0.self_attn.q_proj.weight") == path
    assert weights.to_path("model.layers.norm.xlayers.1.y") == (
        "model",
        "layers",
        "norm",
        "xlayers",
        "1",
        "y",
    )
    assert weights.to_name(path) == "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(UserError, match="layers_0"):
        weights.to_path("model.layers_0.x")
    with pytest.raises(UserError, match="dots"):
        weights.to_name(("a.b",))


PARTS = st.sampled_from(["layers", "model", "0", "12", "007", "layer", "weight", "", "xlayers", "layersx"])


@given(st.lists(PARTS, min_size=1, max_size=7).map(".".join))
def test_names_come_back(name):
    assert weights.to_name(weights.to_path(name)) == name


@given(st.lists(PARTS | st.just("layers_3") | st.just("layers_03"), min_size=1, max_size=7))
def test_paths_come_back(parts):
    path = tuple(parts)
    if not any(a == "layers" and b.isdigit() for a, b in itertools.pairwise(path)):
        assert weights.to_path(weights.to_name(path)) == path


def test_expected_shapes_by_family():
    plain = weights.expected_shapes(CONFIG)
    assert plain[EMBED] == plain[HEAD] == (24, 16)
    assert plain["model.layers.1.self_attn.q_proj.weight"] == (32, 16)
    assert plain["model.layers.1.self_attn.k_proj.weight"] == (16, 16)
    assert plain["model.layers.1.self_attn.o_proj.weight"] == (16, 32)
    assert plain["model.layers.1.mlp.down_proj.weight"] == (16, 40)
    assert plain["model.norm.weight"] == (16,)
    assert len(plain) == 2 * 9 + 3
    tied = weights.expected_shapes(make_config(tie_word_embeddings=True))
    assert set(plain) - set(tied) == {HEAD}
    extra = set(weights.expected_shapes(make_config(model_type="qwen2"))) - set(plain)
    assert extra == {f"model.layers.{i}.self_attn.{p}_proj.bias" for i in (0, 1) for p in "qkv"}
    qwen3 = weights.expected_shapes(make_config(model_type="qwen3"))
    assert qwen3["model.layers.0.self_attn.k_norm.weight"] == (8,)
    biased = weights.expected_shapes(make_config(attention_bias=True, mlp_bias=True))
    assert biased["model.layers.0.self_attn.o_proj.bias"] == (16,)
    assert biased["model.layers.0.mlp.gate_proj.bias"] == (40,)
    assert len(biased) == len(plain) + 2 * 7


# Loading


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_loads_what_was_written(tmp_path, shards, sharded):
    arrays = make_arrays()
    shardings = shardings_for(CONFIG) if sharded else None
    loaded = load(write(tmp_path, arrays, shards), shardings=shardings)
    assert_same(loaded, arrays)
    if shardings is not None:
        flat = weights.flatten(shardings)
        assert all(loaded[name].sharding == flat[name] for name in loaded)
    else:
        assert not any(array.committed for array in loaded.values())


@pytest.mark.parametrize("stored", [np.dtype(np.float16), BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("sharded", [False, True])
def test_casts(tmp_path, stored, dtype, sharded, monkeypatch):
    monkeypatch.setattr(weights, "_WHOLE_BYTES", 64)  # so that wide tensors are read in pieces
    arrays = make_arrays(dtype=stored)
    arrays["model.norm.weight"][:3] = [np.inf, -np.inf, np.nan]
    loaded = load(write(tmp_path, arrays), dtype=dtype, shardings=shardings_for(CONFIG) if sharded else None)
    for name, array in arrays.items():
        ours, theirs = (np.asarray(a, np.float32) for a in (loaded[name], array.astype(dtype)))
        np.testing.assert_array_equal(ours, theirs)
        assert loaded[name].dtype == dtype


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("grid", [None, (8, 1), (4, 2), (1, 8), (2, 4)])
def test_every_element_is_read_once(dtype, grid, monkeypatch):
    monkeypatch.setattr(weights, "_WHOLE_BYTES", 64)
    source = CountingSource(make_arrays())
    shardings = None if grid is None else shardings_for(CONFIG, *grid)
    loaded = weights.flatten(weights.load_params(source, CONFIG, dtype, shardings))
    assert all((counts == 1).all() for counts in source.reads.values())
    # float32 read for bfloat16 comes in pieces, no larger than half of the parameter.
    assert source.calls[EMBED] == (4 if dtype == BF16 else 1)
    for name, array in source.arrays.items():
        assert bits(loaded[name]) == bits(array.astype(dtype)), name


class PartOfADevicesSharding:
    """Stands for a process that holds some devices of a larger mesh: only their blocks may be read."""

    def __init__(self, *indices):
        self.indices = indices

    def addressable_devices_indices_map(self, shape):
        return dict(enumerate(self.indices))


@pytest.mark.parametrize(
    ("indices", "calls"),
    [
        ([(slice(0, 6), slice(None)), (slice(6, 12), slice(None)), (slice(6, 12), slice(None))], 1),
        ([(slice(0, 6), slice(None)), (slice(18, 24), slice(None))], 2),
        ([(slice(0, 12), slice(0, 8)), (slice(12, 24), slice(8, 16))], 2),
        ([(slice(None), slice(8, 16)), (slice(None), slice(8, 16))], 1),
    ],
)
def test_a_process_reads_only_its_blocks(indices, calls, monkeypatch):
    source = CountingSource({EMBED: np.arange(24 * 16, dtype=F32).reshape(24, 16)})
    got = []
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, s, get: [get(i) for i in s.indices])
    monkeypatch.setattr(jax, "block_until_ready", got.extend)

    def read(index):
        return source.read(EMBED, index)

    weights._place(read, source.infos()[EMBED], F32, PartOfADevicesSharding(*indices))  # type: ignore[arg-type]
    expected = np.zeros((24, 16), int)
    for index in indices:
        expected[index] = 1
    np.testing.assert_array_equal(source.reads[EMBED], expected)
    assert source.calls[EMBED] == calls
    for block, index in zip(got, indices, strict=True):
        np.testing.assert_array_equal(block, source.arrays[EMBED][index])


def test_progress_ends_at_the_total(tmp_path):
    arrays = make_arrays()
    seen = []
    source = hf.SafetensorsCheckpoint(write(tmp_path, arrays))
    weights.load_params(source, CONFIG, BF16, progress=lambda done, total: seen.append((done, total)))
    total = sum(a.nbytes for a in arrays.values())
    assert [t for _, t in seen] == [total] * len(arrays)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1] == (total, total)


def test_parameters_do_not_alias_the_source():
    class Shared(CountingSource):
        def read(self, name, index=None):
            return self.arrays[name][... if index is None else index]

    source = Shared(make_arrays())
    loaded = weights.flatten(weights.load_params(source, CONFIG, F32))
    before = bits(loaded[EMBED])
    source.arrays[EMBED][:] = 7
    assert bits(loaded[EMBED]) == before


def test_rejects_other_types_to_load_as():
    with pytest.raises(UserError, match="float16"):
        weights.load_params(CountingSource({}), CONFIG, np.float16)


# Accounting for every key


def fail(arrays, config=CONFIG) -> str:
    source = CountingSource(arrays)
    with pytest.raises(UserError) as caught:
        weights.load_params(source, config, F32)
    assert not any(source.calls.values()), "something was read before the error"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_error_names_everything_wrong():
    arrays = make_arrays()
    del arrays["model.norm.weight"]
    arrays["model.bogus.weight"] = np.zeros(3, F32)
    arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((40, 15), F32)
    arrays["model.layers.1.mlp.up_proj.weight"] = np.zeros((40, 16), np.float64)
    message = fail(arrays)
    for part in (
        "counted:",
        "1 missing tensor: model.norm.weight",
        "1 unknown tensor: model.bogus.weight",
        "model.layers.0.mlp.up_proj.weight is [40, 15], expected [40, 16]",
        "model.layers.1.mlp.up_proj.weight is float64",
    ):
        assert part in message


def test_many_are_counted_and_three_named():
    message = fail({HEAD: np.zeros((24, 16), F32)})
    assert "20 missing tensors:" in message
    assert message.count("model.") == 3


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int64, ml_dtypes.float8_e4m3fn, np.bool_])
def test_element_types_are_refused_by_name(dtype):
    arrays = make_arrays()
    arrays[EMBED] = arrays[EMBED].astype(dtype)
    assert f"{EMBED} is {np.dtype(dtype)}" in fail(arrays)


def test_old_rotary_frequencies_are_skipped():
    arrays = make_arrays()
    source = CountingSource(arrays | {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float64)})
    assert_same(weights.flatten(weights.load_params(source, CONFIG, F32)), arrays)
    assert "unknown" in fail(arrays | {"model.layers.1.self_attn.rotary_emb.other": np.ones(4, F32)})


@given(data=st.data())
@settings(deadline=None)
def test_any_changed_key_is_named(data):
    arrays = make_arrays()
    name = data.draw(st.sampled_from(sorted(arrays)))
    change = data.draw(st.sampled_from(["drop", "add", "rename", "shape", "transpose", "type"]))
    array = arrays[name]
    named = name
    if change == "drop":
        del arrays[name]
    elif change in ("add", "rename"):
        named = (
            data.draw(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)) + "." + name
        )
        arrays[named] = array
        if change == "rename":
            del arrays[name]
    elif change == "shape":
        arrays[name] = np.resize(array, (*array.shape[:-1], array.shape[-1] + data.draw(st.integers(1, 3))))
    elif change == "transpose":
        arrays[name] = array.reshape(*array.shape, 1)
    else:
        arrays[name] = array.astype(data.draw(st.sampled_from([np.float64, np.int32])))
    message = fail(arrays)
    assert named in message
    assert name in message


# Tied embeddings


@pytest.mark.parametrize("grid", [None, (8, 1), (2, 4)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_tied_copy_is_accepted_and_read_once(grid, dtype, monkeypatch):
    monkeypatch.setattr(weights, "_WHOLE_BYTES", 64)  # as bfloat16 the table comes in pieces
    monkeypatch.setattr(weights, "_COMPARED_BYTES", 5 * 16 * 4)  # five rows at a time, of 24
    config = make_config(tie_word_embeddings=True)
    arrays = make_arrays(config)
    arrays[EMBED][3, 3] = np.nan
    source = CountingSource({HEAD: arrays[EMBED].copy()} | arrays)
    shardings = None if grid is None else shardings_for(config, *grid)
    loaded = weights.flatten(weights.load_params(source, config, dtype, shardings))
    assert_same(loaded, {name: array.astype(dtype) for name, array in arrays.items()})
    assert all((counts == 1).all() for counts in source.reads.values())


@pytest.mark.parametrize("where", [(0, 0), (7, 15), (23, 15)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_tied_copy_that_differs_is_an_error(tmp_path, where, dtype, monkeypatch):
    monkeypatch.setattr(weights, "_COMPARED_BYTES", 5 * 16 * 4)
    config = make_config(tie_word_embeddings=True)
    arrays = make_arrays(config)
    head = arrays[EMBED].copy()
    head[where] = np.nextafter(head[where], np.float32(9))  # vanishes in bfloat16, still differs
    with pytest.raises(UserError, match=rf"tie_word_embeddings.*lm_head.*row {where[0]};"):
        load(write(tmp_path, arrays | {HEAD: head}), config, dtype)


def test_a_tied_copy_of_another_type_is_compared_by_value():
    config = make_config(tie_word_embeddings=True)
    arrays = make_arrays(config)
    head = arrays[EMBED].astype(BF16)
    arrays[EMBED] = head.astype(F32)
    assert_same(
        weights.flatten(weights.load_params(CountingSource(arrays | {HEAD: head}), config, F32)), arrays
    )
    head[5, 5] += 1
    with pytest.raises(UserError, match="row 5;"):
        weights.load_params(CountingSource(arrays | {HEAD: head}), config, F32)


# Folders


def broken(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        hf.SafetensorsCheckpoint(folder).infos()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_weights(tmp_path):
    assert "no such folder" in broken(tmp_path / "none")
    assert "no weights" in broken(tmp_path)
    (tmp_path / "x.Q4.gguf").touch()
    assert "x.Q4.gguf" in broken(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pickle" in broken(tmp_path)
    assert "save_pretrained" in broken(tmp_path)


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / hf.INDEX).read_text())
    change(index["weight_map"])
    (folder / hf.INDEX).write_text(json.dumps(index))


def test_index_and_shards_must_agree(tmp_path):
    arrays = make_arrays()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    folder = write(tmp_path / "lost", arrays, 2)
    (folder / second).unlink()
    assert second in broken(folder)
    assert "no such file" in broken(folder)

    folder = write(tmp_path / "twice", arrays, 2)
    save_file(load_file(folder / second) | {EMBED: arrays[EMBED]}, folder / second)
    assert EMBED in broken(folder)
    assert "also in model-00001" in broken(folder)

    folder = write(tmp_path / "absent", arrays, 2)
    edit_index(folder, lambda m: m.update({"model.ghost": first}))
    assert "no tensor 'model.ghost'" in broken(folder)

    folder = write(tmp_path / "elsewhere", arrays, 2)
    edit_index(folder, lambda m: m.update({EMBED: second}))
    assert f"holds tensor '{EMBED}'" in broken(folder)

    folder = write(tmp_path / "unlisted", arrays, 2)
    edit_index(folder, lambda m: m.pop(EMBED))
    assert f"'{EMBED}' is not in {hf.INDEX}" in broken(folder)

    folder = write(tmp_path / "both", arrays, 2)
    save_file(arrays, folder / hf.SINGLE)
    assert "both" in broken(folder)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/x.safetensors", "a\\b.safetensors", "x.bin", "", 3, None]
)
def test_index_stays_in_its_folder(tmp_path, shard):
    save_file({"a": np.zeros(1, F32)}, tmp_path / "x.safetensors")
    folder = write(tmp_path / "in", make_arrays(), 2)
    edit_index(folder, lambda m: m.update({EMBED: shard}))
    assert "expected a .safetensors file name" in broken(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_index(tmp_path, text):
    (tmp_path / hf.INDEX).write_text(text)
    assert hf.INDEX in broken(tmp_path)


def test_empty_and_unknown_types(tmp_path):
    (tmp_path / hf.SINGLE).touch()
    assert "empty" in broken(tmp_path)
    for kind, size in (("F8_E8M0", 2), ("Q9", 2)):
        header = json.dumps({"t": {"dtype": kind, "shape": [2], "data_offsets": [0, size]}}).encode()
        (tmp_path / hf.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        assert kind in broken(tmp_path)


@given(cut=st.integers(0, 10_000), extra=st.integers(0, 3))
@settings(deadline=None)
def test_truncated_or_prolonged_anywhere(cut, extra):
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), {"a.weight": np.ones((3, 5), F32), "b": np.ones(4, BF16)})
        whole = (folder / hf.SINGLE).read_bytes()
        changed = whole + bytes(extra) if extra else whole[: cut % len(whole)]
        (folder / hf.SINGLE).write_bytes(changed)
        assert hf.SINGLE in broken(folder)


@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(deadline=None)
def test_a_changed_header_byte_is_an_error_or_another_header(at, value):
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), {"a.weight": np.ones((3, 5), F32)})
        data = bytearray((folder / hf.SINGLE).read_bytes())
        data[at % (8 + int.from_bytes(data[:8], "little"))] = value
        (folder / hf.SINGLE).write_bytes(data)
        try:
            source = hf.SafetensorsCheckpoint(folder)
            for tensor, info in source.infos().items():
                assert source.read(tensor).shape == info.shape
        except UserError as error:
            assert hf.SINGLE in str(error)  # noqa: PT017


@pytest.mark.parametrize("where", ["open", "stat"])
def test_files_that_may_not_be_read(tmp_path, monkeypatch, where):
    folder = write(tmp_path, make_arrays())
    real = getattr(Path, where)

    def refuse(self, *args, **options):  # these tests may run as root, who may read everything
        if self.name == hf.SINGLE:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, *args, **options)

    monkeypatch.setattr(Path, where, refuse)
    assert broken(folder).endswith(f"{hf.SINGLE}: cannot be read (Permission denied)")


def test_blocks_of_a_file(tmp_path):
    arrays = make_arrays(dtype=BF16)
    source = hf.SafetensorsCheckpoint(write(tmp_path, arrays, 2))
    for index in [(slice(3, 9), slice(None)), (slice(0, 24), slice(4, 7)), (slice(23, 24), slice(15, 16))]:
        assert bits(source.read(EMBED, index)) == bits(arrays[EMBED][index])
    with pytest.raises(UserError, match="no tensor 'nope'"):
        source.read("nope")


# Saving


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("limit", [5e9, 4000])
def test_saved_and_loaded_is_bit_exact(tmp_path, dtype, sharded, limit):
    arrays = make_arrays(dtype=dtype)
    params = weights.unflatten(arrays)
    if sharded:
        params = jax.tree.map(jax.device_put, params, shardings_for(CONFIG))
    hf.save_pretrained(tmp_path / "out", params, CONFIG, max_shard_bytes=limit)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors*"))
    if limit > 1e6:
        assert files == [hf.SINGLE]
    else:
        assert len(files) > 3
        total = json.loads((tmp_path / "out" / hf.INDEX).read_text())["metadata"]["total_size"]
        assert total == sum(a.nbytes for a in arrays.values())
        shards = [load_file(tmp_path / "out" / f) for f in files if not f.endswith(".json")]
        assert all(len(s) == 1 or sum(a.nbytes for a in s.values()) <= limit for s in shards)
    assert_same(load(tmp_path / "out", dtype=dtype), arrays)
    assert read_config(tmp_path / "out") == CONFIG
    assert names_in(tmp_path) == ["out"]


def test_mixed_types_are_aligned(tmp_path):
    arrays = {"a": np.ones(3, BF16), "b": np.arange(4, dtype=F32), "c": np.ones(1, np.float16)}
    hf.write_safetensors(tmp_path / "x.safetensors", arrays)
    assert_same(load_file(tmp_path / "x.safetensors"), arrays)
    raw = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    assert header["__metadata__"] == {"format": "pt"}
    assert all(header[n]["data_offsets"][0] % a.itemsize == 0 for n, a in arrays.items())


def test_saving_leaves_no_host_copies_behind(tmp_path):
    sharding = weights.flatten(shardings_for(CONFIG))[EMBED]
    array = jax.device_put(make_arrays()[EMBED], sharding)
    hf.write_safetensors(tmp_path / "x.safetensors", {EMBED: array})
    assert array._npy_value is None  # where a JAX array keeps its host copy


def test_a_target_in_use_is_refused(tmp_path):
    params = weights.unflatten(make_arrays())
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        hf.save_pretrained(tmp_path / "used", params, CONFIG)
    assert (tmp_path / "used" / "notes").read_text() == "mine"
    with pytest.raises(UserError, match="not a folder"):
        hf.save_pretrained(tmp_path / "used" / "notes", params, CONFIG)
    (tmp_path / "empty").mkdir()
    hf.save_pretrained(tmp_path / "empty", params, CONFIG)
    assert (tmp_path / "empty" / hf.SINGLE).is_file()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "~nobody-of-that-name/x"])
def test_targets_that_cannot_be(name):
    with pytest.raises(UserError, match=r"cannot be read|not a name|home folder"):
        hf.save_pretrained(name, weights.unflatten(make_arrays()), CONFIG)


def test_a_target_of_the_longest_name(tmp_path):
    hf.save_pretrained(tmp_path / ("x" * 255), weights.unflatten(make_arrays()), CONFIG)
    assert names_in(tmp_path) == ["x" * 255]


def test_parameters_must_fit_the_configuration(tmp_path):
    arrays = make_arrays()
    del arrays[HEAD]
    with pytest.raises(UserError, match=r"missing tensor: lm_head\.weight"):
        hf.save_pretrained(tmp_path / "out", weights.unflatten(arrays), CONFIG)
    assert names_in(tmp_path) == []


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


class FailingTokenizer:
    eos_token_id = 2

    def save_pretrained(self, folder):
        raise Exception("No space left on device (os error 28)")


@pytest.mark.parametrize("what", ["weights", "settings", "tokenizer", "interrupt", "parent"])
def test_a_failing_save_leaves_nothing(tmp_path, monkeypatch, what):
    tokenizer, error, target = None, UserError, tmp_path / "out"
    if what == "weights":
        calls = []
        real = hf.write_safetensors
        monkeypatch.setattr(
            hf, "write_safetensors", lambda *a: real(*a) if not calls and not calls.append(0) else full_disk()
        )
    elif what == "settings":
        monkeypatch.setattr(hf, "config_json", full_disk)
    elif what == "tokenizer":
        tokenizer = FailingTokenizer()
    elif what == "interrupt":
        error = KeyboardInterrupt
        monkeypatch.setattr(hf, "config_json", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        (tmp_path / "file").touch()
        target = tmp_path / "file" / "out"
    with pytest.raises(error) as caught:
        hf.save_pretrained(target, weights.unflatten(make_arrays()), CONFIG, tokenizer, max_shard_bytes=4000)
    if what in ("weights", "settings", "tokenizer"):
        assert "No space left on device" in str(caught.value)
    assert [p for p in names_in(tmp_path) if p != "file"] == []


def test_transformers_reads_the_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1, "hello": 2, "world": 3, "<unk>": 4}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    params = weights.unflatten(make_arrays(dtype=BF16))
    generation = {"eos_token_id": [1, 3], "max_length": 77}
    hf.save_pretrained(tmp_path / "out", params, CONFIG, tokenizer, generation)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.head_dim, config.rms_norm_eps) == ("llama", 8, 3e-4)
    assert "bfloat16" in str(config.dtype)
    assert (config.bos_token_id, config.eos_token_id) == (0, [1, 3])
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_length == 77
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("hello world").input_ids
    assert ids == [2, 3]


# The other files of a folder


def folder_with(tmp_path: Path, generation=None, **config) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


@pytest.mark.parametrize(
    ("generation", "read"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 3}),
        ({"eos_token_id": 3.0}, {"eos_token_id": 3}),
        ({"eos_token_id": [1, 2.0]}, {"eos_token_id": [1, 2]}),
        ({"eos_token_id": None}, {"eos_token_id": 7}),
        ({}, {"eos_token_id": 7}),
        ({"top_k": 50.0, "do_sample": True}, {"top_k": 50, "do_sample": True, "eos_token_id": 7}),
        ({"top_k": -1}, {"top_k": 0, "eos_token_id": 7}),
        ({"top_p": None, "other": {"x": 1}}, {"top_p": None, "other": {"x": 1}, "eos_token_id": 7}),
        (
            {"max_new_tokens": 9.0, "temperature": 0},
            {"max_new_tokens": 9, "temperature": 0, "eos_token_id": 7},
        ),
    ],
)
def test_generation_config(tmp_path, generation, read):
    assert checkpoints.read_generation_config(folder_with(tmp_path, generation, eos_token_id=7), 24) == read


def test_no_generation_config(tmp_path):
    assert checkpoints.read_generation_config(folder_with(tmp_path), 24) == {"eos_token_id": None}
    (tmp_path / "generation_config.json").symlink_to("nothing")
    with pytest.raises(UserError, match=r"/generation_config\.json: no such file"):
        checkpoints.read_generation_config(folder_with(tmp_path), 24)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(UserError, match=r"/config\.json: eos_token_id is 24, expected an id below"):
        checkpoints.read_generation_config(folder_with(tmp_path, eos_token_id=24), 24)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("eos_token_id", value) for value in ({}, "2", True, -1, 24, 1.5, [1, "2"], [[1]], 10**400, 1e999)),
        *(("temperature", value) for value in ("1", -1, True, [1], float("nan"), 1e999, 10**400)),
        *(("top_k", value) for value in ("50", -2, 1.5, True, {}, 10**400, 1e999)),
        *(("top_p", value) for value in ("1", 0, 1.1, True, float("nan"), 10**400)),
        *(("min_p", value) for value in ("1", -0.1, 1.1, False, [])),
        *(("repetition_penalty", value) for value in ("1", 0, -1, 1e-300, 1e999, 10**400)),
        *(("max_new_tokens", value) for value in ("1", 0, -1, 2.5, True, 10**400)),
        *(("do_sample", value) for value in (1, 0, "true", [], {})),
    ],
)
def test_bad_generation_config(tmp_path, field, value):
    folder = folder_with(tmp_path, {field: value})
    with pytest.raises(UserError, match=rf"/generation_config\.json: {field} is .*, expected"):
        checkpoints.read_generation_config(folder, 24)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    import tiny

    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    last = max(tokenizer.get_vocab().values())
    assert len(checkpoints.read_tokenizer(tmp_path, last + 1)) == len(tokenizer)
    with pytest.raises(UserError, match=f"has id {last}, but vocab_size in config.json is {last}"):
        checkpoints.read_tokenizer(tmp_path, last)


# Memory

PEAK = """
import sys
from pathlib import Path
import jax, ml_dtypes, numpy as np
from medusa_jax.weights import hf, params
sys.path.insert(0, {tests!r})
from test_weights import BIG, shardings_for

def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field + ":"))
    return int(line.split()[1]) * 1024

jax.devices()
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is resident now
before = status("VmRSS")
dtype = np.dtype({dtype!r})
shardings = shardings_for(BIG) if {sharded} else None
loaded = params.load_params(hf.SafetensorsCheckpoint({folder!r}), BIG, dtype, shardings)
print(status("VmHWM") - before)
"""
BIG = make_config(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, head_dim=256
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("stored", "dtype", "sharded"),
    [(F32, F32, False), (BF16, F32, False), (F32, BF16, False), (F32, F32, True), (F32, BF16, True)],
)
def test_peak_memory(tmp_path, stored, dtype, sharded):
    write(tmp_path, make_arrays(BIG, stored), 2)
    script = PEAK.format(
        tests=str(Path(__file__).parent), dtype=dtype.name, sharded=sharded, folder=str(tmp_path)
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape in weights.expected_shapes(BIG).values()]
    bound = sum(sizes) + 2 * max(sizes)
    assert sum(sizes) > 32e6  # large against what JAX itself takes while running
    peak = int(run.stdout)
    assert sum(sizes) < peak < bound, (
        f"peak {peak / 1e6:.1f} MB, loaded {sum(sizes) / 1e6:.1f} MB, bound {bound / 1e6:.1f}"
    )
