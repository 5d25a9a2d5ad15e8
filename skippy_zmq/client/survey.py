"""Asks every stage of a pipeline what it has done. Pure, as the Conversation that it asks by; the time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from skippy_zmq.client.conversation import Conversation
from skippy_zmq.client.outcomes import Event, Outcome
from skippy_zmq.client.requests import check_timeout
from skippy_zmq.client.stats import PipelineStats, StageStats
from skippy_zmq.errors import SkippyError
from skippy_zmq.wire.messages import StageFacts, Stats, StatsReply

# How long a stage behind stage 0 may take; the caller's own limit holds for all of it.
STAGE_SECONDS = 5.0


@dataclass(slots=True)
class _Survey:
    until: float
    asked: dict[str, StageFacts | None] = field(default_factory=dict)  # by request; None: stage 0
    outcomes: dict[str, StageStats | SkippyError] = field(default_factory=dict)


class Surveys:
    """Stage 0 is asked first, since its WELCOME says which others there are; those known from before, with it.

    A stage that does not answer is told with the reason. Where stage 0 does not and no other is known, its error is the
    outcome.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._running: dict[str, _Survey] = {}
        self._known: tuple[StageFacts, ...] = ()

    def start(self, request: str, now: float, timeout: float | None = None) -> None:
        """Begin; after ``timeout`` seconds at most ``sift`` returns a PipelineStats, or an error, for ``request``."""
        seconds = self._conversation.contact_seconds if timeout is None else check_timeout(timeout)
        survey = self._running[request] = _Survey(now + seconds)
        self._ask(request, survey, None, now)
        self._ask_others(request, survey, now)

    def sift(self, events: list[Event], now: float) -> list[Event]:
        """Take in what concerns surveys; return the rest, and the surveys that are complete."""
        self._known = _joined(self._known, self._conversation.stages)
        others: list[Event] = []
        for asked, outcome in events:
            request = asked.partition("/")[0]
            if asked == request:
                others.append((asked, outcome))
            elif request in self._running:
                self._take(request, asked, outcome, now)
                if (result := self._result(self._running[request])) is not None:
                    del self._running[request]
                    others.append((request, result))
        return others

    def _take(self, request: str, asked: str, outcome: Outcome, now: float) -> None:
        survey = self._running[request]
        if isinstance(outcome, StatsReply):
            survey.outcomes[asked] = StageStats(outcome.facts, outcome.counters, taken_at=now)
        elif isinstance(outcome, SkippyError):
            survey.outcomes[asked] = outcome
        if survey.asked[asked] is None:
            self._ask_others(request, survey, now)

    def _ask_others(self, request: str, survey: _Survey, now: float) -> None:
        endpoints = {stage.endpoint for stage in survey.asked.values() if stage is not None}
        for stage in self._known[1:]:
            if stage.endpoint not in endpoints:
                self._ask(request, survey, stage, now)

    def _ask(self, request: str, survey: _Survey, stage: StageFacts | None, now: float) -> None:
        # A millisecond at least, so that a stage asked late is reported in the same way.
        left = max(0.001, round(survey.until - now, 3))
        asked = f"{request}/{len(survey.asked)}"
        survey.asked[asked] = stage
        seconds = left if stage is None else min(left, STAGE_SECONDS)
        self._conversation.submit(asked, Stats(asked), now, timeout=seconds, to=stage, ask_ready=stage is None)

    def _result(self, survey: _Survey) -> PipelineStats | SkippyError | None:
        if len(survey.outcomes) < len(survey.asked):
            return None
        stages = []
        for asked, outcome in survey.outcomes.items():
            facts = survey.asked[asked] or (self._known[0] if self._known else None)
            if isinstance(outcome, StageStats):
                stages.append(outcome)
            elif facts is None:
                return outcome
            else:
                stages.append(StageStats(facts, failure=outcome))
        stages.sort(key=lambda stage: stage.facts.layer_start)
        return PipelineStats(self._conversation.endpoint, self._conversation.said_ready, tuple(stages))


def _joined(known: tuple[StageFacts, ...], told: tuple[StageFacts, ...]) -> tuple[StageFacts, ...]:
    """What stage 0 tells, and behind that what was known: it forgets the stages behind one that it has lost."""
    if not told:
        return known
    behind = (s for s in known if s.layer_start >= told[-1].layer_end and s.model == told[0].model)
    return (*told, *behind)
