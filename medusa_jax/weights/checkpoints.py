"""Opening a model, whatever kind of file it lies in: configuration, tokenizer, tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medusa_jax.config import ModelConfig, read_config
from medusa_jax.errors import UserError, is_file, read_json, shown, stat_of
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
    if is_file(path):
        gguf = GGUFCheckpoint(path)
        return Checkpoint(path, gguf.config, gguf, gguf.tokenizer, gguf.generation_defaults)
    config = read_config(path)
    return Checkpoint(
        path=path,
        config=config,
        source=SafetensorsCheckpoint(path),
        tokenizer=lambda: read_tokenizer(path, config.vocab_size),
        generation_config=lambda: read_generation_config(path, config.vocab_size),
    )


def read_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a Hugging Face folder. Code that comes with a model is never run.

    Raises UserError when there is none, or it holds tokens for which a model of `vocab_size` has no row.
    """
    from transformers import AutoTokenizer  # only here: it takes a second to import

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any(is_file(folder / name) for name in names):
        raise UserError(f"{folder}: no tokenizer (expected tokenizer.json or tokenizer.model)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        vocabulary = tokenizer.get_vocab()  # with the added tokens
    except Exception as error:  # the tokenizers library raises plain Exception for bad files
        raise UserError(f"{folder}: the tokenizer cannot be read ({error})") from error
    last = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if last is not None and vocabulary[last] >= vocab_size:
        # An array takes an index beyond its end for its last row: the answer would be nonsense.
        raise UserError(
            f"{folder}: the tokenizer's token {shown(last)} has id {vocabulary[last]}, but vocab_size in "
            f"config.json is {vocab_size}; this is another model's tokenizer, or tokens were added to it"
        )
    return tokenizer


def read_generation_config(folder: Path, vocab_size: int) -> dict[str, Any]:
    """`generation_config.json`, with the end token of config.json where it names none.

    The fields that decoding reads are checked, and integers written as floats are made integers; the others
    stay as they are. Raises UserError naming the file and the field.
    """
    path = folder / "generation_config.json"
    # A link to nothing is a broken download, not a model without the file.
    raw = read_json(path) if path.is_symlink() or stat_of(path) is not None else {}
    checked = dict(raw)
    for name, value in raw.items():
        if name in _SAMPLING and value is not None:
            checked[name] = _sampling_value(name, value, str(path))
    if not isinstance(raw.get("do_sample"), bool | None):
        raise UserError(f"{path}: do_sample is {shown(raw['do_sample'])}, expected true or false")
    if raw.get("eos_token_id") is None:
        path = folder / "config.json"
        raw = read_json(path)
    checked["eos_token_id"] = _end_tokens(raw, vocab_size, str(path))
    return checked


# Whether an integer is meant, the values allowed, and how they are described.
_SAMPLING: Mapping[str, tuple[bool, Callable[[Any], bool], str]] = {
    "max_new_tokens": (True, lambda x: 1 <= x < 2**31, "an integer from 1 to 2**31 - 1"),
    "temperature": (False, lambda x: 0 <= x <= 1e6, "a number from 0 to 1e6"),
    "top_k": (True, lambda x: -1 <= x < 2**31, "an integer from 1 to 2**31 - 1, or 0 or -1 for off"),
    "top_p": (False, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": (False, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "repetition_penalty": (False, lambda x: 1e-6 <= x <= 1e6, "a number from 1e-6 to 1e6"),
}


def _whole(value: Any) -> Any:
    """An integer that was written as a float, as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sampling_value(name: str, value: Any, source: str) -> Any:
    whole, good, expected = _SAMPLING[name]
    found = _whole(value) if whole else value
    kinds = int if whole else (int, float)
    # NaN is in no range; an integer of any size can be compared with a float.
    if isinstance(found, bool) or not isinstance(found, kinds) or not good(found):
        raise UserError(f"{source}: {name} is {shown(value)}, expected {expected}")
    return max(found, 0) if name == "top_k" else found


def _end_tokens(raw: Mapping[str, Any], vocab_size: int, source: str) -> int | list[int] | None:
    value = raw.get("eos_token_id")
    if value is None:
        return None
    ids = [_whole(one) for one in (value if isinstance(value, list) else [value])]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size:
            raise UserError(
                f"{source}: eos_token_id is {shown(value)}, expected an id below the vocabulary's size "
                f"{vocab_size}, or a list of ids"
            )
    return ids if isinstance(value, list) else ids[0]
