"""What a Conversation knows about a request. Values; the rules are the conversation's."""

from __future__ import annotations

from dataclasses import dataclass

from skippy_zmq.client.answer import Answer
from skippy_zmq.client.outcomes import Frames


@dataclass(slots=True)
class Pending:
    """``target``: the peer that answers, None for the pipeline as a whole. No frames: waits for the pipeline only."""

    frames: Frames | None
    target: str | None
    contact_by: float
    deadline: float | None
    seconds: float  # what the deadline, or else the contact, was given
    ask_ready: bool = False
    answer: Answer | None = None
    sent: bool = False
    cancelling: bool = False
    told_last: bool = False
    interrupted: bool = False  # the connection that its tokens come over was lost
    resumed: bool = False  # stage 0 was asked to go on with it

    @property
    def due(self) -> float | None:
        """When something has to happen at the latest, if at all."""
        if self.sent or (self.deadline is not None and self.deadline < self.contact_by):
            return self.deadline
        return self.contact_by

    @property
    def runs(self) -> bool:
        """Whether it is an answer that was asked for and is not being cancelled."""
        return self.answer is not None and self.sent and not self.cancelling
