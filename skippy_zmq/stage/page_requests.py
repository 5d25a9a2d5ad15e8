"""Clients that fetch pages from this stage, or bring some."""

from __future__ import annotations

from collections import deque

from skippy_zmq.errors import BusyError, KvPageError
from skippy_zmq.kv.descriptor import pack_descriptor, unpack_descriptor
from skippy_zmq.kv.page import KvPage
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.transport import SendTracker
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.limits import LINK_BYTES, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES

# What may wait for a client that does not read; one message of any size always may, and a second one behind it.
MAX_UNREAD_MESSAGES = 32
MAX_UNREAD_BYTES = 256 << 20


class UnreadPages:
    """Pages on their way to clients: libzmq would hold a thousand messages for one that does not read."""

    def __init__(self) -> None:
        self._sent: dict[bytes, deque[tuple[SendTracker, int]]] = {}

    def check(self, client: bytes) -> None:
        """Raise BusyError where ``client`` has to read first."""
        for other in list(self._sent):  # those that are gone, too: what they did not read was dropped
            self._forget_read(other)
        sent = self._sent.get(client, ())
        n_bytes = sum(size for _, size in sent)
        if len(sent) >= MAX_UNREAD_MESSAGES or (len(sent) > 1 and n_bytes >= MAX_UNREAD_BYTES):
            raise BusyError(
                f"{len(sent)} messages with {n_bytes} bytes of pages are on their way to you, at most "
                f"{MAX_UNREAD_MESSAGES} and {MAX_UNREAD_BYTES} may be: read them, then ask again"
            )

    def add(self, client: bytes, tracker: SendTracker, n_bytes: int) -> None:
        self._sent.setdefault(client, deque()).append((tracker, n_bytes))

    def _forget_read(self, client: bytes) -> None:
        sent = self._sent[client]
        while sent and sent[0][0].done:
            sent.popleft()
        if not sent:
            del self._sent[client]


def exported(asked: wire.KvExport, held: LanePages, client: bytes) -> tuple[wire.KvPages, list[memoryview]]:
    """The answer and its payloads; raise KvPageError where a page is not here, or all are too much for a message."""
    links = [asked.links[at : at + LINK_BYTES] for at in range(0, len(asked.links), LINK_BYTES)]
    pages: list[KvPage] = []
    size = MAX_HEADER_BYTES
    for link in links:
        page = held.page(client, link)
        if page.payload.nbytes > MAX_PAYLOAD_BYTES:
            raise KvPageError(
                f"{page.descriptor}: a message carries {MAX_PAYLOAD_BYTES} bytes, and it has {page.payload.nbytes}: "
                "start the stages with a smaller --kv-page-tokens"
            )
        size += page.payload.nbytes
        if size > MAX_MESSAGE_BYTES and pages:
            raise KvPageError(f"{len(links)} pages: they do not fit into one message, ask for {len(pages)} at once")
        pages.append(page)
    descriptors = tuple(pack_descriptor(page.descriptor) for page in pages)
    tensors = tuple(wire.TensorDescriptor.of_page(page.payload.nbytes) for page in pages)
    return wire.KvPages(asked.request, descriptors, tensors), [page.payload for page in pages]


def imported(brought: wire.KvImport, payloads: list[memoryview], held: LanePages, client: bytes) -> wire.KvImported:
    """Hold what a client brought; raise KvPageError where one of the pages is damaged or does not fit."""
    pairs = zip(brought.descriptors, payloads, strict=True)
    held.take(client, [KvPage(unpack_descriptor(descriptor), payload) for descriptor, payload in pairs])
    return wire.KvImported(brought.request)
