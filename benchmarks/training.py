"""Speed of training heads for the default model on this machine, against the backbone's own forward.

    python benchmarks/training.py            steps of Medusa-1, several kinds
    python benchmarks/training.py --check    exit with status 1 when a limit is passed

A forward gives hidden states and no logits. A step is everything: forward, losses and gradients of the heads,
their update. Sides take turns, each judged by its median; rows are full and all of their tokens labelled.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.timing import Work, alternate
from medusa_jax import MedusaLM, backbone, heads, linear
from medusa_jax.config import MedusaConfig
from train.config import DataOptions, LossOptions, OptimizerOptions, RunOptions, TrainConfig
from train.loss import Batch
from train.programs import Programs
from train.setup import F32, Plan
from train.step import Frozen, Trained

LENGTH = 512
DRAFT = 8192

# Name: heads, layers, conditioned, draft vocabulary, soft labels, stored hidden states, least share of the
# forward's tokens per second.
Kind = tuple[int, int, bool, int | None, float, bool, float | None]
KINDS: dict[str, Kind] = {
    "4 heads of 1 layer, draft vocabulary of 8,192": (4, 1, False, DRAFT, 0.0, False, 0.6),
    "4 heads of 1 layer, full vocabulary": (4, 1, False, None, 0.0, False, 0.3),
    "the default: 3 conditioned of 2 layers, 8,192, soft labels": (3, 2, True, DRAFT, 0.5, False, None),
    "the default over stored hidden states": (3, 2, True, DRAFT, 0.5, True, None),
}


def plan(lm: MedusaLM, kind: Kind, rows: int) -> Plan:
    """A run of heads of this kind."""
    count, layers, conditioned, draft, softness, stored, _ = kind
    config = TrainConfig(
        data=DataOptions(sequence_length=LENGTH),
        loss=LossOptions(soft_labels=softness),
        optimizer=OptimizerOptions(batch_size=rows),
        run=RunOptions(dtype="float32", stored_hidden=stored),
    )
    made = MedusaConfig(
        count,
        layers,
        lm.config.hidden_size,
        lm.config.vocab_size,
        conditioned=conditioned,
        draft_vocab_size=draft,
    )
    return Plan(config, lm.config, made, F32, None, 1000, 1000)


def batch(lm: MedusaLM, rows: int) -> Batch:
    """Rows of one document each."""
    ids = np.random.default_rng(0).integers(100, lm.config.vocab_size, (rows, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    return Batch(ids, np.ones_like(ids), np.ascontiguousarray(positions), np.ones(ids.shape, bool))


def forward(lm: MedusaLM, params: Any, rows: int) -> Work:
    """The backbone's forward over a batch."""
    programs = Programs(plan(lm, next(iter(KINDS.values())), rows))
    program, one = programs.hidden(rows, programs.frozen.params), batch(lm, rows)
    return lambda: program(params, one).block_until_ready()


def step(lm: MedusaLM, params: Any, kind: Kind, rows: int) -> Work:
    """A training step over the same batch; the state goes from one to the next."""
    programs = Programs(plan(lm, kind, rows))
    config = programs.plan.heads
    table = backbone.unembedding_table(params)
    draft = config.draft_vocab_size
    token_map = None if draft is None else jnp.arange(draft, dtype=jnp.int32)
    layers = heads.init(config, table, F32, token_map).layers
    kept = [programs.start()(Trained(layers, None))]
    stored = programs.plan.stored
    frozen = Frozen(
        params=None if stored else params,
        token_map=token_map,
        table=table if stored else None,
        embedding=table if stored and config.conditioned else None,
    )
    rows_of_step = jax.tree.map(lambda leaf: leaf[None], batch(lm, rows))
    hidden = None
    if stored:
        hidden = np.asarray(Programs(programs.plan).hidden(rows, _shapes(params))(params, batch(lm, rows)))[
            None
        ]
    program, key = programs.step(False), programs.key()

    def work() -> None:
        kept[0], metrics = program(kept[0], frozen, rows_of_step, hidden, key)
        jax.block_until_ready(metrics)

    return work


def _shapes(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def main() -> int:
    """Measure, print, and compare with the limits."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rounds", type=int, default=5, help="timed rounds of each side (5)")
    arguments.add_argument("--rows", type=int, default=8, help="rows of a batch (8)")
    arguments.add_argument("--check", action="store_true", help="status 1 when a limit is passed")
    args = arguments.parse_args()
    lm = MedusaLM.load(dtype="float32", heads="none")
    params = linear.restored(lm.params)
    sides = {"forward": forward(lm, params, args.rows)}
    sides |= {name: step(lm, params, kind, args.rows) for name, kind in KINDS.items()}
    seconds = alternate(sides, args.rounds)
    missed = False
    for name, taken in seconds.items():
        share = seconds["forward"] / taken
        least = KINDS[name][-1] if name in KINDS else None
        told = "" if least is None else f" (at least {least:.0%})"
        missed |= least is not None and share < least
        print(f"{name:60} {args.rows * LENGTH / taken:8,.0f} tokens/s, {share:.0%} of the forward{told}")
    return int(args.check and missed)


if __name__ == "__main__":
    raise SystemExit(main())
