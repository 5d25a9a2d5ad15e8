"""A request as stage 0 knows it. Values; what happens to them is the table's business."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from skippy_zmq.stage.prefixes import Prefix
from skippy_zmq.wire import messages as wire


@dataclass(slots=True)
class Request:
    client: bytes
    ask: wire.Generate
    session: str
    deadline: float
    wait_until: float  # for a lane; monotonic seconds, as the deadline
    prompt: tuple[int, ...] = ()
    lane: int | None = None
    opened: bool = False  # its first rows are on the ring
    accepted: bool = False
    prefix: Prefix | None = None  # what its lane begins with; None: not known yet
    fed: list[int] = field(default_factory=list)  # tokens generated, after which the answer goes on
    known: tuple[int, ...] = ()  # what was fed before the ring broke, and has to come out again
    n_windowed: int = 0  # so many of them run in windows
    received: int = 0  # tokens the client has, of an answer that begins anew
    recover_by: float | None = None  # the ring is broken, or the client has not said what it has

    def opening(self, lane: int) -> wire.SessionOpen:
        """What the stages, and the last one above all, need to know of it."""
        ask, prefix = self.ask, self.prefix or Prefix()
        return wire.SessionOpen(
            self.session,
            lane,
            ask.request,
            self.client,
            len(self.prompt),
            ask.max_tokens,
            ask.sampling,
            ask.stop,
            ask.logits,
            prefix.packed,
            prefix.plain,
            ask.keep,
            min(self.received, len(self.known)),  # the client itself compares what is not known here
            np.array(self.known, "<i4").tobytes(),
        )
