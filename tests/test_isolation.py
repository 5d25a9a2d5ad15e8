"""A session's tokens and the bits of its logits do not depend on what else runs: eight streams against each alone.

Every round is a random mix of starts, cancels and lanes used again. ``SKIPPY_ISOLATION_ROUNDS=50`` runs as many rounds
per model and setting as the promise in docs/design.md is about; a few are the default.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from pipeline_helpers import Pipelines, wait_until_idle

from skippy_zmq import AsyncClient, Client
from skippy_zmq.sources.demo_models import demo_model

pytest_plugins = ("pipeline_fixtures",)

ROUNDS = int(os.environ.get("SKIPPY_ISOLATION_ROUNDS", "2"))
_STREAMS, _REQUESTS_PER_ROUND = 8, 12
_CONTEXT = 2048
_MOST_TOKENS = 24
# Around the edges of chunks and of attention's splits; the shorter ones are drawn more often.
_LENGTHS = (10, 17, 40, 63, 64, 65, 100, 129, 200, 300, 650, 1500)
_WEIGHTS = (4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 2, 1)


@dataclass(slots=True)
class Answer:
    """Tokens of an answer, and after each the hash of the logits that it, or the end, was chosen by."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    finish_reason: str = ""

    def differs_at(self, whole: Answer) -> int | None:
        """The first place where this is not how ``whole`` begins."""
        for place, (mine, theirs) in enumerate(zip(self.logits, whole.logits, strict=False)):
            if mine != theirs or self.token_ids[place : place + 1] != whole.token_ids[place : place + 1]:
                return place
        return None if len(self.logits) <= len(whole.logits) else len(whole.logits)


@dataclass(frozen=True, slots=True)
class Plan:
    """A request of a mix. ``after``: tokens of anybody before it starts; ``leave``: its own until it is cancelled."""

    prompt: int
    max_tokens: int
    after: int
    leave: int | None


class Crowd:
    """Runs mixes of requests against one pipeline, and each of them alone."""

    def __init__(self, client: Client, prompts: Sequence[Sequence[int]]) -> None:
        self._client = client
        self._prompts = prompts
        self._alone: dict[int, Answer] = {}
        self.most_at_once = 0

    def alone(self, prompt: int) -> Answer:
        """The longest answer to a prompt, with nothing else running."""
        if prompt not in self._alone:
            wait_until_idle(self._client)
            answers = asyncio.run(self._mix([Plan(prompt, _MOST_TOKENS, 0, None)]))
            self._alone[prompt] = answers[0]
        return self._alone[prompt]

    def mixed(self, plans: Sequence[Plan]) -> list[Answer]:
        """The answers to all of them, begun in this order."""
        return asyncio.run(self._mix(plans))

    async def _mix(self, plans: Sequence[Plan]) -> list[Answer]:
        progress = _Progress()
        async with AsyncClient(self._client.endpoint) as client:
            tasks = [asyncio.create_task(self._run(client, plan, progress)) for plan in plans]
            answers = await asyncio.gather(*tasks)
        self.most_at_once = max(self.most_at_once, progress.most_at_once)
        return answers

    async def _run(self, client: AsyncClient, plan: Plan, progress: _Progress) -> Answer:
        await progress.reached(plan.after)
        answer = Answer()
        stream = client.stream(token_ids=self._prompts[plan.prompt], max_tokens=plan.max_tokens, logits=True)
        progress.begin()
        async with stream:
            if plan.leave == 0:
                stream.cancel()  # in the queue, or with its prompt under way
            async for chunk in stream:
                answer.token_ids += chunk.token_ids
                answer.finish_reason = chunk.finish_reason
                if chunk.logits is not None:
                    answer.logits.append(hashlib.blake2b(chunk.logits.tobytes(), digest_size=16).digest())
                if chunk.token_ids:
                    await progress.add()
                if plan.leave is not None and len(answer.token_ids) >= plan.leave > 0:
                    break
        await progress.end()
        return answer


class _Progress:
    """How many tokens have come, and how many streams run."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._tokens = 0
        self._running = 0
        self.most_at_once = 0

    async def reached(self, n_tokens: int) -> None:
        """Wait for so many tokens, or for the moment when nobody is left to bring them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._tokens >= n_tokens or not self._running)

    def begin(self) -> None:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)

    async def add(self) -> None:
        async with self._changed:
            self._tokens += 1
            self._changed.notify_all()

    async def end(self) -> None:
        async with self._changed:
            self._running -= 1
            self._changed.notify_all()


def _plans(choose: random.Random) -> list[Plan]:
    """A mix: the first half at once, the others as tokens come; about a third is cancelled somewhere."""
    plans = []
    for number in range(_REQUESTS_PER_ROUND):
        [prompt] = choose.choices(range(len(_LENGTHS)), _WEIGHTS)
        max_tokens = choose.randint(4, _MOST_TOKENS)
        after = 0 if number < _REQUESTS_PER_ROUND // 2 else choose.randrange(60)
        leave = choose.choice([0, 1, choose.randint(2, max_tokens)]) if choose.random() < 0.33 else None
        plans.append(Plan(prompt, max_tokens, after, leave))
    choose.shuffle(plans)
    return plans


def _prompts(client: Client) -> list[tuple[int, ...]]:
    """Texts of different words, each as long as wanted."""
    choose = random.Random(11)
    words = ("river", "seven", "quietly", "copper", "because", "Monday", "the", "of", "asked", "-", "blue", "12")
    ids = client.tokenize(" ".join(choose.choice(words) for _ in range(2 * max(_LENGTHS))), add_special=False)
    starts = [choose.randrange(len(ids) - max(_LENGTHS)) for _ in _LENGTHS]
    return [ids[start : start + length] for start, length in zip(starts, _LENGTHS, strict=True)]


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    threads: int
    reproducible: bool = False


_SETTINGS = [
    pytest.param(Setting("smollm2", 1), marks=pytest.mark.real_model, id="smollm2-1-thread"),
    pytest.param(Setting("smollm2", 2, reproducible=True), marks=pytest.mark.real_model, id="smollm2-2-threads"),
    pytest.param(Setting("gemma3", 2, reproducible=True), marks=pytest.mark.test_models, id="gemma3-2-threads"),
]


@pytest.fixture(scope="module", params=_SETTINGS)
def crowd(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    setting: Setting = request.param
    pipelines = Pipelines()
    # Given only where it is asked for: the other setting is about the defaults.
    extra = {"reproducible": True} if setting.reproducible else {}
    try:
        model = demo_model(setting.model)
        client = pipelines(model, 2, ctx_size=_CONTEXT, lanes=_STREAMS, threads=setting.threads, **extra)
        yield Crowd(client, _prompts(client))
        wait_until_idle(client)
    finally:
        pipelines.close()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_mix_gives_everybody_what_they_get_alone(crowd: Crowd, number: int) -> None:
    plans = _plans(random.Random(number))
    answers = crowd.mixed(plans)
    for plan, answer in zip(plans, answers, strict=True):
        alone = crowd.alone(plan.prompt)
        assert answer.differs_at(alone) is None, (plan, len(answer.logits))
        assert len(answer.logits) >= len(answer.token_ids)
        if plan.leave is None:
            assert len(answer.token_ids) == min(plan.max_tokens, len(alone.token_ids))
            assert answer.finish_reason in ("length", "stop")
    assert sum(len(answer.logits) for answer in answers) > _REQUESTS_PER_ROUND
    assert crowd.most_at_once >= _STREAMS // 2
