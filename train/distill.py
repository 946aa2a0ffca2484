"""python -m train.distill: let a model answer prompts, as data to train its heads on.

Heads learn best from the model's own text. Answers are journalled as they end, so that a killed run goes
on where it stopped; the file itself appears when all are there, in the prompts' order.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import cli

if TYPE_CHECKING:
    from medusa_jax import Completion, MedusaLM
    from medusa_jax.completion import Prompt

EPILOG = """\
examples:
  python -m train.distill --prompts questions.jsonl --output answers.jsonl
  python -m train.distill --prompts chats.jsonl --replay --batch-size 128 --output answers.jsonl
  python -m train.distill --model org/name --mesh data=8 --prompts questions.jsonl --output answers.jsonl

A line of --prompts is {"prompt": "..."} or {"messages": [...]}; a ShareGPT file will do too. A line of the
output is {"messages": [...], "finish_reason": "stop" or "length", "looping": true or false}, which python -m
train reads. Run the same command again after an interruption: it goes on where it stopped.
"""

JOURNAL = ".partial"  # put behind the output's name
TEMPERATURE = 0.3  # as the paper distils
_PEEK = 1 << 16  # bytes that tell the kind of a file


@dataclasses.dataclass
class Conversation:
    """One line of the prompts on its way to an answer."""

    messages: list[dict[str, str]]  # what is said so far, answers included
    questions: list[list[dict[str, str]]]  # the messages still to come, up to each user's turn
    finish_reason: str | None = None
    looping: bool = False

    def ask(self) -> None:
        """Take the next user's turn."""
        self.messages += self.questions.pop(0)

    def answer(self, text: str, finish_reason: str, looping: bool) -> None:
        """Take the model's. A conversation ends at an answer that was cut off: none can follow it."""
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reason = finish_reason
        self.looping = self.looping or looping
        if finish_reason == "length":
            self.questions = []


def conversation(prompt: Prompt, replay: bool, system: str | None) -> Conversation:
    """A conversation up to its first answer. With `replay` all user turns are asked, else the first."""
    from medusa_jax.completion import messages_of

    questions: list[list[dict[str, str]]] = [[]]
    for message in messages_of(prompt, system):
        if message["role"] == "assistant":
            continue  # the model gives its own
        questions[-1].append(message)
        if message["role"] == "user":
            questions.append([])
    asked = [question for question in questions if question and question[-1]["role"] == "user"]
    return Conversation([], asked if replay else asked[:1])


def make_parser() -> cli.Parser:
    """The command's flags."""
    made = cli.parser("train.distill", "Let a model answer prompts, as data to train heads on.", EPILOG)
    data = made.add_argument_group("data")
    data.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="what to answer")
    data.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="where answers go")
    data.add_argument(
        "--replay", action="store_true", help="ask every user turn of a conversation, not only the first"
    )
    data.add_argument(
        "--unfinished",
        choices=["mark", "drop"],
        default="mark",
        help="answers cut off at --max-new-tokens: mark keeps them; training leaves their end open (mark)",
    )
    data.add_argument("--limit", type=int, metavar="N", help="take only the first N prompts")
    data.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="leave out longer prompts: the longest decides the memory and the time of all",
    )
    data.add_argument("--system", metavar="TEXT", help='system message; "" removes the template\'s own')
    cli.add_sampling(made, temperature=TEMPERATURE)
    cli.add_medusa(made)
    data.add_argument(
        "--batch-size", type=int, default=64, metavar="B", help="rows that decode at a time (64)"
    )
    made.set_defaults(raw=False)
    return made


def read_questions(path: Path) -> list[Prompt]:
    """The prompts of a file of `infer.generate`'s kind, or the conversations of a ShareGPT file.

    Raises UserError naming the file and the line of a mistake.
    """
    from infer.generate import read_prompt_file
    from medusa_jax.errors import UserError, require_file, user_path
    from train import conversations

    path = user_path(path, "--prompts")
    require_file(path)
    with path.open("rb") as file:
        start = file.read(_PEEK).lstrip()
    if not start.startswith((b"[", b"\x1f\x8b")) and b'"conversations"' not in start.split(b"\n")[0]:
        return read_prompt_file(path)
    documents = conversations.read(path)
    asked = [document.messages for document in documents if document.messages]
    if not asked:
        raise UserError(f"--prompts {path}: no conversation with a user's turn in it")
    return list(asked)


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    made = make_parser()
    args = made.parse_args(argv)
    for name in ("batch_size", "limit", "max_prompt_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    from medusa_jax import UserError
    from medusa_jax.errors import user_path

    args.output = user_path(args.output, "--output")
    if args.output.exists():
        raise UserError(f"--output {args.output}: exists; name another file or remove it")
    prompts = read_questions(args.prompts)[: args.limit]
    params = cli.sampling_params(args)
    conversations = [conversation(prompt, args.replay, args.system) for prompt in prompts]
    for number, one in enumerate(conversations, 1):
        if not one.questions:
            raise UserError(f"--prompts {args.prompts}: prompt {number} has no user's turn")

    def expect(lm: MedusaLM) -> Callable[[], None]:
        """Refuse what cannot be asked before the weights are read."""
        for number, one in enumerate(conversations, 1):
            if not args.max_prompt_tokens:
                try:
                    lm.encode(one.questions[0])
                except UserError as error:
                    raise UserError(f"--prompts {args.prompts}: prompt {number}: {error}") from None
        return lambda: None

    lm = cli.load_model(args, expect)
    journal = Journal(args.output, _fingerprint(args, params, conversations))
    with journal:
        _answer(lm, conversations, params, args, journal)
    _finish(args, conversations)
    journal.remove()
    return 0


def _fingerprint(args: argparse.Namespace, params: Any, conversations: Sequence[Conversation]) -> str:
    """What answers depend on: a journal of anything else must not be continued."""
    told = [str(args.model), args.dtype, dataclasses.asdict(params), args.max_prompt_tokens]
    told.append([one.questions for one in conversations])
    if params.acceptance != "exact":  # which guesses there are matters only then
        told += [str(args.heads), str(args.tree), args.lookup, args.plain]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _answer(
    lm: MedusaLM,
    conversations: Sequence[Conversation],
    params: Any,
    args: argparse.Namespace,
    journal: Journal,
) -> None:
    """Ask turn after turn; within a turn all conversations share one batch."""
    from medusa_jax import UserError
    from medusa_jax.text import looping

    kept = journal.read()
    turn = 0
    while any(one.questions for one in conversations):
        numbers, jobs, done_before = [], [], 0
        for number, one in enumerate(conversations):
            if not one.questions:
                continue
            one.ask()
            if (number, turn) in kept:
                record = kept[number, turn]
                one.answer(record["text"], record["finish_reason"], record["looping"])
                done_before += 1
                continue
            try:
                ids = lm.encode(one.messages)
            except UserError:  # longer than the model's context
                ids = None
            if ids is None or (args.max_prompt_tokens and len(ids) > args.max_prompt_tokens):
                one.messages, one.questions = one.messages[: -len(_question(one))], []  # ends before it
                continue
            # A seed of its own: the same question asked twice is answered twice.
            own = dataclasses.replace(params, seed=(params.seed + number) % 2**31)
            numbers.append(number)
            jobs.append(lm.job(ids, own))
        if jobs:
            title = "answering" if turn == 0 else f"answering, turn {turn + 1}"
            with Meter(title, len(jobs) + done_before, done_before) as meter:

                def on_done(
                    index: int, done: Completion, numbers: list[int] = numbers, turn: int = turn
                ) -> None:
                    number = numbers[index]
                    loops = looping(done.token_ids)
                    conversations[number].answer(done.text, done.finish_reason, loops)
                    journal.add(number, turn, done.text, done.finish_reason, loops)
                    meter.add(len(done.token_ids))

                lm.complete([""] * len(jobs), jobs, args.batch_size, on_done)
        turn += 1


def _question(one: Conversation) -> list[dict[str, str]]:
    """The messages since the last answer."""
    tail: list[dict[str, str]] = []
    for message in reversed(one.messages):
        if message["role"] == "assistant":
            break
        tail.append(message)
    return tail


def _finish(args: argparse.Namespace, conversations: Sequence[Conversation]) -> None:
    """Write the answers in the prompts' order, and say how many there are."""
    from medusa_jax.errors import UserError, write_atomically

    lines, dropped = io.StringIO(), 0
    answered = [one for one in conversations if one.finish_reason is not None]
    for one in answered:
        if one.finish_reason == "length" and args.unfinished == "drop":
            dropped += 1
            continue
        record = {"messages": one.messages, "finish_reason": one.finish_reason, "looping": one.looping}
        lines.write(json.dumps(record, ensure_ascii=False) + "\n")
    if dropped == len(answered):  # the answers stay in the journal
        raise UserError(
            f"--output {args.output}: no answer to write: {len(conversations) - len(answered)} prompts too "
            f"long, {dropped} answers unfinished (--max-new-tokens, --unfinished mark)"
        )
    write_atomically(args.output, lines.getvalue().encode())
    left = len(conversations) - len(answered)
    notes = f", {left} left out as too long" if left else ""
    notes += f", {dropped} unfinished ones dropped" if dropped else ""
    cli.note(f"{len(answered) - dropped} answered conversations in {args.output}{notes}")


class Journal:
    """Answers as they come, one JSON line each, behind a line that names what they depend on."""

    def __init__(self, output: Path, fingerprint: str) -> None:
        self.path = output.with_name(output.name + JOURNAL)
        self._fingerprint = fingerprint
        self._file: Any = None

    def read(self) -> dict[tuple[int, int], dict[str, Any]]:
        """What an interrupted run left, by conversation and turn. A torn last line is cut off.

        Raises UserError for a damaged line.
        """
        from medusa_jax import UserError

        found: dict[tuple[int, int], dict[str, Any]] = {}
        for number, line in enumerate(self._whole_lines(), 2):
            try:
                record = json.loads(line.decode())
                found[record["conversation"], record["turn"]] = record
                _ = record["text"] + record["finish_reason"], bool(record["looping"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{self.path}: line {number} is damaged; remove that line") from None
        if found:
            cli.note(f"going on after {len(found)} answers in {self.path}")
        return found

    def _whole_lines(self) -> Iterator[bytes]:
        assert self._file is not None
        self._file.seek(0)
        next(self._file)
        end = self._file.tell()
        for line in iter(self._file.readline, b""):
            if not line.endswith(b"\n"):
                break
            end = self._file.tell()
            yield line
        self._file.truncate(end)
        self._file.seek(end)

    def __enter__(self) -> Journal:
        from medusa_jax import UserError

        head = json.dumps({"train.distill": self._fingerprint}).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            self._file.seek(0)
            first = self._file.readline()
            if not first.endswith(b"\n"):  # new, or killed before anything was done
                self._file.truncate(0)
                self._file.write(head)
                self._file.flush()
            elif first != head:
                raise UserError(
                    f"{self.path}: left by a run with another model, other prompts or settings; "
                    "remove it to begin anew"
                )
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was told of when the answer came
            self._file.close()

    def add(self, number: int, turn: int, text: str, finish_reason: str, loops: bool) -> None:
        """Keep an answer; after a kill it is there, after a power cut perhaps not.

        Raises UserError where the disk refuses.
        """
        from medusa_jax import UserError

        record = {"conversation": number, "turn": turn, "text": text}
        record |= {"finish_reason": finish_reason, "looping": loops}
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None

    def remove(self) -> None:
        """The output is whole: nothing is left to go on with."""
        self.path.unlink(missing_ok=True)


class Meter:
    """A bar of answers with tokens per second and the time left; a line a minute without a terminal."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._done, self._tokens = title, total, done, 0
        self._began = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Meter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            rate = TextColumn("{task.fields[rate]:.0f} tokens/s")
            self._bar = Progress(*columns, rate, TimeRemainingColumn(), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, rate=0.0)
        return self

    def add(self, tokens: int) -> None:
        """One more answer, of so many tokens."""
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        rate = self._tokens / max(now - self._began, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=rate)
        elif now - self._said > 60:
            self._said = now
            cli.note(f"{self._title}: {self._done} of {self._total}, {rate:.0f} tokens/s")

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cli.main(run)
