"""Page files: one page in one safetensors file, whose byte buffer is the page's payload as it is.

The blocks of layer n are tensors ``layers.n.k`` and ``layers.n.v``, U8, shaped tokens by row bytes (a transposed V:
elements by bytes of all tokens). The metadata's ``page`` is the descriptor as JSON, links and checksum in hex. Headers
are written here because the safetensors package orders tensors by name: layer 10 before 2, the payload torn apart.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.blocks import blocks
from skippy_zmq.kv.descriptor import PageDescriptor, descriptor_from_dict, descriptor_to_dict
from skippy_zmq.kv.limits import MAX_DESCRIPTOR_BYTES, MAX_LAYERS
from skippy_zmq.kv.page import KvPage, checksum_of_fields

_LENGTH_BYTES = 8
_PIECE_BYTES = 1 << 20
_ALIGNMENT = 8  # of the payload in its file, as safetensors pads headers
_MAX_HEADER_BYTES = 4 * MAX_DESCRIPTOR_BYTES + 256 * MAX_LAYERS
_BINARY = ("link_before", "link_after", "checksum")


def encode_header(descriptor: PageDescriptor) -> bytes:
    """All that stands before the payload."""
    header: dict[str, Any] = {"__metadata__": {"page": json.dumps(_readable(descriptor))}}
    for block in blocks(descriptor.layers, descriptor.n_tokens):
        header[f"layers.{block.layer}.{block.part}"] = {
            "dtype": "U8",
            "shape": list(block.shape),
            "data_offsets": [block.start, block.start + block.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def page_file_bytes(descriptor: PageDescriptor) -> int:
    return len(encode_header(descriptor)) + descriptor.payload_bytes


def write_page(file: BinaryIO, page: KvPage, parts: Callable[[bytes | memoryview], object] | None = None) -> int:
    """Write one page; bytes written. ``parts`` is called with each part of the file, in order."""
    header = encode_header(page.descriptor)
    for part in (header, page.payload):
        file.write(part)
        if parts is not None:
            parts(part)
    return len(header) + page.descriptor.payload_bytes


def open_regular(path: str | Path, directory: int | None = None) -> BinaryIO:
    """Open an ordinary file for reading; KvPageError for a link, pipe, device or folder, without waiting for any.

    ``path`` is relative to the folder with descriptor ``directory`` where that is given.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise KvPageError(f"{path}: wanted an ordinary file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise KvPageError(f"{path}: wanted an ordinary file")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_page(file: BinaryIO, sha256: bytes | None = None) -> KvPage:
    """Read and verify the page of an open file. KvPageError where it is not just as ``write_page`` left it.

    ``sha256``: of the whole file, where that is known; then it is checked in place of the page's own checksum. The
    payload is read, not mapped: a mapped file that another process cuts short kills its reader.
    """
    size = os.fstat(file.fileno()).st_size
    descriptor, header = _read_header(file, size)
    wanted_bytes = len(header) + descriptor.payload_bytes
    if size != wanted_bytes:
        raise KvPageError(f"{descriptor}: file: wanted {wanted_bytes} bytes, got {size}")
    payload = np.empty(descriptor.payload_bytes, np.uint8).data
    digest = checksum_of_fields(descriptor) if sha256 is None else hashlib.sha256(header)
    for start in range(0, len(payload), _PIECE_BYTES):
        piece = payload[start : start + _PIECE_BYTES]
        _read_into(file, piece)
        digest.update(piece)  # while it is in the processor's cache
    wanted = descriptor.checksum if sha256 is None else sha256
    if digest.digest() != wanted:
        name = "checksum" if sha256 is None else "SHA-256 of its file"
        raise KvPageError(f"{descriptor}: {name}: wanted {wanted.hex()}, got {digest.hexdigest()}: damaged")
    return KvPage(descriptor, payload)


def _read_header(file: BinaryIO, size: int) -> tuple[PageDescriptor, bytes]:
    length = bytearray(_LENGTH_BYTES)
    if size < _LENGTH_BYTES:
        raise KvPageError(f"KV page file: wanted a safetensors header, got {size} bytes")
    _read_into(file, memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise KvPageError(
            f"KV page file: wanted a header of at most {min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES)} bytes, "
            f"got {header_bytes}"
        )
    text = bytearray(header_bytes)
    _read_into(file, memoryview(text))
    try:
        page = json.loads(json.loads(text)["__metadata__"]["page"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise KvPageError("KV page file: its header has no page descriptor") from None
    descriptor = _from_readable(page)
    header = encode_header(descriptor)
    if header != length + text:
        raise KvPageError(f"{descriptor}: file: its header differs from the one of such a page")
    return descriptor, header


def _read_into(file: BinaryIO, target: memoryview) -> None:
    at = 0
    while at < len(target):
        n_read = file.readinto(target[at:])  # type: ignore[attr-defined]
        if not n_read:
            raise KvPageError(f"KV page file: cut short, {len(target) - at} bytes are missing")
        at += n_read


def _readable(descriptor: PageDescriptor) -> dict[str, Any]:
    values = descriptor_to_dict(descriptor)
    return {**values, **{name: values[name].hex() for name in _BINARY}}


def _from_readable(values: object) -> PageDescriptor:
    if not isinstance(values, Mapping):
        return descriptor_from_dict(values)
    binary = {}
    for name in _BINARY:
        text = values.get(name)
        try:
            binary[name] = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            binary[name] = b""  # refused for its length
    return descriptor_from_dict({**values, **binary})
