"""Telling whether heads meet the model that they were trained on.

A fingerprint is a hash over the names and shapes of a model's parameters, and values taken from some of
them. Two fingerprints are compared with a tolerance: a copy in bfloat16, or one that went through a
quantised GGUF file, is the same model; another model, or one trained further on, is not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from medusa_jax.weights.params import _SKIPPED, UNEMBEDDING, flatten
from medusa_jax.weights.source import TensorSource

VERSION = 1
KEY = "model_fingerprint"  # where the metadata of heads have it

_MATRICES, _VECTORS = 8, 6  # so many parameters of each kind are looked into
_ROWS, _RUN = 8, 16  # of a matrix: so many rows, a run of so many neighbours from each
_VALUES = 32  # of a vector
_STORED = np.dtype(ml_dtypes.bfloat16).newbyteorder("<")

# Root mean square of the difference over that of the values. Rounding to bfloat16 gives 0.002, 8-bit blocks
# 0.006, 4-bit ones 0.1, 2-bit ones 0.3 to 0.5; two models that have nothing in common 1.4.
_CLOSE, _COARSE = 0.01, 0.7
# Of a vector, whose largest difference counts: norms and biases stay float32 in every GGUF file.
_VECTOR_CLOSE = 0.01
# The share of different values in runs of neighbours: 0.99 of bfloat16 weights, 0.88 of 6-bit blocks.
_DISTINCT = 0.95


def fingerprint(params: Mapping[str, Any] | TensorSource) -> dict[str, Any]:
    """The fingerprint of a model, as JSON holds it (some kilobytes).

    params: the nested dict that `load_params` returns, sharded or not, or a TensorSource. All processes
    must call it. Raises UserError when a tensor cannot be read.
    """
    leaves = flatten(params) if isinstance(params, Mapping) else params.infos()
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    # A tied model's files may hold a copy of its table under a second name.
    names = sorted(n for n in shapes if n != UNEMBEDDING and not _SKIPPED.fullmatch(n))
    lines = "".join(f"{name} {list(shapes[name])}\n" for name in names)
    chosen = _spread([name for name in names if len(shapes[name]) == 2], _MATRICES)
    chosen += [UNEMBEDDING] if UNEMBEDDING in shapes else []
    chosen += _spread([name for name in names if len(shapes[name]) == 1], _VECTORS)
    values = {}
    for name in chosen:
        if isinstance(params, Mapping):
            values[name] = _from_array(leaves[name])
        else:
            values[name] = _from_source(params, name, shapes[name])
    runs = [row for name, taken in values.items() if len(shapes[name]) == 2 for row in taken]
    distinct = [len(np.unique(row)) / len(row) for row in runs]
    return {
        "version": VERSION,
        "shapes": hashlib.sha256(lines.encode()).hexdigest(),
        "coarse": bool(distinct) and float(np.mean(distinct)) < _DISTINCT,
        "matrices": {name: _encode(v) for name, v in values.items() if len(shapes[name]) == 2},
        "vectors": {name: _encode(v) for name, v in values.items() if len(shapes[name]) == 1},
    }


def matches(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two fingerprints are of one model. What is no fingerprint matches nothing."""
    try:
        if (a["version"], a["shapes"]) != (b["version"], b["shapes"]) or a["version"] != VERSION:
            return False
        limit = _COARSE if a["coarse"] or b["coarse"] else _CLOSE
        pairs = [(*pair, limit, np.linalg.norm) for pair in _pairs(a["matrices"], b["matrices"])]
        pairs += [(*pair, _VECTOR_CLOSE, _largest) for pair in _pairs(a["vectors"], b["vectors"])]
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error):
        return False
    return bool(pairs) and all(
        x.shape == y.shape and size(x - y) <= limit * max(size(x), size(y)) for x, y, limit, size in pairs
    )


def warnings(metadata: Mapping[str, Any], params: Mapping[str, Any] | TensorSource, label: str) -> list[str]:
    """A line when heads with this metadata were trained on another model than `params`; else nothing."""
    known = metadata.get(KEY)
    if known is None or (isinstance(known, Mapping) and matches(known, fingerprint(params))):
        return []
    base = metadata.get("base_model")
    named = f" ({base})" if isinstance(base, str) else ""
    return [
        f"{label}: the heads were trained on another model than this one{named}; "
        "texts stay right, but few guesses may be accepted"
    ]


def _spread(names: list[str], count: int) -> list[str]:
    """`count` of the names, evenly spread, the first and the last among them."""
    picked = {round(i * (len(names) - 1) / (count - 1)) for i in range(count)} if names else set()
    return [names[i] for i in sorted(picked)]


def _rows_and_columns(shape: tuple[int, ...]) -> Iterable[tuple[int, slice]]:
    """Rows all over a matrix, and in each another run of neighbours that begins where blocks begin."""
    rows, columns = shape
    run = min(_RUN, columns)
    for i in range(_ROWS):
        start = (i * columns // _ROWS) // run * run
        yield min(rows - 1, (2 * i + 1) * rows // (2 * _ROWS)), slice(start, start + run)


def _places(size: int) -> np.ndarray:
    return np.arange(min(_VALUES, size)) * size // min(_VALUES, size)


def _from_source(source: TensorSource, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return source.read(name)[_places(shape[0])].astype(np.float32)
    parts = [source.read(name, (slice(row, row + 1), run)) for row, run in _rows_and_columns(shape)]
    return np.concatenate(parts).astype(np.float32)


def _from_array(array: Any) -> np.ndarray:
    if array.ndim == 1:
        picked = array[_places(array.shape[0])]
    else:
        places = list(_rows_and_columns(array.shape))
        rows = np.array([[row] for row, _ in places])
        picked = array[rows, np.array([range(run.start, run.stop) for _, run in places])]
    if isinstance(picked, jax.Array) and not picked.is_fully_addressable:
        from jax.experimental import multihost_utils

        picked = multihost_utils.process_allgather(picked, tiled=True)
    return np.asarray(picked).astype(np.float32)


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(_STORED).tobytes()).decode()


def _pairs(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The values of the parameters of two models. Only the unembedding may be in one alone."""
    if (a.keys() ^ b.keys()) - {UNEMBEDDING}:
        raise ValueError("other parameters")

    def decode(text: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(text, validate=True), _STORED).astype(np.float32)

    return [(decode(a[name]), decode(b[name])) for name in a if name in b]


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))
