"""Requests that wait for a lane: in order of arrival, as many as --queue says, as long as --queue-seconds says.

Killed clients are in test_faults_vanished_clients, the default limit in test_stage_lanes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lane_helpers import StageWatch, recited
from last_stage import Played
from model_files import Parrot, parrot
from stage_peers import Answer, Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_CONTEXT, _N_GOOD = 65536, 40
_ENDLESS = _CONTEXT - 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "wait a bit ", end="loop", context=_CONTEXT)


@pytest.fixture
def make(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> Callable[..., StagePipeline]:
    """A pipeline with one lane, unless the options say otherwise; not started."""
    return lambda *options: make_pipeline(model.path, "0:2 2:4", "--lanes", "1", "--ctx-size", str(_CONTEXT), *options)


def _holding(asker: Asker) -> str:
    """A request that keeps its lane until it is cancelled."""
    request = asker.ask((5, 6), max_tokens=_ENDLESS)
    asker.wait(request, lambda answer: bool(answer.token_ids))
    return request


def _busy(answer: Answer) -> str:
    """The words of a refusal that says to try again."""
    assert (answer.code, answer.accepted, answer.token_ids) == ("busy", False, [])
    assert answer.error is not None
    assert answer.error.retry
    return answer.error.message


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_full_queue_says_its_limit_and_what_to_do(
    limit: int, make: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    pipeline = make("--queue", str(limit)).start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    held = _holding(asker)
    waiting = [asker.ask((5,), max_tokens=_N_GOOD) for _ in range(limit)]
    for number in range(2):
        words = _busy(asker.run((5,)))
        assert words == f"all 1 lanes are taken and {limit} requests wait already (limit {limit}): try again"
        assert watch.counters()["errors.busy"] == number + 1
    assert watch.counters()["now.requests_queued"] == limit
    if waiting:  # one that leaves makes room for one
        asker.cancel(waiting[0])
        assert asker.answer(waiting.pop(0)).code == "cancelled"
        waiting.append(asker.ask((5,), max_tokens=_N_GOOD))
        _busy(asker.run((5,)))
    asker.cancel(held)
    assert asker.answer(held).finish_reason == "cancelled"
    for request in waiting:
        assert asker.answer(request).token_ids == recited(model, _N_GOOD)
    watch.until_free()
    # A lane is free: even where nobody may wait, a request gets it.
    assert asker.tokens((5,), max_tokens=_N_GOOD) == recited(model, _N_GOOD)
    assert watch.until_free()[0]["errors.busy"] == 2 + bool(limit)


def test_a_refused_client_loses_nothing_that_it_has(
    make: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    pipeline = make("--queue", "1").start_all()
    asker, other = Asker(transport, pipeline.endpoint), Asker(transport, pipeline.endpoint)
    held = _holding(asker)
    waiting = other.ask((5,), max_tokens=_N_GOOD)
    # Of two connections either may be read first: the place is taken before anybody else asks for it.
    StageWatch(transport, pipeline).until(lambda counters: counters["now.requests_queued"] == 1)
    for who in (asker, other, asker):
        _busy(who.run((5,)))
    asker.cancel(held)
    answer = asker.answer(held)
    assert (answer.finish_reason, answer.token_ids) == ("cancelled", recited(model, len(answer.token_ids)))
    assert other.answer(waiting).token_ids == recited(model, _N_GOOD)
    assert [who.code for who in asker.answers.values()] == ["", "busy", "busy"]


def test_who_waits_too_long_is_told_so(make: Callable[..., StagePipeline], transport: Transport, model: Parrot) -> None:
    pipeline = make("--queue-seconds", "1").start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    held = _holding(asker)
    waiting = [asker.ask((5,)) for _ in range(3)]
    for request in waiting:
        assert _busy(asker.answer(request)) == "no lane became free within 1 s: try again"
    assert not asker.answers[held].over  # what runs is not what waits
    assert watch.counters()["now.requests_queued"] == 0
    asker.cancel(held)
    assert asker.answer(held).finish_reason == "cancelled"
    assert asker.tokens((5,), max_tokens=_N_GOOD) == recited(model, _N_GOOD)
    sessions = [counters["sessions"] for counters in watch.until_free()]
    assert sessions == [2, 2]  # nobody who was refused ever began


def test_the_timeout_of_a_request_counts_while_it_waits(
    make: Callable[..., StagePipeline], transport: Transport
) -> None:
    pipeline = make().start_all()
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    held = _holding(asker)
    answer = asker.run((5,), timeout_ms=50)
    assert (answer.code, answer.accepted) == ("deadline", False)
    asker.cancel(held)
    asker.answer(held)
    assert [counters["sessions"] for counters in watch.until_free()] == [1, 1]


def test_lanes_go_out_in_order_of_arrival(make: Callable[..., StagePipeline], transport: Transport) -> None:
    played = Played(transport, make(), n_clients=3)
    requests = [played.ask(1 + number % 3, 2, client=number % 3) for number in range(9)]
    assert played.settle()["now.requests_queued"] == 8
    # Some of those who wait leave; the others keep their places.
    for number in (3, 4):
        played.clients[number % 3].send(wire.Cancel(requests[number]))
        assert played.clients[number % 3].until(wire.Error).code == "cancelled"
    staying = [request for number, request in enumerate(requests) if number not in (3, 4)]
    for request in staying:
        played.last.run_until(request, 2)
    assert played.last.order == staying
    assert played.stage_0.stop() == 0


def test_a_client_that_leaves_takes_what_it_has_waiting_along(
    make: Callable[..., StagePipeline], transport: Transport
) -> None:
    played = Played(transport, make(), n_clients=2)
    first = played.ask(1, 3)
    mine = [played.ask(1, 2, client=0) for _ in range(3)]
    yours = [played.ask(1, 2, client=1) for _ in range(3)]
    played.clients[1].close()
    while (counters := played.counters())["now.requests_queued"] > 3:
        pass
    assert (counters["now.requests_queued"], counters["now.requests_running"]) == (3, 1)
    played.last.run_until(mine[-1], 2)
    assert played.last.order == [first, *mine]
    assert not set(yours) & set(played.last.order)
    assert played.settle()["now.lanes_busy"] == 0
    assert played.stage_0.stop() == 0


def test_a_prompt_that_cannot_run_takes_no_place(make: Callable[..., StagePipeline], transport: Transport) -> None:
    pipeline = make("--queue", "1").start_all()
    asker = Asker(transport, pipeline.endpoint)
    held = _holding(asker)
    for _ in range(3):
        assert asker.run((5,) * (_CONTEXT + 1)).code == "context_length_exceeded"
        assert asker.run((1 << 20,)).code == "invalid_token"
    waiting = asker.ask((5,), max_tokens=1)
    _busy(asker.run((5,)))
    asker.cancel(held)
    assert asker.answer(waiting).finish_reason == "length"
