"""Forwards over finished texts: margins of near-ties, likelihoods, ranks of the model's own tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from infer.benchmarking.journal import Answer
from medusa_jax import MedusaLM, replay, sampling

NEAR_TIE = 1e-3  # in logits: below it products of other shapes may turn a choice
RANKS = 10


def log_probs(lm: MedusaLM, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """The base model's log-probability (natural, temperature 1) of every token of an answer."""
    ids = replay.padded([*prompt, *answer])
    found = lm.programs.log_probs(len(ids))(lm.params, ids)
    return np.asarray(found)[len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist()


def margin(lm: MedusaLM, text: Sequence[int], one: int, other: int, temperature: float, seed: int) -> float:
    """How far apart two tokens are as the next one of a text: in logits, or in logit / T + noise.

    Filters (top-k, top-p) are left out: a token outside them shows as far apart.
    """
    ids = replay.padded(text)
    logits = lm.programs.logits_at(len(ids))(lm.params, ids, np.int32(len(text) - 1))
    if temperature > 0:
        place = jnp.full((1, 1), len(text), jnp.int32)
        noise = sampling.gumbel(jnp.array([seed], jnp.uint32), place, lm.config.vocab_size)[0, 0]
        logits = logits / temperature + noise
    return abs(float(logits[one]) - float(logits[other]))


@dataclasses.dataclass
class Hits:
    """For each head, how often the model's own token stood at which rank of its list; counted by rank."""

    by_rank: np.ndarray  # [M, RANKS]
    places: np.ndarray  # [M]

    def top(self) -> list[list[float]]:
        """[head][k - 1]: the share of places where the token was among the head's first k."""
        return (np.cumsum(self.by_rank, axis=1) / np.maximum(self.places, 1)[:, None]).tolist()


def head_hits(
    lm: MedusaLM,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    progress: Callable[[int, int], None] | None = None,
) -> Hits:
    """Ranks of the model's own greedy tokens in each head's list along its answers; `lm` has heads.

    Head m (from 0) at the place before the answer's token i is judged by the token i + 1 + m, where
    the answer has one.
    """
    assert lm.heads is not None
    config, made = lm.heads
    M = config.num_heads
    hits = Hits(np.zeros((M, RANKS)), np.zeros((M,)))
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        ids = replay.padded([*prompt, *answer.ids])
        program = lm.programs.replay(len(ids), config, M)
        ranks = np.asarray(program(lm.params, made, ids, np.uint32(0), np.float32(0))[0])
        for m in range(M):
            count = max(len(answer.ids) - 1 - m, 0)
            rows = ranks[len(prompt) - 1 :][:count, m]
            hits.places[m] += len(rows)
            hits.by_rank[m] += np.bincount(rows[rows < RANKS], minlength=RANKS)
        if progress is not None:
            progress(number, len(answers))
    return hits
