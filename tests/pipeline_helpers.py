"""Whole pipelines of real processes for tests, and what llama.cpp alone answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import llama_cpp

from skippy_zmq import Client, LocalPipeline

# Small contexts start fast, and the two cores are shared by every stage.
SMALL = {"ctx_size": 512, "lanes": 4, "threads": 1}
# How long to wait before a test is given up; nothing is ever asserted about time.
PATIENCE = 30.0
# As transformers computes: no rounding but that of float32.
FLOAT32 = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}


class Pipelines:
    """Starts each pipeline once, with a client, and stops them all at the end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._clients: dict[object, Client] = {}

    def __call__(self, model: Path, stages: int = 1, *, split: Sequence[int] | None = None, **options: Any) -> Client:
        """A client of the pipeline of ``model`` with these stages and options."""
        key = (model, stages, tuple(split or ()), tuple(sorted(options.items())))
        if key not in self._clients:
            values = {**SMALL, **options}
            pipeline = self._stack.enter_context(LocalPipeline(model, stages=stages, split=split, **values))
            self._clients[key] = self._stack.enter_context(pipeline.client())
        return self._clients[key]

    def close(self) -> None:
        self._clients.clear()
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    status: int
    output: str
    errors: str

    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        assert self.output.count("\n") == 1, self.output
        value: dict[str, Any] = json.loads(self.output)
        return value


def run_client(*arguments: object, stdin: bytes | None = None) -> Ended:
    """``python -m skippy_zmq.client`` with ``arguments``."""
    command = [sys.executable, "-m", "skippy_zmq.client", *map(str, arguments)]
    done = subprocess.run(command, input=stdin or b"", capture_output=True, check=False, timeout=120)
    return Ended(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


def greedy_reference(
    model: Path,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    n_ctx: int = 512,
    n_batch: int = 512,
    flash_attn: bool = True,
    float32: bool = False,
    n_threads: int = 1,
) -> list[list[int]]:
    """What llama.cpp answers to each prompt with the likeliest tokens, the whole model in this process."""
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if float32 else {}
    llama = llama_cpp.Llama(
        str(model),
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        flash_attn=flash_attn,
        swa_full=True,
        verbose=False,
        **cache,
    )
    with closing(llama):
        return [_greedy(llama, prompt, n_tokens) for prompt in prompts]


def _greedy(llama: llama_cpp.Llama, prompt: Sequence[int], n_tokens: int) -> list[int]:
    llama.reset()
    llama._ctx.kv_cache_clear()
    tokens: list[int] = []
    for token in llama.generate(list(prompt), temp=0.0):
        if llama_cpp.llama_vocab_is_eog(llama._model.vocab, token):
            break
        tokens.append(token)
        if len(tokens) == n_tokens:
            break
    return tokens


def greedy_ids(client: Client, prompt: Sequence[int], n_tokens: int) -> list[int]:
    return list(client.generate(token_ids=prompt, max_tokens=n_tokens).token_ids)


def wait_until_idle(client: Client) -> None:
    """Until stage 0 has no request and no lane in use; it hears of the end of an answer after the client may."""
    deadline = time.monotonic() + PATIENCE
    names = ("now.requests_running", "now.requests_queued", "now.lanes_busy")
    while any(busy := [client.stats()[0].counters[name] for name in names]):
        assert time.monotonic() < deadline, f"still busy: {dict(zip(names, busy, strict=True))}"


def child_processes() -> set[int]:
    """Processes that this one has started and that are still there."""
    return children_of("self")


def children_of(pid: int | str) -> set[int]:
    """Processes that another one has started and that are still there."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found.update(int(child) for child in (task / "children").read_text().split())
    return found


def read_exactly(stream: IO[bytes], n_bytes: int) -> bytes:
    """The next bytes of a program's pipe, and none after them: those are left for ``communicate()``."""
    read = b""
    while len(read) < n_bytes:
        piece = os.read(stream.fileno(), n_bytes - len(read))
        assert piece, f"ended after {read!r}"
        read += piece
    return read


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would hold one more open
