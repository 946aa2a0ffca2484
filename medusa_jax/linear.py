"""Products with a weight (flax.linen), in whatever form the parameters hold it.

Beside `weight` [out, in] there may be `scale` and `low`, which make it an int8 one (`quantize`), and `lora_a`
[r, in], `lora_b` [out, r] and a scalar `lora_dropout` (train/lora.py), whose product is added to it. In its
place there may be `kernel` [in, out], by which a CPU that decodes multiplies faster (`turned`). Presence
decides: no configuration speaks of them, and no program without them changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import quantize

# The arrays of one layer, by name.
Leaves = Mapping[str, jax.Array]

_MANY_ROWS = 64  # from here on a CPU multiplies rows first

_YNNPACK_ROWS = range(25, 128)  # numbers of rows whose products YNNPACK is the faster for


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32: the default on TPU and on newer GPUs would round the factors first."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def project(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], giving [..., out].

    On a CPU the product of a few rows is written weight-first behind a barrier: XLA:CPU re-packs the
    right-hand matrix of a product at every call, and must not be allowed to turn it round again. With many
    rows what follows would pay more for reading the transposed result (docs/benchmarks.md, "Steps on a CPU").
    """
    rows = x.reshape(-1, x.shape[-1])
    precision = matmul_precision(weight.dtype)
    out_dtype = out_dtype or x.dtype

    def weight_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
        product = jnp.matmul(weight, rows.T, precision=precision, preferred_element_type=out_dtype)
        return jax.lax.optimization_barrier(product).T

    def rows_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.matmul(rows, weight.T, precision=precision, preferred_element_type=out_dtype)

    if rows.shape[0] < _MANY_ROWS:
        product = jax.lax.platform_dependent(rows, weight, cpu=weight_first, default=rows_first)
    else:
        product = rows_first(rows, weight)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def project_turned(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] times kernel [in, out], giving [..., out], on a CPU.

    XLA:CPU gives products to YNNPACK, but a convolution of width 1 becomes a product only after that choice:
    few rows, and many, cost less in the library that it then goes to (docs/benchmarks.md, "Steps on a CPU").
    """
    rows = x.reshape(-1, x.shape[-1])
    precision = matmul_precision(kernel.dtype)
    if rows.shape[0] in _YNNPACK_ROWS:
        product = jnp.matmul(rows, kernel, precision=precision)
    else:
        axes = ("NWC", "WIO", "NWC")
        product = jax.lax.conv_general_dilated(
            rows[None], kernel[None], (1,), "VALID", dimension_numbers=axes, precision=precision
        )
    # The barrier keeps what follows out of the product's library.
    return jax.lax.optimization_barrier(product).reshape(*x.shape[:-1], kernel.shape[1])


def turned(params: Any) -> Any:
    """A model's parameters, or their shapes, with the matrices of its layers as kernels [in, out].

    Tables of tokens stay. `params` loses each of its matrices as soon as the kernel is there, so that never
    more than one of them is held twice.
    """
    return _exchanged(params, "weight", "kernel")


def is_turned(params: Any) -> bool:
    """Whether parameters are as `turned` leaves them."""
    return any("kernel" in leaves for leaves in params["model"]["layers_0"]["mlp"].values())


def turned_back(params: Any) -> Any:
    """The inverse of `turned`; `params` loses its kernels likewise. Others come back as they are."""
    return _exchanged(params, "kernel", "weight")


def restored(params: Any) -> Any:
    """`turned_back`, which leaves `params` whole."""
    return turned_back(jax.tree.map(lambda leaf: leaf, params))


def _exchanged(node: Any, old: str, new: str, name: str = "") -> Any:
    if not isinstance(node, dict):
        return node
    if name.endswith("_proj") and old in node:
        return {new: _transposed(node.pop(old)), **node}
    return {part: _exchanged(value, old, new, part) for part, value in node.items()}


def _transposed(matrix: Any) -> Any:
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(matrix.shape[::-1], matrix.dtype)
    return jnp.asarray(np.ascontiguousarray(np.asarray(matrix).T))


def over_leading(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector [n] with the rank of `like` [..., n]: broadcasting is asked for, never implied."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def whole(leaves: Leaves, dtype: jnp.dtype) -> jax.Array:
    """The weight [out, in] without what LoRA adds; an int8 one is widened to `dtype`."""
    return quantize.widened(leaves, dtype) if quantize.is_quantized(leaves) else leaves["weight"]


def rows(leaves: Leaves, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows [..., in] of a weight. An index outside of it reads its edge."""
    if quantize.is_quantized(leaves):
        return quantize.widened_rows(leaves, index, dtype)
    return jnp.take(leaves["weight"], index, axis=0, mode="clip")


def dropped(x: jax.Array, rate: jax.Array | float, key: jax.Array) -> jax.Array:
    """x with a share `rate` of its elements zero and the others times 1 / (1 - rate). Srivastava et al. 2014.

    The same for every sharding. Noise is a hash of the element's number, mixed with the key (the finalizer of
    MurmurHash3, twice): JAX's generators take 20 rounds where these take 4, and with one in each product of a
    model most of a training step's compilation went into them.
    """
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    number = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):  # wraps around beyond 2^32 elements, which does no harm
        number = number * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    bits = _mixed(_mixed(number + words[0]) ^ words[-1])
    share = (bits >> 8).astype(jnp.float32) * 2.0**-24  # in [0, 1): 24 bits are exact in float32
    return jnp.where(share >= rate, x / jnp.asarray(1 - rate, x.dtype), 0).astype(x.dtype)


def _mixed(bits: jax.Array) -> jax.Array:
    """A permutation of 32-bit numbers in which every bit depends on every other."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def low_rank(x: jax.Array, leaves: Leaves, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What LoRA adds, as the factors of a product: x A^T [..., r] and B [out, r].

    key: for dropout of x, if the leaves say how much; None: without. Hu et al. 2021 (arXiv 2106.09685).
    """
    if key is not None and "lora_dropout" in leaves:
        x = dropped(x, leaves["lora_dropout"], key)
    return project(x, leaves["lora_a"]), leaves["lora_b"]


class Linear(nn.Module):
    """A product with a weight [out, in] and, if asked, a bias [out]."""

    features: int
    use_bias: bool
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        if self.has_variable("params", "kernel"):
            leaves = self.variables["params"]
            y = project_turned(x, leaves["kernel"])
        else:
            shape = (self.features, x.shape[-1])
            weight = self.param("weight", nn.initializers.normal(0.02), shape, self.param_dtype)
            leaves = self.variables["params"]
            y = _widened_product(x, leaves) if quantize.is_quantized(leaves) else project(x, weight)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
            y = y + over_leading(bias, y)
        if "lora_a" in leaves:
            key = self.make_rng("dropout") if self.has_rng("dropout") else None
            y = y + project(*low_rank(x, leaves, key))
        return y


def _widened_product(x: jax.Array, leaves: Leaves) -> jax.Array:
    # The backward pass widens the weight again: kept from the forward pass, it would be a whole float model.
    @jax.checkpoint
    def product(x: jax.Array, leaves: Leaves) -> jax.Array:
        return project(x, quantize.widened(leaves, x.dtype))

    return product(x, {name: leaves[name] for name in quantize.LEAVES})
