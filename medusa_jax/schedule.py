"""Requests over rows: who is prefilled, which row runs, when the host looks.

`Session` decodes one request at a time and keeps its cache, so that a conversation's next turn reads
only what is new. `decode_batch` keeps several rows full from a queue of requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from medusa_jax import decode
from medusa_jax.decode import DecodeState, Plan, Report
from medusa_jax.errors import UserError
from medusa_jax.heads import HeadParams
from medusa_jax.programs import Programs
from medusa_jax.sampling import ACCEPTANCE, EXACT, RowSampling, SamplingParams
from medusa_jax.text import TextStream

STOP_STRING_STEPS = 16  # steps between two looks of the host when stop strings are set
UNBOUNDED = np.int32(2**31 - 1)


@dataclasses.dataclass
class Job:
    """One request on its way: its prompt, how to decode it, and what came out so far."""

    prompt_ids: list[int]
    params: SamplingParams  # resolved
    limit: int  # prompt and answer together
    end_tokens: tuple[int, ...]
    text_stream: TextStream
    token_ids: list[int] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    # For every token of token_ids: the deepest node that was emitted in the step that began with it, -1 for
    # a guess.
    step_nodes: list[int] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefilled_tokens: int = 0  # prompt tokens that were not in the cache already

    def request(self, slots: int, cached: int, plan: Plan) -> decode.Request:
        """The job as `decode.start` takes it. Without guesses there is nothing to accept: plain is exact."""
        p = self.params
        acceptance = ACCEPTANCE[p.acceptance] if plan.tree.nodes > 1 else EXACT
        tokens = np.zeros((slots,), np.int32)
        tokens[: len(self.prompt_ids)] = self.prompt_ids
        ends = np.full((decode.MAX_END_TOKENS,), -1, np.int32)
        ends[: len(self.end_tokens)] = self.end_tokens

        def one(value: Any, dtype: Any) -> Any:
            return np.asarray([value], dtype)

        return decode.Request(
            tokens=tokens,  # type: ignore[arg-type]
            known=np.int32(len(self.prompt_ids)),  # type: ignore[arg-type]
            cached=np.int32(cached),  # type: ignore[arg-type]
            limit=np.int32(self.limit),  # type: ignore[arg-type]
            sampling=RowSampling(
                temperature=one(p.temperature, np.float32),
                top_k=one(min(p.top_k or 0, 2**31 - 1), np.int32),
                top_p=one(p.top_p, np.float32),
                min_p=one(p.min_p, np.float32),
                repetition_penalty=one(p.repetition_penalty, np.float32),
                seed=one(p.seed, np.uint32),
                acceptance=one(acceptance, np.int32),
                epsilon=one(p.epsilon, np.float32),
                delta=one(p.delta, np.float32),
            ),
            end_tokens=ends,  # type: ignore[arg-type]
        )

    def take(self, report: Report, row: int) -> str:
        """Take what a run added to this job's row; returns the new text and finishes the job if it ended."""
        known = int(report.known[row])
        start = len(self.prompt_ids) + len(self.token_ids)
        added = ""
        for token in np.asarray(report.tokens[row])[start:known].tolist():
            piece = self.text_stream.push(token)
            added += piece
            if self.text_stream.stopped:  # the token that completes a stop string is not part of the answer
                break
            self.token_ids.append(token)
        # Read anew from the beginning: the step of the last root was not made when it was seen first.
        first = len(self.prompt_ids)
        self.step_nodes = np.asarray(report.step_nodes[row])[first : first + len(self.token_ids)].tolist()
        if bool(report.broken[row]):
            raise UserError("the model's logits are not finite: its weights or its configuration are broken")
        if self.text_stream.stopped:
            self.finish_reason = "stop"
        elif not bool(report.active[row]):
            added += self.text_stream.finish()
            self._drop_stop_string()
            ended = bool(self.token_ids) and self.token_ids[-1] in self.end_tokens
            self.finish_reason = "stop" if ended or self.text_stream.stopped else "length"
        self.pieces.append(added)
        return added

    def _drop_stop_string(self) -> None:
        """Cut the ids before the token that completed a stop string which only the end of the text showed."""
        if not self.text_stream.stopped:
            return
        for kept in range(len(self.token_ids)):
            stream = TextStream(self.text_stream.tokenizer, self.text_stream.stop)
            for token in self.token_ids[: kept + 1]:
                stream.push(token)
            stream.finish()
            if stream.stopped:
                self.token_ids, self.step_nodes = self.token_ids[:kept], self.step_nodes[:kept]
                return

    def accepted(self) -> list[tuple[int, int]]:
        """For each step the deepest node that was emitted, and how many guesses stand in the answer.

        Guesses behind a stop string are not counted.
        """
        roots = [i for i, node in enumerate(self.step_nodes) if node != decode.NO_ROOT]
        ends = [*roots, len(self.token_ids)][1:]
        return [(self.step_nodes[at], end - at - 1) for at, end in zip(roots, ends, strict=True)]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model's programs and arrays, and what a step guesses."""

    programs: Programs
    params: Any
    heads: HeadParams | None
    plan: Plan

    def run(
        self, state: DecodeState, max_steps: int | np.int32, stop_early: bool = False
    ) -> tuple[DecodeState, Report]:
        """`decode.run` on a state, which is donated."""
        batch, slots = state.tokens.shape
        program = self.programs.run(batch, slots, self.plan)
        heads = None if self.plan.heads is None else self.heads
        return program(self.params, heads, state, np.int32(max_steps), np.bool_(stop_early))

    def slots_for(self, cached: int, unread: int, limit: int) -> int:
        """See `decode.slots_for`."""
        return decode.slots_for(cached, unread, limit, self.plan.proposed.max_depth)


@dataclasses.dataclass
class Session:
    """One row and the text that its cache holds; a next text that begins the same reads only the rest."""

    engine: Engine
    slots: int
    state: DecodeState | None = None
    text: list[int] = dataclasses.field(default_factory=list)  # tokens known to the state
    cached: int = 0  # how many of them are in the cache

    def compile(self, unread: int, cached: int) -> None:
        """Have every program that reading `unread` new tokens needs; timings leave compilation out."""
        programs = self.engine.programs
        programs.empty(1, self.slots)
        programs.start(self.slots)
        chunk = decode.chunk_for(unread)
        programs.prefill(self.slots, chunk, fresh=cached == 0)
        if unread > chunk:
            programs.prefill(self.slots, chunk, fresh=False)

    def prefill(self, job: Job) -> Report:
        """Read the job's prompt; the report holds its first token."""
        if self.state is not None and self.state.known.is_deleted():
            self.forget()  # an interrupt came between a donation and its result
        reuse = self._reusable(job.prompt_ids)
        unread = len(job.prompt_ids) - reuse
        programs = self.engine.programs
        needed = self.engine.slots_for(reuse, unread, job.limit)
        if needed > self.slots:
            if self.state is not None:
                self.state = programs.grow(self.slots, needed)(self.state)
            self.slots = needed
        self.compile(unread, reuse)
        began = time.perf_counter()
        if self.state is None:
            self.state = programs.empty(1, self.slots)()
        state = programs.start(self.slots)(self.state, job.request(self.slots, reuse, self.engine.plan))
        chunk = decode.chunk_for(unread)
        report: Any = None
        for at in range(reuse, len(job.prompt_ids), chunk):
            program = programs.prefill(self.slots, chunk, fresh=at == 0)
            state, report = program(self.engine.params, state)
        self.state = state
        report = jax.device_get(report)
        job.prefill_seconds = time.perf_counter() - began
        job.prefilled_tokens = unread
        self._remember(report)
        return report

    def _reusable(self, ids: Sequence[int]) -> int:
        """How many tokens of `ids` the cache holds already; the last one is always read for its logits."""
        most = min(self.cached, len(ids) - 1)
        return next((i for i in range(most) if ids[i] != self.text[i]), most)

    def forget(self) -> None:
        """Read the next prompt from its beginning."""
        self.state, self.text, self.cached = None, [], 0

    def _remember(self, report: Report) -> None:
        known = int(report.known[0])
        self.text = np.asarray(report.tokens[0])[:known].tolist()
        self.cached = known - 1

    def stream(self, job: Job) -> Iterator[str]:
        """Decode one job, yielding its text step by step (a step's text may be empty)."""
        report = self.prefill(job)
        self.engine.programs.run(1, self.slots, self.engine.plan)  # compiled before the clock runs
        began = time.perf_counter()
        assert self.state is not None
        # One step is in flight while the host turns the one before into text. Past the end it does nothing.
        self.state, ahead = self.engine.run(self.state, 1)
        while True:
            piece = job.take(report, 0)
            job.decode_seconds = time.perf_counter() - began
            yield piece
            if job.finish_reason is not None:
                break
            report = ahead
            self.state, ahead = self.engine.run(self.state, 1)
            report = jax.device_get(report)
            self._remember(report)
        self._remember(jax.device_get(ahead))


def decode_batch(engine: Engine, jobs: Sequence[Job], batch: int, slots: int) -> Iterator[Job]:
    """Decode all jobs, up to `batch` at a time, yielding each when it is finished.

    A row that ends is refilled from the queue at once; the other rows go on untouched. A prompt is always
    read from its beginning here: a result must not depend on its neighbours. The host looks whenever a row
    ends, so that a short answer does not wait for a long one.
    """
    programs = engine.programs
    waiting = deque(jobs)
    reader = Session(engine, slots)  # prompts are read one at a time, then put into their row
    state = programs.empty(batch, slots)() if batch > 1 else None
    rows: list[Job | None] = [None] * batch
    while True:
        for row in range(batch):
            while waiting and rows[row] is None:
                job = waiting.popleft()
                reader.text, reader.cached = [], 0
                job.take(reader.prefill(job), 0)
                if job.finish_reason is not None:  # its first token was its last
                    yield job
                    continue
                rows[row] = job
                assert reader.state is not None
                if state is None or batch == 1:
                    state = reader.state
                else:
                    state = programs.insert(batch, slots)(state, np.int32(row), reader.state)
        live = {row: job for row, job in enumerate(rows) if job is not None}
        if not live or state is None:
            return
        most = STOP_STRING_STEPS if any(job.params.stop for job in live.values()) else UNBOUNDED
        began = time.perf_counter()
        state, report = engine.run(state, most, stop_early=True)
        report = jax.device_get(report)
        elapsed = time.perf_counter() - began
        keep = np.ones((batch,), bool)
        for row, job in live.items():
            job.decode_seconds += elapsed
            job.take(report, row)
            if job.finish_reason is not None:
                keep[row] = not bool(
                    report.active[row]
                )  # a stop string ended it, which the device cannot see
                rows[row] = None
                yield job
        if not keep.all():
            state = programs.stop_rows(batch, slots)(state, keep)
        if batch == 1:
            reader.state = state
