"""Which of llama.cpp's pre-tokenizers splits text as a tokenizer.json does, told by its structure.

llama.cpp's converter tells pre-tokenizers apart by a hash of the ids of a test text, which any added token changes; the
structure in the file says the same for every vocabulary. One that is not in the table is refused: text that is split in
another way gives other tokens, and a worse model, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CASED_NAME = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_THREE_DIGITS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_ONE_DIGIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_TEKKEN = _CASED_WORD + "|" + _CASED_NAME + r"|\p{N}" + _CASED_TAIL
_GPT_4O = f"{_CASED_WORD}{_CONTRACTIONS}?|{_CASED_NAME}{_CONTRACTIONS}?" + r"|\p{N}{1,3}" + _CASED_TAIL

_BYTE_LEVEL = ("ByteLevel", False)  # that it splits words by itself
_BYTE_LEVEL_WORDS = ("ByteLevel", True)
_Step = tuple[str, object]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """``name``: llama.cpp's; ``ignores_merges``: a word that is a token is taken whole, whatever the merges say."""

    name: str
    ignores_merges: bool


def _split(regex: str) -> tuple[_Step, ...]:
    return (("Split", regex), _BYTE_LEVEL)


# the first that treats merges as the file does is taken
_KNOWN: dict[tuple[_Step, ...], tuple[PreTokenizer, ...]] = {
    _split(_THREE_DIGITS): (PreTokenizer("llama-bpe", True), PreTokenizer("smaug-bpe", False)),
    _split(_ONE_DIGIT): (PreTokenizer("qwen2", False),),
    _split(_TEKKEN): (PreTokenizer("tekken", True),),
    _split(_GPT_4O): (PreTokenizer("gpt-4o", False),),
    (_BYTE_LEVEL_WORDS,): (PreTokenizer("gpt-2", False),),
    (("Digits", True), _BYTE_LEVEL_WORDS): (PreTokenizer("smollm", False),),
}


def find_pre_tokenizer(path: Path, settings: object, *, ignore_merges: bool, merges_decide: bool) -> PreTokenizer:
    """The pre-tokenizer that ``settings`` (``pre_tokenizer`` of the file ``path``) describe.

    ``merges_decide``: whether ``ignore_merges`` makes a difference with this vocabulary. Raise ModelFileError.
    """
    steps = tuple(_steps(path, settings))
    candidates = _KNOWN.get(steps)
    if candidates is None:
        raise ModelFileError(
            f"{path}: pre_tokenizer: llama.cpp knows none that splits text like this one: {shown(str(list(steps)))}"
        )
    if not merges_decide:
        return candidates[0]
    for candidate in candidates:
        if candidate.ignores_merges == ignore_merges:
            return candidate
    raise ModelFileError(
        f"{path}: ignore_merges: wanted {str(candidates[0].ignores_merges).lower()} with a pre-tokenizer like "
        f"{candidates[0].name}, got {str(ignore_merges).lower()}"
    )


def _steps(path: Path, settings: object) -> list[_Step]:
    if not isinstance(settings, dict):
        raise ModelFileError(f"{path}: pre_tokenizer: wanted one, got {shown(str(settings))}")
    kind = settings.get("type")
    if kind == "Sequence":
        parts = settings.get("pretokenizers")
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ModelFileError(f"{path}: pre_tokenizer: wanted a list of pre-tokenizers")
        return [_step(path, part) for part in parts]
    return [_step(path, settings)]


def _step(path: Path, settings: Mapping[str, Any]) -> _Step:
    kind = settings.get("type")
    if kind == "ByteLevel":
        if settings.get("add_prefix_space"):
            raise ModelFileError(f"{path}: pre_tokenizer.add_prefix_space: wanted false, got true")
        return ("ByteLevel", settings.get("use_regex", True) is True)
    if kind == "Digits":
        return ("Digits", settings.get("individual_digits") is True)
    pattern = settings.get("pattern")
    if (
        kind == "Split"
        and isinstance(pattern, dict)
        and isinstance(pattern.get("Regex"), str)
        and settings.get("behavior") == "Isolated"
        and settings.get("invert") is False
    ):
        return ("Split", pattern["Regex"])
    return (str(kind), str({key: value for key, value in settings.items() if key != "type"}))
