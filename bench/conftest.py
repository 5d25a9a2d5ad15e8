"""Benchmarks are ratios of medians, measured alternately in one run; a table of them closes the run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from skippy_zmq.sources.demo_models import demo_model

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Ratio:
    """``ratio`` of ours to the other's time; ``reached``: whether it is within ``target``."""

    name: str
    ratio: float
    target: float
    reached: bool
    ours_ms: float
    other_ms: float


class Comparison:
    """Collects the ratios of a run."""

    def __init__(self) -> None:
        self.ratios: list[Ratio] = []

    def run(
        self, name: str, target: float, ours: Callable[[], object], other: Callable[[], object], rounds: int
    ) -> Ratio:
        """Time ``ours`` and ``other`` alternately, ``rounds`` times after a warm-up; keep the ratio of the medians."""
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for index, call in enumerate((ours, other)):
                started = time.perf_counter()
                call()
                if number:
                    times[index].append(time.perf_counter() - started)
        our_time, other_time = (statistics.median(values) for values in times)
        ratio = our_time / other_time
        result = Ratio(name, ratio, target, ratio <= target, our_time * 1000, other_time * 1000)
        self.ratios.append(result)
        return result


_comparison = Comparison()


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return _comparison


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return demo_model("smollm2")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _comparison.ratios:
        return
    terminalreporter.section("ratios of medians (ours / other; smaller is better)")
    for item in _comparison.ratios:
        terminalreporter.write_line(
            f"{item.name:<52} {item.ratio:5.2f}  target {item.target:4.2f}  "
            f"{'reached' if item.reached else 'MISSED '}  ({item.ours_ms:.3f} ms / {item.other_ms:.3f} ms)"
        )
    RESULTS.mkdir(exist_ok=True)
    summary = [asdict(item) for item in _comparison.ratios]
    (RESULTS / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
