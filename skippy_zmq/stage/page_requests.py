"""Clients that fetch pages from this stage, or bring some."""

from __future__ import annotations

from skippy_zmq.kv.descriptor import pack_descriptor, unpack_descriptor
from skippy_zmq.kv.page import KvPage
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.wire import messages as wire


def exported(asked: wire.KvExport, pages: LanePages, client: bytes) -> tuple[wire.KvPage, tuple[memoryview]]:
    """The answer and its payload; raise KvPageError where the page is not here."""
    page = pages.page(client, asked.link)
    tensor = wire.TensorDescriptor("page", 0, 0, "i8", (page.payload.nbytes,), page.payload.nbytes)
    return wire.KvPage(asked.request, pack_descriptor(page.descriptor), (tensor,)), (page.payload,)


def imported(brought: wire.KvImport, payloads: list[memoryview], pages: LanePages, client: bytes) -> wire.KvImported:
    """Hold what a client brought; raise KvPageError where it is damaged or does not fit."""
    pages.take(client, KvPage(unpack_descriptor(brought.descriptor), payloads[0]))
    return wire.KvImported(brought.request)
