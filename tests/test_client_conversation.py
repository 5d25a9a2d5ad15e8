"""The client's half of the protocol: what it sends when, and what becomes of the answers."""

from __future__ import annotations

import dataclasses

import pytest
from conversation_driver import ASK, CONTACT, END, FIRST, LAST, MIDDLE, STAGES, ZERO, Driver, facts

from skippy_zmq.client.outcomes import Connect, Finished, Opened
from skippy_zmq.client.results import Chunk
from skippy_zmq.errors import (
    BusyError,
    ProtocolError,
    RequestError,
)
from skippy_zmq.wire.messages import (
    Accepted,
    Cancel,
    Detokenize,
    Error,
    Generate,
    Hello,
    NextToken,
    Ready,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Tokens,
    TokensEach,
    Welcome,
)


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


def test_tokens_of_several_requests_in_one_message(driver: Driver) -> None:
    driver.asked().conversation.submit("r2", dataclasses.replace(ASK, request="r2"), 1.0)
    driver.hear(FIRST, Accepted("r2", (5,)), Accepted("r1", (5,)))
    driver.hear(LAST, TokensEach((NextToken("r2", 0, 1, "x"), NextToken("r9", 0, 1, "?"), NextToken("r1", 0, 2, "y"))))
    assert driver.events() == [("r2", Chunk("x", (1,))), ("r1", Chunk("y", (2,)))]
    driver.hear(LAST, TokensEach((NextToken("r2", 2, 1, "x"), NextToken("r1", 1, 3, "z"))))  # a gap in one of them
    (failed, error), went_on = driver.events()
    assert failed == "r2"
    assert isinstance(error, ProtocolError)
    assert went_on == ("r1", Chunk("z", (3,)))


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


def test_questions_to_a_stage_go_to_that_stage(driver: Driver) -> None:
    conversation = driver.opened().conversation
    conversation.submit("t", Tokenize("t", "hi"), 1.0)
    conversation.submit("s0", Stats("s0"), 1.0, to=ZERO)
    conversation.submit("s1", Stats("s1"), 1.0, to=MIDDLE)
    conversation.submit("s2", Stats("s2"), 1.0, to=END)
    assert driver.actions() == [
        (FIRST, Tokenize("t", "hi")),
        (FIRST, Stats("s0")),
        Connect(MIDDLE.endpoint),
        (LAST, Stats("s2")),
    ]
    conversation.connected(MIDDLE.endpoint)
    driver.hear(MIDDLE.endpoint, Welcome((MIDDLE, END), ready=True))
    assert driver.actions()[-1] == (MIDDLE.endpoint, Stats("s1"))
    driver.hear(FIRST, Tokenized("t", (1, 2)), StatsReply("s0", ZERO, {}))
    assert driver.events() == [("t", Tokenized("t", (1, 2))), ("s0", StatsReply("s0", ZERO, {}))]
    conversation.expire(1.0 + CONTACT)
    assert {request for request, _ in driver.events()} == {"s1", "s2"}
