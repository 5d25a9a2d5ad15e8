"""Messages from this process to itself."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.transport.frames import Frame, SendableFrame, receive_frames, send_frames
from skippy_zmq.transport.sockets import SocketFactory
from skippy_zmq.wire.limits import MAX_FRAMES


class Loopback:
    """Owns two sockets that are connected to each other: a message goes its usual way, apart from the network."""

    def __init__(self, factory: SocketFactory) -> None:
        self._factory = factory
        self._out, self._in = factory.pair()
        factory.adopt(self)

    def there_and_back(self, frames: Sequence[SendableFrame]) -> list[Frame]:
        """Send a message of at most MAX_FRAMES frames and receive it."""
        send_frames(self._out, frames, track=False)
        received = receive_frames(self._in, MAX_FRAMES, with_source=True)
        assert received is not None, "libzmq delivers within a process before it returns"
        return received[0]

    def close(self, drain_seconds: float = 0.0) -> None:
        """Close; may be called twice. Nothing is ever under way: ``drain_seconds`` is for the factory's sake."""
        self._factory.discard(self._out)
        self._factory.discard(self._in)
        self._factory.release(self)
