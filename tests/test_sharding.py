"""Sharded equals unsharded, the table of rules is total, and the collectives are those expected."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from medusa_jax import MedusaLM, SamplingParams, UserError, backbone, sharding
from medusa_jax.weights import params as loading

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "hidden_size": 64}
PROMPTS = ["Rain", "A leap year has one day more", "The quick brown fox", "x", "What is the answer?"]
PARAMS = [SamplingParams(max_new_tokens=14), SamplingParams(max_new_tokens=14, temperature=0.9, top_p=0.9)]


def sharded(lm, mesh):
    """The same model on a mesh, loaded through the loader from host arrays."""
    mesh = sharding.make_mesh(sharding.parse_mesh(mesh))
    shardings = sharding.param_shardings(lm.params, lm.config, mesh)
    params = jax.tree.map(jax.device_put, jax.device_get(lm.params), shardings)
    return MedusaLM(lm.config, params, lm.tokenizer, {"eos_token_id": list(lm.end_tokens)}, mesh=mesh)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "data=2,tensor=4"),
        ("llama", "data=8"),
        ("llama", "fsdp=2,tensor=2"),
        ("llama", "tensor=8"),
        ("qwen3", "data=2,tensor=2"),
    ],
)
def test_sharded_generation_equals_one_device(family, mesh):
    """tensor=8 does not divide the 4 K/V heads: attention is whole on every device, the rest is split."""
    lm = tiny.lm(model_type=family, **SIZES)
    other = sharded(lm, mesh)
    for params in PARAMS:
        alone = lm.generate(PROMPTS, params, raw=True, batch_size=2)
        spread = other.generate(PROMPTS, params, raw=True, batch_size=2)
        assert [one.token_ids for one in spread] == [one.token_ids for one in alone]
    assert "".join(other.stream("Rain", PARAMS[1], raw=True)) == "".join(
        lm.stream("Rain", PARAMS[1], raw=True)
    )


def test_loading_shards_every_tensor_by_the_table(tmp_path):
    lm = tiny.lm(**SIZES)
    folder = tiny.write_folder(tmp_path / "model", lm)
    loaded = MedusaLM.load(folder, mesh="data=2,tensor=4", dtype="float32")
    layer = loaded.params["model"]["layers_0"]
    assert layer["self_attn"]["q_proj"]["weight"].sharding.spec == PartitionSpec("tensor", "fsdp")
    assert layer["self_attn"]["q_proj"]["weight"].addressable_shards[0].data.shape == (16, 64)
    assert layer["mlp"]["down_proj"]["weight"].addressable_shards[0].data.shape == (64, 24)
    vocabulary = lm.config.vocab_size
    assert loaded.params["lm_head"]["weight"].addressable_shards[0].data.shape == (vocabulary // 4, 64)
    for mine, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(lm.params), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    done = loaded.generate(["Rain"], PARAMS[0], raw=True)
    assert done[0].token_ids == lm.generate(["Rain"], PARAMS[0], raw=True)[0].token_ids


def collectives(compiled):
    """How often each collective of at least 1 KB stands in a program's text (its loop body counts once)."""
    found = Counter()
    pattern = r"= \(?([a-z0-9]+)\[([0-9,]*)\][^=]*? (all-\w+|reduce-scatter|collective-permute)(?:-start)?\("
    for kind, dims, op in re.findall(pattern, compiled.as_text()):
        size = int(np.prod([int(d) for d in dims.split(",") if d])) * {"f32": 4, "s32": 4}.get(kind, 1)
        if size >= 1024:
            found[op] += 1
    return found


def test_a_tensor_parallel_step_reduces_twice_a_layer_and_gathers_no_weights():
    lm = sharded(tiny.lm(**(SIZES | {"hidden_size": 256})), "tensor=4")
    found = collectives(lm.programs.run(1, 128, lm.plan))
    assert found == {"all-reduce": 2 * lm.config.num_hidden_layers + 1}


def test_refilling_a_row_of_a_data_parallel_batch_gathers_no_cache():
    lm = sharded(tiny.lm(**SIZES), "data=4")
    assert not collectives(lm.programs.insert(4, 128))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_parameter_matches_exactly_one_rule(family):
    bias = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    config = tiny.config(model_type=family, tie_word_embeddings=False, **bias)
    mesh = sharding.make_mesh({"tensor": 2, "fsdp": 2})
    shapes = backbone.abstract_params(config, jnp.float32)
    specs = sharding.param_shardings(shapes, config, mesh)
    assert len(jax.tree.leaves(specs)) == len(jax.tree.leaves(shapes))
    assert jax.tree.structure(loading.abstract_params(config, jnp.float32)) == jax.tree.structure(shapes)
    assert jax.tree.map(lambda x: x.shape, loading.abstract_params(config, jnp.float32)) == jax.tree.map(
        lambda x: x.shape, shapes
    )


def test_a_path_without_a_rule_or_with_two_is_an_error(monkeypatch):
    config, mesh = tiny.config(), sharding.make_mesh({})
    with pytest.raises(ValueError, match="0 rules match the parameter path 'model/extra/weight'"):
        sharding.spec_for("model/extra/weight", (4,), config, mesh)
    monkeypatch.setattr(sharding, "RULES", (*sharding.RULES, (r"model/n.*", (None,))))
    with pytest.raises(ValueError, match="2 rules match the parameter path 'model/norm/weight'"):
        sharding.spec_for("model/norm/weight", (4,), config, mesh)


def test_sizes_that_do_not_divide_are_refused_by_name():
    config, mesh = tiny.config(intermediate_size=50), sharding.make_mesh({"tensor": 4})
    with pytest.raises(UserError, match=r"tensor=4 does not divide model.layers_0.mlp.(down|gate|up)_proj"):
        sharding.param_shardings(backbone.abstract_params(config, jnp.float32), config, mesh)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "expected AXIS=SIZE"),
        ("data=0", "expected AXIS=SIZE"),
        ("data=-1", "expected AXIS=SIZE"),
        ("model=2", "'model=2'"),
        ("data=2,data=2", "given twice"),
        ("", "expected AXIS=SIZE"),
        ("data=²", "expected AXIS=SIZE"),
        ("data=4294967296,tensor=4294967296", "size of axis 'data' is 4294967296"),
        ("data=" + "9" * 5000, "expected AXIS=SIZE"),
        ({"foo": 2}, "unknown axis 'foo'"),
        ({5: 2}, "unknown axis 5"),
        ({"data": 0}, "size of axis 'data' is 0"),
        ({"data": -1}, "size of axis 'data' is -1"),
        ({"data": "2"}, "size of axis 'data' is '2'"),
        ({"data": 2.0}, "size of axis 'data' is 2.0"),
        ({"data": True}, "size of axis 'data' is True"),
        ({"data": 10**5000}, "size of axis 'data' is a very large int"),
        (5, "mesh: 5, expected"),
        (["data"], "expected AXIS=SIZE"),
    ],
)
def test_bad_meshes_are_refused(text, message):
    for read in (sharding.parse_mesh, sharding.make_mesh, sharding.as_mesh):
        with pytest.raises(UserError, match=message):
            read(text)


def test_too_few_devices():
    hint = "; to try it on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=16"
    with pytest.raises(
        UserError, match=r"data=4,tensor=4 needs 16 devices, this machine has 8" + hint
    ) as caught:
        sharding.make_mesh({"data": 4, "tensor": np.int64(4)})
    assert str(caught.value).endswith("=16")
    with pytest.raises(UserError, match=r"needs 1099511627776 devices, this machine has 8$"):
        sharding.make_mesh("data=1048576,tensor=1048576")


def test_meshes_that_were_made_elsewhere():
    assert sharding.as_mesh(None) is None
    mesh = sharding.make_mesh({"tensor": 2})
    assert sharding.as_mesh(mesh) is mesh
    other = jax.make_mesh((2,), ("x",))
    config = tiny.config()
    for use in (
        lambda: sharding.as_mesh(other),
        lambda: sharding.param_shardings(backbone.abstract_params(config, jnp.float32), config, other),
    ):
        with pytest.raises(UserError, match=r"no axis 'data' \(its axes: x\), expected data, fsdp, tensor"):
            use()


@pytest.mark.default_model
def test_the_default_model_gives_the_same_ids_on_every_mesh():
    """3 K/V heads: tensor=3 splits them; 2 and 4 do not divide them and keep attention whole."""
    params = SamplingParams(max_new_tokens=24)
    prompt = ["What is a leap year?"]
    expected = MedusaLM.load(dtype="float32").generate(prompt, params)[0].token_ids
    for mesh in ("tensor=2", "tensor=3", "tensor=4"):
        assert MedusaLM.load(dtype="float32", mesh=mesh).generate(prompt, params)[0].token_ids == expected
