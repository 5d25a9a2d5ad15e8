"""``python -m skippy_zmq.demo``: a real model in two stages on this machine answers a question."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skippy_zmq.client.report import answer_line, stage_table
from skippy_zmq.client.signals import EXIT_INTERRUPTED, cancel_on_interrupt, exit_on_terminate
from skippy_zmq.errors import SkippyError
from skippy_zmq.local import LocalPipeline
from skippy_zmq.sources.demo_models import MODELS, demo_model

QUESTION = "Explain in a few sentences why the sky is blue."
MAX_TOKENS = 160
CONTEXT = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the model if need be, answer, print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m skippy_zmq.demo", description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION, help=f"default: {QUESTION!r}")
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="processes to split the model over (2)")
    arguments = parser.parse_args(argv)
    try:
        with exit_on_terminate():
            return _run(arguments.question, arguments.stages)
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(question: str, n_stages: int) -> int:
    model = demo_model("smollm2")
    with LocalPipeline(model, stages=n_stages, ctx_size=CONTEXT, lanes=1) as pipeline, pipeline.client() as client:
        for index, stage in enumerate(client.stages):
            layers = f"{stage.layer_start}:{stage.layer_end} of {stage.n_layers}"
            print(f"stage {index}: layers {layers} of {MODELS['smollm2'].file_name} at {stage.endpoint}")
        print(f"\n> {question}\n", flush=True)
        stream = client.stream(messages=[{"role": "user", "content": question}], max_tokens=MAX_TOKENS)
        with stream, cancel_on_interrupt(stream):
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(f"\n\n{stage_table(client.stats())}\n{answer_line(stream.result)}")
    return EXIT_INTERRUPTED if stream.result.finish_reason == "cancelled" else 0


if __name__ == "__main__":
    sys.exit(main())
