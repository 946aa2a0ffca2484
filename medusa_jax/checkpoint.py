"""Orbax checkpoints; the only file that imports orbax.

A checkpoint of bare heads has two items: `heads`, the arrays {"layers": ..., "token_map": ...}, and
`config`, the JSON object that `weights.head_files` also writes. Orbax makes the folder appear under its
name only when it is whole, on several processes too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError, is_file, is_folder, read_json
from medusa_jax.weights.head_files import (
    PREFIX,
    TOKEN_MAP,
    HeadCheckpoint,
    check_named,
    check_target,
    check_token_map,
    common_dtype,
    describe,
    layer_shapes,
    named_arrays,
    parse,
    stacked_parts,
)
from medusa_jax.weights.lazy import BLOCK_BYTES, Progress, Stack
from medusa_jax.weights.params import flatten, unflatten
from medusa_jax.weights.source import Index, TensorInfo

KIND = "Orbax heads"
Read = Callable[[str, Index], np.ndarray]  # a block of a stored array
_MARK = "_CHECKPOINT_METADATA"  # Orbax writes it into every checkpoint of named items
_HEADS, _CONFIG = "heads", "config"
_BACKBONE, _RUN = "backbone", "run"  # further items of a run's checkpoint, if it trains its model
_PARTIAL = ".orbax-checkpoint-tmp"  # Orbax's own name for a checkpoint that is being written
_TRIES, _SETTLE_SECONDS = 20, 0.05


def save_head_checkpoint(
    folder: str | os.PathLike[str],
    config: MedusaConfig,
    layers: Mapping[str, Any],
    token_map: Any = None,
    metadata: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write heads as an Orbax checkpoint; arguments as `save_heads`. All processes must call it.

    Arrays may be sharded, over processes too; lazy ones are written block by block. metadata: training
    keeps "step", "metrics" and "model_fingerprint" (see `weights.fingerprint`) in it. Raises UserError when
    the folder exists and is not empty, for arrays that do not fit the configuration, and when writing
    fails, which leaves nothing behind.
    """
    folder = check_target(folder)
    arrays = named_arrays(config, layers, token_map, f"heads for {folder}")
    stored = {name: array for name, array in arrays.items() if name not in _empty(config)}
    with orbax(f"{folder}: cannot be written") as ocp:
        first = jax.process_index() == 0
        try:
            if first:
                folder.parent.mkdir(parents=True, exist_ok=True)
                if folder.is_dir():
                    folder.rmdir()
            # One head and layer a chunk, so that a part can be read without the others.
            kinds = {
                name: ocp.SaveArgs(chunk_byte_size=BLOCK_BYTES, shard_axes=tuple(range(len(array.shape) - 2)))
                for name, array in stored.items()
            }
            items = {
                _HEADS: ocp.args.PyTreeSave(unflatten(stored), save_args=unflatten(kinds)),
                _CONFIG: ocp.args.JsonSave(describe(config, metadata)),
            }
            handlers = {_HEADS: _streaming_handler(ocp, progress), _CONFIG: ocp.JsonCheckpointHandler()}
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as writer:
                writer.save(folder, ocp.args.Composite(**items))
        except BaseException:
            if first:
                _discard(folder.with_name(folder.name + _PARTIAL))
            raise


def _streaming_handler(ocp: Any, progress: Progress | None) -> Any:
    """Orbax's handler of trees, which also takes lazy arrays and holds a block of them at a time."""

    class Handler(ocp.type_handlers.NumpyHandler):
        # Should Orbax one day not call this, it writes what NumPy makes of the lazy array: the same, whole.
        async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
            if not isinstance(value, Stack):
                return await super()._open_and_write(value, tspec, ts_context)
            import tensorstore

            spec = tensorstore.Spec(tspec)
            store = await tensorstore.open(spec, create=True, open=True, context=ts_context)
            chunk = store.chunk_layout.write_chunk.shape
            for place, block in value.blocks(None if chunk is None else chunk[len(value.lead)]):
                await store[place].write(block.reshape(store[place].shape))
                if progress is not None:
                    progress(block.nbytes)

    handler = Handler(deepcopy_host_arrays=False)
    standard = ((jax.Array, ocp.type_handlers.ArrayHandler()), (np.ndarray, handler), (Stack, handler))
    registry = ocp.type_handlers.create_type_handler_registry(*standard)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _discard(partial: Path) -> None:
    """Orbax's threads may go on writing after its save has failed: delete until nothing comes back."""
    for _ in range(_TRIES):
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(_SETTLE_SECONDS)
        if not partial.exists():
            return


def is_head_checkpoint(folder: Path) -> bool:
    """Whether the folder is an Orbax checkpoint."""
    return is_file(folder / _MARK)


def open_head_checkpoint(folder: str | os.PathLike[str]) -> HeadCheckpoint:
    """Open what `save_head_checkpoint` wrote. Raises UserError for anything else, or a broken one."""
    folder = Path(folder).resolve()
    config, metadata, infos = _open(folder)

    read = _reader(folder, _HEADS)
    dtype = common_dtype({name: info for name, info in infos.items() if name != TOKEN_MAP})
    parts = stacked_parts(config, infos, read)
    tokens = (lambda: read(TOKEN_MAP, (slice(None),))) if TOKEN_MAP in infos else None
    settings = describe(config, metadata)
    warnings = []
    if holds_backbone(folder):
        warnings = [
            f"{folder}: the run trained its model too, and the heads belong to that one; "
            "python -m medusa_jax.convert --to hf writes it"
        ]
    return HeadCheckpoint(folder, KIND, config, dtype, metadata, warnings, parts, tokens, settings=settings)


def holds_backbone(folder: Path) -> bool:
    """Whether this is the checkpoint of a run that trains its model too."""
    return is_head_checkpoint(folder) and is_folder(folder / _BACKBONE)


def open_backbone(folder: Path) -> tuple[dict[str, TensorInfo], Read, dict[str, Any]]:
    """What a run's checkpoint holds of the model: arrays by the run's names, how to read them, its options.

    Nothing large is read yet. Raises UserError for a broken checkpoint.
    """
    with orbax(f"{folder}: not a whole Orbax checkpoint") as ocp:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            run = reader.restore(folder, ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))[_RUN]
        infos = _infos(ocp, folder / _BACKBONE)
    options = run.get("options") if isinstance(run, dict) else None
    if not isinstance(options, dict):
        raise UserError(f"{folder}: item {_RUN} has no options of a run")
    return infos, _reader(folder, _BACKBONE), options


def _reader(folder: Path, item: str) -> Read:
    @functools.cache
    def store(name: str) -> Any:
        return _open_array(folder / item, name)

    def read(name: str, index: Index) -> np.ndarray:
        with orbax(f"{folder}: the {item} cannot be read"):
            return store(name)[index].read().result()

    return read


def _infos(ocp: Any, item: Path) -> dict[str, TensorInfo]:
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.metadata(item).item_metadata
    if found is None:
        raise UserError(f"{item.parent}: not a whole Orbax checkpoint (item {item.name} is broken)")
    leaves = jax.tree_util.tree_leaves_with_path(found.tree)
    return {
        ".".join(str(getattr(key, "key", key)) for key in path): TensorInfo(tuple(a.shape), np.dtype(a.dtype))
        for path, a in leaves
    }


def _open_array(folder: Path, name: str) -> Any:
    """A stored array as a store that can be read in parts, which Orbax itself offers no way to do."""
    import tensorstore

    kept = read_json(folder / "_METADATA")
    base = {"driver": "file", "path": f"{folder}/"}
    driver = "zarr3" if kept.get("use_zarr3") else "zarr"
    if kept.get("use_ocdbt", True):
        base = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        base["path"] += f"{name}/"
    return tensorstore.open({"driver": driver, "kvstore": base}, read=True).result()


def restore_head_checkpoint(
    folder: str | os.PathLike[str], dtype: Any, shardings: Mapping[str, Any]
) -> tuple[dict[str, jax.Array], np.ndarray | None]:
    """Read heads of an Orbax checkpoint onto devices: each process only what its own devices hold.

    shardings: a `jax.sharding.Sharding` for every parameter of `HeadStack`, by name. The token_map [V']
    comes as a NumPy array. Raises UserError as `open_head_checkpoint` does.
    """
    folder = Path(folder).resolve()
    config, _, infos = _open(folder)
    with orbax(f"{folder}: the heads cannot be read") as ocp:
        kinds = {
            PREFIX + name: ocp.ArrayRestoreArgs(sharding=shardings[name], dtype=np.dtype(dtype))
            for name in layer_shapes(config)
            if PREFIX + name in infos
        }
        if TOKEN_MAP in infos:
            kinds[TOKEN_MAP] = ocp.RestoreArgs(restore_type=np.ndarray)
        arrays = _restore(ocp, folder, kinds)
    for name, shape in _empty(config).items():
        arrays[name] = jax.device_put(np.zeros(shape, dtype), shardings[name.removeprefix(PREFIX)])
    return _split(arrays, config, folder)


def _open(folder: Path) -> tuple[MedusaConfig, dict[str, Any], dict[str, TensorInfo]]:
    if not is_head_checkpoint(folder):
        raise UserError(f"{folder}: not an Orbax checkpoint (no {_MARK})")
    for item in (_HEADS, _CONFIG):
        if not (folder / item).is_dir():
            raise UserError(f"{folder}: an Orbax checkpoint, but not of heads (no item {item!r})")
    with orbax(f"{folder}: not a whole Orbax checkpoint") as ocp:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            raw = reader.restore(folder, ocp.args.Composite(**{_CONFIG: ocp.args.JsonRestore()}))[_CONFIG]
        infos = _infos(ocp, folder / _HEADS)
    if not isinstance(raw, dict):
        raise UserError(f"{folder}: {_CONFIG} is not a JSON object")
    config, metadata = parse(raw, f"{folder}/{_CONFIG}")
    empty = {name: TensorInfo(shape, np.dtype(np.float32)) for name, shape in _empty(config).items()}
    check_named(empty | infos, config, str(folder))
    return config, metadata, infos


def _empty(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Arrays without elements, of heads without residual layers: Orbax refuses to store such."""
    if config.num_layers:
        return {}
    shapes = layer_shapes(config)
    return {PREFIX + name: shapes[name] for name in ("weight", "bias")}


def _restore(ocp: Any, folder: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by name. Orbax takes the structure from one tree and the form of each leaf from another."""
    structure = unflatten(dict.fromkeys(kinds, 0))
    what = ocp.args.PyTreeRestore(item=structure, restore_args=unflatten(kinds))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return flatten(reader.restore(folder, ocp.args.Composite(**{_HEADS: what}))[_HEADS])


def _split(arrays: Mapping[str, Any], config: MedusaConfig, folder: Path) -> tuple[dict[str, Any], Any]:
    token_map = arrays.get(TOKEN_MAP)
    if token_map is not None:
        check_token_map(token_map, config, str(folder))
    return {name: arrays[PREFIX + name] for name in layer_shapes(config)}, token_map


@contextlib.contextmanager
def orbax(failure: str) -> Iterator[Any]:
    """The library, without its chatter; whatever it raises becomes one line that starts with `failure`."""
    import orbax.checkpoint as ocp  # only here: it takes a second to import

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield ocp
    except UserError:
        raise
    except Exception as error:  # broken files, a full disk: all sorts, from several libraries
        text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        reason = text.splitlines()[0]
        raise UserError(f"{failure} ({reason[:200]})") from error
    finally:
        logger.setLevel(level)
