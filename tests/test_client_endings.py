"""How requests end that do not end well, in the client's half of the protocol: cancelled, late, lost, refused."""

from __future__ import annotations

import dataclasses

import pytest
from conversation_driver import ASK, CONTACT, END, FIRST, LAST, MIDDLE, STAGES, ZERO, Driver

from skippy_zmq.client.conversation import CANCEL_SECONDS
from skippy_zmq.client.outcomes import Connect, Finished
from skippy_zmq.client.results import Chunk
from skippy_zmq.errors import (
    DeadlineError,
    EndpointError,
    ProtocolError,
    SkippyError,
    StageLostError,
)
from skippy_zmq.wire.messages import (
    Accepted,
    Cancel,
    Error,
    Hello,
    Ready,
    Stats,
    Tokens,
    Welcome,
)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_lost_stage_0_fails_what_was_sent_and_keeps_what_waits(driver: Driver) -> None:
    driver.asked().conversation.disconnected(FIRST, f"{FIRST}: connection lost")
    assert isinstance(driver.failure(), StageLostError)
    driver.conversation.submit("r2", dataclasses.replace(ASK, request="r2"), 2.0)
    assert driver.actions() == []
    driver.conversation.connected(FIRST)
    driver.hear(FIRST, Welcome(STAGES, ready=True), now=3.0)
    assert [message.kind.name for _, message in driver.actions()] == ["HELLO", "GENERATE"]  # type: ignore[misc]


def test_a_pipeline_that_comes_back_must_be_ready_anew(driver: Driver) -> None:
    conversation = driver.asked().conversation
    conversation.disconnected(FIRST, f"{FIRST}: connection lost")
    assert isinstance(driver.failure(), StageLostError)
    conversation.submit("r1", ASK, 2.0)
    conversation.connected(FIRST)
    driver.hear(FIRST, Welcome((ZERO,), ready=False))
    assert driver.actions() == [(FIRST, Hello("client", "client-1"))]
    driver.hear(FIRST, Ready(STAGES))
    assert driver.actions() == [(FIRST, ASK)]


def test_what_cannot_be_sent_fails_at_once(driver: Driver) -> None:
    driver.asked().conversation.unsendable("r1", SkippyError("the queue is full"))
    assert "the queue is full" in str(driver.failure())


def test_nothing_there_is_said_with_the_address_and_the_reason(driver: Driver) -> None:
    conversation = driver.conversation
    conversation.submit("r1", ASK, 10.0)
    assert conversation.next_deadline == 10.0 + CONTACT
    conversation.expire(10.0 + CONTACT - 0.1)
    assert driver.events() == []
    conversation.handshake_failed(FIRST, f"{FIRST}: the peer refused our key")
    conversation.expire(10.0 + CONTACT)
    error = driver.failure()
    assert isinstance(error, EndpointError)
    assert str(error) == f"cannot reach {FIRST}: nothing answered within 30 s (the peer refused our key)"
    assert conversation.next_deadline is None


def test_a_shorter_timeout_also_holds_for_the_contact(driver: Driver) -> None:
    driver.conversation.submit("r1", ASK, 0.0, timeout=2.0)
    driver.conversation.expire(2.0)
    assert "within 2 s" in str(driver.failure())


def test_a_silent_peer_and_an_unready_pipeline_are_told_apart(driver: Driver) -> None:
    conversation = driver.conversation
    conversation.connected(FIRST)
    conversation.submit("r1", ASK, 0.0)
    conversation.expire(CONTACT)
    assert "no stage answered" in str(driver.failure())
    driver.hear(FIRST, Welcome((ZERO,), ready=False))
    conversation.submit("r1", ASK, 0.0)
    conversation.expire(CONTACT)
    error = driver.failure()
    assert error.code == "not_ready"
    assert "has layers 0:10 of 30" in str(error)
    driver.hear(FIRST, Ready(STAGES))
    conversation.submit("r1", ASK, 0.0)
    conversation.expire(CONTACT)
    assert f"cannot reach {LAST}" in str(driver.failure())


def test_an_answer_in_time_has_all_the_time_left(driver: Driver) -> None:
    driver.asked()
    driver.conversation.expire(1e9)
    assert driver.events() == []


def test_an_answer_that_takes_too_long_is_cancelled_and_reported(driver: Driver) -> None:
    driver.opened().conversation.submit("r1", ASK, 1.0, timeout=2.0)
    driver.actions()
    driver.conversation.expire(3.0)
    assert isinstance(driver.failure(), DeadlineError)
    assert driver.actions() == [(FIRST, Cancel("r1"))]
    driver.hear(LAST, Tokens("r1", 0, (1,), "late"))
    assert driver.events() == []


def test_a_cancelled_answer_ends_as_the_stages_say(driver: Driver) -> None:
    driver.asked()
    driver.hear(FIRST, Accepted("r1", (5,)))
    driver.hear(LAST, Tokens("r1", 0, (1,), "a"))
    driver.events()
    driver.conversation.cancel("r1", 2.0)
    driver.conversation.cancel("r1", 2.0)
    assert driver.actions() == [(FIRST, Cancel("r1"))]
    # It was over at stage 0 already: its own end is on its way.
    driver.hear(FIRST, Error("unknown_request", "not running", "r1"))
    driver.hear(LAST, Tokens("r1", 1, (2,), "b", "length"))
    ((_, finished),) = driver.events()
    assert isinstance(finished, Finished)
    assert (finished.generation.text, finished.generation.finish_reason) == ("ab", "length")


def test_a_request_cancelled_before_it_had_a_lane_ends_without_text(driver: Driver) -> None:
    driver.asked().conversation.cancel("r1", 2.0)
    driver.hear(FIRST, Error("cancelled", "cancelled before it began", "r1"))
    ((_, finished),) = driver.events()
    assert isinstance(finished, Finished)
    assert finished.chunk == Chunk("", (), "cancelled")
    assert finished.generation.finish_reason == "cancelled"


def test_a_request_cancelled_before_it_was_sent_never_leaves(driver: Driver) -> None:
    driver.conversation.submit("r1", ASK, 0.0)
    driver.conversation.cancel("r1", 0.0)
    ((_, finished),) = driver.events()
    assert isinstance(finished, Finished)
    assert finished.generation.finish_reason == "cancelled"
    assert driver.actions() == [Connect(FIRST)]


def test_a_cancelled_answer_that_nobody_ends_is_ended(driver: Driver) -> None:
    driver.asked()
    driver.hear(LAST, Tokens("r1", 0, (1,), "a"))
    driver.events()
    driver.conversation.cancel("r1", 2.0)
    assert driver.conversation.next_deadline == 2.0 + CANCEL_SECONDS
    driver.conversation.expire(2.0 + CANCEL_SECONDS)
    ((_, finished),) = driver.events()
    assert isinstance(finished, Finished)
    assert (finished.generation.text, finished.generation.finish_reason) == ("a", "cancelled")


def test_an_abandoned_request_is_cancelled_and_forgotten(driver: Driver) -> None:
    driver.asked().conversation.abandon("r1")
    assert driver.actions() == [(FIRST, Cancel("r1"))]
    driver.conversation.abandon("r1")
    driver.hear(LAST, Tokens("r1", 0, (1,), "a"))
    assert (driver.actions(), driver.events()) == ([], [])


def test_a_refused_hello_fails_what_waits_and_what_follows(driver: Driver) -> None:
    conversation = driver.conversation
    conversation.connected(FIRST)
    conversation.submit("r1", ASK, 0.0)
    driver.hear(FIRST, Error("generation_mismatch", "message of generation 1: this side speaks generation 2"))
    error = driver.failure()
    assert isinstance(error, ProtocolError)
    assert error.code == "generation_mismatch"
    assert FIRST in str(error)
    conversation.submit("r1", ASK, 0.0)
    assert driver.failure().code == "generation_mismatch"


def test_messages_that_make_no_sense_fail_what_runs(driver: Driver) -> None:
    driver.asked().hear(LAST, Cancel("r1"))
    assert isinstance(driver.failure(), ProtocolError)
    driver.conversation.submit("r1", ASK, 1.0)
    driver.conversation.malformed(FIRST, ProtocolError("TOKENS header: nested too deeply"))
    assert "nested too deeply" in str(driver.failure())


def test_a_middle_stage_that_is_lost_fails_only_what_it_was_asked(driver: Driver) -> None:
    conversation = driver.asked().conversation
    conversation.submit("s1", Stats("s1"), 1.0, to=MIDDLE)
    conversation.connected(MIDDLE.endpoint)
    driver.hear(MIDDLE.endpoint, Welcome((MIDDLE, END), ready=True))
    conversation.disconnected(MIDDLE.endpoint, f"{MIDDLE.endpoint}: connection lost")
    ((request, error),) = driver.events()
    assert request == "s1"
    assert isinstance(error, StageLostError)
    assert conversation.n_pending == 1


def test_an_address_that_no_client_can_reach_is_reported(driver: Driver) -> None:
    driver.conversation.connected(FIRST)
    driver.hear(FIRST, Welcome(STAGES, ready=True))
    driver.conversation.submit("r1", ASK, 0.0)
    driver.conversation.unreachable(LAST, EndpointError(f"a stage says it is at {LAST}: no such host"))
    assert "no such host" in str(driver.failure())
