"""The allow-list at work: answers libzmq's questions about connecting keys (ZAP, https://rfc.zeromq.org/spec/27/)."""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

from skippy_zmq.transport.security import Security

ZAP_DOMAIN = b"skippy-zmq"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_STOP_ADDRESS = "inproc://skippy.zap.stop"


class Authenticator:
    """One thread per context: handshakes of peers must go on while the stage computes.

    Servers enforce the domain, so without this thread nobody is let in at all.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: Security) -> None:
        # libzmq reports and asks about keys in their 32 byte form.
        self._allowed = frozenset(z85.decode(key) for key in security.allowed_clients)
        self._refused = 0
        questions = context.socket(zmq.REP)
        stop = context.socket(zmq.PAIR)
        self._stop = context.socket(zmq.PAIR)
        for socket in (questions, stop, self._stop):
            socket.setsockopt(zmq.LINGER, 0)
        questions.bind(_ZAP_ADDRESS)
        stop.bind(_STOP_ADDRESS)
        self._stop.connect(_STOP_ADDRESS)
        # The two sockets are handed over to the thread: starting it is the memory barrier libzmq asks for.
        self._thread = threading.Thread(target=self._serve, args=(questions, stop), name="skippy-zap", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Handshakes turned away so far."""
        return self._refused

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice."""
        if not self._stop.closed:
            self._stop.send(b"")
            self._thread.join()
            self._stop.close()

    def _serve(self, questions: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(questions, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if questions in ready:
                    questions.send_multipart(self._answer(questions.recv_multipart()))
                if stop in ready:
                    return
        finally:
            questions.close()
            stop.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        request = question[1] if len(question) > 1 else b""
        if (
            len(question) == 7
            and question[0] == b"1.0"
            and question[2] == ZAP_DOMAIN
            and question[5] == b"CURVE"
            and question[6] in self._allowed
        ):
            return [b"1.0", request, b"200", b"OK", b"", b""]
        self._refused += 1
        return [b"1.0", request, b"400", b"key is not on the allow-list", b"", b""]
