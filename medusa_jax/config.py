"""Model configurations: frozen dataclasses, from and to Hugging Face's `config.json`.

Every number the model uses comes from here. What this project does not implement is refused by
name when the configuration is read, before any weight is touched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_jax.errors import UserError, read_json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# transformers' own defaults for fields that a config.json may leave out.
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as query heads
_DEFAULT_EPS = 1e-6
_DEFAULT_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and the rescaling of its frequencies.

    `kind` is one of `ROPE_KINDS`; fields that a kind does not use keep their defaults.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_context: int | None = None  # llama3 and yarn: the context before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None = by formula
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-family decoder. Field names are Hugging Face's where it has one.

    `layer_windows[l]` is the sliding attention window of layer l in tokens, None for full attention.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"config: {name} is {value!r}, expected a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"config: head_dim {self.head_dim} is odd; rotary embeddings need an even size")
        if not self.rms_norm_eps > 0:
            raise UserError(f"config: rms_norm_eps is {self.rms_norm_eps!r}, expected a positive number")
        if len(self.layer_windows) != self.num_hidden_layers:
            raise UserError(
                f"config: {len(self.layer_windows)} layer types for {self.num_hidden_layers} layers"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a Hugging Face configuration, in the old or the new form of its RoPE fields.

        Raises UserError naming `source`, the field and the value for anything missing or unsupported.
        """
        try:
            return _from_hf(raw, source)
        except UserError as error:
            raise UserError(str(error).replace("config:", f"{source}:", 1)) from None

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face configuration of this model, in the form all transformers versions read."""
        raw: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling(self.rope),
        }
        if self.family in ("llama", "qwen3"):
            raw["attention_bias"] = self.o_bias
        if self.family == "llama":
            raw["mlp_bias"] = self.mlp_bias
        windows = set(self.layer_windows)
        if self.family == "mistral":
            raw["sliding_window"] = next(iter(windows))
        elif self.family in ("qwen2", "qwen3"):
            raw["use_sliding_window"] = windows != {None}
            raw["sliding_window"] = next((w for w in self.layer_windows if w is not None), None)
            raw["layer_types"] = [
                "full_attention" if w is None else "sliding_attention" for w in self.layer_windows
            ]
            raw["max_window_layers"] = sum(w is None for w in self.layer_windows)
        return raw


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads: how many, of how many residual layers, and what they read and score.

    conditioned: a head also reads the tokens between its hidden state and its guess. own_unembedding:
    each head has its own table instead of the model's. draft_vocab_size: the heads score only so many
    tokens, listed in their `token_map`; None for all.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    conditioned: bool = False
    own_unembedding: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size", "draft_vocab_size"):
            value = getattr(self, name)
            least = 0 if name == "num_layers" else 1
            if name == "draft_vocab_size" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"heads: {name} is {value!r}, expected an integer of at least {least}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"heads: draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}"
            )

    @property
    def scored(self) -> int:
        """How many tokens a head scores."""
        return self.draft_vocab_size or self.vocab_size


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`. Raises UserError when it is missing, not JSON or unsupported."""
    path = folder / "config.json"
    return ModelConfig.from_hf(read_json(path), str(path))


def _require(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise UserError(f"config: field {name!r} is missing")
    return raw[name]


def _get(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field's value; Hugging Face files write null for "the default" as often as they leave it out."""
    value = raw.get(name)
    return default if value is None else value


def _from_hf(raw: Mapping[str, Any], source: str) -> ModelConfig:
    family = raw.get("model_type")
    if family not in FAMILIES:
        architectures = ", ".join(raw.get("architectures") or []) or "none named"
        raise UserError(
            f"config: model_type {family!r} (architectures: {architectures}) is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(raw)
    heads = _require(raw, "num_attention_heads")
    hidden = _require(raw, "hidden_size")
    layers = _require(raw, "num_hidden_layers")
    if not isinstance(heads, int) or heads < 1 or not isinstance(hidden, int) or not isinstance(layers, int):
        raise UserError("config: hidden_size, num_hidden_layers and num_attention_heads must be integers")
    # Qwen3 fixes its own head size (transformers' default is 128); the others divide the model size.
    head_dim = _get(raw, "head_dim", 128 if family == "qwen3" else hidden // heads)
    bias = bool(_get(raw, "attention_bias", False)) and family != "mistral"
    context = _get(raw, "max_position_embeddings", _DEFAULT_CONTEXT[family])
    return ModelConfig(
        family=family,
        vocab_size=_require(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_require(raw, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_get(raw, "num_key_value_heads", _DEFAULT_KV_HEADS.get(family, heads)),
        head_dim=head_dim,
        rms_norm_eps=float(_get(raw, "rms_norm_eps", _DEFAULT_EPS)),
        max_position_embeddings=context,
        rope=_read_rope(raw, context),
        tie_word_embeddings=bool(_get(raw, "tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(_get(raw, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        layer_windows=_read_windows(raw, family, layers),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Refuse variations that change the function but keep the family's name."""
    act = _get(raw, "hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"config: hidden_act {act!r} is not supported, expected 'silu'")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if raw.get(name):
            raise UserError(f"config: {name} = {raw[name]}: mixtures of experts are not supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UserError(
            f"config: quantized checkpoint (quant_method {method!r}) is not supported; "
            "use the unquantized one or a GGUF file"
        )
    if _get(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config: partial_rotary_factor {raw['partial_rotary_factor']} is not supported")


def _read_windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    # A Mistral file without the field means transformers' default of 4,096; null means no window.
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        types = ["sliding_attention" if window else "full_attention"] * layers
    else:
        if not _get(raw, "use_sliding_window", False):
            window = None
        full = _get(raw, "max_window_layers", 28)
        types = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    default, types = types, _get(raw, "layer_types", types)
    if family == "mistral" and list(types) != default:
        raise UserError("config: layer_types that differ from sliding_window are not supported for mistral")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(f"config: layer type {kind!r} is not supported")
        if kind == "sliding_attention" and not window:
            raise UserError("config: layer_types name a sliding window, but sliding_window is not set")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(f"config: sliding_window is {window!r}, expected a positive integer or null")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _read_rope(raw: Mapping[str, Any], context: int) -> RopeConfig:
    """RoPE fields: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    fields = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise UserError("config: rope_parameters per layer type are not supported")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UserError(f"config: RoPE type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if _get(fields, "partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config: partial_rotary_factor other than 1 is not supported")
    theta = float(_get(fields, "rope_theta", _get(raw, "rope_theta", _DEFAULT_THETA)))
    if not theta > 0:
        raise UserError(f"config: rope_theta is {theta}, expected a positive number")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = float(_require(fields, "factor"))
    if not factor >= 1:
        raise UserError(f"config: RoPE factor is {factor}, expected at least 1")
    name = "original_max_position_embeddings"
    original, outer = fields.get(name), raw.get(name)
    if original and outer and original != outer:
        raise UserError(f"config: {name} is {outer}, but {original} among the RoPE fields")
    original = original or outer
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=factor,
            original_context=int(_require({name: original}, name)),
            low_freq_factor=float(_require(fields, "low_freq_factor")),
            high_freq_factor=float(_require(fields, "high_freq_factor")),
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_context=int(original or context),
        beta_fast=float(_get(fields, "beta_fast", 32.0)),
        beta_slow=float(_get(fields, "beta_slow", 1.0)),
        attention_factor=_get(fields, "attention_factor", None),
        mscale=_get(fields, "mscale", None),
        mscale_all_dim=_get(fields, "mscale_all_dim", None),
        truncate=bool(_get(fields, "truncate", True)),
    )


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    fields: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        fields |= {
            "original_max_position_embeddings": rope.original_context,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    elif rope.kind == "yarn":
        fields |= {
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                fields[name] = getattr(rope, name)
    return fields


def config_json(config: ModelConfig, **extra: Any) -> str:
    """The text of a `config.json` for `config`, with `extra` fields added."""
    return json.dumps(config.to_hf() | extra, indent=2, sort_keys=True) + "\n"
