"""LoRA: starts as the identity, merges exactly, trains nothing but itself, shards as its weights do."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import PartitionSpec

from medusa_jax import UserError, backbone, heads, linear, quantize, sharding
from medusa_jax.config import MedusaConfig, read_config
from medusa_jax.weights import hf
from medusa_jax.weights import params as loading
from train import lora

F32 = jnp.dtype("float32")
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "hidden_size": 64}
FAMILIES = [{"model_type": "qwen2"}, {"tie_word_embeddings": True}]  # with biases and untied, and tied
T = 10


def model(**fields):
    """A configuration, and parameters whose logits are of the order of 1."""
    config = tiny.config(**SIZES, **fields)
    made = jax.jit(lambda: backbone.init(config, jax.random.key(0), F32))()
    return config, jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim == 2 else leaf, made)


def trained(params, config, **options):
    """Adapters as training might leave them: B is no longer zero."""
    adapters = lora.init(params, config, jax.random.key(1), **({"rank": 4, "dropout": 0.0} | options))
    return jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), adapters
    )


def texts(config, rows=2):
    return jax.random.randint(jax.random.key(2), (rows, T), 0, config.vocab_size)


def logits(params, config, tokens, **options):
    positions = jnp.broadcast_to(jnp.arange(T)[None], tokens.shape)
    hidden, _ = backbone.forward(params, config, tokens, positions, jnp.tri(T, dtype=bool), None, **options)
    terms = backbone.unembed_terms(params, config, hidden, options.get("dropout"))
    return sum(linear.project(x, table, F32) for x, table in terms)


run = jax.jit(logits, static_argnames=("config", "remat"))


def linears(config):
    """The paths of all matrices of the layers."""
    return [name[: -len(".weight")] for name in loading.expected_shapes(config) if "_proj.weight" in name]


@pytest.mark.parametrize("fields", FAMILIES)
def test_fresh_adapters_change_nothing(fields):
    config, params = model(**fields)
    adapters = lora.init(params, config, jax.random.key(1))
    held = loading.flatten(adapters.params)
    assert set(held) == {f"{name}.lora_{x}" for name in [*linears(config), "lm_head"] for x in "ab"}
    assert all(leaf.dtype == F32 for leaf in held.values())
    a = held["model.layers.1.mlp.down_proj.lora_a"]
    assert a.shape == (32, 96)
    assert held["lm_head.lora_b"].shape == (config.vocab_size, 32)
    assert 0.99 / 96**0.5 < jnp.abs(a).max() < 1 / 96**0.5  # uniform up to 1 / sqrt(in)
    assert not np.array_equal(a, held["model.layers.0.mlp.down_proj.lora_a"])
    tokens = texts(config)
    attached = lora.attach(params, adapters, F32)
    np.testing.assert_array_equal(run(attached, config, tokens), run(params, config, tokens))
    small = quantize.quantize(params)
    np.testing.assert_array_equal(
        run(lora.attach(small, adapters, F32), config, tokens), run(small, config, tokens)
    )
    shapes = jax.eval_shape(
        lambda: lora.init(backbone.abstract_params(config, F32), config, jax.random.key(1))
    )
    assert jax.tree.structure(shapes) == jax.tree.structure(adapters)


@pytest.mark.parametrize("fields", FAMILIES)
@pytest.mark.parametrize("int8", [False, True])
def test_merged_adapters_compute_the_same(fields, int8):
    config, params = model(**fields)
    adapters = trained(params, config, alpha=6)
    base = quantize.quantize(params) if int8 else params
    tokens = texts(config)
    attached = lora.attach(base, adapters, F32)
    expected = run(attached, config, tokens)
    assert jnp.abs(expected - run(base, config, tokens)).max() > 0.3
    merged, untied = lora.merge(base, adapters, config)
    assert not untied.tie_word_embeddings
    np.testing.assert_allclose(run(merged, untied, tokens), expected, atol=1e-5)
    np.testing.assert_allclose(
        backbone.unembed(attached, config, jnp.ones((1, 64))),
        backbone.unembed(merged, untied, jnp.ones((1, 64))),
        atol=1e-5,
    )
    # W + (alpha / r) B A, by NumPy, of one layer.
    wide = loading.flatten(quantize.dequantize(base) if int8 else base)
    name = "model.layers.1.self_attn.o_proj"
    held = {x: np.asarray(loading.flatten(adapters.params)[f"{name}.lora_{x}"], np.float64) for x in "ab"}
    weight = np.asarray(wide[f"{name}.weight"], np.float64) + 6 / 4 * held["b"] @ held["a"]
    found = loading.flatten(merged)
    np.testing.assert_allclose(found[f"{name}.weight"], weight, atol=1e-6)
    # Embeddings, norms and biases are what they were.
    for other in wide:
        if not other.startswith(("lm_head", *linears(config))) or other.endswith("bias"):
            np.testing.assert_array_equal(found[other], wide[other])


def test_adapters_of_some_layers_leave_the_others():
    config, params = model(tie_word_embeddings=True)
    adapters = trained(params, config, targets=("q_proj", "down_proj"))
    merged, same = lora.merge(params, adapters, config)
    assert same is config
    before = loading.flatten(params)
    changed = [
        name.split(".")[-2] for name, leaf in loading.flatten(merged).items() if leaf is not before[name]
    ]
    assert sorted(changed) == ["down_proj"] * 2 + ["q_proj"] * 2
    tokens = texts(config)
    np.testing.assert_allclose(
        run(merged, config, tokens), run(lora.attach(params, adapters, F32), config, tokens), atol=1e-5
    )


def test_a_merged_model_is_a_folder_that_reads_back_equal(tmp_path):
    config, params = model(tie_word_embeddings=True)
    merged, untied = lora.merge(quantize.quantize(params), trained(params, config), config)
    hf.save_pretrained(tmp_path / "model", merged, untied, tiny.tokenizer(), {"eos_token_id": 2})
    found = read_config(tmp_path / "model")
    assert found == untied
    again = loading.load_params(hf.SafetensorsCheckpoint(tmp_path / "model"), found, "float32")
    assert jax.tree.structure(again) == jax.tree.structure(merged)
    jax.tree.map(np.testing.assert_array_equal, again, merged)


def test_half_precision_keeps_float32_masters():
    config, params = model(tie_word_embeddings=True)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    adapters = trained(half, config)
    attached = lora.attach(half, adapters, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(attached)} == {jnp.dtype(jnp.bfloat16)}
    merged, untied = lora.merge(half, adapters, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(jnp.bfloat16)}
    exact, _ = lora.merge(jax.tree.map(lambda leaf: leaf.astype(F32), half), adapters, config)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), merged, exact)
    tokens = texts(config)
    expected = run(exact, untied, tokens)
    for found in (run(merged, untied, tokens), run(attached, config, tokens)):
        assert jnp.linalg.norm(found - expected) < 0.03 * jnp.linalg.norm(expected)


# ------------------------------------------------------------------------------------------- training


def loss(adapters, params, config, tokens, key=None, remat=False, mesh=None):
    """KL to the model without its adapters, and a cross-entropy; and the logits."""
    params = sharding.gathered_embedding(params, config, mesh)
    taught = jax.nn.log_softmax(logits(params, config, tokens))
    attached = lora.attach(params, adapters, F32)
    found = logits(attached, config, tokens, remat=remat, dropout=key)
    log = jax.nn.log_softmax(found)
    return jnp.mean(jnp.sum(jnp.exp(taught) * (taught - log), axis=-1)) - jnp.mean(log[..., 7]), found


gradients = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames=("config", "remat", "mesh"))


def test_gradients_reach_every_adapter_and_descend_over_an_int8_model():
    config, params = model(tie_word_embeddings=True, num_hidden_layers=1)
    small, tokens = quantize.quantize(params), texts(config)
    fresh = lora.init(params, config, jax.random.key(1), rank=4)
    _, into = gradients(fresh, small, config, tokens)
    for name, leaf in loading.flatten(into.params).items():  # A has none while B is zero
        assert jnp.any(leaf != 0) == name.endswith("lora_b"), name
    adapters = trained(params, config)
    _, into = gradients(adapters, small, config, tokens)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(into))
    # The gradient is that of the merged model, by finite differences in a random direction.
    keys = jax.random.split(jax.random.key(5), len(jax.tree.leaves(into)))
    way = jax.tree.unflatten(
        jax.tree.structure(into),
        [jax.random.normal(k, x.shape) for k, x in zip(keys, jax.tree.leaves(into), strict=True)],
    )
    slope = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(into), jax.tree.leaves(way), strict=True))

    def at(h):
        moved = jax.tree.map(lambda a, w: a + h * w, adapters, way)
        return gradients(moved, small, config, tokens)[0][0]

    np.testing.assert_allclose((at(1e-3) - at(-1e-3)) / 2e-3, slope, rtol=0.02)


def test_recomputing_layers_changes_no_gradient():
    config, params = model(num_hidden_layers=1)
    adapters, tokens, key = trained(params, config, dropout=0.3), texts(config), jax.random.key(3)
    kept, again = (gradients(adapters, params, config, tokens, key, remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), again, kept)

    def saved(remat):
        forward = lambda adapters: logits(lora.attach(params, adapters, F32), config, tokens, remat=remat)  # noqa: E731
        shapes = jax.eval_shape(lambda: jax.vjp(forward, adapters)[1])
        return sum(leaf.shape == (2, T, 96) for leaf in jax.tree.leaves(shapes))

    assert saved(False) > 0
    assert saved(True) == 0  # nothing from inside an MLP


def test_dropout_only_with_a_key_and_another_one_in_every_layer():
    config, params = model(num_hidden_layers=1)
    adapters, tokens = trained(params, config, dropout=0.25), texts(config)
    attached = lora.attach(params, adapters, F32)
    sure = lora.attach(params, adapters.replace(dropout=0.0), F32)
    plain = run(attached, config, tokens)
    np.testing.assert_array_equal(run(sure, config, tokens, dropout=jax.random.key(1)), plain)
    one, same, other = (run(attached, config, tokens, dropout=jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert jnp.abs(one - plain).max() > 0.01
    assert jnp.abs(one - other).max() > 0.01
    # What is dropped: a quarter of the inputs, and the others make up for it.
    leaves = {"lora_a": jnp.eye(256), "lora_b": jnp.eye(256), "lora_dropout": jnp.float32(0.25)}
    x = jnp.ones((16, 256))
    low, _ = linear.low_rank(x, leaves, jax.random.key(0))
    np.testing.assert_allclose(np.unique(low), [0, 4 / 3], rtol=1e-6)
    assert abs(float(jnp.mean(low == 0)) - 0.25) < 0.03
    np.testing.assert_array_equal(linear.low_rank(x, leaves, None)[0], x)
    # Two layers that read the same input; with equal adapters only their dropout can tell them apart.
    weight = {"weight": jnp.zeros((256, 256))} | leaves
    variables = {"params": {"q": weight, "k": weight}}
    q, k = jax.jit(Two().apply)(variables, x, rngs={"dropout": jax.random.key(0)})
    assert 0.5 < float(jnp.mean((q == 0) == (k == 0))) < 0.75  # 0.625 where they are independent


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return [linear.Linear(256, False, F32, name=name)(x) for name in "qk"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0, expected an integer from 1"),
        ({"alpha": 0}, "alpha is 0, expected a number above 0"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"dropout": 1.0}, "dropout is 1.0, expected a number from 0 to below 1"),
        ({"targets": "q"}, "target 'q', expected 'all' or some of q_proj, k_proj"),
        ({"targets": ()}, "target empty"),
    ],
)
def test_bad_options_are_refused(options, message):
    config = tiny.config()
    with pytest.raises(UserError, match=message):
        lora.init(backbone.abstract_params(config, F32), config, jax.random.key(0), **options)


# ------------------------------------------------------------------------------------------- sharding


def test_sharded_adapters_over_int8_equal_unsharded():
    config, params = model(num_hidden_layers=1)
    small, tokens = quantize.quantize(params), texts(config, rows=4)
    adapters = trained(params, config)
    (value, seen), into = gradients(adapters, small, config, tokens)
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    placed = sharding.place(small, sharding.param_shardings(small, config, mesh))
    held = sharding.place(adapters, sharding.matching_shardings(adapters, config, mesh))
    layer = placed["model"]["layers_0"]
    assert layer["mlp"]["gate_proj"]["weight"].addressable_shards[0].data.shape == (48, 32)
    assert layer["mlp"]["gate_proj"]["low"].addressable_shards[0].data.shape == (6, 32)
    assert layer["mlp"]["gate_proj"]["scale"].sharding.spec == PartitionSpec("tensor", None)  # one group
    assert layer["self_attn"]["o_proj"]["scale"].sharding.spec == PartitionSpec("fsdp", None)
    down = held.params["model"]["layers_0"]["mlp"]["down_proj"]
    assert down["lora_a"].sharding.spec == PartitionSpec(None, "tensor")
    assert down["lora_b"].sharding.spec == PartitionSpec("fsdp", None)
    rows = jax.device_put(tokens, sharding.batch_sharding(mesh))
    assert rows.addressable_shards[0].data.shape == (1, T)
    (again, found), others = gradients(held, placed, config, rows, mesh=mesh)
    np.testing.assert_allclose(found, seen, atol=1e-5)
    np.testing.assert_allclose(again, value, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), others, into)
    # Merging on the mesh: one of the matrices, to where it was.
    one, few = (each.replace(params={"lm_head": each.params["lm_head"]}) for each in (adapters, held))
    split = sharding.place(params, sharding.param_shardings(params, config, mesh))
    merged, alone = (lora.merge(*each, config)[0] for each in ((split, few), (params, one)))
    np.testing.assert_allclose(merged["lm_head"]["weight"], alone["lm_head"]["weight"], atol=1e-6)
    assert merged["lm_head"]["weight"].addressable_shards[0].data.shape == (config.vocab_size // 2, 32)


def test_training_gathers_weights_and_no_activations():
    """Left to itself XLA gathers rows over fsdp and adds up partial products of each layer."""
    config = tiny.config(**SIZES, num_hidden_layers=1)
    mesh = sharding.make_mesh("data=2,fsdp=4")
    shapes = backbone.abstract_params(config, F32)
    specs = sharding.param_shardings(shapes, config, mesh)
    tokens = jax.ShapeDtypeStruct((8, T), jnp.int32, sharding=sharding.batch_sharding(mesh))

    def grow(params, tokens):
        params = sharding.gathered_embedding(params, config, mesh)
        return jnp.mean(logits(params, config, tokens, remat=True) ** 2)

    grad = jax.jit(jax.grad(grow), out_shardings=specs)
    text = grad.lower(sharding.with_shardings(shapes, specs), tokens).compile().as_text()
    gathered = re.findall(r"= f32\[([0-9,]*)\]\S* all-gather\(", text)
    sizes = {int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)}
    assert {int(np.prod([int(n) for n in dims.split(",")])) for dims in gathered} <= sizes
    assert len(gathered) > 8


@pytest.mark.parametrize("fields", FAMILIES)
def test_every_leaf_of_a_training_state_lies_as_its_parameter(fields):
    config, params = model(**fields)
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    adapters = lora.init(params, config, jax.random.key(0), rank=4)
    head_config = MedusaConfig(num_heads=2, num_layers=1, hidden_size=64, vocab_size=config.vocab_size)
    layers = heads.abstract(head_config, F32).layers
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {
        "frozen": {"params": quantize.quantize(params), "table": params["model"]["embed_tokens"]["weight"]},
        "attached": lora.attach(params, adapters, F32),
        "full": jax.eval_shape(optimizer.init, params),
        "lora": jax.eval_shape(optimizer.init, adapters),
        "heads": jax.eval_shape(optimizer.init, layers),
        "step": jnp.int32(0),
    }
    found = {
        sharding.path_string(path): one.spec
        for path, one in jax.tree_util.tree_leaves_with_path(sharding.matching_shardings(state, config, mesh))
    }
    assert len(found) == len(jax.tree.leaves(state))
    q = "model/layers_0/self_attn/q_proj"
    assert found[f"full/1/0/mu/{q}/weight"] == PartitionSpec("tensor", "fsdp")
    assert found[f"lora/1/0/nu/params/{q}/lora_a"] == PartitionSpec(None, "fsdp")
    assert found[f"lora/1/0/nu/params/{q}/lora_b"] == PartitionSpec("tensor", None)
    assert found["lora/1/0/mu/params/lm_head/lora_b"] == PartitionSpec("tensor", None)
    assert found["heads/1/0/mu/weight"] == PartitionSpec(None, None, "fsdp", "tensor")
    assert found["frozen/table"] == PartitionSpec("tensor", "fsdp")
    assert found[f"frozen/params/{q}/low"] == PartitionSpec("tensor", "fsdp")
    assert found["lora/1/0/count"] == found["step"] == found[f"attached/{q}/lora_dropout"] == PartitionSpec()
    assert sharding.matching_shardings(state, config, None) is None


def test_a_leaf_of_training_that_no_rule_or_two_match_is_an_error(monkeypatch):
    config, mesh = tiny.config(), sharding.make_mesh({})
    with pytest.raises(ValueError, match="0 rules match the parameter path 'mu/model/norm/extra'"):
        sharding.matching_shardings({"mu": {"model": {"norm": {"extra": jnp.ones(3)}}}}, config, mesh)
    monkeypatch.setattr(sharding, "RULES", (*sharding.RULES, (r"model/n.*", (None,))))
    with pytest.raises(ValueError, match="2 rules match the parameter path 'model/norm/weight'"):
        sharding.matching_shardings({"mu": {"model": {"norm": {"weight": jnp.ones(3)}}}}, config, mesh)


def test_rows_of_microbatches_are_the_last_leading_dimension():
    mesh = sharding.make_mesh("data=2,fsdp=2")
    batch = jax.device_put(np.zeros((3, 8, 5)), sharding.batch_sharding(mesh, 2))
    assert batch.addressable_shards[0].data.shape == (3, 2, 5)
