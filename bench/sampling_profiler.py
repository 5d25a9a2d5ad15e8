"""Where a stage spends its time, by py-spy: which samples are in llama.cpp, and which in the stage's own Python."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SAMPLES_PER_SECOND = 250
# Innermost Python frames whose time is that of llama.cpp: running the layers, and choosing a token.
NATIVE = ("StageModel.run", "SessionSampler.sample")
WAITING = ";Loop._poll "  # anywhere in a stack: a pinned stage asks its sockets again and again instead of sleeping
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Profile:
    """``leaves``: samples by innermost function, with its file and line; what waits for messages is left out."""

    leaves: Counter[str]

    @property
    def own_share(self) -> float:
        """Share of the samples that were not in llama.cpp."""
        native = sum(count for leaf, count in self.leaves.items() if leaf.startswith(NATIVE))
        return 1 - native / self.leaves.total()


class Recording:
    """Samples a running process for ``seconds``, without stopping it."""

    def __init__(self, pid: int, seconds: int, output: Path) -> None:
        program = Path(sys.executable).with_name("py-spy")
        command = [str(program), "record", "--nonblocking", "--pid", str(pid), "--duration", str(seconds)]
        command += ["--rate", str(SAMPLES_PER_SECOND), "--format", "raw", "--output", str(output)]
        self._output = output
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def result(self) -> Profile | str:
        """What was sampled, or why the system does not allow it."""
        _, errors = self._process.communicate(timeout=_PATIENCE)
        if self._process.returncode:
            return errors.strip().splitlines()[-1] if errors.strip() else f"status {self._process.returncode}"
        leaves: Counter[str] = Counter()
        for line in self._output.read_text(encoding="utf-8").splitlines():
            stack, _, count = line.rpartition(" ")
            if WAITING not in stack:
                leaves[stack.rpartition(";")[2]] += int(count)
        return Profile(leaves)
