"""Decoding: against recomputing everything, rows against single runs, ends, programs, cache moves."""

import copy
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from medusa_jax import SamplingParams, UserError, backbone, cache, decode, generate, sampling, schedule

PROMPTS = ["Rain", "A leap year has one day more", "The quick brown fox " * 3, "x", "What is the answer?"]


def ids(lm, text):
    return lm.encode(text, raw=True)


def reference(lm, prompt_ids, params: SamplingParams):
    """A forward over the whole text for every token: no cache, no batch, no loop on the device."""
    params = sampling.resolve(params, {})
    rows = sampling.RowSampling(
        temperature=jnp.array([params.temperature], jnp.float32),
        top_k=jnp.array([params.top_k], jnp.int32),
        top_p=jnp.array([params.top_p], jnp.float32),
        min_p=jnp.array([params.min_p], jnp.float32),
        repetition_penalty=jnp.array([params.repetition_penalty], jnp.float32),
        seed=jnp.array([params.seed], jnp.uint32),
        acceptance=jnp.zeros(1, jnp.int32),
        epsilon=jnp.zeros(1),
        delta=jnp.zeros(1),
    )
    size = 128

    @jax.jit
    def next_token(tokens, known):
        positions = jnp.arange(size)[None]
        hidden, _ = backbone.forward(lm.params, lm.config, tokens, positions, jnp.tri(size, dtype=bool), None)
        logits = backbone.unembed(lm.params, lm.config, hidden[0, known - 1])[None, None]
        used = lambda: sampling.history_mask(tokens, known[None], lm.config.vocab_size)[:, None]  # noqa: E731
        return sampling.choose(logits, known[None, None], rows, used)[0, 0]

    text = list(prompt_ids)
    for _ in range(params.max_new_tokens):
        padded = jnp.array([text + [0] * (size - len(text))])
        text.append(int(next_token(padded, jnp.int32(len(text)))))
        if text[-1] in lm.end_tokens:
            break
    return text[len(prompt_ids) :]


SETTINGS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=20, temperature=0.9, seed=7),
    SamplingParams(max_new_tokens=20, temperature=1.5, seed=2**32 - 1, top_k=9, top_p=0.8, min_p=0.02),
    SamplingParams(max_new_tokens=20, repetition_penalty=1.6),
    SamplingParams(max_new_tokens=20, temperature=0.7, seed=3, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def lm():
    return tiny.lm(end_tokens=())


@pytest.mark.parametrize("params", SETTINGS)
def test_generation_equals_recomputing_everything(lm, params):
    prompt = PROMPTS[1]
    (done,) = lm.generate([prompt], params, raw=True)
    assert done.token_ids == reference(lm, ids(lm, prompt), params)
    assert len(set(done.token_ids)) > 3  # a text that repeats one token would prove little


def test_batch_rows_equal_single_runs(lm):
    """Other lengths, parameters and limits beside it, and rows refilled from the queue, change nothing."""
    params = [
        dataclasses.replace(p, max_new_tokens=n) for p, n in zip(SETTINGS, (20, 3, 33, 1, 12), strict=True)
    ]
    single = [lm.generate([p], own, raw=True)[0].token_ids for p, own in zip(PROMPTS, params, strict=True)]
    assert [len(one) for one in single] == [20, 3, 33, 1, 12]
    for batch_size in (2, 3, 5):
        together = lm.generate(PROMPTS, params, raw=True, batch_size=batch_size)
        assert [one.token_ids for one in together] == single
        assert [one.prompt for one in together] == PROMPTS


def test_stream_equals_generate(lm):
    for params in SETTINGS:
        (done,) = lm.generate([PROMPTS[2]], params, raw=True)
        assert "".join(lm.stream(PROMPTS[2], params, raw=True)) == done.text


def test_no_program_for_another_prompt_length_temperature_seed_or_limit():
    lm = tiny.lm(seed=5)
    lm.generate(PROMPTS, SamplingParams(max_new_tokens=9), raw=True, batch_size=2)
    before = set(lm.programs.compiled)
    assert len(before) == 8  # empty x 2, start, prefill x 2 chunk widths, insert, run, stop_rows
    for i, params in enumerate(SETTINGS):
        prompts = [*PROMPTS[i:], *PROMPTS[:i]][: 2 + i % 3]
        lm.generate(prompts, params, raw=True, batch_size=2)
    assert set(lm.programs.compiled) == before


@pytest.mark.parametrize("limit", [1, 2, 16, 17, 40])
def test_max_new_tokens_is_exact(lm, limit):
    (done,) = lm.generate(["Rain"], SamplingParams(max_new_tokens=limit), raw=True)
    assert (len(done.token_ids), done.finish_reason) == (limit, "length")
    assert done.stats.steps == done.stats.new_tokens == limit
    assert done.stats.accepted_by_depth == [limit]
    assert done.stats.tokens_per_step == 1


@pytest.mark.parametrize("which", [0, 1, 5, 17])
def test_every_end_token_ends(lm, which):
    full = lm.generate(["Rain"], SamplingParams(max_new_tokens=30), raw=True)[0].token_ids
    end = full[which]
    ended = copy.copy(lm)  # the same programs: end tokens are traced
    ended.end_tokens = (399, end, 398)
    (done,) = ended.generate(["Rain"], SamplingParams(max_new_tokens=30), raw=True)
    assert done.token_ids == full[: full.index(end) + 1]
    assert done.finish_reason == "stop"


def test_the_context_limit_is_reached_exactly():
    lm = tiny.lm(max_position_embeddings=48, end_tokens=())
    prompt_ids = ids(lm, "The quick brown fox jumps over")
    (done,) = lm.generate(["The quick brown fox jumps over"], SamplingParams(max_new_tokens=500), raw=True)
    assert len(prompt_ids) + len(done.token_ids) == 48
    assert done.finish_reason == "length"
    longer = tiny.lm(end_tokens=())  # the last token must not have been computed from a moved cache write
    (same,) = longer.generate(
        ["The quick brown fox jumps over"], SamplingParams(max_new_tokens=500), raw=True
    )
    assert done.token_ids == same.token_ids[: len(done.token_ids)]
    with pytest.raises(UserError, match=r"context of 48 leaves room for 47"):
        lm.generate(["a" * 4000], raw=True)


@pytest.mark.parametrize("at", [0, 3, 15, 16, 20])
def test_stop_strings_cut_text_and_ids(lm, at):
    """Wherever the stop string falls among the 16 steps between two looks of the host."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=11)
    (full,) = lm.generate(["Rain"], params, raw=True)
    pieces = [lm.tokenizer.decode(full.token_ids[: i + 1]) for i in range(40)]
    stop = pieces[at][len(pieces[at - 1]) if at else 0 :]
    cut = full.text.index(stop)
    stopping = SamplingParams(max_new_tokens=40, temperature=1.0, seed=11, stop=(stop,))
    for done in (
        lm.generate(["Rain"], stopping, raw=True)[0],
        lm.generate(["Rain", "x"], [stopping, params], raw=True)[0],
    ):
        assert done.text == full.text[:cut]
        assert done.finish_reason == "stop"
        kept = next(i for i in range(40) if stop in pieces[i])
        assert done.token_ids == full.token_ids[:kept]
        assert done.stats.new_tokens == done.stats.steps == kept
    assert "".join(lm.stream("Rain", stopping, raw=True)) == full.text[:cut]


def test_chunked_prefill_equals_one_chunk(lm, monkeypatch):
    prompt = "The rain falls on the hills and on the roofs. " * 7
    params = SamplingParams(max_new_tokens=12)
    (whole,) = lm.generate([prompt], params, raw=True)
    assert len(ids(lm, prompt)) > 100
    monkeypatch.setattr(decode, "MAX_CHUNK", 32)
    (chunked,) = lm.generate([prompt], params, raw=True)
    assert ("prefill", 128, 32, False) in lm.programs.compiled
    assert chunked.token_ids == whole.token_ids


def test_prefill_memory_is_linear_in_the_prompt():
    programs = tiny.lm().programs
    temp = {
        slots: programs.prefill(slots, 512, False).memory_analysis().temp_size_in_bytes  # type: ignore[attr-defined]
        for slots in (2048, 4096, 8192)
    }
    # Scores of one chunk: [heads, 512, slots] float32, a few copies of it; a square would quadruple.
    assert temp[8192] - temp[4096] < 2.2 * (temp[4096] - temp[2048])
    assert temp[8192] < 8192 * 512 * 4 * 4 * 4


def test_insert_touches_no_other_row(lm):
    programs, slots = lm.programs, 128
    rng = np.random.default_rng(0)

    def noise(leaf):
        return jnp.asarray(rng.integers(0, 2, leaf.shape).astype(leaf.dtype))

    state = jax.tree.map(noise, programs.empty(4, slots)())
    single = jax.tree.map(noise, programs.empty(1, slots)())
    before = jax.device_get(state)
    after = jax.device_get(programs.insert(4, slots)(state, np.int32(2), single))
    for old, new, put in zip(*map(jax.tree.leaves, (before, after, jax.device_get(single))), strict=True):
        np.testing.assert_array_equal(new[[0, 1, 3]], old[[0, 1, 3]])
        np.testing.assert_array_equal(new[2], put[0])


@pytest.mark.parametrize("with_path", [False, True])
def test_commit_equals_numpy(with_path):
    rng = np.random.default_rng(1)
    config = tiny.config()
    shape = (3, config.num_key_value_heads, 16, config.head_dim)
    T, counts, lengths = 5, np.array([0, 2, 3]), np.array([4, 11, 0])
    layers = range(config.num_hidden_layers)
    old = [rng.standard_normal(shape).astype(np.float32) for _ in layers]
    new = [rng.standard_normal((*shape[:2], T, shape[3])).astype(np.float32) for _ in layers]
    path = np.array([[0, 2, 4], [1, 3, 4], [0, 1, 4]]) if with_path else None
    kv = cache.KVCache(
        keys=tuple(map(jnp.asarray, old)),
        values=tuple(jnp.asarray(-x) for x in old),
        lengths=jnp.asarray(lengths, jnp.int32),
    )
    fresh = tuple((jnp.asarray(x), jnp.asarray(-x)) for x in new)
    done = jax.jit(cache.commit)(kv, fresh, path, jnp.asarray(counts, jnp.int32))
    np.testing.assert_array_equal(done.lengths, lengths + counts)
    for layer in layers:
        for b in range(3):
            picked = new[layer][b][:, path[b]] if path is not None else new[layer][b]
            expected = old[layer][b].copy()
            expected[:, lengths[b] : lengths[b] + picked.shape[1]] = picked
            np.testing.assert_array_equal(done.keys[layer][b], expected)
            np.testing.assert_array_equal(done.values[layer][b], -expected)


def test_a_session_reads_only_what_is_new(lm):
    session = schedule.Session(lm.engine, 128)
    first = lm.job(ids(lm, "A leap year has one day more"), SamplingParams(max_new_tokens=10))
    list(session.stream(first))
    assert first.prefilled_tokens == len(first.prompt_ids)
    longer = first.prompt_ids + first.token_ids + ids(lm, " and the other years")
    second = lm.job(longer, SamplingParams(max_new_tokens=120))
    list(session.stream(second))
    # All but the last generated token are cached: that one was chosen, never read.
    assert second.prefilled_tokens == len(longer) - (len(first.prompt_ids) + len(first.token_ids) - 1)
    assert session.slots > 128  # the cache grew on the way
    fresh = lm.job(longer, SamplingParams(max_new_tokens=120))
    list(schedule.Session(lm.engine, 256).stream(fresh))
    assert second.token_ids == fresh.token_ids
    other = lm.job(ids(lm, "A leap day"), SamplingParams(max_new_tokens=5))  # shares a beginning only
    list(session.stream(other))
    assert other.prefilled_tokens < len(other.prompt_ids)
    fresh = lm.job(ids(lm, "A leap day"), SamplingParams(max_new_tokens=5))
    list(schedule.Session(lm.engine, 128).stream(fresh))
    assert other.token_ids == fresh.token_ids


def test_a_session_survives_a_lost_state(lm):
    """An interrupt between the donation of a state and its result leaves a deleted buffer behind."""
    session = schedule.Session(lm.engine, 128)
    job = lm.job(ids(lm, "Rain falls"), SamplingParams(max_new_tokens=6))
    list(session.stream(job))
    jax.tree.map(lambda leaf: leaf.delete(), session.state)
    again = lm.job(ids(lm, "Rain falls"), SamplingParams(max_new_tokens=6))
    list(session.stream(again))
    assert again.token_ids == job.token_ids
    assert again.prefilled_tokens == len(again.prompt_ids)


def test_the_state_is_updated_in_place(lm):
    compiled = lm.programs.run(4, 256, lm.plan)
    layer = 4 * lm.config.num_key_value_heads * 256 * lm.config.head_dim * 4
    caches = 2 * lm.config.num_hidden_layers * layer
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes > caches
    copied = f"f32[4,{lm.config.num_key_value_heads},256,{lm.config.head_dim}]"
    body = [line for line in compiled.as_text().splitlines() if " copy(" in line and copied in line]
    assert not body


def test_calling_twice_does_not_recompile_and_params_are_kept(lm):
    first = lm.generate(["Rain"], SamplingParams(max_new_tokens=5), raw=True)[0]
    second = lm.generate(["Rain"], SamplingParams(max_new_tokens=5), raw=True)[0]
    assert first.token_ids == second.token_ids
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lm.params))


def test_requests_that_cannot_be_served_are_refused(lm):
    assert lm.generate([]) == []
    for call, message in (
        (lambda: lm.generate(["a"], batch_size=0), "batch_size is 0"),
        (lambda: lm.generate(["a", "b"], [SamplingParams()]), "1 sampling parameters for 2 prompts"),
        (lambda: lm.generate(["a", ""], raw=True), "prompt 2: the prompt is empty"),
        (lambda: lm.generate([[]]), "at least one message"),
        (lambda: lm.generate([[{"role": "user"}]]), "message 1: expected"),
        (lambda: lm.generate(["a"], SamplingParams(stop=("",))), "non-empty strings"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_rows_come_in_few_sizes():
    assert [decode.rows_for(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 300)] == [1, 2, 3, 4, 6, 8, 12, 16, 384]


@pytest.mark.parametrize(
    ("n", "least", "expected"), [(1, 16, 16), (16, 16, 16), (17, 16, 32), (2049, 128, 3072)]
)
def test_buckets(n, least, expected):
    assert decode.bucket(n, least) == expected


def test_a_prompt_is_read_in_a_chunk_at_most_half_as_long_again():
    for unread in range(1, 513):
        chunk = decode.chunk_for(unread)
        assert max(unread, 16) <= chunk < max(1.5 * unread, 17)
    assert {decode.chunk_for(n) for n in range(1, 2000)} == {16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}


def test_no_write_reaches_past_the_end():
    for cached in (0, 1, 100, 511):
        for unread in (1, 15, 17, 100, 511, 512, 513, 2000):
            for limit, depth in itertools.product((cached + unread + 1, cached + unread + 300), (0, 4, 15)):
                chunk, slots = decode.chunk_for(unread), decode.slots_for(cached, unread, limit, depth)
                last = cached + (unread - 1) // chunk * chunk
                assert last + chunk <= slots
                assert limit + depth < slots


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_model_is_an_error_and_not_an_answer(value, temperature):
    """Neither NaN nor infinity in the weights may come out as text."""
    lm = copy.copy(tiny.lm(end_tokens=()))
    lm.params = jax.tree.map(lambda leaf: leaf, lm.params)
    norm = lm.params["model"]["norm"]["weight"]
    lm.params["model"]["norm"] = {"weight": norm.at[3].set(value)}
    params = SamplingParams(max_new_tokens=4, temperature=temperature)
    with pytest.raises(UserError, match="not finite"):
        lm.generate(["Rain"], params, raw=True)
    with pytest.raises(UserError, match="not finite"):
        list(lm.stream("Rain", params, raw=True))


def test_results_come_as_they_end(lm):
    """A short answer does not wait for a long one."""
    order = []
    params = [SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=4)]
    done = lm.generate(["Rain", "x"], params, raw=True, on_done=lambda index, one: order.append(index))
    assert order == [1, 0]
    assert done[1].stats.decode_seconds < done[0].stats.decode_seconds


def test_a_cache_that_cannot_fit_is_refused(lm, monkeypatch):
    monkeypatch.setattr(generate, "_memory", lambda: 10_000)
    with pytest.raises(UserError, match=r"needs .* GB, there are .* lower max_new_tokens"):
        lm.generate(["Rain"], SamplingParams(max_new_tokens=4), raw=True)
