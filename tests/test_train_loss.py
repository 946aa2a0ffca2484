"""Losses against naive loops, and the step: accumulation, frozen parameters, chunks."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from medusa_jax import backbone, heads
from medusa_jax.config import MedusaConfig
from train import lora, loss, step
from train.loss import Batch, heads_loss, shift, sum_over_chunks
from train.step import Frozen, Objective, Trained, TrainState, train_step

V, D = 56, 32


def model_config():
    return tiny.config(vocab_size=V, tie_word_embeddings=True)


def head_params(config, seed=0):
    """Heads that differ from one another and from zero."""
    layers = jax.tree.map(lambda leaf: leaf, heads.abstract(config, jnp.float32).layers)
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(layers)))
    values = [0.3 * jax.random.normal(k, a.shape) for k, a in zip(keys, jax.tree.leaves(layers), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(layers), values)


def batch_of(rng, B, T):
    """Rows of two documents and padding, with labels here and there."""
    segments = np.zeros((B, T), np.int32)
    positions = np.zeros((B, T), np.int32)
    for row in range(B):
        a = int(rng.integers(2, T // 2))
        b = int(rng.integers(a + 2, T + 1))
        segments[row, :a], segments[row, a:b] = 1, 2
        positions[row, :a], positions[row, a:b] = np.arange(a), np.arange(b - a)
    return Batch(
        tokens=rng.integers(0, V, (B, T)).astype(np.int32),
        segments=segments,
        positions=positions,
        labels=(rng.random((B, T)) < 0.6) & (segments > 0),
    )


def oracle(layers, config, hidden, embedding, table, batch, decay, softness, token_map, own=None):
    """Sum over heads of decay^m x mean cross-entropy, position by position in float64; hits and counts."""
    M = config.num_heads
    total, counts, hits = 0.0, np.zeros(M), np.zeros((M, 5))
    B, T = batch.tokens.shape
    unit = lambda x: x / np.sqrt(np.mean(x * x) + 1e-6)  # noqa: E731
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    scored = np.arange(V) if token_map is None else np.asarray(token_map)
    for m in range(M):
        losses = []
        for b in range(B):
            for t in range(T):
                at = t + 2 + m
                if at >= T or not batch.labels[b, at]:
                    continue
                if batch.segments[b, t] != batch.segments[b, at] or batch.segments[b, t] == 0:
                    continue
                z = hidden[b, t].astype(np.float64)
                if config.conditioned:
                    parts = [unit(z)] + [
                        unit(embedding[batch.tokens[b, t + 1 + i]].astype(np.float64)) for i in range(m + 1)
                    ]
                    mixed = layers[f"mixer_{m}_weight"] @ np.concatenate(parts) + layers[f"mixer_{m}_bias"]
                    z = z + silu(mixed)
                for layer in range(config.num_layers):
                    z = z + silu(layers["weight"][m, layer] @ z + layers["bias"][m, layer])
                rows = own[m] if own is not None else table[scored]
                logits = rows.astype(np.float64) @ z
                log_q = logits - (np.log(np.sum(np.exp(logits - logits.max()))) + logits.max())
                place = np.flatnonzero(scored == batch.tokens[b, at])
                hard = -log_q[place[0]] if place.size else 0.0
                soft = 0.0
                if softness:
                    taught = table[scored].astype(np.float64) @ hidden[b, at - 1]
                    p = np.exp(taught - taught.max())
                    soft = -np.sum(p / p.sum() * log_q)
                losses.append((1 - softness) * hard + softness * soft)
                counts[m] += 1
                if place.size:
                    better = np.sum(logits > logits[place[0]])
                    hits[m] += better < np.arange(1, 6)
        total += decay**m * np.sum(losses) / max(len(losses), 1)
    return total, counts, hits


@pytest.mark.parametrize("chunk", [4, 7, 64])
@pytest.mark.parametrize(
    ("conditioned", "own", "draft", "softness"),
    [(False, False, None, 0.0), (True, False, 20, 0.5), (False, True, 20, 0.0), (True, False, None, 1.0)],
)
def test_heads_loss_is_the_naive_sum(chunk, conditioned, own, draft, softness):
    rng = np.random.default_rng(3)
    config = MedusaConfig(3, 2, D, V, conditioned, own, draft)
    layers = head_params(config)
    token_map = (
        None if draft is None else jnp.asarray(np.sort(rng.choice(V, draft, replace=False)), jnp.int32)
    )
    hidden = jnp.asarray(rng.normal(size=(5, 19, D)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(V, D)), jnp.float32) * 0.5
    batch = batch_of(rng, 5, 19)
    rows = table if token_map is None else table[token_map]
    learns = loss.head_targets(batch, 3)[1]
    weights = 0.7 ** jnp.arange(3) / jnp.maximum(jnp.sum(learns, axis=(0, 1)), 1)
    params = heads.HeadParams(layers, token_map, None)
    value, scores = jax.jit(
        lambda: heads_loss(
            params,
            config,
            hidden,
            table[batch.tokens],
            batch,
            lambda z: [(z, rows)],
            [(hidden, rows)],
            weights,
            softness,
            chunk,
        )
    )()
    as_numpy = {name: np.asarray(leaf, np.float64) for name, leaf in layers.items()}
    expected, counts, hits = oracle(
        as_numpy,
        config,
        np.asarray(hidden),
        np.asarray(table),
        np.asarray(table),
        batch,
        0.7,
        softness,
        token_map,
        as_numpy.get("unembedding"),
    )
    assert float(value) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(scores.count, counts)
    np.testing.assert_array_equal(scores.hits, hits)
    assert counts.min() > 3
    assert 0 < hits.sum() < counts.sum() * 5


def test_gradients_of_chunks_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    xs = {"a": jnp.asarray(rng.normal(size=(2, 11, 3)), jnp.float32)}
    shared = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    fixed_xs, fixed = jnp.asarray(rng.normal(size=(2, 11)), jnp.float32), jnp.float32(2.0)

    def fn(xs, shared, fixed_xs, fixed):
        value = jnp.sum(jnp.tanh(xs["a"] @ shared.T).sum(-1) * fixed_xs) * fixed
        return value, jnp.sum(fixed_xs)

    def chunked(xs, shared):
        value, extra = sum_over_chunks(fn, 4, xs, shared, fixed_xs, fixed)
        return 3 * value, extra

    def whole(xs, shared):
        value, extra = fn(xs, shared, fixed_xs, fixed)
        return 3 * value, extra

    got = jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True)(xs, shared)
    want = jax.value_and_grad(whole, argnums=(0, 1), has_aux=True)(xs, shared)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("chunk", [8, 64])
def test_logits_of_a_batch_never_exist(chunk):
    """Temporaries of a compiled gradient stay under B x T x V numbers; not with a chunk as long as a row."""
    wide, B, T, M = 4096, 4, 64, 2
    config = MedusaConfig(M, 1, D, wide)
    hidden, table = jnp.zeros((B, T, D)), jnp.zeros((wide, D))
    batch = batch_of(np.random.default_rng(0), B, T)

    def value(layers):
        params = heads.HeadParams(layers, None, None)
        tables = lambda z: [(z, table)]  # noqa: E731
        return heads_loss(params, config, hidden, None, batch, tables, None, jnp.ones((M,)), 0.0, chunk)[0]

    lowered = jax.jit(jax.grad(value)).lower(head_params(config))
    text, temporaries = lowered.as_text(), lowered.compile().memory_analysis().temp_size_in_bytes
    assert f"{B}x{chunk}x{wide}x" in text
    small = chunk < T
    assert (temporaries < 4 * B * T * wide) == small
    assert (f"{B}x{T}x{wide}x" not in text and f"{B * T}x{wide}x" not in text) == small


@pytest.mark.parametrize("kind", ["frozen", "lora", "full"])
def test_logits_of_a_batch_never_exist_in_a_step(kind):
    run, state, _, _ = setup(kind, model_loss={"frozen": "none", "lora": "teacher", "full": "tokens"}[kind])
    B, T = 4, 40
    text = jax.jit(run).lower(state, batches_of(1, B, T)).as_text()
    assert f"{B}x8x{V}x" in text  # a chunk's
    assert not [size for size in (f"{B}x{T}x{V}x", f"{B * T}x{V}x") if size in text]


def test_shift():
    x = jnp.arange(1, 6)[None]
    assert shift(x, 2).tolist() == [[0, 0, 1, 2, 3]]
    assert shift(x, -2).tolist() == [[3, 4, 5, 0, 0]]
    assert shift(x, 0).tolist() == x.tolist()


# ----------------------------------------------------------------------------------------------- step


def setup(backbone_kind="frozen", heads_first=False, **changes):
    config = model_config()
    params = tiny.params(config)
    made = MedusaConfig(2, 1, D, V, conditioned=changes.pop("conditioned", False))
    objective = Objective(config, made, jnp.dtype(jnp.float32), chunk=8, **changes)
    layers = head_params(made)
    learnt, frozen = None, Frozen(params, None, None, None)
    if backbone_kind == "lora":
        learnt = lora.init(params, config, jax.random.key(1), rank=4, alpha=8, dropout=0.0)
    elif backbone_kind == "full":
        learnt, frozen = params, Frozen(None, None, None, None)
    optimizer = optax.sgd(0.1)
    mine = None if learnt is None else optimizer.init(learnt)
    state = TrainState(jnp.int32(0), Trained(layers, learnt), optimizer.init(layers), mine)
    joint = learnt is not None and not heads_first

    def run(state, batches, hidden=None, objective=objective):
        return jax.jit(
            lambda state, batches, hidden: train_step(
                state,
                frozen,
                batches,
                hidden,
                jax.random.key(0),
                objective=objective,
                heads_optimizer=optimizer,
                backbone_optimizer=optimizer if joint else None,
                learning_rate=lambda _: jnp.float32(0.1),
            )
        )(state, batches, hidden)

    return run, state, frozen, objective


def batches_of(A, B, T=24, seed=0):
    rng = np.random.default_rng(seed)
    flat = batch_of(rng, A * B, T)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(A, B, T), flat)


@pytest.mark.parametrize("kind", ["frozen", "lora", "full"])
def test_accumulation_is_one_large_batch(kind):
    run, state, _, _ = setup(kind, model_loss="none" if kind == "frozen" else "tokens")
    whole = batches_of(1, 6)
    parts = jax.tree.map(lambda leaf: leaf.reshape(3, 2, -1), whole)
    one, one_metrics = run(state, whole)
    many, many_metrics = run(state, parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one, many)
    assert float(one_metrics.loss) == pytest.approx(float(many_metrics.loss), rel=1e-5)
    np.testing.assert_array_equal(one_metrics.heads.hits, many_metrics.heads.hits)


def test_a_frozen_backbone_has_no_gradient_and_no_state():
    run, state, frozen, objective = setup("frozen")
    new, metrics = run(state, batches_of(1, 4))
    assert new.trained.backbone is None
    assert new.backbone_optimizer is None
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), new.trained.heads, state.trained.heads)
    assert min(jax.tree.leaves(moved)) > 0
    assert bool(metrics.finite)

    def value(params):
        batch = jax.tree.map(lambda leaf: leaf[0], batches_of(1, 4))
        counts = jnp.ones((2,)), jnp.ones(())
        return step.loss(
            state.trained, dataclasses.replace(frozen, params=params), batch, None, objective, counts, 0, None
        )[0]

    gradients = jax.grad(value)(frozen.params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_stored_hidden_states_change_nothing():
    run, state, frozen, objective = setup("frozen", conditioned=True, softness=0.5)
    batches = batches_of(2, 3)
    flat = jax.tree.map(lambda leaf: leaf.reshape(6, -1), batches)
    hidden = step.hidden_of(objective, frozen.params, flat).reshape(2, 3, 24, D)
    one, first = run(state, batches)
    two, second = run(state, batches, hidden)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, two)
    assert float(first.loss) == pytest.approx(float(second.loss), rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_heads_alone_leave_the_backbone(kind):
    run, state, _, _ = setup(kind, heads_first=True, model_loss="tokens")
    new, _ = run(state, batches_of(1, 4))
    jax.tree.map(np.testing.assert_array_equal, new.trained.backbone, state.trained.backbone)
    assert np.any(new.trained.heads["weight"] != state.trained.heads["weight"])


def test_divergence_from_the_teacher_is_zero_at_the_start_and_then_not():
    run, state, _, _ = setup("lora", model_loss="teacher", dropout=0.0)
    new, metrics = run(state, batches_of(1, 4))
    assert abs(float(metrics.divergence)) < 1e-6
    for _ in range(3):
        new, metrics = run(new, batches_of(1, 4))
    assert float(metrics.divergence) > 1e-5


def test_model_loss_is_the_naive_mean():
    run, state, frozen, objective = setup("lora", model_loss="tokens")
    batches = batches_of(1, 3)
    _, metrics = run(state, batches)
    batch = jax.tree.map(lambda leaf: np.asarray(leaf[0]), batches)
    hidden = np.asarray(step.hidden_of(objective, frozen.params, batch))
    logits = np.asarray(backbone.unembed(frozen.params, objective.config, hidden), np.float64)
    losses = []
    for b in range(3):
        for t in range(23):
            same = batch.segments[b, t] == batch.segments[b, t + 1] > 0
            if batch.labels[b, t + 1] and same:
                row = logits[b, t]
                losses.append(
                    np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[batch.tokens[b, t + 1]]
                )
    assert float(metrics.model.count) == len(losses)
    assert float(metrics.model.loss) / len(losses) == pytest.approx(np.mean(losses), rel=1e-5)
    lonely, _ = run(state, batches, None, dataclasses.replace(objective, model_loss="none"))
    assert np.any(lonely.trained.heads["weight"] != state.trained.heads["weight"])


def test_what_is_not_finite_changes_nothing():
    run, state, _, _ = setup("frozen")
    bad = dataclasses.replace(
        state, trained=Trained({**state.trained.heads, "bias": jnp.full((2, 1, D), jnp.nan)}, None)
    )
    new, metrics = run(bad, batches_of(1, 2))
    assert not bool(metrics.finite)
    np.testing.assert_array_equal(new.trained.heads["weight"], bad.trained.heads["weight"])
    assert int(new.step) == 1


def test_no_labels_is_zero_and_not_nan():
    run, state, _, _ = setup("frozen")
    batches = batches_of(1, 2)
    none = dataclasses.replace(batches, labels=jnp.zeros_like(batches.labels))
    new, metrics = run(state, none)
    assert float(metrics.loss) == 0.0
    assert bool(metrics.finite)
    jax.tree.map(np.testing.assert_array_equal, new.trained.heads, state.trained.heads)
    assert not math.isnan(float(metrics.gradient))


def test_every_head_learns():
    run, state, _, _ = setup("frozen")
    new, metrics = run(state, batches_of(1, 4))
    for m in range(2):
        assert np.any(new.trained.heads["weight"][m] != state.trained.heads["weight"][m])
        assert float(metrics.heads.count[m]) > 0
