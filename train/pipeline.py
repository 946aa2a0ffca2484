"""Files of training data -> batches: which documents are held out, the order of rows, each process's share.

Every process reads and packs all files, so rows have the same numbers everywhere, and takes only its share
of each batch. Order and position are grain's: a batch depends on the seed and its own number alone, so an
iterator set to a stored state goes on as the first would have, on any number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_jax.errors import UserError, is_file, shown, user_path
from train.conversations import Document, read
from train.packing import Packed, pack
from train.tokens import Encoded, encode_all

if TYPE_CHECKING:  # grain takes over a second to import
    import grain

ARRAYS = "tokens", "segments", "positions", "labels"
_PREFETCH = 4  # batches made ahead
_ROWS_NAMED = 3  # in a message, of a batch; and so many documents of each


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file to train on. weight: its share of the rows seen, against the other files'; None: by its size."""

    path: Path
    weight: float | None = None


def parse_data(text: str) -> DataFile:
    """The file that "FILE" or "FILE:WEIGHT" names; whether it is there is left open.

    Raises UserError for a weight that is none.
    """
    path = user_path(text)
    if is_file(path) or ":" not in text:
        return DataFile(path)
    name, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        raise UserError(f"{shown(text)}: no such file, and {shown(number)} is no weight") from None
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"{shown(text)}: the weight is {number}, expected a number above 0")
    return DataFile(user_path(name), weight)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Packed training data. Rows are numbered through all files in their order.

    weights: each file's share of the rows seen, None where every row is seen equally often. validation: the
    documents held out, None if there are none. report: what was read, a line for each file.
    """

    files: list[DataFile]
    train: list[Packed]
    weights: list[float] | None
    validation: Packed | None
    report: str

    @property
    def rows(self) -> int:
        """Training rows of all files."""
        return sum(len(packed) for packed in self.train)

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """tokens, segments, positions, labels [b, T] and row [b] int32 of the training rows numbered so."""
        batch = {"row": rows.astype(np.int32)}
        for name in ARRAYS:
            like = getattr(self.train[0], name)
            batch[name] = np.empty((len(rows), like.shape[1]), like.dtype)
        begin = 0
        for packed in self.train:
            here = (rows >= begin) & (rows < begin + len(packed))
            for name in ARRAYS:
                batch[name][here] = getattr(packed, name)[rows[here] - begin]
            begin += len(packed)
        return batch

    def fingerprint(self) -> str:
        """A hash of all rows and weights: an equal one means equal batches."""
        found = hashlib.sha256(repr(self.weights).encode())
        for packed in [*self.train, *([] if self.validation is None else [self.validation])]:
            found.update(repr(packed.tokens.shape).encode())
            for name in ARRAYS:
                found.update(getattr(packed, name).data)
        return found.hexdigest()


def prepare(
    files: Sequence[DataFile],
    tokenizer: Any,
    length: int,
    heads: int,
    *,
    validation: float = 0.0,
    seed: int = 0,
    system: str | None = None,
    split: bool = False,
    skip_bad: bool = False,
    drop_looping: bool = False,
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Read, check, tokenize and pack files into rows of `length` tokens for `heads` heads.

    validation: the share of documents held out, chosen by a hash of `seed` and their group, so that all
    answers to a question are on one side. system: the system message of chats without one; "" removes the
    template's own. split: cut longer documents into several, instead of off. skip_bad: leave out what is
    wrong. vocab_size: refuse ids that the model does not have. progress: told the number of documents
    tokenized, and of all. Raises UserError for bad files and values, and when nothing is left of a file.
    """
    if not files:
        raise UserError("no file of training data")
    if not 0 <= validation < 1:
        raise UserError(f"validation is {validation}, expected a share from 0 to below 1")
    counts = [Counter[str]() for _ in files]
    read_files = [
        read(file.path, skip_bad=skip_bad, drop_looping=drop_looping, counts=count)
        for file, count in zip(files, counts, strict=True)
    ]
    documents = [document for of_file in read_files for document in of_file]
    held = _held_out(documents, validation, seed)
    problems: list[str] = []
    train: list[list[Encoded]] = [[] for _ in files]
    held_out: list[Encoded] = []
    sequences = encode_all(documents, tokenizer, system=system, problems=problems)
    done = 0
    for number, of_file in enumerate(read_files):
        for document in of_file:
            before = len(problems)
            made = next(sequences)
            outside = _outside(made, vocab_size)
            if outside is not None:
                problems.append(outside)
                made = []
            if not made:
                counts[number]["bad" if len(problems) > before else "without labels"] += 1
            (held_out if document.group in held else train[number]).extend(made)
            done += 1
            if progress is not None and (done % 64 == 0 or done == len(documents)):
                progress(done, len(documents))
    if problems and not skip_bad:
        more = f" (and {len(problems) - 1:,} other documents)" if len(problems) > 1 else ""
        raise UserError(problems[0] + more)
    packed = [pack(of_file, length, heads, split=split) for of_file in train]
    for file, rows in zip(files, packed, strict=True):
        if not len(rows):
            raise UserError(
                f"{file.path}: nothing to learn in it: no answer within the first {length:,} tokens"
            )
    weights = None
    if any(file.weight is not None for file in files):
        weights = [1.0 if file.weight is None else file.weight for file in files]
    for_validation = pack(held_out, length, heads, split=split)
    if not len(for_validation):
        for_validation = None
    # Those held out have a line of their own.
    for_training = [sum(document.group not in held for document in of_file) for of_file in read_files]
    lines = _report(files, for_training, counts, packed, weights)
    if for_validation is not None:
        lines.append(f"validation: {for_validation.stats.documents:,} documents, {_rows(for_validation)}")
    elif validation:
        lines.append("validation: no document could be held out")
    return Prepared(list(files), packed, weights, for_validation, "\n".join(lines))


def _held_out(documents: Sequence[Document], share: float, seed: int) -> set[str]:
    """The groups held out: in the order of their hashes, those that fit into the share of the documents."""

    def key(group: str) -> bytes:
        return hashlib.blake2b(f"{seed} {group}".encode(errors="replace"), digest_size=8).digest()

    sizes = Counter(document.group for document in documents)
    chosen: set[str] = set()
    most, taken = max(1, round(share * len(documents))) if share else 0, 0
    for group in sorted(sizes, key=key):
        if taken + sizes[group] <= most and taken + sizes[group] < len(documents):
            chosen.add(group)
            taken += sizes[group]
    return chosen


def _outside(made: Sequence[Encoded], vocab_size: int | None) -> str | None:
    """What is wrong with ids that the model does not have; JAX would read another's embedding for them."""
    for one in made:
        if vocab_size is not None and one.ids.max(initial=0) >= vocab_size:
            return f"{one.where}: token id {one.ids.max()} is outside the model's vocabulary of {vocab_size}"
    return None


def _report(
    files: Sequence[DataFile],
    documents: Sequence[int],
    counts: Sequence[Counter[str]],
    train: Sequence[Packed],
    weights: Sequence[float] | None,
) -> list[str]:
    """What was read, and what became of it."""
    lines = []
    for number, (file, packed) in enumerate(zip(files, train, strict=True)):
        counts[number]["without labels"] += packed.stats.skipped_without_labels
        kinds = ("bad", "looping", "without labels")
        left_out = [f"{counts[number][kind]:,} {kind}" for kind in kinds if counts[number][kind]]
        line = f"{file.path}: {documents[number]:,} documents, {_rows(packed)}"
        line += f"; left out: {', '.join(left_out)}" if left_out else ""
        if weights is not None:
            share = weights[number] / sum(weights)
            often = share * sum(map(len, train)) / len(packed)
            line += f"; {share:.1%} of the rows seen, each {often:.2f} times an epoch"
        lines.append(line)
    return lines


def _rows(packed: Packed) -> str:
    stats = packed.stats
    line = f"{stats.rows:,} rows of {packed.tokens.shape[1]:,} tokens ({stats.fill:.0%} full), "
    line += f"{stats.labelled:,} of {stats.tokens:,} tokens labelled"
    if stats.truncated or stats.labels_cut:
        line += f"; {stats.truncated:,} documents cut, {stats.labels_cut:,} labelled tokens lost"
    return line


# ------------------------------------------------------------------------------------------ batches


def batches(
    prepared: Prepared,
    batch_size: int,
    seed: int,
    epochs: float | None = None,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """This process's rows of each batch of `batch_size`, as `Prepared.take` gives them.

    Rows are shuffled anew in every epoch, and a batch may hold rows of two. An epoch is as many rows as the
    files have together; with weights some are seen more often in it than others. None never ends; otherwise
    rows that fill no batch at the very end are left out. Process p has the rows from p * b on of each batch,
    b = batch_size / process_count. `get_state()` and `set_state(state)` of the iterator keep and restore the
    place. Raises UserError when there is not one batch, and when the processes do not divide it.
    """
    import grain

    mine = _share(batch_size, process_index, process_count)
    if not 0 <= seed < 2**31:
        raise UserError(f"seed is {seed}, expected a number from 0 to {2**31 - 1}")

    def shuffled(number: int, begin: int, end: int) -> grain.MapDataset[int]:
        # A seed of its own, or files of equal size would have one order.
        own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        return grain.MapDataset.range(begin, end).shuffle(seed=own).repeat(None)

    # Row numbers are mixed and cut into batches; of the rows only a process's own are read.
    if prepared.weights is None:
        order = shuffled(0, 0, prepared.rows)
    else:
        ends = np.cumsum([len(packed) for packed in prepared.train]).tolist()
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        parts = [shuffled(number, *one) for number, one in enumerate(bounds)]
        order = grain.MapDataset.mix(parts, weights=prepared.weights)
    if epochs is not None:
        total = int(epochs * prepared.rows)
        if total < batch_size:
            found = f"{prepared.rows:,} rows and {epochs:g} epochs"
            raise UserError(f"the training data gives {found}, less than one batch of {batch_size}")
        order = order.slice(slice(0, total))
    numbers = order.batch(batch_size, drop_remainder=True)
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=_PREFETCH)
    return iter(numbers.map(lambda rows: prepared.take(rows[mine])).to_iter_dataset(ahead))


def position(prepared: Prepared, rows: np.ndarray, seen: int | None = None) -> str:
    """Where rows [b] of a batch come from, in one line for messages.

    seen: how many rows all processes took before this batch; then the epoch is named too.
    """
    places = []
    for row in rows[:_ROWS_NAMED].tolist():
        begin = 0
        for packed in prepared.train:
            if row < begin + len(packed):
                documents = list(dict.fromkeys(packed.where[row - begin]))
                more = "; ..." if len(documents) > _ROWS_NAMED else ""
                places.append(f"row {row} ({'; '.join(documents[:_ROWS_NAMED])}{more})")
                break
            begin += len(packed)
    if len(rows) > _ROWS_NAMED:
        places.append(f"{len(rows) - _ROWS_NAMED} more")
    epoch = "" if seen is None else f"epoch {seen // prepared.rows + 1}, "
    return epoch + ", ".join(places)


def validation_batches(
    packed: Packed,
    batch_size: int,
    *,
    first_row: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's share of all validation rows, in order, with the arrays of `Prepared.take`.

    Rows are numbered from `first_row` on. Padding fills the last batch up: segments 0, no labels, and the
    number of the last row.
    """
    mine = _share(batch_size, process_index, process_count)
    for begin in range(0, len(packed), batch_size):
        rows = np.arange(begin, begin + batch_size)[mine]
        there = rows < len(packed)
        batch = {"row": (first_row + np.minimum(rows, len(packed) - 1)).astype(np.int32)}
        for name in ARRAYS:
            array = getattr(packed, name)
            batch[name] = np.zeros((len(rows), array.shape[1]), array.dtype)
            batch[name][there] = array[rows[there]]
        yield batch


def _share(batch_size: int, process_index: int, process_count: int) -> slice:
    """The rows of a batch that are a process's own."""
    if batch_size % process_count:
        raise UserError(f"a batch of {batch_size} rows is not divided by {process_count} processes")
    own = batch_size // process_count
    return slice(process_index * own, (process_index + 1) * own)
