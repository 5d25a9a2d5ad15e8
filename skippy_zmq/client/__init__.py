"""Asking a pipeline: the library's clients and ``python -m skippy_zmq.client``.

Owns the client's half of the protocol (``conversation`` and ``survey``, pure), its sockets (``connection``), the two
clients on top, what follows from the stages' counters (``stats``) and how that is shown, and the command line. Does not
own tokenizing, chat templates or text from bytes: the stages do that, so a client needs no model file.
"""

from __future__ import annotations

from skippy_zmq.client.aio import AsyncClient, AsyncStream
from skippy_zmq.client.client import Client, Stream
from skippy_zmq.client.results import Chunk, Generation, Timings
from skippy_zmq.client.stats import PipelineStats, RingStats, StageStats

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Generation",
    "PipelineStats",
    "RingStats",
    "StageStats",
    "Stream",
    "Timings",
]
