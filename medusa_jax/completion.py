"""Prompts as they come in, completions as they go out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_jax.decode import Plan
from medusa_jax.errors import UserError
from medusa_jax.schedule import Job

# A prompt: a text (one user message, or the text to continue with `raw`), or chat messages.
Prompt = str | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Stats:
    """How a completion was decoded. Times exclude compilation; in a batch they are the batch's.

    tokens_per_second counts prefill and decoding. accepted_by_depth[d] is the number of steps that
    emitted exactly d guesses besides the step's own token, hits_by_node[n] the number of steps whose
    emitted path holds node n of the proposed tree. lossy: the acceptance rule does not keep the model's
    own distribution.
    """

    new_tokens: int
    steps: int
    tokens_per_step: float
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    accepted_by_depth: list[int]
    hits_by_node: list[int]
    lossy: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished answer.

    token_ids holds the generated ids only, a final end token included, cut before the token that
    completes a stop string. finish_reason is "stop" (end token or stop string) or "length".
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats


def completion(prompt: Prompt, job: Job, plan: Plan) -> Completion:
    """The result of a finished job. `prompt` is given back as text: of messages, the last user's."""
    assert job.finish_reason is not None
    new, seconds = len(job.token_ids), job.prefill_seconds + job.decode_seconds
    tree, steps = plan.proposed, job.accepted()
    by_depth, hits = [0] * (tree.max_depth + 1), [0] * tree.nodes
    for node, guesses in steps:
        by_depth[guesses] += 1
        for visited in tree.node_paths[node][: guesses + 1]:
            hits[visited] += 1
    sampled = plan.tree.nodes > 1 and bool(job.params.temperature)
    return Completion(
        prompt=prompt_text(prompt),
        text="".join(job.pieces),
        token_ids=job.token_ids,
        finish_reason=job.finish_reason,
        stats=Stats(
            new_tokens=new,
            steps=len(steps),
            tokens_per_step=new / len(steps) if steps else 0.0,
            prefill_seconds=job.prefill_seconds,
            decode_seconds=job.decode_seconds,
            tokens_per_second=new / seconds if seconds else 0.0,
            accepted_by_depth=by_depth,
            hits_by_node=hits,
            lossy=sampled and job.params.acceptance == "typical",
        ),
    )


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], generation_prompt: bool = True) -> str:
    """The text of chat messages by the tokenizer's template; with a prompt, up to where the answer begins.

    Raises UserError when the template refuses the messages.
    """
    import jinja2  # only here: it takes a while to import

    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
    except jinja2.TemplateError as error:
        raise UserError(f"the model's chat template refuses these messages: {error}") from None
    except Exception as error:  # noqa: BLE001 - a template is a program and can fail in any way
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"the model's chat template fails on these messages: {problem}") from None


def prompt_text(prompt: Prompt) -> str:
    """A prompt as the results name it: itself, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    return next((m["content"] for m in reversed(prompt) if m.get("role") == "user"), "")


def messages_of(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    """Chat messages of a prompt, checked. Raises UserError for anything else than role and content texts."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise UserError(f"a prompt is a {type(prompt).__name__}, expected a text or a list of messages")
    else:
        messages = [dict(m) if isinstance(m, Mapping) else m for m in prompt]
    for number, message in enumerate(messages, 1):
        fields = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not fields or not all(isinstance(field, str) for field in fields):
            raise UserError(f'message {number}: expected {{"role": text, "content": text}}')
    if not messages:
        raise UserError("messages: expected at least one message")
    if system is not None and not isinstance(system, str):
        raise UserError(f"system is a {type(system).__name__}, expected a text")
    if system is not None:
        if messages[0]["role"] == "system":
            messages = messages[1:]
        messages = [{"role": "system", "content": system}, *messages]
    return messages
