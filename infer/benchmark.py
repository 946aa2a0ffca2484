"""python -m infer.benchmark: how much faster Medusa decoding is, on which prompts, on this machine.

All sides (plain decoding, trees, acceptance rules, temperatures, batch sizes) answer the same questions
on one loaded model and take turns at every prompt. Results are JSON, Markdown, answers in Spec-Bench's format
and plots.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import cli, interrupts

if TYPE_CHECKING:
    from infer.benchmarking.journal import Journal
    from infer.benchmarking.measure import Asking
    from infer.benchmarking.sides import Side
    from medusa_jax import MedusaLM
    from medusa_jax.decode import Plan

EPILOG = """\
examples:
  python -m infer.benchmark --suite mt-bench --output runs/mt
  python -m infer.benchmark --suite mt-bench --limit 16 --tree auto,2x3x2,mc_sim_7b_63 --output runs/trees
  python -m infer.benchmark --suite synthetic --batch-size 1,2,4,8,16 --output runs/batches
  python -m infer.benchmark --suite humaneval --temperature 0.7 --acceptance exact,typical --output runs/rules
  python -m infer.benchmark --suite mt-bench --accuracy --output runs/accuracy

Suites: mt-bench (80 conversations of two turns in 8 categories), humaneval (164 programming
problems), gsm8k (problems in arithmetic; the package has 100 of the test set, the hub all),
synthetic (prompts and answers of fixed lengths), or a file with lines {"prompt": "..."},
{"messages": [...]} or {"turns": ["...", "..."]}, if you like with "category" and "question_id".
Published questions are fetched once and kept in the user's cache.

--modes, --tree, --acceptance, --temperature and --batch-size take lists, parted by commas or
blanks; every combination is a side. Sides of one temperature and batch size take turns at every
prompt (or batch of prompts). At temperature 0 the acceptance rules are one and the same. A second
turn follows the first answer of the plain side, on all sides.

Compilation and first steps are left out of all figures and told apart. OUTPUT gets results.json,
results.md, answers/SIDE.jsonl (which Spec-Bench's scripts read) and plots. journal.jsonl there
keeps every finished prompt: the same command goes on after an interruption. Let nothing else run on
the machine.
"""


def make_parser() -> cli.Parser:
    """The command's flags."""
    made = cli.parser(
        "infer.benchmark", "Measure what Medusa decoding gains, on prompts of every kind.", EPILOG
    )
    asked = made.add_argument_group("questions")
    asked.add_argument(
        "--suite",
        required=True,
        metavar="mt-bench|humaneval|gsm8k|synthetic|FILE.jsonl",
        help="what is asked",
    )
    asked.add_argument("--turns", type=int, choices=[1, 2], default=1, help="of a conversation (1)")
    asked.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="take N questions, of every category alike (all; synthetic: 16)",
    )
    asked.add_argument("--system", metavar="TEXT", help='system message; "" removes the template\'s own')
    asked.add_argument("--raw", action="store_true", help="continue the text as it is, without chat template")
    asked.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="of synthetic prompts (128)"
    )
    asked.add_argument(
        "--source",
        choices=["auto", "package", "hub"],
        default="auto",
        help="where published questions come from (auto: a package, else the hub)",
    )
    compared = made.add_argument_group("sides")
    lists: dict[str, Any] = {"nargs": "+"}
    compared.add_argument(
        "--modes",
        **lists,
        metavar="plain,medusa",
        help="what is compared (both; with --accuracy only medusa)",
    )
    compared.add_argument(
        "--tree",
        **lists,
        default=["auto"],
        metavar="NAME|FILE|WIDTHS|auto",
        help="trees of guesses (auto: the one that infer.generate takes)",
    )
    compared.add_argument(
        "--acceptance", **lists, default=["exact"], metavar="exact|rejection|typical", help="rules (exact)"
    )
    compared.add_argument("--temperature", **lists, default=["0"], metavar="T", help="0 is greedy (0)")
    compared.add_argument("--batch-size", **lists, default=["1"], metavar="B", help="prompts at a time (1)")
    compared.add_argument(
        "--lookup", choices=["auto", "on", "off"], default="auto", help="as infer.generate (auto)"
    )
    common = made.add_argument_group("decoding, the same on all sides")
    common.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (256)")
    common.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest (0: off)"
    )
    common.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample within this mass (1: off)"
    )
    common.add_argument("--epsilon", type=float, default=0.09, metavar="X", help="for typical (0.09)")
    common.add_argument("--delta", type=float, default=0.3, metavar="X", help="for typical (0.3)")
    common.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of sampling and synthetic prompts (0)"
    )
    common.add_argument("--rounds", type=int, default=1, metavar="N", help="ask everything so often (1)")
    output = made.add_argument_group("output")
    output.add_argument("--output", type=Path, required=True, metavar="DIR", help="where results go")
    output.add_argument(
        "--accuracy",
        action="store_true",
        help="measure each head's top-1 to top-10 accuracy on greedy answers",
    )
    output.add_argument("--no-plots", action="store_true", help="draw nothing (plots need matplotlib)")
    return made


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    made = make_parser()
    args = made.parse_args(given)
    for name in ("limit", "max_new_tokens", "prompt_tokens", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    sides = _sides(args)
    from infer.benchmarking import measure, suites
    from infer.benchmarking.journal import Journal
    from infer.benchmarking.results import collect
    from infer.benchmarking.sides import plans
    from medusa_jax import SamplingParams, UserError
    from medusa_jax.errors import user_path
    from medusa_jax.sampling import resolve

    args.output = user_path(args.output, "--output")
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: is a file, expected a folder")
    common = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=0.0,
        repetition_penalty=1.0,
        seed=args.seed,
        epsilon=args.epsilon,
        delta=args.delta,
    )
    for side in sides.values():
        resolve(side.params(common), {})
    if args.system is not None:
        cli.check_text(args.system, "--system")
    if not args.no_plots and importlib.util.find_spec("matplotlib") is None:
        args.no_plots = True
        cli.note("note: no plots without matplotlib: pip install 'medusa-jax[plot]'")
    synthetic = args.suite == "synthetic"
    suite = None if synthetic else suites.load(args.suite, args.source, args.turns, args.limit)
    begun: list[tuple[Asking, dict[str, Plan], Journal]] = []

    def expect(lm: MedusaLM) -> Callable[[], None]:
        """Find every mistake before the weights are read."""
        if args.accuracy and lm.heads is None:
            raise UserError("--accuracy measures heads, and there are none: give --heads")
        asked = suite
        if asked is None:
            count = args.limit or max(suites.SYNTHETIC, 4 * max(side.batch for side in sides.values()))
            asked = suites.synthetic(lm.tokenizer, count, args.prompt_tokens, args.seed)
        asking = measure.Asking(lm, asked, common, args.system, args.raw)
        asking.check()
        planned = plans(lm, sides, args.lookup)
        journal = Journal(args.output, _settings(args, asking, planned))
        begun.append((asking, planned, journal))
        return lambda: None

    _load(args, sides, expect)
    asking, planned, journal = begun[0]
    _note_small_batches(len(asking.suite.questions), sides)
    with cli.progress_bar("measuring", unit="batches of prompts") as progress:
        measure.measure(asking, sides, planned, journal, args.rounds, progress)
    results = collect(args, given, asking, sides, planned, journal)
    _write(args, results, sides, journal)
    return 0


def _sides(args: argparse.Namespace) -> dict[str, Side]:
    """The sides that the flags name, checked before anything slow is done."""
    from infer.benchmarking import sides
    from medusa_jax import UserError

    def one_of(names: Sequence[str]) -> Callable[[str], str]:
        def read(text: str) -> str:
            if text not in names:
                raise ValueError
            return text

        return read

    def tree(text: str) -> str:
        if text != "auto":
            cli.parse_tree(text)
        return text

    def batch(text: str) -> int:
        value = int(text)
        if not 1 <= value <= 4096:
            raise ValueError
        return value

    def temperature(text: str) -> float:
        value = float(text)
        if not 0 <= value < float("inf"):
            raise ValueError
        return value

    wanted = args.modes or ([sides.MODES[1]] if args.accuracy else list(sides.MODES))
    listed = sides.listed
    modes = listed("--modes", wanted, one_of(sides.MODES), "plain or medusa")
    trees = listed("--tree", args.tree, tree, "a tree")
    rules = listed("--acceptance", args.acceptance, one_of(sides.RULES), ", ".join(sides.RULES))
    temperatures = listed("--temperature", args.temperature, temperature, "0 or a positive number")
    batches = listed("--batch-size", args.batch_size, batch, "a whole number from 1 to 4096")
    found = sides.every_side(modes, trees, rules, temperatures, batches)
    if len(found) > sides.MOST_SIDES:
        raise UserError(f"{len(found)} sides, expected at most {sides.MOST_SIDES}: shorten a list")
    if args.accuracy and 0 not in temperatures:
        raise UserError("--accuracy measures greedy answers: --temperature must have 0 in it")
    return found


def _load(args: argparse.Namespace, sides: Mapping[str, Side], expect: Callable[[MedusaLM], Any]) -> None:
    """One model for all sides, with the automatic tree; `plans` makes the others of it."""
    loading = argparse.Namespace(**vars(args))
    loading.plain = not args.accuracy and all(side.plain for side in sides.values())
    loading.tree = "auto"
    cli.load_model(loading, expect)


def _note_small_batches(count: int, sides: Mapping[str, Side]) -> None:
    for batch in sorted({side.batch for side in sides.values()}):
        if count % batch:
            cli.note(
                f"note: {count} questions are no multiple of the batch size {batch}: its last batch is small"
            )


def _settings(args: argparse.Namespace, asking: Asking, planned: Mapping[str, Plan]) -> dict[str, Any]:
    """All that a figure depends on; a journal of other settings is refused."""
    import hashlib

    lm = asking.lm
    prints = json.dumps(lm.fingerprints, sort_keys=True)
    return {
        "suite": args.suite,
        "questions": asking.suite.digest(),
        "model": str(args.model or "default"),
        "heads": str(args.heads),
        "fingerprints": hashlib.sha256(prints.encode()).hexdigest(),
        "dtype": lm.programs.dtype.name,
        "mesh": args.mesh,
        "device": lm.device,
        "sides": {name: repr(plan) for name, plan in planned.items()},
        "system": args.system,
        "raw": args.raw,
        "max_new_tokens": args.max_new_tokens,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "epsilon": args.epsilon,
        "delta": args.delta,
        "seed": args.seed,
        "rounds": args.rounds,
    }


def _write(
    args: argparse.Namespace, results: Mapping[str, Any], sides: Mapping[str, Side], journal: Journal
) -> None:
    from infer.benchmarking import plots, report
    from medusa_jax import UserError
    from medusa_jax.errors import write_atomically

    folder: Path = args.output
    try:
        (folder / "answers").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be written ({error.strerror})") from None
    with interrupts.unwinding():  # under temporary names first
        for name in sides:
            model = f"{results['model']} {name}"
            text = report.spec_bench(model, journal.answers(name), time.time())
            write_atomically(folder / "answers" / f"{name}.jsonl", text.encode())
        write_atomically(folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
        if "accuracy" in results:
            told = json.dumps(results["accuracy"], indent=1) + "\n"
            write_atomically(folder / "accuracy.json", told.encode())
        made = [] if args.no_plots else plots.draw(results, folder)
        pictures = "".join(f"\n![{path.stem.replace('_', ' ')}]({path.name})\n" for path in made)
        write_atomically(folder / "results.md", (report.markdown(results) + pictures).encode())
    for side in results["sides"].values():
        if side["all"].get("speedup") and not side["plain"]:
            own = side["all"]
            chosen = " (plain by choice)" if side["plain_by_choice"] else ""
            cli.note(
                f"{side['label']}: {own['speedup']:.2f} times plain, "
                f"{own['tokens_per_step']:.2f} tokens/step{chosen}"
            )
    cli.note(f"results in {folder / 'results.md'}")


if __name__ == "__main__":
    cli.main(run)
