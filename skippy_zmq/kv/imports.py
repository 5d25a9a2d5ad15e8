"""Pages that clients sent, held for each of them apart: nobody else's prompts may begin with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.descriptor import PageFacts, check_fits
from skippy_zmq.kv.page import KvPage, verify

# Fresh memory costs more than copying into it: a fault for every 4 KiB. Large pieces come in pages of 2 MiB where the
# system has them (numpy asks for those); a client that brings little gets no more than that takes.
_PIECE_BYTES = 8 << 20
_SMALL_BYTES = 4 << 20


class _Memory:
    """What one client's payloads are copied to, piece by piece; gone with the last of them."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._piece = memoryview(b"")
        self._used = 0

    def place(self, nbytes: int) -> memoryview:
        """Where the next payload goes; the same again until it is taken."""
        if self._used + nbytes > len(self._piece):
            size = nbytes if self.nbytes < _SMALL_BYTES else max(nbytes, _PIECE_BYTES)
            self._piece, self._used = np.empty(size, np.uint8).data, 0
        return self._piece[self._used : self._used + nbytes]

    def take(self, nbytes: int) -> None:
        self._used += nbytes
        self.nbytes += nbytes


class ImportedPages:
    """``budget_bytes`` for all clients together; whose pages were used longest ago loses them first, as a whole."""

    def __init__(self, facts: PageFacts, n_ctx: int, budget_bytes: int) -> None:
        self._facts = facts
        self._n_ctx = n_ctx
        self._budget_bytes = budget_bytes
        self._pages: OrderedDict[bytes, dict[bytes, KvPage]] = OrderedDict()
        self._memory: dict[bytes, _Memory] = {}

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def put(self, owner: bytes, page: KvPage) -> None:
        """Hold a copy of a page; raise KvPageError where it is damaged, does not fit this stage, or finds no room."""
        descriptor = page.descriptor
        check_fits(descriptor, self._facts, n_ctx=self._n_ctx)
        size = descriptor.payload_bytes
        memory = self._memory.get(owner) or _Memory()
        is_new = descriptor.link_after not in self._pages.get(owner, {})
        fits = memory.nbytes + size <= self._budget_bytes
        if is_new and fits:
            place = memory.place(size)
            place[:] = page.payload
            page = KvPage(descriptor, place)
        verify(page)  # the copy, if there is one: it is in the processor's cache
        self._touch(owner, memory)
        if not is_new:
            return
        if not fits:
            self.drop(owner)
            raise KvPageError(
                f"{descriptor}: its session does not fit into the {self._budget_bytes} bytes of --kv-cache-bytes"
            )
        while self.nbytes + size > self._budget_bytes:
            self.drop(next(iter(self._pages)))
        memory.take(size)
        self._pages[owner][descriptor.link_after] = page

    def leading(self, owner: bytes, links: Sequence[bytes]) -> list[KvPage]:
        """The pages of ``links``, up to the first that is not held."""
        held = self._pages.get(owner, {})
        if owner in self._pages:
            self._pages.move_to_end(owner)
        found: list[KvPage] = []
        for link in links:
            page = held.get(link)
            if page is None:
                break
            found.append(page)
        return found

    def drop(self, owner: bytes) -> None:
        self._pages.pop(owner, None)
        self._memory.pop(owner, None)

    def _touch(self, owner: bytes, memory: _Memory) -> None:
        self._pages.setdefault(owner, {})
        self._memory[owner] = memory
        self._pages.move_to_end(owner)
