"""Arrays that stay on disk: read, cast, checked and written in blocks of rows.

A conversion is made of these, so that it holds some megabytes at a time, whatever the size of the heads.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.weights.source import Index

BLOCK_BYTES = 8 << 20
# What safetensors files call the element types.
CODES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}

Block = tuple[Index, np.ndarray]  # a place in an array, and its values
Progress = Callable[[int], None]  # told the bytes of every block that is written

# The exponent of a value that is infinite or no number, by type: far faster than NumPy's own test.
_EXPONENT = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A matrix or a vector; `read(start, stop)` gives rows of it, of this dtype, when they are needed."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, step: int | None = None) -> Iterator[Block]:
        """All rows from the first to the last, `step` or some megabytes of them at a time."""
        count = self.shape[0]
        step = step or max(1, BLOCK_BYTES * count // max(1, self.nbytes))
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield (slice(start, stop),), self.read(start, stop)

    def astype(self, dtype: np.dtype) -> Lazy:
        """The same in another type."""
        if dtype == self.dtype:
            return self
        return Lazy(self.shape, dtype, lambda start, stop: cast(self.read(start, stop), dtype))

    def rows(self, ids: Lazy) -> Lazy:
        """The rows of these numbers, in their order; scattered ones, so each block reads the whole array."""

        def read(start: int, stop: int) -> np.ndarray:
            wanted = ids.read(start, stop)
            picked = np.empty((len(wanted), *self.shape[1:]), self.dtype)
            for (rows,), block in self.blocks():
                inside = (wanted >= rows.start) & (wanted < rows.stop)
                picked[inside] = block[wanted[inside] - rows.start]
            return picked

        return Lazy((ids.shape[0], *self.shape[1:]), self.dtype, read)

    def first(self, count: int) -> Lazy:
        """The first `count` rows."""
        return dataclasses.replace(self, shape=(count, *self.shape[1:]))

    def finite(self, label: str) -> Lazy:
        """The same, raising UserError that begins with `label` where a value is infinite or no number."""

        def read(start: int, stop: int) -> np.ndarray:
            block = self.read(start, stop)
            if not is_finite(block):
                raise UserError(f"{label}: holds values that are infinite or not numbers in {self.dtype}")
            return block

        return Lazy(self.shape, self.dtype, read)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for place, block in self.blocks():
            whole[place] = block
        return whole if dtype is None else whole.astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Lazy arrays of one shape and type as a single array with the leading axes `lead`, in their order."""

    lead: tuple[int, ...]
    tail: tuple[int, ...]
    dtype: np.dtype
    parts: Sequence[Lazy]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return self.lead + self.tail

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, step: int | None = None) -> Iterator[Block]:
        """All values in the array's own order, `step` rows of a part or some megabytes at a time."""
        for lead, part in zip(np.ndindex(self.lead), self.parts, strict=True):
            for place, block in part.blocks(step):
                yield (*(slice(n, n + 1) for n in lead), *place), block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for place, block in self.blocks():
            whole[place] = block
        return whole if dtype is None else whole.astype(dtype, copy=False)


def of_array(array: np.ndarray) -> Lazy:
    """An array in memory as a lazy one."""
    return Lazy(array.shape, array.dtype, lambda start, stop: array[start:stop])


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Lazy:
    """An array of zeros that takes no memory."""
    return Lazy(shape, dtype, lambda start, stop: np.zeros((stop - start, *shape[1:]), dtype))


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in `dtype`; what does not fit is infinite, as in any cast."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array).astype(dtype, copy=False)


def common(a: np.dtype, b: np.dtype) -> np.dtype:
    """The type that holds all values of both (of float32, float16 and bfloat16) exactly."""
    return a if a == b else np.dtype(np.float32)


def is_finite(array: np.ndarray) -> bool:
    """Whether no value is infinite or no number. Integers are finite."""
    exponent = _EXPONENT.get(array.dtype)
    if exponent is None:
        return bool(np.isfinite(array).all())
    return not ((np.ascontiguousarray(array).view(np.uint16) & exponent) == exponent).any()


def same_values(a: Lazy, b: Lazy) -> bool:
    """Whether two arrays are equal but for one of them having been rounded to the other's type."""
    if a.shape != b.shape:
        return False
    wide, narrow = (a, b) if a.dtype.itemsize > b.dtype.itemsize else (b, a)
    # Of two types of equal width neither holds the other's values: which was rounded is not known.
    down, up = True, narrow.dtype.itemsize == wide.dtype.itemsize
    for (rows,), block in wide.blocks():
        other = narrow.read(rows.start, rows.stop)
        down = down and _same_bits(cast(block, narrow.dtype), other)
        up = up and _same_bits(block, cast(other, wide.dtype))
        if not (down or up):
            return False
    return True


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    word = np.dtype(f"u{a.dtype.itemsize}")
    return bool((np.ascontiguousarray(a).view(word) == np.ascontiguousarray(b).view(word)).all())


def write_safetensors(path: Path, arrays: Mapping[str, Any], progress: Progress | None = None) -> None:
    """Write one safetensors file of lazy, NumPy or JAX arrays, block by block. Raises OSError.

    The library's writer wants all tensors of a file in host memory at once.
    """
    # Wide types first, so that every tensor starts at a multiple of its element's size.
    names = sorted(arrays, key=lambda name: -np.dtype(arrays[name].dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        array = arrays[name]
        end = offset + math.prod(array.shape) * np.dtype(array.dtype).itemsize
        code = CODES[np.dtype(array.dtype)]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for data in byte_blocks(arrays[name]):
                file.write(data)
                if progress is not None:
                    progress(len(data))


def byte_blocks(array: Any) -> Iterator[memoryview]:
    """The bytes of an array, little end first, some megabytes at a time (those of a JAX array at once)."""
    if isinstance(array, Lazy | Stack):
        blocks: Iterator[np.ndarray] = (block for _, block in array.blocks())
    else:
        blocks = iter([_to_host(array) if isinstance(array, jax.Array) else np.asarray(array)])
    for block in blocks:
        host = block.astype(block.dtype.newbyteorder("<"), copy=False)
        yield np.ascontiguousarray(host).reshape(-1).view(np.uint8).data


def _to_host(array: jax.Array) -> np.ndarray:
    # A JAX array keeps the host copy that it once made; a second handle on the same buffers takes it along.
    shards = [shard.data for shard in array.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards))
