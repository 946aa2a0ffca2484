"""Training data: packing, held-out documents, batches and their order."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_data_files import GOOD, lines_file, shared, turns

from medusa_jax import UserError
from train import pipeline
from train.packing import Packed, pack
from train.pipeline import DataFile, Prepared, batches, parse_data, prepare, validation_batches
from train.tokens import Encoded

# ------------------------------------------------------------------------------------------- packing


def sequence(first: int, labels: list[bool] | list[int]) -> Encoded:
    """Tokens first, first + 1, ...: every token says where it is from."""
    return Encoded(
        np.arange(first, first + len(labels), dtype=np.int32), np.array(labels, bool), f"line {first}"
    )


sequences = st.lists(st.lists(st.booleans(), max_size=14), max_size=12).map(
    lambda lists: [sequence(1000 * (i + 1), labels) for i, labels in enumerate(lists)]
)


def segments(packed: Packed) -> list[tuple[int, int, slice]]:
    """(row, segment, its place), and all that must hold of a row."""
    found = []
    for row in range(len(packed)):
        numbers = packed.segments[row]
        count = numbers.max()
        assert count >= 1, "an empty row"
        filled = int((numbers > 0).sum())
        assert (np.diff(numbers[:filled]) >= 0).all()  # padding is behind
        assert set(numbers[:filled].tolist()) == set(range(1, count + 1))
        for array in (packed.tokens, packed.positions, packed.labels):
            assert not array[row, filled:].any()
        for segment in range(1, count + 1):
            places = np.flatnonzero(numbers == segment)
            place = slice(int(places[0]), int(places[-1]) + 1)
            assert packed.positions[row, place].tolist() == list(range(len(places)))
            found.append((row, segment, place))
    return found


@given(sequences, st.integers(5, 12), st.integers(0, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_token_is_packed_once(encoded, length, heads, split):
    packed = pack(encoded, length, heads, split=split)
    assert packed.tokens.shape[1] == length
    assert [packed.tokens.dtype, packed.segments.dtype, packed.positions.dtype] == [np.int32] * 3
    assert packed.labels.dtype == bool
    offset = 2 if heads else 1  # the first token that something learns
    found = {}
    for row, segment, place in segments(packed):
        tokens = packed.tokens[row, place]
        assert (np.diff(tokens) == 1).all(), "a segment is one document's tokens, in their order"
        number, begin = divmod(int(tokens[0]), 1000)
        assert begin == 0 or split
        assert begin % length == 0
        assert (
            packed.labels[row, place].tolist() == encoded[number - 1].labels[begin:][: len(tokens)].tolist()
        )
        assert packed.where[row][segment - 1] == encoded[number - 1].where
        found[number, begin] = len(tokens)
    assert len(found) == len(segments(packed)), "a piece is packed twice"
    wanted, skipped = {}, 0
    for number, one in enumerate(encoded, 1):
        pieces = {
            (number, begin): len(one.ids[begin : begin + length])
            for begin in range(0, len(one.ids) if split else 1, length)
            if one.labels[begin : begin + length][offset:].any()
        }
        wanted |= pieces
        skipped += not pieces
    assert found == wanted
    labelled = sum(int(one.labels.sum()) for one in encoded)
    assert packed.stats.labelled == int(packed.labels.sum()) == labelled - packed.stats.labels_cut
    assert packed.stats.tokens == sum(found.values()) == int((packed.segments > 0).sum())
    assert packed.stats.skipped_without_labels == skipped
    assert packed.stats.documents == len(encoded)
    assert packed.stats.rows == len(packed)
    if len(packed):
        assert packed.stats.fill == pytest.approx(packed.stats.tokens / packed.tokens.size)
    if not split:
        assert packed.stats.truncated == sum(len(encoded[n - 1].ids) > length for n, _ in found)


@given(st.lists(st.integers(3, 20), max_size=60))
@settings(max_examples=100, deadline=None)
def test_every_document_goes_where_it_leaves_least_room(sizes):
    rows: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= 20]
        if not fitting:
            fitting = [[]]
            rows += fitting
        max(fitting, key=sum).append(size)
    packed = pack([sequence(100 * (i + 1), [1] * size) for i, size in enumerate(sizes)], 20, 1)
    found: list[list[int]] = [[] for _ in range(len(packed))]
    for row, _, place in segments(packed):
        found[row].append(place.stop - place.start)
    assert sorted(map(sum, found)) == sorted(map(sum, rows))


def test_packing_is_deterministic_and_cuts_where_it_says():
    encoded = [sequence(100, [0] * 9 + [1] * 4), sequence(200, [0, 0, 1, 1]), sequence(300, [1, 1])]
    packed = pack(encoded, 8, 3)
    assert packed.tokens.tolist() == [[200, 201, 202, 203, 0, 0, 0, 0]]
    assert packed.stats.skipped_without_labels == 2  # the first's labels are all behind its cut
    assert packed.stats.labels_cut == 6
    packed = pack(encoded, 8, 3, split=True)
    assert packed.tokens.tolist() == [[108, 109, 110, 111, 112, 0, 0, 0], [200, 201, 202, 203, 0, 0, 0, 0]]
    assert packed.stats.truncated == 1
    packed = pack(encoded, 10, 3)
    assert packed.stats.truncated == 1
    assert packed.tokens[0].tolist() == list(range(100, 110))
    with pytest.raises(UserError, match="rows of 5 tokens, expected at least 6 for 4 heads"):
        pack(encoded, 5, 4)


def test_packing_many_documents_takes_no_quadratic_time():
    rng = np.random.default_rng(0)
    encoded = [sequence(0, [1] * size) for size in rng.integers(3, 60, 20_000)]
    packed = pack(encoded, 2048, 4)
    assert packed.stats.fill > 0.99


def test_no_head_learns_across_documents():
    """The trainer's targets on packed rows are those of every document by itself."""
    from train.loss import Batch, head_targets

    encoded = [sequence(100 * (i + 1), [0] * 2 + [1] * (i + 1) + [0, 1]) for i in range(6)]
    packed = pack(encoded, 24, 3)
    batch = Batch(packed.tokens, packed.segments, packed.positions, packed.labels)
    target, learns = map(np.asarray, head_targets(batch, 3))
    found = Counter()
    for row, place, head in np.argwhere(learns).tolist():
        found[head, int(packed.tokens[row, place - head - 1]), int(target[row, place])] += 1
    wanted = Counter()
    for one in encoded:
        for head in range(3):
            for at in range(len(one.ids) - head - 2):
                if one.labels[at + head + 2]:
                    wanted[head, int(one.ids[at]), int(one.ids[at + head + 2])] += 1
    assert found == wanted


# ------------------------------------------------------------------------------------------- prepare


def test_file_and_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b:2", "c:"):
        Path(name).write_text("x")
    assert parse_data("a.jsonl") == DataFile(Path("a.jsonl"), None)
    assert parse_data("a.jsonl:0.5") == DataFile(Path("a.jsonl"), 0.5)
    assert parse_data("b:2") == DataFile(Path("b:2"), None)
    assert parse_data("b:2:3") == DataFile(Path("b:2"), 3.0)
    assert parse_data("none") == DataFile(Path("none"), None)
    for text, message in (
        ("a.jsonl:0", "weight is 0, expected a number above 0"),
        ("a.jsonl:-1", "weight is -1"),
        ("a.jsonl:nan", "weight is nan"),
        ("a.jsonl:inf", "weight is inf"),
        ("a.jsonl:two", "'a.jsonl:two': no such file, and 'two' is no weight"),
        ("a\0b:1", "not a name a file can have"),
    ):
        with pytest.raises(UserError, match=message):
            parse_data(text)


def many(path: Path, count: int, word: str = "Rain", **fields) -> Path:
    records = [turns(f"{word} {i}?", f"{word} falls on the plain {i}.") | fields for i in range(count)]
    return lines_file(path, *records)


def test_prepare(tmp_path):
    """From files to rows: what is left out is counted, what is learnt can be read in the rows."""
    a = many(tmp_path / "a.jsonl", 30)
    records = [turns("Hello!", "The dog."), turns("Hello!", ""), GOOD | {"looping": True}, {"text": 3}]
    b = lines_file(tmp_path / "b.jsonl", *records, turns("Hello!", "x " * 300), {"text": "Rain falls."})
    told = []
    made = prepare(
        [DataFile(a), DataFile(b)],
        tiny.tokenizer(),
        128,
        4,
        skip_bad=True,
        drop_looping=True,
        system="",
        progress=lambda *counts: told.append(counts),
    )
    first, second = made.report.split("\n")
    assert first.startswith(f"{a}: 30 documents, {len(made.train[0])} rows of 128 tokens (")
    assert "left out" not in first
    assert second.startswith(f"{b}: 4 documents, {len(made.train[1])} rows of 128 tokens (")
    assert "; 1 documents cut, " in second
    assert second.endswith("labelled tokens lost; left out: 1 bad, 1 looping, 1 without labels")
    assert made.validation is None
    assert made.weights is None
    assert made.rows == sum(map(len, made.train))
    assert told == [(34, 34)]
    seen = []
    for packed in made.train:
        for row, segment, place in segments(packed):
            ids = packed.tokens[row, place][packed.labels[row, place]]
            seen.append((packed.where[row][segment - 1], tiny.tokenizer().decode(ids)))
    wanted = [(f"{a}, line {i + 1}", f"Rain falls on the plain {i}.<|im_end|>") for i in range(30)]
    wanted += [(f"{b}, line 1", "The dog.<|im_end|>"), (f"{b}, line 6", "Rain falls.")]
    cut = [text for where, text in seen if where == f"{b}, line 5"]
    assert len(cut) == 1
    assert set(cut[0]) == {"x", " "}
    assert sorted(set(seen) - {(f"{b}, line 5", cut[0])}) == sorted(wanted)
    whole = prepare([DataFile(a), DataFile(b)], tiny.tokenizer(), 128, 4, skip_bad=True, split=True)
    assert whole.train[1].stats.labels_cut == 0


def test_what_prepare_refuses(tmp_path):
    good, bad = many(tmp_path / "a.jsonl", 3), lines_file(tmp_path / "b.jsonl", GOOD, {"text": 3})
    nothing = lines_file(tmp_path / "c.jsonl", turns("Hello!"), turns("Hello!", " "), {"conversations": []})
    tokenizer = tiny.tokenizer()
    for files, options, message in (
        ([], {}, "no file of training data"),
        ([good], {"validation": 1.0}, "validation is 1.0, expected a share from 0 to below 1"),
        ([good], {"validation": -0.1}, "validation is -0.1"),
        ([good, bad], {}, r"b.jsonl, line 2: \"text\" is 3"),
        ([good, nothing], {}, r"c.jsonl: nothing to learn in it: no answer within the first 64 tokens"),
        (
            [good],
            {"vocab_size": 99},
            r"a.jsonl, line 1: token id \d+ is outside .* of 99 \(and 2 other documents\)$",
        ),
    ):
        with pytest.raises(UserError, match=message):
            prepare([DataFile(file) for file in files], tokenizer, 64, 4, **options)
    template = (
        tiny.TEMPLATE
        + "{% if messages[-1]['content'] == 'Rain falls on the plain 1.' %}{{ 1 / 0 }}{% endif %}"
    )
    with pytest.raises(
        UserError, match=r"a.jsonl, line 2: the model's chat template fails .*ZeroDivisionError"
    ):
        prepare([DataFile(good)], tiny.tokenizer(template), 64, 4)
    made = prepare([DataFile(good)], tiny.tokenizer(template), 64, 4, skip_bad=True)
    assert made.report.endswith("left out: 1 bad")


def wheres(packed: Packed) -> set[str]:
    return {where for row in packed.where for where in row}


def test_held_out_documents(tmp_path):
    """The same every time, others with another seed; all answers to one question are on the same side."""
    records = [turns(f"Rain {i % 50}?", f"The dog {i}.") for i in range(200)]
    path = lines_file(tmp_path / "a.jsonl", *records)

    def split(seed, file=path, share=0.1):
        made = prepare([DataFile(file)], tiny.tokenizer(), 128, 4, validation=share, seed=seed)
        assert made.validation is not None
        train, held = wheres(made.train[0]), wheres(made.validation)
        assert train | held == {f"{file}, line {i + 1}" for i in range(200)}
        assert not train & held
        return made, {int(where.rpartition(" ")[2]) - 1 for where in held}

    made, held = split(0)
    assert len(held) == 20
    questions = {i % 50 for i in held}
    assert held == {i for i in range(200) if i % 50 in questions}
    assert split(0)[1] == held != split(1)[1]
    assert "\nvalidation: 20 documents, " in made.report
    other = lines_file(tmp_path / "b.jsonl", *reversed(records))
    assert {(199 - i) % 50 for i in split(0, other)[1]} == questions
    assert made.fingerprint() == split(0)[0].fingerprint() != split(1)[0].fingerprint()


def test_nothing_to_hold_out(tmp_path):
    one = lines_file(tmp_path / "a.jsonl", GOOD)
    same = lines_file(tmp_path / "b.jsonl", *[turns("Hello!", f"The dog {i}.") for i in range(9)])
    for path in (one, same):
        made = prepare([DataFile(path)], tiny.tokenizer(), 64, 4, validation=0.2)
        assert made.validation is None
        assert made.report.endswith("\nvalidation: no document could be held out")


def test_parts_of_a_conversation_stay_together(tmp_path):
    path = lines_file(
        tmp_path / "a.jsonl",
        *[shared(f"Rain {i} {k}?", "The dog.", id=f"x{i}_{k}") for i in range(20) for k in range(3)],
    )
    made = prepare([DataFile(path)], tiny.tokenizer(), 64, 4, validation=0.2)
    assert made.validation is not None
    held = {int(where.rpartition(" ")[2]) - 1 for where in wheres(made.validation)}
    assert len(held) == 12
    assert {i // 3 * 3 + k for i in held for k in range(3)} == held


# ------------------------------------------------------------------------------------------- batches


def rows_of(*counts: int, weights: list[float] | None = None) -> Prepared:
    """Files of so many rows of 8 tokens, every token its row's number."""
    files, train, begin = [], [], 0
    for number, count in enumerate(counts):
        encoded = [
            Encoded(np.full(8, begin + i, np.int32), np.ones(8, bool), f"f{number}, line {i + 1}")
            for i in range(count)
        ]
        files.append(DataFile(Path(f"f{number}")))
        train.append(pack(encoded, 8, 2))
        begin += count
    return Prepared(files, train, weights, None, "")


def flat(batches) -> list[int]:
    return [row for rows in batches for row in rows]


def drawn(iterator, count: int | None = None) -> list[list[int]]:
    """Row numbers of batches, each checked to hold these rows."""
    found = []
    for batch in iterator:
        rows = batch["row"]
        assert rows.dtype == np.int32
        assert set(batch) == {"tokens", "segments", "positions", "labels", "row"}
        assert batch["tokens"].tolist() == [[row] * 8 for row in rows.tolist()]
        assert batch["segments"].shape == batch["positions"].shape == batch["labels"].shape == (len(rows), 8)
        assert batch["positions"].tolist() == [list(range(8))] * len(rows)
        found.append(rows.tolist())
        if len(found) == count:
            break
    return found


def test_every_epoch_has_every_row_in_another_order():
    prepared = rows_of(7, 13)
    rows = flat(drawn(batches(prepared, 4, 3, epochs=3)))
    epochs = [rows[:20], rows[20:40], rows[40:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])
    assert flat(drawn(batches(prepared, 4, 3), 15)) == rows  # without end
    assert flat(drawn(batches(prepared, 4, 4), 5)) != epochs[0]


def test_the_last_rows_that_fill_no_batch_are_left_out():
    """Only at the very end: a batch may hold rows of two epochs."""
    prepared = rows_of(10)
    found = drawn(batches(prepared, 4, 0, epochs=1.0))
    assert [len(rows) for rows in found] == [4, 4]
    found = flat(drawn(batches(prepared, 4, 0, epochs=3)))
    assert [sorted(found[at : at + 10]) for at in (0, 10)] == [list(range(10))] * 2
    assert len(found) == 28
    assert len(drawn(batches(prepared, 4, 0, epochs=1.5))) == 3
    assert len(drawn(batches(prepared, 16, 0, epochs=2))) == 1  # more than there are rows
    with pytest.raises(UserError, match="gives 10 rows and 1 epochs, less than one batch of 16"):
        batches(prepared, 16, 0, epochs=1)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_same_batches(weights, processes):
    prepared = rows_of(7, 13, weights=weights)
    whole = drawn(batches(prepared, 8, 5), 9)
    shares = [
        drawn(batches(prepared, 8, 5, process_index=index, process_count=processes), 9)
        for index in range(processes)
    ]
    assert [flat(parts) for parts in zip(*shares, strict=True)] == whole
    with pytest.raises(UserError, match="a batch of 8 rows is not divided by 3 processes"):
        batches(prepared, 8, 5, process_count=3)


@pytest.mark.parametrize("weights", [None, [0.3, 1.0]])
def test_a_resumed_iterator_goes_on_exactly(weights):
    """From any place, also between epochs, after JSON, and on another number of processes."""
    prepared = rows_of(5, 8, weights=weights)
    whole = drawn(batches(prepared, 4, 1, epochs=5))
    iterator, states = batches(prepared, 4, 1, epochs=5), []
    for _ in whole:
        states.append(json.loads(json.dumps(iterator.get_state())))
        next(iterator)
    for number in (0, 1, 3, 7, len(states) - 1):
        fresh = batches(prepared, 4, 1, epochs=5)
        next(fresh)  # what was made ahead is thrown away
        fresh.set_state(states[number])
        assert drawn(fresh) == whole[number:]
    half = batches(prepared, 4, 1, epochs=5, process_index=1, process_count=2)
    half.set_state(states[3])
    assert drawn(half) == [rows[2:] for rows in whole[3:]]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [2.0, 1.0], [0.5, 4.5], [1e-3, 1e-3]])
def test_weights_are_shares_of_the_rows(weights):
    prepared = rows_of(6, 30, weights=weights)
    rows = np.array(flat(drawn(batches(prepared, 4, 0), 90)))
    share = weights[0] / sum(weights)
    for end in range(40, 361, 40):
        assert abs(int((rows[:end] < 6).sum()) - share * end) <= 1
    for low, high in ((0, 6), (6, 36)):
        seen = np.bincount(rows[(rows >= low) & (rows < high)] - low, minlength=high - low)
        assert seen.max() - seen.min() <= 1  # each row of a file as often as the others
    first = rows[rows < 6]
    assert len({tuple(first[at : at + 6]) for at in range(0, 18, 6)}) > 1


def test_files_of_one_size_have_orders_of_their_own():
    rows = np.array(flat(drawn(batches(rows_of(16, 16, weights=[1.0, 1.0]), 4, 0), 8)))
    assert rows[rows < 16].tolist() != (rows[rows >= 16] - 16).tolist()


def test_bad_seeds_are_refused():
    with pytest.raises(UserError, match="seed is -1, expected a number from 0 to 2147483647"):
        batches(rows_of(8), 4, -1)


def test_the_report_says_how_often_weighted_rows_are_seen(tmp_path):
    a, b = many(tmp_path / "a.jsonl", 40), many(tmp_path / "b.jsonl", 40, "Dog")
    made = prepare([DataFile(a, 3.0), DataFile(b)], tiny.tokenizer(), 64, 4)
    assert made.weights == [3.0, 1.0]
    first, second = made.report.split("\n")
    assert "; 75.0% of the rows seen, each " in first
    assert "; 25.0% of the rows seen, each " in second
    often = 0.75 * made.rows / len(made.train[0])
    assert first.endswith(f"{often:.2f} times an epoch")


def test_where_a_batch_comes_from():
    prepared = rows_of(5, 8)
    found = pipeline.position(prepared, np.array([3, 12, 5, 0]), seen=30)
    assert found == "epoch 3, row 3 (f0, line 4), row 12 (f1, line 8), row 5 (f1, line 1), 1 more"
    short = pack([sequence(100 * i, [1] * 4) for i in range(1, 6)], 24, 2)
    prepared = Prepared([DataFile(Path("x"))], [short], None, None, "")
    assert pipeline.position(prepared, np.array([0])) == "row 0 (line 100; line 200; line 300; ...)"


@pytest.mark.parametrize("processes", [1, 2])
def test_validation_rows_come_once_in_order(processes):
    packed = rows_of(10).train[0]
    found = [
        list(validation_batches(packed, 4, first_row=20, process_index=index, process_count=processes))
        for index in range(processes)
    ]
    whole = [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*found, strict=True)
    ]
    assert [batch["row"].tolist() for batch in whole] == [
        [20, 21, 22, 23],
        [24, 25, 26, 27],
        [28, 29, 29, 29],
    ]
    for name in ("tokens", "segments", "positions", "labels"):
        array = np.concatenate([batch[name] for batch in whole])
        assert array.dtype == getattr(packed, name).dtype
        assert array[:10].tolist() == getattr(packed, name).tolist()
        assert not array[10:].any()
