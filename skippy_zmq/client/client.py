"""The client for programs without an event loop."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from skippy_zmq.client import transfers
from skippy_zmq.client.connection import Connection
from skippy_zmq.client.outcomes import Event, Finished, Opened, Outcome
from skippy_zmq.client.requests import DEFAULT_MAX_TOKENS, GREEDY, Messages, check_timeout, generate_request
from skippy_zmq.client.results import Chunk, Generation
from skippy_zmq.client.stats import PipelineStats
from skippy_zmq.client.transfers import Ask, Progress, Run, Stages, Step, Transfer
from skippy_zmq.errors import OptionError, SkippyError
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.session_manifest import SessionFacts
from skippy_zmq.transport import Security
from skippy_zmq.wire.messages import (
    Detokenize,
    Detokenized,
    KvSessionReply,
    SamplingParams,
    StageFacts,
    Tokenize,
    Tokenized,
)

DEFAULT_CONTACT_SECONDS = 30.0
_T = TypeVar("_T")


class Client:
    """Asks a pipeline, at the address of its stage 0. One thread uses it; many requests may run at once.

    ``security`` and ``server_key``: keys of this process and the public key of the stages, where they use CURVE.
    ``timeout``: seconds that a request waits for the pipeline to be there and ready, and for answers other than
    generated text.

    Every method raises a SkippyError of the class and code that the stage sent, EndpointError where nothing answers,
    DeadlineError where an answer comes too late, StageLostError where a connection breaks.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        security: Security | None = None,
        server_key: bytes | None = None,
        timeout: float = DEFAULT_CONTACT_SECONDS,
    ) -> None:
        """Start to connect; does not wait. Raises EndpointError for an address that cannot be right."""
        self._connection = Connection(
            endpoint, security=security, server_key=server_key, contact_seconds=check_timeout(timeout)
        )
        self._conversation = self._connection.conversation
        self._mailboxes: dict[str, deque[Event]] = {}  # of one request, or of all of a transfer
        self._ids = itertools.count(1)

    @property
    def endpoint(self) -> str:
        return self._conversation.endpoint

    @property
    def stages(self) -> tuple[StageFacts, ...]:
        """Facts of all stages, in layer order; waits for a ready pipeline."""
        request = self._new_request()
        self._look()
        self._conversation.submit(request, None, time.monotonic())
        return self._answer(request, Opened).stages

    def generate(
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
        """The whole answer to exactly one of ``prompt`` (text as it is), ``messages`` (a chat) and ``token_ids``.

        ``stop``: texts that end the answer. ``timeout``: seconds for everything, None for any time.
        ``logits``: also return those that tokens were chosen by. ``keep``: have the stages keep the attention state of
        prompt and answer, which Generation.session then names. ``session``: the name of a kept or imported state to
        begin with, as far as its tokens begin the prompt; KvPageError where the stages do not have it.
        """
        with self.stream(
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
        ) as stream:
            for _ in stream:
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
    ) -> Stream:
        """The answer as it comes; parameters as for ``generate``."""
        self._connection.check_usable()
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
        self._look()
        self._conversation.submit(request, message, time.monotonic(), timeout=timeout)
        self._mailboxes[request] = deque()
        self._connection.flush()
        return Stream(self, request)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``. ``add_special``: BOS and its like where the model wants them."""
        request = self._new_request()
        message = Tokenize(request, text, add_special, parse_special)
        return self._ask(message, request, Tokenized).token_ids

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of ``token_ids``; they need not be whole characters."""
        request = self._new_request()
        return self._ask(Detokenize(request, tuple(token_ids)), request, Detokenized).data

    def stats(self, *, timeout: float | None = None) -> PipelineStats:
        """What every stage is doing and has done; does not wait until the pipeline is ready.

        A stage that does not answer within 5 seconds is told with the reason; an error is raised only where nothing is
        known of any. ``timeout``: seconds for all of it, else the client's.
        """
        request = self._new_request()
        self._look()
        self._connection.surveys.start(request, time.monotonic(), timeout)
        return self._answer(request, PipelineStats)

    def export_session(
        self,
        name: str,
        directory: str | Path,
        *,
        token_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> SessionFacts:
        """Save a kept session into ``directory``, in place of one saved there before; all of it or nothing.

        ``token_ids``: the conversation's, where they go on after those whose state is kept. ``progress`` is called with
        the number of pages done and that of all. Raises KvPageError where the stages do not have it (any more), where a
        page is damaged and where the directory holds something else.
        """
        return self._transfer(transfers.export_session(name, Path(directory), token_ids, progress))

    def export_pages(
        self, name: str, take: Callable[[KvPage], object], *, progress: Progress | None = None
    ) -> KvSessionReply:
        """Give ``take`` each page of a kept session from each stage, verified, and return its tokens."""
        return self._transfer(transfers.export_pages(name, take, progress))

    def import_session(self, directory: str | Path, *, progress: Progress | None = None) -> str:
        """Send a saved session to the stages, in whatever split they are, and return its name for ``generate``.

        It is this client's alone and gone when the stages make room or the client is closed. Raises KvPageError, saying
        what does not fit: another model, build, cache type or page size, a damaged file.
        """
        return self._transfer(transfers.import_session(Path(directory), progress))

    def import_pages(
        self,
        token_ids: Sequence[int],
        n_prompt: int,
        pages: Callable[[StageFacts], Iterable[KvPage]],
        *,
        progress: Progress | None = None,
    ) -> str:
        """Send each stage its ``pages``, first tokens first, and return the session's name. See KvSessionReply."""
        return self._transfer(transfers.import_pages(token_ids, n_prompt, pages, progress))

    def idle(self, seconds: float) -> None:
        """Keep the connections up meanwhile: what arrives is taken in, lost ones are dialled again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._sort(self._connection.step(until))

    def close(self) -> None:
        """Cancel what still runs and close the connections; may be called twice. Takes half a second at most."""
        for request in list(self._mailboxes):
            self._forget(request)
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For Stream.

    def _next(self, request: str) -> Outcome:
        """What comes next for ``request``; raises it where it is an error, which ends the request."""
        while True:
            mailbox = self._mailboxes.get(request)
            if mailbox is None:
                raise OptionError(f"request {request}: closed")
            if mailbox:
                _, outcome = mailbox.popleft()
                if isinstance(outcome, SkippyError):
                    del self._mailboxes[request]
                    raise outcome
                return outcome
            self._sort(self._connection.step())

    def _sort(self, events: list[Event]) -> None:
        for event in events:
            mailbox = self._mailboxes.get(event[0])
            if mailbox is not None:
                mailbox.append(event)

    def _forget(self, request: str) -> None:
        if self._mailboxes.pop(request, None) is not None:
            self._conversation.abandon(request)
            self._connection.flush()

    def _cancel_soon(self, request: str) -> None:
        self._connection.post(lambda: self._conversation.cancel(request, time.monotonic()))

    # Inside.

    def _look(self) -> None:
        """Nobody looks after the connections while the program does something else: what was lost has to show first."""
        self._sort(self._connection.look())

    def _new_request(self) -> str:
        return f"r{next(self._ids)}"

    def _transfer(self, steps: Transfer[_T]) -> _T:
        mailbox: deque[Event] = deque()
        answer: object = None
        self._look()
        try:
            while True:
                try:
                    step = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
                except StopIteration as stop:
                    result: _T = stop.value
                    return result
                try:
                    answer = self._carry_out(step, mailbox)
                except SkippyError as error:
                    answer = error
        finally:
            steps.close()
            for request in [request for request, known in self._mailboxes.items() if known is mailbox]:
                self._forget(request)

    def _carry_out(self, step: Step, mailbox: deque[Event]) -> object:
        if isinstance(step, Stages):
            return self.stages
        if isinstance(step, Run):
            return step.call()
        if isinstance(step, Ask):
            request = self._new_request()
            message = step.make(request)
            self._conversation.submit(
                request, message, time.monotonic(), payloads=step.payloads, timeout=step.seconds, to=step.to
            )
            self._mailboxes[request] = mailbox
            self._connection.flush()
            return request
        while not mailbox:
            self._sort(self._connection.step())
        event = mailbox.popleft()
        del self._mailboxes[event[0]]
        return event

    def _ask(self, message: Tokenize | Detokenize, request: str, kind: type[_T]) -> _T:
        self._look()
        self._conversation.submit(request, message, time.monotonic())
        return self._answer(request, kind)

    def _answer(self, request: str, kind: type[_T]) -> _T:
        self._mailboxes[request] = deque()
        try:
            outcome = self._next(request)
        finally:
            self._forget(request)
        if not isinstance(outcome, kind):
            raise SkippyError(f"request {request}: wanted {kind.__name__}, got {type(outcome).__name__}")
        return outcome


class Stream(Iterator[Chunk]):
    """The chunks of one answer. Leaving a ``for`` or ``with`` early, or ``close``, cancels the request."""

    def __init__(self, client: Client, request: str) -> None:
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
        """End the answer early: a last chunk with finish reason "cancelled" follows. Fit for a signal handler."""
        self._client._cancel_soon(self.request)

    def close(self) -> None:
        """Forget the request, and cancel it where it still runs; may be called twice."""
        if not self._over:
            self._over = True
            self._client._forget(self.request)

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        try:
            outcome = self._client._next(self.request)
        except SkippyError:
            self._over = True
            raise
        if isinstance(outcome, Finished):
            self._result = outcome.generation
            self.close()
            if outcome.chunk is None:
                raise StopIteration
            return outcome.chunk
        if not isinstance(outcome, Chunk):
            raise SkippyError(f"request {self.request}: wanted a chunk, got {type(outcome).__name__}")
        return outcome

    def __iter__(self) -> Iterator[Chunk]:
        # A generator, so that leaving the loop early is noticed.
        try:
            while not self._over:
                try:
                    chunk = next(self)
                except StopIteration:
                    return
                yield chunk
        finally:
            self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
