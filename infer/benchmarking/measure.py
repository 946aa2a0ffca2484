"""The measuring itself: every side answers a batch of prompts, then every side the next."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.benchmarking.journal import Answer, Journal, Key, Unit
from infer.benchmarking.sides import Side
from infer.benchmarking.suites import Question, Suite
from medusa_jax import MedusaLM, SamplingParams, UserError, decode
from medusa_jax.completion import Prompt, messages_of
from medusa_jax.decode import Plan
from medusa_jax.schedule import Job, decode_batch
from medusa_jax.text import TextStream

WARM_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Asking:
    """How questions become jobs: what all sides share."""

    lm: MedusaLM
    suite: Suite
    common: SamplingParams
    system: str | None = None
    raw: bool = False

    @functools.cached_property
    def plain_lm(self) -> MedusaLM:
        """The model that plain sides ask."""
        return self.lm.plainly()

    def check(self) -> None:
        """Raises UserError for a question that the model cannot be asked."""
        for one in self.suite.questions:
            try:
                first = self.job(one, 0, [], self.common)
                room = self.lm.config.max_position_embeddings
                later = sum(len(self.lm.encode(turn, "")) for turn in one.turns[1:])
                assert first.params.max_new_tokens is not None
                needed = len(first.prompt_ids) + later + (len(one.turns) - 1) * first.params.max_new_tokens
                if one.turns[1:] and needed >= room:
                    raise UserError(f"its turns may need {needed} tokens, the model's context has {room}")
            except UserError as error:
                raise UserError(f"question {one.id}: {error}") from None

    def job(self, question: Question, turn: int, history: Sequence[str], params: SamplingParams) -> Job:
        """The job of a turn, behind the answers to the turns before."""
        if question.ids:
            job = self.lm.job(list(question.ids), params)
        else:
            prompt: Prompt = question.turns[turn]
            if turn:
                messages = messages_of(question.turns[0], None)
                for said, asked in zip(history, question.turns[1 : turn + 1], strict=True):
                    messages += [
                        {"role": "assistant", "content": said},
                        {"role": "user", "content": str(asked)},
                    ]
                prompt = messages
            job = self.lm.job(self.lm.encode(prompt, self.system, self.raw), params)
        if self.suite.fixed:
            job.end_tokens = ()
        return job


def reference(sides: Mapping[str, Side], name: str) -> str:
    """Whom this side is compared with, and whose answers the next turn follows: plain, if there is one."""
    return next(other for other, side in sides.items() if side.group == sides[name].group)


def prompts(asking: Asking, sides: Mapping[str, Side], journal: Journal, name: str) -> dict[Key, list[int]]:
    """The prompt's ids of each answer of a side."""
    questions = {one.id: one for one in asking.suite.questions}
    said = {one.key: one.text for one in journal.answers(reference(sides, name))}
    found = {}
    for one in journal.answers(name):
        history = [said[one.round, one.question, turn] for turn in range(one.turn)]
        job = asking.job(questions[one.question], one.turn, history, asking.common)
        found[one.key] = job.prompt_ids
    return found


def measure(
    asking: Asking,
    sides: Mapping[str, Side],
    plans: Mapping[str, Plan],
    journal: Journal,
    rounds: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Have every side answer every question, but for what the journal holds.

    The sides of one batch size and temperature take turns at every batch of prompts, each time another of
    them first, so that a machine's moods meet all alike. A side's compilation and its first, untimed steps
    stand apart.
    """
    tasks = _tasks(asking.suite, sides, rounds)
    for number, (name, block, turn, questions, round_) in enumerate(tasks):
        if (name, block, turn) not in journal.units:
            side = sides[name]
            before = [journal.units[reference(sides, name), block, t].answers for t in range(turn)]
            jobs = []
            for question in questions:
                history = [one.text for part in before for one in part if one.question == question.id]
                jobs.append(asking.job(question, turn, history, side.params(asking.common)))
            lm = asking.plain_lm if side.plain else asking.lm
            lm.plan = plans[name]
            seconds = _prepare(lm, jobs, side.batch)
            if seconds:
                journal.compiled(name, seconds)
            journal.add(_unit(lm, name, block, turn, round_, questions, jobs, side.batch))
        if progress is not None:
            progress(number + 1, len(tasks))


def _tasks(suite: Suite, sides: Mapping[str, Side], rounds: int) -> list[tuple[str, int, int, list, int]]:
    """(side, block, turn, questions, round) in the order of work."""
    groups: dict[tuple[float, int], list[str]] = {}
    for name, side in sides.items():
        groups.setdefault(side.group, []).append(name)
    tasks = []
    for (_, batch), names in groups.items():
        starts = range(0, len(suite.questions), batch)
        for block in range(len(starts) * rounds):
            round_, start = block // len(starts), starts[block % len(starts)]
            asked = suite.questions[start : start + batch]
            for turn in range(max((len(one.turns) for one in asked), default=0) or 1):
                left = [one for one in asked if one.ids or len(one.turns) > turn]
                first = block % len(names)
                for name in names[first:] + names[:first]:
                    tasks.append((name, block, turn, left, round_))
    return tasks


def _prepare(lm: MedusaLM, jobs: Sequence[Job], batch: int) -> float:
    """Compile what the jobs need and run it once. Returns the seconds that took; 0 if nothing was new."""
    programs, began = lm.engine.programs, time.perf_counter()
    known = set(programs.compiled)
    lm.compile_for(jobs, batch)
    new = set(programs.compiled) - known
    if not new:
        return 0.0
    by_chunk = {decode.chunk_for(len(job.prompt_ids)): job for job in jobs}
    steps = WARM_STEPS * (lm.plan.proposed.max_depth + 1)
    short = [
        dataclasses.replace(
            job,
            limit=min(job.limit, len(job.prompt_ids) + 1 + steps),
            text_stream=TextStream(lm.tokenizer),
            token_ids=[],
            pieces=[],
            step_nodes=[],
        )
        for job in by_chunk.values()
    ]
    runs = [key for key in new if key[0] == "run"]
    for _, rows, slots, _ in runs:
        list(decode_batch(lm.engine, short, rows, slots))
    if not runs:  # only prompts of another length
        for job in short:
            lm.session(jobs).prefill(job)
    return time.perf_counter() - began


def _unit(
    lm: MedusaLM,
    name: str,
    block: int,
    turn: int,
    round_: int,
    questions: Sequence[Question],
    jobs: Sequence[Job],
    batch: int,
) -> Unit:
    prompts: list[Any] = [""] * len(jobs)
    began = time.perf_counter()
    done = lm.complete(prompts, jobs, batch)
    seconds = time.perf_counter() - began
    answers = [
        Answer(
            question=question.id,
            category=question.category,
            turn=turn,
            ids=one.token_ids,
            text=one.text,
            finish=one.finish_reason,
            accepted=[guesses + 1 for _, guesses in job.accepted()],
            prefill_seconds=job.prefill_seconds,
            decode_seconds=job.decode_seconds,
            round=round_,
        )
        for question, job, one in zip(questions, jobs, done, strict=True)
    ]
    return Unit.of(name, block, turn, seconds, answers)
