"""train.distill: answers in order, the same after an interruption, several turns, and what it refuses."""

import json
from pathlib import Path

import pytest
import tiny

from medusa_jax import SamplingParams, UserError
from train import conversations, distill


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", tiny.lm())


QUESTIONS = [
    "What is rain?",
    "Who is the fox?",
    "Is a dog lazy?",
    "How are you?",
    "What is a year?",
    "Who is the fox?",
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def flags(model, prompts, output, *more):
    given = [
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--output",
        str(output),
        "--max-new-tokens",
        "12",
    ]
    return [*given, "--batch-size", "4", *more]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("prompts") / "q.jsonl", [{"prompt": q} for q in QUESTIONS])


def test_answers_are_the_models_in_order_each_with_its_seed(model, prompts, tmp_path):
    output = tmp_path / "a.jsonl"
    assert distill.run(flags(model, prompts, output, "--seed", "5")) == 0
    found = lines(output)
    assert [one["messages"][0]["content"] for one in found] == QUESTIONS
    for number, one in enumerate(found):
        params = SamplingParams(max_new_tokens=12, temperature=0.3, seed=5 + number)
        done = tiny.lm().generate(QUESTIONS[number], params)[0]
        assert one["messages"][1] == {"role": "assistant", "content": done.text}
        assert one["finish_reason"] == done.finish_reason
    assert not list(tmp_path.glob("*.partial"))
    assert len(conversations.read(output)) == len(QUESTIONS)


@pytest.mark.parametrize("answers", [0, 1, 4])
def test_a_killed_run_goes_on_without_doubles_or_losses(model, prompts, tmp_path, monkeypatch, answers):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "a.jsonl"
    assert distill.run(flags(model, prompts, whole)) == 0
    added, add = [], distill.Journal.add

    def killed(self, *record):
        if len(added) == answers:
            self._file.write(b'{"conversation": 3, "tu')  # a line that was being written
            self._file.flush()
            raise KeyboardInterrupt
        added.append(record)
        add(self, *record)

    with monkeypatch.context() as patch:
        patch.setattr(distill.Journal, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            distill.run(flags(model, prompts, output))
    assert not output.exists()
    again = []
    monkeypatch.setattr(
        distill.Journal, "add", lambda self, *record: (again.append(record[0]), add(self, *record))
    )
    assert distill.run(flags(model, prompts, output)) == 0
    assert output.read_bytes() == whole.read_bytes()
    assert sorted([*(record[0] for record in added), *again]) == list(range(len(QUESTIONS)))


def test_a_journal_of_other_settings_is_not_continued(model, prompts, tmp_path, monkeypatch):
    output = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(distill, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            distill.run(flags(model, prompts, output))
    with pytest.raises(UserError, match=r"a.jsonl.partial: left by a run with another model"):
        distill.run(flags(model, prompts, output, "--seed", "9"))


@pytest.mark.parametrize("damaged", [b"\0\0\0\0", b"{}", b'{"conversation": 0, "turn": 0, "text": 3}'])
def test_a_damaged_line_of_the_journal_is_named(tmp_path, damaged):
    with distill.Journal(tmp_path / "a.jsonl", "f") as journal:
        journal.add(0, 0, "text", "stop", False)
    path = tmp_path / "a.jsonl.partial"
    path.write_bytes(path.read_bytes() + damaged + b"\n" + path.read_bytes().split(b"\n")[1] + b"\n")
    with (
        distill.Journal(tmp_path / "a.jsonl", "f") as journal,
        pytest.raises(UserError, match=r"a.jsonl.partial: line 3 is damaged"),
    ):
        journal.read()


def test_a_full_disk_is_named(tmp_path):
    with distill.Journal(tmp_path / "a.jsonl", "f") as journal:
        journal._file.close()
        journal._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the journal closes it
        with pytest.raises(UserError, match=r"a.jsonl.partial: cannot be written \(No space"):
            journal.add(0, 0, "text", "stop", False)


def test_nothing_to_write_keeps_the_answers(model, prompts, tmp_path):
    output = tmp_path / "a.jsonl"
    short = ["--max-new-tokens", "1", "--unfinished", "drop"]
    with pytest.raises(UserError, match="no answer to write: 0 prompts too long, 6 answers unfinished"):
        distill.run(flags(model, prompts, output, *short))
    assert not output.exists()
    assert distill.run(flags(model, prompts, output, *short[:2])) == 0  # from the journal
    assert len(lines(output)) == 6


def test_replay_asks_every_turn_of_the_model_itself(model, tmp_path):
    chat = [
        {"from": "gpt", "value": "dropped"},
        {"from": "human", "value": "What is rain?"},
        {"from": "gpt", "value": "not this"},
        {"from": "human", "value": "And snow?"},
    ]
    prompts = tmp_path / "chats.json"
    prompts.write_text(json.dumps([{"id": "a_0", "conversations": chat}]))
    output = tmp_path / "a.jsonl"
    assert (
        distill.run(
            flags(model, prompts, output, "--replay", "--temperature", "0", "--max-new-tokens", "200")
        )
        == 0
    )
    (found,) = lines(output)
    params = SamplingParams(max_new_tokens=200, temperature=0)
    first = tiny.lm().generate([[{"role": "user", "content": "What is rain?"}]], params)[0]
    assert found["messages"][1]["content"] == first.text
    if first.finish_reason == "length":
        assert len(found["messages"]) == 2
        assert found["finish_reason"] == "length"
    else:
        assert found["messages"][2]["content"] == "And snow?"
        second = tiny.lm().generate([found["messages"][:3]], params)[0]
        assert found["messages"][3]["content"] == second.text
    one = tmp_path / "one.jsonl"
    assert distill.run(flags(model, prompts, one, "--temperature", "0")) == 0
    assert len(lines(one)[0]["messages"]) == 2


def test_unfinished_answers_are_marked_or_dropped(model, prompts, tmp_path):
    marked, dropped = tmp_path / "m.jsonl", tmp_path / "d.jsonl"
    distill.run(flags(model, prompts, marked))
    distill.run(flags(model, prompts, dropped, "--unfinished", "drop"))
    finished = [one for one in lines(marked) if one["finish_reason"] == "stop"]
    assert lines(dropped) == finished
    assert len(finished) < len(QUESTIONS)


def test_long_prompts_are_left_out(model, tmp_path, capsys):
    prompts = write(tmp_path / "q.jsonl", [{"prompt": "rain " * 50}, {"prompt": "Hello!"}])
    output = tmp_path / "a.jsonl"
    assert distill.run(flags(model, prompts, output, "--max-prompt-tokens", "40")) == 0
    assert [one["messages"][0]["content"] for one in lines(output)] == ["Hello!"]
    assert "1 left out as too long" in capsys.readouterr().err


def test_mistakes(model, prompts, tmp_path):
    output = tmp_path / "a.jsonl"
    output.write_text("")
    with pytest.raises(UserError, match="exists"):
        distill.run(flags(model, prompts, output))
    with pytest.raises(UserError, match="no such file"):
        distill.run(flags(model, tmp_path / "none.jsonl", tmp_path / "b.jsonl"))
    empty = write(tmp_path / "e.jsonl", [{"messages": [{"role": "system", "content": "x"}]}])
    with pytest.raises(UserError, match="prompt 1 has no user's turn"):
        distill.run(flags(model, empty, tmp_path / "b.jsonl"))
    long = write(tmp_path / "l.jsonl", [{"prompt": "Hello!"}, {"prompt": "rain " * 3000}])
    with pytest.raises(UserError, match="prompt 2: the prompt has"):
        distill.run(flags(model, long, tmp_path / "b.jsonl"))
    assert not list(tmp_path.glob("b.jsonl*"))


def test_looping():
    from medusa_jax.text import looping

    assert not looping(list(range(60)))
    assert looping(list(range(12)) * 4)
    assert not looping(list(range(12)) * 3)  # each run of ten three times
    assert not looping([])
