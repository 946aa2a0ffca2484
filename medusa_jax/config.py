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

from medusa_jax.errors import UserError, read_json, shown

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# transformers' own defaults for fields that a config.json may leave out.
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as query heads
_DEFAULT_EPS = 1e-6
_DEFAULT_THETA = 10000.0

# Bounds of every number, both ends included, by Hugging Face's names. Those of integers lie far above any
# real model and below what would take long, or overflow the int32 that positions and ids are kept in.
LARGEST_SIZE = 2**24
LONGEST_CONTEXT = 2**31 - 2048  # a step's tokens and a cache's rounding come on top
INTEGERS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, LARGEST_SIZE),
    "hidden_size": (1, LARGEST_SIZE),
    "intermediate_size": (1, LARGEST_SIZE),
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "max_position_embeddings": (1, LONGEST_CONTEXT),
    "original_max_position_embeddings": (1, LONGEST_CONTEXT),
    "sliding_window": (1, LONGEST_CONTEXT),
    "max_window_layers": (0, LARGEST_SIZE),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (1e-30, 0.5),  # far below, float32 would make it 0
    "rope_theta": (1.01, 1e15),  # at 1 every dimension would turn alike, and yarn divide by log 1
    "partial_rotary_factor": (0.0, 1.0),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0.0, 1e3),  # 0: off
    "mscale_all_dim": (0.0, 1e3),
}
# What transformers and the makers of models write among the RoPE fields. Another key could be one of these
# misspelt, and leaving it out would give another function without any error.
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "truncate"}
_ROPE_KEYS |= {"factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
_ROPE_KEYS |= {"attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor", "finetuned"}


def check_integer(name: str, value: Any, bounds: tuple[int, int], where: str = "config") -> int:
    """`value`, or a UserError that begins with `where` when it is no integer within the bounds."""
    least, most = bounds
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{where}: {name} is {shown(value)}, expected an integer from {least} to {most}")
    return value


def check_number(name: str, value: Any, bounds: tuple[float, float], where: str = "config") -> float:
    """`value` as a float, or a UserError as of `check_integer`. NaN lies within no bounds."""
    least, most = bounds
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UserError(f"{where}: {name} is {shown(value)}, expected a number from {least:g} to {most:g}")
    return float(value)


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

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            kinds = ", ".join(ROPE_KINDS)
            raise UserError(f"config: RoPE type {shown(self.kind)} is not supported; supported are {kinds}")
        check_number("rope_theta", self.theta, NUMBERS["rope_theta"])
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_number(f"RoPE {name}", getattr(self, name), NUMBERS[name])
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_number(f"RoPE {name}", getattr(self, name), NUMBERS[name])
        name = "original_max_position_embeddings"
        if self.original_context is not None:
            check_integer(f"RoPE {name}", self.original_context, INTEGERS[name])
        elif self.kind in ("llama3", "yarn"):
            raise UserError(f"config: field {name!r} is missing, which RoPE type {self.kind!r} needs")
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"config: RoPE low_freq_factor {self.low_freq_factor} is not below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.beta_fast < self.beta_slow:
            raise UserError(
                f"config: RoPE beta_fast {self.beta_fast} is below beta_slow {self.beta_slow}, "
                "expected at least as much"
            )
        if not isinstance(self.truncate, bool):
            raise UserError(f"config: RoPE truncate is {shown(self.truncate)}, expected true or false")


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
        if self.family not in FAMILIES:
            raise UserError(
                f"config: family {shown(self.family)} is not supported; supported are {', '.join(FAMILIES)}"
            )
        for name in INTEGERS:
            if hasattr(self, name):  # the others are fields of files only
                check_integer(name, getattr(self, name), INTEGERS[name])
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"config: head_dim {self.head_dim} is odd; rotary embeddings need an even size")
        check_number("rms_norm_eps", self.rms_norm_eps, NUMBERS["rms_norm_eps"])
        for name in ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"config: {name} is {shown(getattr(self, name))}, expected true or false")
        if len(self.layer_windows) != self.num_hidden_layers:
            raise UserError(
                f"config: {len(self.layer_windows)} layer types for {self.num_hidden_layers} layers"
            )
        for window in set(self.layer_windows) - {None}:
            check_integer("sliding_window", window, INTEGERS["sliding_window"])
        from medusa_jax.rope import check_frequencies  # only here: that module needs this one

        check_frequencies(self.rope, self.head_dim)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Read a Hugging Face configuration, in the old or the new form of its RoPE fields.

        Raises UserError naming `source`, the field and the value for anything missing or unsupported.
        """
        try:
            return _from_hf(raw)
        except UserError as error:
            raise UserError(f"{source}: {str(error).removeprefix('config: ')}") from None

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
        bounds = {
            "num_heads": (1, 1000),
            "num_layers": (0, 1000),
            "hidden_size": INTEGERS["hidden_size"],
            "vocab_size": INTEGERS["vocab_size"],
        }
        if self.draft_vocab_size is not None:
            bounds["draft_vocab_size"] = INTEGERS["vocab_size"]
        for name, allowed in bounds.items():
            check_integer(name, getattr(self, name), allowed, "heads")
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


_REQUIRED: Any = object()


class _Fields:
    """The fields of a JSON object, each read as the type and within the bounds that it must have.

    null counts as left out: Hugging Face files write it for "the default". A field without a default
    must be there. `prefix` is put before a field's name in messages.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw, self.prefix = raw, prefix

    def get(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        value = self.raw.get(name)
        if value is None and default is _REQUIRED:
            raise UserError(f"config: {self.prefix}field {name!r} is missing")
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.get(name, default)
        return None if value is None else check_integer(self.prefix + name, value, INTEGERS[name])

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.get(name, default)
        return None if value is None else check_number(self.prefix + name, value, NUMBERS[name])

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"config: {self.prefix}{name} is {shown(value)}, expected true or false")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise UserError(f"config: {self.prefix}{name} is {shown(value)}, expected an object or null")
        return value


def _from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    fields = _Fields(raw)
    family = fields.get("model_type")
    if family not in FAMILIES:
        named = fields.get("architectures")
        named = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
        architectures = ", ".join(named[:3]) or "none named"
        raise UserError(
            f"config: model_type {shown(family)} (architectures: {architectures}) is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(fields)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    bias = fields.boolean("attention_bias") and family != "mistral"
    context = fields.integer("max_position_embeddings", _DEFAULT_CONTEXT[family])
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", _DEFAULT_KV_HEADS.get(family, heads)),
        # Qwen3 fixes its own head size (transformers' default is 128); the others divide the model size.
        head_dim=fields.integer("head_dim", 128 if family == "qwen3" else hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps", _DEFAULT_EPS),
        max_position_embeddings=context,
        rope=_read_rope(fields, context),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias and family != "qwen2",
        mlp_bias=fields.boolean("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        layer_windows=_read_windows(fields, family, layers),
    )


def _refuse_unsupported(fields: _Fields) -> None:
    """Refuse variations that change the function but keep the family's name."""
    act = fields.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"config: hidden_act {shown(act)} is not supported, expected 'silu'")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.get(name):
            raise UserError(
                f"config: {name} = {shown(fields.get(name))}: mixtures of experts are not supported"
            )
    if quantization := fields.object("quantization_config"):
        method = shown(quantization.get("quant_method", "unknown"))
        raise UserError(
            f"config: quantized checkpoint (quant_method {method}) is not supported; "
            "use the unquantized one or a GGUF file"
        )


def _refuse_partial_rotation(fields: _Fields) -> None:
    share = fields.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise UserError(f"config: {fields.prefix}partial_rotary_factor {share} is not supported, expected 1")


def _read_windows(fields: _Fields, family: str, layers: int) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * layers
    # A Mistral file without the field means transformers' default of 4,096; null means no window.
    missing = family == "mistral" and "sliding_window" not in fields.raw
    window = None
    if family == "mistral" or fields.boolean("use_sliding_window"):
        window = 4096 if missing else fields.integer("sliding_window", None)
    if family == "mistral":
        default = ["sliding_attention" if window else "full_attention"] * layers
    else:
        full = fields.integer("max_window_layers", 28)
        default = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    types = fields.get("layer_types", default)
    if not isinstance(types, list | tuple):
        raise UserError(f"config: layer_types is {shown(types)}, expected a list of names")
    if family == "mistral" and list(types) != default:
        raise UserError("config: layer_types that differ from sliding_window are not supported for mistral")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(f"config: layer type {shown(kind)} is not supported")
        if kind == "sliding_attention" and not window:
            raise UserError("config: layer_types name a sliding window, but sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _read_rope(outer: _Fields, context: int) -> RopeConfig:
    """RoPE fields: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    raw = {**outer.object("rope_scaling"), **outer.object("rope_parameters")}
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UserError("config: rope_parameters per layer type are not supported")
    fields = _Fields(raw, "RoPE ")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_KINDS:
        kinds = ", ".join(ROPE_KINDS)
        raise UserError(f"config: RoPE type {shown(kind)} is not supported; supported are {kinds}")
    unknown = [key for key in raw if key not in _ROPE_KEYS]
    if unknown:
        keys = ", ".join(sorted(_ROPE_KEYS))
        raise UserError(f"config: RoPE field {shown(unknown[0])} is unknown; known are {keys}")
    if fields.get("factor") is not None and fields.get("rope_type", fields.get("type")) is None:
        raise UserError("config: RoPE fields give a factor but no rope_type")
    _refuse_partial_rotation(outer)
    _refuse_partial_rotation(fields)
    # Checked whatever the kind; what a kind does not use is then left out.
    theta = fields.number("rope_theta", outer.number("rope_theta", _DEFAULT_THETA))
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    optional = ("attention_factor", "mscale", "mscale_all_dim")
    numbers = {name: fields.number(name, None) for name in (*names, *optional)}
    truncate = fields.boolean("truncate", True)
    name = "original_max_position_embeddings"
    original, above = fields.integer(name, None), outer.integer(name, None)
    if original and above and original != above:
        raise UserError(f"config: {name} is {above}, but {original} among the RoPE fields")
    original = original or above
    needed = {"linear": names[:1], "llama3": names[:3], "yarn": names[:1]}.get(kind, ())
    for name in needed:
        fields.get(name, _REQUIRED)
    given = {name: value for name, value in numbers.items() if value is not None}
    if kind in ("default", "linear"):
        given = {name: given[name] for name in needed}
        return RopeConfig(kind=kind, theta=theta, **given)
    if kind == "llama3":
        given = {name: given[name] for name in needed}
        return RopeConfig(kind=kind, theta=theta, original_context=original, **given)
    given = {n: value for n, value in given.items() if n in ("factor", "beta_fast", "beta_slow", *optional)}
    return RopeConfig(
        kind=kind, theta=theta, original_context=original or context, truncate=truncate, **given
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
