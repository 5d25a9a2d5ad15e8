"""Which cores a process runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager

CORES = tuple(sorted(os.sched_getaffinity(0)))


@contextmanager
def pinned(cores: Set[int] | None) -> Iterator[None]:
    """What this thread starts meanwhile runs on ``cores`` only; None: wherever this thread may."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
