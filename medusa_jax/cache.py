"""Key/value cache: allocated once, read by the forward, written only with accepted tokens."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from medusa_jax.config import ModelConfig

# One layer's keys and values, each [B, K, T, h].
KeyValue = tuple[jax.Array, jax.Array]


@flax.struct.dataclass
class KVCache:
    """Keys and values of the text so far; row b holds `lengths[b]` tokens, the slots behind are garbage."""

    keys: tuple[jax.Array, ...]  # a layer: [B, K, S, h], after RoPE
    values: tuple[jax.Array, ...]  # a layer: [B, K, S, h]
    lengths: jax.Array  # [B] int32

    @property
    def slots(self) -> int:
        """S, the number of tokens a row can hold."""
        return self.keys[0].shape[2]


def allocate(config: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `slots` tokens for each of `batch` rows."""
    shape = (batch, config.num_key_value_heads, slots, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def commit(cache: KVCache, fresh: tuple[KeyValue, ...], path: jax.Array | None, counts: jax.Array) -> KVCache:
    """Append to row b the first `counts[b]` [B] fresh tokens named by `path` [B, P] (None: all, in order).

    Always P slots are written, from the row's length on; those past `counts` hold garbage that the
    next write covers. The caller guarantees lengths + P <= S: XLA would silently move a write that
    reaches past the end. A vmapped dynamic_update_slice writes whole windows in place; an
    element-wise scatter rewrites the entire cache on TPU.
    """

    def append(slots: jax.Array, new: jax.Array) -> jax.Array:
        if path is not None:
            new = jnp.take_along_axis(new, path[:, None, :, None], axis=2)
        write = jax.vmap(lambda row, block, at: jax.lax.dynamic_update_slice(row, block, (0, at, 0)))
        return write(slots, new.astype(slots.dtype), cache.lengths)

    return KVCache(
        keys=tuple(append(slots, key) for slots, (key, _) in zip(cache.keys, fresh, strict=True)),
        values=tuple(append(slots, value) for slots, (_, value) in zip(cache.values, fresh, strict=True)),
        lengths=cache.lengths + counts,
    )


def grow(cache: KVCache, slots: int) -> KVCache:
    """The same text in a cache of more slots."""
    pad = ((0, 0), (0, 0), (0, slots - cache.slots), (0, 0))
    return dataclasses.replace(
        cache,
        keys=tuple(jnp.pad(layer, pad) for layer in cache.keys),
        values=tuple(jnp.pad(layer, pad) for layer in cache.values),
    )
