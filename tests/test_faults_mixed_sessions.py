"""R06: nothing of one conversation gets into another, in any mix of lengths, lanes, cancels and lanes used again.

Chunk edges and several clients are in test_stage_lanes, real weights and equal bits in test_isolation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lane_helpers import StageWatch
from model_files import tiny
from pipeline_helpers import greedy_reference
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.wire.messages import SamplingParams

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_LANES, _CHUNK, _CONTEXT, _N_TOKENS, _ROUNDS = 4, 64, 1024, 24, 20
_LENGTHS = (3, 20, 63, 64, 65, 130, 300, 700)
_ENDLESS = SamplingParams(ignore_eos=True)
_OPTIONS = ("--lanes", str(_LANES), "--ctx-size", str(_CONTEXT), "--ubatch-size", str(_CHUNK))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=3)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    choose = random.Random(8)
    return [tuple(choose.randrange(4, 300) for _ in range(length)) for length in _LENGTHS]


@pytest.fixture(scope="module")
def pipeline(module_dir: Path, model: Path) -> Iterator[StagePipeline]:
    with StagePipeline(module_dir, model, "0:2 2:4", *_OPTIONS) as pipeline:
        yield pipeline.start_all()
        assert [pipeline[index].stop() for index in (0, 1)] == [0, 0]


@pytest.fixture
def asker(pipeline: StagePipeline, transport: Transport) -> Iterator[Asker]:
    watch = StageWatch(transport, pipeline)
    yield Asker(transport, pipeline.endpoint)
    watch.until_free()


@pytest.fixture(scope="module")
def alone(model: Path, prompts: list[tuple[int, ...]], pipeline: StagePipeline) -> list[list[int]]:
    """The answer to each prompt with nothing else running, which is also what llama.cpp answers unsplit."""
    transport = Transport()
    try:
        asker = Asker(transport, pipeline.endpoint)
        answers = [asker.tokens(prompt, max_tokens=_N_TOKENS) for prompt in prompts]
    finally:
        transport.close()
    assert answers == greedy_reference(model, prompts, _N_TOKENS, n_ctx=_CONTEXT, n_batch=_CHUNK)
    assert len({tuple(answer) for answer in answers}) == len(answers)  # one could not be taken for another
    return answers


@pytest.mark.parametrize("number", range(_ROUNDS))
def test_a_random_mix(number: int, asker: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]) -> None:
    choose = random.Random(number)
    order = [*range(len(prompts)), *choose.choices(range(len(prompts)), k=4)]
    choose.shuffle(order)
    leaves = {place: choose.randrange(_N_TOKENS) for place in choose.sample(range(len(order)), len(order) // 3)}
    requests = []
    for place, index in enumerate(order):
        n_tokens = choose.randint(1, _N_TOKENS)
        requests.append((asker.ask(prompts[index], max_tokens=n_tokens), index, n_tokens, place in leaves))
        if choose.random() < 0.5:  # the next one comes while this mix is under way
            some = choose.choice(requests)[0]
            asker.wait(some, lambda answer: answer.over or bool(answer.token_ids))
    for place, n_tokens in leaves.items():
        request = requests[place][0]
        asker.wait(request, lambda answer, n=n_tokens: answer.over or len(answer.token_ids) >= n)
        if not asker.answers[request].over:
            asker.cancel(request)
    for request, index, n_tokens, leaves_early in requests:
        answer = asker.answer(request)
        if leaves_early:
            assert answer.code in ("", "cancelled", "unknown_request")
            assert answer.token_ids == alone[index][: len(answer.token_ids)]
        else:
            assert answer.token_ids == alone[index][:n_tokens]


@pytest.fixture
def one_lane(make_pipeline: Callable[..., StagePipeline], model: Path, transport: Transport) -> Iterator[Asker]:
    pipeline = make_pipeline(model, "0:2 2:4", *_OPTIONS, "--lanes", "1").start_all()
    watch = StageWatch(transport, pipeline)
    yield Asker(transport, pipeline.endpoint)
    watch.until_free()


@pytest.mark.parametrize("end", ["length", "cancelled", "cancelled in its prompt"])
def test_a_short_one_on_the_lane_of_a_long_one(
    end: str, one_lane: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]
) -> None:
    for index in (0, 1, 2, 5):
        if end == "length":
            assert one_lane.tokens(prompts[-1], max_tokens=_N_TOKENS) == alone[-1]
        else:
            long = one_lane.ask(prompts[-1], max_tokens=300, sampling=_ENDLESS)
            one_lane.wait(long, lambda answer: answer.accepted and (end != "cancelled" or bool(answer.token_ids)))
            one_lane.cancel(long)
            answer = one_lane.answer(long)
            assert "cancelled" in (answer.finish_reason, answer.code)
        assert one_lane.tokens(prompts[index], max_tokens=_N_TOKENS) == alone[index]


def test_a_short_one_beside_a_long_one_on_the_lane_of_another(
    asker: Asker, prompts: list[tuple[int, ...]], alone: list[list[int]]
) -> None:
    """Lanes are left in another order than they were taken, so that those which are taken again lie between others."""
    long = [asker.ask(prompts[-1 - number % 2], max_tokens=200, sampling=_ENDLESS) for number in range(_LANES)]
    for request in long:
        asker.wait(request, lambda answer: bool(answer.token_ids))
    for lane in (1, 3, 0, 2):
        asker.cancel(long[lane])
        answer = asker.answer(long[lane])
        wanted = alone[-1 - lane % 2]
        assert answer.token_ids[: len(wanted)] == wanted[: len(answer.token_ids)]
        for index in (0, 4):
            assert asker.tokens(prompts[index], max_tokens=_N_TOKENS) == alone[index]
