"""Training steps for benchmarks/aot.py: Llama-2-7B shapes, 32 rows of 2,048 tokens over 16 v5e chips."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from medusa_jax.config import MedusaConfig, ModelConfig
from train.config import BackboneOptions, DataOptions, OptimizerOptions, RunOptions, TrainConfig
from train.programs import Programs
from train.setup import Plan

ROWS, LENGTH = 32, 2048


def plan(model: ModelConfig, mesh: jax.sharding.Mesh, backbone: BackboneOptions, num_heads: int) -> Plan:
    """A run of `ROWS` rows of `LENGTH` tokens a step in bfloat16, everything over the mesh's fsdp axis."""
    config = TrainConfig(
        data=DataOptions(sequence_length=LENGTH),
        backbone=backbone,
        optimizer=OptimizerOptions(batch_size=ROWS),
        run=RunOptions(dtype="bfloat16", loss_chunk=256),
    )
    heads = MedusaConfig(num_heads, 1, model.hidden_size, model.vocab_size)
    steps = 1000
    joint_from = 0 if backbone.backbone != "frozen" else steps
    return Plan(config, model, heads, jnp.dtype(jnp.bfloat16), mesh, steps, joint_from)


def programs(model: ModelConfig, mesh: jax.sharding.Mesh, backbone: BackboneOptions) -> Programs:
    """The programs of a run that trains four heads, and the model as `backbone` says."""
    return Programs(plan(model, mesh, backbone, num_heads=4))


MEDUSA_1 = BackboneOptions()
MEDUSA_2_LORA = BackboneOptions(backbone="lora", model_loss="tokens", heads_weight=0.2)
