"""What `infer.calibrate` measured: its file, and the ones that the user's cache keeps for `--tree auto`.

Such a file is a tree file (`tree.load_tree`) with these further fields; times are in seconds:

    source        which combination of candidates fills the tree: "heads", "lookup" or "both"
    sources       for each combination "paths" and "hit_rates" of the largest tree proposed; "lookup_rates",
                  by depth the probability that a token of lookup is right where those above it are; and
                  "tokens_per_step" by number of nodes read, of answers that the trees were not grown on
    step_seconds  {device: {batch: {nodes: seconds of a step}}}, with `source`
    chosen        {device: {batch: nodes}}, what follows from both; for the reader
    device, temperature, model_fingerprint, heads_fingerprint, prompts

A tree file with "hit_rates" alone is a calibration whose steps were not timed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError, read_json_value, write_atomically
from medusa_jax.tree import MAX_DEPTH, RankPath, Tree, tree_of
from medusa_jax.weights import fingerprint, hub

if TYPE_CHECKING:
    from medusa_jax.weights.head_files import HeadCheckpoint

FORMAT = "medusa-jax-tree"
SOURCES = ("heads", "lookup", "both")
_ROWS = 4  # of a matrix of the heads, that their fingerprint looks into

Seconds = dict[int, dict[int, float]]  # of a step, by batch and nodes


@dataclasses.dataclass(frozen=True)
class Source:
    """What one combination of candidates reaches.

    rates: for each path the probability that all of it is right. tokens_per_step: by number of nodes.
    lookup_rates: see `selection.Selection`; none where that was not measured.
    """

    rates: dict[RankPath, float]
    tokens_per_step: dict[int, float] = dataclasses.field(default_factory=dict)
    lookup_rates: tuple[float, ...] = ()

    def gain(self, nodes: int) -> float:
        """Tokens per step of the tree of so many nodes; where not measured, what its rates add up to."""
        return self.tokens_per_step.get(nodes) or Tree.grow(self.rates, nodes).expected_tokens(self.rates)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A calibration, read. See the module's text for its fields; `model` and `heads` are fingerprints."""

    source: str
    sources: dict[str, Source]
    step_seconds: dict[str, Seconds] = dataclasses.field(default_factory=dict)
    temperature: float = 0.0
    device: str = ""
    model: Mapping[str, Any] | None = None
    heads: str | None = None

    def seconds(self, device: str, batch: int) -> dict[int, float] | None:
        """Seconds of a step by number of nodes, of the measured batch nearest above; None: there is none.

        A batch stands for those down to half of it: a larger batch favours the smaller tree.
        """
        measured = self.step_seconds.get(device, {})
        near = [size for size in measured if batch <= size <= 2 * batch]
        return measured[min(near)] if near else None


def device_label(mesh: jax.sharding.Mesh | None, dtype: Any) -> str:
    """What a step's time depends on besides model, tree and batch, e.g. "cpu" or "TPU v4 tensor=4 float32".

    The type is named where it is not the usual one: float32 on a CPU, bfloat16 elsewhere.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    axes = {} if mesh is None else {name: size for name, size in mesh.shape.items() if size > 1}
    usual = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    words = [device.device_kind, ",".join(f"{name}={size}" for name, size in axes.items())]
    words.append("" if jnp.dtype(dtype) == usual else jnp.dtype(dtype).name)
    return " ".join(word for word in words if word)


def heads_fingerprint(heads: HeadCheckpoint) -> str:
    """A hash over the settings of heads and rows of all their arrays, rounded to bfloat16.

    The format that holds them and the type that they are kept in do not change it. Raises UserError when a
    tensor cannot be read.
    """
    config = dataclasses.asdict(heads.config) | {"vocab_size": heads.vocab_size}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for place in sorted(heads.parts):
        part = heads.parts[place]
        count = part.shape[0]
        matrix = len(part.shape) > 1
        rows = sorted({i * (count - 1) // (_ROWS - 1) for i in range(_ROWS)}) if matrix else [0]
        digest.update(f"{place} {list(part.shape)}".encode())
        for row in rows:
            values = np.asarray(part.read(row, row + 1 if matrix else count))
            stored = np.dtype(ml_dtypes.bfloat16).newbyteorder("<")
            digest.update(np.ascontiguousarray(values.astype(np.float32).astype(stored)).tobytes())
    token_map = heads.token_map()
    if token_map is not None:
        digest.update(token_map.astype("<i4").tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------- files


def read(path: Path) -> Calibration | None:
    """Read a calibration; None for a tree file without rates.

    Raises UserError naming the file and the field for whatever is wrong with it.
    """
    value = read_json_value(path)
    _, rates = tree_of(value, str(path))
    if rates is None:
        return None
    name, found = value.get("source", "both"), value.get("sources")
    if not isinstance(found, Mapping):
        name, found = (found if isinstance(found, str) else name), None
    if name not in SOURCES or (found is not None and name not in found):
        raise UserError(f'{path}: "source" is {name!r}, expected one of {", ".join(found or SOURCES)}')
    sources = {name: Source(rates)} if found is None else _sources(found, path)
    temperature = value.get("temperature", 0.0)
    if not _is_number(temperature) or temperature < 0:
        raise UserError(f'{path}: "temperature" is {temperature!r}, expected a number from 0 on')
    return Calibration(
        source=name,
        sources=sources,
        step_seconds=_step_seconds(value.get("step_seconds", {}), path),
        temperature=float(temperature),
        device=str(value.get("device", "")),
        model=value.get("model_fingerprint"),
        heads=value.get("heads_fingerprint"),
    )


def _sources(value: Mapping[str, Any], path: Path) -> dict[str, Source]:
    sources = {}
    for name, fields in value.items():
        where = f"{path}: sources: {name}"
        if not isinstance(fields, dict):
            raise UserError(f"{where}: expected an object, found {type(fields).__name__}")
        _, rates = tree_of(fields, where)
        if rates is None:
            raise UserError(f'{where}: there are no "hit_rates"')
        looked_up = fields.get("lookup_rates", [])
        if not isinstance(looked_up, list) or not all(_is_number(v) and 0 <= v <= 1 for v in looked_up):
            raise UserError(f'{where}: "lookup_rates" are not numbers between 0 and 1')
        gains = _by_number(fields.get("tokens_per_step", {}), where)
        sources[name] = Source(rates, gains, tuple(map(float, looked_up[:MAX_DEPTH])))
    return sources


def _step_seconds(value: Any, path: Path) -> dict[str, Seconds]:
    where = f"{path}: step_seconds"
    found: dict[str, Seconds] = {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected an object, found {type(value).__name__}")
    for device, batches in value.items():
        if not isinstance(batches, Mapping):
            raise UserError(f"{where}: {device}: expected an object, found {type(batches).__name__}")
        rows = {_number(batch, where): _by_number(one, where) for batch, one in batches.items()}
        if any(1 not in one for one in rows.values()):
            raise UserError(f"{where}: {device}: a batch without the time of plain decoding (1 node)")
        found[device] = rows
    return found


def _by_number(value: Any, where: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected an object, found {type(value).__name__}")
    wrong = next((v for v in value.values() if not _is_number(v) or v <= 0), None)
    if wrong is not None:
        raise UserError(f"{where}: holds {wrong!r}, expected numbers above 0")
    return {_number(key, where): float(number) for key, number in value.items()}


def _number(key: str, where: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", key):
        raise UserError(f"{where}: {key!r} is not a number from 1 on")
    return int(key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ------------------------------------------------------------------------------------------- the cache


def folder() -> Path:
    """Where the user's cache keeps calibrations."""
    return hub.cache_dir() / "trees"


def place(result: Mapping[str, Any]) -> Path:
    """The cache's file for a calibration of this model, heads, device and temperature."""
    keys = [result[name] for name in ("model_fingerprint", "heads_fingerprint", "device", "temperature")]
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{_slug(str(result['device']))}-{digest}.json"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a calibration's file, whole or not at all. Raises UserError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made ({error.strerror})") from None
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())


def earlier_times(result: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What "step_seconds" holds at `path`, if the file is of this model, these heads and this temperature.

    So a run for other batches, or on another device, adds to what is known.
    """
    try:
        read(path)
        old = read_json_value(path)
    except UserError:
        return {}
    same = isinstance(old, dict) and all(
        old.get(name) == result[name] for name in ("heads_fingerprint", "source", "temperature")
    )
    if same and fingerprint.matches(old.get("model_fingerprint", {}), result["model_fingerprint"]):
        return old.get("step_seconds", {})
    return {}


def remembered(
    device: str,
    heads: Callable[[], str | None],
    model: Callable[[], Mapping[str, Any]],
    notes: list[str],
) -> list[Calibration]:
    """The calibrations in the user's cache for this device, these heads and this model; the newest first.

    heads() and model() give the fingerprints; they are called only when there is something to compare.
    A file that cannot be read or is damaged is passed over, with a line in `notes`.
    """
    heads, model = functools.cache(heads), functools.cache(model)
    dated: list[tuple[float, Calibration]] = []
    try:
        paths = sorted(folder().glob(f"{_slug(device)}-*.json"))
    except (UserError, OSError):  # no home folder, or one that may not be looked into: nothing is kept
        return []
    for path in paths:
        try:
            found = read(path)
            written = path.stat().st_mtime
        except UserError as error:
            notes.append(f"{error}; this calibration is ignored")
            continue
        except OSError:  # taken away meanwhile
            continue
        if found is None or (found.device, found.heads) != (device, heads()):
            continue
        if found.model is not None and fingerprint.matches(found.model, model()):
            dated.append((written, found))
    return [found for _, found in sorted(dated, key=lambda pair: -pair[0])]


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") or "device"
