"""The heads that come with the package, for the default model."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from medusa_jax.errors import UserError

KINDS = ("conditioned", "medusa")  # the better one first


def resolve(heads: str | os.PathLike[str] | None, model: str | os.PathLike[str] | None) -> Path | str | None:
    """The heads that `heads` means for this model: a folder of the package, or what it is itself.

    "auto": the better shipped ones for the default model, none for another. One of KINDS: those. None or
    "none": none. Raises UserError for shipped heads with another model than the default one.
    """
    if heads is None or heads == "none":
        return None
    if heads == "auto":
        return folder(KINDS[0]) if model is None else None
    if heads in KINDS:
        if model is not None:
            raise UserError(
                f"heads {str(heads)!r} are those that come with the default model, the model is {model}; "
                f"a folder of that name is ./{heads}"
            )
        return folder(str(heads))
    return os.fspath(heads)


def folder(kind: str) -> Path:
    """Where the shipped heads of a kind lie."""
    return Path(str(resources.files("medusa_jax") / "default_heads" / kind))
