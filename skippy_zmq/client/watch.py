"""``--watch``: shows what a pipeline does, interval by interval, until it is interrupted."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from skippy_zmq.client.client import Client
from skippy_zmq.client.history import History, PipelineChange
from skippy_zmq.client.json_values import as_line, change_values
from skippy_zmq.client.signals import EXIT_INTERRUPTED, exit_on_terminate
from skippy_zmq.client.watch_view import LINE_HEADINGS, Line, frame, interval_line

# A stage that computes a long chunk answers after it; no shorter interval makes it count as lost.
LEAST_ANSWER_SECONDS = 2.0

_ENTER, _LEAVE = "\x1b[?1049h\x1b[H\x1b[J", "\x1b[?1049l"  # the alternate screen, as pagers use it
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m", "bad": "\x1b[31m"}
_PLAIN = "\x1b[0m"


def watch(client: Client, seconds: float, *, as_json: bool) -> int:
    """Show an interval of ``seconds`` after the other; return the exit code once Ctrl-C ends it.

    Raises what Client.stats does where nothing can be reached at the start; later, stages that are away show as lost.
    """
    history = History()
    first = history.add(client.stats())
    answer_seconds = max(seconds, LEAST_ANSWER_SECONDS)
    due = time.monotonic()
    with exit_on_terminate(), _shown(seconds, as_json=as_json) as show:
        try:
            show(first)
            while True:
                now = time.monotonic()
                due = max(due + seconds, now + seconds / 2)  # after a late answer the next interval is not too short
                client.idle(due - now)
                show(history.add(client.stats(timeout=answer_seconds)))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def is_terminal(stream: TextIO) -> bool:
    """Whether escape codes may go to ``stream``: a terminal, and not against the user's wish (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def _shown(seconds: float, *, as_json: bool) -> Iterator[Callable[[PipelineChange], None]]:
    if as_json:
        yield lambda change: print(as_line(change_values(change, time.time())), flush=True)
    elif is_terminal(sys.stdout):
        with _screen(seconds) as show:
            yield show
    else:
        print(LINE_HEADINGS, flush=True)
        yield lambda change: print(interval_line(change, _clock()), flush=True)


@contextmanager
def _screen(seconds: float) -> Iterator[Callable[[PipelineChange], None]]:
    shown: list[Line] = []

    def show(change: PipelineChange) -> None:
        size = shutil.get_terminal_size()
        # A line that fills the last column would lose it to the code that clears the rest of the line.
        shown[:] = frame(change, clock=_clock(), seconds=seconds, width=size.columns - 1)
        # One write of what has changed in place: nothing is cleared before it is drawn, so nothing flickers.
        lines = [_styled(line) + _END_OF_LINE for line in shown[: size.lines]]
        sys.stdout.write(_HOME + "\r\n".join(lines) + _BELOW)
        sys.stdout.flush()

    sys.stdout.write(_ENTER)
    try:
        yield show
    finally:
        # The last view stays in the terminal's own history.
        sys.stdout.write(_LEAVE + "".join(f"{line.text}\n" for line in shown))
        sys.stdout.flush()


def _styled(line: Line) -> str:
    return f"{_STYLES[line.style]}{line.text}{_PLAIN}" if line.style else line.text


def _clock() -> str:
    return time.strftime("%H:%M:%S")
