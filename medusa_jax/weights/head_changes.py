"""What a conversion does to heads before they are written: unembeddings, vocabularies, tied layers.

Everything is lazy: a changed checkpoint reads through the one that it was made of.
Shapes: D model, V vocabulary, V' tokens that the heads score.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from medusa_jax.errors import UserError
from medusa_jax.weights.checkpoints import Checkpoint
from medusa_jax.weights.head_files import HeadCheckpoint
from medusa_jax.weights.lazy import Lazy, common, of_array, same_values
from medusa_jax.weights.params import (
    _SKIPPED,
    EMBEDDING,
    UNEMBEDDING,
    Params,
    _check_tied,
    check_tensors,
    expected_shapes,
    unflatten,
)


def model_arrays(model: Checkpoint) -> Params:
    """A model's parameters as a nested dict of lazy arrays. Raises UserError as `load_params` does."""
    infos, expected, label = model.source.infos(), expected_shapes(model.config), str(model.path)
    wanted = dict(expected)
    if model.config.tie_word_embeddings and UNEMBEDDING in infos:
        wanted[UNEMBEDDING] = wanted[EMBEDDING]
        unembedding(model)
    check_tensors({n: i for n, i in infos.items() if not _SKIPPED.fullmatch(n)}, wanted, label)
    return unflatten({name: _tensor(model, name) for name in expected})


def unembedding(model: Checkpoint) -> Lazy:
    """The table [V, D] of a model, which is its embedding where the two are tied.

    Raises UserError when it is missing or misshapen, or a stored copy differs from the embedding.
    """
    config, infos = model.config, model.source.infos()
    tied = config.tie_word_embeddings
    name = EMBEDDING if tied else UNEMBEDDING
    shape = (config.vocab_size, config.hidden_size)
    check_tensors({n: infos[n] for n in [name] if n in infos}, {name: shape}, str(model.path))
    table = _tensor(model, name)
    if tied and UNEMBEDDING in infos:
        for (rows,), block in table.blocks():
            _check_tied(model.source, block, (rows, slice(0, config.hidden_size)), str(model.path))
    return table


def _tensor(model: Checkpoint, name: str) -> Lazy:
    info = model.source.infos()[name]
    after = (slice(None),) * (len(info.shape) - 1)
    return Lazy(
        info.shape, info.dtype, lambda start, stop: model.source.read(name, (slice(start, stop), *after))
    )


def have_tied_layers(heads: HeadCheckpoint) -> bool:
    """Whether the layers of each head are copies of one, as the first implementation trains several."""
    config = heads.config
    return config.num_layers > 1 and all(
        same_values(heads.parts[name, (h, 0)], heads.parts[name, (h, layer)])
        for h in range(config.num_heads)
        for layer in range(1, config.num_layers)
        for name in ("weight", "bias")
    )


def shared_rows(heads: HeadCheckpoint, table: Lazy) -> Lazy:
    """The rows [V', D] of the model's table [V, D] that the heads score."""
    token_map = heads.token_map()
    return table if token_map is None else table.rows(of_array(token_map))


def settle(heads: HeadCheckpoint, table: Lazy | None) -> tuple[HeadCheckpoint, list[str]]:
    """Heads whose files hold a shared unembedding, after a look at the model's table, if there is one.

    A stored one that is not the model's becomes each head's own. Returns lines for the user too.
    """
    stored = heads.table
    if stored is None or table is None or same_values(stored, shared_rows(heads, table)):
        return heads, []
    line = f"{heads.path}: the stored unembedding is not the model's; each head gets it as its own"
    return _with_own(heads, stored), [line]


def with_own(heads: HeadCheckpoint, table: Lazy | None, why: str) -> HeadCheckpoint:
    """Heads that each have their own unembedding: a copy of the shared one where they had none.

    Raises UserError that says `why` one is needed when there is no table to copy.
    """
    if heads.config.own_unembedding:
        return heads
    return _with_own(heads, require_rows(heads, table, why))


def require_rows(heads: HeadCheckpoint, table: Lazy | None, why: str) -> Lazy:
    """The unembedding [V', D] that the heads share. Raises UserError that says `why` when none is at hand."""
    if table is None and heads.table is None:
        raise UserError(f"{heads.path}: the heads share their model's unembedding, and {why}; give --model")
    return heads.table if table is None else shared_rows(heads, table)  # type: ignore[return-value]


def _with_own(heads: HeadCheckpoint, rows: Lazy) -> HeadCheckpoint:
    config = dataclasses.replace(heads.config, own_unembedding=True, vocab_size=_vocabulary(heads, rows))
    own = {("unembedding", (h,)): rows for h in range(config.num_heads)}
    return dataclasses.replace(heads, config=config, parts={**heads.parts, **own}, table=None)


def _vocabulary(heads: HeadCheckpoint, rows: Lazy) -> int:
    if heads.vocab_size is None and heads.config.draft_vocab_size is None:
        return rows.shape[0]
    return heads.config.vocab_size


def with_shared(heads: HeadCheckpoint, table: Lazy | None, what: str) -> tuple[HeadCheckpoint, list[str]]:
    """Heads that share the model's unembedding. Own ones are given up only where all equal the model's.

    Raises UserError that names `what` asked for it otherwise. Returns lines for the user too.
    """
    if not heads.config.own_unembedding:
        lines = []
        if heads.table is not None and table is None:
            lines = [
                f"{heads.path}: the stored unembedding is left out, {what} takes the model's; "
                "--model would check that they are the same"
            ]
        return dataclasses.replace(heads, table=None), lines
    reason = f"{heads.path}: each head has its own unembedding, but {what} has none to put it in"
    if table is None:
        raise UserError(f"{reason}; --model would check whether they are all the model's")
    rows = shared_rows(heads, table)
    for h in range(heads.config.num_heads):
        if not same_values(heads.parts["unembedding", (h,)], rows):
            raise UserError(f"{reason}, and that of head {h} is not the model's")
    parts = {place: part for place, part in heads.parts.items() if place[0] != "unembedding"}
    config = dataclasses.replace(heads.config, own_unembedding=False)
    return dataclasses.replace(heads, config=config, parts=parts), []


def expanded(heads: HeadCheckpoint, table: Lazy | None) -> HeadCheckpoint:
    """Heads that score the whole vocabulary; tokens outside their draft vocabulary get the model's rows.

    Raises UserError when there is no table to take them from.
    """
    token_map = heads.token_map()
    if token_map is None:
        return heads
    if table is None:
        raise UserError(f"{heads.path}: --expand-vocabulary needs the model's unembedding; give --model")
    config = dataclasses.replace(heads.config, draft_vocab_size=None, vocab_size=table.shape[0])
    place_of = np.full(table.shape[0], -1)
    place_of[token_map] = np.arange(len(token_map))

    def overlaid(part: Lazy) -> Lazy:
        dtype = common(part.dtype, table.dtype)

        def read(start: int, stop: int) -> np.ndarray:
            block = table.read(start, stop).astype(dtype)
            places = place_of[start:stop]
            own = places[places >= 0]
            if own.size:
                block[places >= 0] = part.rows(of_array(own)).read(0, len(own))
            return block

        return Lazy(table.shape, dtype, read)

    parts = {
        place: overlaid(part) if place[0] == "unembedding" else part for place, part in heads.parts.items()
    }
    return dataclasses.replace(heads, config=config, parts=parts, tokens=None, table=None)
