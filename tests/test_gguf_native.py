"""What the checks let through never kills llama.cpp: it loads and runs, or is refused by llama.cpp with a message."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gguf_bytes import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, RawGguf, RawTensor, array, read_raw, scalar
from model_files import tiny

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_model import open_model

DATA = Path(__file__).parent / "data"
_PER_MODEL = 60
_F16 = 1

# one process for all files: a fatal signal ends it, and the last name it printed is the culprit
_CHILD = """
import sys
from pathlib import Path
import llama_cpp as llama
for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    print(path.name, flush=True)
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        continue
    params = llama.llama_context_default_params()
    params.n_ctx = 64
    params.n_batch = params.n_ubatch = 16
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = False
    params.swa_full = True
    context = llama.llama_init_from_model(model, params)
    if context:
        tokens = (llama.llama_token * 64)()
        text = "Hello\\n wörld".encode()
        llama.llama_tokenize(llama.llama_model_get_vocab(model), text, len(text), tokens, 64, True, True)
        llama.llama_decode(context, llama.llama_batch_get_one((llama.llama_token * 3)(1, 2, 3), 3))
        llama.llama_decode(context, llama.llama_batch_get_one((llama.llama_token * 1)(1), 1))
        llama.llama_free(context)
    llama.llama_model_free(model)
print("end", flush=True)
"""


def _other_values(value: bytes) -> Iterator[bytes]:
    (value_type,) = struct.unpack_from("<I", value)
    if value_type == UINT32:
        (number,) = struct.unpack_from("<I", value, 4)
        yield from (scalar(UINT32, other % 2**32) for other in (0, 1, 3, number + 1, 2 * number, number // 2, 2**31))
    elif value_type == FLOAT32:
        yield from (scalar(FLOAT32, other) for other in (0.0, -1.0, float("nan")))
    elif value_type == BOOL:
        yield scalar(BOOL, not value[4])
    elif value_type == STRING:
        yield scalar(STRING, "other")
    elif value_type == ARRAY:
        element_type, count = struct.unpack_from("<IQ", value, 4)
        if element_type in (INT32, UINT32):
            yield from (array(element_type, [other] * count) for other in (0, 1, 3))


def _mutants(source: Path, seed: int) -> Iterator[RawGguf]:
    """Copies of a model with one thing changed, in an order that ``seed`` fixes."""
    choose = random.Random(seed)
    raw = read_raw(source)
    while True:
        values, tensors = dict(raw.values), dict(raw.tensors)
        if choose.random() < 0.7:
            key = choose.choice(list(values))
            values[key] = choose.choice([*_other_values(values[key]), values[key]])
        else:
            name = choose.choice(list(tensors))
            old = tensors[name]
            n_elements = len(old.data or b"") // 4
            replacement = choose.choice(
                (None, RawTensor(old.shape, _F16, bytes(2 * n_elements)), RawTensor((n_elements,), old.type, old.data))
            )
            if replacement is None:
                del tensors[name]
            else:
                tensors[name] = replacement
        yield RawGguf(values, tensors)


def test_accepted_files_never_kill_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "mutants").mkdir()
    sources = [tiny(tmp_path / "tiny.gguf"), *sorted(DATA.glob("arch/*.gguf"))]
    accepted = 0
    for seed, source in enumerate(sources):
        mutants = _mutants(source, seed)
        for number in range(_PER_MODEL):
            path = next(mutants).write(tmp_path / "mutants" / f"{source.stem}-{number:03}.gguf")
            try:
                open_model(path)
            except ModelFileError:
                path.unlink()
            else:
                accepted += 1
    assert accepted > len(sources) * _PER_MODEL // 4
    # without a debugger that ggml would start to print a backtrace
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path / "mutants")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )
    names = result.stdout.splitlines()
    assert result.returncode == 0, (names[-1:], result.stderr[-2000:])
    assert len(names) == accepted + 1
    assert names[-1] == "end"
