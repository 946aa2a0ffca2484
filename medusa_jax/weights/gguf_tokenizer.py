"""Building a Hugging Face tokenizer from the metadata of a GGUF file.

A GGUF file stores vocabulary, merges or scores, and the name of a pre-tokenizer. The patterns behind the
names are those of the models' own tokenizers; unknown names are refused, since a wrong pattern gives
other ids without any error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from medusa_jax.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
)


class _Pre(NamedTuple):
    """How text is cut before merging: each pattern cuts the pieces that the one before it left."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token as a whole is never built from merges
    add_bos: bool = False


_LLAMA3 = _Pre((_WORDS % "{1,3}",), ignore_merges=True, add_bos=True)
_DIGITS_GPT2 = _Pre((r"\p{N}", _GPT2))
_QWEN2 = _Pre((_WORDS % "",), nfc=True)
_PRE_TOKENIZERS = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Pre((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _Pre((_QWEN35,), nfc=True),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
# What llama.cpp takes when a SentencePiece vocabulary does not say.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens that the file names: bos, eos, eot, eom, unk, pad.

    Raises UserError for an id outside of the vocabulary.
    """
    tokens = _tokens(metadata)
    ids = dict(_SENTENCEPIECE_IDS) if metadata.get("tokenizer.ggml.model") == "llama" else {}
    for kind, key in _SPECIAL_IDS.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            ids[kind] = value
    for kind, value in ids.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
            raise UserError(
                f"tokenizer.ggml.{_SPECIAL_IDS[kind]} is {shown(value)}, expected an id below {len(tokens)}"
            )
    return ids


def build_tokenizer(
    metadata: Mapping[str, Any], vocab_size: int, context_length: int
) -> PreTrainedTokenizerFast:
    """The tokenizer that `metadata` (a GGUF file's key-value pairs) describes.

    `vocab_size` is the number of rows of the embedding, `context_length` becomes model_max_length.
    Control tokens (and the unknown token) are special; user-defined ones are matched whole and kept in
    decoded text. Raises UserError naming the field that is missing, inconsistent or not supported.
    """
    tokens = _tokens(metadata)
    if len(tokens) > vocab_size:
        raise UserError(
            f"tokenizer.ggml.tokens has {len(tokens)} tokens for an embedding of {vocab_size} rows"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise UserError(f"tokenizer.ggml.tokens holds {shown(twice)} twice")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not all(map(_is_number, types)):
        raise UserError(f"tokenizer.ggml.token_type is not a list of {len(tokens)} numbers, one a token")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise UserError(f"tokenizer.chat_template is {type(template).__name__}, expected text")
    ids = special_ids(metadata)
    model = metadata["tokenizer.ggml.model"]
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, vocab)
    else:
        tokenizer, add_bos = _sentencepiece(metadata, vocab, types, tokens[ids["unk"]]), True
    _add_tokens(tokenizer, tokens, types)
    add_bos = _flag(metadata, "add_bos_token", add_bos)
    if add_bos and "bos" not in ids:
        raise UserError("the tokenizer adds a bos token, but tokenizer.ggml.bos_token_id is missing")
    add_eos = _flag(metadata, "add_eos_token", False)
    if add_eos and "eos" not in ids:
        raise UserError("the tokenizer adds an eos token, but tokenizer.ggml.eos_token_id is missing")
    names = {f"{kind}_token": tokens[ids[kind]] for kind in ("bos", "eos", "unk", "pad") if kind in ids}
    from transformers import PreTrainedTokenizerFast  # only here: it takes a while to import

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **names,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        chat_template=template,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise UserError(f"tokenizer.ggml.{name} is {shown(value)}, expected true or false")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UserError(f"tokenizer.ggml.model {shown(model)} is not supported; supported are gpt2, llama")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise UserError("tokenizer.ggml.tokens is missing or not a list of strings")
    return tokens


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether a text begins with bos when the file does not say."""
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre {shown(name)} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    pre = _PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(BPE(vocab, _read_merges(metadata, vocab), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _read_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    written = metadata.get("tokenizer.ggml.merges")
    if not isinstance(written, list):
        raise UserError("tokenizer.ggml.merges is missing")
    merges = []
    for merge in written:
        left, _, right = str(merge).partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise UserError(
                f"tokenizer.ggml.merges holds {shown(merge)}, whose parts or result are not tokens"
            )
        merges.append((left, right))
    return merges


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], unk: str
) -> Tokenizer:
    """SentencePiece BPE: spaces are U+2581, unknown characters fall back to byte tokens."""
    if "tokenizer.ggml.merges" in metadata:
        merges = _read_merges(metadata, vocab)
    else:
        merges = _merges_from_scores(metadata.get("tokenizer.ggml.scores"), vocab, types)
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", True):
        # As SentencePiece and llama.cpp do: before every text, also one that begins with a space.
        steps.insert(0, normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(
    scores: list[float] | None, vocab: Mapping[str, int], types: list[int]
) -> list[tuple[str, str]]:
    """Every way of building a normal token from two, best score first."""
    if not isinstance(scores, list) or len(scores) != len(vocab) or not all(map(_is_number, scores)):
        raise UserError(f"tokenizer.ggml.scores is missing or not a list of {len(vocab)} numbers")
    pieces = {token: index for token, index in vocab.items() if types[index] == _NORMAL}
    if len({scores[index] for index in pieces.values()}) == 1 < len(pieces):
        raise UserError("tokenizer.ggml.scores are all equal, so the order of merges is lost")
    found = [
        (scores[index], token[:cut], token[cut:])
        for token, index in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    # SentencePiece takes the leftmost of equals, which no fixed order can say; this is transformers' order.
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Mark the tokens that are matched whole in the text; their ids stay those of the vocabulary."""
    for kinds, is_special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
