"""What a checkpoint looks like to the loader, whatever file it comes from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

Index = tuple[slice, ...]


class TensorInfo(NamedTuple):
    """Shape and element type of a tensor as `read` returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype


class TensorSource(Protocol):
    """Named tensors that can be read one at a time; names are Hugging Face's.

    `model.layers.0.self_attn.q_proj.weight` is [out, in], rotary halves split as Hugging Face does.
    """

    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint, without reading any. Raises UserError for a broken file."""
        ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or the block of it that `index` selects. Raises UserError naming the tensor."""
        ...
