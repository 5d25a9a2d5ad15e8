"""A large language model, split by layers into processes that pass activations over ZeroMQ.

``LocalPipeline`` runs all stages on this machine; ``Client`` and ``AsyncClient`` ask a pipeline anywhere;
``SamplingParams`` says how tokens are chosen; ``errors`` holds every exception raised on purpose.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skippy_zmq import errors

if TYPE_CHECKING:
    from skippy_zmq.client import AsyncClient, Client
    from skippy_zmq.local import LocalPipeline
    from skippy_zmq.wire.messages import SamplingParams

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "LocalPipeline", "SamplingParams", "__version__", "errors"]

# Loaded when first asked for: a stage needs no client, and the clients bring in ZeroMQ.
_HOMES = {
    "AsyncClient": "skippy_zmq.client",
    "Client": "skippy_zmq.client",
    "LocalPipeline": "skippy_zmq.local",
    "SamplingParams": "skippy_zmq.wire.messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
