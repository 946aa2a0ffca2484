"""Temperature, top-k, top-p, min-p, repetition penalty and seeded noise, as pure functions of logits.

A choice is arg-max(log p + g), p the filtered distribution and g Gumbel noise keyed by (seed, absolute
position). It depends on nothing else, so a text does not depend on its batch, on how it was cut into
steps, or on what else was computed beside it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. None: the model's own default where it has one (see `resolve`)."""

    max_new_tokens: int | None = None  # built-in default 256
    temperature: float | None = None  # built-in default 0: greedy
    top_k: int | None = None  # built-in default 0: off
    top_p: float | None = None  # built-in default 1: off
    min_p: float | None = None  # built-in default 0: off
    repetition_penalty: float | None = None  # built-in default 1: off
    seed: int = 0
    stop: tuple[str, ...] = ()
    # How guesses are judged above temperature 0: or "rejection", or "typical" (lossy), which reads neither
    # the filters nor the repetition penalty.
    acceptance: str = "exact"
    epsilon: float = 0.09  # typical: a guess this probable is always accepted
    delta: float = 0.3  # typical: share of exp(-entropy) that suffices


DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 256,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


# What every field may hold, and in words. Numbers are judged as the float32 that the device computes with.
_INTEGER, _NUMBER = numbers.Integral, numbers.Real
_TINY = float(np.finfo(np.float32).tiny)
_CHECKS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_new_tokens": (_INTEGER, lambda x: x >= 1, "an integer of at least 1"),
    "temperature": (_NUMBER, lambda x: x == 0 or _TINY <= x < math.inf, "0 or a positive finite number"),
    "top_k": (_INTEGER, lambda x: x >= 0, "an integer of at least 0 (0: off)"),
    "top_p": (_NUMBER, lambda x: _TINY <= x <= 1, "a number above 0 and at most 1 (1: off)"),
    "min_p": (_NUMBER, lambda x: 0 <= x <= 1, "a number from 0 to 1 (0: off)"),
    "repetition_penalty": (_NUMBER, lambda x: _TINY <= x < math.inf, "a finite number above 0 (1: off)"),
    "seed": (_INTEGER, lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1"),
    "epsilon": (_NUMBER, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "delta": (_NUMBER, lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
}


# How a row's guesses are judged (see verify.py), as traced values.
EXACT, REJECTION, TYPICAL = 0, 1, 2
ACCEPTANCE = {"exact": EXACT, "rejection": REJECTION, "typical": TYPICAL}

# Independent streams of noise. Sharing one between the drawing of guesses and their acceptance would bias
# the result of `rejection`; `exact` ranks guesses and chooses under the same noise on purpose.
CHOICE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults that a model's `generation_config.json` asks for.

    Its temperature and filters count only when it asks for sampling (`do_sample`).
    """
    sampled = bool(generation_config.get("do_sample"))
    names = ["max_new_tokens", "repetition_penalty"]
    names += ["temperature", "top_k", "top_p", "min_p"] if sampled else []
    found = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if sampled:
        found.setdefault("temperature", 1.0)
    return {name: value for name, value in found.items() if value != DEFAULTS[name]}


def resolve(params: SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Fill every None from the model's `defaults`, then from `DEFAULTS`, and check all values.

    Raises UserError naming the field, its value and what was expected.
    """
    chosen = {
        name: value if (value := getattr(params, name)) is not None else defaults.get(name, builtin)
        for name, builtin in DEFAULTS.items()
    }
    if not isinstance(params, SamplingParams):
        raise UserError(f"sampling parameters are {params!r}, expected SamplingParams")
    if not isinstance(params.stop, (str, tuple, list)):
        raise UserError(f"stop is {params.stop!r}, expected a list of strings")
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    params = dataclasses.replace(params, stop=stop, **chosen)

    checked = {name: _checked(name, getattr(params, name)) for name in _CHECKS}
    params = dataclasses.replace(params, **checked)
    if params.acceptance not in ACCEPTANCE:
        raise UserError(f"acceptance is {params.acceptance!r}, expected one of {', '.join(ACCEPTANCE)}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise UserError(f"stop holds {text!r}, expected non-empty strings")
    return params


def _checked(name: str, value: Any) -> int | float:
    """The value as Python's int or float. Raises UserError when it, rounded to float32, is out of range."""
    kind, good, expected = _CHECKS[name]
    error = UserError(f"{name} is {value!r}, expected {expected}")
    if isinstance(value, bool) or not isinstance(value, kind):
        raise error
    if kind is _INTEGER:
        if not good(int(value)):
            raise error
        return int(value)
    try:
        number = float(value)
    except OverflowError:  # an integer too large for a float
        raise error from None
    with np.errstate(over="ignore", under="ignore"):
        if not good(float(np.float32(number))):
            raise error
    return number


@flax.struct.dataclass
class RowSampling:
    """The sampling parameters of each row, traced: another value is not another program."""

    temperature: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32, 0: off
    top_p: jax.Array  # [B] float32, 1: off
    min_p: jax.Array  # [B] float32, 0: off
    repetition_penalty: jax.Array  # [B] float32, 1: off
    seed: jax.Array  # [B] uint32
    acceptance: jax.Array  # [B] int32: EXACT, REJECTION or TYPICAL
    epsilon: jax.Array  # [B] float32, typical
    delta: jax.Array  # [B] float32, typical

    @classmethod
    def greedy(cls, batch: int) -> RowSampling:
        """Rows that take the most likely token."""
        return cls(
            temperature=jnp.zeros((batch,), jnp.float32),
            top_k=jnp.zeros((batch,), jnp.int32),
            top_p=jnp.ones((batch,), jnp.float32),
            min_p=jnp.zeros((batch,), jnp.float32),
            repetition_penalty=jnp.ones((batch,), jnp.float32),
            seed=jnp.zeros((batch,), jnp.uint32),
            acceptance=jnp.full((batch,), EXACT, jnp.int32),
            epsilon=jnp.full((batch,), 0.09, jnp.float32),
            delta=jnp.full((batch,), 0.3, jnp.float32),
        )


SMALL = 4096  # up to here a vocabulary is searched whole


def block_size(size: int) -> int:
    """Into blocks of how many entries a vocabulary of `size` is cut, 1 for not at all.

    The number of blocks keeps a factor of 16 where the vocabulary has one: blocks of a sharded vocabulary
    then lie within its shards, and none is gathered.
    """
    if size <= SMALL:
        return 1
    twos = (size & -size).bit_length() - 1
    return 2 ** min(4, twos - 4) if twos > 5 else 16


def in_blocks(x: jax.Array) -> jax.Array:
    """x [..., V] as [..., blocks, block_size(V)], -inf behind the end."""
    size = block_size(x.shape[-1])
    count = -(-x.shape[-1] // size)
    behind = [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])]
    return jnp.pad(x, behind, constant_values=-jnp.inf).reshape(*x.shape[:-1], count, size)


def argmax(x: jax.Array) -> jax.Array:
    """The first index [...] of the largest of x [..., V], int32.

    Maxima of blocks first, since XLA:CPU does not vectorise an arg-max but does a maximum: 16 rows of 49,152
    take a twentieth of the time.
    """
    if block_size(x.shape[-1]) == 1:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    blocks = in_blocks(x)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * blocks.shape[-1] + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 values x, so that a threshold can be found bit by bit."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def at_least_weight(keys: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Mask [..., V] of the fewest largest keys whose weights reach `target` [...]; equal keys stay together.

    Finds the largest threshold t with sum(weights[keys >= t]) >= target by fixing one bit after the other:
    32 passes over V, where a sort of [B, N, V] would cost more than a decoding step on a CPU.
    """

    def fix_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= candidate[..., None], weights, 0), axis=-1)
        return jnp.where(reached >= target, candidate, threshold)

    start = jnp.zeros(keys.shape[:-1], jnp.uint32)
    return keys >= jax.lax.fori_loop(0, 32, fix_bit, start)[..., None]


def filter_logits(logits: jax.Array, rows: RowSampling) -> jax.Array:
    """Set to -inf what top-k, top-p and min-p exclude, in this order, each after the one before.

    logits [B, N, V] float32, after the temperature. Tokens that tie with the last one kept are kept too, and
    the likeliest is never excluded.
    top-p: Holtzman et al. 2020 (arXiv 1904.09751); min-p: Nguyen et al. 2024 (arXiv 2407.01082).
    """
    V = logits.shape[-1]

    def each_row(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], logits.shape[:2])

    def top_k(x: jax.Array) -> jax.Array:
        k = jnp.where(rows.top_k > 0, rows.top_k, V).astype(jnp.float32)
        return jnp.where(at_least_weight(ordered_bits(x), jnp.ones_like(x), each_row(k)), x, -jnp.inf)

    def top_p(x: jax.Array) -> jax.Array:
        keep = at_least_weight(ordered_bits(x), jax.nn.softmax(x, axis=-1), each_row(rows.top_p))
        keep = keep | (rows.top_p >= 1)[:, None, None] | (x == jnp.max(x, axis=-1, keepdims=True))
        return jnp.where(keep, x, -jnp.inf)

    def min_p(x: jax.Array) -> jax.Array:
        floor = jnp.max(x, axis=-1, keepdims=True) + jnp.log(rows.min_p)[:, None, None]
        return jnp.where(x >= floor, x, -jnp.inf)

    def same(x: jax.Array) -> jax.Array:
        return x

    logits = jax.lax.cond(jnp.any(rows.top_k > 0), top_k, same, logits)
    logits = jax.lax.cond(jnp.any(rows.top_p < 1), top_p, same, logits)
    return jax.lax.cond(jnp.any(rows.min_p > 0), min_p, same, logits)


def _key(seed: jax.Array, position: jax.Array, stream: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return key if stream == CHOICE_STREAM else jax.random.fold_in(key, stream)


def gumbel(seeds: jax.Array, positions: jax.Array, vocab_size: int, stream: int = CHOICE_STREAM) -> jax.Array:
    """Gumbel noise [B, N, V] float32, a function of (seeds [B], absolute position of the token [B, N])."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(_key(seed, position, stream), (vocab_size,))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seeds, positions)


def uniform(seeds: jax.Array, positions: jax.Array, count: int) -> jax.Array:
    """Uniform numbers [B, count] in [0, 1) for accepting guesses at positions [B]."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(_key(seed, position, ACCEPT_STREAM), (count,))

    return jax.vmap(one)(seeds, positions)


def penalise(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Repetition penalty (Keskar et al. 2019, arXiv 1909.05858) as Hugging Face applies it.

    logits [B, N, V]; seen [B, N, V] bool, the tokens of each node's own text; penalty [B].
    """
    penalty = penalty[:, None, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def history_mask(tokens: jax.Array, known: jax.Array, vocab_size: int) -> jax.Array:
    """[B, V] bool: which tokens occur in the first `known[b]` of tokens [B, S]."""
    inside = jnp.arange(tokens.shape[1])[None] < known[:, None]
    # Slots behind the text go to an index outside the table, which drops them.
    targets = jnp.where(inside, tokens, vocab_size)
    empty = jnp.zeros((tokens.shape[0], vocab_size), bool)
    return jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(empty, targets)


def temper(logits: jax.Array, rows: RowSampling) -> jax.Array:
    """logits [B, N, V] over the temperature, up to a constant; those of greedy rows over 1.

    The maximum goes first: a logit over a tiny temperature would be infinite.
    """
    above = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - above) / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None, None]


def pick(logits: jax.Array, tempered: jax.Array, rows: RowSampling, noise: jax.Array) -> jax.Array:
    """The choice [B, N] under noise [B, N, V]: arg-max(log p + g).

    Rows that are greedy, or typical (whose roots are greedy by the published rule), take the likeliest token.
    """
    noisy = filter_logits(tempered, rows) + noise
    sampled = (rows.temperature > 0) & (rows.acceptance != TYPICAL)
    return jnp.where(sampled[:, None], argmax(noisy), argmax(logits))


def choose(
    logits: jax.Array, positions: jax.Array, rows: RowSampling, seen: Callable[[], jax.Array]
) -> jax.Array:
    """The model's choice [B, N] of the token at `positions` [B, N], from logits [B, N, V].

    seen() gives the tokens [B, N, V] bool that the repetition penalty counts as used. Work that no row of
    the batch asks for, this one too, is branched over at run time.
    """
    V = logits.shape[-1]

    def penalised(logits: jax.Array) -> jax.Array:
        return penalise(logits, seen(), rows.repetition_penalty)

    def elaborate(logits: jax.Array) -> jax.Array:
        logits = jax.lax.cond(jnp.any(rows.repetition_penalty != 1), penalised, lambda x: x, logits)
        return pick(logits, temper(logits, rows), rows, gumbel(rows.seed, positions, V))

    plain = jnp.all((rows.temperature == 0) & (rows.repetition_penalty == 1))
    return jax.lax.cond(plain, argmax, elaborate, logits)
