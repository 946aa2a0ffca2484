"""Reading a model from a GGUF file: configuration, tensors under Hugging Face's names, tokenizer.

Facts about the format that this file depends on:

* q and k of architecture `llama` are stored with the two halves of each head interleaved; they are put
  back into Hugging Face's half-split order by choosing rows, before anything is dequantised.
* Llama 3's RoPE scaling is stored as a tensor of divisors, `rope_freqs.weight`.
* Mistral is written as `llama`, and its sliding window is dropped (see `_mistral_window`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GGMLType
from transformers import PreTrainedTokenizerFast

from medusa_jax.config import ModelConfig, RopeConfig
from medusa_jax.errors import UserError
from medusa_jax.weights.gguf_tokenizer import build_tokenizer, special_ids
from medusa_jax.weights.source import Index, TensorInfo

ARCHITECTURES = ("llama", "qwen2", "qwen3")

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
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"

# Keys `<architecture>.*` that the configuration is read from, or that do not change the function.
# fmt: off
_READ_KEYS = {
    "block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size",
    "tensor_data_layout", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "attention.scale", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}
# fmt: on
# Keys that change the function, with the values that leave it as it is. Any other key is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


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
            self.config = _read_config(self.metadata, stored)
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
        if tensor.name == _ROPE_FREQS:
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


def _read_config(metadata: Mapping[str, Any], stored: Mapping[str, gguf.ReaderTensor]) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"general.architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(metadata, architecture)
    if "token_embd.weight" not in stored:
        raise UserError("tensor 'token_embd.weight' is missing")
    prefix = f"{architecture}."
    fields = {k.removeprefix(prefix): _plain(v) for k, v in metadata.items() if k.startswith(prefix)}
    heads, hidden = _integer(fields, "attention.head_count"), _integer(fields, "embedding_length")
    head_dim = _integer(fields, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(fields, key, head_dim) != head_dim:
            raise UserError(f"{architecture}.{key} is {fields[key]}, expected the head size {head_dim}")
    scale = _number(fields, "attention.scale") if fields.get("attention.scale") else 0
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise UserError(
            f"{architecture}.attention.scale is {scale}, expected 1/sqrt of the head size {head_dim}"
        )
    layers, context = _integer(fields, "block_count"), _integer(fields, "context_length")
    rope = _read_rope(fields, stored, head_dim)
    window = _read_window(metadata, fields, architecture, rope.theta, context)
    return ModelConfig(
        family="mistral" if window else architecture,
        vocab_size=int(stored["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=_integer(fields, "feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_integer(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_number(fields, "attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        rope=rope,
        tie_word_embeddings="output.weight" not in stored,
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in stored,
        o_bias="blk.0.attn_output.bias" in stored,
        mlp_bias="blk.0.ffn_gate.bias" in stored,
        qk_norm=architecture == "qwen3",
        layer_windows=(window,) * layers,
    )


def _refuse_unsupported(metadata: Mapping[str, Any], architecture: str) -> None:
    if metadata.get("general.type", "model") != "model":
        raise UserError(f"general.type is {metadata['general.type']!r}, expected 'model'")
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"one of {metadata['split.count']} parts of a split GGUF file, expected a merged file"
        )
    for name, value in metadata.items():
        key = name.removeprefix(f"{architecture}.")
        if key == name or key in _READ_KEYS or value in _NEUTRAL.get(key, ()):
            continue
        expected = f"expected {_NEUTRAL[key][-1]}" if key in _NEUTRAL else "which is unknown"
        raise UserError(f"{name} is {value!r}, {expected}: not supported")


def _plain(value: Any) -> Any:
    """A field's value; per-layer arrays of one repeated value count as that value."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    # float32 fields give back the decimal they were written from: 1e-5 and not 9.999999747e-06.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _integer(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "missing" if value is None else repr(value)
        raise UserError(f"metadata field {key!r} is {found}, expected a positive integer")
    return value


def _number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = fields.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        found = "missing" if value is None else repr(value)
        raise UserError(f"metadata field {key!r} is {found}, expected a positive number")
    return float(value)


def _read_rope(
    fields: Mapping[str, Any], stored: Mapping[str, gguf.ReaderTensor], head_dim: int
) -> RopeConfig:
    theta = _number(fields, "rope.freq_base", 10000.0)
    # llama.cpp takes a factor without a type as linear, and 0 as no factor.
    has_factor = bool(fields.get("rope.scaling.factor"))
    kind = fields.get("rope.scaling.type", "linear" if has_factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn")
    if _ROPE_FREQS in stored:
        if kind != "none":
            raise UserError(f"rope.scaling.type {kind!r} together with {_ROPE_FREQS} is not supported")
        original = _integer(fields, "rope.scaling.original_context_length", 8192)
        return _llama3_rope(stored[_ROPE_FREQS], theta, head_dim, original)
    if kind == "none" or (kind == "linear" and not has_factor):
        return RopeConfig(theta=theta)
    factor = _number(fields, "rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_context=_integer(
            fields, "rope.scaling.original_context_length", _integer(fields, "context_length")
        ),
        beta_fast=_number(fields, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(fields, "rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(tensor: gguf.ReaderTensor, theta: float, head_dim: int, original: int) -> RopeConfig:
    """The llama3 parameters whose divisors are `rope_freqs.weight` [head_dim / 2].

    A wavelength below original / 4 is divided by 1, above `original` by the factor, and between by
    1 / ((1 - s) / factor + s) with s = (original / wavelength - 1) / 3 (Llama 3.1's own formula).
    """
    if tensor.tensor_type != GGMLType.F32 or tensor.data.shape != (head_dim // 2,):
        raise UserError(f"{_ROPE_FREQS} is {tensor.data.shape}, expected {head_dim // 2} values of F32")
    divisors = tensor.data.astype(np.float64)
    if np.all(divisors == 1):
        return RopeConfig(theta=theta)
    factor = _plain(float(divisors.max()))
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-5, atol=0):
        raise UserError(
            f"{_ROPE_FREQS} does not follow Llama 3's RoPE scaling "
            f"(factor {factor:g}, context {original}, low and high frequency factors 1 and 4)"
        )
    return RopeConfig(kind="llama3", theta=theta, factor=factor, original_context=original)


def _read_window(
    metadata: Mapping[str, Any], fields: Mapping[str, Any], architecture: str, theta: float, context: int
) -> int | None:
    window = fields.get("attention.sliding_window")
    if not window:
        return (
            _mistral_window(metadata, theta, context) if architecture == "llama" and window is None else None
        )
    if architecture != "llama":
        raise UserError(f"{architecture}.attention.sliding_window is {window}, which is not supported")
    return _integer(fields, "attention.sliding_window")


def _mistral_window(metadata: Mapping[str, Any], theta: float, context: int) -> int | None:
    """The sliding window of a Mistral model whose file does not say it.

    The rule: the general metadata names Mistral or Zephyr 7B, the RoPE base is 10,000 and the context
    is longer than 4,096. Only version 0.1 and its descendants have that base, and their window is 4,096
    tokens; versions 0.2 and later have a base of 1,000,000 and no window.
    """
    keys = r"general\.(name|basename|finetune|(base_model\.\d+|source)\.(name|repo_url|url))"
    names = " ".join(str(value) for key, value in metadata.items() if re.fullmatch(keys, key))
    if theta == 10000.0 and context > 4096 and re.search(r"mistral|zephyr[-_ ]7b", names, re.IGNORECASE):
        return 4096
    return None
