"""Pictures of a tree of guesses: for a terminal, and as a PNG file (needs matplotlib, the `plot` extra)."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.text
import rich.tree

from medusa_jax.errors import UserError, write_atomically
from medusa_jax.tree import HitRates, RankPath, Tree, check_rates

# Inches.
ROW, LAYER = 0.265, 1.35
COUSINS = 1.3  # rows between nodes of different parents, where sisters are one apart
BOX_WIDTH, BOX_HEIGHT = 0.66, 0.205
MARGIN, LINE = 0.25, 0.23
LETTER = 0.095  # a wide letter of the title

DPI = 160
MAX_PIXELS = 20_000  # a side; the resolution falls for trees of very many leaves
EDGE_POINTS = 1.0, 7.0  # thickness at rates of 0 and 1
INK, MUTED, PLAIN = "#1b1e28", "#5b6172", "#8d95a8"


def to_text(tree: Tree, hit_rates: HitRates | None = None) -> rich.tree.Tree:
    """The tree for a `rich` console, a line for each node: its rank, and its hit rate where that is known.

    hit_rates: for each path the probability that all of its guesses are right; paths may be missing.
    Raises UserError for a rate outside [0, 1] or above its parent's.
    """
    if hit_rates is not None:
        check_rates(hit_rates, "hit rates")
    drawn = rich.tree.Tree(rich.text.Text(_summary(tree, hit_rates), style="bold"), guide_style="dim")
    branches: dict[RankPath, rich.tree.Tree] = {(): drawn}
    for path in tree.paths:
        label = rich.text.Text(str(path[-1]))
        if hit_rates is not None and path in hit_rates:
            label.append(f"  {_percent(hit_rates[path])} %", style="cyan")
        branches[path] = branches[path[:-1]].add(label)
    return drawn


def to_png(tree: Tree, path: str | Path, hit_rates: HitRates | None = None, title: str | None = None) -> None:
    """Draw the tree into a PNG file: depth from left to right, and in each node its rank.

    hit_rates: for each path the probability that all of its guesses are right; paths may be missing. Edges
    are thicker and darker with it, and it stands beside the rank in percent. The file appears whole or not at
    all. Raises UserError for such rates as `to_text` refuses, when matplotlib is not installed, and
    when the file cannot be written.
    """
    if hit_rates is not None:
        check_rates(hit_rates, "hit rates")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"{path}: drawing needs matplotlib: pip install 'medusa-jax[plot]'") from None
    title, summary = title or "", _summary(tree, hit_rates)
    header = (3 if title else 2) * 0.7 * LINE
    rows = _rows(tree)
    # A figure of its own, not pyplot's: no window system, no state that outlives the call.
    text_width = LETTER * max(len(title), 0.72 * len(summary))
    width = max(tree.max_depth * LAYER + BOX_WIDTH, text_width) + 2 * MARGIN
    height = max(rows.values()) * ROW + BOX_HEIGHT + header + 2 * MARGIN
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    axes.text(MARGIN, height - MARGIN, title, va="top", size=11, weight="bold", color=INK)
    below = height - MARGIN - (LINE if title else 0)
    axes.text(MARGIN, below, summary, va="top", size=8.5, color=MUTED)
    left, top = MARGIN + BOX_WIDTH / 2, height - MARGIN - header - BOX_HEIGHT / 2
    place = {path: (left + len(path) * LAYER, top - row * ROW) for path, row in rows.items()}
    _draw(axes, tree, place, hit_rates or {})
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=min(DPI, MAX_PIXELS / max(width, height)))
    write_atomically(Path(path), picture.getvalue())


def _summary(tree: Tree, hit_rates: HitRates | None) -> str:
    text = f"{tree.nodes} node{'s' if tree.nodes > 1 else ''}, depth {tree.max_depth}"
    if hit_rates is not None and all(path in hit_rates for path in tree.paths):
        text += f", {tree.expected_tokens(hit_rates):.2f} tokens per step"
    return text


def _percent(rate: float) -> str:
    percent = 100 * rate
    return f"{percent:.0f}" if percent >= 9.95 or percent == 0 else f"{percent:.1f}"


def _rows(tree: Tree) -> dict[RankPath, float]:
    """Where each node stands, in rows from 0 on: at least one apart in a layer, parents amid children."""
    children: dict[RankPath, list[RankPath]] = {}
    for path in tree.paths:
        children.setdefault(path[:-1], []).append(path)
    offset: dict[RankPath, float] = {(): 0.0}  # from the parent
    # A subtree's outline: its first and last row in each layer, seen from its own root.
    outlines: dict[RankPath, list[tuple[float, float]]] = {}
    for path in reversed(((), *tree.paths)):  # children before their parents
        outline: list[tuple[float, float]] = []
        for child in children.get(path, ()):
            # As close to the sisters above it as the nearest layer allows.
            gaps = itertools.chain((1.0,), itertools.repeat(COUSINS))
            sides = zip(outline, outlines[child], gaps, strict=False)
            at = max((last + gap - first for (_, last), (first, _), gap in sides), default=0.0)
            offset[child] = at
            below = [(at + first, at + last) for first, last in outlines.pop(child)]
            shared = [(first, last) for (first, _), (_, last) in zip(outline, below, strict=False)]
            outline = shared + outline[len(below) :] + below[len(outline) :]
        if outline:
            middle = (offset[children[path][0]] + offset[children[path][-1]]) / 2
            outline = [(first - middle, last - middle) for first, last in outline]
            for child in children[path]:
                offset[child] -= middle
        outlines[path] = [(0.0, 0.0), *outline]
    rows: dict[RankPath, float] = {(): -min(first for first, _ in outlines[()])}
    for path in tree.paths:
        rows[path] = rows[path[:-1]] + offset[path]
    return rows


def _draw(axes: Any, tree: Tree, place: dict[RankPath, tuple[float, float]], hit_rates: HitRates) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path as Curve

    # cividis reads the same with the common colour-vision deficiencies; its yellow end is too pale on white.
    # Most rates are small: the square root spreads them over the scale.
    shades = colormaps["cividis"]
    colours = {path: shades(0.8 - 0.8 * math.sqrt(rate)) for path, rate in hit_rates.items()}
    bends = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    for path in tree.paths:
        (x0, y0), (x1, y1) = place[path[:-1]], place[path]
        x0, x1 = x0 + BOX_WIDTH / 2, x1 - BOX_WIDTH / 2
        middle, rate = (x0 + x1) / 2, hit_rates.get(path, 0.0)
        axes.add_patch(
            PathPatch(
                Curve([(x0, y0), (middle, y0), (middle, y1), (x1, y1)], bends),
                fill=False,
                edgecolor=colours.get(path, PLAIN),
                linewidth=EDGE_POINTS[0] + (EDGE_POINTS[1] - EDGE_POINTS[0]) * rate,
                zorder=1 + rate,  # likely edges above the others
            )
        )
    centred = {"ha": "center", "va": "center_baseline", "zorder": 4}
    for path, (x, y) in place.items():
        corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
        style = {"boxstyle": "round,pad=0,rounding_size=0.07", "linewidth": 1.2, "zorder": 3}
        style |= {"edgecolor": colours.get(path, PLAIN), "facecolor": "white"} if path else {"color": INK}
        axes.add_patch(FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, **style))
        if not path:
            axes.text(x, y, "root", **centred, size=8, color="white")
        elif path not in hit_rates:
            axes.text(x, y, str(path[-1]), **centred, size=9, color=INK)
        else:
            axes.text(x - 0.2, y, str(path[-1]), **centred, size=9, color=INK)
            axes.text(x + 0.1, y, f"{_percent(hit_rates[path])} %", **centred, size=7.5, color=MUTED)


def curves_to_png(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw what `infer.calibrate` measured: tokens per step, step time and tokens per second by nodes.

    result: a calibration as its file holds it; of its devices the one it was made on is shown, a line a
    batch; the chosen size has a ring. Without times only the first is drawn. Raises UserError when matplotlib
    is not installed, and when the file cannot be written.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
    except ImportError:
        raise UserError(f"{path}: drawing needs matplotlib: pip install 'medusa-jax[plot]'") from None
    device = result["device"]
    times = result["step_seconds"].get(device, {})
    batches = sorted(times, key=int)
    panels = 3 if batches else 1
    figure = Figure(figsize=(0.4 + 4.6 * panels, 4.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    marks: dict[str, Any] = {"markersize": 3.5, "linewidth": 1.3}

    def points(row: Mapping[str, float]) -> tuple[list[int], list[float]]:
        sizes = sorted(map(int, row))
        return sizes, [row[str(size)] for size in sizes]

    shades = colormaps["cividis"]
    for number, (name, fields) in enumerate(result["sources"].items()):
        sizes, values = points(fields["tokens_per_step"])
        line = f"o{('-', '--', '-.')[number % 3]}"
        axes[0].plot(sizes, values, line, color=shades(0.4 * number), label=name, **marks)
    axes[0].set_ylabel("tokens per step")
    axes[0].legend(frameon=False, title="guesses from")
    gains = result["sources"][result["source"]]["tokens_per_step"]
    for number, batch in enumerate(batches):
        # The yellow end of cividis is too pale on white.
        colour = shades(0.85 * number / max(len(batches) - 1, 1))
        style = {"color": colour, "label": batch, **marks}
        sizes, seconds = points(times[batch])
        axes[1].plot(sizes, [1000 * value for value in seconds], "o-", **style)
        speed = {
            n: int(batch) * gains[str(n)] / s for n, s in zip(sizes, seconds, strict=True) if str(n) in gains
        }
        axes[2].plot(list(speed), list(speed.values()), "o-", **style)
        best = result["chosen"][device][batch]
        axes[2].plot(best, speed[best], "o", color=colour, markersize=10, fillstyle="none")
    if batches:
        axes[1].set_ylabel(f"milliseconds of a step ({device})")
        axes[2].set_ylabel("tokens per second, all rows (ring: chosen)")
        axes[2].legend(frameon=False, title="batch", loc="upper right")
        for one in axes[1:]:
            one.set_ylim(bottom=0)
    ticks = sorted({int(n) for fields in result["sources"].values() for n in fields["tokens_per_step"]})
    for one in axes:
        one.set_xscale("log", base=2)
        one.xaxis.set_major_locator(FixedLocator(ticks))
        one.xaxis.set_minor_locator(NullLocator())
        one.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        one.set_xlabel("nodes of the tree")
        one.grid(color="#e6e8ee", linewidth=0.8)
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI)
    write_atomically(Path(path), picture.getvalue())
