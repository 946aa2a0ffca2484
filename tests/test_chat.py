"""infer.chat: a conversation keeps its cache, and answers what a fresh run on the same messages answers."""

import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
import tiny

from infer import chat as program
from infer import cli
from infer.chat import Chat
from medusa_jax import MedusaLM, SamplingParams, UserError
from medusa_jax import generate as library
from medusa_jax.schedule import Session
from medusa_jax.weights import hub

GREEDY = SamplingParams(max_new_tokens=30)
WARM = SamplingParams(max_new_tokens=30, temperature=1.0, seed=7)
LONG = "What is the answer?"  # its answer is cut by the limit


def say(chat: Chat, text: str) -> str:
    return "".join(chat.ask(text))


def fresh(messages: list[dict[str, str]], params: SamplingParams = GREEDY, system: str | None = None) -> str:
    """The answer of a run that knows nothing of the chat."""
    return "".join(tiny.lm().stream(messages, params, system=system))


def check_history(chat: Chat, *texts: str) -> None:
    roles = ["user", "assistant"] * (len(texts) // 2)
    assert chat.messages == [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


def test_turns_read_only_what_is_new():
    chat = Chat(tiny.lm(), GREEDY)
    said: list[str] = []
    before: list[int] = []
    for text in ("Hello!", LONG, "Rain"):
        answer = say(chat, text)
        assert answer == fresh([*chat.messages[:-2], {"role": "user", "content": text}])
        said += [text, answer]
        check_history(chat, *said)
        ids = tiny.lm().encode(chat.messages[:-1])
        assert ids[: len(before)] == before, "the template appends"
        if before:
            # At least the turn before is reused, up to where its answer was tokenised otherwise.
            assert 0 < chat.last_prefilled <= len(ids) - len(before)
        else:
            assert chat.last_prefilled == len(ids)
        before = ids
    assert chat.last is not None
    assert chat.last.text == said[-1]


def test_an_answer_that_ended_by_itself_is_read_from_the_cache():
    """Its tokens are those of the text again, so the next turn reads the new question only."""
    chat = Chat(tiny.lm(), GREEDY)
    answer = say(chat, "Hello!")
    assert chat.last is not None
    assert chat.last.finish_reason == "stop"
    first, ids = tiny.lm().encode([{"role": "user", "content": "Hello!"}]), chat.last.token_ids
    again = tiny.lm().tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), len(again))
    say(chat, "Rain")
    whole = tiny.lm().encode(chat.messages[:-1])
    assert chat.last_prefilled == len(whole) - len(first) - min(same, len(ids) - 1)


def test_regenerate_takes_the_next_seed():
    chat = Chat(tiny.lm(), WARM)
    answers = [say(chat, "Hello!")]
    question = chat.messages[:1]
    assert answers[0] == fresh(question, WARM)
    for attempt in (1, 2):
        answers.append("".join(chat.regenerate()))
        assert answers[-1] == fresh(question, dataclasses.replace(WARM, seed=WARM.seed + attempt))
        check_history(chat, "Hello!", answers[-1])
        assert chat.last_prefilled == 1, "the question is in the cache; its last token gives the logits"
    assert len(set(answers)) == 3
    say(chat, "Rain")  # under the first seed again
    assert chat.messages[-1]["content"] == fresh(chat.messages[:-1], WARM)
    chat.undo()
    "".join(chat.regenerate())
    assert chat.attempt == 1, "attempts are counted from the last change"


def test_regenerate_at_temperature_zero_repeats():
    chat = Chat(tiny.lm(), GREEDY)
    assert "".join(chat.ask("Hello!")) == "".join(chat.regenerate())


def test_undo_and_reset():
    chat = Chat(tiny.lm(), GREEDY)
    first = say(chat, "Hello!")
    say(chat, LONG)
    chat.undo()
    check_history(chat, "Hello!", first)
    rain = say(chat, "Rain")
    assert rain == fresh(chat.messages[:-1])
    chat.reset()
    check_history(chat)
    assert chat.last is None
    assert say(chat, "Rain") == fresh([{"role": "user", "content": "Rain"}])
    chat.undo()
    for empty in (chat.undo, lambda: list(chat.regenerate())):
        with pytest.raises(UserError, match="nothing to"):
            empty()


def test_save_and_load(tmp_path):
    chat = Chat(tiny.lm(), GREEDY, system="Be brief é.")
    say(chat, "Hello! é")
    file = tmp_path / "chat.json"
    chat.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["chat.json"]
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") == 1, "a line that infer.generate --prompts reads"
    assert json.loads(text)["messages"][0] == {"role": "system", "content": "Be brief é."}
    other = Chat(tiny.lm(), GREEDY)
    say(other, "Rain")
    other.load(file)
    assert (other.messages, other.system, other.last) == (chat.messages, chat.system, None)
    question = [*chat.messages, {"role": "user", "content": LONG}]
    assert say(other, LONG) == say(chat, LONG) == fresh(question, system="Be brief é.")
    chat.system = None
    chat.reset()
    chat.save(file)
    other.load(file)
    assert (other.messages, other.system) == ([], None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected .*messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "ending with an answer"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}',
            "in turn",
        ),
        ('{"messages": [{"role": "user"}]}', "message 1: expected"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\ud800"}]}',
            "message 2: not valid Unicode",
        ),
    ],
)
def test_a_file_that_is_no_chat(tmp_path, content, message):
    chat = Chat(tiny.lm(), GREEDY)
    chat.messages = before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "chat.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        chat.load(file)
    assert str(file) in str(caught.value)
    assert chat.messages == before


def test_a_chat_that_cannot_be_saved(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        Chat(tiny.lm(), GREEDY).save(tmp_path / "none" / "chat.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        Chat(tiny.lm(), GREEDY).save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_saving_touches_no_other_file(tmp_path):
    chat = Chat(tiny.lm(), GREEDY)
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "chat.json.partial").symlink_to(other)
    chat.save(tmp_path / "chat.json")
    assert other.read_text() == "kept"
    assert json.loads((tmp_path / "chat.json").read_text()) == {"messages": []}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.json", "chat.json.partial", "other"]


def test_the_cache_grows_with_the_chat():
    chat = Chat(tiny.lm(), GREEDY)
    say(chat, LONG)
    first = chat.session.slots
    while chat.session.slots == first:
        answer = say(chat, LONG)
        assert answer == fresh(chat.messages[:-1])
    assert chat.last_prefilled < len(tiny.lm().encode(chat.messages[:-1])) // 2
    assert say(chat, "Rain") == fresh(chat.messages[:-1])


def test_a_cache_lost_to_an_interrupt_is_built_anew():
    """An exception between a donation and its result leaves a deleted state; the next text may be longer."""
    chat = Chat(tiny.lm(), GREEDY)
    say(chat, LONG)
    slots = chat.session.slots
    chat.session.state.known.delete()
    text = "the dog " * (slots // 2)
    assert say(chat, text) == fresh(chat.messages[:-1])
    assert chat.last_prefilled == len(tiny.lm().encode(chat.messages[:-1]))
    assert chat.session.slots > slots


def test_a_full_context_does_not_end_the_chat():
    chat = Chat(tiny.lm(), GREEDY)
    answer = say(chat, "Hello!")
    context = tiny.lm().config.max_position_embeddings
    with pytest.raises(UserError, match=f"context of {context}"):
        say(chat, "a" * context)
    check_history(chat, "Hello!", answer)
    assert say(chat, "Rain") == fresh(chat.messages[:-1])


# --------------------------------------------------------------------------------------------- Ctrl-C


@pytest.fixture
def listening():
    """Ctrl-C as Python handles it: a test runner in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(chat: Chat, text: str, after: int):
    """An answer whose reader presses Ctrl-C after some pieces."""
    for count, piece in enumerate(chat.ask(text), 1):
        yield piece
        if count == after:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("listening")
def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(capsys):
    handler = signal.getsignal(signal.SIGINT)
    whole = fresh([{"role": "user", "content": LONG}])
    chat = Chat(tiny.lm(), GREEDY)
    program.show(chat, interrupted(chat, LONG, after=6))
    out, err = capsys.readouterr()
    said = out.removesuffix("\n")
    assert 0 < len(said) < len(whole)
    assert whole.startswith(said)
    assert err == "(stopped)\n"
    check_history(chat, LONG, said)
    assert chat.last is not None
    assert chat.last.stats.new_tokens == chat.last.stats.steps == 6
    assert signal.getsignal(signal.SIGINT) is handler
    program.show(chat, chat.ask("Rain"))
    assert capsys.readouterr().out == fresh(chat.messages[:-1]) + "\n"
    # Stopped again at its first token, and answered again in full.
    program.show(chat, interrupted(chat, "the dog", after=1))
    program.show(chat, chat.regenerate())
    assert chat.messages[-1]["content"] == fresh(chat.messages[:-1])


def test_a_reader_that_leaves_in_the_middle():
    chat = Chat(tiny.lm(), GREEDY)
    answer = chat.ask(LONG)
    said = "".join(next(answer) for _ in range(5))
    answer.close()
    check_history(chat, LONG, said)
    assert say(chat, "Rain") == fresh(chat.messages[:-1])


# ---------------------------------------------------------------------------------------- the command


@pytest.fixture
def talk(capsys, monkeypatch):
    """Runs the command in this process on lines of standard input; returns status, output and messages."""

    def load(model, *, dtype, mesh, expect, progress, **guesses):
        assert (model, dtype, mesh) == (None, None, None)
        expect(tiny.lm())()
        return tiny.lm()

    def run(*lines: str, flags: tuple[str, ...] = (), raw: bytes | None = None) -> tuple[int, str, str]:
        text = raw if raw is not None else "".join(line + "\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        capsys.readouterr()
        status = cli._status(lambda _: program.run(["--max-new-tokens", "30", *flags]))
        return status, *capsys.readouterr()

    monkeypatch.setattr(MedusaLM, "load", load)
    monkeypatch.setattr(hub, "default_model", lambda: None)
    monkeypatch.setattr(library, "enable_compilation_cache", lambda: None)
    return run


def test_a_scripted_chat(talk, tmp_path):
    chat = Chat(tiny.lm(), GREEDY)
    hello, rain = say(chat, "Hello!"), say(chat, "Rain")
    file = tmp_path / "chat.json"
    commands = [
        "/stats",
        "/undo",
        f"/save {file}",
        "/reset",
        "/undo",
        f"/load {file}",
        "/regenerate",
        "/help",
    ]
    status, out, err = talk("Hello!", "", "Rain", *commands, "/quit", "never asked")
    assert status == 2, "one of them was a mistake"
    assert out == f"{hello}\n{rain}\n{hello}\n"
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["Hello!", hello]
    for part in (
        "chat: 4 messages",
        "tokens in the cache of 128 (context 512)",
        "(taken back; 2 messages left)",
        f"(saved to {file})",
        "(a new chat)",
        "error: nothing to undo",
        "(loaded 2 messages)",
        "(the same answer: decoding is greedy; try --temperature)",
        "/regenerate     answer again",
    ):
        assert part in err


def test_mistakes_in_a_chat_do_not_end_it(talk, tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    lines = ["/frobnicate now", "/save", "/load", f"/load {tmp_path / 'none'}", "/regenerate", "a" * 600]
    lines += [
        f"/load {deep}",
        "/load ~nobody-of-that-name/x",
        "/save ~nobody-of-that-name/x",
        "/save .",
        "/save /",
    ]
    lines += ["/save a\0b", "/load a\0b", "/load /dev/zero", f"/load {tmp_path / 'pipe'}", "/save /dev/null"]
    status, out, err = talk(*lines, "Hello!")
    assert status == 2
    assert out == fresh([{"role": "user", "content": "Hello!"}]) + "\n"
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(lines)
    assert errors[0] == "error: /frobnicate: unknown command; /help lists them"


def test_a_failure_does_not_end_a_chat(talk, monkeypatch):
    """Whatever fails: one line, the messages stay, and the next answer is read from the beginning."""
    hello = fresh([{"role": "user", "content": "Hello!"}])
    stream, calls = Session.stream, []

    def failing(self, job):
        calls.append(job)
        pieces = stream(self, job)
        for count, piece in enumerate(pieces):
            yield piece
            if len(calls) == 2 and count == 3:
                raise ZeroDivisionError("the device\nis gone")

    monkeypatch.setattr(Session, "stream", failing)
    status, out, err = talk("Hello!", LONG, "/stats", "/regenerate")
    assert status == 1
    assert "failed: ZeroDivisionError: the device is gone\n" in err
    assert "chat: 2 messages, 0 tokens in the cache" in err
    lines = out.splitlines()
    assert (lines[0], lines[-1]) == (hello, hello)
    assert calls[2].prefilled_tokens == len(calls[2].prompt_ids)
    calls.clear()
    assert talk("Hello!", LONG, "/nothing")[0] == 2


def test_a_reader_of_answers_that_leaves_ends_the_chat(talk, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(Session, "stream", gone)
    assert talk("Hello!", "Hello!") == (1, "", "")


def test_an_answer_cut_by_a_limit_is_said_to_be(talk):
    assert "(cut: 30 new tokens are the limit; --max-new-tokens raises it)" in talk(LONG)[2]
    assert "(cut" not in talk("Hello!")[2]
    text = "a" * 600
    while len(tiny.lm().tokenizer(text)["input_ids"]) > 462:  # with the template a few less than the context
        text = text[1:]
    full = talk(text, flags=("--max-new-tokens", "2000"))[2]
    assert "(cut: the model's context of 512 tokens is full; /undo or /reset makes room)" in full


def test_tokens_a_step_are_shown_where_wanted(talk):
    flags = ("--show-accepted", "--temperature", "1", "--seed", "7")
    status, out, err = talk("Hello!", "/regenerate", "/stats", flags=flags)
    assert status == 0
    assert "\x1b" not in out
    assert err.count("tokens/step") == 3
    assert "the same answer" not in err


def test_flags_of_a_chat(talk):
    asked = [{"role": "user", "content": "Hello!"}]
    assert talk("Hello!", flags=("--system", ""))[1] == fresh(asked, system="") + "\n"
    warm = ("--temperature", "1", "--seed", "7")
    assert talk("Hello!", flags=warm)[1] == fresh(asked, WARM) + "\n"
    for flags, fragment in (
        (("--prompt", "a"), "unrecognized arguments"),
        (("--top-p", "0"), "top_p is 0.0"),
    ):
        status, out, err = talk("Hello!", flags=flags)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert fragment in err
    status, out, err = talk(raw=b"Hello!\na\xff\n")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: standard input is not UTF-8")


# Opening it makes the terminal the one whose Ctrl-C this process gets.
AT_A_TERMINAL = """
import os, signal
os.open(os.ttyname(0), os.O_RDWR)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from infer import chat, cli
cli.main(chat.run)
"""


def test_a_chat_at_a_terminal(tmp_path):
    """Through a pseudo-terminal: prompt, answer, Ctrl-C at the prompt, Ctrl-D."""
    folder = tiny.write_folder(tmp_path / "tiny", tiny.lm())
    environment = tiny.environment() | {"TERM": "dumb"}
    master, terminal = pty.openpty()
    flags = ["--model", str(folder), "--max-new-tokens", "30"]
    process = subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, *flags],
        cwd=tiny.ROOT,
        env=environment,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    screen = b""

    def wait_for(part: bytes) -> None:
        nonlocal screen
        end = time.monotonic() + 240  # a busy machine compiles slowly
        while part not in screen:
            ready, _, _ = select.select([master], [], [], end - time.monotonic())
            assert ready, screen
            screen += os.read(master, 4096)
        screen = screen.partition(part)[2]

    def wait_until_reading() -> None:
        """A Ctrl-C between the prompt and the line editor's wait for keys is kept back until the next key."""
        end = time.monotonic() + 240  # a busy machine compiles slowly
        while termios.tcgetattr(master)[3] & termios.ICANON:  # the editor takes the terminal's own away
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.3)

    try:
        wait_for(b"Talk with the model")
        wait_for(b"> ")
        os.write(master, b"Hello!\n")
        wait_for(fresh([{"role": "user", "content": "Hello!"}]).encode())
        wait_for(b"> ")
        wait_until_reading()
        os.write(master, b"half a line\x03")
        wait_for(b"(Ctrl-D or /quit leaves)")
        wait_for(b"> ")
        os.write(master, b"\x04")
        wait_for(b"\n")  # the shell's prompt begins a line
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
