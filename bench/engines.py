"""The engines of one comparison, all of the same shape: ours, llama.cpp in process, and llama.cpp over RPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers import Measured, Peer, RpcPeer
from bench.pinning import CORES
from bench.pipelines import Pipeline
from bench.splits import DECODE_SPLIT, PREFILL_SPLIT
from skippy_zmq.sources.models import open_model

# llama.cpp computes as many rows at once as our largest chunk. RPC overlaps the parts of a prompt only where there are
# several, and in process 128 rows are no slower than 512.
UBATCH = 128

Engine = Pipeline | Peer


@dataclass(frozen=True, slots=True)
class Engines:
    """``two_threads`` and ``one_thread``: llama.cpp in process."""

    ours: Pipeline
    two_threads: Peer
    one_thread: Peer
    rpc: RpcPeer

    def named(self, *names: str) -> dict[str, Engine]:
        return {name: getattr(self, name) for name in names}


@contextmanager
def engines(model: Path, *, lanes: int, ctx_size: int, decode: bool) -> Iterator[Engines]:
    """All of them, started and idle; ``decode``: split for decoding, else for prefill."""
    boundary = DECODE_SPLIT if decode else PREFILL_SPLIT
    shares = [boundary, open_model(model).n_layers - boundary]
    with ExitStack() as stack:
        yield Engines(
            ours=stack.enter_context(Pipeline(model, [boundary], *stage_options(lanes, ctx_size))),
            two_threads=stack.enter_context(
                Peer(model, threads=2, lanes=lanes, ctx_size=ctx_size, ubatch_size=UBATCH),
            ),
            one_thread=stack.enter_context(
                Peer(model, threads=1, lanes=lanes, ctx_size=ctx_size, ubatch_size=UBATCH),
            ),
            rpc=stack.enter_context(
                RpcPeer(model, cores=CORES[:2], split=shares, lanes=lanes, ctx_size=ctx_size, ubatch_size=UBATCH)
            ),
        )


def stage_options(lanes: int, ctx_size: int) -> tuple[str, ...]:
    return ("--lanes", str(lanes), "--ctx-size", str(ctx_size), "--ubatch-size", str(UBATCH))


def checked(run: Callable[[], Measured], expected: Sequence[Sequence[int]] | None) -> Callable[[], float]:
    """``run`` as a call that returns its seconds, and fails where the tokens are not the ``expected`` ones."""

    def call() -> float:
        measured = run()
        if expected is not None:
            assert measured.tokens == expected
        return measured.seconds

    return call
