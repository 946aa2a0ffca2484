"""Hugging Face folders: reading safetensors checkpoints and writing whole models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from medusa_jax.config import ModelConfig, config_json
from medusa_jax.errors import UserError, is_file, is_folder, read_json, require_file, shown, user_path
from medusa_jax.weights.lazy import CODES, write_safetensors
from medusa_jax.weights.params import EMBEDDING, Params, check_tensors, expected_shapes, flatten
from medusa_jax.weights.source import Index, TensorInfo
from medusa_jax.weights.staging import staged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {code: dtype for dtype, code in CODES.items()}


class SafetensorsCheckpoint:
    """The tensors of a folder with `model.safetensors`, or with shards and their index (a TensorSource).

    Raises UserError when the folder holds no such weights, or an index that cannot be read. Files are
    opened anew for every tensor: the pages of a file that stays mapped count as this process's memory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        index, single = self.path / INDEX, self.path / SINGLE
        self._weight_map: dict[str, str] | None = None
        if is_file(index):
            self._weight_map = _read_weight_map(index)
            if is_file(single) and SINGLE not in self._weight_map.values():
                raise UserError(
                    f"{self.path}: holds both {SINGLE} and {INDEX}, which names other files; remove one"
                )
        elif not is_file(single):
            raise UserError(_no_weights(self.path))
        self._infos: dict[str, TensorInfo] | None = None
        self._files: dict[str, Path] = {}

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and type of every tensor, in file order. Raises UserError naming a broken or missing file."""
        if self._infos is None:
            files, infos = self._scan()
            self._files, self._infos = files, infos
        return dict(self._infos)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or the block that `index` (slices of step 1) selects, as a new array."""
        if name not in self.infos():
            raise UserError(f"{self.path}: no tensor {name!r}")
        file = self._files[name]
        try:
            if index is None:
                # Reading into memory leaves no mapped pages behind; it cannot read a part, a map can.
                with safe_open(file, framework="np", backend="pread") as handle:
                    return handle.get_tensor(name)
            with safe_open(file, framework="np", backend="mmap") as handle:
                return handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: tensor {name!r} cannot be read ({error})") from None

    def _scan(self) -> tuple[dict[str, Path], dict[str, TensorInfo]]:
        files: dict[str, Path] = {}
        infos: dict[str, TensorInfo] = {}
        shards = [SINGLE] if self._weight_map is None else sorted(set(self._weight_map.values()))
        for shard in shards:
            file = self.path / shard
            if not is_file(file):
                raise UserError(f"{file}: no such file, but {INDEX} names it")
            for name, info in _read_header(file).items():
                if name in files:
                    raise UserError(f"{file}: tensor {name!r} is also in {files[name].name}")
                if self._weight_map is not None and name not in self._weight_map:
                    raise UserError(f"{file}: tensor {name!r} is not in {INDEX}")
                files[name], infos[name] = file, info
        for name, shard in (self._weight_map or {}).items():
            if name not in files:
                raise UserError(f"{self.path / shard}: no tensor {name!r}, but {INDEX} says it is there")
            if files[name].name != shard:
                raise UserError(f"{files[name]}: holds tensor {name!r}, but {INDEX} says it is in {shard}")
        return files, infos


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: field 'weight_map' is missing, empty or not an object")
    for name, shard in weight_map.items():
        # The index is a stranger's file: it must not point outside its folder.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", shard):
            raise UserError(
                f"{path}: tensor {shown(name)} is said to be in {shown(shard)}, "
                "expected a .safetensors file name"
            )
    return weight_map


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The library checks that the header is sound and that the file is exactly as long as it says."""
    infos = {}
    if require_file(file).st_size == 0:
        raise UserError(f"{file}: the file is empty")
    try:
        with file.open("rb"):  # says why a file cannot be read; the library may not
            pass
        with safe_open(file, framework="np", backend="mmap") as handle:
            for name in handle.offset_keys():
                part = handle.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise UserError(
                        f"{file}: tensor {name!r} has element type {part.get_dtype()}, which is not supported"
                    )
                infos[name] = TensorInfo(tuple(part.get_shape()), _DTYPES[part.get_dtype()])
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise UserError(f"{file}: not a whole safetensors file ({error})") from None
    return infos


def _no_weights(folder: Path) -> str:
    if not is_folder(folder):
        return f"{folder}: no such folder"
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        return f"{folder}: cannot be read ({error.strerror})"
    pickles = [p.name for p in names if p.suffix in _PICKLES]
    if pickles:
        return (
            f"{folder}: only pickled weights ({pickles[0]}), never read: a pickle can run any code; "
            f"convert them where you trust them: transformers.AutoModelForCausalLM.from_pretrained(FOLDER)"
            f".save_pretrained(NEW_FOLDER) writes safetensors"
        )
    ggufs = [p.name for p in names if p.suffix == ".gguf"]
    if ggufs:
        return f"{folder}: no {SINGLE} or {INDEX}; to use {ggufs[0]}, name the file itself"
    return f"{folder}: no weights: neither {SINGLE} nor {INDEX} is there"


def save_pretrained(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Any = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write a model as a folder that Hugging Face libraries read; element types stay as they are.

    `params` is a nested dict of NumPy, lazy or JAX arrays, sharded or not, exactly as
    `expected_shapes(config)` has it. Tensors are brought to the host one at a time, lazy ones block by
    block. The folder appears under its name only when it is whole. Raises UserError when `folder` exists
    and is not empty, when the parameters do not fit the configuration, or when writing fails.
    """
    folder = _free_folder(folder)
    arrays = flatten(params)
    infos = {name: TensorInfo(tuple(a.shape), np.dtype(a.dtype)) for name, a in arrays.items()}
    expected = expected_shapes(config)
    check_tensors(infos, expected, f"parameters for {folder}")
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise UserError(f"{folder}: parameter {name} is spread over several processes; gather it first")

    with staged(folder) as partial:
        _write_weights(partial, {name: arrays[name] for name in expected}, max_shard_bytes)
        try:
            _write_settings(partial, config, infos[EMBEDDING].dtype, tokenizer, generation_config)
        except Exception as error:
            if "(os error " in str(error):  # how the tokenizers library, written in Rust, reports a full disk
                raise UserError(f"{folder}: cannot be written ({error})") from error
            raise


def _free_folder(folder: str | Path) -> Path:
    """The whole path of a folder to be written, which is empty or not there yet; else UserError."""
    path = user_path(folder)
    try:
        path = path.resolve()
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: exists and is not a folder")
        if path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path}: exists and is not empty")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    except RuntimeError:  # what resolve() says of links in a circle
        raise UserError(f"{path}: cannot be written (links in a circle)") from None
    return path


def _write_settings(
    folder: Path,
    config: ModelConfig,
    dtype: np.dtype,
    tokenizer: Any,
    generation_config: Mapping[str, Any] | None,
) -> None:
    # transformers 5 writes `dtype`, but every version reads this name, and the older ones only this one.
    extra: dict[str, Any] = {"torch_dtype": str(dtype)}
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # Without these fields other runtimes assume Llama's numbers, whatever the tokenizer.
        value = (generation_config or {}).get(field, getattr(tokenizer, field, None))
        if value is not None:
            extra[field] = value
    (folder / "config.json").write_text(config_json(config, **extra), encoding="utf-8")
    if generation_config is not None:
        text = json.dumps(dict(generation_config), indent=2, sort_keys=True) + "\n"
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_weights(folder: Path, arrays: Mapping[str, Any], max_shard_bytes: float) -> None:
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, array in arrays.items():
        if shards[-1] and size + array.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
