"""How long a stage takes to load from a layer package, against the same layers from the whole GGUF file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources import gguf_model
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.package import hashes
from skippy_zmq.sources.package.building import build_package
from skippy_zmq.sources.package.weight_source import GgufWeights
from skippy_zmq.topology import LayerRange, split_evenly

ROUNDS = 25
MAY_TAKE = 1.2


@pytest.fixture(scope="module")
def package(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    build_package(GgufWeights(gguf_model.open_model(smollm2)), folder)
    return folder


def _load(path: Path, layers: LayerRange) -> float:
    """Seconds to open the model, know its identity and have the stage ready, as the stage program does."""
    options = check_options({"ctx_size": 512, "lanes": 1}, "bench")
    started = time.perf_counter()
    source = open_model(path)
    source.identity()
    StageModel(source, layers, options)
    return time.perf_counter() - started


@pytest.mark.parametrize("start", ["first", "later"])
@pytest.mark.parametrize("stage", [0, 1])
def test_load(
    smollm2: Path,
    package: Path,
    comparison: Comparison,
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stage: int,
    start: str,
) -> None:
    """The first start hashes the stage's parts; later ones know that the files have not changed since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # A file is remembered only some time after it was written; here it was written a moment ago.
    monkeypatch.setattr(hashes, "_SETTLED_NS", 2**62 if start == "first" else -(2**62))
    layers = split_evenly(2, open_model(smollm2).n_layers)[stage]
    seconds = alternate(
        benchmark,
        ROUNDS,
        {"package": lambda: _load(package, layers), "gguf": lambda: _load(smollm2, layers)},
    )
    name = f"load of stage {stage} from a package, {start} start, against the file"
    comparison.at_most(MAY_TAKE, name, seconds["package"] * 1e3, seconds["gguf"] * 1e3, "ms")
