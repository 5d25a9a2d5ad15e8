"""What a Conversation asks its connection to do, and what it tells about requests."""

from __future__ import annotations

from dataclasses import dataclass

from skippy_zmq.client.results import Chunk, Generation
from skippy_zmq.client.stats import PipelineStats
from skippy_zmq.errors import SkippyError
from skippy_zmq.wire.messages import (
    Detokenized,
    KvImported,
    KvSessionReply,
    StageFacts,
    StatsReply,
    Tokenized,
)

Frames = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Connect:
    """Action: open a link to ``endpoint``."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Action: close the link to ``endpoint``, which is no longer of this pipeline."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send ``frames`` to ``endpoint``; report ``unsendable`` with ``request`` where that fails."""

    endpoint: str
    frames: Frames
    request: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last chunk of an answer and the whole of it; ``chunk`` is None where the last one was told before."""

    chunk: Chunk | None
    generation: Generation


@dataclass(frozen=True, slots=True)
class Opened:
    """The pipeline is ready and the client welcome at both ends."""

    stages: tuple[StageFacts, ...]


@dataclass(frozen=True, slots=True)
class PagesReceived:
    """Pages as a stage sent them: of each its packed descriptor and its bytes, neither looked at yet."""

    descriptors: tuple[bytes, ...]
    payloads: tuple[memoryview, ...]


Action = Connect | Leave | Send
Outcome = (
    Chunk
    | Finished
    | Opened
    | Tokenized
    | Detokenized
    | StatsReply
    | PipelineStats
    | PagesReceived
    | KvImported
    | KvSessionReply
    | SkippyError
)
Event = tuple[str, Outcome]  # the request it belongs to
