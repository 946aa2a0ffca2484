"""Which of the guesses that were proposed a step reads: those most likely to be right there.

A tree that is the same at every step spends nodes on guesses that this step's heads hold for unlikely, or
that lookup has nothing for. So a larger tree is proposed, which costs little beside the model's own forward,
and each row reads the nodes with the largest promise, its estimate of the probability that the node's whole
path is right. EAGLE-2 (Li et al. 2024, arXiv 2406.16858) chooses by the draft model's confidence; here one
of a head counts with the head's own probability, one of lookup with the rate at which those were right.

Rows that sample read the nodes with the largest measured rates, as a tree of that size would have: under
`rejection` a guess may not be left out because of what was drawn.

Shapes: B batch, U nodes proposed, N nodes read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.propose import EMPTY, Draft
from medusa_jax.tree import MAX_NODES, RankPath, Tree

# How often lookup's next token is right where those before it were; until a calibration says it.
LOOKUP_RATE = 0.8
WIDER = 2.5  # nodes proposed for each that is read; measured on a CPU, more gained nothing


@dataclasses.dataclass(frozen=True)
class Selection:
    """A tree to propose, and what is known of it before a step; static.

    rates: of each path of the tree, the probability that all of it is right. lookup_rates: by depth, that a
    token of lookup is right where those above it are; the last one holds for all further depths.
    """

    tree: Tree
    rates: tuple[float, ...]
    lookup_rates: tuple[float, ...]

    @classmethod
    def around(
        cls,
        tree: Tree,
        hit_rates: Mapping[RankPath, float],
        lookup_rates: tuple[float, ...] | None,
        depth: int,
    ) -> Selection | None:
        """What to propose where `tree` has the size to read; None where nothing more is known to guess.

        lookup_rates: None without lookup, which otherwise gets a chain of `depth` guesses.
        """
        most = tree.nodes - 1  # a step that reads so many guesses comes no deeper
        rates = {path: rate for path, rate in hit_rates.items() if len(path) <= most}
        wide = set(Tree.grow(rates, min(round(WIDER * tree.nodes), MAX_NODES)).paths)
        if lookup_rates is not None:
            wide |= {(0,) * length for length in range(1, min(depth, most) + 1)}
        made = Tree.from_paths(wide | set(tree.paths))
        if made.nodes == tree.nodes:
            return None
        known = tuple(float(hit_rates.get(path, 0.0)) for path in made.paths)
        return cls(made, known, lookup_rates or (LOOKUP_RATE,))

    @functools.cached_property
    def log_lookup(self) -> np.ndarray:
        """[max_depth] float32: log of lookup's rate at each depth, from 1."""
        last = self.lookup_rates[-1]
        rates = [*self.lookup_rates, *[last] * self.tree.max_depth][: self.tree.max_depth]
        return np.log(np.clip(np.array(rates, np.float32), 1e-6, 1))

    @functools.cached_property
    def log_rates(self) -> np.ndarray:
        """[U] float32: log of each node's rate, -inf for what was never right."""
        with np.errstate(divide="ignore"):
            return np.log(np.array([1.0, *self.rates], np.float32))


def promise(selection: Selection, draft: Draft, warm: jax.Array) -> jax.Array:
    """The log of each node's promise, [B, U]: 0 for the root, -inf without a token. warm [B]: samples."""
    assert draft.promise is not None
    known = jnp.where(draft.tokens == EMPTY, -jnp.inf, jnp.asarray(selection.log_rates)[None])
    return jnp.where(warm[:, None], known, draft.promise)


def read(selection: Selection, draft: Draft, nodes: int, warm: jax.Array) -> tuple[Draft, jax.Array]:
    """The draft without what is not read, and the nodes that are: [B, N] int32, parents first.

    As no promise is larger than that of the node above, and nodes are numbered from the root on, the
    largest promises (of equal ones the first) always form a tree, where they are above -inf.
    """
    chosen = jax.lax.top_k(promise(selection, draft, warm), nodes)[1]
    is_read = chosen[:, :, None] == jnp.arange(draft.tokens.shape[1])[None, None]
    tokens = jnp.where(jnp.any(is_read, axis=1), draft.tokens, EMPTY)
    place = jnp.argmax(is_read, axis=1).astype(jnp.int32)
    return dataclasses.replace(draft, tokens=tokens, place=place), chosen
