"""Statistics at the client: what follows from counters, whom it asks, and what a person and a script see of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import pytest
from conversation_driver import CONTACT, END, FIRST, LAST, MIDDLE, STAGES, ZERO, Driver

from skippy_zmq.client.history import History
from skippy_zmq.client.json_values import change_values, stats_values
from skippy_zmq.client.outcomes import Connect, Event
from skippy_zmq.client.stats import PipelineStats, StageStats
from skippy_zmq.client.stats_view import stats_report
from skippy_zmq.client.survey import STAGE_SECONDS, Surveys
from skippy_zmq.client.watch_view import frame, interval_line
from skippy_zmq.errors import DeadlineError, EndpointError, StageLostError
from skippy_zmq.wire.messages import Message, Ping, Pong, Stats, StatsReply, Welcome

COUNTERS = {
    "compute_us": 600_000,
    "active_us": 800_000,
    "queue_us": 20_000,
    "batches": 100,
    "rows": 450,
    "tokens": 90,
    "batch_rows.1": 60,
    "batch_rows.8": 40,
    "batch_rows.16": 0,
    "errors.busy": 3,
    "errors.deadline": 0,
    "now.kv_cells": 4096,
    "now.lanes_busy": 2,
    "of.the.future": 17,
}
RING = {
    "ring.batches": 100,
    "ring.round_trip_us": 2_000_000,
    "ring.spent_us": 1_700_000,
    "ring.compute_us": 1_500_000,
    "credit_waits": 7,
    "now.hop_us": 150,
    "now.requests_running": 2,
    "now.requests_queued": 5,
    "now.chunk_rows": 128,
    "now.groups": 2,
}


def pipeline(*counters: Mapping[str, int], at: float = 1.0) -> PipelineStats:
    """The three stages of conversation_driver with these counters."""
    stages = (StageStats(s, c, taken_at=at) for s, c in zip(STAGES, counters, strict=True))
    return PipelineStats(FIRST, True, tuple(stages))


# What follows from the counters.


def test_values_that_follow_from_counters() -> None:
    stage = StageStats(ZERO, COUNTERS)
    assert stage.bubble_share == pytest.approx(0.25)
    assert (stage.rows_per_batch, stage.compute_us_per_batch, stage.queue_us_per_batch) == (4.5, 6000, 200)
    assert stage.batch_sizes == {1: 60, 8: 40}
    assert stage.errors == {"busy": 3}
    assert (stage.lanes_busy, stage.kv_cells, stage.kv_cells_total) == (2, 4096, ZERO.lanes * ZERO.n_ctx)


def test_what_a_stage_does_not_send_counts_as_nothing() -> None:
    stage = StageStats(ZERO)
    assert (stage.bubble_share, stage.rows_per_batch, stage.batch_sizes, stage.errors) == (None, None, {}, {})
    assert (stage.lanes_busy, stage.kv_cells, stage.count("tokens")) == (0, 0, 0)
    ring = pipeline({}, {}, {}).ring
    assert ring is not None
    assert (ring.batches, ring.round_trip_us, ring.waiting_us, ring.credit_waits) == (0, None, None, 0)


@pytest.mark.parametrize(("compute_us", "share"), [(0, 1.0), (80, 0.2), (100, 0.0), (130, 0.0)])
def test_a_bubble_share_is_a_share(compute_us: int, share: float) -> None:
    counters = {"compute_us": compute_us, "active_us": 100}
    assert StageStats(ZERO, counters).bubble_share == pytest.approx(share)


def test_a_stage_that_gives_out_no_lanes_has_those_of_its_sessions() -> None:
    assert StageStats(END, {"now.sessions": 3}).lanes_busy == 3


@pytest.mark.parametrize(("hop_us", "waiting_us"), [(0, 5000), (150, 4550), (9000, 0)])
def test_waiting_is_the_round_trip_without_model_and_travel(hop_us: int, waiting_us: float) -> None:
    ring = pipeline({**RING, "now.hop_us": hop_us}, {}, {}).ring
    assert ring is not None
    assert (ring.hops, ring.round_trip_us, ring.compute_us, ring.spent_us) == (3, 20_000, 15_000, 17_000)
    assert ring.waiting_us == pytest.approx(waiting_us)


def test_a_stage_alone_has_no_hops() -> None:
    ring = PipelineStats(FIRST, True, (StageStats(ZERO, RING),)).ring
    assert ring is not None
    assert (ring.hops, ring.waiting_us) == (0, 5000)


def test_layers_without_a_stage_are_named() -> None:
    lost = EndpointError("gone")
    whole = pipeline({}, {}, {})
    assert (whole.missing_layers, whole.complete) == ((), True)
    assert PipelineStats(FIRST, False, whole.stages).complete is False
    assert PipelineStats(FIRST, True, (whole[0], whole[2])).missing_layers == ("10:20",)
    assert PipelineStats(FIRST, True, whole[1:2]).missing_layers == ("0:10", "20:30")
    assert PipelineStats(FIRST, True, (*whole[:2], StageStats(END, failure=lost))).complete is False


def test_differences_are_of_counters_and_leave_gauges() -> None:
    before, after = (
        StageStats(ZERO, {"rows": 5, "now.queue": 4}),
        StageStats(ZERO, {"rows": 12, "x": 1, "now.queue": 3}),
    )
    assert after.since(before).counters == {"rows": 7, "x": 1, "now.queue": 3}


def test_a_stage_that_was_started_anew_counts_from_its_start() -> None:
    anew = StageStats(dataclasses.replace(ZERO, stage="other-1"), {"rows": 12})
    assert anew.since(StageStats(ZERO, {"rows": 500})).counters == {"rows": 12}


def test_rates_are_of_the_time_between_the_answers_of_that_stage() -> None:
    history = History()
    first = history.add(pipeline({"rows": 10}, {"rows": 10}, {"tokens": 5}, at=1.0))
    assert (first.rows_per_s, first.tokens_per_s, first.stages[0].busy_share) == (None, None, None)
    middle_lost = list(pipeline({"rows": 30, "compute_us": 500_000}, {}, {"tokens": 9}, at=3.0))
    middle_lost[1] = StageStats(MIDDLE, failure=StageLostError("gone"))
    second = history.add(PipelineStats(FIRST, False, tuple(middle_lost)))
    assert (second.rows_per_s, second.tokens_per_s) == (10, 2)
    assert second.stages[0].busy_share == 0.25
    assert second.stages[1].change is None
    back = history.add(pipeline({"rows": 30}, {"rows": 50}, {"tokens": 9}, at=5.0))
    assert [stage.per_second("rows") for stage in back.stages] == [0, 10, 0]
    assert back.tokens_per_s == 0


# Whom it asks.


class Surveyor(Driver):
    """A driver that surveys the pipeline as request r1."""

    def __init__(self) -> None:
        super().__init__()
        self.surveys = Surveys(self.conversation)

    def told(self, now: float = 1.0) -> list[Event]:
        return self.surveys.sift(self.events(), now)

    def survey(self, now: float = 1.0, timeout: float | None = None) -> list[Connect | tuple[str, Message]]:
        self.surveys.start("r1", now, timeout)
        return self.actions()

    def result(self, now: float = 1.0) -> PipelineStats:
        ((request, stats),) = self.told(now)
        assert request == "r1"
        assert isinstance(stats, PipelineStats)
        return stats


@pytest.fixture
def surveyor() -> Surveyor:
    return Surveyor()


def replied(request: str, index: int) -> StatsReply:
    return StatsReply(request, STAGES[index], {"rows": index})


def test_stage_0_is_asked_first_and_then_all_that_it_knows(surveyor: Surveyor) -> None:
    surveyor.opened()
    assert surveyor.survey() == [(FIRST, Ping(0)), (FIRST, Stats("r1/0"))]
    surveyor.hear(FIRST, Pong(0, True), replied("r1/0", 0))
    assert surveyor.told() == []
    assert surveyor.actions() == [Connect(MIDDLE.endpoint), (LAST, Stats("r1/2"))]
    surveyor.conversation.connected(MIDDLE.endpoint)
    surveyor.hear(MIDDLE.endpoint, Welcome((MIDDLE, END), ready=True))
    assert surveyor.actions()[-1] == (MIDDLE.endpoint, Stats("r1/1"))
    surveyor.hear(LAST, replied("r1/2", 2))
    assert surveyor.told() == []
    surveyor.hear(MIDDLE.endpoint, replied("r1/1", 1))
    stats = surveyor.result(now=4.0)
    assert [stage.facts for stage in stats] == list(STAGES)
    assert [stage.counters for stage in stats] == [{"rows": 0}, {"rows": 1}, {"rows": 2}]
    assert (stats.endpoint, stats.complete, stats[1].taken_at) == (FIRST, True, 4.0)


def test_it_does_not_wait_for_a_ready_pipeline(surveyor: Surveyor) -> None:
    surveyor.conversation.connected(FIRST)
    surveyor.hear(FIRST, Welcome((ZERO,), ready=False))
    surveyor.survey()
    surveyor.hear(FIRST, Pong(0, False), replied("r1/0", 0))
    stats = surveyor.result()
    assert (len(stats), stats.ready, stats.missing_layers) == (1, False, ("10:30",))


def test_a_stage_that_cannot_be_reached_is_told_with_the_reason(surveyor: Surveyor) -> None:
    surveyor.opened().survey()
    surveyor.hear(FIRST, replied("r1/0", 0))
    surveyor.told()
    surveyor.hear(LAST, replied("r1/2", 2))
    assert surveyor.told() == []
    surveyor.conversation.expire(1.0 + STAGE_SECONDS)
    stats = surveyor.result()
    assert [stage.failure is None for stage in stats] == [True, False, True]
    assert isinstance(stats[1].failure, EndpointError)
    assert MIDDLE.endpoint in str(stats[1].failure)
    assert f"within {STAGE_SECONDS:g} s" in str(stats[1].failure)


def test_a_stage_that_is_lost_meanwhile_is_told_with_the_reason(surveyor: Surveyor) -> None:
    surveyor.opened().survey()
    surveyor.hear(FIRST, replied("r1/0", 0))
    surveyor.told()
    surveyor.conversation.disconnected(LAST, f"{LAST}: connection lost")
    surveyor.conversation.expire(1.0 + STAGE_SECONDS)
    stats = surveyor.result()
    assert isinstance(stats[2].failure, StageLostError)
    assert LAST in str(stats[2].failure)


def test_the_stages_known_from_before_are_asked_though_stage_0_is_gone(surveyor: Surveyor) -> None:
    surveyor.opened().told()
    surveyor.conversation.disconnected(FIRST, f"{FIRST}: connection lost")
    assert (LAST, Stats("r1/2")) in surveyor.survey(timeout=2.0)
    surveyor.hear(LAST, replied("r1/2", 2))
    surveyor.conversation.expire(3.0)
    stats = surveyor.result()
    assert [stage.facts for stage in stats] == list(STAGES)
    assert [type(stage.failure) for stage in stats] == [EndpointError, EndpointError, type(None)]
    assert (stats.ready, stats.ring) == (False, None)


def test_stages_that_stage_0_has_lost_are_remembered_until_it_knows_others(surveyor: Surveyor) -> None:
    surveyor.opened().told()
    surveyor.conversation.disconnected(FIRST, "gone")
    surveyor.conversation.connected(FIRST)
    surveyor.hear(FIRST, Welcome((ZERO,), ready=False))
    surveyor.told()
    surveyor.survey()
    surveyor.conversation.expire(1.0 + CONTACT)
    assert [stage.facts for stage in surveyor.result()] == list(STAGES)
    moved = dataclasses.replace(MIDDLE, layer_end=30)
    surveyor.hear(FIRST, Welcome((ZERO, moved), ready=True))
    surveyor.told()
    surveyor.survey()
    surveyor.conversation.expire(1.0 + CONTACT)
    assert [stage.facts for stage in surveyor.result()] == [ZERO, moved]


def test_stages_of_another_model_are_not_remembered(surveyor: Surveyor) -> None:
    surveyor.opened().told()
    other = dataclasses.replace(ZERO, model="other")
    surveyor.hear(FIRST, Welcome((other,), ready=False))
    surveyor.told()
    surveyor.survey()
    surveyor.conversation.expire(1.0 + CONTACT)
    assert [stage.facts for stage in surveyor.result()] == [other]


def test_an_error_is_the_outcome_where_nothing_is_known(surveyor: Surveyor) -> None:
    surveyor.survey(timeout=2.0)
    surveyor.conversation.expire(3.0)
    ((request, error),) = surveyor.told()
    assert request == "r1"
    assert isinstance(error, EndpointError)
    assert f"{FIRST}: nothing answered within 2 s" in str(error)


def test_a_stage_that_does_not_answer_is_late(surveyor: Surveyor) -> None:
    surveyor.opened().told()
    surveyor.survey(timeout=2.0)
    surveyor.hear(FIRST, replied("r1/0", 0))
    surveyor.conversation.expire(3.0)
    assert isinstance(surveyor.result()[2].failure, DeadlineError)
    surveyor.hear(LAST, replied("r1/2", 2))
    assert surveyor.told() == []


# What a person and a script see.

HUGE = 2**62


def extreme(name: str, at: float = 1.0) -> PipelineStats:
    """Three stages with long names whose counters are as large as they get; the middle one is lost."""
    values = {**COUNTERS, **RING, **{f"batch_rows.{2**i}": HUGE for i in range(12)}, "errors." + "x" * 90: 1}
    values = {key: HUGE if isinstance(value, int) else value for key, value in values.items()}
    stages = [
        StageStats(
            dataclasses.replace(
                f, stage=name, endpoint=f"ipc:///{name}", model_name=name, threads=256, n_ctx=2**31 - 1
            ),
            values,
            taken_at=at,
        )
        for f in STAGES
    ]
    stages[1] = dataclasses.replace(stages[1], counters={}, failure=EndpointError(f"cannot reach {name}"))
    return PipelineStats(f"ipc:///{name}", True, tuple(stages))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("stats", [pipeline({**COUNTERS, **RING}, COUNTERS, COUNTERS), pipeline({}, {}, {})])
def test_tables_fit_the_terminal(stats: PipelineStats, width: int) -> None:
    report = stats_report(stats, width).splitlines()
    assert max(map(len, report)) <= width
    history = History()
    history.add(dataclasses.replace(stats, stages=tuple(dataclasses.replace(s, taken_at=0.0) for s in stats)))
    lines = frame(history.add(stats), clock="12:00:00", seconds=1, width=width)
    assert max(len(line.text) for line in lines) <= width
    assert any("KV" in line.text for line in lines)


def test_nothing_makes_tables_wider_than_the_terminal() -> None:
    history = History()
    history.add(extreme("n" * 120))
    lines = frame(history.add(extreme("n" * 120, at=1.5)), clock="12:00:00", seconds=1, width=80)
    assert max(len(line.text) for line in lines) == 80
    assert "not reached" in stats_report(extreme("n" * 120), 80)
    endpoint_lines = [line for line in stats_report(extreme("n" * 120), 80).splitlines() if "ipc" in line]
    assert max(map(len, endpoint_lines)) <= 80


def test_what_peers_say_cannot_steer_the_terminal() -> None:
    stats = extreme("\x1b[2Jevil\r\n\x9b")
    change = History().add(stats)
    shown = stats_report(stats, 80).replace("\n", "") + interval_line(change, "12:00:00")
    shown += "".join(line.text for line in frame(change, clock="12:00:00", seconds=1, width=80))
    assert shown.isprintable()
    assert "evil" in shown


def test_the_report_says_what_there_is() -> None:
    stats = pipeline({**COUNTERS, **RING}, COUNTERS, {**COUNTERS, "errors.native": 2})
    report = stats_report(stats)
    rows = [line.split() for line in report.splitlines()]
    assert ["0", "100", "450", "4.50", "-", "600", "ms", "6.00", "ms", "200", "us", "25%"] in rows
    assert ["2", "100", "450", "4.50", "90", "600", "ms", "6.00", "ms", "200", "us", "25%"] in rows
    assert ["0", "2/8", "4096/16384", "25%", "0", "-"] in rows
    assert ["stage", "1", "8"] in rows
    assert ["0", "60", "40"] in rows
    assert "errors at stage 0: busy 3\n" in report
    assert "errors at stage 2: busy 3, native 2\n" in report
    for words in (
        "round trip     20.0 ms",
        "in the model   15.0 ms",
        "waiting        4.55 ms",
        "travel         150 us",
    ):
        assert words in report
    for words in ("2 running, 5 queued", "credit waits   7", "128 rows", "2..12"):
        assert words in report


def test_json_holds_facts_counters_as_they_came_and_values_that_follow() -> None:
    stats = pipeline({**COUNTERS, **RING}, {}, {})
    stats = PipelineStats(FIRST, True, (stats[0], StageStats(MIDDLE, failure=StageLostError("gone"))))
    values = json.loads(json.dumps(stats_values(stats)))
    first, second = values["stages"]
    assert (values["endpoint"], values["ready"], values["missing_layers"]) == (FIRST, True, ["20:30"])
    assert first["counters"] == {**COUNTERS, **RING}
    assert (first["layers"], first["facts"]["endpoint"], first["error"]) == ("0:10", ZERO.endpoint, None)
    assert "wanted" not in first["facts"]
    assert first["derived"]["bubble_share"] == 0.25
    assert first["derived"]["batch_sizes"] == {"1": 60, "8": 40}
    assert (second["error"], second["counters"]) == ({"code": "stage_lost", "message": "gone"}, {})
    assert second["derived"] is None
    assert values["ring"]["credit_waits"] == 7


def test_json_of_an_interval_holds_its_rates() -> None:
    history = History()
    history.add(pipeline({"rows": 10}, {}, {"tokens": 5}, at=1.0))
    values = change_values(history.add(pipeline({"rows": 30}, {}, {"tokens": 9}, at=3.0)), 1e9)
    assert (values["time"], values["rows_per_s"], values["tokens_per_s"]) == (1e9, 10, 2)
    assert values["stages"][0]["counters"] == {"rows": 30}
    assert (values["stages"][0]["derived"]["interval_s"], values["stages"][0]["derived"]["rows_per_s"]) == (2.0, 10)
