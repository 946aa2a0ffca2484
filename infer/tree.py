"""python -m infer.tree: draw a tree of guesses on the terminal, and into a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infer import cli, interrupts

EPILOG = """\
examples:
  python -m infer.tree 2x3x2
  python -m infer.tree mc_sim_7b_63 --png tree.png
  python -m infer.tree calibrated.json

A node is drawn as its rank among the candidates of the node above, and with its hit rate where the file
holds one. --tree of the other programs takes the same trees.
"""


def make_parser() -> cli.Parser:
    """The command's arguments."""
    made = cli.bare_parser("infer.tree", "Draw a tree of guesses.", EPILOG)
    made.add_argument("tree", metavar="NAME|FILE|WIDTHS", help="what --tree of the other programs takes")
    made.add_argument("--png", type=Path, metavar="FILE", help="draw into this file too (needs matplotlib)")
    return made


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    args = make_parser().parse_args(argv)
    from rich.console import Console

    from medusa_jax import UserError
    from medusa_jax.tree import load_tree
    from medusa_jax.tree_drawing import to_png, to_text

    path, rates = Path(args.tree), None
    tree = cli.parse_tree(args.tree)
    # A name that is both is not the file; its rates would be those of another tree.
    if path.is_file() and (found := load_tree(path))[0] == tree:
        rates = found[1]
    if args.png is not None:
        if args.png.exists() and not args.png.is_file():
            raise UserError(f"--png {args.png}: cannot be written (not a file)")
        with interrupts.unwinding():  # it writes under a temporary name first
            to_png(tree, args.png, rates, title=args.tree)
    Console(highlight=False).print(to_text(tree, rates))
    return 0


if __name__ == "__main__":
    cli.main(run)
