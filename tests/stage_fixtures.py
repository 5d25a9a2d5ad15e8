"""Fixtures for tests of real stage processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stage_processes import StagePipeline, StageProcess


@pytest.fixture(scope="module")
def module_dir() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="skm") as directory:
        yield Path(directory)


@pytest.fixture
def make_pipeline(leak_check: None, socket_dir: Path) -> Iterator[Callable[..., StagePipeline]]:
    """Makes pipelines that are ended with the test; nothing is started yet."""
    made: list[StagePipeline] = []

    def make(model: Path, ranges: str, *options: str) -> StagePipeline:
        directory = socket_dir / f"{len(made)}"
        directory.mkdir()
        made.append(StagePipeline(directory, model, ranges, *options))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


@pytest.fixture
def start_stage(leak_check: None) -> Iterator[Callable[..., StageProcess]]:
    """Starts single stages that are ended with the test."""
    started: list[StageProcess] = []

    def start(*arguments: object, **environment: str) -> StageProcess:
        started.append(StageProcess(*map(str, arguments), **environment))
        return started[-1]

    yield start
    for stage in started:
        stage.close()
