"""python -m infer.generate: complete prompts, streamed to the terminal or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import cli

if TYPE_CHECKING:
    from medusa_jax import Completion, MedusaLM
    from medusa_jax.completion import Prompt

EPILOG = """\
examples:
  python -m infer.generate --prompt "What is a leap year?"
  python -m infer.generate --prompt "Write a haiku about rain" --temperature 0.7 --seed 3
  python -m infer.generate --prompts questions.jsonl --batch-size 8 --json > answers.jsonl
  python -m infer.generate --prompt "Write a quicksort in Python, twice" --lookup on --show-accepted
  echo "Once upon a time" | python -m infer.generate --raw --max-new-tokens 50

--lookup on is faster where the answer repeats the prompt or itself, and needs no heads.
A line of --prompts is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.
Numbers in parentheses are defaults; a model's generation_config.json may set its own.
"""

MAX_FILE = 10**9  # bytes of a file of prompts


def make_parser() -> cli.Parser:
    """The command's flags."""
    made = cli.parser("infer.generate", "Complete prompts with a language model.", EPILOG)
    prompt = made.add_argument_group("prompt")
    prompt.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="one or more prompts; none: standard input",
    )
    prompt.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="a file of prompts, one a line")
    prompt.add_argument("--system", metavar="TEXT", help='system message; "" removes the template\'s own')
    prompt.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without chat template"
    )
    cli.add_sampling(made)
    cli.add_medusa(made)
    output = made.add_argument_group("output")
    output.add_argument(
        "--batch-size", type=int, default=1, metavar="B", help="prompts decoded at a time (1)"
    )
    output.add_argument("--json", action="store_true", help="one JSON object a completion, in input order")
    return made


def read_prompts(args: argparse.Namespace, made: cli.Parser) -> list[Prompt]:
    """The prompts that the flags or standard input give, before anything slow is done."""
    if args.prompt and args.prompts:
        made.error("--prompt and --prompts exclude each other")
    if args.prompts:
        return read_prompt_file(args.prompts)
    if args.prompt:
        for number, text in enumerate(args.prompt, 1):
            cli.check_text(text, f"--prompt, text {number}")
            if not text.strip():
                made.error(f"--prompt, text {number}: the prompt is empty")
        return args.prompt
    if sys.stdin is None or sys.stdin.isatty():
        made.error("no prompt: give --prompt, --prompts or standard input")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        made.error(f"standard input is not UTF-8 ({error})")
    text = text.removesuffix("\n")
    if not text.strip():
        made.error("no prompt: standard input is empty")
    cli.check_text(text, "standard input")
    return [text]


def read_prompt_file(path: Path) -> list[Prompt]:
    """Read a JSONL file of prompts. Raises UserError naming the file and the line of a mistake."""
    from medusa_jax.errors import UserError, json_lines, user_path

    prompts: list[Prompt] = []
    try:
        path = user_path(path)
        cli.check_file(path, MAX_FILE)
        with path.open("rb") as file:
            for number, record in json_lines(file):
                where = f"{path}, line {number}"
                if isinstance(record, UserError):
                    raise UserError(f"{where}: {record}")
                prompts.append(_prompt_of(record, where))
    except OSError as error:
        raise UserError(f"--prompts {path}: cannot be read ({error.strerror})") from None
    except UserError as error:
        raise UserError(f"--prompts {error}") from None
    if not prompts:
        raise UserError(f"--prompts {path}: no prompts in it")
    return prompts


def _prompt_of(record: Any, where: str) -> Prompt:
    from medusa_jax.completion import messages_of
    from medusa_jax.errors import UserError

    if isinstance(record, dict) and ("prompt" in record) != ("messages" in record):
        if isinstance(record.get("prompt"), str):
            cli.check_text(record["prompt"], where)
            if not record["prompt"].strip():
                raise UserError(f"{where}: the prompt is empty")
            return record["prompt"]
        if isinstance(record.get("messages"), list):
            try:
                messages = messages_of(record["messages"], None)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            for message in messages:
                cli.check_text(message["role"] + message["content"], where)
            return messages
    raise UserError(f'{where}: expected {{"prompt": text}} or {{"messages": [...]}}')


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    made = make_parser()
    args = made.parse_args(argv)
    if args.batch_size < 1:
        made.error(f"--batch-size is {args.batch_size}, expected at least 1")
    if args.show_accepted and (args.json or args.batch_size > 1):
        made.error("--show-accepted is for streamed text, not for --json or --batch-size")
    prompts = read_prompts(args, made)
    from medusa_jax import UserError

    params = cli.sampling_params(args)
    streaming = args.batch_size == 1 and not args.json
    jobs = []

    def expect(lm: MedusaLM) -> Callable[[], None]:
        for number, prompt in enumerate(prompts, 1):
            try:
                jobs.append(lm.job(lm.encode(prompt, args.system, args.raw), params))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        # A stream sizes its programs by its own prompt, a batch by all of them.
        return lambda: lm.compile_for(jobs[:1] if streaming else jobs, args.batch_size, streaming=streaming)

    lm = cli.load_model(args, expect)
    cli.announce_defaults(lm, params)
    if streaming:
        _stream(lm, prompts, jobs, cli.show_colours(args.show_accepted))
    else:
        _batch(lm, prompts, jobs, args)
    return 0


def _stream(lm: MedusaLM, prompts: Sequence[Prompt], jobs: Sequence[Any], coloured: bool) -> None:
    from medusa_jax.completion import completion

    for number, (prompt, job) in enumerate(zip(prompts, jobs, strict=True)):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}### {_one_line(prompt)}", flush=True)
        colours = cli.Colours(job) if coloured else None
        for piece in lm.stream_job(job):
            print(colours.paint(piece) if colours else piece, end="", flush=True)
        print(flush=True)
        plan = lm.plan_for(1, job.params.temperature or 0.0)
        cli.note(closing_line([completion(prompt, job, plan)]))


def _batch(lm: MedusaLM, prompts: Sequence[Prompt], jobs: Sequence[Any], args: argparse.Namespace) -> None:
    waiting: dict[int, Completion] = {}
    shown: list[Completion] = []

    def on_done(index: int, done: Completion) -> None:
        """Print in input order, as soon as everything before has been printed."""
        waiting[index] = done
        while len(shown) in waiting:
            ready = waiting.pop(len(shown))
            if args.json:
                print(json.dumps(dataclasses.asdict(ready), ensure_ascii=False), flush=True)
            else:
                print(f"{chr(10) if shown else ''}### {_one_line(ready.prompt)}\n{ready.text}", flush=True)
            shown.append(ready)

    began = time.perf_counter()
    lm.complete(prompts, jobs, args.batch_size, on_done)
    cli.note(closing_line(shown, time.perf_counter() - began))


def _one_line(prompt: Prompt) -> str:
    from medusa_jax.completion import prompt_text

    text = cli.printable(" ".join(prompt_text(prompt).split()))
    return text if len(text) <= 100 else text[:99] + "…"


def closing_line(done: Sequence[Completion], seconds: float | None = None) -> str:
    """The statistics of a run in one line. seconds: what a batch took, as its rows' own times overlap."""
    new = sum(one.stats.new_tokens for one in done)
    steps = sum(one.stats.steps for one in done)
    lossy = ", lossy (typical acceptance)" if any(one.stats.lossy for one in done) else ""
    if len(done) == 1:
        s = done[0].stats
        took, speed = s.prefill_seconds + s.decode_seconds, f"{s.tokens_per_second:.1f} tokens/s"
        return (
            f"{new} tokens in {took:.2f} s ({speed}; prefill {s.prefill_seconds:.2f} s), "
            f"{s.tokens_per_step:.2f} tokens/step, {done[0].finish_reason}{lossy}"
        )
    time_taken = f" in {seconds:.1f} s ({new / seconds:.1f} tokens/s)" if seconds else ""
    per_step = f"{new / steps if steps else 0:.2f} tokens/step"
    return f"{len(done)} completions, {new} tokens{time_taken}, {per_step}{lossy}"


if __name__ == "__main__":
    cli.main(run)
