"""The arrays that a run begins with: weights read and placed, heads fresh or from files, hidden states."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax import backbone, heads, linear, sharding
from medusa_jax.weights.checkpoints import Checkpoint
from medusa_jax.weights.head_files import HeadCheckpoint
from medusa_jax.weights.params import abstract_params, flatten, load_params
from train import pipeline
from train.hidden import HiddenStates
from train.loss import Batch
from train.programs import Programs
from train.setup import F32, Plan, draft_vocabulary
from train.step import Frozen, Trained, TrainState

Progress = Callable[[int, int], None]


def read_model(
    plan: Plan, programs: Programs, checkpoint: Checkpoint, progress: Progress | None = None
) -> Any:
    """The model's parameters on their devices: float32 where they are trained, int8 if so configured."""
    full = plan.config.backbone.backbone == "full"
    dtype = F32 if full else plan.dtype
    shapes = abstract_params(plan.model, dtype)
    shardings = sharding.param_shardings(shapes, plan.model, plan.mesh)
    params = load_params(checkpoint.source, plan.model, dtype, shardings, progress)
    return programs.quantize()(params) if plan.config.backbone.int8 else params


def begin(
    plan: Plan, programs: Programs, params: Any, opened: HeadCheckpoint | None, data: pipeline.Prepared
) -> tuple[TrainState, Frozen]:
    """The state before the first step, and what stays as it is.

    params: as `read_model` gives them; donated where they are trained. opened: heads to start from.
    """
    table = backbone.unembedding_table(params)
    token_map = None
    if opened is not None:
        layers, token_map = opened.read(F32)
    else:
        size = plan.heads.draft_vocab_size
        if size is not None:
            token_map = draft_vocabulary(data, size, plan.model.vocab_size)
        kept = None if token_map is None else jnp.asarray(token_map)
        layers = heads.init(plan.heads, table, F32, kept).layers
    wanted = programs.state.trained
    frozen = Frozen(
        params=None,
        token_map=None if token_map is None else _placed(token_map, programs.frozen.token_map),
        table=None,
        embedding=None,
    )
    learnt = None
    if plan.stored:
        embedding = None
        if plan.heads.conditioned:
            embedding = linear.whole(params["model"]["embed_tokens"], plan.dtype)
        frozen = dataclasses.replace(frozen, table=table, embedding=embedding)
    elif plan.config.backbone.backbone == "full":
        learnt = params
    else:
        frozen = dataclasses.replace(frozen, params=params)
        if plan.config.backbone.backbone == "lora":
            learnt = programs.adapters()()
    placed = sharding.place(layers, plan.shardings(wanted.heads))
    return programs.start()(Trained(placed, learnt)), frozen


def _placed(array: Any, like: Any) -> jax.Array:
    return jnp.asarray(array) if like.sharding is None else jax.device_put(array, like.sharding)


def store_hidden(
    plan: Plan,
    programs: Programs,
    params: Any,
    data: pipeline.Prepared,
    folder: Path,
    progress: Progress | None = None,
) -> HiddenStates:
    """The hidden states of all rows, training's and then validation's; what the folder has is kept."""
    packed = [*data.train, *([data.validation] if data.validation is not None else [])]
    names = ("tokens", "segments", "positions", "labels")
    arrays = {name: np.concatenate([getattr(one, name) for one in packed]) for name in names}
    shape = (*arrays["tokens"].shape, plan.model.hidden_size)
    fingerprint = hashlib.sha256(f"{data.fingerprint()} {plan.model} {plan.dtype}".encode())
    for name, leaf in flatten(params).items():
        values = np.asarray(leaf.reshape(-1)[: 1 << 10].astype(F32))
        fingerprint.update(f"{name} {leaf.shape} {leaf.dtype}".encode() + values.tobytes())
    stored = HiddenStates(folder, fingerprint.hexdigest(), shape)
    if stored.done == shape[0]:
        return stored
    rows = max(1, min(shape[0], 4096 // shape[1]))
    if plan.mesh is not None:
        shards = plan.mesh.shape["data"] * plan.mesh.shape["fsdp"]
        rows = -(-rows // shards) * shards
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
    )
    program = programs.hidden(rows, shapes)

    def compute(numbers: np.ndarray) -> Any:
        batch = Batch(*(arrays[name][numbers] for name in names))
        if plan.mesh is not None:
            batch = jax.device_put(batch, sharding.batch_sharding(plan.mesh, 1))
        return program(params, batch)

    stored.fill(compute, rows, progress)
    return stored
