"""The pictures of a benchmark, each drawn only where the run has what it shows."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_jax.errors import write_atomically

# Okabe and Ito's colours, told apart with the common colour-vision deficiencies; black is plain decoding's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, MUTED, GRID = "#222222", "#666666", "#dddddd"
DPI = 150
MOST_SERIES = len(COLOURS)

Sides = Mapping[str, Mapping[str, Any]]


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the results hold into PNG files of a folder; returns their paths.

    Raises UserError when matplotlib is missing or a file cannot be written.
    """
    sides: Sides = results["sides"]
    made = []
    for name, picture in PICTURES.items():
        figure = picture(results, sides)
        if figure is not None:
            made.append(folder / f"{name}.png")
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=DPI)
            write_atomically(made[-1], data.getvalue())
    return made


def _first_batch(sides: Sides) -> list[Mapping[str, Any]]:
    """The sides of the smallest batch size; what tokens are accepted does not hang on it."""
    least = min(side["batch"] for side in sides.values())
    return [side for side in sides.values() if side["batch"] == least]


def _label(side: Mapping[str, Any]) -> str:
    return side["label"].removesuffix(f", batch {side['batch']}")


def _left_out(every: Sequence[Any]) -> list[str]:
    """What a picture says when it shows fewer series than there are."""
    return [f"the first {MOST_SERIES} of {len(every)} sides"] if len(every) > MOST_SERIES else []


def _axes(
    title: str, x: str, y: str, results: Mapping[str, Any], width: float = 7.0, more: Sequence[str] = ()
) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no window system, no state that outlives the call.
    figure = Figure(figsize=(width, 4.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", size=12, weight="bold", color=INK, pad=22)
    told = [results["model"], results["suite"]["name"], results["device"], *more]
    axes.text(0, 1.02, ", ".join(told), transform=axes.transAxes, size=8.5, color=MUTED, va="bottom")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        # Below the picture: it never covers a value.
        room = int(axes.figure.get_figwidth() * 12 / (max(map(len, names)) + 7))
        columns = max(1, min(len(names), room))
        axes.figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def _ints(axis: Any, values: Sequence[int]) -> None:
    axis.set_ticks(sorted(set(values)), labels=[str(value) for value in sorted(set(values))])
    axis.set_minor_locator(_none())


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def speedup_by_category(results: Mapping[str, Any], sides: Sides) -> Any:
    """Bars: each category, all, and all that do not loop."""
    every = [side for side in _first_batch(sides) if not side["plain"] and side["all"].get("speedup")]
    shown = every[:MOST_SERIES]
    if not shown:
        return None
    groups: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = []
    if len(results["categories"]) > 1:
        for category in results["categories"]:
            groups.append((category, lambda side, name=category: side["categories"].get(name, {}).get("all")))
    groups.append(("all", lambda side: side["all"]))
    if any(side["all"]["looping_share"] for side in shown):
        groups.append(("not looping", lambda side: side["not_looping"]))
    width = min(max(7.0, 1.1 + len(groups) * max(0.34 * len(shown), 0.75)), 16)
    more = [f"batch {shown[0]['batch']}", *_left_out(every)]
    figure, axes = _axes("Speed-up by category", "", "times plain decoding", results, width, more)
    bar = 0.8 / len(shown)
    labelled = bar * width / len(groups) > 0.28  # inches: room for a number above a bar
    top = 1.0
    for number, side in enumerate(shown):
        at = [place + (number - (len(shown) - 1) / 2) * bar for place in range(len(groups))]
        found = [read(side) or {} for _, read in groups]
        values = [one.get("speedup") or 0.0 for one in found]
        axes.bar(at, values, bar * 0.92, color=COLOURS[number], label=_label(side))
        for x, value, one in zip(at, values, found, strict=True):
            interval = one.get("speedup_interval")
            tip = value
            if interval:
                low, high = max(value - interval[0], 0), max(interval[1] - value, 0)
                axes.errorbar(x, value, [[low], [high]], color=INK, linewidth=1, capsize=2)
                tip = value + high
            top = max(top, tip)
            if labelled and value:
                # At the foot of the bar, which no interval reaches.
                style = {"ha": "center", "va": "bottom", "size": 7.5, "color": "white"}
                axes.annotate(f"{value:.2f}", (x, 0), (0, 4), textcoords="offset points", **style)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(0, top * 1.12)
    names = [name.replace("_", " ") for name, _ in groups]
    axes.set_xticks(range(len(groups)), names, rotation=25 if len(groups) > 5 else 0)
    if len(groups) > 1 and len(results["categories"]) > 1:
        axes.axvline(len(results["categories"]) - 0.5, color=GRID, linewidth=1)
    _legend(axes)
    return figure


def _by_nodes(
    results: Mapping[str, Any],
    sides: Sequence[Mapping[str, Any]],
    value: str,
    title: str,
    y: str,
    scale: float,
) -> Any:
    """A curve over the nodes of trees, for each rule, temperature and batch size; plain is one node."""
    groups: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for side in sides:
        if not side["plain"] and side["all"][value] is not None:
            own = side["acceptance"], side["temperature"], side["batch"]
            groups.setdefault(own, []).append((side["nodes"], side["all"][value] * scale))
    for side in sides:
        for (_, *group), points in groups.items():
            if side["plain"] and group == [side["temperature"], side["batch"]] and side["all"][value]:
                points.append((1, side["all"][value] * scale))
    several = {
        key: sorted(points) for key, points in groups.items() if len({n for n, _ in points if n > 1}) > 1
    }
    if not several:
        return None
    shapes = ("{}", "T={:g}", "batch {}")
    varied = [index for index in range(3) if len({key[index] for key in several}) > 1]
    figure, axes = _axes(
        title, "nodes of the tree (the root included)", y, results, more=_left_out([*several])
    )
    top, ticks = 0.0, set()
    for number, (key, points) in enumerate([*several.items()][:MOST_SERIES]):
        parts = [shapes[index].format(key[index]) for index in varied if key[index] != ""]
        best: dict[int, float] = {}  # of trees of one size, such as a sparse and a dense one
        for nodes, reading in points:
            best[nodes] = max(best.get(nodes, reading), reading)
        axes.plot([*best], [*best.values()], color=COLOURS[number], linewidth=1.6)
        style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 6}
        x, readings = zip(*points, strict=True)
        axes.plot(x, readings, linestyle="", label=", ".join(parts), **style)
        top, ticks = max(top, *best.values()), ticks | best.keys()
    axes.set_xscale("log", base=2)
    _ints(axes.xaxis, sorted(ticks))
    axes.set_ylim(0, top * 1.1)
    _legend(axes)
    return figure


def tokens_by_nodes(results: Mapping[str, Any], sides: Sides) -> Any:
    """Tokens per step against nodes."""
    title = "Tokens per step by size of the tree"
    return _by_nodes(results, _first_batch(sides), "tokens_per_step", title, "tokens per step", 1)


def step_time_by_nodes(results: Mapping[str, Any], sides: Sides) -> Any:
    """Step time against nodes."""
    title = "Time of a step by size of the tree"
    return _by_nodes(results, [*sides.values()], "step_seconds", title, "milliseconds a step", 1e3)


def acceptance_by_depth(results: Mapping[str, Any], sides: Sides) -> Any:
    """The share of steps whose guesses held to each depth."""
    guessing = [side for side in _first_batch(sides) if side["depth"] and sum(side["accepted_by_depth"])]
    shown = guessing[:MOST_SERIES]
    if not shown:
        return None
    title, more = "Acceptance by depth", _left_out(guessing)
    figure, axes = _axes(title, "guess, from the root", "% of steps that accept it", results, more=more)
    deepest = max(side["depth"] for side in shown)
    for number, side in enumerate(shown):
        counts, depth = side["accepted_by_depth"], side["depth"]
        shares = [100 * sum(counts[d:]) / sum(counts) for d in range(1, depth + 1)]
        style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 6, "linewidth": 1.6}
        axes.plot(range(1, depth + 1), shares, label=_label(side), **style)
        if len(shown) == 1:
            for d, share in enumerate(shares, 1):
                axes.annotate(
                    f"{share:.0f}", (d, share), (0, 6), textcoords="offset points", ha="center", size=8
                )
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlim(0.7, deepest + 0.3)
    axes.set_ylim(0, 100)
    _legend(axes)
    return figure


def speedup_by_batch(results: Mapping[str, Any], sides: Sides) -> Any:
    """Speed-up against batch size, with its interval."""
    series: dict[str, list[tuple[int, float, Any]]] = {}
    for side in sides.values():
        if not side["plain"] and side["all"].get("speedup"):
            part = side["all"]
            series.setdefault(_label(side), []).append(
                (side["batch"], part["speedup"], part["speedup_interval"])
            )
    batches = sorted({batch for points in series.values() for batch, _, _ in points})
    if len(batches) < 2:
        return None
    figure, axes = _axes(
        "Speed-up by batch size", "prompts decoded at a time", "times plain decoding", results
    )
    top = 1.0
    for number, (name, points) in enumerate(list(series.items())[:MOST_SERIES]):
        points = sorted(points, key=lambda point: point[0])
        x, y = [point[0] for point in points], [point[1] for point in points]
        style = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 6, "linewidth": 1.6}
        axes.plot(x, y, label=name, **style)
        if all(point[2] for point in points):
            low, high = [point[2][0] for point in points], [point[2][1] for point in points]
            axes.fill_between(x, low, high, color=COLOURS[number], alpha=0.15, linewidth=0)
            top = max(top, *high)
        top = max(top, *y)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xscale("log", base=2)
    _ints(axes.xaxis, batches)
    axes.set_ylim(0, top * 1.1)
    _legend(axes)
    return figure


def head_accuracy(results: Mapping[str, Any], _: Sides) -> Any:
    """Top-k accuracy of each head."""
    found = results.get("accuracy")
    if not found:
        return None
    figure, axes = _axes("Accuracy of the heads", "k", "% of tokens among the head's first k", results)
    ranks = range(1, len(found["top"][0]) + 1)
    for m, top in enumerate(found["top"]):
        style = {"color": COLOURS[m % MOST_SERIES], "marker": MARKERS[m % MOST_SERIES]}
        label = f"head {m + 1}: {100 * top[0]:.0f} % at k = 1"
        axes.plot(ranks, [100 * share for share in top], label=label, linewidth=1.6, markersize=5, **style)
    axes.set_xticks(ranks)
    axes.set_ylim(0, 100)
    _legend(axes)
    return figure


PICTURES: dict[str, Callable[[Mapping[str, Any], Sides], Any]] = {
    "speedup_by_category": speedup_by_category,
    "tokens_per_step_by_nodes": tokens_by_nodes,
    "step_time_by_nodes": step_time_by_nodes,
    "acceptance_by_depth": acceptance_by_depth,
    "speedup_by_batch": speedup_by_batch,
    "head_accuracy": head_accuracy,
}
