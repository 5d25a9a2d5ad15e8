"""Whether stages grow: their resident memory after 10,000 short requests against that after 1,000."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from model_files import parrot
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison
from bench.pipelines import Pipeline
from skippy_zmq.client import Stream

REQUESTS, SETTLED, AT_ONCE, TOKENS = 10_000, 1_000, 16, 2
MAY_GROW = 1.02
PROMPT = [10, 20, 30, 40]


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_memory(tmp_path: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """With a model that recites a text, so that every answer is known."""
    model = parrot(tmp_path / "parrot.gguf", "steady as she goes")
    expected = model.token_ids[:TOKENS]
    options = ("--lanes", str(AT_ONCE), "--ctx-size", "256", "--ubatch-size", "64")
    with Pipeline(model.path, [2], *options) as pipeline:
        running: deque[Stream] = deque()

        def ask(count: int) -> None:
            for number in range(count + AT_ONCE):
                if number >= AT_ONCE:
                    done = running.popleft()
                    assert tuple(token for chunk in done for token in chunk.token_ids) == expected
                if number < count:
                    running.append(pipeline.stream(PROMPT, TOKENS))

        ask(SETTLED)
        before = [_resident_kib(stage.pid) for stage in pipeline.stages]
        benchmark.pedantic(ask, args=(REQUESTS - SETTLED,), rounds=1)
        after = [_resident_kib(stage.pid) for stage in pipeline.stages]
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        name = f"memory of stage {index}: {REQUESTS} requests against {SETTLED}"
        comparison.at_most(MAY_GROW, name, new / 1024, old / 1024, "MiB")
