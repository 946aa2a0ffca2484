"""A model as a run trained it: the backbone in a run's checkpoint, over the model that the run began with.

What is trained fully replaces the model's tensors. LoRA's A [r, in] and B [out, r] are merged,
W + (alpha / r) B A, over int8 weights if the run kept those, block by block as tensors are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax import checkpoint, quantize
from medusa_jax.errors import UserError
from medusa_jax.weights.checkpoints import Checkpoint
from medusa_jax.weights.lazy import cast
from medusa_jax.weights.params import EMBEDDING, UNEMBEDDING, to_name
from medusa_jax.weights.source import Index, TensorInfo, TensorSource

F32 = np.dtype(np.float32)
_ADAPTERS = "params."  # what precedes the names of LoRA's arrays


def opened(model: Checkpoint, run: Path, dtype: np.dtype | None = None) -> Checkpoint:
    """The model with the backbone of the checkpoint `run`, in `dtype`; None: in the model's own.

    Raises UserError for a checkpoint that is broken or of a model with other shapes.
    """
    infos, read, options = checkpoint.open_backbone(run)
    own = model.source.infos()
    if EMBEDDING not in own:
        raise UserError(f"{model.path}: no tensor {EMBEDDING!r}")
    dtype = own[EMBEDDING].dtype if dtype is None else dtype
    label = f"{run}: the trained model"
    if not any(name.startswith(_ADAPTERS) for name in infos):
        return dataclasses.replace(model, source=_Full(infos, read, dtype))
    source = _Merged(model, infos, read, options, dtype, label)
    config = model.config
    if UNEMBEDDING in source.adapted:
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return dataclasses.replace(model, config=config, source=source)


class _Full:
    """A model all of which was trained (a TensorSource)."""

    def __init__(
        self, infos: Mapping[str, TensorInfo], read: Callable[[str, Index], np.ndarray], dtype: np.dtype
    ) -> None:
        self._names = {to_name(tuple(name.split("."))): name for name in infos}
        self._infos = {name: TensorInfo(infos[kept].shape, dtype) for name, kept in self._names.items()}
        self._read = read

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and type of every tensor."""
        return dict(self._infos)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or a block of it."""
        shape, dtype = self._infos[name]
        return cast(self._read(self._names[name], index or (slice(None),) * len(shape)), dtype)


class _Merged:
    """A model with adapters merged into it (a TensorSource)."""

    def __init__(
        self,
        model: Checkpoint,
        infos: Mapping[str, TensorInfo],
        read: Callable[[str, Index], np.ndarray],
        options: Mapping[str, Any],
        dtype: np.dtype,
        label: str,
    ) -> None:
        self._base: TensorSource = model.source
        self._read, self._dtype, self._int8 = read, dtype, options.get("int8")
        alpha = options.get("lora_alpha")
        if not isinstance(self._int8, bool) or not isinstance(alpha, int | float):
            raise UserError(f"{label} has adapters, but the run's options do not tell int8 and lora_alpha")
        self.adapted: dict[str, str] = {}  # the stem of A's and B's names, by the weight's
        for name in infos:
            if name.endswith(".lora_a"):
                stem = name.removesuffix("lora_a")
                self.adapted[to_name(tuple(f"{stem}weight".split("."))[1:])] = stem
        shapes = {name: info.shape for name, info in self._base.infos().items()}
        if model.config.tie_word_embeddings and UNEMBEDDING in self.adapted:
            shapes[UNEMBEDDING] = shapes[EMBEDDING]
            self._table = EMBEDDING
        else:
            self._table = UNEMBEDDING
        for name, stem in self.adapted.items():
            a, b = infos[f"{stem}lora_a"].shape, infos[f"{stem}lora_b"].shape
            if shapes.get(name) != (b[0], a[1]):
                raise UserError(
                    f"{label} has {name} of shape {[b[0], a[1]]}, {model.path} has "
                    f"{list(shapes[name]) if name in shapes else 'none'}; the run began with another model"
                )
            self._scale = alpha / a[0]
        self._infos = {name: TensorInfo(shape, dtype) for name, shape in shapes.items()}

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and type of every tensor."""
        return dict(self._infos)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or a block of it; sums are float32."""
        index = index or (slice(None),) * len(self._infos[name].shape)
        block = self._weight(self._table if name == UNEMBEDDING else name, index)
        stem = self.adapted.get(name)
        if stem is not None:
            a = self._read(f"{stem}lora_a", (slice(None), index[1]))
            b = self._read(f"{stem}lora_b", (index[0], slice(None)))
            block = block.astype(F32) + np.float32(self._scale) * (b @ a)
        return cast(block, self._dtype)

    def _weight(self, name: str, index: Index) -> np.ndarray:
        if not self._int8 or len(index) != 2:
            return self._base.read(name, index)
        # A scale belongs to neighbours in a row, so a row is quantised whole.
        rows = self._base.read(name, (index[0], slice(None)))
        whole = quantize.quantize({"model": {"weight": np.asarray(rows)}})["model"]
        return np.asarray(quantize.widened(whole, F32))[:, index[1]]
