"""A stage that waits keeps weights in the processor's cache: which, how many, and nothing else changes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from lane_helpers import recited
from model_files import parrot, tiny
from stage_peers import Asker
from stage_processes import StagePipeline, StageProcess
from transport_helpers import Transport

from skippy_zmq.runtime.cpu_cache import last_level_share
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import Crossing, StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import LayerRange

pytest_plugins = ("transport_fixtures", "stage_fixtures")

ALL = 1 << 50


def opened(path: Path, start: int, end: int, **options: object) -> StageModel:
    values = {"ctx_size": 64, "lanes": 1, "threads": 1, "ubatch_size": 16, **options}
    return StageModel(open_model(path), LayerRange(start, end), StageOptions.model_validate(values))


def matrices(path: Path, start: int, end: int, *heads: str) -> int:
    """Bytes of the matrices of some layers, and of ``heads``, by the file's own table."""
    layers = tuple(f"blk.{layer}." for layer in range(start, end))
    tensors = gguf.GGUFReader(path).tensors
    return sum(int(t.n_bytes) for t in tensors if t.name.startswith(layers) and "norm" not in t.name) + sum(
        int(t.n_bytes) for t in tensors if t.name in heads
    )


@pytest.mark.parametrize("quant", [None, "q4_0"])  # the latter is repacked
@pytest.mark.parametrize("tied", [False, True])
def test_the_matrices_of_own_layers_are_kept(tied: bool, quant: str | None, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", tied=tied, quant=quant, n_layers=4)
    head = "token_embd.weight" if tied else "output.weight"
    assert opened(path, 0, 2).native_context.warmable_bytes == matrices(path, 0, 2)
    assert opened(path, 2, 3).native_context.warmable_bytes == matrices(path, 2, 3)
    assert opened(path, 3, 4).native_context.warmable_bytes == matrices(path, 3, 4, head)


def test_experts_are_not(tmp_path: Path) -> None:
    """Which of them the next row asks is not known."""
    path = tiny(tmp_path / "model.gguf", experts=4)
    experts = sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors if "_exps" in t.name)
    everything = matrices(path, 0, 4, "output.weight")
    assert 0 < experts < everything
    assert opened(path, 0, 4).native_context.warmable_bytes == everything - experts


def test_no_more_than_a_stage_has_and_none_where_it_does_not_poll(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf")
    own = matrices(path, 0, 4, "output.weight")
    polling = {"busy_poll_ms": 20}
    assert opened(path, 0, 4, **polling, warm_bytes=ALL).warm_bytes == own
    assert opened(path, 0, 4, **polling, warm_bytes=1000).warm_bytes == 1000
    assert opened(path, 0, 4, **polling, warm_bytes=0).warm_bytes == 0
    assert opened(path, 0, 4, **polling).warm_bytes == min(own, last_level_share(os.sched_getaffinity(0)))
    assert opened(path, 0, 4, busy_poll_ms=0, warm_bytes=ALL).warm_bytes == 0


def test_results_are_the_same(tmp_path: Path) -> None:
    """Of any number of bytes between two runs, those that no weights have included."""
    path = tiny(tmp_path / "model.gguf", quant="q4_0")

    def logits(*warmed: tuple[int, int]) -> list[bytes]:
        first, last = opened(path, 0, 2), opened(path, 2, 4)
        first.serve(last.wanted)
        rows = []
        for position, token in enumerate((7, 8, 9, 10)):
            ids = np.array([token], np.int32)
            leaving: list[Crossing] = first.run([(0, position, 1)], ids, (), ())
            for limit, n_bytes in warmed:
                first.native_context.warm(limit, n_bytes)
                last.native_context.warm(limit, n_bytes)
            last.run([(0, position, 1)], ids, (0,), leaving)
            rows.append(last.logits(0).tobytes())
        return rows

    expected = logits()
    assert logits((0, 0), (0, 100), (100, 0), (1, 1), (64, 1000), (1000, 64), (ALL, 100_001), (ALL, ALL)) == expected
    assert logits(*[(70_000, 4_097)] * 50) == expected


def resident(path: Path) -> int:
    """Bytes of a file that are mapped into this process and there."""
    maps = Path("/proc/self/smaps").read_text().split(f"{path}\n")[1:]
    return sum(int(part.split("Rss:")[1].split()[0]) << 10 for part in maps)


def test_no_page_is_read_for_it(tmp_path: Path) -> None:
    """A hint for memory that is not there does nothing: a model larger than memory does not go through it."""
    path = tiny(tmp_path / "model.gguf", n_layers=8, hidden=256, ffn=1024)
    stage = opened(path, 0, 8)
    own = stage.native_context.warmable_bytes
    assert own > 64 * mmap.PAGESIZE
    before = resident(path)
    for _ in range(20):
        stage.native_context.warm(ALL, own)
    assert resident(path) - before < own // 8
    stage.run([(0, 0, 1)], np.array([5], np.int32), (0,), ())
    assert resident(path) > own // 2  # so that the figure means something


@pytest.mark.parametrize("size", ["64K", "1T"])
def test_a_pipeline_that_keeps_its_weights_warm(
    size: str, make_pipeline: Callable[..., StagePipeline], transport: Transport, tmp_path: Path
) -> None:
    model = parrot(tmp_path / "parrot.gguf", "warm and still right ", end="loop")
    options = ("--lanes", "2", "--busy-poll-ms", "50", "--warm-bytes", size)
    pipeline = make_pipeline(model.path, "0:2 2:4", *options).start_all()
    asker = Asker(transport, pipeline.endpoint)
    requests = [asker.ask((5, 6), max_tokens=60) for _ in range(3)]
    for request in requests:
        assert asker.answer(request).token_ids == recited(model, 60)


@pytest.mark.parametrize(
    ("busy_poll_ms", "layers", "said"), [(0, "0:2", "it does not busy-poll"), (50, "2:4", ""), (50, "0:2", "")]
)
def test_an_option_that_does_nothing_says_so(
    busy_poll_ms: int,
    layers: str,
    said: str,
    start_stage: Callable[..., StageProcess],
    socket_dir: Path,
    tmp_path: Path,
) -> None:
    path = tiny(tmp_path / "model.gguf")
    bind = ("--bind", f"ipc://{socket_dir}/stage")
    neighbour = ("--next" if layers.startswith("0") else "--first", f"ipc://{socket_dir}/other")
    polling = ("--busy-poll-ms", busy_poll_ms, "--warm-bytes", "64K")
    stage = start_stage("--model", path, "--layers", layers, *bind, *neighbour, *polling)
    stage.logged("listening on")
    assert stage.stop() == 0
    warned = [line for line in stage.stderr().splitlines() if "--warm-bytes does nothing" in line]
    assert len(warned) == bool(said)
    assert all(said in line for line in warned)


# ---- the share of a cache


def described(root: Path, core: int, *caches: tuple[str, str, str]) -> None:
    """A core as Linux describes it: level, size, cores that share it, of each cache."""
    for index, (level, size, shared) in enumerate(caches):
        directory = root / f"cpu{core}" / "cache" / f"index{index}"
        directory.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (directory / name).write_text(text + "\n")


def test_a_core_gets_its_share_of_the_last_level(tmp_path: Path) -> None:
    described(tmp_path, 0, ("1", "48K", "0"), ("2", "2048K", "0"), ("3", "32768K", "0-3,8-11"))
    described(tmp_path, 1, ("3", "32768K", "0-3,8-11"), ("2", "2048K", "1"))
    described(tmp_path, 2, ("2", "1024K", "2,3"))
    assert last_level_share([0], tmp_path) == 4 << 20
    assert last_level_share([0, 1], tmp_path) == 8 << 20
    assert last_level_share([2], tmp_path) == 512 << 10
    assert last_level_share([0, 2], tmp_path) == (4 << 20) + (512 << 10)
    assert last_level_share([], tmp_path) == 0


@pytest.mark.parametrize(
    "cache", [("3", "", "0-1"), ("3", "big", "0-1"), ("x", "1024K", "0"), ("3", "1024K", ""), ("3", "1024K", "0-x")]
)
def test_what_the_system_does_not_say_is_no_cache(cache: tuple[str, str, str], tmp_path: Path) -> None:
    described(tmp_path, 0, cache)
    assert last_level_share([0, 7], tmp_path) == 0
