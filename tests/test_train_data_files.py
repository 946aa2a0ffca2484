"""Files of training data: what is read, and what is said of their faults."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from medusa_jax import UserError, errors
from train import conversations


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def turns(*texts: str) -> dict:
    return {"messages": [(user, assistant)[i % 2](text) for i, text in enumerate(texts)]}


def shared(*texts: str, **fields) -> dict:
    sides = "human", "gpt"
    return {
        "conversations": [{"from": sides[i % 2], "value": text} for i, text in enumerate(texts)],
        **fields,
    }


GOOD = turns("Hello!", "How are you?")


def lines_file(path: Path, *records) -> Path:
    """Records as JSON lines; texts and bytes as they are."""
    lines = [
        r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in records
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_four_kinds_of_record(tmp_path):
    path = lines_file(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "system", "content": "Be."}, user("Hello!"), assistant("How?")], "id": 3},
        shared("Hello!", "How?", "Rain?"),
        {"prompt": "Hello!", "completion": "How?", "source": "x"},
        {"text": "The dog."},
    )
    found = conversations.read(path)
    assert [one.messages for one in found] == [
        [{"role": "system", "content": "Be."}, user("Hello!"), assistant("How?")],
        [user("Hello!"), assistant("How?"), user("Rain?")],
        [user("Hello!"), assistant("How?")],
        None,
    ]
    assert [one.text for one in found] == [None, None, None, "The dog."]
    assert [one.where for one in found] == [f"{path}, line {n}" for n in (1, 2, 3, 4)]
    assert not any(one.open_end for one in found)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("kind", ["json", "json.gz"])
def test_a_json_array(tmp_path, indent, kind):
    path = tmp_path / f"a.{kind}"
    text = " \n" + json.dumps([shared("Hello!", "How?"), GOOD, shared("Ü 😀", "日本")], indent=indent) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    found = conversations.read(path)
    assert [one.where for one in found] == [f"{path}, record {n}" for n in (1, 2, 3)]
    assert found[2].messages == [user("Ü 😀"), assistant("日本")]


def test_lines_may_be_compressed_blank_and_marked(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    separator = json.dumps(turns("a", "b\u2028c"), ensure_ascii=False)
    text = "\ufeff" + json.dumps(GOOD) + "\r\n\n  \n" + separator  # U+2028 ends no line, nor does the file
    path.write_bytes(gzip.compress(text.encode()))
    found = conversations.read(path)
    assert [one.where for one in found] == [f"{path}, line {n}" for n in (1, 4)]
    assert found[1].messages == [user("a"), assistant("b\u2028c")]


def test_sharegpt_as_it_is_found(tmp_path):
    """Conversations in parts begin with an answer; some are empty. Other models answer too."""
    path = lines_file(
        tmp_path / "a.jsonl",
        {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "Hi"}], "id": "abc_17"},
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "x"}]},
        {"conversations": [{"from": "system", "value": "Be."}, {"from": "gpt", "value": "x"}]},
        {
            "conversations": [
                {"from": "system", "value": "Be."},
                {"from": "gpt", "value": "x"},
                {"from": "user", "value": "Hi", "markdown": None},
                {"from": "chatgpt", "value": "Ho"},
            ]
        },
    )
    found = conversations.read(path)
    system = {"role": "system", "content": "Be."}
    assert [one.messages for one in found] == [
        [user("Hi")],
        [],
        [],
        [],
        [system, user("Hi"), assistant("Ho")],
    ]
    assert found[0].group == "abc"


def test_what_distill_writes(tmp_path):
    """Cut-off answers have an open end; looping ones can be left out."""
    path = lines_file(
        tmp_path / "a.jsonl",
        GOOD | {"finish_reason": "stop", "looping": False},
        GOOD | {"finish_reason": "length", "looping": True},
        GOOD | {"finish_reason": None},
    )
    assert [one.open_end for one in conversations.read(path)] == [False, True, False]
    counts = Counter()
    assert len(conversations.read(path, drop_looping=True, counts=counts)) == 2
    assert counts == Counter(looping=1, bad=0)


ONE_OF = 'expected one of "messages", "conversations", "prompt" with "completion", "text"'
BAD_RECORDS = {
    '{"messages": [': r"not valid JSON \(.* at column 15\)",
    "not json": r"not valid JSON",
    b'{"text": "caf\xe9"}': r"not UTF-8 \(invalid continuation byte at byte 14\)",
    "[" * 100_000: r"not valid JSON \(nested too deeply\)",
    "3": "found 3, expected an object with one of",
    "{}": f"found fields \\[\\], {ONE_OF}",
    '{"prompt": "a"}': rf"found fields \['prompt'\], {ONE_OF}",
    '{"text": "a", "messages": []}': f'found "messages" and "text", {ONE_OF}',
    '{"text": null}': '"text" is None, expected a text',
    '{"text": "\\ud83d"}': r'"text" is not valid Unicode \(at character 1\)',
    '{"prompt": "a", "completion": ["b"]}': '"completion" is a list, expected a text',
    '{"messages": {"role": "user"}}': '"messages" is an object, expected a list',
    '{"messages": ["Hi"]}': r"""1 of "messages": found 'Hi', expected \{"role": text, "content": text\}""",
    '{"messages": [{"from": "human", "value": "Hi"}]}': r"found fields \['from', 'value'\], expected \{",
    '{"messages": [{"role": "user"}]}': r"message 1 of \"messages\": found fields \['role'\]",
    '{"messages": [{"role": "user", "content": 3}]}': '"content" is 3, expected a text',
    '{"messages": [{"role": "user", "content": "\\udc00"}]}': r'"content" is not valid Unicode',
    '{"messages": [{"role": "tool", "content": ""}]}': r"\"role\" is 'tool', expected system, user or assi",
    '{"messages": [{"role": "human", "content": ""}]}': r"\"role\" is 'human', expected system, user or assi",
    '{"conversations": [{"from": [], "value": ""}]}': r"\"from\" is \[\], expected system, user, assistant,",
    json.dumps({"messages": [assistant("a")]}): r"\"role\" is 'assistant', expected system or user",
    json.dumps({"messages": [user("a"), user("b")]}): r"message 2 .* 'user' after user, expected assistant",
    json.dumps(shared("a", "b", "c")).replace("human", "gpt"): None,  # only answers: no question, no label
    json.dumps(shared("a", "b", "c", "d")).replace("gpt", "human"): r"message 2 .*'human' after user",
    json.dumps({"messages": [user("a"), {"role": "system", "content": "b"}]}): r"'system' after user",
    json.dumps(GOOD | {"finish_reason": 3}): '"finish_reason" is 3, expected "stop" or "length"',
    json.dumps(GOOD | {"looping": "yes"}): "\"looping\" is 'yes', expected true or false",
    '{"text": "a", "n": ' + "9" * 5000 + "}": r"not valid JSON \(Exceeds the limit",
}


@pytest.mark.parametrize("record", BAD_RECORDS)
def test_bad_records_are_named(tmp_path, record):
    path = lines_file(tmp_path / "a.jsonl", GOOD, "", record, GOOD)
    if BAD_RECORDS[record] is None:
        assert len(conversations.read(path)) == 3
        return
    with pytest.raises(UserError, match=BAD_RECORDS[record]) as error:
        conversations.read(path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert "other" not in str(error.value)
    counts = Counter()
    assert len(conversations.read(path, skip_bad=True, counts=counts)) == 2
    assert counts["bad"] == 1


def test_all_lines_are_checked(tmp_path):
    bad = {"text": 3}
    path = lines_file(
        tmp_path / "a.jsonl", GOOD, GOOD, bad, GOOD, GOOD, GOOD, "{", GOOD, bad, *[GOOD] * 2, bad
    )
    message = r'a.jsonl, line 3: "text" is 3, expected a text \(and 3 other lines: 7, 9, 12\)$'
    with pytest.raises(UserError, match=message):
        conversations.read(path)
    with pytest.raises(UserError, match=r"\(and 1 other line: 2\)$"):
        conversations.read(lines_file(path, bad, bad))
    with pytest.raises(UserError, match=r"\(and 1,499 other lines: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...\)$"):
        conversations.read(lines_file(path, *[bad] * 1500))
    with pytest.raises(UserError, match=r"line 1: .* \(and 1 other line"):
        conversations.read(lines_file(path, bad, bad), skip_bad=True)  # nothing is left


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "LONGEST_LINE", 120)
    path = lines_file(tmp_path / "a.jsonl", GOOD, {"text": "x" * 350}, GOOD, {"text": "y" * 105}, {"text": 3})
    with pytest.raises(UserError, match=r"line 2: more than 120 bytes, .* \(and 1 other line: 5\)$"):
        conversations.read(path)


ARRAY = json.dumps([GOOD, GOOD, {"text": 3}, GOOD], indent=1)
BAD_ARRAYS = {
    ARRAY: (r'record 3: "text" is 3, expected a text$', 3),
    ARRAY[:-30]: (r"record 3: .* \(and 1 other record: 4\)$", 2),
    ARRAY.replace("3\n", "4\n")[:-2]: (r"record 3: \"text\" is 4.*\(and 1 other record: 4\)$", 2),
    json.dumps([GOOD, GOOD])[:-20]: (
        r"record 2: not valid JSON \(the file ends inside the array, at line 1, column \d+\)$",
        1,
    ),
    json.dumps([GOOD])[:-1]: (r"record 1: not valid JSON \(the file ends inside the array", 0),
    json.dumps([GOOD, GOOD]).replace("}, {", "} {"): None,
    json.dumps([GOOD, GOOD]) + "\n[]": (r"record 3: '\[\]' behind the JSON array, expected the end", 2),
    f"[{json.dumps(GOOD)},]": (r"record 2: not valid JSON \(Expecting value, at line 1", 1),
    json.dumps([[GOOD], GOOD]): (r"record 1: found a list, expected an object with", 1),
    json.dumps([GOOD, shared("caf\ufffd", "b")], ensure_ascii=False): None,
    '[{"text": "a"}, {"text": "\\ud800"}]': (r"record 2: \"text\" is not valid Unicode", 1),
    "[" * 100_000: (r"record 1: not valid JSON \(nested too deeply", 0),
}


@pytest.mark.parametrize("text", [text for text, found in BAD_ARRAYS.items() if found])
def test_damaged_arrays(tmp_path, text):
    message, left = BAD_ARRAYS[text]
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        conversations.read(path)
    assert str(error.value).startswith(f"{path}, record ")
    if left:
        assert len(conversations.read(path, skip_bad=True)) == left
    else:
        with pytest.raises(UserError):
            conversations.read(path, skip_bad=True)


def test_an_array_that_is_not_utf8(tmp_path):
    """The record that has the bytes is named, and only it is left out."""
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps([GOOD, {"text": "cafX"}, GOOD]).encode().replace(b"X", b"\xe9"))
    with pytest.raises(UserError, match=r'record 2: "text" is not valid Unicode \(at character 4\)$'):
        conversations.read(path)
    assert len(conversations.read(path, skip_bad=True)) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no records in it; expected JSON lines or a JSON array"),
        (b" \n\n", "no records in it"),
        (b" [ ] \n", "no records in it"),
        ("\ufeff".encode(), "no records in it"),
        (json.dumps(GOOD).encode("utf-16"), "line 1: not UTF-8"),
    ],
)
def test_files_without_records(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        conversations.read(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none.jsonl: no such file"):
        conversations.read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a directory"):
        conversations.read(tmp_path)
    whole = gzip.compress((json.dumps(GOOD) + "\n").encode() * 1000)
    for name, data in (
        ("cut", whole[: len(whole) // 2]),
        ("plain", b'{"text": "a"}'),
        ("bits", whole[:20] + b"x" * 99),
    ):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(UserError, match=f"{name}.jsonl.gz: not a whole gzip file"):
            conversations.read(path)
