"""What a config.json beside heads says, held against what their tensors say. The tensors count.

Each project has its own fields, and published files get them wrong: the heads for Vicuna-7B say 2 and are 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_jax.config import MedusaConfig
from medusa_jax.errors import shown
from medusa_jax.weights import head_names
from medusa_jax.weights.head_files import UNKNOWN_VOCABULARY

_HEADS = ("medusa_num_heads", "num_medusa_heads")
_LAYERS = ("medusa_num_layers", "num_medusa_layers")


def disagreements(
    settings: Mapping[str, Any], kind: str, config: MedusaConfig, biased: bool, label: str
) -> list[str]:
    """A line for every field that says otherwise than the tensors, naming both. kind: the format's name."""
    if not settings:
        return []
    if kind == head_names.VLLM.kind:
        return _of_vllm(settings, config, biased, label)
    fields = settings
    if kind == head_names.MODELOPT.kind and isinstance(settings.get("medusa"), Mapping):
        fields = settings["medusa"]
    lines = [_count(label, name, fields, config.num_heads, "heads") for name in _HEADS]
    lines += [_count(label, name, fields, config.num_layers, "layers a head") for name in _LAYERS]
    if kind == head_names.MLC:
        lines += _sizes(settings, config, label)
    shared = str(settings.get("version")) == "2"
    alone = kind in (head_names.REFERENCE_OWN, head_names.REFERENCE_SHARED)
    if alone and shared == config.own_unembedding:
        says = "version 2, which shares" if shared else "no version 2, which would share"
        lines.append(
            f"{label}: says {says} the model's unembedding, but the heads have "
            f"{'their own' if config.own_unembedding else 'none of their own'}; the tensors count"
        )
    return [line for line in lines if line]


def _count(label: str, name: str, fields: Mapping[str, Any], count: int, what: str) -> str:
    value = fields.get(name, count)
    if value == count and not isinstance(value, bool):
        return ""
    return f"{label}: {name} is {shown(value)}, but the tensors hold {count} {what}; the tensors count"


def _sizes(settings: Mapping[str, Any], config: MedusaConfig, label: str) -> list[str]:
    return [
        f"{label}: {name} is {shown(settings[name])}, but it is {found} here; that counts"
        for name, found in (("hidden_size", config.hidden_size), ("vocab_size", config.vocab_size))
        if name in settings and found not in (settings[name], UNKNOWN_VOCABULARY)
    ]


def _of_vllm(settings: Mapping[str, Any], config: MedusaConfig, biased: bool, label: str) -> list[str]:
    lines = []
    for ours, words, count, what in (
        ("num_heads", ("num", "heads"), config.num_heads, "heads"),
        ("num_hidden_layers", ("num", "layers"), config.num_layers, "layers a head"),
    ):
        # vLLM takes any field with both words for its own; the last one wins.
        found = [name for name in settings if all(word in name for word in words)]
        fields = {name: settings[name] for name in found[-1:]} or {ours: {"num_heads": 5}.get(ours, 1)}
        lines += [_count(label, name, fields, count, what) for name in fields]
    lines += _sizes({"vocab_size": 32001, **settings}, config, label)
    truncated = settings.get("truncated_vocab_size") or config.vocab_size
    if truncated != config.scored:
        lines.append(
            f"{label}: truncated_vocab_size is {shown(truncated)}, but the heads score {config.scored} "
            "tokens; the tensors count"
        )
    if biased != (settings.get("medusa_fc_bias") is True):
        says, holds = ("true", "none") if not biased else ("not true", "biases")
        lines.append(f"{label}: medusa_fc_bias is {says}, but the tensors hold {holds}; the tensors count")
    if settings.get("original_lm_head") is not True and not config.own_unembedding:
        lines.append(
            f"{label}: original_lm_head is not true, but there is one unembedding for all heads; "
            "the tensors count"
        )
    return [line for line in lines if line]
