"""A frozen model in int8: every matrix, and the vocabulary tables; norms and biases stay as they are.

Symmetric, with a scale for each GROUP weights of a row. A bfloat16 scale costs no accuracy, as codes are made
for the rounded scale. A ninth bit, half steps, is packed into `low`, those of eight rows to a byte (along a
row, a TPU would have to spread them over its lanes). Eight bits are an error of 0.5 % of each weight, which
the 30 layers of SmolLM2-135M turn into 3.5 % of the logits of chats with one scale a row, and 2.3 % with one
for every 32 weights. Nine halve that, at 0.289 of float32's bytes.

Not a library: qwix 0.1.8 quantises by replacing functions of jax and flax while a model is traced
(`jax.lax.dot_general`, `jax.numpy.einsum`, `Module.param`). It expects the weight on the right of a product,
and sees neither the lookup in a table nor a product whose shapes were traced before: of a model's 14 matrices
it quantised one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

GROUP = 64  # the least that divides a row, from this on
LEAVES = ("weight", "scale", "low")  # int8 [out, in], bfloat16 [out, groups], uint8 [out / 8, in]
_LEVELS = 255  # codes from -255 to 255: a high byte and a low bit


def is_quantized(leaves: Mapping[str, Any]) -> bool:
    """Whether the arrays of one layer are those of an int8 weight."""
    return "scale" in leaves


def widened(leaves: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """The weight [out, in] of one layer: scale x (high byte + low bit / 2)."""
    rows = leaves["weight"].shape[0]
    bits = leaves["low"][:, None, :] >> jnp.arange(8, dtype=jnp.uint8)[None, :, None]
    return _combined(leaves["weight"], bits.reshape(-1, bits.shape[-1])[:rows], leaves["scale"], dtype)


def widened_rows(leaves: Mapping[str, jax.Array], index: jax.Array, dtype: Any) -> jax.Array:
    """Rows [..., in] of the weight. An index outside of it reads its edge."""
    index = jnp.clip(index, 0, leaves["weight"].shape[0] - 1)
    bits = leaves["low"][index // 8] >> (index % 8).astype(jnp.uint8)[..., None]
    return _combined(leaves["weight"][index], bits, leaves["scale"][index], dtype)


def _combined(high: jax.Array, bits: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    codes = high.astype(jnp.float32) + (bits & 1).astype(jnp.float32) / 2
    # Repeated, and not a product over groups: a weight that is split within its rows stays so.
    return (codes * jnp.repeat(scale, high.shape[-1] // scale.shape[-1], axis=-1)).astype(dtype)


def quantize(params: Params) -> Params:
    """The same model with int8 matrices, made one at a time. What is int8 already stays."""
    return _each_matrix(params, lambda leaves: _quantized(leaves["weight"]))


def dequantize(params: Params) -> Params:
    """A model of plain weights from an int8 one, of the norms' dtype."""
    dtype = params["model"]["norm"]["weight"].dtype
    return _each_matrix(params, lambda leaves: {"weight": _widened(leaves, dtype)}, quantized=True)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, from arrays or from shapes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _each_matrix(node: Params, change: Callable[[Any], Params], quantized: bool = False) -> Params:
    if "weight" not in node:
        return {
            part: _each_matrix(value, change, quantized) if isinstance(value, dict) else value
            for part, value in node.items()
        }
    if node["weight"].ndim != 2 or is_quantized(node) != quantized:
        return node
    others = {part: value for part, value in node.items() if part not in LEAVES}
    return change({part: node[part] for part in LEAVES if part in node}) | others


@partial(jax.jit, static_argnames="dtype")
def _widened(leaves: Params, dtype: Any) -> jax.Array:
    return widened(leaves, dtype)


@jax.jit
def _quantized(weight: jax.Array) -> Params:
    rows, width = weight.shape
    group = next(n for n in range(min(GROUP, width), width + 1) if width % n == 0)
    exact = weight.astype(jnp.float32).reshape(rows, -1, group)
    largest = jnp.max(jnp.abs(exact), axis=-1, keepdims=True)
    scale = (2 * largest / _LEVELS).astype(jnp.bfloat16)
    step = scale.astype(jnp.float32) / 2
    codes = jnp.round(exact / jnp.where(step > 0, step, 1))
    codes = jnp.clip(codes, -_LEVELS, _LEVELS).astype(jnp.int32).reshape(rows, width)
    bits = jnp.pad(codes & 1, ((0, -rows % 8), (0, 0))).reshape(-1, 8, width)
    low = jnp.sum(bits << jnp.arange(8)[None, :, None], axis=1).astype(jnp.uint8)
    return {"weight": (codes >> 1).astype(jnp.int8), "scale": scale[..., 0], "low": low}
