"""Converting the checkpoint of a run that trains its model: what is written has the model as trained."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file
from test_convert import BF16, D, M, V, fails, own, run, same, same_heads, table_of, values  # noqa: F401

from medusa_jax import quantize
from medusa_jax.weights import checkpoints, fingerprint, hf
from medusa_jax.weights.head_files import open_heads
from medusa_jax.weights.params import flatten
from train import lora
from train.checkpoints import Checkpoints
from train.step import Trained, TrainState

METRICS = {"training": {"loss": 3.25}, "validation": {"loss": 3.5, "head0/top1": 0.5}}


def checkpoint_of(folder, lm, backbone, **options):
    """A checkpoint after 7 steps of a run that began with `lm`; returns it, and its heads."""
    config, layers, _ = values()
    metadata = {"base_model": "org/base", fingerprint.KEY: fingerprint.fingerprint(lm.params)}
    kept = Checkpoints(folder / "checkpoints", 2, config, metadata, None)
    trained = Trained(jax.tree.map(jnp.asarray, layers), backbone)
    run_json = {"options": {"int8": False, "lora_alpha": 16.0} | options}
    kept.save(TrainState(jnp.int32(7), trained, {}, None), run_json, None, METRICS, wait=True)
    kept.close()
    return folder / "checkpoints/7", (config, layers)


def adapters_of(lm, seed=3):
    """Adapters that change something."""
    made = lora.init(lm.params, lm.config, jax.random.key(seed), rank=4)
    rng = np.random.default_rng(seed)
    changed = jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) / 9, made)
    return dataclasses.replace(made, params=changed.params)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def lm(request):
    return tiny.lm(tie_word_embeddings=request.param)


@pytest.mark.parametrize("int8", [False, True])
def test_adapters_are_merged(tmp_path, lm, int8):
    adapters = adapters_of(lm)
    step, heads = checkpoint_of(tmp_path / "run", lm, adapters, int8=int8)
    base = tiny.write_folder(tmp_path / "base", lm)
    run(tmp_path / "run", tmp_path / "hf", "--to", "hf", "--model", base, "--check")
    frozen = quantize.quantize(lm.params) if int8 else lm.params
    merged, config = lora.merge(frozen, adapters, lm.config)
    found, expected = load_file(tmp_path / "hf/model.safetensors"), flatten(merged)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
        assert np.abs(found[name] - np.asarray(array)).max() < 1e-6
    assert np.abs(found["lm_head.weight"] - table_of(base)).max() > 1e-2
    opened = checkpoints.open_model(tmp_path / "hf")
    assert opened.config == config
    same_heads(tmp_path / "hf/heads", *heads)
    metadata = open_heads(tmp_path / "hf/heads").metadata
    assert (metadata["step"], metadata["metrics"]) == (7, METRICS)
    assert not fingerprint.warnings(metadata, opened.source, "heads")
    assert fingerprint.warnings(metadata, checkpoints.open_model(base).source, "heads")
    # A runtime's copy of the unembedding is the trained one too.
    run(step, tmp_path / "vllm", "--to", "vllm", "--model", base, "--check")
    same(load_file(tmp_path / "vllm/model.safetensors")["lm_head.weight"], found["lm_head.weight"])
    assert "org/base" not in (tmp_path / "vllm/README.md").read_text()


def test_a_whole_model_is_replaced(tmp_path, lm):
    trained = tiny.lm(seed=1, tie_word_embeddings=lm.config.tie_word_embeddings)
    _, heads = checkpoint_of(tmp_path / "run", lm, trained.params)
    base = tiny.write_folder(tmp_path / "base", lm)
    run(tmp_path / "run", tmp_path / "a", "--to", "hf", "--model", base, "--check", "--dtype", "bfloat16")
    found = load_file(tmp_path / "a/model.safetensors")
    expected = flatten(trained.params)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        same(found[name], np.asarray(array).astype(BF16))
    config, layers = heads
    same_heads(tmp_path / "a/heads", config, {name: array.astype(BF16) for name, array in layers.items()})


def test_in_the_models_own_type(tmp_path, lm):
    """A run's masters are float32; the files that it began with say what is written."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), lm.params)
    hf.save_pretrained(tmp_path / "base", half, lm.config, lm.tokenizer, {})
    checkpoint_of(tmp_path / "run", lm, adapters_of(lm))
    run(tmp_path / "run", tmp_path / "a", "--to", "hf", "--model", tmp_path / "base", "--check")
    assert {array.dtype for array in load_file(tmp_path / "a/model.safetensors").values()} == {BF16}


def test_the_untrained_model_is_not_taken_for_the_trained_one(tmp_path, capsys):
    lm = tiny.lm()
    step, heads = checkpoint_of(tmp_path / "run", lm, adapters_of(lm))
    base = tiny.write_folder(tmp_path / "base", lm)
    for to in ("vllm", "orbax", "tgi", "hf"):
        fails(step, tmp_path / "x", "--to", to, parts=["--model"])
    for to in ("tgi", "reference"):
        fails(step, tmp_path / "x", "--to", to, "--model", base, parts=["no folder holds", "--to hf"])
    run(step, tmp_path / "tgi", "--to", "tgi", "--model", base, "--base-name", "me/merged")
    found = json.loads((tmp_path / "tgi/config.json").read_text())
    assert found["base_model_name_or_path"] == "me/merged"
    other = tiny.lm(seed=2, num_hidden_layers=1)
    small = tiny.write_folder(tmp_path / "small", other)
    fails(step, tmp_path / "x", "--to", "hf", "--model", small, parts=["model.layers.1", "none"])
    capsys.readouterr()
    run("--describe", step)
    lines = capsys.readouterr().out.splitlines()
    assert "metadata        step: 7" in lines
    assert 'metadata        validation: {"loss": 3.5, "head0/top1": 0.5}' in lines
    assert "the run trained its model too" in lines[-1]
    # Kept, as everything else is, on the way through another format.
    run(step, tmp_path / "ours", "--to", "medusa-jax", "--model", base)
    assert open_heads(tmp_path / "ours").metadata["metrics"] == METRICS
    same_heads(tmp_path / "ours", *heads)
