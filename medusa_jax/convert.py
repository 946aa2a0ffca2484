"""python -m medusa_jax.convert: heads from one project's files into another's, or what files hold."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from medusa_jax.weights import checkpoints, head_push
from medusa_jax.weights.conversion import DEFAULT_MODEL, TARGETS, Options, convert
from medusa_jax.weights.head_check import CheckError
from medusa_jax.weights.head_description import describe

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

EPILOG = """\
examples:
  python -m medusa_jax.convert --describe FasterDecoding/medusa-vicuna-7b-v1.3
  python -m medusa_jax.convert FasterDecoding/medusa-vicuna-7b-v1.3 heads --to medusa-jax
  python -m medusa_jax.convert run vllm-heads --to vllm --model lmsys/vicuna-7b-v1.3 --dtype bfloat16 --check
  python -m medusa_jax.convert run tgi-heads --to tgi --push-to-hub me/medusa-heads
  python -m medusa_jax.convert vllm-heads orbax-heads --to orbax --model ./vicuna

SOURCE is told by its content: this project's heads (a folder, an Orbax checkpoint, a run's output); those of
the first implementation (a folder, medusa_lm_head.safetensors or .pt, a whole Medusa model), of vLLM, of
ModelOpt or of MLC-LLM; or a hub id of such. docs/formats.md describes every kind and what none can express.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    # The library does not depend on the programs; but this file is both, and their manners (flags, errors,
    # exit status, Ctrl-C) should be the same everywhere. So it asks for them only where it runs as one.
    from infer import cli

    made = cli.bare_parser("medusa_jax.convert", "Convert Medusa heads, or say what files hold.", EPILOG)
    made.add_argument("source", nargs="?", metavar="SOURCE", help="heads: a folder, a file or a hub id")
    made.add_argument("target", nargs="?", metavar="TARGET", help="the folder to write, new or empty")
    made.add_argument(
        "--to",
        choices=TARGETS,
        help="reference: the first implementation; hf: a whole model with its heads beside it; medusa-jax: "
        "this project's safetensors",
    )
    made.add_argument(
        "--describe", metavar="PATH", help="say what heads these are, and what is wrong with them"
    )
    made.add_argument(
        "--model",
        metavar="DIR|FILE.gguf|HUB_ID",
        help="the heads' model: to check sizes, and for its unembedding where heads share it and TARGET "
        f"needs a copy; {DEFAULT_MODEL}: the small default model (the one beside the heads, if there is one)",
    )
    made.add_argument(
        "--reference-generation",
        choices=["v1", "v2"],
        help="of reference and tgi: v1 has an unembedding for each head, v2 shares the model's (as SOURCE)",
    )
    made.add_argument("--dtype", choices=list(TYPES), help="element type of TARGET (as SOURCE)")
    made.add_argument(
        "--expand-vocabulary",
        action="store_true",
        help="let heads with a draft vocabulary score all tokens; the others get the model's rows",
    )
    made.add_argument(
        "--base-name",
        metavar="NAME",
        help="what TARGET calls its model: a hub id or a folder (as SOURCE, else --model)",
    )
    made.add_argument(
        "--check",
        action="store_true",
        help="read TARGET back independently and compare logits; where they differ it is not kept",
    )
    made.add_argument("--push-to-hub", metavar="REPO", help="upload TARGET to this hub repository as well")
    return made


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    from infer import cli, interrupts

    made = make_parser()
    args = made.parse_args(argv)
    if args.describe is not None:
        if args.source is not None or args.to is not None:
            made.error("--describe PATH takes no SOURCE, TARGET or --to")
        with cli.progress_bar("reading") as bar:
            lines = list(describe(args.describe, _model(args.model), bar))
        print("\n".join(cli.printable(line) for line in lines))
        return 0
    if args.source is None or args.target is None:
        made.error("SOURCE and TARGET are needed, or --describe PATH")
    if args.to is None:
        made.error(f"--to is needed: one of {', '.join(TARGETS)}")
    if args.reference_generation is not None and args.to not in ("reference", "tgi"):
        made.error(f"--reference-generation is for --to reference and tgi, not {args.to}")
    if args.base_name is not None and not args.base_name.strip():
        made.error("--base-name is empty, expected a hub id or a folder")
    if args.push_to_hub is not None:
        head_push.check_repository(args.push_to_hub)
    options = Options(
        source=args.source,
        target=args.target,
        to=args.to,
        model=args.model,
        generation=args.reference_generation,
        dtype=None if args.dtype is None else np.dtype(TYPES[args.dtype]),
        expand_vocabulary=args.expand_vocabulary,
        base_name=args.base_name,
        check=args.check,
    )
    try:
        with interrupts.unwinding(), cli.progress_bar("converting") as bar:  # what is half written goes
            checked = convert(options, lambda line: cli.note(cli.printable(line)), bar)
    except CheckError as error:
        cli.note(f"check failed: {cli.printable(str(error))}; nothing was written")
        return 1
    folder = Path(args.target).expanduser()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    cli.note(f"wrote {cli.printable(str(folder))}: {args.to}, {size / 1e6:,.1f} MB")
    if checked is not None:
        print(f"largest difference in logits: {checked[0]:.3g} (at most {checked[1]:.3g} is right)")
    if args.push_to_hub is not None:
        print(cli.printable(head_push.push(folder, args.push_to_hub)))
    return 0


def _model(name: str | None) -> checkpoints.Checkpoint | None:
    return None if name is None else checkpoints.open_model(None if name == DEFAULT_MODEL else name)


if __name__ == "__main__":
    from infer import cli

    cli.main(run)
