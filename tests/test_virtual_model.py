"""A stage of a model that is made while it loads has the bits of the same model in a file, and makes only its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from model_files import sparse, tiny
from quantize_oracle import FileRows, as_checkpoint, llama_quantize

from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import DEFAULTS_TWO_THREADS, context_size, script, stage_options
from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.quantize import quantized
from skippy_zmq.runtime.recipes import recipe_named
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_model import GgufModel, RowSource, open_model
from skippy_zmq.topology import LayerRange

SPLITS = [inner for n in range(4) for inner in itertools.combinations(range(1, 4), n)]
OPTIONS = StageOptions(lanes=1, threads=1, ctx_size=256)
FEW_ROWS = StageOptions(lanes=1, threads=1, ctx_size=64, batch_size=8, ubatch_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("virtual")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return tiny(folder / "plain.gguf", hidden=256, ffn=512, quant="bf16")


@pytest.fixture(scope="module")
def tied(folder: Path) -> Path:
    return tiny(folder / "tied.gguf", hidden=256, ffn=512, tied=True)


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """400 MB of f16 zeros that take no place on the disk."""
    return sparse(folder / "large.gguf", n_layers=4, layer_bytes=96 * 1024 * 1024)


def compared(file: Path, source: GgufModel, inner: tuple[int, ...]) -> object:
    """What differs between llama.cpp with the file, unsplit, and the stages of ``source``."""
    n_ctx = context_size(source)
    with Unsplit(file, DEFAULTS_TWO_THREADS, n_ctx) as whole:
        steps = script(n_ctx, can_trim=whole.can_trim)
        wanted = whole.run(steps, whole=False)
    staged = StagedModel(source, inner, stage_options(DEFAULTS_TWO_THREADS, n_ctx))
    return first_difference(steps, wanted, staged.run(steps))


# Q4_0 and Q4_K weights are repacked while they load, Q8_0 and F32 ones are not everywhere.
@pytest.mark.parametrize("recipe", ["F32", "Q8_0", "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize("inner", SPLITS, ids=str)
def test_every_split_has_the_bits_of_the_file(inner: tuple[int, ...], recipe: str, plain: Path, tmp_path: Path) -> None:
    found = recipe_named(recipe)
    assert found is not None
    file = llama_quantize(plain, tmp_path / "file.gguf", found.file_type)
    assert compared(file, quantized(as_checkpoint(plain), found, threads=2), inner) is None


@pytest.mark.parametrize("recipe", ["Q4_0", "Q5_K_M"])
@pytest.mark.parametrize("inner", [(), (2,), (1, 3)], ids=str)
def test_tied_output(inner: tuple[int, ...], recipe: str, tied: Path, tmp_path: Path) -> None:
    found = recipe_named(recipe)
    assert found is not None
    file = llama_quantize(tied, tmp_path / "file.gguf", found.file_type)
    assert compared(file, quantized(as_checkpoint(tied), found, threads=2), inner) is None


@pytest.mark.parametrize("inner", [(), (1, 2, 3)], ids=str)
def test_preserved(inner: tuple[int, ...], plain: Path) -> None:
    assert compared(plain, as_checkpoint(plain), inner) is None


@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 3), (3, 4)])
def test_only_tensors_of_the_stage_are_made(start: int, end: int, plain: Path) -> None:
    rows = FileRows(plain)
    source = as_checkpoint(plain, rows)
    model = StageModel(source, LayerRange(start, end), OPTIONS)
    wanted = {t.name for t in source.tensors if any(t.name.startswith(f"blk.{n}.") for n in range(start, end))}
    wanted |= {"token_embd.weight"} if start == 0 else set()
    wanted |= {"output.weight", "output_norm.weight"} if end == 4 else set()
    assert set(rows.asked) == wanted
    own = sum(tensor.nbytes for tensor in source.tensors if tensor.name in wanted)
    assert model.native_model.own_bytes == own
    assert model.memory().weights >= own


def test_rows_come_in_rising_order_and_bounded_pieces(large: Path) -> None:
    pieces: dict[str, list[tuple[int, int]]] = {}
    rows = FileRows(large)

    def noted(tensor: TensorInfo, first: int, n_rows: int) -> bytes:
        pieces.setdefault(tensor.name, []).append((first, n_rows))
        return rows(tensor, first, n_rows)

    source = replace(as_checkpoint(large), rows=noted)
    StageModel(source, LayerRange(1, 2), FEW_ROWS)
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    for name, seen in pieces.items():
        row_length, n_rows = shapes[name][0], (*shapes[name], 1)[1]
        most = 8 * 1024 * 1024 // row_length
        assert seen == [(first, min(most, n_rows - first)) for first in range(0, n_rows, most)]
    assert len(pieces["blk.1.ffn_up.weight"]) > 1


def test_progress_rises_to_the_end(plain: Path) -> None:
    seen: list[float] = []
    StageModel(as_checkpoint(plain), LayerRange(1, 3), OPTIONS, progress=seen.append)
    assert seen == sorted(seen)
    assert len(seen) == 18
    assert seen[-1] == 1.0


class MakingError(Exception):
    pass


def raising(rows: RowSource) -> RowSource:
    def make(tensor: TensorInfo, first: int, n_rows: int) -> object:
        raise MakingError(tensor.name)

    return make  # type: ignore[return-value]


def returning(value: object) -> Callable[[RowSource], RowSource]:
    return lambda rows: lambda tensor, first, n_rows: value  # type: ignore[return-value]


def test_what_a_source_raises_comes_out(plain: Path) -> None:
    source = as_checkpoint(plain)
    assert source.rows is not None
    with pytest.raises(MakingError, match=r"weight"):
        StageModel(replace(source, rows=raising(source.rows)), LayerRange(0, 2), OPTIONS)
    with pytest.raises(MakingError):
        StageModel(source, LayerRange(0, 2), OPTIONS, progress=raising_progress)
    StageModel(source, LayerRange(0, 2), OPTIONS)


def raising_progress(done: float) -> None:
    raise MakingError(str(done))


@pytest.mark.parametrize(
    "value", [None, 7, "text", np.zeros((4, 4), np.float32)[:, ::2]], ids=["none", "7", "str", "gaps"]
)
def test_what_is_no_run_of_bytes_is_refused(value: object, plain: Path) -> None:
    source = as_checkpoint(plain)
    with pytest.raises((TypeError, ValueError, BufferError, OptionError)):
        StageModel(replace(source, rows=returning(value)(lambda *_: b"")), LayerRange(0, 2), OPTIONS)


@pytest.mark.parametrize("size", [0, 1, 511, 10_000_000])
def test_rows_of_another_size_are_refused(size: int, plain: Path) -> None:
    source = replace(as_checkpoint(plain), rows=lambda tensor, first, n_rows: bytes(size))
    with pytest.raises(
        ModelFileError, match=rf"plain\.gguf: tensor '.*': rows 0 to \d+: wanted \d+ bytes, got {size}$"
    ):
        StageModel(source, LayerRange(0, 2), OPTIONS)


def test_numbers_that_are_not_finite_are_refused(plain: Path) -> None:
    rows = FileRows(plain)

    def make(tensor: TensorInfo, first: int, n_rows: int) -> bytes:
        data = bytearray(rows(tensor, first, n_rows))
        if tensor.name == "blk.1.attn_v.weight":
            data[100:102] = b"\xc1\x7f"
        return bytes(data)

    with pytest.raises(
        ModelFileError, match=r"tensor 'blk\.1\.attn_v\.weight' holds values that are not finite numbers"
    ):
        StageModel(replace(as_checkpoint(plain), rows=make), LayerRange(0, 2), OPTIONS)
    StageModel(replace(as_checkpoint(plain), rows=make), LayerRange(2, 4), OPTIONS)


def test_direct_io_is_refused(plain: Path) -> None:
    options = StageOptions(lanes=1, threads=1, ctx_size=256, direct_io=True)
    with pytest.raises(OptionError, match="direct I/O is for files"):
        StageModel(as_checkpoint(plain), LayerRange(0, 4), options)


def test_locked_weights(plain: Path) -> None:
    before = locked()
    options = StageOptions(lanes=1, threads=1, ctx_size=256, mlock=True, repack=False)
    model = StageModel(as_checkpoint(plain), LayerRange(0, 4), options)
    assert locked() - before >= model.native_model.own_bytes


def locked() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck"))


def test_identity(plain: Path, tied: Path) -> None:
    source = as_checkpoint(plain)
    assert source.identity() == as_checkpoint(plain).identity() == source.full_hash()
    assert len({source.identity(), replace(source, content="c").identity(), as_checkpoint(tied).identity()}) == 3
    assert source.identity() != open_model(plain).identity()


_LOAD = """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    from quantize_oracle import FileRows, as_checkpoint
    from skippy_zmq.runtime.options import StageOptions
    from skippy_zmq.runtime.quantize import quantized
    from skippy_zmq.runtime.recipes import recipe_named
    from skippy_zmq.runtime.stage_model import StageModel
    from skippy_zmq.topology import LayerRange

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    source = as_checkpoint(Path(sys.argv[2]))
    recipe = recipe_named(sys.argv[3])
    model = source if recipe is None else quantized(source, recipe, threads=2)
    cache = sys.argv[6] if len(sys.argv) > 6 else None
    if cache is not None:
        from dataclasses import replace
        from skippy_zmq.sources.weights_cache import folder
        folder.SETTLED_NS = -(2**62)
        model = replace(model, origins={tensor.name: (Path(sys.argv[2]),) for tensor in source.tensors})
    peak = 0
    def progress(done):
        global peak
        peak = max(peak, status("VmHWM"))
    before = status("VmRSS")
    layers = LayerRange(int(sys.argv[4]), int(sys.argv[5]))
    options = StageOptions(
        lanes=1, threads=1, ctx_size=64, batch_size=8, ubatch_size=8, weights_cache=cache, repack=cache is None
    )
    stage = StageModel(model, layers, options, progress=progress)
    print(peak - before, stage.native_model.own_bytes, max(tensor.nbytes for tensor in source.tensors))
"""


@pytest.mark.parametrize("recipe", ["preserve", "F32", "Q8_0", "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize(("start", "end"), [(0, 4), (1, 3)])
def test_peak_memory(recipe: str, start: int, end: int, large: Path) -> None:
    """At most the stage's weights and three times the largest source tensor."""
    peak, weights, largest = _peak(large, recipe, start, end)
    assert largest < weights
    assert weights < peak <= weights + 3 * largest


def test_peak_memory_while_weights_are_kept_and_when_they_are_mapped(large: Path, tmp_path: Path) -> None:
    first, weights, largest = _peak(large, "Q8_0", 1, 3, str(tmp_path / "cache"))
    assert weights < first <= weights + 3 * largest
    second, *_ = _peak(large, "Q8_0", 1, 3, str(tmp_path / "cache"))
    assert second < largest  # nothing is copied, and what is checked is not kept in memory
    assert len(list((tmp_path / "cache").iterdir())) == 1


def _peak(model: Path, recipe: str, start: int, end: int, *cache: str) -> tuple[int, int, int]:
    """Memory that a load took, bytes of the stage's weights, and of the largest source tensor."""
    script = [sys.executable, "-c", dedent(_LOAD), str(Path(__file__).parent)]
    command = [*script, str(model), recipe, str(start), str(end), *cache]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights, largest = map(int, done.stdout.split())
    return peak, weights, largest
