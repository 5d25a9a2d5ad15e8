"""Share of time in which a stage has nothing to do, by stages and streams: the real scheduler, simulated stages."""

from __future__ import annotations

from skippy_zmq.schedule.chunks import fixed_chunks
from skippy_zmq.schedule.scheduler import Scheduler
from skippy_zmq.schedule.simulation import Arrival, Simulation, StageCost

# SmolLM2-135M with one thread, as measured: a step takes about 10 ms and 10 ms more for each of its rows.
WHOLE = StageCost(micro_batch_us=10_000, row_us=10_000, prefill_row_us=7_000)
HOP_US = 150
PROMPT = 32
STAGES = (1, 2, 4, 8)
STREAMS = (1, 2, 4, 8, 16, 32, 64)
_SETTLE, _MEASURED = 24, 48  # tokens of every stream
_ENDLESS = 1_000_000


def bubble_share(n_stages: int, streams: int) -> float:
    """Mean over ``n_stages`` equal stages while ``streams`` decode."""
    scheduler = Scheduler(streams, 512, fixed_chunks(128), n_stages=n_stages)
    simulation = Simulation(scheduler, WHOLE.split([1] * n_stages), HOP_US)
    simulation.add(Arrival(f"s{number}", 0, PROMPT, _ENDLESS) for number in range(streams))
    simulation.run(n_tokens=_SETTLE * streams)
    simulation.measure()
    simulation.run(n_tokens=_MEASURED * streams)
    return simulation.outcome().bubble
