"""TextStream: what comes out piece by piece is the decoding of the whole, cut at the first stop string."""

import functools

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from medusa_jax.text import REPLACEMENT, TextStream

PIECES = (
    "▁",
    "▁a",
    "a",
    "b",
    "ab",
    "▁ab",
    "c",
    "é",
    "▁é",
    "日",
    "▁▁",
    REPLACEMENT,
    "x" + REPLACEMENT,
    "abbab",
)
NOT_IN_VOCABULARY = 5000  # embeddings are padded; such ids decode to nothing


def sentencepiece(steps: list, prepend: bool) -> PreTrainedTokenizerFast:
    """BPE with ▁ for a space and byte tokens for unknown characters: ids 0-2 special, 3-258 the bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {name: index for index, name in enumerate(names)}
    bpe = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    bpe.decoder = decoders.Sequence(steps)
    bpe.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    bpe.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def make(kind: str):
    if kind == "byte-level":
        return tiny.tokenizer()
    if kind == "sentencepiece":  # as in Llama 2's files
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        return sentencepiece([*steps, decoders.Strip(" ", 1, 0)], prepend=True)
    if kind == "metaspace":
        return sentencepiece([decoders.ByteFallback(), decoders.Metaspace()], prepend=True)
    if kind == "no prefix space":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        return sentencepiece(steps, prepend=False)
    raise AssertionError(kind)


KINDS = ("byte-level", "sentencepiece", "metaspace", "no prefix space")


@functools.cache
def bytes_of(kind: str) -> list[int]:
    """The ids of the 256 byte tokens."""
    if kind != "byte-level":
        return list(range(3, 259))
    return make(kind).convert_tokens_to_ids(byte_level_alphabet())


def byte_level_alphabet() -> list[str]:
    """GPT-2's table: the printable character that stands for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in kept}
    others = (byte for byte in range(256) if byte not in table)
    table |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def spelt(kind: str, text: str | bytes) -> list[int]:
    """A text as byte tokens only."""
    raw = text.encode() if isinstance(text, str) else text
    return [bytes_of(kind)[byte] for byte in raw]


def decode(kind: str, ids: list[int]) -> str:
    return make(kind).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


FRAGMENTS = ["a", "b", "ab", "é", "€", "😀", "日", " ", "\n", REPLACEMENT, "e\u0301", "a b", "<|im_end|>"]
BROKEN = [
    b"\xff",
    b"\x80",
    b"\xe2",
    b"\xe2\x82",
    b"\xf0\x9f",
    b"\xf0\x9f\x98",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbf",
]


@st.composite
def sequences(draw, kind: str) -> list[int]:
    """Ids that a model could give: any at all, text spelt in bytes or tokenised, broken bytes, specials."""
    size = len(make(kind))
    part = st.one_of(
        st.integers(0, size - 1).map(lambda i: [i]),
        st.sampled_from(FRAGMENTS).map(lambda text: spelt(kind, text)),
        st.sampled_from(FRAGMENTS).map(lambda text: make(kind)(text, add_special_tokens=False)["input_ids"]),
        st.sampled_from(BROKEN).map(lambda raw: spelt(kind, raw)),
        st.sampled_from([[0], [1], [2], [NOT_IN_VOCABULARY], [size - 1]]),
    )
    return [token for ids in draw(st.lists(part, max_size=8)) for token in ids]


def run(kind: str, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str, int | None]:
    """The pieces, the rest, and how many tokens were pushed when it stopped (None: it did not)."""
    stream = TextStream(make(kind), stop)
    pieces: list[str] = []
    stopped = None
    for count, token in enumerate(ids, 1):
        pieces.append(stream.push(token))
        if stream.stopped and stopped is None:
            stopped = count
    rest = stream.finish()
    if stream.stopped and stopped is None:
        stopped = len(ids) + 1
    assert stream.finish() == ""
    return pieces, rest, stopped


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_whole_decoding(kind, data):
    ids = data.draw(sequences(kind))
    pieces, rest, stopped = run(kind, ids)
    assert "".join(pieces) + rest == decode(kind, ids)
    assert stopped is None
    shown = ""
    for count, piece in enumerate(pieces, 1):
        assert not piece.endswith(REPLACEMENT), "a broken character was shown"
        shown += piece
        # Never revised: what is shown is the beginning of the decoding of every longer text.
        assert decode(kind, ids[:count]).startswith(shown)


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_without_needless_delay(kind):
    """Readable text appears with its token, a character spelt in bytes at the latest with the next token."""
    ids = make(kind)("a b", add_special_tokens=False)["input_ids"] + spelt(kind, "😀")
    after = make(kind)("ab", add_special_tokens=False)["input_ids"][-1]
    stream = TextStream(make(kind))
    shown = ""
    for token in ids[:-4]:
        shown += stream.push(token)
        assert shown == decode(kind, stream.ids)
    before = shown
    for token in ids[-4:-1]:
        assert stream.push(token) == ""
    assert stream.push(ids[-1]) == ("😀" if kind == "byte-level" else "")
    stream.push(after)
    assert stream.finish() == ""
    assert decode(kind, stream.ids).startswith(before + "😀")


def test_a_run_of_bytes_is_only_certain_when_it_has_ended():
    """The decoder shows a run of byte tokens with an invalid byte as replacement characters, all of it."""
    kind = "sentencepiece"
    euro, broken, letter = spelt(kind, "€"), spelt(kind, b"\xe2"), [3 + 256 + PIECES.index("a")]
    pieces, rest, _ = run(kind, euro + broken + letter)
    assert pieces == ["", "", "", "", 4 * REPLACEMENT + "a"]
    assert rest == ""
    assert run(kind, euro + letter)[0] == ["", "", "", "€a"]
    assert run(kind, euro)[:2] == (["", "", ""], "€")
    # A special token shows as nothing: the run goes on behind it.
    assert run(kind, [*euro, 2, *broken, *letter])[0][-1] == 4 * REPLACEMENT + "a"


# ------------------------------------------------------------------------------------- stop strings


def reference(kind: str, ids: list[int], stop: tuple[str, ...]) -> tuple[str, int | None]:
    """What a reader who sees the text grow token by token would do, and after how many tokens he stops.

    Broken characters at the end do not count as text yet. The stop string that is complete first wins,
    reading character by character; of several complete at the same character, the longest.
    """
    for count in range(1, len(ids) + 2):
        text = decode(kind, ids[:count])
        if count <= len(ids):
            text = text.rstrip(REPLACEMENT)
        for end in range(1, len(text) + 1):
            complete = [s for s in stop if text[:end].endswith(s)]
            if complete:
                return text[: end - max(map(len, complete))], count
    return decode(kind, ids), None


def check_stop(kind: str, ids: list[int], stop: tuple[str, ...]) -> None:
    pieces, rest, stopped = run(kind, ids, stop)
    text, expected = reference(kind, ids, stop)
    assert stopped == expected
    assert "".join(pieces) + rest == text
    if stopped is not None:
        assert not any(pieces[stopped:]), "text after the stop"
        whole = decode(kind, ids[:stopped])
        shown = ""
        for piece in pieces:
            shown += piece
            # The stop string begins behind everything that was ever shown.
            assert whole.startswith(shown)
            assert not any(s in shown for s in stop)
            assert len(shown) <= len(text)


STOP_TEXT = st.one_of(
    st.text(alphabet="ab é€\n😀", min_size=1, max_size=4),
    st.sampled_from(["ab", "abc", "b", "bab", "\n\n", "€", "a" + REPLACEMENT, REPLACEMENT, "<think>", " "]),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_the_first_is_complete(kind, data):
    ids = data.draw(sequences(kind))
    stop = data.draw(st.lists(STOP_TEXT, max_size=3))
    text = decode(kind, ids)
    if text and data.draw(st.booleans()):  # a stop string that surely occurs, across token borders too
        start = data.draw(st.integers(0, len(text) - 1))
        stop.append(text[start : start + data.draw(st.integers(1, 6))])
    check_stop(kind, ids, tuple(stop))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "▁ab", "abbab"]), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
@example(["ab", "ab"], ["bab", "abab"])  # contained in another, complete at the same character
@example(["a", "b", "ab"], ["ba", "abb"])
def test_overlapping_stop_strings(pieces, stop):
    """Two letters only: prefixes of each other, contained in each other, repeated in themselves."""
    check_stop("sentencepiece", [259 + PIECES.index(piece) for piece in pieces], tuple(stop))


def ids_of(*pieces: str) -> list[int]:
    return [259 + PIECES.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        (("a", "b", "c"), ("b",), "a", 2),
        (("ab", "ab", "c"), ("ba",), "a", 2),  # across a border, in the middle of two tokens
        (("a", "b", "a", "c"), ("abc",), "abac", None),  # nearly: what was held is given back
        (("ab", "c"), ("b", "ab"), "", 1),  # both complete at the same character: the longest
        (("ab",), ("a", "ab"), "", 1),
        (("c", "ab", "c"), ("abc", "b"), "ca", 2),  # the inner one is complete first
        (("c", "abbab"), ("abba", "bb"), "ca", 2),  # also when one token completes both
        (("c", "abbab"), ("bab", "abbab"), "c", 2),
        (("a", "a", "b"), ("aab",), "", 3),
        (("a", "a", "a", "b"), ("aab",), "a", 4),
    ],
)
def test_which_stop_string_is_first(pieces, stop, text, stopped):
    got, rest, at = run("sentencepiece", ids_of(*pieces), stop)
    assert ("".join(got) + rest, at) == (text, stopped)
    check_stop("sentencepiece", ids_of(*pieces), stop)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_in_byte_tokens_stops_at_its_last_byte(kind):
    """Such as the end of a line in Llama 2's vocabulary: nothing follows, so nothing can change it."""
    ids = spelt(kind, "a\nb")
    assert run(kind, ids, ("\n",))[2] == 2
    assert run(kind, spelt(kind, "a€b"), ("€",))[2] == 4
    assert run(kind, spelt(kind, "a") + spelt(kind, b"\xe2") + spelt(kind, "b"), ("a",))[2] == 1


def test_stop_text_before_a_broken_character_is_seen_at_once():
    """A token that ends in the middle of a character may complete a stop string before it."""
    kind = "sentencepiece"
    assert run(kind, ids_of("a", "x" + REPLACEMENT, "b"), ("ax",))[2] == 2
