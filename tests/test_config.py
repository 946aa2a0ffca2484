"""Configurations and settings files: every value is read, or refused in one line; nothing hangs."""

import json
import os
import stat

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from medusa_jax import errors
from medusa_jax.config import FAMILIES, INTEGERS, NUMBERS, MedusaConfig, ModelConfig, RopeConfig, read_config
from medusa_jax.errors import UserError

BASE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 7,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NAN, INF = float("nan"), float("inf")


def read(family="llama", **changes) -> ModelConfig:
    return ModelConfig.from_hf(BASE | {"model_type": family} | changes, "x/config.json")


def refused(*parts: str, **changes) -> None:
    with pytest.raises(UserError) as caught:
        read(**changes)
    assert str(caught.value).startswith("x/config.json: ")
    for part in parts:
        assert part in str(caught.value)


# Any value in any field

ROPE_FIELDS = ["rope_type", "type", "rope_theta", "truncate", "original_max_position_embeddings"]
ROPE_FIELDS += [name for name in NUMBERS if name not in ("rms_norm_eps", "rope_theta")] + [
    "finetuned",
    "Factor",
]
FIELDS = [*INTEGERS, *NUMBERS, "model_type", "architectures", "hidden_act", "attention_bias", "mlp_bias"]
FIELDS += ["tie_word_embeddings", "use_sliding_window", "layer_types", "quantization_config", "num_experts"]
FIELDS += ["rope_scaling", "rope_parameters"]

numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**24 + 1, 3_000_000, 2**31, 2**63, 10**400]),
    st.floats(),
    st.sampled_from([0.0, 1e-310, 1.0, 1e308, 10.0]),
)
texts = st.sampled_from(["", "x", *FAMILIES, "default", "linear", "llama3", "yarn", "sliding_attention"])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(ROPE_FIELDS) | st.text(max_size=2), inner, max_size=4)
    ),
    max_leaves=8,
)
rope_objects = st.dictionaries(st.sampled_from(ROPE_FIELDS), numbers | values, max_size=4).flatmap(
    lambda changes: st.sampled_from([{}, {"rope_type": "linear", "factor": 2}, YARN, LLAMA3]).map(
        lambda base: {**base, **changes}
    )
)


@settings(max_examples=400, deadline=1000)
@given(
    family=st.sampled_from(FAMILIES),
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
    rope=st.none() | rope_objects,
    place=st.sampled_from(["rope_scaling", "rope_parameters"]),
)
@example("llama", {"num_hidden_layers": 3_000_000}, None, "rope_scaling")
@example("qwen2", {"num_hidden_layers": 10**400, "hidden_size": 10**400}, None, "rope_scaling")
@example("qwen3", {"architectures": 5, "model_type": None}, None, "rope_scaling")
@example("llama", {"rope_theta": 1}, YARN, "rope_scaling")
def test_any_value_gives_a_configuration_or_one_line(family, changes, rope, place):
    fields = BASE | {"model_type": family} | changes | ({} if rope is None else {place: rope})
    try:
        config = ModelConfig.from_hf(fields)
    except UserError as error:
        event(str(error).split(" is ")[0][:40])
        return
    event(f"read, {config.rope.kind}")
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("value", ["x", [1], {}, True, NAN, INF, -INF, -1, 10**400])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_numbers(field, value):
    refused(field, "expected a number from", **{field: value})


def test_numbers_out_of_range():
    refused("rms_norm_eps is 1.5", rms_norm_eps=1.5)
    refused("rope_theta is 1", rope_theta=1)


@pytest.mark.parametrize("value", ["x", [1], {}, True, 1.5, 0, -1, 2**31, 10**400])
@pytest.mark.parametrize("field", [name for name in BASE if name != "sliding_window"])
def test_integers(field, value):
    refused(field, "expected an integer from", **{field: value})


@pytest.mark.parametrize("value", ["x", [1], 5, 0, False, True])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters", "quantization_config"])
def test_objects(field, value):
    refused(field, "expected an object or null", **{field: value})


@pytest.mark.parametrize("value", ["false", 0, 1, [], {}])
@pytest.mark.parametrize("field", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_booleans(field, value):
    refused(field, "expected true or false", **{field: value})


@pytest.mark.parametrize(
    "value", ["full_attention", 5, {"full_attention": 1}, [1, 2], [["full_attention"]] * 2]
)
def test_layer_types(value):
    refused("layer type" if isinstance(value, list) else "layer_types", family="qwen2", layer_types=value)


def test_unsupported_models():
    refused("model_type 'gemma'", "architectures: none named", model_type="gemma", architectures=5)
    refused("architectures: A, B", model_type=["x"], architectures=["A", "B", 3])
    refused("quant_method 'awq'", quantization_config={"quant_method": "awq"})


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "part"),
    [
        ({"Rope_Type": "yarn", "factor": 2}, "'Rope_Type' is unknown"),
        (YARN | {"beta": 3}, "'beta' is unknown"),
        ({"factor": 2.0}, "no rope_type"),
        ({"rope_type": "linear"}, "'factor' is missing"),
        ({"rope_type": "linear", "factor": "x"}, "RoPE factor is 'x'"),
        (YARN | {"factor": NAN}, "RoPE factor is nan"),
        (YARN | {"factor": INF}, "RoPE factor is inf"),
        (YARN | {"factor": 0.5}, "RoPE factor is 0.5"),
        (YARN | {"original_max_position_embeddings": "x"}, "original_max_position_embeddings is 'x'"),
        (LLAMA3 | {"original_max_position_embeddings": -5}, "original_max_position_embeddings is -5"),
        (
            LLAMA3 | {"original_max_position_embeddings": None},
            "'original_max_position_embeddings' is missing",
        ),
        (LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor 1.0 is not below high_freq_factor 1.0"),
        (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor is 0"),
        (YARN | {"beta_fast": 0}, "beta_fast is 0"),
        (YARN | {"beta_fast": NAN}, "beta_fast is nan"),
        (YARN | {"beta_fast": 0.5}, "beta_fast 0.5 is below beta_slow 1.0"),
        (YARN | {"attention_factor": INF}, "attention_factor is inf"),
        (YARN | {"mscale": [1]}, "mscale is [1]"),
        (YARN | {"truncate": "no"}, "truncate is 'no'"),
        (YARN | {"rope_theta": True}, "rope_theta is True"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_rope(field, rope, part):
    refused(part, **{field: rope})


def test_what_transformers_writes_is_read():
    everything = YARN | {
        "type": "yarn",
        "finetuned": True,
        "partial_rotary_factor": 1.0,
        "mscale": 1,
        "beta_fast": 32,
    }
    rope = read(rope_scaling=everything, rope_theta=10000).rope
    assert rope == RopeConfig("yarn", 10000.0, 4.0, 16, mscale=1.0)
    assert isinstance(rope.beta_fast, float)
    assert (
        read(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5
    )
    assert read("mistral").layer_windows == (7, 7)
    assert read("mistral", sliding_window=None).layer_windows == (None, None)


def test_objects_made_in_python_are_checked_too():
    for make in (
        lambda: RopeConfig(kind="yarn", factor=2.0),
        lambda: RopeConfig(kind="other"),
        lambda: RopeConfig(theta=NAN),
        lambda: MedusaConfig(10**6, 1, 16, 24),
        lambda: MedusaConfig(2, 1, 2**40, 24),
        lambda: MedusaConfig(2, True, 16, 24),
    ):
        with pytest.raises(UserError):
            make()


# Settings files


def test_unusable_json(tmp_path):
    path = tmp_path / "config.json"

    def fails(part: str) -> None:
        with pytest.raises(UserError, match=part) as caught:
            read_config(tmp_path)
        assert str(path) in str(caught.value)

    fails("no such file")
    for text, part in (
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"x": NaN}', "model_type None"),
    ):
        path.write_bytes(text)
        fails(part)
    with path.open("wb") as file:
        file.truncate(errors.LARGEST_JSON + 1)  # takes no space on the disk
    fails("bytes, expected at most")
    path.unlink()
    os.mkfifo(path)  # opening it would wait for a writer
    fails("expected a regular file")
    path.unlink()
    path.mkdir()
    fails("is a directory")


def test_files_are_written_whole(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "link"
    errors.write_atomically(path, b"one")
    errors.write_atomically(path, b"two")
    link.symlink_to(path)
    errors.write_atomically(link, b"three")
    assert (path.read_bytes(), link.is_symlink()) == (b"three", True)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    os.mkfifo(tmp_path / "pipe")
    for bad, part in (
        (tmp_path / "none" / "x", "No such file"),
        (path / "x", "Not a directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "expected a regular file"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "a\0b", "not a name"),
    ):
        with pytest.raises(UserError, match=part):
            errors.write_atomically(bad, b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "link", "pipe"]


def test_a_failing_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        errors.write_atomically(tmp_path / "x", "text")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_messages_are_one_printable_line():
    assert str(UserError("a\n b\x1b[2J \ud800 é日")) == r"a b\x1b[2J \ud800 é日"
    assert len(str(UserError("x" * 10**6))) < 3000
    assert len(errors.shown("x" * 10**6)) < 100
    assert errors.shown(10**5000) == "a very large int"
