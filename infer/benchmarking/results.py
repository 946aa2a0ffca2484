"""From the journal to the results: figures of every side, identity with plain decoding, quality, accuracy."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import medusa_jax
from infer import cli
from infer.benchmarking import figures, measure, scores
from infer.benchmarking.journal import Answer, Journal
from infer.benchmarking.measure import Asking
from infer.benchmarking.sides import Side, labels
from medusa_jax import MedusaLM
from medusa_jax.decode import Plan
from medusa_jax.text import looping


def collect(
    args: argparse.Namespace,
    given: Sequence[str],
    asking: Asking,
    sides: Mapping[str, Side],
    planned: Mapping[str, Plan],
    journal: Journal,
) -> dict[str, Any]:
    """Everything that results.json holds."""
    lm, asked = asking.lm, asking.suite
    label = labels(sides)
    answers = {name: journal.answers(name) for name in sides}
    plain_of = {name: measure.reference(sides, name) for name in sides}
    found: dict[str, Any] = {}
    for name, side in sides.items():
        plain = answers[plain_of[name]] if sides[plain_of[name]].plain else None
        plan = planned[name]
        found[name] = {
            "label": label[name],
            "mode": side.mode,
            "plain": side.plain,
            "tree": side.tree,
            "nodes": plan.tree.nodes,
            "depth": plan.proposed.max_depth,
            "proposed": plan.proposed.nodes,
            "lookup": plan.lookup,
            "acceptance": side.acceptance,
            "lossy": side.lossy,
            # The automatic tree may find that none pays; the program is then that of plain decoding.
            "plain_by_choice": not side.plain and plan == Plan.plain(),
            "temperature": side.temperature,
            "batch": side.batch,
            "compile_seconds": journal.compile_seconds.get(name, 0.0),
            **figures.summary(answers[name], plain),
        }
        comparable = not side.plain and (side.temperature == 0 or side.acceptance == "exact")
        if plain is not None and comparable:
            found[name]["identity"] = _identity(asking, sides, journal, name)
    _qualities(asking, sides, journal, found)
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "format": "medusa-jax-benchmark",
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "infer.benchmark", *given]),
        "model": args.model or "SmolLM2-135M-Instruct (Q4_1)",
        "heads": _heads_name(args, lm),
        "device": f"{device.device_kind} ({platform.machine()})"
        if device.platform == "cpu"
        else device.device_kind,
        "devices": 1 if lm.mesh is None else lm.mesh.size,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {"medusa-jax": medusa_jax.__version__, "jax": jax.__version__},
        "suite": {
            "name": asked.name,
            "source": asked.source,
            "count": len(asked.questions),
            "turns": max((len(one.turns) for one in asked.questions), default=0) or 1,
            "sha256": asked.digest(),
        },
        "settings": {key: value for key, value in journal.settings.items() if key != "sides"},
        "categories": list(dict.fromkeys(one.category for one in asked.questions)),
        "sides": found,
    }
    if args.accuracy:
        greedy = next(name for name, side in sides.items() if side.temperature == 0)
        results["accuracy"] = _accuracy(asking, sides, journal, greedy)
    return results


def _heads_name(args: argparse.Namespace, lm: MedusaLM) -> str:
    if lm.heads is None:
        return "none"
    config = lm.heads[0]
    name = "shipped" if args.heads == "auto" else str(args.heads)
    return f"{name} ({config.num_heads} heads)"


def _identity(asking: Asking, sides: Mapping[str, Side], journal: Journal, name: str) -> dict[str, Any]:
    """How many of a side's answers are plain's, token for token; for the others, how near a tie it was."""
    side, plain = sides[name], measure.reference(sides, name)
    own, theirs = journal.answers(name), {one.key: one.ids for one in journal.answers(plain)}
    places = figures.first_differences(own, journal.answers(plain))
    prompts = measure.prompts(asking, sides, journal, name) if places else {}
    differences = []
    for one in own:
        if one.key not in places:
            continue
        at, other, apart = places[one.key], theirs[one.key], None
        if at < min(len(one.ids), len(other)):
            text = [*prompts[one.key], *one.ids[:at]]
            apart = scores.margin(
                asking.lm, text, one.ids[at], other[at], side.temperature, asking.common.seed
            )
        differences.append(
            {
                "question": one.question,
                "turn": one.turn,
                "round": one.round,
                "position": at,
                "token": one.ids[at] if at < len(one.ids) else None,
                "plain": other[at] if at < len(other) else None,
                "margin": apart,
                "near_tie": apart is not None and apart < scores.NEAR_TIE,
            }
        )
    return {"compared": len(own), "identical": len(own) - len(differences), "differences": differences}


def _qualities(
    asking: Asking, sides: Mapping[str, Side], journal: Journal, found: Mapping[str, dict[str, Any]]
) -> None:
    """Where a side is lossy: the likelihood of its texts, and of the others' at its temperature."""
    groups = {side.group for side in sides.values() if side.lossy}
    chosen = [name for name, side in sides.items() if side.group in groups]
    first = {name: [one for one in journal.answers(name) if one.round == 0] for name in chosen}
    total, done = sum(map(len, first.values())), 0
    with cli.progress_bar("scoring texts", unit="answers") as progress:
        for name, answers in first.items():
            prompts, scored = measure.prompts(asking, sides, journal, name), []
            for one in answers:
                scored.append(scores.log_probs(asking.lm, prompts[one.key], one.ids))
                done += 1
                if progress is not None:
                    progress(done, total)
            found[name]["quality"] = figures.log_likelihood(scored)


def _accuracy(asking: Asking, sides: Mapping[str, Side], journal: Journal, name: str) -> dict[str, Any]:
    """Top-1 to top-10 accuracy of each head along a side's answers, those that loop left out."""
    prompts = measure.prompts(asking, sides, journal, name)
    everything = [one for one in journal.answers(name) if one.round == 0]
    # Loops are guessed whatever the heads have learnt.
    answers: list[Answer] = [one for one in everything if not looping(one.ids)] or everything
    with cli.progress_bar("ranking tokens", unit="answers") as progress:
        hits = scores.head_hits(asking.lm, [prompts[one.key] for one in answers], answers, progress)
    return {
        "top": hits.top(),
        "places": hits.places.tolist(),
        "answers": len(answers),
        "not_looping_only": len(answers) < len(everything),
    }
