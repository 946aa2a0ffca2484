"""Opening heads that other projects' files hold, whatever they are called there (`head_names`).

Heads and layers are counted from the tensors: published configurations are wrong about them.

Shapes: D model, V vocabulary, M heads, L residual layers of a head, V' tokens that the heads score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError, is_file, is_folder, read_json
from medusa_jax.weights import head_names, lazy
from medusa_jax.weights.head_files import (
    TOKEN_MAP,
    UNKNOWN_VOCABULARY,
    HeadCheckpoint,
    OneFile,
    Place,
    check_token_map,
    common_dtype,
    layer_shapes,
    split_shape,
)
from medusa_jax.weights.head_names import IN_MODEL, MODELOPT, REFERENCE, VLLM, layout_of
from medusa_jax.weights.head_settings import disagreements
from medusa_jax.weights.hf import INDEX, SINGLE, SafetensorsCheckpoint, _read_weight_map
from medusa_jax.weights.lazy import Lazy
from medusa_jax.weights.params import UNEMBEDDING, check_tensors
from medusa_jax.weights.source import TensorInfo, TensorSource
from medusa_jax.weights.torch_files import TorchFile

SAFETENSORS = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"

_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_INTEGERS = (np.dtype(np.int64), np.dtype(np.int32))
_MOST_PADDING = 1024  # vocabularies are padded to multiples of at most this


def holds_heads(folder: Path) -> bool:
    """Whether a folder is of one of these kinds. Raises UserError for a broken index or header."""
    if is_file(folder / SAFETENSORS) or is_file(folder / PICKLE):
        return True
    if is_file(folder / INDEX):
        return layout_of(_read_weight_map(folder / INDEX)) is not None
    single = folder / SINGLE
    return is_file(single) and layout_of(OneFile(single).infos()) is not None


def open_published(path: Path, *, hidden_size: int | None, vocab_size: int | None) -> HeadCheckpoint:
    """Open a folder or a file of one of these kinds, for a model of these sizes; None: for any model.

    Raises UserError naming tensors that are missing, unknown, misshapen or of a wrong type, and for heads
    of another hidden size or vocabulary. What config.json says otherwise than the tensors is a warning.
    """
    folder = path if is_folder(path) else path.parent
    if is_folder(path):
        path = next((path / name for name in (SAFETENSORS, PICKLE) if is_file(path / name)), path)
    source: TensorSource
    if path.suffix.lower() == ".pt":
        source = TorchFile(path)
    elif is_file(path):
        source = OneFile(path)
    else:
        source = _HeadShards(path)
    file = folder / "config.json"
    settings = read_json(file) if is_file(file) else {}
    return _Reading(path, source, settings, hidden_size, vocab_size).checkpoint(str(file))


class _Reading:
    """One set of tensors, and what their names and shapes mean."""

    def __init__(
        self, path: Path, source: TensorSource, settings: Mapping[str, Any], D: int | None, V: int | None
    ) -> None:
        self.path, self.source, self.settings, self.label = path, source, settings, str(path)
        self.warnings: list[str] = []
        infos = source.infos()
        layout = layout_of(infos)
        if layout is None:
            found = ", ".join(list(infos)[:3]) or "nothing"
            raise UserError(f"{path}: no Medusa heads: expected names like 0.0.linear.weight, found {found}")
        self.layout = layout
        self.in_model = any(not name.startswith(layout.prefix) for name in infos)
        self.stored: dict[str, str] = {}  # the names in the file, by those that the layout has
        for name in infos:
            plain = layout.plain(name)
            if plain in self.stored:
                raise UserError(f"{path}: {name!r} and {self.stored[plain]!r} are the same tensor")
            if plain.startswith(layout.prefix):
                self.stored[plain] = name
            elif any(other.names(name) for other in head_names.others(layout)):
                raise UserError(f"{path}: {name!r} is no name of {layout.kind}'s, as the other heads have")
        self.infos = {plain: infos[name] for plain, name in self.stored.items()}
        self.scales = self._take_scales()
        self.tokens = self.infos.pop(TOKEN_MAP, None) if layout is VLLM else None
        self.table = self._shared_table()
        self.numbers = {
            name: found for name in self.infos if (found := layout.numbers(name)) and name != self.table
        }
        self.biased = layout is not VLLM or any(n.parameter == "bias" for n in self.numbers.values())
        self.config, self.rows = self._sizes(D, V)

    def checkpoint(self, config_file: str) -> HeadCheckpoint:
        """The heads, every tensor accounted for."""
        layout, config = self.layout, self.config
        names: dict[Place, str] = {}
        expected: dict[str, tuple[int, ...]] = {}
        if self.table is not None:
            expected[self.table] = (self.rows, config.hidden_size)
        for parameter, shape in layer_shapes(config).items():
            lead, tail = split_shape(parameter, shape)
            if parameter == "unembedding":
                tail = (self.rows, config.hidden_size)
            for place in np.ndindex(lead) if self.biased or parameter != "bias" else ():
                name = names[parameter, place] = layout.name(parameter, place, config.num_layers)
                expected[name] = tail
        self._account(expected)

        parts = {place: self._part(name, place[0] == "unembedding") for place, name in names.items()}
        dtype = common_dtype({str(place): TensorInfo(p.shape, p.dtype) for place, p in parts.items()})
        if not self.biased:
            for place in np.ndindex(config.num_heads, config.num_layers):
                parts["bias", place] = lazy.zeros((config.hidden_size,), dtype)
        base = self.settings.get("_name_or_path" if self.in_model else "base_model_name_or_path")
        self.warnings += disagreements(self.settings, self.kind(), config, self.biased, config_file)
        return HeadCheckpoint(
            path=self.path,
            kind=self.kind(),
            config=config,
            dtype=dtype,
            metadata={"base_model": base} if base and isinstance(base, str) else {},
            warnings=self.warnings,
            parts=parts,
            tokens=None if self.tokens is None else self._tokens,
            table=None if self.table is None else self._part(self.table, True),
            settings=self.settings,
        )

    def kind(self) -> str:
        """The name of the format."""
        if self.layout is IN_MODEL:
            return head_names.WHOLE_MODEL if self.in_model else head_names.MLC
        if self.layout is REFERENCE:
            own = self.config.own_unembedding
            return head_names.REFERENCE_OWN if own else head_names.REFERENCE_SHARED
        return self.layout.kind

    def _take_scales(self) -> dict[str, str]:
        """The scales' names of FP8 weights, by weight; from here on those weights are float32."""
        scales: dict[str, str] = {}
        for name, info in list(self.infos.items()) if self.layout is MODELOPT else ():
            if not name.endswith(".weight") or info.dtype not in _FP8:
                continue
            stem = name.removesuffix("weight")
            for scale in (stem + "weight_scale", stem + "input_scale"):
                found = self.infos.pop(scale, None)
                if found is None and scale.endswith("weight_scale"):
                    raise UserError(f"{self.label}: {name} is {info.dtype}, but there is no {scale}")
                if found is not None and (math.prod(found.shape), found.dtype) != (1, np.dtype(np.float32)):
                    raise UserError(
                        f"{self.label}: {scale} is {found.dtype} {list(found.shape)}, expected one float32"
                    )
            scales[name] = stem + "weight_scale"
            self.infos[name] = TensorInfo(info.shape, np.dtype(np.float32))
        if scales:
            self.warnings.append(
                f"{self.label}: FP8 weights are multiplied by their scales; input scales, which quantise "
                "activations, are left out"
            )
        return scales

    def _shared_table(self) -> str | None:
        """The name of vLLM's single unembedding, if these heads have one."""
        if self.layout is not VLLM:
            return None
        own = [name for name in self.infos if (n := VLLM.numbers(name)) and n.parameter == "unembedding"]
        if not own and UNEMBEDDING not in self.infos:
            raise UserError(f"{self.label}: neither lm_heads.0.weight nor {UNEMBEDDING} is there")
        if not own:
            return UNEMBEDDING
        if self.settings.get("original_lm_head") is not True:
            return None
        if own == ["lm_heads.0.weight"] and UNEMBEDDING not in self.infos:
            return own[0]
        raise UserError(
            f"{self.label}: original_lm_head in config.json means one unembedding for all heads, but there "
            f"are {len(own) + (UNEMBEDDING in self.infos)}; set it to false if each head has its own"
        )

    def _sizes(self, D: int | None, V: int | None) -> tuple[MedusaConfig, int]:
        """The configuration that names and shapes mean, and the rows that a stored unembedding has."""
        if not self.numbers:
            built = any(".medusa_layers." in name for name in self.infos)
            hint = "; TensorRT-LLM's converter wrote this, convert what it was made from" if built else ""
            raise UserError(f"{self.label}: no Medusa heads: no name is one of {self.layout.kind}'s{hint}")
        tables = {name for name, n in self.numbers.items() if n.parameter == "unembedding"}
        tables |= set() if self.table is None else {self.table}
        matrices = {n: i.shape for n, i in self.infos.items() if len(i.shape) == 2}
        matrices = {n: shape for n, shape in matrices.items() if n in self.numbers or n == self.table}
        D = self._hidden_size(matrices, D)
        heights = [shape[0] for name, shape in matrices.items() if name in tables and shape[1] == D]
        agree = len(set(heights)) == 1
        rows = heights[0] if agree or (heights and V is None) else None
        drafted = None if self.tokens is None else math.prod(self.tokens.shape)
        if V is None:
            V = rows if rows not in (None, drafted) else _told(self.settings, "vocab_size")
        elif rows is not None and rows not in (V, drafted):
            self._check_rows(next(name for name in matrices if name in tables), rows, V)
        try:
            config = MedusaConfig(
                num_heads=_contiguous((n.head for n in self.numbers.values()), "head", self.label),
                num_layers=_contiguous(
                    (n.layer for n in self.numbers.values() if n.parameter != "unembedding"),
                    "residual layer",
                    self.label,
                ),
                hidden_size=D,
                vocab_size=V,
                own_unembedding=self.table is None and bool(tables),
                draft_vocab_size=drafted,
            )
        except UserError as error:
            raise UserError(str(error).replace("heads:", f"{self.label}:", 1)) from None
        return config, config.scored if rows is None else rows

    def _hidden_size(self, matrices: Mapping[str, tuple[int, ...]], D: int | None) -> int:
        """Heads that agree with each other but belong to another model get a line that says so."""
        widths = {shape[1] for shape in matrices.values()}
        if D is None:
            residual = [self.infos[name].shape for name, n in self.numbers.items() if n.parameter == "weight"]
            return next((shape[1] for shape in (*residual, *matrices.values()) if len(shape) == 2), 1)
        if len(widths) == 1 and widths != {D}:
            name, shape = next(iter(matrices.items()))
            raise UserError(
                f"{self.label}: the heads are for hidden size {shape[1]}, the model's is {D} "
                f"({name} is {list(shape)})"
            )
        return D

    def _check_rows(self, name: str, rows: int, V: int) -> None:
        """Rows past the vocabulary are cut off where they look like padding to a multiple of a power of 2."""
        step = 8
        while step <= _MOST_PADDING and rows != -(-V // step) * step:
            step *= 2
        if rows < V or step > _MOST_PADDING:
            raise UserError(
                f"{self.label}: {name} scores {rows} tokens, the model's vocabulary has {V}, and the "
                "difference is no padding; use the model that the heads were made for"
            )
        self.warnings.append(
            f"{self.label}: the heads score {rows} tokens, the model's vocabulary has {V}: "
            f"the last {rows - V} are padding and left out"
        )

    def _account(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Every tensor must be known and have its shape and type."""
        real = self.stored
        try:
            check_tensors(
                {real[name]: info for name, info in self.infos.items()},
                {real.get(name, name): shape for name, shape in expected.items()},
                self.label,
            )
        except UserError as error:
            raise UserError(str(error).replace("the configuration needs", "these heads need")) from None
        if self.tokens is not None:
            found, wanted = self.tokens, (self.config.scored,)
            if found.shape != wanted or found.dtype not in _INTEGERS:
                raise UserError(
                    f"{self.label}: {TOKEN_MAP} is {found.dtype} {list(found.shape)}, "
                    f"expected int64 or int32 {list(wanted)}"
                )

    def _tokens(self) -> np.ndarray:
        found = self.source.read(self.stored[TOKEN_MAP])
        check_token_map(found, self.config, self.label)
        return found

    def _fp8_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of an FP8 matrix, from the file: the safetensors library makes no NumPy arrays of them."""
        assert isinstance(self.source, SafetensorsCheckpoint)
        info, file = self.source.infos()[name], self.source._files[name]
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            begin = json.loads(stream.read(size))[name]["data_offsets"][0]
        rows, width = stop - start, info.shape[1]
        found = np.fromfile(file, info.dtype, rows * width, offset=8 + size + begin + start * width)
        return found.reshape(rows, width)

    def _part(self, name: str, is_table: bool) -> Lazy:
        """A tensor as our arrays have it: its scale applied, its rows those that the heads score."""
        info, real = self.infos[name], self.stored[name]
        after = (slice(None),) * (len(info.shape) - 1)

        def read(start: int, stop: int) -> np.ndarray:
            return self.source.read(real, (slice(start, stop), *after))

        def scaled(start: int, stop: int) -> np.ndarray:
            scale = self.source.read(self.stored[self.scales[name]])
            return self._fp8_rows(real, start, stop).astype(np.float32) * scale.reshape(1, 1)

        part = Lazy(info.shape, info.dtype, scaled if name in self.scales else read)
        if not is_table or self.rows == self.config.scored:
            return part
        if self.tokens is None:
            return part.first(self.config.scored)
        return part.rows(
            Lazy((self.config.scored,), self.tokens.dtype, lambda start, stop: self._tokens()[start:stop])
        )


def _told(settings: Mapping[str, Any], field: str) -> int:
    value = settings.get(field)
    return value if type(value) is int and 0 < value <= UNKNOWN_VOCABULARY else UNKNOWN_VOCABULARY


def _contiguous(numbers: Iterable[int], what: str, label: str) -> int:
    found = set(numbers)
    gap = next((n for n in range(len(found)) if n not in found), None)
    if gap is not None:
        raise UserError(f"{label}: there is a {what} {max(found)}, but no tensor of {what} {gap}")
    return len(found)


class _HeadShards(SafetensorsCheckpoint):
    """A folder of which only the files that hold heads are looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = self._weight_map
        layout = None if names is None else layout_of(names)
        if names is not None and layout is not None:
            needed = {file for name, file in names.items() if name.startswith(layout.prefix)}
            self._weight_map = {name: file for name, file in names.items() if file in needed}
