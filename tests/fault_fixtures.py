"""Fixtures for tests of bad peers: two stages of a parrot, on ipc and on tcp, with a good client at work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from fault_helpers import Scene, TcpPipeline
from model_files import Parrot, parrot
from stage_processes import StagePipeline
from transport_helpers import Transport

_P = TypeVar("_P", bound=StagePipeline)
# Long answers must fit a lane; the parrot's lanes cost next to nothing.
_OPTIONS = ("--lanes", "4", "--ctx-size", "8192")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    path = tmp_path_factory.mktemp("model") / "parrot.gguf"
    return parrot(path, "pieces of eight! ", end="loop", context=8192)


def _running(pipeline: _P) -> Iterator[_P]:
    with pipeline:
        yield pipeline.start_all()
        for index in range(len(pipeline.ranges)):
            assert pipeline[index].process.poll() is None
            assert pipeline[index].stop() == 0
            assert "Traceback" not in pipeline[index].stderr()


@pytest.fixture(scope="module")
def tcp_pipeline(module_dir: Path, model: Parrot) -> Iterator[TcpPipeline]:
    yield from _running(TcpPipeline(module_dir, model.path, "0:2 2:4", *_OPTIONS))


@pytest.fixture(scope="module")
def ipc_pipeline(module_dir: Path, model: Parrot) -> Iterator[StagePipeline]:
    yield from _running(StagePipeline(module_dir, model.path, "0:2 2:4", *_OPTIONS))


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def pipeline(request: pytest.FixtureRequest) -> StagePipeline:
    """Both, one after the other."""
    pipeline: StagePipeline = request.getfixturevalue(f"{request.param}_pipeline")
    return pipeline


@pytest.fixture
def scene(transport: Transport, pipeline: StagePipeline, model: Parrot) -> Iterator[Scene]:
    with Scene(pipeline, model, transport) as scene:
        yield scene


@pytest.fixture
def ipc_scene(transport: Transport, ipc_pipeline: StagePipeline, model: Parrot) -> Iterator[Scene]:
    with Scene(ipc_pipeline, model, transport) as scene:
        yield scene


@pytest.fixture
def tcp_scene(transport: Transport, tcp_pipeline: TcpPipeline, model: Parrot) -> Iterator[Scene]:
    with Scene(tcp_pipeline, model, transport) as scene:
        yield scene
