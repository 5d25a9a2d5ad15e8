"""A link between two addresses that is as long, slow and unsteady as wanted: a proxy for any stream of bytes.

In a process that is busy with other things the proxy's thread waits for the interpreter like any other (5 ms and more);
a benchmark runs it as a program of its own: ``python -m skippy_zmq.testing.link_proxy --help``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeAlias

from skippy_zmq.errors import EndpointError, OptionError, SkippyError
from skippy_zmq.testing.pump import Pump
from skippy_zmq.testing.shaping import LinkShape, Wire
from skippy_zmq.transport import Endpoint, check_bind, check_connect
from skippy_zmq.transport.ipc_path import IpcClaim

_BACKLOG = 128
_IN_PROGRESS = (0, errno.EINPROGRESS)
_Address: TypeAlias = Any  # a path, or a tuple whose length depends on the family


class LinkProxy:
    """Listens at ``listen``, dials ``connect`` for every connection, and carries bytes both ways; use it with ``with``.

    Both addresses are ipc:// or tcp://; port 0 of ``listen`` means any free one. Each direction has a ``delay_s`` (one
    way, seconds), a bandwidth that all connections share (bytes per second, None: no limit), and up to ``jitter_s``
    seconds more by chance (``seed`` repeats it). Bytes never overtake each other, and none comes out before its time.
    Where a receiver does not read, or the link is full (``LinkShape.in_flight_bytes``), the sender is not read either.
    A connection whose other side cannot be reached is closed.

    Raises OptionError for values and EndpointError for addresses that cannot be right; a public address is refused.
    """

    def __init__(
        self,
        listen: str,
        connect: str,
        *,
        delay_s: float = 0.0,
        bandwidth_bytes_per_s: float | None = None,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.shape = LinkShape(delay_s, bandwidth_bytes_per_s, jitter_s)
        self._listen = Endpoint.parse(listen)
        self._target = Endpoint.parse(connect)
        check_connect(self._target)
        self._seed = seed
        self._endpoint: Endpoint | None = None
        self._claim: IpcClaim | None = None
        self._pump: Pump | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens, the port chosen by the system included."""
        if self._endpoint is None:
            raise OptionError(f"link proxy at {self._listen}: not started")
        return str(self._endpoint)

    def start(self) -> Self:
        """Listen; return once connections are taken. Raises EndpointError where the address cannot be bound."""
        if self._thread is not None:
            raise OptionError(f"link proxy at {self._listen}: started already")
        listener = self._bind()
        wires = (Wire(self.shape, f"{self._seed}-{direction}") for direction in ("forward", "back"))
        self._pump = Pump(listener, self._dial, *wires)
        self._thread = threading.Thread(target=self._run, args=(self._pump,), name="link-proxy", daemon=True)
        self._thread.start()
        return self

    def pause(self) -> None:
        """Hold everything, as a line that has gone dead: nothing more comes out after this returns."""
        self._running.call(self._running.pause)

    def resume(self) -> None:
        """Go on after ``pause``, with the bytes that were under way."""
        self._running.call(self._running.resume)

    def cut(self) -> int:
        """Drop all connections and what is under way on them; new ones are taken. Returns how many there were."""
        return self._running.call(self._running.cut)

    def close(self) -> None:
        """Stop listening and drop all connections; may be called twice. Raises what ended the proxy before, if so."""
        if self._thread is None or self._pump is None:
            return
        with contextlib.suppress(OptionError):
            self._pump.call(self._pump.stop)
        self._thread.join()
        if self._claim is not None:
            self._claim.release()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _running(self) -> Pump:
        if self._pump is None:
            raise OptionError(f"link proxy at {self._listen}: not started")
        return self._pump

    def _run(self, pump: Pump) -> None:
        try:
            pump.run()
        except BaseException as error:
            self._failure = error

    def _bind(self) -> socket.socket:
        if self._listen.transport == "ipc":
            self._claim = IpcClaim(self._listen.path)
            Path(self._listen.path).unlink(missing_ok=True)  # a socket that nobody listens on, by the claim
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            address: _Address = self._listen.path
        else:
            target = check_bind(self._listen)
            bound = Endpoint.parse(target.address)
            listener = socket.socket(socket.AF_INET6 if target.ipv6 else socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            address = (bound.host, bound.port)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if self._claim is not None:
                self._claim.release()
            raise EndpointError(f"cannot bind {self._listen}: {error.strerror}") from error
        self._endpoint = self._listen
        if self._claim is not None:
            self._claim.note_bound()
        else:
            self._endpoint = Endpoint("tcp", bound.host, listener.getsockname()[1])
        return listener

    def _dial(self) -> socket.socket:
        target = self._target
        if target.transport == "ipc":
            family = socket.AF_UNIX
            address: _Address = target.path
        else:
            family, _, _, _, address = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
        far = socket.socket(family, socket.SOCK_STREAM)
        far.setblocking(False)
        if family != socket.AF_UNIX:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = far.connect_ex(address)
        if number not in _IN_PROGRESS:
            far.close()
            raise OSError(number, os.strerror(number))
        return far


_EXAMPLE = """\
example: two stages on one machine, 10 ms and 100 MB/s apart both ways
  python -m skippy_zmq.testing.link_proxy --delay-ms 10 --bandwidth-bytes-per-s 1e8 \\
      --link ipc:///run/p/to-s1 ipc:///run/p/s1 --link ipc:///run/p/to-s0 ipc:///run/p/s0 &
  python -m skippy_zmq.stage --model m.gguf --layers 0:15  --bind ipc:///run/p/s0 --next ipc:///run/p/to-s1 &
  python -m skippy_zmq.stage --model m.gguf --layers 15:30 --bind ipc:///run/p/s1 --first ipc:///run/p/to-s0 &

It prints a line LISTENING and the address for every link, in order, and ends with SIGTERM or SIGINT.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run proxies until told to end; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m skippy_zmq.testing.link_proxy",
        description="Links with a delay, a bandwidth and a jitter, for any stream of bytes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--link",
        nargs=2,
        action="append",
        required=True,
        metavar=("LISTEN", "CONNECT"),
        help="listen at one address, connect to the other; may be given several times",
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="MS", help="one way (default: 0)")
    parser.add_argument("--jitter-ms", type=float, default=0.0, metavar="MS", help="up to so much more (default: 0)")
    parser.add_argument(
        "--bandwidth-bytes-per-s", type=float, metavar="N", help="of each link, each way (default: no limit)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="repeats the jitter (default: 0)")
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end when standard input closes (for programs that start it)"
    )
    options = parser.parse_args(argv)
    try:
        with contextlib.ExitStack() as stack:
            wakeup = stack.enter_context(_signals())
            for listen, connect in options.link:
                proxy = LinkProxy(
                    listen,
                    connect,
                    delay_s=options.delay_ms / 1000,
                    bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
                    jitter_s=options.jitter_ms / 1000,
                    seed=options.seed,
                )
                print(f"LISTENING {stack.enter_context(proxy).endpoint}", flush=True)
            _wait_for_end(wakeup, exit_with_stdin=options.exit_with_stdin)
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """SIGTERM and SIGINT make the descriptor readable."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        pass  # the descriptor is what tells

    read, write = os.pipe()
    os.set_blocking(write, False)
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    old = signal.set_wakeup_fd(write)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _wait_for_end(wakeup: int, *, exit_with_stdin: bool) -> None:
    inputs = [wakeup, sys.stdin.fileno()] if exit_with_stdin else [wakeup]
    while True:
        ready, _, _ = select.select(inputs, [], [])
        if wakeup in ready or not os.read(sys.stdin.fileno(), 4096):
            return


if __name__ == "__main__":
    sys.exit(main())
