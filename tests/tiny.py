"""A tiny random model with its own tokenizer, for tests that need a whole `MedusaLM` or a model folder.

    lm = tiny.lm()                                  # the same object all session long: compiled once
    lm = tiny.lm(model_type="qwen3", head_dim=16)   # any field of a config.json
    folder = tiny.write_folder(tmp_path / "model", lm)

Weights are scaled so that logits lie far apart: greedy answers do not hang on rounding.
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from medusa_jax import MedusaLM, backbone
from medusa_jax.config import ModelConfig
from medusa_jax.weights import hf

ROOT = Path(__file__).resolve().parents[1]  # where commands run
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
SYSTEM = "You are tiny."  # the template's own system message
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog lets it.",
    "A leap year has one day more than the other years; that day is in February.",
    "Rain falls on the plain, on the hills and on the roofs of the town.",
    "user system assistant You are tiny. Hello! How are you? What is the answer?",
    "Où est la forêt? Wo ist die Straße? 日本語 😀 €100",
)
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% if message['role'] != 'system' or message['content'] %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a few hundred tokens with ChatML's special tokens; <|im_end|> ends an answer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def config(**overrides: Any) -> ModelConfig:
    """A small configuration; overrides are fields of a `config.json` (`model_type` names the family)."""
    fields = {
        "model_type": "llama",
        "vocab_size": -(-len(tokenizer()) // 8) * 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 3e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
    }
    return ModelConfig.from_hf(fields | overrides)


def params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random parameters whose logits differ by several units; they favour tokens that are readable text."""
    made = backbone.init(config, jax.random.key(seed), jnp.dtype(jnp.float32))
    made = jax.tree.map(lambda leaf: leaf * 20 if leaf.ndim == 2 else leaf, made)
    texts = [tokenizer().decode([i]) for i in range(config.vocab_size)]
    readable = [text.isascii() and text.isprintable() and text != "" for text in texts]
    readable[2] = True  # the end token
    table = made["model"]["embed_tokens"] if config.tie_word_embeddings else made["lm_head"]
    table["weight"] = table["weight"] * jnp.where(jnp.array(readable), 1.0, 0.1)[:, None]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), made)


@functools.cache
def _lm(seed: int, made: ModelConfig, template: str | None, end_tokens: tuple[int, ...]) -> MedusaLM:
    generation = {"eos_token_id": list(end_tokens)}
    return MedusaLM(made, params(made, seed), tokenizer(template), generation)


def lm(
    seed: int = 0,
    *,
    template: str | None = TEMPLATE,
    end_tokens: tuple[int, ...] = (2,),
    **overrides: Any,
) -> MedusaLM:
    """A float32 model on one device. Equal arguments give the same object with its compiled programs."""
    return _lm(seed, config(**overrides), template, end_tokens)


def write_folder(path: Path, lm: MedusaLM, generation_config: Mapping[str, Any] | None = None) -> Path:
    """Write a model as a Hugging Face folder and return its path."""
    generation = {"eos_token_id": list(lm.end_tokens)} | dict(generation_config or {})
    hf.save_pretrained(path, lm.params, lm.config, lm.tokenizer, generation)
    return path


def environment() -> dict[str, str]:
    """The environment of a command that a test runs: one device, and the compiled programs of the suite."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONWARNINGS")}
    return kept | {"MEDUSA_JAX_CACHE": str(ROOT / ".pytest_cache"), "JAX_PLATFORMS": "cpu"}
