"""Keeps what peers can cause to be logged from filling a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 50  # lines
LINES_PER_SECOND = 2.0


@dataclass(slots=True)
class _Place:
    credit: float  # lines
    at: float  # monotonic seconds, of the credit
    left_out: int = 0


class LogLimit(logging.Filter):
    """For each place in the code: ``burst`` lines at once, then ``per_second``; the next tells of those left out."""

    def __init__(
        self,
        burst: int = BURST,
        per_second: float = LINES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._burst = float(burst)
        self._per_second = per_second
        self._clock = clock
        self._places: dict[tuple[str, int], _Place] = {}  # as many as there are calls in the code

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        place = self._places.setdefault((record.pathname, record.lineno), _Place(self._burst, now))
        place.credit = min(self._burst, place.credit + (now - place.at) * self._per_second)
        place.at = now
        if place.credit < 1:
            place.left_out += 1
            return False
        place.credit -= 1
        if place.left_out:
            record.msg = f"{record.getMessage()} (left out before: {place.left_out} lines like this)"
            record.args = None
            place.left_out = 0
        return True
