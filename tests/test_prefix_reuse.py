"""Prompts that begin alike, over real stages: what is reused is said, was not computed, and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from model_files import tiny
from stage_processes import StagePipeline

from skippy_zmq.client import Client, Generation
from skippy_zmq.wire.messages import SamplingParams

pytest_plugins = ("transport_fixtures", "stage_fixtures")

PAGE = 64
OPTIONS = ("--ctx-size", "512", "--lanes", "2")
_choose = random.Random(7)
TOKENS = [_choose.randrange(10, 250) for _ in range(400)]
OTHERS = [_choose.randrange(10, 250) for _ in range(400)]
PENALIZED = SamplingParams(ignore_eos=True, repeat_penalty=1.3, repeat_last_n=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", quant="q4_1")


def _ask(client: Client, prompt: list[int], sampling: SamplingParams = PENALIZED) -> Generation:
    return client.generate(token_ids=prompt, max_tokens=5, sampling=sampling, logits=True)


def _rows(client: Client) -> list[int]:
    return [stage.counters.get("prefill_rows", 0) for stage in client.stats().stages]


def _equal(one: Generation, other: Generation) -> bool:
    assert one.logits is not None
    assert other.logits is not None
    return one.token_ids == other.token_ids and np.array_equal(one.logits.view("u4"), other.logits.view("u4"))


PROMPTS = {
    "the same again": (TOKENS[:200], 192),
    "the same again, whole pages": (TOKENS[:192], 128),
    "its beginning": (TOKENS[:100], 64),
    "its beginning and others": ([*TOKENS[:150], *OTHERS[:100]], 128),
    "longer": (TOKENS[:300], 192),
    "less than a page": (TOKENS[:40], 0),
    "one that only ends alike": ([*OTHERS[:1], *TOKENS[1:200]], 0),
}


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_what_is_known_is_not_computed_and_gives_the_same_bits(
    flash_attn: str, make_pipeline: Callable[..., StagePipeline], model: Path
) -> None:
    """The history of penalties goes on over what was restored, too."""
    options = (*OPTIONS, "--flash-attn", flash_attn)
    cold = make_pipeline(model, "0:2 2:4", *options, "--kv-cache-bytes", "0").start_all()
    warm = make_pipeline(model, "0:1 1:4", *options).start_all()
    with Client(cold.endpoint) as without, Client(warm.endpoint) as client:
        assert _ask(client, TOKENS[:200]).reused_tokens == 0
        for name, (prompt, known) in PROMPTS.items():
            before = _rows(client)
            answer = _ask(client, prompt)
            assert answer.reused_tokens == known, name
            assert [new - old for old, new in zip(before, _rows(client), strict=True)] == [len(prompt) - known] * 2
            expected = _ask(without, prompt)
            assert expected.reused_tokens == 0
            assert _equal(answer, expected), name


def test_all_stages_or_none(make_pipeline: Callable[..., StagePipeline], model: Path) -> None:
    """A stage that keeps nothing, or has lost what it kept."""
    pipeline = make_pipeline(model, "0:2 2:4", *OPTIONS)
    first, last = pipeline.start(0), pipeline.start(1, "--kv-cache-bytes", "0")
    first.ready()
    with Client(pipeline.endpoint) as client:
        answers = [_ask(client, TOKENS[:200]) for _ in range(2)]
        assert [answer.reused_tokens for answer in answers] == [0, 0]
    last.kill()
    pipeline.start(1)
    pipeline[1].ready()
    with Client(pipeline.endpoint) as client:
        answers += [_ask(client, TOKENS[:200]) for _ in range(2)]
    assert [answer.reused_tokens for answer in answers[2:]] == [0, 192]
    assert all(_equal(answer, answers[0]) for answer in answers)


def test_pages_on_disk_outlive_the_stages(
    make_pipeline: Callable[..., StagePipeline], model: Path, tmp_path: Path
) -> None:
    """Damaged files are not used."""
    options = (*OPTIONS, "--kv-cache-dir", str(tmp_path / "pages"))
    answers = []
    for round_number in range(3):
        pipeline = make_pipeline(model, "0:2 2:4", *options).start_all()
        with Client(pipeline.endpoint) as client:
            answers.append(_ask(client, TOKENS[:200]))
        assert [pipeline[index].stop() for index in (0, 1)] == [0, 0]
        if round_number == 1:
            files = sorted((tmp_path / "pages").rglob("*.safetensors"))
            assert len(files) == 6
            for file in files:
                data = bytearray(file.read_bytes())
                data[-5] ^= 1
                file.write_bytes(data)
    assert [answer.reused_tokens for answer in answers] == [0, 192, 0]
    assert all(_equal(answer, answers[0]) for answer in answers)


def test_pages_of_other_kernels_are_not_used(
    make_pipeline: Callable[..., StagePipeline], model: Path, tmp_path: Path
) -> None:
    """Weights in another layout are computed with by others, whose bits may differ."""
    options = (*OPTIONS, "--kv-cache-dir", str(tmp_path / "pages"))
    reused = []
    for others in ((), ("--no-repack",), (), ("--no-repack",)):
        pipeline = make_pipeline(model, "0:2 2:4", *options, *others).start_all()
        with Client(pipeline.endpoint) as client:
            reused.append(_ask(client, TOKENS[:200]).reused_tokens)
        assert [pipeline[index].stop() for index in (0, 1)] == [0, 0]
    assert reused == [0, 0, 192, 192]


def test_the_longest_unused_make_room(make_pipeline: Callable[..., StagePipeline], model: Path) -> None:
    pipeline = make_pipeline(model, "0:2 2:4", *OPTIONS).start_all()
    with Client(pipeline.endpoint) as client:
        _ask(client, TOKENS[:200])
        page_bytes = client.stats().stages[0].counters["now.kv_page_bytes"] // 3
    small = make_pipeline(model, "0:2 2:4", *OPTIONS, "--kv-cache-bytes", str(4 * page_bytes)).start_all()
    with Client(small.endpoint) as client:
        for prompt, known in ((TOKENS, 0), (OTHERS, 0), (OTHERS, 128), (TOKENS, 128), (OTHERS, 128)):
            assert _ask(client, prompt[:130]).reused_tokens == known
        assert _ask(client, [*TOKENS[130:], *OTHERS[200:]][:200]).reused_tokens == 0
        counters = client.stats().stages[0].counters
        assert counters["kv_evictions"] >= 2
        assert counters["now.kv_page_bytes"] <= 4 * page_bytes
        assert _ask(client, OTHERS[:130]).reused_tokens <= 128
