"""What `--tree auto` decodes with: source and size by device, batch and temperature.

Tokens per second are tokens per step over seconds of a step. The first of these that has times for this
batch on this device decides the size: a calibration in the user's cache that was made for this model and
these heads, then the one that comes with the heads. Where there is none, ASSUMED does, and the first
one that has rates gives the tree its form.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from medusa_jax import calibration
from medusa_jax.calibration import Calibration, Source
from medusa_jax.config import MedusaConfig
from medusa_jax.decode import Plan
from medusa_jax.errors import is_file
from medusa_jax.selection import LOOKUP_RATE, Selection
from medusa_jax.tree import RankPath, Tree
from medusa_jax.weights import fingerprint

if TYPE_CHECKING:
    from medusa_jax.weights.head_files import HeadCheckpoint
    from medusa_jax.weights.source import TensorSource

TREE_FILE = "tree.json"  # beside heads: what was measured for them
MARGIN = 1.05  # a tree must promise so much more than plain decoding: timings and texts vary

# Largest batch, nodes. Not measured on the device in question. What counts is the number of tokens in one
# forward: on CPUs that were measured about eight cost half as much again as one, 64 six times as much. On
# accelerators they are nearly free until arithmetic, not memory, is the limit, at some hundred.
ASSUMED = {
    "cpu": ((1, 8), (4, 4)),
    "accelerator": ((2, 64), (4, 32), (16, 16), (math.inf, 8)),
}

# Rank accuracies of published heads (Vicuna-7B, five heads, ranks 0 to 4, from the first implementation's
# training log), until a calibration replaces them.
_PUBLISHED_RATES = (
    (0.560, 0.112, 0.055, 0.033, 0.020),
    (0.316, 0.108, 0.061, 0.043, 0.034),
    (0.201, 0.087, 0.060, 0.035, 0.034),
    (0.147, 0.078, 0.047, 0.039, 0.029),
    (0.118, 0.069, 0.048, 0.037, 0.028),
)
LOOKUP_DEPTH = 7
_MATCH_RATE = 0.1  # a match is rare but goes on for long; not measured


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan, and a line for the user where it is plain decoding though guesses were to be had."""

    plan: Plan
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class AutoTree:
    """Chooses plans for one model on one device.

    heads: those of the model. lookup: whether it fills the tree too; None leaves that to the calibration.
    device: see `calibration.device_label`. accelerator: whether that is no CPU. remembered: the
    calibrations of the user's cache that fit, the newest first. shipped: the one beside the heads, if any.
    tree: the one beside the heads if it came without rates; nothing is known that would give another size.
    """

    heads: MedusaConfig | None
    lookup: bool | None
    device: str
    accelerator: bool
    remembered: tuple[Calibration, ...] = ()
    shipped: Calibration | None = None
    tree: Tree | None = None

    def choose(self, batch: int, temperature: float = 0.0) -> Choice:
        """The plan for a batch of so many rows. temperature: of its rows, the highest."""
        if self.heads is None and self.lookup is False:
            return Choice(Plan.plain())
        nearest = sorted(
            self.remembered,
            key=lambda one: ((one.temperature > 0) != (temperature > 0), abs(one.temperature - temperature)),
        )
        if not nearest and self.tree is not None:
            return Choice(plan_of(self.tree, self.heads, "heads" if self.lookup is False else "both"))
        known = [*nearest, self.shipped or assumed(self.heads)]
        for one in known:
            seconds = one.seconds(self.device, batch)
            if seconds is not None:
                nodes = best_size(self._source(one), seconds)
                why = "on this device no tree pays, as calibrated"
                return self._plan(one, nodes, batch, why)
        if self.heads is None and self.lookup is None and not self.accelerator:
            return Choice(Plan.plain())  # lookup alone was measured to lose there
        nodes = assumed_size(batch, self.accelerator)
        why = "no tree is expected to pay; python -m infer.calibrate measures it"
        return self._plan(known[0], nodes, batch, why)

    def _name(self, one: Calibration) -> str:
        if self.heads is None:
            return "lookup"
        if self.lookup is None:
            return one.source
        return "both" if self.lookup else "heads"

    def _source(self, one: Calibration) -> Source:
        """The rates that fit best: those of the same candidates, where they were measured."""
        return one.sources.get(self._name(one)) or one.sources[one.source]

    def _plan(self, one: Calibration, nodes: int, batch: int, why: str) -> Choice:
        plan = plan_for(self._source(one), nodes, self.heads, self._name(one))
        note = f"batch {batch}: {why}; decoding plainly" if plan.tree.nodes == 1 else None
        return Choice(plan, note)


def plan_of(tree: Tree, heads: MedusaConfig | None, name: str) -> Plan:
    """The plan of this tree filled by the candidates of this name, cut to where they reach."""
    if name == "heads" and heads is not None:
        tree = tree.cut(heads.num_heads)
    if tree.nodes == 1:
        return Plan.plain()
    return Plan(tree, None if name == "lookup" else heads, name != "heads")


def plan_for(source: Source, nodes: int, heads: MedusaConfig | None, name: str) -> Plan:
    """The plan that reads so many nodes, where heads are asked chosen from a larger tree at each step."""
    plan = plan_of(Tree.grow(source.rates, nodes), heads, name)
    if plan.heads is None:
        return plan
    reach = {p: rate for p, rate in source.rates.items() if plan.lookup or len(p) <= plan.heads.num_heads}
    looked_up = (source.lookup_rates or (LOOKUP_RATE,)) if plan.lookup else None
    depth = max(LOOKUP_DEPTH, plan.tree.max_depth)
    return dataclasses.replace(plan, selection=Selection.around(plan.tree, reach, looked_up, depth))


def best_size(source: Source, seconds: Mapping[int, float]) -> int:
    """The number of nodes that gives most tokens per second; 1 where none promises MARGIN above plain.

    seconds: of a step, by number of nodes, of 1 too.
    """
    speed = {nodes: source.gain(nodes) / time for nodes, time in sorted(seconds.items())}
    best = max(speed, key=speed.__getitem__)
    return best if speed[best] >= MARGIN * speed[1] else 1


def assumed_size(batch: int, accelerator: bool) -> int:
    """The number of nodes where nothing was timed; see ASSUMED. 1 is plain decoding."""
    sizes = ASSUMED["accelerator" if accelerator else "cpu"]
    return next((nodes for most, nodes in sizes if batch <= most), 1)


def find(
    model: TensorSource,
    heads: HeadCheckpoint | None,
    lookup: bool | None,
    mesh: jax.sharding.Mesh | None,
    dtype: Any,
    notes: list[str],
) -> AutoTree:
    """What chooses for this model and these heads, which need not have been read yet.

    A line for each calibration in the cache that had to be passed over is added to `notes`. Raises UserError
    for a damaged one beside the heads.
    """
    device = calibration.device_label(mesh, dtype)
    shipped, tree = (None, None) if heads is None else beside(heads.path)
    remembered = []
    # Processes of one run must choose alike, and each may have a cache of its own.
    if jax.process_count() == 1:
        remembered = calibration.remembered(
            device,
            lambda: None if heads is None else calibration.heads_fingerprint(heads),
            lambda: fingerprint.fingerprint(model),
            notes,
        )
    return AutoTree(
        heads=None if heads is None else heads.config,
        lookup=lookup,
        device=device,
        accelerator=jax.default_backend() != "cpu",
        remembered=tuple(remembered),
        shipped=shipped,
        tree=tree,
    )


def beside(heads: Path) -> tuple[Calibration | None, Tree | None]:
    """The calibration that lies beside heads, or the tree, where the file is one without rates.

    Raises UserError for a damaged file.
    """
    path = heads / TREE_FILE
    if not is_file(path):
        return None, None
    found = calibration.read(path)
    return (found, None) if found is not None else (None, Tree.load(path))


def assumed(heads: MedusaConfig | None) -> Calibration:
    """Published rates, as far as these heads reach; without heads lookup's chain. Nothing is timed."""
    chain: dict[RankPath, float] = {(0,) * length: _MATCH_RATE for length in range(1, LOOKUP_DEPTH + 1)}
    if heads is None:
        return Calibration("lookup", {"lookup": Source(chain)})
    depth = min(heads.num_heads, len(_PUBLISHED_RATES))
    rates = {
        path: math.prod(_PUBLISHED_RATES[d][rank] for d, rank in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(5), repeat=length)
    }
    both = rates | {path: max(rates.get(path, 0.0), rate) for path, rate in chain.items()}
    return Calibration("both", {"heads": Source(rates), "both": Source(both)})
