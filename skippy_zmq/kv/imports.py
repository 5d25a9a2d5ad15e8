"""Pages that clients sent, held for each of them apart: nobody else's prompts may begin with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.descriptor import PageFacts, check_fits
from skippy_zmq.kv.held_page import kept
from skippy_zmq.kv.page import KvPage, verify


class ImportedPages:
    """``budget_bytes`` for all clients together; whose pages were used longest ago loses them first, as a whole."""

    def __init__(self, facts: PageFacts, n_ctx: int, budget_bytes: int) -> None:
        self._facts = facts
        self._n_ctx = n_ctx
        self._budget_bytes = budget_bytes
        self._pages: OrderedDict[bytes, dict[bytes, KvPage]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def owners(self) -> tuple[bytes, ...]:
        """Whose pages are here."""
        return tuple(self._pages)

    def put(self, owner: bytes, pages: Sequence[KvPage]) -> None:
        """Hold pages; raise KvPageError, and hold none of them, where one is damaged or does not fit this stage.

        What finds no room is refused in the same way, and all of its owner's pages go with it.
        """
        for page in pages:
            check_fits(page.descriptor, self._facts, n_ctx=self._n_ctx)
            verify(page)
        self._touch(owner)
        for page in pages:
            self._hold(owner, page)

    def _hold(self, owner: bytes, page: KvPage) -> None:
        descriptor = page.descriptor
        if descriptor.link_after in self._pages[owner]:
            return
        if self._bytes[owner] + descriptor.payload_bytes > self._budget_bytes:
            self.drop(owner)
            raise KvPageError(
                f"{descriptor}: its session does not fit into the {self._budget_bytes} bytes of --kv-cache-bytes"
            )
        while self.nbytes + descriptor.payload_bytes > self._budget_bytes:
            self.drop(next(iter(self._pages)))
        self._pages[owner][descriptor.link_after] = kept(page)
        self._bytes[owner] += descriptor.payload_bytes

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
        self._bytes.pop(owner, None)

    def _touch(self, owner: bytes) -> None:
        self._pages.setdefault(owner, {})
        self._bytes.setdefault(owner, 0)
        self._pages.move_to_end(owner)
