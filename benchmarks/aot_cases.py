"""The programs that benchmarks/aot.py compiles, and what each may do: decoding, training, controls."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

# The TPU compiler reads these when it is loaded: no device, no metadata server, no lock between processes.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["TPU_LOG_DIR"] = "disabled"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import aot_training
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from medusa_jax import backbone, decode, heads, sharding
from medusa_jax.config import MedusaConfig, ModelConfig
from medusa_jax.programs import Programs, compiler_options
from medusa_jax.tree import Tree

LLAMA_2_7B = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
)
DTYPE = jnp.dtype(jnp.bfloat16)
SLOTS = 2048
PLAIN = decode.Plan.plain()
HEADS = MedusaConfig(4, 1, LLAMA_2_7B.hidden_size, LLAMA_2_7B.vocab_size)
CONDITIONED = dataclasses.replace(HEADS, conditioned=True, draft_vocab_size=8192)
BANDWIDTH = {"v5e": 819e9, "h200": 4.8e12}  # bytes/s

READ_RATIO = 1.01  # bytes read over the analytic minimum
WRITE_RATIO = 0.02  # bytes written over those of the cache: a cache that is rewritten would be 1
AROUND_RATIO = 0.01  # what `run` moves once, outside of its loop, over the minimum of one step
TEMP_RATIO = 0.25  # temporaries over the cache: a copied cache would be 1
TEMP_COLLECTIVES = 64 << 20  # bytes that XLA reserves on every device of a program with collectives
TREE_RATIO = 1.15  # bytes moved by a step of 16 nodes over those of a plain step, on a GPU
SHARDS = 8  # of the tensor-parallel cases
CHIP_MEMORY = 15.75 * 2**30  # bytes of a v5e that a program may use

# What the GPU compiler must know of a card that is not there (NVIDIA's data sheet and occupancy tables).
H200 = """
gpu_device_info {
  name: "NVIDIA H200"  device_vendor: "NVIDIA Corporation"  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  threads_per_warp: 32
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  l2_cache_size: 52428800  memory_bandwidth: 4800000000000  device_memory_size: 150000000000
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  device_address_bits: 64  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"
}
platform_name: "CUDA"
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may do; None: reported only. Bytes are those of one device."""

    read_ratio: float | None = None  # over the minimum
    write_ratio: float | None = None  # over the donated cache
    temp: float | None = None
    memory: float | None = None  # arguments, results and temporaries together
    collectives: dict[str, int] | None = None  # the most of each kind of more than hlo.TINY bytes, others 0
    times_plain: float | None = None  # bytes read and written over those of the case's plain step


@dataclasses.dataclass
class Built:
    """A compiled program, and what its shapes say of it."""

    program: Any
    minimum: float  # bytes that one step must read, 0: not stated
    donated: float  # bytes of the donated cache
    leaves: int  # donated buffers


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile."""

    build: Callable[[], Built]
    limits: Limits = Limits()
    chip: str = "v5e"
    plain: Callable[[], Built] | None = None  # the step that `times_plain` compares with
    breaks: frozenset[str] = frozenset()  # a positive control: the limits that it must pass


def mesh_of(topology: Any, shape: tuple[int, int, int]) -> Mesh:
    """A mesh of devices that are only described."""
    devices = np.array(topology.devices[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * len(sharding.AXES))


def v5e(*shape: int) -> Mesh:
    """One v5e chip, eight or sixteen, as (data, fsdp, tensor)."""
    assert len(shape) == 3
    count = math.prod(shape)
    if count == 1:
        one = topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
        )
        return mesh_of(one, shape)
    name = {8: "v5e:2x4", 16: "v5e:4x4"}[count]
    return mesh_of(topologies.get_topology_desc(platform="tpu", topology_name=name), shape)


def h200() -> Mesh:
    """One H200."""
    card = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H200, topology="1x1x1"
    )
    return mesh_of(card, (1, 1, 1))


def programs(mesh: Mesh, config: ModelConfig = LLAMA_2_7B, medusa: MedusaConfig | None = None) -> Programs:
    """The library's programs for parameters and heads as its own rules shard them."""
    params = backbone.abstract_params(config, DTYPE)
    params = sharding.with_shardings(params, sharding.param_shardings(params, config, mesh))
    made = None
    if medusa is not None:
        made = heads.abstract(medusa, DTYPE)
        made = sharding.with_shardings(made, sharding.head_shardings(made, mesh))
    return Programs(config, DTYPE, params, made, mesh)


def shard_bytes(tree: Any) -> float:
    """Bytes of a tree on one device."""

    def one(leaf: Any) -> float:
        return float(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)

    return sum(map(one, jax.tree.leaves(tree)))


def built(program: Any, made: Programs, state: decode.DecodeState, tokens: int) -> Built:
    """With the least that a forward over `tokens` must read: weights, cache, and rows of the embedding."""
    layers = (state.cache.keys, state.cache.values)
    table = made.params["model"]["embed_tokens"]
    minimum = shard_bytes(made.params) + shard_bytes(layers)
    if not made.config.tie_word_embeddings:
        minimum += tokens * made.config.hidden_size * DTYPE.itemsize - shard_bytes(table)
    return Built(program, minimum if tokens else 0.0, shard_bytes(layers), len(jax.tree.leaves(state)))


def compile_step(made: Programs, batch: int, function: Callable[..., decode.DecodeState]) -> Built:
    """`function(params, state)` alone, the state donated; plain steps are given no heads."""
    state = made.state_shape(batch, SLOTS)
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    lowered = jax.jit(function, donate_argnames="state", out_shardings=kept).lower(made.params, state)
    return built(lowered.compile(compiler_options=compiler_options(made.mesh)), made, state, batch)


def build_step(mesh: Callable[[], Mesh], config: ModelConfig = LLAMA_2_7B) -> Built:
    """One plain step of one row."""

    def step(params: backbone.Params, state: decode.DecodeState) -> decode.DecodeState:
        return decode.step(params, None, state, config, PLAIN)

    return compile_step(programs(mesh(), config), 1, step)


def build_run(mesh: Callable[[], Mesh]) -> Built:
    """The whole generation loop of one row."""
    made = programs(mesh())
    return built(made.run(1, SLOTS, PLAIN), made, made.state_shape(1, SLOTS), 1)


def build_prefill(mesh: Callable[[], Mesh]) -> Built:
    """One chunk of a prompt, behind others."""
    made = programs(mesh())
    chunk = decode.MAX_CHUNK
    return built(made.prefill(SLOTS, chunk, False), made, made.state_shape(1, SLOTS), chunk)


def build_insert(mesh: Callable[[], Mesh]) -> Built:
    """A prefilled request put into a batch of 8."""
    made = programs(mesh())
    return built(made.insert(8, SLOTS), made, made.state_shape(8, SLOTS), 0)


def build_medusa(
    mesh: Callable[[], Mesh],
    medusa: MedusaConfig,
    nodes: int,
    batch: int = 1,
    config: ModelConfig = LLAMA_2_7B,
) -> Built:
    """The generation loop of Medusa steps: heads, a tree of so many nodes, verification, commit."""
    made = programs(mesh(), config, medusa)
    rates = {
        path: float(np.prod([0.5 / (rank + 1) for rank in path]))
        for depth in range(1, medusa.num_heads + 1)
        for path in itertools.product(range(10), repeat=depth)
    }
    plan = decode.Plan(Tree.grow(rates, nodes), medusa)
    return built(made.run(batch, SLOTS, plan), made, made.state_shape(batch, SLOTS), batch * nodes)


def build_training(backbone: aot_training.BackboneOptions, config: ModelConfig = LLAMA_2_7B) -> Built:
    """A training step of `aot_training.ROWS` rows, split over the 16 chips of a v5e-16."""
    made = aot_training.programs(config, v5e(1, 16, 1), backbone)
    program = made.step(made.plan.joint_from == 0)
    return Built(program, 0.0, shard_bytes(made.state), len(jax.tree.leaves(made.state)))


def small() -> ModelConfig:
    """Two layers, for the controls: quick to compile, with every array of a layer at its real size."""
    return dataclasses.replace(LLAMA_2_7B, num_hidden_layers=2, layer_windows=(None,) * 2)


def build_gathering() -> Built:
    """Control: a tensor-parallel step that asks for whole weights, and so gathers each of them."""
    made = programs(v5e(1, 1, SHARDS), small())
    assert made.mesh is not None
    whole = sharding.replicated(made.mesh)

    def step(params: backbone.Params, state: decode.DecodeState) -> decode.DecodeState:
        return decode.step(jax.lax.with_sharding_constraint(params, whole), None, state, made.config, PLAIN)

    return compile_step(made, 1, step)


def build_copying() -> Built:
    """Control: a step that writes its token by a select over all slots, and so rewrites the cache."""
    config = small()

    def step(params: backbone.Params, state: decode.DecodeState) -> decode.DecodeState:
        lengths = state.cache.lengths[:, None]
        root = jnp.take_along_axis(state.tokens, lengths, axis=1)
        hidden, fresh = backbone.forward(params, config, root, lengths, jnp.ones((1, 1), bool), state.cache)
        chosen = jnp.argmax(backbone.unembed(params, config, hidden), axis=-1).astype(jnp.int32)
        here = (jnp.arange(SLOTS)[None] == lengths)[:, None, :, None]
        written = dataclasses.replace(
            state.cache,
            keys=tuple(
                jnp.where(here, new, old) for (new, _), old in zip(fresh, state.cache.keys, strict=True)
            ),
            values=tuple(
                jnp.where(here, new, old) for (_, new), old in zip(fresh, state.cache.values, strict=True)
            ),
        )
        return dataclasses.replace(state, cache=written, known=chosen[:, 0])

    return compile_step(programs(v5e(1, 1, 1), config), 1, step)


def cases() -> dict[str, Case]:
    """All programs by name."""
    one, eight = partial(v5e, 1, 1, 1), partial(v5e, 1, 1, SHARDS)
    layers = LLAMA_2_7B.num_hidden_layers
    cached = 2 * layers * SLOTS * DTYPE.itemsize * LLAMA_2_7B.num_key_value_heads * LLAMA_2_7B.head_dim
    single = Limits(read_ratio=READ_RATIO, write_ratio=WRITE_RATIO, temp=TEMP_RATIO * cached, collectives={})
    # What 64 nodes write are activations. Each of the cache's 64 arrays that is rewritten adds 1/64.
    tree = dataclasses.replace(single, read_ratio=1.05, write_ratio=0.075)
    # Two all-reduces a layer and the embedding's.
    split = dataclasses.replace(
        single,
        write_ratio=0.015,
        temp=TEMP_RATIO * cached / SHARDS + TEMP_COLLECTIVES,
        collectives={"all-reduce": 2 * layers + 1},
    )
    # The heads' besides, and top-k results that are not tiny; nothing else is gathered or moved.
    split_tree = dataclasses.replace(
        split, read_ratio=1.05, write_ratio=0.19, collectives={"all-reduce": 2 * layers + 7}
    )
    split_batch = dataclasses.replace(
        split_tree, write_ratio=WRITE_RATIO, temp=8 * TEMP_RATIO * cached / SHARDS + TEMP_COLLECTIVES
    )
    # Every weight is gathered whole where it is needed, once: seven of a layer, embedding, unembedding,
    # heads. Gradients of the heads are added up; activations and logits never move.
    training = Limits(
        temp=4e9, memory=CHIP_MEMORY, collectives={"all-gather": 7 * layers + 3, "all-reduce": 2}
    )
    card = partial(Case, chip="h200", plain=partial(build_step, h200))
    return {
        "step": Case(partial(build_step, one), single),
        "run": Case(partial(build_run, one), single),
        "step-tensor8": Case(partial(build_step, eight), split),
        "run-tensor8": Case(partial(build_run, eight), split),
        "insert-data2-tensor4": Case(partial(build_insert, partial(v5e, 2, 1, 4)), Limits(collectives={})),
        "prefill-512": Case(partial(build_prefill, one)),
        "medusa-64": Case(partial(build_medusa, one, HEADS, 64), tree),
        "medusa-64-conditioned": Case(
            partial(build_medusa, one, CONDITIONED, 64), dataclasses.replace(tree, read_ratio=1.08)
        ),
        "medusa-64-tensor8": Case(partial(build_medusa, eight, HEADS, 64), split_tree),
        "medusa-16-tensor8-batch8": Case(partial(build_medusa, eight, HEADS, 16, 8), split_batch),
        # XLA:GPU keeps scores and products of the attention in memory: what is reached, and no more.
        "step-h200": Case(partial(build_step, h200), Limits(1.09, 1.05), chip="h200"),
        "medusa-16-h200": card(
            partial(build_medusa, h200, HEADS, 16), Limits(1.14, 0.77, times_plain=TREE_RATIO)
        ),
        "medusa-64-h200": card(partial(build_medusa, h200, HEADS, 64), Limits(1.37, 2.63)),
        "train-medusa1": Case(partial(build_training, aot_training.MEDUSA_1), training),
        "train-medusa2-lora": Case(
            # Layers are computed twice, and their weights and adapters gathered each time.
            partial(build_training, aot_training.MEDUSA_2_LORA),
            Limits(temp=6.5e9, memory=CHIP_MEMORY, collectives={"all-gather": 1086, "all-reduce": 3}),
        ),
        "control-gather": Case(
            build_gathering, Limits(collectives={"all-reduce": 5}), breaks=frozenset({"all-gather"})
        ),
        "control-copy": Case(
            build_copying,
            Limits(read_ratio=READ_RATIO, write_ratio=WRITE_RATIO),
            breaks=frozenset({"read", "write"}),
        ),
        "control-dear-tree": Case(
            partial(build_medusa, h200, HEADS, 64, config=small()),
            Limits(times_plain=TREE_RATIO),
            chip="h200",
            plain=partial(build_step, h200, small()),
            breaks=frozenset({"times plain"}),
        ),
    }
