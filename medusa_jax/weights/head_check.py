"""Comparing converted heads with their source: a few random hidden states through both.

Shapes: n states, D model, V vocabulary, M heads, V' tokens that the heads score.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

from medusa_jax.weights.head_changes import shared_rows
from medusa_jax.weights.head_files import HeadCheckpoint, Place
from medusa_jax.weights.head_readback import READERS, Found, Head
from medusa_jax.weights.lazy import Lazy, common, of_array

LIMIT = 1e-5
_STATES = 4  # random hidden states that are compared
_STAND_IN = 997  # rows of a random unembedding, where heads share one that is not at hand
_BLOCK = 1 << 20  # elements of a matrix that are multiplied at a time, in float64
_BITS = {np.dtype(np.float32): 23, np.dtype(np.float16): 10, np.dtype(ml_dtypes.bfloat16): 7}  # of precision


class CheckError(Exception):
    """What was written is not what was to be written."""


def largest_difference(
    source: HeadCheckpoint, table: Lazy | None, folder: Path, to: str, dtype: np.dtype
) -> tuple[float, float]:
    """The largest difference in logits between a source and a target of kind `to`, and the limit for it.

    table [V, D]: the model's unembedding, for heads that share it. The limit is 1e-5, or one step of `dtype`
    at the largest logit where the source had to be rounded to it. Raises CheckError where the target lacks
    something, or differs from the source even after the source was rounded too.
    """
    try:
        found = READERS[to](folder)
    except (KeyError, ValueError, TypeError, OSError, zipfile.BadZipFile, pickle.PickleError) as error:
        raise CheckError(f"the target cannot be read back ({type(error).__name__}: {error})") from error
    if len(found.heads) != source.config.num_heads:
        raise CheckError(f"the target has {len(found.heads)} heads, the source {source.config.num_heads}")
    sides = _Sides(source, table, found, dtype)
    worst = limit = 0.0
    for m in range(source.config.num_heads):
        got = sides.got(m)
        if sides.narrows(m):
            difference = _difference(sides.wanted(m, rounded=True), got, m)
            if difference > LIMIT:
                raise CheckError(f"head {m} differs by {difference:.2g} in logits from its source in {dtype}")
        wanted = sides.wanted(m)
        worst, largest = max(worst, _difference(wanted, got, m)), float(np.max(np.abs(wanted)))
        if sides.narrows(m) and largest:
            limit = max(limit, 2.0 ** (math.floor(math.log2(largest)) - _BITS[dtype]))
    return worst, max(LIMIT, limit)


def _difference(wanted: np.ndarray, got: np.ndarray, m: int) -> float:
    if wanted.shape != got.shape:
        raise CheckError(f"head {m} scores {got.shape[1]} tokens, in the source {wanted.shape[1]}")
    difference = float(np.max(np.abs(wanted - got)))
    if not math.isfinite(difference):
        raise CheckError(f"logits of head {m} are not finite")
    return difference


class _Sides:
    """Source and target, run on the same random hidden states [n, D] and embeddings [n, M, D]."""

    def __init__(self, source: HeadCheckpoint, table: Lazy | None, found: Found, dtype: np.dtype) -> None:
        self.source, self.table, self.found, self.dtype = source, table, found, dtype
        M, D = source.config.num_heads, source.config.hidden_size
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(_STATES, D)), rng.normal(size=(_STATES, M, D))
        self.tokens = source.token_map()
        self.expanded = self.tokens is not None and found.tokens is None
        if self.expanded and table is None:
            raise CheckError("the target scores the whole vocabulary, the source does not")
        same = (self.tokens is None) == (found.tokens is None)
        if not self.expanded and (not same or (same and _differ(self.tokens, found.tokens))):
            raise CheckError("the target scores other tokens than the source")
        theirs = table if found.table is None else found.table
        if theirs is not None and found.tokens is not None:
            theirs = theirs.rows(of_array(found.tokens))
        if table is None and source.table is None:
            self.ours = of_array(rng.normal(size=(_STAND_IN, D)).astype(np.float32))
        else:
            self.ours = source.table if table is None else shared_rows(source, table)
        self.theirs = self.ours if theirs is None else theirs

    def got(self, m: int) -> np.ndarray:
        """Logits of the target's head m."""
        return _logits(self.found.heads[m], m, *self.inputs, self.theirs)

    def narrows(self, m: int) -> bool:
        """Whether the source had to be rounded."""
        types = [part.dtype for place, part in self.source.parts.items() if _belongs(place, m)]
        narrowed = any(common(kind, self.dtype) != self.dtype for kind in types)
        stored = self._stored(m)
        if stored is None or (self.source.config.own_unembedding and not self.expanded):
            return narrowed
        shared = self.ours if self.table is None else self.table
        return narrowed or (shared is not None and common(shared.dtype, stored.dtype) != stored.dtype)

    def _stored(self, m: int) -> Lazy | None:
        """The unembedding that the target holds for head m."""
        own = self.found.heads[m].table
        return self.found.table if own is None else own

    def wanted(self, m: int, rounded: bool = False) -> np.ndarray:
        """Logits of the source's head m over the tokens that the target scores; rounded as the target is."""
        stored = self._stored(m)
        kind = stored.dtype if rounded and stored is not None else None
        head = _source_head(self.source, m, self.dtype if rounded else None)
        logits = _logits(head, m, *self.inputs, _astype(self.ours, kind))
        if not self.expanded:
            return logits
        # The model's rows stand for the tokens that the draft vocabulary lacks.
        full = _logits(dataclasses.replace(head, table=_astype(self.table, kind)), m, *self.inputs, None)
        full[:, self.tokens] = logits
        return full


def _differ(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and not np.array_equal(a, b)


def _astype(part: Lazy | None, dtype: np.dtype | None) -> Lazy | None:
    return part if part is None or dtype is None else part.astype(dtype)


def _belongs(place: Place, m: int) -> bool:
    """Whether a part is one of head m's."""
    parameter, index = place
    return index[0] == m if index else parameter.startswith(f"mixer_{m}_")


def _source_head(source: HeadCheckpoint, m: int, dtype: np.dtype | None) -> Head:
    parts = {
        place: part if dtype is None else part.astype(dtype)
        for place, part in source.parts.items()
        if _belongs(place, m)
    }
    layers = range(source.config.num_layers)
    mixer = None
    if source.config.conditioned:
        mixer = parts[f"mixer_{m}_weight", ()], parts[f"mixer_{m}_bias", ()]
    pairs = [(parts["weight", (m, layer)], parts["bias", (m, layer)]) for layer in layers]
    return Head(pairs, parts.get(("unembedding", (m,))), mixer)


def _logits(head: Head, m: int, states: np.ndarray, path: np.ndarray, shared: Lazy | None) -> np.ndarray:
    """Logits [n, rows] of head m from states [n, D], in float64. path [n, M, D] stands for embeddings."""
    z = states
    if head.mixer is not None:
        parts = [states, *(path[:, i] for i in range(m + 1))]
        units = [x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) for x in parts]
        z = z + _silu(_product(np.concatenate(units, axis=-1), *head.mixer))
    for weight, bias in head.layers:
        z = z + _silu(_product(z, weight, bias))
    table = head.table or shared
    if table is None:
        raise CheckError("the heads have no unembedding")
    return _product(z, table)


def _product(x: np.ndarray, matrix: Lazy, bias: Lazy | None = None) -> np.ndarray:
    out = np.empty((len(x), matrix.shape[0]))
    for (rows,), block in matrix.blocks(max(1, _BLOCK // matrix.shape[1])):
        out[:, rows] = x @ block.astype(np.float64).T
    return out if bias is None else out + np.asarray(bias).astype(np.float64)


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and the quotient zero
        return x / (1 + np.exp(-x))
