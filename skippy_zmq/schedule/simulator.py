"""How busy the stages of a ring are kept, without a model: ``python -m skippy_zmq.schedule.simulator --help``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from skippy_zmq.schedule.chunks import DEFAULT_TARGET_US, AdaptiveChunks, ChunkPolicy, ScheduledChunks
from skippy_zmq.schedule.scheduler import Scheduler
from skippy_zmq.schedule.simulation import Arrival, Outcome, Simulation, StageCost

SMOLLM2 = StageCost(10_000, 10_000, 3_500)  # about SmolLM2-135M on one core
MAX_CHUNK = 512  # rows
STAGES = tuple(range(1, 9))
LANES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

_WARM_STEPS = 16  # of every lane, before anything counts
_STEPS = 24  # of every lane, that count
_ENDLESS = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class Ring:
    """What is simulated. ``hop_us``: on the way from one stage to the next. ``n_groups``: None for the scheduler's own.

    ``shares``: of the stages in the model's cost, None for equal ones. ``n_prompts``: lanes beside the decoding ones,
    in which prompts of ``prompt_tokens`` follow each other without end.
    """

    model: StageCost = SMOLLM2
    hop_us: int = 0
    n_groups: int | None = None
    shares: tuple[float, ...] | None = None
    chunks: Callable[[], ChunkPolicy] = lambda: AdaptiveChunks(MAX_CHUNK)
    n_prompts: int = 0
    prompt_tokens: int = 1536


def steady_decode(n_stages: int, n_lanes: int, ring: Ring = Ring()) -> Outcome:
    """``n_lanes`` sessions that decode without end, measured once they have settled."""
    stages = ring.model.split(ring.shares or (1.0,) * n_stages)
    scheduler = Scheduler(n_lanes + ring.n_prompts, MAX_CHUNK, ring.chunks(), n_stages, ring.n_groups)
    simulation = Simulation(scheduler, stages, ring.hop_us)
    simulation.add(Arrival(f"lane {lane}", 0, 1, _ENDLESS) for lane in range(n_lanes))
    while simulation.fewest_tokens < _WARM_STEPS:
        simulation.run(n_tokens=n_lanes)
    simulation.measure()
    if ring.n_prompts:
        enough = range(ring.n_prompts * n_lanes * _STEPS)
        simulation.add(Arrival(f"prompt {i}", simulation.now_us, ring.prompt_tokens, 1) for i in enough)
    simulation.run(n_tokens=n_lanes * _STEPS)
    return simulation.outcome()


def bubble_shares(
    stages: Iterable[int] = STAGES,
    lanes: Iterable[int] = LANES,
    ring: Ring = Ring(),
) -> dict[tuple[int, int], float]:
    """The mean share of time in which a stage is idle, by number of stages and of lanes, in steady decode."""
    lanes = tuple(lanes)
    return {(n, m): steady_decode(n, m, ring).bubble for n in stages for m in lanes}


# ---- the program

_SHOWN: dict[str, tuple[str, Callable[[Outcome], str]]] = {
    "bubble": ("Bubble share in %, mean over stages", lambda outcome: f"{100 * outcome.bubble:.1f}"),
    "tokens": ("Tokens per second, of all lanes together", lambda outcome: f"{outcome.tokens_per_s:.1f}"),
    "gap": ("Worst gap between two tokens of a lane, in ms", lambda outcome: f"{outcome.worst_gap_us / 1000:.0f}"),
    "flight": ("Most batches under way at once", lambda outcome: str(outcome.peak_in_flight)),
}

_EXAMPLES = """\
examples:
  python -m skippy_zmq.schedule.simulator                     the bubble share of 1 to 8 stages, 1 to 64 lanes
  python -m skippy_zmq.schedule.simulator --delay-ms 50       the same with 50 ms from each stage to the next
  python -m skippy_zmq.schedule.simulator --show tokens --groups 1
                                                              what it would be without groups of lanes
  python -m skippy_zmq.schedule.simulator --show gap --prompts 1 --chunks 128 --stages 1-4
                                                              how long prompts that keep coming hold up decoding
  python -m skippy_zmq.schedule.simulator --stages 2 --lanes 8 --json
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m skippy_zmq.schedule.simulator",
        description="The scheduler on a simulated ring of stages: costs instead of a model, a virtual clock.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--stages", type=_numbers, default=STAGES, metavar="LIST", help="such as 1-8 or 2,4")
    parser.add_argument("--lanes", type=_numbers, default=LANES, metavar="LIST", help="that decode; such as 1,8,64")
    parser.add_argument("--delay-ms", type=_from_0, default=0.0, metavar="MS", help="from each stage to the next")
    parser.add_argument("--groups", type=_count, metavar="N", help="of lanes; without it, the scheduler's choice")
    parser.add_argument("--chunks", type=_chunks, default="adaptive", metavar="ROWS", help="adaptive, 128, 128,256,512")
    parser.add_argument("--target-ms", type=_above_0, default=DEFAULT_TARGET_US / 1000, help="of adaptive chunks")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="lanes in which prompts keep coming")
    parser.add_argument("--prompt-tokens", type=_count, default=1536, metavar="N")
    for option, value, what in (
        ("--begin-ms", SMOLLM2.micro_batch_us / 1000, "to begin a micro-batch, all stages together"),
        ("--row-ms", SMOLLM2.row_us / 1000, "per row of decode"),
        ("--prefill-row-ms", SMOLLM2.prefill_row_us / 1000, "per row of prefill"),
    ):
        parser.add_argument(option, type=_from_0, default=value, metavar="MS", help=f"{what} (%(default)s)")
    parser.add_argument("--show", choices=tuple(_SHOWN), default="bubble")
    parser.add_argument("--json", action="store_true", help="everything that was measured")
    options = parser.parse_args(arguments)
    sizes, target_us = options.chunks, round(options.target_ms * 1000)
    ring = Ring(
        StageCost(*(round(ms * 1000) for ms in (options.begin_ms, options.row_ms, options.prefill_row_ms))),
        round(options.delay_ms * 1000),
        options.groups,
        None,
        lambda: ScheduledChunks(sizes) if sizes else AdaptiveChunks(MAX_CHUNK, target_us),
        max(0, options.prompts),
        options.prompt_tokens,
    )
    if options.json:
        print(json.dumps([_facts(n, m, steady_decode(n, m, ring)) for n in options.stages for m in options.lanes]))
        return
    title, show = _SHOWN[options.show]
    print(f"{title}; stages down, decoding lanes across")
    print("       " + "".join(f"{m:>7}" for m in options.lanes))
    for n in options.stages:
        print(f"{n:>7}" + "".join(f"{show(steady_decode(n, m, ring)):>7}" for m in options.lanes), flush=True)


def _facts(n_stages: int, n_lanes: int, outcome: Outcome) -> dict[str, object]:
    return {
        "stages": n_stages,
        "lanes": n_lanes,
        "bubble": outcome.bubble,
        "bubbles": outcome.bubbles,
        "tokens_per_s": outcome.tokens_per_s,
        "mean_gap_ms": outcome.mean_gap_us / 1000,
        "worst_gap_ms": outcome.worst_gap_us / 1000,
        "peak_in_flight": outcome.peak_in_flight,
        "batches": [[phase, rows, count] for (phase, rows), count in sorted(outcome.batches.items())],
    }


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers += range(_count(low), _count(high or low) + 1)
    return tuple(numbers)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 1 to 4096")
    return int(text)


def _from_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted 0 to 1000000 milliseconds")
    return number


def _above_0(text: str) -> float:
    number = _from_0(text)
    if round(number * 1000) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted 0.001 milliseconds at least")
    return number


def _chunks(text: str) -> tuple[int, ...]:
    """Rows of the chunks; none for adaptive ones."""
    if text == "adaptive":
        return ()
    sizes = tuple(_count(part) for part in text.split(","))
    if max(sizes) > MAX_CHUNK:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted at most {MAX_CHUNK} rows")
    return sizes


if __name__ == "__main__":
    main()
