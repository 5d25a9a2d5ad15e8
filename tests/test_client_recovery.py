"""What the client's half of the protocol does while stages come and go: answers go on, or end with a reason."""

from __future__ import annotations

import dataclasses

import pytest
from conversation_driver import ASK, CONTACT, END, FIRST, LAST, MIDDLE, STAGES, ZERO, Driver, facts

from skippy_zmq.client.conversation import CANCEL_SECONDS
from skippy_zmq.client.outcomes import Connect, Finished, Leave
from skippy_zmq.client.recovery import ASK_SECONDS
from skippy_zmq.client.results import Chunk, Generation
from skippy_zmq.errors import (
    DeadlineError,
    EndpointError,
    HandshakeError,
    ProtocolError,
    RetryableError,
    StageLostError,
)
from skippy_zmq.wire.messages import (
    Accepted,
    Cancel,
    Error,
    Generate,
    Hello,
    Kept,
    Message,
    Ping,
    Pong,
    Ready,
    Resume,
    StageFacts,
    Stats,
    TensorDescriptor,
    Tokens,
    Welcome,
)

HELLO = Hello("client", "client-1")
ELSEWHERE = "tcp://10.0.0.9:7700"
# The last stage, started again: at the same address, and at another one.
AGAIN = dataclasses.replace(END, stage="stage-2-again")
MOVED = dataclasses.replace(facts(20, 30, ELSEWHERE), stage="stage-2-moved")
KEEP = dataclasses.replace(ASK, keep=True)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def running(driver: Driver, ask: Generate = ASK) -> Driver:
    """r1 was accepted, and three of its tokens have come."""
    driver.opened().conversation.submit("r1", ask, 1.0)
    driver.hear(FIRST, Accepted("r1", (5, 6)))
    driver.hear(LAST, Tokens("r1", 0, (1,), "a"), Tokens("r1", 1, (2,), "b"), Tokens("r1", 2, (3,), "c"))
    driver.actions(), driver.events()
    return driver


def lose(driver: Driver, endpoint: str = LAST) -> None:
    driver.conversation.disconnected(endpoint, f"{endpoint}: connection lost")


def meet(driver: Driver, last: StageFacts = AGAIN) -> None:
    """The connection to the last stage is there again."""
    driver.conversation.connected(last.endpoint)
    driver.hear(last.endpoint, Welcome((last,), ready=True))


def ready(driver: Driver, last: StageFacts = AGAIN) -> None:
    driver.hear(FIRST, Ready((ZERO, MIDDLE, last)))


def sent(driver: Driver) -> list[Message]:
    return [action[1] for action in driver.actions() if isinstance(action, tuple)]


def generation(driver: Driver) -> Generation:
    outcome = driver.events()[-1][1]
    assert isinstance(outcome, Finished)
    return outcome.generation


@pytest.mark.parametrize("ready_first", [True, False], ids=["READY first", "WELCOME first"])
def test_an_answer_goes_on_when_the_last_stage_was_restarted(driver: Driver, ready_first: bool) -> None:
    running(driver)
    lose(driver)
    assert driver.events() == []
    for step in (ready, meet) if ready_first else (meet, ready):
        assert not any(isinstance(message, Resume) for message in sent(driver))
        step(driver)
    assert Resume("r1", 3) in sent(driver)
    driver.hear(LAST, Tokens("r1", 3, (4,), "d", "length"))
    answer = generation(driver)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abcd", (1, 2, 3, 4), "length")


def test_a_restarted_last_stage_is_told_from_the_one_that_was_lost_unnoticed(driver: Driver) -> None:
    """READY may come before the end of the connection to the old process: nothing may be asked for until then."""
    running(driver)
    ready(driver)
    driver.conversation.submit("r2", dataclasses.replace(ASK, request="r2"), 2.0)
    assert sent(driver) == []
    lose(driver)
    assert sent(driver) == []
    meet(driver)
    assert sent(driver) == [HELLO, Resume("r1", 3), dataclasses.replace(ASK, request="r2")]


def test_a_last_stage_at_another_address_is_met_there_and_the_old_one_left(driver: Driver) -> None:
    running(driver)
    lose(driver)
    ready(driver, MOVED)
    assert driver.actions() == [Connect(ELSEWHERE), Leave(LAST)]
    # What the connection still tells about the old address concerns nobody.
    driver.conversation.handshake_failed(LAST, "refused")
    driver.conversation.connected(LAST)
    lose(driver)
    driver.hear(LAST, Welcome((END,), ready=True), Tokens("r1", 7, (9,), "x"))
    assert (driver.actions(), driver.events()) == ([], [])
    meet(driver, MOVED)
    assert driver.actions() == [(ELSEWHERE, HELLO), (FIRST, Resume("r1", 3))]


def test_a_pipeline_that_went_through_many_addresses_keeps_connections_to_two(driver: Driver) -> None:
    running(driver)
    open_endpoints = {FIRST, LAST}
    for port in range(100):
        last = dataclasses.replace(MOVED, endpoint=f"tcp://10.0.0.9:{8000 + port}", stage=f"stage-2-{port}")
        ready(driver, last)
        meet(driver, last)
        for action in driver.actions():
            if isinstance(action, Connect):
                open_endpoints.add(action.endpoint)
            elif isinstance(action, Leave):
                open_endpoints.remove(action.endpoint)
    assert open_endpoints == {FIRST, "tcp://10.0.0.9:8099"}


def test_a_lost_middle_stage_needs_no_new_connection(driver: Driver) -> None:
    running(driver)
    driver.hear(FIRST, Ready((ZERO, dataclasses.replace(MIDDLE, stage="stage-1-again"), END)))
    assert driver.actions() == [(FIRST, Resume("r1", 3))]


def test_every_answer_under_way_is_resumed_with_what_came_of_it(driver: Driver) -> None:
    running(driver)
    driver.conversation.submit("r2", dataclasses.replace(ASK, request="r2"), 1.0)  # just before the loss
    lose(driver)
    driver.conversation.submit("r3", dataclasses.replace(ASK, request="r3"), 2.0)
    driver.actions()
    meet(driver)
    ready(driver)
    assert sent(driver) == [HELLO, Resume("r1", 3), Resume("r2", 0), dataclasses.replace(ASK, request="r3")]


def test_a_pipeline_that_breaks_again_is_resumed_again(driver: Driver) -> None:
    running(driver)
    for n_tokens in (3, 4, 5):
        lose(driver)
        ready(driver)
        meet(driver)
        assert sent(driver) == [HELLO, Resume("r1", n_tokens)]
        driver.hear(LAST, Tokens("r1", n_tokens, (n_tokens + 1,), "x"))
    assert [outcome for _, outcome in driver.events()] == [Chunk("x", (4,)), Chunk("x", (5,)), Chunk("x", (6,))]


def test_tokens_that_were_on_their_way_may_come_again(driver: Driver) -> None:
    running(driver)
    driver.hear(FIRST, Ready(STAGES))
    assert driver.actions() == [(FIRST, Resume("r1", 3))]
    driver.hear(LAST, Tokens("r1", 3, (4,), "d"))  # the old run's
    logits = TensorDescriptor("logits", 0, 0, "f32", (1,), 4)
    driver.conversation.received(LAST, Tokens("r1", 3, (4,), "d", tensors=(logits,)), 2.0, [memoryview(bytes(4))])
    driver.hear(LAST, Tokens("r1", 4, (8,), "e", "length"))
    answer = generation(driver)
    assert (answer.text, answer.token_ids, answer.logits) == ("abcde", (1, 2, 3, 4, 8), None)


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (Tokens("r1", 1, (9,), "x"), "resumed: wanted tokens 2 at 1 again, got 9"),
        (Tokens("r1", 0, (1, 2, 9), "x"), "resumed: wanted tokens 1, 2, 3 at 0 again, got 1, 2, 9"),
        (Tokens("r1", 1, (2,), "b", "stop"), r"wanted the same end \(none\) after token 2, got stop"),
        (Tokens("r1", 2, (3, 4), "cd"), "wanted token 3, got 2"),
    ],
)
def test_other_tokens_than_before_fail_the_request(driver: Driver, again: Tokens, words: str) -> None:
    running(driver)
    driver.hear(FIRST, Ready(STAGES))
    driver.actions()
    driver.hear(LAST, again)
    with pytest.raises(ProtocolError, match=words):
        raise driver.failure()
    assert driver.actions() == [(FIRST, Cancel("r1"))]


@pytest.mark.parametrize("n_again", [0, 2])
def test_an_answer_may_be_cancelled_before_all_of_it_came_out_again(driver: Driver, n_again: int) -> None:
    running(driver)
    driver.hear(FIRST, Ready(STAGES))
    driver.conversation.cancel("r1", 2.0)
    driver.hear(LAST, Tokens("r1", n_again, (), "c"[: n_again // 2], "cancelled"))
    answer = generation(driver)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abc", (1, 2, 3), "cancelled")


def test_tokens_that_are_missing_after_a_loss_are_a_loss(driver: Driver) -> None:
    running(driver)
    lose(driver)
    meet(driver, END)
    driver.hear(LAST, Tokens("r1", 5, (6,), "f"))
    error = driver.failure()
    assert isinstance(error, StageLostError)
    assert "wanted token 3, got 5" in str(error)


def test_a_connection_that_was_lost_while_nothing_else_happened_is_resumed_without_ready(driver: Driver) -> None:
    """Tokens may have been lost with it, the last ones too: stage 0 then does not know the request any more."""
    running(driver)
    lose(driver)
    meet(driver, END)
    assert sent(driver) == [HELLO, Resume("r1", 3)]
    driver.hear(FIRST, Error("unknown_request", "no such request", "r1"))
    error = driver.failure()
    assert isinstance(error, StageLostError)
    assert "r1 was lost" in str(error)


def test_a_pipeline_that_does_not_come_back_fails_its_requests(driver: Driver) -> None:
    running(driver)
    lose(driver)
    driver.hear(FIRST, Error("stage_lost", "layers 20:30 did not come back within 60 s", "r1", True))
    error = driver.failure()
    assert isinstance(error, StageLostError)
    assert "did not come back" in str(error)


def test_a_lost_stage_0_fails_interrupted_answers_too(driver: Driver) -> None:
    running(driver)
    lose(driver)
    lose(driver, FIRST)
    assert isinstance(driver.failure(), StageLostError)


def test_the_only_stage_is_stage_0(driver: Driver) -> None:
    whole = facts(0, 30, "tcp://zero:7700")
    driver.conversation.connected(FIRST)
    driver.hear(FIRST, Welcome((whole,), ready=True))
    driver.conversation.submit("r1", ASK, 1.0)
    lose(driver, FIRST)
    assert isinstance(driver.failure(), StageLostError)


def test_questions_to_a_lost_last_stage_fail_at_once(driver: Driver) -> None:
    running(driver).conversation.submit("s1", Stats("s1"), 1.0, to=END)
    lose(driver)
    ((request, error),) = driver.events()
    assert request == "s1"
    assert isinstance(error, StageLostError)


def test_questions_to_a_stage_that_is_no_longer_there_fail(driver: Driver) -> None:
    running(driver)
    lose(driver)
    driver.conversation.submit("s1", Stats("s1"), 1.0, to=END)
    ready(driver, MOVED)
    ((request, error),) = driver.events()
    assert request == "s1"
    assert isinstance(error, StageLostError)


# Cancelled and late ones.


def test_an_interrupted_answer_can_be_cancelled(driver: Driver) -> None:
    running(driver)
    lose(driver)
    driver.conversation.cancel("r1", 2.0)
    assert sent(driver) == [Cancel("r1")]
    driver.hear(FIRST, Error("cancelled", "cancelled while a stage was lost", "r1"))
    answer = generation(driver)
    assert (answer.text, answer.finish_reason) == ("abc", "cancelled")
    ready(driver)
    meet(driver)
    assert sent(driver) == [HELLO]


@pytest.mark.parametrize("answered", [True, False], ids=["unknown", "no answer"])
def test_an_answer_cancelled_just_before_the_loss_ends(driver: Driver, answered: bool) -> None:
    running(driver).conversation.cancel("r1", 2.0)
    lose(driver)
    ready(driver)
    meet(driver)
    assert not any(isinstance(message, Resume) for message in sent(driver))
    if answered:
        driver.hear(FIRST, Error("unknown_request", "no such request", "r1"))
    else:
        assert driver.conversation.next_deadline == 2.0 + CANCEL_SECONDS
        driver.conversation.expire(2.0 + CANCEL_SECONDS)
    assert (generation(driver).text, driver.conversation.n_pending) == ("abc", 0)


def test_the_time_of_an_interrupted_answer_goes_on(driver: Driver) -> None:
    driver.opened().conversation.submit("r1", ASK, 1.0, timeout=20.0)
    driver.actions()
    lose(driver)
    driver.conversation.expire(2.0)
    assert driver.events() == []
    driver.conversation.expire(21.0)
    assert isinstance(driver.failure(), DeadlineError)
    assert driver.actions() == [(FIRST, Cancel("r1"))]


def test_how_long_the_pipeline_may_take_is_the_pipelines_choice(driver: Driver) -> None:
    """The client asks now and then whether stage 0 still waits for a stage."""
    running(driver)
    lose(driver)
    now = 2.0
    for _ in range(10):
        driver.conversation.expire(now)
        now += CONTACT
        assert driver.conversation.next_deadline == now
        assert driver.actions() == []
        driver.conversation.expire(now)
        assert driver.actions() == [(FIRST, Ping(0))]
        driver.hear(FIRST, Pong(0, ready=False))
    assert driver.events() == []
    ready(driver)
    meet(driver)
    assert Resume("r1", 3) in sent(driver)


@pytest.mark.parametrize("answers", [[Pong(0, ready=True)], []])
def test_a_last_stage_that_only_we_cannot_reach_fails_the_answer(driver: Driver, answers: list[Pong]) -> None:
    running(driver)
    lose(driver)
    driver.conversation.expire(2.0)
    driver.conversation.expire(2.0 + CONTACT)
    driver.hear(FIRST, *answers)
    assert sent(driver) == [Ping(0)]
    driver.conversation.expire(2.0 + CONTACT + ASK_SECONDS)
    error = driver.failure()
    assert isinstance(error, EndpointError)
    assert f"cannot reach {LAST}" in str(error)
    assert sent(driver) == [Cancel("r1")]
    assert driver.conversation.next_deadline is None


def test_a_last_stage_that_refuses_us_fails_the_answer(driver: Driver) -> None:
    running(driver)
    lose(driver)
    driver.conversation.connected(LAST)
    driver.hear(LAST, Error("retry", "not now", "", True))
    assert driver.events() == []
    driver.hear(LAST, Error("handshake", "wrong keys"))
    assert isinstance(driver.failure(), HandshakeError)
    assert Cancel("r1") in sent(driver)


def test_a_last_stage_that_is_about_to_end_does_not_end_answers(driver: Driver) -> None:
    running(driver).conversation.submit("s1", Stats("s1"), 1.0, to=END)
    driver.hear(LAST, Error("shutting_down", "stage 2 is shutting down", "", True))
    ((request, error),) = driver.events()
    assert request == "s1"
    assert isinstance(error, RetryableError)


# Kept sessions.


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_kept_session_is_named_in_either_order(driver: Driver, kept_first: bool) -> None:
    running(driver, KEEP)
    steps: list[tuple[str, Message]] = [(LAST, Tokens("r1", 3, (4,), "d", "length")), (FIRST, Kept("r1", "5e", 5))]
    for endpoint, message in reversed(steps) if kept_first else steps:
        assert driver.conversation.n_pending == 1
        driver.hear(endpoint, message)
    *chunks, (_, finished) = driver.events()
    assert isinstance(finished, Finished)
    last = Chunk("d", (4,), "length")
    assert ([outcome for _, outcome in chunks], finished.chunk) == (([], last) if kept_first else ([last], None))
    assert (finished.generation.session, finished.generation.text) == ("5e", "abcd")


def test_a_session_that_could_not_be_kept_has_no_name(driver: Driver) -> None:
    running(driver, KEEP)
    driver.hear(LAST, Tokens("r1", 3, (), "", "stop"))
    driver.hear(FIRST, Kept("r1", "", 0))
    assert generation(driver).session == ""


def test_a_cancelled_answer_waits_for_no_name(driver: Driver) -> None:
    running(driver, KEEP).conversation.cancel("r1", 2.0)
    driver.hear(LAST, Tokens("r1", 3, (), "", "cancelled"))
    assert generation(driver).finish_reason == "cancelled"
    driver.hear(FIRST, Kept("r1", "", 0))
    assert driver.events() == []


def test_a_name_that_nobody_asked_for_fails_the_request(driver: Driver) -> None:
    running(driver)
    driver.hear(FIRST, Kept("r1", "5e", 5))
    assert isinstance(driver.failure(), ProtocolError)


def test_a_whole_answer_is_resumed_to_be_kept_and_its_end_may_come_again(driver: Driver) -> None:
    running(driver, KEEP)
    driver.hear(LAST, Tokens("r1", 3, (4,), "d", "length"))
    driver.events()
    lose(driver)
    ready(driver)
    meet(driver)
    assert sent(driver) == [HELLO, Resume("r1", 4)]
    driver.hear(LAST, Tokens("r1", 3, (4,), "d", "length"), Tokens("r1", 4, (), "", "length"))
    assert driver.events() == []
    driver.hear(FIRST, Kept("r1", "5e", 5))
    assert (generation(driver).session, driver.conversation.n_pending) == ("5e", 0)


def test_another_end_than_before_fails_the_request(driver: Driver) -> None:
    running(driver, KEEP)
    driver.hear(LAST, Tokens("r1", 3, (4,), "d", "length"))
    driver.events()
    driver.hear(FIRST, Ready(STAGES))
    driver.hear(LAST, Tokens("r1", 4, (), "", "stop"))
    assert isinstance(driver.failure(), ProtocolError)


@pytest.mark.parametrize("why", ["stage 0 lost", "error", "late", "cancelled"])
def test_a_whole_answer_is_not_lost_with_the_state_that_was_to_be_kept(driver: Driver, why: str) -> None:
    driver.opened().conversation.submit("r1", KEEP, 1.0, timeout=10.0)
    driver.hear(FIRST, Accepted("r1", (5, 6), 1))
    driver.hear(LAST, Tokens("r1", 0, (1,), "a", "length"))
    if why == "stage 0 lost":
        lose(driver, FIRST)
    elif why == "error":
        driver.hear(FIRST, Error("stage_lost", "layers 20:30 did not come back", "r1", True))
    elif why == "late":
        driver.conversation.expire(11.0)
    else:
        driver.conversation.cancel("r1", 2.0)
        driver.hear(FIRST, Error("unknown_request", "no such request", "r1"))
    answer = generation(driver)
    assert (answer.text, answer.finish_reason, answer.session) == ("a", "length", "")
    assert answer.reused_tokens == 1
