"""Ratios against targets and plain figures: measured alternately, kept as medians, written at the end of the run."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

RESULTS = Path(__file__).parent / "results"
SUMMARY = RESULTS / "summary.json"
FIGURES = RESULTS / "figures.json"
# Fewer rounds than a benchmark asks for: to see whether everything works, not for figures.
_ROUNDS_AT_MOST = int(os.environ.get("BENCH_ROUNDS", "1000"))


@dataclass(frozen=True, slots=True)
class Ratio:
    """``ratio`` = ``ours`` / ``other``, both in ``unit``; ``reached``: at least, or at most, ``target``.

    ``aim``: what is hoped for beyond the target, if anything.
    """

    name: str
    ratio: float
    target: float
    direction: str  # "at least" | "at most"
    reached: bool
    ours: float
    other: float
    unit: str
    aim: float | None = None


@dataclass(slots=True)
class Comparison:
    """What a run has measured. ``curves``: by plot and line, the points (x as text, y)."""

    ratios: list[Ratio] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    curves: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    notes: list[str] = field(default_factory=list)

    def at_least(
        self, target: float, name: str, ours: float, other: float, unit: str, aim: float | None = None
    ) -> float:
        """Keep a ratio where more is better; return it."""
        return self._keep(Ratio(name, ours / other, target, "at least", ours / other >= target, ours, other, unit, aim))

    def at_most(
        self, target: float, name: str, ours: float, other: float, unit: str, aim: float | None = None
    ) -> float:
        """Keep a ratio where less is better; return it."""
        return self._keep(Ratio(name, ours / other, target, "at most", ours / other <= target, ours, other, unit, aim))

    def _keep(self, ratio: Ratio) -> float:
        self.ratios.append(ratio)
        return ratio.ratio

    def figure(self, name: str, value: float, unit: str) -> None:
        """Keep a figure that has no target."""
        self.figures[name] = {"value": value, "unit": unit}

    def point(self, plot: str, line: str, x: float, y: float) -> None:
        self.curves.setdefault(plot, {}).setdefault(line, {})[f"{x:.12g}"] = y

    def note(self, text: str) -> None:
        """Say at the end what could not be measured, and why."""
        self.notes.append(text)

    def write(self, machine: Mapping[str, Any]) -> None:
        RESULTS.mkdir(exist_ok=True)
        _write(SUMMARY, [asdict(ratio) for ratio in self.ratios])
        _write(FIGURES, {"machine": dict(machine), "figures": self.figures, "curves": self.curves})

    def table(self) -> list[str]:
        """One line per ratio, then the notes."""
        width = max((len(ratio.name) for ratio in self.ratios), default=0)
        return [f"{ratio.name:<{width}}  {_cells(ratio)}" for ratio in self.ratios] + self.notes


def alternate(
    benchmark: BenchmarkFixture, rounds: int, calls: Mapping[str, Callable[[], float]], warm_rounds: int = 1
) -> dict[str, float]:
    """Medians of what ``calls`` return, each called once per round, one after the other.

    The first is ours and is what pytest-benchmark's own statistics are of; the others run before it.
    """
    (first, ours), *others = calls.items()
    rounds = min(rounds, _ROUNDS_AT_MOST)
    values: dict[str, list[float]] = {name: [] for name in calls}

    def run_others() -> None:
        for name, call in others:
            values[name].append(call())

    def run_ours() -> None:
        values[first].append(ours())

    benchmark.pedantic(run_ours, setup=run_others, rounds=rounds, warmup_rounds=warm_rounds)
    medians = {name: statistics.median(row[warm_rounds:]) for name, row in values.items()}
    benchmark.extra_info.update(medians)
    return medians


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _cells(ratio: Ratio) -> str:
    aim = f", aim {ratio.aim:g}" if ratio.aim is not None else ""
    word = "reached" if ratio.reached else "MISSED "
    values = f"{ratio.ours:.4g} / {ratio.other:.4g} {ratio.unit}"
    return f"{ratio.ratio:6.3f}  {ratio.direction:<8} {ratio.target:<5g} {word}  {values}{aim}"
