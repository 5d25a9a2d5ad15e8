"""R02: clients that are killed while they stream, wait for a whole answer, have a long prompt, or are queued.

Clients that leave in order, or come back under a known id, are in test_stage_abuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lane_helpers import Counters, Program, StageWatch, client_program, cpu_seconds, raw_client, recited
from model_files import Parrot, parrot
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_ROUNDS = 10
_CONTEXT, _LANES, _CHUNK, _N_GOOD = 16384, 2, 16, 100
_LONG = _CONTEXT - 384  # tokens of an answer, or of a prompt, that would take many seconds
_WITHIN_SECONDS = 2.0  # of the client's end, a lane has to be free on every stage
_WATCH_SECONDS, _IDLE_SHARE = 0.5, 0.3  # of that time, at most, an idle stage may compute


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "over and out ", end="loop", context=_CONTEXT)


@pytest.fixture(scope="module")
def pipeline(module_dir: Path, model: Parrot) -> Iterator[StagePipeline]:
    options = ("--lanes", str(_LANES), "--ctx-size", str(_CONTEXT), "--chunk-policy", "fixed")
    with StagePipeline(module_dir, model.path, "0:2 2:4", *options, "--chunk-sizes", str(_CHUNK)) as pipeline:
        yield pipeline.start_all()
        for index in (0, 1):
            assert pipeline[index].process.poll() is None
            assert pipeline[index].stop() == 0
            assert "Traceback" not in pipeline[index].stderr()


@pytest.fixture
def asker(pipeline: StagePipeline, transport: Transport) -> Asker:
    return Asker(transport, pipeline.endpoint)


@pytest.fixture
def watch(pipeline: StagePipeline, transport: Transport) -> Iterator[StageWatch]:
    watch = StageWatch(transport, pipeline)
    watch.until_free()
    yield watch
    before = watch.until_free()
    used = [cpu_seconds(pipeline[index].pid) for index in (0, 1)]
    transport.loop.wait(_WATCH_SECONDS)
    for index in (0, 1):
        assert cpu_seconds(pipeline[index].pid) - used[index] < _IDLE_SHARE * _WATCH_SECONDS
        assert watch.counters(index)["batches"] == before[index]["batches"]


def _stream(pipeline: StagePipeline, *, wait: bool = True) -> Program:
    program = client_program(pipeline.endpoint, "--prompt", "x", "--max-tokens", _LONG)
    if wait:
        assert program.read(13) == b"over and out "
    return program


def _whole_answer(pipeline: StagePipeline, *, wait: bool = True) -> Program:
    return client_program(pipeline.endpoint, "--prompt", "x", "--max-tokens", _LONG, "--json")


def _long_prompt(pipeline: StagePipeline) -> Program:
    return client_program(pipeline.endpoint, "--prompt", "x" * _LONG, "--max-tokens", "1")


def _raw(pipeline: StagePipeline, *, wait: bool = True) -> Program:
    return raw_client("raw", [pipeline.endpoint_of(0), pipeline.endpoint_of(1)], n_prompt=3, max_tokens=_LONG)


def _raw_with_a_long_prompt(pipeline: StagePipeline, *, wait: bool = True) -> Program:
    return raw_client("raw", [pipeline.endpoint_of(0), pipeline.endpoint_of(1)], n_prompt=_LONG, max_tokens=1)


def _raw_at_stage_0_alone(pipeline: StagePipeline) -> Program:
    return raw_client("raw", [pipeline.endpoint], n_prompt=_LONG, max_tokens=1)


def _decodes(counters: Counters) -> bool:
    return counters["now.requests_running"] == 1 and counters["now.kv_cells"] > 8


def _prefills(counters: Counters) -> bool:
    return counters["now.requests_running"] == 1 and counters["now.kv_cells"] > 2 * _CHUNK


_VARIANTS: dict[str, tuple[Callable[[StagePipeline], Program], Callable[[Counters], bool]]] = {
    "stream": (_stream, _decodes),
    "whole answer": (_whole_answer, _decodes),
    "long prompt": (_long_prompt, _prefills),
    "raw": (_raw, _decodes),
    "raw, long prompt": (_raw_with_a_long_prompt, _prefills),
    "raw, long prompt, not connected to the last stage": (_raw_at_stage_0_alone, _prefills),
}


@pytest.mark.parametrize("variant", _VARIANTS)
def test_a_killed_client_gives_its_lane_back(
    variant: str, pipeline: StagePipeline, asker: Asker, watch: StageWatch, model: Parrot
) -> None:
    start, at_work = _VARIANTS[variant]
    wanted = recited(model, _N_GOOD)
    for _ in range(_ROUNDS):
        before = [counters.get("rows", 0) for counters in watch.until_free()]
        with start(pipeline) as program:
            watch.until(at_work)
            good = asker.ask((7, 8), max_tokens=_N_GOOD)
            assert program.running
            program.kill()
            for index, gauge in enumerate(("now.lanes_busy", "now.sessions")):
                watch.until(lambda counters, gauge=gauge: counters[gauge] <= 1, index=index, seconds=_WITHIN_SECONDS)
        assert asker.answer(good).token_ids == wanted
        for index, counters in enumerate(watch.until_free()):
            assert counters["rows"] - before[index] < _LONG  # it was ended, and has not come to its end


@pytest.mark.parametrize("start", [_stream, _whole_answer, _raw, _raw_with_a_long_prompt])
def test_a_killed_client_in_the_queue_never_starts(
    start: Callable[..., Program], pipeline: StagePipeline, asker: Asker, watch: StageWatch, model: Parrot
) -> None:
    before = [counters.get("sessions", 0) for counters in watch.until_free()]
    for _ in range(_ROUNDS):
        held = [asker.ask((5, 6), max_tokens=_LONG) for _ in range(_LANES)]
        for request in held:
            asker.wait(request, lambda answer: bool(answer.token_ids))
        with start(pipeline, wait=False) as program:
            _until(asker, held[0], lambda: watch.counters()["now.requests_queued"] == 1)
            assert program.running
            program.kill()
            killed_at = time.monotonic()
            _until(asker, held[0], lambda: watch.counters()["now.requests_queued"] == 0)
            assert time.monotonic() < killed_at + _WITHIN_SECONDS
        for request in held:
            asker.cancel(request)
            answer = asker.answer(request)
            assert (answer.finish_reason, answer.token_ids) == ("cancelled", recited(model, len(answer.token_ids)))
    started = [counters["sessions"] for counters in watch.until_free()]
    assert started == [sessions + _ROUNDS * _LANES for sessions in before]
    assert asker.tokens((5,), max_tokens=_N_GOOD) == recited(model, _N_GOOD)


def _until(asker: Asker, request: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition and read meanwhile: a client that does not would be taken for one that is gone."""
    asker.wait(request, lambda _answer: condition())
