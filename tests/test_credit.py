"""Credit: what is under way on the ring is bounded, in batches and in bytes, whatever a stage behind does not do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lane_helpers import Program, StageWatch, raw_client, recited, resident_kib
from last_stage import LONG_LINKS, SHORT_LINKS, Played
from model_files import Parrot, parrot
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_CONTEXT, _LANES, _CHUNK = 4096, 4, 64
_OPTIONS = ("--lanes", str(_LANES), "--ctx-size", str(_CONTEXT))
_IN_FLIGHT_MIB = 2
_MANY = 150  # requests
_TEXT = "steady as she goes, " * 50  # makes a wide model: a chunk of it is a quarter of a MiB
_CHUNK_BYTES = 256 << 10
# What a stage may grow by while it is asked for things that it cannot do: its queue of requests and its sockets'
# buffers: hundreds of short requests and a few batches. A batch per request would be many times as much.
_GROWTH_KIB = 16 << 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "wide.gguf", _TEXT, end="loop", context=_CONTEXT)


@pytest.mark.parametrize(
    ("mib", "times", "n_batches"),
    [(None, SHORT_LINKS, 2 * 2), (1, SHORT_LINKS, 3), (1, LONG_LINKS, 3)],
    ids=["batches", "bytes", "bytes on long links"],
)
def test_what_is_under_way_is_counted(
    mib: int | None,
    times: wire.BatchTimes,
    n_batches: int,
    make_pipeline: Callable[..., StagePipeline],
    transport: Transport,
    model: Parrot,
) -> None:
    options = (*_OPTIONS, "--drain-seconds", "0", *(() if mib is None else ("--in-flight-mib", str(mib))))
    played = Played(transport, make_pipeline(model.path, "0:2 2:4", *options))
    played.last.times = times
    for _ in range(_LANES):
        played.ask(2000, 1)
    chunk_bytes = _CHUNK * sum(spec.row_bytes for spec in played.last.facts.wanted)  # it wants all that there is
    assert mib is None or n_batches * chunk_bytes <= mib << 20 < (n_batches + 1) * chunk_bytes
    for _ in range(3):
        counters = played.settle()
        assert counters["now.batches_in_flight"] == len(played.last.held) == n_batches
        assert counters["now.bytes_in_flight"] == n_batches * chunk_bytes
        assert played.settle()["credit_waits"] > counters["credit_waits"] > 0  # it shows as long as it lasts
        played.last.answer()  # one back, one more
    assert played.stage_0.stop() == 0


def test_a_stopped_stage_uses_up_the_credit(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    pipeline = make_pipeline(model.path, "0:1 1:2 2:4", *_OPTIONS, "--in-flight-mib", "1").start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    assert len(asker.tokens((5,), max_tokens=2)) == 2
    watch.until_free()
    pipeline[2].send_signal(signal.SIGSTOP)
    requests = [asker.ask((5,) * 2000, max_tokens=20) for _ in range(_LANES)]
    counters = watch.until(lambda counters: counters["credit_waits"] > 0)
    assert counters["now.batches_in_flight"] == 4
    assert counters["now.bytes_in_flight"] == 4 * _CHUNK_BYTES == 1 << 20
    pipeline[2].send_signal(signal.SIGCONT)
    for request in requests:
        assert asker.answer(request).token_ids == recited(model, 20)
    watch.until_free()


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stopped_stage_does_not_fill_the_memory_of_others(
    victim: int, make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    options = (*_OPTIONS, "--in-flight-mib", str(_IN_FLIGHT_MIB))
    pipeline = make_pipeline(model.path, "0:1 1:2 2:4", *options).start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    for request in [asker.ask((5,) * 2000, max_tokens=20) for _ in range(2 * _LANES)]:  # all that it will ever need
        assert asker.answer(request).token_ids == recited(model, 20)
    watch.until_free()
    streams = [asker.ask((5, 6), max_tokens=1000) for _ in range(2)]
    for request in streams:
        asker.wait(request, lambda answer: bool(answer.token_ids))
    before = {index: resident_kib(pipeline[index].pid) for index in range(3)}
    pipeline[victim].send_signal(signal.SIGSTOP)
    prompts = [asker.ask((5,) * 2000, max_tokens=20) for _ in range(2)]
    impatient = [asker.ask((5,) * 30, max_tokens=20, timeout_ms=300) for _ in range(_MANY)]
    for request in impatient:
        assert asker.answer(request).code == "deadline"
    patient = [asker.ask((5,) * 30, max_tokens=20) for _ in range(_MANY)]
    counters = watch.until(lambda counters: counters["now.requests_queued"] == len(patient))
    assert counters["now.bytes_in_flight"] <= _IN_FLIGHT_MIB << 20
    for index in range(3):
        assert resident_kib(pipeline[index].pid) - before[index] < _GROWTH_KIB
    pipeline[victim].send_signal(signal.SIGCONT)
    for requests, n_tokens in ((streams, 1000), (prompts, 20), (patient, 20)):
        for request in requests:
            assert asker.answer(request).token_ids == recited(model, n_tokens)
    for index in range(3):
        assert resident_kib(pipeline[index].pid) - before[index] < _GROWTH_KIB
    watch.until_free()
    assert [pipeline[index].stop() for index in range(3)] == [0, 0, 0]


def test_a_stage_that_stops_again_and_again_is_only_slow(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    options = (*_OPTIONS, "--in-flight-mib", str(_IN_FLIGHT_MIB))
    pipeline = make_pipeline(model.path, "0:2 2:4", *options).start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    stream = asker.ask((5, 6), max_tokens=1000)
    prompts = [asker.ask((5,) * 2000, max_tokens=20) for _ in range(2 * _LANES)]
    for number in range(20):
        asker.wait(stream, lambda answer, n=number: len(answer.token_ids) > 40 * n)
        pipeline[1].send_signal(signal.SIGSTOP)
        for _ in range(10):
            counters = watch.counters()
            assert counters["now.bytes_in_flight"] <= _IN_FLIGHT_MIB << 20
            assert counters["now.lanes_busy"] <= _LANES
        pipeline[1].send_signal(signal.SIGCONT)
    assert asker.answer(stream).token_ids == recited(model, 1000)
    for request in prompts:
        assert asker.answer(request).token_ids == recited(model, 20)
    watch.until_free()


def test_a_client_that_stops_reading_holds_up_nobody_and_fills_no_memory(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot, tmp_path: Path
) -> None:
    narrow = parrot(tmp_path / "narrow.gguf", "read me ", end="loop", context=65536)
    pipeline = make_pipeline(narrow.path, "0:2 2:4", "--lanes", "2", "--ctx-size", "65536").start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    endpoints = [pipeline.endpoint_of(index) for index in (0, 1)]
    with raw_client("deaf", endpoints, n_prompt=3, max_tokens=60_000) as program:
        watch.until(lambda counters: counters["now.kv_cells"] > 8)
        before = [resident_kib(pipeline[index].pid) for index in (0, 1)]
        program.process.send_signal(signal.SIGSTOP)
        while watch.counters()["now.lanes_busy"]:  # until the last stage finds that nothing is taken any more
            assert asker.tokens((5,), max_tokens=100) == recited(narrow, 100)
        assert watch.counters(1)["undelivered"] == 1
        assert [code for code in watch.counters() if code.startswith("errors.")] == ["errors.stage_lost"]
        for index in (0, 1):
            assert resident_kib(pipeline[index].pid) - before[index] < _GROWTH_KIB
        assert program.running
    assert asker.tokens((5,), max_tokens=100) == recited(narrow, 100)
    watch.until_free()


# Asks as fast as it can: always so many questions open that the stage never finds its socket empty.
_FLOOD = """
import sys, zmq
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
identity, endpoint = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, identity.encode())
socket.connect(endpoint)
socket.send_multipart(encode(wire.Hello("client", identity)))
decode(socket.recv_multipart())
question = encode(wire.Ping(1))
for _ in range(50):
    socket.send_multipart(question)
print("begun", flush=True)
while True:
    socket.recv_multipart()
    socket.send_multipart(question)
"""


def test_peers_that_never_stop_asking_hold_up_nobody(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    pipeline = make_pipeline(model.path, "0:2 2:4", *_OPTIONS).start_all()
    asker = Asker(transport, pipeline.endpoint)
    with contextlib.ExitStack() as stack:
        floods = [
            stack.enter_context(Program("-c", _FLOOD, f"flood-{index}-{number}", pipeline.endpoint_of(index)))
            for index in (0, 1)
            for number in range(3)
        ]
        assert [flood.read(6) for flood in floods] == [b"begun\n"] * len(floods)
        for _ in range(3):
            assert asker.tokens((5,) * 200, max_tokens=100) == recited(model, 100)
        assert all(flood.running for flood in floods)
