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
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np

from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError, read_json
from medusa_jax.weights import hub
from medusa_jax.weights.hf import INDEX, SINGLE, SafetensorsCheckpoint, _read_header, write_safetensors
from medusa_jax.weights.params import check_tensors
from medusa_jax.weights.source import TensorInfo, TensorSource

FORMAT = "medusa-jax-heads"
VERSION = 1
WEIGHTS = "heads.safetensors"
PREFIX = "layers."
TOKEN_MAP = "token_map"

Layers = dict[str, np.ndarray]

_READ = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
_FIELDS = tuple(field.name for field in dataclasses.fields(MedusaConfig))
_ON_HUB = ["config.json", "*.safetensors", "*.safetensors.index.json"]
_EXPECTED = (
    f"expected {WEIGHTS} with its config.json, an Orbax checkpoint of heads, "
    "medusa_lm_head.safetensors or .pt, or a model with medusa_head tensors"
)


@dataclasses.dataclass(frozen=True)
class HeadCheckpoint:
    """Heads on disk, opened: everything is checked but the values, which `read` reads.

    kind names the format, for messages. dtype holds every stored value exactly. metadata has
    "base_model" where the files name one. warnings: lines for the user, such as a wrong count in config.json.
    """

    path: Path
    kind: str
    config: MedusaConfig
    dtype: np.dtype
    metadata: dict[str, Any]
    warnings: list[str]
    reader: Callable[[np.dtype], tuple[Layers, np.ndarray | None]]

    def read(self, dtype: Any) -> tuple[Layers, np.ndarray | None]:
        """The parameters of `HeadStack` in `dtype`, and the token_map [V'] int32 if there is one.

        Raises UserError naming a tensor that cannot be read, and for a dtype that parameters never have.
        """
        dtype = np.dtype(dtype)
        if dtype not in _READ:
            raise UserError(f"heads of type {dtype} are not supported, expected float32, float16 or bfloat16")
        return self.reader(dtype)


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


def open_heads(heads: str | os.PathLike[str], *, hidden_size: int, vocab_size: int) -> HeadCheckpoint:
    """Open the heads that `heads` means, for a model of that hidden size and vocabulary.

    A folder, of any kind named in the module's text or of `medusa_formats`; a .safetensors or .pt file;
    or a hub id (`org/name`, `org/name@revision`), as `hub.resolve` understands it. A folder's own
    config.json decides first, then medusa_lm_head.safetensors, its .pt twin, and a whole model.

    Raises UserError for files that are missing, broken, of no known kind, or not made for such a model.
    """
    # Both build on this file.
    from medusa_jax import checkpoint
    from medusa_jax.weights import medusa_formats

    path = _resolve(heads)
    if path.is_file() and path.name == WEIGHTS and _is_own(path.parent):
        path = path.parent
    if path.is_dir() and checkpoint.is_head_checkpoint(path):
        opened = checkpoint.open_head_checkpoint(path)
    elif path.is_dir() and _is_own(path):
        opened = _open_own(path)
    elif path.is_file() or medusa_formats.holds_heads(path):
        return medusa_formats.open_published(path, hidden_size=hidden_size, vocab_size=vocab_size)
    else:
        raise UserError(_no_heads(path))
    config = opened.config
    if config.hidden_size != hidden_size:
        raise UserError(
            f"{path}: the heads are for hidden size {config.hidden_size}, the model's is {hidden_size}"
        )
    if config.vocab_size != vocab_size:
        raise UserError(
            f"{path}: the heads are for a vocabulary of {config.vocab_size}, the model's is {vocab_size}"
        )
    return opened


def save_heads(
    folder: str | os.PathLike[str],
    config: MedusaConfig,
    layers: Mapping[str, Any],
    token_map: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write heads in this project's format; element types stay as they are.

    layers: NumPy or JAX arrays as `layer_shapes(config)` has them. token_map [V'] int32: with a draft
    vocabulary, and only then. metadata: anything JSON holds; "base_model" names the model they are for.
    The folder appears under its name only when it is whole.
    Raises UserError when it exists and is not empty, for arrays that do not fit the configuration, and
    when writing fails.
    """
    folder = Path(folder).resolve()
    arrays = named_arrays(config, layers, token_map, f"heads for {folder}")
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise UserError(f"{folder}: parameter {name} is spread over several processes; gather it first")
    check_target(folder)
    text = json.dumps(describe(config, metadata), indent=2) + "\n"
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        write_safetensors(partial / WEIGHTS, arrays)
        (partial / "config.json").write_text(text, encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_target(folder: Path) -> None:
    """Raise UserError unless `folder` is free to be written: not there, or an empty folder."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: exists and is not a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: exists and is not empty")


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
        raise UserError(f"{label}: format is {raw.get('format')!r}, expected {FORMAT!r}")
    if raw.get("version") != VERSION:
        raise UserError(f"{label}: version is {raw.get('version')!r}, this program reads version {VERSION}")
    known = {"format", "version", "base_model", "metadata", *_FIELDS}
    for kind, names in (("missing", set(_FIELDS) - raw.keys()), ("unknown", raw.keys() - known)):
        if names:
            raise UserError(f"{label}: {kind} field {', '.join(sorted(names)[:3])}")
    for name in ("conditioned", "own_unembedding"):
        if not isinstance(raw[name], bool):
            raise UserError(f"{label}: {name} is {raw[name]!r}, expected true or false")
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


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in `dtype`; what does not fit is infinite, as in any cast."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array).astype(dtype, copy=False)


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


def _is_own(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("format") == FORMAT


def _open_own(folder: Path) -> HeadCheckpoint:
    config, metadata = parse(read_json(folder / "config.json"), str(folder / "config.json"))
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    source: TensorSource = OneFile(file)
    infos = source.infos()
    check_named(infos, config, str(file))

    def read(dtype: np.dtype) -> tuple[Layers, np.ndarray | None]:
        layers = {name: cast(source.read(PREFIX + name), dtype) for name in layer_shapes(config)}
        token_map = source.read(TOKEN_MAP) if TOKEN_MAP in infos else None
        if token_map is not None:
            check_token_map(token_map, config, str(file))
        return layers, token_map

    dtype = common_dtype({name: info for name, info in infos.items() if name != TOKEN_MAP})
    return HeadCheckpoint(folder, FORMAT, config, dtype, metadata, [], read)


def _no_heads(folder: Path) -> str:
    if (folder / WEIGHTS).is_file():
        return f'{folder}: has {WEIGHTS}, but no config.json with "format": "{FORMAT}"'
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return f"{folder}: a model without Medusa heads (no medusa_head tensors); {_EXPECTED}"
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix == ".bin")
    if pickles:
        return f"{folder}: only pickled weights ({pickles[0]}), which are not read: a pickle can run any code"
    return f"{folder}: no heads; {_EXPECTED}"


# Finding them


def _resolve(heads: str | os.PathLike[str]) -> Path:
    text = os.fspath(heads)
    if not text:
        raise UserError("the heads' name is empty; expected a folder, a file or a hub id")
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() not in (".safetensors", ".pt"):
            raise UserError(f"{path}: not a file of heads; expected a folder, a .safetensors or a .pt file")
        return path
    local = text.startswith((".", "/", "~", os.sep)) or path.is_absolute() or not isinstance(heads, str)
    match = hub._HUB_ID.fullmatch(text)
    if local or path.suffix.lower() in (".safetensors", ".pt") or (match and match["file"]):
        raise UserError(f"{text}: no such file or folder")
    if match is None:
        raise UserError(f"{text!r}: no such file or folder, and not a hub id (org/name or org/name@revision)")
    return _fetch(match["repo"], match["revision"])


def _fetch(repo: str, revision: str | None) -> Path:
    """The folder of a hub repository in the hub's cache; a pickle is fetched where there is nothing else."""
    try:
        for patterns in (_ON_HUB, ["medusa_lm_head.pt"]):
            folder = Path(
                huggingface_hub.snapshot_download(
                    repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
                )
            )
            if any(folder.glob("*.safetensors")) or any(folder.glob("*.pt")):
                return folder
    except (hub.errors.HFValidationError, hub.errors.EntryNotFoundError, hub._HTTPError, OSError) as error:
        hub._explain(error, repo, None, revision)
    raise UserError(
        f"{repo}: the hub repository has no heads: no safetensors file and no medusa_lm_head.pt "
        "(other pickled weights are not read: a pickle can run any code)"
    )
