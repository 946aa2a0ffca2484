"""Files of torch.save: read by torch's own safe loader only, written without torch."""

from __future__ import annotations

import importlib
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.weights.lazy import Lazy, Progress, byte_blocks
from medusa_jax.weights.source import Index, TensorInfo

# weights_only loading could be tricked into running code before (CVE-2025-32434).
_SAFE_TORCH = (2, 6)
STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
}
_ALIGNMENT = 64  # of each tensor in the file: torch may map it
_LOCAL_HEADER, _ZIP64_EXTRA, _EXTRA_HEADER = 30, 20, 4  # bytes; the first without its name


class TorchFile:
    """The tensors of a file written by torch.save (a TensorSource); needs torch.

    torch reads it with weights_only=True, which builds tensors and runs nothing else that a pickle may ask
    for. Raises UserError without torch, for a file that holds anything but a dict of plain tensors, and
    for a broken one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError:
            raise UserError(
                f'{path}: reading a .pt file needs torch: pip install "medusa-jax[torch]", or convert the '
                "file to safetensors where torch is installed"
            ) from None
        version = tuple(int(n) for n in re.findall(r"[0-9]+", self._torch.__version__)[:2])
        if version < _SAFE_TORCH:
            raise UserError(
                f"{path}: torch {self._torch.__version__} cannot read .pt files safely, 2.6 or newer can"
            )
        self._tensors = self._load()

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and type of every tensor."""
        return {name: TensorInfo(tuple(t.shape), self._dtype(name, t)) for name, t in self._tensors.items()}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or the block of it that `index` selects."""
        tensor = self._tensors[name].detach()
        tensor = (tensor if index is None else tensor[index]).contiguous()
        if tensor.dtype == self._torch.bfloat16:  # NumPy has no such type; the bits are the same
            return tensor.view(self._torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _load(self) -> dict[str, Any]:
        try:
            mapped = zipfile.is_zipfile(self.path)  # only files of today's form can be mapped
            value = self._torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # torch raises whatever the reading of a broken file runs into
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise UserError(
                f"{self.path}: refused: not a whole file of tensors only (torch: {reason})"
            ) from error
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: holds a {type(value).__name__}, expected a dict of tensors")
        for name, tensor in value.items():
            if not isinstance(name, str) or not isinstance(tensor, self._torch.Tensor):
                raise UserError(f"{self.path}: {name!r} is a {type(tensor).__name__}, expected a tensor")
            if tensor.layout != self._torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
                raise UserError(f"{self.path}: {name} is not a plain dense tensor")
        return value

    def _dtype(self, name: str, tensor: Any) -> np.dtype:
        text = str(tensor.dtype).removeprefix("torch.")
        try:
            return np.dtype(getattr(ml_dtypes, text, text))
        except TypeError:
            raise UserError(f"{self.path}: tensor {name!r} has element type {text}, not supported") from None


def write_torch(path: Path, tensors: Mapping[str, Lazy], progress: Progress | None = None) -> None:
    """Write a state dict as torch.save does: {name: tensor}, each with a storage of its own.

    The file is a zip archive, not compressed: a pickle that names the storages, and a member for each.
    Raises OSError.
    """
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def add(member: str) -> IO[bytes]:
            info = zipfile.ZipInfo(f"{path.stem}/{member}")
            # Padding, as torch writes it, in an extra field of the member's header.
            before = _LOCAL_HEADER + len(info.filename.encode()) + _ZIP64_EXTRA + _EXTRA_HEADER
            padding = -(file.tell() + before) % _ALIGNMENT
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            return archive.open(info, "w", force_zip64=True)

        for member, data in (("data.pkl", _state_pickle(tensors)), ("byteorder", b"little")):
            with add(member) as stream:
                stream.write(data)
        for number, tensor in enumerate(tensors.values()):
            with add(f"data/{number}") as stream:
                for block in byte_blocks(tensor):
                    stream.write(block)
                    if progress is not None:
                        progress(len(block))
        with add("version") as stream:
            stream.write(b"3\n")


def _state_pickle(tensors: Mapping[str, Lazy]) -> bytes:
    """The pickle of {name: torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, {})}.

    pickle's own opcodes, since a pickler would want to import torch to name its classes.
    """
    op = pickle

    def number(value: int) -> bytes:
        return op.LONG1 + bytes([9]) + value.to_bytes(9, "little", signed=True)

    def text(value: str) -> bytes:
        return op.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()

    def imported(module: str, name: str) -> bytes:
        return op.GLOBAL + f"{module}\n{name}\n".encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return op.MARK + b"".join(map(number, values)) + op.TUPLE

    out = op.PROTO + bytes([2]) + op.EMPTY_DICT + op.MARK
    for key, (name, tensor) in enumerate(tensors.items()):
        strides = tuple(int(np.prod(tensor.shape[axis + 1 :])) for axis in range(len(tensor.shape)))
        size = int(np.prod(tensor.shape))
        out += text(name) + imported("torch._utils", "_rebuild_tensor_v2") + op.MARK
        out += op.MARK + text("storage") + imported("torch", STORAGES[tensor.dtype]) + text(str(key))
        out += text("cpu") + number(size) + op.TUPLE + op.BINPERSID
        out += number(0) + numbers(tensor.shape) + numbers(strides) + op.NEWFALSE
        out += imported("collections", "OrderedDict") + op.EMPTY_TUPLE + op.REDUCE + op.TUPLE + op.REDUCE
    return out + op.SETITEMS + op.STOP
