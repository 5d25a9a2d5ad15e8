"""When bytes that enter a link come out of it: delay, bandwidth and jitter as arithmetic. Pure; the clock is given."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from skippy_zmq.errors import OptionError

# What may wait in a link beyond the bytes that its length holds, as in a router before the slow line.
QUEUE_BYTES = 256 << 10
# How much a link without a bandwidth is taken to hold: as if it had this one, and never more than so much.
UNSHAPED_BYTES_PER_S = 1 << 30
UNSHAPED_MAX_BYTES = 256 << 20
# A slow line is shared in pieces that it takes this long to send, but not smaller than an Ethernet packet.
PIECE_SECONDS = 0.001
MIN_PIECE_BYTES = 1460
MAX_PIECE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class LinkShape:
    """A link: seconds one way, bytes per second (None: any number), and seconds that come on top by chance.

    The chance is uniform from 0 to ``jitter_s``. Raises OptionError for values that are not finite or below 0.
    """

    delay_s: float = 0.0
    bandwidth_bytes_per_s: float | None = None
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(f"link {name} {value}: wanted seconds from 0")
        bandwidth = self.bandwidth_bytes_per_s
        if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
            raise OptionError(f"link bandwidth_bytes_per_s {bandwidth}: wanted a number above 0, or None")

    @property
    def in_flight_bytes(self) -> int:
        """The most bytes of one stream that are under way at a time: what the link's length holds, and a queue."""
        seconds = self.delay_s + self.jitter_s
        if self.bandwidth_bytes_per_s is None:
            return QUEUE_BYTES + min(math.ceil(UNSHAPED_BYTES_PER_S * seconds), UNSHAPED_MAX_BYTES)
        return QUEUE_BYTES + math.ceil(self.bandwidth_bytes_per_s * seconds)

    @property
    def piece_bytes(self) -> int:
        """The most bytes that are given one time of arrival."""
        if self.bandwidth_bytes_per_s is None:
            return MAX_PIECE_BYTES
        return min(max(int(self.bandwidth_bytes_per_s * PIECE_SECONDS), MIN_PIECE_BYTES), MAX_PIECE_BYTES)


class Wire:
    """One direction of a link, shared by all streams through it: what enters first comes out first."""

    def __init__(self, shape: LinkShape, seed: str) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._free_at = -math.inf  # when the line has sent what it was given
        self._last_at = -math.inf

    def arrival(self, now: float, n_bytes: int) -> float:
        """When the last of ``n_bytes`` that enter at ``now`` (seconds of any clock) comes out."""
        shape = self.shape
        sent_at = max(self._free_at, now)
        if shape.bandwidth_bytes_per_s is not None:
            sent_at += n_bytes / shape.bandwidth_bytes_per_s
            self._free_at = sent_at
        late = self._random.uniform(0.0, shape.jitter_s) if shape.jitter_s else 0.0
        self._last_at = max(self._last_at, sent_at + shape.delay_s + late)
        return self._last_at

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """``data`` in the pieces in which it travels."""
        size = self.shape.piece_bytes
        if len(data) <= size:
            yield data
            return
        for start in range(0, len(data), size):
            yield data[start : start + size]
