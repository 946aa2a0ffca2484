"""The configuration of a model in a GGUF file, from its metadata.

* Llama 3's RoPE scaling is stored as a tensor of divisors, `rope_freqs.weight`.
* Mistral is written as `llama`, and its sliding window is dropped (see `_mistral_window`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

from medusa_jax.config import INTEGERS, LONGEST_CONTEXT, NUMBERS, ModelConfig, RopeConfig
from medusa_jax.errors import UserError, shown

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"

# Keys `<architecture>.*` that the configuration is read from, or that do not change the function.
# fmt: off
_READ_KEYS = {
    "block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size",
    "tensor_data_layout", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "attention.scale", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}
# fmt: on
# Hugging Face's names of the numbers, for their bounds.
_HF_NAMES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Keys that change the function, with the values that leave it as it is. Any other key is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def read_config(metadata: Mapping[str, Any], stored: Mapping[str, gguf.ReaderTensor]) -> ModelConfig:
    """The configuration that a file's metadata and the names of its tensors give.

    Raises UserError naming the field for what is missing, unsupported or unknown.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"general.architecture {shown(architecture)} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(metadata, architecture)
    if "token_embd.weight" not in stored:
        raise UserError("tensor 'token_embd.weight' is missing")
    prefix = f"{architecture}."
    fields = {k.removeprefix(prefix): _plain(v) for k, v in metadata.items() if k.startswith(prefix)}
    heads, hidden = _integer(fields, "attention.head_count"), _integer(fields, "embedding_length")
    head_dim = _integer(fields, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(fields, key, head_dim) != head_dim:
            raise UserError(
                f"{architecture}.{key} is {shown(fields[key])}, expected the head size {head_dim}"
            )
    scale = _number(fields, "attention.scale") if fields.get("attention.scale") else 0
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise UserError(
            f"{architecture}.attention.scale is {scale}, expected 1/sqrt of the head size {head_dim}"
        )
    layers, context = _integer(fields, "block_count"), _integer(fields, "context_length")
    rope = _read_rope(fields, stored, head_dim)
    window = _read_window(metadata, fields, architecture, rope.theta, context)
    return ModelConfig(
        family="mistral" if window else architecture,
        vocab_size=int(stored["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=_integer(fields, "feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_integer(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_number(fields, "attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        rope=rope,
        tie_word_embeddings="output.weight" not in stored,
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in stored,
        o_bias="blk.0.attn_output.bias" in stored,
        mlp_bias="blk.0.ffn_gate.bias" in stored,
        qk_norm=architecture == "qwen3",
        layer_windows=(window,) * layers,
    )


def _refuse_unsupported(metadata: Mapping[str, Any], architecture: str) -> None:
    if metadata.get("general.type", "model") != "model":
        raise UserError(f"general.type is {shown(metadata['general.type'])}, expected 'model'")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"one of {shown(metadata['split.count'])} parts of a split GGUF file, expected a merged file"
        )
    for name, value in metadata.items():
        key = name.removeprefix(f"{architecture}.")
        if key == name or key in _READ_KEYS or value in _NEUTRAL.get(key, ()):
            continue
        expected = f"expected {_NEUTRAL[key][-1]}" if key in _NEUTRAL else "which is unknown"
        raise UserError(f"{name} is {shown(value)}, {expected}: not supported")


def _plain(value: Any) -> Any:
    """A field's value; per-layer arrays of one repeated value count as that value."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    if not isinstance(value, float):
        return value
    # float32 fields give back the decimal they were written from: 1e-5 and not 9.999999747e-06.
    with np.errstate(over="ignore"):  # a float64 field beyond float32 is infinite, which no bounds allow
        return float(str(np.float32(value)))


def _integer(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    most = INTEGERS[_HF_NAMES[key]][1] if key in _HF_NAMES else LONGEST_CONTEXT
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        found = "missing" if value is None else shown(value)
        raise UserError(f"metadata field {key!r} is {found}, expected an integer from 1 to {most}")
    return value


def _number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = fields.get(key, default)
    least, most = NUMBERS[_HF_NAMES[key]] if key in _HF_NAMES else (1e-30, 1e30)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        found = "missing" if value is None else shown(value)
        raise UserError(f"metadata field {key!r} is {found}, expected a number from {least:g} to {most:g}")
    return float(value)


def _read_rope(
    fields: Mapping[str, Any], stored: Mapping[str, gguf.ReaderTensor], head_dim: int
) -> RopeConfig:
    theta = _number(fields, "rope.freq_base", 10000.0)
    # llama.cpp takes a factor without a type as linear, and 0 as no factor.
    has_factor = bool(fields.get("rope.scaling.factor"))
    kind = fields.get("rope.scaling.type", "linear" if has_factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"rope.scaling.type {shown(kind)} is not supported; supported are none, linear, yarn")
    if ROPE_FREQS in stored:
        if kind != "none":
            raise UserError(f"rope.scaling.type {kind!r} together with {ROPE_FREQS} is not supported")
        original = _integer(fields, "rope.scaling.original_context_length", 8192)
        return _llama3_rope(stored[ROPE_FREQS], theta, head_dim, original)
    if kind == "none" or (kind == "linear" and not has_factor):
        return RopeConfig(theta=theta)
    factor = _number(fields, "rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_context=_integer(
            fields, "rope.scaling.original_context_length", _integer(fields, "context_length")
        ),
        beta_fast=_number(fields, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(fields, "rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(tensor: gguf.ReaderTensor, theta: float, head_dim: int, original: int) -> RopeConfig:
    """The llama3 parameters whose divisors are `rope_freqs.weight` [head_dim / 2].

    A wavelength below original / 4 is divided by 1, above `original` by the factor, and between by
    1 / ((1 - s) / factor + s) with s = (original / wavelength - 1) / 3 (Llama 3.1's own formula).
    """
    if tensor.tensor_type != GGMLType.F32 or tensor.data.shape != (head_dim // 2,):
        raise UserError(f"{ROPE_FREQS} is {tensor.data.shape}, expected {head_dim // 2} values of F32")
    divisors = tensor.data.astype(np.float64)
    if np.all(divisors == 1):
        return RopeConfig(theta=theta)
    factor = _plain(float(divisors.max()))
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    with np.errstate(all="ignore"):  # a factor of 0, infinity or NaN equals nothing below
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-5, atol=0):
        raise UserError(
            f"{ROPE_FREQS} does not follow Llama 3's RoPE scaling "
            f"(factor {factor:g}, context {original}, low and high frequency factors 1 and 4)"
        )
    return RopeConfig(kind="llama3", theta=theta, factor=factor, original_context=original)


def _read_window(
    metadata: Mapping[str, Any], fields: Mapping[str, Any], architecture: str, theta: float, context: int
) -> int | None:
    window = fields.get("attention.sliding_window")
    if not window:
        return (
            _mistral_window(metadata, theta, context) if architecture == "llama" and window is None else None
        )
    if architecture != "llama":
        raise UserError(f"{architecture}.attention.sliding_window is {shown(window)}, which is not supported")
    return _integer(fields, "attention.sliding_window")


def _mistral_window(metadata: Mapping[str, Any], theta: float, context: int) -> int | None:
    """The sliding window of a Mistral model whose file does not say it.

    The rule: the general metadata names Mistral or Zephyr 7B, the RoPE base is 10,000 and the context
    is longer than 4,096. Only version 0.1 and its descendants have that base, and their window is 4,096
    tokens; versions 0.2 and later have a base of 1,000,000 and no window.
    """
    keys = r"general\.(name|basename|finetune|(base_model\.\d+|source)\.(name|repo_url|url))"
    names = " ".join(str(value) for key, value in metadata.items() if re.fullmatch(keys, key))
    if theta == 10000.0 and context > 4096 and re.search(r"mistral|zephyr[-_ ]7b", names, re.IGNORECASE):
        return 4096
    return None
