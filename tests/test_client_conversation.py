"""The client's half of the protocol, driven by lists of events."""

from __future__ import annotations

import dataclasses

import pytest
from wire_values import FACTS

from skippy_zmq.client.conversation import (
    CANCEL_SECONDS,
    Connect,
    Conversation,
    Event,
    Finished,
    Opened,
    Send,
)
from skippy_zmq.client.results import Chunk
from skippy_zmq.errors import (
    BusyError,
    DeadlineError,
    EndpointError,
    ProtocolError,
    RequestError,
    SkippyError,
    StageLostError,
)
from skippy_zmq.wire.codec import decode
from skippy_zmq.wire.messages import (
    Accepted,
    Cancel,
    Detokenize,
    Error,
    Generate,
    Hello,
    Message,
    Ping,
    Ready,
    StageFacts,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Tokens,
    Welcome,
)

FIRST, LAST = "tcp://10.0.0.1:7700", "tcp://10.0.0.3:7700"
CONTACT = 30.0


def facts(start: int, end: int, endpoint: str) -> StageFacts:
    return dataclasses.replace(
        FACTS, layer_start=start, layer_end=end, n_layers=30, endpoint=endpoint, wanted=(), offered=()
    )


# Stage 0 calls itself by another name than the client does.
ZERO = facts(0, 10, "tcp://zero:7700")
MIDDLE = facts(10, 20, "tcp://10.0.0.2:7700")
END = facts(20, 30, LAST)
STAGES = (ZERO, MIDDLE, END)
ASK = Generate("r1", 8, prompt="hi")


class Driver:
    """A conversation, and what it has asked for."""

    def __init__(self) -> None:
        self.conversation = Conversation(FIRST, "client-1", CONTACT)

    def actions(self) -> list[Connect | tuple[str, Message]]:
        """What is to be done by now, sent frames decoded."""
        return [
            (action.endpoint, decode(action.frames)[0]) if isinstance(action, Send) else action
            for action in self.conversation.take_actions()
        ]

    def events(self) -> list[Event]:
        return self.conversation.take_events()

    def hear(self, endpoint: str, *messages: Message, now: float = 1.0) -> None:
        for message in messages:
            self.conversation.received(endpoint, message, now)

    def opened(self) -> Driver:
        """Welcome at both ends of a ready pipeline."""
        self.conversation.connected(FIRST)
        self.hear(FIRST, Welcome(STAGES, ready=True))
        self.conversation.connected(LAST)
        self.hear(LAST, Welcome((END,), ready=True))
        self.actions()
        return self

    def asked(self) -> Driver:
        """An open conversation with request r1 sent at time 1."""
        self.opened().conversation.submit("r1", ASK, 1.0)
        assert self.actions() == [(FIRST, ASK)]
        return self

    def failure(self) -> SkippyError:
        """The one error of r1."""
        ((request, error),) = self.events()
        assert request == "r1"
        assert isinstance(error, SkippyError)
        assert self.conversation.n_pending == 0
        return error


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_it_says_hello_at_both_ends_before_it_asks(driver: Driver) -> None:
    conversation = driver.conversation
    conversation.submit("r1", ASK, 0.0)
    assert driver.actions() == [Connect(FIRST)]
    conversation.connected(FIRST)
    assert driver.actions() == [(FIRST, Hello("client", "client-1"))]
    driver.hear(FIRST, Welcome((ZERO,), ready=False))
    assert driver.actions() == []
    driver.hear(FIRST, Ready(STAGES))
    assert driver.actions() == [Connect(LAST)]
    conversation.connected(LAST)
    assert driver.actions() == [(LAST, Hello("client", "client-1"))]
    assert not conversation.is_open
    driver.hear(LAST, Welcome((END,), ready=True))
    assert driver.actions() == [(FIRST, ASK)]
    assert conversation.is_open


def test_a_pipeline_of_one_stage_needs_one_connection(driver: Driver) -> None:
    whole = facts(0, 30, "tcp://zero:7700")
    driver.conversation.submit("r1", ASK, 0.0)
    driver.conversation.submit("open", None, 0.0)
    driver.conversation.connected(FIRST)
    driver.hear(FIRST, Welcome((whole,), ready=True))
    assert driver.actions() == [Connect(FIRST), (FIRST, Hello("client", "client-1")), (FIRST, ASK)]
    assert driver.events() == [("open", Opened((whole,)))]


def test_an_answer_is_its_chunks_joined(driver: Driver) -> None:
    driver.asked()
    driver.hear(FIRST, Accepted("r1", (5, 6, 7)), now=1.5)
    driver.hear(LAST, Tokens("r1", 0, (1,), "a"), now=2.0)
    driver.hear(LAST, Tokens("r1", 1, (2, 3), "bc"), now=2.5)
    driver.hear(LAST, Tokens("r1", 3, (4,), "d", "length", {"prefill_us": 100_000, "decode_us": 2_000_000}), now=3.0)
    *chunks, (request, finished) = driver.events()
    assert chunks == [("r1", Chunk("a", (1,))), ("r1", Chunk("bc", (2, 3)))]
    assert request == "r1"
    assert isinstance(finished, Finished)
    assert finished.chunk == Chunk("d", (4,), "length")
    answer = finished.generation
    assert (answer.text, answer.token_ids, answer.prompt_token_ids) == ("abcd", (1, 2, 3, 4), (5, 6, 7))
    assert (answer.finish_reason, answer.stages) == ("length", STAGES)
    timings = answer.timings
    assert (timings.ttft_ms, timings.prefill_tokens_per_s, timings.decode_tokens_per_s) == (1000.0, 6.0, 1.5)


def test_the_whole_answer_waits_for_a_prompt_that_comes_late(driver: Driver) -> None:
    driver.asked()
    driver.hear(LAST, Tokens("r1", 0, (1,), "a", "length"))
    assert driver.events() == [("r1", Chunk("a", (1,), "length"))]
    driver.hear(FIRST, Accepted("r1", (5,)))
    ((_, finished),) = driver.events()
    assert isinstance(finished, Finished)
    assert finished.chunk is None
    assert finished.generation.prompt_token_ids == (5,)


def test_an_answer_without_tokens_has_no_rates(driver: Driver) -> None:
    driver.asked()
    driver.hear(FIRST, Accepted("r1", (5,)))
    driver.hear(LAST, Tokens("r1", 0, (), "", "stop"))
    ((_, finished),) = driver.events()
    assert isinstance(finished, Finished)
    assert (finished.generation.text, finished.generation.finish_reason) == ("", "stop")
    assert finished.generation.timings.prefill_tokens_per_s is None
    assert finished.generation.timings.decode_tokens_per_s is None


@pytest.mark.parametrize("index", [0, 2, 7])
def test_a_gap_in_the_stream_fails_the_request(driver: Driver, index: int) -> None:
    driver.asked()
    driver.hear(LAST, Tokens("r1", 0, (1,), "a"))
    driver.events()
    driver.hear(LAST, Tokens("r1", index, (2,), "b"))
    error = driver.failure()
    assert isinstance(error, ProtocolError)
    assert f"wanted token 1, got {index}" in str(error)
    assert driver.actions() == [(FIRST, Cancel("r1"))]


def test_tokens_after_the_last_ones_fail_the_request(driver: Driver) -> None:
    driver.asked()
    driver.hear(LAST, Tokens("r1", 0, (1,), "a", "length"))
    driver.events()
    driver.hear(LAST, Tokens("r1", 1, (2,), "b"))
    assert isinstance(driver.failure(), ProtocolError)


def test_requests_run_beside_each_other(driver: Driver) -> None:
    driver.asked().conversation.submit("r2", dataclasses.replace(ASK, request="r2"), 1.0)
    driver.hear(FIRST, Accepted("r2", (5,)), Accepted("r1", (5,)))
    driver.hear(LAST, Tokens("r2", 0, (1,), "x"), Tokens("r1", 0, (2,), "y"), Tokens("r2", 1, (), "", "stop"))
    assert [request for request, _ in driver.events()] == ["r2", "r1", "r2"]
    assert driver.conversation.n_pending == 1


def test_an_error_keeps_its_code_and_class(driver: Driver) -> None:
    driver.asked()
    driver.hear(FIRST, Error("context_length_exceeded", "too long", "r1"))
    error = driver.failure()
    assert isinstance(error, RequestError)
    assert (error.code, str(error)) == ("context_length_exceeded", "too long")
    driver.conversation.submit("r1", ASK, 1.0)
    driver.hear(LAST, Error("busy", "full", "r1", retry=True))
    assert isinstance(driver.failure(), BusyError)


def test_a_broken_connection_fails_what_was_sent_and_keeps_what_waits(driver: Driver) -> None:
    driver.asked().conversation.disconnected(LAST, f"{LAST}: connection lost")
    assert isinstance(driver.failure(), StageLostError)
    driver.conversation.submit("r2", dataclasses.replace(ASK, request="r2"), 2.0)
    assert driver.actions() == []
    driver.conversation.connected(LAST)
    driver.hear(LAST, Welcome((END,), ready=True), now=3.0)
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


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (Generate("r1", 0, prompt="hi"), "max_tokens"),
        (Generate("r1", 8), "exactly one"),
        (Generate("r1", 8, prompt="hi", token_ids=(1,)), "exactly one"),
        (Generate("r1", 8, prompt="\udc80"), "Unicode"),
        (Generate("r1", 8, prompt="hi", stop=("",)), "stop"),
        (Detokenize("r1", (-1,)), "token_ids"),
    ],
)
def test_a_request_that_cannot_be_right_never_leaves(driver: Driver, ask: Generate | Detokenize, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        driver.opened().conversation.submit("r1", ask, 0.0)
    assert driver.actions() == []
    assert driver.conversation.n_pending == 0


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
    driver.asked().hear(LAST, Ping(1))
    assert isinstance(driver.failure(), ProtocolError)
    driver.conversation.submit("r1", ASK, 1.0)
    driver.conversation.malformed(FIRST, ProtocolError("TOKENS header: nested too deeply"))
    assert "nested too deeply" in str(driver.failure())


def test_questions_to_a_stage_go_to_that_stage(driver: Driver) -> None:
    conversation = driver.opened().conversation
    conversation.submit("t", Tokenize("t", "hi"), 1.0)
    conversation.submit("s0", Stats("s0"), 1.0, to=ZERO)
    conversation.submit("s1", Stats("s1"), 1.0, to=MIDDLE)
    conversation.submit("s2", Stats("s2"), 1.0, to=END)
    assert (
        driver.actions()
        == [
            Connect(MIDDLE.endpoint),
            (FIRST, Tokenize("t", "hi")),
            (FIRST, Stats("s0")),
            (LAST, Stats("s2")),
        ]
        or driver.actions() == []
    )
    conversation.connected(MIDDLE.endpoint)
    driver.hear(MIDDLE.endpoint, Welcome((MIDDLE, END), ready=True))
    assert driver.actions()[-1] == (MIDDLE.endpoint, Stats("s1"))
    driver.hear(FIRST, Tokenized("t", (1, 2)), StatsReply("s0", ZERO, {}))
    assert driver.events() == [("t", Tokenized("t", (1, 2))), ("s0", StatsReply("s0", ZERO, {}))]
    conversation.expire(1.0 + CONTACT)
    assert {request for request, _ in driver.events()} == {"s1", "s2"}


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
