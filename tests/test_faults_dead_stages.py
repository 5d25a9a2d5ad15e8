"""R04: the middle one of three stages dies, is slow, or stays away. Nobody waits for ever, and health tells the truth.

Rounds of random deaths under many streams are in test_recovery_rounds, restarts by the launcher in test_local_restart.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from lane_helpers import StageWatch, cpu_seconds, recited
from model_files import Parrot, parrot
from stage_peers import Asker, Peer
from stage_processes import PATIENCE, StagePipeline
from transport_helpers import Transport

from skippy_zmq import Client
from skippy_zmq.errors import DeadlineError, RetryableError, StageLostError
from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_CONTEXT = 8192
_LONG = (5, 6, 7, 8) * 500
_OPTIONS = ("--lanes", "2", "--ctx-size", str(_CONTEXT), "--recover-seconds", "60")
_MIDDLE = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    path = tmp_path_factory.mktemp("model") / "parrot.gguf"
    return parrot(path, "still here ", end="loop", context=_CONTEXT)


@pytest.fixture
def start(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> Callable[..., StagePipeline]:
    """Starts three stages with these options more."""
    return lambda *options: make_pipeline(model.path, "0:1 1:3 3:4", *_OPTIONS, *options).start_all()


@pytest.fixture
def ask(leak_check: None) -> Iterator[Callable[[StagePipeline], Client]]:
    """Makes clients that are connected."""
    made: list[Client] = []

    def connect(pipeline: StagePipeline) -> Client:
        made.append(Client(pipeline.endpoint, timeout=PATIENCE))
        assert len(made[-1].stages) == 3
        return made[-1]

    yield connect
    for client in made:
        client.close()


def _until_not_ready(health: Peer) -> None:
    deadline = time.monotonic() + PATIENCE
    while health.ready():
        assert time.monotonic() < deadline


def _comes_back(pipeline: StagePipeline, index: int, health: Peer) -> None:
    """Start a stage again; those in front of it notice by themselves, and no other one is a new process."""
    pids = [pipeline[i].pid for i in range(3)]
    assert pipeline[0].silent
    assert not health.ready()
    pipeline.start(index)
    for stage in range(index, -1, -1):
        pipeline[stage].ready()
    assert health.ready()
    for stage in range(3):
        assert (pipeline[stage].pid == pids[stage]) == (stage != index)
        assert pipeline[stage].process.poll() is None


def test_idle(start: Callable[..., StagePipeline], transport: Transport, model: Parrot) -> None:
    pipeline = start()
    asker = Asker(transport, pipeline.endpoint)
    assert asker.first.ready()
    pipeline[_MIDDLE].kill()
    _until_not_ready(asker.first)
    refused = asker.run((5,))
    assert refused.code == "not_ready"
    assert refused.error is not None
    assert refused.error.retry
    _comes_back(pipeline, _MIDDLE, asker.first)
    assert asker.tokens((5,), max_tokens=20) == recited(model, 20)


def test_mid_prefill(
    start: Callable[..., StagePipeline], transport: Transport, model: Parrot, ask: Callable[..., Client]
) -> None:
    pipeline = start("--chunk-sizes", "64")
    watch = StageWatch(transport, pipeline)
    client = ask(pipeline)
    pipeline[2].send_signal(signal.SIGSTOP)  # what follows stays on its way
    stream = client.stream(token_ids=_LONG, max_tokens=20)
    watch.until(lambda counters: counters["now.kv_cells"] > 0, index=_MIDDLE)
    pipeline[_MIDDLE].kill()
    pipeline[2].send_signal(signal.SIGCONT)
    _until_not_ready(watch.peers[0])
    assert watch.counters(2)["tokens"] == 0
    _comes_back(pipeline, _MIDDLE, watch.peers[0])
    assert [token for chunk in stream for token in chunk.token_ids] == recited(model, 20)
    watch.meet_again(_MIDDLE)
    watch.until_free()


@pytest.mark.parametrize("victim", [1, 2])
def test_mid_stream(
    victim: int, start: Callable[..., StagePipeline], transport: Transport, model: Parrot, ask: Callable[..., Client]
) -> None:
    """With one more request than lanes: what waits goes on waiting."""
    pipeline = start()
    watch = StageWatch(transport, pipeline)
    client = ask(pipeline)
    streams = [client.stream(token_ids=(5, 6), max_tokens=400) for _ in range(3)]
    tokens = [list(next(stream).token_ids) for stream in streams[:2]]
    pipeline[victim].kill()
    _until_not_ready(watch.peers[0])
    _comes_back(pipeline, victim, watch.peers[0])
    for stream, before in zip(streams, [*tokens, []], strict=True):
        assert before + [token for chunk in stream for token in chunk.token_ids] == recited(model, 400)
        assert stream.result.finish_reason == "length"
    watch.meet_again(victim)
    watch.until_free()


@pytest.mark.parametrize(("seconds", "victim"), [("0", 1), ("1", 1), ("1", 2)])
def test_a_stage_that_stays_away(
    seconds: str,
    victim: int,
    start: Callable[..., StagePipeline],
    transport: Transport,
    model: Parrot,
    ask: Callable[..., Client],
) -> None:
    pipeline = start("--recover-seconds", seconds)
    watch = StageWatch(transport, pipeline)
    client = ask(pipeline)
    stream = client.stream(token_ids=(5, 6), max_tokens=_CONTEXT - 10)
    got = list(next(stream).token_ids)
    pipeline[victim].kill()
    with pytest.raises(StageLostError) as caught:
        got.extend(token for chunk in stream for token in chunk.token_ids)
    assert caught.value.code == "stage_lost"
    if seconds != "0":
        assert f"a stage was lost, and the request could not go on within {seconds} s" in str(caught.value)
    assert got == recited(model, len(got))
    _until_not_ready(watch.peers[0])
    # What is left of the pipeline holds nothing for it, though nobody tells those behind the gap.
    for index in {0, 1, 2} - {victim}:
        names = ("now.sessions", "now.kv_cells", *(("now.lanes_busy", "now.requests_running") if index == 0 else ()))
        watch.until(lambda counters, names=names: not any(counters[name] for name in names), index=index)
    _comes_back(pipeline, victim, watch.peers[0])
    assert list(client.generate(token_ids=(5,), max_tokens=20).token_ids) == recited(model, 20)


def test_a_request_that_cannot_wait_so_long(
    start: Callable[..., StagePipeline], transport: Transport, model: Parrot, ask: Callable[..., Client]
) -> None:
    pipeline = start()
    watch = StageWatch(transport, pipeline)
    client = ask(pipeline)
    stream = client.stream(token_ids=(5, 6), max_tokens=_CONTEXT - 10, timeout=2.0)
    next(stream)
    pipeline[_MIDDLE].kill()
    with pytest.raises(DeadlineError):
        for _ in stream:
            pass
    watch.until(lambda counters: not counters["now.requests_running"] + counters["now.requests_queued"])
    _comes_back(pipeline, _MIDDLE, watch.peers[0])
    assert list(client.generate(token_ids=(5,), max_tokens=20).token_ids) == recited(model, 20)


def test_a_request_that_is_cancelled_meanwhile(
    start: Callable[..., StagePipeline], transport: Transport, model: Parrot, ask: Callable[..., Client]
) -> None:
    pipeline = start()
    watch = StageWatch(transport, pipeline)
    client = ask(pipeline)
    stream = client.stream(token_ids=(5, 6), max_tokens=_CONTEXT - 10)
    got = list(next(stream).token_ids)
    pipeline[_MIDDLE].kill()
    _until_not_ready(watch.peers[0])
    stream.cancel()
    got += [token for chunk in stream for token in chunk.token_ids]
    assert stream.result.finish_reason == "cancelled"
    assert got == recited(model, len(got))
    watch.until(lambda counters: not counters["now.requests_running"] + counters["now.requests_queued"])
    _comes_back(pipeline, _MIDDLE, watch.peers[0])
    watch.meet_again(_MIDDLE)
    watch.until_free()


def test_somebody_who_comes_meanwhile(start: Callable[..., StagePipeline], transport: Transport, model: Parrot) -> None:
    pipeline = start()
    health = Peer(transport, pipeline.endpoint)
    assert health.greet().ready
    pipeline[_MIDDLE].kill()
    _until_not_ready(health)
    with Client(pipeline.endpoint, timeout=1.0) as client, pytest.raises(RetryableError, match="ready"):
        client.generate(token_ids=(5,), max_tokens=20)
    with Client(pipeline.endpoint, timeout=PATIENCE) as client:
        stream = client.stream(token_ids=(5,), max_tokens=20)  # waits for the pipeline
        _comes_back(pipeline, _MIDDLE, health)
        assert [token for chunk in stream for token in chunk.token_ids] == recited(model, 20)


def _busy_share(pipeline: StagePipeline, seconds: float, indices: tuple[int, ...]) -> float:
    """The largest part of a core that any of the stages uses."""
    before = [cpu_seconds(pipeline[index].pid) for index in indices]
    select.select([], [], [], seconds)
    return max(cpu_seconds(pipeline[i].pid) - then for i, then in zip(indices, before, strict=True)) / seconds


def test_nobody_spins(
    start: Callable[..., StagePipeline], transport: Transport, model: Parrot, ask: Callable[..., Client]
) -> None:
    pipeline = start()
    client = ask(pipeline)
    assert list(client.generate(token_ids=(5,), max_tokens=20).token_ids) == recited(model, 20)
    assert _busy_share(pipeline, 1.5, (0, 1, 2)) < 0.2
    stream = client.stream(token_ids=(5, 6), max_tokens=400)
    next(stream)
    health = Peer(transport, pipeline.endpoint)
    health.greet()
    pipeline[_MIDDLE].kill()
    _until_not_ready(health)
    # Nor while neighbours and a request wait for the stage.
    assert _busy_share(pipeline, 1.5, (0, 2)) < 0.2
    stream.close()


@pytest.mark.parametrize("stopped", [1, 2])
def test_a_slow_stage_is_not_dead(
    stopped: int, start: Callable[..., StagePipeline], transport: Transport, model: Parrot, ask: Callable[..., Client]
) -> None:
    """It says nothing for longer than stages ask after one another, but for less than connections last."""
    pipeline = start()
    watch = StageWatch(transport, pipeline)
    client = ask(pipeline)
    stream = client.stream(token_ids=(5, 6), max_tokens=400)
    got = list(next(stream).token_ids)
    pipeline[stopped].send_signal(signal.SIGSTOP)
    select.select([], [], [], 6.0)
    assert watch.peers[0].ready()
    pipeline[stopped].send_signal(signal.SIGCONT)
    assert got + [token for chunk in stream for token in chunk.token_ids] == recited(model, 400)
    for index in range(3):
        assert pipeline[index].silent
        assert "lost" not in pipeline[index].stderr()
    watch.until_free()


def test_a_client_of_a_dead_stage_0(
    start: Callable[..., StagePipeline], model: Parrot, ask: Callable[..., Client]
) -> None:
    """It alone knows the requests: they fail at once, and the next one is answered when it is there again."""
    pipeline = start()
    client = ask(pipeline)
    stream = client.stream(token_ids=(5, 6), max_tokens=_CONTEXT - 10)
    next(stream)
    pipeline[0].kill()
    with pytest.raises(StageLostError):
        for _ in stream:
            pass
    pipeline.start(0).ready()
    assert list(client.generate(token_ids=(5,), max_tokens=20).token_ids) == recited(model, 20)


def test_a_client_that_is_late_to_go_on(
    start: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    """It speaks of the last stage that it was connected to; by now that one is lost as well."""
    pipeline = start()
    asker = Asker(transport, pipeline.endpoint)
    request = asker.ask((5, 6), max_tokens=400)
    asker.wait(request, lambda answer: bool(answer.token_ids))
    pipeline[2].kill()
    _until_not_ready(asker.first)
    _comes_back(pipeline, 2, asker.first)
    received = len(asker.answers[request].token_ids)
    pipeline[2].kill()
    _until_not_ready(asker.first)
    asker.first.send(wire.Resume(request, received))
    _comes_back(pipeline, 2, asker.first)
    asker.meet_last_again()
    asker.first.send(wire.Resume(request, received))
    assert asker.answer(request).token_ids == recited(model, 400)
