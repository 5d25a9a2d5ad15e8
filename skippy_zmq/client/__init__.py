"""Asking a pipeline: the library's clients and ``python -m skippy_zmq.client``.

Owns the client's half of the protocol (``conversation``, pure), its sockets (``connection``), the two clients on top
and the command line. Does not own tokenizing, chat templates or text from bytes: the stages do that, so a client
needs no model file.
"""

from __future__ import annotations

from skippy_zmq.client.aio import AsyncClient, AsyncStream
from skippy_zmq.client.client import Client, Stream
from skippy_zmq.client.results import Chunk, Generation, StageStats, Timings

__all__ = ["AsyncClient", "AsyncStream", "Chunk", "Client", "Generation", "StageStats", "Stream", "Timings"]
