"""This project and transformers: same weights, prompts, lengths and threads, taking turns (extra: torch).

    python benchmarks/peers.py --suite mt-bench --output peers.json
    python benchmarks/peers.py --suite questions.jsonl --limit 40 --assistant FOLDER

Sides: ours plain and with guesses; transformers' `generate` plain, with prompt lookup
(`prompt_lookup_num_tokens=10`), and with a smaller model as its assistant, where one that shares the
tokenizer is given. All greedy and in float32, one prompt at a time, prefill included; every side has answered
one prompt before the clock runs. Figures are given with and without the answers that loop
(medusa_jax.text.looping).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peer_models import torch_generate, torch_model
from rich.console import Console
from rich.table import Table

from infer.benchmarking import suites
from infer.cli import note, progress_bar
from medusa_jax import MedusaLM, SamplingParams, UserError
from medusa_jax.errors import write_atomically
from medusa_jax.generate import enable_compilation_cache
from medusa_jax.text import looping

LOOKUP_TOKENS = 10  # the length that transformers' documentation uses
RESAMPLES = 2000
Generate = Callable[[Sequence[int]], list[int]]


@dataclasses.dataclass
class Taken:
    """One side's answer to one prompt."""

    ids: list[int]
    seconds: float


def our_side(lm: MedusaLM, new_tokens: int) -> Generate:
    """Our greedy answers."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0)

    def generate(ids: Sequence[int]) -> list[int]:
        return lm.complete([""], [lm.job(list(ids), params)], 1)[0].token_ids

    return generate


def make_sides(lm: MedusaLM, new_tokens: int, assistant: Path | None) -> dict[str, Generate]:
    """All sides by name; the first is what the others are compared with."""
    model = torch_model(lm)

    def theirs(**options: Any) -> Generate:
        return lambda ids: torch_generate(model, lm, ids, new_tokens, **options)

    sides = {
        "transformers": theirs(),
        "transformers, prompt lookup": theirs(prompt_lookup_num_tokens=LOOKUP_TOKENS),
        "medusa-jax, plain": our_side(lm.plainly(), new_tokens),
        "medusa-jax": our_side(lm, new_tokens),
    }
    if assistant is not None:
        from transformers import AutoModelForCausalLM

        small = AutoModelForCausalLM.from_pretrained(assistant, dtype="float32").eval()
        sides["transformers, assisted"] = theirs(assistant_model=small)
    return sides


def summary(taken: dict[str, list[Taken]], kept: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Tokens per second of each side over the prompts `kept`, and each as a multiple of the first side's.

    The 95 % interval of a multiple is a bootstrap over prompts.
    """
    drawn = np.random.default_rng(0).integers(0, len(kept), (RESAMPLES, len(kept)))
    tokens, seconds = {}, {}
    for name, answers in taken.items():
        tokens[name] = np.array([len(answers[i].ids) for i in kept])
        seconds[name] = np.array([answers[i].seconds for i in kept])
    first = next(iter(taken))

    def rate(name: str, rows: Any = slice(None)) -> Any:
        return tokens[name][rows].sum(axis=-1) / seconds[name][rows].sum(axis=-1)

    return {
        name: {
            "tokens_per_second": float(rate(name)),
            "times_first": float(rate(name) / rate(first)),
            "interval": np.quantile(rate(name, drawn) / rate(first, drawn), [0.025, 0.975]).tolist(),
            "same_ids": sum(taken[name][i].ids == taken[first][i].ids for i in kept),
        }
        for name in taken
    }


def show(title: str, rows: dict[str, dict[str, Any]], count: int) -> None:
    """One table."""
    table = Table(title=title)
    for name in ("", "tokens/s", "times transformers", "95 %", "same ids"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in rows.items():
        low, high = row["interval"]
        cells = f"{row['tokens_per_second']:.1f}", f"{row['times_first']:.2f}", f"{low:.2f}-{high:.2f}"
        table.add_row(name, *cells, f"{row['same_ids']} of {count}")
    Console(width=100).print(table)


def main() -> int:
    """Answer every prompt on every side, and print two tables."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--suite", default="mt-bench", help="a suite of infer.benchmark, or a JSONL file")
    arguments.add_argument("--limit", type=int, help="take so many prompts")
    arguments.add_argument("--max-new-tokens", type=int, default=128)
    arguments.add_argument("--assistant", type=Path, metavar="FOLDER", help="a smaller Hugging Face model")
    arguments.add_argument("--output", type=Path, metavar="FILE.json", help="write all figures")
    args = arguments.parse_args()
    try:
        asked = suites.load(args.suite, turns=1, limit=args.limit)
    except UserError as error:
        arguments.error(str(error))
    enable_compilation_cache()
    lm = MedusaLM.load(dtype="float32")
    prompts = [lm.encode(one.turns[0]) for one in asked.questions]
    sides = make_sides(lm, args.max_new_tokens, args.assistant)
    for generate in sides.values():
        generate(prompts[0])
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    with progress_bar("answering", unit="prompts") as progress:
        for number, ids in enumerate(prompts):
            order = list(sides.items())
            for name, generate in order[number % len(order) :] + order[: number % len(order)]:
                # A prompt of a new length compiles on our side: that is not what is timed.
                if name.startswith("medusa-jax"):
                    generate(ids)
                began = time.perf_counter()
                found = generate(ids)
                taken[name].append(Taken(found, time.perf_counter() - began))
            if progress is not None:
                progress(number + 1, len(prompts))
    straight = [i for i in range(len(prompts)) if not any(looping(one[i].ids) for one in taken.values())]
    every = list(range(len(prompts)))
    results: dict[str, Any] = {"all": summary(taken, every)}
    show(f"{asked.name}: all {len(every)} answers", results["all"], len(every))
    if straight:
        results["not_looping"] = summary(taken, straight)
        show(f"the {len(straight)} that do not loop", results["not_looping"], len(straight))
    else:
        note("every answer loops")
    names = ("jax", "jaxlib", "torch", "transformers")
    results["setting"] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    results["setting"] |= {name: importlib.metadata.version(name) for name in names}
    results["setting"]["max_new_tokens"] = args.max_new_tokens
    if args.output is not None:
        write_atomically(args.output, (json.dumps(results, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
