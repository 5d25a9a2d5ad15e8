"""Eight streams over a pipeline whose stages are killed at chosen moments, and what must be left of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_helpers import PATIENCE, child_processes

from skippy_zmq import AsyncClient, LocalPipeline
from skippy_zmq.errors import SkippyError
from skippy_zmq.wire.messages import SamplingParams

N_STAGES, N_STREAMS = 3, 8
# One is likeliest; the others are drawn with the same seed for every request that has one.
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=7),
    SamplingParams(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.1, seed=1 << 31),
)
_AGAIN_SECONDS = 0.1  # from an answer that the pipeline is not ready to the next attempt
# Held by a stage for requests; all zero once these are over.
_HELD = (
    "now.sessions",
    "now.queue",
    "now.kv_cells",
)
_HELD_AT_STAGE_0 = (
    "now.lanes_busy",
    "now.requests_running",
    "now.requests_queued",
    "now.batches_in_flight",
    "now.bytes_in_flight",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. ``prompt``, ``sampling``: numbers of a prompt and of one of SAMPLINGS."""

    prompt: int
    sampling: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Which stage dies, and how many tokens of anybody have come by then."""

    stage: int
    after: int


@dataclass(frozen=True, slots=True)
class Round:
    asks: tuple[Ask, ...]
    kills: tuple[Kill, ...]

    @property
    def loses_stage_0(self) -> bool:
        return any(kill.stage == 0 for kill in self.kills)


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: SkippyError | None = None


def round_of(choose: random.Random, n_prompts: int, most_tokens: int) -> Round:
    """More requests than lanes, and one death; in every fourth round two of different stages, perhaps at once."""
    asks = tuple(
        Ask(choose.randrange(n_prompts), choose.randrange(len(SAMPLINGS)), choose.randint(1, most_tokens))
        for _ in range(N_STREAMS + choose.randrange(4))
    )
    n_tokens = sum(ask.max_tokens for ask in asks)
    stages = choose.sample(range(N_STAGES), 2 if choose.random() < 0.25 else 1)
    after = sorted(choose.randrange(n_tokens * 3 // 4) for _ in stages)
    if choose.random() < 0.3:
        after = [0] * len(stages)  # while prompts run
    return Round(asks, tuple(Kill(stage, at) for stage, at in zip(stages, after, strict=True)))


class Streams:
    """Runs rounds over one pipeline: half of the requests by a client that stays, half by one that is new."""

    def __init__(self, pipeline: LocalPipeline, prompts: Sequence[Sequence[int]], timeout: float) -> None:
        """``timeout``: seconds for each request, which none may need."""
        self._pipeline = pipeline
        self._prompts = prompts
        self._timeout = timeout
        self._runner = asyncio.Runner()
        self._client = AsyncClient(pipeline.endpoint, timeout=timeout)
        self._runner.run(self._client.__aenter__())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def alone(self, prompt: int, sampling: int, max_tokens: int) -> Answer:
        """The answer to a prompt with nothing else running, and nothing dying."""
        return self._runner.run(self._run(self._client, Ask(prompt, sampling, max_tokens), _Tokens(1)))

    def run(self, plan: Round) -> list[Answer]:
        """The answers to all requests of a round, in order."""
        return self._runner.run(self._round(plan))

    def counters(self) -> list[Mapping[str, int]]:
        """What each stage counts now."""
        stats = self._runner.run(self._client.stats())
        assert stats.complete, stats
        return [stage.counters for stage in stats]

    def at_rest(self, *, pages: bool) -> None:
        """Wait until no stage holds anything for a request."""
        deadline = time.monotonic() + PATIENCE
        while True:
            counters = self.counters()
            held = [
                {name: stage[name] for name in _names(index, pages=pages) if stage[name]}
                for index, stage in enumerate(counters)
            ]
            if not any(held):
                return
            assert time.monotonic() < deadline, held

    def restarted(self, times: int) -> None:
        """Wait until stages have been started again so often, not more, and the pipeline is whole."""
        deadline = time.monotonic() + PATIENCE
        while self._pipeline.restarts < times:
            assert time.monotonic() < deadline, (self._pipeline.restarts, times)
            self._pipeline.failure()  # which waits for deaths that are not noticed yet
        self._pipeline.wait_until_ready(PATIENCE)
        assert self._pipeline.restarts == times

    async def _round(self, plan: Round) -> list[Answer]:
        tokens = _Tokens(len(plan.asks))
        async with AsyncClient(self._pipeline.endpoint, timeout=self._timeout) as newcomer:
            clients = (self._client, newcomer)
            tasks = [
                asyncio.create_task(self._run(clients[index % 2], ask, tokens)) for index, ask in enumerate(plan.asks)
            ]
            for kill in plan.kills:
                await tokens.reached(kill.after)
                os.kill(self._pipeline.process_ids[kill.stage], signal.SIGKILL)
            return await asyncio.gather(*tasks)

    async def _run(self, client: AsyncClient, ask: Ask, tokens: _Tokens) -> Answer:
        answer = await self._ask(client, ask, tokens)
        while answer.error is not None and answer.error.code == "not_ready":  # nothing has begun: it is asked again
            await asyncio.sleep(_AGAIN_SECONDS)
            answer = await self._ask(client, ask, tokens)
        await tokens.end()
        return answer

    async def _ask(self, client: AsyncClient, ask: Ask, tokens: _Tokens) -> Answer:
        answer = Answer()
        stream = client.stream(
            token_ids=self._prompts[ask.prompt],
            max_tokens=ask.max_tokens,
            sampling=SAMPLINGS[ask.sampling],
            timeout=self._timeout,
        )
        try:
            async with stream:
                async for chunk in stream:
                    answer.token_ids += chunk.token_ids
                    answer.finish_reason = chunk.finish_reason
                    await tokens.add(len(chunk.token_ids))
        except SkippyError as error:
            answer.error = error
        return answer


def _names(index: int, *, pages: bool) -> list[str]:
    names = [*_HELD, *(() if index else _HELD_AT_STAGE_0)]
    return names if pages else [name for name in names if "kv_pinned" not in name]


class _Tokens:
    """How many tokens have come, and how many streams run."""

    def __init__(self, n_streams: int) -> None:
        self._changed = asyncio.Condition()
        self._n = 0
        self._running = n_streams

    async def reached(self, n_tokens: int) -> None:
        """Wait for so many tokens, or for the moment when nobody is left to bring them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._n >= n_tokens or not self._running)

    async def add(self, n_tokens: int) -> None:
        async with self._changed:
            self._n += n_tokens
            self._changed.notify_all()

    async def end(self) -> None:
        async with self._changed:
            self._running -= 1
            self._changed.notify_all()


def _opened(pid: int) -> list[str]:
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(str(entry.readlink()))
    return names


@dataclass(frozen=True, slots=True)
class Footing:
    """What every stage has open and runs, and the processes that this one has."""

    files: tuple[int, ...]  # sockets and pipes included
    events: tuple[int, ...]  # anonymous descriptors of libzmq's threads and sockets
    threads: tuple[int, ...]
    processes: int

    @classmethod
    def of(cls, pipeline: LocalPipeline) -> Footing:
        pids = pipeline.process_ids
        opened = [_opened(pid) for pid in pids]
        events = tuple(sum(name.startswith("anon_inode:") for name in names) for names in opened)
        files = tuple(len(names) - n for names, n in zip(opened, events, strict=True))
        threads = tuple(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)  # noqa: PTH208
        return cls(files, events, threads, len(child_processes()))

    def fits(self, before: Footing) -> bool:
        """Whether nothing has come to what was there ``before``.

        A stage starts pyzmq's collector, a thread with a context of its own, with the first large message it sends:
        one that is new need not have done so.
        """
        return (
            (self.files, self.processes) == (before.files, before.processes)
            and all(now <= then for now, then in zip(self.events, before.events, strict=True))
            and all(now <= then for now, then in zip(self.threads, before.threads, strict=True))
        )


def settled(pipeline: LocalPipeline, before: Footing) -> Footing:
    """Look until it fits ``before``, as the ends of connections arrive when they do; what was seen last."""
    deadline = time.monotonic() + PATIENCE
    while not (seen := Footing.of(pipeline)).fits(before) and time.monotonic() < deadline:
        os.sched_yield()
    return seen
