"""Multipart messages in and out of a socket, without waiting and without copying what is large."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import zmq
from zmq import backend

from skippy_zmq.errors import RetryableError

# Handing memory over costs a message to pyzmq's collector thread; below this size a copy is cheaper.
ZERO_COPY_BYTES = 64 << 10

# The innermost calls and plain numbers: pyzmq's outer layer and its flag enums cost more than libzmq does here.
_send = backend.Socket.send
_receive = backend.Socket.recv
_option = backend.Socket.get
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_SOURCE = int(zmq.SRCFD)
NO_SOURCE = -1

# A received frame: bytes of its own, or, when large, a view of libzmq's memory, which lives as long as the view.
Frame: TypeAlias = bytes | memoryview
# What can be sent: anything contiguous.
SendableFrame: TypeAlias = bytes | bytearray | memoryview


class QueueFull(RetryableError):
    """The queue towards a peer is full: it stopped reading, or more was sent than its credit. Nothing was sent."""

    code = "queue_full"


class PeerGone(RetryableError):
    """Nobody is connected under that id or at that address. Nothing was sent, or what was sent will not be read."""

    code = "peer_gone"


class Incoming(msgspec.Struct, frozen=True):
    """A message. ``peer``: routing id of the sender, empty on a Link.

    ``excess``: number of frames above the limit; where it is not 0 the whole message was thrown away.
    """

    peer: bytes
    frames: list[Frame]
    excess: int = 0


class SendTracker:
    """Says when libzmq is done with *all* of a message: the kernel has it, or it was dropped with its connection.

    The memory of large frames must not change until then. What was sent last may count as under way until something
    else is sent to the same peer.
    """

    __slots__ = ("_trackers",)

    def __init__(self, trackers: Sequence[zmq.MessageTracker] = ()) -> None:
        self._trackers = trackers

    @property
    def done(self) -> bool:
        return all(tracker.done for tracker in self._trackers)

    def wait(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds; return whether all frames are free."""
        deadline = time.monotonic() + timeout
        try:
            for tracker in self._trackers:
                tracker.wait(max(0.0, deadline - time.monotonic()))
        except zmq.NotDone:
            return False
        return True


NOTHING_HELD = SendTracker()


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive; also makes libzmq look at its mailbox, as sending does rarely."""
    return bool(int(_option(socket, _EVENTS)) & _POLLIN)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[SendableFrame], track: bool) -> SendTracker:
    """Queue one message without waiting; with ``track``, large frames and the last one are under a tracker each.

    Small frames are copied before this returns. Large ones are kept alive by pyzmq, which holds a reference.
    Raises zmq.Again or zmq.ZMQError when the first frame is not taken, and PeerGone when a later one is not.
    """
    trackers: list[zmq.MessageTracker] = []
    last = len(frames) - 1
    lost = False
    for index, frame in enumerate(frames):
        flags = _NOBLOCK_MORE if index < last else _NOBLOCK
        nbytes = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        try:
            if track and (index == last or nbytes >= ZERO_COPY_BYTES):
                handed_over = frame if nbytes >= ZERO_COPY_BYTES else bytes(frame)
                tracked = zmq.Frame(handed_over, track=True, copy=False)  # of any size, which the socket would copy
                trackers.append(_send(socket, tracked, flags, False, True))
            elif nbytes < ZERO_COPY_BYTES:
                _send(socket, frame, flags)
            else:
                _send(socket, frame, flags, False)
        except zmq.Again:
            if index == 0:
                raise
            # The peer left in the middle. The rest must still go through the socket, which drops it: otherwise it would
            # drop the beginning of the next message instead.
            lost = True
    if lost:
        raise PeerGone("the peer left while a message was being queued for it")
    return SendTracker(trackers) if trackers else NOTHING_HELD


def receive_frames(
    socket: zmq.Socket[bytes], max_frames: int, *, with_source: bool = False
) -> tuple[list[Frame], int, int] | None:
    """The first ``max_frames`` frames of a message, the number of frames dropped after them, and its source.

    The source is the descriptor of the connection, NO_SOURCE where it is not asked for or not known. None: no message.
    """
    if not has_input(socket):  # an exception would be the dearer way to learn it
        return None
    part = _receive(socket, _NOBLOCK, False)
    source = _source(part) if with_source else NO_SOURCE
    frames: list[Frame] = []
    excess = 0
    while True:
        if len(frames) < max_frames:
            frames.append(part.bytes if len(part) < ZERO_COPY_BYTES else part.buffer)
        else:
            excess += 1
        if not part.more:
            return frames, excess, source
        part = _receive(socket, _NOBLOCK, False)


def _source(part: zmq.Frame) -> int:
    try:
        return int(part.get(_SOURCE))
    except zmq.ZMQError:  # of a peer that speaks libzmq's oldest protocol
        return NO_SOURCE
