"""A product's forms: weights turned round for a CPU that decodes; what is dropped of its input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax import MedusaLM, backbone, linear
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


def test_a_model_that_guesses_on_a_cpu_is_turned_and_written_as_it_was(tmp_path):
    folder = tiny.write_folder(tmp_path / "model", tiny.lm())
    lm = MedusaLM.load(folder, lookup="on")
    assert "kernel" in lm.params["model"]["layers_0"]["self_attn"]["q_proj"]
    plain = lm.plainly()
    jax.tree.map(np.testing.assert_array_equal, plain.params, MedusaLM.load(folder).params)
    assert plain.plan.tree.nodes == 1
    lm.save_pretrained(tmp_path / "copy")
    again = MedusaLM.load(tmp_path / "copy", lookup="on")
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    stored = linear.restored(lm.params)["model"]["layers_0"]["mlp"]["up_proj"]["weight"]
    assert stored.shape == (lm.config.intermediate_size, lm.config.hidden_size)


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
