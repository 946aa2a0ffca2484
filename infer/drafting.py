"""What steps accept that choose which guesses they read (`medusa_jax.selection`), told from known answers.

Ranks of the true tokens are enough for a tree that is the same at every step. A choice depends on what the
wrong guesses promise as well, so here everything is proposed at every place of every answer, once for all
sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from infer import measuring

if TYPE_CHECKING:
    from infer.measuring import Answer, Progress, Ranks
    from medusa_jax import MedusaLM
    from medusa_jax.config import MedusaConfig
    from medusa_jax.decode import Plan
    from medusa_jax.tree import HitRates, Tree


@dataclasses.dataclass(frozen=True)
class Guesses:
    """What steps would propose along one answer: nodes [U] of a tree at its places [P].

    right: the whole path of the node is. there: the node has a token. promise: see `replay.drafts`. found:
    lookup has guesses there.
    """

    right: np.ndarray  # [P, U] bool
    there: np.ndarray  # [P, U] bool
    promise: np.ndarray  # [P, U] float32
    found: np.ndarray  # [P] bool


@dataclasses.dataclass(frozen=True)
class Drafted:
    """The guesses along all answers, of every tree that is to be judged.

    name: of the combination of candidates. temperature: at which the answers were drawn.
    """

    tree: Tree
    heads: MedusaConfig
    name: str
    temperature: float
    guesses: Sequence[Guesses]

    @classmethod
    def along(
        cls,
        lm: MedusaLM,
        answers: Sequence[Answer],
        rows: Ranks,
        sizes: Sequence[int],
        name: str,
        temperature: float,
        progress: Progress = None,
    ) -> Drafted:
        """Propose what trees of these sizes may hold, grown on all answers or on those of a fold."""
        from medusa_jax.tree import Tree

        assert lm.heads is not None
        config, _ = lm.heads
        learnt = [list(range(len(rows))), *(learnt for _, learnt in measuring.folds(len(rows)))]
        paths = set()
        for some in learnt:
            own = measuring.rates([rows[i] for i in some])
            for size in sizes:
                paths |= set(_plan(own, (), size, config, name).proposed.paths)
        tree = Tree.from_paths(paths)
        lookup = name != "heads"
        found = []
        for number, answer in enumerate(answers, 1):
            found.append(_guesses(lm, answer, tree, lookup, temperature))
            if progress is not None:
                progress(number, len(answers))
        return cls(tree, config, name, temperature, found)

    def lookup_rates(self, rows: Ranks, numbers: Sequence[int]) -> tuple[float, ...]:
        """By depth, how often lookup's token was right where those above it were, in some answers.

        rows: ranks of all answers. Counted where steps begin; empty where lookup had nothing.
        """
        counts = np.zeros(self.tree.max_depth + 1)
        spine = [node for node in self.tree.spine.tolist() if node >= 0]
        for number, places in zip(numbers, measuring.starts([rows[i] for i in numbers]), strict=True):
            own = self.guesses[number]
            counted = own.right[[at for at in places if own.found[at]]][:, spine]
            counts[: len(spine)] += counted.sum(0)
        if self.name == "heads" or not counts[0]:
            return ()
        return tuple((counts[1 : len(spine)] / np.maximum(counts[: len(spine) - 1], 1)).tolist())

    def plan(self, rates: HitRates, lookup_rates: tuple[float, ...], nodes: int) -> Plan:
        """What `--tree auto` would decode with, had these rates been measured and this size chosen."""
        return _plan(rates, lookup_rates, nodes, self.heads, self.name)

    def steps(self, plan: Plan, number: int) -> int:
        """The steps that a plan takes for the answer of this number."""
        reach = self._reach(plan, self.guesses[number])
        at = steps = 0
        while at < len(reach):
            at += 1 + min(int(reach[at]), len(reach) - at - 1)
            steps += 1
        return steps

    def _reach(self, plan: Plan, own: Guesses) -> np.ndarray:
        """The guesses that a step at each place accepts, [P]."""
        at = [self.tree.index[path] for path in ((), *plan.proposed.paths)]
        right = own.right[:, at]
        if plan.selection is not None:
            promise = plan.selection.log_rates[None]
            if self.temperature == 0:
                on_spine = [_leading_zeros(path) for path in ((), *plan.proposed.paths)]
                of_lookup = np.r_[0, plan.selection.log_lookup.cumsum()][on_spine]
                promise = own.promise[:, at] + own.found[:, None] * of_lookup[None]
            promise = np.where(own.there[:, at], promise, -np.inf)
            order = np.argsort(-promise, axis=1, kind="stable")[:, : plan.tree.nodes]
            is_read = np.zeros_like(right)
            np.put_along_axis(is_read, order, True, axis=1)
            right = right & is_read
        return np.where(right, plan.proposed.depth[None], 0).max(axis=1)


def _leading_zeros(path: Sequence[int]) -> int:
    """How many of its nodes lie on the spine."""
    return next((depth for depth, rank in enumerate(path) if rank), len(path))


def _plan(
    rates: HitRates, lookup_rates: tuple[float, ...], nodes: int, heads: MedusaConfig, name: str
) -> Plan:
    from medusa_jax.calibration import Source
    from medusa_jax.tree_choice import plan_for

    return plan_for(Source(dict(rates), {}, lookup_rates), nodes, heads, name)


def _guesses(lm: MedusaLM, answer: Answer, tree: Tree, lookup: bool, temperature: float) -> Guesses:
    from medusa_jax import replay
    from medusa_jax.propose import EMPTY

    assert lm.heads is not None
    config, made = lm.heads
    size = len(answer.ids)
    padded = replay.padded(answer.ids)
    program = lm.programs.drafts(len(padded), tree, config, lookup)
    drafted = program(lm.params, made, padded, np.uint32(answer.seed), np.float32(temperature))
    places = np.arange(answer.start - 1, size - 1)
    tokens, promise, found = (np.asarray(part)[places] for part in drafted)
    text = np.full((len(padded) + tree.max_depth,), EMPTY - 1)  # behind the text nothing is right
    text[:size] = answer.ids
    right = tokens == text[places[:, None] + 1 + tree.depth]
    for node in range(1, tree.nodes):
        right[:, node] &= right[:, tree.parent[node]]
    return Guesses(right, tokens != EMPTY, promise, found)
