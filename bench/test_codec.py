"""Messages to frames and back, every field checked, beside bare msgpack of the same content, which checks nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgpack
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.messages import NO_TIMES, Activations, SessionRows, TensorDescriptor

N_EMBD = 576
REPEATS = 200


def _activations(lanes: int, rows_each: int, phase: str) -> tuple[Activations, list[bytes]]:
    n_rows = lanes * rows_each
    tensor = TensorDescriptor("l_out-18", 0, 0, "f32", (N_EMBD, n_rows), N_EMBD * n_rows * 4)
    rows = tuple(SessionRows(f"session-{lane}", lane, 1000, rows_each, True) for lane in range(lanes))
    tokens = np.arange(n_rows, dtype=np.int32).tobytes()
    message = Activations(12345, "stage-0-19-0123456789abcdef", 0, 19, phase, rows, tokens, (tensor,), (), NO_TIMES)
    return message, [bytes(tensor.nbytes)]


CASES = {"decode step of 8 rows": (8, 1, "decode"), "prefill chunk of 512 rows": (1, 512, "prefill")}


def _repeated(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(REPEATS):
        call()
    return (time.perf_counter() - started) / REPEATS


@pytest.mark.parametrize("case", CASES)
def test_codec(case: str, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    message, payloads = _activations(*CASES[case])
    frames = encode(message, payloads)
    content = (msgpack.unpackb(frames[1], use_list=False), *payloads)

    def through_codec() -> None:
        decode(encode(message, payloads))

    def through_msgpack() -> None:
        msgpack.unpackb(msgpack.packb(content), use_list=False)

    received, views = decode(frames)
    assert received == message
    assert [bytes(view) for view in views] == payloads
    seconds = alternate(
        benchmark, 15, {"ours": partial(_repeated, through_codec), "msgpack": partial(_repeated, through_msgpack)}
    )
    comparison.figure(f"codec, {case}: there and back", seconds["ours"] * 1e6, "us")
    comparison.figure(f"codec, {case}: bare msgpack", seconds["msgpack"] * 1e6, "us")
