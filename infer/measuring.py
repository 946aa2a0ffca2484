"""What a calibration measures: answers, ranks of the true tokens along them, times of steps.

All of it can be interrupted: a journal beside the output keeps the answers and the times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infer import cli

if TYPE_CHECKING:
    from infer.drafting import Drafted
    from infer.timing import Decoding
    from medusa_jax import MedusaLM
    from medusa_jax.decode import Plan
    from medusa_jax.schedule import Job
    from medusa_jax.tree import RankPath

Ranks = Sequence[np.ndarray]  # [places, depth] of each answer, as `replay.combined_ranks` gives them
Progress = Callable[[int, int], None] | None

ROWS = 32  # that answer at a time
# Steps of this tree say how much each place counts. Counted alike, places amid what a step has just
# accepted buy depth that no step gets to see: trees of 8 nodes came out 4 % worse.
REFERENCE_NODES = 16
FOLDS = 5
STEPS = 8  # in one timing


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of the model: its text as ids, and where the answer begins."""

    ids: list[int]
    start: int
    seed: int


class Journal:
    """Lines of JSON that outlive an interruption, below a line that says what they belong to."""

    def __init__(self, path: Path, belongs: Any) -> None:
        """Raises UserError for a file of other prompts or settings, and where it cannot be written."""
        from medusa_jax import UserError

        head = hashlib.sha256(json.dumps(belongs, sort_keys=True).encode()).hexdigest()
        self.path, self.records = path, []
        try:
            if path.exists():
                first, *lines = path.read_text().split("\n")
                if first != head:
                    raise UserError(f"{path}: answers to other prompts or of other settings; remove it")
                # What is behind the last line feed was being written.
                self.records: list[Any] = list(map(json.loads, lines[:-1]))
            path.write_text("".join(f"{line}\n" for line in [head, *map(json.dumps, self.records)]))
        except (OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{path}: cannot be used ({reason}); remove it") from None

    def add(self, record: Any) -> None:
        """Keep a record. Raises UserError where it cannot be written."""
        from medusa_jax import UserError

        self.records.append(record)
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None

    def remove(self) -> None:
        """The work is done."""
        self.path.unlink(missing_ok=True)


def answers(lm: MedusaLM, jobs: Sequence[Job], journal: Journal) -> list[Answer]:
    """The model's answers, those that the journal holds included."""
    found: dict[int, list[int]] = {
        record["answer"]: record["ids"] for record in journal.records if "answer" in record
    }
    missing = [number for number in range(len(jobs)) if number not in found]
    with cli.progress_bar("answering", unit="answers") as progress:

        def on_done(index: int, done: Any) -> None:
            found[missing[index]] = done.token_ids
            journal.add({"answer": missing[index], "ids": done.token_ids})
            if progress is not None:
                progress(len(found), len(jobs))

        if missing:
            lm.complete([""] * len(missing), [jobs[number] for number in missing], ROWS, on_done)
    return [
        Answer([*job.prompt_ids, *found[number]], len(job.prompt_ids), int(job.params.seed))
        for number, job in enumerate(jobs)
    ]


def ranks(
    lm: MedusaLM, answers: Sequence[Answer], temperature: float, progress: Progress = None
) -> dict[str, list[np.ndarray]]:
    """Ranks of the true tokens [places, depth] along each answer, for each combination of sources.

    An answer's tokens are draws of the model's own distribution at this temperature, and the lists are ranked
    under the noise that drew them, as in decoding: a path that is right here is one that a step accepts.
    """
    from medusa_jax import replay
    from medusa_jax.calibration import SOURCES
    from medusa_jax.tree_choice import LOOKUP_DEPTH

    config, made = (None, None) if lm.heads is None else lm.heads
    depth = max(LOOKUP_DEPTH, 0 if config is None else config.num_heads)
    found: dict[str, list[np.ndarray]] = {name: [] for name in SOURCES}
    for number, answer in enumerate(answers, 1):
        size = len(answer.ids)
        padded = replay.padded(answer.ids)
        program = lm.programs.replay(len(padded), config, depth)
        seed, warmth = np.uint32(answer.seed), np.float32(temperature)
        true, looked, following = program(lm.params, made, padded, seed, warmth)
        places = slice(answer.start - 1, size - 1)
        following = np.asarray(following)[:size]
        parts: dict[str, tuple[Any, Any, Any]] = {"lookup": (None, None, following)}
        if true is not None:
            true, looked = np.array(true)[:size], np.asarray(looked)[:size]
            parts |= {"heads": (true, None, None), "both": (true, looked, following)}
        for name, (own, theirs, looked_up) in parts.items():
            reach = config.num_heads if name == "heads" and config is not None else depth
            combined = replay.combined_ranks(padded[:size], own, theirs, looked_up, reach)
            found[name].append(combined[places])
        if progress is not None:
            progress(number, len(answers))
    return {name: rows for name, rows in found.items() if rows}


# -------------------------------------------------------------------------------------------- rates


def rates(rows: Ranks) -> dict[RankPath, float]:
    """For each path the probability that all of it is right, over the places where steps begin."""
    from medusa_jax import replay

    return replay.hit_rates([one[places] for one, places in zip(rows, starts(rows), strict=True)])


def starts(rows: Ranks) -> list[list[int]]:
    """The places of each answer where steps begin; see REFERENCE_NODES."""
    from medusa_jax import replay
    from medusa_jax.tree import Tree

    reference = Tree.grow(replay.hit_rates(rows), REFERENCE_NODES)
    taken = [np.array(replay.accepted(reference, one), np.int64) + 1 for one in rows]
    return [(np.cumsum(one) - one).tolist() for one in taken]


def single_products(rows: Ranks, paths: Sequence[RankPath]) -> list[float]:
    """What accuracies of single guesses multiplied would say of each path, at the places `rates` counts."""
    counted = np.concatenate([one[places] for one, places in zip(rows, starts(rows), strict=True)])
    return [float(np.prod([np.mean(counted[:, d] == rank) for d, rank in enumerate(path)])) for path in paths]


def folds(count: int) -> list[tuple[list[int], list[int]]]:
    """Numbers of the answers to judge and of those to learn from, several times; a single answer is both."""
    parts = min(FOLDS, count)
    numbers = range(count)
    found = [(list(numbers[part::parts]), [i for i in numbers if i % parts != part]) for part in range(parts)]
    return [(judged, learnt or judged) for judged, learnt in found]


def tokens_per_step(rows: Ranks, sizes: Sequence[int], drafted: Drafted | None = None) -> dict[int, float]:
    """Tokens per step by number of nodes, each answer decoded with trees grown on the others' folds.

    drafted: for steps that choose what they read. With a single answer it is decoded with its own trees,
    which promises too much.
    """
    from medusa_jax import replay
    from medusa_jax.tree import Tree

    steps = dict.fromkeys(sizes, 0)
    for judged, learnt in folds(len(rows)):
        own = rates([rows[i] for i in learnt])
        looked_up = () if drafted is None else drafted.lookup_rates(rows, learnt)
        for nodes in sizes:
            if drafted is None:
                tree = Tree.grow(own, nodes)
                steps[nodes] += sum(len(replay.accepted(tree, rows[number])) for number in judged)
            else:
                plan = drafted.plan(own, looked_up, nodes)
                steps[nodes] += sum(drafted.steps(plan, number) for number in judged)
    return {nodes: sum(map(len, rows)) / max(count, 1) for nodes, count in steps.items()}


# -------------------------------------------------------------------------------------------- times


def step_seconds(
    lm: MedusaLM,
    plans: Mapping[int, Plan],
    gains: Mapping[int, float],
    batches: Sequence[int],
    rounds: int,
    sampling: Mapping[str, float],
    journal: Journal,
) -> dict[int, dict[int, float]]:
    """Median seconds of a step by batch and number of nodes; the sizes of a batch take turns.

    plans: by size, plain decoding among them. gains: tokens per step of each. sampling: temperature and
    top_p of the rows.
    """
    told = [repr(sorted(plans.items())), rounds, dict(sampling), lm.device, lm.fingerprints[1]]
    key = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    done = {r["batch"]: r["seconds"] for r in journal.records if r.get("timed") == key}
    found: dict[int, dict[int, float]] = {}
    with cli.progress_bar("timing steps", unit="timings") as progress:
        for number, batch in enumerate(batches):
            if batch not in done:

                def report(part: float, number: int = number) -> None:
                    if progress is not None:
                        progress(round(100 * (number + part)), 100 * len(batches))

                done[batch] = _time_batch(lm, plans, gains, batch, rounds, sampling, report)
                journal.add({"timed": key, "batch": batch, "seconds": done[batch]})
            found[batch] = {int(size): seconds for size, seconds in done[batch].items()}
    return found


def _time_batch(
    lm: MedusaLM,
    plans: Mapping[int, Plan],
    gains: Mapping[int, float],
    batch: int,
    rounds: int,
    sampling: Mapping[str, float],
    report: Callable[[float], None],
) -> dict[int, float]:
    from infer.timing import Decoding, alternate

    sides: dict[str, Decoding] = {}
    plain = 0.0
    for turn, (size, plan) in enumerate(sorted(plans.items())):
        report(0.5 * turn / len(plans))
        work = Decoding(lm, plan, batch, steps=STEPS, **sampling)
        once = alternate({"": work}, 1)[""]
        if size == 1:
            plain = once
        elif gains[size] * plain < 0.5 * once:
            break  # half of plain decoding's speed, and larger ones cost more: no use in waiting for them
        sides[str(size)] = work
    turns = 0

    def counted(work: Decoding) -> Callable[[], None]:
        def run() -> None:
            nonlocal turns
            work()
            turns += 1
            report(0.5 + 0.5 * turns / (len(sides) * (rounds + 1)))

        return run

    taken = alternate({size: counted(work) for size, work in sides.items()}, rounds)
    return {int(size): seconds / STEPS for size, seconds in taken.items()}
