"""Parity with transformers' torch models, and the forward's own identities on the same small models.

The expected values are stored (`parity/make_fixtures.py`); with the `torch` extra installed the same
checks also run against torch models built now (marker `torch`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from parity.cases import CASES, FILTER_DEFAULTS, FILTERS, NEW_TOKENS, PENALTY, PROMPTS, TEXT, respelled
from safetensors.numpy import load_file

from medusa_jax import backbone, cache, sampling
from medusa_jax.config import ModelConfig, read_config
from medusa_jax.generate import MedusaLM
from medusa_jax.sampling import SamplingParams
from medusa_jax.weights import hf, hub
from medusa_jax.weights.params import Params, flatten, load_params
from medusa_jax.weights.source import Index, TensorInfo

DATA = Path(__file__).parent / "parity" / "data"
LOGITS = 1e-4  # against torch
OWN = 6e-5  # between our own programs, which sum in another order; logits reach 12
NEAR_TIE = 1e-3
LONGEST, ROWS = TEXT + NEW_TOKENS, 16  # of the texts that `text_logits` takes
BF16 = np.dtype(ml_dtypes.bfloat16)


class Arrays:
    """Tensors in memory as a `TensorSource`."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(array.shape, array.dtype) for name, array in self.arrays.items()}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        return self.arrays[name][index or ...].copy()


@dataclasses.dataclass(frozen=True)
class Model:
    """A case's model as this project loads it."""

    config: ModelConfig
    params: Params
    tokens: np.ndarray  # [2, TEXT] int32


@functools.cache
def stored(name: str) -> SimpleNamespace:
    """A case's file, in the form of `make_fixtures.Expected`."""
    arrays = load_file(DATA / f"{name}.safetensors")
    expected = {key.removeprefix("expected."): a for key, a in arrays.items() if key.startswith("expected.")}
    return SimpleNamespace(
        **expected, weights={n: a for n, a in arrays.items() if n.split(".")[0] != "expected"}
    )


@functools.cache
def live(name: str) -> Any:
    """The same, computed now by torch."""
    from parity import make_fixtures

    return make_fixtures.compute(CASES[name])


@functools.cache
def ours(name: str) -> Model:
    config = ModelConfig.from_hf(CASES[name].fields)
    return Model(
        config, load_params(Arrays(stored(name).weights), config, np.float32), stored(name).input_ids
    )


# Each of these programs runs a few times only, so what counts is how long it takes to compile.
# The programs of the decoding loop are compiled as they always are.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def logits_and_fresh(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    relation: jax.Array,
    kv: cache.KVCache | None = None,
) -> tuple[jax.Array, Any]:
    """Logits [B, T, V] and fresh keys and values."""
    hidden, fresh = backbone.forward(params, config, tokens, positions, relation, kv)
    return backbone.unembed(params, config, hidden), fresh


def whole_texts(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Logits [B, T, V] of texts [B, T] from their beginning, without a cache."""
    T = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    return logits_and_fresh(params, config, tokens, positions, jnp.tri(T, dtype=bool))[0]


run_whole_texts = quick_jit(whole_texts, static_argnames="config")
run_tree = quick_jit(logits_and_fresh, static_argnames="config")


def text_logits(params: Params, config: ModelConfig, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Logits [T, V] of each text; always by the same program, whatever their number and lengths."""
    tokens = np.zeros((ROWS, LONGEST), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    logits = np.asarray(run_whole_texts(params, config, tokens))
    return [logits[row, : len(text)] for row, text in enumerate(texts)]


@functools.cache
def our_logits(name: str) -> np.ndarray:
    """Logits [2, TEXT, V] of the stored texts."""
    model = ours(name)
    return np.stack(text_logits(model.params, model.config, list(model.tokens)))


@functools.cache
def our_ids(name: str) -> np.ndarray:
    """Greedy ids [4, NEW_TOKENS] by the decoding loop: both prompts, then both with the penalty."""
    model = ours(name)
    lm = MedusaLM(model.config, model.params, tiny.tokenizer(), {"eos_token_id": []})
    jobs = [
        lm.job(
            model.tokens[row, :length].tolist(),
            SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, repetition_penalty=penalty),
        )
        for penalty in (1.0, PENALTY)
        for row, length in enumerate(PROMPTS)
    ]
    done = lm.complete([""] * len(jobs), jobs, batch_size=len(jobs))
    return np.asarray([completion.token_ids for completion in done])


# The decoding loop's programs take seconds to compile: without torch these cases stand for all.
DECODED = (
    "llama-mha",
    "llama-tied-gqa",
    "llama-llama3",
    "mistral-yarn-window",
    "qwen2-tied",
    "qwen2-window-above",
    "qwen3-linear-window",
)

# The scope keeps a case's tests together, so that the processes of a parallel run share little work.
every_case = pytest.mark.parametrize("name", CASES, scope="module")
every_reference = pytest.mark.parametrize(
    "reference", [pytest.param(stored, id="stored"), pytest.param(live, id="live", marks=pytest.mark.torch)]
)


# ------------------------------------------------------------------------------------- against torch


@every_reference
@every_case
def test_logits(name: str, reference: Any) -> None:
    expected = reference(name)
    assert expected.logits.shape == (2, TEXT, CASES[name].fields["vocab_size"])
    np.testing.assert_allclose(our_logits(name), expected.logits, rtol=0, atol=LOGITS)


def greedy_ids(expected: Any) -> np.ndarray:
    """The reference's ids [4, NEW_TOKENS] in the order of `our_ids`."""
    return np.concatenate([expected.generated, expected.penalised])


@every_reference
@every_case
def test_greedy_ids(name: str, reference: Any) -> None:
    """Every id is the best after the prompt and the ids before it, so it is what greedy decoding gives."""
    model, expected = ours(name), greedy_ids(reference(name))
    prompts = [model.tokens[row, :length] for row, length in enumerate(PROMPTS)] * 2
    texts = [np.concatenate([prompt, ids]) for prompt, ids in zip(prompts, expected, strict=True)]
    logits = text_logits(model.params, model.config, texts)
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        for at in range(len(prompt), len(text)):
            scores = logits[row][at - 1].copy()
            if row >= len(PROMPTS):
                seen = np.unique(text[:at])
                scores[seen] = np.where(scores[seen] > 0, scores[seen] / PENALTY, scores[seen] * PENALTY)
            assert np.argmax(scores) == text[at], (row, at)


@pytest.mark.parametrize("name", DECODED)
def test_decoding_loop(name: str) -> None:
    np.testing.assert_array_equal(our_ids(name), greedy_ids(stored(name)))


@pytest.mark.torch
@every_case
def test_decoding_loop_live(name: str) -> None:
    expected = greedy_ids(live(name))  # first: without torch the test ends here
    np.testing.assert_array_equal(our_ids(name), expected)


@pytest.mark.torch
@every_case
def test_fixtures_are_current(name: str) -> None:
    old, new = stored(name), live(name)
    assert old.weights.keys() == new.weights.keys()
    for key, array in new.weights.items():
        np.testing.assert_array_equal(old.weights[key].astype(np.float32), array, err_msg=key)
    np.testing.assert_array_equal(old.input_ids, new.input_ids)
    np.testing.assert_allclose(old.logits, new.logits, rtol=0, atol=OWN)


def test_every_case_is_stored() -> None:
    assert {path.stem for path in DATA.glob("*.safetensors")} == {*CASES, "filters"}
    versions = json.loads((DATA / "versions.json").read_text())
    for part in ("cases", "default_model"):
        assert {"torch", "transformers", "numpy", "date"} <= versions[part].keys()


def as_torch_saves(folder: Path, target: Path, shard: str, dtype: str) -> Any:
    """Have transformers load `folder` and save it into `target`; returns its model."""
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
    )
    # A tied model has no output table in the file, and transformers may or may not say so.
    assert not {key: found for key, found in report.items() if found and key != "missing_keys"}, report
    assert set(report["missing_keys"]) <= {"lm_head.weight"}
    model.save_pretrained(target, max_shard_size=shard)
    return model


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@every_case
def test_save_through_transformers(name: str, shard: str, dtype: str, tmp_path: Path) -> None:
    reference = live(name)
    from parity import make_fixtures

    config = ours(name).config
    arrays = {key: array.astype(np.dtype(dtype)) for key, array in reference.weights.items()}
    params = load_params(Arrays(arrays), config, np.dtype(dtype))
    limit = 5e9 if shard == "5GB" else 20e3
    hf.save_pretrained(tmp_path / "ours", params, config, max_shard_bytes=limit)
    theirs = as_torch_saves(tmp_path / "ours", tmp_path / "theirs", shard, dtype)
    for folder in ("ours", "theirs"):
        assert (tmp_path / folder / hf.INDEX).exists() == (shard == "20KB")
    if dtype == "float32":  # the configuration that we wrote means the same model to transformers
        np.testing.assert_array_equal(
            make_fixtures.torch_logits(theirs, reference.input_ids), reference.logits
        )
    assert dataclasses.replace(read_config(tmp_path / "theirs"), rope=config.rope) == config
    back = flatten(load_params(hf.SafetensorsCheckpoint(tmp_path / "theirs"), config, np.dtype(dtype)))
    assert back.keys() == arrays.keys()
    for key, array in arrays.items():
        assert np.asarray(back[key]).dtype == array.dtype
        assert np.asarray(back[key]).tobytes() == array.tobytes(), key


# ---------------------------------------------------------------------------------------- our own


@every_case
def test_config_spellings(name: str) -> None:
    config = ModelConfig.from_hf(CASES[name].fields)
    assert ModelConfig.from_hf(respelled(CASES[name].fields)) == config
    assert ModelConfig.from_hf(config.to_hf()) == config


CHUNK = 12


@functools.partial(quick_jit, static_argnames="config")
def run_chunk(
    params: Params, config: ModelConfig, kv: cache.KVCache, tokens: jax.Array, counts: jax.Array
) -> tuple[jax.Array, cache.KVCache]:
    """Read the next tokens [B, CHUNK] of each row, of which counts [B] are meant."""
    positions = kv.lengths[:, None] + jnp.arange(CHUNK)[None]
    logits, fresh = logits_and_fresh(params, config, tokens, positions, jnp.tri(CHUNK, dtype=bool), kv)
    return logits, cache.commit(kv, fresh, None, counts)


def read_cached(model: Model, counts: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], cache.KVCache]:
    """Logits [T, V] of each row's text, counts[i] [2] tokens at a time, and the cache that holds it."""
    empty = cache.allocate(model.config, 2, 64, jnp.float32)
    # What lies in slots that hold no token must not matter.
    kv = jax.tree.map(lambda leaf: np.full(leaf.shape, 99, leaf.dtype), empty).replace(lengths=empty.lengths)
    read, logits = [0, 0], [[], []]
    for chunk_counts in counts:
        chunk = np.zeros((2, CHUNK), np.int32)
        for row, count in enumerate(chunk_counts):
            chunk[row, :count] = model.tokens[row, read[row] : read[row] + count]
        out, kv = run_chunk(model.params, model.config, kv, chunk, np.asarray(chunk_counts, np.int32))
        for row, count in enumerate(chunk_counts):
            logits[row].append(np.asarray(out)[row, :count])
            read[row] += count
    return [np.concatenate(row) for row in logits], kv


@every_case
def test_cached_equals_uncached(name: str) -> None:
    """Rows at different lengths: full chunks, cut ones, single tokens, and chunks that add nothing."""
    counts = [(12, 12), (12, 5), (7, 12), (0, 3), *[(1, 1)] * 8, (1, 0)]
    logits, kv = read_cached(ours(name), counts)
    np.testing.assert_array_equal(kv.lengths, TEXT)
    np.testing.assert_allclose(logits, our_logits(name), rtol=0, atol=OWN)


SOME = {
    # a case, and how far back a token can look through its layers
    "llama-biases": None,
    "mistral-window": 2 * 6,
    "qwen2-window-above": None,  # its first layer has no window
    "qwen3-biases": None,
}


@pytest.mark.parametrize("name", SOME)
def test_causality_by_gradient(name: str) -> None:
    """The gradient of position t with respect to token t' is exactly zero for t' > t, and not for others."""
    model, T = ours(name), 20
    tokens = np.random.default_rng(0).permutation(model.config.vocab_size)[None, :T]  # distinct
    mix = jax.random.normal(jax.random.key(0), (model.config.vocab_size,))

    @quick_jit
    @jax.jacrev
    def influence(table: jax.Array) -> jax.Array:
        """A random projection of the logits of every position [T]."""
        params = {**model.params, "model": {**model.params["model"], "embed_tokens": {"weight": table}}}
        return whole_texts(params, model.config, tokens)[0] @ mix

    gradient = np.asarray(influence(model.params["model"]["embed_tokens"]["weight"]))  # [T, V, D]
    seen = np.abs(gradient[:, tokens[0]]).max(axis=-1)  # [t, t']
    distance = np.arange(T)[:, None] - np.arange(T)[None]
    reach = T if SOME[name] is None else SOME[name]
    expected = (distance >= 0) & (distance <= reach)
    np.testing.assert_array_equal(seen > 0, expected)
    assert (seen[~expected] == 0).all()
    assert (seen[expected] > 1e-7).all()


PARENTS = (-1, 0, 0, 1, 1, 2, 3, 6)


def ancestors(parents: tuple[int, ...]) -> tuple[np.ndarray, list[list[int]]]:
    """Whether node j is node i or above it [N, N], and each node's path from the root."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [node])
    relation = np.zeros((len(parents), len(parents)), bool)
    for node, path in enumerate(paths):
        relation[node, path] = True
    return relation, paths


@pytest.mark.parametrize("name", [*SOME, "mistral-yarn-window", "qwen3-linear-window"])
def test_tree_equals_chains(name: str) -> None:
    """Each node of a tree gets the logits of the last token of its path, read as a plain text."""
    model = ours(name)
    relation, paths = ancestors(PARENTS)
    B, N = 2, len(PARENTS)
    assert B * N <= ROWS
    _, kv = read_cached(model, [(12, 12), (5, 1)])
    lengths = np.asarray(kv.lengths)
    nodes = np.random.default_rng(1).permutation(model.config.vocab_size)[: B * N].reshape(B, N)
    depth = np.asarray([len(path) - 1 for path in paths])
    positions = lengths[:, None] + depth
    tree, _ = run_tree(model.params, model.config, nodes, positions, relation, kv)
    chains = [
        np.concatenate([model.tokens[row, : lengths[row]], nodes[row, path]])
        for row in range(B)
        for path in paths
    ]
    expected = np.stack([logits[-1] for logits in text_logits(model.params, model.config, chains)])
    np.testing.assert_allclose(tree, expected.reshape(tree.shape), rtol=0, atol=OWN)


@pytest.mark.parametrize("name", ["llama-biases", "mistral-yarn-window", "qwen2-window-above", "qwen3-tied"])
def test_bfloat16_is_near_float32(name: str) -> None:
    """The weights are exact in bfloat16, so only activations are rounded, to 8 bits each.

    Such random layers amplify rounding: 3 % of the logits' spread on average is what is asked for.
    """
    model = ours(name)
    params = load_params(Arrays(stored(name).weights), model.config, BF16)
    logits = np.stack(text_logits(params, model.config, list(model.tokens)))
    assert logits.dtype == np.float32
    error = logits - our_logits(name)
    assert 0 < np.sqrt(np.mean(error**2)) < 0.03 * our_logits(name).std()


# --------------------------------------------------------------------------------- sampling filters


def filter_rows(sets: list[dict[str, float]]) -> sampling.RowSampling:
    """Parameter sets as rows."""
    full = [FILTER_DEFAULTS | chosen for chosen in sets]
    columns = {name: jnp.asarray([p[name] for p in full], jnp.float32) for name in FILTER_DEFAULTS}
    columns["top_k"] = columns["top_k"].astype(jnp.int32)
    return dataclasses.replace(sampling.RowSampling.greedy(len(sets)), **columns)


@jax.jit
def process(logits: jax.Array, tokens: jax.Array, rows: sampling.RowSampling) -> jax.Array:
    """Logits [P, N, V] as `sampling.choose` sees them before it adds noise."""
    known = jnp.full((tokens.shape[0],), tokens.shape[1])
    seen = sampling.history_mask(tokens, known, logits.shape[-1])[:, None]
    logits = sampling.penalise(logits, jnp.broadcast_to(seen, logits.shape), rows.repetition_penalty)
    return sampling.filter_logits(logits / rows.temperature[:, None, None], rows)


def check_filters(stored: dict[str, np.ndarray], at: slice) -> None:
    out = np.asarray(process(stored["logits"][at], stored["tokens"][at], filter_rows(FILTERS[at])))
    expected = stored["processed"][at]
    np.testing.assert_array_equal(np.isneginf(out), np.isneginf(expected))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_filters_equal_transformers() -> None:
    stored = load_file(DATA / "filters.safetensors")
    check_filters(stored, slice(None))  # rows with different parameters beside each other
    for index in range(len(FILTERS)):
        check_filters(stored, slice(index, index + 1))


@pytest.mark.torch
def test_filters_equal_transformers_live() -> None:
    from parity import make_fixtures

    fixture = make_fixtures.filter_fixture()
    check_filters(fixture, slice(None))
    old = load_file(DATA / "filters.safetensors")
    np.testing.assert_array_equal(old["logits"], fixture["logits"])
    np.testing.assert_allclose(old["processed"], fixture["processed"], rtol=1e-6)


# ------------------------------------------------------------------------------------ default model


@pytest.mark.default_model
def test_default_model_equals_torch() -> None:
    """Greedy ids of every prompt; where they ever part, torch's two best must be a near-tie."""
    expected = json.loads((DATA / "default_model.json").read_text())
    lm = MedusaLM.load(hub.default_model(), dtype="float32")
    new = max(len(entry["token_ids"]) for entry in expected)
    params = SamplingParams(max_new_tokens=new, temperature=0.0, repetition_penalty=1.0)
    done = lm.generate([entry["prompt"] for entry in expected], params)
    for entry, completion in zip(expected, done, strict=True):
        assert lm.encode(entry["prompt"]) == entry["prompt_ids"]
        pairs = zip(completion.token_ids, entry["token_ids"], strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            assert completion.token_ids == entry["token_ids"]
        else:
            assert entry["margins"][first] < NEAR_TIE, f"{entry['prompt']!r}: token {first} differs"
