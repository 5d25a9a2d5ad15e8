"""Check the vocabulary in a model file: what llama.cpp's tokenizers assert on, loop over for ever, or recurse into."""

from __future__ import annotations

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import GgufHeader
from skippy_zmq.sources.gguf_values import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    VALUE_TYPES,
    shown,
    string_array,
    type_text,
)

MAX_TOKENS = 1 << 22
MAX_TOKEN_BYTES = 8192  # some tokenizers recurse once per byte

_TOKENS = "tokenizer.ggml.tokens"
_MODEL = "tokenizer.ggml.model"
# tokenizer model: default ids of the tokens that begin and end a text, and whether it adds each by itself
_DEFAULTS: dict[str, tuple[int | None, int | None, bool, bool]] = {
    "llama": (1, 2, True, False),
    "gpt2": (11, 11, False, False),
    "hybriddna": (11, 11, False, False),
    "whitespace": (11, 11, False, False),
    "gemma4": (None, None, True, False),
    "t5": (None, 1, False, True),
    "plamo2": (1, 2, False, False),
    "rwkv": (None, None, False, False),
    "test": (None, None, False, False),
}
_NEEDS_MERGES = ("gpt2", "hybriddna", "whitespace", "gemma4")
# pre-tokenizers that add a beginning-of-text token unless the file says otherwise, and those that always do
_ADDS_BOS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
_ALWAYS_ADDS_BOS = ("gemma4", "granite-embed-multi-311m")
# ids that decide where text begins and ends; llama.cpp would replace one that is out of range by a default of its own
_CHECKED_IDS = ("bos", "eos", "eot", "eom", "unknown")


def check_vocabulary(header: GgufHeader) -> int:
    """Return the number of tokens; raise ModelFileError for a vocabulary that is missing or would abort llama.cpp."""
    model = _text(header, _MODEL)
    if model in ("none", "no_vocab"):
        raise _fail(header, _MODEL, "this file has no vocabulary, so it cannot generate text")
    if model not in _DEFAULTS:
        raise _fail(header, _MODEL, f"wanted one of {', '.join(_DEFAULTS)}, got {shown(model)}")
    tokens = _tokens(header)
    _check_array(header, "tokenizer.ggml.scores", (FLOAT32, INT32), len(tokens))
    _check_array(header, "tokenizer.ggml.token_type", (INT32,), len(tokens))
    _check_merges(header, model)
    _check_special_ids(header, model, len(tokens))
    if model == "rwkv":
        _check_rwkv(header, tokens)
    return len(tokens)


def _fail(header: GgufHeader, key: str, text: str) -> ModelFileError:
    return ModelFileError(f"{header.path}: {key}: {text}")


def _scalar(header: GgufHeader, key: str, wanted: int) -> int | float | bool | str | None:
    value = header.values.get(key)
    if value is None:
        return None
    if value.type != wanted:
        raise _fail(header, key, f"wanted a {VALUE_TYPES[wanted]}, got {type_text(value)}")
    return header.scalar(key)


def _text(header: GgufHeader, key: str) -> str:
    text = _scalar(header, key, STRING)
    if text is None:
        raise _fail(header, key, "this metadata key is missing")
    return str(text)


def _tokens(header: GgufHeader) -> list[bytes]:
    value = header.values.get(_TOKENS)
    if value is None:
        raise _fail(header, _TOKENS, "this metadata key is missing")
    if value.type != ARRAY or value.element_type != STRING:
        raise _fail(header, _TOKENS, f"wanted an array of string, got {type_text(value)}")
    if not 1 <= value.count <= MAX_TOKENS:
        raise _fail(header, _TOKENS, f"wanted 1 to {MAX_TOKENS} tokens, got {value.count}")
    tokens = string_array(header.raw, value)
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_BYTES:
        raise _fail(header, _TOKENS, f"wanted tokens of at most {MAX_TOKEN_BYTES} bytes, got one of {longest}")
    _check_distinct(header, tokens)
    return tokens


def _check_distinct(header: GgufHeader, tokens: list[bytes]) -> None:
    """llama.cpp asserts that token texts differ, as it sees them: cut at NUL, and empty ones given a name."""
    distinct = set(tokens)
    if len(distinct) == len(tokens) and b"" not in distinct and b"\0" not in b"".join(tokens):
        return
    seen: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        text = token.split(b"\0", 1)[0] or b"[EMPTY_%d]" % index
        first = seen.setdefault(text, index)
        if first != index:
            raise _fail(header, _TOKENS, f"wanted distinct tokens, got {shown(token)} as token {first} and {index}")


def _check_array(header: GgufHeader, key: str, types: tuple[int, ...], n_tokens: int) -> None:
    value = header.values.get(key)
    if value is None:
        return
    if value.type != ARRAY or value.element_type not in types:
        wanted = " or ".join(VALUE_TYPES[number] for number in types)
        raise _fail(header, key, f"wanted an array of {wanted}, got {type_text(value)}")
    if value.count != n_tokens:
        raise _fail(header, key, f"wanted one element for each of {n_tokens} tokens, got {value.count}")


def _check_merges(header: GgufHeader, model: str) -> None:
    key = "tokenizer.ggml.merges"
    value = header.values.get(key)
    if model not in _NEEDS_MERGES:
        return
    if value is None:
        if _scalar(header, "tokenizer.ggml.pre", STRING) != "kimi-k2":
            raise _fail(header, key, "this metadata key is missing")
    elif value.type != ARRAY or value.element_type != STRING:
        raise _fail(header, key, f"wanted an array of string, got {type_text(value)}")


def _check_special_ids(header: GgufHeader, model: str, n_tokens: int) -> None:
    ids: dict[str, int | None] = {}
    for name in _CHECKED_IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        token = _scalar(header, key, UINT32)
        ids[name] = None if token is None else int(token)
        if token is not None and int(token) >= n_tokens:
            raise _fail(header, key, f"wanted a token id below {n_tokens}, got {token}")
    default_bos, default_eos, adds_bos, adds_eos = _DEFAULTS[model]
    pre = "gemma4" if model == "gemma4" else _scalar(header, "tokenizer.ggml.pre", STRING)
    always = model in _NEEDS_MERGES and pre in _ALWAYS_ADDS_BOS
    adds_bos = adds_bos or (model in _NEEDS_MERGES and pre in _ADDS_BOS)
    for name, default, adds in (("bos", default_bos, adds_bos), ("eos", default_eos, adds_eos)):
        given = _scalar(header, f"tokenizer.ggml.add_{name}_token", BOOL)
        usable = ids[name] is not None or (default is not None and default < n_tokens)
        adds = adds if given is None else bool(given)
        if (adds or (always and name == "bos")) and not usable:
            raise _fail(
                header, f"tokenizer.ggml.{name}_token_id", "this metadata key is missing; the tokenizer adds the token"
            )


def _check_rwkv(header: GgufHeader, tokens: list[bytes]) -> None:
    """Every token must start with a byte that is itself a token: the greedy match would otherwise never advance."""
    starts, whole = set(), set()
    for token in tokens:
        text = _unescape_rwkv(token)
        if text:
            starts.add(text[0])
            if len(text) == 1:
                whole.add(text[0])
    if starts - whole:
        raise _fail(header, _TOKENS, f"wanted a token of the single byte {min(starts - whole)}, which starts others")


def _unescape_rwkv(token: bytes) -> bytes:
    r"""Decode the escapes \t, \n, \r, \xHH and \c of the RWKV vocabulary, as llama.cpp does; only its start matters."""
    output = bytearray()
    position = 0
    while position < len(token):
        byte = token[position : position + 1]
        if byte != b"\\":
            output += byte
            position += 1
            continue
        escaped = token[position + 1 : position + 2]
        if escaped == b"x":
            digits = token[position + 2 : position + 4]
            if len(digits) == 2:
                output.append(sum(_nibble(digit) << shift for digit, shift in zip(digits, (4, 0), strict=True)) & 0xFF)
            position += 4
        else:
            output += {b"t": b"\t", b"n": b"\n", b"r": b"\r"}.get(escaped, escaped)
            position += 2
    return bytes(output)


def _nibble(digit: int) -> int:
    return digit - ord("a") + 10 if ord("a") <= digit < 128 else digit - ord("0")
