"""python -m infer.calibrate: which tree suits a model, its heads and this machine.

The model answers the prompts once. Along each answer the true tokens are looked up in the lists that heads
and lookup would have offered, which gives the probability of every path of ranks to be right as a whole;
trees are grown from these. Then steps are timed, and the size that gives most tokens per second is chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import cli, interrupts, measuring

if TYPE_CHECKING:
    from medusa_jax import MedusaLM

EPILOG = """\
examples:
  python -m infer.calibrate --prompts questions.jsonl --output tree.json
  python -m infer.calibrate --heads runs/medusa1/heads --prompts questions.jsonl --output tree.json
  python -m infer.calibrate --prompts questions.jsonl --batch-size 1 4 16 --output tree.json
  python -m infer.generate --prompt "What is a leap year?"

A line of --prompts is {"prompt": "..."} or {"messages": [...]}; some hundred are enough, and they should not
be those of a benchmark. The result is also kept in the user's cache, where --tree auto finds it for this
model, these heads, this device and these batch sizes. Answers and times are kept in OUTPUT.journal until the
tree is written: run the same command again after an interruption. A run for other batch sizes adds to OUTPUT.
"""

SIZES = (1, 2, 4, 8, 16, 32, 64)
FEW = 20  # answers that say little about others


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
    data.add_argument(
        "--sources",
        choices=["heads", "lookup", "both"],
        default="both",
        help="what fills the tree (both; all are measured, this one is timed and chosen)",
    )
    data.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=list(SIZES),
        metavar="N",
        help=f"trees whose steps are timed ({' '.join(map(str, SIZES))}); those far from paying are not",
    )
    data.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[1],
        metavar="B",
        help="rows of the steps timed (1); each also stands for batches down to half of it",
    )
    data.add_argument("--rounds", type=int, default=5, metavar="N", help="timings of each step; 0: none (5)")
    output = made.add_argument_group("output")
    output.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="the picture of the tree; that of the curves stands beside it, named -curves (default: OUTPUT's "
        "name; needs matplotlib)",
    )
    output.add_argument("--no-png", action="store_true", help="draw nothing")
    output.add_argument(
        "--no-cache", action="store_true", help="keep it from --tree auto: write OUTPUT alone"
    )
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked as far as that goes without the model."""
    made = make_parser()
    args = made.parse_args(argv)
    for name in ("limit", "max_new_tokens", "max_nodes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    if any(size < 1 for size in [*args.sizes, *args.batch_size]) or args.rounds < 0:
        made.error("--sizes, --batch-size and --rounds: expected numbers of at least 1")
    if args.sources == "heads" and args.heads == "none":
        made.error("--sources heads and --heads none exclude each other")
    from medusa_jax.errors import UserError, is_folder, user_path

    args.output = user_path(args.output, "--output")
    if not is_folder(args.output.parent):
        raise UserError(f"--output {args.output}: {args.output.parent} is no folder")
    if importlib.util.find_spec("matplotlib") is None and not args.no_png:
        if args.png is not None:
            raise UserError(f"--png {args.png}: drawing needs matplotlib: pip install 'medusa-jax[plot]'")
        args.no_png = True
        cli.note("note: no pictures without matplotlib: pip install 'medusa-jax[plot]'")
    args.png = args.output.with_suffix(".png") if args.png is None else user_path(args.png, "--png")
    return args


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    from infer.generate import read_prompt_file

    args = parse(argv)
    from medusa_jax import SamplingParams, UserError
    from medusa_jax.sampling import resolve

    prompts = read_prompt_file(args.prompts)[: args.limit]
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    resolve(params, {})
    args.plain, args.tree, args.lookup = False, "auto", "on"
    jobs: list[Any] = []

    def expect(lm: MedusaLM) -> Callable[[], None]:
        if args.sources == "heads" and lm.heads is None:
            raise UserError("--sources heads: there are none; name them with --heads")
        lm.use(None)  # what answers is plain decoding
        jobs.extend(lm.job(lm.encode(prompt, args.system), params) for prompt in prompts)
        return lambda: None

    lm = cli.load_model(args, expect)
    told = [str(args.model), args.max_new_tokens, args.temperature, args.seed, args.dtype]
    journal = measuring.Journal(
        args.output.with_name(args.output.name + ".journal"), [told, [job.prompt_ids for job in jobs]]
    )
    everything = measuring.answers(lm, jobs, journal)
    answers = _worth_measuring(everything)
    with cli.progress_bar("measuring guesses", unit="answers") as progress:
        ranks = measuring.ranks(lm, answers, args.temperature, progress)
    about = {
        "count": len(prompts),
        "looping": len(everything) - len(answers) if answers is not everything else len(everything),
        "max_new_tokens": args.max_new_tokens,
        "sha256": hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest(),
    }
    sampling = {"temperature": args.temperature, "top_p": float(jobs[0].params.top_p)}
    _write(calibrate(lm, answers, ranks, args, sampling, journal) | {"prompts": about}, args)
    journal.remove()
    return 0


def _worth_measuring(everything: list[measuring.Answer]) -> list[measuring.Answer]:
    """The answers that do not repeat themselves; all of them, with a warning, where all do."""
    from medusa_jax.text import looping

    # A text that repeats itself is guessed whatever the tree; counted, it would buy depth at others' cost.
    answers = [one for one in everything if not looping(one.ids[one.start :])]
    left_out = len(everything) - len(answers)
    if not answers:
        cli.note(
            f"warning: all of the {len(everything)} answers repeat themselves; they are measured all the "
            "same, but what follows promises too much and is too deep for other texts"
        )
        return everything
    cli.note(f"{len(everything)} answers, {left_out} that repeat themselves left out")
    if len(answers) < FEW:
        cli.note(f"warning: {len(answers)} answers say little about others; some hundred are better")
    return answers


def calibrate(
    lm: MedusaLM,
    answers: Sequence[measuring.Answer],
    ranks: Mapping[str, measuring.Ranks],
    args: argparse.Namespace,
    sampling: Mapping[str, float],
    journal: measuring.Journal,
) -> dict[str, Any]:
    """The best trees of each combination of sources, and what their steps cost, as the file holds it."""
    from infer.drafting import Drafted
    from medusa_jax.calibration import FORMAT, Source
    from medusa_jax.selection import WIDER
    from medusa_jax.tree import MAX_NODES, Tree
    from medusa_jax.tree_choice import plan_for

    source = args.sources if args.sources in ranks else "lookup"
    if lm.heads is None:
        cli.note("note: there are no heads; only lookup is measured")
    rates = {name: measuring.rates(rows) for name, rows in ranks.items()}
    sizes = sorted({1, *args.sizes})
    sources, gains, looked_up = {}, {}, {}
    for name, rows in ranks.items():
        # More than the largest tree: a step chooses among them.
        tree = Tree.grow(rates[name], min(round(WIDER * args.max_nodes), MAX_NODES))
        rates[name] = {path: rates[name][path] for path in tree.paths}
        possible = sorted({min(size, args.max_nodes, tree.nodes) for size in sizes})
        drafted, looked_up[name] = None, ()
        if name != "lookup" and possible[-1] > 1:
            with cli.progress_bar(f"judging steps, {name}", unit="answers") as progress:
                drafted = Drafted.along(lm, answers, rows, possible, name, args.temperature, progress)
            looked_up[name] = drafted.lookup_rates(rows, range(len(rows)))
        gains[name] = measuring.tokens_per_step(rows, possible, drafted)
        sources[name] = {
            "paths": [list(path) for path in tree.paths],
            "hit_rates": [rates[name][path] for path in tree.paths],
            "lookup_rates": list(looked_up[name]),
            "products_of_single_rates": measuring.single_products(rows, tree.paths),
            "tokens_per_step": {str(nodes): value for nodes, value in gains[name].items()},
        }
    own, of_heads = lm.fingerprints
    result = {
        "format": FORMAT,
        "source": source,
        "max_nodes": args.max_nodes,
        "sources": sources,
        "temperature": args.temperature,
        "device": lm.device,
        "model_fingerprint": own,
        "heads_fingerprint": of_heads,
        "heads": None if lm.heads is None else dataclasses.asdict(lm.heads[0]),
        "step_seconds": {},
    }
    if args.rounds:
        known = Source(rates[source], {}, looked_up[source])
        config = None if lm.heads is None else lm.heads[0]
        plans = {nodes: plan_for(known, nodes, config, source) for nodes in gains[source]}
        batches = sorted(set(args.batch_size))
        seconds = measuring.step_seconds(lm, plans, gains[source], batches, args.rounds, sampling, journal)
        rows = {str(b): {str(n): value for n, value in one.items()} for b, one in seconds.items()}
        result["step_seconds"] = {lm.device: rows}
    return result


# ------------------------------------------------------------------------------------------- output


def _write(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the tree, the copy in the cache and the pictures; say what came out."""
    from medusa_jax import UserError, calibration

    whole = chosen_tree(result, calibration.earlier_times(result, args.output))
    with interrupts.unwinding():
        calibration.write(args.output, whole)
    _tell(whole, args.output)
    if not args.no_cache:
        try:
            path = calibration.place(result)
            kept = chosen_tree(result, calibration.earlier_times(result, path))
            with interrupts.unwinding():
                calibration.write(path, kept)
            cli.note(f"kept for --tree auto in {path}")
        except UserError as error:
            cli.note(f"note: not kept for --tree auto: {error}")
    if not args.no_png:
        _draw(whole, args.png)


def chosen_tree(result: Mapping[str, Any], earlier: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result with times of earlier runs, what is chosen by all of them, and the smallest batch's tree."""
    from medusa_jax.calibration import Source
    from medusa_jax.tree import Tree
    from medusa_jax.tree_choice import best_size

    seconds = {device: dict(batches) for device, batches in earlier.items()}
    for device, batches in result["step_seconds"].items():
        seconds[device] = seconds.get(device, {}) | batches
    fields = result["sources"][result["source"]]
    tree = Tree.from_paths(fields["paths"])
    rates = {tuple(p): rate for p, rate in zip(fields["paths"], fields["hit_rates"], strict=True)}
    source = Source(rates, {int(n): value for n, value in fields["tokens_per_step"].items()})
    chosen = {
        device: {
            b: best_size(source, {int(n): value for n, value in batches[b].items()})
            for b in sorted(batches, key=int)
        }
        for device, batches in sorted(seconds.items())
    }
    sizes = chosen.get(result["device"], {})
    tree = Tree.grow(rates, next(iter(sizes.values()), min(tree.nodes, result["max_nodes"])))
    return {
        "format": result["format"],
        "paths": [list(path) for path in tree.paths],
        "hit_rates": [rates[path] for path in tree.paths],
        **{name: value for name, value in result.items() if name != "format"},
        "step_seconds": seconds,
        "chosen": chosen,
    }


def _tell(result: Mapping[str, Any], output: Path) -> None:
    for name, fields in result["sources"].items():
        row = ", ".join(f"{n} nodes {value:.2f}" for n, value in fields["tokens_per_step"].items())
        cli.note(f"{name}: {row} tokens per step")
        joint, product = fields["hit_rates"], fields["products_of_single_rates"]
        cli.note(
            f"  all {len(joint) + 1} nodes: {1 + sum(joint):.2f} tokens per step by joint probabilities, "
            f"{1 + sum(product):.2f} by products of single accuracies; of one path they differ by up to "
            f"{max((abs(a - b) for a, b in zip(joint, product, strict=True)), default=0):.3f}"
        )
    gains = result["sources"][result["source"]]["tokens_per_step"]
    for batch, nodes in result["chosen"].get(result["device"], {}).items():
        seconds = result["step_seconds"][result["device"]][batch]
        if nodes == 1:
            cli.note(f"batch {batch}: no tree pays; plain decoding gives most")
            continue
        ratio = gains[str(nodes)] * seconds["1"] / seconds[str(nodes)]
        cli.note(f"batch {batch}: {nodes} nodes give most, {ratio:.2f} times plain decoding")
    cli.note(f"{len(result['paths']) + 1} nodes in {output}")


def _draw(result: Mapping[str, Any], path: Path) -> None:
    from medusa_jax.tree import Tree
    from medusa_jax.tree_drawing import curves_to_png, to_png

    # The root alone is no picture: where no tree pays, the largest one is shown.
    shown = result if result["paths"] else result["sources"][result["source"]]
    tree = Tree.from_paths(shown["paths"])
    rates = {tuple(p): rate for p, rate in zip(shown["paths"], shown["hit_rates"], strict=True)}
    curves = path.with_name(f"{path.stem}-curves.png")
    with interrupts.unwinding():
        to_png(tree, path, rates, title=path.stem)
        curves_to_png(result, curves)
    cli.note(f"pictures: {path}, {curves}")


if __name__ == "__main__":
    cli.main(run)
