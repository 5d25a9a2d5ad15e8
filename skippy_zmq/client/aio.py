"""The client for asyncio: the same connection, on a thread of its own, which is the owner of its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TypeVar

from skippy_zmq.client.client import DEFAULT_CONTACT_SECONDS
from skippy_zmq.client.connection import Connection
from skippy_zmq.client.outcomes import Event, Finished, Opened, Outcome
from skippy_zmq.client.requests import DEFAULT_MAX_TOKENS, GREEDY, Messages, check_timeout, generate_request
from skippy_zmq.client.results import Chunk, Generation
from skippy_zmq.client.stats import PipelineStats
from skippy_zmq.errors import OptionError, SkippyError
from skippy_zmq.transport import Endpoint, Security
from skippy_zmq.wire.messages import (
    Detokenize,
    Detokenized,
    Generate,
    SamplingParams,
    StageFacts,
    Tokenize,
    Tokenized,
)

_T = TypeVar("_T")


class AsyncClient:
    """The twin of Client; use it with ``async with``. One event loop uses it; methods and errors are Client's."""

    def __init__(
        self,
        endpoint: str,
        *,
        security: Security | None = None,
        server_key: bytes | None = None,
        timeout: float = DEFAULT_CONTACT_SECONDS,
    ) -> None:
        self.endpoint = str(Endpoint.parse(endpoint))
        self._security = security
        self._server_key = server_key
        self._contact_seconds = check_timeout(timeout)
        self._worker: _Worker | None = None
        self._mailboxes: dict[str, asyncio.Queue[Outcome]] = {}
        self._ids = itertools.count(1)

    async def __aenter__(self) -> AsyncClient:
        def make() -> Connection:
            return Connection(
                self.endpoint,
                security=self._security,
                server_key=self._server_key,
                contact_seconds=self._contact_seconds,
            )

        if self._worker is not None:
            raise OptionError(f"client of {self.endpoint}: entered before")
        worker = _Worker(make, self._deliver, self._fail, asyncio.get_running_loop())
        await worker.start()
        self._worker = worker
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def stages(self) -> tuple[StageFacts, ...]:
        """Facts of all stages, in layer order; waits for a ready pipeline."""
        return (await self._ask(None, self._new_request(), Opened)).stages

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams = GREEDY,
        stop: str | Sequence[str] = (),
        timeout: float | None = None,
        logits: bool = False,
    ) -> Generation:
        """As Client.generate. Cancelling the task cancels the request."""
        stream = self.stream(
            prompt,
            messages=messages,
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            timeout=timeout,
            logits=logits,
        )
        async with stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams = GREEDY,
        stop: str | Sequence[str] = (),
        timeout: float | None = None,
        logits: bool = False,
    ) -> AsyncStream:
        """As Client.stream, for ``async for``; leave a loop early by ``async with`` or ``close``."""
        request = self._new_request()
        message = generate_request(
            request,
            prompt,
            messages,
            token_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            timeout=timeout,
            logits=logits,
        )
        self._submit(request, message, timeout=timeout)
        return AsyncStream(self, request)

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]:
        """As Client.tokenize."""
        request = self._new_request()
        return (await self._ask(Tokenize(request, text, add_special, parse_special), request, Tokenized)).token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> bytes:
        """As Client.detokenize."""
        request = self._new_request()
        return (await self._ask(Detokenize(request, tuple(token_ids)), request, Detokenized)).data

    async def stats(self, *, timeout: float | None = None) -> PipelineStats:
        """As Client.stats."""
        request, worker = self._new_request(), self._running()
        self._start(request, lambda: worker.connection.surveys.start(request, time.monotonic(), timeout))
        return await self._answer(request, PipelineStats)

    async def close(self) -> None:
        """As Client.close."""
        self._fail(OptionError(f"client of {self.endpoint}: closed"))
        if self._worker is not None:
            await self._worker.stop()

    # For AsyncStream.

    async def _next(self, request: str) -> Outcome:
        mailbox = self._mailboxes.get(request)
        if mailbox is None:
            raise OptionError(f"request {request}: closed")
        outcome = await mailbox.get()
        if isinstance(outcome, SkippyError):
            self._mailboxes.pop(request, None)
            raise outcome
        return outcome

    def _forget(self, request: str) -> None:
        if self._mailboxes.pop(request, None) is not None and self._worker is not None:
            connection = self._worker.connection
            self._worker.post(lambda: connection.conversation.abandon(request))

    def _cancel(self, request: str) -> None:
        worker = self._running()
        worker.post(lambda: worker.connection.conversation.cancel(request, time.monotonic()))

    # Inside.

    def _running(self) -> _Worker:
        if self._worker is None:
            raise OptionError(f"client of {self.endpoint}: use it inside 'async with'")
        if self._worker.stopped:
            raise OptionError(f"client of {self.endpoint}: closed")
        return self._worker

    def _new_request(self) -> str:
        return f"r{next(self._ids)}"

    def _submit(
        self,
        request: str,
        message: Generate | Tokenize | Detokenize | None,
        *,
        timeout: float | None = None,
    ) -> None:
        worker = self._running()

        def submit() -> None:
            worker.connection.conversation.submit(request, message, time.monotonic(), timeout=timeout)

        self._start(request, submit)

    def _start(self, request: str, begin: Callable[[], None]) -> None:
        """Have the thread ``begin``; what that raises is the outcome of ``request``."""
        worker = self._running()
        self._mailboxes[request] = asyncio.Queue()

        def start() -> None:
            try:
                begin()
            except SkippyError as error:
                worker.tell([(request, error)])

        worker.post(start)

    async def _ask(self, message: Tokenize | Detokenize | None, request: str, kind: type[_T]) -> _T:
        self._submit(request, message)
        return await self._answer(request, kind)

    async def _answer(self, request: str, kind: type[_T]) -> _T:
        try:
            outcome = await self._next(request)
        finally:
            self._forget(request)
        if not isinstance(outcome, kind):
            raise SkippyError(f"request {request}: wanted {kind.__name__}, got {type(outcome).__name__}")
        return outcome

    def _deliver(self, events: list[Event]) -> None:
        for request, outcome in events:
            if request in self._mailboxes:
                self._mailboxes[request].put_nowait(outcome)

    def _fail(self, error: SkippyError) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.put_nowait(error)
        self._mailboxes.clear()


class AsyncStream(AsyncIterator[Chunk]):
    """The twin of Stream. ``async with`` or ``close`` ends a request that is left early."""

    def __init__(self, client: AsyncClient, request: str) -> None:
        self.request = request
        self._client = client
        self._result: Generation | None = None
        self._over = False

    @property
    def result(self) -> Generation:
        """The whole answer, once the last chunk has come; raises OptionError before."""
        if self._result is None:
            raise OptionError(f"request {self.request}: the answer is not complete")
        return self._result

    def cancel(self) -> None:
        """End the answer early: a last chunk with finish reason "cancelled" follows."""
        if not self._over:
            self._client._cancel(self.request)

    def close(self) -> None:
        """Forget the request, and cancel it where it still runs; may be called twice."""
        if not self._over:
            self._over = True
            self._client._forget(self.request)

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        try:
            outcome = await self._client._next(self.request)
        except BaseException:
            self.close()
            raise
        if isinstance(outcome, Finished):
            self._result = outcome.generation
            self.close()
            if outcome.chunk is None:
                raise StopAsyncIteration
            return outcome.chunk
        if not isinstance(outcome, Chunk):
            raise SkippyError(f"request {self.request}: wanted a chunk, got {type(outcome).__name__}")
        return outcome

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """The thread that owns the connection. ``deliver`` and ``fail`` run in ``loop``, events in order."""

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
