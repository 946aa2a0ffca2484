"""python -m train: train Medusa heads for a model, and with Medusa-2 the model with them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer import STATUS, cli, interrupts

if TYPE_CHECKING:
    from train.config import Command, TrainConfig

SETTINGS = "config.yaml"


def run(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status."""
    from medusa_jax import UserError
    from medusa_jax.errors import is_file

    try:
        import grain  # noqa: F401
        import tensorboardX  # noqa: F401
        import tyro  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f'training needs {error.name}: pip install "medusa-jax[train]"') from None
    from train import config

    command = config.parse(argv)
    options = command.options
    output = _output(command)
    if command.resume and is_file(output / SETTINGS):
        config.check_resumed(options, output / SETTINGS)
    _join(options)

    import jax

    from medusa_jax import sharding
    from medusa_jax.generate import enable_compilation_cache, parse_dtype
    from medusa_jax.weights import checkpoints
    from medusa_jax.weights.head_files import open_heads
    from train import estimate, pipeline
    from train.setup import Plan, heads_config

    mesh = cli.make_mesh(options.run.mesh, options.run.processes or 1)
    if mesh is None and jax.device_count() > 1:
        mesh = sharding.make_mesh({"fsdp": jax.device_count()})
    enable_compilation_cache()
    with interrupts.unwinding():
        checkpoint = checkpoints.open_model(options.model)
    model, tokenizer, opened = checkpoint.config, checkpoint.tokenizer(), None
    heads = heads_config(options, model)
    if options.heads.heads is not None:
        opened = open_heads(options.heads.heads, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
        heads = opened.config
        cli.note(f"heads from {opened.path} ({opened.kind}); their own sizes count")
    cli.note("reading data ...")
    data = pipeline.prepare(
        [pipeline.parse_data(text) for text in options.data.data],
        tokenizer,
        options.data.sequence_length,
        heads.num_heads,
        validation=options.data.validation,
        seed=options.run.seed,
        system=options.data.system,
        skip_bad=options.data.skip_bad,
        drop_looping=options.data.drop_looping,
        vocab_size=model.vocab_size,
    )
    for line in data.report.splitlines():
        cli.note(line)
    plan = Plan.of(options, model, heads, parse_dtype(options.run.dtype), mesh, data)
    if command.dry_run:
        for line in estimate.lines(plan, data):
            print(line)
        return 0
    return _train(command, output, plan, checkpoint, tokenizer, opened, data)


def _train(
    command: Command, output: Path, plan: Any, checkpoint: Any, tokenizer: Any, opened: Any, data: Any
) -> int:
    import jax
    import numpy as np
    import yaml

    from medusa_jax.errors import UserError, write_atomically
    from medusa_jax.weights.fingerprint import fingerprint
    from train import export, start
    from train.checkpoints import Checkpoints
    from train.config import TrainConfig
    from train.hidden import HiddenStates
    from train.loop import TERMINATED, Feed, Loop, Stop
    from train.programs import Programs
    from train.report import Report

    options, first = plan.config, jax.process_index() == 0
    began = time.perf_counter()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be made ({error.strerror})") from None
    programs = Programs(plan)
    with cli.progress_bar("reading weights") as progress:
        params = start.read_model(plan, programs, checkpoint, progress)
    stored: HiddenStates | None = None
    if plan.stored:
        folder = Path(options.run.stored_hidden_folder or output / "hidden").expanduser()
        with cli.progress_bar("computing hidden states", unit="rows") as progress:
            stored = start.store_hidden(plan, programs, params, data, folder, progress)
    base = options.model or "HuggingFaceTB/SmolLM2-135M-Instruct"
    metadata: dict[str, Any] = {"base_model": base, "model_fingerprint": fingerprint(checkpoint.source)}
    state, frozen = start.begin(plan, programs, params, opened, data)
    if not (plan.stored or options.backbone.backbone == "full"):
        params = frozen.params
    else:
        del params
        params = None
    token_map = None if frozen.token_map is None else np.asarray(frozen.token_map)
    kept = Checkpoints(output / "checkpoints", options.run.keep, plan.heads, metadata, token_map)
    saved = None
    if command.resume and (latest := kept.latest()) is not None:
        state, saved = kept.restore(latest, programs.state)
        if latest > plan.steps:
            kept.close()
            raise UserError(f"--resume: the run has made {latest} steps already, more than {plan.steps}")
        cli.note(f"going on after step {latest} of {plan.steps}")
    if first:  # by now nothing about the run is refused any more
        write_atomically(output / SETTINGS, yaml.safe_dump(options.flat(), sort_keys=False).encode())
    report = Report(output, plan.steps, int(state.step), quiet=not first)
    interrupts.hand_over()
    try:
        with Stop() as stop:
            loop = Loop(programs, frozen, data, Feed(programs, stored), kept, report)
            seconds = (saved or {}).get("seconds", 0.0)
            loop.began = began - seconds
            done = loop.run(state, saved, stop)
    finally:
        kept.close()  # a checkpoint that is being written is finished, whatever happened
        report.close()
    if done is None:
        cli.note(f"stopped after step {kept.latest()}; the same command with --resume goes on")
        return STATUS if stop.signal == 2 else TERMINATED
    best = kept.best()
    if best is not None and best != plan.steps:
        done, _ = kept.restore(best, programs.state)
        cli.note(f"the checkpoint of step {best} is the best by validation; it is the one exported")
    values = loop.values_at.get(best or 0, loop.last_values)
    text = export.card(
        plan,
        base,
        "; ".join(data.report.splitlines()),
        int(done.step),
        time.perf_counter() - loop.began,
        values,
        TrainConfig(),
    )
    export.save(
        output,
        plan,
        done.trained,
        token_map,
        params,
        tokenizer,
        checkpoint.generation_config(),
        metadata | {"step": int(done.step), "metrics": {"validation": values} if values else {}},
        text,
    )
    cli.note(
        f"heads in {output / 'heads'}" + (f", model in {output / 'model'}" if done.trained.backbone else "")
    )
    return 0


def _output(command: Command) -> Path:
    """The folder of the run, checked before any work."""
    from medusa_jax import UserError
    from medusa_jax.errors import is_folder, stat_of, user_path

    output = user_path(command.output, "--output")
    if stat_of(output) is not None and not is_folder(output):
        raise UserError(f"--output {output}: is a file, expected a folder")
    used = is_folder(output) and any(output.iterdir())
    if used and not (command.resume or command.dry_run):
        raise UserError(
            f"--output {output}: is not empty; --resume goes on with its run, or name another folder"
        )
    return output


def _join(options: TrainConfig) -> None:
    """Meet the other processes, if there are any; before anything else asks for devices."""
    import jax

    from medusa_jax import UserError

    r = options.run
    if not r.distributed:
        return
    if r.coordinator is not None and not re.fullmatch(r".+:\d{1,5}", r.coordinator):
        raise UserError(f"--coordinator {r.coordinator}: expected HOST:PORT")
    try:
        jax.distributed.initialize(r.coordinator, r.processes, r.process)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--distributed: {' '.join(str(error).split())}") from None


if __name__ == "__main__":
    cli.main(run)
