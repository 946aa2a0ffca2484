"""Products with a weight (flax.linen), in whatever form the parameters hold it.

Beside `weight` [out, in] there may be `scale` and `low`, which make it an int8 one (`quantize`), and `lora_a`
[r, in], `lora_b` [out, r] and a scalar `lora_dropout` (train/lora.py), whose product is added to it. Their
presence decides: no configuration speaks of them, and no program without them changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from medusa_jax import quantize

# The arrays of one layer, by name.
Leaves = Mapping[str, jax.Array]


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32: the default on TPU and on newer GPUs would round the factors first."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def project(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [..., in] times weight [out, in], giving [..., out].

    On a CPU the product is written weight-first behind a barrier: XLA:CPU re-packs the right-hand
    matrix of a product at every call, and must not be allowed to turn it round again
    (docs/benchmarks.md, "Steps on a CPU").
    """
    rows = x.reshape(-1, x.shape[-1])
    precision = matmul_precision(weight.dtype)
    out_dtype = out_dtype or x.dtype

    def weight_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
        product = jnp.matmul(weight, rows.T, precision=precision, preferred_element_type=out_dtype)
        return jax.lax.optimization_barrier(product).T

    def rows_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.matmul(rows, weight.T, precision=precision, preferred_element_type=out_dtype)

    product = jax.lax.platform_dependent(rows, weight, cpu=weight_first, default=rows_first)
    return product.reshape(*x.shape[:-1], weight.shape[0])


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


def low_rank(x: jax.Array, leaves: Leaves, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What LoRA adds, as the factors of a product: x A^T [..., r] and B [out, r].

    key: for dropout of x, if the leaves say how much; None: without. Hu et al. 2021 (arXiv 2106.09685).
    """
    if key is not None and "lora_dropout" in leaves:
        kept = 1 - leaves["lora_dropout"]
        x = jnp.where(jax.random.bernoulli(key, kept, x.shape), x / kept.astype(x.dtype), 0)
    return project(x, leaves["lora_a"]), leaves["lora_b"]


class Linear(nn.Module):
    """A product with a weight [out, in] and, if asked, a bias [out]."""

    features: int
    use_bias: bool
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
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
