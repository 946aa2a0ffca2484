"""The command line of python -m train: recipes, YAML, bounds, and one line for every mistake."""

import dataclasses
import re

import pytest
import yaml

from medusa_jax import UserError
from train import config
from train.config import TrainConfig, parse, read_recipe, recipe_names

BASE = ["--data", "a.jsonl", "--output", "runs/x"]


def test_every_recipe_is_valid_and_readable():
    assert recipe_names() == [
        "medusa1", "medusa2", "medusa2-selfdistill", "vicuna-33b", "vicuna-7b-13b", "zephyr-7b",
    ]  # fmt: skip
    for name in recipe_names():
        made = TrainConfig().with_fields(read_recipe(name), name)
        assert made.loss.decay == 0.8
        text = (config.resources.files("train") / "recipes" / f"{name}.yaml").read_text()
        assert "Deviations:" in text
        assert f"--recipe {name} " in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("medusa1", {"backbone": "frozen", "learning_rate": 1e-3, "heads_multiplier": 1.0, "epochs": 2.0}),
        ("medusa2", {"backbone": "lora", "lora_rank": 32, "lora_alpha": 16.0, "lora_dropout": 0.05}),
        (
            "vicuna-7b-13b",
            {"heads_weight": 0.2, "learning_rate": 5e-4, "sequence_length": 4096, "int8": True},
        ),
        ("vicuna-33b", {"heads_weight": 0.01, "heads_weight_schedule": "sine", "model_loss": "teacher"}),
        ("zephyr-7b", {"batch_size": 128, "warmup_steps": 20, "heads_multiplier": 4.0, "int8": False}),
    ],
)
def test_recipes_hold_the_published_values(name, expected):
    flat = parse([*BASE, "--recipe", name]).options.flat()
    assert {key: flat[key] for key in expected} == expected


def test_flags_go_over_the_file_and_the_file_over_the_recipe(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 3.0e-4\nnum_heads: 7\ndata: [b.jsonl]\n")
    made = parse(["--output", "x", "--recipe", "medusa1", "--config", str(file), "--num-heads", "3"]).options
    assert made.optimizer.learning_rate == 3e-4
    assert made.heads.num_heads == 3
    assert made.data.data == ("b.jsonl",)
    assert made.optimizer.warmup_steps == read_recipe("medusa1")["warmup_steps"]


def test_what_is_saved_gives_the_same_run(tmp_path):
    made = parse([*BASE, "--recipe", "zephyr-7b", "--soft-labels", "0.5", "--system", ""]).options
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(made.flat()))
    assert parse(["--output", "x", "--config", str(file)]).options == made


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--lerning-rate", "1"], "--lerning-rate"),
        (["--learning-rate", "fast"], "learning-rate"),
        (["--learning-rate", "-1"], "learning_rate is -1.0, expected"),
        (["--learning-rate", "nan"], "learning_rate is nan, expected a number"),
        (["--recipe", "medusa3"], "'medusa3': unknown, expected one of medusa1"),
        (["--backbone", "half"], "half"),
        (["--batch-size", "10", "--microbatch", "3"], "microbatch 3 does not divide batch_size 10"),
        (["--model-loss", "teacher"], "needs backbone 'lora'"),
        (["--int8", "--backbone", "full"], "int8 weights are frozen"),
        (["--stored-hidden", "--backbone", "lora"], "stored_hidden needs backbone 'frozen'"),
        (["--processes", "2"], "coordinator, processes and process need distributed"),
        (["--distributed", "--processes", "2", "--process", "2"], "process is 2, expected 0 to 1"),
        (["--stepz", "4"], "Unrecognized options: --stepz"),
        (["--config", "no-such.yaml"], "no-such.yaml: no such file"),
    ],
)
def test_mistakes_are_one_line(flags, expected):
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        parse([*BASE, *flags])
    assert "\n" not in str(error.value)


def test_no_data_is_refused():
    with pytest.raises(UserError, match="--data: expected at least one file"):
        parse(["--output", "x"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rat: 1", "unknown field 'learning_rat'"),
        ("learning_rate: fast", "learning_rate is 'fast', expected a number"),
        ("num_heads: 2.5", "num_heads is 2.5, expected an integer"),
        ("int8: 1", "int8 is 1, expected true or false"),
        ("data: a.jsonl", "data is 'a.jsonl', expected a list of texts"),
        ("- 1", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("model: 7", "model is 7, expected a text or null"),
        ("optimizer: {learning_rate: 1}", "unknown field 'optimizer'"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, text, expected):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        parse([*BASE, "--config", str(file)])
    assert "c.yaml" in str(error.value)


def test_every_number_has_bounds():
    """A new option cannot be forgotten."""
    numbers = {
        name
        for name, value in TrainConfig().flat().items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert numbers <= set(config._BOUNDS)
    names = [field.name for group in config._GROUPS.values() for field in dataclasses.fields(group)]
    assert len(names) == len(set(names))
