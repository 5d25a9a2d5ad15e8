"""The client for asyncio: the same connection, on a thread of its own, which is the owner of its sockets."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from skippy_zmq.client import transfers
from skippy_zmq.client.client import DEFAULT_CONTACT_SECONDS
from skippy_zmq.client.connection import Connection
from skippy_zmq.client.outcomes import Event, Finished, Opened, Outcome
from skippy_zmq.client.requests import DEFAULT_MAX_TOKENS, GREEDY, Messages, check_timeout, generate_request
from skippy_zmq.client.results import Chunk, Generation
from skippy_zmq.client.stats import PipelineStats
from skippy_zmq.client.transfers import Ask, Progress, Run, Stages, Step, Transfer
from skippy_zmq.client.worker import Worker
from skippy_zmq.errors import OptionError, SkippyError
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.session_manifest import SessionFacts
from skippy_zmq.transport import Endpoint, Security
from skippy_zmq.wire.messages import (
    Detokenize,
    Detokenized,
    Generate,
    KvSessionReply,
    SamplingParams,
    StageFacts,
    Tokenize,
    Tokenized,
)

_T = TypeVar("_T")
_Mailbox = asyncio.Queue[Event]  # of one request, or of all of a transfer


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
        self._worker: Worker | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
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
        worker = Worker(make, self._deliver, self._fail, asyncio.get_running_loop())
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
        keep: bool = False,
        session: str = "",
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
            keep=keep,
            session=session,
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
        keep: bool = False,
        session: str = "",
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
            keep=keep,
            session=session,
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

    async def export_session(
        self,
        name: str,
        directory: str | Path,
        *,
        token_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> SessionFacts:
        """As Client.export_session; files are written, and ``progress`` is called, without holding up the loop."""
        return await self._transfer(transfers.export_session(name, Path(directory), token_ids, progress))

    async def export_pages(
        self, name: str, take: Callable[[KvPage], object], *, progress: Progress | None = None
    ) -> KvSessionReply:
        """As Client.export_pages; ``take`` is called in a thread, for one page at a time."""
        return await self._transfer(transfers.export_pages(name, take, progress))

    async def import_session(self, directory: str | Path, *, progress: Progress | None = None) -> str:
        """As Client.import_session."""
        return await self._transfer(transfers.import_session(Path(directory), progress))

    async def import_pages(
        self,
        token_ids: Sequence[int],
        n_prompt: int,
        pages: Callable[[StageFacts], Iterable[KvPage]],
        *,
        progress: Progress | None = None,
    ) -> str:
        """As Client.import_pages; the iterables are read in a thread, one page at a time."""
        return await self._transfer(transfers.import_pages(token_ids, n_prompt, pages, progress))

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
        _, outcome = await mailbox.get()
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

    def _running(self) -> Worker:
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

    def _start(self, request: str, begin: Callable[[], None], mailbox: _Mailbox | None = None) -> None:
        """Have the thread ``begin``; what that raises is the outcome of ``request``."""
        worker = self._running()
        self._mailboxes[request] = asyncio.Queue() if mailbox is None else mailbox

        def start() -> None:
            try:
                begin()
            except SkippyError as error:
                worker.tell([(request, error)])

        worker.post(start)

    async def _transfer(self, steps: Transfer[_T]) -> _T:
        mailbox: _Mailbox = asyncio.Queue()
        under_way: set[str] = set()
        answer: object = None
        try:
            while True:
                try:
                    step = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
                except StopIteration as stop:
                    result: _T = stop.value
                    return result
                try:
                    answer = await self._carry_out(step, mailbox, under_way)
                except SkippyError as error:
                    answer = error
        finally:
            steps.close()
            for request in under_way:
                self._forget(request)

    async def _carry_out(self, step: Step, mailbox: _Mailbox, under_way: set[str]) -> object:
        if isinstance(step, Stages):
            return await self.stages()
        if isinstance(step, Run):
            return await _in_thread(step.call)
        if isinstance(step, Ask):
            request, worker, ask = self._new_request(), self._running(), step
            message = ask.make(request)

            def submit() -> None:
                worker.connection.conversation.submit(
                    request, message, time.monotonic(), payloads=ask.payloads, timeout=ask.seconds, to=ask.to
                )

            under_way.add(request)
            self._start(request, submit, mailbox)
            return request
        request, outcome = await mailbox.get()
        under_way.discard(request)
        self._mailboxes.pop(request, None)
        return request, outcome

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
                self._mailboxes[request].put_nowait((request, outcome))

    def _fail(self, error: SkippyError) -> None:
        for request, mailbox in self._mailboxes.items():
            mailbox.put_nowait((request, error))
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


async def _in_thread(call: Callable[[], _T]) -> _T:
    """What ``call`` returns; it has come to its end in any case, so that nothing is undone under its hands."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
