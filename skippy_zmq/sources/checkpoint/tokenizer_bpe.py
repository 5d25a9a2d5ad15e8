"""Byte-level BPE from tokenizer.json: tokens and their kinds, merges, and the pre-tokenizer, as GGUF metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.metadata import Metadata, i32s, text, texts
from skippy_zmq.sources.checkpoint.pre_tokenizers import find_pre_tokenizer
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.gguf_vocabulary import MAX_TOKENS

log = logging.getLogger("skippy_zmq.checkpoint")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SPACE, _ENCODED_SPACE = " ", "\u0120"  # merges are joined by a space in GGUF; byte-level BPE has another sign for it
_FALSE_OR_ABSENT = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")


def bpe_metadata(path: Path, tokenizer: Mapping[str, Any], n_rows: int) -> Metadata:
    """The tokenizer keys for ``tokenizer``, the contents of ``path``, in a model with ``n_rows`` rows of embeddings.

    Ids without a token become unused ones. Raise ModelFileError for a tokenizer that llama.cpp would not follow, and
    for tokens without a row.
    """
    model = _model(path, tokenizer)
    vocabulary = _vocabulary(path, model.get("vocab"))
    added = _added_tokens(path, tokenizer.get("added_tokens"))
    tokens, kinds = _token_list(path, vocabulary, added, n_rows)
    merges = _merges(path, model.get("merges"))
    products = _check_merges(path, merges, vocabulary, added)
    decide = any(len(token) > 1 and token not in products and token not in added for token in vocabulary)
    ignore_merges = model.get("ignore_merges", False)
    if not isinstance(ignore_merges, bool):
        raise ModelFileError(f"{path}: ignore_merges: wanted true or false, got {shown(str(ignore_merges))}")
    pre = find_pre_tokenizer(path, tokenizer.get("pre_tokenizer"), ignore_merges=ignore_merges, merges_decide=decide)
    return {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text(pre.name),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.token_type": i32s(kinds),
        "tokenizer.ggml.merges": texts(f"{_encoded(left)} {_encoded(right)}" for left, right in merges),
    }


def looks_special(content: str) -> bool:
    """Whether a token that is not marked as special is one all the same, by its look, as llama.cpp's converter does."""
    return (
        content in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (content.startswith("<|") and content.endswith("|>"))
        or (content.startswith("<\uff5c") and content.endswith("\uff5c>"))
        or (content.startswith("<unused") and content.endswith(">"))
    )


def _model(path: Path, tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise ModelFileError(f"{path}: model.type: wanted BPE, got {shown(str(kind))}")
    if model.get("byte_fallback"):
        raise ModelFileError(
            f"{path}: model.byte_fallback: a SentencePiece tokenizer; wanted its tokenizer.model beside"
        )
    for key in _FALSE_OR_ABSENT:
        if model.get(key):
            raise ModelFileError(f"{path}: model.{key}: wanted none for byte-level BPE, got {shown(str(model[key]))}")
    decoder = tokenizer.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise ModelFileError(f"{path}: decoder: wanted ByteLevel, got {shown(str(decoder))}")
    _check_normalizer(path, tokenizer.get("normalizer"))
    return model


def _check_normalizer(path: Path, normalizer: object) -> None:
    """llama.cpp normalizes nothing. NFC leaves all but rare texts as they are; others change most of them."""
    parts = [normalizer]
    if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
        listed = normalizer.get("normalizers")
        parts = listed if isinstance(listed, list) else [listed]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind == "NFC":
            log.debug("%s: normalizer NFC is not applied", path)
        elif kind is not None:
            raise ModelFileError(f"{path}: normalizer: wanted none or NFC, got {shown(str(kind))}")


def _vocabulary(path: Path, vocabulary: object) -> dict[str, int]:
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise ModelFileError(f"{path}: model.vocab: wanted a map of tokens to ids")
    for token, number in vocabulary.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MAX_TOKENS:
            raise ModelFileError(
                f"{path}: model.vocab: token {shown(token)}: wanted an id from 0, got {shown(str(number))}"
            )
    return vocabulary


def _added_tokens(path: Path, entries: object) -> dict[str, tuple[int, bool]]:
    """Id, and whether it is a control token, by content."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise ModelFileError(f"{path}: added_tokens: wanted a list")
    added: dict[str, tuple[int, bool]] = {}
    for entry in entries:
        content, number = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        is_id = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < MAX_TOKENS
        if not isinstance(content, str) or not content or not isinstance(number, int) or not is_id:
            raise ModelFileError(f"{path}: added_tokens: wanted entries with content and an id from 0")
        if content in added:
            raise ModelFileError(f"{path}: added_tokens: token {shown(content)} appears twice")
        added[content] = (number, entry.get("special") is True or looks_special(content))
    return added


def _token_list(
    path: Path, vocabulary: Mapping[str, int], added: Mapping[str, tuple[int, bool]], n_rows: int
) -> tuple[list[str], list[int]]:
    by_id: dict[int, str] = {}
    for content, number in [*vocabulary.items(), *((content, entry[0]) for content, entry in added.items())]:
        first = by_id.setdefault(number, content)
        if first != content:
            raise ModelFileError(f"{path}: tokens {shown(first)} and {shown(content)} have the same id {number}")
    for content, (number, _) in added.items():
        if vocabulary.get(content, number) != number:
            raise ModelFileError(f"{path}: token {shown(content)} has two ids, {vocabulary[content]} and {number}")
    highest = max(by_id)
    if highest >= n_rows:
        raise ModelFileError(
            f"{path}: token {shown(by_id[highest])} has id {highest}, but there are only {n_rows} rows of embeddings"
        )
    tokens, kinds = [], []
    for number in range(n_rows):
        token = by_id.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            kinds.append(UNUSED)
        elif token in added:
            is_control = added[token][1]
            tokens.append(token if is_control else token.replace("\u2581", " "))
            kinds.append(CONTROL if is_control else USER_DEFINED)
        else:
            tokens.append(token)
            kinds.append(NORMAL)
    return tokens, kinds


def _merges(path: Path, merges: object) -> list[tuple[str, str]]:
    """Merges in either spelling: a text with a space between the parts, or a list of two parts."""
    if not isinstance(merges, list):
        raise ModelFileError(f"{path}: model.merges: wanted a list")
    pairs = []
    for number, merge in enumerate(merges):
        parts = merge.split(_SPACE) if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise ModelFileError(f"{path}: model.merges: merge {number}: wanted two parts, got {shown(str(merge))}")
        pairs.append((parts[0], parts[1]))
    return pairs


def _check_merges(
    path: Path,
    merges: list[tuple[str, str]],
    vocabulary: Mapping[str, int],
    added: Mapping[str, tuple[int, bool]],
) -> set[str]:
    """What merges make; raise ModelFileError for a part or a product that is no token."""
    products = {left + right for left, right in merges}
    parts = {part for merge in merges for part in merge}
    for token in parts | products:
        if token not in vocabulary and token not in added:
            raise ModelFileError(f"{path}: model.merges: {shown(token)} is merged, but no token")
    return products


def _encoded(part: str) -> str:
    return part.replace(_SPACE, _ENCODED_SPACE)
