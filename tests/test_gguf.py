"""GGUF files, written here by gguf's own writer and read back by name, value and id."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from medusa_jax.config import RopeConfig
from medusa_jax.errors import UserError
from medusa_jax.weights.gguf import GGUFCheckpoint

HEADS, KV, HEAD, HIDDEN, MLP, LAYERS, CONTEXT = 4, 2, 16, 32, 96, 2, 777
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["a b", "Ġ a", "Ġa b", "1 2", "12 3", "Ċ Ċ", "Ġ Ġ", "h e", "l l", "he ll", "hell o", "' s", "= ="]
TOKENS = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "whole", "<|bos|>", "<|end|>", "<think>"]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
BOS, END, THINK = len(TOKENS) - 3, len(TOKENS) - 2, len(TOKENS) - 1
VOCAB = len(TOKENS) + 4  # padded rows, as many models have

TEMPLATE = "{% for m in messages %}<|bos|>{{ m['content'] }}<|end|>{% endfor %}"


def metadata(arch: str, **changes: Any) -> dict[str, Any]:
    """Key-value pairs of a tiny model; `changes` with a value of None leave a key out."""
    pairs = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": MLP,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV,
        f"{arch}.attention.key_length": HEAD,
        f"{arch}.attention.value_length": HEAD,
        f"{arch}.attention.layer_norm_rms_epsilon": 3e-4,
        f"{arch}.rope.freq_base": 54321.0,
        f"{arch}.rope.dimension_count": HEAD,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": TEMPLATE,
    }
    pairs |= {key.replace("ARCH", arch): value for key, value in changes.items()}
    return {key: value for key, value in pairs.items() if value is not None}


def weights(arch: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under their stored names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD, HIDDEN),
            "attn_k.weight": (KV * HEAD, HIDDEN),
            "attn_v.weight": (KV * HEAD, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD),
            "ffn_gate.weight": (MLP, HIDDEN),
            "ffn_up.weight": (MLP, HIDDEN),
            "ffn_down.weight": (HIDDEN, MLP),
        }
        if arch == "qwen2":
            block |= {f"attn_{x}.bias": (n * HEAD,) for x, n in (("q", HEADS), ("k", KV), ("v", KV))}
        if arch == "qwen3":
            block |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: for each head 0, h/2, 1, h/2 + 1, ... written out row by row."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + j for head in range(heads) for j in range(half) for part in (0, 1)
    ]
    return rows[order]


def add_pairs(writer: gguf.GGUFWriter, pairs: dict[str, Any]) -> None:
    for key, value in pairs.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def write(
    path: Path,
    pairs: dict[str, Any],
    tensors: dict[str, np.ndarray],
    arch: str = "llama",
    kinds: dict[str, GGMLType] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    writer = gguf.GGUFWriter(path, arch, endianess=endianess)
    add_pairs(writer, pairs)
    for name, value in tensors.items():
        kind = (kinds or {}).get(name, GGMLType.F32)
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_with(
    tmp_path: Path, arch: str = "llama", extra: dict[str, np.ndarray] | None = None, **changes: Any
):
    tensors = weights(arch) | (extra or {})
    return GGUFCheckpoint(write(tmp_path / "model.gguf", metadata(arch, **changes), tensors, arch))


def refused(tmp_path: Path, *words: str, arch: str = "llama", extra: Any = None, **changes: Any) -> None:
    """Opening the file (or its tokenizer) is one line that names the file and every word."""
    with pytest.raises(UserError) as caught:
        open_with(tmp_path, arch, extra, **changes).tokenizer()
    for word in ("model.gguf", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


# Tensors


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_equal_dequantize(tmp_path: Path, kind: str):
    stored = weights("qwen3")
    kinds = {name: GGMLType[kind] for name, value in stored.items() if value.ndim == 2}
    path = write(tmp_path / "m.gguf", metadata("qwen3"), stored, "qwen3", kinds)
    checkpoint = GGUFCheckpoint(path)
    infos = checkpoint.infos()
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(infos) == len(raw) == len(stored)
    for hf, name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
        "model.layers.1.self_attn.k_norm.weight": "blk.1.attn_k_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }.items():
        expected = gguf.quants.dequantize(raw[name].data, raw[name].tensor_type)
        got = checkpoint.read(hf)
        np.testing.assert_array_equal(got.astype(np.float32), expected)
        is_matrix = stored[name].ndim == 2
        dtype = (
            {"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(kind, np.float32) if is_matrix else np.float32
        )
        assert infos[hf] == (stored[name].shape, np.dtype(dtype))
        assert got.dtype == dtype
        assert got.shape == stored[name].shape


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_types_gguf_cannot_write_are_read(tmp_path: Path, kind: str):
    # gguf has no quantiser for these; any finite bytes are a valid tensor.
    block, size = gguf.GGML_QUANT_SIZES[GGMLType[kind]]
    rows = np.random.default_rng(1).integers(0, 60, (VOCAB, 2 * size), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_pairs(writer, metadata("llama", **{"ARCH.embedding_length": 2 * block}))
    writer.add_tensor("token_embd.weight", rows, raw_dtype=GGMLType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFCheckpoint(path).read("model.embed_tokens.weight")
    np.testing.assert_array_equal(got, gguf.quants.dequantize(rows, GGMLType[kind]))
    assert got.shape == (VOCAB, 2 * block)


def test_llama_q_and_k_are_half_split_again(tmp_path: Path):
    true = weights("llama", seed=3)
    for layer in range(LAYERS):
        for x, n in (("q", HEADS), ("k", KV), ("v", KV)):
            true[f"blk.{layer}.attn_{x}.bias"] = (
                np.random.default_rng(n).normal(size=n * HEAD).astype(np.float32)
            )
    stored = dict(true)
    for name, value in true.items():
        if ".attn_q." in name or ".attn_k." in name:
            stored[name] = interleave(value, HEADS if ".attn_q." in name else KV)
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", metadata("llama"), stored))
    for layer in range(LAYERS):
        for x in "qkv":
            for part in ("weight", "bias"):
                got = checkpoint.read(f"model.layers.{layer}.self_attn.{x}_proj.{part}")
                np.testing.assert_array_equal(got, true[f"blk.{layer}.attn_{x}.{part}"])
    assert checkpoint.config.qkv_bias
    assert not checkpoint.config.o_bias


def test_quantised_llama_q_is_half_split(tmp_path: Path):
    true = weights("llama")["blk.0.attn_q.weight"]
    stored = weights("llama") | {"blk.0.attn_q.weight": interleave(true, HEADS)}
    kinds = {"blk.0.attn_q.weight": GGMLType.Q8_0}
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf", metadata("llama"), stored, kinds=kinds))
    rounded = gguf.quants.dequantize(gguf.quants.quantize(true, GGMLType.Q8_0), GGMLType.Q8_0)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), rounded)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_is_not_permuted(tmp_path: Path, arch: str):
    checkpoint = open_with(tmp_path, arch)
    stored = weights(arch)
    for x in "qk":
        got = checkpoint.read(f"model.layers.1.self_attn.{x}_proj.weight")
        np.testing.assert_array_equal(got, stored[f"blk.1.attn_{x}.weight"])
    if arch == "qwen2":
        got = checkpoint.read("model.layers.1.self_attn.q_proj.bias")
        np.testing.assert_array_equal(got, stored["blk.1.attn_q.bias"])


bounds = st.one_of(st.none(), st.integers(0, 200))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> GGUFCheckpoint:
    stored = weights("llama") | {"output.weight": weights("llama", 9)["token_embd.weight"]}
    kinds = {
        "token_embd.weight": GGMLType.Q8_0,
        "output.weight": GGMLType.BF16,
        "blk.0.attn_q.weight": GGMLType.Q4_0,
        "blk.0.attn_k.weight": GGMLType.F16,
        "blk.0.ffn_down.weight": GGMLType.Q4_1,
    }
    return GGUFCheckpoint(
        write(tmp_path_factory.mktemp("g") / "m.gguf", metadata("llama"), stored, kinds=kinds)
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_reading_a_block_equals_slicing_the_whole(mixed: GGUFCheckpoint, data: st.DataObject):
    infos = mixed.infos()
    name = data.draw(st.sampled_from(sorted(infos)))
    slices = st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 3]))
    index = tuple(data.draw(slices) for _ in range(data.draw(st.integers(0, len(infos[name].shape)))))
    np.testing.assert_array_equal(mixed.read(name, index), mixed.read(name)[index])


def test_what_is_read_is_writable_and_unknown_names_are_errors(mixed: GGUFCheckpoint):
    block = mixed.read("model.layers.1.mlp.down_proj.weight", (slice(0, 4), slice(0, 2)))
    block[:] = 0
    assert block.base is None
    with pytest.raises(UserError, match=r"m\.gguf: no tensor 'lm_tail'"):
        mixed.read("lm_tail")


@pytest.mark.parametrize(
    "name",
    [
        "blk.2.attn_q.weight",
        "blk.00.attn_norm.weight",
        "blk.\u0660.attn_norm.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.attn_q_norm.weight",
        "v.x",
    ],
)
def test_unknown_tensors_are_refused(tmp_path: Path, name: str):
    refused(tmp_path, repr(name), extra={name: np.zeros(HEAD, np.float32)})


def test_biases_a_family_does_not_have_are_refused(tmp_path: Path):
    refused(
        tmp_path, "blk.0.ffn_up.bias", arch="qwen2", extra={"blk.0.ffn_up.bias": np.zeros(MLP, np.float32)}
    )


def test_undecodable_type_is_refused(tmp_path: Path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_pairs(writer, metadata("llama"))
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"'token_embd\.weight' is stored as I8"):
        GGUFCheckpoint(path)


def test_wrong_rows_of_q_are_refused(tmp_path: Path):
    extra = {"blk.0.attn_q.weight": np.zeros((HEADS * HEAD + 2, HIDDEN), np.float32)}
    refused(tmp_path, "blk.0.attn_q.weight", "66 rows", extra=extra)


# Configuration


def test_config_values(tmp_path: Path):
    config = open_with(tmp_path).config
    assert config.family == "llama"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, HIDDEN, MLP)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV, HEAD)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (LAYERS, CONTEXT)
    assert config.rms_norm_eps == 3e-4
    assert config.rope == RopeConfig(theta=54321.0)
    assert config.tie_word_embeddings
    assert config.layer_windows == (None,) * LAYERS
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))


def test_config_defaults(tmp_path: Path):
    left_out = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    changes: dict[str, Any] = {f"ARCH.{key}": None for key in (*left_out, "attention.head_count_kv")}
    tensors = {"token_embd.weight": weights("llama")["token_embd.weight"]}
    config = GGUFCheckpoint(write(tmp_path / "m.gguf", metadata("llama", **changes), tensors)).config
    assert config.head_dim == HIDDEN // HEADS
    assert config.num_key_value_heads == HEADS
    assert config.rope.theta == 10000.0


def test_family_traits(tmp_path: Path):
    (tmp_path / "2").mkdir()
    qwen2 = open_with(tmp_path / "2", "qwen2").config
    qwen3 = open_with(
        tmp_path, "qwen3", extra={"output.weight": weights("qwen3")["token_embd.weight"]}
    ).config
    assert (qwen2.family, qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == ("qwen2", True, False, False)
    assert (qwen3.family, qwen3.qkv_bias, qwen3.qk_norm) == ("qwen3", False, True)
    assert qwen2.tie_word_embeddings
    assert not qwen3.tie_word_embeddings


def test_rope_scaling(tmp_path: Path):
    linear = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.5}
    assert open_with(tmp_path, **linear).config.rope == RopeConfig("linear", 54321.0, 2.5)
    untyped = {"ARCH.rope.scaling.factor": 2.5}
    assert open_with(tmp_path, **untyped).config.rope == RopeConfig("linear", 54321.0, 2.5)
    assert open_with(tmp_path, **{"ARCH.rope.scaling.type": "none"}).config.rope == RopeConfig(theta=54321.0)
    yarn = linear | {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.original_context_length": 123}
    assert open_with(tmp_path, **yarn).config.rope == RopeConfig("yarn", 54321.0, 2.5, original_context=123)
    beta = yarn | {"ARCH.rope.scaling.yarn_beta_fast": 30.0, "ARCH.rope.scaling.yarn_beta_slow": 2.0}
    rope = open_with(tmp_path, **beta).config.rope
    assert (rope.beta_fast, rope.beta_slow) == (30.0, 2.0)
    refused(tmp_path, "longrope", **{"ARCH.rope.scaling.type": "longrope"})


def llama3_divisors(factor: float, theta: float) -> np.ndarray:
    """Llama 3.1's rule, frequency by frequency."""
    divisors = []
    for j in range(HEAD // 2):
        wavelength = 2 * math.pi * theta ** (2 * j / HEAD)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(divisors)) > 2, "the test must have a frequency in the smooth range"
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recovered(tmp_path: Path, factor: float):
    extra = {"rope_freqs.weight": llama3_divisors(factor, 54321.0)}
    checkpoint = open_with(tmp_path, extra=extra)
    expected = RopeConfig("llama3", 54321.0, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert checkpoint.config.rope == expected
    assert not any("rope" in name for name in checkpoint.infos())


@pytest.mark.parametrize("place", range(HEAD // 2))
def test_other_rope_divisors_are_refused(tmp_path: Path, place: int):
    divisors = llama3_divisors(8.0, 54321.0)
    divisors[place] *= 1.001
    refused(tmp_path, "rope_freqs.weight", "Llama 3", extra={"rope_freqs.weight": divisors})


def test_rope_divisors_of_the_wrong_kind(tmp_path: Path):
    ones = np.ones(HEAD // 2, np.float32)
    assert open_with(tmp_path, extra={"rope_freqs.weight": ones}).config.rope.kind == "default"
    refused(tmp_path, "rope_freqs.weight", extra={"rope_freqs.weight": np.ones(HEAD, np.float32)})
    changes = {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 2.0}
    refused(tmp_path, "rope_freqs.weight", "yarn", extra={"rope_freqs.weight": ones}, **changes)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"ARCH.attention.sliding_window": 55}, 55),
        ({"general.name": "mistralai_mistral-7b-instruct-v0.1"}, 4096),
        ({"general.basename": "Mistral"}, 4096),
        ({"general.base_model.0.name": "Mistral 7B v0.1"}, 4096),
        ({"general.name": "zephyr-7b-beta"}, 4096),
        ({"general.name": "Mistral-7B-Instruct-v0.2", "ARCH.rope.freq_base": 1e6}, None),
        ({"general.name": "Mistral-7B-v0.1", "ARCH.context_length": 4096}, None),
        ({"general.name": "Mistral-7B-v0.1", "ARCH.attention.sliding_window": 0}, None),
        ({"general.name": "Llama 2"}, None),
    ],
)
def test_mistral_windows(tmp_path: Path, changes: dict[str, Any], window: int | None):
    changes = {"ARCH.context_length": 32768, "ARCH.rope.freq_base": 10000.0} | changes
    config = open_with(tmp_path, **changes).config
    assert config.layer_windows == (window,) * LAYERS
    assert config.family == ("mistral" if window else "llama")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ARCH.attention.value_length", 8),
        ("ARCH.rope.dimension_count", 8),
        ("ARCH.block_count", None),
        ("ARCH.block_count", "two"),
        ("ARCH.block_count", 3_000_000),  # would build a table of so many layers first
        ("ARCH.embedding_length", 2**31),
        ("ARCH.context_length", 2**32 - 1),
        ("ARCH.rope.freq_base", 1.0),
        ("ARCH.rope.freq_base", math.inf),
        ("ARCH.attention.layer_norm_rms_epsilon", math.nan),
        ("ARCH.attention.head_count", 0),
        ("ARCH.attention.head_count_kv", [1, 2]),
        ("ARCH.attention.layer_norm_rms_epsilon", None),
        ("ARCH.expert_count", 8),
        ("ARCH.attention.scale", 0.5),
        ("ARCH.attention.scale", "half"),
        ("ARCH.logit_scale", 8.0),
        ("ARCH.residual_scale", 0.22),
        ("ARCH.embedding_scale", 12.0),
        ("ARCH.attention.causal", False),
        ("ARCH.attn_logit_softcapping", 50.0),
        ("ARCH.something.new", 1),
        ("general.type", "adapter"),
        ("split.count", 2),
    ],
)
def test_refused_metadata(tmp_path: Path, key: str, value: Any):
    refused(
        tmp_path, key.split(".", 1)[1].split(".")[-1] if key != "split.count" else "split", **{key: value}
    )


def test_neutral_metadata_is_accepted(tmp_path: Path):
    neutral = {
        "ARCH.expert_count": 0,
        "ARCH.attention.scale": HEAD**-0.5,
        "ARCH.logit_scale": 1.0,
        "ARCH.embedding_scale": 1.0,
        "ARCH.attention.causal": True,
        "ARCH.attention.head_count_kv": [KV] * LAYERS,
        "ARCH.vocab_size": VOCAB,
        "split.count": 1,
        "general.type": "model",
    }
    config = open_with(tmp_path, **neutral).config
    assert config.num_key_value_heads == KV


def test_qwen_window_and_other_architectures_are_refused(tmp_path: Path):
    refused(tmp_path, "sliding_window", arch="qwen2", **{"ARCH.attention.sliding_window": 9})
    path = write(tmp_path / "g.gguf", {}, weights("llama"), arch="gemma3")
    with pytest.raises(UserError, match=r"'gemma3' is not supported; supported are llama, qwen2, qwen3"):
        GGUFCheckpoint(path)


# Broken files


def test_not_a_gguf_file(tmp_path: Path):
    for content, words in ((b"", "empty"), (b"PK\x03\x04zip", "not a GGUF"), (b"GGUF", "truncated")):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(UserError, match=rf"x\.gguf: .*{words}"):
            GGUFCheckpoint(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes([9, 0, 0, 0]) + bytes(16))
    with pytest.raises(UserError, match="version 9, expected 2 or 3"):
        GGUFCheckpoint(tmp_path / "x.gguf")
    with pytest.raises(UserError, match="directory"):
        GGUFCheckpoint(tmp_path)
    with pytest.raises(UserError, match=r"none\.gguf: no such file"):
        GGUFCheckpoint(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match="expected a regular file"):  # opening it would wait for a writer
        GGUFCheckpoint(tmp_path / "pipe.gguf")


def test_big_endian(tmp_path: Path):
    path = write(tmp_path / "b.gguf", metadata("llama"), weights("llama"), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(UserError, match="big-endian"):
        GGUFCheckpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write(tmp_path_factory.mktemp("t") / "m.gguf", metadata("llama"), weights("llama"))
    last = max(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    return path, path.read_bytes()[: last.data_offset + last.n_bytes]  # without the padding at the end


def test_truncated_anywhere(whole: tuple[Path, bytes]):
    path, content = whole
    cuts = {*range(0, 200), *range(200, len(content), 997), *range(len(content) - 40, len(content))}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        with pytest.raises(UserError, match=r"m\.gguf: "):
            GGUFCheckpoint(path)
    path.write_bytes(content)
    GGUFCheckpoint(path)


def test_an_array_longer_than_the_file_ends_at_once(whole: tuple[Path, bytes]):
    path, content = whole
    key = b"tokenizer.ggml.token_type"
    place = content.index(key) + len(key) + 8  # after the types of the field and of its entries
    assert int.from_bytes(content[place : place + 8], "little") == len(TOKENS)
    path.write_bytes(content[:place] + (2**62).to_bytes(8, "little") + content[place + 8 :])
    with pytest.raises(UserError, match=rf"m\.gguf: truncated .* has {len(content)} bytes"):
        GGUFCheckpoint(path)
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"truncated"):
        GGUFCheckpoint(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_headers_never_raise_anything_else(whole: tuple[Path, bytes], data: st.DataObject):
    path, content = whole
    broken = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.one_of(st.integers(0, 1500), st.integers(0, 12000)))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        broken[start : start + len(patch)] = patch
    path.write_bytes(broken)
    message = complaint(path)
    assert message is None or "m.gguf" in message


def complaint(path: Path) -> str | None:
    """What reading all of a file complains of; any error but a UserError passes through."""
    try:
        checkpoint = GGUFCheckpoint(path)
        checkpoint.tokenizer()
        for name in checkpoint.infos():
            checkpoint.read(name)
    except UserError as error:
        return str(error)
    return None


# Tokenizers

TEXTS = [
    "a\n\n2. ab   1234",
    "hello hello's HELLO'S",
    "a==b (c)  \n x",
    "é ⅷ",
    " ab<think>ab",
    "<|bos|>ab<|end|>",
]


def reference(splits: list[Any], ignore_merges: bool = False) -> Tokenizer:
    pairs: list[tuple[str, str]] = []
    for merge in MERGES:
        left, right = merge.split(" ")
        pairs.append((left, right))
    vocab = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|end|>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def test_smollm_ids(tmp_path: Path):
    ours = open_with(tmp_path).tokenizer()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    theirs = reference([pre_tokenizers.Digits(individual_digits=True), byte_level])
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids) == text
    assert ours.tokenize("a\n\n2. 123") == ["a", "ĊĊ", "2", ".", "Ġ", "1", "2", "3"]
    gpt2 = open_with(tmp_path, **{"tokenizer.ggml.pre": "gpt-2"}).tokenizer()
    assert gpt2.encode("a 123b") == reference([byte_level]).encode("a 123b").ids
    assert gpt2.tokenize("a 123b") == ["a", "Ġ", "123", "b"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "123412 hello'S", ["123", "4", "12", "Ġ", "hello", "'", "S"]),
        ("llama-bpe", "whole", ["whole"]),
        ("llama3", "whole", ["whole"]),
        ("smollm", "whole", list("who") + list("le")),
        ("qwen2", "1231", ["1", "2", "3", "1"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("qwen2", "a\n\n\nb", ["a", "ĊĊ", "Ċ", "b"]),
        ("default", "1234==a", ["123", "4", "==", "a"]),
        ("default", "012312", ["0", "12", "3", "12"]),
        ("tekken", "123", ["1", "2", "3"]),
    ],
)
def test_pre_tokenizers_by_name(tmp_path: Path, pre: str, text: str, pieces: list[str]):
    tokenizer = open_with(tmp_path, **{"tokenizer.ggml.pre": pre}).tokenizer()
    assert tokenizer.tokenize(text) == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "qwen35"])
def test_patterns_equal_transformers(tmp_path: Path, pre: str):
    from tokenizers import Regex
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    pattern = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS[pre]

    theirs = pre_tokenizers.Split(Regex(pattern), "isolated")
    ours = open_with(tmp_path, **{"tokenizer.ggml.pre": pre}).tokenizer().backend_tokenizer.pre_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    both = pre_tokenizers.Sequence([theirs, byte_level])
    for text in [*TEXTS, "it'S  DON'T\r\n\t x1234567 ÀÉa日本語 क्षि / a/b//\n"]:
        assert ours.pre_tokenize_str(text) == both.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_add_bos(tmp_path: Path, pre: str, flag: bool | None, adds: bool):
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    tokenizer = open_with(tmp_path, **changes).tokenizer()
    assert (tokenizer("ab")["input_ids"][0] == BOS) == adds
    assert len(tokenizer("ab")["input_ids"]) == 1 + adds
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [TOKENS.index("ab")]
    tokenizer.save_pretrained(tmp_path / "saved")
    from transformers import PreTrainedTokenizerFast

    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert again("ab<think> 12")["input_ids"] == tokenizer("ab<think> 12")["input_ids"]


def test_special_tokens_and_template(tmp_path: Path):
    changes = {"tokenizer.ggml.padding_token_id": END, "tokenizer.ggml.eot_token_id": THINK}
    checkpoint = open_with(tmp_path, **changes)
    tokenizer = checkpoint.tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|bos|>",
        "<|end|>",
        "<|end|>",
    )
    assert tokenizer.unk_token is None
    assert tokenizer.model_max_length == CONTEXT
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.decode([BOS, TOKENS.index("ab"), THINK, END], skip_special_tokens=True) == "ab<think>"
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|bos|>ab<|end|>"
    defaults = {"eos_token_id": [END, THINK], "bos_token_id": BOS, "pad_token_id": END}
    assert checkpoint.generation_defaults() == defaults
    bare = {f"tokenizer.ggml.{x}_token_id": None for x in ("bos", "eos")} | {"tokenizer.chat_template": None}
    checkpoint = open_with(tmp_path, **bare)
    assert checkpoint.generation_defaults() == {}
    assert checkpoint.tokenizer().chat_template is None


SPM = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "d"]
SPM_PIECES = ["ab", "▁a", "bc", "▁ab", "abc", "cd", "▁▁", "aa", "da", "dab", "<tool>", "[PAD]"]
SPM_TYPES = [2, 3, 3] + [6] * 256 + [1] * 15 + [4, 5]


def spm_changes(**more: Any) -> dict[str, Any]:
    tokens = SPM + SPM_PIECES
    scores = [0.0] * 259 + [-1000.0 - i for i in range(5)] + [-float(i + 1) for i in range(len(SPM_PIECES))]
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": SPM_TYPES,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.chat_template": None,
    }
    return changes | more


def sentencepiece_pieces(text: str, prefix: bool = True) -> list[str]:
    """SentencePiece's BPE: merge the neighbours whose union scores best, the leftmost of equals."""
    score = {piece: -i for i, piece in enumerate(SPM_PIECES[:-2])}
    pieces = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        places = [i for i in range(len(pieces) - 1) if pieces[i] + pieces[i + 1] in score]
        if not places:
            break
        best = max(places, key=lambda i: (score[pieces[i] + pieces[i + 1]], -i))
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    known = set(SPM + SPM_PIECES)
    out: list[str] = []
    for piece in pieces:
        out += [piece] if piece in known else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return out


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory):
    return {
        prefix: open_with(
            tmp_path_factory.mktemp("s"), **spm_changes(**{"tokenizer.ggml.add_space_prefix": prefix})
        ).tokenizer()
        for prefix in (None, False)
    }


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abcd \né", max_size=12), prefix=st.sampled_from([None, False]))
def test_sentencepiece_ids(spm: dict[Any, Any], text: str, prefix: bool | None):
    tokenizer = spm[prefix]
    assert tokenizer.tokenize(text) == sentencepiece_pieces(text, prefix is None)
    ids = tokenizer.encode(text)
    assert ids[0] == 1  # bos is added when the file does not say
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_special_tokens(spm: dict[Any, Any], tmp_path: Path):
    assert spm[None].tokenize("abc<tool>abc</s>") == ["▁ab", "c", "<tool>", "▁ab", "c", "</s>"]
    assert (spm[None].bos_token_id, spm[None].eos_token_id, spm[None].unk_token_id) == (1, 2, 0)
    assert open_with(tmp_path, **spm_changes()).generation_defaults() == {
        "eos_token_id": [2],
        "bos_token_id": 1,
    }
    refused(tmp_path, "scores", **spm_changes(**{"tokenizer.ggml.scores": [-1000.0] * len(SPM + SPM_PIECES)}))
    refused(tmp_path, "scores", **spm_changes(**{"tokenizer.ggml.scores": None}))
    scores = [math.nan] * len(SPM + SPM_PIECES)
    refused(tmp_path, "scores", **spm_changes(**{"tokenizer.ggml.scores": scores}))


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("pre", "deepseek-v3", "'deepseek-v3'"),
        ("pre", None, "None"),
        ("pre", ["smollm", "gpt-2"], "smollm"),
        ("token_type", ["x"] * len(TOKENS), "token_type"),
        ("add_bos_token", "no", "true or false"),
        ("model", "bert", "'bert'"),
        ("model", None, "None"),
        ("tokens", None, "tokens"),
        ("tokens", TOKENS + [f"x{i}" for i in range(5)], str(VOCAB)),
        ("tokens", [*TOKENS[:-1], "a"], "'a' twice"),
        ("token_type", TYPES[:-1], "token_type"),
        ("merges", None, "merges"),
        ("merges", [*MERGES, "zz z"], "zz z"),
        ("bos_token_id", 10**6, "bos_token_id"),
    ],
)
def test_refused_tokenizers(tmp_path: Path, key: str, value: Any, word: str):
    refused(tmp_path, f"tokenizer.ggml.{key}", word, **{f"tokenizer.ggml.{key}": value})


def test_template_that_is_no_text(tmp_path: Path):
    refused(tmp_path, "tokenizer.chat_template", **{"tokenizer.chat_template": 7})
    refused(tmp_path, "tokenizer.ggml.token_type", **{"tokenizer.ggml.token_type": 7})


def test_bos_that_is_missing(tmp_path: Path):
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}
    refused(tmp_path, "bos_token_id", **changes)


@pytest.mark.default_model
def test_default_model():
    from medusa_jax.weights import hub

    checkpoint = GGUFCheckpoint(hub.default_model())
    assert len(checkpoint.infos()) == 272
    assert checkpoint.config.rope.theta == 100000.0
    assert checkpoint.generation_defaults() == {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 2}
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.tokenize("a\n\n2. b   7") == ["a", "ĊĊ", "2", ".", "Ġb", "ĠĠĠ", "7"]
    assert tokenizer("hello")["input_ids"][0] != 1
    assert "<|im_start|>" in str(tokenizer.chat_template)
    q = checkpoint.read("model.layers.29.self_attn.q_proj.weight")
    assert q.shape == (576, 576)
    assert np.isfinite(q).all()
