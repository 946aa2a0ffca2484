"""Finding heads: a folder, a file, a run's output folder, a hub id, or those that come with the package."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub

from medusa_jax.errors import UserError, is_file, is_folder, user_path
from medusa_jax.weights import hub, shipped

IN_RUN = "heads"  # of the folder in a run's output, and beside an exported model, that holds the heads
CHECKPOINTS_IN_RUN = "checkpoints"  # of the folder with a run's checkpoints, each under its step
MODEL_IN_RUN = "model"  # of the folder with the backbone, where a run trained that too

_OURS = [f"{IN_RUN}/config.json", f"{IN_RUN}/heads.safetensors"]
_ON_HUB = ["config.json", "hf_quant_config.json", "*.safetensors", "*.safetensors.index.json"]
_PICKLE = ["medusa_lm_head.pt"]


def resolve_heads(heads: str | os.PathLike[str]) -> Path:
    """The folder or file that `heads` means; a hub repository is fetched into the hub's cache.

    The names of the heads that come with the package mean those, where no file has such a name.

    Raises UserError saying what was found instead, or why the hub gave nothing.
    """
    text = os.fspath(heads)
    if not text:
        raise UserError("the heads' name is empty; expected a folder, a file or a hub id")
    path = user_path(heads, "heads")
    if is_folder(path):
        return path
    if is_file(path):
        if path.suffix.lower() not in (".safetensors", ".pt"):
            raise UserError(f"{path}: not a file of heads; expected a folder, a .safetensors or a .pt file")
        return path
    if text in shipped.KINDS and is_folder(shipped.folder(text)):
        return shipped.folder(text)
    local = text.startswith((".", "/", "~", os.sep)) or path.is_absolute() or not isinstance(heads, str)
    match = hub._HUB_ID.fullmatch(text)
    if local or path.suffix.lower() in (".safetensors", ".pt") or (match and match["file"]):
        raise UserError(f"{text}: no such file or folder")
    if match is None:
        raise UserError(f"{text!r}: no such file or folder, and not a hub id (org/name or org/name@revision)")
    return _fetch(match["repo"], match["revision"])


def within_run(output: Path) -> Path | None:
    """The folder of heads in a run's output: those it ended with, else its newest checkpoint."""
    if is_folder(output / IN_RUN):
        return output / IN_RUN
    kept = output / CHECKPOINTS_IN_RUN
    steps = [int(path.name) for path in kept.glob("*") if path.name.isdecimal()] if is_folder(kept) else []
    return kept / str(max(steps)) if steps else None


def _fetch(repo: str, revision: str | None) -> Path:
    """The folder of a hub repository in the hub's cache; a pickle is fetched where there is nothing else."""
    try:
        # Beside a whole model only its heads are wanted, so they are asked for first.
        for patterns, ignored in ((_OURS, None), (_ON_HUB, ["*/*"]), (_PICKLE, ["*/*"])):
            folder = Path(
                huggingface_hub.snapshot_download(
                    repo, revision=revision, allow_patterns=patterns, ignore_patterns=ignored
                )
            )
            if patterns is _OURS:
                if all(is_file(folder / name) for name in _OURS):
                    return folder / IN_RUN
            elif any(folder.glob("*.safetensors")) or any(folder.glob("*.pt")):
                return folder
    except (hub.errors.HFValidationError, hub.errors.EntryNotFoundError, hub._HTTPError, OSError) as error:
        hub._explain(error, repo, None, revision)
    raise UserError(
        f"{repo}: the hub repository has no heads: no safetensors file and no medusa_lm_head.pt "
        "(other pickled weights are not read: a pickle can run any code)"
    )
