"""Running what travels down the ring: batches, ends of sessions, batches that failed in front, pages in question."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from skippy_zmq.errors import KvPageError, NativeError, ProtocolError
from skippy_zmq.runtime.stage_model import Crossing, StageModel, Tokens
from skippy_zmq.schedule.scheduler import Batch
from skippy_zmq.stage.last import TokenSource
from skippy_zmq.stage.meters import Meters
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.failures import clipped

log = logging.getLogger("skippy_zmq.stage")

_TOKEN = np.dtype("<i4")  # on the wire

RingMessage = wire.Activations | wire.SessionClose | wire.BatchFailed | wire.KvMatch | wire.KvKeep
RingAnswer = wire.BatchDone | wire.KvAnswer
SendDown = Callable[[RingMessage, Sequence[memoryview]], None]


class BatchRunner:
    """Runs ring messages through the model, in the order given, and hands on what follows from them.

    ``tokens``: of the last stage, else None. ``send_down`` reaches the next stage, ``answer`` stage 0.
    """

    def __init__(
        self,
        model: StageModel,
        facts: wire.StageFacts,
        tokens: TokenSource | None,
        meters: Meters,
        pages: LanePages,
        send_down: SendDown,
        answer: Callable[[RingAnswer], None],
    ) -> None:
        self._model = model
        self._facts = facts
        self._tokens = tokens
        self._meters = meters
        self._pages = pages
        self._send_down = send_down
        self._answer = answer
        self._lanes: dict[str, int] = {}  # of the sessions that are open here

    @property
    def sessions(self) -> int:
        return len(self._lanes)

    @property
    def kv_cells(self) -> int:
        """Cells in use, of all lanes."""
        return sum(self._model.position(lane) for lane in set(self._lanes.values()))

    def run_scheduled(self, batch: Batch, opens: tuple[wire.SessionOpen, ...]) -> None:
        """Stage 0: begin a batch that the scheduler has formed."""
        rows = tuple(wire.SessionRows(r.session, r.lane, r.position, r.n_rows, r.sample) for r in batch.rows)
        tokens = np.array(batch.tokens, _TOKEN)
        message = wire.Activations(
            batch.number,
            self._facts.stage,
            self._facts.layer_start,
            self._facts.layer_end,
            batch.phase,
            rows,
            tokens.tobytes(),
            (),
            opens,
            wire.NO_TIMES,
        )
        self._run(message, tokens.astype(np.int32, copy=False), (), time.monotonic_ns())

    def run(self, message: RingMessage, payloads: Sequence[memoryview], taken_at: int) -> None:
        """Run a message from upstream that was taken from the socket at ``taken_at`` (monotonic nanoseconds)."""
        if isinstance(message, wire.SessionClose):
            self.close(message)
        elif isinstance(message, wire.BatchFailed):
            self._open(message.opens, restore=False)
            self._fail(message)
        elif isinstance(message, wire.KvMatch):
            self.match(message)
        elif isinstance(message, wire.KvKeep):
            self.keep(message)
        else:
            tokens = np.frombuffer(message.tokens, _TOKEN).astype(np.int32, copy=False)
            arriving = [Crossing(d, data) for d, data in zip(message.tensors, payloads, strict=True)]
            self._run(message, tokens, arriving, taken_at)

    def match(self, message: wire.KvMatch) -> None:
        """See how many pages are here, and behind."""
        pages = self._pages.match(message.session, message.links, message.pages, message.owner)
        self._ask_behind(dataclasses.replace(message, pages=pages))

    def keep(self, message: wire.KvKeep) -> None:
        """Keep the pages of a session that is about to end, here and behind."""
        self._ask_behind(dataclasses.replace(message, pages=min(message.pages, self._pages.keep(message.session))))

    def _ask_behind(self, message: wire.KvMatch | wire.KvKeep) -> None:
        if self._model.is_last:
            self._answer(wire.KvAnswer(message.session, message.pages))
        else:
            self._send_down(message, ())

    def close(self, message: wire.SessionClose) -> None:
        """End a session, behind this stage and here; its lane holds nothing afterwards."""
        self._send_down(message, ())
        self._pages.end(message.session)
        lane = self._lanes.pop(message.session, None)
        self._meters.sessions_open(len(self._lanes))
        if lane is not None and lane not in self._lanes.values():
            self._model.trim(lane, 0)
        if self._tokens is not None:
            self._tokens.close(message.session, message.reason)

    def close_all(self) -> None:
        """The upstream is another one: whatever the old one had under way is over, here and behind."""
        for session, lane in list(self._lanes.items()):
            self.close(wire.SessionClose(session, lane, "error"))
        self._pages.end_all()
        if self._tokens is not None:
            self._tokens.close_all()

    def drop_all(self) -> None:
        """What is behind went away and knows nothing any more: forget every session here."""
        self._lanes.clear()
        self._pages.end_all()
        self._meters.sessions_open(0)
        for lane in range(self._facts.lanes):
            self._model.trim(lane, 0)

    def _run(self, message: wire.Activations, tokens: Tokens, arriving: Sequence[Crossing], taken_at: int) -> None:
        try:
            failed = self._open(message.opens)
        except (KvPageError, NativeError) as error:  # stage 0 begins it anew, without pages
            log.warning("session %s: its pages could not be restored: %s", message.opens[0].session, error)
            sessions = tuple(entry.session for entry in message.rows)
            self._fail(wire.BatchFailed(message.batch, sessions, message.opens, "kv_page", clipped(str(error))))
            return
        outputs: list[int] = []
        n_rows = 0
        for entry in message.rows:
            n_rows += entry.n_rows
            if entry.sample and self._model.is_last:
                n_outputs = entry.n_rows if message.phase == "replay" else 1
                outputs += range(n_rows - n_outputs, n_rows)
        started = time.monotonic_ns()
        try:
            for entry in message.rows:
                if self._lanes.get(entry.session) != entry.lane:
                    raise ProtocolError(f"session {entry.session} on lane {entry.lane} was not opened here")
            leaving = self._model.run([(e.lane, e.position, e.n_rows) for e in message.rows], tokens, outputs, arriving)
        except (ProtocolError, NativeError) as error:
            log.error("batch %d: %s", message.batch, error)
            sessions = tuple(entry.session for entry in message.rows)
            self._fail(wire.BatchFailed(message.batch, sessions, message.opens, error.code, clipped(str(error))))
            return
        compute_us = (time.monotonic_ns() - started) // 1000
        if self._tokens is None:
            self._pass_on(message, leaving, self._times(message.times, compute_us, taken_at))
            self._pages.ran(message, tokens)
        else:
            sampled, more_failed = self._tokens.take(message.rows, tokens, each_row=message.phase == "replay")
            times = self._times(message.times, compute_us, taken_at)
            alone = self._model.is_first  # then a session may be kept while the answer is taken
            if alone:
                self._pages.ran(message, tokens)
            self._answer(wire.BatchDone(message.batch, tuple(sampled), (*failed, *more_failed), times))
            self._tokens.stream()
            if not alone:
                self._pages.ran(message, tokens)
        # Last: others wait for what was sent, nobody for what is noted.
        self._meters.ran(message.phase, n_rows, (started - taken_at) // 1000, compute_us)

    @staticmethod
    def _times(before: wire.BatchTimes, compute_us: int, taken_at: int) -> wire.BatchTimes:
        """``before`` and this stage's own part, up to now."""
        spent_us = (time.monotonic_ns() - taken_at) // 1000
        return wire.BatchTimes(
            before.spent_us + spent_us, before.compute_us + compute_us, max(before.slowest_us, compute_us)
        )

    def _pass_on(self, message: wire.Activations, leaving: Sequence[Crossing], times: wire.BatchTimes) -> None:
        activations = wire.Activations(
            message.batch,
            self._facts.stage,
            self._facts.layer_start,
            self._facts.layer_end,
            message.phase,
            message.rows,
            message.tokens,
            tuple(item.descriptor for item in leaving),
            message.opens,
            times,
        )
        self._send_down(activations, [item.data for item in leaving])
        self._meters.counts["bytes_sent"] += sum(item.descriptor.nbytes for item in leaving)

    def _open(self, opens: Sequence[wire.SessionOpen], *, restore: bool = True) -> list[tuple[str, str, str]]:
        """Begin sessions; return (session, code, message) of those that cannot be sampled for.

        Raises KvPageError or NativeError where the state that one begins with cannot be restored.
        """
        failed = []
        for opened in opens:
            self._lanes[opened.session] = opened.lane
            self._meters.counts["sessions"] += 1
            if restore:
                self._pages.open(opened)
            if self._tokens is not None and (problem := self._tokens.open(opened)) is not None:
                failed.append(problem)
        if opens:
            self._meters.sessions_open(len(self._lanes))
        return failed

    def _fail(self, message: wire.BatchFailed) -> None:
        """A batch did not run, here or in front: its sessions end, others go on."""
        over = message.code == "cancelled"  # its session is: who asked was told, or will be by the end that follows
        if not over:
            self._meters.counts["batches_failed"] += 1
        if self._tokens is None:
            self._send_down(message, ())
            return
        sessions = () if over else message.sessions
        for session in sessions:
            if message.code == "kv_page":
                self._tokens.close(session, "error")
            else:
                self._tokens.fail(session, message.code, message.message)
        failed = tuple((session, message.code, message.message) for session in sessions)
        self._answer(wire.BatchDone(message.batch, (), failed, wire.NO_TIMES))
