"""Whether llama.cpp may lay a model's weights out for this processor."""

from __future__ import annotations

import logging

from skippy_zmq import _native
from skippy_zmq.sources.ggml_types import TENSOR_TYPES
from skippy_zmq.sources.gguf_model import GgufModel

log = logging.getLogger("skippy_zmq.stage")

_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8"
_MEND = (
    f"CFLAGS='{_WITHOUT_AMX}' CXXFLAGS='{_WITHOUT_AMX}' pip install --no-cache-dir --force-reinstall --no-deps "
    + _native.LLAMA_CPP_PIN.replace(" ", "==")
)
_ONE_BLOCK = 32  # values
_WRONG_FOR_ONE_BLOCK = ("Q4_0", "Q4_1", "Q8_0")


def may_repack(source: GgufModel) -> bool:
    """Not where AMX would crash, nor where its results would be wrong. The log says why, and how to mend it."""
    if fault := _native.amx_fault():
        log.warning("%s; weights are not rearranged for the CPU, which is slower. To mend it: %s", fault, _MEND)
        return False
    if _native.has_amx() and (spoilt := _of_one_block(source)):
        log.warning(
            "%s: weights are not rearranged for the CPU: '%s' has rows of %d values, for which the AMX kernels of "
            "llama.cpp add to memory that nobody has set",
            source.path,
            spoilt,
            _ONE_BLOCK,
        )
        return False
    return True


def _of_one_block(source: GgufModel) -> str | None:
    """The name of the first such matrix. From 32 inputs on, the kernel then begins with whatever its output held."""
    return next(
        (
            t.name
            for t in source.tensors
            if t.shape[0] == _ONE_BLOCK and TENSOR_TYPES[t.type].name in _WRONG_FOR_ONE_BLOCK
        ),
        None,
    )
