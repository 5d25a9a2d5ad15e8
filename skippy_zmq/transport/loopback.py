"""Messages from this process to itself."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.transport.frames import Frame, SendableFrame, receive_frames, send_frames
from skippy_zmq.transport.sockets import SocketFactory
from skippy_zmq.wire.limits import MAX_FRAMES


class Loopback:
    """Two sockets of a factory that are connected to each other; a message goes their way as it does everywhere else,
    apart from the network. They close with the factory."""

    def __init__(self, factory: SocketFactory) -> None:
        self._out, self._in = factory.pair()

    def there_and_back(self, frames: Sequence[SendableFrame]) -> list[Frame]:
        """Send a message and receive it; raises zmq.ZMQError once the factory is closed."""
        send_frames(self._out, frames, track=False)
        received = receive_frames(self._in, MAX_FRAMES, with_source=True)
        assert received is not None, "libzmq delivers within a process before it returns"
        return received[0]
