"""Orbax checkpoints; the only file that imports orbax.

A checkpoint of bare heads has two items: `heads`, the arrays {"layers": ..., "token_map": ...}, and
`config`, the JSON object that `weights.head_files` also writes. Orbax makes the folder appear under its
name only when it is whole, on several processes too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError
from medusa_jax.weights.head_files import (
    PREFIX,
    TOKEN_MAP,
    HeadCheckpoint,
    Layers,
    check_named,
    check_target,
    check_token_map,
    common_dtype,
    describe,
    layer_shapes,
    named_arrays,
    parse,
)
from medusa_jax.weights.params import flatten, unflatten
from medusa_jax.weights.source import TensorInfo

KIND = "Orbax heads"
_MARK = "_CHECKPOINT_METADATA"  # Orbax writes it into every checkpoint of named items
_HEADS, _CONFIG = "heads", "config"
_PARTIAL = ".orbax-checkpoint-tmp"  # Orbax's own name for a checkpoint that is being written
_TRIES, _SETTLE_SECONDS = 20, 0.05


def save_head_checkpoint(
    folder: str | os.PathLike[str],
    config: MedusaConfig,
    layers: Mapping[str, Any],
    token_map: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write heads as an Orbax checkpoint; arguments as `save_heads`. All processes must call it.

    Arrays may be sharded, over processes too. Raises UserError when the folder exists and is not empty,
    for arrays that do not fit the configuration, and when writing fails, which leaves nothing behind.
    """
    folder = Path(folder).resolve()
    arrays = named_arrays(config, layers, token_map, f"heads for {folder}")
    check_target(folder)
    stored = {name: array for name, array in arrays.items() if name not in _empty(config)}
    with orbax(f"{folder}: cannot be written") as ocp:
        first = jax.process_index() == 0
        try:
            if first:
                folder.parent.mkdir(parents=True, exist_ok=True)
                if folder.is_dir():
                    folder.rmdir()
            items = {
                _HEADS: ocp.args.PyTreeSave(unflatten(stored)),
                _CONFIG: ocp.args.JsonSave(describe(config, metadata)),
            }
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
                writer.save(folder, ocp.args.Composite(**items))
        except BaseException:
            if first:
                _discard(folder.with_name(folder.name + _PARTIAL))
            raise


def _discard(partial: Path) -> None:
    """Orbax's threads may go on writing after its save has failed: delete until nothing comes back."""
    for _ in range(_TRIES):
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(_SETTLE_SECONDS)
        if not partial.exists():
            return


def is_head_checkpoint(folder: Path) -> bool:
    """Whether the folder is an Orbax checkpoint."""
    return (folder / _MARK).is_file()


def open_head_checkpoint(folder: str | os.PathLike[str]) -> HeadCheckpoint:
    """Open what `save_head_checkpoint` wrote. Raises UserError for anything else, or a broken one."""
    folder = Path(folder).resolve()
    config, metadata, infos = _open(folder)

    def read(dtype: np.dtype) -> tuple[Layers, np.ndarray | None]:
        with orbax(f"{folder}: the heads cannot be read") as ocp:
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype) for name in infos}
            if TOKEN_MAP in infos:
                kinds[TOKEN_MAP] = ocp.RestoreArgs(restore_type=np.ndarray)
            arrays = _restore(ocp, folder, kinds)
        arrays |= {name: np.zeros(shape, dtype) for name, shape in _empty(config).items()}
        return _split(arrays, config, folder)

    dtype = common_dtype({name: info for name, info in infos.items() if name != TOKEN_MAP})
    return HeadCheckpoint(folder, KIND, config, dtype, metadata, [], read)


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
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.metadata(folder / _HEADS).item_metadata.tree
        infos = {name: TensorInfo(tuple(a.shape), np.dtype(a.dtype)) for name, a in flatten(tree).items()}
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
    logger.setLevel(logging.ERROR)
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
