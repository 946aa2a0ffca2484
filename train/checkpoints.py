"""A run's checkpoints: all that a step changes and where the data stands, saved while training goes on.

A checkpoint has the items of a head checkpoint (`medusa_jax.checkpoint`), so heads can be read from it alone,
and besides them `backbone`, `optimizer` and `run`. It appears under its step's number only when it is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from medusa_jax import checkpoint
from medusa_jax.config import MedusaConfig
from medusa_jax.errors import UserError
from medusa_jax.sharding import path_string
from medusa_jax.weights.head_files import describe
from medusa_jax.weights.params import flatten, unflatten
from train.step import Trained, TrainState

_HEADS, _CONFIG, _BACKBONE, _OPTIMIZER, _RUN = "heads", "config", "backbone", "optimizer", "run"


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints in a folder: the last `keep` of them and the one with the best metric.

    heads, metadata: the configuration that is saved with the heads. token_map: of their draft vocabulary.
    """

    folder: Path
    keep: int
    heads: MedusaConfig
    metadata: Mapping[str, Any]
    token_map: np.ndarray | None

    def __post_init__(self) -> None:
        with checkpoint.orbax(f"{self.folder}: cannot be written") as ocp:
            managers = ocp.checkpoint_managers
            policy = managers.AnyPreservationPolicy(
                [
                    managers.LatestN(self.keep),
                    managers.BestN(
                        get_metric_fn=_metric, reverse=True, n=1, keep_checkpoints_without_metrics=False
                    ),
                ]
            )
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder.resolve(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    best_fn=_metric,  # or metrics are not stored
                    best_mode="min",
                    cleanup_tmp_directories=True,
                    save_root_metadata=False,
                ),
                item_names=(_HEADS, _CONFIG, _BACKBONE, _OPTIMIZER, _RUN),
            )

    def save(
        self,
        state: TrainState,
        run: Mapping[str, Any],
        metric: float | None,
        metrics: Mapping[str, Any],
        *,
        wait: bool = False,
    ) -> None:
        """Save after `state.step` steps. run: JSON. metric: smaller is better; None where none was taken.

        metrics: JSON, kept with the heads, as the step is. Writing goes on in the background unless `wait`.
        Raises UserError when it fails, a former one too.
        """
        step = int(state.step)
        with checkpoint.orbax(f"{self.folder}: checkpoint {step} cannot be written") as ocp:
            if step in self._manager.all_steps():
                return
            metadata = {**self.metadata, "step": step, "metrics": dict(metrics)}
            named: dict[str, Any] = {"layers": state.trained.heads}
            if self.token_map is not None:
                named["token_map"] = self.token_map
            items = {
                _HEADS: ocp.args.PyTreeSave(_without_empty(named)),
                _CONFIG: ocp.args.JsonSave(describe(self.heads, metadata)),
                _OPTIMIZER: ocp.args.PyTreeSave(_named(_optimizer(state))),
                _RUN: ocp.args.JsonSave(dict(run)),
            }
            if state.trained.backbone is not None:
                items[_BACKBONE] = ocp.args.PyTreeSave(_named(state.trained.backbone))
            best = None if metric is None else {"loss": metric}
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=best, force=True)
            if wait:
                self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        with checkpoint.orbax(f"{self.folder}: cannot be read"):
            return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the checkpoint with the smallest metric; the last one where none has any."""
        with checkpoint.orbax(f"{self.folder}: cannot be read"):
            self._manager.wait_until_finished()
            scored = {}
            for step in self._manager.all_steps():
                metrics = self._manager.metrics(step)
                if metrics:
                    scored[step] = _metric(metrics)
            return min(scored, key=scored.__getitem__) if scored else self._manager.latest_step()

    def folder_of(self, step: int) -> Path:
        """Where a checkpoint lies: a folder of heads for `open_heads`."""
        return self.folder / str(step)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state after `step` steps, and what was saved as `run`.

        like: shapes, dtypes and shardings of the state, of this run's mesh: the checkpoint may have come from
        another. Raises UserError for a checkpoint that is broken or of other shapes.
        """
        trained, optimizer = like.trained, _named(_optimizer(like))
        with checkpoint.orbax(f"{self.folder_of(step)}: cannot be read") as ocp:
            named = {"layers": trained.heads}
            wanted = _without_empty(named)
            items = {
                _HEADS: _restore_as(ocp, wanted, partial=True),
                _OPTIMIZER: _restore_as(ocp, optimizer),
                _RUN: ocp.args.JsonRestore(),
            }
            if trained.backbone is not None:
                items[_BACKBONE] = _restore_as(ocp, _named(trained.backbone))
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        heads = _with_empty(found[_HEADS], named)["layers"]
        backbone = None
        if trained.backbone is not None:
            backbone = _unnamed(found[_BACKBONE], trained.backbone)
        moved = _unnamed(found[_OPTIMIZER], _optimizer(like))
        state = TrainState(moved[0], Trained(heads, backbone), moved[1], moved[2])
        _check_shapes(state, like, self.folder_of(step))
        return state, found[_RUN]

    def close(self) -> None:
        """Wait for what is still being written."""
        with checkpoint.orbax(f"{self.folder}: a checkpoint cannot be written"):
            self._manager.wait_until_finished()
            self._manager.close()


def _metric(metrics: Any) -> float:
    return float(metrics["loss"])


def _optimizer(state: TrainState) -> tuple[Any, Any, Any]:
    return state.step, state.heads_optimizer, state.backbone_optimizer


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by the names of their paths; Orbax refuses arrays without elements, so those are left out."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_string(path).replace("/", "."): leaf for path, leaf in leaves if leaf.size}


def _unnamed(named: Mapping[str, Any], like: Any) -> Any:
    def one(path: Any, leaf: Any) -> Any:
        return named[path_string(path).replace("/", ".")] if leaf.size else _zeros(leaf)

    return jax.tree_util.tree_map_with_path(one, like)


def _without_empty(named: Any) -> Any:
    return unflatten({name: leaf for name, leaf in flatten(named).items() if leaf.size})


def _with_empty(found: Any, like: Any) -> Any:
    kept = flatten(found)
    return unflatten(
        {name: kept[name] if leaf.size else _zeros(leaf) for name, leaf in flatten(like).items()}
    )


def _zeros(leaf: Any) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def _restore_as(ocp: Any, like: Any, *, partial: bool = False) -> Any:
    # Without a mesh shapes name no device, and Orbax would go by the one that the arrays were saved from.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def one(leaf: Any) -> Any:
        placed = leaf.sharding or here
        return ocp.ArrayRestoreArgs(sharding=placed, global_shape=leaf.shape, dtype=leaf.dtype)

    return ocp.args.PyTreeRestore(item=like, restore_args=jax.tree.map(one, like), partial_restore=partial)


def _check_shapes(state: TrainState, like: TrainState, where: Path) -> None:
    def one(path: Any, found: Any, wanted: Any) -> None:
        if found.shape != wanted.shape:
            name = path_string(path)
            raise UserError(f"{where}: {name} has shape {found.shape}, this run's has {wanted.shape}")

    jax.tree_util.tree_map_with_path(one, state, like)
