"""The mesh, and one ordered table of (parameter path, PartitionSpec).

Axes: `data` splits the batch, `fsdp` the parameters (in training), `tensor` the heads, the MLP and the
vocabulary. Model code names none of them; XLA's partitioner derives the collectives from the shardings
of parameters and state: two all-reduces a layer and one for the embedding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from medusa_jax.config import ModelConfig
from medusa_jax.errors import UserError, shown

AXES = ("data", "fsdp", "tensor")
_Axes = tuple[str | None, ...]
_Rules = tuple[tuple[str, _Axes], ...]
_MOST_PRETENDED = 512  # CPU devices that a hint proposes; each takes a thread

# Projections by output row, o and down by input column, both vocabulary tables by row. Every parameter
# path must match exactly one line. "heads" stands for `tensor` where that divides the K/V heads, and
# for nothing otherwise: a head is never split. Scales and low bits of int8 weights lie as their weight does;
# they are smaller, so an axis with "?" is left out where it does not divide. What LoRA adds is split by its
# weight's rows and columns, and never by rank.
RULES: _Rules = (
    (r"model/embed_tokens/weight", ("tensor", "fsdp")),
    (r"lm_head/weight", ("tensor", "fsdp")),
    (r"(model/embed_tokens|lm_head)/(scale|low)", ("tensor?", "fsdp?")),
    (r"lm_head/lora_a", (None, "fsdp")),
    (r"lm_head/lora_b", ("tensor", None)),
    (r"model/layers_\d+/self_attn/[qkv]_proj/weight", ("heads", "fsdp")),
    (r"model/layers_\d+/self_attn/[qkv]_proj/(scale|low)", ("heads?", "fsdp?")),
    (r"model/layers_\d+/self_attn/[qkv]_proj/lora_a", (None, "fsdp")),
    (r"model/layers_\d+/self_attn/[qkv]_proj/lora_b", ("heads", None)),
    (r"model/layers_\d+/self_attn/[qkv]_proj/bias", ("heads",)),
    (r"model/layers_\d+/self_attn/o_proj/weight", ("fsdp", "heads")),
    (r"model/layers_\d+/self_attn/o_proj/(scale|low)", ("fsdp?", "heads?")),
    (r"model/layers_\d+/self_attn/o_proj/lora_a", (None, "heads")),
    (r"model/layers_\d+/self_attn/o_proj/lora_b", ("fsdp", None)),
    (r"model/layers_\d+/self_attn/o_proj/bias", (None,)),
    (r"model/layers_\d+/self_attn/[qk]_norm/weight", (None,)),
    (r"model/layers_\d+/mlp/(gate|up)_proj/weight", ("tensor", "fsdp")),
    (r"model/layers_\d+/mlp/(gate|up)_proj/(scale|low)", ("tensor?", "fsdp?")),
    (r"model/layers_\d+/mlp/(gate|up)_proj/lora_a", (None, "fsdp")),
    (r"model/layers_\d+/mlp/(gate|up)_proj/lora_b", ("tensor", None)),
    (r"model/layers_\d+/mlp/(gate|up)_proj/bias", ("tensor",)),
    (r"model/layers_\d+/mlp/down_proj/weight", ("fsdp", "tensor")),
    (r"model/layers_\d+/mlp/down_proj/(scale|low)", ("fsdp?", "tensor?")),
    (r"model/layers_\d+/mlp/down_proj/lora_a", (None, "tensor")),
    (r"model/layers_\d+/mlp/down_proj/lora_b", ("fsdp", None)),
    (r"model/layers_\d+/mlp/down_proj/bias", (None,)),
    (r"(model/layers_\d+/(self_attn|mlp)/\w+_proj|lm_head)/lora_dropout", ()),
    (r"model/layers_\d+/(input|post_attention)_layernorm/weight", (None,)),
    (r"model/norm/weight", (None,)),
)

# Heads: residual layers by input column (one all-reduce each), mixers by output row, which feeds them,
# unembeddings by vocabulary row. In training they stand without the `layers/` of `HeadParams`, and beside the
# tables of a model that is itself not there.
HEAD_RULES: _Rules = (
    (r"(layers/)?weight", (None, None, "fsdp", "tensor")),
    (r"(layers/)?bias", (None, None, None)),
    (r"(layers/)?mixer_\d+_weight", ("tensor", "fsdp")),
    (r"(layers/)?mixer_\d+_bias", ("tensor",)),
    (r"(layers/)?unembedding", (None, "tensor?", "fsdp")),
    (r"token_map", (None,)),
    # A draft vocabulary is of any size.
    (r"table|embedding", ("tensor?", "fsdp")),
)


_LARGEST_AXIS = 2**20  # far above any machine; a count of devices stays a number that can be printed


def parse_mesh(mesh: str | Mapping[str, int]) -> dict[str, int]:
    """The size of every axis, from `data=2,tensor=4` or from a mapping; 1 for those not named.

    Raises UserError for an unknown axis, or a size that is not an integer of at least 1.
    """
    if isinstance(mesh, str):
        pairs = [_parse_axis(part.strip()) for part in mesh.split(",")]
    elif isinstance(mesh, Mapping):
        pairs = list(mesh.items())
    else:
        raise UserError(f"mesh: {shown(mesh)}, expected AXIS=SIZE,... or a mapping of axes to sizes")
    axes = ", ".join(AXES)
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if name not in AXES:
            raise UserError(f"mesh: unknown axis {shown(name)}, expected one of {axes}")
        if name in sizes:
            raise UserError(f"mesh: axis {name!r} is given twice")
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size <= _LARGEST_AXIS:
            raise UserError(
                f"mesh: size of axis {name!r} is {shown(size)}, expected an integer from 1 to {_LARGEST_AXIS}"
            )
        sizes[name] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def _parse_axis(part: str) -> tuple[str, int]:
    name, _, value = part.partition("=")
    if name not in AXES or not re.fullmatch("[1-9][0-9]{0,9}", value):
        raise UserError(
            f"mesh: {shown(part)}, expected AXIS=SIZE with AXIS one of {', '.join(AXES)} "
            f"and SIZE from 1 to {_LARGEST_AXIS}"
        )
    return name, int(value)


def make_mesh(mesh: str | Mapping[str, int]) -> Mesh:
    """A mesh of the first devices, from what `parse_mesh` takes. Raises UserError when there are too few."""
    shape = tuple(parse_mesh(mesh).values())
    count = math.prod(shape)
    if count > jax.device_count():
        asked = ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True) if size > 1)
        hint = ""
        if jax.default_backend() == "cpu" and count <= _MOST_PRETENDED:
            hint = f"; to try it on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise UserError(f"mesh: {asked} needs {count} devices, this machine has {jax.device_count()}{hint}")
    # Explicit axes, the default, would ask flax.linen's modules for shardings they cannot give.
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=jax.devices()[:count])


def as_mesh(mesh: str | Mapping[str, int] | Mesh | None) -> Mesh | None:
    """A mesh as it is, or made from what `parse_mesh` takes; None stays None.

    Raises UserError for a mesh without the three axes, and as `make_mesh` does.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        return make_mesh(mesh)
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        found = ", ".join(map(str, mesh.axis_names)) or "none"
        raise UserError(f"mesh: no axis {missing[0]!r} (its axes: {found}), expected {', '.join(AXES)}")
    return mesh


def spans_tpus(mesh: Mesh | None) -> bool:
    """Whether a mesh joins several TPU chips, whose compiler then has more to decide."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "tpu"


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def heads_axis(config: ModelConfig, mesh: Mesh) -> str | None:
    """The axis that attention heads are split over: `tensor`, or none when it does not divide K."""
    return "tensor" if config.num_key_value_heads % mesh.shape["tensor"] == 0 else None


def spec_for(path: str, shape: tuple[int, ...], config: ModelConfig, mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of one parameter. Raises for a path that no rule or several rules match.

    Raises UserError when a dimension does not divide over its axis.
    """
    return _checked(path, shape, _rule(path, RULES), mesh, config)


def _matches(path: str, rules: _Rules) -> list[_Axes]:
    return [spec for pattern, spec in rules if re.fullmatch(pattern, path)]


def _rule(path: str, rules: _Rules) -> _Axes:
    matches = _matches(path, rules)
    if len(matches) != 1:
        raise ValueError(f"sharding: {len(matches)} rules match the parameter path {path!r}, expected one")
    return matches[0]


def _checked(
    path: str, shape: tuple[int, ...], axes: _Axes, mesh: Mesh, config: ModelConfig | None = None
) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(
            f"sharding: the rule for {path!r} has {len(axes)} dimensions, the array {len(shape)}"
        )
    spec: list[str | None] = []
    for size, wanted in zip(shape, axes, strict=True):
        axis = wanted and wanted.removesuffix("?")
        if axis == "heads":
            assert config is not None
            axis = heads_axis(config, mesh)
        if axis and size % mesh.shape[axis]:
            if not str(wanted).endswith("?"):
                name = path.replace("/", ".")
                raise UserError(
                    f"mesh: {axis}={mesh.shape[axis]} does not divide {name} of shape {list(shape)}"
                )
            axis = None
        spec.append(axis)
    return PartitionSpec(*spec)


def path_string(path: tuple[Any, ...]) -> str:
    """`model/norm/weight` of a key path as jax.tree_util gives it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def param_shardings(params: Any, config: ModelConfig, mesh: Mesh | None) -> Any:
    """The sharding of every parameter (None without a mesh), from shapes or arrays."""
    mesh = as_mesh(mesh)  # one that was handed in may lack an axis
    if mesh is None:
        return None
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_for(path_string(path), leaf.shape, config, mesh)), params
    )


def head_shardings(heads: Any, mesh: Mesh | None) -> Any:
    """The sharding of every array of a `HeadParams` (None without a mesh), from shapes or arrays."""
    if mesh is None:
        return None

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_string(path)
        return NamedSharding(mesh, _checked(name, leaf.shape, _rule(name, HEAD_RULES), mesh))

    return jax.tree_util.tree_map_with_path(one, heads)


def matching_shardings(tree: Any, config: ModelConfig, mesh: Mesh | None) -> Any:
    """The sharding of every leaf of what training holds (None without a mesh), from shapes or arrays.

    Masters, adapters, gradients and optimizer state end in the path of the parameter that they belong to
    (`backbone_optimizer/0/mu/params/model/norm/weight`), and lie as it does: the longest end of a path that a
    rule matches counts. Scalars are whole everywhere. Raises as `spec_for` does.
    """
    if mesh is None:
        return None

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if not leaf.shape:
            return replicated(mesh)
        name = path_string(path)
        parts = name.split("/")
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        end = next((end for end in ends if _matches(end, RULES + HEAD_RULES)), name)
        rule = _rule(end, RULES + HEAD_RULES)
        return NamedSharding(mesh, _checked(name, leaf.shape, rule, mesh, config))

    return jax.tree_util.tree_map_with_path(one, tree)


def gathered(tree: Any, config: ModelConfig, mesh: Mesh | None) -> Any:
    """Inside a program: parameters whole along `fsdp`, which splits their storage and not the computation.

    Left to itself the partitioner would rather split products over it, and add up activations and logits.
    """
    if mesh is None:
        return tree

    def one(leaf: Any, placed: NamedSharding) -> Any:
        kept = PartitionSpec(*(None if axis == "fsdp" else axis for axis in placed.spec))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, kept))

    return jax.tree.map(one, tree, matching_shardings(tree, config, mesh))


def batch_sharding(mesh: Mesh, leading: int = 1) -> NamedSharding:
    """Rows of training data over `data` and `fsdp` together; rows are the last of `leading` dimensions."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * (leading - 1), ("data", "fsdp")))


def gathered_embedding(params: Any, config: ModelConfig, mesh: Mesh | None) -> Any:
    """Inside a program: the model with its embedding whole along `fsdp`, before tokens are looked up in it.

    A lookup in a table that is split by column gives columns. XLA goes on from there: it gathers the rows of
    a batch that `fsdp` splits, and adds up partial products in every layer. From whole embeddings it goes on
    by row, and gathers each layer's weights where they are needed.
    """
    part = {"model": {"embed_tokens": params["model"]["embed_tokens"]}}
    return params | {"model": params["model"] | gathered(part, config, mesh)["model"]}


def place(arrays: Any, shardings: Any) -> Any:
    """The arrays on their devices; on the default one without shardings."""
    return jax.device_put(arrays) if shardings is None else jax.device_put(arrays, shardings)


def state_shardings(state: Any, config: ModelConfig, mesh: Mesh | None) -> Any:
    """The sharding of every leaf of a decoding state: rows over `data`, cache heads over `tensor`.

    A state of fewer rows than `data` (a request being prefilled) is whole on every data shard.
    """
    if mesh is None:
        return None

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        rows = "data" if leaf.shape[0] % mesh.shape["data"] == 0 else None
        if path_string(path).startswith(("cache/keys", "cache/values")):
            return NamedSharding(mesh, PartitionSpec(rows, heads_axis(config, mesh)))
        return NamedSharding(mesh, PartitionSpec(rows))

    return jax.tree_util.tree_map_with_path(one, state)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs with these shardings (unchanged when there are none)."""
    if shardings is None:
        return shapes
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def keep_layout(arrays: Any, shapes: Any) -> Any:
    """The same arrays, laid out on the device as a program's arguments are: last dimension innermost.

    `shapes` carries their shardings. Inside a loop XLA chooses layouts of its own, and copies a cache that
    comes in and goes out in another one. The partitioner would gather an array for a layout constraint,
    so every shard is constrained by itself.
    """

    def one(array: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        def keep(shard: jax.Array) -> jax.Array:
            return with_layout_constraint(shard, Layout(tuple(range(shard.ndim))))

        if not isinstance(shape.sharding, NamedSharding):
            return keep(array)
        spec = shape.sharding.spec
        return jax.shard_map(keep, mesh=shape.sharding.mesh, in_specs=spec, out_specs=spec)(array)

    return jax.tree.map(one, arrays, shapes)
