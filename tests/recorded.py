"""A recorded benchmark: answers with known times, as a run's journal holds them. Nothing is decoded.

Plain decoding takes 50 ms a step and a tree 75 ms, a prompt 100 ms, and the host 1 ms a batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.benchmarking.figures import summary
from infer.benchmarking.journal import Answer, Unit
from infer.benchmarking.sides import Side, labels

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
PREFILL, PLAIN_STEP, TREE_STEP, HOST = 0.1, 0.05, 0.075, 0.001


def answer(
    question: int, accepted: Sequence[int], step: float, category: str = "writing", loop: bool = False
) -> Answer:
    """An answer of sum(accepted) tokens; its last step is one that had nothing left to do."""
    tokens = sum(accepted)
    ids = [7] * tokens if loop else [1000 * question + i for i in range(tokens)]
    forwards = len(accepted) - (accepted[-1] == 1)
    return Answer(
        question, category, 0, ids, f"text {question}", "stop", list(accepted), PREFILL, forwards * step
    )


def unit(side: str, block: int, answers: list[Answer], rows: int = 1) -> Unit:
    """A unit whose time is that of its prompts, of its longest row (or of the sum of them) and the host's."""
    decode = [one.decode_seconds for one in answers]
    seconds = max(decode) if rows > 1 else sum(decode)
    return Unit.of(side, block, 0, PREFILL * len(answers) + seconds + HOST, answers)


def run(
    trees: Mapping[str, int], batches: Sequence[int] = (1,), per_category: int = 4, loops: int = 1
) -> dict[str, Any]:
    """Results of plain decoding and of trees {name: nodes}; larger trees accept more and cost more."""
    sides: dict[str, Side] = {}
    for batch in batches:
        sides[f"plain-t0-b{batch}"] = Side("plain", "", "", 0.0, batch)
        for name in trees:
            sides[f"medusa-{name}-t0-b{batch}"] = Side("medusa", name, "", 0.0, batch)
    label, found, plain = labels(sides), {}, []
    for name, side in sides.items():
        nodes, answers = 1 if side.plain else trees[side.tree], []
        for index in range(len(CATEGORIES) * per_category):
            kind = index % len(CATEGORIES)
            loop = index < loops
            reach = 1 if side.plain else min(1 + nodes.bit_length() * (3 if loop else 1) // 2, 5)
            lengths = [1 + (i * (kind + 3) + index) % reach for i in range(120 // reach)]
            lengths = [1] * 60 if side.plain else [*_cut(lengths, 59), 1]
            step = PLAIN_STEP if side.plain else PLAIN_STEP * (1.1 + nodes * side.batch / 60)
            answers.append(
                unit(name, index, [answer(index, lengths, step, CATEGORIES[kind], loop)]).answers[0]
            )
        plain = answers if side.plain else plain
        found[name] = {
            "label": label[name],
            "mode": side.mode,
            "plain": side.plain,
            "tree": side.tree,
            "nodes": nodes,
            "depth": 0 if side.plain else 4,
            "lookup": not side.plain,
            "acceptance": side.acceptance,
            "lossy": side.lossy,
            "plain_by_choice": False,
            "temperature": side.temperature,
            "batch": side.batch,
            "compile_seconds": 9.5,
            **summary(answers, plain),
        }
    top = [[0.8 * 0.7**m * (1 - 0.5**k) for k in range(1, 11)] for m in range(4)]
    return {
        "date": "2026-01-01",
        "command": "python -m infer.benchmark --suite mt-bench",
        "model": "SmolLM2-135M-Instruct (Q4_1)",
        "heads": "shipped (4 heads)",
        "device": "cpu (x86_64)",
        "devices": 1,
        "cores": 2,
        "versions": {"medusa-jax": "0", "jax": "0"},
        "suite": {"name": "mt-bench", "source": "package x", "count": 32, "turns": 1, "sha256": "0"},
        "settings": {"dtype": "float32", "max_new_tokens": 60, "seed": 0, "rounds": 1},
        "categories": list(CATEGORIES),
        "sides": found,
        "accuracy": {"top": top, "places": [100.0] * 4, "answers": 9, "not_looping_only": True},
    }


def _cut(lengths: Sequence[int], tokens: int) -> list[int]:
    """The first of these steps, with so many tokens together."""
    cut: list[int] = []
    for length in lengths:
        left = tokens - sum(cut)
        if left <= 0:
            break
        cut.append(min(length, left))
    return cut + [1] * (tokens - sum(cut))
