"""What a finished run leaves: heads that `--heads` takes, with a card, and the model where it was trained."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from medusa_jax.errors import write_atomically
from medusa_jax.weights import hf
from medusa_jax.weights.fingerprint import KEY, fingerprint
from medusa_jax.weights.head_files import save_heads
from train import lora
from train.setup import Plan
from train.step import Trained

CARD = """\
---
library_name: medusa-jax
base_model: {base}
---
# {kind} for {base}

{heads} heads of {layers}{vocabulary}, trained with `python -m train` of medusa-jax. They
guess tokens ahead, so that
{base} decodes several at a time. Use them with

    python -m infer.generate {model}--heads THIS_FOLDER
{beside}
## Training

* Data: {data}
* {steps} steps of {batch} rows of {length} tokens, {hours:.2f} hours on {devices}
* Command's fields that differ from the defaults:

{fields}

## Results on the documents held out

| | loss | top-1 | top-2 | top-3 | top-4 | top-5 |
|---|---|---|---|---|---|---|
{table}
"""


def save(
    output: Path,
    plan: Plan,
    trained: Trained,
    token_map: np.ndarray | None,
    params: Any,
    tokenizer: Any,
    generation_config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    card: str,
) -> None:
    """Write `output/heads`, and `output/model` where the model was trained; both replace older ones.

    params: the frozen model, for adapters to be merged into.
    """
    merged, config = None, plan.model
    if trained.backbone is not None:
        merged = _local(trained.backbone)
        if isinstance(trained.backbone, lora.Adapters):
            merged, config = lora.merge(params, trained.backbone, plan.model)
        merged = jax.tree.map(lambda leaf: np.asarray(leaf).astype(plan.dtype), _local(merged))
        # The heads belong to the model as it is now.
        metadata = {**metadata, KEY: fingerprint(merged)}
    dtype = np.dtype(jax.numpy.dtype(plan.config.run.heads_dtype))
    layers = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), _local(trained.heads))
    if jax.process_index() != 0:
        return
    if merged is not None:
        _remove(output / "model")
        hf.save_pretrained(output / "model", merged, config, tokenizer, generation_config)
    _remove(output / "heads")
    save_heads(output / "heads", plan.heads, layers, token_map, metadata)
    write_atomically(output / "heads" / "README.md", card.encode())


def _local(tree: Any) -> Any:
    """Arrays whole on this process."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def card(
    plan: Plan, base: str, report: str, steps: int, seconds: float, values: Mapping[str, float], defaults: Any
) -> str:
    """The text of the heads' README."""
    fields = {k: v for k, v in plan.config.flat().items() if v != defaults.flat()[k]}
    rows = []
    for m in range(plan.heads.num_heads):
        if f"head{m}/loss" in values:
            shares = " | ".join(f"{values[f'head{m}/top{k}']:.3f}" for k in range(1, 6))
            rows.append(f"| head {m} | {values[f'head{m}/loss']:.3f} | {shares} |")
    size = plan.heads.draft_vocab_size
    own, beside = f"--model {plan.config.model} " if plan.config.model else "", ""
    if plan.config.backbone.backbone != "frozen":
        own, beside = (
            "--model MODEL_FOLDER ",
            f"\nMODEL_FOLDER is the `model` folder beside this one: {base} as it was trained with them.\n",
        )
    return CARD.format(
        base=base,
        model=own,
        beside=beside,
        kind="Conditioned Medusa heads" if plan.heads.conditioned else "Medusa heads",
        heads=plan.heads.num_heads,
        layers=f"{plan.heads.num_layers} layer{'s' * (plan.heads.num_layers != 1)}",
        vocabulary=f" over the {size:,} most frequent tokens" if size else "",
        data=report,
        steps=steps,
        batch=plan.config.optimizer.batch_size,
        length=plan.config.data.sequence_length,
        hours=seconds / 3600,
        devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        fields="\n".join("      " + line for line in yaml.safe_dump(fields, sort_keys=False).splitlines()),
        table="\n".join(rows) or "| none were held out | | | | | | |",
    )
