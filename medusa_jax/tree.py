"""The tree of guesses that one forward pass checks: rank paths, and what follows from them as arrays.

A path names a guess: entry j is a place in the ranked candidates of the node above, so (0, 2) is the third
candidate after the first candidate after the root. The root, the model's own next token, has no path.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax.errors import UserError, read_json_value, shown, write_atomically

RankPath = tuple[int, ...]
HitRates = Mapping[RankPath, float]

MAX_NODES = 1024  # with the root; a forward pass over more costs more than any acceptance can return
MAX_DEPTH = 16
MAX_RANKS = 64

# More digits than any width that could pass: int() of thousands of digits is an error of its own.
_WIDTHS = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*")


@dataclass(frozen=True)
class Tree:
    """Nodes 0 to N - 1 of a tree of guesses; node 0 is the root, node i > 0 is `paths[i - 1]`.

    paths: rank paths sorted by (depth, path), so that a node comes after its ancestors. Ranks of siblings
    need not be consecutive. Made with `from_paths`, which sorts and checks; the constructor refuses
    paths in another order (UserError).

    Equal trees have equal paths and equal hashes: a tree can be a static argument of a jitted function. The
    arrays are NumPy, computed once and read-only.
    """

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        if _checked(self.paths, "tree", MAX_NODES) != self.paths:
            raise UserError("tree: paths are not tuples sorted by (depth, path); use Tree.from_paths")

    # ------------------------------------------------------------------------------------ making trees

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], name: str = "tree") -> Tree:
        """The tree of these rank paths, in any order; no paths at all is the root alone.

        Raises UserError, with `name` in front, for a path that is empty, doubled, too deep (MAX_DEPTH) or
        without its parent, for a rank that is not an integer in [0, MAX_RANKS), and above MAX_NODES nodes.
        """
        return cls(_checked(paths, name, MAX_NODES))

    @classmethod
    def single(cls) -> Tree:
        """The root alone: plain decoding."""
        return cls(())

    @classmethod
    def chain(cls, depth: int) -> Tree:
        """The first candidate after the first candidate, `depth` times: depth + 1 nodes."""
        if depth < 0:
            raise UserError(f"tree: a chain of depth {depth}, expected 0 to {MAX_DEPTH}")
        return cls.dense((1,) * depth)

    @classmethod
    def dense(cls, widths: Sequence[int]) -> Tree:
        """Ranks 0 to widths[d] - 1 below every node at depth d: (2, 3, 2) has 1 + 2 + 6 + 12 nodes.

        Raises UserError for a width outside 1 to MAX_RANKS, and above MAX_DEPTH levels or MAX_NODES nodes.
        """
        text = f"tree {'x'.join(map(str, widths))}"
        if len(widths) > MAX_DEPTH:
            raise UserError(f"tree of {len(widths)} widths: at most {MAX_DEPTH} are supported")
        for width in widths:
            if not 1 <= width <= MAX_RANKS:
                raise UserError(f"{text}: width {width} is not between 1 and {MAX_RANKS}")
        nodes = 1 + sum(itertools.accumulate(widths, lambda a, b: a * b))
        if nodes > MAX_NODES:
            raise UserError(f"{text}: has {nodes} nodes, at most {MAX_NODES} are supported")
        levels = (itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
        return cls(tuple(itertools.chain.from_iterable(levels)))

    @classmethod
    def named(cls, name: str) -> Tree:
        """A published tree (see `published_names`). Raises UserError listing the names for any other."""
        if name not in _published():
            raise UserError(f"tree {name!r}: not a published tree; those are {', '.join(published_names())}")
        return _published()[name]

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """Read a tree file: see `load_tree`, which returns its hit rates too."""
        return load_tree(path)[0]

    @classmethod
    def parse(cls, text: str) -> Tree:
        """The value of a --tree flag: widths ("2x3x2", "4"), a published name, or a file.

        They are tried in this order; a file with such a name can be given as "./4". Raises UserError.
        """
        if _WIDTHS.fullmatch(text):
            return cls.dense([int(width) for width in text.split("x")])
        if text in _published():
            return cls.named(text)
        # What looks like a file gets the error of a file.
        if text and (text.endswith(".json") or os.sep in text or _exists(text)):
            return cls.load(text)
        names = ", ".join(published_names())
        raise UserError(f"tree {shown(text)}: neither widths (such as 2x3x2), nor a file, nor one of {names}")

    @classmethod
    def grow(cls, hit_rates: HitRates, nodes: int) -> Tree:
        """The tree of at most `nodes` nodes (with the root) with the most expected tokens per step.

        hit_rates: for each path the measured probability that all of its guesses are right. Starting from the
        root, the likeliest child of a node that is already in is added next (equal rates: the smaller depth,
        then the smaller path), until there are `nodes` or no measured path is left. As no path is likelier
        than its parent, that is the best tree of its size, and each tree is inside the next larger one.

        Raises UserError as `from_paths` does, for a rate outside [0, 1], for a rate above its parent's (these
        are joint probabilities, not those of a node given its parent), and for `nodes` not in
        [1, MAX_NODES].
        """
        if not 1 <= nodes <= MAX_NODES:
            raise UserError(f"tree of {nodes} nodes: expected 1 to {MAX_NODES}")
        paths = _checked(hit_rates, "hit rates", None)
        check_rates(hit_rates, "hit rates")
        # As rates fall along a path and equal ones go by depth, this order puts parents before children.
        order = sorted(paths, key=lambda path: (-hit_rates[path], len(path), path))
        return cls.from_paths(order[: nodes - 1])

    def cut(self, max_depth: int) -> Tree:
        """The tree without paths of more than `max_depth` entries: what heads of that number can fill."""
        return Tree(tuple(path for path in self.paths if len(path) <= max_depth))

    def cut_ranks(self, max_rank: int) -> Tree:
        """The tree without paths that go through a rank above `max_rank`: lists of max_rank + 1 fill it."""
        return Tree(tuple(path for path in self.paths if max(path) <= max_rank))

    # -------------------------------------------------------------------------------- sizes and arrays

    @property
    def nodes(self) -> int:
        """N, with the root."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """Entries of the longest path; 0 for the root alone."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def width(self) -> int:
        """The largest rank + 1: the candidates a node needs. The root's rank is 0, so at least 1."""
        return 1 + max((path[-1] for path in self.paths), default=0)

    @functools.cached_property
    def index(self) -> dict[RankPath, int]:
        """Node of each path; the root's is ()."""
        return {path: node for node, path in enumerate(((), *self.paths))}

    @functools.cached_property
    def parent(self) -> np.ndarray:
        """[N] int32: the node above; 0 for the root."""
        return _static([0, *(self.index[path[:-1]] for path in self.paths)])

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """[N] int32: edges from the root; 0 for the root."""
        return _static([len(path) for path in self.index])

    @functools.cached_property
    def rank(self) -> np.ndarray:
        """[N] int32: place in the parent's list of candidates; 0 for the root."""
        return _static([0, *(path[-1] for path in self.paths)])

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """[N, N] bool: [i, j] is true where node j is node i or above it: where i may attend to j."""
        relation = np.eye(self.nodes, dtype=bool)
        for node in range(1, self.nodes):  # parents come first
            relation[node] |= relation[self.parent[node]]
        return _static(relation, bool)

    @functools.cached_property
    def node_paths(self) -> np.ndarray:
        """[N, max_depth + 1] int32: nodes from the root to the node, then the node again: always an index."""
        nodes = np.empty((self.nodes, self.max_depth + 1), np.int32)
        for path, node in self.index.items():
            nodes[node] = node
            nodes[node, : len(path)] = [self.index[path[:depth]] for depth in range(len(path))]
        return _static(nodes)

    @functools.cached_property
    def children(self) -> np.ndarray:
        """[N, width] int32: the node's child of each rank, -1 where it has none."""
        nodes = np.full((self.nodes, self.width), -1, np.int32)
        nodes[self.parent[1:], self.rank[1:]] = np.arange(1, self.nodes)
        return _static(nodes)

    @functools.cached_property
    def spine(self) -> np.ndarray:
        """[max_depth + 1] int32: the nodes (), (0,), (0, 0), ... as far as they are in the tree, then -1."""
        return _static([self.index.get((0,) * depth, -1) for depth in range(self.max_depth + 1)])

    # -------------------------------------------------------------------------------- rates and files

    def expected_tokens(self, hit_rates: HitRates) -> float:
        """Tokens per step: one, and each node with the probability that all of its path is right.

        Raises UserError for a node without a rate, and for rates that `grow` refuses.
        """
        missing = next((path for path in self.paths if path not in hit_rates), None)
        if missing is not None:
            raise UserError(f"hit rates: none for path {_show(missing)}")
        check_rates(hit_rates, "hit rates")
        return 1 + math.fsum(hit_rates[path] for path in self.paths)

    def to_json(self, hit_rates: HitRates | None = None) -> str:
        """The text of a tree file: an object with "paths" and, if given, each path's rate in "hit_rates"."""
        fields: dict[str, list[Any]] = {"paths": [list(path) for path in self.paths]}
        if hit_rates is not None:
            self.expected_tokens(hit_rates)  # refuses what load_tree would
            fields["hit_rates"] = [float(hit_rates[path]) for path in self.paths]
        lines = (f'  "{name}": {json.dumps(values)}' for name, values in fields.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path, hit_rates: HitRates | None = None) -> None:
        """Write a tree file, whole or not at all. Raises UserError when the file cannot be written."""
        write_atomically(Path(path), self.to_json(hit_rates).encode())


def published_names() -> tuple[str, ...]:
    """Names of the published trees."""
    return tuple(_published())


def load_tree(path: str | Path) -> tuple[Tree, dict[RankPath, float] | None]:
    """Read a tree file: a list of paths, or an object with "paths" and perhaps "hit_rates", one a path.

    Other fields of the object are the writer's own. Returns the tree and its rates (None: it has none).
    Raises UserError naming the file when it is missing, not JSON, of another form or not a tree.
    """
    return tree_of(read_json_value(Path(path)), str(path))


def tree_of(value: Any, name: str) -> tuple[Tree, dict[RankPath, float] | None]:
    """The tree and its rates of what a tree file holds; raises UserError, `name` in front, as `load_tree`."""
    if isinstance(value, dict):
        if "paths" not in value:
            raise UserError(f'{name}: the object has no "paths"')
        paths, rates = value["paths"], value.get("hit_rates")
    else:
        paths, rates = value, None
    if not isinstance(paths, list):
        raise UserError(f"{name}: expected a list of paths, found {type(paths).__name__}")
    tree = Tree.from_paths(paths, name)
    if rates is None:
        return tree, None
    if not isinstance(rates, list) or len(rates) != len(paths):
        found = len(rates) if isinstance(rates, list) else type(rates).__name__
        raise UserError(f'{name}: "hit_rates" is {found}, expected a list of {len(paths)}, one for each path')
    hit_rates = {tuple(path): rate for path, rate in zip(paths, rates, strict=True)}
    check_rates(hit_rates, name)
    return tree, {path: float(hit_rates[path]) for path in tree.paths}


@functools.cache
def _published() -> dict[str, Tree]:
    """Trees of the first implementation's medusa_choices.py (FasterDecoding/Medusa), by its names."""
    text = resources.files("medusa_jax").joinpath("trees/published.json").read_text(encoding="utf-8")
    return {name: Tree.from_paths(paths, name) for name, paths in json.loads(text).items()}


def _static(values: Any, dtype: type = np.int32) -> np.ndarray:
    array = np.asarray(values, dtype)
    array.setflags(write=False)
    return array


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for a name
        return False


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _checked(paths: Any, name: str, max_nodes: int | None) -> tuple[RankPath, ...]:
    """The paths as sorted tuples of int, or a UserError."""
    if isinstance(paths, str | bytes) or not isinstance(paths, Iterable):
        raise UserError(f"{name}: expected a list of paths, found {type(paths).__name__}")
    found: set[RankPath] = set()
    for value in paths:
        path = _checked_path(value, name)
        if path in found:
            raise UserError(f"{name}: path {_show(value)} is there twice")
        found.add(path)
        if max_nodes is not None and len(found) >= max_nodes:
            raise UserError(f"{name}: has more than {max_nodes} nodes (with the root)")
    order = tuple(sorted(found, key=lambda path: (len(path), path)))
    for path in order:
        if len(path) > 1 and path[:-1] not in found:
            raise UserError(f"{name}: path {_show(path)} is there without its parent {_show(path[:-1])}")
    return order


def _checked_path(value: Any, name: str) -> RankPath:
    if not isinstance(value, list | tuple):
        raise UserError(f"{name}: path {_show(value)} is not a list of ranks")
    if not value:
        raise UserError(f"{name}: a path is empty; the root is not listed")
    for rank in value:
        if not isinstance(rank, int | np.integer) or isinstance(rank, bool):
            raise UserError(f"{name}: path {_show(value)} has rank {_show(rank)}, expected an integer")
        if not 0 <= rank < MAX_RANKS:
            raise UserError(
                f"{name}: path {_show(value)} has rank {_show(rank)}, expected 0 to {MAX_RANKS - 1}"
            )
    if len(value) > MAX_DEPTH:
        raise UserError(
            f"{name}: path {_show(value)} has {len(value)} entries, at most {MAX_DEPTH} supported"
        )
    return tuple(int(rank) for rank in value)


def check_rates(hit_rates: HitRates, name: str) -> None:
    """Raise UserError, with `name` in front, for rates that cannot be joint probabilities."""
    for path, rate in hit_rates.items():
        number = isinstance(rate, int | float | np.integer | np.floating) and not isinstance(rate, bool)
        if not number or not 0 <= rate <= 1:  # NaN fails the comparison
            raise UserError(f"{name}: the hit rate of {_show(path)} is {_show(rate)}, expected 0 to 1")
    for path, rate in hit_rates.items():
        above = hit_rates.get(path[:-1], 1)
        if rate > above:
            raise UserError(
                f"{name}: the hit rate of {_show(path)} is {rate}, above its parent's {above}; a rate is the "
                "probability that the whole path is right, not that of a guess given the one before"
            )
