"""Pages on disk survive a restart, what is damaged or foreign is set aside, a disk that fails costs no request."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from kv_states import State
from kv_store_machine import FACTS, LAYERS, PAGE_BYTES, StoreMachine, links_of, session

from skippy_zmq.kv import page_disk
from skippy_zmq.kv.chain import ROOT
from skippy_zmq.kv.limits import MAX_DAMAGED_FILES
from skippy_zmq.kv.page import KvPage, seal
from skippy_zmq.kv.page_disk import WRITE_PAUSE_SECONDS
from skippy_zmq.kv.page_file import page_file_bytes, write_page
from skippy_zmq.kv.page_folder import PageFolder, folder_name
from skippy_zmq.kv.page_writer import PageWriter
from skippy_zmq.kv.store import PageStore

SECONDS = 60.0  # far more than any of it takes
FILE_BYTES = page_file_bytes(session(1).page(0, 4).descriptor)


class Case:
    """A directory, and what stores in it reported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / folder_name(FACTS, "")
        self.reports: list[str] = []
        self.now = 0.0

    def store(self, budget: int = 100, disk_bytes: int | None = None) -> PageStore:
        return PageStore(
            FACTS,
            budget * PAGE_BYTES,
            self.directory,
            disk_bytes=disk_bytes,
            report=self.reports.append,
            clock=lambda: self.now,
        )

    def write(self, *pages: KvPage) -> None:
        with self.store() as store:
            for page in pages:
                assert store.put(page)
            assert store.close(SECONDS)

    def file(self, page: KvPage) -> Path:
        descriptor = page.descriptor
        return self.folder / f"{descriptor.link_before.hex()}-{descriptor.link_after.hex()}.safetensors"

    def files(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.safetensors")}

    def set_aside(self) -> set[str]:
        return {path.name for path in (self.folder / "damaged").iterdir()}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_pages_survive_a_restart(case: Case) -> None:
    pages = session(1, 2, 3, 4).pages()
    case.write(*pages)
    with case.store() as store:
        assert store.match(links_of(pages)) == 4
        assert store.counters().memory_pages == 0
        with store.pin(links_of(pages)) as pinned:
            assert pinned.load() == pages
            assert pinned.load() == pages
        counters = store.counters()
        assert (counters.hits, counters.disk_hits) == (8, 4)
        assert counters.disk_bytes == 4 * FILE_BYTES == sum(path.stat().st_size for path in map(case.file, pages))
    assert not case.reports


def test_what_memory_has_no_room_for_is_read_from_disk(case: Case) -> None:
    pages = session(*range(6)).pages()
    with case.store(budget=2, disk_bytes=6 * FILE_BYTES) as store:
        for page in pages:
            assert store.put(page)
            assert store.flush(SECONDS)
        assert store.counters().memory_pages == 2
        with store.pin(links_of(pages)) as pinned:
            assert pinned.load() == pages
        assert store.counters().memory_bytes <= 2 * PAGE_BYTES
        assert store.counters().evictions == 0


def test_the_disk_has_a_budget_of_its_own(case: Case) -> None:
    pages = session(*range(6)).pages()
    with case.store(disk_bytes=3 * FILE_BYTES) as store:
        for page in pages:
            assert store.put(page)
        assert store.match(links_of(pages)) == 6
        assert store.close(SECONDS)
    assert case.files() == {case.file(page).name for page in pages[:3]}
    with case.store(disk_bytes=2 * FILE_BYTES) as store:  # less than was there
        assert store.match(links_of(pages)) == 2
        assert store.put(session(9).page(0, 4))
        assert store.match(links_of(pages)) == 1
        assert store.close(SECONDS)
    assert len(case.files()) == 2


def test_files_used_last_stay_longest_across_a_restart(case: Case) -> None:
    one, two = session(1).page(0, 4), session(2).page(0, 4)
    case.write(one, two)
    for page, seconds in ((one, 2000), (two, 1000)):
        os.utime(case.file(page), (seconds, seconds))
    with case.store() as store:
        assert store.page(two.descriptor.link_after) == two
    with case.store(disk_bytes=FILE_BYTES) as store:
        assert store.match(links_of([two])) == 1
        assert store.match(links_of([one])) == 0


PREFIX = session(1, 2, 3).pages()
NEIGHBOUR = session(7).page(0, 4)


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_set_aside_and_reported_and_never_used(where: float, flip: int, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        case = Case(Path(directory))
        case.write(*PREFIX, NEIGHBOUR)
        path = case.file(PREFIX[1])
        data = bytearray(path.read_bytes())
        at = int(where * len(data))
        if cut:
            del data[at:]
        else:
            data[at] ^= flip
        path.write_bytes(data)
        with case.store() as store:
            assert store.match(links_of(PREFIX)) == 3
            with store.pin(links_of(PREFIX)) as pinned:
                assert pinned.load() == PREFIX[:1]
            assert store.match(links_of(PREFIX)) == 1
            assert store.page(NEIGHBOUR.descriptor.link_after) == NEIGHBOUR
            assert store.counters().damaged == 1
            assert store.put(PREFIX[1])  # computed again
            assert store.page(PREFIX[1].descriptor.link_after) == PREFIX[1]
        (report,) = case.reports
        assert str(path) in report
        assert "set aside in damaged" in report
        assert case.set_aside() == {path.name}
        assert case.files() == {case.file(page).name for page in (*PREFIX[:2], NEIGHBOUR)}


def _link(path: Path, page: KvPage) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _pipe(path: Path, page: KvPage) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("replace", [_link, _pipe])
def test_what_has_a_pages_name_but_is_no_file_is_set_aside_at_start(case: Case, replace) -> None:
    case.write(*PREFIX)
    replace(case.file(PREFIX[0]), PREFIX[0])
    with case.store() as store:
        assert len(store) == 0
    assert case.set_aside() == {case.file(PREFIX[0]).name}
    assert "1 files that are no pages were set aside" in case.reports[0]
    assert not case.files()  # what hung from it is of no use


def test_a_pipe_that_takes_a_files_place_while_a_store_is_open_is_not_waited_for(case: Case) -> None:
    case.write(PREFIX[0])
    with case.store() as store:
        _pipe(case.file(PREFIX[0]), PREFIX[0])
        assert store.page(PREFIX[0].descriptor.link_after) is None
    assert "wanted an ordinary file" in case.reports[0]


def _of_another_model(page: KvPage) -> bytes:
    state = State(LAYERS, (1,) * 4, seed=5)
    other = state.page(0, 4)
    return _file_bytes(KvPage(other.descriptor, other.payload), model="cd" * 32)


def _file_bytes(page: KvPage, **changes: str) -> bytes:
    descriptor = page.descriptor
    facts = dataclasses.replace(descriptor.facts, **changes)
    sealed = seal(facts, descriptor.first, descriptor.end, descriptor.link_before, descriptor.link_after, page.payload)
    file = io.BytesIO()
    write_page(file, sealed)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_of_another_model(PREFIX[0]), "model: wanted abab"),
        (_file_bytes(PREFIX[0], build="llama.cpp 0.6.0"), "build: wanted llama.cpp 0.5.0, got llama.cpp 0.6.0"),
        (_file_bytes(NEIGHBOUR), "link_after: wanted"),
        (b"", "wanted a safetensors header, got 0 bytes"),
        (b"\xff" * 100, "wanted a header of at most 92 bytes"),
        ((40).to_bytes(8, "little") + b"[" * 40, "has no page descriptor"),
        ((2).to_bytes(8, "little") + b"{}", "has no page descriptor"),
    ],
)
def test_a_file_of_something_else_is_refused_with_the_reason(case: Case, data: bytes, reason: str) -> None:
    case.write(PREFIX[0])
    case.file(PREFIX[0]).write_bytes(data)
    with case.store() as store:
        assert store.page(PREFIX[0].descriptor.link_after) is None
        assert len(store) == 0
    assert reason in case.reports[0]


def test_a_file_that_is_gone_is_a_page_that_is_gone(case: Case) -> None:
    case.write(*PREFIX)
    with case.store() as store:
        case.file(PREFIX[1]).unlink()
        assert store.page(PREFIX[1].descriptor.link_after) is None
        assert store.match(links_of(PREFIX)) == 1
        assert store.close(SECONDS)
    assert "cannot be read" in case.reports[0]
    assert case.files() == {case.file(PREFIX[0]).name}


def test_foreign_files_are_set_aside_leftovers_deleted_and_both_bounded(case: Case) -> None:
    case.write(PREFIX[0])
    for number in range(MAX_DAMAGED_FILES + 5):
        (case.folder / f"letter {number}").write_text("dear")
    (case.folder / ".new-123-4").write_text("half a page")
    (case.folder / "photos").mkdir()
    with case.store() as store:
        assert store.match(links_of(PREFIX)) == 1
    (report,) = case.reports
    assert "22 files that are no pages were set aside: " in report
    assert report.endswith(", ...")
    assert len(case.set_aside()) == MAX_DAMAGED_FILES
    assert {path.name for path in case.folder.iterdir()} == {
        "lock",
        "facts.json",
        "damaged",
        "photos",
        case.file(PREFIX[0]).name,
    }


def test_a_folder_that_cannot_be_made_leaves_a_store_of_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    case = Case(blocked)
    with case.store() as store:
        assert store.put(PREFIX[0])
        assert store.page(PREFIX[0].descriptor.link_after) == PREFIX[0]
        assert store.counters().disk_pages == 0
    assert len(case.reports) == 1
    assert case.reports[0].startswith("KV pages are kept in memory only: ")
    assert "Not a directory" in case.reports[0]


def test_a_disk_that_fails_is_said_once_and_tried_again_later(case: Case) -> None:
    pages = session(*range(5)).pages()
    with case.store() as store:
        shutil.rmtree(case.folder)
        for page in pages[:3]:
            assert store.put(page)
            assert store.flush(SECONDS)
        assert store.match(links_of(pages)) == 3
        counters = store.counters()
        assert (counters.disk_pages, counters.disk_bytes, counters.unwritten) == (0, 0, 3)
        case.now += WRITE_PAUSE_SECONDS
        assert store.put(pages[3])  # its parent is not on disk
        assert store.page(pages[0].descriptor.link_after) == pages[0]  # tried, fails again
        assert store.flush(SECONDS)
        assert len(case.reports) == 1
        assert "in memory only until their folder can be written: [Errno 2]" in case.reports[0]
        case.folder.mkdir()
        case.now += WRITE_PAUSE_SECONDS
        for page in pages:
            assert store.put(page)
        assert store.close(SECONDS)
    assert case.files() == {case.file(page).name for page in pages}


class SlowFolder(PageFolder):
    """A disk that writes only while the gate is open."""

    gate: threading.Event
    begun: threading.Event

    def write(self, page: KvPage) -> None:
        self.begun.set()
        assert self.gate.wait(SECONDS)
        super().write(page)


@pytest.fixture
def slow_folder(tmp_path: Path) -> Iterator[SlowFolder]:
    folder = SlowFolder(tmp_path, FACTS, "", print)
    folder.gate, folder.begun = threading.Event(), threading.Event()
    yield folder
    folder.gate.set()
    folder.close()


def test_a_slow_disk_is_given_no_more_than_the_queue_holds(slow_folder: SlowFolder) -> None:
    pages = session(*range(4)).pages()
    writer = PageWriter(slow_folder, 2 * PAGE_BYTES)
    assert [writer.write(number, page) for number, page in enumerate(pages)] == [True, True, False, False]
    assert not writer.wait_until_idle(0)
    slow_folder.gate.set()
    assert writer.wait_until_idle(SECONDS)
    written, error = writer.take_written()
    assert [(one.ticket, one.error) for one in written] == [(0, None), (1, None)]
    assert error is None
    assert writer.write(2, pages[2])
    assert writer.close(SECONDS)
    assert not writer.write(3, pages[3])


def test_closing_waits_no_longer_than_told_and_leaves_the_rest(slow_folder: SlowFolder) -> None:
    pages = session(1, 2, 3).pages()
    writer = PageWriter(slow_folder, 3 * PAGE_BYTES)
    for number, page in enumerate(pages):
        assert writer.write(number, page)
    assert slow_folder.begun.wait(SECONDS)
    assert not writer.close(0)
    slow_folder.gate.set()
    writer.thread.join(SECONDS)
    assert not writer.thread.is_alive()
    assert [page.link_after for page in slow_folder.scan()] == links_of(pages[:1])


def test_after_an_error_nothing_is_written_that_was_queued_behind_it(slow_folder: SlowFolder) -> None:
    pages = session(1, 2).pages()
    writer = PageWriter(slow_folder, 2 * PAGE_BYTES)
    obstacle = slow_folder.path / f"{ROOT.hex()}-{pages[0].descriptor.link_after.hex()}.safetensors"
    obstacle.mkdir()
    for number, page in enumerate(pages):
        assert writer.write(number, page)
    slow_folder.gate.set()
    assert writer.wait_until_idle(SECONDS)
    written, error = writer.take_written()
    assert isinstance(error, IsADirectoryError)
    assert [one.error for one in written] == [error, error]
    assert not writer.write(2, pages[1])
    obstacle.rmdir()
    assert slow_folder.scan() == []
    writer.resume()
    assert writer.write(3, pages[0])
    assert writer.close(SECONDS)
    assert [page.link_after for page in slow_folder.scan()] == links_of(pages[:1])


def test_a_page_that_waits_for_the_disk_stays_in_memory_and_none_is_written_before_its_parent(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    class GatedFolder(SlowFolder):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.gate, self.begun = gate, threading.Event()

    monkeypatch.setattr(page_disk, "PageFolder", GatedFolder)
    first, second, third = session(1, 2, 3).pages()
    other = session(9).page(0, 4)
    with case.store(budget=3, disk_bytes=9 * FILE_BYTES) as store:  # so that one page may wait
        for page in (first, second, third):
            assert store.put(page)
        assert store.put(other)
        assert store.page(first.descriptor.link_after) == first
        assert store.page(second.descriptor.link_after) == second
        assert third.descriptor.link_after not in store
        gate.set()
        assert store.flush(SECONDS)
        assert store.put(third)  # its parent is in memory only
        assert store.flush(SECONDS)
        assert case.files() == {case.file(first).name}
        assert store.page(second.descriptor.link_after) == second  # is written now, as it is used
        assert store.flush(SECONDS)
        assert store.put(third)
        assert store.close(SECONDS)
    assert case.files() == {case.file(page).name for page in (first, second, third)}


class DiskMachine(StoreMachine):
    """As in memory, with a disk that is smaller than what is asked of it, and restarts."""

    DISK_BUDGET = 4

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.directory = Path(self.temporary.name)

    @rule()
    def settle(self) -> None:
        assert self.store.flush(SECONDS)

    @rule()
    def restart(self) -> None:
        while self.pins:
            self.pins.pop()[0].release()
        assert self.store.flush(SECONDS)
        counters = self.store.counters()
        assert self.store.close(SECONDS)
        self.store = self.open()
        again = self.store.counters()
        assert (again.disk_pages, again.disk_bytes) == (counters.disk_pages, counters.disk_bytes)
        assert (again.pages, again.memory_pages) == (counters.disk_pages, 0)

    def teardown(self) -> None:
        super().teardown()
        self.temporary.cleanup()


TestStoreOnDisk = DiskMachine.TestCase
TestStoreOnDisk.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
