"""Store what transformers' torch models compute, so that the parity tests need no torch.

Run from the root of the repository, with the `torch` extra installed, after changing `cases.py`:

    python -m tests.parity.make_fixtures [--default-model SmolLM2-135M-Instruct.Q4_1.gguf]

It writes into `tests/parity/data`:

* NAME.safetensors for every case of `cases.py`: the weights under their Hugging Face names (bfloat16,
  which holds them exactly), `expected.input_ids` [2, TEXT], `expected.logits` [2, TEXT, V] float32,
  `expected.generated` and `expected.penalised` [2, NEW_TOKENS]: greedy ids after the first PROMPTS[row]
  tokens, without and with a repetition penalty.
* filters.safetensors: random logits, and what transformers' logits processors make of them.
* default_model.json (only with --default-model): the greedy ids of a few prompts, from torch on the
  weights that this project's loader dequantises, and the margin between the two best logits at each step.
* versions.json: what the cases (and filters) and the default model's ids were made with.

Weights and tokens come from NumPy generators seeded by the case's name and torch runs on one thread, so
the same versions give the same files (but for the date). Tokens are drawn again while a greedy choice is
a near-tie. The script refuses a case in which something that makes it special does not show in the logits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import save_file

from . import cases
from .cases import CASES, FILTER_DEFAULTS, FILTERS, NEW_TOKENS, PENALTY, PROMPTS, TEXT, Case

DATA = Path(__file__).parent / "data"
SEEN_DIFFERENCE = 1e-2  # in logits: what taking a speciality away must change at least
CLEAR_MARGIN = 3e-3  # in logits: between the best and the second best token of a stored choice
DEFAULT_NEW_TOKENS = 48
DEFAULT_PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me three tips for learning a new language.",
)


class Expected(NamedTuple):
    """What torch computes of a case."""

    weights: dict[str, np.ndarray]  # float32, exact in bfloat16
    input_ids: np.ndarray  # [2, TEXT]
    logits: np.ndarray  # [2, TEXT, V] float32
    generated: np.ndarray  # [2, NEW_TOKENS]
    penalised: np.ndarray  # [2, NEW_TOKENS]


def torch_model(fields: dict[str, Any], weights: dict[str, np.ndarray] | None = None) -> Any:
    """A transformers model in float32 with eager attention; the weights given, or empty ones."""
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if weights is not None:
        state = {name: torch.from_numpy(array) for name, array in weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        assert set(missing) <= tied, missing
        assert not unexpected, unexpected
    return model


def random_weights(case: Case) -> dict[str, np.ndarray]:
    """Weights large enough to spread the logits; norms and biases are as random as the rest."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    weights = {}
    for name, parameter in torch_model(case.fields).named_parameters():
        shape = tuple(parameter.shape)
        if "norm" in name:
            array = rng.uniform(0.4, 1.6, shape)
        elif name.endswith("bias"):
            array = rng.normal(0, 0.5, shape)
        elif "embed_tokens" in name:
            # Small, so that the first norm's epsilon matters, and so that a tied model does not merely
            # repeat the last token, whose embedding is part of the hidden state.
            array = rng.normal(0, 0.3 if case.fields["tie_word_embeddings"] else 0.05, shape)
        elif name == "lm_head.weight":
            array = rng.normal(0, 0.5, shape)
        else:
            array = rng.normal(0, 1.4 * shape[-1] ** -0.5, shape)
        weights[name] = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    return weights


def torch_logits(model: Any, input_ids: np.ndarray) -> np.ndarray:
    """float32 logits of every position."""
    with torch.no_grad():
        return model(torch.from_numpy(input_ids)).logits.numpy()


def torch_generate(model: Any, prompt: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Greedy ids after one prompt [T], and the margin between the two best (processed) logits at each."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    best = torch.cat(out.scores).topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].numpy(), (best[:, 0] - best[:, 1]).numpy()


def compute(case: Case) -> Expected:
    """Everything that is stored of a case, from a torch model built now."""
    torch.set_num_threads(1)
    weights = random_weights(case)
    model = torch_model(case.fields, weights)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()) + 1)
    while True:  # until no choice is a near-tie
        input_ids = rng.integers(0, case.fields["vocab_size"], (2, TEXT))
        runs = [
            torch_generate(
                model, input_ids[row, :length], max_new_tokens=NEW_TOKENS, repetition_penalty=penalty
            )
            for penalty in (1.0, PENALTY)
            for row, length in enumerate(PROMPTS)
        ]
        if min(margins.min() for _, margins in runs) > CLEAR_MARGIN:
            break
    generated, penalised = np.stack([ids for ids, _ in runs]).astype(np.int32).reshape(2, 2, NEW_TOKENS)
    logits = torch_logits(model, input_ids)
    return Expected(weights, input_ids.astype(np.int32), logits, generated, penalised)


def check_specialities(case: Case, expected: Expected) -> None:
    """Refuse a case that would pass without the code that it is there to test."""
    for name, changes in case.weakened.items():
        weaker = torch_model(case.fields | changes, expected.weights)
        difference = np.abs(torch_logits(weaker, expected.input_ids) - expected.logits).max()
        if not difference > SEEN_DIFFERENCE:
            raise SystemExit(f"{case.name}: logits change by {difference:.2g} only without its {name}")


def store(case: Case, expected: Expected) -> None:
    """Write one case's file."""
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in expected.weights.items()}
    for name, array in expected._asdict().items():
        if name != "weights":
            arrays[f"expected.{name}"] = array
    save_file(arrays, DATA / f"{case.name}.safetensors")


def filter_fixture(P: int = len(FILTERS), N: int = 2, V: int = 83, S: int = 12) -> dict[str, np.ndarray]:
    """Logits [P, N, V] and texts [P, S] of every parameter set, and the processed logits."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (P, N, V)).astype(np.float32)
    tokens = rng.integers(0, V, (P, S))
    processed = []
    for chosen, scores, text in zip(FILTERS, torch.from_numpy(logits), torch.from_numpy(tokens), strict=True):
        p = FILTER_DEFAULTS | chosen
        processors = [
            transformers.RepetitionPenaltyLogitsProcessor(float(p["repetition_penalty"])),
            transformers.TemperatureLogitsWarper(float(p["temperature"])),
        ]
        if p["top_k"]:
            processors.append(transformers.TopKLogitsWarper(int(p["top_k"])))
        if p["top_p"] < 1:
            processors.append(transformers.TopPLogitsWarper(float(p["top_p"])))
        if p["min_p"]:
            processors.append(transformers.MinPLogitsWarper(float(p["min_p"])))
        history = text.expand(N, S)
        for processor in processors:
            scores = processor(history, scores)
        processed.append(scores.numpy())
    return {"logits": logits, "tokens": tokens.astype(np.int32), "processed": np.stack(processed)}


def default_model_fixture(path: Path) -> list[dict[str, Any]]:
    """Greedy ids of torch on the weights of a GGUF file as our loader dequantises them."""
    from medusa_jax.weights import checkpoints

    checkpoint = checkpoints.open_model(path)
    weights = {name: checkpoint.source.read(name) for name in checkpoint.source.infos()}
    weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    model = torch_model(checkpoint.config.to_hf(), weights)
    tokenizer = checkpoint.tokenizer()
    ends = checkpoint.generation_config()["eos_token_id"]
    results = []
    for prompt in DEFAULT_PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, margins = torch_generate(
            model,
            np.asarray(prompt_ids),
            max_new_tokens=DEFAULT_NEW_TOKENS,
            eos_token_id=ends,
            pad_token_id=0,
        )
        print(f"{prompt!r}: margins from {margins.min():.3g}\n{tokenizer.decode(ids)}\n")
        results.append(
            {
                "prompt": prompt,
                "prompt_ids": prompt_ids,
                "token_ids": ids.tolist(),
                "margins": [round(float(margin), 5) for margin in margins],
            }
        )
    return results


def versions() -> dict[str, str]:
    """What the fixtures are made with."""
    modules = {"torch": torch, "transformers": transformers, "numpy": np, "safetensors": safetensors}
    found = {name: module.__version__ for name, module in modules.items()}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return found | {"python": platform.python_version(), "machine": platform.machine(), "date": today}


def note_versions(*parts: str) -> None:
    """Write the versions of the parts that were made now beside those of the others."""
    path = DATA / "versions.json"
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, noted | dict.fromkeys(parts, versions()))


def write_json(path: Path, value: Any) -> None:
    """Lists of numbers stay on one line."""
    rows = [json.dumps(entry) for entry in value] if isinstance(value, list) else None
    text = json.dumps(value, indent=2) if rows is None else "[\n" + ",\n".join(rows) + "\n]"
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Make all fixtures anew."""
    parser = argparse.ArgumentParser(description="Store what transformers' torch models compute.")
    parser.add_argument(
        "--default-model", type=Path, help="the default model's GGUF file, to make its ids too"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    DATA.mkdir(exist_ok=True)
    for stale in DATA.glob("*.safetensors"):
        stale.unlink()
    for case in CASES.values():
        expected = compute(case)
        check_specialities(case, expected)
        store(case, expected)
        print(f"{case.name}: logits' spread {expected.logits.std():.2f}, ids {expected.generated.tolist()}")
    save_file(filter_fixture(), DATA / "filters.safetensors")
    note_versions("cases")
    if arguments.default_model is not None:
        write_json(DATA / "default_model.json", default_model_fixture(arguments.default_model))
        note_versions("default_model")
    print(f"{sum(path.stat().st_size for path in DATA.iterdir()) / 1e6:.2f} MB in {cases.__package__}/data")


if __name__ == "__main__":
    main()
