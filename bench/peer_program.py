"""llama.cpp as a process that is told what to run, one JSON line each way: in process, or over its RPC back end.

``python -m bench.peer_program OPTIONS``; ``--serve ENDPOINT`` makes it a server of the RPC back end instead. Needs
nothing but llama_cpp and numpy. The clock runs around llama_decode and the choice of tokens only: batches are made
before, so that what ctypes costs is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from bench.whole_model import Batch, WholeModel

_LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def _library(name: str) -> Any:
    library = ctypes.CDLL(str(_LIBRARIES / f"lib{name}.so"))
    for function in (
        "ggml_backend_dev_by_type",
        "ggml_backend_rpc_add_server",
        "ggml_backend_reg_dev_get",
    ):
        if hasattr(library, function):
            getattr(library, function).restype = ctypes.c_void_p
    return library


def serve(endpoint: str, threads: int) -> None:
    """Compute for whoever connects, on the CPU, without end."""
    device = ctypes.c_void_p(_library("ggml").ggml_backend_dev_by_type(CPU_DEVICE))
    devices = (ctypes.c_void_p * 1)(device)
    start = _library("ggml-rpc").ggml_backend_rpc_start_server
    start(endpoint.encode(), None, ctypes.c_size_t(threads), ctypes.c_size_t(1), devices)


def rpc_devices(endpoints: Sequence[str]) -> list[int]:
    """The one device of each server."""
    rpc, base = _library("ggml-rpc"), _library("ggml-base")
    devices = []
    for endpoint in endpoints:
        registry = ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(endpoint.encode()))
        if not registry:
            raise RuntimeError(f"{endpoint}: no server of the RPC back end")
        devices.append(base.ggml_backend_reg_dev_get(registry, ctypes.c_size_t(0)))
    return devices


def prefill(model: WholeModel, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """All prompts, each in a sequence of its own; time until the first token of every one is known."""
    model.clear()
    steps: list[tuple[Batch, bool]] = []
    for sequence, prompt in enumerate(prompts):
        for start in range(0, len(prompt), model.n_batch):
            part = prompt[start : start + model.n_batch]
            ends = start + len(part) == len(prompt)
            steps.append((Batch([(sequence, start, part)], outputs=ends), ends))
    tokens: list[int] = []
    started = time.perf_counter()
    for batch, ends in steps:
        model.decode(batch)
        if ends:
            tokens += map(int, model.likeliest(1))
    seconds = time.perf_counter() - started
    for batch, _ in steps:
        batch.free()
    return {"seconds": seconds, "tokens": [[token] for token in tokens]}


def decode(model: WholeModel, prompts: Sequence[Sequence[int]], warm: int, steps: int) -> dict[str, Any]:
    """One token of every sequence per batch. ``seconds``: of ``steps`` steps after the first ``warm``."""
    chosen = [row[0] for row in prefill(model, prompts)["tokens"]]
    count = len(prompts)
    batch = Batch([(sequence, len(prompt), [0]) for sequence, prompt in enumerate(prompts)])
    history = []
    started = 0.0
    for step in range(warm + steps):
        if step == warm:
            started = time.perf_counter()
        history.append(chosen)
        batch.tokens[:] = chosen
        model.decode(batch)
        chosen = model.likeliest(count).tolist()
        batch.positions += 1
    seconds = time.perf_counter() - started
    batch.free()
    history.append(chosen)
    return {"seconds": seconds, "tokens": [list(row) for row in zip(*history, strict=True)]}


def chunk(model: WholeModel, prompt: Sequence[int], rows: int) -> dict[str, Any]:
    """``seconds``: of the last ``rows`` of a prompt, as one batch, the rest of it being there already."""
    before = len(prompt) - rows
    prefill(model, [prompt[:before]])
    batch = Batch([(0, before, prompt[before:])])
    started = time.perf_counter()
    model.decode(batch)
    model.likeliest(1)
    seconds = time.perf_counter() - started
    batch.free()
    return {"seconds": seconds, "tokens": []}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", metavar="ENDPOINT")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=512)
    parser.add_argument("--ubatch-size", type=int, default=512)
    parser.add_argument("--rpc", action="append", default=[], metavar="ENDPOINT")
    parser.add_argument("--split", default="")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    model = WholeModel(
        options.model,
        n_ctx=options.ctx_size,
        threads=options.threads,
        lanes=options.lanes,
        n_ubatch=options.ubatch_size,
        devices=rpc_devices(options.rpc) if options.rpc else (),
        split=[float(share) for share in options.split.split(",") if share],
    )
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        operation = {"prefill": prefill, "decode": decode, "chunk": chunk}[asked.pop("run")]
        print(json.dumps(operation(model, **asked)), flush=True)
    model.close()


if __name__ == "__main__":
    main()
