"""A few rounds of prefill and decode, printed: ``python -m bench.quick [--rpc] [--only decode|prefill] [--rounds N]``.

For work on the scheduler; the figures that count are those of `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench.peers import Measured, Peer, RpcPeer
from bench.pinning import CORES
from bench.pipelines import Pipeline
from bench.workloads import prompts
from skippy_zmq.sources.demo_models import demo_model

Engine = Pipeline | Peer


def _rows(engines: dict[str, Engine], rounds: int, name: str, n_tokens: int, run: Callable[[Engine], Measured]) -> None:
    rates: dict[str, list[float]] = {key: [] for key in engines}
    answers: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for key, engine in engines.items():
            measured = run(engine)
            answers[key] = measured.tokens
            if number:
                rates[key].append(n_tokens / measured.seconds)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    shown = "  ".join(f"{key} {value:6.1f}" for key, value in medians.items())
    ratios = "  ".join(f"/{key} {medians['ours'] / value:4.2f}" for key, value in medians.items() if key != "ours")
    same = "  ".join(f"{key}:{'same' if answers[key] == answers['ours'] else 'DIFFERENT'}" for key in answers)
    print(f"{name:<24} tokens/s {shown}   {ratios}   {same}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rpc", action="store_true")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--split", type=int)
    parser.add_argument("--ubatch", type=int, default=128)
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("stage_options", nargs="*", help="after --: options of the stage program")
    options = parser.parse_args(arguments)
    model = demo_model("smollm2")
    for kind in ("decode", "prefill"):
        if options.only not in (None, kind):
            continue
        lanes, ctx = (16, 512) if kind == "decode" else (8, 2304)
        boundary = options.split or (19 if kind == "decode" else 15)
        shared = {"lanes": lanes, "ctx_size": ctx, "ubatch_size": options.ubatch}
        stage = ("--lanes", str(lanes), "--ctx-size", str(ctx), "--ubatch-size", str(options.ubatch))
        with ExitStack() as stack:
            engines: dict[str, Engine] = {
                "ours": stack.enter_context(Pipeline(model, [boundary], *stage, *options.stage_options)),
                "2 threads": stack.enter_context(Peer(model, threads=2, **shared)),
            }
            if kind == "decode":
                engines["1 thread"] = stack.enter_context(Peer(model, threads=1, **shared))
            if options.rpc:
                split = [boundary, 30 - boundary]
                engines["rpc"] = stack.enter_context(RpcPeer(model, cores=CORES[:2], split=split, **shared))
            if kind == "decode":
                for streams in map(int, options.streams.split(",")):
                    texts = prompts(model, streams, 32)
                    steps = options.steps
                    _rows(
                        engines,
                        options.rounds,
                        f"decode, {streams} streams",
                        streams * steps,
                        lambda engine, texts=texts, steps=steps: engine.decode(texts, warm=4, steps=steps),
                    )
            else:
                for count, length in ((1, 512), (1, 2048), (8, 256)):
                    texts = prompts(model, count, length)
                    _rows(
                        engines,
                        options.rounds,
                        f"prefill, {count} x {length}",
                        count * length,
                        lambda engine, texts=texts: engine.prefill(texts),
                    )


if __name__ == "__main__":
    main()
