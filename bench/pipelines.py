"""Our pipeline for a benchmark: stages that are pinned to a core each, asked through the client of the library."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from stage_processes import PATIENCE, StageProcess, stage_environment

from bench.peers import Measured
from bench.pinning import CORES, pinned
from skippy_zmq import Client
from skippy_zmq.client import StageStats, Stream
from skippy_zmq.sources.models import open_model
from skippy_zmq.topology import split_at
from skippy_zmq.wire.messages import SamplingParams

GREEDY = SamplingParams(ignore_eos=True)


class Pipeline:
    """``split``: layer numbers to cut at. ``pin``: a core for each stage; else all cores are everybody's.

    ``options``: of the stage program, the same for every stage; unless they name ``--kv-cache-bytes`` no prompt is
    remembered, as a benchmark asks for the same ones again. ``delay_s``: one way, of every link of the ring, through
    the proxy of ``skippy_zmq.testing``; None: without a proxy. Clients reach all stages without a delay.
    """

    def __init__(
        self,
        model: Path,
        split: Sequence[int],
        *options: str,
        threads: int = 1,
        pin: bool = True,
        delay_s: float | None = None,
    ) -> None:
        self._stack = ExitStack()
        self.stages: list[StageProcess] = []
        self.compute_s = 0.0
        try:
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            layers = split_at(split, open_model(model).n_layers)
            self.endpoints = [f"ipc://{directory}/{index}" for index in range(len(layers))]
            reached_at = self.endpoints if delay_s is None else self._start_proxy(delay_s)
            for index, layer_range in enumerate(layers):
                arguments = ["--model", str(model), "--layers", str(layer_range), "--bind", self.endpoints[index]]
                if index + 1 < len(layers):
                    arguments += ["--next", reached_at[index + 1]]
                elif index:
                    arguments += ["--first", reached_at[0]]
                arguments += ["--threads", str(threads), "--no-progress", "--log-level", "warning"]
                arguments += ["--kv-cache-bytes", "0", *options]
                with pinned({CORES[index % len(CORES)]} if pin else None):
                    stage = StageProcess(*arguments)
                self.stages.append(self._stack.enter_context(stage))
            self.stages[0].ready()
            self.client = self._stack.enter_context(Client(self.endpoints[0]))
        except BaseException:
            self.close()
            raise

    def _start_proxy(self, delay_s: float) -> list[str]:
        """A delayed way to every stage; returns where they begin.

        By TCP, as a link of that length is; and the proxy then knows when bytes came in, however late it looks.
        """
        links = [part for endpoint in self.endpoints for part in ("--link", "tcp://127.0.0.1:0", endpoint)]
        proxy = subprocess.Popen(
            [sys.executable, "-m", "skippy_zmq.testing.link_proxy", "--delay-ms", f"{delay_s * 1000:g}", *links],
            stdout=subprocess.PIPE,
            env=stage_environment(),
        )
        self._stack.callback(_end, proxy)
        assert proxy.stdout is not None
        told = [proxy.stdout.readline().split() for _ in self.endpoints]
        assert all(line[:1] == [b"LISTENING"] for line in told)
        return [line[1].decode() for line in told]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Measured:
        """All prompts at once until the first token of each has come; one token each."""
        started = time.perf_counter()
        streams = [self.stream(prompt, 1) for prompt in prompts]
        tokens = [_next_tokens(stream) for stream in streams]
        seconds = time.perf_counter() - started
        _finish(streams, tokens)
        return Measured(seconds, tokens)

    def decode(
        self, prompts: Sequence[Sequence[int]], *, warm: int, steps: int, count_compute: bool = False
    ) -> Measured:
        """``steps`` tokens of every stream, all of them decoding, after ``warm`` ones that are not measured.

        A few more are asked for, so that nobody ends within the measured part. ``count_compute``: set ``compute_s``,
        what all stages together computed per decode step, by their own counters.
        """
        after = max(8, warm)
        streams = [self.stream(prompt, 1 + warm + steps + after) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in streams]
        _until(streams, tokens, 1 + warm // 2)
        at_start = self.client.stats() if count_compute else ()
        _until(streams, tokens, 1 + warm)  # what came while the stages were asked is read here
        begun = time.perf_counter()
        before = sum(map(len, tokens))
        _until(streams, tokens, 1 + warm + steps)
        seconds = time.perf_counter() - begun
        measured = sum(map(len, tokens)) - before
        if count_compute:
            self.compute_s = _compute_per_batch(at_start, self.client.stats())
        _finish(streams, tokens)
        return Measured(seconds * len(streams) * steps / measured, [row[: 1 + warm + steps] for row in tokens])

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        """The likeliest tokens, the end of a text apart."""
        return self.client.stream(token_ids=prompt, max_tokens=max_tokens, sampling=GREEDY)

    def client_again(self) -> Client:
        """Another client, to be closed by the caller."""
        return Client(self.endpoints[0])

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def _compute_per_batch(before: Iterable[StageStats], after: Iterable[StageStats]) -> float:
    """Seconds in the model, all stages together."""
    spent = [new.since(old).compute_us_per_batch for old, new in zip(before, after, strict=True)]
    assert None not in spent, "a stage has run nothing"
    return sum(filter(None, spent)) / 1e6


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(PATIENCE)
    assert process.stdout is not None
    process.stdout.close()


def _next_tokens(stream: Stream) -> list[int]:
    return list(next(stream).token_ids)


def _until(streams: Sequence[Stream], tokens: Sequence[list[int]], count: int) -> None:
    """Read until every stream has ``count`` tokens."""
    waiting = [pair for pair in zip(streams, tokens, strict=True) if len(pair[1]) < count]
    while waiting:
        for stream, row in waiting:
            row += _next_tokens(stream)
        waiting = [pair for pair in waiting if len(pair[1]) < count]


def _finish(streams: Sequence[Stream], tokens: Sequence[list[int]]) -> None:
    for stream, row in zip(streams, tokens, strict=True):
        for chunk in stream:
            row += chunk.token_ids
