"""Compare open parts with the hashes of the manifest, several at once, while something else goes on."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.package.hashes import sha256_of
from skippy_zmq.sources.package.manifest import Part

_MOST_AT_ONCE = 8


class _StoppedError(Exception):
    pass


def hash_problem(
    descriptor: int, part: Part, *, remember: bool, progress: Callable[[int], object] = lambda _bytes: None
) -> str:
    """What is wrong with the bytes of an open part; empty where nothing is."""
    try:
        digest = sha256_of(descriptor, remember=remember, progress=progress)
    except ModelFileError as error:
        return f"{part.path}: {error}"
    return "" if digest == part.sha256 else f"{part.path}: wanted sha256 {part.sha256}, has {digest}; fetch it again"


class HashChecks:
    """Checks that begin at once and end with the context at the latest. Used by one thread.

    ``parts``: open descriptors and what they must be, by the part's index. ``remember``: trust what is known of
    unchanged files.
    """

    def __init__(self, parts: Mapping[int, tuple[int, Part]], *, remember: bool = True) -> None:
        self._under_way = len(parts)
        self._remember = remember
        self._news: queue.SimpleQueue[int | tuple[int, str | BaseException]] = queue.SimpleQueue()
        self._problems: dict[int, str] = {}
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(min(_MOST_AT_ONCE, len(os.sched_getaffinity(0))))
        for index, (descriptor, part) in parts.items():
            self._pool.submit(self._check, index, descriptor, part)

    def __enter__(self) -> HashChecks:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)

    def wait(self, progress: Callable[[int], object] | None = None) -> dict[int, str]:
        """What is wrong, by the part's index, once all have been checked; ``progress`` is told bytes as they are."""
        while self._under_way:
            news = self._news.get()
            if isinstance(news, int):
                if progress is not None:
                    progress(news)
                continue
            self._under_way -= 1
            index, outcome = news
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome:
                self._problems[index] = outcome
        return dict(sorted(self._problems.items()))

    def _check(self, index: int, descriptor: int, part: Part) -> None:
        try:
            outcome = hash_problem(descriptor, part, remember=self._remember, progress=self._report)
            self._news.put((index, outcome))
        except BaseException as error:  # told to whoever waits
            self._news.put((index, error))

    def _report(self, n_bytes: int) -> None:
        if self._stopping.is_set():
            raise _StoppedError
        self._news.put(n_bytes)
