"""Heads as the first implementation of Medusa published them, in three generations.

    v0.1  medusa_lm_head.pt, or its safetensors twin: {h}.{l}.linear.weight and .bias, {h}.{L}.weight
    v2    medusa_lm_head.safetensors: the same without the last, the model's unembedding is shared
    v1.0  a whole Hugging Face model, the names of v0.1 after `medusa_head.`

All mean the same function as `heads.HeadStack`, and weights are [out, in] as ours are: nothing is
transposed. Heads and layers are counted from the tensors: published configurations are wrong about them.

Shapes: D model, V vocabulary, M heads, L residual layers of a head.
"""

from __future__ import annotations

import importlib
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError, read_json
from medusa_jax.weights.head_files import HeadCheckpoint, Layers, OneFile, cast, common_dtype, layer_shapes
from medusa_jax.weights.hf import INDEX, SINGLE, SafetensorsCheckpoint, _read_weight_map
from medusa_jax.weights.params import check_tensors
from medusa_jax.weights.source import Index, TensorInfo, TensorSource

SAFETENSORS = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"
IN_MODEL = "medusa_head."

# Plain numbers only: "00" would be a second name of head 0.
_NAME = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(linear\.weight|linear\.bias|weight)")
# weights_only loading could be tricked into running code before (CVE-2025-32434).
_SAFE_TORCH = (2, 6)


def holds_heads(folder: Path) -> bool:
    """Whether a folder is of one of the three generations. Raises UserError for a broken index or header."""
    if (folder / SAFETENSORS).is_file() or (folder / PICKLE).is_file():
        return True
    if (folder / INDEX).is_file():
        return any(name.startswith(IN_MODEL) for name in _read_weight_map(folder / INDEX))
    single = folder / SINGLE
    return single.is_file() and any(name.startswith(IN_MODEL) for name in OneFile(single).infos())


def open_published(path: Path, *, hidden_size: int, vocab_size: int) -> HeadCheckpoint:
    """Open a folder of one of the three generations, or a file of heads, for a model of these sizes.

    Raises UserError naming tensors that are missing, unknown, misshapen or of a wrong type, and for heads
    of another hidden size or vocabulary. What config.json says otherwise than the tensors is a warning.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        path = next((path / name for name in (SAFETENSORS, PICKLE) if (path / name).is_file()), path)
    source: TensorSource
    if path.suffix.lower() == ".pt":
        source = TorchFile(path)
    elif path.is_file():
        source = OneFile(path)
    else:
        source = _HeadShards(path)
    infos = source.infos()
    in_model = any(name.startswith(IN_MODEL) for name in infos)
    prefix = IN_MODEL if in_model else ""
    heads = {name.removeprefix(prefix): info for name, info in infos.items() if name.startswith(prefix)}

    config = _count(heads, hidden_size, vocab_size, str(path))
    _check_sizes(heads, config, prefix, str(path))
    try:
        expected = {prefix + name: shape for name, (shape, _) in _places(config).items()}
        check_tensors({prefix + name: info for name, info in heads.items()}, expected, str(path))
    except UserError as error:
        raise UserError(str(error).replace("the configuration needs", "these heads need")) from None

    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    generation = "v1.0" if in_model else "v0.1" if config.own_unembedding else "v2"
    base = raw.get("_name_or_path" if in_model else "base_model_name_or_path")
    return HeadCheckpoint(
        path=path,
        kind=f"{'Medusa model' if in_model else path.name} {generation}",
        config=config,
        dtype=common_dtype(heads),
        metadata={"base_model": base} if base and isinstance(base, str) else {},
        warnings=_disagreements(raw, config, in_model, str(folder / "config.json")),
        reader=lambda dtype: (_read(source, config, prefix, dtype), None),
    )


def _count(infos: Mapping[str, TensorInfo], hidden_size: int, vocab_size: int, label: str) -> MedusaConfig:
    """How many heads and layers the names mean. Raises UserError when there are none, or a gap in them."""
    matches = [match for name in infos if (match := _NAME.fullmatch(name))]
    if not matches:
        found = ", ".join(list(infos)[:3]) or "nothing"
        raise UserError(f"{label}: no Medusa heads: expected names like 0.0.linear.weight, found {found}")
    residual = [match for match in matches if match[3] != "weight"]
    return MedusaConfig(
        num_heads=_contiguous((int(match[1]) for match in matches), "head", label),
        num_layers=_contiguous((int(match[2]) for match in residual), "residual layer", label),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        own_unembedding=len(residual) < len(matches),
    )


def _contiguous(numbers: Iterable[int], what: str, label: str) -> int:
    found = set(numbers)
    gap = next((n for n in range(len(found)) if n not in found), None)
    if gap is not None:
        raise UserError(f"{label}: there is a {what} {max(found)}, but no tensor of {what} {gap}")
    return len(found)


def _places(config: MedusaConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, tuple[int, ...]]]]:
    """Of every tensor by name: its shape, and the parameter and place in it that it fills."""
    L, D, V = config.num_layers, config.hidden_size, config.vocab_size
    places: dict[str, tuple[tuple[int, ...], tuple[str, tuple[int, ...]]]] = {}
    for h in range(config.num_heads):
        for layer in range(L):
            places[f"{h}.{layer}.linear.weight"] = ((D, D), ("weight", (h, layer)))
            places[f"{h}.{layer}.linear.bias"] = ((D,), ("bias", (h, layer)))
        if config.own_unembedding:
            places[f"{h}.{L}.weight"] = ((V, D), ("unembedding", (h,)))
    return places


def _check_sizes(infos: Mapping[str, TensorInfo], config: MedusaConfig, prefix: str, label: str) -> None:
    """Heads that agree with each other but belong to another model get a line that says so."""
    D, V = config.hidden_size, config.vocab_size
    weights = {n: i.shape for n, i in infos.items() if _NAME.fullmatch(n) and len(i.shape) == 2}
    widths = {shape[1] for shape in weights.values()}
    if len(widths) == 1 and widths != {D}:
        name, shape = next(iter(weights.items()))
        raise UserError(
            f"{label}: the heads are for hidden size {shape[1]}, the model's is {D} "
            f"({prefix}{name} is {list(shape)})"
        )
    tables = {n: shape for n, shape in weights.items() if not n.endswith("linear.weight") and shape[1] == D}
    if len({shape[0] for shape in tables.values()}) == 1:
        name, (rows, _) = next(iter(tables.items()))
        hint = "; cut the padding off, or use the model they were made for" if rows > V else ""
        if rows != V:
            raise UserError(
                f"{label}: {prefix}{name} scores {rows} tokens, the model's vocabulary has {V}{hint}"
            )


def _disagreements(raw: Mapping[str, Any], config: MedusaConfig, in_model: bool, label: str) -> list[str]:
    counts = (
        ("medusa_num_heads", config.num_heads, "heads"),
        ("medusa_num_layers", config.num_layers, "layers a head"),
    )
    lines = [
        f"{label}: {field} is {raw[field]!r}, but the tensors hold {count} {what}; the tensors count"
        for field, count, what in counts
        if field in raw and (raw[field] != count or isinstance(raw[field], bool))
    ]
    shared = str(raw.get("version")) == "2"
    if raw and not in_model and shared == config.own_unembedding:
        says = "version 2, which shares" if shared else "no version 2, which would share"
        lines.append(
            f"{label}: says {says} the model's unembedding, but the heads have "
            f"{'their own' if config.own_unembedding else 'none of their own'}; the tensors count"
        )
    return lines


def _read(source: TensorSource, config: MedusaConfig, prefix: str, dtype: np.dtype) -> Layers:
    layers = {name: np.empty(shape, dtype) for name, shape in layer_shapes(config).items()}
    for name, (_, (parameter, place)) in _places(config).items():
        layers[parameter][place] = cast(source.read(prefix + name), dtype)
    return layers


class _HeadShards(SafetensorsCheckpoint):
    """A model's folder of which only the files that hold heads are looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if self._weight_map is not None:
            needed = {file for name, file in self._weight_map.items() if name.startswith(IN_MODEL)}
            self._weight_map = {name: file for name, file in self._weight_map.items() if file in needed}


class TorchFile:
    """The tensors of a file written by torch.save (a TensorSource); needs torch.

    torch reads it with weights_only=True, which builds tensors and runs nothing else that a pickle may ask
    for. Raises UserError without torch, for a file that holds anything but a dict of plain tensors, and
    for a broken one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError:
            raise UserError(
                f'{path}: reading a .pt file needs torch: pip install "medusa-jax[torch]", or convert the '
                "file to safetensors where torch is installed"
            ) from None
        version = tuple(int(n) for n in re.findall(r"[0-9]+", self._torch.__version__)[:2])
        if version < _SAFE_TORCH:
            raise UserError(
                f"{path}: torch {self._torch.__version__} cannot read .pt files safely, 2.6 or newer can"
            )
        self._tensors = self._load()

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and type of every tensor."""
        return {name: TensorInfo(tuple(t.shape), self._dtype(name, t)) for name, t in self._tensors.items()}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or the block of it that `index` selects."""
        tensor = self._tensors[name].detach()
        tensor = (tensor if index is None else tensor[index]).contiguous()
        if tensor.dtype == self._torch.bfloat16:  # NumPy has no such type; the bits are the same
            return tensor.view(self._torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _load(self) -> dict[str, Any]:
        try:
            mapped = zipfile.is_zipfile(self.path)  # only files of today's form can be mapped
            value = self._torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # torch raises whatever the reading of a broken file runs into
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise UserError(
                f"{self.path}: refused: not a whole file of tensors only (torch: {reason})"
            ) from error
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: holds a {type(value).__name__}, expected a dict of tensors")
        for name, tensor in value.items():
            if not isinstance(name, str) or not isinstance(tensor, self._torch.Tensor):
                raise UserError(f"{self.path}: {name!r} is a {type(tensor).__name__}, expected a tensor")
            if tensor.layout != self._torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
                raise UserError(f"{self.path}: {name} is not a plain dense tensor")
        return value

    def _dtype(self, name: str, tensor: Any) -> np.dtype:
        text = str(tensor.dtype).removeprefix("torch.")
        try:
            return np.dtype(getattr(ml_dtypes, text, text))
        except TypeError:
            raise UserError(f"{self.path}: tensor {name!r} has element type {text}, not supported") from None
