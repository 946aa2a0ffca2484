"""Int8 weights: the error they may have, the bytes they may take, and what the backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from medusa_jax import backbone, linear, quantize
from medusa_jax.weights import checkpoints
from medusa_jax.weights import params as loading

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8, "head_dim": 8}


def logits_of(config, tokens):
    """A compiled function from parameters to the logits of a text."""
    T = tokens.shape[1]

    @jax.jit
    def logits(params):
        positions = jnp.broadcast_to(jnp.arange(T)[None], tokens.shape)
        hidden, _ = backbone.forward(params, config, tokens, positions, jnp.tri(T, dtype=bool), None)
        return backbone.unembed(params, config, hidden)

    return logits


def relative(found, expected):
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


@pytest.mark.parametrize(
    ("width", "group", "dtype"),
    [(32, 32, "bfloat16"), (61, 61, "float32"), (144, 72, "float32"), (192, 64, "bfloat16")],
)
def test_no_weight_is_further_than_a_step_from_its_code(width, group, dtype):
    rows = np.random.default_rng(0).normal(size=(5, width)) * np.exp(np.arange(5.0))[:, None]
    rows[1], rows[2, 0] = 0, 1000
    weight = jnp.asarray(rows, dtype)
    leaves = quantize.quantize({"weight": weight})
    types = {"weight": jnp.int8, "scale": jnp.bfloat16, "low": jnp.uint8}
    assert {name: leaf.dtype for name, leaf in leaves.items()} == types
    assert leaves["scale"].shape == (5, width // group)
    groups = np.asarray(weight, np.float64).reshape(5, -1, group)
    found = jax.jit(lambda leaves: quantize.widened(leaves, jnp.float32))(leaves)
    error = np.asarray(found).reshape(groups.shape) - groups
    # Half a step of 1/255 of the largest, and what rounding that to bfloat16 moves.
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    assert (np.abs(error) <= largest * (0.5 / 255 + 2**-8)).all()
    assert np.sqrt((error[0] ** 2).mean()) < largest[0].max() / 255 * 0.45  # evenly spread errors: 0.29
    assert not error[1].any()


@pytest.mark.parametrize("fields", [{"model_type": "qwen2"}, {"tie_word_embeddings": True}])
def test_logits_stay_within_two_percent_at_less_than_a_third_of_the_bytes(fields):
    config = tiny.config(**SIZES, **fields)
    params = backbone.init(config, jax.random.key(0), jnp.dtype("float32"))
    small = quantize.quantize(params)
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, config.vocab_size)
    logits = logits_of(config, tokens)
    assert 0 < relative(logits(small), logits(params)) <= 0.01
    assert quantize.bytes_of(small) <= 0.3 * quantize.bytes_of(params)
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert quantize.bytes_of(small) < sum(leaf.size for leaf in matrices) * 1.3  # every one of them
    shapes = jax.eval_shape(quantize.quantize, backbone.abstract_params(config, jnp.float32))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), small
    )
    for name, leaf in loading.flatten(params).items():  # norms and biases
        if leaf.ndim == 1:
            assert loading.flatten(small)[name] is leaf
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, quantize.quantize(small), small))
    # The same model, widened once.
    wide = quantize.dequantize(small)
    assert jax.tree.structure(wide) == jax.tree.structure(params)
    np.testing.assert_allclose(logits(small), logits(wide), atol=1e-5)
    np.testing.assert_array_equal(backbone.unembedding_table(small), backbone.unembedding_table(wide))
    some = jnp.array([[3, -1, 10**6]])
    np.testing.assert_array_equal(backbone.embed(small, config, some), backbone.embed(wide, config, some))


def test_the_backward_pass_keeps_the_int8_weight_alone():
    """Kept as float32, the frozen weights of all layers would be the model that int8 was to avoid."""
    layer = linear.Linear(24, False, jnp.dtype("float32"))
    x = jax.random.normal(jax.random.key(0), (3, 64))
    params = layer.init(jax.random.key(1), x)["params"]
    small = quantize.quantize(params)

    def kept(params):
        out, backward = jax.vjp(lambda x: layer.apply({"params": params}, x), x)
        shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(backward)]
        return shapes, backward(jnp.ones_like(out))[0]

    assert ((24, 64), jnp.float32) in kept(params)[0]
    shapes, gradient = kept(small)
    assert ((24, 64), jnp.int8) in shapes
    assert not [shape for shape, dtype in shapes if dtype == jnp.float32 and np.prod(shape) >= 24 * 64]
    expected = np.ones((3, 24)) @ np.asarray(quantize.widened(small, jnp.float32))
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.default_model
def test_the_default_model_in_int8():
    found = checkpoints.open_model(None)
    params = loading.load_params(found.source, found.config, "float32")
    tokenizer = found.tokenizer()
    chat = [
        {"role": "user", "content": "What is a leap year, and why do we have them?"},
        {
            "role": "assistant",
            "content": "A leap year has 366 days. It keeps the calendar and the sun in step.",
        },
    ]
    tokens = jnp.array([tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"]])
    logits = logits_of(found.config, tokens)
    expected = logits(params)
    small = jax.jit(quantize.quantize)(params)
    assert quantize.bytes_of(small) <= 0.3 * quantize.bytes_of(params)
    assert relative(logits(small), expected) <= 0.02
