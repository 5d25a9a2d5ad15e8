"""What a waiting stage does so that its processor's caches hold what the next batch needs: weights, and code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.transport import ZERO_COPY_BYTES, Frame, Loopback
from skippy_zmq.wire.codec import decode

# Weights that pass between two rehearsals. A core's own cache (1 to 2 MiB) holds no code any more by then; a rehearsal
# takes tens of microseconds, a fraction of what loading so many weights does.
_WEIGHTS_BETWEEN_BYTES = 4 << 20


class Rehearsal:
    """To be called again and again while a stage waits.

    Each call loads some weights. Now and then ``last``, the frames of a message of the ring that was taken, take their
    way through libzmq and the codec once more, and ``look`` asks what could run: so far, handling the next one can be
    rehearsed without effect.
    """

    def __init__(self, model: StageModel, loopback: Loopback, look: Callable[[], object]) -> None:
        self.last: Sequence[Frame] = ()
        self._model = model
        self._loopback = loopback
        self._look = look
        self._warmed_bytes = 0

    def __call__(self) -> None:
        self._warmed_bytes += self._model.warm()
        if self._warmed_bytes < _WEIGHTS_BETWEEN_BYTES:
            return
        self._warmed_bytes = 0
        if sum(map(len, self.last)) >= ZERO_COPY_BYTES:
            self.last = ()  # of a long prompt: nobody waits for that little
        if self.last:
            decode(self._loopback.there_and_back(self.last))
            self._look()
