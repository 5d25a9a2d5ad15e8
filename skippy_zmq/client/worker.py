"""The thread that owns the connection of an AsyncClient."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from skippy_zmq.client.connection import Connection
from skippy_zmq.client.outcomes import Event
from skippy_zmq.errors import SkippyError

_T = TypeVar("_T")


class Worker:
    """``deliver`` and ``fail`` run in ``loop``, events in order."""

    def __init__(
        self,
        make: Callable[[], Connection],
        deliver: Callable[[list[Event]], None],
        fail: Callable[[SkippyError], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._make = make
        self._deliver = deliver
        self._fail = fail
        self._loop = loop
        self._made: asyncio.Future[Connection | SkippyError] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._connection: Connection | None = None
        self.stopped = False
        self._stopping = False  # the thread's own
        # A daemon: a program that forgets to close the client ends all the same.
        self._thread = threading.Thread(target=self._run, name="skippy-client", daemon=True)

    async def start(self) -> None:
        """Raises what making the connection raises."""
        self._thread.start()
        made = await self._made
        if isinstance(made, SkippyError):
            self._thread.join()
            raise made
        self._connection = made

    @property
    def connection(self) -> Connection:
        """To be touched by posted calls only."""
        assert self._connection is not None
        return self._connection

    def post(self, call: Callable[[], object]) -> None:
        if not self.stopped and self._connection is not None:
            self._connection.post(call)

    async def stop(self) -> None:
        self.post(self._stop)
        self.stopped = True
        await asyncio.shield(self._ended)
        self._thread.join()

    def tell(self, events: list[Event]) -> None:
        self._call(self._deliver, events)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            connection = self._make()
        except SkippyError as error:
            self._call(_settle, self._made, error)
            return
        self._call(_settle, self._made, connection)
        try:
            while not self._stopping:
                events = connection.step()
                if events:
                    self.tell(events)
        except BaseException as error:
            self._call(self._fail, SkippyError(f"the client's thread failed: {error!r}"))
            raise
        finally:
            connection.close()
            self._call(_settle, self._ended, None)

    def _call(self, call: Callable[..., object], *arguments: object) -> None:
        # The event loop may have been closed without closing the client.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)


def _settle(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)
