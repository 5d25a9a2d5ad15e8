"""Whether answers under way have to be resumed, and how long the last stage may be out of reach. Pure.

A stage that is lost interrupts answers; stage 0 keeps them and says READY when the pipeline is whole again, or ends
them. The client waits for that without a limit of its own: how long is the pipeline's choice. It limits the time in
which the pipeline is ready and its last stage is out of reach from here, for then nobody else may notice.
"""

from __future__ import annotations

import enum

# How long stage 0 may take to say whether the pipeline is ready.
ASK_SECONDS = 5.0


class Verdict(enum.Enum):
    WAIT = "wait"
    ASK = "ask"  # stage 0, whether the pipeline is ready
    GIVE_UP = "give up"


class Recovery:
    """``reach_seconds``: how long the last stage may be out of reach before stage 0 is asked."""

    def __init__(self, reach_seconds: float) -> None:
        self._reach_seconds = reach_seconds
        self._due = False
        self._by: float | None = None
        self._asked = False

    @property
    def due(self) -> bool:
        """Whether answers have to be resumed as soon as both ends of the pipeline can be reached."""
        return self._due

    @property
    def by(self) -> float | None:
        """When to call ``expire``; None before its first call."""
        return self._by if self._due else None

    def interrupt(self) -> None:
        """The last stage was lost, or the pipeline is ready once more."""
        self._due, self._by, self._asked = True, None, False

    def resumed(self) -> None:
        self._due = False

    def told_ready(self, ready: bool) -> None:
        """Stage 0 has said whether the pipeline is ready: the answer to ASK, where that was the verdict."""
        if self._asked and not ready:
            self.interrupt()  # it is stage 0 that waits

    def expire(self, now: float) -> Verdict:
        if not self._due:
            return Verdict.WAIT
        if self._by is None:
            self._by = now + self._reach_seconds
        if now < self._by:
            return Verdict.WAIT
        if self._asked:
            return Verdict.GIVE_UP
        self._asked, self._by = True, now + ASK_SECONDS
        return Verdict.ASK
