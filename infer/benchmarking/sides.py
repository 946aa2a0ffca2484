"""The sides of a benchmark: what is compared, each a way to decode that takes its turn at every prompt."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infer import cli

if TYPE_CHECKING:
    from medusa_jax import MedusaLM, SamplingParams
    from medusa_jax.decode import Plan

MODES = ("plain", "medusa")
RULES = ("exact", "rejection", "typical")
MOST_SIDES = 64


@dataclasses.dataclass(frozen=True)
class Side:
    """One combination. Plain decoding has no tree, greedy decoding no acceptance rule (all are the same)."""

    mode: str
    tree: str
    acceptance: str
    temperature: float
    batch: int

    @property
    def plain(self) -> bool:
        """Whether it guesses nothing."""
        return self.mode == "plain"

    @property
    def lossy(self) -> bool:
        """Whether its texts are not those, nor of the law, of plain decoding."""
        return self.acceptance == "typical"

    @property
    def group(self) -> tuple[float, int]:
        """What it shares with the plain side that it is compared with: temperature and batch size."""
        return self.temperature, self.batch

    def params(self, common: SamplingParams) -> SamplingParams:
        """The sampling parameters of its prompts."""
        rule = self.acceptance or "exact"
        return dataclasses.replace(common, temperature=self.temperature, acceptance=rule)


def every_side(
    modes: Sequence[str],
    trees: Sequence[str],
    rules: Sequence[str],
    temperatures: Sequence[float],
    batches: Sequence[int],
) -> dict[str, Side]:
    """All combinations by name, plain first. The names are those of files too."""
    found: dict[Side, None] = {}
    for batch in batches:
        for temperature in temperatures:
            for mode in MODES:
                if mode not in modes:
                    continue
                for tree in trees if mode == "medusa" else [""]:
                    for rule in rules if mode == "medusa" and temperature > 0 else [""]:
                        found[Side(mode, tree, rule, temperature, batch)] = None
    named: dict[str, Side] = {}
    for side in found:
        parts = [side.mode, _slug(side.tree), side.acceptance, f"t{side.temperature:g}", f"b{side.batch}"]
        name = "-".join(part for part in parts if part)
        while name in named:  # trees of different folders may have one name
            name += "x"
        named[name] = side
    return named


def _slug(tree: str) -> str:
    stem = re.split(r"[/\\]", tree)[-1].removesuffix(".json")
    return re.sub(r"[^A-Za-z0-9_.]+", "_", stem)[:40]


def labels(sides: Mapping[str, Side]) -> dict[str, str]:
    """What tables and pictures call each side: its mode, and only what sets sides apart here."""

    def several(values: list[Any]) -> bool:
        return len(set(values)) > 1

    medusa = [side for side in sides.values() if not side.plain]
    trees = several([side.tree for side in medusa])
    rules = several([side.acceptance for side in medusa if side.acceptance])
    warm = several([side.temperature for side in sides.values()])
    batches = several([side.batch for side in sides.values()])
    made = {}
    for name, side in sides.items():
        parts = ["plain" if side.plain else "Medusa"]
        if not side.plain and trees:
            parts.append(f"tree {_slug(side.tree)}")
        if side.acceptance and (rules or side.lossy):
            parts.append(side.acceptance)
        parts += [f"T={side.temperature:g}"] if warm else []
        parts += [f"batch {side.batch}"] if batches else []
        made[name] = ", ".join(parts)
    return made


def plans(lm: MedusaLM, sides: Mapping[str, Side], lookup: str) -> dict[str, Plan]:
    """What each side's steps guess. `lm` was loaded with tree "auto".

    Raises UserError when a side of Medusa decoding has nothing to guess from.
    """
    from medusa_jax import UserError
    from medusa_jax.decode import Plan

    made: dict[str, Plan] = {}
    for name, side in sides.items():
        if side.plain:
            made[name] = Plan.plain()
            continue
        if side.tree == "auto":
            lm.use("auto")
        else:
            lm.use(cli.parse_tree(side.tree), lookup=lookup != "off")
        made[name] = lm.plan_for(side.batch, side.temperature)
        if made[name].tree.nodes == 1 and lm.heads is None and lookup != "on":
            raise UserError("Medusa decoding needs guesses: give --heads or --lookup on, or --modes plain")
    return made


def listed(flag: str, values: Sequence[str], read: Callable[[str], Any], expected: str) -> list[Any]:
    """The values of a flag that takes a list, parted by commas or blanks, each once.

    Raises UserError naming the flag and the value that `read` refuses with a ValueError.
    """
    from medusa_jax import UserError

    found: list[Any] = []
    for text in [part.strip() for value in values for part in value.split(",")]:
        try:
            value = read(text)
        except ValueError as error:
            said = str(error) if isinstance(error, UserError) else f"{text!r}, expected {expected}"
            raise UserError(f"{flag}: {said}") from None
        if value not in found:
            found.append(value)
    return found
