"""Special tokens and chat template: which ids begin and end a text, whether they are added, how a chat is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.json_file import MAX_CONFIG_BYTES, read_file, read_object
from skippy_zmq.sources.checkpoint.metadata import Metadata, flag, text, texts, u32
from skippy_zmq.sources.gguf_values import shown

log = logging.getLogger("skippy_zmq.checkpoint")

MAX_TEMPLATE_BYTES = 1024 * 1024
_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
    "eot": "eot_token_id",
}
_NEEDED = ("bos", "eos", "eot")


@dataclass(slots=True)
class _Specials:
    names: dict[str, str] = field(default_factory=dict)  # content by kind
    added: dict[str, bool] = field(default_factory=dict)  # whether it is added to every text, by kind


def special_metadata(
    folder: Path,
    config: Config,
    tokenizer: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
    n_tokens: int,
    *,
    byte_level: bool,
) -> Metadata:
    """The keys for ``tokenizer`` (of tokenizer.json) and ``settings`` (of tokenizer_config.json), where there are such.

    ``byte_level``: say whether the first token is added even where no file does: llama.cpp's own idea of it would
    depend on the pre-tokenizer. Raise ModelFileError.
    """
    specials = _from_settings(folder, settings or {})
    _from_post_processor(folder, tokenizer or {}, specials, bool(settings))
    for kind in ("bos", "eos"):
        given = (settings or {}).get(f"add_{kind}_token")
        if isinstance(given, bool):
            specials.added[kind] = given
    ids = _ids(folder, config, tokenizer or {}, specials, n_tokens)
    if byte_level:
        specials.added.setdefault("bos", False)
    for kind, is_added in specials.added.items():
        if is_added and kind not in ids:
            raise ModelFileError(f"{folder}: the tokenizer adds a {kind} token, but no file says which one it is")
    values: Metadata = {f"tokenizer.ggml.{_KEYS[kind]}": u32(number) for kind, number in ids.items()}
    values |= {f"tokenizer.ggml.add_{kind}_token": flag(value) for kind, value in specials.added.items()}
    return values | _templates(folder, settings or {})


def _from_settings(folder: Path, settings: Mapping[str, Any]) -> _Specials:
    specials = _Specials()
    for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        entry = settings.get(f"{kind}_token")
        content = entry.get("content") if isinstance(entry, dict) else entry
        if content is not None and not isinstance(content, str):
            raise ModelFileError(f"{folder}: tokenizer_config.json: {kind}_token: wanted a token")
        if content:
            specials.names[kind] = content
    for kind, other in (("bos", "cls"), ("eos", "sep")):
        if other in specials.names:
            specials.names.setdefault(kind, specials.names[other])
    return specials


def _from_post_processor(folder: Path, tokenizer: Mapping[str, Any], specials: _Specials, has_settings: bool) -> None:
    """Whether a single text gets a first and a last token, by the template in tokenizer.json."""
    processor = tokenizer.get("post_processor")
    if not isinstance(processor, dict):
        return
    parts = processor.get("processors", [processor])
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict) or part.get("type") != "TemplateProcessing":
            continue
        pieces = part.get("single")
        if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
            raise ModelFileError(f"{folder}: tokenizer.json: post_processor.single: wanted a list of pieces")
        if len(pieces) < 2:
            continue
        first, last = (_special_token(piece) for piece in (pieces[0], pieces[-1]))
        if first is not None:
            if not has_settings:
                specials.names["bos"] = first
            specials.added["bos"] = True
            if specials.names.setdefault("bos", first) != first:
                raise ModelFileError(
                    f"{folder}: tokenizer.json: post_processor: texts begin with {shown(first)}, which is no bos token"
                )
        if last is not None:
            if has_settings and specials.names.get("eos") not in (None, last):
                specials.names["eot"] = specials.names["eos"]
            specials.names["eos"] = last
            specials.added["eos"] = True


def _special_token(piece: Mapping[str, Any]) -> str | None:
    token = piece.get("SpecialToken")
    content = token.get("id") if isinstance(token, dict) else None
    return content if isinstance(content, str) else None


def _ids(
    folder: Path, config: Config, tokenizer: Mapping[str, Any], specials: _Specials, n_tokens: int
) -> dict[str, int]:
    by_content: dict[str, Any] = {}
    entries = tokenizer.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            by_content.setdefault(entry["content"], entry.get("id"))
    ids: dict[str, int] = {}
    for kind in _KEYS:
        number = by_content.get(specials.names.get(kind, ""))
        if number is None:
            number = config.get(f"{kind}_token_id")
        if isinstance(number, bool) or not isinstance(number, int):
            continue
        if 0 <= number < n_tokens:
            ids[kind] = number
        elif kind in _NEEDED:
            raise ModelFileError(f"{folder}: {kind} token: wanted an id below {n_tokens}, got {number}")
        else:
            log.warning("%s: %s token: id %d is no token and is left out", folder, kind, number)
    return ids


def _templates(folder: Path, settings: Mapping[str, Any]) -> Metadata:
    """The chat templates: those of tokenizer_config.json, else those in files of their own."""
    found = settings.get("chat_template")
    if found is None:
        found = _template_files(folder)
    if found is None:
        return {}
    if isinstance(found, str):
        return {"tokenizer.chat_template": text(found)}
    values: Metadata = {}
    names = []
    for entry in found if isinstance(found, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelFileError(f"{folder}: chat_template: wanted a text, or a list of named ones")
        if name == "default":
            values["tokenizer.chat_template"] = text(template)
            continue
        name = "".join(sign if sign.isascii() and sign.isalnum() else "_" for sign in name)
        names.append(name)
        values[f"tokenizer.chat_template.{name}"] = text(template)
    if names:
        values["tokenizer.chat_templates"] = texts(names)
    return values


def _template_files(folder: Path) -> object:
    jinja, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if not jinja.exists():
        return read_object(wrapped, MAX_CONFIG_BYTES).get("chat_template") if wrapped.exists() else None
    main = _template(jinja)
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not others:
        return main
    return [
        {"name": "default", "template": main},
        *({"name": path.stem, "template": _template(path)} for path in others),
    ]


def _template(path: Path) -> str:
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError:
        raise ModelFileError(f"{path}: wanted UTF-8") from None
