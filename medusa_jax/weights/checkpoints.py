"""Opening a model, whatever kind of file it lies in: configuration, tokenizer, tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_jax.config import ModelConfig, read_config
from medusa_jax.errors import UserError, read_json
from medusa_jax.weights import hub
from medusa_jax.weights.gguf import GGUFCheckpoint
from medusa_jax.weights.hf import SafetensorsCheckpoint
from medusa_jax.weights.source import TensorSource


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model's files, opened; nothing large is read yet.

    generation_config has the fields of Hugging Face's `generation_config.json` (end tokens, sampling).
    """

    path: Path
    config: ModelConfig
    source: TensorSource
    tokenizer: Callable[[], Any]
    generation_config: Callable[[], dict[str, Any]]


def open_model(model: str | os.PathLike[str] | None) -> Checkpoint:
    """Find, fetch if need be, and open a model; see `hub.resolve` for what `model` may be."""
    path = hub.resolve(model)
    if path.is_file():
        gguf = GGUFCheckpoint(path)
        return Checkpoint(path, gguf.config, gguf, gguf.tokenizer, gguf.generation_defaults)
    return Checkpoint(
        path=path,
        config=read_config(path),
        source=SafetensorsCheckpoint(path),
        tokenizer=lambda: read_tokenizer(path),
        generation_config=lambda: read_generation_config(path),
    )


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder. Code that comes with a model is never run."""
    from transformers import AutoTokenizer  # only here: it takes a second to import

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).exists() for name in names):
        raise UserError(f"{folder}: no tokenizer (expected tokenizer.json or tokenizer.model)")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for bad files
        raise UserError(f"{folder}: the tokenizer cannot be read ({error})") from error


def read_generation_config(folder: Path) -> dict[str, Any]:
    """`generation_config.json`, with the end token of config.json where it names none."""
    path = folder / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    if raw.get("eos_token_id") is None:
        raw["eos_token_id"] = read_json(folder / "config.json").get("eos_token_id")
    return raw
