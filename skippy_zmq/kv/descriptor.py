"""What a page is: everything that decides whether it fits, checked field by field.

Descriptors come from peers and files. A ``PageDescriptor`` that exists is consistent in itself; whether it fits a stage
is ``check_fits``'s question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack  # type: ignore[import-untyped]

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.chain import LINK_BYTES, ROOT
from skippy_zmq.kv.checked_layers import LAYER_FIELDS, checked_layers, layers_from_arrays
from skippy_zmq.kv.checks import check_binary, check_integer, check_text, refused, shown
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.limits import (
    FORMAT,
    MAX_DESCRIPTOR_BYTES,
    MAX_LAYERS,
    MAX_PAGE_BYTES,
    MAX_PAGE_TOKENS,
    MAX_POSITION,
    MAX_TEXT_BYTES,
)

CHECKSUM_BYTES = 16  # XXH3, 128 bits
_WHAT = "KV page descriptor"


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What pages of one stage have in common; pages of equal facts can stand in for one another."""

    model: str  # identity by content
    build: str  # llama.cpp pin and library version
    layers: tuple[LayerRows, ...]  # that keep state, ascending

    def __post_init__(self) -> None:
        check_text(f"{_WHAT}: model", self.model)
        check_text(f"{_WHAT}: build", self.build)
        checked_layers(self.layers, _WHAT)


@dataclass(frozen=True, slots=True)
class PageDescriptor:
    """Layers ``layers`` of tokens ``first`` to ``end`` (excluded) of a session. Raises KvPageError for what cannot be.

    ``link_before`` and ``link_after`` are the token chain's links (``chain``) at ``first`` and ``end``. ``checksum`` is
    XXH3-128 of all other fields (``sealed_fields``) and then the payload.
    """

    model: str
    build: str
    layers: tuple[LayerRows, ...]
    first: int
    end: int
    link_before: bytes
    link_after: bytes
    payload_bytes: int
    checksum: bytes
    version: int = FORMAT

    def __post_init__(self) -> None:
        check_integer(f"{_WHAT}: version", self.version, FORMAT, FORMAT)
        check_text(f"{_WHAT}: model", self.model)
        check_text(f"{_WHAT}: build", self.build)
        layers = checked_layers(self.layers, _WHAT)
        check_integer(f"{_WHAT}: first", self.first, 0, MAX_POSITION)
        check_integer(f"{_WHAT}: end", self.end, self.first + 1, min(MAX_POSITION + 1, self.first + MAX_PAGE_TOKENS))
        check_binary(f"{_WHAT}: link_before", self.link_before, LINK_BYTES)
        check_binary(f"{_WHAT}: link_after", self.link_after, LINK_BYTES)
        if (self.first == 0) != (self.link_before == ROOT):
            raise refused(
                f"{_WHAT}: link_before", f"the root at token 0 only, and first is {self.first}", self.link_before
            )
        size = self.n_tokens * layers.token_bytes
        if size > MAX_PAGE_BYTES:
            raise refused(f"{_WHAT}: layers and tokens", f"at most {MAX_PAGE_BYTES} bytes", f"{size}")
        check_integer(f"{_WHAT}: payload_bytes", self.payload_bytes, size, size)
        check_binary(f"{_WHAT}: checksum", self.checksum, CHECKSUM_BYTES)

    def __str__(self) -> str:
        return f"KV page of layers {layer_text(self.layers)}, tokens {self.first}:{self.end}"

    @property
    def n_tokens(self) -> int:
        return self.end - self.first

    @property
    def facts(self) -> PageFacts:
        return PageFacts(self.model, self.build, self.layers)


_FIELDS = tuple(field.name for field in fields(PageDescriptor))


def layer_text(layers: Sequence[LayerRows]) -> str:
    """Layer numbers for people: runs as half-open ranges, ``0:15`` or ``0:3,5:8``."""
    runs: list[list[int]] = []
    for rows in layers:
        if runs and runs[-1][1] == rows.layer:
            runs[-1][1] += 1
        else:
            runs.append([rows.layer, rows.layer + 1])
    return shown(",".join(f"{start}:{end}" for start, end in runs))


def check_fits(
    descriptor: PageDescriptor,
    facts: PageFacts,
    *,
    n_ctx: int | None = None,
    first: int | None = None,
    end: int | None = None,
    link_before: bytes | None = None,
    link_after: bytes | None = None,
    all_layers: bool = True,
) -> None:
    """Raise KvPageError, naming the field, what was wanted and what was got, unless the page fits a stage of ``facts``.

    ``n_ctx``: tokens that a lane can hold. ``first``, ``end`` and the links: where given, the page must have these.
    With ``all_layers`` the page must have the stage's layers, no more and no fewer; without it, it is a page of another
    split: it must share a layer with the stage, and those that it shares must agree.
    """
    for name, wanted, got in _differences(descriptor, facts, all_layers):
        raise KvPageError(f"{descriptor}: {name}: wanted {wanted}, got {got}")
    exact: tuple[tuple[str, Any], ...] = (
        ("first", first),
        ("end", end),
        ("link_before", link_before),
        ("link_after", link_after),
    )
    for name, value in exact:
        if value is not None and getattr(descriptor, name) != value:
            raise KvPageError(f"{descriptor}: {name}: wanted {shown(value)}, got {shown(getattr(descriptor, name))}")
    if n_ctx is not None and descriptor.end > n_ctx:
        raise KvPageError(f"{descriptor}: end: wanted at most {n_ctx}, the context of a lane, got {descriptor.end}")


def _differences(
    descriptor: PageDescriptor, facts: PageFacts, all_layers: bool
) -> Iterator[tuple[str, object, object]]:
    for name in ("model", "build"):
        if getattr(descriptor, name) != getattr(facts, name):
            yield name, shown(getattr(facts, name)), shown(getattr(descriptor, name))
    if descriptor.layers == facts.layers:  # both were checked, so that equal numbers are of equal types
        return
    wanted, got = ({rows.layer: rows for rows in layers} for layers in (facts.layers, descriptor.layers))
    shared = wanted.keys() & got.keys()
    if not shared or (all_layers and wanted.keys() != got.keys()):
        yield "layers", layer_text(facts.layers), layer_text(descriptor.layers)
    for layer in sorted(shared):
        for name in LAYER_FIELDS:
            left, right = getattr(wanted[layer], name), getattr(got[layer], name)
            if left != right:
                yield f"layer {layer}: {name}", left, right


def sealed_fields(descriptor: PageDescriptor) -> bytes:
    """All fields but the checksum in msgpack: what the checksum covers before the payload."""
    return _pack(descriptor, b"")


def descriptor_to_dict(descriptor: PageDescriptor) -> dict[str, Any]:
    """The fields by name, layers as arrays of theirs in order: values that msgpack can carry."""
    values = {name: getattr(descriptor, name) for name in _FIELDS}
    values["layers"] = checked_layers(descriptor.layers, _WHAT).arrays
    return values


def descriptor_from_dict(values: object) -> PageDescriptor:
    """The opposite of ``descriptor_to_dict`` for values from anywhere; KvPageError names the field that is wrong."""
    if not isinstance(values, Mapping):
        raise KvPageError(f"KV page descriptor: wanted a map, got {shown(values)}")
    if values.keys() != set(_FIELDS):
        raise KvPageError(
            f"KV page descriptor: fields: wanted {', '.join(_FIELDS)}, "
            f"got {shown(', '.join(sorted(map(shown, values)))) or 'none'}"
        )
    return PageDescriptor(**{**values, "layers": layers_from_arrays(values["layers"], _WHAT)})


def pack_descriptor(descriptor: PageDescriptor) -> bytes:
    return _pack(descriptor, descriptor.checksum)


def unpack_descriptor(data: bytes) -> PageDescriptor:
    """Read what ``pack_descriptor`` wrote; KvPageError for anything else."""
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise KvPageError(f"KV page descriptor: wanted at most {MAX_DESCRIPTOR_BYTES} bytes, got {len(data)}")
    known = _known_start(data)
    if known is not None:
        start, shared = known
        rest = _unpack(_MAP_OF_OWN + data[len(start) :])
        if isinstance(rest, dict) and tuple(rest) == _OWN_FIELDS:
            return PageDescriptor(**shared, **rest)
    values = _unpack(data)
    descriptor = descriptor_from_dict(values)
    if tuple(values) == _FIELDS_PACKED:
        start = _start(descriptor.model, descriptor.build, descriptor.layers)
        if data.startswith(start):
            if len(_starts) >= _MOST_STARTS:
                _starts.clear()
            _starts[start] = {name: getattr(descriptor, name) for name in _SHARED_FIELDS}
    return descriptor


# The pages of a stage are many and begin alike: with model, build and layers. What one descriptor began with is packed,
# parsed and checked once. Starts are whole values, so that what follows one is parsed as if all had been.
_SHARED_FIELDS = ("model", "build", "layers")
_OWN_FIELDS = tuple(name for name in _FIELDS if name not in _SHARED_FIELDS)
_FIELDS_PACKED = (*_SHARED_FIELDS, *_OWN_FIELDS)
_MAP_OF_OWN = bytes([0x80 | len(_OWN_FIELDS)])
_MOST_STARTS = 64
_MOST_STARTS_OF_LAYERS = 4  # peers may have them made, before anybody asks whether they fit
_starts: dict[bytes, dict[str, Any]] = {}


def _pack(descriptor: PageDescriptor, checksum: bytes) -> bytes:
    own: dict[str, Any] = {name: getattr(descriptor, name) for name in _OWN_FIELDS}
    own["checksum"] = checksum
    rest: bytes = msgpack.packb(own)
    return _start(descriptor.model, descriptor.build, descriptor.layers) + rest[1:]


def _start(model: str, build: str, layers: tuple[LayerRows, ...]) -> bytes:
    checked = checked_layers(layers, _WHAT)
    start = checked.starts.get((model, build))
    if start is None:
        packed: bytes = msgpack.packb({"model": model, "build": build, "layers": checked.arrays})
        start = bytes([0x80 | len(_FIELDS)]) + packed[1:]
        if len(checked.starts) >= _MOST_STARTS_OF_LAYERS:
            checked.starts.clear()
        checked.starts[model, build] = start
    return start


def _known_start(data: bytes) -> tuple[bytes, dict[str, Any]] | None:
    for start, shared in _starts.items():
        if data.startswith(start):
            return start, shared
    return None


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data, max_array_len=MAX_LAYERS, max_map_len=len(_FIELDS), max_ext_len=0, max_str_len=MAX_TEXT_BYTES
        )
    except Exception as error:  # msgpack raises what its callbacks and str() raise, of many classes
        raise KvPageError(f"KV page descriptor: not msgpack: {shown(str(error))}") from None
