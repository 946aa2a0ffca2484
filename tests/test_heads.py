"""Heads: fresh ones repeat the base model, all weights count and only where they belong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from medusa_jax import UserError, backbone, heads
from medusa_jax.config import MedusaConfig, ModelConfig

V, D, M, B = 40, 16, 3, 5
MAP = jnp.array([7, 0, 39, 3, 21, 4, 30, 11], jnp.int32)


def base_model(dtype, *, tied=True):
    """A random model, its unembedding and some hidden states."""
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": V,
            "hidden_size": D,
            "intermediate_size": D,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "tie_word_embeddings": tied,
        }
    )
    params = backbone.init(config, jax.random.key(0), jnp.dtype(dtype))
    hidden = jax.random.normal(jax.random.key(1), (B, D)).astype(dtype)
    return config, params, backbone.unembedding_table(params), hidden


def head_config(layers=1, *, own=False, conditioned=False, draft=False):
    return MedusaConfig(
        num_heads=M,
        num_layers=layers,
        hidden_size=D,
        vocab_size=V,
        own_unembedding=own,
        conditioned=conditioned,
        draft_vocab_size=len(MAP) if draft else None,
    )


def made_heads(config, table, dtype, *, seed=None):
    """Fresh heads, or random ones."""
    params = heads.init(config, table, dtype, MAP if config.draft_vocab_size else None)
    if seed is None:
        return params
    rng = np.random.default_rng(seed)
    noisy = jax.tree.map(
        lambda x: x + jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), params.layers
    )
    return dataclasses.replace(params, layers=noisy)


def some_path(seed=2, lead=(B,), dtype="float32"):
    return (0.05 * jax.random.normal(jax.random.key(seed), (*lead, M, D))).astype(dtype)


def scores(params, config, hidden, path, table):
    """[M, B, V']: all heads."""
    return jax.jit(
        lambda params: jnp.stack(
            [
                heads.logits(params, config, heads.state(params, config, hidden, m, path), m, table)
                for m in range(config.num_heads)
            ]
        )
    )(params)


KINDS = [
    {"own": own, "conditioned": conditioned, "draft": draft}
    for own in (False, True)
    for conditioned in (False, True)
    for draft in (False, True)
]


@pytest.mark.parametrize(("layers", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "float32")])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "+".join(k for k in kind if kind[k]) or "shared")
def test_fresh_heads_repeat_the_base_prediction(kind, layers, dtype):
    model_config, model, table, hidden = base_model(dtype, tied=layers != 1)
    config = head_config(layers, **kind)
    params = made_heads(config, table, dtype)
    base = backbone.unembed(model, model_config, hidden)
    assert base.dtype == jnp.float32
    for m in range(M):
        state = heads.state(params, config, hidden, m, some_path(dtype=dtype))
        np.testing.assert_array_equal(state, hidden)
        got = heads.logits(params, config, state, m, table)
        assert got.dtype == jnp.float32
        if kind["draft"]:
            # The same numbers, but a product with fewer rows may add them up in another order.
            np.testing.assert_allclose(got, np.asarray(base)[:, MAP], rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(got, base)


@pytest.mark.parametrize(("layers", "dtype"), [(0, "float32"), (2, "bfloat16")])
def test_arrays_are_stacked(layers, dtype):
    _, _, table, _ = base_model(dtype)
    params = made_heads(head_config(layers, own=True, conditioned=True, draft=True), table, dtype)
    expected = {
        "weight": (M, layers, D, D),
        "bias": (M, layers, D),
        "unembedding": (M, len(MAP), D),
        "mixer_0_weight": (D, 2 * D),
        "mixer_1_weight": (D, 3 * D),
        "mixer_2_weight": (D, 4 * D),
        "mixer_0_bias": (D,),
        "mixer_1_bias": (D,),
        "mixer_2_bias": (D,),
    }
    assert {name: leaf.shape for name, leaf in params.layers.items()} == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(params.layers)} == {jnp.dtype(dtype)}
    plain = made_heads(head_config(layers), table, dtype)
    assert set(plain.layers) == {"weight", "bias"}
    assert plain.table is None
    assert plain.token_map is None


def test_own_unembeddings_start_as_copies_and_go_their_own_way():
    _, _, table, hidden = base_model("float32")
    for draft in (False, True):
        config = head_config(own=True, draft=draft)
        params = made_heads(config, table, "float32")
        rows = table[MAP] if draft else table
        np.testing.assert_array_equal(params.layers["unembedding"], np.stack([rows] * M))
        assert params.table is None
        before = scores(params, config, hidden, some_path(), table)
        other = dataclasses.replace(
            params, layers=params.layers | {"unembedding": params.layers["unembedding"].at[1].multiply(2)}
        )
        after = scores(other, config, hidden, some_path(), 5 * table)  # the model's table is not read
        np.testing.assert_array_equal(after[1], 2 * before[1])
        np.testing.assert_array_equal(after[::2], before[::2])


def test_heads_with_a_draft_vocabulary_score_its_tokens():
    _, _, table, hidden = base_model("float32")
    small = head_config(2, draft=True)
    params = made_heads(small, table, "float32", seed=3)
    np.testing.assert_array_equal(params.table, table[MAP])
    whole = dataclasses.replace(params, token_map=None, table=None)
    few = scores(params, small, hidden, some_path(), table)
    every = scores(whole, head_config(2), hidden, some_path(), table)
    np.testing.assert_allclose(few, every[:, :, MAP], rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [None, 7, 9])
def test_a_draft_vocabulary_of_another_size_than_the_configuration_s_is_refused(length):
    config = MedusaConfig(2, 1, 16, 32, draft_vocab_size=8)
    token_map = None if length is None else jnp.arange(length, dtype=jnp.int32)
    with pytest.raises(ValueError, match="the draft vocabulary is 8"):
        heads.init(config, jnp.zeros((32, 16)), jnp.float32, token_map)


@pytest.mark.parametrize(("layers", "conditioned"), [(1, False), (3, True)])
def test_each_array_belongs_to_one_head(layers, conditioned):
    _, _, table, hidden = base_model("float32")
    config = head_config(layers, own=True, conditioned=conditioned)
    params = made_heads(config, table, "float32", seed=4)
    program = jax.jit(
        lambda params: jnp.stack(
            [
                heads.logits(params, config, heads.state(params, config, hidden, m, some_path()), m, table)
                for m in range(M)
            ]
        )
    )
    before = np.asarray(program(params))
    for m in range(M):
        places = [(name, (m, layer)) for name in ("weight", "bias") for layer in range(layers)]
        places += [("unembedding", (m,))]
        places += [(f"mixer_{m}_{part}", ()) for part in ("weight", "bias") if conditioned]
        for name, at in places:
            changed = params.layers | {name: params.layers[name].at[at].add(0.5)}
            after = np.asarray(program(dataclasses.replace(params, layers=changed)))
            moved = np.abs(after - before).max(axis=(1, 2))
            assert moved[m] > 1e-3, (name, at)
            assert np.delete(moved, m).max() == 0, (name, at)


def silu(x):
    return x / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("conditioned", [False, True])
def test_states_follow_the_formula(conditioned):
    _, _, table, hidden = base_model("float32")
    config = head_config(2, conditioned=conditioned)
    params = made_heads(config, table, "float32", seed=5)
    layers = jax.tree.map(lambda x: np.asarray(x, np.float64), params.layers)
    nodes = 4
    spread = jnp.broadcast_to(hidden[:, None], (B, nodes, D))
    path = some_path(lead=(B, nodes))
    h, e = np.asarray(spread, np.float64), np.asarray(path, np.float64)
    for m in range(M):
        z = h
        if conditioned:
            seen = np.concatenate([unit(h), *(unit(e[:, :, i]) for i in range(m + 1))], axis=-1)
            z = z + silu(seen @ layers[f"mixer_{m}_weight"].T + layers[f"mixer_{m}_bias"])
        for layer in range(2):
            z = z + silu(z @ layers["weight"][m, layer].T + layers["bias"][m, layer])
        got = heads.state(params, config, spread, m, path)
        np.testing.assert_allclose(got, z, rtol=1e-4, atol=1e-5)


def test_only_conditioned_heads_read_the_path_and_only_as_far_as_it_goes():
    _, _, table, hidden = base_model("float32")
    for conditioned in (False, True):
        config = head_config(conditioned=conditioned)
        params = made_heads(config, table, "float32", seed=6)
        before = scores(params, config, hidden, some_path(), table)
        for place in range(M):
            other = some_path().at[:, place].set(0.1)
            moved = np.abs(scores(params, config, hidden, other, table) - before).max(axis=(1, 2))
            np.testing.assert_array_equal(moved > 0, [conditioned and place <= m for m in range(M)])


def test_conditioned_heads_see_embeddings_of_any_scale():
    """The scale of the embedding table is the model's own affair; training should not hang on it."""
    _, _, table, hidden = base_model("float32")
    config = head_config(conditioned=True)
    params = made_heads(config, table, "float32", seed=7)
    one = scores(params, config, hidden, 10 * some_path(), table)
    two = scores(params, config, hidden, 1000 * some_path(), table)
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_heads", 0),
        ("num_heads", True),
        ("num_heads", 1.0),
        ("num_heads", None),
        ("num_layers", -1),
        ("num_layers", "1"),
        ("hidden_size", 0),
        ("vocab_size", 0),
        ("vocab_size", None),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", V + 1),
        ("draft_vocab_size", 2.5),
    ],
)
def test_bad_configurations_are_refused_by_name(name, value):
    good = {"num_heads": M, "num_layers": 0, "hidden_size": D, "vocab_size": V}
    MedusaConfig(**good)
    with pytest.raises(UserError, match=name):
        MedusaConfig(**(good | {name: value}))


def test_a_configuration_knows_how_many_tokens_are_scored():
    assert head_config().scored == V
    assert head_config(draft=True).scored == len(MAP)
    assert dataclasses.replace(head_config(), draft_vocab_size=V).scored == V


@pytest.mark.parametrize(
    "options",
    [{}, {"conditioned": True}, {"own_unembedding": True}, {"own_unembedding": True, "num_layers": 0}],
)
def test_heads_taken_apart_give_the_same(options):
    config = MedusaConfig(
        **({"num_heads": 2, "num_layers": 2, "hidden_size": 16, "vocab_size": 40} | options)
    )
    table = jax.random.normal(jax.random.key(0), (40, 16))
    made = heads.init(config, table, jnp.float32)
    layers = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), made.layers)
    whole = dataclasses.replace(made, layers=layers)
    apart = dataclasses.replace(made, layers=heads.taken_apart(layers))
    assert not [
        name for name, leaf in apart.layers.items() if leaf.ndim > 2 and leaf.size and "bias" not in name
    ]
    hidden, path = (
        jax.random.normal(jax.random.key(1), (3, 16)),
        jax.random.normal(jax.random.key(2), (3, 2, 16)),
    )
    for m in range(2):
        found, wanted = (
            heads.logits(one, config, heads.state(one, config, hidden, m, path), m, table)
            for one in (apart, whole)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    shapes = heads.taken_apart(jax.eval_shape(lambda: layers))
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(
        lambda leaf: leaf.shape, apart.layers
    )
