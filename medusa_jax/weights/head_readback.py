"""Reading converted heads back, each kind of target as its runtime reads it.

Neither names nor file formats are taken from the writers: a slip in those would otherwise be made twice.
What a runtime would silently leave out, it is left out here, and shows as a difference.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from medusa_jax import checkpoint
from medusa_jax.weights.lazy import Lazy, of_array

_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}
_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
Tensors = Mapping[str, Lazy]


@dataclasses.dataclass(frozen=True)
class Head:
    """One head as a runtime runs it: pairs of weight and bias, and its table; None: the model's."""

    layers: list[tuple[Lazy, Lazy]]
    table: Lazy | None
    mixer: tuple[Lazy, Lazy] | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """What a runtime would run. tokens [V']: those that the heads score, None for the whole vocabulary.

    table: the model's own, where the target holds a whole model.
    """

    heads: list[Head]
    tokens: np.ndarray | None = None
    table: Lazy | None = None


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _stored(file: Path, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Lazy:
    """An array that lies at a known place in a file."""
    width = math.prod(shape[1:])

    def read(first: int, last: int) -> np.ndarray:
        count, offset = (last - first) * width, start + first * width * dtype.itemsize
        return np.fromfile(file, dtype, count, offset=offset).reshape(last - first, *shape[1:])

    return Lazy(shape, dtype, read)


def _safetensors(file: Path) -> dict[str, Lazy]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return {
        name: _stored(
            file, 8 + size + entry["data_offsets"][0], tuple(entry["shape"]), _TYPES[entry["dtype"]]
        )
        for name, entry in header.items()
    }


class _Unpickler(pickle.Unpickler):
    """What a state dict's pickle may name, and nothing else; tensors become places in the archive."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *rest: (storage, offset, shape, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _torch(file: Path) -> dict[str, Lazy]:
    tensors = {}
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        root = archive.namelist()[0].partition("/")[0]
        with archive.open(f"{root}/data.pkl") as pickled:
            state = _Unpickler(pickled).load()
        for name, ((_, dtype, key, _, count), offset, shape, strides) in state.items():
            member = archive.getinfo(f"{root}/data/{key}")
            stream.seek(member.header_offset + 26)
            lengths = [int.from_bytes(stream.read(2), "little") for _ in range(2)]
            packed = member.compress_type != zipfile.ZIP_STORED
            wanted = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            if packed or offset or strides != wanted or count * dtype.itemsize != member.file_size:
                raise ValueError(f"{name} is not stored plainly")
            tensors[name] = _stored(file, member.header_offset + 30 + sum(lengths), shape, dtype)
    return tensors


def _v1(tensors: Tensors, heads: int, layers: int) -> Found:
    found = []
    for h in range(heads):
        pairs = [(tensors[f"{h}.{n}.linear.weight"], tensors[f"{h}.{n}.linear.bias"]) for n in range(layers)]
        found.append(Head(pairs, tensors[f"{h}.{layers}.weight"]))
    return Found(found)


def _v2(tensors: Tensors, heads: int, layers: int) -> Found:
    return Found(
        [
            Head(
                [(tensors[f"{h}.{n}.linear.weight"], tensors[f"{h}.{n}.linear.bias"]) for n in range(layers)],
                None,
            )
            for h in range(heads)
        ]
    )


def _reference(folder: Path) -> Found:
    config = _json(folder / "config.json")
    counts = config["medusa_num_heads"], config["medusa_num_layers"]
    if config.get("version") == "2":
        return _v2(_safetensors(folder / "medusa_lm_head.safetensors"), *counts)
    return _v1(_twins(folder), *counts)


def _twins(folder: Path) -> dict[str, Lazy]:
    """The tensors of the .pt file, after a look at its safetensors twin."""
    pickled, twin = _torch(folder / "medusa_lm_head.pt"), _safetensors(folder / "medusa_lm_head.safetensors")
    for name in {*pickled, *twin}:
        a, b = pickled[name], twin[name]
        same = (a.shape, a.dtype) == (b.shape, b.dtype) and all(
            block.tobytes() == b.read(rows.start, rows.stop).tobytes() for (rows,), block in a.blocks()
        )
        if not same:
            raise ValueError(f"{name} differs between the .pt file and its safetensors twin")
    return pickled


def _tgi(folder: Path) -> Found:
    config = _json(folder / "config.json")
    if "architectures" in config or not config["base_model_name_or_path"]:
        raise ValueError("config.json must not have architectures, and must name the base model")
    tensors = _safetensors(folder / "medusa_lm_head.safetensors")
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    try:
        return _v1(tensors, heads, layers)
    except KeyError:
        if layers != 1:
            raise
        return _v2(tensors, heads, 1)


def _trtllm(folder: Path) -> Found:
    config = _json(folder / "config.json")
    heads, layers = config["num_medusa_heads"], config["medusa_num_layers"]
    if (heads, layers) != (config["medusa_num_heads"], config["num_medusa_layers"]):
        raise ValueError("config.json has two spellings of a count that differ")
    return _v1(_twins(folder), heads, layers)


def _vllm(folder: Path) -> Found:
    settings = {
        "num_heads": 5,
        "num_hidden_layers": 1,
        "vocab_size": 32001,
        "medusa_fc_bias": False,
        "original_lm_head": False,
    }
    for key, value in _json(folder / "config.json").items():
        if "num" in key and "heads" in key:
            key = "num_heads"
        elif "num" in key and "layers" in key:
            key = "num_hidden_layers"
        settings[key] = value
    if settings["model_type"] != "medusa" or settings["architectures"] != ["MedusaModel"]:
        raise ValueError("config.json does not name Medusa")
    named = _safetensors(folder / "model.safetensors")
    tensors = {name.replace("medusa_heads.", ""): tensor for name, tensor in named.items()}
    vocabulary = settings["vocab_size"]
    truncated = settings.get("truncated_vocab_size") or vocabulary
    tokens = np.asarray(tensors["token_map"]) if truncated < vocabulary else None
    found = []
    for h in range(settings["num_heads"]):
        pairs = []
        for n in range(settings["num_hidden_layers"]):
            weight = tensors[f"blocks.{h}.layers.{n}.weight"]
            bias = of_array(np.zeros(weight.shape[:1], np.float32))
            if settings["medusa_fc_bias"]:
                bias = tensors[f"blocks.{h}.layers.{n}.bias"]
            pairs.append((weight, bias))
        if settings["original_lm_head"]:
            table = tensors.get("lm_head.weight") or tensors["lm_heads.0.weight"]
        else:
            table = tensors[f"lm_heads.{h}.weight"]
        if tokens is not None and table.shape[0] > truncated:
            table = table.rows(of_array(tokens))
        if table.shape != (truncated, settings["hidden_size"]):
            raise ValueError(f"an unembedding is {list(table.shape)}")
        found.append(Head(pairs, table))
    return Found(found, tokens)


def _stacked(arrays: Mapping[str, Any], at: Callable[[str, tuple[int, ...]], Lazy]) -> Found:
    """Heads of this project: `arrays` have shapes, `at` gives what lies at a place in an array."""
    heads = []
    for m in range(arrays["weight"].shape[0]):
        pairs = [
            (at("weight", (m, layer)), at("bias", (m, layer))) for layer in range(arrays["weight"].shape[1])
        ]
        mixer = None
        if f"mixer_{m}_weight" in arrays:
            mixer = at(f"mixer_{m}_weight", ()), at(f"mixer_{m}_bias", ())
        heads.append(Head(pairs, at("unembedding", (m,)) if "unembedding" in arrays else None, mixer))
    return Found(heads)


def _own(folder: Path) -> Found:
    file = folder / "heads.safetensors"
    tensors = _safetensors(file)
    tokens = tensors.pop("token_map", None)
    arrays = {name.removeprefix("layers."): tensor for name, tensor in tensors.items()}
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))

    def at(name: str, place: tuple[int, ...]) -> Lazy:
        array = arrays[name]
        shape = array.shape[len(place) :]
        number = int(np.ravel_multi_index(place, array.shape[: len(place)])) if place else 0
        start = 8 + size + header[f"layers.{name}"]["data_offsets"][0]
        return _stored(file, start + number * math.prod(shape) * array.dtype.itemsize, shape, array.dtype)

    if _json(folder / "config.json")["num_heads"] != arrays["weight"].shape[0]:
        raise ValueError("config.json and the tensors differ in the number of heads")
    return dataclasses.replace(_stacked(arrays, at), tokens=None if tokens is None else np.asarray(tokens))


def _orbax(folder: Path) -> Found:
    with checkpoint.orbax(f"{folder}: cannot be read back") as ocp, ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(folder / "heads")
    arrays = dict(tree["layers"])
    config = _json(folder / "config" / "metadata")
    D, M = config["hidden_size"], config["num_heads"]
    arrays.setdefault("weight", np.zeros((M, 0, D, D)))  # Orbax stores no arrays without elements
    found = _stacked(arrays, lambda name, place: of_array(np.asarray(arrays[name])[place]))
    return dataclasses.replace(found, tokens=tree.get("token_map"))


def _hf(folder: Path) -> Found:
    index = folder / "model.safetensors.index.json"
    names = set(_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    tensors: dict[str, Lazy] = {}
    for name in names:
        tensors |= _safetensors(folder / name)
    tied = _json(folder / "config.json")["tie_word_embeddings"]
    table = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return dataclasses.replace(_own(folder / "heads"), table=table)


READERS: Mapping[str, Callable[[Path], Found]] = {
    "reference": _reference,
    "vllm": _vllm,
    "tgi": _tgi,
    "trtllm": _trtllm,
    "orbax": _orbax,
    "medusa-jax": _own,
    "hf": _hf,
}
