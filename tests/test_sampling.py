"""Filters against sorting, noise against statistics, parameters against bad values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_jax import SamplingParams, UserError, sampling

FLOATS = st.floats(-50, 50, width=32).map(lambda x: x + 0.0)


filter_logits = jax.jit(sampling.filter_logits)


def rows(n=1, **values):
    made = sampling.RowSampling.greedy(n).__dict__
    given = {name: jnp.full((n,), value, made[name].dtype) for name, value in values.items()}
    return sampling.RowSampling(**(made | given))


def judging(n):
    """The fields that only trees look at."""
    made = sampling.RowSampling.greedy(n)
    return {"acceptance": made.acceptance, "epsilon": made.epsilon, "delta": made.delta}


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOATS, min_size=8, max_size=8), st.integers(1, 10))
def test_top_k_equals_sorting(values, k):
    logits = jnp.asarray(values, jnp.float32)[None, None]
    kept = np.asarray(filter_logits(logits, rows(top_k=k)) > -np.inf)[0, 0]
    threshold = np.sort(np.asarray(values, np.float32))[::-1][min(k, 8) - 1]
    np.testing.assert_array_equal(kept, np.asarray(values, np.float32) >= threshold)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-6, 6, width=32), min_size=8, max_size=8, unique=True), st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(values, p):
    x = np.asarray(values, np.float64)
    probabilities = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    order = np.argsort(-x)
    mass = np.cumsum(probabilities[order])
    if np.any(np.abs(mass - p) < 1e-5):
        return  # at the edge itself rounding decides
    logits = jnp.asarray(values, jnp.float32)[None, None]
    kept = np.asarray(filter_logits(logits, rows(top_p=p)) > -np.inf)[0, 0]
    expected = np.zeros(8, bool)
    expected[order[: int(np.sum(mass < p)) + 1]] = True
    np.testing.assert_array_equal(kept, expected)


def test_filters_of_each_row_are_its_own():
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (4, 2, 1))
    made = sampling.RowSampling(
        temperature=jnp.ones(4),
        top_k=jnp.array([0, 1, 0, 3]),
        top_p=jnp.array([1.0, 1.0, 0.7, 0.85]),
        min_p=jnp.array([0.2, 0.0, 0.0, 0.0]),
        repetition_penalty=jnp.ones(4),
        seed=jnp.zeros(4, jnp.uint32),
        **judging(4),
    )
    kept = np.isfinite(filter_logits(logits, made)).sum(-1)
    # Row 3: of the three left by top-k, 0.526 + 0.316 = 0.842 does not reach 0.85.
    np.testing.assert_array_equal(kept, [[3, 3], [1, 1], [2, 2], [3, 3]])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-38, -3e38])
def test_ordered_bits_keep_the_order(value):
    others = np.array([-np.inf, -1e30, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1e30, np.inf], np.float32)
    keys = np.asarray(sampling.ordered_bits(jnp.asarray(others)))
    key = int(sampling.ordered_bits(jnp.float32(value)))
    for other, its in zip(others, keys, strict=True):
        if other < np.float32(value):
            assert its < key
        if other > np.float32(value):
            assert its > key


@pytest.mark.parametrize("size", [1, 400, 4096, 4097, 5000, 49152])
def test_argmax_equals_numpys(size):
    rng = np.random.default_rng(size)
    x = rng.integers(-3, 3, (3, 4, size)).astype(np.float32)  # many ties: the first counts
    np.testing.assert_array_equal(sampling.argmax(jnp.asarray(x)), np.argmax(x, axis=-1))
    assert int(sampling.argmax(jnp.full((size,), -jnp.inf))) == 0


@pytest.mark.parametrize(
    ("vocabulary", "devices"), [(49152, 3), (49152, 8), (32000, 8), (128256, 8), (151936, 8), (32768, 16)]
)
def test_blocks_lie_within_shards(vocabulary, devices):
    size = sampling.block_size(vocabulary)
    assert size >= 4
    assert vocabulary % (size * devices) == 0


def test_noise_depends_on_seed_and_position_only():
    one = sampling.gumbel(jnp.array([5, 6], jnp.uint32), jnp.array([[3, 4], [3, 4]]), 50)
    two = sampling.gumbel(jnp.array([6], jnp.uint32), jnp.array([[4]]), 50)
    np.testing.assert_array_equal(one[1, 1], two[0, 0])
    flat = np.asarray(one).reshape(4, -1)
    assert len({row.tobytes() for row in flat}) == 4


def test_samples_follow_the_filtered_distribution():
    """Chi-square over 40,000 draws (fixed seeds), 4 outcomes: 16.27 is the 0.999 quantile at 3 degrees."""
    n = 40_000
    base = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.06, 0.04]))
    made = sampling.RowSampling(
        temperature=jnp.full((n,), 2.0),
        top_k=jnp.full((n,), 4, jnp.int32),
        top_p=jnp.ones(n),
        min_p=jnp.zeros(n),
        repetition_penalty=jnp.ones(n),
        seed=jnp.arange(n, dtype=jnp.uint32),
        **judging(n),
    )
    logits = jnp.tile(base, (n, 1, 1))
    unused = lambda: jnp.zeros((n, 1, 5), bool)  # noqa: E731
    drawn = jax.jit(lambda logits: sampling.choose(logits, jnp.full((n, 1), 9), made, unused))(logits)
    counts = np.bincount(np.asarray(drawn)[:, 0], minlength=5)
    expected = np.exp(np.asarray(base)[:4] / 2)
    expected = n * expected / expected.sum()
    assert counts[4] == 0
    assert np.sum((counts[:4] - expected) ** 2 / expected) < 16.27


def test_history_mask_ignores_what_lies_behind_the_text():
    tokens = jnp.array([[1, 3, 1, 5], [0, 0, 2, 2]])
    mask = sampling.history_mask(tokens, jnp.array([3, 0]), 6)
    np.testing.assert_array_equal(np.asarray(mask), [[0, 1, 0, 1, 0, 0], [0] * 6])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 1e-39),  # zero, or nearly, as float32
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1e-40),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", ("ok", "")),
    ],
)
def test_bad_parameters_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        sampling.resolve(SamplingParams(**{field: value}), {})


def test_the_models_own_defaults_count_unless_overridden():
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}
    defaults = sampling.model_defaults(asked)
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    resolved = sampling.resolve(SamplingParams(temperature=0.0), defaults)
    assert (resolved.temperature, resolved.top_p, resolved.max_new_tokens) == (0.0, 0.9, 256)
    # Without do_sample a file's temperature is not in force: transformers decodes greedily then.
    assert sampling.model_defaults({"temperature": 0.6, "eos_token_id": 2}) == {}
    assert sampling.model_defaults({"do_sample": True}) == {"temperature": 1.0}


@pytest.mark.parametrize("temperature", [2e-38, 1e-30, 1e30])
@pytest.mark.parametrize("top_p", [2e-38, 0.5, 1.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_numbers_still_choose_a_token(temperature, top_p, scale):
    logits = jnp.array([[[1.0, 4.0, 3.0, -2.0]]]) * scale
    made = rows(temperature=temperature, top_p=top_p, seed=3)
    unused = lambda: jnp.zeros((1, 1, 4), bool)  # noqa: E731
    chosen = int(sampling.choose(logits, jnp.array([[5]]), made, unused)[0, 0])
    assert 0 <= chosen < 4
    # The likeliest, where anything can tell it from the others: at 1e30 all may be equal in float32.
    told_apart = scale * 3 / temperature > 1e-6
    if told_apart and ((temperature < 1 and scale >= 1) or top_p < 0.2):
        assert chosen == 1


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5), seed=np.uint32(7))
    resolved = sampling.resolve(params, {})
    assert (resolved.top_k, resolved.temperature, resolved.seed) == (3, 0.5, 7)
    assert type(resolved.top_k) is int
