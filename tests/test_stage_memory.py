"""What a stage costs: its own weights, in memory and from disk, and where the load options put them.

Each figure is taken in a process of its own, from the kernel's books.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from model_files import sparse, tiny

ROOT = Path(__file__).parent.parent
N_LAYERS, START, END = 100, 40, 50

# Opens layers START:END, runs a batch through them, and prints what that cost.
_CHILD = """
import ctypes, json, mmap, re, sys
from pathlib import Path
import numpy as np
from skippy_zmq.errors import SkippyError
from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.stage_model import Crossing, StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire.messages import TensorDescriptor

small, path = Path(sys.argv[1]), Path(sys.argv[2])
start, end, values = int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])

def figures():
    status = dict(re.findall(r"(\\w+):\\s+(\\d+) kB", Path("/proc/self/status").read_text()))
    io = dict(re.findall(r"(\\w+): (\\d+)", Path("/proc/self/io").read_text()))
    memory = {name: int(status[name]) * 1024 for name in ("VmRSS", "RssAnon", "RssFile", "VmLck")}
    return {**memory, "read": int(io["read_bytes"]), "rchar": int(io["rchar"])}

def cached():
    # pages of the file in memory, whoever mapped them
    page = mmap.PAGESIZE
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        libc = ctypes.CDLL(None, use_errno=True)
        base = ctypes.addressof(ctypes.c_char.from_buffer(view))
        pages = -(-len(view) // page)
        resident = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(base), ctypes.c_size_t(len(view)), resident) == 0
        return sum(value & 1 for value in resident) * page

def open_and_run(path, start, end, values):
    values = {"ctx_size": 256, "lanes": 1, "ubatch_size": 16, "threads": 1, **values}
    options = check_options(values, "options")
    stage = StageModel(open_model(path), LayerRange(start, end), options)
    tensors = [
        Crossing(
            TensorDescriptor(s.name, s.occurrence, 0, s.dtype, (s.row_bytes // 4, 1), s.row_bytes),
            np.full(s.row_bytes // 4, 0.5, np.float32).view(np.uint8),
        )
        for s in stage.wanted
    ]
    stage.run([(0, 0, 1)], np.zeros(1, np.int32), (), tensors)
    return stage

open_and_run(small, 1, 2, {})  # the code of the libraries is in memory from here on
before, cached_before = figures(), cached()
try:
    stage = open_and_run(path, start, end, values)
except SkippyError as error:
    print(json.dumps({"refused": str(error)}))
    raise SystemExit(0)
after, memory = figures(), stage.memory()
print(json.dumps({
    "own": memory.weights,
    "rest": memory.kv + memory.compute,
    "cached": cached() - cached_before,
    **{name: after[name] - before[name] for name in after},
}))
"""


def cost(path: Path, start: int, end: int, **options: Any) -> dict[str, Any]:
    small = path.with_name("small.gguf")
    if not small.exists():
        tiny(small)
    command = [sys.executable, "-c", _CHILD, str(small), str(path), str(start), str(end), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    value: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


@pytest.fixture
def hundred_layers(tmp_path: Path) -> Path:
    """New for each test: nothing of it is in the page cache but its header."""
    return sparse(tmp_path / "model.gguf", N_LAYERS, layer_bytes=1 << 20)


@pytest.fixture
def share(hundred_layers: Path) -> int:
    """Bytes of the weights of layers START:END, by the file's own table."""
    prefixes = tuple(f"blk.{layer}." for layer in range(START, END))
    return sum(int(t.n_bytes) for t in gguf.GGUFReader(hundred_layers).tensors if t.name.startswith(prefixes))


@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"mlock": True}], ids=str)
def test_a_stage_costs_its_own_share(hundred_layers: Path, share: int, options: dict[str, bool]) -> None:
    """Where weights are not laid out for the processor, as these would be for AMX."""
    found = cost(hundred_layers, START, END, repack=False, **options)
    if "refused" in found:
        assert options == {"mlock": True}
        assert "raise `ulimit -l`" in found["refused"]
        return
    assert found["own"] == share
    assert share < found["VmRSS"] < 1.05 * share + found["rest"]
    for figure in ("cached", "read", "rchar"):
        assert found[figure] < 1.05 * share
    assert found["cached"] >= share  # so that the figure means something
    copied = "mmap" in options or "mlock" in options
    assert (found["RssAnon"] >= share) == copied
    assert (found["RssFile"] >= share) == (not copied)
    assert (found["VmLck"] >= share) == ("mlock" in options)


def test_the_first_and_the_last_stage_too(hundred_layers: Path, share: int) -> None:
    tables = 260 * 2048 * 2  # the embedding, or the output matrix, of f16
    for start, end in ((0, 10), (90, 100)):
        found = cost(hundred_layers, start, end, repack=False)
        assert share + tables <= found["own"] < share + 2 * tables
        assert found["own"] < found["VmRSS"] < 1.05 * found["own"] + found["rest"]
        assert found["cached"] < 1.05 * found["own"]


def test_shares_add_up(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", n_layers=6)
    parts = [cost(path, start, start + 2) for start in (0, 2, 4)]
    assert sum(part["own"] for part in parts) == cost(path, 0, 6)["own"]


def test_repacked_weights_are_copies(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", n_layers=4, hidden=1024, ffn=4096, heads=8, kv_heads=8, quant="q4_0")
    repacked, plain = cost(path, 1, 3), cost(path, 1, 3, repack=False)
    own = repacked["own"]
    assert plain["own"] == own
    assert repacked["RssAnon"] > plain["RssAnon"] + 0.9 * own
    assert plain["RssFile"] >= own


def test_repacked_weights_are_locked_too(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", n_layers=4, hidden=1024, ffn=4096, heads=8, kv_heads=8, quant="q4_0")
    found = cost(path, 1, 3, mlock=True)
    if "refused" in found:
        assert "raise `ulimit -l`" in found["refused"]
    else:
        assert found["VmLck"] >= 0.9 * found["own"]
