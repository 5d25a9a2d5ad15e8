"""Prompts around the edges of chunks (R07) and of the context (R09), lanes beside each other, over real stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from model_files import FIRST_BYTE_TOKEN, Parrot, parrot, tiny
from pipeline_helpers import FLOAT32, Pipelines, greedy_ids, greedy_reference, run_client, wait_until_idle

from skippy_zmq import Client
from skippy_zmq.errors import RequestError

pytest_plugins = ("pipeline_fixtures",)

CHUNK = 16
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48)
N_TOKENS = 20
STAGES = (1, 2, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    random = np.random.default_rng(7)
    return {length: random.integers(FIRST_BYTE_TOKEN, 300, length).tolist() for length in LENGTHS}


@pytest.fixture(scope="module")
def expected(model: Path, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """The whole model in one process, each prompt in one piece."""
    answers = greedy_reference(model, list(prompts.values()), N_TOKENS, flash_attn=False, float32=True)
    return dict(zip(prompts, answers, strict=True))


def chunked(pipelines: Pipelines, model: Path, stages: int) -> Client:
    return pipelines(model, stages, ubatch_size=CHUNK, batch_size=CHUNK, **FLOAT32)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_prompts_give_the_tokens_of_whole_ones(
    pipelines: Pipelines,
    model: Path,
    prompts: dict[int, list[int]],
    expected: dict[int, list[int]],
    length: int,
    stages: int,
) -> None:
    client = chunked(pipelines, model, stages)
    assert greedy_ids(client, prompts[length], N_TOKENS) == expected[length]


@pytest.mark.parametrize("stages", STAGES)
def test_prompts_of_different_lengths_beside_each_other_give_the_same_tokens(
    pipelines: Pipelines, model: Path, prompts: dict[int, list[int]], expected: dict[int, list[int]], stages: int
) -> None:
    client = chunked(pipelines, model, stages)
    # Eight requests on four lanes: half of them wait, and begin beside others that are well under way.
    streams = {n: client.stream(token_ids=prompts[n], max_tokens=N_TOKENS) for n in LENGTHS}
    answers: dict[int, list[int]] = {n: [] for n in LENGTHS}
    open_streams = dict(streams)
    while open_streams:
        for length, stream in list(open_streams.items()):
            chunk = next(stream)
            answers[length] += chunk.token_ids
            if chunk.finish_reason:
                del open_streams[length]
    assert answers == expected


N_CTX = 64


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "alpha beta ", end="loop")


@pytest.fixture(params=[1, 2])
def short(request: pytest.FixtureRequest, pipelines: Pipelines, endless: Parrot) -> Iterator[Client]:
    """A pipeline whose lanes hold N_CTX tokens; all of them must be free again in the end."""
    client = pipelines(endless.path, request.param, ctx_size=N_CTX, lanes=2)
    assert [stage.n_ctx for stage in client.stages] == [N_CTX] * request.param
    yield client
    wait_until_idle(client)


def prompt_of(n_tokens: int) -> list[int]:
    return [FIRST_BYTE_TOKEN + ord("x")] * n_tokens


@pytest.mark.parametrize("n_prompt", [1, 60, 62, 63, 64])
def test_an_answer_ends_exactly_where_the_context_does(short: Client, endless: Parrot, n_prompt: int) -> None:
    # Every token but the last has a cell of its own.
    n_tokens = N_CTX - n_prompt + 1
    recited = (endless.token_ids * N_CTX)[:n_tokens]
    answer = short.generate(token_ids=prompt_of(n_prompt), max_tokens=100)
    assert (answer.token_ids, answer.finish_reason) == (recited, "length")
    chunks = list(short.stream(token_ids=prompt_of(n_prompt), max_tokens=100))
    assert sum((chunk.token_ids for chunk in chunks), ()) == recited
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("n_prompt", [65, 5000])
def test_a_prompt_that_does_not_fit_is_refused_before_any_text(short: Client, n_prompt: int) -> None:
    stream = short.stream(token_ids=prompt_of(n_prompt), max_tokens=5)
    with pytest.raises(RequestError, match=rf"{n_prompt} tokens.* {N_CTX}") as caught:
        next(stream)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError):
        short.generate("x" * n_prompt)
    assert short.generate(token_ids=prompt_of(60), max_tokens=2).finish_reason == "length"


def test_two_lanes_reach_the_end_at_once(short: Client, endless: Parrot) -> None:
    streams = [short.stream(token_ids=prompt_of(n), max_tokens=100) for n in (60, 58)]
    for stream, n_tokens in zip(streams, (5, 7), strict=True):
        for _ in stream:
            pass
        assert stream.result.token_ids == (endless.token_ids * 2)[:n_tokens]
        assert stream.result.finish_reason == "length"


def test_max_tokens_holds_short_of_the_context(short: Client, endless: Parrot) -> None:
    for n_tokens in (1, 2, 3, 11, 12):
        answer = short.generate("x", max_tokens=n_tokens)
        assert answer.token_ids == (endless.token_ids * 2)[:n_tokens]
        assert answer.finish_reason == "length"
    with pytest.raises(RequestError, match="max_tokens"):
        short.generate("x", max_tokens=0)


def test_the_command_line_says_what_did_not_fit(short: Client) -> None:
    refused = run_client("--connect", short.endpoint, "--prompt-file", "-", "--json", stdin=b"x" * 200)
    assert (refused.status, refused.output) == (2, "")
    assert refused.errors.startswith("error: ")
    assert "200 tokens" in refused.errors
    assert refused.errors.count("\n") == 1
