"""Llama-family decoder (flax.linen): one forward for prefill, plain steps and tree steps.

Parameter paths follow Hugging Face's names (`model/layers_0/self_attn/q_proj/weight`) and weights
keep its layout [out, in]. Shapes: B batch, T tokens in this call, S cache slots, D model, H query
heads, K key/value heads, G = H / K, h head size, F MLP, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from medusa_jax import linear, rope
from medusa_jax.cache import KeyValue, KVCache
from medusa_jax.config import ModelConfig
from medusa_jax.linear import Linear, matmul_precision, over_leading, project

Params = dict[str, Any]
F32 = jnp.dtype(jnp.float32)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the sum is taken in float32."""

    eps: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., n] -> [..., n]."""
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        exact = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(exact * exact, axis=-1, keepdims=True) + self.eps)
        return over_leading(weight, x) * (exact * scale).astype(x.dtype)


def attend(
    query: jax.Array,
    fresh: KeyValue,
    fresh_mask: jax.Array,
    cached: KeyValue | None,
    cached_mask: jax.Array | None,
) -> jax.Array:
    """Grouped-query attention over [cached ; fresh] keys, softmax in float32.

    query [B, T, H, h]; fresh 2 x [B, K, T, h]; cached 2 x [B, K, S, h] or None; masks [B, 1, 1, T, T] and
    [B, 1, 1, T or 1, S], true where attention is allowed. Returns [B, T, H * h].
    The two parts share one softmax but are never concatenated, so that the cache is read in place.
    """
    B, T, H, h = query.shape
    K = fresh[0].shape[1]
    G = H // K
    # Queries of one K/V head stand together, so that both products are plain batched matrix products: as
    # free einsums XLA:CPU transposes the cache for each.
    grouped = query.reshape(B, T, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, h)
    precision = matmul_precision(query.dtype)

    def product(left: jax.Array, right: jax.Array, contract: int) -> jax.Array:
        dimensions = (((3,), (contract,)), ((0, 1), (0, 1)))
        return jax.lax.dot_general(left, right, dimensions, precision, jnp.dtype(jnp.float32))

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:
        products = product(grouped, keys, 3).reshape(B, K, G, T, -1)
        return jnp.where(mask, products * h**-0.5, -jnp.inf)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        return product(weights.astype(values.dtype).reshape(B, K, G * T, -1), values, 2)

    fresh_scores = scores(fresh[0], fresh_mask)
    # Every token sees itself, so the maximum is finite whatever the cache holds.
    peak = jnp.max(fresh_scores, axis=-1, keepdims=True)
    if cached is None:
        fresh_weights = jnp.exp(fresh_scores - peak)
        mixed = mix(fresh_weights / jnp.sum(fresh_weights, axis=-1, keepdims=True), fresh[1])
    else:
        assert cached_mask is not None
        cached_scores = scores(cached[0], cached_mask)
        peak = jnp.maximum(peak, jnp.max(cached_scores, axis=-1, keepdims=True))
        fresh_weights, cached_weights = jnp.exp(fresh_scores - peak), jnp.exp(cached_scores - peak)
        total = jnp.sum(fresh_weights, axis=-1, keepdims=True) + jnp.sum(
            cached_weights, axis=-1, keepdims=True
        )
        mixed = mix(cached_weights / total, cached[1]) + mix(fresh_weights / total, fresh[1])
    return mixed.astype(query.dtype).reshape(B, K, G, T, h).transpose(0, 3, 1, 2, 4).reshape(B, T, H * h)


class Attention(nn.Module):
    """Self-attention of one layer."""

    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        fresh_mask: jax.Array,
        cached: KeyValue | None,
        cached_mask: jax.Array | None,
    ) -> tuple[jax.Array, KeyValue]:
        """x [B, T, D] -> [B, T, D] and this call's keys and values, 2 x [B, K, T, h]."""
        c = self.config
        B, T, _ = x.shape

        def heads(name: str, count: int) -> jax.Array:
            y = Linear(count * c.head_dim, c.qkv_bias, self.param_dtype, name=name)(x)
            return y.reshape(B, T, count, c.head_dim)

        query = heads("q_proj", c.num_attention_heads)
        key = heads("k_proj", c.num_key_value_heads)
        value = heads("v_proj", c.num_key_value_heads)
        if c.qk_norm:
            query = RMSNorm(c.rms_norm_eps, self.param_dtype, name="q_norm")(query)
            key = RMSNorm(c.rms_norm_eps, self.param_dtype, name="k_norm")(key)
        query, key = rope.rotate(query, *turn), rope.rotate(key, *turn)
        fresh = (key.swapaxes(1, 2), value.swapaxes(1, 2))
        mixed = attend(query, fresh, fresh_mask, cached, cached_mask)
        y = Linear(c.hidden_size, c.o_bias, self.param_dtype, name="o_proj")(mixed)
        return y, fresh


class MLP(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        c = self.config
        gate = Linear(c.intermediate_size, c.mlp_bias, self.param_dtype, name="gate_proj")(x)
        up = Linear(c.intermediate_size, c.mlp_bias, self.param_dtype, name="up_proj")(x)
        return Linear(c.hidden_size, c.mlp_bias, self.param_dtype, name="down_proj")(nn.silu(gate) * up)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to its input."""

    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, *attention: Any) -> tuple[jax.Array, KeyValue]:
        """x [B, T, D] -> [B, T, D] and the layer's fresh keys and values; the rest goes to `Attention`."""
        c = self.config
        normed = RMSNorm(c.rms_norm_eps, self.param_dtype, name="input_layernorm")(x)
        mixed, fresh = Attention(c, self.param_dtype, name="self_attn")(normed, *attention)
        x = x + mixed
        normed = RMSNorm(c.rms_norm_eps, self.param_dtype, name="post_attention_layernorm")(x)
        return x + MLP(c, self.param_dtype, name="mlp")(normed), fresh


class Embedding(nn.Module):
    """A vocabulary table [V, D]; hidden states are multiplied with it by `unembed`."""

    config: ModelConfig
    param_dtype: jnp.dtype

    def setup(self) -> None:
        """Declare the table."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.weight = self.param("weight", nn.initializers.normal(0.02), shape, self.param_dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] -> [B, T, D]. Ids outside the vocabulary (empty tree nodes) read its edge."""
        return linear.rows(self.variables["params"], tokens, self.param_dtype)


class Decoder(nn.Module):
    """The stack of layers between the token embedding and the final norm."""

    config: ModelConfig
    param_dtype: jnp.dtype
    remat: bool

    def setup(self) -> None:
        """Declare the parts under Hugging Face's names."""
        c = self.config
        self.embed_tokens = Embedding(c, self.param_dtype)
        layer = nn.remat(Layer) if self.remat else Layer
        self.layers = [layer(c, self.param_dtype) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, self.param_dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, relation: jax.Array, cache: KVCache | None
    ) -> tuple[jax.Array, tuple[KeyValue, ...]]:
        """See `forward`."""
        c = self.config
        turn = rope.cos_sin(c.rope, c.head_dim, positions)
        # Layers differ only by their window, so each kind of mask is built once.
        masks = {window: _masks(positions, relation, cache, window) for window in set(c.layer_windows)}
        x = self.embed_tokens.embed(tokens)
        fresh = []
        for i, layer in enumerate(self.layers):
            fresh_mask, cached_mask = masks[c.layer_windows[i]]
            cached = None if cache is None else (cache.keys[i], cache.values[i])
            x, new = layer(x, turn, fresh_mask, cached, cached_mask)
            fresh.append(new)
        return self.norm(x), tuple(fresh)


def _masks(
    positions: jax.Array, relation: jax.Array, cache: KVCache | None, window: int | None
) -> tuple[jax.Array, jax.Array | None]:
    """What each token may attend to: fresh tokens [B, 1, 1, T, T] and cache slots [B, 1, 1, T or 1, S]."""
    relation = relation if relation.ndim == 3 else relation[None]
    fresh = jnp.broadcast_to(relation, (positions.shape[0], *relation.shape[1:]))
    if window is not None:
        fresh = fresh & (positions[:, :, None] - positions[:, None, :] < window)
    cached = None
    if cache is not None:
        slot = jnp.arange(cache.slots)[None, None, :]  # a slot's index is its token's position
        cached = slot < cache.lengths[:, None, None]
        if window is not None:
            cached = cached & (positions[:, :, None] - slot < window)
        cached = cached[:, None, None]
    return fresh[:, None, None], cached


class CausalLM(nn.Module):
    """All parameters of a model; what `forward` applies."""

    config: ModelConfig
    param_dtype: jnp.dtype
    remat: bool = False

    def setup(self) -> None:
        """Declare the parts under Hugging Face's names."""
        self.model = Decoder(self.config, self.param_dtype, self.remat)
        if not self.config.tie_word_embeddings:
            self.lm_head = Embedding(self.config, self.param_dtype)

    def __call__(self, *args: Any) -> tuple[jax.Array, tuple[KeyValue, ...]]:
        """See `forward`."""
        return self.model(*args)

    def everything(self, tokens: jax.Array) -> None:
        """Touch every parameter; for initialisation."""
        self(tokens, jnp.zeros_like(tokens), jnp.ones((1, 1), bool), None)
        if not self.config.tie_word_embeddings:
            self.lm_head.embed(tokens)


def init(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> Params:
    """Random parameters of a model of this configuration."""
    module = CausalLM(config, jnp.dtype(dtype))
    variables = module.init(key, jnp.zeros((1, 1), jnp.int32), method=CausalLM.everything)
    return dict(variables)["params"]


def abstract_params(config: ModelConfig, dtype: jnp.dtype) -> Params:
    """Shapes and dtypes of the parameters, without allocating any."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))


def compute_dtype(params: Params) -> jnp.dtype:
    """The dtype that a model computes in: of its norms, which are never int8."""
    return params["model"]["norm"]["weight"].dtype


def unembedding_table(params: Params) -> jax.Array:
    """The table [V, D] that scores tokens: the embedding where both are tied. Without what LoRA adds."""
    head = params.get("lm_head", {})
    leaves = head if "weight" in head else params["model"]["embed_tokens"]
    return linear.whole(leaves, compute_dtype(params))


def embed(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Embeddings [..., D] of tokens [...]."""
    return linear.rows(params["model"]["embed_tokens"], tokens, compute_dtype(params))


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    relation: jax.Array,
    cache: KVCache | None,
    *,
    remat: bool = False,
    dropout: jax.Array | None = None,
) -> tuple[jax.Array, tuple[KeyValue, ...]]:
    """Hidden states after the final norm [B, T, D], and the tokens' fresh keys and values for `cache.commit`.

    tokens, positions: [B, T] int32, absolute positions. relation: [T, T] or [B, T, T] bool, whether
    token i attends to token j of this call (each to itself at least): causal for a prompt, ancestors
    for a tree. cache: the text before, which every token attends to (within its window); it is only
    read. None means that there is none, and saves reading an empty one.

    For training: remat keeps only each layer's input for the backward pass; dropout is a key for the dropout
    of LoRA layers, each of which has a stream of its own (None: without).
    """
    module = CausalLM(config, compute_dtype(params), remat)
    rngs = None if dropout is None else {"dropout": dropout}
    return module.apply({"params": params}, tokens, positions, relation, cache, rngs=rngs)  # type: ignore[return-value]


def unembed_terms(
    params: Params, config: ModelConfig, hidden: jax.Array, dropout: jax.Array | None = None
) -> list[tuple[jax.Array, jax.Array]]:
    """Products that add up to the logits of hidden [..., D]: pairs of x [..., d] and a table [V, d].

    The hidden states and the unembedding; with LoRA on it, a second one of d = r. A loss can take them by
    chunks. dropout: as in `forward`.
    """
    head = params.get("lm_head", {})
    leaves = params["model"]["embed_tokens"] if config.tie_word_embeddings else head
    terms = [(hidden, linear.whole(leaves, compute_dtype(params)))]
    if "lora_a" in head:
        terms.append(linear.low_rank(hidden, head, dropout))
    return terms


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D]."""
    first, *rest = [project(x, table, F32) for x, table in unembed_terms(params, config, hidden)]
    return sum(rest, first)
