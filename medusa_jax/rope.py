"""Rotary position embeddings in Hugging Face's half-split form, with its rescaled variants."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.config import RopeConfig
from medusa_jax.errors import UserError


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Frequencies [head_dim / 2] in radians a token, float32, and the scale of cos and sin.

    Sources: linear, Chen et al. 2023 (arXiv 2306.15595); yarn, Peng et al. 2023 (arXiv 2309.00071);
    llama3, the rule published with Llama 3.1 (long wavelengths divided, a ramp between).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.float32(1.0) / np.float32(rope.theta) ** exponents
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    return _yarn(rope, base, head_dim)


def check_frequencies(rope: RopeConfig, head_dim: int) -> None:
    """Raise UserError for values that give no finite frequencies, before a model turns them into NaN."""
    try:
        with np.errstate(all="ignore"):
            frequencies, scale = inverse_frequencies(rope, head_dim)
        good = bool(np.isfinite(frequencies).all()) and math.isfinite(scale)
    except ArithmeticError:
        good = False
    if not good:
        raise UserError(f"config: RoPE type {rope.kind!r}: the fields' values give no finite frequencies")


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    assert rope.original_context is not None
    turns = rope.original_context * base / (2 * math.pi)  # rotations over the original context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = np.clip(ramp, 0.0, 1.0)
    return ((1 - ramp) * base / rope.factor + ramp * base).astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    original = rope.original_context
    assert original is not None

    def dimension(turns: float) -> float:
        """The (fractional) dimension pair that turns `turns` times over the original context."""
        wavelength = original / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        scale = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        scale = mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    else:
        scale = mscale(1.0)
    return frequencies.astype(np.float32), scale


def cos_sin(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, head_dim / 2], float32, of absolute positions [B, T].

    Angles stay in float32: at position 40,000 bfloat16 would be off by whole turns.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
    # The barrier keeps XLA from computing them anew in every layer, for every head.
    return jax.lax.optimization_barrier((jnp.cos(angles) * scale, jnp.sin(angles) * scale))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [B, T, heads, h]: element i turns together with element i + h/2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
