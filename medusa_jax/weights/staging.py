"""A folder that appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from medusa_jax.errors import UserError


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder`, which takes its name when the block ends.

    Where the block fails nothing is left behind, also not the parents that had to be made. Raises
    UserError when the folder cannot be written; `folder` must be free (`hf._free_folder`).
    """
    parents = [parent for parent in (folder.parent, *folder.parent.parents) if not parent.exists()]
    partial = folder.with_name(f".{uuid.uuid4().hex}.partial")  # with the folder's name it could be too long
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in parents:
            with contextlib.suppress(OSError):  # somebody else has put something there
                parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from error
        if isinstance(error, UserError):
            raise UserError(str(error).replace(str(partial), str(folder))) from error
        raise
