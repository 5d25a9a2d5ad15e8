"""The tokenizer of a checkpoint folder: which of its files describe it, and the metadata they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.family import Family
from skippy_zmq.sources.checkpoint.json_file import MAX_TOKENIZER_BYTES, read_object
from skippy_zmq.sources.checkpoint.metadata import Metadata, flag
from skippy_zmq.sources.checkpoint.special_tokens import special_metadata
from skippy_zmq.sources.checkpoint.tokenizer_bpe import bpe_metadata
from skippy_zmq.sources.checkpoint.tokenizer_spm import spm_metadata


def tokenizer_metadata(folder: Path, family: Family, config: Config, n_rows: int) -> Metadata:
    """All ``tokenizer.*`` keys for a model with ``n_rows`` rows of embeddings; raise ModelFileError.

    A SentencePiece model (tokenizer.model) counts before a tokenizer.json, which then only says what is special.
    """
    pieces, described = folder / "tokenizer.model", folder / "tokenizer.json"
    tokenizer = _optional(described)
    settings = _optional(folder / "tokenizer_config.json")
    is_byte_level = not pieces.exists()
    if not is_byte_level:
        values = spm_metadata(
            pieces,
            n_rows,
            added_tokens=_optional(folder / "added_tokens.json"),
            settings=settings,
            tokenizer=tokenizer,
            plain=family.plain_added_tokens,
        )
    elif tokenizer is not None:
        values = bpe_metadata(described, tokenizer, n_rows)
    else:
        raise ModelFileError(f"{folder}: wanted tokenizer.json or tokenizer.model, found neither")
    prefix = (settings or {}).get("add_prefix_space") if family.space_prefix_from_settings else family.space_prefix
    if isinstance(prefix, bool) and (family.space_prefix_from_settings or not is_byte_level):
        values["tokenizer.ggml.add_space_prefix"] = flag(prefix)
    return values | special_metadata(folder, config, tokenizer, settings, n_rows, byte_level=is_byte_level)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_object(path, MAX_TOKENIZER_BYTES) if path.exists() else None
