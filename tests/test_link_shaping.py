"""The arithmetic of a link: what enters it comes out in order, not before its time, and the same for the same seed."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.errors import OptionError
from skippy_zmq.testing.link_proxy import LinkProxy
from skippy_zmq.testing.shaping import LinkShape, Wire

_MEGABYTE = 1 << 20
_NOISE = random.Random(3).randbytes(_MEGABYTE)

_SECONDS = st.floats(0, 5)
_BANDWIDTHS = st.none() | st.floats(1, 1e10)


@given(
    st.builds(LinkShape, _SECONDS, _BANDWIDTHS, _SECONDS),
    st.lists(st.tuples(_SECONDS, st.integers(0, 1 << 20)), min_size=1, max_size=30),
    st.integers(),
)
def test_arrivals(shape: LinkShape, entries: list[tuple[float, int]], seed: int) -> None:
    """Nothing arrives before its delay and its turn on the line, nothing overtakes, and a seed repeats it."""
    wire, again = Wire(shape, str(seed)), Wire(shape, str(seed))
    now, last, sent_at = 0.0, 0.0, 0.0
    for gap, n_bytes in entries:
        now += gap
        sent_at = max(sent_at, now)
        if shape.bandwidth_bytes_per_s is not None:
            sent_at += n_bytes / shape.bandwidth_bytes_per_s
        arrival = wire.arrival(now, n_bytes)
        assert arrival == again.arrival(now, n_bytes)
        assert last <= arrival
        assert sent_at + shape.delay_s <= arrival * (1 + 1e-12)
        assert arrival <= max(last, sent_at + shape.delay_s + shape.jitter_s) * (1 + 1e-12)
        last = arrival


@given(_BANDWIDTHS, st.integers(0, _MEGABYTE))
def test_pieces_are_the_bytes(bandwidth: float | None, size: int) -> None:
    shape = LinkShape(bandwidth_bytes_per_s=bandwidth)
    pieces = list(Wire(shape, "").pieces(_NOISE[:size]))
    assert b"".join(pieces) == _NOISE[:size]
    assert all(len(piece) <= shape.piece_bytes for piece in pieces)


@given(_SECONDS, st.floats(1, 1e12), _SECONDS)
def test_a_link_holds_what_its_length_holds(delay: float, bandwidth: float, jitter: float) -> None:
    assert LinkShape(delay, bandwidth, jitter).in_flight_bytes >= bandwidth * (delay + jitter)


@pytest.mark.parametrize(
    "values",
    [
        {"delay_s": -1.0},
        {"delay_s": math.nan},
        {"delay_s": math.inf},
        {"jitter_s": -0.001},
        {"bandwidth_bytes_per_s": 0},
        {"bandwidth_bytes_per_s": -5},
        {"bandwidth_bytes_per_s": math.inf},
    ],
    ids=str,
)
def test_links_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"link {next(iter(values))}"):
        LinkProxy("tcp://127.0.0.1:0", "tcp://127.0.0.1:1", **values)
