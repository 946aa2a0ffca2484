"""Sequences of any length -> rows of a fixed one.

A row holds whole documents, one behind the other, and padding. Segments tell them apart: a token attends to
its own segment only, its position counts from the segment's beginning, and a head learns a token only of its
own segment, so nothing crosses from one document into another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from medusa_jax.errors import UserError
from train.tokens import Encoded

_FIRST = 2  # head 0 stands at t and learns token t + 2, so no head learns a document's first two tokens


@dataclasses.dataclass(frozen=True)
class PackStats:
    """What became of the sequences. Tokens are counted as they are in the rows."""

    documents: int  # given
    skipped_without_labels: int  # no head could learn anything from them
    truncated: int  # documents kept, of which some tokens are left out
    labels_cut: int  # labelled tokens of all that is left out
    tokens: int
    labelled: int
    rows: int
    fill: float  # share of the rows that is no padding


@dataclasses.dataclass(frozen=True)
class Packed:
    """n rows of T tokens. Documents of a row have segments 1, 2, ...; 0 is padding."""

    tokens: np.ndarray  # int32 [n, T]
    segments: np.ndarray  # int32 [n, T]
    positions: np.ndarray  # int32 [n, T], from 0 in every segment
    labels: np.ndarray  # bool [n, T]
    where: list[tuple[str, ...]]  # for each row, file and line of its segments
    stats: PackStats

    def __len__(self) -> int:
        return len(self.tokens)


def pack(encoded: Sequence[Encoded], length: int, heads: int, *, split: bool = False) -> Packed:
    """Pack sequences into rows of `length` tokens, the longest first, each where it leaves least room.

    A longer sequence is cut at the end; with `split` it becomes several, each a document of its own. One from
    which no head can learn (with heads = 0: the model) is left out and counted. Equal input gives equal rows.
    Raises UserError when `length` is too short for the last head to learn anything.
    """
    if length < heads + 2:
        raise UserError(f"rows of {length} tokens, expected at least {heads + 2} for {heads} heads")
    pieces: list[tuple[Encoded, int, int]] = []  # and from where to where of it
    skipped = truncated = labels_cut = 0
    first = min(_FIRST, heads + 1)
    for one in encoded:
        taken = [
            (one, begin, end)
            for begin, end in _cuts(len(one.ids), length, split)
            if np.count_nonzero(one.labels[begin + first : end])
        ]
        labels_cut += np.count_nonzero(one.labels)
        labels_cut -= sum(np.count_nonzero(one.labels[begin:end]) for _, begin, end in taken)
        skipped += not taken
        truncated += 0 < sum(end - begin for _, begin, end in taken) < len(one.ids)
        pieces += taken
    rows = _place([end - begin for _, begin, end in pieces], length)
    shape = len(rows), length
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels = np.zeros(shape, bool)
    numbers = np.arange(length, dtype=np.int32)
    for row, members in enumerate(rows):
        at = 0
        for segment, member in enumerate(members, 1):
            one, begin, end = pieces[member]
            place = slice(at, at + end - begin)
            tokens[row, place] = one.ids[begin:end]
            segments[row, place] = segment
            positions[row, place] = numbers[: end - begin]
            labels[row, place] = one.labels[begin:end]
            at = place.stop
    filled = sum(end - begin for _, begin, end in pieces)
    stats = PackStats(
        documents=len(encoded),
        skipped_without_labels=skipped,
        truncated=truncated,
        labels_cut=int(labels_cut),
        tokens=filled,
        labelled=int(labels.sum()),
        rows=len(rows),
        fill=filled / max(1, len(rows) * length),
    )
    where = [tuple(pieces[member][0].where for member in members) for members in rows]
    return Packed(tokens, segments, positions, labels, where, stats)


def _cuts(size: int, length: int, split: bool) -> Iterator[tuple[int, int]]:
    """Where the pieces of a sequence begin and end."""
    for begin in range(0, size if split else min(size, 1), length):
        yield begin, min(begin + length, size)


def _place(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Best fit, longest first: the indices of the sizes that share a row, each row at most `length`.

    Rows are found by the room that they have left. Which rooms there are is one integer's bits, so that the
    smallest sufficient one is found without a search.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable
        sufficient = rooms >> sizes[index]
        if sufficient:
            room = sizes[index] + (sufficient & -sufficient).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - sizes[index]
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    return rows
