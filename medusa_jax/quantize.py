"""A frozen model in int8: every matrix, and both vocabulary tables; norms and biases stay as they are.

Symmetric, with one scale for each GROUP weights of a row: w = scale x code, code from -127 to 127. A bfloat16
scale costs nothing in accuracy, since the codes are made for the rounded scale.

Matrices of layers also have a ninth bit, half steps, packed eight to a byte into `low`. Eight bits err by 0.5 %
of each weight, which 30 layers of SmolLM2-135M add up to 1 to 3.6 % of the logits, depending on the text, in
groups of any size; nine halve that.

Not a library: qwix 0.1.8 quantises by replacing functions of jax and flax while a model is traced
(`jax.lax.dot_general`, `jax.numpy.einsum`, `Module.param`). It expects the weight on the right of a product, and
sees neither the lookup in a table nor a product of a shape that was traced before: of the 14 matrices of a model
of ours it quantised one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

GROUP = 32
LEAVES = ("weight", "scale", "low")  # int8 [out, in], bfloat16 [out, groups], uint8 [out, in / 8]
_TABLES = ("embed_tokens", "lm_head")


def is_quantized(leaves: Mapping[str, Any]) -> bool:
    """Whether the arrays of one layer are those of an int8 weight."""
    return "scale" in leaves


def widened(leaves: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """The weight [out, in] of one layer, from its int8 codes."""
    codes = leaves["weight"].astype(jnp.float32)
    width = codes.shape[-1]
    if "low" in leaves:
        codes = codes + jnp.unpackbits(leaves["low"], axis=-1, count=width).astype(jnp.float32) / 2
    scale = leaves["scale"].astype(jnp.float32)
    # Repeated, and not a product of three-dimensional arrays: the weight keeps whatever sharding it has.
    return (codes * jnp.repeat(scale, width // scale.shape[-1], axis=-1)).astype(dtype)


def quantize(params: Params) -> Params:
    """The same model with int8 matrices, one matrix at a time. What is int8 already stays."""
    return _each_matrix(params, lambda name, leaves: _quantized(leaves["weight"], name not in _TABLES))


def dequantize(params: Params) -> Params:
    """A model of plain weights from an int8 one, of the norms' dtype."""
    dtype = params["model"]["norm"]["weight"].dtype
    return _each_matrix(params, lambda name, leaves: {"weight": _widened(leaves, dtype)}, quantized=True)


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, from arrays or from shapes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _each_matrix(node: Params, change: Any, quantized: bool = False, name: str = "") -> Params:
    if "weight" not in node:
        return {
            part: _each_matrix(value, change, quantized, part) if isinstance(value, Mapping) else value
            for part, value in node.items()
        }
    if node["weight"].ndim != 2 or is_quantized(node) != quantized:
        return node
    others = {part: value for part, value in node.items() if part not in LEAVES}
    return change(name, node) | others


@partial(jax.jit, static_argnames="dtype")
def _widened(leaves: Params, dtype: Any) -> jax.Array:
    return widened(leaves, dtype)


@partial(jax.jit, static_argnames="ninth")
def _quantized(weight: jax.Array, ninth: bool) -> Params:
    height, width = weight.shape
    group = next(n for n in range(min(GROUP, width), width + 1) if width % n == 0)
    exact = weight.astype(jnp.float32).reshape(height, -1, group)
    levels = 255 if ninth else 127
    largest = jnp.max(jnp.abs(exact), axis=-1, keepdims=True)
    step = (largest / levels).astype(jnp.bfloat16).astype(jnp.float32)
    codes = jnp.round(exact / jnp.where(step > 0, step, 1))
    codes = jnp.clip(codes, -levels, levels).astype(jnp.int32).reshape(height, width)
    scale = step[..., 0].astype(jnp.bfloat16)
    if not ninth:
        return {"weight": codes.astype(jnp.int8), "scale": scale}
    low = jnp.packbits((codes & 1).astype(jnp.uint8), axis=-1)
    return {"weight": (codes >> 1).astype(jnp.int8), "scale": scale * 2, "low": low}
