"""Hidden states of packed rows, computed once and kept on disk: no pass over the data repeats the model.

A folder with `hidden.bin`, bfloat16 [rows, T, D], and `hidden.json`, which says what the states belong to and
how many rows are done: an interrupted computation goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError, is_file, read_json, write_atomically

ARRAY, ABOUT = "hidden.bin", "hidden.json"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SAVE_EVERY = 16  # batches between notes of how far it is


class HiddenStates:
    """The states of `rows` rows of T tokens, [rows, T, D]. fingerprint: of the model and the rows."""

    def __init__(self, folder: Path, fingerprint: str, shape: tuple[int, int, int]) -> None:
        """Open what is there, or make the file at its full size, so that a disk too small shows at once.

        Raises UserError when the folder holds the states of something else, or cannot be written.
        """
        self.folder, self.shape = folder, shape
        self._about = {"fingerprint": fingerprint, "shape": list(shape)}
        self.done = 0
        path = folder / ARRAY
        if is_file(folder / ABOUT):
            found = read_json(folder / ABOUT)
            done = found.pop("done", 0)
            whole = isinstance(done, int) and 0 <= done <= shape[0]
            if found != self._about or not whole:
                raise UserError(
                    f"{folder}: hidden states of another model or other data; name another folder"
                )
            self.done = done
        size = int(np.prod(shape)) * BFLOAT16.itemsize
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "w+b") as file:
                if os.fstat(file.fileno()).st_size != size:
                    self.done = 0
                    # Or an interruption would leave a note that speaks of rows which are zeros now.
                    (folder / ABOUT).unlink(missing_ok=True)
                    os.posix_fallocate(file.fileno(), 0, size)
                    file.truncate(size)
        except OSError as error:
            reason = f"{path}: {size / 1e9:.1f} GB of hidden states cannot be written ({error.strerror})"
            if self.done == 0 and is_file(path):
                path.unlink()
            raise UserError(reason) from None
        self._array = np.memmap(path, BFLOAT16, "r+", shape=shape)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The states of these rows, [n, T, D] bfloat16."""
        return self._array[numbers]

    def fill(
        self,
        compute: Callable[[np.ndarray], Any],
        batch: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compute what is missing: compute(row numbers [batch]) gives [batch, T, D].

        The last batch repeats its last row. progress(rows done, rows) is called after each.
        """
        rows = self.shape[0]
        for at in range(self.done, rows, batch):
            numbers = np.minimum(np.arange(at, at + batch), rows - 1)
            states = np.asarray(compute(numbers)).astype(BFLOAT16)
            self._array[at : at + batch] = states[: rows - at]
            self.done = min(at + batch, rows)
            if (at // batch) % _SAVE_EVERY == 0 or self.done == rows:
                self._note()
            if progress is not None:
                progress(self.done, rows)

    def _note(self) -> None:
        self._array.flush()  # the note must not be ahead of what it speaks of
        write_atomically(self.folder / ABOUT, json.dumps(self._about | {"done": self.done}).encode())
