"""Medusa heads as files: opening any kind, and this project's own format.

Own format: a folder with `config.json` ({"format": "medusa-jax-heads", "version": 1, ...}) and
`heads.safetensors`, whose tensors are `layers.` and the name that `HeadStack` gives the parameter, and
`token_map` for a draft vocabulary.

Shapes: D model, V vocabulary, M heads, L residual layers of a head, V' tokens that the heads score.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from medusa_jax.config import LARGEST_SIZE, MedusaConfig
from medusa_jax.errors import UserError, is_file, is_folder, read_json, shown
from medusa_jax.weights.head_paths import resolve_heads, within_run
from medusa_jax.weights.hf import INDEX, SINGLE, SafetensorsCheckpoint, _free_folder, _read_header
from medusa_jax.weights.lazy import Lazy, Progress, Stack, write_safetensors
from medusa_jax.weights.params import check_tensors
from medusa_jax.weights.source import Index, TensorInfo, TensorSource
from medusa_jax.weights.staging import staged

FORMAT = "medusa-jax-heads"
VERSION = 1
WEIGHTS = "heads.safetensors"
PREFIX = "layers."
TOKEN_MAP = "token_map"
# Stands for the vocabulary where files of heads do not tell it: those that share the model's unembedding.
UNKNOWN_VOCABULARY = LARGEST_SIZE

Layers = dict[str, np.ndarray]
Place = tuple[str, tuple[int, ...]]  # a parameter of `HeadStack` and an index into its leading axes

TYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
_FIELDS = tuple(field.name for field in dataclasses.fields(MedusaConfig))
_EXPECTED = (
    f"expected {WEIGHTS} with its config.json, an Orbax checkpoint of heads, a run's output folder, "
    "medusa_lm_head.safetensors or .pt, vLLM's model.safetensors, or a model with medusa_head tensors"
)


@dataclasses.dataclass(frozen=True)
class HeadCheckpoint:
    """Heads on disk, opened: everything is checked but the values.

    kind names the format, for messages. dtype holds every stored value exactly. metadata has
    "base_model" where the files name one. warnings: lines for the user, such as a wrong count in config.json.
    parts: every matrix and vector of a head where it lies. tokens reads the token_map. table: a copy of the
    model's unembedding [V', D] that the files hold. settings: what the files say besides tensors.
    """

    path: Path
    kind: str
    config: MedusaConfig
    dtype: np.dtype
    metadata: dict[str, Any]
    warnings: list[str]
    parts: Mapping[Place, Lazy]
    tokens: Callable[[], np.ndarray] | None = None
    table: Lazy | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary, where it is known."""
        return None if self.config.vocab_size == UNKNOWN_VOCABULARY else self.config.vocab_size

    def token_map(self) -> np.ndarray | None:
        """The tokens [V'] int32 that the heads score, if not all. Raises UserError for a nonsensical map."""
        if self.tokens is None:
            return None
        found = self.tokens()
        check_token_map(found, self.config, str(self.path))
        return found.astype(np.int32, copy=False)

    def arrays(self, dtype: Any) -> dict[str, Stack]:
        """The parameters of `HeadStack` in `dtype`, not read yet."""
        dtype = np.dtype(dtype)
        if dtype not in TYPES:
            raise UserError(f"heads of type {dtype} are not supported, expected float32, float16 or bfloat16")
        arrays = {}
        for name, shape in layer_shapes(self.config).items():
            lead, tail = split_shape(name, shape)
            parts = [self.parts[name, place].astype(dtype) for place in np.ndindex(lead)]
            arrays[name] = Stack(lead, tail, dtype, parts)
        return arrays

    def read(self, dtype: Any) -> tuple[Layers, np.ndarray | None]:
        """The parameters of `HeadStack` in `dtype`, and the token_map [V'] int32 if there is one.

        Raises UserError naming a tensor that cannot be read, and for a dtype that parameters never have.
        """
        arrays = self.arrays(dtype)
        return {name: np.asarray(array) for name, array in arrays.items()}, self.token_map()


def layer_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that `HeadStack` declares; weights are [out, in]."""
    M, L, D = config.num_heads, config.num_layers, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"weight": (M, L, D, D), "bias": (M, L, D)}
    if config.conditioned:
        for m in range(M):
            shapes |= {f"mixer_{m}_weight": (D, (m + 2) * D), f"mixer_{m}_bias": (D,)}
    if config.own_unembedding:
        shapes["unembedding"] = (M, config.scored, D)
    return shapes


def split_shape(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A parameter's leading axes, heads and layers, and the shape of what lies at a place in them."""
    lead = {"weight": 2, "bias": 2, "unembedding": 1}.get(name, 0)
    return shape[:lead], shape[lead:]


def open_heads(
    heads: str | os.PathLike[str], *, hidden_size: int | None = None, vocab_size: int | None = None
) -> HeadCheckpoint:
    """Open the heads that `heads` means, for a model of that hidden size and vocabulary; None: for any.

    A folder, of any kind named in the module's text or of `medusa_formats`; a run's output folder; a
    .safetensors or .pt file; or a hub id (`org/name`, `org/name@revision`), as `hub.resolve` understands
    it. A folder's own config.json decides first, then medusa_lm_head.safetensors, its .pt twin, and a model.

    Raises UserError for files that are missing, broken, of no known kind, or not made for such a model.
    """
    # Both build on this file.
    from medusa_jax import checkpoint
    from medusa_jax.weights import medusa_formats

    path = resolve_heads(heads)
    if is_folder(path) and not _holds_heads(path):
        path = within_run(path) or path
    if path.name == WEIGHTS and is_file(path) and _is_own(path.parent):
        path = path.parent
    if is_folder(path) and checkpoint.is_head_checkpoint(path):
        opened = checkpoint.open_head_checkpoint(path)
    elif is_folder(path) and _is_own(path):
        opened = _open_own(path)
    elif is_file(path) or medusa_formats.holds_heads(path):
        return medusa_formats.open_published(path, hidden_size=hidden_size, vocab_size=vocab_size)
    else:
        raise UserError(_no_heads(path))
    config = opened.config
    if hidden_size not in (None, config.hidden_size):
        raise UserError(
            f"{path}: the heads are for hidden size {config.hidden_size}, the model's is {hidden_size}"
        )
    if vocab_size not in (None, config.vocab_size):
        raise UserError(
            f"{path}: the heads are for a vocabulary of {config.vocab_size}, the model's is {vocab_size}"
        )
    return opened


def _holds_heads(folder: Path) -> bool:
    from medusa_jax import checkpoint
    from medusa_jax.weights import medusa_formats

    return checkpoint.is_head_checkpoint(folder) or _is_own(folder) or medusa_formats.holds_heads(folder)


def save_heads(
    folder: str | os.PathLike[str],
    config: MedusaConfig,
    layers: Mapping[str, Any],
    token_map: Any = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write heads in this project's format; element types stay as they are.

    layers: NumPy, JAX or lazy arrays as `layer_shapes(config)` has them. token_map [V'] int32: with a draft
    vocabulary, and only then. metadata: anything JSON holds; "base_model" names the model they are for.
    The folder appears under its name only when it is whole.
    Raises UserError when it exists and is not empty, for arrays that do not fit the configuration, and
    when writing fails.
    """
    folder = check_target(folder)
    arrays = named_arrays(config, layers, token_map, f"heads for {folder}")
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise UserError(f"{folder}: parameter {name} is spread over several processes; gather it first")
    text = json.dumps(describe(config, metadata), indent=2) + "\n"
    with staged(folder) as partial:
        write_safetensors(partial / WEIGHTS, arrays, progress)
        (partial / "config.json").write_text(text, encoding="utf-8")


def check_target(folder: str | os.PathLike[str]) -> Path:
    """The whole path of `folder`. Raises UserError unless it is free: not there, or an empty folder."""
    return _free_folder(Path(folder))


def named_arrays(
    config: MedusaConfig, layers: Mapping[str, Any], token_map: Any, label: str
) -> dict[str, Any]:
    """All arrays of the heads by the names they are stored under. Raises UserError for a misfit."""
    arrays = {PREFIX + name: array for name, array in layers.items()}
    if token_map is not None:
        arrays[TOKEN_MAP] = token_map
    check_named({n: TensorInfo(tuple(a.shape), np.dtype(a.dtype)) for n, a in arrays.items()}, config, label)
    if token_map is not None:
        check_token_map(np.asarray(token_map), config, label)
    return arrays


def check_named(infos: Mapping[str, TensorInfo], config: MedusaConfig, label: str) -> None:
    """Raise one UserError naming every way in which stored heads differ from what `config` asks for."""
    if config.num_heads > max(len(infos), 1) and config.conditioned:  # a nonsensical count, before it is used
        raise UserError(
            f"{label}: num_heads is {config.num_heads}, but there are {len(infos)} tensors in all"
        )
    rest = dict(infos)
    found = rest.pop(TOKEN_MAP, None)
    check_tensors(rest, {PREFIX + name: shape for name, shape in layer_shapes(config).items()}, label)
    wanted = None if config.draft_vocab_size is None else (config.draft_vocab_size,)
    if (found is None) != (wanted is None):
        state = "missing" if found is None else f"there ({list(found.shape)})"
        raise UserError(f"{label}: {TOKEN_MAP} is {state}, but draft_vocab_size is {config.draft_vocab_size}")
    if found is not None and wanted is not None and found != (wanted, np.dtype(np.int32)):
        raise UserError(
            f"{label}: {TOKEN_MAP} is {found.dtype} {list(found.shape)}, expected int32 {list(wanted)}"
        )


def check_token_map(token_map: np.ndarray, config: MedusaConfig, label: str) -> None:
    """Raise UserError unless the ids [V'] are different tokens of the vocabulary."""
    outside = (token_map < 0) | (token_map >= config.vocab_size)
    if outside.any():
        place = int(np.argmax(outside))
        raise UserError(
            f"{label}: {TOKEN_MAP}[{place}] is {token_map[place]}, "
            f"the vocabulary has {config.vocab_size} tokens"
        )
    values, counts = np.unique(token_map, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{label}: {TOKEN_MAP} names token {values[np.argmax(counts > 1)]} more than once")


def describe(config: MedusaConfig, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is stored about heads besides the arrays, as a JSON object."""
    rest = dict(metadata or {})
    raw: dict[str, Any] = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(config)}
    raw["base_model"] = rest.pop("base_model", None)
    return raw | {"metadata": rest}


def parse(raw: Mapping[str, Any], label: str) -> tuple[MedusaConfig, dict[str, Any]]:
    """The inverse of `describe`. Raises UserError naming what is missing, unknown or of a wrong type."""
    if raw.get("format") != FORMAT:
        raise UserError(f"{label}: format is {shown(raw.get('format'))}, expected {FORMAT!r}")
    if raw.get("version") != VERSION:
        raise UserError(
            f"{label}: version is {shown(raw.get('version'))}, this program reads version {VERSION}"
        )
    known = {"format", "version", "base_model", "metadata", *_FIELDS}
    for kind, names in (("missing", set(_FIELDS) - raw.keys()), ("unknown", raw.keys() - known)):
        if names:
            raise UserError(f"{label}: {kind} field {', '.join(sorted(names)[:3])}")
    for name in ("conditioned", "own_unembedding"):
        if not isinstance(raw[name], bool):
            raise UserError(f"{label}: {name} is {shown(raw[name])}, expected true or false")
    try:
        config = MedusaConfig(**{name: raw[name] for name in _FIELDS})
    except UserError as error:
        raise UserError(str(error).replace("heads:", f"{label}:", 1)) from None
    metadata, base = raw.get("metadata", {}), raw.get("base_model")
    if not isinstance(metadata, dict) or not isinstance(base, str | None):
        raise UserError(f"{label}: metadata must be an object and base_model a string or null")
    return config, metadata if base is None else {"base_model": base, **metadata}


def common_dtype(infos: Mapping[str, TensorInfo]) -> np.dtype:
    """The type that holds all values of these tensors exactly (of float32, float16 and bfloat16)."""
    types = {info.dtype for info in infos.values()}
    return types.pop() if len(types) == 1 else np.dtype(np.float32)


class OneFile(SafetensorsCheckpoint):
    """The tensors of one safetensors file of any name (a TensorSource)."""

    def __init__(self, file: Path) -> None:
        self.path = file
        self._weight_map = None
        self._infos = None
        self._files = {}

    def _scan(self) -> tuple[dict[str, Path], dict[str, TensorInfo]]:
        infos = _read_header(self.path)
        return dict.fromkeys(infos, self.path), infos


def stacked_parts(
    config: MedusaConfig, infos: Mapping[str, TensorInfo], read: Callable[[str, Index], np.ndarray]
) -> dict[Place, Lazy]:
    """Every part of heads whose arrays are stored whole, under `PREFIX` and the parameter's name."""

    def part(name: str, place: tuple[int, ...], tail: tuple[int, ...]) -> Lazy:
        before = tuple(slice(n, n + 1) for n in place)
        after = (slice(None),) * (len(tail) - 1)

        def rows(start: int, stop: int) -> np.ndarray:
            block = read(PREFIX + name, (*before, slice(start, stop), *after))
            return block.reshape(stop - start, *tail[1:])

        return Lazy(tail, infos[PREFIX + name].dtype, rows)

    parts: dict[Place, Lazy] = {}
    for name, shape in layer_shapes(config).items():
        lead, tail = split_shape(name, shape)
        parts |= {(name, place): part(name, place, tail) for place in np.ndindex(lead)}
    return parts


def _is_own(folder: Path) -> bool:
    config = folder / "config.json"
    return is_file(config) and read_json(config).get("format") == FORMAT


def _open_own(folder: Path) -> HeadCheckpoint:
    raw = read_json(folder / "config.json")
    config, metadata = parse(raw, str(folder / "config.json"))
    file = folder / WEIGHTS
    if not is_file(file):
        raise UserError(f"{file}: no such file")
    source: TensorSource = OneFile(file)
    infos = source.infos()
    check_named(infos, config, str(file))
    dtype = common_dtype({name: info for name, info in infos.items() if name != TOKEN_MAP})
    parts = stacked_parts(config, infos, source.read)
    tokens = (lambda: source.read(TOKEN_MAP)) if TOKEN_MAP in infos else None
    return HeadCheckpoint(folder, FORMAT, config, dtype, metadata, [], parts, tokens, settings=raw)


def _no_heads(folder: Path) -> str:
    if is_file(folder / WEIGHTS):
        return f'{folder}: has {WEIGHTS}, but no config.json with "format": "{FORMAT}"'
    if is_file(folder / SINGLE) or is_file(folder / INDEX):
        return f"{folder}: a model without Medusa heads (no medusa_head tensors); {_EXPECTED}"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix == ".bin")
    if pickles:
        return f"{folder}: only pickled weights ({pickles[0]}), which are not read: a pickle can run any code"
    return f"{folder}: no heads; {_EXPECTED}"
