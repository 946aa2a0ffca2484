"""MedusaLM: load a model, generate, stream. What users of the library import."""

from __future__ import annotations

import dataclasses
import numbers
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from medusa_jax import backbone, calibration, decode, linear, sharding, tree_choice
from medusa_jax import heads as heads_module
from medusa_jax.completion import Completion, Prompt, completion, messages_of, render
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.decode import Plan
from medusa_jax.errors import UserError
from medusa_jax.heads import HeadParams
from medusa_jax.programs import Programs
from medusa_jax.sampling import SamplingParams, model_defaults, resolve
from medusa_jax.schedule import Engine, Job, Session, decode_batch
from medusa_jax.text import TextStream
from medusa_jax.tree import Tree
from medusa_jax.tree_choice import AutoTree
from medusa_jax.weights import checkpoints, fingerprint, hf, hub, shipped
from medusa_jax.weights.params import abstract_params, load_params

if TYPE_CHECKING:
    from medusa_jax.weights.head_files import HeadCheckpoint
    from medusa_jax.weights.source import TensorSource


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
        heads: tuple[MedusaConfig, HeadParams] | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Params are arrays, or only their shapes as long as nothing but compilation is asked for.

        plan: what a step guesses, whatever the batch (see `use`); plain decoding without one.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.params: Any = params
        self.generation_config = dict(generation_config)
        self.end_tokens = end_tokens(generation_config, tokenizer)
        self.defaults = model_defaults(generation_config)
        self.heads = heads
        self._files: tuple[TensorSource, HeadCheckpoint | None] | None = None  # it was loaded from
        self.warnings: list[str] = []  # what is odd about the files or decides the speed, but is not wrong
        head_shapes = None
        if heads is not None:
            head_shapes = _shapes(heads[1])
            placed = sharding.head_shardings(head_shapes, mesh)
            head_shapes = sharding.with_shardings(head_shapes, placed)
        shapes = _shapes(params)
        shapes = sharding.with_shardings(shapes, sharding.param_shardings(shapes, config, mesh))
        self.programs = Programs(config, jnp.dtype(dtype), shapes, head_shapes, mesh)
        # Of the weights as they are not held now (see `_hold`), if there is a second form of them at all.
        self._other_programs: Programs | None = None
        self._auto: AutoTree | None = None
        self._given: Plan | None = plan or Plan.plain()  # None: `_auto` chooses

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        heads: str | os.PathLike[str] | None = "auto",
        tree: Tree | str | os.PathLike[str] | None = None,
        dtype: str | Any | None = None,
        mesh: str | Mapping[str, int] | jax.sharding.Mesh | None = None,
        *,
        lookup: str | bool = "auto",
        expect: Callable[[MedusaLM], Callable[[], None] | None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> MedusaLM:
        """Load a model: a Hugging Face folder, a .gguf file, a hub id, or None for the small default model.

        dtype: "float32" or "bfloat16"; None gives float32 on a CPU and bfloat16 elsewhere. mesh: as
        "data=2,tensor=4". expect(lm) is called before the weights are read, to find mistakes in prompts
        early; what it returns, if anything, is called while they are read: compiling needs only their
        shapes (see `compile_for`). progress(bytes_done, bytes_total) is called as they come.

        heads: a folder, a file or a hub id; "medusa" or "conditioned" for those that come with the default
        model, "auto" for the better of them with that model and none with another; None or "none" for none.
        tree: what `Tree.parse` takes, or "auto" (the same as None): by the batch, the tree that gives most
        tokens per second as `infer.calibrate` measured it, plain decoding where none pays (see
        `medusa_jax.tree_choice`). lookup: "on", "off", or "auto": as the calibration says; without one it is
        on where there are heads, or a tree is named, and on accelerators (on a CPU lookup alone is slower
        than plain decoding). Raises UserError for whatever is wrong with the files or the tree.
        """
        if tree is not None and not isinstance(tree, Tree):
            tree = None if str(tree) == "auto" else Tree.parse(str(tree))
        if lookup not in ("auto", "on", "off", True, False):
            raise UserError(f"lookup is {lookup!r}, expected 'auto', 'on' or 'off'")
        checkpoint = checkpoints.open_model(model)
        opened = None
        heads = shipped.resolve(heads, model)
        if heads is not None:
            from medusa_jax.weights.head_files import open_heads

            opened = open_heads(
                heads,
                hidden_size=checkpoint.config.hidden_size,
                vocab_size=checkpoint.config.vocab_size,
            )
        dtype = parse_dtype(dtype)
        mesh = sharding.as_mesh(mesh)
        shapes = abstract_params(checkpoint.config, dtype)

        def apart(made: HeadParams) -> HeadParams:
            if mesh is not None or jax.default_backend() != "cpu":
                return made
            return dataclasses.replace(made, layers=heads_module.taken_apart(made.layers))

        guessing = None
        if opened is not None:
            guessing = opened.config, apart(heads_module.abstract(opened.config, dtype))
        lm = cls(
            checkpoint.config,
            shapes,
            checkpoint.tokenizer(),
            checkpoint.generation_config(),
            dtype,
            mesh,
            guessing,
        )
        # Trees are steps of a few rows, which a CPU takes faster with turned weights, and single rows 5 %
        # slower. On a mesh of pretended devices speed is no aim.
        if mesh is None and jax.default_backend() == "cpu" and dtype == jnp.float32:
            turned = linear.turned(jax.tree.map(lambda leaf: leaf, shapes))
            lm._other_programs = dataclasses.replace(lm.programs, params=turned, compiled={}, locks={})
        lm._files = checkpoint.source, opened
        lm.warnings += [] if opened is None else opened.warnings
        if tree is None:
            wanted = None if lookup == "auto" else lookup in ("on", True)
            lm._auto = tree_choice.find(checkpoint.source, opened, wanted, mesh, dtype, lm.warnings)
            lm._given = None
        else:
            lm.use(tree, lookup=lookup in ("auto", "on", True))
        meanwhile = None if expect is None else expect(lm)
        worker = None if meanwhile is None else _Background(meanwhile)
        shardings = sharding.param_shardings(shapes, checkpoint.config, mesh)
        params = load_params(checkpoint.source, checkpoint.config, dtype, shardings, progress)
        if opened is not None:
            layers, token_map = opened.read(dtype)
            table = backbone.unembedding_table(params)
            kept = None if token_map is None else jnp.asarray(token_map)
            made = apart(heads_module.attach(opened.config, layers, table, kept))
            lm.heads = opened.config, sharding.place(made, sharding.head_shardings(made, mesh))
            lm.warnings += fingerprint.warnings(opened.metadata, checkpoint.source, str(opened.path))
        if worker is not None:  # not waited for when loading fails: the error should not wait for a compiler
            worker.join()
        if expect is None:  # nobody has asked for steps yet: most likely those of a single row
            first = lm._given if lm._auto is None else lm._auto.choose(1).plan
            lm._hold(first is not None and lm._turns(first))
        # Reading is over, so that each matrix can be given up as soon as its kernel is there.
        lm.params = linear.turned(params) if linear.is_turned(lm.params) else params
        return lm

    def plainly(self) -> MedusaLM:
        """The same model decoding plainly, beside this one: what guessing is to be compared with.

        It shares this one's programs for that, and has weights of its own where this one's are turned.
        """
        params, dtype = linear.restored(self.params), self.programs.dtype
        lm = MedusaLM(self.config, params, self.tokenizer, self.generation_config, dtype, self.mesh)
        if linear.is_turned(self.params):
            assert self._other_programs is not None
            lm.programs = self._other_programs
        else:
            lm.programs = self.programs
        return lm

    @property
    def plan(self) -> Plan:
        """What a step of one greedy row guesses; one that is set holds for every batch."""
        return self.plan_for()

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._given = plan

    def plan_for(self, batch: int = 1, temperature: float = 0.0) -> Plan:
        """What a step guesses with so many rows, of which the hottest has this temperature.

        Where the tree was chosen by hand it is always the same. Where it was not, and none pays, it is plain
        decoding, and `warnings` says so.
        """
        if self._given is not None:
            return self._given
        assert self._auto is not None
        choice = self._auto.choose(batch, temperature)
        if choice.note is not None and choice.note not in self.warnings:
            self.warnings.append(choice.note)
        return choice.plan

    def use(self, tree: Tree | Literal["auto"] | None = None, lookup: bool = False) -> None:
        """Choose what the next steps guess: a tree filled by the heads, if there are any, and by lookup.

        None, or a tree of one node, decodes plainly. "auto" goes back to what `load` chose for tree="auto",
        lookup included. Without heads or lookup there is nothing to guess from, and a tree deeper than both
        reach is cut to what they fill. Raises UserError for the former, and for "auto" where `load` was given
        a tree.
        """
        if isinstance(tree, str):
            if self._auto is None:
                raise UserError('tree "auto" needs a model that was loaded with it')
            self._given = None
            return
        if tree is None or tree.nodes == 1:
            self._given = Plan.plain()
            return
        if self.heads is None and not lookup:
            raise UserError("a tree needs guesses: give the model heads, or turn lookup on")
        config = None if self.heads is None else self.heads[0]
        if not lookup and config is not None and tree.max_depth > config.num_heads:
            self.warnings.append(
                f"the tree is {tree.max_depth} deep and there are {config.num_heads} heads: it is cut to them"
            )
            tree = tree.cut(config.num_heads)
        self._given = Plan(tree, config, lookup)

    @property
    def fingerprints(self) -> tuple[dict[str, Any], str | None]:
        """What tells calibrations of which model and which heads, if any, they are.

        Raises UserError for a model that was not loaded from files, or whose files cannot be read any more.
        """
        if self._files is None:
            raise UserError("the model was not loaded from files; nothing tells it from others")
        source, heads = self._files
        own = None if heads is None else calibration.heads_fingerprint(heads)
        return fingerprint.fingerprint(source), own

    @property
    def device(self) -> str:
        """What tells calibrations where steps were timed (see `calibration.device_label`)."""
        return calibration.device_label(self.mesh, self.programs.dtype)

    @property
    def engine(self) -> Engine:
        """Programs, arrays and the plan of one greedy row, as the scheduler takes them."""
        return self.engine_for(self.plan)

    def engine_for(self, plan: Plan) -> Engine:
        """The same for any plan."""
        self._hold(self._turns(plan))
        return Engine(self.programs, self.params, None if self.heads is None else self.heads[1], plan)

    def _hold(self, turned: bool) -> None:
        """Have the weights, or their shapes, in the form in which the next steps multiply fastest.

        An engine made before keeps what it was made with. Both forms exist for a moment: an interrupt must
        find one of them whole.
        """
        if linear.is_turned(self.params) == turned:
            return
        assert self._other_programs is not None
        change = linear.turned if turned else linear.turned_back
        params = change(jax.tree.map(lambda leaf: leaf, self.params))
        self.params, self.programs, self._other_programs = params, self._other_programs, self.programs

    def _turns(self, plan: Plan) -> bool:
        """Whether this plan's steps want turned weights."""
        return self._other_programs is not None and plan.tree.nodes > 1

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
        if not self.tokenizer.chat_template:
            raise UserError("this model has no chat template; give it plain text with --raw (raw=True)")
        return render(self.tokenizer, messages)

    def job(self, ids: list[int], params: SamplingParams | None = None) -> Job:
        """A request for the answer to a prompt's ids."""
        resolved = resolve(SamplingParams() if params is None else params, self.defaults)
        assert resolved.max_new_tokens is not None
        self._check_length(len(ids))
        if not all(0 <= token < self.config.vocab_size for token in ids):
            outside = next(token for token in ids if not 0 <= token < self.config.vocab_size)
            size = self.config.vocab_size
            raise UserError(f"token id {outside} is outside the model's vocabulary of {size}")
        return Job(
            prompt_ids=ids,
            params=resolved,
            limit=min(len(ids) + resolved.max_new_tokens, self.config.max_position_embeddings),
            end_tokens=self.end_tokens,
            text_stream=TextStream(self.tokenizer, resolved.stop),
        )

    def compile_for(self, jobs: Sequence[Job], batch_size: int = 1, *, streaming: bool = False) -> None:
        """Compile, on several threads, every program that these jobs need (those not compiled yet)."""
        engine, batch, slots = self._sizes(jobs, batch_size)
        programs = engine.programs
        tasks: list[Callable[[], Any]] = [lambda: programs.run(batch, slots, engine.plan)]
        chunks = {}
        for job in jobs:
            chunks.setdefault(decode.chunk_for(len(job.prompt_ids)), job)
        session = Session(engine, slots)
        for job in chunks.values():
            tasks.append(lambda job=job: session.compile(len(job.prompt_ids), 0))
        longest = max(jobs, key=lambda job: len(job.prompt_ids))
        tasks.append(lambda: session.compile(len(longest.prompt_ids), 0))
        if not streaming:
            tasks.append(lambda: programs.stop_rows(batch, slots))
        if batch > 1:
            tasks += [lambda: programs.empty(batch, slots), lambda: programs.insert(batch, slots)]
        workers = [_Background(task) for task in tasks]
        for worker in workers:
            worker.join()

    def _sizes(self, jobs: Sequence[Job], batch_size: int) -> tuple[Engine, int, int]:
        """The engine, rows and slots for these jobs: no more rows than jobs, a multiple of the data axis."""
        batch = min(batch_size, len(jobs))
        if batch > 1:
            batch = min(decode.rows_for(batch), batch_size)
            data = self.mesh.shape["data"] if self.mesh is not None else 1
            batch = -(-batch // data) * data
        temperature = max((float(job.params.temperature or 0) for job in jobs), default=0.0)
        engine = self.engine_for(self.plan_for(batch, temperature))
        slots = max(engine.slots_for(0, len(job.prompt_ids), job.limit) for job in jobs)
        self._check_memory(batch, slots)
        return engine, batch, slots

    def _check_memory(self, batch: int, slots: int) -> None:
        """Refuse a cache that is larger than the memory of the devices."""
        c = self.config
        row = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self.programs.dtype.itemsize
        need = row * slots * (batch + (batch > 1))  # prompts are read in a row of their own
        have = _memory()
        if have is not None and need > have:
            raise UserError(
                f"the key/value cache for {batch} rows of {slots} tokens needs {need / 1e9:.1f} GB, "
                f"there are {have / 1e9:.1f} GB: lower max_new_tokens or the batch size"
            )

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
        if isinstance(prompts, (Mapping, bytes)) or not isinstance(prompts, Iterable):
            raise UserError(f"prompts are a {type(prompts).__name__}, expected a list of prompts")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts:
            return []
        whole = isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool)
        if batch_size is not None and not (whole and batch_size >= 1):
            raise UserError(f"batch_size is {batch_size!r}, expected an integer of at least 1")
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
        engine, batch, slots = self._sizes(jobs, batch_size)
        self.compile_for(jobs, batch_size)
        index_of = {id(job): index for index, job in enumerate(jobs)}
        done: dict[int, Completion] = {}
        for job in decode_batch(engine, jobs, batch, slots):
            index = index_of[id(job)]
            done[index] = completion(prompts[index], job, engine.plan)
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

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as a Hugging Face folder (weights, configuration, tokenizer), without the heads.

        Raises UserError when the folder exists and is not empty, or cannot be written.
        """
        params = linear.restored(self.params)
        hf.save_pretrained(Path(folder), params, self.config, self.tokenizer, self.generation_config)

    def session(self, jobs: Sequence[Job]) -> Session:
        """A row of its own that keeps its cache, large enough for these jobs; it grows when it must."""
        engine, _, slots = self._sizes(jobs, 1)
        return Session(engine, slots)


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)


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


def _memory() -> int | None:
    """Bytes of memory of all local devices together; None where that cannot be known."""
    if jax.default_backend() == "cpu":
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    stats = [device.memory_stats() for device in jax.local_devices()]
    return sum(one["bytes_limit"] for one in stats if one) if all(stats) else None


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> None:
    """Keep compiled programs in `folder` (default: the user's cache), so that the next start finds them.

    Without `folder`, one that JAX has been told of already stays.
    """
    if folder is None and jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    folder = hub.cache_dir() / "xla" if folder is None else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
