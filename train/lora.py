"""LoRA adapters: W + (alpha / r) B A, with A [r, in] and B [out, r] trained and W [out, in] left as it is.

Hu et al. 2021 (arXiv 2106.09685). On every matrix of the layers and on the unembedding, as Medusa-2 was
trained (Cai et al. 2024, arXiv 2401.10774, appendix B.2). Where embeddings are tied, only the unembedding has
adapters: a token's embedding stays what it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from medusa_jax import quantize
from medusa_jax.backbone import Params, compute_dtype
from medusa_jax.config import ModelConfig
from medusa_jax.errors import UserError, shown

F32 = jnp.dtype(jnp.float32)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


@flax.struct.dataclass
class Adapters:
    """What is trained, and the two numbers that belong to it."""

    params: Params  # nested as the model's: {"lora_a", "lora_b"} in place of {"weight"}, float32
    alpha: float = flax.struct.field(pytree_node=False)
    dropout: float = flax.struct.field(pytree_node=False)  # share of a layer's inputs that training drops


def init(
    params: Params,
    config: ModelConfig,
    key: jax.Array,
    rank: int = 32,
    alpha: float = 16.0,
    dropout: float = 0.05,
    targets: str | Sequence[str] = "all",
) -> Adapters:
    """Fresh adapters, under which a model is what it was: B is zero.

    A is uniform up to 1 / sqrt(in), PEFT's default. params: the model, or its shapes. targets: "all", or some
    of TARGETS. Raises UserError for numbers out of range and for unknown targets.
    """
    _check(rank, alpha, dropout)
    wanted = _targets(targets)
    model = dict(params)
    if config.tie_word_embeddings:
        model["lm_head"] = params["model"]["embed_tokens"]
    keys = iter(jax.random.split(key, 1 + len(TARGETS) * (1 + config.num_hidden_layers)))

    def one(name: str, leaves: Params) -> Params | None:
        if name not in wanted:
            return None
        rows, columns = leaves["weight"].shape
        bound = 1 / math.sqrt(columns)
        a = jax.random.uniform(next(keys), (rank, columns), F32, -bound, bound)
        return {"lora_a": a, "lora_b": jnp.zeros((rows, rank), F32)}

    return Adapters(_each(model, one), float(alpha), float(dropout))


def attach(params: Params, adapters: Adapters, dtype: Any) -> Params:
    """The model with its adapters: the same arrays, and A and (alpha / r) B in dtype beside adapted weights.

    Gradients reach the adapters through it. What the model then computes: see `medusa_jax.linear`.
    """
    rate = {"lora_dropout": jnp.asarray(adapters.dropout, F32)} if adapters.dropout else {}

    def one(leaves: Params, added: Params) -> Params:
        a, b = added["lora_a"], added["lora_b"] * (adapters.alpha / added["lora_a"].shape[0])
        return leaves | {"lora_a": a.astype(dtype), "lora_b": b.astype(dtype)} | rate

    return _join(params, adapters.params, one)


def merge(params: Params, adapters: Adapters, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """A plain model that computes what `params` with its adapters does, and its configuration.

    Sums are float32, the results of the model's dtype; int8 weights become plain ones. Adapters on the
    unembedding untie it from the embedding.
    """
    dtype = compute_dtype(params)
    if "lm_head" in adapters.params and config.tie_word_embeddings:
        params = params | {"lm_head": params["model"]["embed_tokens"]}
        config = dataclasses.replace(config, tie_word_embeddings=False)

    def one(leaves: Params, added: Params) -> Params:
        base = {name: leaves[name] for name in quantize.LEAVES if name in leaves}
        others = {name: leaf for name, leaf in leaves.items() if name not in base}
        return others | {"weight": _merged(base, added, adapters.alpha, dtype=dtype)}

    return quantize.dequantize(_join(params, adapters.params, one)), config


@partial(jax.jit, static_argnames="dtype")
def _merged(base: Params, added: Params, alpha: float, *, dtype: Any) -> jax.Array:
    weight = quantize.widened(base, F32) if quantize.is_quantized(base) else base["weight"].astype(F32)
    factor = alpha / added["lora_a"].shape[0]
    change = jnp.matmul(added["lora_b"], added["lora_a"], precision=jax.lax.Precision.HIGHEST)
    return (weight + factor * change).astype(dtype)


def _join(node: Params, added: Params, change: Callable[[Params, Params], Params]) -> Params:
    """The model with `change` of each adapted layer and its adapters."""
    if "lora_a" in added:
        return change(node, added)
    # With tied embeddings lm_head has adapters and nothing of its own.
    parts = {name: node.get(name, {}) if name == "lm_head" else node[name] for name in added}
    return node | {name: _join(part, added[name], change) for name, part in parts.items()}


def _each(node: Params, change: Callable[[str, Params], Params | None], name: str = "") -> Any:
    """`change` of every layer that has a weight, nested as before, without those that give None."""
    if "weight" in node:
        return change(name, node)
    parts = {part: _each(value, change, part) for part, value in node.items()}
    return {part: value for part, value in parts.items() if value} or None


def _check(rank: int, alpha: float, dropout: float) -> None:
    if not 1 <= rank <= 2**16:
        raise UserError(f"lora: rank is {shown(rank)}, expected an integer from 1 to {2**16}")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(f"lora: alpha is {shown(alpha)}, expected a number above 0")
    if not 0 <= dropout < 1:
        raise UserError(f"lora: dropout is {shown(dropout)}, expected a number from 0 to below 1")


def _targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(targets, str):
        targets = TARGETS if targets == "all" else (targets,)
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or not targets:
        found = shown(unknown[0]) if unknown else "empty"
        raise UserError(f"lora: target {found}, expected 'all' or some of {', '.join(TARGETS)}")
    return tuple(targets)
