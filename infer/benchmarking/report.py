"""What a benchmark leaves behind: results.json, results.md, and answers as Spec-Bench's scripts read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infer.benchmarking.figures import CHECK_TOLERANCE
from infer.benchmarking.journal import Answer
from infer.benchmarking.scores import NEAR_TIE

Results = Mapping[str, Any]

LOOPS = """\
An answer loops if a run of ten tokens occurs in it more than three times. Loops are easy to guess and flatter
every method that guesses.
"""
FIGURES = """
Overhead and speed-up are against plain decoding at the same batch size and temperature. The speed-up is of
wall-clock time with prefill, in parentheses its 95 % interval over questions. Tokens per second are those of
all rows of a batch together, in parentheses the quartiles over answers. Loading, compilation and warm-up are
left out.
"""
QUALITY = """
Natural logarithm of the base model's probability (temperature 1) of each emitted token. A lossless rule has
plain sampling's value but for chance; how far a lossy one lies from it is what it does to the text.
"""


def spec_bench(model: str, answers: Sequence[Answer], when: float) -> str:
    """Answers of one side in Spec-Bench's format, a JSON object a question.

    Its scripts read `choices[0]`: turns, new_tokens and wall_time (seconds, prefill included) a turn, and
    accept_lengths, the tokens of each step with the step's own. Times leave compilation out.
    """
    questions: dict[int | str, list[Answer]] = {}
    for one in answers:
        if one.round == 0:
            questions.setdefault(one.question, []).append(one)
    lines = []
    for name, turns in questions.items():
        choice = {
            "index": 0,
            "turns": [one.text for one in turns],
            "decoding_steps": [one.steps for one in turns],
            "new_tokens": [len(one.ids) for one in turns],
            "wall_time": [one.wall_seconds for one in turns],
            "accept_lengths": [length for one in turns for length in one.accepted],
        }
        record = {
            "question_id": name,
            "category": turns[0].category,
            "answer_id": hashlib.sha256(f"{model} {name}".encode()).hexdigest()[:22],
            "model_id": model,
            "choices": [choice],
            "tstamp": when,
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def shown(value: float | None, digits: int = 2, factor: float = 1.0) -> str:
    """A number for people; a dash where there is none."""
    return "-" if value is None else f"{value * factor:.{digits}f}"


def markdown(results: Results) -> str:
    """The report for people."""
    sides = results["sides"]
    several = len(results["categories"]) > 1
    parts = [f"# Benchmark: {results['suite']['name']}\n", _setting(results), _overall(results, "all")]
    if any(side["all"]["looping_share"] for side in sides.values()):
        parts += [
            "## Answers that do not loop\n",
            LOOPS,
            _overall(results, "not_looping"),
        ]
    if several:
        parts.append(_categories(results))
    parts += [_identity(results), _check(results), _quality(results), _accuracy(results), _apart(results)]
    return "\n".join(part for part in parts if part)


def _setting(results: Results) -> str:
    told, suite, versions = results["settings"], results["suite"], results["versions"]
    rounds = f", {told['rounds']} rounds" if told["rounds"] > 1 else ""
    lines = [
        f"* {results['date']}, {results['device']} x {results['devices']}, {results['cores']} cores, "
        f"jax {versions['jax']}, medusa-jax {versions['medusa-jax']}",
        f"* model: {results['model']}, heads: {results['heads']}, {told['dtype']}",
        f"* {suite['count']} questions ({suite['source']}), turns: {suite['turns']}, "
        f"at most {told['max_new_tokens']} new tokens, seed {told['seed']}{rounds}",
        f"* made by: `{results['command']}`",
    ]
    return "\n".join(lines) + "\n"


def _overall(results: Results, part: str) -> str:
    rows = []
    for side in results["sides"].values():
        own = side[part]
        if own is None:
            rows.append([_named(side), *["-"] * 9])
            continue
        low, _, high = own["tokens_per_second_quartiles"]
        interval = own.get("speedup_interval")
        ratio = shown(own.get("speedup"))
        if interval:
            ratio += f" ({interval[0]:.2f} to {interval[1]:.2f})"
        rows.append(
            [
                _named(side),
                side["nodes"],
                shown(own["tokens_per_step"]),
                shown(own["step_seconds"], 1, 1e3),
                shown(own.get("overhead")),
                ratio if not side["plain"] else "1",
                f"{own['tokens_per_second']:.1f} ({low:.1f} to {high:.1f})",
                shown(own["first_token_seconds_quartiles"][1], 0, 1e3),
                shown(own["looping_share"], 0, 100) + " %",
                own["answers"],
            ]
        )
    head = ["side", "nodes", "tokens/step", "step, ms", "overhead", "speed-up", "tokens/s", "first token, ms"]
    return table([*head, "looping", "answers"], rows) + (FIGURES if part == "all" else "")


def _named(side: Mapping[str, Any]) -> str:
    chosen = " (plain by choice)" if side["plain_by_choice"] else ""
    return side["label"] + (" (lossy)" if side["lossy"] else "") + chosen


def _categories(results: Results) -> str:
    medusa = [side for side in results["sides"].values() if not side["plain"]]
    if not medusa:
        return ""
    names = results["categories"]
    parts = ["## By category\n"]
    for value, title in (("speedup", "speed-up"), ("tokens_per_step", "tokens/step")):
        rows = []
        for side in medusa:
            own = [side["categories"].get(name, {}).get("all") or {} for name in names]
            if any(one.get(value) for one in own):
                rows.append([_named(side), *(shown(one.get(value)) for one in own)])
        if rows:
            parts.append(table([title, *names], rows))
    return "\n".join(parts)


def _identity(results: Results) -> str:
    lines = []
    for side in results["sides"].values():
        found = side.get("identity")
        if found is None:
            continue
        lines.append(f"* {side['label']}: {found['identical']} of {found['compared']} answers identical")
        for one in found["differences"]:
            margin = "one text ends earlier" if one["margin"] is None else f"margin {one['margin']:.2g}"
            tie = ", a near-tie" if one["near_tie"] else ""
            lines.append(
                f"    * question {one['question']}, turn {one['turn'] + 1}: token {one['position'] + 1} is "
                f"{one['token']}, plain has {one['plain']}; {margin}{tie}"
            )
    if not lines:
        return ""
    return (
        "## The same ids as plain decoding\n\n" + "\n".join(lines) + f"\n\nA margin below {NEAR_TIE:g} (in "
        "logits, above temperature 0 in logit / T + noise) is a near-tie, which rounding decides.\n"
    )


def _check(results: Results) -> str:
    rows = []
    for side in results["sides"].values():
        own = side["all"]
        check = own.get("check")
        if side["plain"] or not check:
            continue
        rows.append(
            [
                _named(side),
                shown(own["tokens_per_forward"], 3),
                shown(own["overhead"], 3),
                shown(check["tokens_per_forward_over_overhead"], 3),
                shown(own["decode_speedup"], 3),
                shown(check["measured_over_it_minus_1"], 1, 100) + " %",
                "holds" if check["holds"] else "differs",
            ]
        )
    if not rows:
        return ""
    head = ["side", "tokens/forward", "overhead", "quotient", "measured decoding speed-up", "apart", ""]
    return (
        "## Check: speed-up = tokens per step / overhead\n\n"
        + table(head, rows)
        + f"\nWithout prefill and first tokens. It holds within {CHECK_TOLERANCE:.0%}; time outside of the "
        "steps, and rows of a batch that idle, set the two apart.\n"
    )


def _quality(results: Results) -> str:
    rows = []
    for side in results["sides"].values():
        found = side.get("quality")
        if found:
            low, middle, high = found["quartiles"]
            quarters = f"{low:.3f}, {middle:.3f}, {high:.3f}"
            rows.append([_named(side), shown(found["mean_log_likelihood"], 4), quarters])
    if not rows:
        return ""
    head = ["side", "mean log-likelihood a token", "quartiles over answers"]
    return "## What lossy acceptance does to the text\n\n" + table(head, rows) + QUALITY


def _accuracy(results: Results) -> str:
    found = results.get("accuracy")
    if not found:
        return ""
    ranks = [1, 2, 3, 5, 10]
    rows = [
        [f"head {m + 1}", *(shown(top[k - 1], 1, 100) for k in ranks), int(found["places"][m])]
        for m, top in enumerate(found["top"])
    ]
    return (
        "## Accuracy of the heads\n\n"
        + table(["head", *(f"top-{k}, %" for k in ranks), "places"], rows)
        + f"\nAgainst the model's own greedy tokens, over {found['answers']} answers"
        + (" that do not loop.\n" if found["not_looping_only"] else ".\n")
    )


def _apart(results: Results) -> str:
    rows = [
        [_named(side), shown(side["compile_seconds"], 1)]
        for side in results["sides"].values()
        if side["compile_seconds"]
    ]
    if not rows:
        return ""
    return "## Compilation and warm-up, not part of any figure\n\n" + table(["side", "seconds"], rows)
