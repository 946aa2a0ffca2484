"""Names of heads' tensors in other projects' files.

    first implementation   medusa_lm_head.pt or .safetensors: {h}.{l}.linear.weight and .bias; v1 also has
                           {h}.{L}.weight, in v2 the model's unembedding is shared. TGI and TensorRT-LLM
                           read the same names
    v1.0, MLC-LLM          the names of v1 after `medusa_head.`, in a whole model or alone
    ModelOpt               the names of v1 after `medusa_heads.`, in a whole model; scales where it is FP8
    vLLM                   blocks.{h}.layers.{l}.weight and .bias, lm_heads.{h}.weight or one lm_head.weight,
                           token_map

All mean the same function as `heads.HeadStack`, and weights are [out, in] as ours are: nothing is transposed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import NamedTuple

REFERENCE_OWN, REFERENCE_SHARED = "first implementation v1", "first implementation v2"
WHOLE_MODEL, MLC = "first implementation v1.0, a whole model", "MLC-LLM"

_N = "0|[1-9][0-9]{0,5}"  # plain numbers only: "00" would be a second name of head 0


class Numbers(NamedTuple):
    """What a tensor's name says."""

    parameter: str  # of `HeadStack`
    head: int
    layer: int  # 0 where the name has none


@dataclasses.dataclass(frozen=True)
class Layout:
    """One project's names. Tensors without the prefix are a model's, and left alone."""

    kind: str
    prefix: str
    weight: str
    bias: str
    unembedding: str
    removed: str = ""  # taken out of names before they are compared

    def name(self, parameter: str, place: tuple[int, ...], num_layers: int) -> str:
        """The tensor's name for a part of a head, at (head, layer) or (head,)."""
        h, *layer = place
        return self.prefix + getattr(self, parameter).format(h=h, l=layer[0] if layer else num_layers)

    def plain(self, name: str) -> str:
        """A name without what this project ignores in it."""
        return name.replace(self.removed, "") if self.removed else name

    def names(self, name: str) -> bool:
        """Whether this is the name of a part of a head."""
        return self.numbers(self.plain(name)) is not None

    def numbers(self, name: str) -> Numbers | None:
        """What a plain name says; None for the name of anything but a part of a head."""
        for parameter in ("weight", "bias", "unembedding"):
            pattern = re.escape(self.prefix + getattr(self, parameter))
            pattern = pattern.replace(r"\{h\}", f"(?P<h>{_N})").replace(r"\{l\}", f"(?P<l>{_N})")
            if match := re.fullmatch(pattern, name):
                return Numbers(parameter, int(match["h"]), int(match.groupdict().get("l") or 0))
        return None


_V1 = ("{h}.{l}.linear.weight", "{h}.{l}.linear.bias", "{h}.{l}.weight")
REFERENCE = Layout("first implementation", "", *_V1)
IN_MODEL = Layout("first implementation", "medusa_head.", *_V1)
MODELOPT = Layout("ModelOpt", "medusa_heads.", *_V1)
VLLM = Layout(
    "vLLM",
    "",
    "blocks.{h}.layers.{l}.weight",
    "blocks.{h}.layers.{l}.bias",
    "lm_heads.{h}.weight",
    removed="medusa_heads.",
)
_LAYOUTS = (VLLM, MODELOPT, IN_MODEL, REFERENCE)


def others(layout: Layout) -> tuple[Layout, ...]:
    """All layouts but one."""
    return tuple(one for one in _LAYOUTS if one is not layout)


def layout_of(names: Collection[str]) -> Layout | None:
    """The layout that most of these are names of, or at least whose prefix some have."""
    counts = {layout: sum(layout.names(name) for name in names) for layout in _LAYOUTS}
    best = max(_LAYOUTS, key=counts.__getitem__)
    if counts[best]:
        return best
    return next((one for one in (MODELOPT, IN_MODEL) if any(n.startswith(one.prefix) for n in names)), None)
