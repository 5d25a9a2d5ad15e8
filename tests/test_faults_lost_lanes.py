"""R01: a stage hangs while lanes are in use, or the one in front of it dies; no lane is lost on any stage.

Hangs of a single request, and of a stage 0 that dies with one, are in test_stage_neighbours as well.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lane_helpers import StageWatch, recited
from model_files import Parrot, parrot
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_CONTEXT, _LANES, _N_GOOD = 16384, 2, 100
_OPTIONS = ("--lanes", str(_LANES), "--ctx-size", str(_CONTEXT))
_ENDLESS = _CONTEXT - 16  # tokens; not one of the requests below gets to its end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "three, two, one ", end="loop", context=_CONTEXT)


@pytest.fixture
def pipeline(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> Iterator[StagePipeline]:
    pipeline = make_pipeline(model.path, "0:2 2:4", *_OPTIONS).start_all()
    yield pipeline
    for index in (0, 1):
        assert pipeline[index].stop() == 0
        assert "Traceback" not in pipeline[index].stderr()


def _all_is_well(asker: Asker, watch: StageWatch, model: Parrot) -> None:
    """One request more than there are lanes, each with the reference tokens; then every lane is free everywhere."""
    wanted = recited(model, _N_GOOD)
    for request in [asker.ask((5, 6), max_tokens=_N_GOOD) for _ in range(_LANES + 1)]:
        assert asker.answer(request).token_ids == wanted
    watch.until_free()


def test_ten_hangs_of_the_last_stage_with_every_lane_in_use(
    pipeline: StagePipeline, transport: Transport, model: Parrot
) -> None:
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    for _ in range(10):
        requests = [asker.ask((5, 6), max_tokens=_ENDLESS, timeout_ms=500) for _ in range(_LANES)]
        for request in requests:
            asker.wait(request, lambda answer: bool(answer.token_ids))
        pipeline[1].send_signal(signal.SIGSTOP)
        assert [asker.answer(request).code for request in requests] == ["deadline"] * _LANES
        assert watch.counters()["now.lanes_busy"] == 0  # stage 0 waits for nobody
        pipeline[1].send_signal(signal.SIGCONT)
    _all_is_well(asker, watch, model)


def test_a_request_that_comes_while_the_last_stage_hangs(
    pipeline: StagePipeline, transport: Transport, model: Parrot
) -> None:
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    pipeline[1].send_signal(signal.SIGSTOP)
    for _ in range(3):  # their rows are on their way, then their ends are
        assert asker.run((5,) * 500, max_tokens=_ENDLESS, timeout_ms=200).code == "deadline"
    waiting = asker.ask((5, 6), max_tokens=_N_GOOD)
    pipeline[1].send_signal(signal.SIGCONT)
    assert asker.answer(waiting).token_ids == recited(model, _N_GOOD)
    _all_is_well(asker, watch, model)


def test_a_hang_so_long_that_the_connection_is_given_up(
    pipeline: StagePipeline, transport: Transport, model: Parrot
) -> None:
    asker = Asker(transport, pipeline.endpoint)
    requests = [asker.ask((5, 6), max_tokens=_ENDLESS) for _ in range(_LANES)]
    for request in requests:
        asker.wait(request, lambda answer: bool(answer.token_ids))
    pipeline[1].send_signal(signal.SIGSTOP)
    assert [asker.answer(request).code for request in requests] == ["stage_lost"] * _LANES
    pipeline[1].send_signal(signal.SIGCONT)
    pipeline[0].ready()  # again, by itself
    asker.close()
    _all_is_well(Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline), model)


@pytest.mark.parametrize("ranges", ["0:2 2:4", "0:1 1:2 2:4"])
def test_lanes_of_a_stage_0_that_died_are_reclaimed(
    ranges: str,
    make_pipeline: Callable[..., StagePipeline],
    transport: Transport,
    model: Parrot,
    tmp_path: Path,
) -> None:
    pipeline = make_pipeline(model.path, ranges, *_OPTIONS).start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    requests = [asker.ask((5, 6), max_tokens=_ENDLESS) for _ in range(_LANES)]
    for request in requests:
        asker.wait(request, lambda answer: bool(answer.token_ids))
    pipeline[0].kill()
    behind = range(1, len(pipeline.ranges))
    for index in behind:  # nobody greets them, nobody asks: they find out
        watch.until(lambda counters: not counters["now.sessions"] and not counters["now.kv_cells"], index=index)
    pipeline.start(0).ready()
    asker.close()
    watch.close()
    _all_is_well(Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline), model)
    for index in behind:
        assert pipeline[index].stop() == 0


def test_a_hang_of_stage_0_so_long_that_the_connection_is_given_up(
    pipeline: StagePipeline, transport: Transport, model: Parrot
) -> None:
    """It may well be at work, but the last stage can tell it nothing any more, and frees its lanes."""
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    requests = [asker.ask((5, 6), max_tokens=_ENDLESS) for _ in range(_LANES)]
    for request in requests:
        asker.wait(request, lambda answer: bool(answer.token_ids))
    pipeline[0].send_signal(signal.SIGSTOP)
    pipeline[1].logged("connection lost")  # the ring's
    watch.until(lambda counters: not counters["now.sessions"] and not counters["now.kv_cells"], index=1)
    pipeline[0].send_signal(signal.SIGCONT)
    asker.close()  # its connection may have been given up as well
    watch.close()
    _all_is_well(Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline), model)
