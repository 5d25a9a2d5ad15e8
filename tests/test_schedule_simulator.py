"""The scheduler at the head of a simulated ring: who waits for whom, and for how long."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippy_zmq.schedule.chunks import AdaptiveChunks, fixed_chunks
from skippy_zmq.schedule.scheduler import Scheduler
from skippy_zmq.schedule.simulation import Arrival, Outcome, Simulation, StageCost
from skippy_zmq.schedule.simulator import LANES, SMOLLM2, Ring, bubble_shares, main, steady_decode

ENDLESS = 1 << 40


def _even(n_stages: int) -> tuple[StageCost, ...]:
    return SMOLLM2.split((1.0,) * n_stages)


# ---- the simulation itself, where the answer is known


def test_one_session_alone_takes_what_its_steps_and_hops_take() -> None:
    scheduler = Scheduler(1, 64, fixed_chunks(64), 2)
    simulation = Simulation(scheduler, [StageCost(100, 10, 1), StageCost(200, 20, 2)], hop_us=5)
    simulation.add([Arrival("a", 1000, 64, 3)])
    simulation.run()
    outcome = simulation.outcome()
    chunk_us, step_us = 64 + 5 + 128, 110 + 5 + 220
    first = 1000 + chunk_us
    assert outcome.token_us == {"a": (first, first + 5 + step_us, first + 2 * (5 + step_us))}
    assert outcome.first_token_us == {"a": chunk_us}
    assert outcome.gaps_us("a") == [5 + step_us] * 2
    assert outcome.alive_us == chunk_us + 2 * (5 + step_us)
    assert outcome.batches == {("prefill", 64): 1, ("decode", 1): 2}
    assert outcome.bubbles == pytest.approx([1 - busy / outcome.alive_us for busy in (64 + 220, 128 + 440)])
    assert outcome.tokens_per_s == pytest.approx(3e6 / outcome.alive_us)
    assert (outcome.worst_gap_us, outcome.mean_gap_us, outcome.peak_in_flight) == (5 + step_us, 5 + step_us, 1)


def test_time_without_sessions_is_no_bubble() -> None:
    simulation = Simulation(Scheduler(1, 64, fixed_chunks(64)), [StageCost(100, 10, 1)])
    simulation.add([Arrival("a", 0, 10, 2), Arrival("b", 50_000, 10, 2)])
    simulation.run()
    assert simulation.outcome().bubbles == (0.0,)
    assert simulation.outcome().alive_us == 2 * (10 + 110)


def test_sessions_wait_for_a_lane_in_their_order() -> None:
    simulation = Simulation(Scheduler(2, 64, fixed_chunks(64), 2), _even(2))
    simulation.add(Arrival(name, 0, 20, 5) for name in "abcdef")
    simulation.run()
    firsts = simulation.outcome().first_token_us
    assert sorted(firsts, key=lambda name: firsts[name]) == list("abcdef")


def test_what_does_not_fit_is_refused() -> None:
    simulation = Simulation(Scheduler(1, 64, fixed_chunks(64)), _even(1))
    with pytest.raises(ValueError, match="2 stages for a scheduler of 1"):
        Simulation(simulation.scheduler, _even(2))
    simulation.run(until_us=5)
    simulation.add([Arrival("a", 9, 1, 1)])
    simulation.run(until_us=7)
    for late in (Arrival("b", 6, 1, 1), Arrival("b", 8, 1, 0)):
        with pytest.raises(ValueError, match="session b comes too late or wants no token"):
            simulation.add([late])


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 60_000),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 20)), min_size=1, max_size=12),
)
def test_every_session_gets_all_its_tokens(
    n_stages: int, n_lanes: int, hop_us: int, sessions: list[tuple[int, int, int]]
) -> None:
    simulation = Simulation(Scheduler(n_lanes, 64, AdaptiveChunks(64), n_stages), _even(n_stages), hop_us)
    simulation.add(Arrival(str(i), *session) for i, session in enumerate(sessions))
    simulation.run()
    outcome = simulation.outcome()
    assert {name: len(times) for name, times in outcome.token_us.items()} == {
        str(i): n_tokens for i, (_, _, n_tokens) in enumerate(sessions)
    }
    assert all(0 <= bubble < 1 for bubble in outcome.bubbles)
    assert (simulation.scheduler.sessions, simulation.scheduler.in_flight) == (0, 0)


# ---- decode


def test_two_groups_per_stage_and_more_leave_no_bubbles() -> None:
    for n_stages in range(1, 9):
        full = [n_stages * groups for groups in (1, 2, 4, 8)]
        shares = bubble_shares([n_stages], full)
        assert max(shares.values()) < 0.001, shares


def test_lanes_that_do_not_divide_leave_small_bubbles() -> None:
    shares = bubble_shares(range(1, 7), LANES)
    assert max(share for (stages, lanes), share in shares.items() if lanes >= 2 * stages) < 0.21
    assert max(share for (stages, lanes), share in shares.items() if lanes >= 3 * stages) < 0.09
    for (stages, lanes), share in shares.items():
        if lanes <= stages:  # each lane keeps one stage busy
            assert share == pytest.approx(1 - lanes / stages, abs=0.001)


@pytest.mark.parametrize("ring", [Ring(), Ring(hop_us=2000), Ring(hop_us=10_000), Ring(StageCost(20_000, 1000, 300))])
@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_hardly_any_number_of_groups_would_be_faster(ring: Ring, n_stages: int) -> None:
    for n_lanes in (2, 3, 5, 8, 12):
        own = steady_decode(n_stages, n_lanes, ring).tokens_per_s
        for n_groups in range(1, n_lanes + 1):
            given = Ring(ring.model, ring.hop_us, n_groups)
            assert steady_decode(n_stages, n_lanes, given).tokens_per_s <= 1.08 * own, (n_lanes, n_groups)


def test_a_heavy_last_stage_is_kept_busy() -> None:
    for n_lanes in (4, 6, 8, 12, 16):
        outcome = steady_decode(4, n_lanes, Ring(shares=(1, 1, 1, 1.6)))
        assert outcome.bubbles[-1] < 0.06, (n_lanes, outcome.bubbles)


@pytest.mark.parametrize(("n_stages", "hop_us", "n_lanes"), [(2, 50_000, 8), (2, 10_000, 8), (3, 50_000, 16)])
def test_groups_hide_the_delay_of_links(n_stages: int, hop_us: int, n_lanes: int) -> None:
    """A token cannot be had sooner than one step alone and the links take; nor can a stage be more than busy."""
    outcome = steady_decode(n_stages, n_lanes, Ring(hop_us=hop_us))
    alone_us = SMOLLM2.micro_batch_us + SMOLLM2.row_us + n_stages * hop_us
    busy_us = (SMOLLM2.micro_batch_us * n_stages + SMOLLM2.row_us * n_lanes) / n_stages
    bound = n_lanes * 1e6 / max(alone_us, busy_us)
    assert outcome.tokens_per_s > 0.8 * bound
    assert outcome.tokens_per_s > 1.1 * steady_decode(n_stages, n_lanes, Ring(hop_us=hop_us, n_groups=1)).tokens_per_s


def test_sessions_that_come_and_go_leave_small_bubbles() -> None:
    chance = random.Random(0)
    simulation = Simulation(Scheduler(8, 512, AdaptiveChunks(512), 2), _even(2))
    simulation.add(Arrival(str(i), 0, chance.randint(16, 300), chance.randint(20, 150)) for i in range(40))
    simulation.run(n_tokens=2500)
    assert simulation.outcome().bubble < 0.1


# ---- decode while long prompts keep coming


def _under_prompts(
    n_stages: int, n_decoding: int, n_rows: int, hop_us: int = 0, prompt_tokens: int = 1500
) -> tuple[Outcome, int]:
    """What was measured from the moment on at which prompts began to come, and the cost of a step of all."""
    scheduler = Scheduler(n_decoding + 2, 512, fixed_chunks(n_rows), n_stages)
    simulation = Simulation(scheduler, _even(n_stages), hop_us)
    simulation.add(Arrival(f"lane {i}", 0, 1, ENDLESS) for i in range(n_decoding))
    while simulation.fewest_tokens < 20:
        simulation.run(n_tokens=1)
    simulation.measure()
    simulation.add(Arrival(f"prompt {i}", simulation.now_us, prompt_tokens, 1) for i in range(200))
    simulation.run(n_tokens=60 * n_decoding)
    return simulation.outcome(), SMOLLM2.micro_batch_us * scheduler.groups + SMOLLM2.row_us * n_decoding


@pytest.mark.parametrize("n_decoding", [1, 2, 5])
@pytest.mark.parametrize("n_rows", [64, 128, 512])
def test_two_stages_hold_up_decoding_for_one_chunk_and_a_step(n_rows: int, n_decoding: int) -> None:
    """At its slowest stage; but a chunk that follows none, or a smaller one, holds it up at both to some part."""
    outcome, step_us = _under_prompts(2, n_decoding, n_rows, prompt_tokens=1536)
    chunk_us = n_rows * SMOLLM2.prefill_row_us // 2
    for lane in range(n_decoding):
        first, second, *later = outcome.gaps_us(f"lane {lane}")
        assert max(first, second) <= 2 * chunk_us + step_us
        assert max(later) <= chunk_us + step_us


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([64, 128, 256]), st.sampled_from([0, 2000, 50_000]))
def test_a_chunk_on_its_way_through_the_ring_is_the_most_that_decoding_waits_for(
    n_stages: int, n_decoding: int, n_rows: int, hop_us: int
) -> None:
    outcome, step_us = _under_prompts(n_stages, n_decoding, n_rows, hop_us)
    around_us = n_stages * hop_us if n_stages > 1 else 0
    worst = max(max(outcome.gaps_us(f"lane {lane}")) for lane in range(n_decoding))
    assert worst <= n_rows * SMOLLM2.prefill_row_us + 2 * step_us + around_us


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_prefill_keeps_the_stages_busy_beside_a_session_that_decodes(n_stages: int) -> None:
    outcome, _ = _under_prompts(n_stages, 1, 128)
    assert outcome.bubble < 0.12


@pytest.mark.parametrize(("n_stages", "hop_us"), [(2, 0), (2, 50_000), (4, 0), (4, 50_000)])
def test_prompts_alone_keep_the_stages_busy(n_stages: int, hop_us: int) -> None:
    simulation = Simulation(Scheduler(8, 512, fixed_chunks(128), n_stages), _even(n_stages), hop_us)
    simulation.add(Arrival(str(i), 0, 2048, 1) for i in range(8))
    simulation.run()
    n_chunks = 8 * 2048 // 128
    assert simulation.outcome().bubble < 1.2 * (n_stages - 1) / (n_chunks + n_stages - 1) + 0.02


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    simulation = Simulation(Scheduler(4, 512, fixed_chunks(128), 2), _even(2))
    simulation.add([Arrival("long", 0, 2048, 1), Arrival("short", 1_000_000, 16, 1)])
    simulation.run()
    chunk_us = 128 * SMOLLM2.prefill_row_us // 2
    firsts = simulation.outcome().first_token_us
    assert firsts["short"] <= 3 * chunk_us < firsts["long"] / 4


# ---- the program


def test_the_program_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--stages", "1-2,4", "--lanes", "1,4"])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("Bubble share in %")
    assert [line.split() for line in (head, *lines)] == [
        ["1", "4"],
        ["1", "0.0", "0.0"],
        ["2", "50.0", "0.0"],
        ["4", "75.0", "0.0"],
    ]


def test_the_program_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--stages", "2", "--lanes", "8", "--delay-ms", "5", "--prompts", "1", "--chunks", "64,128", "--json"]
    main([*options, "--groups", "3"])
    (facts,) = json.loads(capsys.readouterr().out)
    outcome = steady_decode(2, 8, Ring(hop_us=5000, n_groups=3))
    assert (facts["stages"], facts["lanes"]) == (2, 8)
    assert 0 <= facts["bubble"] < outcome.bubble + 0.2
    assert facts["worst_gap_ms"] * 1000 > outcome.worst_gap_us
    assert {(phase, rows) for phase, rows, _ in facts["batches"]} >= {("prefill", 64), ("prefill", 128), ("decode", 3)}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--stages", "0", "'0': wanted a number from 1 to 4096"),
        ("--lanes", "1-x", "'x': wanted a number from 1 to 4096"),
        ("--delay-ms", "-1", "'-1': wanted 0 to 1000000 milliseconds"),
        ("--delay-ms", "nan", "'nan': wanted 0 to 1000000 milliseconds"),
        ("--target-ms", "0", "'0': wanted 0.001 milliseconds at least"),
        ("--chunks", "128,513", "'128,513': wanted at most 512 rows"),
    ],
)
def test_the_program_refuses_what_it_cannot_simulate(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"{option}={value}"])
    assert message in capsys.readouterr().err
