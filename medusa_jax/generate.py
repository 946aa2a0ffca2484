"""MedusaLM: load a model, generate, stream. What users of the library import."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax import decode, sharding
from medusa_jax.config import ModelConfig
from medusa_jax.errors import UserError
from medusa_jax.sampling import SamplingParams, model_defaults, resolve
from medusa_jax.schedule import Job, Session, decode_batch
from medusa_jax.text import TextStream
from medusa_jax.weights import checkpoints
from medusa_jax.weights.params import abstract_params, load_params

# A prompt: a text (one user message, or the text to continue with `raw`), or chat messages.
Prompt = str | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Stats:
    """How a completion was decoded. Times exclude compilation; in a batch they are the batch's.

    tokens_per_second counts prefill and decoding. accepted_by_depth[d] is the number of steps that
    emitted exactly d guesses besides the step's own token.
    """

    new_tokens: int
    steps: int
    tokens_per_step: float
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    accepted_by_depth: list[int]


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


class MedusaLM:
    """A model ready to generate. Build one with `MedusaLM.load`."""

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Any,
        generation_config: Mapping[str, Any],
        dtype: Any = jnp.float32,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        """Params are arrays, or only their shapes as long as nothing but compilation is asked for."""
        self.config = config
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.params = params
        self.end_tokens = end_tokens(generation_config, tokenizer)
        self.defaults = model_defaults(generation_config)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        shapes = sharding.with_shardings(shapes, sharding.param_shardings(shapes, config, mesh))
        self.programs = decode.Programs(config, jnp.dtype(dtype), shapes, mesh)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        heads: str | os.PathLike[str] | None = None,
        tree: Any = None,
        dtype: str | Any | None = None,
        mesh: str | Mapping[str, int] | jax.sharding.Mesh | None = None,
        *,
        expect: Callable[[MedusaLM], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> MedusaLM:
        """Load a model: a Hugging Face folder, a .gguf file, a hub id, or None for the small default model.

        dtype: "float32" or "bfloat16"; None gives float32 on a CPU and bfloat16 elsewhere. mesh: as
        "data=2,tensor=4". expect(lm) runs while the weights are being read, for work that needs only
        their shapes: compiling (see `compile_for`). progress(bytes_done, bytes_total) is called as they
        come. Raises UserError for whatever is wrong with the model's files, and for heads or a tree,
        which this version does not decode with yet.
        """
        if heads not in (None, "none") or tree is not None:
            raise UserError("heads and trees: not yet; this version decodes plainly")
        checkpoint = checkpoints.open_model(model)
        dtype = parse_dtype(dtype)
        mesh = as_mesh(mesh)
        shapes = abstract_params(checkpoint.config, dtype)
        lm = cls(
            checkpoint.config, shapes, checkpoint.tokenizer(), checkpoint.generation_config(), dtype, mesh
        )
        worker = _Background(lambda: expect(lm)) if expect is not None else None
        shardings = sharding.param_shardings(shapes, checkpoint.config, mesh)
        lm.params = load_params(checkpoint.source, checkpoint.config, dtype, shardings, progress)
        if worker is not None:  # not waited for when loading fails: the error should not wait for a compiler
            worker.join()
        return lm

    def encode(self, prompt: Prompt, system: str | None = None, raw: bool = False) -> list[int]:
        """The ids of a prompt: through the chat template, or as it is (`raw`).

        system: the system message; "" removes the template's own. Raises UserError when the model has no
        chat template, or when the template refuses the messages.
        """
        if raw:
            if not isinstance(prompt, str):
                raise UserError("raw: the prompt is a list of messages, expected a text")
            if system:
                raise UserError("system: a raw prompt has no system message")
            text = prompt
        else:
            text = self.render(messages_of(prompt, system))
        try:
            text.encode()
        except UnicodeEncodeError as error:  # lone surrogates, which tokenizers answer with a TypeError
            raise UserError(f"the prompt is not valid Unicode ({error.reason})") from None
        ids = self.tokenizer(text, add_special_tokens=raw)["input_ids"]
        if not ids:
            raise UserError("the prompt is empty")
        self._check_length(len(ids))
        return ids

    def _check_length(self, length: int) -> None:
        most = self.config.max_position_embeddings
        if length >= most:
            raise UserError(
                f"the prompt has {length} tokens; the model's context of {most} leaves room for {most - 1}"
            )

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of chat messages, ending where the assistant's answer begins."""
        import jinja2  # only here: it takes a while to import

        if not self.tokenizer.chat_template:
            raise UserError("this model has no chat template; give it plain text with --raw (raw=True)")
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"the model's chat template refuses these messages: {error}") from None

    def job(self, ids: list[int], params: SamplingParams | None = None) -> Job:
        """A request for the answer to a prompt's ids."""
        resolved = resolve(params or SamplingParams(), self.defaults)
        assert resolved.max_new_tokens is not None
        self._check_length(len(ids))
        return Job(
            prompt_ids=ids,
            params=resolved,
            limit=min(len(ids) + resolved.max_new_tokens, self.config.max_position_embeddings),
            end_tokens=self.end_tokens,
            text_stream=TextStream(self.tokenizer, resolved.stop),
        )

    def compile_for(self, jobs: Sequence[Job], batch_size: int = 1, *, streaming: bool = False) -> None:
        """Compile, on several threads, every program that these jobs need (those not compiled yet)."""
        batch, slots = self._sizes(jobs, batch_size)
        tasks: list[Callable[[], Any]] = [lambda: self.programs.run(batch, slots)]
        chunks = {}
        for job in jobs:
            chunks.setdefault(decode.chunk_for(len(job.prompt_ids)), job)
        session = Session(self.programs, self.params, slots)
        for job in chunks.values():
            tasks.append(lambda job=job: session.compile(len(job.prompt_ids), 0))
        longest = max(jobs, key=lambda job: len(job.prompt_ids))
        tasks.append(lambda: session.compile(len(longest.prompt_ids), 0))
        if not streaming:
            tasks.append(lambda: self.programs.stop_rows(batch, slots))
        if batch > 1:
            tasks += [lambda: self.programs.empty(batch, slots), lambda: self.programs.insert(batch, slots)]
        workers = [_Background(task) for task in tasks]
        for worker in workers:
            worker.join()

    def _sizes(self, jobs: Sequence[Job], batch_size: int) -> tuple[int, int]:
        """Rows and slots for these jobs: no more rows than jobs, a multiple of the mesh's data axis."""
        batch = min(batch_size, len(jobs))
        if batch > 1:
            batch = decode.bucket(batch, 1)
            data = self.mesh.shape["data"] if self.mesh is not None else 1
            batch = -(-batch // data) * data
        slots = max(decode.slots_for(0, len(job.prompt_ids), job.limit) for job in jobs)
        return batch, slots

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        raw: bool = False,
        system: str | None = None,
        batch_size: int | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; the results are in the prompts' order.

        params: for all prompts, or one each. batch_size: rows that decode at a time (default: all
        prompts); a row that ends is refilled from the prompts that wait. on_done(index, completion) is
        called as each ends. Raises UserError for a bad prompt or parameter, before any work.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts:
            return []
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, expected an integer of at least 1")
        each = (
            [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} sampling parameters for {len(prompts)} prompts, expected one each")
        jobs = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                jobs.append(self.job(self.encode(prompt, system, raw), own))
            except UserError as error:
                raise UserError(f"prompt {index + 1}: {error}" if len(prompts) > 1 else str(error)) from None
        return self.complete(prompts, jobs, batch_size or len(jobs), on_done)

    def complete(
        self,
        prompts: Sequence[Prompt],
        jobs: Sequence[Job],
        batch_size: int,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """`generate`, for jobs made beforehand (`job`) of these prompts."""
        batch, slots = self._sizes(jobs, batch_size)
        self.compile_for(jobs, batch_size)
        index_of = {id(job): index for index, job in enumerate(jobs)}
        done: dict[int, Completion] = {}
        for job in decode_batch(self.programs, self.params, jobs, batch, slots):
            index = index_of[id(job)]
            done[index] = completion(prompts[index], job)
            if on_done is not None:
                on_done(index, done[index])
        return [done[index] for index in range(len(jobs))]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        raw: bool = False,
        system: str | None = None,
    ) -> Iterator[str]:
        """Complete one prompt, yielding its text piece by piece (whole characters, no stop string)."""
        job = self.job(self.encode(prompt, system, raw), params)
        return self.stream_job(job)

    def stream_job(self, job: Job) -> Iterator[str]:
        """Yield the text of a job as it comes; afterwards the job holds its ids and times."""
        self.compile_for([job], streaming=True)
        yield from filter(None, self.session([job]).stream(job))

    def session(self, jobs: Sequence[Job]) -> Session:
        """A row of its own that keeps its cache, large enough for these jobs; it grows when it must."""
        return Session(self.programs, self.params, self._sizes(jobs, 1)[1])


def completion(prompt: Prompt, job: Job) -> Completion:
    """The result of a finished job. `prompt` is given back as text: of messages, the last user's."""
    assert job.finish_reason is not None
    new, seconds = len(job.token_ids), job.prefill_seconds + job.decode_seconds
    return Completion(
        prompt=prompt_text(prompt),
        text="".join(job.pieces),
        token_ids=job.token_ids,
        finish_reason=job.finish_reason,
        stats=Stats(
            new_tokens=new,
            steps=job.steps,
            tokens_per_step=new / job.steps if job.steps else 0.0,
            prefill_seconds=job.prefill_seconds,
            decode_seconds=job.decode_seconds,
            tokens_per_second=new / seconds if seconds else 0.0,
            accepted_by_depth=[job.steps],
        ),
    )


def prompt_text(prompt: Prompt) -> str:
    """A prompt as the results name it: itself, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    return next((m["content"] for m in reversed(prompt) if m.get("role") == "user"), "")


def messages_of(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    """Chat messages of a prompt, checked. Raises UserError for anything else than role and content texts."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [dict(m) if isinstance(m, Mapping) else m for m in prompt]
    for number, message in enumerate(messages, 1):
        fields = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not fields or not all(isinstance(field, str) for field in fields):
            raise UserError(f'message {number}: expected {{"role": text, "content": text}}')
    if not messages:
        raise UserError("messages: expected at least one message")
    if system is not None:
        if messages[0]["role"] == "system":
            messages = messages[1:]
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def end_tokens(generation_config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """All ids that end an answer: the generation config's, else the tokenizer's."""
    value = generation_config.get("eos_token_id")
    if value is None:
        value = tokenizer.eos_token_id
    ids = [value] if isinstance(value, int) else list(value or [])
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"generation_config: eos_token_id is {value!r}, expected an id or a list of ids")
    if len(ids) > decode.MAX_END_TOKENS:
        raise UserError(
            f"generation_config: {len(ids)} end tokens, at most {decode.MAX_END_TOKENS} supported"
        )
    return tuple(ids)


def parse_dtype(dtype: Any) -> jnp.dtype:
    """float32 or bfloat16; None chooses by the platform. Raises UserError for another."""
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or parsed not in (jnp.float32, jnp.bfloat16):
        raise UserError(f"dtype is {dtype!r}, expected float32 or bfloat16")
    return parsed


def as_mesh(mesh: str | Mapping[str, int] | jax.sharding.Mesh | None) -> jax.sharding.Mesh | None:
    """A mesh of a mesh, of axis sizes, or of their text."""
    if mesh is None or isinstance(mesh, jax.sharding.Mesh):
        return mesh
    return sharding.make_mesh(sharding.parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh))


class _Background:
    """A function on a thread of its own, whose error comes back at `join`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by `join`
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def enable_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in `folder`, so that the next start does not compile them again."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
