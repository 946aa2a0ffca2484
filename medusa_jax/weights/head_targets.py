"""Heads as other runtimes want them: which files, which tensors, which fields. Facts: docs/formats.md.

A plan is made, and what cannot be expressed refused, before anything is written.
Shapes: D model, V vocabulary, M heads, L residual layers of a head, V' tokens that the heads score.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.weights import head_cards, head_changes
from medusa_jax.weights.head_files import TOKEN_MAP, HeadCheckpoint
from medusa_jax.weights.head_names import REFERENCE, VLLM, Layout
from medusa_jax.weights.hf import SINGLE
from medusa_jax.weights.lazy import Lazy, Progress, of_array, write_safetensors
from medusa_jax.weights.medusa_formats import PICKLE, SAFETENSORS
from medusa_jax.weights.params import UNEMBEDDING
from medusa_jax.weights.torch_files import write_torch

_LOADER_HEADS = 5  # the first implementation's loader builds so many, whatever config.json says

Tensors = Mapping[str, Lazy]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be written. table [V, D]: the model's unembedding, if a model is at hand.

    base: what the target calls its model. family: the model's, if known. generation: v1 or v2 of the first
    implementation, None for the one that suits the heads.
    """

    heads: HeadCheckpoint
    dtype: np.dtype
    table: Lazy | None = None
    base: str | None = None
    family: str | None = None
    generation: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Files by name, as tensors or as text. heads: as they are in the target. notes: lines for the user."""

    heads: HeadCheckpoint
    tensors: Mapping[str, Tensors]
    texts: Mapping[str, str]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for file in self.tensors.values() for tensor in file.values())

    def write(self, folder: Path, progress: Progress | None = None) -> None:
        """Write every file into a folder. Raises OSError, and UserError for values that are not finite."""
        for name, tensors in self.tensors.items():
            write = write_torch if name.endswith(".pt") else write_safetensors
            write(folder / name, tensors, progress)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def plan_reference(request: Request) -> Plan:
    """The first implementation: v1 with unembeddings of the heads' own, v2 sharing the model's."""
    runtime = "the first implementation"
    heads = _expressible(request, runtime)
    base = _base(request, runtime)
    generation = request.generation or ("v1" if heads.config.own_unembedding else "v2")
    heads, notes = _in_generation(heads, request.table, generation, runtime)
    config = heads.config
    tensors = _named(REFERENCE, heads, request.dtype)
    settings: dict[str, Any] = {
        "base_model_name_or_path": base,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "transformers_version": importlib.metadata.version("transformers"),
    }
    files = {SAFETENSORS: tensors}
    if generation == "v1":
        files = {PICKLE: tensors, SAFETENSORS: tensors}
        if config.num_heads != _LOADER_HEADS:
            notes.append(
                f"the first implementation's loader builds {_LOADER_HEADS} heads whatever the files say: "
                f"with these {config.num_heads} the others stay random, or are lost"
            )
        if config.num_layers > 1 and not head_changes.have_tied_layers(heads):
            notes.append(
                "the first implementation repeats one layer: it would run the last of these "
                f"{config.num_layers} layers {config.num_layers} times; TGI and TensorRT-LLM read all of them"
            )
    else:
        settings["version"] = "2"
        notes.append("the first implementation writes v2 but has no loader for it; TGI reads it")
    return _plan(request, f"reference {generation}", heads, files, settings, notes)


def plan_tgi(request: Request) -> Plan:
    """Text Generation Inference: the first implementation's names; no field that names an architecture."""
    runtime = "TGI"
    heads = _expressible(request, runtime)
    base = _base(request, runtime)
    generation = request.generation or ("v1" if heads.config.own_unembedding else "v2")
    if generation == "v2" and heads.config.num_layers != 1:
        raise UserError(
            f"{heads.path}: TGI reads heads that share the model's unembedding with one residual layer only, "
            f"these have {heads.config.num_layers}; --reference-generation v1 gives each its own unembedding"
        )
    heads, notes = _in_generation(heads, request.table, generation, runtime)
    settings = {
        "base_model_name_or_path": base,
        "medusa_num_heads": heads.config.num_heads,
        "medusa_num_layers": heads.config.num_layers,
    }
    if generation == "v2":
        settings["version"] = "2"
    files = {SAFETENSORS: _named(REFERENCE, heads, request.dtype)}
    return _plan(request, "tgi", heads, files, settings, notes)


def plan_trtllm(request: Request) -> Plan:
    """TensorRT-LLM's --medusa_model_dir: unembeddings always there, both spellings of the counts."""
    heads = _expressible(request, "TensorRT-LLM")
    heads = head_changes.with_own(heads, request.table, "TensorRT-LLM wants a copy for each head")
    config = heads.config
    settings: dict[str, Any] = {
        "medusa_num_heads": config.num_heads,
        "num_medusa_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "num_medusa_layers": config.num_layers,
    }
    if request.base is not None:
        settings["base_model_name_or_path"] = request.base
    tensors = _named(REFERENCE, heads, request.dtype)
    return _plan(request, "trtllm", heads, {PICKLE: tensors, SAFETENSORS: tensors}, settings, [])


def plan_vllm(request: Request) -> Plan:
    """vLLM: its own names and fields; a draft vocabulary becomes token_map."""
    heads, dtype = _independent(request.heads, "vLLM"), request.dtype
    shared = None
    if not heads.config.own_unembedding:
        shared = head_changes.require_rows(heads, request.table, "vLLM wants a copy of it in the file")
    if heads.vocab_size is None and shared is not None and heads.config.draft_vocab_size is None:
        config = dataclasses.replace(heads.config, vocab_size=shared.shape[0])
        heads = dataclasses.replace(heads, config=config)
    if heads.vocab_size is None:
        raise UserError(f"{heads.path}: the files do not tell the vocabulary's size; give --model")
    config = heads.config
    tensors = dict(_named(VLLM, heads, dtype))
    if shared is not None:
        tensors[UNEMBEDDING] = shared.astype(dtype).finite(f"{heads.path}: {UNEMBEDDING}")
    token_map = heads.token_map()
    if token_map is not None:
        tensors[TOKEN_MAP] = of_array(token_map.astype(np.int64))
    settings = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.scored,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        # Without this field vLLM drops biases silently.
        "medusa_fc_bias": True,
        "original_lm_head": shared is not None,
        "torch_dtype": str(dtype),
    }
    return _plan(request, "vllm", heads, {SINGLE: tensors}, settings, [])


PLANS: Mapping[str, Callable[[Request], Plan]] = {
    "reference": plan_reference,
    "vllm": plan_vllm,
    "tgi": plan_tgi,
    "trtllm": plan_trtllm,
}


def _independent(heads: HeadCheckpoint, runtime: str) -> HeadCheckpoint:
    if heads.config.conditioned:
        raise UserError(
            f"{heads.path}: conditioned heads read the tokens between, {runtime} knows only independent "
            "heads; only medusa-jax runs these (--to orbax, medusa-jax or hf)"
        )
    return heads


def _expressible(request: Request, runtime: str) -> HeadCheckpoint:
    """The heads, where a runtime knows independent heads over the whole vocabulary only."""
    heads = _independent(request.heads, runtime)
    size = heads.config.draft_vocab_size
    if size is not None:
        raise UserError(
            f"{heads.path}: the heads score a draft vocabulary of {size} tokens, which {runtime} has no way "
            "to say (vLLM has); --expand-vocabulary gives them the whole one"
        )
    return heads


def _base(request: Request, runtime: str) -> str:
    if request.base is None:
        raise UserError(
            f"{request.heads.path}: {runtime} finds the model through base_model_name_or_path, and the files "
            "name none; give --base-name (a hub id or a folder) or --model"
        )
    return request.base


def _in_generation(
    heads: HeadCheckpoint, table: Lazy | None, generation: str, runtime: str
) -> tuple[HeadCheckpoint, list[str]]:
    if generation == "v1":
        return head_changes.with_own(heads, table, "v1 wants a copy for each head"), []
    heads, notes = head_changes.with_shared(heads, table, f"v2 for {runtime}")
    if heads.config.num_layers == 0:
        raise UserError(
            f"{heads.path}: heads without residual layers are nothing in v2, which shares the rest"
        )
    return heads, notes


def _named(layout: Layout, heads: HeadCheckpoint, dtype: np.dtype) -> dict[str, Lazy]:
    """Every part of every head under the name that a layout gives it."""
    named = {}
    for (parameter, place), part in heads.parts.items():
        name = layout.name(parameter, place, heads.config.num_layers)
        named[name] = part.astype(dtype).finite(f"{heads.path}: {name}")
    return named


def _plan(
    request: Request,
    runtime: str,
    heads: HeadCheckpoint,
    files: Mapping[str, Tensors],
    settings: Mapping[str, Any],
    notes: list[str],
) -> Plan:
    facts = head_cards.Facts(heads, request.dtype, request.base, request.family)
    texts = {
        "config.json": json.dumps(settings, indent=2) + "\n",
        "README.md": head_cards.card(runtime, facts, notes),
    }
    return Plan(heads, files, texts, notes)
