"""One training step as a pure function: gradients summed over microbatches, then one update.

What is trained has float32 masters and optimizer state; what is frozen has neither. Heads and backbone
have an optimizer each, so that heads can learn alone for a while and at another rate.

Shapes: A microbatches, B rows, T tokens, D model, M heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from medusa_jax import backbone
from medusa_jax.backbone import Params
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.heads import HeadParams
from train import lora
from train.loss import (
    Batch,
    Scores,
    Term,
    cross_entropy,
    head_targets,
    heads_loss,
    logits_of,
    shift,
    sum_over_chunks,
)

F32 = jnp.dtype(jnp.float32)


@flax.struct.dataclass
class Trained:
    """What an optimizer changes; float32."""

    heads: Params  # `HeadStack`'s parameters
    backbone: lora.Adapters | Params | None  # adapters, or all parameters of the model; None: frozen


@flax.struct.dataclass
class Frozen:
    """What no optimizer touches, of the dtype of the computation or int8."""

    params: Params | None  # the model; None when all of it is trained, or when hidden states are stored
    token_map: jax.Array | None  # [V'] int32, of heads with a draft vocabulary
    table: jax.Array | None  # [V, D]: the unembedding, where the model itself is not needed
    embedding: jax.Array | None  # [V, D]: likewise the embedding, for conditioned heads


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes; donated."""

    step: jax.Array  # int32: steps done
    trained: Trained
    heads_optimizer: Any
    backbone_optimizer: Any


@flax.struct.dataclass
class Metrics:
    """Of one step. Losses are means over labelled tokens."""

    loss: jax.Array  # what was minimised
    heads: Scores  # stacked over heads [M]: sums
    model: Scores  # of the model's own prediction: sums; zero where it is not trained
    divergence: jax.Array  # KL(teacher || model), mean
    gradient: jax.Array  # global norm
    learning_rate: jax.Array  # of the heads
    finite: jax.Array  # bool; where false nothing was changed


def _one(step: jax.Array) -> jax.Array:
    del step
    return jnp.float32(1)


def _same(tree: Any) -> Any:
    return tree


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: the sum over heads of decay^m x cross-entropy; in Medusa-2 the model's loss too.

    model_loss: "none", "tokens" (cross-entropy) or "teacher" (KL to the model without its adapters).
    Cai et al. 2024 (arXiv 2401.10774), sections 2.2 and 2.3.2.
    """

    config: ModelConfig
    heads: MedusaConfig
    dtype: Any
    model_loss: str = "none"
    heads_weight: Callable[[jax.Array], jax.Array] = _one
    decay: float = 0.8
    softness: float = 0.0
    dropout: float = 0.0  # of the heads' input
    chunk: int = 128
    remat: bool = False
    gather: Callable[[Any], Any] = _same  # heads and tables made ready to compute with
    gather_embedding: Callable[[Any], Any] = _same  # a model's embedding, before tokens are looked up

    def model(self, trained: lora.Adapters | Params | None, frozen: Frozen) -> Params | None:
        """The parameters of the model as it now is, in the dtype of the computation."""
        if trained is None:
            return None if frozen.params is None else self.gather_embedding(frozen.params)
        if isinstance(trained, lora.Adapters):
            assert frozen.params is not None
            return lora.attach(self.gather_embedding(frozen.params), trained, self.dtype)
        return self.gather_embedding(jax.tree.map(lambda leaf: leaf.astype(self.dtype), trained))

    def unembed_terms(
        self, params: Params, hidden: jax.Array, dropout: jax.Array | None = None
    ) -> list[Term]:
        """`backbone.unembed_terms`, with tables that are ready to compute with."""
        if "lm_head" in params:
            params = params | self.gather({"lm_head": params["lm_head"]})
        return backbone.unembed_terms(params, self.config, hidden, dropout)


def hidden_of(
    objective: Objective, params: Params, batch: Batch, dropout: jax.Array | None = None
) -> jax.Array:
    """The model's hidden states [B, T, D]; a token sees what stands before it in its own document."""
    T = batch.tokens.shape[1]
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    relation = jnp.tril(jnp.ones((T, T), bool))[None] & same
    return backbone.forward(
        params,
        objective.config,
        batch.tokens,
        batch.positions,
        relation,
        None,
        remat=objective.remat,
        dropout=dropout,
    )[0]


def loss(
    trained: Trained,
    frozen: Frozen,
    batch: Batch,
    hidden: jax.Array | None,
    objective: Objective,
    counts: tuple[jax.Array, jax.Array],
    step: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, tuple[Scores, Scores, jax.Array]]:
    """This batch's part of the objective, and its sums (heads, model, divergence).

    hidden [B, T, D]: hidden states computed beforehand; None: by the model. counts: labelled positions of the
    whole step, for each head [M] and for the model. key: for dropout; None: without.
    """
    keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))
    params = objective.model(trained.backbone, frozen)
    if hidden is None:
        assert params is not None
        hidden = hidden_of(objective, params, batch, keys[0])
    hidden = hidden.astype(objective.dtype)
    if trained.backbone is None:
        hidden = jax.lax.stop_gradient(hidden)
    total, model, divergence = jnp.float32(0), _no_scores(()), jnp.float32(0)
    if objective.model_loss != "none":
        assert params is not None
        part, model, divergence = _model_loss(
            frozen,
            params,
            batch,
            hidden,
            objective,
            counts[1],
            keys[1],
            isinstance(trained.backbone, lora.Adapters),
        )
        total += part
    config = objective.heads
    layers = objective.gather(jax.tree.map(lambda leaf: leaf.astype(objective.dtype), trained.heads))
    made = HeadParams(layers, frozen.token_map, None)
    embedded = None
    if config.conditioned:
        if params is None:
            assert frozen.embedding is not None
            embedded = objective.gather({"embedding": frozen.embedding})["embedding"][batch.tokens]
        else:
            embedded = backbone.embed(params, objective.config, batch.tokens)
        embedded = jax.lax.stop_gradient(embedded).astype(objective.dtype)
    weights = objective.decay ** jnp.arange(config.num_heads, dtype=F32) / jnp.maximum(counts[0], 1)
    weights = weights * objective.heads_weight(step)
    tables, teacher = _shared_tables(params, frozen, objective, hidden)
    part, heads = heads_loss(
        made,
        config,
        hidden,
        embedded,
        batch,
        tables,
        teacher,
        weights,
        objective.softness,
        objective.chunk,
        objective.dropout,
        keys[2],
    )
    return total + part, (heads, model, divergence)


def _shared_tables(
    params: Params | None, frozen: Frozen, objective: Objective, hidden: jax.Array
) -> tuple[Callable[[jax.Array], list[Term]], list[Term]]:
    """The products of the unembedding that the heads share, and those of the model's own logits.

    Both over the draft vocabulary if there is one: what lies outside of it no head can learn. Neither is
    trained by the heads' loss; the path of LoRA on the unembedding is as the model has it now.
    """

    def tables(z: jax.Array) -> list[Term]:
        if params is None:
            terms = [(z, objective.gather({"table": frozen.table})["table"])]
        else:
            still = jax.lax.stop_gradient(params)
            terms = objective.unembed_terms(still, z)
        if frozen.token_map is None:
            return terms
        return [(x, table[frozen.token_map]) for x, table in terms]

    return tables, tables(jax.lax.stop_gradient(hidden))


def _model_loss(
    frozen: Frozen,
    params: Params,
    batch: Batch,
    hidden: jax.Array,
    objective: Objective,
    count: jax.Array,
    key: jax.Array | None,
    adapted: bool,
) -> tuple[jax.Array, Scores, jax.Array]:
    """The model's own loss over labelled tokens: with the tokens, or KL to the model without adapters.

    adapted: the unembedding itself is frozen, and only what LoRA adds to it is trained.
    """
    learns = model_targets(batch)
    terms = objective.unembed_terms(params, hidden, key)
    taught: list[Term] = []
    if objective.model_loss == "teacher":
        assert frozen.params is not None
        teacher = objective.gather_embedding(frozen.params)
        still = jax.lax.stop_gradient(hidden_of(objective, teacher, batch))
        taught = objective.unembed_terms(teacher, still)
    tables = [table for _, table in terms]
    frozen_tables, trained_tables = (tables[:1], tables[1:]) if adapted else ([], tables)
    fixed_xs = {
        "target": shift(batch.tokens, -1),
        "weight": learns / jnp.maximum(count, 1),
        "taught": [x for x, _ in taught],
    }
    fixed: Any = (frozen_tables, [table for _, table in taught])

    def score(xs: Any, shared: Any, fixed_xs: Any, fixed: Any) -> Any:
        logits = logits_of(list(zip(xs, [*fixed[0], *shared], strict=True)))
        teacher = None
        if taught:
            teacher = logits_of(list(zip(fixed_xs["taught"], fixed[1], strict=True)))
        part, scores = cross_entropy(logits, fixed_xs["target"], fixed_xs["weight"], None, 0.0)
        divergence = jnp.float32(0)
        if teacher is not None:
            log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(logits)
            apart = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            part = divergence = jnp.sum(apart * fixed_xs["weight"])
        return part, (scores, jax.lax.stop_gradient(divergence))

    xs = [x for x, _ in terms]
    summed: Any = sum_over_chunks(
        score, objective.chunk, xs, trained_tables, fixed_xs, jax.lax.stop_gradient(fixed)
    )
    part, (scores, divergence) = summed
    return part, scores, divergence


def model_targets(batch: Batch) -> jax.Array:
    """Whether the model's own prediction at each position is learnt, [B, T] bool."""
    segment = shift(batch.segments, -1)
    return shift(batch.labels, -1) & (segment > 0) & (segment == batch.segments)


def _no_scores(shape: tuple[int, ...]) -> Scores:
    from train.loss import TOP

    return Scores(jnp.zeros(shape), jnp.zeros((*shape, TOP)), jnp.zeros(shape))


def train_step(
    state: TrainState,
    frozen: Frozen,
    batches: Batch,
    hidden: jax.Array | None,
    key: jax.Array,
    *,
    objective: Objective,
    heads_optimizer: optax.GradientTransformation,
    backbone_optimizer: optax.GradientTransformation | None,
    learning_rate: optax.Schedule,
) -> tuple[TrainState, Metrics]:
    """One update from batches [A, B, T] and, if stored, their hidden [A, B, T, D].

    key: the run's; each step and microbatch folds in its number. With backbone_optimizer None only the heads
    learn in this step, and the backbone's gradients are not computed. A step whose loss or gradients are not
    finite changes nothing but its own number.
    """
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batches)
    learns = head_targets(flat, objective.heads.num_heads)[1]
    counts = jnp.sum(learns, axis=(0, 1)).astype(F32), jnp.sum(model_targets(flat)).astype(F32)
    key = jax.random.fold_in(key, state.step)
    joint = backbone_optimizer is not None
    alone = objective if joint else dataclasses.replace(objective, model_loss="none")

    def part(learning: Any, batch: Batch, hidden: jax.Array | None, number: jax.Array) -> Any:
        trained = learning if joint else Trained(learning, jax.lax.stop_gradient(state.trained.backbone))
        if not joint and trained.backbone is not None:
            params: Any = alone.model(trained.backbone, frozen)
            hidden = jax.lax.stop_gradient(hidden_of(alone, params, batch))
        return loss(
            trained, frozen, batch, hidden, alone, counts, state.step, jax.random.fold_in(key, number)
        )

    learning = state.trained if joint else state.trained.heads
    gradient_of = jax.value_and_grad(part, has_aux=True)

    def body(total: Any, given: Any) -> Any:
        return jax.tree.map(jnp.add, total, gradient_of(learning, *given)), None

    given = (batches, hidden, jnp.arange(batches.tokens.shape[0]))
    shapes = jax.eval_shape(lambda: gradient_of(learning, *jax.tree.map(lambda leaf: leaf[0], given)))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    ((total, (heads, model, divergence)), gradients), _ = jax.lax.scan(body, zeros, given)
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(total) & jnp.isfinite(norm)

    def update(optimizer: Any, gradients: Any, kept: Any, trained: Any) -> Any:
        changes, new = optimizer.update(gradients, kept, trained)
        new = (optax.apply_updates(trained, changes), new)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (trained, kept))

    into_heads = gradients.heads if joint else gradients
    trained = state.trained
    new_heads, heads_state = update(heads_optimizer, into_heads, state.heads_optimizer, trained.heads)
    new_backbone, backbone_state = trained.backbone, state.backbone_optimizer
    if joint:
        new_backbone, backbone_state = update(
            backbone_optimizer, gradients.backbone, state.backbone_optimizer, trained.backbone
        )
    new = TrainState(state.step + 1, Trained(new_heads, new_backbone), heads_state, backbone_state)
    rate = jnp.asarray(learning_rate(state.step), F32)
    metrics = Metrics(total, heads, model, divergence, norm, rate, finite)
    return new, metrics


def evaluate(
    trained: Trained, frozen: Frozen, batch: Batch, hidden: jax.Array | None, *, objective: Objective
) -> tuple[Scores, Scores]:
    """Sums over a batch [B, T] of the heads' scores [M] and the model's, without dropout."""
    ones = jnp.ones((objective.heads.num_heads,), F32), jnp.ones((), F32)
    hard = dataclasses.replace(objective, softness=0.0)
    _, (heads, model, _) = loss(trained, frozen, batch, hidden, hard, ones, jnp.int32(0), None)
    return heads, model
