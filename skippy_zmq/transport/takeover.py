"""Who speaks over which connection of a server, and the end of one whose peer's id another has taken over."""

from __future__ import annotations

import os
import socket
import struct

import zmq

from skippy_zmq.transport.frames import has_input
from skippy_zmq.transport.sockets import Socket

WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")


class Connections:
    """Follows a ROUTER by its monitor (events ``WATCHED``) and by the descriptors that its messages came from.

    When a peer's id turns up on a second connection, libzmq listens to the first no more but leaves it open, so that
    whoever is there would wait for ever; here it is ended, and its peer sees that.
    """

    def __init__(self, monitor: Socket) -> None:
        self._monitor = monitor
        self._n_accepted = 0
        self._n_losses = 0
        self._open: dict[int, int] = {}  # descriptor -> number of the connection that has it
        self._descriptors: dict[bytes, int] = {}
        self._peers: dict[int, bytes] = {}

    @property
    def pending(self) -> bool:
        """Whether connections ended that ``take_losses`` has not told of."""
        return self._n_losses > 0

    def take_losses(self) -> int:
        """Connections that ended since the last call, as far as the monitor was looked at."""
        losses, self._n_losses = self._n_losses, 0
        return losses

    def note(self, peer: bytes, descriptor: int) -> None:
        """A message of ``peer`` has come over the connection with ``descriptor``."""
        if self._descriptors.get(peer) == descriptor:
            return
        self.refresh()
        before = self._descriptors.get(peer)
        if before is not None and before != descriptor:
            self._forget(before)
            self._end(before)
        if descriptor in self._open:  # else it has ended already
            self._forget(descriptor)
            self._descriptors[peer], self._peers[descriptor] = descriptor, peer

    def refresh(self) -> None:
        """Take in what the monitor has to say."""
        while has_input(self._monitor):
            event, descriptor = _EVENT.unpack(self._monitor.recv(zmq.NOBLOCK))
            self._monitor.recv(zmq.NOBLOCK)  # the address
            self._forget(descriptor)
            if event == zmq.EVENT_ACCEPTED:
                self._n_accepted += 1
                self._open[descriptor] = self._n_accepted
            else:
                self._open.pop(descriptor, None)
                self._n_losses += 1

    def _forget(self, descriptor: int) -> None:
        peer = self._peers.pop(descriptor, None)
        if peer is not None and self._descriptors.get(peer) == descriptor:
            del self._descriptors[peer]

    def _end(self, descriptor: int) -> None:
        number = self._open.get(descriptor)
        if number is None:
            return
        try:
            copy = os.dup(descriptor)
        except OSError:
            return
        with socket.socket(fileno=copy) as connection:
            # libzmq says that a connection ends before its descriptor is free: unsaid, the copy is the right one.
            self.refresh()
            if self._open.get(descriptor) == number:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # its peer was quicker
