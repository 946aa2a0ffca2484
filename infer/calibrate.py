"""python -m infer.calibrate: which tree suits a model, its heads and this machine.

The model answers the prompts once. Along each answer the true tokens are looked up in the lists that heads
and lookup would have offered, which gives the probability of every path of ranks to be right as a whole;
trees are grown from these. Then steps are timed, and the size that gives most tokens per second is chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infer import cli, interrupts

if TYPE_CHECKING:
    from medusa_jax import MedusaLM
    from medusa_jax.tree import RankPath, Tree

EPILOG = """\
examples:
  python -m infer.calibrate --prompts questions.jsonl --output tree.json
  python -m infer.calibrate --heads runs/medusa1/heads --prompts questions.jsonl --output tree.json
  python -m infer.generate --tree tree.json --prompt "What is a leap year?"

A line of --prompts is {"prompt": "..."} or {"messages": [...]}; some hundred are enough, and they should not
be those of a benchmark. The answers are kept in OUTPUT.answers until the tree is written: run the same
command again after an interruption.
"""

SOURCES = ("heads", "lookup", "both")
SIZES = (1, 4, 8, 16, 32, 64)
LOOKUP_DEPTH = 7
BUCKET = 64  # texts are padded to multiples of it


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of the model: its text as ids, and where the answer begins."""

    ids: list[int]
    start: int
    seed: int


def make_parser() -> cli.Parser:
    """The command's flags."""
    made = cli.parser(
        "infer.calibrate", "Measure which tree of guesses suits a model and this machine.", EPILOG
    )
    data = made.add_argument_group("what is measured")
    data.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="what to answer")
    data.add_argument("--output", type=Path, required=True, metavar="tree.json", help="where the tree goes")
    data.add_argument("--limit", type=int, metavar="N", help="take only the first N prompts")
    data.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (128)")
    data.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    data.add_argument("--seed", type=int, default=0, metavar="N", help="for temperatures above 0 (0)")
    data.add_argument("--system", metavar="TEXT", help='system message; "" removes the template\'s own')
    data.add_argument("--max-nodes", type=int, default=64, metavar="N", help="of the largest tree (64)")
    data.add_argument("--sources", choices=SOURCES, default="both", help="what fills the tree (both)")
    data.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="trees whose steps are timed"
    )
    data.add_argument(
        "--batch-size", type=int, nargs="+", default=[1], metavar="B", help="rows of the steps timed (1)"
    )
    data.add_argument("--rounds", type=int, default=5, metavar="N", help="timings of each step; 0: none (5)")
    data.add_argument("--png", type=Path, metavar="FILE", help="draw tree and curves (needs matplotlib)")
    return made


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    from infer.generate import read_prompt_file

    made = make_parser()
    args = made.parse_args(argv)
    for name in ("limit", "max_new_tokens", "max_nodes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    if any(size < 1 for size in [*args.sizes, *args.batch_size]) or args.rounds < 0:
        made.error("--sizes, --batch-size and --rounds: expected numbers of at least 1")
    from medusa_jax import SamplingParams
    from medusa_jax.errors import user_path, write_atomically
    from medusa_jax.sampling import resolve
    from medusa_jax.text import looping

    args.output = user_path(args.output, "--output")
    prompts = read_prompt_file(args.prompts)[: args.limit]
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    resolve(params, {})
    args.plain, args.tree, args.lookup = False, "auto", "off" if args.sources == "heads" else "on"
    jobs: list[Any] = []

    def expect(lm: MedusaLM) -> Callable[[], None]:
        jobs.extend(lm.job(lm.encode(prompt, args.system), params) for prompt in prompts)
        return lambda: None

    lm = cli.load_model(args, expect)
    everything = _answers(lm, jobs, args)
    # A text that repeats itself is guessed whatever the tree; counted, it would buy depth at others' cost.
    answers = [one for one in everything if not looping(one.ids[one.start :])] or everything
    cli.note(f"{len(everything)} answers, {len(everything) - len(answers)} that repeat themselves left out")
    with cli.progress_bar("measuring guesses", unit="answers") as progress:
        ranks = measure(lm, answers, args.temperature, progress)
    if args.sources != "lookup" and lm.heads is None:
        cli.note("note: there are no heads; only lookup is measured")
    result = choose(lm, ranks, args)
    result["prompts"] = {
        "count": len(prompts),
        "looping": len(everything) - len(answers),
        "sha256": hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest(),
    }
    with interrupts.unwinding():
        write_atomically(args.output, (json.dumps(result, indent=1) + "\n").encode())
    _journal(args).unlink(missing_ok=True)
    if args.png is not None:
        _draw(result, args.png)
    _tell(result, args)
    return 0


# ------------------------------------------------------------------------------------------- answers


def _journal(args: argparse.Namespace) -> Path:
    return args.output.with_name(args.output.name + ".answers")


def _answers(lm: MedusaLM, jobs: Sequence[Any], args: argparse.Namespace) -> list[Answer]:
    """The model's answers, those of an interrupted run included."""
    from medusa_jax import UserError

    told = json.dumps([str(args.model), args.max_new_tokens, args.temperature, args.seed, args.dtype])
    head = hashlib.sha256((told + json.dumps([job.prompt_ids for job in jobs])).encode()).hexdigest()
    path = _journal(args)
    found: dict[int, list[int]] = {}
    try:
        if path.exists():
            first, *lines = path.read_text().split("\n")
            if first != head:
                raise UserError(f"{path}: answers to other prompts or of other settings; remove it")
            # What is behind the last line feed was being written.
            found = dict(map(json.loads, lines[:-1]))
        path.write_text(
            "".join(f"{line}\n" for line in [head, *(json.dumps(pair) for pair in found.items())])
        )
        with path.open("a") as file, cli.progress_bar("answering", unit="answers") as progress:
            missing = [number for number in range(len(jobs)) if number not in found]

            def on_done(index: int, done: Any) -> None:
                found[missing[index]] = done.token_ids
                file.write(json.dumps([missing[index], done.token_ids]) + "\n")
                file.flush()
                if progress is not None:
                    progress(len(found), len(jobs))

            if missing:
                lm.complete([""] * len(missing), [jobs[number] for number in missing], 32, on_done)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return [
        Answer([*job.prompt_ids, *found[number]], len(job.prompt_ids), int(job.params.seed))
        for number, job in enumerate(jobs)
    ]


def measure(
    lm: MedusaLM,
    answers: Sequence[Answer],
    temperature: float,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[np.ndarray]]:
    """Ranks of the true tokens [places, depth] along each answer, for each combination of sources."""
    from medusa_jax import replay

    made = None if lm.heads is None else lm.heads[1]
    config = None if lm.heads is None else lm.heads[0]
    depth = max(LOOKUP_DEPTH, 0 if config is None else config.num_heads)
    found: dict[str, list[np.ndarray]] = {name: [] for name in SOURCES}
    for number, answer in enumerate(answers, 1):
        size = len(answer.ids)
        padded = np.zeros((-(-size // BUCKET) * BUCKET,), np.int32)
        padded[:size] = answer.ids
        program = lm.programs.replay(len(padded), config, depth)
        seed, warmth = np.uint32(answer.seed), np.float32(temperature)
        true, looked, following = program(lm.params, made, padded, seed, warmth)
        ids = padded[:size]
        places = slice(answer.start - 1, size - 1)
        following = np.asarray(following)[:size]
        if true is not None:
            true, looked = np.array(true)[:size], np.asarray(looked)[:size]
        sources: dict[str, tuple[Any, Any, Any]] = {
            "heads": (true, None, None),
            "lookup": (None, None, following),
            "both": (true, looked, following),
        }
        for name, (own, theirs, looked_up) in sources.items():
            if name == "heads" and true is None:
                continue
            reach = config.num_heads if name == "heads" and config is not None else depth
            found[name].append(replay.combined_ranks(ids, own, theirs, looked_up, reach)[places])
        if progress is not None:
            progress(number, len(answers))
    return {name: ranks for name, ranks in found.items() if ranks}


# -------------------------------------------------------------------------------------------- choice


def marginal_product(ranks: Sequence[np.ndarray], path: RankPath) -> float:
    """What single accuracies multiplied would say of a path; reported beside its joint probability."""
    product = 1.0
    for depth, rank in enumerate(path):
        column = np.concatenate([rows[:, depth] for rows in ranks])
        product *= float(np.mean(column == rank))
    return product


def choose(lm: MedusaLM, ranks: Mapping[str, list[np.ndarray]], args: argparse.Namespace) -> dict[str, Any]:
    """The best trees of each combination of sources, what their steps cost, and the size that pays most."""
    import jax

    from medusa_jax import replay
    from medusa_jax.tree import Tree
    from medusa_jax.weights.fingerprint import fingerprint

    source = args.sources if args.sources in ranks else next(iter(ranks))
    rates = replay.hit_rates(ranks[source])
    tree = Tree.grow(rates, args.max_nodes)
    sizes = sorted({min(size, tree.nodes) for size in args.sizes})
    gains = {}
    for name, rows in ranks.items():
        own = replay.hit_rates(rows)
        gains[name] = {n: _tokens_per_step(Tree.grow(own, n), rows) for n in sizes}
    costs = step_costs(lm, rates, sizes, source, args) if args.rounds else {}
    chosen = {}
    for batch, seconds in costs.items():
        best = max(sizes, key=lambda n: gains[source][n] / seconds[n])
        chosen[batch] = best
    far = [(path, rates[path], marginal_product(ranks[source], path)) for path in tree.paths if len(path) > 1]
    return {
        "format": "medusa-jax-tree",
        "paths": [list(path) for path in tree.paths],
        "hit_rates": [rates[path] for path in tree.paths],
        "sources": source,
        "tokens_per_step": {name: {str(n): value for n, value in row.items()} for name, row in gains.items()},
        "step_seconds": {str(b): {str(n): v for n, v in row.items()} for b, row in costs.items()},
        "chosen": {str(batch): nodes for batch, nodes in chosen.items()},
        "joint_minus_product": max((joint - product for _, joint, product in far), default=0.0),
        "temperature": args.temperature,
        "device": jax.devices()[0].device_kind,
        "model_fingerprint": fingerprint(lm.params),
        "heads": None if lm.heads is None else dataclasses.asdict(lm.heads[0]),
    }


def _tokens_per_step(tree: Tree, ranks: Sequence[np.ndarray]) -> float:
    from medusa_jax import replay

    return sum(len(rows) for rows in ranks) / max(sum(len(replay.accepted(tree, rows)) for rows in ranks), 1)


def step_costs(
    lm: MedusaLM, rates: Mapping[RankPath, float], sizes: Sequence[int], source: str, args: argparse.Namespace
) -> dict[int, dict[int, float]]:
    """Median seconds of a step by batch and number of nodes; all sizes take turns."""
    from infer.timing import Decoding, alternate
    from medusa_jax.decode import Plan
    from medusa_jax.tree import Tree

    config = None if lm.heads is None or source == "lookup" else lm.heads[0]
    found = {}
    for batch in args.batch_size:
        sides = {}
        for nodes in sizes:
            tree = Tree.grow(rates, nodes)
            plan = Plan.plain() if tree.nodes == 1 else Plan(tree, config, source != "heads")
            sides[str(nodes)] = Decoding(lm, plan, batch, steps=8)
        cli.note(f"timing steps of {batch} rows ...")
        found[batch] = {int(n): seconds / 8 for n, seconds in alternate(sides, args.rounds).items()}
    return found


def _tell(result: Mapping[str, Any], args: argparse.Namespace) -> None:
    for name, row in result["tokens_per_step"].items():
        cli.note(
            f"{name}: " + ", ".join(f"{n} nodes {value:.2f}" for n, value in row.items()) + " tokens per step"
        )
    for batch, nodes in result["chosen"].items():
        seconds = result["step_seconds"][batch]
        gain = result["tokens_per_step"][result["sources"]][str(nodes)]
        plain = seconds.get("1")
        told = f", {gain * plain / seconds[str(nodes)]:.2f} times plain decoding" if plain else ""
        cli.note(f"batch {batch}: {nodes} nodes give most{told}")
    cli.note(f"{len(result['paths']) + 1} nodes in {args.output}")


def _draw(result: Mapping[str, Any], path: Path) -> None:
    from medusa_jax.tree import Tree
    from medusa_jax.tree_drawing import to_png

    tree = Tree.from_paths(result["paths"])
    rates = {tuple(p): rate for p, rate in zip(result["paths"], result["hit_rates"], strict=True)}
    with interrupts.unwinding():
        to_png(tree, path, rates, title=str(path.stem))


if __name__ == "__main__":
    cli.main(run)
