"""The benchmarks: ours against llama.cpp and against raw ZeroMQ, in one run; docs/benchmarks.md explains them.

Owns the peers, the workloads, the table of ratios and the plots. It starts stages as the tests do.
"""

from __future__ import annotations

import sys
from pathlib import Path

# What starts stages and writes small models is shared with the tests, which are no package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
