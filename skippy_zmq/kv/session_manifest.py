"""The manifest of a saved session, ``session.json``: what was saved, and which files hold it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.checked_layers import checked_layers, layers_from_arrays
from skippy_zmq.kv.checks import check_binary, check_integer, check_text, refused, shown
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.limits import (
    FORMAT,
    MAX_LAYERS,
    MAX_MANIFEST_BYTES,
    MAX_OPAQUE_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGE_TOKENS,
    MAX_POSITION,
    MAX_SESSION_FILES,
    MAX_SESSION_TOKENS,
    MAX_TOKEN_ID,
)
from skippy_zmq.kv.session_chain import SessionLinks
from skippy_zmq.topology import LayerRange

MANIFEST = "session.json"
KIND = "skippy-zmq session"
OPENING = f'{{"kind": "{KIND}"'.encode()  # what every manifest begins with
FILE_NAME = re.compile(r"layers-[0-9]{4}-[0-9]{4}\.tokens-[0-9]{10}-[0-9]{10}\.[0-9a-f]{8}\.safetensors")
_KEYS = frozenset(
    (
        "kind",
        "format",
        "name",
        "model",
        "build",
        "n_ctx",
        "page_tokens",
        "n_prompt",
        "link_after",
        "n_cached",
        "layers",
        "files",
    )
) | {"tokens", "extra", "checksum"}
_SHA256_BYTES = 32
_FILE_KEYS = frozenset(["name", "bytes", "sha256", "layer_start", "layer_end", "first", "end"])


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session is, apart from its attention state.

    ``tokens`` may go on where the state ends: a sampled token that no stage has run yet. ``extra`` is kept for others
    as it is: values that JSON has, at most ``limits.MAX_OPAQUE_BYTES`` of it. ``n_prompt``: full pages within so many
    tokens have the plain chain's links, all others a kept session's; None: all have the plain chain's. Raises
    KvPageError.
    """

    name: str
    model: str
    build: str
    tokens: tuple[int, ...]
    n_ctx: int
    page_tokens: int
    extra: Mapping[str, Any]
    n_prompt: int | None = None

    def __post_init__(self) -> None:
        for field in ("name", "model", "build"):
            check_text(f"{MANIFEST}: {field}", getattr(self, field))
        if not isinstance(self.tokens, tuple) or not 1 <= len(self.tokens) <= MAX_SESSION_TOKENS:
            raise refused(f"{MANIFEST}: tokens", f"1..{MAX_SESSION_TOKENS} ids", self.tokens)
        for token in self.tokens:
            if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
                raise refused(f"{MANIFEST}: tokens", f"ids of 0..{MAX_TOKEN_ID}", token)
        check_integer(f"{MANIFEST}: n_ctx", self.n_ctx, 1, MAX_POSITION)
        check_integer(f"{MANIFEST}: page_tokens", self.page_tokens, 1, MAX_PAGE_TOKENS)
        if self.n_prompt is not None:
            check_integer(f"{MANIFEST}: n_prompt", self.n_prompt, 1, len(self.tokens))
        if not isinstance(self.extra, Mapping):
            raise refused(f"{MANIFEST}: extra", "a JSON object", self.extra)
        try:
            size = len(json.dumps(dict(self.extra), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise refused(f"{MANIFEST}: extra", "a JSON object", str(error)) from None
        if size > MAX_OPAQUE_BYTES:
            raise refused(f"{MANIFEST}: extra", f"at most {MAX_OPAQUE_BYTES} bytes of JSON", size)


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A page file: the session's layers in ``layers``, tokens ``first`` to ``end``. ``sha256`` is of all its bytes."""

    name: str
    file_bytes: int
    sha256: bytes
    layers: LayerRange
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class SessionManifest:
    """``layers``: all that keep state, ascending. ``n_cached``: tokens, from the first on, whose state is in files."""

    facts: SessionFacts
    layers: tuple[LayerRows, ...]
    n_cached: int
    files: tuple[SessionFile, ...]

    def __post_init__(self) -> None:
        check_integer(f"{MANIFEST}: n_cached", self.n_cached, 1, min(len(self.facts.tokens), self.facts.n_ctx))
        if not 1 <= len(self.files) <= MAX_SESSION_FILES:
            raise refused(f"{MANIFEST}: files", f"1..{MAX_SESSION_FILES}", self.files)
        if len({file.name for file in self.files}) != len(self.files):
            raise KvPageError(f"{MANIFEST}: files: wanted each name once")
        for file in self.files:
            if not any(file.layers.start <= rows.layer < file.layers.end for rows in self.layers):
                raise KvPageError(f"{MANIFEST}: {file.name}: wanted some of the session's layers, got {file.layers}")
            if file.end > self.n_cached:
                raise KvPageError(f"{MANIFEST}: {file.name}: end: wanted at most {self.n_cached}, got {file.end}")
        self._check_complete()

    def _check_complete(self) -> None:
        """Each layer's tokens are there from the first to ``n_cached``."""
        by_token = sorted(self.files, key=lambda file: file.first)
        reached = {rows.layer: 0 for rows in self.layers}
        for file in by_token:
            for layer in range(file.layers.start, file.layers.end):
                if reached.get(layer, -1) >= file.first:
                    reached[layer] = max(reached[layer], file.end)
        for layer, end in reached.items():
            if end < self.n_cached:
                raise KvPageError(f"{MANIFEST}: files: layer {layer}, token {end}: no file holds it")


def encode_manifest(manifest: SessionManifest) -> bytes:
    """As ``session.json`` has it; KvPageError where it would be too large."""
    facts = manifest.facts
    values: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "name": facts.name,
        "model": facts.model,
        "build": facts.build,
        "n_ctx": facts.n_ctx,
        "page_tokens": facts.page_tokens,
        "n_prompt": facts.n_prompt,
        "link_after": SessionLinks(facts.tokens, facts.page_tokens, facts.n_prompt).at(manifest.n_cached).hex(),
        "n_cached": manifest.n_cached,
        "layers": checked_layers(manifest.layers, MANIFEST).arrays,
        "files": [
            {
                "name": file.name,
                "bytes": file.file_bytes,
                "sha256": file.sha256.hex(),
                "layer_start": file.layers.start,
                "layer_end": file.layers.end,
                "first": file.first,
                "end": file.end,
            }
            for file in manifest.files
        ],
        "tokens": facts.tokens,
        "extra": dict(facts.extra),
    }
    values["checksum"] = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    data = json.dumps(values).encode()
    if len(data) > MAX_MANIFEST_BYTES:
        raise KvPageError(f"{MANIFEST}: wanted at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}")
    return data


def decode_manifest(data: bytes) -> SessionManifest:
    """Read what ``encode_manifest`` wrote; KvPageError, naming the entry, for anything else."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise KvPageError(f"{MANIFEST}: wanted at most {MAX_MANIFEST_BYTES} bytes")
    try:
        values = json.loads(data, object_pairs_hook=_unique)
    except KvPageError:
        raise
    except (ValueError, RecursionError) as error:
        raise KvPageError(f"{MANIFEST}: not JSON: {shown(str(error))}") from None
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise KvPageError(f'{MANIFEST}: kind: wanted "{KIND}"')
    check_integer(f"{MANIFEST}: format", values.get("format"), FORMAT, FORMAT)
    _check_keys(MANIFEST, values, _KEYS)
    facts = SessionFacts(
        name=values["name"],
        model=values["model"],
        build=values["build"],
        tokens=tuple(_array("tokens", values["tokens"], MAX_SESSION_TOKENS)),
        n_ctx=values["n_ctx"],
        page_tokens=values["page_tokens"],
        extra=values["extra"],
        n_prompt=values["n_prompt"],
    )
    manifest = SessionManifest(
        facts=facts,
        layers=layers_from_arrays(values["layers"], MANIFEST),
        n_cached=values["n_cached"],
        files=tuple(_file(entry) for entry in _array("files", values["files"], MAX_SESSION_FILES)),
    )
    if encode_manifest(manifest) != data:
        raise KvPageError(f"{MANIFEST}: damaged: its link_after or checksum does not fit its entries")
    return manifest


def _file(entry: object) -> SessionFile:
    if not isinstance(entry, dict):
        raise refused(f"{MANIFEST}: files", "objects", entry)
    name = entry.get("name")
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise refused(f"{MANIFEST}: files: name", "the name of a page file of a session", name)
    _check_keys(f"{MANIFEST}: {name}", entry, _FILE_KEYS)
    start = check_integer(f"{MANIFEST}: {name}: layer_start", entry["layer_start"], 0, MAX_LAYERS - 1)
    first = check_integer(f"{MANIFEST}: {name}: first", entry["first"], 0, MAX_POSITION)
    return SessionFile(
        name=name,
        file_bytes=check_integer(f"{MANIFEST}: {name}: bytes", entry["bytes"], 1, 2 * MAX_PAGE_BYTES),
        sha256=_binary(f"{name}: sha256", entry["sha256"], _SHA256_BYTES),
        layers=LayerRange(
            start, check_integer(f"{MANIFEST}: {name}: layer_end", entry["layer_end"], start + 1, MAX_LAYERS)
        ),
        first=first,
        end=check_integer(f"{MANIFEST}: {name}: end", entry["end"], first + 1, MAX_POSITION),
    )


def _array(name: str, value: object, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise refused(f"{MANIFEST}: {name}", f"an array of at most {most}", value)
    return value


def _binary(name: str, value: object, size: int) -> bytes:
    try:
        data = bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        data = None
    if data is None:
        raise refused(f"{MANIFEST}: {name}", f"{2 * size} hexadecimal digits", value)
    return check_binary(f"{MANIFEST}: {name}", data, size)


def _check_keys(where: str, values: Mapping[str, Any], wanted: frozenset[str]) -> None:
    for key in sorted(wanted - values.keys()):
        raise KvPageError(f"{where}: {key}: missing")
    for key in sorted(values.keys() - wanted):
        raise KvPageError(f"{where}: {shown(key)}: not known in format {FORMAT}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise KvPageError(f"{MANIFEST}: wanted each key once in an object")
    return values
