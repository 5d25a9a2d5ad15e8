"""Stage 0's own part: requests, what the ring runs next, and what comes back from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from skippy_zmq.chat.renderer import TemplateRenderer
from skippy_zmq.errors import SkippyError
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.stage.absences import Absences
from skippy_zmq.stage.batches import BatchRunner, RingAnswer
from skippy_zmq.stage.meters import Meters, RingMeter
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.stage.prefixes import Prefixes
from skippy_zmq.stage.requests import CloseSession, RequestTable, SendToClient
from skippy_zmq.stage.scheduling import join_ring, new_scheduler, scheduler_counters
from skippy_zmq.stage.tokenizing import BackgroundTokenizer
from skippy_zmq.wire import messages as wire

log = logging.getLogger("skippy_zmq.stage")


class Head:
    """Requests and the scheduler of a pipeline. ``close_session`` ends a session here and down the ring."""

    def __init__(
        self,
        model: StageModel,
        facts: wire.StageFacts,
        meters: Meters,
        batches: BatchRunner,
        pages: LanePages,
        tokenizer: BackgroundTokenizer,
        send: SendToClient,
        close_session: CloseSession,
    ) -> None:
        native = model.native_model
        bos, eos = (
            model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
            for token in (native.bos, native.eos)
        )
        self._send = send
        self._batches = batches
        self._ring_meter = RingMeter(meters)
        self._scheduler = new_scheduler(model.options, facts)
        self._absences = Absences(0.0)  # of those who wait for an answer
        self.renderer = TemplateRenderer(model.source.chat_template or "", bos, eos)
        self.renderer.start()
        self._prefixes = Prefixes(pages, send, self._ask_ring)
        self.requests = RequestTable(
            model,
            self._scheduler,
            self.renderer,
            send,
            close_session,
            facts.stage.rpartition("-")[2],
            tokenizer,
            self._prefixes,
        )

    def _ask_ring(self, question: wire.KvMatch | wire.KvKeep) -> None:
        if isinstance(question, wire.KvMatch):
            self._batches.match(question)
        else:
            self._batches.keep(question)

    @property
    def busy(self) -> bool:
        return bool(self.requests.queued or self.requests.running)

    @property
    def has_work(self) -> bool:
        """Whether ``run_next`` would run something."""
        return self._scheduler.has_work

    def next_deadline(self) -> float | None:
        """When ``tick`` is due (monotonic seconds), if at all."""
        times = [at for at in (self.requests.next_deadline(), self._absences.due) if at is not None]
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Do what is due by ``now``."""
        if (due := self._absences.due) is not None and due <= now:
            self._look_for_clients(now)
        self.requests.expire(now)

    def connections_ended(self) -> None:
        """Some peer's connection ended; if it was a client's, its requests are to end too."""
        self._absences.connection_ended(time.monotonic())

    def _look_for_clients(self, now: float) -> None:
        """End the requests of clients that are gone: nothing else is sent to one that waits or has a long prompt."""
        for client in self._absences.look(now, self.requests.clients, lambda peer: self._send(peer, wire.Ping(0))):
            log.info("client %r is gone", client)
            self.requests.forget_client(client)

    def forget_imports(self, client: bytes) -> None:
        """Sessions that a client brought cannot be begun with any more."""
        self._prefixes.forget_client(client)

    def run_next(self) -> None:
        """Run the next batch through this stage, if one can go."""
        batch = self._scheduler.next_batch()
        if batch is not None:
            self._ring_meter.formed(batch.number)
            self._batches.run_scheduled(batch, self.requests.opening(batch))
        self._scheduler.learn()  # others wait for what was sent, nobody for what is learnt

    def take_answer(self, answer: RingAnswer) -> None:
        """A batch has left the ring, or a question about pages has gone round it."""
        if isinstance(answer, wire.KvAnswer):
            self.requests.take_kv_answer(answer)
        else:
            self._take_done(answer)

    def _take_done(self, done: wire.BatchDone) -> None:
        times = done.times
        travel_us = self._ring_meter.done(done.batch, times)
        if self._scheduler.batch_done(done.batch, travel_us, times.slowest_us, times.compute_us):
            self.requests.take_tokens(done)

    def join(self, stages: Sequence[wire.StageFacts]) -> None:
        """The ring is closed: the whole pipeline is known."""
        join_ring(self._scheduler, stages)
        self._prefixes.join(stages)

    def lose(self, why: str) -> None:
        """The ring broke: what has a lane begins anew when it is closed again, what waits goes on waiting."""
        self.requests.suspend(why, time.monotonic())
        self._scheduler.reset()
        self._ring_meter.reset()

    def fail_all(self, error: SkippyError) -> None:
        self.requests.fail_all(error)

    def counters(self, n_stages: int) -> dict[str, int]:
        """Its part of STATS_REPLY."""
        return {
            "now.requests_queued": self.requests.queued,
            "now.requests_running": self.requests.running,
            **scheduler_counters(self._scheduler, n_stages),
        }

    def close(self) -> None:
        self.renderer.close()
