"""The arithmetic of a benchmark: from answers to figures. Nothing here knows a model.

Definitions, over a set of answers with n new tokens in s steps (a step is a token that the model chose and
the guesses accepted behind it, so plain decoding has n = s; the prefill chooses an answer's first token):

    tokens per step      n / s
    tokens per forward   tokens that the prefill did not choose / forwards of the tree
    step time            decoding seconds / forwards
    overhead             step time / plain's step time
    speed-up             plain's wall-clock seconds per token / this side's, prefill included
    decoding speed-up    the same without prefill and without the tokens that prefill chose
    check                tokens per forward / overhead, which must be the decoding speed-up

as in Cai et al. 2024 (arXiv 2401.10774, appendix B.1): speed-up = acceleration rate / overhead. The check is
none of arithmetic: step times are the engine's own clock around its steps, speed-ups the clock around whole
batches of prompts. Where rows of a batch end at different times, rows that idle set the two apart.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from infer.benchmarking.journal import Answer, Key
from medusa_jax.text import looping

RESAMPLES = 2000
CHECK_TOLERANCE = 0.05  # relative; beyond it the report says so


def quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median and third quartile."""
    return [float(value) for value in np.quantile(values, [0.25, 0.5, 0.75])]


def totals(answers: Sequence[Answer]) -> dict[str, Any]:
    """What one side did in these answers (at least one)."""
    tokens, steps = sum(len(one.ids) for one in answers), sum(one.steps for one in answers)
    forwards = sum(one.forwards for one in answers)
    wall = sum(one.wall_seconds for one in answers)
    decode = sum(one.decode_seconds for one in answers)
    prefill = sum(one.prefill_seconds for one in answers)
    loops = sum(looping(one.ids) for one in answers)
    return {
        "answers": len(answers),
        "new_tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "tokens_per_forward": (tokens - len(answers)) / forwards if forwards else None,
        "step_seconds": decode / forwards if forwards else None,
        "wall_seconds": wall,
        "prefill_seconds": prefill,
        "tokens_per_second": tokens / wall,
        "tokens_per_second_quartiles": quartiles([len(one.ids) / one.wall_seconds for one in answers]),
        "first_token_seconds_quartiles": quartiles([one.prefill_seconds for one in answers]),
        "looping_share": loops / len(answers),
    }


def compare(answers: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """A side's figures beside plain decoding's of the same prompts (see the module's definitions)."""
    ours, theirs = totals(answers), totals(plain)
    ratio, interval = speedup(answers, plain)
    found: dict[str, Any] = {"speedup": ratio, "speedup_interval": interval, "overhead": None}
    found |= {"decode_speedup": None, "check": None}
    if ours["step_seconds"] and theirs["step_seconds"]:
        found["overhead"] = ours["step_seconds"] / theirs["step_seconds"]

        def pace(one: Mapping[str, Any]) -> float:
            return (one["wall_seconds"] - one["prefill_seconds"]) / (one["new_tokens"] - one["answers"])

        found["decode_speedup"] = pace(theirs) / pace(ours)
        product = ours["tokens_per_forward"] / found["overhead"]
        apart = found["decode_speedup"] / product - 1
        found["check"] = {
            "tokens_per_forward_over_overhead": product,
            "measured_over_it_minus_1": apart,
            "holds": abs(apart) <= CHECK_TOLERANCE,
        }
    return found


def speedup(answers: Sequence[Answer], plain: Sequence[Answer]) -> tuple[float, list[float] | None]:
    """The ratio of wall-clock seconds per token, and its 95 % interval (None for a single question).

    The interval is that of a bootstrap over questions: all answers to a question, on both sides, are drawn
    together. It tells how far the ratio hangs on the questions and on the machine's noise.
    """
    rows: dict[int | str, list[float]] = {}
    for at, side in ((0, plain), (2, answers)):
        for one in side:
            row = rows.setdefault(one.question, [0.0] * 4)
            row[at] += one.wall_seconds
            row[at + 1] += len(one.ids)
    table = np.array(list(rows.values()))  # [questions, (plain's seconds, tokens, our seconds, tokens)]

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    whole = float(ratio(table.sum(axis=0)))
    if len(table) < 2:
        return whole, None
    counts = np.random.default_rng(0).multinomial(len(table), np.full(len(table), 1 / len(table)), RESAMPLES)
    with np.errstate(all="ignore"):
        drawn = ratio(counts @ table)
    return whole, [float(value) for value in np.nanquantile(drawn, [0.025, 0.975])]


def accepted_by_depth(answers: Sequence[Answer]) -> list[int]:
    """[d]: the forwards that emitted exactly d guesses."""
    counts = collections.Counter(length - 1 for one in answers for length in one.accepted[: one.forwards])
    return [counts[depth] for depth in range(max(counts, default=0) + 1)]


def summary(answers: Sequence[Answer], plain: Sequence[Answer] | None) -> dict[str, Any]:
    """All figures of a side: overall, by category, and each over the answers that do not loop too.

    plain: the plain side's answers to the same questions, None without one. An answer counts as one that does
    not loop if it does so on neither side.
    """
    by_category: dict[str, set[Key]] = {}
    for one in answers:
        by_category.setdefault(one.category, set()).add(one.key)
    every = {one.key for one in answers}
    straight = every - {one.key for one in [*answers, *(plain or [])] if looping(one.ids)}
    return {
        "all": _part(answers, plain, every),
        "not_looping": _part(answers, plain, straight),
        "categories": {
            name: {"all": _part(answers, plain, keys), "not_looping": _part(answers, plain, keys & straight)}
            for name, keys in by_category.items()
        },
        "accepted_by_depth": accepted_by_depth(answers),
    }


def _part(
    answers: Sequence[Answer], plain: Sequence[Answer] | None, keys: Collection[Key]
) -> dict[str, Any] | None:
    ours = [one for one in answers if one.key in keys]
    if not ours:
        return None
    theirs = [one for one in plain or [] if one.key in keys]
    return totals(ours) | (compare(ours, theirs) if theirs else {})


def first_differences(answers: Sequence[Answer], plain: Sequence[Answer]) -> dict[Key, int]:
    """Where a side's ids first differ from plain's, of the answers that do."""
    theirs = {one.key: one.ids for one in plain}
    found = {}
    for one in answers:
        other = theirs[one.key]
        if one.ids != other:
            both = zip(one.ids, other, strict=False)
            found[one.key] = next(
                (i for i, (a, b) in enumerate(both) if a != b), min(len(one.ids), len(other))
            )
    return found


def log_likelihood(log_probs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean log-likelihood a token over all answers, and the quartiles of the answers' own means."""
    means = [statistics.fmean(one) for one in log_probs if len(one)]
    everything = [value for one in log_probs for value in one]
    return {"mean_log_likelihood": statistics.fmean(everything), "quartiles": quartiles(means)}
