"""One run's fixtures, and the table that closes it. Targets that are missed never fail a run; wrong results do."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench.comparison import FIGURES, SUMMARY, Comparison
from bench.pinning import CORES
from skippy_zmq import _native
from skippy_zmq.sources.demo_models import demo_model

_comparison = Comparison()
_LOAD_AT_START = os.getloadavg()[0]


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return _comparison


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """BENCH_MODEL: another one of 30 layers in its place, such as a tiny one, to try the benchmarks themselves."""
    other = os.environ.get("BENCH_MODEL")
    return Path(other) if other else demo_model("smollm2")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not (_comparison.ratios or _comparison.figures):
        return
    _comparison.write(_machine())
    from bench.plots import draw_all  # matplotlib takes a while, and may be missing where only one benchmark is run

    drawn = draw_all()
    terminalreporter.section("ratios of medians, ours / other")
    for line in _comparison.table():
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"written: {SUMMARY}, {FIGURES}" + "".join(f", {path.name}" for path in drawn))


def _machine() -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "AMX": "yes" if _native.has_amx() and not _native.amx_fault() else "no",
        "cores": len(CORES),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load at start": round(_LOAD_AT_START, 2),
        **{name: version(name) for name in ("llama-cpp-python", "pyzmq", "msgpack", "msgspec")},
    }
