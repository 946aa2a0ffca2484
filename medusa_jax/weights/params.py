"""Parameters: a checkpoint's tensors as a nested dict of (sharded) JAX arrays.

The path of a parameter is its Hugging Face name, so conversion is a rename:
`model.layers.0.self_attn.q_proj.weight` is `params['model']['layers_0']['self_attn']['q_proj']['weight']`.
Letters in shapes: D model, H query heads, K key/value heads, h head size, F MLP, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from medusa_jax.config import ModelConfig
from medusa_jax.errors import UserError
from medusa_jax.weights.source import Index, TensorInfo, TensorSource

Params = dict[str, Any]

EMBEDDING = "model.embed_tokens.weight"
UNEMBEDDING = "lm_head.weight"

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LOADED = (np.dtype(np.float32), _BFLOAT16)
_STORED = (np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16)
# Old Llama files carry the rotary frequencies, which follow from the configuration; a Medusa model of the
# first implementation carries its heads, which `head_files.open_heads` reads.
_SKIPPED = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq|medusa_head\..+")
_LAYER_NAME = re.compile(r"(?<![^.])layers\.([0-9]+)(?![^.])")
_LAYER_PART = re.compile(r"layers_([0-9]+)")
_NAMED = 3  # tensors named in a message, the rest is counted
_COMPARED_BYTES = 16 << 20  # of a tied output table, at a time
_WHOLE_BYTES = 4 << 20  # a tensor below this is always read in one piece
_PIECES = 4
_ALIGNMENT = 64  # JAX takes over a NumPy array on CPU without copying it from this alignment on


def to_path(name: str) -> tuple[str, ...]:
    """The path in the nested dict of a Hugging Face name; only `layers.N` becomes `layers_N`.

    Raises UserError for a name that already contains a part `layers_N`, which would not come back.
    """
    if any(_LAYER_PART.fullmatch(part) for part in name.split(".")):
        raise UserError(f"tensor name {name!r} is not supported: a part reads like 'layers_0'")
    return tuple(_LAYER_NAME.sub(r"layers_\1", name).split("."))


def to_name(path: tuple[str, ...]) -> str:
    """The Hugging Face name of a path: the inverse of `to_path`. Raises UserError for a part with a dot."""
    if not path or any("." in part for part in path):
        raise UserError(f"parameter path {path!r} is not one: parts must not contain dots")
    return ".".join(_LAYER_PART.sub(r"layers.\1", part) if "layers_" in part else part for part in path)


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by Hugging Face name, in the order of the dict."""

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for part, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(value, (*path, part))
            else:
                yield to_name((*path, part)), value

    return dict(walk(tree, ()))


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """The nested dict of leaves given by Hugging Face name: the inverse of `flatten`."""
    tree: Params = {}
    for name, value in leaves.items():
        *parents, last = to_path(name)
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of `config` by Hugging Face name; weights are [out, in]."""
    D, F, V, h = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    Hh, Kh = config.num_attention_heads * h, config.num_key_value_heads * h
    linears = {
        "self_attn.q_proj": (Hh, D, config.qkv_bias),
        "self_attn.k_proj": (Kh, D, config.qkv_bias),
        "self_attn.v_proj": (Kh, D, config.qkv_bias),
        "self_attn.o_proj": (D, Hh, config.o_bias),
        "mlp.gate_proj": (F, D, config.mlp_bias),
        "mlp.up_proj": (F, D, config.mlp_bias),
        "mlp.down_proj": (D, F, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (V, D)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (D,)
        shapes[prefix + "post_attention_layernorm.weight"] = (D,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (h,)
            shapes[prefix + "self_attn.k_norm.weight"] = (h,)
    shapes["model.norm.weight"] = (D,)
    if not config.tie_word_embeddings:
        shapes[UNEMBEDDING] = (V, D)
    return shapes


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """Shapes and types of all parameters, as a nested dict of ShapeDtypeStructs; nothing is traced."""
    shapes = expected_shapes(config)
    return unflatten({name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()})


def load_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: Any,
    shardings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Read `source` into parameters of `dtype` (float32 or bfloat16), placed as `shardings` says.

    `shardings` is a nested dict like the parameters with a `jax.sharding.Sharding` at each leaf; None
    puts every parameter on the default device, uncommitted. Each process reads only the blocks that its
    own devices hold, each of them once, one tensor at a time. `progress` is called with
    (bytes done, bytes in all) of the checkpoint after every tensor.

    Raises UserError, before anything is read, that names missing, unknown and misshapen tensors and
    element types other than float32, float16 and bfloat16; also when the configuration ties the
    embeddings and the checkpoint holds an output table that differs from the input one.
    """
    dtype = np.dtype(dtype)
    if dtype not in _LOADED:
        raise UserError(f"parameters of type {dtype} are not supported, expected float32 or bfloat16")
    label = str(getattr(source, "path", "checkpoint"))
    infos = source.infos()
    expected = expected_shapes(config)
    tied_copy = config.tie_word_embeddings and UNEMBEDDING in infos
    if tied_copy:
        expected[UNEMBEDDING] = expected[EMBEDDING]
    check_tensors({n: i for n, i in infos.items() if not _SKIPPED.fullmatch(n)}, expected, label)

    wanted = None if shardings is None else flatten(shardings)
    # The checkpoint's own order reads the file from front to back.
    names = [name for name in infos if name in expected and not (tied_copy and name == UNEMBEDDING)]
    done, total = 0, sum(_nbytes(infos[name]) for name in names)
    leaves: dict[str, jax.Array] = {}
    for name in names:

        def read(index: Index, name: str = name) -> np.ndarray:
            whole = _block_shape(index) == infos[name].shape
            block = source.read(name, None if whole else index)
            if tied_copy and name == EMBEDDING:
                _check_tied(source, block, index, label)
            return block

        if wanted is not None and name not in wanted:
            raise ValueError(f"no sharding is given for parameter {name}")
        sharding = None if wanted is None else wanted[name]
        leaves[name] = _place(read, infos[name], dtype, sharding)
        done += _nbytes(infos[name])
        if progress is not None:
            progress(done, total)
    return unflatten({name: leaves[name] for name in expected if name in leaves})


def check_tensors(
    infos: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], label: str
) -> None:
    """Raise one UserError naming every kind of difference between a checkpoint and what a model needs."""
    missing = [name for name in expected if name not in infos]
    unknown = [name for name in infos if name not in expected]
    common = [name for name in expected if name in infos]
    shapes = [
        f"{name} is {list(infos[name].shape)}, expected {list(expected[name])}"
        for name in common
        if tuple(infos[name].shape) != expected[name]
    ]
    types = [f"{name} is {infos[name].dtype}" for name in common if infos[name].dtype not in _STORED]
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'missing tensor')}: {_some(missing)}")
    if unknown:
        problems.append(f"{_count(unknown, 'unknown tensor')}: {_some(unknown)}")
    if shapes:
        problems.append(f"{_count(shapes, 'wrong shape')}: {_some(shapes)}")
    if types:
        wanted = "expected float32, float16 or bfloat16"
        problems.append(f"{_count(types, 'unsupported element type')}: {_some(types)} ({wanted})")
    if problems:
        counts = f"found {len(infos)} tensors, the configuration needs {len(expected)}"
        raise UserError(f"{label}: {'; '.join(problems)} ({counts})")


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _some(items: list[str]) -> str:
    return ", ".join(items[:_NAMED]) + (", ..." if len(items) > _NAMED else "")


def _nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _place(
    read: Callable[[Index], np.ndarray],
    info: TensorInfo,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """One parameter, from the blocks that this process's devices hold; equal blocks are read once."""
    shape = info.shape
    whole = tuple((0, n) for n in shape)
    needed = {whole}
    if sharding is not None:
        indices = sharding.addressable_devices_indices_map(shape).values()
        needed = {_bounds(index, shape) for index in indices}
    blocks = {key: _aligned(tuple(b - a for a, b in key), dtype) for key in needed}
    hull = tuple((min(b[0] for b in axis), max(b[1] for b in axis)) for axis in zip(*needed, strict=True))
    # Blocks that tile a box without gaps are read as one box.
    boxes = [hull] if sum(map(_size, needed)) == _size(hull) else list(needed)
    for box in boxes:
        for piece in _pieces(box, info.dtype.itemsize, dtype.itemsize):
            raw = read(tuple(slice(*bounds) for bounds in piece))
            for key in needed if len(boxes) == 1 else (box,):
                _copy(raw, piece, blocks[key], key)
            del raw
    # Waiting keeps at most one tensor on its way to the devices, which bounds the host's memory.
    if sharding is None:
        return jax.block_until_ready(jax.device_put(blocks[whole]))
    return jax.block_until_ready(
        jax.make_array_from_callback(shape, sharding, lambda index: blocks[_bounds(index, shape)])
    )


_Bounds = tuple[tuple[int, int], ...]  # (start, stop) of every axis


def _bounds(index: Index | None, shape: tuple[int, ...]) -> _Bounds:
    full = index or (slice(None),) * len(shape)
    return tuple(part.indices(n)[:2] for part, n in zip(full, shape, strict=True))


def _size(bounds: _Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


def _block_shape(index: Index) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


def _pieces(box: _Bounds, stored: int, loaded: int) -> list[_Bounds]:
    """`box` in one piece, or in row pieces where the stored elements are wider than the loaded ones.

    A float32 tensor of a model loaded as bfloat16 is twice the parameter's size; whole, beside the
    parameter and the mapped pages that it came from, it would break the bound on the host's memory.
    """
    (start, stop), *rest = box
    if stored <= loaded or _size(box) * stored < _WHOLE_BYTES:
        return [box]
    edges = [start + (stop - start) * i // _PIECES for i in range(_PIECES + 1)]
    return [((a, b), *rest) for a, b in itertools.pairwise(edges) if a < b]


def _copy(raw: np.ndarray, at: _Bounds, block: np.ndarray, key: _Bounds) -> None:
    """Cast the part that `raw`, which lies at `at`, and `block`, which lies at `key`, have in common."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(at, key, strict=True))
    if any(a >= b for a, b in common):
        return
    source = raw[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, at, strict=True))]
    target = block[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, key, strict=True))]
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is infinite, as in any cast
        np.copyto(target, source, casting="unsafe")


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that is all of its memory, so aligned that a CPU device takes it over as it is.

    Were a device to take over a view of a larger buffer, all of that buffer would stay alive.
    """
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def _check_tied(source: TensorSource, embedding: np.ndarray, index: Index, label: str) -> None:
    """Compare the block `index` of a stored output table with the input one, a few rows at a time."""
    rows, columns = index
    step = max(1, _COMPARED_BYTES // max(1, embedding[:1].nbytes))
    for start in range(0, len(embedding), step):
        ours = embedding[start : start + step]
        first = rows.start + start
        theirs = source.read(UNEMBEDDING, (slice(first, first + len(ours)), columns))
        if theirs.dtype != ours.dtype:  # widening to float32 is exact
            ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        word = np.dtype(f"u{ours.dtype.itemsize}")
        same = np.ascontiguousarray(ours).view(word) == np.ascontiguousarray(theirs).view(word)
        if not same.all():
            row = first + int(np.argmin(same.all(axis=1)))
            raise UserError(
                f"{label}: the configuration ties the embeddings (tie_word_embeddings), but {UNEMBEDDING} "
                f"differs from {EMBEDDING} in row {row}; set tie_word_embeddings to false in config.json "
                f"if the table is meant to be used"
            )
