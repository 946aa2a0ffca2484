"""What the programs of this package share: model and sampling flags, files, errors, exit status.

Standard output carries results only; progress and messages go to standard error. Exit status: 0; 2 for
a user's mistake, with one line; 1 for any other failure; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from infer import STATUS, interrupts

if TYPE_CHECKING:  # importing jax takes a second that --help and a wrong flag need not wait for
    from jax.sharding import Mesh

    from medusa_jax import MedusaLM, SamplingParams
    from medusa_jax.sampling import SamplingParams as Sampling
    from medusa_jax.schedule import Job
    from medusa_jax.tree import Tree


MOST_CPU_DEVICES = 64
MAX_TREE_FILE = 10**8  # bytes


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and where help is; exit with status 2."""
        message = printable(" ".join(message.split()))
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def print_help(self, file: Any = None) -> None:
        """Print the help. Unlike the base class it fails where that cannot be written."""
        print(self.format_help(), end="", file=file or sys.stdout, flush=True)


def bare_parser(prog: str, description: str, epilog: str) -> Parser:
    """A parser without flags of ours."""
    return Parser(
        prog=f"python -m {prog}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser(prog: str, description: str, epilog: str) -> Parser:
    """A parser with the flags that choose and place a model."""
    made = bare_parser(prog, description, epilog)
    model = made.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="DIR|FILE.gguf|HUB_ID",
        help="a Hugging Face folder, a GGUF file, or a hub id such as org/name; "
        "default: SmolLM2-135M-Instruct, fetched once (93 MB) and cached",
    )
    model.add_argument(
        "--heads",
        default="auto",
        metavar="DIR|FILE|HUB_ID|none",
        help="Medusa heads trained for this model: this project's files or the first implementation's; "
        "medusa or conditioned: those that come with the default model (auto: the better of them, none for "
        "another model)",
    )
    model.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="type of parameters and compute; default: float32 on a CPU, bfloat16 elsewhere",
    )
    model.add_argument(
        "--mesh",
        metavar="data=1,tensor=1",
        help="devices to spread over: data splits the batch, tensor splits the model",
    )
    return made


def add_sampling(made: Parser, temperature: float | None = None) -> None:
    """The flags of `SamplingParams`. Their defaults are the model's own where it has some.

    temperature: the command's own default.
    """
    group = made.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens to generate; they take memory (256)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 takes the likeliest token ({temperature or 0:g})",
    )
    group.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest; 0 is off (0)")
    group.add_argument("--top-p", type=float, metavar="P", help="sample within probability mass P (1)")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest's probability (0)"
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 discourages repeating the text (1)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed, the same text (0)")
    group.add_argument(
        "--stop",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="end the answer at any of these",
    )


def add_medusa(made: Parser) -> None:
    """The flags of Medusa decoding."""
    group = made.add_argument_group("medusa decoding")
    group.add_argument(
        "--plain", action="store_true", help="a token a step; --heads, --tree and --lookup are ignored"
    )
    group.add_argument(
        "--lookup",
        choices=["auto", "on", "off"],
        default="auto",
        help="guess what followed the same words earlier in the text; needs no heads "
        "(auto: as calibrated; else on with heads, with a --tree, and on a TPU or GPU)",
    )
    group.add_argument(
        "--tree",
        metavar="NAME|FILE|WIDTHS|auto",
        default="auto",
        help="which guesses a step checks: widths such as 2x3x2, a published tree's name or a file of paths; "
        "needs --heads or lookup; python -m infer.tree draws one (auto: by the batch, what "
        "python -m infer.calibrate found fastest here, or measured for the heads; plain where none pays)",
    )
    group.add_argument(
        "--acceptance",
        choices=["exact", "rejection", "typical"],
        default="exact",
        help="above temperature 0: exact gives the very text of plain sampling, rejection only its "
        "distribution, typical is lossy; at 0 all give the text of plain decoding (exact)",
    )
    group.add_argument("--epsilon", type=float, default=0.09, metavar="X", help="for typical (0.09)")
    group.add_argument("--delta", type=float, default=0.3, metavar="X", help="for typical (0.3)")
    group.add_argument(
        "--show-accepted",
        action="store_true",
        help="on a terminal, show accepted guesses in green (NO_COLOR turns colours off)",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the flags name, checked before anything slow is done."""
    from medusa_jax import SamplingParams
    from medusa_jax.sampling import resolve

    names = [field.name for field in dataclasses.fields(SamplingParams)]
    values: dict[str, Any] = {name: getattr(args, name) for name in names}
    values["stop"] = tuple(args.stop)
    params = SamplingParams(**values)
    resolve(params, {})
    for text in params.stop:
        check_text(text, "--stop")
    if args.system is not None:
        check_text(args.system, "--system")
    return params


def check_text(text: str, where: str) -> None:
    """Refuse text that no tokenizer takes: bytes that were not UTF-8, or half of a surrogate pair."""
    from medusa_jax import UserError

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not valid Unicode at character {error.start + 1}") from None


def check_file(path: Path, most_bytes: int) -> None:
    """Raises UserError for what is no regular file (a device may never end) and for too large a file."""
    from medusa_jax.errors import UserError, require_file

    size = require_file(path).st_size
    if size > most_bytes:
        raise UserError(f"{path}: has {size:,} bytes, expected at most {most_bytes:,}")


def parse_tree(text: str) -> Tree:
    """The tree that --tree names, without reading from devices."""
    from medusa_jax.errors import is_folder, stat_of
    from medusa_jax.tree import Tree

    path = Path(text)
    if stat_of(path) is not None and not is_folder(path):
        check_file(path, MAX_TREE_FILE)
    return Tree.parse(text)


def printable(text: str) -> str:
    """The text as a terminal can show it: control characters replaced, white space other than spaces too."""
    # Zero-width joiners count as unprintable, but emoji and several scripts need them.
    return "".join(c if c.isprintable() or c in "\u200c\u200d" else "\ufffd" for c in text)


class Colours:
    """Paints a job's text as it comes: green where accepted guesses spelt it."""

    ON, OFF = "\x1b[32m", "\x1b[39m"

    def __init__(self, job: Job) -> None:
        from medusa_jax.text import TextStream

        self._job = job
        # Which token a character is of, without what waits for the rest of a stop string.
        self._stream = TextStream(job.text_stream.tokenizer)
        self._owners: list[bool] = []  # of the characters to come: whether a guess spelt them
        self._last = False

    def paint(self, piece: str) -> str:
        """The next piece of the job's text; without the colours it is the piece itself."""
        from medusa_jax.decode import NO_ROOT

        for at in range(len(self._stream.ids), len(self._job.token_ids)):
            text = self._stream.push(self._job.token_ids[at])
            # Only the token a step begins with has a node; the others are guesses that held.
            self._owners += [self._job.step_nodes[at] == NO_ROOT] * len(text)
            self._last = self._job.step_nodes[at] == NO_ROOT
        # Before a stop string characters come that are not certain yet by themselves: the last token's.
        owners, self._owners = self._owners[: len(piece)], self._owners[len(piece) :]
        owners += [self._last] * (len(piece) - len(owners))
        painted = ""
        for guessed, run in itertools.groupby(zip(owners, piece, strict=True), key=lambda pair: pair[0]):
            text = "".join(character for _, character in run)
            painted += f"{self.ON}{text}{self.OFF}" if guessed else text
        return painted


def show_colours(wanted: bool) -> bool:
    """Whether accepted guesses are wanted in colour and standard output can show it."""
    return bool(
        wanted and sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def make_mesh(text: str | None, processes: int = 1) -> Mesh | None:
    """The mesh that --mesh names; where there are no accelerators, of as many pretended CPU devices.

    processes: how many share it.
    """
    import jax

    from medusa_jax import sharding

    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if text is not None and not forced:
        count = -(-math.prod(sharding.parse_mesh(text).values()) // processes)
        jax.config.update("jax_num_cpu_devices", min(count, MOST_CPU_DEVICES))
    return sharding.as_mesh(text)


def load_model(args: argparse.Namespace, expect: Callable[[MedusaLM], Callable[[], None]]) -> MedusaLM:
    """Load the model that the flags name, compiling meanwhile, with a progress bar on a terminal."""
    import jax

    from medusa_jax import MedusaLM
    from medusa_jax.generate import enable_compilation_cache
    from medusa_jax.tree import Tree
    from medusa_jax.weights import hub

    mesh = make_mesh(args.mesh)  # before anything is fetched
    enable_compilation_cache()
    slow = threading.Timer(4, note, ["preparing (the first run of a model compiles its programs) ..."])
    slow.daemon = True
    if sys.stderr.isatty():
        slow.start()
    if args.plain:
        guesses: dict[str, Any] = {"heads": "none", "tree": Tree.single(), "lookup": "off"}
    else:
        tree = "auto" if args.tree == "auto" else parse_tree(args.tree)
        guesses = {"heads": args.heads, "tree": tree, "lookup": args.lookup}
    if args.model is None:
        with interrupts.unwinding():  # it fetches into temporary folders
            hub.default_model()
    try:
        with progress_bar("reading weights") as progress:
            lm = MedusaLM.load(
                args.model, dtype=args.dtype, mesh=mesh, expect=expect, progress=progress, **guesses
            )
    finally:
        slow.cancel()
    if args.dtype == "bfloat16" and jax.default_backend() == "cpu":
        note("note: on a CPU bfloat16 is usually far slower than float32")
    for warning in lm.warnings:
        note(f"note: {warning}")
    return lm


class progress_bar:  # noqa: N801 - used as a function
    """A bar on standard error while it is a terminal and the work lasts; nothing otherwise.

    unit: what is counted, bytes if it is not said.
    """

    def __init__(self, title: str, unit: str | None = None) -> None:
        self._title, self._unit = title, unit
        self._bar: Any = None

    def __enter__(self) -> Callable[[int, int], None] | None:
        return self._update if sys.stderr.isatty() else None

    def _update(self, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            counted = DownloadColumn()
            if self._unit is not None:
                counted = TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + self._unit)
            columns = TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn()
            console = Console(stderr=True)
            self._bar = Progress(*columns, console=console, transient=True)
            if not console.is_dumb_terminal:  # after Ctrl-C: the bar's line empty, the cursor visible again
                interrupts.restore = b"\r\x1b[2K\x1b[?25h"
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=total)
        self._bar.update(self._task, completed=done)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            interrupts.restore = b""


def announce_defaults(lm: MedusaLM, params: Sampling) -> None:
    """Say which of the model's own sampling defaults are in force."""
    used = {name: value for name, value in lm.defaults.items() if getattr(params, name) is None}
    if used:
        note("the model's own defaults: " + ", ".join(f"{name} {value}" for name, value in used.items()))


def note(text: str) -> None:
    """A message to the person at the terminal."""
    print(text + "\n", end="", file=sys.stderr, flush=True)  # at once: Ctrl-C may come in between


def failure(error: BaseException) -> str:
    """A failure that is no user's mistake, in one line."""
    return f"failed: {type(error).__name__}: {printable(' '.join(str(error).split()))[:500]}".removesuffix(
        ": "
    )


def main(program: Callable[[Sequence[str] | None], int]) -> NoReturn:
    """Run a program and exit with its status, in the manner the module's docstring gives."""
    interrupts.watch()
    # Imported libraries chatter about torch being absent and about tokenizer forks; neither concerns a user.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for number in range(3):  # a file opened later must not take the place of a standard stream
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:  # closed by whoever started us; messages must not go to standard output instead
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        note("failed: standard output is closed; there is nowhere to put results")
        os._exit(1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file or a pipe gets UTF-8 whatever the locale; a terminal shows what it can.
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")
        else:
            sys.stdout.reconfigure(encoding="utf-8")
    status = _status(program)
    # The interpreter's own shutdown would wait for threads that may still be compiling.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader has gone
            status = status or 1
    if interrupts.came:
        interrupts.leave()
    os._exit(status)


def _status(program: Callable[[Sequence[str] | None], int]) -> int:
    try:
        return program(None)
    except KeyboardInterrupt:
        note("interrupted")
        return STATUS
    except BrokenPipeError:  # the reader of standard output has gone; there is nobody to tell
        return 1
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:  # the last line of defence decides the exit status
        if interrupts.came:  # what a library made of it
            interrupts.leave()
        from medusa_jax.errors import UserError

        if isinstance(error, UserError):
            note(f"error: {error}")
            return 2
        if os.environ.get("MEDUSA_JAX_TRACEBACK"):
            raise
        note(failure(error))
        note("(set MEDUSA_JAX_TRACEBACK=1 for the traceback)")
        return 1
