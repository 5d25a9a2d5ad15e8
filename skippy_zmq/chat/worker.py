"""The process that renders a template: ``python -m skippy_zmq.chat.worker``, started and killed by ``renderer``.

JSON lines. In: first ``{"template", "bos", "eos"}``, then per request ``{"messages", "add_generation_prompt"}``.
Out: ``{"ready": true}`` once; per request ``{"text"}`` or ``{"error"}``, with ``"last": true`` where the process ends
after it; and ``{"more": true}`` whenever a read did not complete a line, so that the parent writes only what fits into
the pipe and never blocks. Ends when stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jinja2

from skippy_zmq.chat.limits import MEMORY_BYTES, ORPHAN_SECONDS
from skippy_zmq.chat.sandbox import ChatTemplateError, ChatTemplateMemoryError, compile_template, render_template


def confine() -> None:
    """Give up, for good, the means that a template never needs: memory without end, files, processes."""
    if sys.platform == "win32":  # no such limits; the sandbox and the parent's time limit remain
        return
    import resource

    # What is used lazily must be loaded before no file can be opened any more.
    with contextlib.suppress(ChatTemplateError):
        warm = compile_template(
            "{{ messages | tojson }}{{ messages | pprint }}{{ 'a b' | wordwrap(1) }}{{ strftime_now('%B') }}{{ x.y.z }}"
        )
        render_template(warm, [{"role": "é"}], add_generation_prompt=True, bos="", eos="")
    for name, limit in [
        ("RLIMIT_AS", MEMORY_BYTES),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_NOFILE", 3),
    ]:
        with contextlib.suppress(ValueError, OSError):  # lower already, or not known to this system
            resource.setrlimit(getattr(resource, name), (limit, limit))


def send(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def lines() -> Iterator[dict[str, Any]]:
    buffer = bytearray()
    while chunk := os.read(0, 1 << 16):
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            yield json.loads(line)
        if buffer:
            send({"more": True})


def main() -> None:
    confine()
    requests = lines()
    setup = next(requests, None)
    if setup is None:
        return
    send({"ready": True})
    template: jinja2.Template | None = None
    for request in requests:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, ORPHAN_SECONDS)
        try:
            # Compiled inside of the first request: its time limit holds for that too.
            template = template or compile_template(setup["template"])
            text = render_template(
                template,
                request["messages"],
                add_generation_prompt=request["add_generation_prompt"],
                bos=setup["bos"],
                eos=setup["eos"],
            )
            text.encode()
            answer = {"text": text}
        except ChatTemplateMemoryError as failure:
            send({"error": str(failure), "last": True})
            return
        except ChatTemplateError as failure:
            answer = {"error": str(failure)}
        except UnicodeEncodeError:
            answer = {"error": "the rendered text holds a lone surrogate"}
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0)
        send(answer)


if __name__ == "__main__":
    main()
