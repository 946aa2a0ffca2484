"""Reading a model from a GGUF file: configuration, tensors under Hugging Face's names, tokenizer.

Facts about the format that this file depends on:

* q and k of architecture `llama` are stored with the two halves of each head interleaved; they are put
  back into Hugging Face's half-split order by choosing rows, before anything is dequantised.
* `rope_freqs.weight` is part of the configuration, which `gguf_config` reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GGMLType

from medusa_jax.config import ModelConfig
from medusa_jax.errors import UserError, require_file
from medusa_jax.weights.gguf_config import ROPE_FREQS, read_config
from medusa_jax.weights.gguf_tokenizer import build_tokenizer, special_ids
from medusa_jax.weights.source import Index, TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_STORED = {GGMLType.F32: np.float32, GGMLType.F16: np.float16, GGMLType.BF16: ml_dtypes.bfloat16}
_CHUNK_BYTES = 1 << 16  # a chunk, its float32 values and temporaries stay in the cache

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASES = {
    "llama": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "qwen2": ("attn_q", "attn_k", "attn_v"),
    "qwen3": ("attn_q", "attn_k", "attn_v", "attn_output"),
}
# One spelling a layer, or blk.0 and blk.00 would be the same parameter.
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)")


class _Tensor(NamedTuple):
    stored_name: str
    kind: GGMLType
    shape: tuple[int, ...]
    raw: npt.NDArray[Any]  # over the mapped file; the last axis counts bytes for quantised types
    heads: int  # above 0: rows of this many heads are interleaved


class GGUFCheckpoint:
    """A GGUF file as a `TensorSource`, with its configuration and tokenizer.

    Attributes:
        path: the file.
        config: the model's configuration.
        metadata: the file's key-value pairs as Python values.

    The file is mapped, not read; each tensor is dequantised when asked for. Raises UserError naming the
    file and what was found for a file that is missing, broken, truncated or not supported.
    """

    config: ModelConfig

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        _check_header(self.path)
        reader = _open(self.path)
        try:
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: metadata is not valid UTF-8 ({error})") from None
        stored = {tensor.name: tensor for tensor in reader.tensors}
        try:
            self.config = read_config(self.metadata, stored)
            self._tensors = _name_tensors(stored, self.config, self.metadata["general.architecture"])
        except UserError as error:
            raise UserError(f"{self.path}: {str(error).removeprefix('config: ')}") from None

    def infos(self) -> dict[str, TensorInfo]:
        """Shape and element type of every tensor; float32 for quantised ones. Reads none."""
        return {
            name: TensorInfo(tensor.shape, np.dtype(_STORED.get(tensor.kind, np.float32)))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor of `infos()[name].shape`, or the block `index` selects, as a fresh array.

        Only the rows selected are dequantised. Raises UserError when there is no such tensor.
        """
        if name not in self._tensors:
            raise UserError(f"{self.path}: no tensor {name!r}")
        tensor = self._tensors[name]
        index = tuple(index or ()) + (slice(None),) * (len(tensor.shape) - len(index or ()))
        rows: slice | npt.NDArray[np.intp] = index[0]
        if tensor.heads:
            rows = _half_split_rows(tensor.shape[0], tensor.heads)[index[0]]
        if len(tensor.shape) == 1:
            return _decode(tensor.raw[None], tensor.kind, tensor.shape[0])[0][rows]
        block = _decode(tensor.raw[rows], tensor.kind, tensor.shape[1])
        # A copy, or a narrow block of columns would keep the whole rows alive.
        return np.ascontiguousarray(block[:, index[1]])

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with chat template and special tokens. Raises UserError when unsupported."""
        try:
            return build_tokenizer(self.metadata, self.config.vocab_size, self.config.max_position_embeddings)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def generation_defaults(self) -> dict[str, Any]:
        """What a `generation_config.json` would say: `eos_token_id` (a list), `bos_`, `pad_token_id`.

        Ends are eos and, where the file names them, end of turn and end of message.
        """
        try:
            ids = special_ids(self.metadata)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        ends = [ids[kind] for kind in ("eos", "eot", "eom") if kind in ids]
        defaults: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
        return defaults | {f"{kind}_token_id": ids[kind] for kind in ("bos", "pad") if kind in ids}


class _Reader(gguf.GGUFReader):
    """GGUFReader that stops at the end of the file; its own slices are silently short there."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> npt.NDArray[Any]:
        if isinstance(self.data, np.memmap):
            # Slicing a memmap object costs several times more, and a vocabulary takes 300,000 slices.
            self.data = self.data.view(np.ndarray)
        dtype = np.dtype(dtype).newbyteorder("<")
        end = int(offset) + dtype.itemsize * int(count)
        if not 0 <= int(offset) <= end <= self.data.size:
            raise EOFError(f"it has {self.data.size} bytes, but its header points to byte {end}")
        return self.data[int(offset) : end].view(dtype)


def _check_header(path: Path) -> None:
    require_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a GGUF file") from None
    if head[:4] != b"GGUF":
        found = f"it starts with {head[:4]!r}" if head else "it is empty"
        raise UserError(f"{path}: not a GGUF file ({found}, expected b'GGUF')")
    if len(head) < 8:
        raise UserError(f"{path}: truncated GGUF file ({len(head)} bytes)")
    version = int.from_bytes(head[4:], "little")
    if version and not version & 0xFFFF:
        raise UserError(f"{path}: big-endian GGUF file, expected a little-endian one")
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version}, expected 2 or 3")


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return _Reader(path)
    except EOFError as error:
        raise UserError(f"{path}: truncated or damaged GGUF file ({error})") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
        # What the reader raises for field types, tensor types, names and sizes that cannot be.
        raise UserError(f"{path}: damaged GGUF file ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _decode(raw: npt.NDArray[Any], kind: GGMLType, columns: int) -> np.ndarray:
    """Rows of stored values [n, ...] as [n, columns], in a fresh array."""
    if kind in _STORED:
        return np.array(raw.view(_STORED[kind]))
    out = np.empty((raw.shape[0], columns), np.float32)
    step = max(1, _CHUNK_BYTES // raw.shape[1])
    for start in range(0, raw.shape[0], step):
        # Rows are whole numbers of blocks; as a single row gguf does not cut them into small groups.
        chunk = raw[start : start + step]
        out[start : start + step] = gguf.quants.dequantize(chunk.reshape(1, -1), kind).reshape(-1, columns)
    return out


def _half_split_rows(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Where Hugging Face's row (head, half, j) is stored: at (head, j, half)."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _name_tensors(
    stored: Mapping[str, gguf.ReaderTensor], config: ModelConfig, architecture: str
) -> dict[str, _Tensor]:
    tensors = {}
    for tensor in stored.values():
        if tensor.name == ROPE_FREQS:
            continue  # became part of the configuration
        name = _hf_name(tensor.name, config, architecture)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        kind = GGMLType(tensor.tensor_type)
        rank = (
            2 if name.endswith("_proj.weight") or name in (_TOP["token_embd.weight"], "lm_head.weight") else 1
        )
        if len(shape) != rank or 0 in shape:
            raise UserError(f"tensor {tensor.name!r} has shape {shape}, expected {rank} dimensions")
        heads = 0
        if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            if shape[0] != heads * config.head_dim:
                raise UserError(
                    f"tensor {tensor.name!r} has {shape[0]} rows, expected {heads} heads of {config.head_dim}"
                )
        tensors[name] = _Tensor(tensor.name, kind, shape, tensor.data, heads)
    for kind in {tensor.kind for tensor in tensors.values()} - set(_STORED):
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            name = next(tensor.stored_name for tensor in tensors.values() if tensor.kind == kind)
            raise UserError(
                f"tensor {name!r} is stored as {kind.name}, which cannot be dequantised"
            ) from None
    return tensors


def _hf_name(stored: str, config: ModelConfig, architecture: str) -> str:
    if stored in _TOP:
        return _TOP[stored]
    match = _LAYER_NAME.fullmatch(stored)
    if match and int(match[1]) < config.num_hidden_layers and match[2] in _LAYER:
        is_allowed = match[2] in _BIASES[architecture] if match[3] == "bias" else True
        if match[2] in ("attn_q_norm", "attn_k_norm") and not config.qk_norm:
            is_allowed = False
        if is_allowed:
            return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    raise UserError(
        f"tensor {stored!r} is unknown for architecture {architecture!r} "
        f"with {config.num_hidden_layers} layers"
    )
