"""A peer can make a stage log a line with every message; the log must not grow with them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from model_files import parrot
from stage_peers import Peer
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.stage.log_limit import BURST, LogLimit
from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(limit: LogLimit, n: int, line: int = 1) -> list[str]:
    """What comes through of ``n`` records of one place."""
    records = [logging.LogRecord("x", logging.INFO, "file.py", line, "peer %d of 100%%", (i,), None) for i in range(n)]
    return [record.getMessage() for record in records if limit.filter(record)]


def test_a_burst_then_so_many_a_second() -> None:
    clock = Clock()
    limit = LogLimit(burst=3, per_second=2.0, clock=clock)
    assert lines(limit, 10) == ["peer 0 of 100%", "peer 1 of 100%", "peer 2 of 100%"]
    clock.now += 0.4
    assert lines(limit, 1) == []
    clock.now += 0.1
    assert lines(limit, 2) == ["peer 0 of 100% (left out before: 8 lines like this)"]
    clock.now += 3600
    assert len(lines(limit, 10)) == 3


def test_places_do_not_share() -> None:
    limit = LogLimit(burst=2, clock=Clock())
    assert len(lines(limit, 5, line=1)) == 2
    assert len(lines(limit, 5, line=2)) == 2


def test_a_flood_of_refused_messages(
    transport: Transport, make_pipeline: Callable[..., StagePipeline], tmp_path: Path
) -> None:
    pipeline = make_pipeline(parrot(tmp_path / "parrot.gguf", "pieces of eight! ").path, "0:4").start_all()
    stranger = Peer(transport, pipeline.endpoint, name="stranger")
    n = 40 * BURST
    for begin in range(0, n, 100):  # every answer is awaited, so that none is lost to a full queue
        for _ in range(100):
            stranger.send(wire.Cancel("x"))  # before HELLO
        for _ in range(100):
            assert stranger.expect(wire.Error).code == "not_ready", begin
    assert pipeline[0].stop() == 0
    refused = re.findall(r"before HELLO.*", pipeline[0].stderr())
    assert BURST <= len(refused) < n / 4
