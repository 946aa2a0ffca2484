"""Medusa heads and conditioned heads (flax.linen): from a hidden state to scores of the tokens ahead.

Head m (from 0) reads the hidden state after the final norm at position t and scores the token at
t + 2 + m; the base model scores t + 1. Residual layers x + SiLU(W x + b) start at zero, so that an
untrained head repeats the base model's prediction. Cai et al. 2024 (arXiv 2401.10774), section 2.1.

Conditioned heads also read the embeddings of the tokens between, Ankner et al. 2024 (arXiv 2402.05109):
z = h + SiLU(W0 [h ; E(x_(t+1)) ; ... ; E(x_(t+1+m))] + b), then the residual layers.

Shapes: B batch, n nodes that share a depth, D model, M heads, V' tokens that the heads score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.backbone import Params
from medusa_jax.config import MedusaConfig
from medusa_jax.linear import over_leading, project

F32 = jnp.dtype(jnp.float32)


@flax.struct.dataclass
class HeadParams:
    """Everything that the heads need at run time besides the model."""

    layers: Params  # what `HeadStack` declares: trained
    token_map: jax.Array | None  # [V'] int32: the tokens that are scored; None: the whole vocabulary
    table: jax.Array | None  # [V', D]: the model's rows for a token_map; None: its whole table, or own ones


class HeadStack(nn.Module):
    """The parameters of all heads; residual layers are stacked over heads and layers."""

    config: MedusaConfig
    param_dtype: jnp.dtype

    def setup(self) -> None:
        """Declare the parameters: zeros everywhere but in own unembeddings, which `init` copies."""
        c, zeros = self.config, nn.initializers.zeros
        M, L, D = c.num_heads, c.num_layers, c.hidden_size
        if not self.has_variable("params", "weight_0_0"):  # see `taken_apart`
            self.weight = self.param("weight", zeros, (M, L, D, D), self.param_dtype)
        self.bias = self.param("bias", zeros, (M, L, D), self.param_dtype)
        if c.conditioned:
            # Head m reads m + 1 tokens, so these are as many arrays of growing width.
            self.mixers = [
                (
                    self.param(f"mixer_{m}_weight", zeros, (D, (m + 2) * D), self.param_dtype),
                    self.param(f"mixer_{m}_bias", zeros, (D,), self.param_dtype),
                )
                for m in range(M)
            ]
        if c.own_unembedding and not self.has_variable("params", "unembedding_0"):
            self.unembedding = self.param("unembedding", zeros, (M, c.scored, D), self.param_dtype)

    def state(self, hidden: jax.Array, m: int, path: jax.Array | None) -> jax.Array:
        """See the function `state`."""
        z = hidden
        if self.config.conditioned:
            assert path is not None
            weight, bias = self.mixers[m]
            # Embeddings are far smaller than normed hidden states; the mixer should see both alike.
            parts = [_unit(hidden), *(_unit(path[..., i, :]) for i in range(m + 1))]
            mixed = project(jnp.concatenate(parts, axis=-1), weight)
            z = z + nn.silu(mixed + over_leading(bias, mixed))
        for layer in range(self.config.num_layers):
            turned = project(z, _part(self.variables["params"], "weight", m, layer))
            z = z + nn.silu(turned + over_leading(self.bias[m, layer], turned))
        return z


def taken_apart(layers: Params) -> Params:
    """The same with an array for each matrix, in place of arrays stacked over heads and layers; or shapes.

    XLA:CPU copies what it slices out of a stack, at every step.
    """
    stacks = {name: leaf for name, leaf in layers.items() if name in _STACKED and leaf.size}
    apart = {name: leaf for name, leaf in layers.items() if name not in stacks}
    for name, stack in stacks.items():
        for index in np.ndindex(stack.shape[:-2]):
            key = "_".join(map(str, (name, *index)))
            shape = isinstance(stack, jax.ShapeDtypeStruct)
            apart[key] = jax.ShapeDtypeStruct(stack.shape[-2:], stack.dtype) if shape else stack[index]
    return apart


_STACKED = {"weight", "unembedding"}  # stacks of matrices


def _part(layers: Mapping[str, Any], name: str, *index: int) -> jax.Array:
    """One matrix of a stack, which may have been taken apart."""
    return layers[name][index] if name in layers else layers["_".join(map(str, (name, *index)))]


def _unit(x: jax.Array) -> jax.Array:
    """x [..., D] scaled to a root mean square of 1, computed in float32."""
    exact = x.astype(F32)
    return (exact * jax.lax.rsqrt(jnp.mean(exact * exact, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def init(
    config: MedusaConfig, table: jax.Array, dtype: Any, token_map: jax.Array | None = None
) -> HeadParams:
    """Fresh heads, which repeat the base model's prediction.

    table [V, D]: the model's unembedding. token_map [V'] int32: the draft vocabulary, if there is one.
    """
    module = HeadStack(config, jnp.dtype(dtype))
    hidden = jnp.zeros((1, config.hidden_size), dtype)
    path = jnp.zeros((1, config.num_heads, config.hidden_size), dtype)
    layers = dict(module.init(jax.random.key(0), hidden, 0, path, method=HeadStack.state))["params"]
    if config.own_unembedding:
        rows = table if token_map is None else table[token_map]
        shape = (config.num_heads, *rows.shape)
        layers = layers | {"unembedding": jnp.broadcast_to(rows.astype(dtype)[None], shape)}
    return attach(config, layers, table, token_map)


def abstract(config: MedusaConfig, dtype: Any) -> HeadParams:
    """Shapes and types of heads ready to run, without allocating any."""
    table = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), dtype)
    if config.draft_vocab_size is None:
        return jax.eval_shape(lambda table: init(config, table, dtype), table)
    token_map = jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32)
    return jax.eval_shape(lambda table, kept: init(config, table, dtype, kept), table, token_map)


def attach(config: MedusaConfig, layers: Params, table: jax.Array, token_map: jax.Array | None) -> HeadParams:
    """Heads ready to run with a model whose unembedding is table [V, D]: the draft rows are copied once.

    Raises ValueError when token_map is not as long as the configuration says.
    """
    if (None if token_map is None else token_map.shape[0]) != config.draft_vocab_size:
        raise ValueError(
            f"token_map has shape {getattr(token_map, 'shape', None)}, the draft vocabulary is "
            f"{config.draft_vocab_size}"
        )
    shared_draft = token_map is not None and not config.own_unembedding
    return HeadParams(layers, token_map, table[token_map] if shared_draft else None)


def state(params: HeadParams, config: MedusaConfig, hidden: jax.Array, m: int, path: jax.Array) -> jax.Array:
    """State of head m, [..., D], ready for its unembedding, from hidden [..., D].

    path [..., at least m + 1, D]: embeddings of the tokens that follow; read by conditioned heads only.
    """
    module = HeadStack(config, params.layers["bias"].dtype)
    variables = {"params": params.layers}
    return module.apply(variables, hidden, m, path, method=HeadStack.state)  # type: ignore[return-value]


def logits(params: HeadParams, config: MedusaConfig, z: jax.Array, m: int, table: jax.Array) -> jax.Array:
    """float32 scores [..., V'] of head m from its state z [..., D]. table [V, D]: the model's unembedding."""
    if config.own_unembedding:
        table = _part(params.layers, "unembedding", m)
    elif params.table is not None:
        table = params.table
    return project(z, table, F32)
