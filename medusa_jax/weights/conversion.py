"""Converting heads: open, adapt, write, compare. What `python -m medusa_jax.convert` does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from medusa_jax import checkpoint
from medusa_jax.errors import UserError, is_file, is_folder, stat_of
from medusa_jax.weights import checkpoints, fingerprint, head_cards, head_changes, hf, trained
from medusa_jax.weights.checkpoints import Checkpoint
from medusa_jax.weights.head_check import CheckError, largest_difference
from medusa_jax.weights.head_files import HeadCheckpoint, check_target, open_heads, save_heads
from medusa_jax.weights.head_names import MODELOPT, WHOLE_MODEL
from medusa_jax.weights.head_paths import IN_RUN, MODEL_IN_RUN
from medusa_jax.weights.head_targets import PLANS, Request
from medusa_jax.weights.lazy import Lazy, Progress, common
from medusa_jax.weights.params import flatten, unflatten
from medusa_jax.weights.staging import staged

OURS = ("orbax", "hf", "medusa-jax")
TARGETS = ("orbax", "reference", "vllm", "tgi", "trtllm", "hf", "medusa-jax")
DEFAULT_MODEL = "default"  # as --model: the small default model

Note = Callable[[str], None]
Bar = Callable[[int, int], None]  # told the bytes done and the bytes in all


@dataclasses.dataclass(frozen=True)
class Options:
    """One conversion. generation: v1 or v2. dtype: None keeps the source's. base_name: see `Request.base`."""

    source: str
    target: str
    to: str
    model: str | None = None
    generation: str | None = None
    dtype: Any = None
    expand_vocabulary: bool = False
    base_name: str | None = None
    check: bool = False


def convert(options: Options, note: Note, bar: Bar | None = None) -> tuple[float, float] | None:
    """Convert heads; the target appears under its name only when it is whole and, if asked, checked.

    note is given lines for the user. Returns the largest difference in logits and its limit where that was
    checked. Raises UserError for what cannot be read, expressed or written, CheckError for a wrong target.
    """
    target = check_target(options.target)
    heads, model = open_source(options, note)
    table = None if model is None else head_changes.unembedding(model)
    dtype = np.dtype(heads.dtype if options.dtype is None else options.dtype)
    heads, lines = head_changes.settle(heads, table)
    source = heads
    if heads.config.draft_vocab_size is None and options.expand_vocabulary:
        lines.append("--expand-vocabulary changes nothing: the heads score the whole vocabulary")
    if options.expand_vocabulary:
        heads = head_changes.expanded(heads, table)
    if common(heads.dtype, dtype) != dtype:
        lines.append(f"values are rounded from {heads.dtype} to {dtype}")
    copied = options.to in ("vllm", "trtllm") or options.generation == "v1"
    shared = table if copied and not heads.config.own_unembedding else None
    if shared is not None and common(shared.dtype, dtype) != dtype:
        lines.append(f"the model's unembedding is rounded from {shared.dtype} to {dtype}")
    if head_changes.have_tied_layers(heads):
        lines.append(
            f"the {heads.config.num_layers} residual layers of each head are copies of one; "
            "they are written as layers of their own"
        )
    request = Request(
        heads=heads,
        dtype=dtype,
        table=table,
        base=_base_name(options, heads, model),
        family=None if model is None else model.config.family,
        generation=options.generation,
    )
    for line in lines:
        note(f"note: {line}")
    if options.to in OURS:
        write = _plan_ours(request, model, options, note, bar)
    else:
        plan = PLANS[options.to](request)
        for line in plan.notes:
            note(f"note: {line}")
        write = functools.partial(plan.write, progress=_counted(bar, plan.nbytes))
    with staged(target) as folder:
        write(folder)
        if not options.check:
            return None
        difference, limit = largest_difference(source, table, folder, options.to, dtype)
        if not difference <= limit:
            raise CheckError(f"logits differ by up to {difference:.3g}, at most {limit:.3g} is right")
    return difference, limit


def open_source(options: Options, note: Note) -> tuple[HeadCheckpoint, Checkpoint | None]:
    """The heads and, where one is given or lies beside them, their model. Raises UserError."""
    model = None
    if options.model is not None:
        model = checkpoints.open_model(None if options.model == DEFAULT_MODEL else options.model)
    heads = _open_for(options.source, model)
    if model is None and (beside := _model_beside(heads, options)) is not None:
        note(f"the model: {beside}")
        model = checkpoints.open_model(beside)
        heads = _open_for(options.source, model)
    if options.to == "hf" and model is None:
        raise UserError(
            f"{heads.path}: --to hf writes the model too, and none lies beside the heads; give --model"
        )
    note(f"{options.source}: {summary(heads)}")
    for line in heads.warnings:
        note(f"note: {line}")
    if model is not None:
        for line in fingerprint.warnings(heads.metadata, model.source, str(heads.path)):
            note(f"note: {line}")
    if checkpoint.holds_backbone(heads.path):
        return _with_trained(heads, model, options)
    return heads, model


def _with_trained(
    heads: HeadCheckpoint, model: Checkpoint | None, options: Options
) -> tuple[HeadCheckpoint, Checkpoint]:
    """Heads from the checkpoint of a run that trains its model too, and that model. Raises UserError."""
    if model is None:
        raise UserError(
            f"{heads.path}: the run trained its model too, and the heads belong to that one; "
            "give the model that it began with as --model"
        )
    if options.to in ("reference", "tgi") and options.base_name is None:
        raise UserError(
            f"{heads.path}: the run trained its model too, and no folder holds that one yet; write it with "
            "--to hf and convert what that gives, or say with --base-name where it is"
        )
    model = trained.opened(model, heads.path, options.dtype)
    metadata = heads.metadata | {fingerprint.KEY: fingerprint.fingerprint(model.source)}
    return dataclasses.replace(heads, metadata=metadata), model


def summary(heads: HeadCheckpoint) -> str:
    """What heads are, in a line."""
    c = heads.config
    unembedding = "unembeddings of their own" if c.own_unembedding else "the model's unembedding"
    kind = "conditioned heads" if c.conditioned else "heads"
    draft = f", {c.draft_vocab_size:,} tokens scored" if c.draft_vocab_size is not None else ""
    layers = f"{c.num_layers} layer{'' if c.num_layers == 1 else 's'}"
    kind = kind.removesuffix("s") if c.num_heads == 1 else kind
    return f"{heads.kind}, {c.num_heads} {kind} of {layers}, {unembedding}{draft}, {heads.dtype}"


def _open_for(source: str, model: Checkpoint | None) -> HeadCheckpoint:
    if model is None:
        return open_heads(source)
    return open_heads(source, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size)


def _model_beside(heads: HeadCheckpoint, options: Options) -> Path | None:
    """The model that a run trained with the heads, or that holds them, or that they were exported with."""
    folder = heads.path if is_folder(heads.path) else heads.path.parent
    if heads.kind in (WHOLE_MODEL, MODELOPT.kind):
        return folder if options.to == "hf" or options.generation == "v2" else None
    if folder.name != IN_RUN:
        return None
    for candidate in (folder.parent / MODEL_IN_RUN, folder.parent):
        weights = any(is_file(candidate / name) for name in (hf.SINGLE, hf.INDEX))
        if weights and is_file(candidate / "config.json"):
            return candidate
    return None


def _base_name(options: Options, heads: HeadCheckpoint, model: Checkpoint | None) -> str | None:
    """What the target calls its model: never one without the training that the heads went through."""
    if options.base_name is not None:
        return options.base_name
    if heads.kind in (WHOLE_MODEL, MODELOPT.kind):
        return _whole(options.source)
    trained = heads.path.resolve().parent / MODEL_IN_RUN if heads.path.name == IN_RUN else None
    if model is not None and model.path.resolve() == trained:
        return str(trained)
    if checkpoint.holds_backbone(heads.path) and options.to in ("vllm", "trtllm"):
        return None
    if "base_model" in heads.metadata:
        return heads.metadata["base_model"]
    if model is None or options.model == DEFAULT_MODEL:
        return None
    return _whole(options.model or str(model.path))


def _whole(name: str) -> str:
    """A path as it is understood from anywhere; a hub id as it is."""
    path = Path(name).expanduser()
    return name if stat_of(path) is None else str(path.resolve())


def _plan_ours(
    request: Request, model: Checkpoint | None, options: Options, note: Note, bar: Bar | None
) -> Callable[[Path], None]:
    """What writes a kind of this project: Orbax, safetensors, or a whole model with the heads beside it."""
    heads, dtype = request.heads, request.dtype
    if heads.vocab_size is None:
        raise UserError(f"{heads.path}: the files do not tell the vocabulary's size; give --model")
    if not heads.config.own_unembedding:
        heads, lines = head_changes.with_shared(heads, request.table, "this project's format")
        for line in lines:
            note(f"note: {line}")
    metadata = dict(heads.metadata) | ({} if request.base is None else {"base_model": request.base})
    layers = {
        name: dataclasses.replace(stack, parts=[part.finite(f"{heads.path}: {name}") for part in stack.parts])
        for name, stack in heads.arrays(dtype).items()
    }
    arguments: tuple[Any, ...] = (heads.config, layers, heads.token_map(), metadata)
    progress = _counted(bar, sum(stack.nbytes for stack in layers.values()))

    def write(folder: Path) -> None:
        if options.to == "hf":
            assert model is not None
            _write_model(model, None if options.dtype is None else dtype, folder, bar)
            save_heads(folder / IN_RUN, *arguments)
        elif options.to == "orbax":
            checkpoint.save_head_checkpoint(folder, *arguments, progress=progress)
        else:
            save_heads(folder, *arguments, progress=progress)
        card = head_cards.card(options.to, head_cards.Facts(heads, dtype, request.base), [])
        (folder / "README.md").write_text(card, encoding="utf-8")

    return write


def _write_model(model: Checkpoint, dtype: np.dtype | None, folder: Path, bar: Bar | None) -> None:
    """The model as it is, tensor by tensor; nothing of it is changed but, if asked, the element type."""
    arrays = flatten(head_changes.model_arrays(model))
    if dtype is not None:
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    progress = _counted(bar, sum(array.nbytes for array in arrays.values()))
    arrays = {name: _told(array.finite(f"{model.path}: {name}"), progress) for name, array in arrays.items()}
    hf.save_pretrained(folder, unflatten(arrays), model.config, model.tokenizer(), model.generation_config())


def _told(array: Lazy, progress: Progress) -> Lazy:
    def read(start: int, stop: int) -> np.ndarray:
        block = array.read(start, stop)
        progress(block.nbytes)
        return block

    return dataclasses.replace(array, read=read)


def _counted(bar: Bar | None, total: int) -> Progress:
    """Tells a bar the sum of what it is told."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if bar is not None:
            bar(done, total)

    return count
