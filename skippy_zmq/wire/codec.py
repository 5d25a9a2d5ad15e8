"""Messages to frames and back. Every byte a peer may choose is checked here before anything else sees it.

What every step sends is read, checked and written by msgspec in native code: a step of the model leaves the processor's
caches empty, and there every line of code costs a wait for memory. Whatever it does not take goes the other way, by the
converters of the fields, which say what is wrong where something is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]
import msgspec

from skippy_zmq.errors import ProtocolError, RequestError
from skippy_zmq.wire.fields import FieldError
from skippy_zmq.wire.limits import (
    MAX_ARRAY_ITEMS,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_HEADER_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_TEXT_BYTES,
)
from skippy_zmq.wire.messages import (
    GENERATION,
    MESSAGE_TYPES,
    Activations,
    Detokenize,
    Generate,
    Kind,
    KvImport,
    KvPages,
    Message,
    TensorDescriptor,
    Tokenize,
    Tokens,
)
from skippy_zmq.wire.schema import MESSAGE_FIELDS

_PREFIX_BYTES = 2  # frame 0: generation, kind
_PREFIXES = {kind: bytes((GENERATION, kind)) for kind in Kind}
_READERS = {int(kind): (kind, MESSAGE_FIELDS[cls].unpack) for kind, cls in MESSAGE_TYPES.items()}
_WRITERS = {cls: (_PREFIXES[kind], MESSAGE_FIELDS[cls].pack) for kind, cls in MESSAGE_TYPES.items()}
_NATIVE_READERS: dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any], object] | None]] = {
    cls: (msgspec.msgpack.Decoder(cls).decode, fields.rest) for cls, fields in MESSAGE_FIELDS.items() if fields.native
}
_write_natively = msgspec.msgpack.Encoder().encode
_WITH_PAYLOADS = (Activations, Tokens, KvPages, KvImport)
_FROM_USER = (Generate, Tokenize, Detokenize)


def encode(message: Message, payloads: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """Frames of ``message``; ``payloads`` (C-contiguous, one per tensor descriptor) follow without a copy.

    A message that ``decode`` would refuse is refused here. Raises RequestError (invalid_request or too_large) for
    Generate, Tokenize and Detokenize, whose contents are a user's, and ValueError for the others, where it is a bug.
    """
    writer = _WRITERS.get(type(message))
    if writer is None:
        raise ValueError(f"{type(message).__name__} is not a message of generation {GENERATION}")
    prefix, pack = writer
    try:
        header = _natively_written(message) or msgpack.packb(pack(message))
    except FieldError as refused:
        _refuse_own(message, _text(type(message).__name__, refused), "invalid_request")
    except UnicodeEncodeError as error:
        _refuse_own(message, f"{type(message).__name__}: wanted valid Unicode, got {error.reason}", "invalid_request")
    if len(header) > MAX_HEADER_BYTES:
        words = f"{type(message).__name__}: wanted a header of at most {MAX_HEADER_BYTES} bytes, got {len(header)}"
        _refuse_own(message, words, "too_large")
    frames: list[bytes | memoryview] = [prefix, header]
    if payloads or type(message) in _WITH_PAYLOADS:
        views = [_flat(payload) for payload in payloads]
        try:
            _check_payloads(message, views, _PREFIX_BYTES + len(header))
        except ProtocolError as error:
            raise ValueError(str(error)) from None
        frames += views
    return frames


def decode(frames: Sequence[bytes | memoryview]) -> tuple[Message, list[memoryview]]:
    """The message in ``frames`` and its payloads, as views of the given frames.

    Raises ProtocolError, and nothing else, for any bytes: codes generation_mismatch, unknown_kind, too_large, protocol.
    """
    count = len(frames)
    if count > MAX_FRAMES:
        raise ProtocolError(f"message: wanted at most {MAX_FRAMES} frames, got {count}", code="too_large")
    if count < 2:
        raise ProtocolError(f"message: wanted at least 2 frames, got {count}")
    kind, unpack = _reader(bytes(frames[0][: _PREFIX_BYTES + 1]))
    header = memoryview(frames[1])
    size = header.nbytes
    if size > MAX_HEADER_BYTES:
        words = f"{kind.name}: wanted a header of at most {MAX_HEADER_BYTES} bytes, got {size}"
        raise ProtocolError(words, code="too_large")
    payloads: list[memoryview] = []
    if count > 2:
        if MESSAGE_TYPES[kind] not in _WITH_PAYLOADS:
            raise ProtocolError(f"{kind.name}: wanted no payload frames, got {count - 2}")
        payloads = [_flat(frame) for frame in frames[2:]]
    try:
        message: Message = _natively_read(MESSAGE_TYPES[kind], header) or unpack(_parse(kind, header, size))
    except FieldError as refused:
        raise ProtocolError(_text(MESSAGE_TYPES[kind].__name__, refused)) from None
    if type(message) in _WITH_PAYLOADS:
        _check_payloads(message, payloads, _PREFIX_BYTES + size)
    return message, payloads


def _natively_read(cls: type[Any], header: memoryview | bytes) -> Any:
    """The message, or None where the converters have to look at it; raises FieldError as they do."""
    reader = _NATIVE_READERS.get(cls)
    if reader is None:
        return None
    read, check_rest = reader
    try:
        message = read(header)
    except (msgspec.MsgspecError, ValueError):
        return None
    if check_rest is not None:
        check_rest(message)
    return message


def _natively_written(message: Message) -> bytes | None:
    """The header, where it can be read natively; raises FieldError as the converters do."""
    if type(message) not in _NATIVE_READERS:
        return None
    try:
        header = _write_natively(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return None
    return header if _natively_read(type(message), header) is not None else None


def _reader(prefix: bytes) -> tuple[Kind, Any]:
    if not prefix:
        raise ProtocolError(f"frame 0: wanted {_PREFIX_BYTES} bytes, got none")
    if prefix[0] != GENERATION:
        words = f"message of generation {prefix[0]}: this side speaks generation {GENERATION}"
        raise ProtocolError(words, code="generation_mismatch")
    if len(prefix) != _PREFIX_BYTES:
        raise ProtocolError(f"frame 0: wanted {_PREFIX_BYTES} bytes, got {'1' if len(prefix) == 1 else 'more'}")
    reader = _READERS.get(prefix[1])
    if reader is None:
        words = f"message of kind {prefix[1]}: generation {GENERATION} has no such kind"
        raise ProtocolError(words, code="unknown_kind")
    return reader


class _ItemCount:
    """Counts the values of finished arrays, and so the objects a header has made."""

    def __init__(self) -> None:
        self.items = 0

    def add(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self.items += len(items)
        if self.items > MAX_HEADER_ITEMS:
            raise ValueError(f"more than {MAX_HEADER_ITEMS} values")
        return items


def _refuse_map(pairs: object) -> NoReturn:
    raise ValueError("a map")


def _refuse_ext(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _parse(kind: Kind, header: memoryview, size: int) -> Any:
    """The header's values: tuples, ints, floats, texts, bytes, booleans, None; no map, no extension type.

    The length limits stop an announced size before it is allocated. A value takes at least a byte, so only a header
    of more bytes than MAX_HEADER_ITEMS needs the count.
    """
    try:
        return msgpack.unpackb(
            header,
            use_list=False,
            raw=False,
            strict_map_key=True,
            list_hook=_ItemCount().add if size > MAX_HEADER_ITEMS else None,
            object_pairs_hook=_refuse_map,
            ext_hook=_refuse_ext,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=max(4 * MAX_PROMPT_TOKENS, MAX_TEXT_BYTES),
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
    except msgpack.exceptions.StackError:
        raise ProtocolError(f"{kind.name} header: nested too deeply") from None
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ProtocolError(f"{kind.name} header: not a msgpack header of this protocol: {reason}") from None


def _check_payloads(message: Message, payloads: Sequence[memoryview], size_before: int) -> None:
    tensors: tuple[TensorDescriptor, ...] = message.tensors if isinstance(message, _WITH_PAYLOADS) else ()
    name = type(message).__name__
    if len(payloads) != len(tensors):
        raise ProtocolError(f"{name}: wanted {len(tensors)} payload frames, one per tensor, got {len(payloads)}")
    total = size_before
    for index, (tensor, payload) in enumerate(zip(tensors, payloads, strict=True)):
        size = payload.nbytes
        if size > MAX_PAYLOAD_BYTES:
            words = f"{name} payload {index}: wanted at most {MAX_PAYLOAD_BYTES} bytes, got {size}"
            raise ProtocolError(words, code="too_large")
        if size != tensor.nbytes:
            raise ProtocolError(f"{name} payload {index}: wanted {tensor.nbytes} bytes by its descriptor, got {size}")
        total += size
    if total > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{name}: wanted at most {MAX_MESSAGE_BYTES} bytes in all, got {total}", code="too_large")


def _flat(frame: bytes | memoryview) -> memoryview:
    """A view of single bytes; raises TypeError where the memory is not contiguous."""
    view = memoryview(frame)
    return view if view.ndim == 1 and view.format == "B" and view.contiguous else view.cast("B")


def _text(name: str, refused: FieldError) -> str:
    return f"{name}{refused.path}: wanted {refused.wanted}, got {refused.got}"


def _refuse_own(message: Message, words: str, code: str) -> NoReturn:
    if isinstance(message, _FROM_USER):
        raise RequestError(words, code=code) from None
    raise ValueError(words) from None
