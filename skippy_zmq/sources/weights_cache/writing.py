"""Write an entry while its stage loads: rows are kept as they are made, in no more memory than they have."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from pathlib import Path

import numpy as np
import xxhash

from skippy_zmq.errors import ModelFileError, SkippyError
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_model import RowBytes
from skippy_zmq.sources.weights_cache.entry import Entry, file_states

log = logging.getLogger("skippy_zmq.weights")

_SLAB_ELEMENTS = 8 << 20  # made at a time, as loading does


class EntryWriter:
    """A RowSource that makes what the entry's source makes, and writes it to the file ``partial`` as well.

    Once ``finish`` has put the file in its place it is whole. Where it cannot be written that is logged, once, and rows
    are made as before.
    """

    def __init__(self, entry: Entry, descriptor: int, partial: Path, path: Path) -> None:
        assert entry.source.rows is not None
        self._entry = entry
        self._make = entry.source.rows
        self._descriptor: int | None = descriptor
        self._partial = partial
        self._path = path
        self._offsets = {tensor.name: offset for tensor, offset in zip(entry.own, entry.layout.offsets, strict=True)}
        self._n_rows = dict.fromkeys(self._offsets, 0)  # written so far
        self._digests = {name: xxhash.xxh3_64() for name in self._offsets}
        try:
            os.ftruncate(descriptor, entry.size)  # so that others who look for room count all of it
        except OSError as error:
            self._give_up(f"{error.strerror}")

    def __call__(self, tensor: TensorInfo, first_row: int, n_rows: int) -> RowBytes:
        rows = self._make(tensor, first_row, n_rows)
        # A matrix that serves at both ends is asked for twice.
        if self._descriptor is not None and self._n_rows.get(tensor.name) == first_row:
            try:
                self._keep(tensor, rows, n_rows)
            except OSError as error:
                self._give_up(f"{error.strerror}")
        return rows

    def finish(self) -> None:
        """Make what nobody asked for, and put the file in its place."""
        if self._descriptor is None:
            return
        try:
            for tensor in self._entry.own:
                self._complete(tensor)
            if file_states(self._entry.files) != self._entry.states:
                raise ModelFileError("their source changed while the stage was loading")
            checksums = [self._digests[tensor.name].hexdigest() for tensor in self._entry.own]
            _write(self._descriptor, memoryview(self._entry.header(checksums)), 0)
            os.fsync(self._descriptor)
            self._partial.replace(self._path)
            _sync_folder(self._path.parent)
        except SkippyError as error:
            self._give_up(str(error))
        except OSError as error:
            self._give_up(f"{error.strerror}")
        else:
            log.info("weights kept in %s", self._path)
            self._close()

    def abandon(self) -> None:
        """Leave nothing behind; after ``finish`` this does nothing."""
        if self._descriptor is not None:
            self._close()
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _complete(self, tensor: TensorInfo) -> None:
        total, step = math.prod(tensor.shape[1:]), max(1, _SLAB_ELEMENTS // tensor.shape[0])
        for first in range(self._n_rows[tensor.name], total, step):
            n_rows = min(step, total - first)
            self._keep(tensor, self._make(tensor, first, n_rows), n_rows)

    def _keep(self, tensor: TensorInfo, rows: RowBytes, n_rows: int) -> None:
        assert self._descriptor is not None
        total = math.prod(tensor.shape[1:])
        first = self._n_rows[tensor.name]
        data = (rows.data if isinstance(rows, np.ndarray) else memoryview(rows)).cast("B")
        if len(data) * total != tensor.nbytes * n_rows:
            raise ModelFileError(f"tensor {tensor.name}: wanted {tensor.nbytes} bytes, got rows of another size")
        _write(self._descriptor, data, self._offsets[tensor.name] + tensor.nbytes // total * first)
        self._digests[tensor.name].update(data)
        self._n_rows[tensor.name] += n_rows

    def _give_up(self, why: str) -> None:
        self.abandon()
        log.warning("weights are not kept in %s: %s", self._path.parent, why)

    def _close(self) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
