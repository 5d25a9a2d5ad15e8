"""The asyncio client: what the other one does, many at once, on a thread that ends with it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from model_files import FIRST_BYTE_TOKEN, Parrot, parrot, tiny
from pipeline_helpers import FLOAT32, Pipelines, greedy_ids, wait_until_idle

from skippy_zmq import AsyncClient, Client
from skippy_zmq.errors import EndpointError, OptionError, RequestError

pytest_plugins = ("pipeline_fixtures",)

_T = TypeVar("_T")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "alpha beta ", end="loop", context=100_000)


@pytest.fixture
def served(pipelines: Pipelines, endless: Parrot) -> Client:
    """The pipeline's synchronous client."""
    return pipelines(endless.path, 2, ctx_size=65536, lanes=2)


def within(endpoint: str, use: Callable[[AsyncClient], Awaitable[_T]], **options: float) -> _T:
    """What ``use`` gives back, in an event loop of its own; the client's thread must be gone afterwards."""

    async def run() -> _T:
        async with AsyncClient(endpoint, **options) as client:  # type: ignore[arg-type]
            return await use(client)

    before = threading.active_count()
    try:
        return asyncio.run(run(), debug=True)
    finally:
        assert threading.active_count() == before


def test_it_gives_what_the_other_client_gives(served: Client) -> None:
    async def use(client: AsyncClient) -> None:
        assert await client.stages() == served.stages
        assert await client.tokenize("hélène") == served.tokenize("hélène")
        assert await client.detokenize(served.tokenize("hélène")) == "hélène".encode()
        answer, same = await client.generate("x", max_tokens=40), served.generate("x", max_tokens=40)
        assert (answer.text, answer.token_ids, answer.prompt_token_ids, answer.finish_reason, answer.stages) == (
            same.text,
            same.token_ids,
            same.prompt_token_ids,
            same.finish_reason,
            same.stages,
        )
        assert [stage.facts for stage in await client.stats()] == list(served.stages)

    within(served.endpoint, use)


def test_chunks_come_one_by_one_and_end_with_a_result(served: Client) -> None:
    async def use(client: AsyncClient) -> None:
        stream = client.stream("x", max_tokens=11)
        with pytest.raises(OptionError, match="not complete"):
            _ = stream.result
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == stream.result.text == "alpha beta "
        assert [chunk.finish_reason for chunk in chunks] == [""] * 10 + ["length"]

    within(served.endpoint, use)


def test_many_requests_at_once_keep_apart(pipelines: Pipelines, tmp_path: Path) -> None:
    pipeline = pipelines(tiny(tmp_path / "tiny.gguf"), 2, **FLOAT32)
    random = np.random.default_rng(3)
    prompts = [random.integers(FIRST_BYTE_TOKEN, 300, length).tolist() for length in (3, 50, 9, 21, 40, 7)]
    alone = [greedy_ids(pipeline, prompt, 12) for prompt in prompts]

    async def use(client: AsyncClient) -> list[list[int]]:
        answers = await asyncio.gather(*(client.generate(token_ids=p, max_tokens=12) for p in prompts))
        return [list(answer.token_ids) for answer in answers]

    assert within(pipeline.endpoint, use) == alone


def test_cancelling_the_task_cancels_the_request(served: Client) -> None:
    async def use(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("x", max_tokens=60_000))
        async with client.stream("x", max_tokens=60_000) as other:
            await anext(other)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # Both lanes are free, so both of these can run.
        answers = await asyncio.gather(*(client.generate("x", max_tokens=5) for _ in range(2)))
        assert [answer.text for answer in answers] == ["alpha", "alpha"]

    within(served.endpoint, use)
    wait_until_idle(served)


def test_a_stream_can_be_cancelled_and_keeps_its_text(served: Client) -> None:
    async def use(client: AsyncClient) -> None:
        stream = client.stream("x", max_tokens=60_000)
        await anext(stream)
        stream.cancel()
        *_, last = [chunk async for chunk in stream]
        assert last.finish_reason == stream.result.finish_reason == "cancelled"
        assert stream.result.text.startswith("a")

    within(served.endpoint, use)


def test_closing_ends_what_waits(served: Client) -> None:
    async def use(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("x", max_tokens=60_000))
        await client.tokenize("x")
        await client.close()
        with pytest.raises(OptionError, match="closed"):
            await task
        with pytest.raises(OptionError, match="closed"):
            await client.generate("x")

    within(served.endpoint, use)
    wait_until_idle(served)


def test_errors_are_the_same(served: Client) -> None:
    async def use(client: AsyncClient) -> None:
        with pytest.raises(RequestError, match="max_tokens"):
            await client.generate("x", max_tokens=0)
        with pytest.raises(RequestError) as caught:
            await client.generate(token_ids=[100_000_000])
        assert caught.value.code == "invalid_token"
        assert (await client.generate("x", max_tokens=5)).text == "alpha"

    within(served.endpoint, use)


def test_nothing_there_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"

    async def use(client: AsyncClient) -> None:
        with pytest.raises(EndpointError, match=endpoint):
            await client.generate("x")

    within(endpoint, use, timeout=0.2)


def test_an_address_that_cannot_be_right_is_refused_at_once() -> None:
    with pytest.raises(EndpointError):
        AsyncClient("http://somewhere")

    async def use(_client: AsyncClient) -> None:
        raise AssertionError("entered")

    with pytest.raises(EndpointError, match=r"tcp://127\.0\.0\.1:0"):
        within("tcp://127.0.0.1:0", use)


def test_it_is_used_inside_async_with() -> None:
    async def use() -> None:
        with pytest.raises(OptionError, match="async with"):
            await AsyncClient("7700").generate("x")

    asyncio.run(use())
