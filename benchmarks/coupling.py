"""What it gains that guesses are ranked under the noise that will choose, against ranking by score alone.

    python benchmarks/coupling.py --prompts questions.jsonl --limit 100

With `exact` at temperatures above 0 the model's choice is arg-max(log p + g); `propose` ranks a head's tokens
by log q + g with the same g. Here answers are sampled, and the true tokens looked up in both kinds of lists
(medusa_jax/replay.py; decoding accepts what replay says). Trees are grown on every other answer and judged on
the rest: tokens per step, lookup included and not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from infer.generate import read_prompt_file
from infer.measuring import Answer, ranks
from medusa_jax import MedusaLM, SamplingParams, replay
from medusa_jax.generate import enable_compilation_cache
from medusa_jax.tree import Tree

TEMPERATURES = (0.5, 0.7, 1.0)
NODES = (8, 16, 64)


def tokens_per_step(rows: list[np.ndarray], nodes: int) -> float:
    """With a tree of `nodes` nodes from the even answers, on the odd ones."""
    tree = Tree.grow(replay.hit_rates(rows[::2]), nodes)
    judged = rows[1::2]
    return sum(map(len, judged)) / sum(len(replay.accepted(tree, one)) for one in judged)


def main() -> int:
    """Sample, measure both ways, print a table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    arguments.add_argument("--limit", type=int, default=100, help="prompts (100)")
    arguments.add_argument("--heads", default="auto")
    arguments.add_argument("--max-new-tokens", type=int, default=128)
    args = arguments.parse_args()
    enable_compilation_cache()
    lm = MedusaLM.load(heads=args.heads, lookup="on")
    prompts = read_prompt_file(args.prompts)[: args.limit]
    for temperature in TEMPERATURES:
        params = [SamplingParams(args.max_new_tokens, temperature, seed=seed) for seed in range(len(prompts))]
        jobs = [lm.job(lm.encode(prompt), own) for prompt, own in zip(prompts, params, strict=True)]
        done = lm.complete([""] * len(jobs), jobs, 32)
        answers = [
            Answer([*job.prompt_ids, *one.token_ids], len(job.prompt_ids), seed)
            for seed, (job, one) in enumerate(zip(jobs, done, strict=True))
        ]
        coupled, scored = ranks(lm, answers, temperature), ranks(lm, answers, 0.0)
        for source in ("heads", "both"):
            for nodes in NODES:
                with_noise, without = (tokens_per_step(way[source], nodes) for way in (coupled, scored))
                print(
                    f"temperature {temperature}, {source}, {nodes} nodes: {with_noise:.3f} tokens per step "
                    f"under the same noise, {without:.3f} by score, {with_noise / without - 1:+.1%}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
