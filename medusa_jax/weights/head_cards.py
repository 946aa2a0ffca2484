"""The README of converted heads: what they are, and the command that serves them."""

from __future__ import annotations

import dataclasses
import json
import shlex

import numpy as np

from medusa_jax.weights.head_files import HeadCheckpoint

_TENSORRT_TYPES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}

_TITLES = {
    "reference v1": "the first implementation of Medusa (v1)",
    "reference v2": "the first implementation of Medusa (v2)",
    "vllm": "vLLM",
    "tgi": "Text Generation Inference",
    "trtllm": "TensorRT-LLM",
    "orbax": "medusa-jax (Orbax)",
    "medusa-jax": "medusa-jax",
    "hf": "medusa-jax, beside their model",
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a README tells. base: the model's name. family: its family, if known."""

    heads: HeadCheckpoint
    dtype: np.dtype
    base: str | None
    family: str | None = None


def card(runtime: str, facts: Facts, notes: list[str]) -> str:
    """The text of a README.md. runtime: a key of the titles above. notes: lines that a user should read."""
    config = facts.heads.config
    own = "one of each head's own" if config.own_unembedding else "the model's, shared"
    rows = [
        ("base model", facts.base or "the one that the heads were trained on"),
        ("heads", f"{config.num_heads}{', conditioned on the tokens between' if config.conditioned else ''}"),
        ("residual layers of a head", config.num_layers),
        ("unembedding", own),
        ("hidden size", config.hidden_size),
        ("vocabulary", facts.heads.vocab_size or "the model's"),
        ("tokens scored", config.draft_vocab_size or "all"),
        ("type", facts.dtype),
        ("converted from", facts.heads.kind),
    ]
    lines = [f"# Medusa heads for {_TITLES[runtime]}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    lines += [
        "",
        "Head m (from 0) reads the hidden state after the final norm and guesses the token m + 2 places on.",
        "",
    ]
    if notes:
        lines += ["Note:", "", *(f"* {note}" for note in notes), ""]
    lines += _LAUNCH[runtime.split()[0]](facts)
    lines += ["", "Written by `python -m medusa_jax.convert`."]
    return "\n".join(lines) + "\n"


def _code(*lines: str) -> list[str]:
    return ["```bash", *lines, "```"]


def _reference(facts: Facts) -> list[str]:
    return _code("python -m medusa.inference.cli --model THIS_FOLDER")


def _vllm(facts: Facts) -> list[str]:
    heads = facts.heads.config.num_heads
    settings = {"method": "medusa", "model": "THIS_FOLDER", "num_speculative_tokens": heads}
    target = shlex.quote(facts.base or "MODEL")
    return [
        *_code(f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"),
        "",
        "`num_speculative_tokens` replaces the number of heads: fewer leave heads unused, more than "
        f"{heads} would run heads without weights. `draft_tensor_parallel_size` is 1 or the model's.",
    ]


def _tgi(facts: Facts) -> list[str]:
    heads = facts.heads.config.num_heads
    return [
        *_code(f"text-generation-launcher --model-id THIS_FOLDER --speculate {heads}"),
        "",
        f"TGI loads the base model that config.json names, and `--speculate` at most {heads} heads. Leave "
        "`architectures` out of config.json: with it TGI would not look for heads.",
    ]


def _trtllm(facts: Facts) -> list[str]:
    config = facts.heads.config
    kind = _TENSORRT_TYPES.get(facts.family or "llama", "llama")
    counts = f"--num_medusa_heads {config.num_heads} --num_medusa_layers {config.num_layers}"
    chain = json.dumps([[0] * depth for depth in range(1, config.num_heads + 1)])
    dtype = "float16" if str(facts.dtype) == "float32" else str(facts.dtype)  # it knows no wider one
    model = shlex.quote(facts.base or "MODEL")
    return [
        *_code(
            f"python examples/medusa/convert_checkpoint.py --model_dir {model} --dtype {dtype} \\",
            f"    --medusa_model_dir THIS_FOLDER --output_dir CHECKPOINT --model_type {kind} {counts}",
            "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --speculative_decoding_mode medusa",
            f"python examples/run.py --engine_dir ENGINE --tokenizer_dir {model} --temperature 1.0 \\",
            f'    --medusa_choices "{chain}" --input_text "Once upon a time"',
        ),
        "",
        "`--model_dir` must be a folder. `--medusa_choices` is a tree of rank paths, here the simplest one.",
    ]


def _ours(facts: Facts) -> list[str]:
    model = f"--model {shlex.quote(facts.base)} " if facts.base else ""
    return _code(f'python -m infer.generate {model}--heads THIS_FOLDER --prompt "Once upon a time"')


def _whole(facts: Facts) -> list[str]:
    return [
        *_code('python -m infer.generate --model THIS_FOLDER --heads THIS_FOLDER/heads --prompt "Hello!"'),
        "",
        "The model by itself is one that transformers and every runtime of Hugging Face models loads.",
    ]


_LAUNCH = {
    "reference": _reference,
    "vllm": _vllm,
    "tgi": _tgi,
    "trtllm": _trtllm,
    "orbax": _ours,
    "medusa-jax": _ours,
    "hf": _whole,
}
