"""The store of pages in memory: prefixes, pins, room; and what holds whatever is done to it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from kv_store_machine import FACTS, PAGE_BYTES, StoreMachine, links_of, session

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.store import PageStore


def test_the_leading_pages_of_a_prompt_are_found_and_come_back_as_they_were() -> None:
    pages = session(1, 2, 3).pages()
    store = PageStore(FACTS, 10 * PAGE_BYTES)
    assert [store.put(page) for page in pages[:2]] == [True, True]
    assert store.match(links_of(pages)) == 2
    assert store.match(links_of(session(1, 3, 3).pages())) == 1
    assert store.match(links_of(session(2, 2, 3).pages())) == 0
    with store.pin(links_of(pages)) as pinned:
        assert pinned.load() == pages[:2]
    assert store.page(pages[2].descriptor.link_after) is None
    counters = store.counters()
    assert (counters.pages, counters.memory_pages, counters.memory_bytes) == (2, 2, 2 * PAGE_BYTES)
    assert (counters.hits, counters.disk_hits, counters.evictions) == (2, 0, 0)


def test_a_page_that_is_there_is_not_kept_twice() -> None:
    page = session(1).page(0, 4)
    store = PageStore(FACTS, 10 * PAGE_BYTES)
    assert store.put(page)
    assert store.put(page)
    assert store.counters().memory_bytes == PAGE_BYTES


def test_the_page_used_longest_ago_goes_first_and_never_before_its_children() -> None:
    old, young = session(1, 2).pages(), session(5, 6).pages()
    store = PageStore(FACTS, 4 * PAGE_BYTES)
    for page in (*old, *young):
        store.put(page)
    store.match(links_of(old))
    store.put(session(7).page(0, 4))
    assert store.match(links_of(old)) == 2
    assert store.match(links_of(young)) == 1
    store.put(session(8).page(0, 4))
    assert (store.match(links_of(old)), store.match(links_of(young))) == (2, 1)
    assert session(7).links.at(4) not in store
    assert store.counters().evictions == 2


def test_a_page_in_use_stays_and_a_store_full_of_them_refuses() -> None:
    pages = session(1, 2).pages()
    store = PageStore(FACTS, 2 * PAGE_BYTES)
    for page in pages:
        store.put(page)
    first, second = store.pin(links_of(pages)), store.pin(links_of(pages[:1]))
    assert not store.put(session(3).page(0, 4))
    first.release()
    first.release()  # once is enough
    assert store.put(session(3).page(0, 4))
    assert store.match(links_of(pages)) == 1
    assert not store.put(session(3, 4).page(4, 8)) or store.match(links_of(pages)) == 1
    second.release()
    assert store.put(session(9).page(0, 4))
    assert store.counters().refused == 2


def test_a_page_without_its_parent_or_too_large_is_not_kept() -> None:
    pages = session(1, 2, 3).pages()
    store = PageStore(FACTS, PAGE_BYTES)
    assert not store.put(pages[1])
    assert not PageStore(FACTS, PAGE_BYTES - 1).put(pages[0])
    assert store.put(pages[0])
    assert not store.put(pages[1])  # room for it would cost its parent
    assert store.match(links_of(pages)) == 1
    assert store.counters().refused == 2


def test_a_page_of_another_stage_is_refused_by_name() -> None:
    store = PageStore(dataclasses.replace(FACTS, build="llama.cpp 0.6.0"), PAGE_BYTES)
    with pytest.raises(KvPageError, match=r"build: wanted llama.cpp 0.6.0, got llama.cpp 0.5.0"):
        store.put(session(1).page(0, 4))
    assert len(store) == 0


def test_a_payload_that_is_part_of_something_larger_is_copied() -> None:
    page = session(1).page(0, 4)
    large = bytearray(bytes(page.payload) + bytes(1000))
    store = PageStore(FACTS, PAGE_BYTES)
    store.put(KvPage(page.descriptor, memoryview(large)[:PAGE_BYTES]))
    large[:] = bytes(len(large))
    kept = store.page(page.descriptor.link_after)
    assert kept is not None
    assert kept == page


def test_no_more_pages_than_the_limit_are_known() -> None:
    store = PageStore(FACTS, 100 * PAGE_BYTES, max_pages=3)
    for number in range(10):
        assert store.put(session(number).page(0, 4))
    assert len(store) == 3
    assert session(9).links.at(4) in store


TestStoreInMemory = StoreMachine.TestCase
TestStoreInMemory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
