"""Python's own share of a decode step at eight streams: what a stage does apart from its libraries, profiled."""

from __future__ import annotations

from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import RESULTS, Comparison
from bench.pipelines import Pipeline
from bench.sampling_profiler import Profile, Recording
from bench.splits import DECODE_SPLIT
from bench.workloads import prompts

STREAMS, PROMPT, SECONDS = 8, 32, 5
WARM, STEPS = 8, 160  # more than SECONDS, at any rate that this model reaches on two cores
TARGET = 0.05


def test_python_share(smollm2: Path, tmp_path: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """The functions that took the most go into a file beside the results."""
    options = ("--lanes", str(STREAMS), "--ctx-size", "512")
    with Pipeline(smollm2, [DECODE_SPLIT], *options) as pipeline:

        def run() -> list[Profile | str]:
            streams = [pipeline.stream(prompt, WARM + STEPS) for prompt in prompts(smollm2, STREAMS, PROMPT)]
            for _ in range(WARM):
                for stream in streams:
                    next(stream)
            recordings = [
                Recording(stage.pid, SECONDS, tmp_path / f"{index}.raw") for index, stage in enumerate(pipeline.stages)
            ]
            for stream in streams:
                for _ in stream:
                    pass
            return [recording.result() for recording in recordings]

        profiles = benchmark.pedantic(run, rounds=1)
    lines = []
    for index, profile in enumerate(profiles):
        if isinstance(profile, str):
            comparison.note(f"Python's share at stage {index} was not measured: py-spy: {profile}")
            continue
        name = f"Python's own share of stage {index}, 8 streams"
        comparison.at_most(TARGET, name, profile.own_share, 1.0, "of the time it works")
        comparison.figure(f"libzmq's share of stage {index}, 8 streams", profile.libzmq_share, "of the time it works")
        lines += [f"stage {index}: {count:5}  {leaf}" for leaf, count in profile.leaves.most_common(15)]
    if lines:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "profile.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
