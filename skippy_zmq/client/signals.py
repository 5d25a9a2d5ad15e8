"""What the client's programs do when they are interrupted or asked to end."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from skippy_zmq.client.client import Stream

EXIT_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
_EXIT_TERMINATED = 143  # and for one ended by SIGTERM


@contextlib.contextmanager
def cancel_on_interrupt(stream: Stream) -> Iterator[None]:
    """The first Ctrl-C ends the answer in order, a second one ends the program."""
    asked = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def exit_on_terminate() -> Iterator[None]:
    """SIGTERM leaves through every ``with`` on the way out, so that local stages and their directory go too."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        sys.exit(_EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
