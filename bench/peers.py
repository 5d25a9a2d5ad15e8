"""Starts llama.cpp as a process of its own: in process with some threads, or over its RPC back end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.pinning import pinned

ROOT = Path(__file__).resolve().parents[1]
# The environment whose llama.cpp has the RPC back end; `make bench` makes it.
RPC_PYTHON = Path(os.environ.get("BENCH_RPC_VENV", ROOT / ".venv-rpc")) / "bin" / "python"
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """``seconds`` that the measured part took, and the tokens of every stream, for the check."""

    seconds: float
    tokens: list[list[int]]


class Peer:
    """llama.cpp, asked over pipes; one context at a time, for ``lanes`` sequences of ``ctx_size`` tokens."""

    def __init__(
        self,
        model: Path,
        *,
        threads: int,
        lanes: int,
        ctx_size: int,
        ubatch_size: int,
        python: Path = Path(sys.executable),
        arguments: Sequence[str] = (),
    ) -> None:
        self._process = _start(
            python,
            *("--model", str(model), "--threads", str(threads), "--lanes", str(lanes)),
            *("--ctx-size", str(ctx_size), "--ubatch-size", str(ubatch_size), *arguments),
        )
        self._answer()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Measured:
        """All prompts until the first token of each."""
        return self._ask(run="prefill", prompts=prompts)

    def decode(self, prompts: Sequence[Sequence[int]], *, warm: int, steps: int) -> Measured:
        """``steps`` tokens of every stream, after ``warm`` ones that are not measured; prompts of equal length."""
        return self._ask(run="decode", prompts=prompts, warm=warm, steps=steps)

    def chunk(self, prompt: Sequence[int], rows: int) -> Measured:
        """The last ``rows`` of a prompt, as one batch, the rest of it being there already."""
        return self._ask(run="chunk", prompt=prompt, rows=rows)

    def _ask(self, **asked: Any) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Measured(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait(PATIENCE)}: {self._process.args!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


class RpcPeer(Peer):
    """llama.cpp over its RPC back end: a server of one thread on each of ``cores``, layers in the shares ``split``."""

    def __init__(
        self,
        model: Path,
        *,
        cores: Sequence[int],
        split: Sequence[float],
        lanes: int,
        ctx_size: int,
        ubatch_size: int,
    ) -> None:
        if not RPC_PYTHON.exists():
            raise RuntimeError(f"{RPC_PYTHON} is missing: `make bench` makes it")
        self._servers = ExitStack()
        arguments = ["--split", ",".join(map(str, split))]
        try:
            for core in cores:
                endpoint = f"127.0.0.1:{_free_port()}"
                with pinned({core}):
                    server = _start(RPC_PYTHON, "--serve", endpoint, "--threads", "1")
                self._servers.callback(_end, server)
                _wait_until_listening(server, endpoint)
                arguments += ["--rpc", endpoint]
            super().__init__(
                model,
                threads=1,
                lanes=lanes,
                ctx_size=ctx_size,
                ubatch_size=ubatch_size,
                python=RPC_PYTHON,
                arguments=arguments,
            )
        except BaseException:
            self._servers.close()
            raise

    def close(self) -> None:
        super().close()
        self._servers.close()


def _start(python: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(python), "-m", "bench.peer_program", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PATIENCE)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_listening(server: subprocess.Popen[str], endpoint: str) -> None:
    """The server says so on standard output, which it leaves buffered: its port is the only sign."""
    host, port = endpoint.split(":")
    while True:
        try:
            socket.create_connection((host, int(port)), PATIENCE).close()
            return
        except ConnectionRefusedError:
            if server.poll() is not None:
                raise RuntimeError(f"the RPC server at {endpoint} ended with status {server.returncode}") from None
            _pause(server)


def _pause(server: subprocess.Popen[str]) -> None:
    """Wait a little, or until the server has ended."""
    try:
        server.wait(0.05)
    except subprocess.TimeoutExpired:
        return
