"""A store of pages under everything that can be done to it, and sessions whose pages it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_states import BUILD, MODEL, State, plain_layers

from skippy_zmq.kv.descriptor import PageFacts
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.page_file import page_file_bytes
from skippy_zmq.kv.pinned_pages import PinnedPages
from skippy_zmq.kv.store import PageStore

LAYERS = plain_layers(0, 2)
FACTS = PageFacts(MODEL, BUILD, LAYERS)
PAGE_BYTES = 4 * 2 * 16  # tokens, layers, bytes of K and V


def session(*tokens: int) -> State:
    """Each number stands for a page of that token."""
    return State(LAYERS, tuple(token for token in tokens for _ in range(4)))


def links_of(pages: list[KvPage]) -> list[bytes]:
    return [page.descriptor.link_after for page in pages]


class StoreMachine(RuleBasedStateMachine):
    """Prompts over few tokens, so that they share prefixes; every page is known by its tokens."""

    BUDGET = 5
    DISK_BUDGET: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.directory: Path | None = None
        self.pins: list[tuple[PinnedPages, list[KvPage]]] = []
        self.reports: list[str] = []
        self.known: dict[bytes, KvPage] = {}

    def open(self) -> PageStore:
        report: Callable[[str], None] = self.reports.append
        page = session(1).page(0, 4)
        disk_bytes = self.DISK_BUDGET and self.DISK_BUDGET * page_file_bytes(page.descriptor)
        return PageStore(
            FACTS, self.BUDGET * PAGE_BYTES, self.directory, disk_bytes=disk_bytes, max_pages=9, report=report
        )

    @initialize()
    def start(self) -> None:
        self.store = self.open()

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def keep(self, prompt: list[int]) -> None:
        for page in session(*prompt).pages():
            before = page.descriptor.link_before
            kept = self.store.put(page)
            assert kept == (page.descriptor.link_after in self.store)
            assert not kept or page.descriptor.first == 0 or before in self.store
            self.known[page.descriptor.link_after] = page

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def use(self, prompt: list[int]) -> None:
        pages = session(*prompt).pages()
        n_held = self.store.match(links_of(pages))
        for number, page in enumerate(pages):
            found = self.store.page(page.descriptor.link_after)
            assert found == (page if number < n_held else None)

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def pin(self, prompt: list[int]) -> None:
        pages = session(*prompt).pages()
        pinned = self.store.pin(links_of(pages))
        self.pins.append((pinned, pages[: len(pinned)]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.pins:
            self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[0].release()

    @invariant()
    def nothing_pinned_is_lost_and_nothing_is_out_of_bounds(self) -> None:
        for pinned, pages in self.pins:
            assert pinned.load() == pages
        counters = self.store.counters()
        assert counters.memory_bytes <= self.BUDGET * PAGE_BYTES
        assert counters.memory_bytes == counters.memory_pages * PAGE_BYTES
        assert counters.disk_bytes <= self.store.disk_bytes
        assert max(counters.memory_pages, counters.disk_pages) <= counters.pages <= 9
        assert counters.pages == len(self.store) <= counters.memory_pages + counters.disk_pages
        held = [link for link in self.known if link in self.store]
        assert len(held) == counters.pages
        for link in held:  # every page can be reached
            page = self.known[link]
            assert page.descriptor.first == 0 or page.descriptor.link_before in self.store

    def teardown(self) -> None:
        assert self.store.close()
        assert not self.reports
