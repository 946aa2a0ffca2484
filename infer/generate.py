"""python -m infer.generate: complete prompts, streamed to the terminal or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import cli

if TYPE_CHECKING:
    from medusa_jax import Completion, MedusaLM
    from medusa_jax.generate import Prompt

EPILOG = """\
examples:
  python -m infer.generate --prompt "What is a leap year?"
  python -m infer.generate --prompt "Write a haiku about rain" --temperature 0.7 --seed 3
  python -m infer.generate --prompts questions.jsonl --batch-size 8 --json > answers.jsonl
  echo "Once upon a time" | python -m infer.generate --raw --max-new-tokens 50

A line of --prompts is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}.
Numbers in parentheses are defaults; a model's generation_config.json may set its own.
"""


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
    from medusa_jax.errors import UserError

    try:
        # Not splitlines: a JSON text may hold other line separators, such as U+2028, as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"--prompts {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path}: not UTF-8 ({error})") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--prompts {path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        prompts.append(_prompt_of(record, where))
    if not prompts:
        raise UserError(f"--prompts {path}: no prompts in it")
    return prompts


def _prompt_of(record: Any, where: str) -> Prompt:
    from medusa_jax.errors import UserError
    from medusa_jax.generate import messages_of

    if isinstance(record, dict) and ("prompt" in record) != ("messages" in record):
        if isinstance(record.get("prompt"), str):
            cli.check_text(record["prompt"], where)
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
    prompts = read_prompts(args, made)
    from medusa_jax import UserError

    params = cli.sampling_params(args)
    streaming = args.batch_size == 1 and not args.json
    jobs = []

    def expect(lm: MedusaLM) -> None:
        for number, prompt in enumerate(prompts, 1):
            try:
                jobs.append(lm.job(lm.encode(prompt, args.system, args.raw), params))
            except UserError as error:
                raise UserError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
        # A stream sizes its programs by its own prompt, a batch by all of them.
        lm.compile_for(jobs[:1] if streaming else jobs, args.batch_size, streaming=streaming)

    lm = cli.load_model(args, expect)
    cli.announce_defaults(lm, params)
    if streaming:
        _stream(lm, prompts, jobs)
    else:
        _batch(lm, prompts, jobs, args)
    return 0


def _stream(lm: MedusaLM, prompts: Sequence[Prompt], jobs: Sequence[Any]) -> None:
    from medusa_jax.generate import completion

    for number, (prompt, job) in enumerate(zip(prompts, jobs, strict=True)):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}### {_one_line(prompt)}", flush=True)
        for piece in lm.stream_job(job):
            print(piece, end="", flush=True)
        print(flush=True)
        cli.note(closing_line([completion(prompt, job, lm.plan)]))


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

    lm.complete(prompts, jobs, args.batch_size, on_done)
    cli.note(closing_line(shown))


def _one_line(prompt: Prompt) -> str:
    from medusa_jax.generate import prompt_text

    text = " ".join(prompt_text(prompt).split())
    return text if len(text) <= 100 else text[:99] + "…"


def closing_line(done: Sequence[Completion]) -> str:
    """The statistics of a run in one line. In a batch the decode time is that of the slowest row."""
    new = sum(one.stats.new_tokens for one in done)
    steps = sum(one.stats.steps for one in done)
    if len(done) == 1:
        s = done[0].stats
        seconds, speed = s.prefill_seconds + s.decode_seconds, f"{s.tokens_per_second:.1f} tokens/s"
        return (
            f"{new} tokens in {seconds:.2f} s ({speed}; prefill {s.prefill_seconds:.2f} s), "
            f"{s.tokens_per_step:.2f} tokens/step, {done[0].finish_reason}"
        )
    return f"{len(done)} completions, {new} tokens, {new / steps if steps else 0:.2f} tokens/step"


if __name__ == "__main__":
    cli.main(run)
