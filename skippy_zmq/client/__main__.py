"""``python -m skippy_zmq.client``: ask a pipeline from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from skippy_zmq.client.arguments import DEFAULT_LOCAL_STAGES, parse_arguments
from skippy_zmq.client.client import DEFAULT_CONTACT_SECONDS, Client
from skippy_zmq.client.report import answer_line, stage_table
from skippy_zmq.client.results import Generation
from skippy_zmq.client.signals import EXIT_INTERRUPTED, cancel_on_interrupt, exit_on_terminate
from skippy_zmq.errors import OptionError, SkippyError, StageLostError
from skippy_zmq.local import LocalPipeline
from skippy_zmq.transport import Security, load_keys
from skippy_zmq.wire.messages import StageFacts

EXIT_BROKEN_PIPE = 141  # what a shell reports for a program whose reader went away


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    where = ""
    try:
        arguments = parse_arguments(argv)
        where = f" while using {arguments.connect or arguments.model}"
        if arguments.model is not None:
            return _run_local(arguments)
        with _connect(arguments) as client:
            return _run(client, arguments)
    except SkippyError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"error: interrupted{where}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _connect(arguments: argparse.Namespace) -> Client:
    if (arguments.curve_key is None) != (arguments.server_key is None):
        raise OptionError("--curve-key and --server-key: wanted both or neither")
    security, server_key = None, None
    if arguments.curve_key is not None:
        security = Security(load_keys(arguments.curve_key))
        server_key = arguments.server_key.encode("utf-8", "replace")
    timeout = arguments.timeout or DEFAULT_CONTACT_SECONDS
    return Client(arguments.connect, security=security, server_key=server_key, timeout=timeout)


def _run_local(arguments: argparse.Namespace) -> int:
    stages = DEFAULT_LOCAL_STAGES if arguments.local_stages is None else arguments.local_stages
    pipeline = LocalPipeline(
        arguments.model,
        stages=stages,
        split=arguments.split,
        options=arguments.options,
        uncertified=arguments.uncertified,
    )
    timeout = arguments.timeout or DEFAULT_CONTACT_SECONDS
    with exit_on_terminate(), pipeline, pipeline.client(timeout=timeout) as client:
        try:
            return _run(client, arguments)
        except StageLostError as error:
            why = pipeline.failure()
            raise (StageLostError(why) if why else error) from None


def _run(client: Client, arguments: argparse.Namespace) -> int:
    generation = _generate(client, arguments) if arguments.request else None
    if generation is not None and arguments.json:
        print(json.dumps(_json(generation), ensure_ascii=False), flush=True)
    if arguments.stats:
        _print_stats(client, generation)
    return EXIT_INTERRUPTED if generation is not None and generation.finish_reason == "cancelled" else 0


def _generate(client: Client, arguments: argparse.Namespace) -> Generation:
    stream = client.stream(
        **arguments.request,
        max_tokens=arguments.max_tokens,
        sampling=arguments.sampling,
        stop=arguments.stop,
        timeout=arguments.timeout,
    )
    with stream, cancel_on_interrupt(stream):
        text = ""
        try:
            for chunk in stream:
                text = chunk.text or text
                if not arguments.json:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
        finally:
            if text and not text.endswith("\n") and not arguments.json:
                sys.stdout.write("\n")
                sys.stdout.flush()
    generation = stream.result
    if generation.finish_reason == "cancelled" and not generation.token_ids:
        print(f"error: interrupted before {client.endpoint} gave an answer", file=sys.stderr)
    return generation


def _json(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "prompt_token_ids": generation.prompt_token_ids,
        "finish_reason": generation.finish_reason,
        "timings": dataclasses.asdict(generation.timings),
        "stages": [_stage(facts) for facts in generation.stages],
    }


def _stage(facts: StageFacts) -> dict[str, Any]:
    shown = ("stage", "endpoint", "model", "model_name", "architecture", "lanes", "n_ctx", "threads")
    memory = ("weights_bytes", "kv_bytes", "compute_bytes")
    layers = f"{facts.layer_start}:{facts.layer_end}"
    return {"layers": layers, **{name: getattr(facts, name) for name in (*shown, *memory)}}


def _print_stats(client: Client, generation: Generation | None) -> None:
    stats = client.stats()
    if generation is not None:
        print(answer_line(generation), file=sys.stderr)
    print(stage_table(stats), file=sys.stderr)
    for index, stage in enumerate(stats):
        counters = " ".join(f"{name}={value}" for name, value in sorted(stage.counters.items()))
        print(f"stage {index} {stage.facts.stage}: {counters}", file=sys.stderr)


def _one_line(error: SkippyError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
