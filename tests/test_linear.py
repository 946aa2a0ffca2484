"""A product's forms: weights turned round for a CPU that decodes; what is dropped of its input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax import MedusaLM, SamplingParams, backbone, linear
from medusa_jax.weights.params import abstract_params
from tests import tiny


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 5), (2, 64)])
def test_a_turned_weight_gives_the_product_of_the_weight(shape):
    x = jax.random.normal(jax.random.key(0), (*shape, 24))
    weight = jax.random.normal(jax.random.key(1), (40, 24))
    found = jax.jit(linear.project_turned)(x, weight.T)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(weight).T, rtol=0, atol=1e-5)


def test_turning_changes_the_matrices_of_layers_alone_and_comes_back_bit_for_bit():
    config = tiny.config()
    params = backbone.init(config, jax.random.key(2), jnp.float32)
    before = jax.tree.map(np.array, params)
    turned = linear.turned(params)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(turned)}
    assert all(("_proj" in name) == ("kernel" in name) for name in names)
    assert "weight" not in params["model"]["layers_0"]["mlp"]["up_proj"]  # given up, not held twice
    back = linear.restored(turned)
    jax.tree.map(np.testing.assert_array_equal, back, before)
    assert "kernel" in turned["model"]["layers_0"]["mlp"]["up_proj"]


def test_shapes_turn_as_arrays_do():
    config = tiny.config()
    arrays = linear.turned(backbone.init(config, jax.random.key(2), jnp.float32))
    shapes = linear.turned(abstract_params(config, jnp.float32))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arrays) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )


def test_weights_are_turned_for_trees_alone_and_written_as_they_were(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", tiny.lm())
    stored = MedusaLM.load(folder).params
    lm = MedusaLM.load(folder, tree="2x2", lookup="on")
    assert linear.is_turned(lm.params)  # at once, while nothing else holds the weights
    guessed = lm.generate(["abc abc abc"], SamplingParams(max_new_tokens=12))[0]
    assert "kernel" in lm.params["model"]["layers_0"]["self_attn"]["q_proj"]
    lm.save_pretrained(tmp_path / "copy")
    jax.tree.map(np.testing.assert_array_equal, MedusaLM.load(tmp_path / "copy").params, stored)
    plain = lm.plainly()
    jax.tree.map(np.testing.assert_array_equal, plain.params, stored)
    turned = lm.engine
    lm.use(None)
    answer = lm.generate(["abc abc abc"], SamplingParams(max_new_tokens=12))[0]
    assert answer.token_ids == guessed.token_ids
    assert answer.token_ids == plain.generate(["abc abc abc"], SamplingParams(max_new_tokens=12))[0].token_ids
    # Plain decoding is the same programs over the same weights, whichever model is asked.
    jax.tree.map(np.testing.assert_array_equal, lm.params, stored)
    assert lm.programs is plain.programs
    # What was made before still holds its own.
    assert "kernel" in turned.params["model"]["layers_0"]["mlp"]["up_proj"]
    assert turned.programs is not lm.programs


def test_programs_are_compiled_for_turned_weights_while_those_are_read(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", tiny.lm())
    compiled = []

    def expect(lm):
        def work():
            lm.compile_for([lm.job(lm.encode("abc"), SamplingParams(max_new_tokens=4))])
            compiled.append((lm.programs, set(lm.programs.compiled)))

        return work

    lm = MedusaLM.load(folder, tree="2x2", lookup="on", expect=expect)
    lm.generate(["abc"], SamplingParams(max_new_tokens=4))
    ((programs, keys),) = compiled
    assert linear.is_turned(programs.params)
    assert linear.is_turned(lm.params)
    assert lm.programs is programs
    assert set(programs.compiled) == keys


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_dropout_drops_its_share_and_is_independent_of_place_and_key(rate):
    x = jnp.ones((4, 256, 256))
    keys = [jax.random.fold_in(jax.random.key(7), step) for step in range(2)]
    kept = np.array([linear.dropped(x, rate, key) != 0 for key in keys], np.float64)
    n = x.size
    # Six standard deviations of a share, and of a correlation of independent samples.
    assert abs(kept[0].mean() - (1 - rate)) < 6 * math.sqrt(rate * (1 - rate) / n)
    apart = [(kept[0], kept[1]), (kept[0, :, :, 1:], kept[0, :, :, :-1]), (kept[0, :, 1:], kept[0, :, :-1])]
    apart += [(kept[0, 1:], kept[0, :-1]), (kept[0, :, :, 2:], kept[0, :, :, :-2])]
    for one, other in apart:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 6 / math.sqrt(one.size)
    np.testing.assert_allclose(linear.dropped(x, rate, keys[0]).max(), 1 / (1 - rate), rtol=1e-6)
    np.testing.assert_array_equal(linear.dropped(x, 0.0, keys[0]), x)
