"""SentencePiece from tokenizer.model: pieces, scores and kinds, as GGUF metadata.

The file is a protocol buffer (sentencepiece_model.proto). The few fields needed are read here, with limits, rather than
by the library: it is written for files that are trusted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.json_file import MAX_TOKENIZER_BYTES, read_file
from skippy_zmq.sources.checkpoint.metadata import Metadata, f32s, i32s, text, texts
from skippy_zmq.sources.checkpoint.tokenizer_bpe import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    looks_special,
)
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.gguf_vocabulary import MAX_TOKENS

_PADDING_SCORE = -10000.0
_ADDED_SCORE = -1000.0
# ModelProto.pieces, .trainer_spec; SentencePiece.piece, .score, .type; TrainerSpec.model_type
_PIECES, _TRAINER = 1, 2
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BPE = 3, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: NORMAL, 5: UNUSED, 6: BYTE}


@dataclass(frozen=True, slots=True)
class _Piece:
    text: bytes
    score: float
    kind: int


def spm_metadata(
    path: Path,
    n_rows: int,
    *,
    added_tokens: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any] | None,
    plain: bool,
) -> Metadata:
    """The tokenizer keys for the model file ``path`` in a model with ``n_rows`` rows of embeddings.

    ``added_tokens``, ``settings`` and ``tokenizer``: the contents of added_tokens.json, tokenizer_config.json and
    tokenizer.json. ``plain``: added tokens are taken as they are, and those of tokenizer.json count too. Raise
    ModelFileError.
    """
    pieces = _read_pieces(path)
    if len(pieces) > n_rows:
        raise ModelFileError(f"{path}: {len(pieces)} pieces, but there are only {n_rows} rows of embeddings")
    rows = [_Piece(b"[PAD%d]" % number, _PADDING_SCORE, UNUSED) for number in range(n_rows)]
    rows[: len(pieces)] = pieces
    extra = (tokenizer or {}).get("added_tokens") if plain else None
    for number, piece in _added(path, added_tokens or {}, (settings or {}).get("added_tokens_decoder"), extra, plain):
        if number >= n_rows:
            raise ModelFileError(
                f"{path.parent}: added token {shown(piece.text)} has id {number}, but there are only {n_rows} rows of "
                "embeddings"
            )
        rows[number] = piece
    return {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": texts(piece.text for piece in rows),
        "tokenizer.ggml.scores": f32s(piece.score for piece in rows),
        "tokenizer.ggml.token_type": i32s(piece.kind for piece in rows),
    }


def _added(
    path: Path, added_tokens: Mapping[str, Any], decoder: object, extra: object, plain: bool
) -> Iterator[tuple[int, _Piece]]:
    for content, number in added_tokens.items():
        yield _identifier(path, number), _Piece(content.encode(), _ADDED_SCORE, USER_DEFINED)
    if not isinstance(decoder, dict | None):
        raise ModelFileError(f"{path.parent}: added_tokens_decoder: wanted a map of ids to tokens")
    for number, entry in (decoder or {}).items():
        yield _identifier(path, number), _described(path, entry, plain=plain)
    if not isinstance(extra, list | None):
        raise ModelFileError(f"{path.parent}: added_tokens: wanted a list")
    for entry in extra or ():
        number = entry.get("id") if isinstance(entry, dict) else None
        yield _identifier(path, number), _described(path, entry, plain=plain)


def _described(path: Path, entry: object, *, plain: bool) -> _Piece:
    """``plain``: neither the look of a token nor signs for spaces in it matter."""
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(content, str):
        raise ModelFileError(f"{path.parent}: added token: wanted one with content, got {shown(str(entry))}")
    if entry.get("special") or (not plain and looks_special(content)):
        return _Piece(content.encode(), _ADDED_SCORE, CONTROL)
    if not plain:
        content = content.replace("\u2581", " ")
    return _Piece(content.encode(), _ADDED_SCORE, USER_DEFINED)


def _identifier(path: Path, value: object) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MAX_TOKENS:
        raise ModelFileError(f"{path.parent}: added token: wanted an id from 0, got {shown(str(value))}")
    return number


def _read_pieces(path: Path) -> list[_Piece]:
    data = memoryview(read_file(path, MAX_TOKENIZER_BYTES))
    pieces: list[_Piece] = []
    model_type = 1
    for number, value in _fields(path, data):
        if number == _PIECES:
            pieces.append(_piece(path, _as_bytes(path, value)))
            if len(pieces) > MAX_TOKENS:
                raise ModelFileError(f"{path}: wanted at most {MAX_TOKENS} pieces")
        elif number == _TRAINER:
            for inner, setting in _fields(path, _as_bytes(path, value)):
                if inner == _MODEL_TYPE:
                    model_type = _as_int(path, setting)
    if not pieces:
        raise ModelFileError(f"{path}: wanted a SentencePiece model, found no pieces")
    if model_type != _BPE:
        raise ModelFileError(f"{path}: model_type: wanted BPE ({_BPE}), which llama.cpp computes, got {model_type}")
    return pieces


def _piece(path: Path, data: memoryview) -> _Piece:
    content, score, kind = b"", 0.0, 1
    for number, value in _fields(path, data):
        if number == _PIECE:
            content = bytes(_as_bytes(path, value))
        elif number == _SCORE:
            (score,) = struct.unpack("<f", _as_bytes(path, value, 4))
        elif number == _TYPE:
            kind = _as_int(path, value)
    if kind not in _KINDS or not math.isfinite(score):
        raise ModelFileError(f"{path}: piece {shown(content)}: wanted a known type and a finite score")
    return _Piece(content, score, _KINDS[kind])


def _fields(path: Path, data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values: an int for a varint, else bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(path, data, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(path, data, position)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, position = _varint(path, data, position)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ModelFileError(f"{path}: not a SentencePiece model: field of unknown kind {kind}")
        if length > len(data) - position:
            raise ModelFileError(f"{path}: truncated: wanted {length} bytes more, got {len(data) - position}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(path: Path, data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ModelFileError(f"{path}: truncated inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ModelFileError(f"{path}: not a SentencePiece model: a number of more than 64 bits")


def _as_bytes(path: Path, value: int | memoryview, length: int | None = None) -> memoryview:
    if isinstance(value, int) or (length is not None and len(value) != length):
        raise ModelFileError(f"{path}: not a SentencePiece model: a field of another kind than its number says")
    return value


def _as_int(path: Path, value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ModelFileError(f"{path}: not a SentencePiece model: a field of another kind than its number says")
    return value
