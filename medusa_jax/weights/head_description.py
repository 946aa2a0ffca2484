"""What a checkpoint of heads is, in words; and what is wrong with it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from medusa_jax.errors import shown
from medusa_jax.weights import fingerprint, head_changes
from medusa_jax.weights.checkpoints import Checkpoint
from medusa_jax.weights.head_files import FORMAT, HeadCheckpoint, open_heads
from medusa_jax.weights.lazy import is_finite

_WIDTH = 16
_LONGEST = 300  # characters of a setting


def describe(
    heads: str | os.PathLike[str],
    model: Checkpoint | None = None,
    bar: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Lines on heads of any kind: what they are, their configuration, problems. All values are read.

    model: held against them. bar: told the bytes done and in all. Raises UserError for what is no heads.
    """
    sizes = (
        {}
        if model is None
        else {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    )
    opened = open_heads(heads, **sizes)
    config = opened.config
    scored = f"{config.scored:,}" if opened.vocab_size is not None else "?"
    parameters = sum(math.prod(part.shape) for part in opened.parts.values())
    yield f"{opened.path}: {opened.kind}"
    for name, value in (
        ("heads", f"{config.num_heads}{', conditioned on the tokens between' if config.conditioned else ''}"),
        ("layers", f"{config.num_layers} residual layer{'' if config.num_layers == 1 else 's'} a head"),
        ("unembedding", _unembedding(opened, scored)),
        ("hidden size", f"{config.hidden_size:,}"),
        (
            "vocabulary",
            f"{opened.vocab_size:,}" if opened.vocab_size is not None else "not told: the model's",
        ),
        ("dtype", ", ".join(sorted({str(part.dtype) for part in opened.parts.values()}))),
        ("parameters", f"{parameters:,}"),
        ("base model", opened.metadata.get("base_model", "not told")),
    ):
        yield f"{name:<{_WIDTH}}{value}"
    for name, value in opened.metadata.items():
        if name == "metrics" and isinstance(value, Mapping):
            for part, values in value.items():
                yield f"{'metadata':<{_WIDTH}}{part}: {_short(_rounded(values))}"
        elif name != "base_model":
            yield f"{'metadata':<{_WIDTH}}{name}: {'...' if name == fingerprint.KEY else _short(value)}"
    for name, value in opened.settings.items():
        if name == "metadata" and opened.settings.get("format") == FORMAT:
            continue
        yield f"{'config':<{_WIDTH}}{name}: {_short(value)}"
    problems = [*opened.warnings, *_problems(opened, model, bar)]
    for problem in problems or ["none found"]:
        yield f"{'problems':<{_WIDTH}}{problem}"


def _unembedding(opened: HeadCheckpoint, scored: str) -> str:
    config = opened.config
    rows = f"{scored} x {config.hidden_size:,}"
    draft = (
        f" (a draft vocabulary of {config.draft_vocab_size:,})" if config.draft_vocab_size is not None else ""
    )
    if config.own_unembedding:
        return f"one for each head, {rows}{draft}"
    return f"the model's, shared{', with a copy in the files' if opened.table is not None else ''}{draft}"


def _rounded(values: Any) -> Any:
    """Metrics, to as many digits as one reads."""
    if not isinstance(values, Mapping):
        return values
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()
    }


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = shown(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _problems(
    opened: HeadCheckpoint, model: Checkpoint | None, bar: Callable[[int, int], None] | None
) -> Iterator[str]:
    """What only the values tell."""
    if model is not None:
        yield from fingerprint.warnings(opened.metadata, model.source, str(opened.path))
    done, total = 0, sum(part.nbytes for part in opened.parts.values())
    for (parameter, place), part in opened.parts.items():
        finite = True
        for _, block in part.blocks():
            finite = finite and is_finite(block)
            done += block.nbytes
            if bar is not None:
                bar(done, total)
        if not finite:
            where = f" of head {place[0]}" if place else ""
            yield f"{parameter}{where} holds values that are infinite or not numbers"
    opened.token_map()
    if head_changes.have_tied_layers(opened):
        yield f"the {opened.config.num_layers} layers of each head are copies of one"
