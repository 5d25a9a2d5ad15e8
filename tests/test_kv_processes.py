"""Two processes on one directory of pages, and one that is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_process import N_PAGES, process_pages
from kv_states import BUILD, MODEL

from skippy_zmq.kv.descriptor import PageFacts
from skippy_zmq.kv.page_folder import folder_name
from skippy_zmq.kv.store import PageStore

Start = Callable[[int, int], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def started(layer_start: int, layer_end: int) -> subprocess.Popen[str]:
        program = str(Path(__file__).with_name("kv_process.py"))
        process = subprocess.Popen(
            [sys.executable, program, str(tmp_path), str(layer_start), str(layer_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()
        process.communicate()


def said_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    raise AssertionError(f"the process ended without {word!r}: {lines}")


def test_two_stages_share_a_directory(start: Start, tmp_path: Path) -> None:
    processes = [start(0, 2), start(2, 4)]
    for process in processes:
        assert said_until(process, "written")[-1] == f"written {N_PAGES}"
    for process in processes:
        process.communicate("")
        assert process.returncode == 0
    for layer_start, layer_end in ((0, 2), (2, 4)):
        state = process_pages(layer_start, layer_end)
        pages = state.pages()
        links = [page.descriptor.link_after for page in pages]
        facts = PageFacts(MODEL, BUILD, state.layers)
        with PageStore(facts, 1 << 20, tmp_path) as store, store.pin(links) as pinned:
            assert pinned.load() == pages


def test_a_second_stage_of_the_same_layers_keeps_its_pages_in_memory(start: Start) -> None:
    first, second = start(0, 2), None
    said_until(first, "written")
    second = start(0, 2)
    lines = said_until(second, "written")
    assert lines[0].startswith("report KV pages are kept in memory only: ")
    assert lines[0].endswith("another process keeps its pages there")
    assert lines[-1] == "written 0"
    assert sum(line.startswith("kept") for line in lines) == N_PAGES


def test_a_process_that_is_killed_leaves_whole_pages_and_a_free_folder(start: Start, tmp_path: Path) -> None:
    process = start(0, 2)
    said_until(process, "kept 7")
    process.kill()
    process.wait()
    state = process_pages(0, 2)
    facts = PageFacts(MODEL, BUILD, state.layers)
    pages = state.pages()
    reports: list[str] = []
    with PageStore(facts, 1 << 20, tmp_path, report=reports.append) as store:
        n_held = store.match([page.descriptor.link_after for page in pages])
        assert len(store) == n_held
        with store.pin([page.descriptor.link_after for page in pages]) as pinned:
            assert pinned.load() == pages[:n_held]
        assert all(map(store.put, pages))
        assert store.close(60)
    assert not reports
    names = {path.name for path in (tmp_path / folder_name(facts, "")).iterdir()}
    assert len(names) == N_PAGES + 3
    assert not any(name.startswith(".new-") for name in names)
