"""python -m infer.chat: talk with a model; it keeps its key/value cache from turn to turn."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import cli, interrupts

if TYPE_CHECKING:
    from medusa_jax import MedusaLM, SamplingParams
    from medusa_jax.completion import Completion
    from medusa_jax.schedule import Job

COMMANDS = """\
  /reset          start over            /save FILE   write the chat as JSON
  /undo           take back a turn      /load FILE   continue a saved chat
  /regenerate     answer again          /stats       speed of the last answer, size of the chat
  /help           this list             /quit        leave (also Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the chat."""

EPILOG = f"""\
in the chat:
{COMMANDS}

Lines are read from standard input, so a chat can be scripted. Answers go to standard output. A command or
message that fails does not end the chat; when standard input is not a terminal, the exit status is then
2 if one of them was a mistake, 1 if they failed otherwise.
"""


class Chat:
    """A conversation and the row of the model that has read it.

    Each turn renders the whole conversation anew and lets the session read what its cache does not hold:
    that makes undo, regenerate and load need no bookkeeping of their own.
    """

    def __init__(self, lm: MedusaLM, params: SamplingParams, system: str | None = None) -> None:
        """A chat without messages."""
        self.lm, self.params, self.system = lm, params, system
        self.messages: list[dict[str, str]] = []
        self.session: Any = None
        self.last: Completion | None = None
        self.last_prefilled = 0  # tokens that the last turn had to read
        self.attempt = 0  # how often the last question was answered again
        self.interrupted = False
        self.job: Job | None = None  # of the last answer

    def ask(self, text: str) -> Generator[str]:
        """Answer a message, piece by piece (pieces may be empty). The chat keeps both."""
        self.attempt = 0
        yield from self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Generator[str]:
        """Answer the last message again; with sampling, under the next seed."""
        from medusa_jax import UserError

        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("nothing to regenerate")
        self.attempt += 1
        yield from self._answer(self.messages[:-1])

    def _answer(self, messages: list[dict[str, str]]) -> Generator[str]:
        """Answer the last of these messages. An answer that fails leaves the chat as it was before."""
        import dataclasses

        self.interrupted = False
        seed = (self.params.seed + self.attempt) % 2**32
        ids = self.lm.encode(messages, self.system)
        job = self.lm.job(ids, dataclasses.replace(self.params, seed=seed))
        try:
            if self.session is None:
                self.lm.compile_for([job], streaming=True)
                self.session = self.lm.session([job])
            self.job = job
            stream = self.session.stream(job)
            for piece in stream:
                yield piece
                if self.interrupted:
                    break
            stream.close()
        except Exception:
            self.forget()
            raise
        except BaseException:  # the reader has left
            self._keep(messages, job)
            raise
        self._keep(messages, job)

    def _keep(self, messages: list[dict[str, str]], job: Job) -> None:
        """Hold in the chat what was shown of an answer, whatever ended it."""
        from medusa_jax.completion import completion

        shown = "".join(job.pieces)
        self.messages = [*messages, {"role": "assistant", "content": shown}]
        self.last_prefilled = job.prefilled_tokens
        job.finish_reason = job.finish_reason or "interrupted"
        assert self.session is not None  # it has just answered
        self.last = completion(messages, job, self.session.engine.plan)

    def forget(self) -> None:
        """Drop the state of the row: after a failure it may be torn. The next turn reads everything anew."""
        if self.session is not None:
            self.session.forget()

    def why_cut(self) -> str | None:
        """Which limit ended the last answer, if one did, and what to do about it."""
        if self.job is None or self.job.finish_reason != "length":
            return None
        context = self.lm.config.max_position_embeddings
        if self.job.limit == context:
            return f"the model's context of {context} tokens is full; /undo or /reset makes room"
        return f"{self.job.params.max_new_tokens} new tokens are the limit; --max-new-tokens raises it"

    def undo(self) -> None:
        """Take back the last message and its answer."""
        from medusa_jax import UserError

        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise UserError("nothing to undo")
        self.messages, self.attempt = self.messages[: users[-1]], 0

    def reset(self) -> None:
        """Forget all messages."""
        self.messages, self.last, self.attempt = [], None, 0

    def save(self, path: Path) -> None:
        """Write the chat as one line of JSON that `infer.generate --prompts` reads too."""
        from medusa_jax.errors import write_atomically

        messages = self.messages
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        with interrupts.unwinding():
            write_atomically(path, (json.dumps({"messages": messages}, ensure_ascii=False) + "\n").encode())

    def load(self, path: Path) -> None:
        """Continue the chat in a file that `save` wrote."""
        from medusa_jax import UserError
        from medusa_jax.completion import messages_of
        from medusa_jax.errors import read_json

        raw = read_json(path).get("messages")
        if not isinstance(raw, list):
            raise UserError(f'{path}: expected {{"messages": [...]}}')
        try:
            messages = messages_of(raw, None) if raw else []
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        for number, message in enumerate(messages, 1):
            cli.check_text(message["role"] + message["content"], f"{path}: message {number}")
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        messages = messages[1:] if system is not None else messages
        roles = [message["role"] for message in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise UserError(f"{path}: expected user and assistant messages in turn, ending with an answer")
        self.system, self.messages, self.last, self.attempt = system, messages, None, 0

    def statistics(self) -> str:
        """The last answer's figures and the size of the chat."""
        from infer.generate import closing_line

        held = f"{len(self.messages)} messages"
        if self.session is not None:
            held += (
                f", {self.session.cached} tokens in the cache of {self.session.slots}"
                f" (context {self.lm.config.max_position_embeddings})"
            )
        if self.last is None:
            return held
        read = f"{self.last_prefilled} prompt tokens read"
        return f"last answer: {closing_line([self.last])}; {read}\nchat: {held}"


def command(chat: Chat, line: str, coloured: bool = False) -> bool:
    """Carry out a /command. Returns False when the chat is to end. Raises UserError for a wrong one."""
    from medusa_jax import UserError
    from medusa_jax.errors import user_path

    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/save", "/load") and not rest:
        raise UserError(f"{name}: expected a file name")
    if name in ("/quit", "/exit"):
        return False
    if name == "/reset":
        chat.reset()
        cli.note("(a new chat)")
    elif name == "/undo":
        chat.undo()
        cli.note(f"(taken back; {len(chat.messages)} messages left)")
    elif name == "/regenerate":
        before = chat.messages[-1:]
        show(chat, chat.regenerate(), coloured)
        if before == chat.messages[-1:] and chat.job is not None and not chat.job.params.temperature:
            cli.note("(the same answer: decoding is greedy; try --temperature)")
    elif name == "/save":
        chat.save(user_path(rest))
        cli.note(f"(saved to {rest})")
    elif name == "/load":
        chat.load(user_path(rest))
        cli.note(f"(loaded {len(chat.messages)} messages)")
    elif name == "/stats":
        cli.note(chat.statistics())
    elif name == "/help":
        cli.note(COMMANDS)
    else:
        raise UserError(f"{name}: unknown command; /help lists them")
    return True


def show(chat: Chat, pieces: Generator[str], coloured: bool = False) -> None:
    """Print an answer as it comes. Ctrl-C stops it between two tokens, so that no state is torn."""

    def interrupt(*_: Any) -> None:
        chat.interrupted = True

    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    colours, started = None, False
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                if coloured and colours is None and chat.job is not None:
                    colours = cli.Colours(chat.job)
                print(colours.paint(piece) if colours else piece, end="", flush=True)
                started = True
    finally:
        signal.signal(signal.SIGINT, before)
        if started:
            print(flush=True)
    if chat.interrupted:
        cli.note("(stopped)")
    elif why := chat.why_cut():
        cli.note(f"(cut: {why})")


def read_line() -> str | None:
    """The next line of input, None at its end. Ctrl-C at the prompt clears the line."""
    terminal = sys.stdin.isatty()
    while True:
        try:
            if terminal and not sys.stdout.isatty():  # input() would write the prompt among the answers
                print("> ", end="", file=sys.stderr, flush=True)
                return input()
            return input("> " if terminal else "")
        except EOFError:
            if terminal:  # the next prompt, the shell's, begins a line
                cli.note("")
            return None
        except UnicodeDecodeError as error:
            from medusa_jax import UserError

            raise UserError(f"standard input is not UTF-8 ({error})") from None
        except KeyboardInterrupt:
            if not terminal:
                raise
            cli.note("\n(Ctrl-D or /quit leaves)")


def make_parser() -> cli.Parser:
    """The command's flags."""
    made = cli.parser("infer.chat", "Talk with a language model.", EPILOG)
    made.add_argument("--system", metavar="TEXT", help='system message; "" removes the template\'s own')
    cli.add_sampling(made)
    cli.add_medusa(made)
    return made


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    made = make_parser()
    args = made.parse_args(argv)
    if sys.stdin is None:
        made.error("standard input is closed, expected the lines of a chat")
    terminal = sys.stdin.isatty()
    params = cli.sampling_params(args)

    def expect(lm: MedusaLM) -> Callable[[], None]:
        """Compile for a short first question while the weights are read; a longer one compiles its own."""
        job = lm.job(lm.encode("Hello!", args.system), params)
        return lambda: lm.compile_for([job], streaming=True)

    lm = cli.load_model(args, expect)
    cli.announce_defaults(lm, params)
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its history and line editing
        interrupts.hand_over()
        cli.note("Talk with the model; /help lists commands, Ctrl-D leaves.")
    status = converse(Chat(lm, params, args.system), args.show_accepted)
    return 0 if terminal else status


def converse(chat: Chat, show_accepted: bool = False) -> int:
    """Read and answer lines to their end. Returns 0, or what status the mistakes and failures deserve."""
    from infer.generate import closing_line
    from medusa_jax import UserError

    coloured = cli.show_colours(show_accepted)
    mistakes = failures = False
    while (line := read_line()) is not None:
        if not line.strip():
            continue
        last = chat.last
        try:
            cli.check_text(line, "the message")
            if not line.startswith("/"):
                show(chat, chat.ask(line), coloured)
            elif not command(chat, line.strip(), coloured):
                break
            if show_accepted and chat.last is not None and chat.last is not last:
                cli.note(closing_line([chat.last]))
        except UserError as error:  # neither a mistake nor a failure ends a chat
            mistakes = True
            cli.note(f"error: {error}")
        except BrokenPipeError:  # but nobody reads it any more
            raise
        except KeyboardInterrupt:  # at a terminal, in the midst of a command
            if not sys.stdin.isatty():
                raise
            chat.forget()
            cli.note("\n(stopped)")
        except Exception as error:  # noqa: BLE001 - whatever failed, the conversation is worth keeping
            failures = True
            chat.forget()
            cli.note(cli.failure(error))
    return 2 if mistakes else int(failures)


if __name__ == "__main__":
    cli.main(run)
