"""Tokenizing long texts beside the event loop: llama.cpp can take many seconds for a few hundred kilobytes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from skippy_zmq.errors import BusyError, SkippyError

INLINE_BYTES = 16 << 10  # of text that is tokenized at once; even the worst of it takes a few milliseconds
MAX_WAITING = 64  # texts

Result = list[int] | SkippyError
Done = Callable[[Result], None]


class BackgroundTokenizer:
    """One thread that tokenizes text after text. ``wake`` tells the loop to call ``deliver``.

    The thread ends with the process: nothing can stop llama.cpp in the middle of a text.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._work: queue.SimpleQueue[tuple[Callable[[], list[int]], Done]] = queue.SimpleQueue()
        self._finished: deque[tuple[Done, Result]] = deque()
        self._thread: threading.Thread | None = None
        self._waiting = 0

    def submit(self, tokenize: Callable[[], list[int]], done: Done) -> None:
        """Run ``tokenize`` on the thread and hand its result to ``done`` on the loop's; raise BusyError when full."""
        if self._waiting >= MAX_WAITING:
            raise BusyError(f"{MAX_WAITING} long texts are waiting to be tokenized already: try again later")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tokenizer", daemon=True)
            self._thread.start()
        self._waiting += 1
        self._work.put((tokenize, done))

    def deliver(self) -> None:
        """Call ``done`` of every text that is finished; never waits."""
        while self._finished:
            self._waiting -= 1
            done, result = self._finished.popleft()
            done(result)

    def _run(self) -> None:
        while True:
            tokenize, done = self._work.get()
            result: Result
            try:
                result = tokenize()
            except SkippyError as error:
                result = error
            self._finished.append((done, result))
            self._wake()
