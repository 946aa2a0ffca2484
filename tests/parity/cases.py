"""Small models that parity with transformers is asked of: every family, RoPE kind and odd setting."""

from __future__ import annotations

import dataclasses
from typing import Any

TEXT = 40  # tokens a row of the stored logits; original contexts and windows are shorter
PROMPTS = (40, 35)  # tokens of the two rows that generation starts from
NEW_TOKENS = 12
PENALTY = 1.4  # of the second set of generated ids

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's config.json, and the fields that make it special.

    `weakened` maps a name to changed fields that take one speciality away. The script that makes the
    fixtures refuses a case whose logits do not show the difference.
    """

    name: str
    fields: Fields
    weakened: dict[str, Fields] = dataclasses.field(default_factory=dict)


# Sizes are pairwise different where a model allows it, so that a mistaken axis does not fit by chance.
_BASE: Fields = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

_EPS = {"eps": {"rms_norm_eps": 1e-6}}
_THETA = {"theta": {"rope_theta": 10000.0}}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 6.0,
    "low_freq_factor": 0.3,
    "high_freq_factor": 1.8,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_BETAS = {"beta_fast": 0.9, "beta_slow": 0.1}


def _old(theta: float, scaling: Fields | None = None) -> Fields:
    """RoPE as transformers 4 writes it."""
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})


def _new(theta: float, **parameters: Any) -> Fields:
    """RoPE as transformers 5 writes it."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | parameters}


def _unscaled(fields: Fields, *names: str) -> Fields:
    """Changes that set a case's RoPE to the default kind, or only take some of its fields away."""
    key = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    if names:
        return {key: {name: value for name, value in fields[key].items() if name not in names}}
    if key == "rope_scaling":
        return {key: None}
    return {key: {"rope_type": "default", "rope_theta": fields[key]["rope_theta"]}}


def _case(name: str, *parts: Fields, rope: tuple[str, ...] = (), **weakened: Fields) -> Case:
    """A case of the family that its name begins with; `rope` names RoPE fields whose effect is asked for."""
    fields = dict(_BASE, model_type=name.split("-")[0])
    for part in parts:
        fields |= part
    kind = (fields.get("rope_parameters") or fields.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default" or "rope_scaling" in fields:
        weakened["scaling"] = _unscaled(fields)
    for field in rope:
        weakened[field] = _unscaled(fields, field)
    if fields.get("sliding_window") and fields.get("use_sliding_window", True):
        weakened["window"] = {"sliding_window": 64}
    return Case(name, fields, weakened)


_ALL = [
    # llama
    _case("llama-mha", _old(10000.0), {"num_key_value_heads": None}),
    _case(
        "llama-tied-gqa", _old(500.0), {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}, **_EPS, **_THETA
    ),
    _case("llama-mqa-head-dim", _new(3e5), {"num_key_value_heads": 1, "head_dim": 14, "rms_norm_eps": 3e-5}),
    _case("llama-biases", _old(777.0), {"attention_bias": True, "mlp_bias": True}, **_THETA),
    _case("llama-linear", _old(10000.0, {"type": "linear", "factor": 3.0}), {"tie_word_embeddings": True}),
    _case("llama-llama3", _old(500.0, _LLAMA3), {"head_dim": 16}),
    _case("llama-llama3-tied", _new(2000.0, **_LLAMA3), {"tie_word_embeddings": True, "head_dim": 24}),
    _case("llama-yarn", _old(10000.0, _YARN), {"head_dim": 16}),
    _case(
        "llama-yarn-attention-factor",
        _new(500.0, **_YARN, **_BETAS, attention_factor=0.6),
        {"head_dim": 16},
        rope=("attention_factor", "beta_fast", "beta_slow"),
    ),
    _case(
        "llama-yarn-mscale",
        _old(500.0, _YARN | {"mscale": 1.3, "mscale_all_dim": 0.4}),
        {"head_dim": 16, "tie_word_embeddings": True},
        rope=("mscale", "mscale_all_dim"),
    ),
    _case(
        "llama-yarn-not-truncated",
        _new(500.0, **_YARN, **_BETAS, truncate=False),
        {"head_dim": 20, "num_key_value_heads": 4},
        rope=("truncate",),
    ),
    # mistral; a window that is missing is 4,096, null is none
    _case("mistral-window", _old(10000.0), {"sliding_window": 7, "rms_norm_eps": 3e-5}),
    _case(
        "mistral-head-dim",
        _new(1e6),
        {"sliding_window": None, "head_dim": 12, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        **_EPS,
    ),
    _case("mistral-linear", _new(900.0, rope_type="linear", factor=2.5), {"tie_word_embeddings": True}),
    _case("mistral-llama3-window", _old(500.0, _LLAMA3), {"sliding_window": 11, "head_dim": 16}),
    _case(
        "mistral-yarn-window",
        _new(500.0, **_YARN),
        {"sliding_window": 5, "tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 3},
    ),
    # qwen2
    _case(
        "qwen2-tied",
        _old(1e6),
        {
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    _case(
        "qwen2-window-above",
        _old(5000.0),
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rms_norm_eps": 1e-3,
        },
        **_EPS,
        layers={"max_window_layers": 0},
    ),
    _case(
        "qwen2-layer-types",
        _new(5000.0),
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        layers={"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    _case("qwen2-linear", _new(3000.0, rope_type="linear", factor=4.0), {"num_key_value_heads": 1}),
    _case("qwen2-llama3", _new(500.0, **_LLAMA3), {"rms_norm_eps": 3e-5, "num_attention_heads": 2}),
    _case(
        "qwen2-yarn",
        _old(5000.0, _YARN | {"mscale": 0.7, "mscale_all_dim": 1.6}),
        {"tie_word_embeddings": True},
        rope=("mscale",),
    ),
    # qwen3
    _case("qwen3-tied", _old(1e6), {"tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 1e-6}),
    _case(
        "qwen3-biases",
        _new(1e4),
        {"head_dim": 10, "attention_bias": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        **_EPS,
    ),
    _case(
        "qwen3-linear-window",
        _old(2000.0, {"rope_type": "linear", "factor": 2.0}),
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        layers={"max_window_layers": 0},
    ),
    _case("qwen3-llama3", _old(500.0, _LLAMA3), {"head_dim": 16, "num_key_value_heads": 1}),
    # Without an original context it is max_position_embeddings.
    _case("qwen3-yarn-context", _new(500.0, rope_type="yarn", factor=4.0, **_BETAS), {"head_dim": 16}),
]

CASES: dict[str, Case] = {case.name: case for case in _ALL}


def respelled(fields: Fields) -> Fields:
    """The same configuration in the other form of its RoPE fields."""
    fields = dict(fields)
    if "rope_parameters" in fields:
        scaling = dict(fields.pop("rope_parameters"))
        fields["rope_theta"] = scaling.pop("rope_theta")
        return fields | {"rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    scaling = dict(fields.pop("rope_scaling", None) or {"rope_type": "default"})
    return fields | {"rope_parameters": {"rope_theta": fields.pop("rope_theta")} | scaling}


# What sampling.filter_logits and sampling.penalise are compared on; 0 and 1 switch a filter off.
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1, "temperature": 2.5},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"top_p": 0.9999, "temperature": 4.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "temperature": 3.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_k": 9},
    {"top_k": 20, "top_p": 0.6, "temperature": 1.5},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.05, "temperature": 1.3},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.2, "temperature": 0.4, "repetition_penalty": 1.2},
    {"top_p": 0.7, "min_p": 0.01, "temperature": 6.0, "repetition_penalty": 3.0},
]
FILTER_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
