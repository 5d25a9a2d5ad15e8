"""Fixtures that start pipelines of real processes and stop them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_helpers import Pipelines, child_processes, open_descriptors


@pytest.fixture(scope="module")
def pipelines() -> Iterator[Pipelines]:
    made = Pipelines()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def one_pipeline() -> Iterator[Pipelines]:
    """For pipelines that no other test asks for: stopped right after the test."""
    made = Pipelines()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory for temporary files; a test that leaves a process, thread, descriptor or file behind fails."""
    tmp_path_factory.getbasetemp()  # pytest chooses its own place now, not below the one that is watched
    with tempfile.TemporaryDirectory(prefix="skt") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        processes, descriptors, threads = child_processes(), open_descriptors(), set(threading.enumerate())
        yield Path(directory)
        assert child_processes() == processes
        assert set(threading.enumerate()) == threads
        assert open_descriptors() == descriptors
        assert list(Path(directory).iterdir()) == []
