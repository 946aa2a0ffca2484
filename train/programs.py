"""The compiled programs of a run: the only place of this package that jits and donates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from medusa_jax import quantize, sharding
from train import step as steps
from train.loss import Batch
from train.setup import Plan
from train.step import Frozen, TrainState

# Left to itself XLA:TPU passes weights round in pieces beside their products, which takes more memory and far
# longer to compile than gathering each where it is needed (docs/benchmarks.md, "Training steps for sixteen
# chips"). A compiler that does not know the option refuses to compile, and names it.
_SEVERAL_TPUS: dict[str, str | bool] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


@dataclasses.dataclass(eq=False)
class Programs:
    """Of one plan, compiled when first asked for. Shapes come from the plan, so no weights are needed."""

    plan: Plan

    @functools.cached_property
    def frozen(self) -> Frozen:
        """Shapes and shardings."""
        return self.plan.abstract_frozen()

    @functools.cached_property
    def state(self) -> TrainState:
        """Shapes and shardings."""
        return self.plan.abstract_state()

    def rows(self, *leading: int) -> tuple[Batch, Any]:
        """Shapes of a batch with these leading dimensions, the last of them rows; of its hidden states."""
        T, D = self.plan.config.data.sequence_length, self.plan.model.hidden_size

        def shape(*more: int, dtype: Any) -> Any:
            spread = None if self.plan.mesh is None else sharding.batch_sharding(self.plan.mesh, len(leading))
            return jax.ShapeDtypeStruct((*leading, *more), dtype, sharding=spread)

        ids = shape(T, dtype=jnp.int32)
        batch = Batch(ids, ids, ids, shape(T, dtype=jnp.bool_))
        return batch, shape(T, D, dtype=jnp.bfloat16) if self.plan.stored else None

    def _out(self, *shapes: Any) -> Any:
        """Output shardings: states as they came in, everything else whole on every device."""
        if self.plan.mesh is None:
            return None
        whole = sharding.replicated(self.plan.mesh)
        return tuple(whole if one is None else self.plan.shardings(one) for one in shapes)

    @functools.cache  # noqa: B019 - as long-lived as the run
    def step(self, joint: bool) -> Any:
        """(state: donated, frozen, batches [A, B, T], hidden, key) -> state, metrics."""
        plan, both = self.plan, self.plan.optimizers
        micro = plan.config.optimizer.batch_size // plan.microbatches
        program = partial(
            steps.train_step,
            objective=plan.objective,
            heads_optimizer=both.heads,
            backbone_optimizer=both.backbone if joint else None,
            learning_rate=both.heads_rate,
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        jitted = jax.jit(program, donate_argnames="state", out_shardings=self._out(self.state, None))
        lowered = jitted.lower(self.state, self.frozen, *self.rows(plan.microbatches, micro), key)
        return lowered.compile(_SEVERAL_TPUS if sharding.spans_tpus(plan.mesh) else None)

    @functools.cache  # noqa: B019
    def evaluate(self, rows: int) -> Callable[..., Any]:
        """(trained, frozen, batch [B, T], hidden) -> scores of heads and model."""
        program = partial(steps.evaluate, objective=self.plan.objective)
        batch, hidden = self.rows(rows)
        jitted = jax.jit(program, out_shardings=self._out(None, None))
        return jitted.lower(self.state.trained, self.frozen, batch, hidden).compile()

    def hidden(self, rows: int, params: Any) -> Callable[..., Any]:
        """(params, batch [B, T]) -> hidden states [B, T, D] bfloat16; params given as shapes."""

        def program(params: Any, batch: Batch) -> jax.Array:
            objective = self.plan.objective
            ready = objective.gather_embedding(params)
            return steps.hidden_of(objective, ready, batch).astype(jnp.bfloat16)

        return jax.jit(program).lower(params, self.rows(rows)[0]).compile()

    def quantize(self) -> Callable[[Any], Any]:
        """(params: donated) -> the same in int8."""
        out = self.plan.shardings(self.frozen.params)
        return jax.jit(quantize.quantize, donate_argnums=0, out_shardings=out)

    def key(self) -> jax.Array:
        """The run's random key, whole on every device of every process."""
        seed = self.plan.config.run.seed
        mesh = self.plan.mesh
        out = None if mesh is None else sharding.replicated(mesh)
        return jax.jit(lambda: jax.random.key(seed), out_shardings=out)()

    def adapters(self) -> Callable[[], Any]:
        """() -> fresh LoRA adapters."""
        return jax.jit(self.plan.adapters, out_shardings=self.plan.shardings(self.state.trained.backbone))

    @functools.cache  # noqa: B019
    def start(self) -> Callable[..., TrainState]:
        """(trained: donated) -> a state before the first step."""
        jitted = jax.jit(
            self.plan.start, donate_argnames="trained", out_shardings=self.plan.shardings(self.state)
        )
        return jitted.lower(self.state.trained).compile()
