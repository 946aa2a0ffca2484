"""What a training run is told: flags, a YAML file of the same fields, a recipe; checked before any work."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from medusa_jax.errors import UserError, require_file, shown

MAX_FILE = 10**6  # bytes of a settings file


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What is learnt from."""

    data: tuple[str, ...] = ()
    """Files: ShareGPT JSON, or JSONL of messages, prompt and completion, or text. With FILE:2 a file has
    twice the share of the rows seen that one of weight 1 has."""
    sequence_length: int = 2048
    """Tokens of a packed row."""
    validation: float = 0.02
    """Share of the documents that is held out."""
    system: str | None = None
    """System message for conversations without one; "" removes the template's own."""
    skip_bad: bool = False
    """Leave out records that are broken, instead of refusing the file."""
    drop_looping: bool = False
    """Leave out answers that train.distill marked as repeating themselves."""


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The heads."""

    heads: str | None = None
    """Heads to start from; without them they begin as copies of the model's own prediction."""
    num_heads: int = 4
    """How many: head m guesses m + 2 tokens ahead."""
    num_layers: int = 1
    """Residual layers of each."""
    conditioned: bool = False
    """Heads that also read the tokens between (Hydra); better guesses, not for other runtimes."""
    own_unembedding: bool = False
    """An unembedding for each head, instead of the model's: far larger."""
    draft_vocab_size: int | None = None
    """Score only so many tokens, the most frequent of the data; None: all."""


@dataclasses.dataclass(frozen=True)
class BackboneOptions:
    """The model itself."""

    backbone: Literal["frozen", "lora", "full"] = "frozen"
    """frozen is Medusa-1; lora and full are Medusa-2."""
    lora_rank: int = 32
    """Rank of the adapters, on all linear layers and the LM head."""
    lora_alpha: float = 16.0
    """Adapters are scaled by alpha / rank."""
    lora_dropout: float = 0.05
    """Dropout of the adapters' input."""
    int8: bool = False
    """Keep the frozen weights as 8-bit integers."""
    model_loss: Literal["tokens", "teacher"] = "tokens"
    """With a trained backbone: cross-entropy with the data, or KL to the model without its adapters."""
    heads_weight: float = 1.0
    """Weight of the heads' loss beside the model's."""
    heads_weight_schedule: Literal["constant", "linear", "sine"] = "constant"
    """How the weight grows to its value over the run."""
    heads_first: float = 0.0
    """Share of the steps in which the heads learn alone, before the backbone joins them."""


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What is minimised, and against over-fitting."""

    decay: float = 0.8
    """Head m counts decay^m."""
    soft_labels: float = 0.0
    """Share of the model's own distribution in the labels; the rest is the data's token."""
    head_dropout: float = 0.0
    """Dropout of the heads' input."""
    weight_decay: float = 0.0
    """AdamW's decay of weight matrices."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and its schedule."""

    learning_rate: float = 1e-3
    """Peak rate of the backbone; of the heads it is this times heads_multiplier."""
    heads_multiplier: float = 1.0
    """The heads' rate over the backbone's; biases included."""
    warmup_steps: int = 40
    """Steps of linear growth to the peak, before the cosine; all of a run that has fewer."""
    final_rate: float = 0.0
    """The rate at the end, as a share of the peak."""
    clip: float = 1.0
    """Largest norm of the gradients of heads and of backbone; 0 is off."""
    batch_size: int = 64
    """Rows of a step, over all devices and microbatches."""
    microbatch: int | None = None
    """Rows computed at a time; smaller takes less memory and gives the same numbers."""
    epochs: float = 2.0
    """Passes over the data."""
    steps: int | None = None
    """Steps instead of epochs."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How it runs."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Of frozen weights and of the computation; None: float32 on a CPU, bfloat16 elsewhere."""
    mesh: str | None = None
    """Devices, as data=2,fsdp=4,tensor=1; None: all over fsdp."""
    distributed: bool = False
    """One of several processes that train together; on Cloud TPU and under Slurm they find each other."""
    coordinator: str | None = None
    """HOST:PORT of the first process, where they do not; with processes and process."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """The number of this one, from 0."""
    seed: int = 0
    """Decides the order of the data, the first values and the dropout."""
    remat: bool = True
    """Compute layers twice rather than keep them, where the backbone is trained."""
    loss_chunk: int = 128
    """Positions of a row whose logits exist at a time."""
    stored_hidden: bool = False
    """Compute the hidden states once and keep them on disk: for frozen backbones and several passes."""
    stored_hidden_folder: str | None = None
    """Where: default OUTPUT/hidden; runs over the same data can share it."""
    log_every: int = 10
    """Steps between lines of the log."""
    evaluate_every: int = 200
    """Steps between validations; 0: only at the end."""
    save_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept, besides the best by validation."""
    heads_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the finished heads' file."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All options of a run, in groups whose fields have distinct names."""

    model: str | None = None
    """A Hugging Face folder, a GGUF file or a hub id; None: the small default model."""
    data: DataOptions = DataOptions()
    heads: HeadOptions = HeadOptions()
    backbone: BackboneOptions = BackboneOptions()
    loss: LossOptions = LossOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    run: RunOptions = RunOptions()

    def flat(self) -> dict[str, Any]:
        """Every field by its name, without the groups: what a YAML file holds."""
        fields: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            fields |= value if isinstance(value, dict) else {name: value}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def with_fields(self, fields: Mapping[str, Any], where: str) -> TrainConfig:
        """The same with other values. Raises UserError, beginning with `where`, for a wrong name or value."""
        groups: dict[str, dict[str, Any]] = {}
        own = {}
        for name, value in fields.items():
            group = _group_of(name)
            if group is None:
                raise UserError(f"{where}: unknown field {shown(name)}")
            value = tuple(value) if isinstance(value, list) else value
            if group:
                groups.setdefault(group, {})[name] = value
            else:
                own[name] = value
        changed = {group: dataclasses.replace(getattr(self, group), **new) for group, new in groups.items()}
        made = dataclasses.replace(self, **own, **changed)
        made.check(where)
        return made

    def check(self, where: str = "config") -> None:
        """Raises UserError for a value of the wrong type or out of its bounds."""
        for name, value in self.flat().items():
            _check_type(name, value, where)
        for name, (least, most) in _BOUNDS.items():
            value = self.flat()[name]
            if value is not None and not least <= value <= most:
                raise UserError(f"{where}: {name} is {value}, expected {least} to {most}")
        b = self.backbone
        if b.model_loss == "teacher" and b.backbone != "lora":
            raise UserError(
                f"{where}: model_loss 'teacher' needs backbone 'lora': the teacher is the model without it"
            )
        if b.int8 and b.backbone == "full":
            raise UserError(
                f"{where}: int8 weights are frozen; expected backbone 'frozen' or 'lora', not 'full'"
            )
        if self.run.stored_hidden and b.backbone != "frozen":
            raise UserError(
                f"{where}: stored_hidden needs backbone 'frozen': a trained one has no fixed states"
            )
        r = self.run
        if not r.distributed and {r.coordinator, r.processes, r.process} != {None}:
            raise UserError(f"{where}: coordinator, processes and process need distributed")
        if r.processes is not None and r.process is not None and r.process >= r.processes:
            raise UserError(f"{where}: process is {r.process}, expected 0 to {r.processes - 1}")
        o = self.optimizer
        if o.microbatch is not None and o.batch_size % o.microbatch:
            raise UserError(f"{where}: microbatch {o.microbatch} does not divide batch_size {o.batch_size}")


# What may change between a run and its resumption: where things are, how they are computed, how long it
# goes on.
_FREE = {
    *("model", "data", "epochs", "steps", "microbatch", "remat", "loss_chunk", "heads_dtype"),
    *("mesh", "distributed", "coordinator", "processes", "process"),
    *("stored_hidden", "stored_hidden_folder", "log_every", "evaluate_every", "save_every", "keep"),
}


def check_resumed(options: TrainConfig, path: Path) -> None:
    """Raises UserError where a run was begun with other options than those it is to go on with.

    path: the YAML file of those it was begun with.
    """
    before = read_yaml(path)
    for name, value in options.flat().items():
        if name not in _FREE and name in before and before[name] != value:
            raise UserError(
                f"--resume: {name} is {shown(value)}, but the run was begun with {shown(before[name])} "
                f"({path}); give it the same options"
            )


_BOUNDS: dict[str, tuple[float, float]] = {
    "sequence_length": (8, 2**20),
    "validation": (0.0, 0.5),
    "num_heads": (1, 100),
    "num_layers": (0, 100),
    "draft_vocab_size": (1, 2**31),
    "lora_rank": (1, 2**16),
    "lora_alpha": (1e-6, 1e6),
    "lora_dropout": (0.0, 0.99),
    "heads_weight": (0.0, 1e6),
    "heads_first": (0.0, 1.0),
    "decay": (1e-3, 1.0),
    "soft_labels": (0.0, 1.0),
    "head_dropout": (0.0, 0.99),
    "weight_decay": (0.0, 1e3),
    "learning_rate": (1e-12, 1e3),
    "heads_multiplier": (1e-6, 1e6),
    "warmup_steps": (0, 10**9),
    "final_rate": (0.0, 1.0),
    "clip": (0.0, 1e9),
    "batch_size": (1, 2**20),
    "microbatch": (1, 2**20),
    "epochs": (1e-6, 1e6),
    "steps": (1, 10**9),
    "seed": (0, 2**31 - 1),
    "loss_chunk": (1, 2**20),
    "log_every": (1, 10**9),
    "evaluate_every": (0, 10**9),
    "save_every": (1, 10**9),
    "keep": (1, 10**6),
    "processes": (1, 10**6),
    "process": (0, 10**6),
}
_GROUPS = {
    field.name: field.default
    for field in dataclasses.fields(TrainConfig)
    if dataclasses.is_dataclass(field.default)
}


def _group_of(name: str) -> str | None:
    """The group a field is in, "" for one in none; None for no field."""
    if name in _GROUPS:
        name = next((f.name for f in dataclasses.fields(_GROUPS[name]) if f.name == name), "")
        return name or None
    if name in (field.name for field in dataclasses.fields(TrainConfig)):
        return ""
    return next(
        (group for group, made in _GROUPS.items() if name in (f.name for f in dataclasses.fields(made))), None
    )


def _check_type(name: str, value: Any, where: str) -> None:
    group = _group_of(name)
    kind = typing.get_type_hints(type(_GROUPS[group]) if group else TrainConfig)[name]
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    kinds = typing.get_args(kind) if union else (kind,)
    if not any(_fits(value, one) for one in kinds):
        expected = " or ".join(_NAMES.get(one) or ", ".join(typing.get_args(one)) for one in kinds)
        raise UserError(f"{where}: {name} is {shown(value)}, expected {expected}")


_NAMES: dict[Any, str] = {
    str: "a text",
    int: "an integer",
    bool: "true or false",
    float: "a number",
    tuple[str, ...]: "a list of texts",
    types.NoneType: "null",
}


def _fits(value: Any, kind: Any) -> bool:
    if kind == tuple[str, ...]:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


# ------------------------------------------------------------------------------------ files and flags


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a YAML file. Raises UserError for anything but a mapping of names to plain values."""
    size = require_file(path).st_size
    if size > MAX_FILE:
        raise UserError(f"{path}: has {size:,} bytes, expected at most {MAX_FILE:,} of settings")
    try:
        fields = yaml.safe_load(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML ({str(error) or type(error).__name__})") from None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise UserError(f"{path}: expected a mapping of field names to values")
    return fields


def recipe_names() -> list[str]:
    """The recipes there are."""
    folder = resources.files("train") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """The fields of a recipe. Raises UserError listing the names for an unknown one."""
    if name not in recipe_names():
        raise UserError(f"--recipe {shown(name)}: unknown, expected one of {', '.join(recipe_names())}")
    with resources.as_file(resources.files("train") / "recipes" / f"{name}.yaml") as path:
        return read_yaml(path)


@dataclasses.dataclass(frozen=True)
class Command:
    """Train Medusa heads for a language model, and with --backbone lora or full the model too.

    Recipes set the fields of the paper's runs; flags and --config change them. The log, checkpoints and the
    finished heads go to --output; python -m infer.generate --heads OUTPUT/heads uses them.
    """

    output: str
    """Folder of the run."""
    recipe: str | None = None
    """medusa1, medusa2, medusa2-selfdistill, vicuna-7b-13b, vicuna-33b or zephyr-7b."""
    config: str | None = None
    """A YAML file of any of the fields below."""
    resume: bool = False
    """Go on after the last checkpoint in --output."""
    dry_run: bool = False
    """Say what the run would take (memory, steps, time) and end."""
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig()


def parse(argv: Sequence[str] | None = None) -> Command:
    """The command line. Exits as argparse does; raises UserError for values out of their bounds."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = TrainConfig()
    if (recipe := _value_of(argv, "recipe")) is not None:
        options = options.with_fields(read_recipe(recipe), f"recipe {recipe}")
    if (path := _value_of(argv, "config")) is not None:
        options = options.with_fields(read_yaml(Path(path).expanduser()), path)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            made = tyro.cli(
                tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Command]],
                prog="python -m train",
                args=argv,
                default=Command(output=tyro.MISSING, options=options),
            )
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise UserError(f"{_one_line(said.getvalue())} (see --help)") from None
    made.options.check("flags")
    if not made.options.data.data:
        raise UserError("--data: expected at least one file")
    return made


def _value_of(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag that decides the others' defaults; read before the flags are parsed."""
    for at, word in enumerate(argv):
        if word == f"--{flag}" and at + 1 < len(argv):
            return argv[at + 1]
        if word.startswith(f"--{flag}="):
            return word.split("=", 1)[1]
    return None


def _one_line(text: str) -> str:
    """What tyro draws in a box, in one line."""
    words = re.sub(r"[\u2500-\u257f]+", " ", text).split("For full helptext")[0]
    line = " ".join(words.split()).strip(" ,")
    return re.sub(r"^(.+?) (?=\1)", "", line) or "the flags cannot be read"  # title and text say the same
