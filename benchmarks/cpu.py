"""Speed of the default model on this machine: steps, plain decoding, batches, sampling, start-up.

    python benchmarks/cpu.py                 what this project alone can measure
    python benchmarks/cpu.py --peer          also transformers' torch generate, same weights (extra: torch)
    python benchmarks/cpu.py --products      what the form of a matrix product costs, and nothing else
    python benchmarks/cpu.py --medusa        only what Medusa steps cost, and right guesses gain
    python benchmarks/cpu.py --check         exit with status 1 when a limit is passed

Every claim is a ratio of two sides measured in one run, alternated, each by its median.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_models import torch_generate, torch_model
from rich.console import Console
from rich.table import Table

from infer.timing import Decoding, Work, alternate
from medusa_jax import MedusaLM, SamplingParams, backbone, cache, heads, linear, propose
from medusa_jax.config import MedusaConfig
from medusa_jax.decode import Plan
from medusa_jax.tree import Tree
from medusa_jax.weights import hub

PROMPT = "Explain in a few sentences how a bicycle stays upright when it moves."
NEW_TOKENS = 128
WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)


def bench_steps(lm: MedusaLM, rounds: int) -> dict[int, float]:
    """Median seconds of one forward with logits over T tokens, 100 tokens of 256 slots in the cache."""
    shape = cache.allocate(lm.config, 1, 256, jnp.dtype(jnp.float32))
    held = cache.KVCache(shape.keys, shape.values, jnp.array([100], jnp.int32))

    @jax.jit
    def forward(params: Any, tokens: jax.Array, held: cache.KVCache) -> jax.Array:
        T = tokens.shape[1]
        positions = held.lengths[:, None] + jnp.arange(T)[None]
        hidden, _ = backbone.forward(params, lm.config, tokens, positions, jnp.tri(T, dtype=bool), held)
        return jnp.argmax(backbone.unembed(params, lm.config, hidden), axis=-1)

    def once(T: int) -> Work:
        tokens = jnp.arange(T)[None] + 100
        return lambda: forward(lm.params, tokens, held).block_until_ready()

    sides = {str(T): once(T) for T in WIDTHS}
    return {int(name): seconds for name, seconds in alternate(sides, rounds).items()}


def bench_products(lm: MedusaLM, rounds: int) -> dict[str, dict[int, float]]:
    """Median seconds of all products of one forward over T tokens, written in four ways; no attention."""
    stored = linear.restored(lm.params)
    turned = linear.turned(jax.tree.map(lambda leaf: leaf, stored))

    def rows_first(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight.T

    def weight_first(x: jax.Array, weight: jax.Array) -> jax.Array:
        return (weight @ x.T).T

    def kept_weight_first(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(weight @ x.T).T

    def all_products(form: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, params: Any) -> Any:
        for layer in range(lm.config.num_hidden_layers):
            part = params["model"][f"layers_{layer}"]
            linears = {**part["self_attn"], **part["mlp"]}
            matrix = {name: next(iter(leaves.values())) for name, leaves in linears.items()}
            query, key, value = (form(x, matrix[f"{n}_proj"]) for n in "qkv")
            groups = lm.config.num_attention_heads // lm.config.num_key_value_heads
            x = x + form(query + jnp.tile(key + value, (1, groups)), matrix["o_proj"])
            x = x + form(
                jax.nn.silu(form(x, matrix["gate_proj"])) * form(x, matrix["up_proj"]), matrix["down_proj"]
            )
            x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        return linear.project(x, backbone.unembedding_table(params))

    found: dict[str, dict[int, float]] = {}
    forms: list[tuple[Callable[[jax.Array, jax.Array], jax.Array], Any]] = [
        (rows_first, stored),
        (weight_first, stored),
        (kept_weight_first, stored),
        (linear.project_turned, turned),
    ]
    programs = {form.__name__: (jax.jit(partial(all_products, form)), held) for form, held in forms}
    for T in (1, 2, 4, 8, 16, 32, 64):
        x = jax.random.normal(jax.random.key(T), (T, lm.config.hidden_size))

        def once(program: Any, x: jax.Array, params: Any) -> Work:
            return lambda: program(x, params).block_until_ready()

        sides = {name: once(program, x, params) for name, (program, params) in programs.items()}
        times = alternate(sides, rounds)
        for name, seconds in times.items():
            found.setdefault(name, {})[T] = seconds
    return found


def bench_batch(lm: MedusaLM, rounds: int, steps: int = 24) -> dict[str, float]:
    """Tokens per second of 1 and of 64 rows, and what sampling adds to one row."""
    plain = Plan.plain()
    sides = {
        "1": Decoding(lm, plan=plain, steps=steps),
        "64": Decoding(lm, plan=plain, batch=64, steps=steps),
        "sampled": Decoding(lm, plan=plain, steps=steps, temperature=0.7, top_p=0.9),
    }
    seconds = alternate(sides, rounds)
    return {
        "one_row": steps / seconds["1"],
        "batch_64": 64 * steps / seconds["64"],
        "sampling_overhead": seconds["sampled"] / seconds["1"] - 1,
    }


def bench_medusa(lm: MedusaLM, rounds: int, steps: int = 8) -> dict[str, float]:
    """Milliseconds of a step, plain and Medusa; four untrained heads, draft vocabulary 8,192, lookup on.

    Untrained heads cost what trained ones do, and guess almost nothing: this is cost, not gain.
    """
    sides: dict[str, Work] = {"plain": Decoding(lm.plainly(), Plan.plain(), steps=steps)}
    table = backbone.unembedding_table(lm.params)
    for conditioned in (False, True):
        config = MedusaConfig(4, 1, lm.config.hidden_size, lm.config.vocab_size, conditioned, False, 8192)
        made = heads.init(config, table, jnp.float32, jnp.arange(8192, dtype=jnp.int32))
        guessing = MedusaLM(lm.config, lm.params, lm.tokenizer, lm.generation_config, heads=(config, made))
        rates = {
            path: float(np.prod([0.5 / (rank + 1) for rank in path]))
            for depth in range(1, 5)
            for path in itertools.product(range(5), repeat=depth)
        }
        for nodes in (8, 16):
            name = f"{'conditioned' if conditioned else 'independent'} heads, {nodes} nodes"
            plan = Plan(Tree.grow(rates, nodes), config, lookup=True)
            sides[name] = Decoding(guessing, plan, steps=steps)
            sides[name + ", sampled"] = Decoding(guessing, plan, steps=steps, temperature=0.7, top_p=0.9)
    return {name: seconds / steps * 1e3 for name, seconds in alternate(sides, rounds).items()}


def bench_oracle(lm: MedusaLM, rounds: int, tokens: int = 40, guesses: int = 4) -> dict[str, float]:
    """Tokens per second, plain and with a chain of guesses that are always right.

    The guesses are put into the lists of four untrained heads in place of lookup's: the plain text, replayed.
    Everything else that a step does is done.
    """
    plain = Decoding(lm.plainly(), Plan.plain(), steps=tokens)
    truth = plain.text()
    config = MedusaConfig(4, 1, lm.config.hidden_size, lm.config.vocab_size, False, False, 8192)
    table = backbone.unembedding_table(lm.params)
    made = heads.init(config, table, jnp.float32, jnp.arange(8192, dtype=jnp.int32))
    guessing = MedusaLM(lm.config, lm.params, lm.tokenizer, lm.generation_config, heads=(config, made))

    def replay(text: jax.Array, known: jax.Array, length: int) -> jax.Array:
        return jnp.asarray(truth)[:, known[0] + jnp.arange(length)]

    before, propose.lookup = propose.lookup, replay
    try:
        steps = tokens // (guesses + 1)
        chain = Decoding(guessing, Plan(Tree.chain(guesses), config, lookup=True), steps=steps)
        if not np.array_equal(chain.text()[:, : 65 + tokens], truth[:, : 65 + tokens]):
            raise SystemExit("the oracle's text is not the plain one: it was not always right")
    finally:
        propose.lookup = before
    seconds = alternate({"plain": plain, "oracle": chain}, rounds)
    return {name: tokens / value for name, value in seconds.items()}


def bench_stream(lm: MedusaLM, rounds: int) -> float:
    """What the host adds to a streamed step, as a share of the step in a loop on the device."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    ids = lm.encode(PROMPT)
    jobs: list[Any] = []

    def streamed() -> None:
        job = lm.job(ids, params)
        for _ in lm.stream_job(job):
            pass
        jobs.append(job)

    def looped() -> None:
        job = lm.job(ids, params)
        lm.complete([PROMPT], [job], 1)
        jobs.append(job)

    found: dict[str, list[float]] = {"streamed": [], "looped": []}
    for number in range(rounds + 1):
        for name, work in (("streamed", streamed), ("looped", looped)):
            work()
            if number:
                found[name].append(jobs[-1].decode_seconds)
    return statistics.median(found["streamed"]) / statistics.median(found["looped"]) - 1


def bench_generate(lm: MedusaLM, rounds: int, peer: bool) -> dict[str, float]:
    """Tokens per second of a whole answer of 128 tokens, prefill included; beside torch when asked."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    ids = lm.encode(PROMPT)
    jobs = [lm.job(ids, params)]
    lm.compile_for(jobs)
    ours: list[int] = []
    theirs: list[int] = []

    def generate() -> None:
        ours[:] = lm.generate([PROMPT], params)[0].token_ids

    sides: dict[str, Work] = {"medusa_jax": generate}
    if peer:
        sides["transformers"], theirs = _torch_side(lm, ids)
    seconds = alternate(sides, rounds)
    if peer and ours != theirs:
        raise SystemExit("the two sides gave different tokens: the comparison would mean nothing")
    return {name: len(ours) / value for name, value in seconds.items()}


def _torch_side(lm: MedusaLM, ids: Sequence[int]) -> tuple[Work, list[int]]:
    """transformers' own greedy generate over the same float32 weights, and where its ids appear."""
    model, found = torch_model(lm), []

    def generate() -> None:
        found[:] = torch_generate(model, lm, ids, NEW_TOKENS)

    return generate, found


def bench_start() -> dict[str, float]:
    """Seconds from process start to the first streamed character, with an empty and a warm program cache."""

    def first_character(folder: str) -> float:
        command = [sys.executable, "-m", "infer.generate", "--prompt", PROMPT, "--max-new-tokens", "8"]
        began = time.perf_counter()
        environment = os.environ | {"MEDUSA_JAX_CACHE": folder}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        ) as process:
            assert process.stdout is not None
            if not process.stdout.read(1):
                raise SystemExit("infer.generate printed nothing")
            seconds = time.perf_counter() - began
            process.stdout.read()
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        # The model itself is there already: fetching it is the network's speed, not ours.
        models = Path(folder) / "models"
        models.symlink_to(hub.default_model().parent, target_is_directory=True)
        cold = first_character(folder)
        return {"cold": cold, "warm": statistics.median(first_character(folder) for _ in range(3))}


def report(results: dict[str, Any]) -> list[tuple[str, float, str, bool | None]]:
    """Rows (what, value, limit, met or None) of everything measured."""
    rows: list[tuple[str, float, str, bool | None]] = []

    def add(what: str, value: float, limit: float | None = None, *, most: bool = False) -> None:
        met = None if limit is None else (value <= limit if most else value >= limit)
        rows.append((what, value, "" if limit is None else f"{'<=' if most else '>='} {limit:g}", met))

    limits = {8: 1.5, 16: 2.3}
    steps = results["steps"]
    for T in WIDTHS:
        add(f"forward over {T} tokens, ms", steps[T] * 1e3)
        if T > 1:
            add(f"  times one over 1 token (T={T})", steps[T] / steps[1], limits.get(T), most=True)
    add("plain decoding, one row, tokens/s", results["batch"]["one_row"])
    add("plain decoding, 64 rows, tokens/s", results["batch"]["batch_64"])
    add("  64 rows over one row", results["batch"]["batch_64"] / results["batch"]["one_row"], 5)
    add("sampling (T 0.7, top-p 0.9) over greedy", results["batch"]["sampling_overhead"], 0.15, most=True)
    add("an answer of 128 tokens, tokens/s", results["generate"]["medusa_jax"])
    if "transformers" in results["generate"]:
        add("  transformers' torch generate, tokens/s", results["generate"]["transformers"])
        ratio = results["generate"]["medusa_jax"] / results["generate"]["transformers"]
        add("  ours over transformers", ratio, 1.5)
    add("first character, cold program cache, s", results["start"]["cold"], 20, most=True)
    add("first character, warm program cache, s", results["start"]["warm"], 8, most=True)
    return rows


def _medusa(lm: MedusaLM, args: argparse.Namespace) -> int:
    """Print what Medusa steps cost, beside the limits."""
    costs = bench_medusa(lm, args.rounds)
    limits = {"independent heads, 8 nodes": 1.5, "independent heads, 16 nodes": 2.0}
    missed = False
    for name, cost in costs.items():
        ratio = cost / costs["plain"]
        limit = limits.get(name)
        told = "" if limit is None else f" (at most {limit})"
        missed |= limit is not None and ratio > limit
        print(f"{name:40} {cost:6.2f} ms, {ratio:.2f} times plain{told}")
    rates = bench_oracle(lm, args.rounds)
    gain = rates["oracle"] / rates["plain"]
    print(f"four right guesses a step: {rates['oracle']:.1f} tokens/s, {gain:.2f} times plain (at least 2.3)")
    host = bench_stream(lm, args.rounds)
    print(f"host work between streamed steps: {host:+.1%} of a step (at most 5 %)")
    return int(args.check and (missed or gain < 2.3 or host > 0.05))


def main() -> int:
    """Measure, print a table, and compare with the limits."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rounds", type=int, default=9, help="timed rounds of each side (9)")
    arguments.add_argument("--peer", action="store_true", help="compare with transformers (needs torch)")
    arguments.add_argument("--products", action="store_true", help="only ways of writing a product")
    arguments.add_argument("--medusa", action="store_true", help="only the cost of Medusa steps")
    arguments.add_argument("--check", action="store_true", help="status 1 when a limit is passed")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    args = arguments.parse_args()
    lm = MedusaLM.load(dtype="float32")
    if args.products:
        for name, times in bench_products(lm, args.rounds).items():
            print(f"{name:18}", *(f"T={T}: {seconds * 1e3:.1f} ms" for T, seconds in times.items()))
        return 0
    if args.medusa:
        return _medusa(lm, args)
    results: dict[str, Any] = {
        "start": bench_start(),
        "steps": bench_steps(lm, args.rounds),
        "batch": bench_batch(lm.plainly(), args.rounds),
        "generate": bench_generate(lm.plainly(), max(3, args.rounds // 2), args.peer),
    }
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "transformers")}
    if args.peer:
        versions["torch"] = importlib.metadata.version("torch")
    setting = {"python": platform.python_version(), "cpus": os.cpu_count(), **versions}
    rows = report(results)
    table = Table(title="default model, float32: " + ", ".join(f"{k} {v}" for k, v in setting.items()))
    for name in ("", "value", "limit", "met"):
        table.add_column(name, justify="left" if not name else "right")
    for what, value, limit, met in rows:
        table.add_row(what, f"{value:.2f}", limit, "" if met is None else "yes" if met else "NO")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "results": results}, indent=2) + "\n")
    return int(args.check and any(met is False for *_, met in rows))


if __name__ == "__main__":
    sys.exit(main())
