"""Where SmolLM2-135M is cut in two, and the measurement behind it: ``python -m bench.splits``.

A step takes as long as its slowest stage. The last stage also runs the output head, a matrix of 49,152 rows, which
costs as much as several layers at each decoded token and nothing worth mentioning during prefill, where it runs for one
row per prompt: so decoding wants fewer layers behind the cut, and prefill equal halves.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from bench.pipelines import Pipeline
from bench.workloads import prompts
from skippy_zmq.sources.demo_models import demo_model

DECODE_SPLIT = 18
PREFILL_SPLIT = 15
STREAMS, PROMPT, STEPS = 8, 32, 32


def decode_rate(model: Path, boundary: int, rounds: int) -> float:
    """Tokens per second of eight streams with the model cut at ``boundary``."""
    texts = prompts(model, STREAMS, PROMPT)
    with Pipeline(model, [boundary], "--lanes", str(STREAMS), "--ctx-size", "512") as pipeline:
        seconds = [pipeline.decode(texts, warm=4, steps=STEPS).seconds for _ in range(rounds + 1)]
    return STREAMS * STEPS / statistics.median(seconds[1:])


def prefill_rate(model: Path, boundary: int, rounds: int) -> float:
    """Tokens per second of a prompt of 1024 tokens with the model cut at ``boundary``."""
    texts = prompts(model, 1, 1024)
    with Pipeline(model, [boundary], "--lanes", "1", "--ctx-size", "2048", "--ubatch-size", "128") as pipeline:
        seconds = [pipeline.prefill(texts).seconds for _ in range(rounds + 1)]
    return 1024 / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode and prefill rates of SmolLM2 by where it is cut.")
    parser.add_argument("--boundaries", default="13,15,17,18,19,20,21")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = demo_model("smollm2")
    print("cut  decode, 8 streams  prefill, 1024 tokens  (tokens/s)")
    for boundary in map(int, options.boundaries.split(",")):
        decode, prefill = (rate(model, boundary, options.rounds) for rate in (decode_rate, prefill_rate))
        print(f"{boundary:3}  {decode:17.1f}  {prefill:20.1f}", flush=True)


if __name__ == "__main__":
    main()
