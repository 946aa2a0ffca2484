"""The contract of `python -m infer.generate`: output, exit status, messages.

Most tests call the command in this process, on a tiny model that is loaded once; what only a process of
its own can show (signals, pipes, the chatter of libraries) runs in one.
"""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny

from infer import cli, generate
from medusa_jax import MedusaLM, UserError
from medusa_jax import generate as library

KEYS = ["prompt", "text", "token_ids", "finish_reason", "stats"]
STATS = [
    "new_tokens",
    "steps",
    "tokens_per_step",
    "prefill_seconds",
    "decode_seconds",
    "tokens_per_second",
    "accepted_by_depth",
    "hits_by_node",
    "lossy",
]
PROMPTS = ["What is the answer?", "Hello!", "Rain falls", "the dog", "How are you?"]  # the second ends first


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def records(self) -> list[dict]:
        assert self.status == 0, self.err
        assert self.out.endswith("\n")
        return [json.loads(line) for line in self.out.removesuffix("\n").split("\n")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", tiny.lm())


@pytest.fixture(scope="session")
def loaded() -> dict:
    return {}


@pytest.fixture
def command(folder, loaded, capsys, monkeypatch):
    """Runs the command as `cli.main` does. A model is loaded once and used again."""
    load = MedusaLM.load

    def load_once(model, *, dtype, mesh, expect, progress, **guesses):
        key = (model, dtype, *guesses.values())
        if key not in loaded:
            loaded[key] = load(model, dtype=dtype, mesh=mesh, **guesses)
        expect(loaded[key])()
        return loaded[key]

    def run(*argv: str, stdin: bytes | None = None, model: Path | None = None) -> Result:
        text = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", text)
        capsys.readouterr()
        arguments = ["--model", str(model or folder), *argv]
        status = cli._status(lambda _: generate.run(arguments))
        return Result(status, *capsys.readouterr())

    monkeypatch.setattr(MedusaLM, "load", load_once)
    monkeypatch.setattr(library, "enable_compilation_cache", lambda: None)
    return run


def check_mistake(result: Result, fragment: str) -> None:
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.count("\n") == 1, result.err
    assert result.err.endswith("\n")
    assert fragment in result.err


def write_lines(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def without_times(record: dict) -> dict:
    stats = {name: value for name, value in record["stats"].items() if "second" not in name}
    return record | {"stats": stats}


# ------------------------------------------------------------------------------------------- results


def check_record(record: dict, most: int) -> None:
    assert list(record) == KEYS
    stats, ids = record["stats"], record["token_ids"]
    assert list(stats) == STATS
    assert stats["new_tokens"] == len(ids)
    assert sum(stats["accepted_by_depth"]) == stats["steps"]
    assert stats["steps"] == stats["new_tokens"], "plain decoding: a token a step"
    assert stats["tokens_per_step"] == 1
    assert stats["prefill_seconds"] > 0
    assert stats["decode_seconds"] >= 0
    seconds = stats["prefill_seconds"] + stats["decode_seconds"]
    assert stats["tokens_per_second"] == pytest.approx(len(ids) / seconds)
    assert len(ids) <= most
    assert (record["finish_reason"] == "stop") == (ids[-1] == 2)
    assert 2 not in ids[:-1]
    if record["finish_reason"] == "length":
        assert len(ids) == most
    assert record["text"] == tiny.tokenizer().decode(ids, skip_special_tokens=True)


def test_json_is_one_object_a_completion_in_input_order(command):
    result = command("--prompt", *PROMPTS, "--max-new-tokens", "30", "--json")
    assert [record["prompt"] for record in result.records] == PROMPTS
    for record in result.records:
        check_record(record, 30)
    assert {record["finish_reason"] for record in result.records} == {"stop", "length"}
    tokens = sum(len(record["token_ids"]) for record in result.records)
    line = rf"5 completions, {tokens} tokens in \d+\.\d s \(\d+\.\d tokens/s\), 1\.00 tokens/step\n"
    assert re.fullmatch(line, result.err)


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1.5", "--top-p", "0.9", "--seed", "3")])
def test_a_batch_gives_what_single_prompts_give(command, sampling):
    flags = ["--max-new-tokens", "30", "--json", *sampling]
    together = command("--prompt", *PROMPTS, "--batch-size", "3", *flags).records
    single = [command("--prompt", prompt, *flags).records[0] for prompt in PROMPTS]
    assert list(map(without_times, together)) == list(map(without_times, single))
    if sampling:
        assert together != command("--prompt", *PROMPTS, "--max-new-tokens", "30", "--json").records


def test_repeated_flags_add_up(command):
    result = command("--prompt", "a", "b", "--prompt", "c", "--max-new-tokens", "1", "--json")
    assert [record["prompt"] for record in result.records] == ["a", "b", "c"]


def test_the_stream_shows_the_text_of_the_json(command):
    record = command("--prompt", "Hello!", "--max-new-tokens", "30", "--json").records[0]
    result = command("--prompt", "Hello!", "--max-new-tokens", "30")
    assert (result.status, result.out) == (0, record["text"] + "\n")
    assert result.err.count("\n") == 1
    assert f"{len(record['token_ids'])} tokens in" in result.err
    two = command("--prompt", "Hello!", "the\n dog", "--max-new-tokens", "30")
    assert two.out.startswith(f"### Hello!\n{record['text']}\n\n### the dog\n")
    assert two.err.count("\n") == 2
    batch = command("--prompt", "Hello!", "the\n dog", "--max-new-tokens", "30", "--batch-size", "2")
    assert batch.out == two.out


def test_prompts_and_messages_from_a_file(command, tmp_path):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "the\u2028dog"},
    ]
    file = tmp_path / "prompts.jsonl"
    text = [{"prompt": "Rain"}, {"messages": messages}]
    # A byte order mark, blank lines, Windows line ends and a line separator inside a text.
    lines = [json.dumps(record, ensure_ascii=False) for record in text]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join([*lines, ""]).encode())
    records = command("--prompts", str(file), "--max-new-tokens", "5", "--json").records
    assert [record["prompt"] for record in records] == ["Rain", "the\u2028dog"]
    lm = tiny.lm()
    assert records[1]["text"] == lm.generate([messages], library.SamplingParams(max_new_tokens=5))[0].text
    assert (
        records[1]["text"]
        != command("--prompt", "the\u2028dog", "--max-new-tokens", "5", "--json").records[0]["text"]
    )


def test_standard_input_is_one_prompt(command):
    flags = ["--max-new-tokens", "5", "--json"]
    record = command(*flags, stdin="two\nlines é\n".encode()).records[0]
    assert record["prompt"] == "two\nlines é"
    assert without_times(record) == without_times(command("--prompt", "two\nlines é", *flags).records[0])


def test_system_and_raw_change_what_the_model_reads(command, monkeypatch):
    read: list[list[int]] = []
    job = MedusaLM.job

    def spy(self, ids, params=None):
        read.append(ids)
        return job(self, ids, params)

    monkeypatch.setattr(MedusaLM, "job", spy)
    for flags in ([], ["--system", "Be brief."], ["--system", ""], ["--raw"], ["--raw", "--system", ""]):
        assert command("--prompt", "Hi", "--max-new-tokens", "1", *flags).status == 0
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\n{}<|im_end|>\n"
    decode = tiny.tokenizer().decode
    expected = [system.format(tiny.SYSTEM) + asked, system.format("Be brief.") + asked, asked, "Hi", "Hi"]
    assert [decode(ids) for ids in read] == expected


def test_max_new_tokens_is_exact(command):
    for most in (1, 2, 7):
        record = command("--prompt", "What is the answer?", "--max-new-tokens", str(most), "--json").records[
            0
        ]
        check_record(record, most)
        assert record["finish_reason"] == "length"


def test_the_context_is_filled_to_its_last_token(command):
    lm = tiny.lm()
    prompt = "a" * 505
    known = len(lm.tokenizer(prompt)["input_ids"])
    context = lm.config.max_position_embeddings
    assert context - 30 < known < context
    record = command("--raw", "--prompt", prompt, "--max-new-tokens", "200", "--json").records[0]
    assert record["finish_reason"] == "length"
    assert record["stats"]["new_tokens"] == context - known
    # One token less than the context leaves room for one.
    full = "a" * (505 + context - 1 - known)
    record = command("--raw", "--prompt", full, "--max-new-tokens", "200", "--json").records[0]
    assert (record["finish_reason"], record["stats"]["new_tokens"]) == ("length", 1)
    check_mistake(command("--raw", "--prompt", full + "a"), f"the prompt has {context} tokens")
    two = command("--raw", "--prompt", "a", full + "a", "--max-new-tokens", "1")
    check_mistake(two, "prompt 2: the prompt has")


# --------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("batch", ["1", "2"])
def test_stop_strings_cut_text_and_ids(command, batch):
    flags = ["--prompt", *PROMPTS[:2], "--max-new-tokens", "30", "--json", "--batch-size", batch]
    free = command(*flags).records
    decode = tiny.tokenizer().decode
    text = free[0]["text"]
    stop = text[12:16]
    assert text.find(stop) == 12
    records = command(*flags, "--stop", "never there", stop).records
    cut = records[0]
    assert cut["text"] == text[:12]
    assert cut["finish_reason"] == "stop"
    # The ids end before the token that completes the stop string.
    count = len(cut["token_ids"])
    assert cut["token_ids"] == free[0]["token_ids"][:count]
    assert stop not in decode(cut["token_ids"])
    assert stop in decode(free[0]["token_ids"][: count + 1])
    for record in records:
        stats = record["stats"]
        assert stats["new_tokens"] == len(record["token_ids"])
        assert stats["steps"] == stats["new_tokens"] == sum(stats["accepted_by_depth"])
    if stop not in free[1]["text"]:
        assert without_times(records[1]) == without_times(free[1])
    assert command(*flags, "--stop", "never there", "--stop", stop).records[0]["text"] == text[:12]


def test_a_stop_string_at_once_gives_an_empty_answer(command):
    flags = ["--prompt", "Hello!", "--max-new-tokens", "30"]
    text = command(*flags, "--json").records[0]["text"]
    record = command(*flags, "--stop", text[0], "--json").records[0]
    assert (record["text"], record["token_ids"], record["finish_reason"]) == ("", [], "stop")
    assert (record["stats"]["steps"], record["stats"]["tokens_per_step"]) == (0, 0)
    assert command(*flags, "--stop", text[0]).out == "\n"


# ------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--temperature", "-1"], "temperature is -1.0, expected"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "inf"], "temperature is inf"),
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-p", "1.1"], "top_p is 1.1"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--top-k", "1.5"], "--top-k"),
        (["--min-p", "2"], "min_p is 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", str(2**32)], f"seed is {2**32}"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--stop", ""], "stop holds ''"),
        (["--stop", "a\udcff"], "--stop: not valid Unicode at character 2"),
        (["--system", "\ud800"], "--system: not valid Unicode"),
        (["--dtype", "int8"], "--dtype"),
        (["--mesh", "nonsense"], "mesh: 'nonsense'"),
        (["--mesh", "data=0"], "mesh: 'data=0'"),
        (["--mesh", "data=2,data=2"], "given twice"),
        (["--mesh", "tensor=64"], "mesh: tensor=64 needs 64 devices"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--temp", "1"], "unrecognized arguments"),  # no guessing what a flag may mean
        (["--prompts", "file.jsonl"], "--prompt and --prompts exclude each other"),
        (["--raw", "--system", "Be brief."], "system: a raw prompt has no system message"),
        (["--tree", "2x0"], "width 0 is not between"),
        (["--tree", "nothing"], "neither widths"),
        (["--tree", "/dev/zero"], "/dev/zero: a pipe, socket or device"),
        (["--tree", "2x3", "--lookup", "off"], "a tree needs guesses"),
        (["--epsilon", "2"], "epsilon is 2.0"),
        (["--delta", "-1"], "delta is -1.0"),
        (["--acceptance", "wrong"], "--acceptance"),
        (["--prompt", " \n"], "--prompt, text 2: the prompt is empty"),
        (["--show-accepted", "--json"], "--show-accepted is for streamed text"),
        (["--show-accepted", "--batch-size", "2"], "--show-accepted is for streamed text"),
        (["--no\nsuch\x1b"], "unrecognized arguments: --no such\ufffd"),
    ],
)
def test_a_wrong_flag(command, flags, fragment):
    check_mistake(command("--prompt", "Hello!", *flags), fragment)


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9", "--seed", "3")])
def test_lookup_gives_the_plain_text_in_fewer_steps(command, sampling):
    flags = ("--prompt", "Rain " * 8, "--max-new-tokens", "60", "--json", *sampling)
    plain = json.loads(command(*flags).out)
    fast = json.loads(command(*flags, "--lookup", "on", "--tree", "1x1x1").out)
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["text"] == plain["text"]
    stats = fast["stats"]
    assert len(stats["accepted_by_depth"]) == len(stats["hits_by_node"]) == 4
    assert stats["hits_by_node"][0] == stats["steps"]
    if not sampling:  # this model repeats itself when greedy, which lookup guesses
        assert stats["steps"] < 40


def test_plain_overrides_the_flags_of_medusa(command):
    medusa = ["--heads", "h", "--tree", "2x3", "--lookup", "on", "--acceptance", "typical"]
    result = command("--prompt", "Hello!", "--max-new-tokens", "3", *medusa, "--plain")
    assert result.status == 0
    assert result.out == command("--prompt", "Hello!", "--max-new-tokens", "3").out


def test_headers_show_no_control_characters(command):
    family = "\U0001f468\u200d\U0001f469"
    result = command("--prompt", f"a\x1b[31m\x07b\tc\u202e {family}", "b", "--max-new-tokens", "1")
    assert result.out.startswith(f"### a\ufffd[31m\ufffdb c\ufffd {family}\n")


def test_a_lossy_rule_is_named(command):
    lookup = ("--lookup", "on", "--tree", "1x1x1", "--max-new-tokens", "5", "--temperature", "1")
    typical = (*lookup, "--acceptance", "typical", "--prompt", "Hello!")
    assert command(*typical).err.endswith(", lossy (typical acceptance)\n")
    assert "tokens/step, lossy (typical acceptance)" in command(*typical, "Rain", "--batch-size", "2").err
    assert command(*typical, "--json").records[0]["stats"]["lossy"] is True
    assert "lossy" not in command(*lookup, "--prompt", "Hello!").err


def test_dtype_and_mesh_reach_the_model(command, monkeypatch):
    seen = {}

    def load(model, **options):
        seen.update(options)
        raise UserError("enough")

    monkeypatch.setattr(MedusaLM, "load", load)
    check_mistake(command("--prompt", "a", "--dtype", "bfloat16", "--mesh", "data=2,tensor=2"), "enough")
    assert seen["dtype"] == "bfloat16"
    assert dict(seen["mesh"].shape) == {"data": 2, "fsdp": 1, "tensor": 2}


@pytest.mark.parametrize("text", [b"", b"\n", b" \n\t"])
def test_empty_standard_input(command, text):
    check_mistake(command(stdin=text), "standard input is empty")


def test_standard_input_that_is_not_text(command):
    check_mistake(command(stdin=b"a\xffb"), "standard input is not UTF-8")


@pytest.mark.parametrize(
    ("lines", "fragment"),
    [
        (b"", "no prompts in it"),
        (b"\n \n", "no prompts in it"),
        (
            b'{"prompt": "a"}\n\n{"prompt": }\n',
            "line 3: not valid JSON (Expecting value at column 12)",
        ),
        (b'{"prompt": "  "}\n', "line 1: the prompt is empty"),
        (b'{"prompt": ' + b"1" * 9999 + b"}\n", "line 1: not valid JSON"),
        (b'{"prompt": "a"}\n"' + b"a" * 2**24, "line 2: more than 16,777,216 bytes"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2: expected"),
        (b'{"text": "a"}\n', "line 1: expected"),
        (b'{"prompt": 1}\n', "line 1: expected"),
        (b'{"prompt": "a", "messages": []}\n', "line 1: expected"),
        (b'{"messages": []}\n', "line 1: messages: expected at least one"),
        (b'{"messages": [{"role": "user"}]}\n', "line 1: message 1: expected"),
        (b'{"messages": ["a"]}\n', "line 1: message 1: expected"),
        (b'{"prompt": "\\ud800"}\n', "line 1: not valid Unicode"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "line 1: not valid Unicode"),
        (b"[" * 100_000 + b"\n", "line 1: not valid JSON"),
        (b"\xff\xfe\n", "not UTF-8"),
    ],
)
def test_a_wrong_prompt_file(command, tmp_path, lines, fragment):
    file = tmp_path / "p.jsonl"
    file.write_bytes(lines)
    result = command("--prompts", str(file))
    check_mistake(result, fragment)
    assert str(file) in result.err


def test_prompt_files_that_cannot_be_read(command, tmp_path):
    check_mistake(command("--prompts", str(tmp_path / "none")), "none: no such file")
    check_mistake(command("--prompts", str(tmp_path)), "is a directory, expected a file")
    check_mistake(command("--prompts", "/dev/zero"), "--prompts /dev/zero: a pipe, socket or device")
    os.mkfifo(tmp_path / "pipe")
    check_mistake(
        command("--prompts", str(tmp_path / "pipe")),
        "pipe: a pipe, socket or device, expected a regular file",
    )
    check_mistake(command("--prompts", "a\0b"), "not a name a file can have")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2 * 10**9)
    check_mistake(command("--prompts", str(tmp_path / "huge")), "huge: has 2,000,000,000 bytes")


def test_prompts_that_the_model_refuses(command, tmp_path):
    messages = write_lines(tmp_path / "m.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    check_mistake(command("--prompts", messages, "--raw"), "raw: the prompt is a list of messages")
    check_mistake(command("--prompt", "", "--raw"), "the prompt is empty")
    check_mistake(command("--prompt", "a\udcff"), "--prompt, text 1: not valid Unicode")
    wizard = write_lines(tmp_path / "w.jsonl", {"messages": [{"role": "wizard", "content": "a"}]})
    check_mistake(command("--prompts", wizard), "unknown role wizard")


def test_a_model_without_a_chat_template(command, tmp_path):
    lm = tiny.lm(template=None)
    lm.programs = tiny.lm().programs  # the template is not part of them
    bare = tiny.write_folder(tmp_path / "bare", lm)
    check_mistake(command("--prompt", "a", model=bare), "no chat template; give it plain text with --raw")


def test_models_that_cannot_be_opened(command, folder, tmp_path):
    missing = tmp_path / "missing"
    check_mistake(command("--prompt", "a", model=missing), str(missing))
    for absent in ("model.safetensors", "config.json", "tokenizer.json"):
        broken = tmp_path / absent
        shutil.copytree(folder, broken)
        (broken / absent).unlink()
        if absent == "tokenizer.json":
            (broken / "tokenizer_config.json").unlink()
        check_mistake(command("--prompt", "a", model=broken), str(broken))
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    weights = short / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    check_mistake(command("--prompt", "a", model=short), "not a whole safetensors file")


def test_other_failures_are_not_the_users(command, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the device\nis gone")

    monkeypatch.setattr(MedusaLM, "complete", fail)
    result = command("--prompt", "a", "--max-new-tokens", "1", "--json")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("failed: RuntimeError: the device is gone\n")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(MedusaLM, "complete", interrupt)
    assert command("--prompt", "a", "--max-new-tokens", "1", "--json").status == 130


def test_the_models_own_defaults_are_announced(command, tmp_path):
    own = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 4}
    folder = tiny.write_folder(tmp_path / "own", tiny.lm(), own)
    result = command("--prompt", "Hello!", "--temperature", "0", "--json", model=folder)
    assert result.records[0]["stats"]["new_tokens"] == 4
    assert result.err.splitlines()[0] == "the model's own defaults: max_new_tokens 4"


# ----------------------------------------------------------------------------- in a process of its own

# Decoding slowed down, so that there is time to interrupt it. A test runner in the background may have
# been told to ignore Ctrl-C; its children would inherit that.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from infer import cli, generate
from medusa_jax.schedule import Job
take = Job.take
def slow(*args):
    time.sleep(0.1)
    return take(*args)
Job.take = slow
cli.main(generate.run)
"""


COLOURS = re.compile(r"\x1b\[(?:32|39)m")


@pytest.mark.parametrize("stop", [(), ("over 日",)])
def test_accepted_guesses_in_colour(stop):
    """Painted text is the text; what is green is what guesses spelt, characters of several tokens too."""
    lm = tiny.lm()
    lm = MedusaLM(lm.config, lm.params, lm.tokenizer, {"eos_token_id": [2]})
    ids = lm.tokenizer(" jumps over 日本語 the lazy")["input_ids"]
    job = lm.job(lm.encode("a"), library.SamplingParams(stop=stop))
    colours = cli.Colours(job)
    painted, plain, guessed = "", "", []
    for first in range(0, len(ids), 3):  # steps of a root and two guesses
        for at, token in list(enumerate(ids))[first : first + 3]:
            job.pieces.append(job.text_stream.push(token))
            if job.text_stream.stopped:
                break
            job.token_ids.append(token)
            job.step_nodes.append(-1 if at % 3 else 2)
            guessed.append(bool(at % 3))
        piece = "".join(job.pieces)
        job.pieces.clear()
        painted, plain = painted + colours.paint(piece), plain + piece
        if job.text_stream.stopped:
            break
    else:
        rest = job.text_stream.finish()
        painted, plain = painted + colours.paint(rest), plain + rest
    assert plain == (" jumps " if stop else " jumps over 日本語 the lazy")
    assert COLOURS.sub("", painted) == plain
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[39m", painted))
    assert green
    if not stop:
        # Each token's own text; a character of several tokens belongs to the last of them.
        whole, expected = library.TextStream(lm.tokenizer), ""
        for token, guess in zip(ids, guessed, strict=True):
            text = whole.push(token)
            expected += text if guess else ""
        assert green == expected


def at_a_terminal(environment, *arguments: str) -> str:
    """What a command prints on a terminal of its own; its messages are not."""
    master, terminal = pty.openpty()
    with start(environment, *arguments, stdout=terminal) as process:
        os.close(terminal)
        shown = b""
        try:
            while select.select([master], [], [], 60)[0] and (part := os.read(master, 4096)):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(master)
        assert process.wait(timeout=60) == 0, process.stderr.read()
    return shown.decode().replace("\r\n", "\n")


def test_colours_only_on_a_terminal_that_wants_them(environment, folder, command):
    flags = ["--prompt", "Rain " * 8, "--max-new-tokens", "60", "--lookup", "on", "--tree", "1x1x1"]
    flags += ["--raw", "--repetition-penalty", "0.5"]  # this model seldom repeats itself otherwise
    plain = command(*flags, "--show-accepted").out
    assert "\x1b" not in plain
    program = ["-m", "infer.generate", "--model", str(folder), *flags, "--show-accepted"]
    environment = environment | {"TERM": "xterm"}
    coloured = at_a_terminal(environment, *program)
    assert COLOURS.sub("", coloured) == plain
    assert coloured.count("\x1b[32m") > 2
    assert at_a_terminal(environment | {"NO_COLOR": "1"}, *program) == plain


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return tiny.environment()


def start(environment, *arguments: str, **options) -> subprocess.Popen:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], cwd=tiny.ROOT, env=environment, **(pipes | options))


def test_ctrl_c_in_the_middle_of_an_answer(environment, folder):
    flags = ["--model", str(folder), "--prompt", "What is the answer?", "--max-new-tokens", "90"]
    with start(environment, "-c", SLOW, *flags) as process:
        shown = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    expected = tiny.lm().generate("What is the answer?", library.SamplingParams(max_new_tokens=90))[0].text
    assert len(shown + out) < len(expected)
    assert expected.encode().startswith(shown + out)
    assert err.split() == [b"interrupted"]


# A test runner in the background may have been told to ignore Ctrl-C; its children would inherit that.
LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def check_interrupted(process: subprocess.Popen) -> None:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert re.fullmatch(rb"(\d+ tokens in .*\n)?interrupted\n", err), (out, err)


def test_ctrl_c_at_any_moment(environment, folder):
    """Through imports, compiling and decoding: never a traceback, never another status."""
    flags = ["--model", str(folder), "--prompt", "What is the answer?", "--max-new-tokens", "400", "--json"]
    # As with -m, Ctrl-C is watched before anything else of the package runs. It comes too late never.
    code = (
        LISTEN + "from infer import interrupts; interrupts.watch(); print(flush=True)\n"
        "import time; from infer import generate, cli\n"
        "def program(_):\n generate.run(); print(flush=True); time.sleep(60)\n"
        "cli.main(program)"
    )
    whole = None
    for moment in range(9, -1, -1):
        with start(environment, "-c", code, *flags) as process:
            process.stdout.readline()
            began = time.monotonic()
            if whole is None:
                assert process.stdout.readline().startswith(b"{")
                whole = time.monotonic() - began
            else:
                time.sleep(moment / 9 * whole)
            process.send_signal(signal.SIGINT)
            check_interrupted(process)


def test_ctrl_c_that_a_library_swallows(environment, folder):
    """In foreign code that catches everything, in long C code, and made another error of."""
    for fault in (
        "while True:\n  try: time.sleep(9)\n  except BaseException: pass",
        "import numpy; numpy.sort(numpy.tile(numpy.arange(2e7), 9))  # C code, without Python's lock",
        "try: time.sleep(9)\nexcept BaseException: raise ImportError('no')",
    ):
        code = (
            f"{LISTEN}import time\nfrom infer import cli\n"
            f"def program(_):\n print(flush=True)\n {fault.replace(chr(10), chr(10) + ' ')}\n return 0\n"
            "cli.main(program)"
        )
        with start(environment, "-c", code) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            check_interrupted(process)


def test_ctrl_c_while_the_default_model_is_fetched(environment, tmp_path):
    """Temporary folders are taken away; an exception that was swallowed ends the process all the same."""
    for swallow in (False, True):
        code = (
            f"{LISTEN}import sys, tempfile, time\nfrom infer import cli, generate\n"
            "from medusa_jax.weights import hub\n"
            "def fetch():\n"
            " with tempfile.TemporaryDirectory(dir=sys.argv.pop()):\n"
            "  print(flush=True)\n"
            "  try: time.sleep(30)\n"
            f"  except KeyboardInterrupt:\n   if {not swallow}: raise\n"
            f"  time.sleep(30)\n"
            "hub.default_model = fetch\n"
            "cli.main(lambda _: generate.run(['--prompt', 'a']))"
        )
        place = tmp_path / str(swallow)
        place.mkdir()
        with start(environment, "-c", code, str(place)) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            check_interrupted(process)
        if not swallow:
            assert not list(place.iterdir())


def test_ctrl_c_that_is_ignored(environment, folder):
    """A shell's background job starts with it ignored."""
    flags = ["--model", str(folder), "--prompt", "What is the answer?", "--max-new-tokens", "9"]
    shell = ["-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "infer.generate"]
    with start(environment, *shell, *flags, executable="/bin/sh") as process:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_outputs_that_cannot_be_written(environment, tmp_path):
    """A closed standard output, and a full one: one line and status 1, before anything is loaded."""
    shell = ["-c", 'exec "$@" >&-', "sh", sys.executable, "-m"]
    for program, *flags in (
        ["infer.generate", "--prompt", "a"],
        ["infer.chat"],
        ["infer.generate", "--help"],
    ):
        with start(environment, *shell, program, *flags, executable="/bin/sh") as process:
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err.count(b"\n")) == (1, 1), err
        assert b"standard output is closed" in err
    if Path("/dev/full").exists():
        with (
            Path("/dev/full").open("wb") as full,
            start(environment, "-m", "infer.generate", "--help", stdout=full) as process,
        ):
            assert process.wait(timeout=60) == 1


def test_a_reader_that_leaves(environment, folder):
    """As in `... | head -c 10`: no traceback. Also: an output that is not UTF-8 by its locale."""
    flags = ["--model", str(folder), "--prompt", "What is the answer?", "--max-new-tokens", "90"]
    with start(environment | {"PYTHONIOENCODING": "ascii"}, "-c", SLOW, *flags) as process:
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert err == b""


def test_libraries_add_nothing_to_standard_error(environment, folder):
    """A mistake that only the loaded model shows is one line still; JSON is UTF-8 whatever the locale."""
    flags = ["-m", "infer.generate", "--model", str(folder)]
    with start(environment, *flags, "--raw", "--prompt", "a" * 600) as process:
        out, err = process.communicate(timeout=60)
    check_mistake(Result(process.returncode, out.decode(), err.decode()), "the prompt has 600 tokens")
    ascii_only = environment | {"PYTHONIOENCODING": "ascii"}
    with start(ascii_only, *flags, "--prompt", "é", "--max-new-tokens", "2", "--json") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["prompt"] == "é"
    assert '"é"'.encode() in out
    assert err.count(b"\n") == 1


def test_no_prompt_at_a_terminal(environment):
    master, terminal = pty.openpty()
    try:
        with start(environment, "-m", "infer.generate", stdin=terminal) as process:
            out, err = process.communicate(timeout=60)
    finally:
        os.close(master)
        os.close(terminal)
    check_mistake(Result(process.returncode, out.decode(), err.decode()), "no prompt: give --prompt")


def test_messages_never_go_to_standard_output(environment):
    """Not even where standard error was closed."""
    closed = ["-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "infer.generate"]
    with start(environment, *closed, "--prompt", "a", "--seed", "-1", executable="/bin/sh") as process:
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 2


def test_help_and_a_wrong_flag_do_not_wait_for_jax(environment):
    check = "import sys; from infer import generate, chat; generate.make_parser(); chat.make_parser()"
    with start(environment, "-c", check + "; print('jax' in sys.modules)") as process:
        assert process.communicate(timeout=60) == (b"False\n", b"")
    with start(environment, "-m", "infer.generate", "--help") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    for flag in ("--model", "--prompts", "--temperature", "--stop", "--mesh", "--json"):
        assert flag.encode() in out


@pytest.mark.default_model
def test_the_default_model(environment):
    """The README's first command: the small model, fetched once, in a process of its own."""
    environment = {k: v for k, v in environment.items() if k != "MEDUSA_JAX_CACHE"}
    if "MEDUSA_JAX_CACHE" in os.environ:
        environment["MEDUSA_JAX_CACHE"] = os.environ["MEDUSA_JAX_CACHE"]
    question = "What is the capital of France?"
    flags = ["--prompt", question, "--max-new-tokens", "24", "--json"]
    with start(environment, "-m", "infer.generate", *flags) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (record,) = [json.loads(line) for line in out.decode().splitlines()]
    assert list(record) == KEYS
    assert record["prompt"] == question
    assert "Paris" in record["text"]
    stats = record["stats"]
    assert 1 <= stats["new_tokens"] == len(record["token_ids"]) <= 24
    # The shipped heads are used, and some of their guesses hold.
    assert stats["steps"] == sum(stats["accepted_by_depth"]) < stats["new_tokens"]
    plain = start(environment, "-m", "infer.generate", *flags, "--plain")
    with plain as process:
        told = json.loads(process.communicate(timeout=300)[0])
    assert told["token_ids"] == record["token_ids"]
    assert told["stats"]["steps"] == told["stats"]["new_tokens"]
