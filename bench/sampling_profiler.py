"""Where a stage spends its time, by py-spy: samples in llama.cpp, in libzmq, and in the stage's own Python."""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import skippy_zmq

SAMPLES_PER_SECOND = 250
# Innermost Python functions, and what stands in the lines of theirs whose time is that of a library.
LLAMA_CPP = {"StageModel.run": "native_context.run(", "SessionSampler.sample": "_native.sample("}
LIBZMQ = {"send_frames": "_send(", "receive_frames": "_receive(", "has_input": "_option("}
WAITING = ";Loop._poll "  # anywhere in a stack: a pinned stage asks its sockets again and again instead of sleeping
_LEAF = re.compile(r"(?P<function>\S+) \((?P<path>[^()]+):(?P<line>\d+)\)")
_ROOT = Path(skippy_zmq.__file__).parents[1]
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Profile:
    """``leaves``: samples by innermost function, with its file and line; what waits for messages is left out."""

    leaves: Counter[str]

    @property
    def own_share(self) -> float:
        """Share of the samples that were neither in llama.cpp nor in libzmq."""
        return 1 - self._share(LLAMA_CPP | LIBZMQ)

    @property
    def libzmq_share(self) -> float:
        """Share of the samples that were in libzmq, or in whoever ran on this core because of it."""
        return self._share(LIBZMQ)

    def _share(self, calls: Mapping[str, str]) -> float:
        inside = sum(count for leaf, count in self.leaves.items() if _is_call(leaf, calls))
        return inside / self.leaves.total()


def _is_call(leaf: str, calls: Mapping[str, str]) -> bool:
    """Whether ``leaf``, such as "has_input (skippy_zmq/transport/frames.py:97)", stands at one of ``calls``."""
    found = _LEAF.fullmatch(leaf)
    if found is None or found["function"] not in calls:
        return False
    path = _ROOT / found["path"]  # an absolute path stays as it is
    return calls[found["function"]] in linecache.getline(str(path), int(found["line"]))


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
