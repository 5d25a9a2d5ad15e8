"""Reading a socket together with when the bytes came in, where the kernel notes it.

It does for TCP on Linux (SO_TIMESTAMPNS, socket(7)); where it does not, bytes count as if they had just come.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

# As Linux's socket.h has it; Python has no name for it.
_SO_TIMESTAMPNS = 35
_STAMP = struct.Struct("@ll")  # seconds and nanoseconds of the wall clock
_ROOM = socket.CMSG_SPACE(_STAMP.size)
_OLDEST_SECONDS = 1.0  # whatever looks older, or comes from the future, tells of a clock that was set


def ask_for_stamps(sock: socket.socket) -> None:
    """Have the kernel note arrivals at ``sock`` from now on, if it can."""
    if sock.family != socket.AF_UNIX and sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def receive(sock: socket.socket, buffer: memoryview) -> tuple[int, float]:
    """Number of bytes read into ``buffer``, and when the last of them came in (``time.monotonic``).

    Raises what ``recv`` does, BlockingIOError among it.
    """
    if sock.family == socket.AF_UNIX:
        return sock.recv_into(buffer), time.monotonic()
    n, notes, _, _ = sock.recvmsg_into([buffer], _ROOM)
    waited = 0.0
    now, wall = time.monotonic(), time.time()
    for level, kind, data in notes:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(data) >= _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            waited = wall - seconds - nanoseconds * 1e-9
    return n, now - waited if 0.0 < waited < _OLDEST_SECONDS else now
