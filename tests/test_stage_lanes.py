"""Many requests at once: each gets what it would get alone, in its turn, and can be ended at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model_files import tiny
from pipeline_helpers import greedy_reference
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.wire.messages import SamplingParams

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_LANES, _CHUNK, _CONTEXT, _N_TOKENS = 3, 16, 256, 12
_ENDLESS = SamplingParams(ignore_eos=True)
# around the edges of a chunk, and of several
_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 100, 160)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    choose = random.Random(5)
    return [tuple(choose.randrange(4, 300) for _ in range(length)) for length in _LENGTHS]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What llama.cpp answers to each prompt, the whole model in this process."""
    return greedy_reference(model, prompts, _N_TOKENS, n_ctx=_CONTEXT, n_batch=_CHUNK)


@pytest.fixture(scope="module")
def pipeline(module_dir: Path, model: Path) -> Iterator[StagePipeline]:
    with StagePipeline(module_dir, model, "0:2 2:4", "--lanes", str(_LANES), "--ubatch-size", str(_CHUNK)) as pipeline:
        yield pipeline.start_all()
        for index in range(2):
            assert pipeline[index].stop() == 0


@pytest.fixture
def asker(pipeline: StagePipeline, transport: Transport) -> Iterator[Asker]:
    asker = Asker(transport, pipeline.endpoint)
    yield asker
    counters = asker.first.at_rest().counters
    assert [counters[f"now.{name}"] for name in ("requests_queued", "requests_running", "lanes_busy")] == [0, 0, 0]
    assert counters["now.batches_in_flight"] == 0
    assert asker.last.at_rest().counters["now.sessions"] == 0


def test_one_after_another_on_one_lane(asker: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]) -> None:
    for prompt, wanted in zip(reversed(prompts), reversed(alone), strict=True):  # long ones first
        assert asker.tokens(prompt, max_tokens=_N_TOKENS) == wanted


def test_tokens_of_one_step_come_together(
    make_pipeline: Callable[..., StagePipeline],
    model: Path,
    transport: Transport,
    prompts: list[tuple[int, ...]],
    alone: list[list[int]],
) -> None:
    """One group, so all that is under way steps at once; how many groups else is learned from how fast they step."""
    options = ("--lanes", str(_LANES), "--ubatch-size", str(_CHUNK), "--groups", "1")
    asker = Asker(transport, make_pipeline(model, "0:2 2:4", *options).start_all().endpoint)
    requests = [asker.ask(prompts[i], max_tokens=200, sampling=_ENDLESS) for i in (0, 1, 2)]
    answers = [asker.answer(request).token_ids for request in requests]
    assert [tokens[:_N_TOKENS] for tokens in answers] == alone[:3]
    assert [len(tokens) for tokens in answers] == [200] * 3
    assert asker.n_together > 0


@pytest.mark.parametrize("seed", range(6))
def test_at_once_as_alone(seed: int, asker: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]) -> None:
    choose = random.Random(seed)
    chosen = [choose.randrange(len(prompts)) for _ in range(8)]
    requests = [asker.ask(prompts[i], max_tokens=_N_TOKENS) for i in chosen]
    dropped = set(choose.sample(range(8), 3))
    for number in sorted(dropped):
        n_tokens = choose.randrange(3)
        asker.wait(requests[number], lambda answer, n=n_tokens: answer.over or len(answer.token_ids) >= n)
        if not asker.answers[requests[number]].over:
            asker.cancel(requests[number])
    for number, (request, index) in enumerate(zip(requests, chosen, strict=True)):
        answer = asker.answer(request)
        if number in dropped:
            assert answer.code in ("", "cancelled", "unknown_request")
            assert answer.token_ids == alone[index][: len(answer.token_ids)]
        else:
            assert answer.token_ids == alone[index]
    accepted = [request for request in asker.order if request in requests]
    assert accepted == [request for request in requests if request in accepted]  # in order of arrival


def test_clients_take_turns(
    asker: Asker,
    pipeline: StagePipeline,
    transport: Transport,
    prompts: list[tuple[int, ...]],
    alone: list[list[int]],
) -> None:
    askers = [asker, *(Asker(transport, pipeline.endpoint) for _ in range(3))]
    requests = [
        [who.ask(prompt, max_tokens=_N_TOKENS) for prompt in prompts[number::4]] for number, who in enumerate(askers)
    ]
    for number, who in enumerate(askers):
        assert [who.answer(request).token_ids for request in requests[number]] == alone[number::4]


def test_a_request_is_cancelled_while_it_waits(asker: Asker, prompts: list[tuple[int, ...]]) -> None:
    running = [asker.ask(prompts[0], max_tokens=200, sampling=_ENDLESS) for _ in range(_LANES)]
    waiting = asker.ask(prompts[0])
    asker.wait(running[-1], lambda answer: bool(answer.token_ids))
    assert not asker.answers[waiting].accepted
    asker.cancel(waiting)
    answer = asker.answer(waiting)
    assert (answer.code, answer.accepted, answer.token_ids) == ("cancelled", False, [])
    for request in running:
        asker.cancel(request)
    for request in running:
        answer = asker.answer(request)
        assert answer.finish_reason == "cancelled"
        assert 0 < len(answer.token_ids) < 200


def test_a_request_that_takes_too_long(asker: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]) -> None:
    holding = [asker.ask(prompts[0], max_tokens=200, sampling=_ENDLESS) for _ in range(_LANES)]
    asker.wait(holding[-1], lambda answer: bool(answer.token_ids))
    answer = asker.run(prompts[0], timeout_ms=1)
    assert (answer.code, answer.accepted) == ("deadline", False)
    assert answer.error is not None
    assert answer.error.retry
    for request in holding:
        asker.cancel(request)
        asker.answer(request)
    # one that runs already, with a prompt of many chunks before its first token
    answer = asker.run(prompts[-1], max_tokens=90, timeout_ms=1)
    assert answer.code == "deadline"
    assert asker.tokens(prompts[-1], max_tokens=_N_TOKENS) == alone[-1]


@pytest.mark.parametrize("timeout_ms", [2**31, 2**53, 2**63 - 1])
def test_a_request_with_all_the_time_in_the_world(
    timeout_ms: int, asker: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]
) -> None:
    running = asker.ask(prompts[0], max_tokens=200, timeout_ms=timeout_ms, sampling=_ENDLESS)
    assert asker.tokens(prompts[1], max_tokens=_N_TOKENS, timeout_ms=timeout_ms) == alone[1]
    assert len(asker.answer(running).token_ids) == 200


def test_a_full_queue_is_said(asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    held = [asker.ask((5,), max_tokens=250, sampling=_ENDLESS) for _ in range(_LANES)]
    asker.wait(held[-1], lambda answer: bool(answer.token_ids))
    requests = [asker.ask((5,), max_tokens=1) for _ in range(500)]
    answers = [asker.answer(request) for request in requests]
    refused = [answer for answer in answers if answer.error]
    assert {answer.code for answer in refused} == {"busy"}
    assert all(answer.error.retry for answer in refused if answer.error)
    assert len(answers) - len(refused) >= 256
    for request in held:
        assert asker.answer(request).finish_reason == "length"


def test_one_long_prompt_does_not_hold_up_the_others(asker: Asker, prompts: list[tuple[int, ...]]) -> None:
    talking = asker.ask(prompts[0], max_tokens=250, sampling=_ENDLESS)
    asker.wait(talking, lambda answer: bool(answer.token_ids))
    before = len(asker.answers[talking].token_ids)
    asker.answer(asker.ask(prompts[-1], max_tokens=1))
    chunks = -(-len(prompts[-1]) // _CHUNK)
    after = len(asker.answers[talking].token_ids)
    assert after - before >= chunks // 4  # at most four batches are under way, and one of them is a step
    assert len(asker.answer(talking).token_ids) == 250


def test_counters_add_up(asker: Asker, pipeline: StagePipeline, prompts: list[tuple[int, ...]]) -> None:
    before = [peer.at_rest().counters for peer in (asker.first, asker.last)]
    assert len(asker.tokens(prompts[4], max_tokens=5)) == 5
    after = [peer.at_rest().counters for peer in (asker.first, asker.last)]
    for old, new in zip(before, after, strict=True):
        added = {name: new[name] - old.get(name, 0) for name in new if not name.startswith("now.")}
        assert added["rows"] == len(prompts[4]) + 4
        assert added["batches"] == 2 + 4
        assert added["sessions"] == 1
        assert added["compute_us"] > 0
    assert after[1]["tokens"] - before[1]["tokens"] == 5
