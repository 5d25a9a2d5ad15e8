"""Seeds (X05): none differs, the same repeats, whatever the lane, the neighbours and the number of stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import tiny
from pipeline_helpers import FLOAT32, Pipelines, run_client

from skippy_zmq import Client, SamplingParams
from skippy_zmq.errors import RequestError

pytest_plugins = ("pipeline_fixtures",)

PROMPT = "the thing"
N_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(params=[1, 2, 4])
def client(request: pytest.FixtureRequest, pipelines: Pipelines, model: Path) -> Client:
    return pipelines(model, request.param, **FLOAT32)


def hot(seed: int | None) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True, seed=seed)


def sampled(client: Client, seed: int | None) -> tuple[int, ...]:
    return client.generate(PROMPT, max_tokens=N_TOKENS, sampling=hot(seed)).token_ids


@pytest.fixture(scope="module")
def with_seed_42(pipelines: Pipelines, model: Path) -> tuple[int, ...]:
    return sampled(pipelines(model, 1, **FLOAT32), 42)


def test_without_a_seed_every_answer_differs(client: Client) -> None:
    assert len({sampled(client, None) for _ in range(5)}) == 5


def test_the_same_seed_repeats_over_any_number_of_stages(client: Client, with_seed_42: tuple[int, ...]) -> None:
    assert {sampled(client, 42) for _ in range(5)} == {with_seed_42}
    assert sampled(client, 43) != with_seed_42


def test_a_seed_repeats_beside_others_that_sample(client: Client, with_seed_42: tuple[int, ...]) -> None:
    others = [client.stream(PROMPT, max_tokens=N_TOKENS, sampling=hot(seed)) for seed in (None, 42, 7)]
    assert sampled(client, 42) == with_seed_42
    answers = []
    for stream in others:
        for _ in stream:
            pass
        answers.append(stream.result.token_ids)
    assert answers[1] == with_seed_42
    assert len(set(answers)) == 3


def test_a_seed_repeats_on_a_lane_whose_request_was_cancelled(client: Client, with_seed_42: tuple[int, ...]) -> None:
    with client.stream(PROMPT, max_tokens=300, sampling=hot(None)) as stream:
        next(stream)
        stream.cancel()
        assert [chunk.finish_reason for chunk in stream][-1] == "cancelled"
    assert sampled(client, 42) == with_seed_42


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_the_ends_of_the_range_are_seeds(client: Client, seed: int) -> None:
    assert sampled(client, seed) == sampled(client, seed)


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 2**32, 2**64])
def test_a_seed_out_of_range_is_refused(client: Client, seed: int) -> None:
    with pytest.raises(RequestError, match="seed"):
        sampled(client, seed)


def test_greedy_answers_do_not_depend_on_a_seed(client: Client) -> None:
    answers = {
        client.generate(PROMPT, max_tokens=N_TOKENS, sampling=SamplingParams(seed=seed)).token_ids
        for seed in (None, 1, 2)
    }
    assert len(answers) == 1


def test_the_command_line_passes_seed_and_sampling_on(client: Client, with_seed_42: tuple[int, ...]) -> None:
    flags = ["--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--ignore-eos", "--seed"]
    asked = ("--connect", client.endpoint, "--prompt", PROMPT, "--max-tokens", N_TOKENS, "--json", *flags)
    assert tuple(run_client(*asked, 42).json()["token_ids"]) == with_seed_42
    refused = run_client(*asked, 2**32)
    assert (refused.status, refused.output) == (2, "")
    assert "seed" in refused.errors
