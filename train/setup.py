"""From a configuration to what a run needs: model, heads, optimizers, steps, shardings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from medusa_jax import heads, quantize, sharding
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.errors import UserError
from medusa_jax.weights.params import abstract_params
from train import lora
from train.config import TrainConfig
from train.pipeline import Prepared
from train.step import Frozen, Objective, Trained, TrainState

F32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass
class Optimizers:
    """AdamW for heads and backbone, and the rate of the heads by step."""

    heads: optax.GradientTransformation
    backbone: optax.GradientTransformation
    heads_rate: optax.Schedule


def rate(options: Any, peak: float, first: int, steps: int) -> optax.Schedule:
    """Linear growth over the warm-up from step `first` on, then a cosine to the end of the run."""
    warmup = min(options.warmup_steps, max(steps - first, 1))
    end = peak * options.final_rate
    grown = optax.schedules.warmup_cosine_decay_schedule(
        init_value=peak / max(warmup, 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps - first, warmup + 1),
        end_value=end,
    )
    return lambda count: grown(count)


def optimizers(config: TrainConfig, steps: int, joint_from: int) -> Optimizers:
    """One for the heads over all steps, one for the backbone over those from `joint_from` on."""
    o = config.optimizer

    def adamw(schedule: optax.Schedule) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(o.clip)] if o.clip else []
        decay = optax.add_decayed_weights(config.loss.weight_decay, mask=_matrices)
        return optax.chain(*parts, optax.scale_by_adam(), decay, optax.scale_by_learning_rate(schedule))

    heads_rate = rate(o, o.learning_rate * o.heads_multiplier, 0, steps)
    return Optimizers(adamw(heads_rate), adamw(rate(o, o.learning_rate, joint_from, steps)), heads_rate)


def _matrices(params: Any) -> Any:
    """What weight decay applies to: not biases, nor norms' weights."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim >= 2 and not sharding.path_string(path).endswith("bias"), params
    )


def weight_schedule(options: Any, steps: int) -> Callable[[Any], Any]:
    """The weight of the heads' loss by step. The fork's sine grows as sin(pi / 2 x step / steps)."""
    peak = options.heads_weight
    if options.heads_weight_schedule == "linear":
        return lambda step: peak * jnp.minimum((step + 1) / steps, 1.0)
    if options.heads_weight_schedule == "sine":
        return lambda step: peak * jnp.sin(jnp.pi / 2 * jnp.minimum((step + 1) / steps, 1.0))
    return lambda step: jnp.float32(peak)


def draft_vocabulary(prepared: Any, size: int, vocab_size: int) -> np.ndarray:
    """The most frequent labelled tokens of the data, `size` of them in rising order, int32."""
    counts = np.zeros((vocab_size,), np.int64)
    for packed in prepared.train:
        counts += np.bincount(packed.tokens[packed.labels], minlength=vocab_size)
    kept = np.argsort(-counts, kind="stable")[:size]
    return np.sort(kept).astype(np.int32)


def heads_config(config: TrainConfig, model: ModelConfig) -> MedusaConfig:
    """The heads that the options describe. Raises UserError for ones that would have nothing to learn."""
    h = config.heads
    if h.num_layers == 0 and not (h.conditioned or h.own_unembedding):
        raise UserError(
            "num_layers is 0: heads without layers of their own have nothing to learn, expected 1 or more"
        )
    return MedusaConfig(
        num_heads=h.num_heads,
        num_layers=h.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        conditioned=h.conditioned,
        own_unembedding=h.own_unembedding,
        draft_vocab_size=h.draft_vocab_size,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does, without its arrays: everything that its programs are compiled from."""

    config: TrainConfig
    model: ModelConfig
    heads: MedusaConfig
    dtype: Any
    mesh: jax.sharding.Mesh | None
    steps: int
    joint_from: int  # the first step in which the backbone learns too; `steps` if it never does

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        model: ModelConfig,
        heads: MedusaConfig,
        dtype: Any,
        mesh: jax.sharding.Mesh | None,
        data: Prepared,
    ) -> Plan:
        """For this data. Raises UserError when it does not fill a batch, or the mesh does not divide one."""
        o = config.optimizer
        if mesh is not None:
            shards = mesh.shape["data"] * mesh.shape["fsdp"]
            micro = o.microbatch or o.batch_size
            if micro % shards:
                raise UserError(
                    f"a microbatch of {micro} rows does not divide over data x fsdp = {shards} devices"
                )
        steps = o.steps or int(o.epochs * data.rows) // o.batch_size
        if not steps:
            raise UserError(
                f"batch_size is {o.batch_size}, and {o.epochs:g} epochs of the data have {data.rows} rows of "
                f"{config.data.sequence_length} tokens: lower it, or sequence_length, or give more data"
            )
        trains = config.backbone.backbone != "frozen"
        joint_from = min(round(config.backbone.heads_first * steps), steps) if trains else steps
        return cls(config, model, heads, jnp.dtype(dtype), mesh, steps, joint_from)

    @property
    def microbatches(self) -> int:
        """A: how many a step takes."""
        o = self.config.optimizer
        return o.batch_size // (o.microbatch or o.batch_size)

    @property
    def stored(self) -> bool:
        """Whether hidden states come from the disk, so that the model itself takes no part."""
        return self.config.run.stored_hidden

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        c = self.config
        trains = c.backbone.backbone != "frozen"
        return Objective(
            config=self.model,
            heads=self.heads,
            dtype=self.dtype,
            model_loss=c.backbone.model_loss if trains else "none",
            heads_weight=weight_schedule(c.backbone, self.steps),
            decay=c.loss.decay,
            softness=c.loss.soft_labels,
            dropout=c.loss.head_dropout,
            chunk=c.run.loss_chunk,
            remat=c.run.remat and trains,
            gather=partial(sharding.gathered, config=self.model, mesh=self.mesh),
            gather_embedding=partial(sharding.gathered_embedding, config=self.model, mesh=self.mesh),
        )

    @property
    def optimizers(self) -> Optimizers:
        """One for the heads, one for the backbone."""
        return optimizers(self.config, self.steps, self.joint_from)

    # Shapes of everything, with shardings where there is a mesh: programs are compiled from them.

    def abstract_frozen(self) -> Frozen:
        """Of what is not trained."""
        params: Any = None
        table: Any = None
        embedding: Any = None
        token_map: Any = None
        shapes = abstract_params(self.model, self.dtype)
        if self.stored:
            table = backbone_table(shapes)
            embedding = shapes["model"]["embed_tokens"]["weight"] if self.heads.conditioned else None
        elif self.config.backbone.backbone != "full":
            params = jax.eval_shape(quantize.quantize, shapes) if self.config.backbone.int8 else shapes
        if self.heads.draft_vocab_size is not None:
            token_map = jax.ShapeDtypeStruct((self.heads.draft_vocab_size,), jnp.int32)
        return self._sharded(Frozen(params, token_map, table, embedding))

    def abstract_state(self) -> TrainState:
        """Of what is."""
        shapes = abstract_params(self.model, F32)
        layers = heads.abstract(self.heads, F32).layers
        trained = None
        if self.config.backbone.backbone == "full":
            trained = shapes
        elif self.config.backbone.backbone == "lora":
            trained = jax.eval_shape(self.adapters)
        return self._sharded(jax.eval_shape(self.start, Trained(layers, trained)))

    def adapters(self) -> Any:
        """Fresh LoRA adapters."""
        b = self.config.backbone
        shapes = abstract_params(self.model, F32)
        key = jax.random.key(self.config.run.seed)
        return lora.init(shapes, self.model, key, b.lora_rank, b.lora_alpha, b.lora_dropout)

    def start(self, trained: Trained) -> TrainState:
        """A state before the first step."""
        both = self.optimizers
        learnt: Any = trained.backbone
        mine = None if learnt is None else both.backbone.init(learnt)
        return TrainState(jnp.int32(0), trained, both.heads.init(trained.heads), mine)

    def _sharded(self, shapes: Any) -> Any:
        return sharding.with_shardings(shapes, sharding.matching_shardings(shapes, self.model, self.mesh))

    def shardings(self, shapes: Any) -> Any:
        """The shardings that shapes carry; None without a mesh."""
        return None if self.mesh is None else jax.tree.map(lambda leaf: leaf.sharding, shapes)


def backbone_table(shapes: Any) -> Any:
    """The unembedding of a model, given its parameters or their shapes."""
    return shapes.get("lm_head", shapes["model"]["embed_tokens"])["weight"]
