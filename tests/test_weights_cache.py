"""Weights that were made once are mapped at the next start, and never used where they could be others."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from checkpoint_files import CASES, GOLDEN, edited, write_case
from quantize_oracle import bytes_in, llama_quantize
from stage_processes import SMALL, StageProcess, stage_environment
from test_checkpoint_stages import _importances, as_gguf, unsplit

from skippy_zmq import LocalPipeline
from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import DEFAULTS, context_size, stage_options
from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.recipes import recipe_named
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.references import locate
from skippy_zmq.sources.weights_cache import folder as cache_folder
from skippy_zmq.topology import LayerRange

pytest_plugins = ("transport_fixtures",)

LLAMA = GOLDEN / "llama"
FEW = StageOptions(lanes=1, threads=1, ctx_size=64, batch_size=8, ubatch_size=8)

_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_note_opened)


@contextlib.contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths that Python opens meanwhile."""
    global _opened
    _opened = found = []
    try:
        yield found
    finally:
        _opened = None


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written count as old."""
    monkeypatch.setattr(cache_folder, "SETTLED_NS", -(2**62))


def opened(folder: Path, quant: str = "Q8_0", **options: object) -> GgufModel:
    return open_with_options(locate(folder), StageOptions.model_validate({"quant": quant, "threads": 1, **options}))


def load(source: GgufModel, cache: Path, layers: str = "1:3", **options: object) -> StageModel:
    values = {"weights_cache": str(cache), **options}
    return StageModel(source, LayerRange.parse(layers), FEW.model_copy(update=values))


def entries(cache: Path) -> set[str]:
    assert not list(cache.glob(".*")), "nothing but entries"
    return {path.name for path in cache.glob("*.gguf")}


def staged(source: GgufModel, inner: Sequence[int], cache: Path) -> StagedModel:
    options = stage_options(DEFAULTS, context_size(source))
    return StagedModel(source, inner, options.model_copy(update={"weights_cache": str(cache)}))


# Q4_0 weights are repacked while they load, Q8_0 ones are not everywhere; preserved ones are changed by conversion
@pytest.mark.parametrize("quant", ["preserve", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("inner", [(), (2,), (1, 4)], ids=str)
def test_the_second_start_has_the_same_bits_and_opens_no_source(
    inner: tuple[int, ...], quant: str, cache: Path, tmp_path: Path
) -> None:
    whole = as_gguf(LLAMA, tmp_path / "whole.gguf")
    recipe = recipe_named(quant)
    if recipe is not None:
        whole = llama_quantize(whole, tmp_path / "quantized.gguf", recipe.file_type)
    steps, wanted = unsplit(whole, DEFAULTS)
    assert first_difference(steps, wanted, staged(opened(LLAMA, quant), inner, cache).run(steps)) is None
    assert len(entries(cache)) == len(inner) + 1
    again = opened(LLAMA, quant)
    with opened_files() as found:
        second = staged(again, inner, cache)
    assert not [path for path in found if path.startswith(str(GOLDEN))]
    assert len([path for path in found if path.startswith(str(cache))]) == len(inner) + 1
    assert first_difference(steps, wanted, second.run(steps)) is None
    mapped = Path("/proc/self/maps").read_text()
    assert all(name in mapped for name in entries(cache))


def test_a_tied_matrix_of_two_stages(cache: Path, tmp_path: Path, settled: None) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    steps, wanted = unsplit(as_gguf(folder, tmp_path / "whole.gguf"), DEFAULTS)
    for _ in range(2):
        found = staged(opened(folder, "preserve"), (1,), cache)
        assert first_difference(steps, wanted, found.run(steps)) is None
    assert len(entries(cache)) == 2


def test_what_is_kept_are_the_bytes_of_llama_cpps_quantizer(cache: Path, tmp_path: Path) -> None:
    wanted = bytes_in(llama_quantize(as_gguf(LLAMA, tmp_path / "whole.gguf"), tmp_path / "q.gguf", 7))
    load(opened(LLAMA), cache, "1:3")
    (name,) = entries(cache)
    kept = bytes_in(cache / name)
    assert set(kept) == {tensor for tensor in wanted if tensor.startswith(("blk.1.", "blk.2."))}
    assert all(kept[tensor] == wanted[tensor] for tensor in kept)


def test_whatever_weights_depend_on_makes_another_entry(cache: Path, tmp_path: Path, settled: None) -> None:
    folder = write_case(CASES["llama-old-spelling"], tmp_path / "model")
    _importances(folder / "one.dat", {"blk.0.attn_q.weight": 32})
    _importances(folder / "two.dat", {"blk.0.attn_k.weight": 32})
    seen = []
    for quant, layers, imatrix in [
        ("Q4_0", "0:1", ""),
        ("Q4_0", "0:2", ""),
        ("Q8_0", "0:1", ""),
        ("Q4_0", "0:1", "one.dat"),
        ("Q4_0", "0:1", "two.dat"),
    ]:
        for _ in range(2):
            load(opened(folder, quant, imatrix=imatrix), cache, layers)
        seen.append(len(entries(cache)))
    assert seen == [1, 2, 3, 4, 5]
    edited(folder, {"rms_norm_eps": 1e-3})  # a setting alone
    load(opened(folder, "Q4_0"), cache, "0:1")
    assert len(entries(cache)) == 6


def test_a_byte_that_no_sample_covers_makes_another_entry(cache: Path, tmp_path: Path, settled: None) -> None:
    """Even where size, place and the time of writing are those of before."""
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    weights = folder / "model.safetensors"
    before, source = weights.stat(), opened(folder)
    load(source, cache, "0:5")
    data = bytearray(weights.read_bytes())
    data[-600] ^= 1
    with weights.open("r+b") as file:
        file.write(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = opened(folder)
    assert changed.identity() == source.identity()
    steps, wanted = unsplit(llama_quantize(as_gguf(folder, tmp_path / "whole.gguf"), tmp_path / "q.gguf", 7), DEFAULTS)
    load(changed, cache, "0:5")
    assert len(entries(cache)) == 2
    assert first_difference(steps, wanted, staged(changed, (), cache).run(steps)) is None
    assert len(entries(cache)) == 2


def test_a_source_written_just_before_or_while_it_loads_is_not_trusted(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    monkeypatch.setattr(cache_folder, "SETTLED_NS", 3600 * 10**9)
    load(opened(folder), cache)
    assert "their source was written only now" in caplog.text
    monkeypatch.setattr(cache_folder, "SETTLED_NS", -(2**62))
    caplog.clear()
    source = opened(folder)
    values = {"weights_cache": str(cache)}
    StageModel(
        source,
        LayerRange(1, 3),
        FEW.model_copy(update=values),
        progress=lambda _done: (folder / "model.safetensors").touch(),
    )
    assert "their source changed while the stage was loading" in caplog.text
    assert entries(cache) == set()


def flipped(position: int) -> object:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 4
        path.chmod(0o600)
        path.write_bytes(data)

    return flip


def replaced_by_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "magic": (flipped(0), "its header is not that of these tensors"),
    "checksum": (flipped(80), "wanted checksum"),
    "header": (flipped(2000), "its header is not that of these tensors"),
    "tensor": (flipped(-1), r"tensor 'blk\.2\.attn_v\.weight': wanted checksum"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "wanted [0-9]+ bytes, got"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "wanted [0-9]+ bytes, got"),
    "empty": (lambda path: path.write_bytes(b""), "wanted [0-9]+ bytes, got 0"),
    "foreign": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "its header is not that"),
    "link": (replaced_by_link, "wanted a regular file, got a link"),
    "folder": (replaced_by_folder, "wanted a regular file"),
    "pipe": (replaced_by_pipe, "wanted a regular file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_set_aside_and_made_anew(name: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(opened(LLAMA), cache)
    (entry,) = entries(cache)
    whole = (cache / entry).read_bytes()
    damage, problem = DAMAGES[name]
    damage(cache / entry)  # type: ignore[operator]
    with opened_files() as found:
        load(opened(LLAMA), cache)
    assert [path for path in found if path.endswith("model.safetensors")]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert entry in warning
    assert "it was set aside as" in warning
    caplog.clear()
    assert re.search(problem, warning)
    assert (cache / entry).read_bytes() == whole
    assert (cache / entry).with_suffix(".damaged").exists() or name == "link"
    load(opened(LLAMA), cache)
    assert not caplog.records
    assert entries(cache) == {entry}


def test_a_folder_that_cannot_be_written_is_said_and_no_obstacle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    model = load(opened(LLAMA), tmp_path / "file" / "cache")
    assert model.memory().weights > 0
    assert [record.getMessage() for record in caplog.records] == [
        f"weights are not kept in {tmp_path / 'file' / 'cache'}: Not a directory"
    ]


def test_a_folder_in_which_nobody_can_make_files(caplog: pytest.LogCaptureFixture) -> None:
    load(opened(LLAMA), Path("/proc/self/fdinfo"))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("weights are not kept in /proc/self/fdinfo: ")


def test_a_disk_that_is_full_is_said_and_no_obstacle(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = opened(LLAMA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        model = load(source, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert model.memory().weights > 0
    assert "File too large" in caplog.text
    assert entries(cache) == set()
    assert len(caplog.records) == 1


def test_a_disk_that_fills_up_while_weights_load(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.pwrite, iter(range(100))

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        if next(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    source = opened(LLAMA)
    monkeypatch.setattr(os, "pwrite", filling)
    model = load(source, cache)
    assert model.memory().weights > 0
    assert "No space left on device" in caplog.text
    assert len(caplog.records) == 1
    assert next(calls) == 6, "nothing more is written"
    assert entries(cache) == set()


def test_space_that_is_not_there_is_said_before_anything_is_written(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1, 1, 1))
    load(opened(LLAMA), cache)
    assert "bytes of space, 1 are free" in caplog.text
    assert entries(cache) == set()


def test_the_limit(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was not used for longest goes; what is in use stays."""
    caplog.set_level(logging.INFO)
    source = opened(LLAMA)
    names = {}
    for layers in ("0:1", "1:2", "2:3"):
        load(source, cache, layers)
        (names[layers],) = entries(cache) - set(names.values())
    size = (cache / names["1:2"]).stat().st_size
    load(source, cache, "1:2")  # used again, and no more
    used = load(source, cache, "0:1")  # in use
    os.utime(cache / names["0:1"], ns=(0, 0))  # however long ago it was opened
    total = sum(path.stat().st_size for path in cache.iterdir())
    load(source, cache, "3:4", weights_cache_bytes=total)
    assert entries(cache) >= {names["0:1"], names["1:2"]}
    assert names["2:3"] not in entries(cache)
    (cache / "of-somebody.gguf").write_bytes(b"not ours")
    load(source, cache, "1:3", weights_cache_bytes=3 * size)
    assert "more than weights_cache_bytes" not in caplog.text
    assert (cache / "of-somebody.gguf").exists()
    assert sum((cache / name).stat().st_size for name in entries(cache) - {"of-somebody.gguf"}) <= 3 * size
    load(source, cache, "0:5", weights_cache_bytes=size)
    assert f"more than weights_cache_bytes, which is {size}" in caplog.text
    del used
    load(source, cache, "4:5", weights_cache_bytes=2 * size)
    assert names["0:1"] not in entries(cache)


_KILLED = """
import dataclasses, os, signal, sys
from pathlib import Path
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.references import locate
from skippy_zmq.topology import LayerRange

folder, cache = sys.argv[1:]
options = StageOptions(lanes=1, threads=1, ctx_size=64, quant="Q8_0", weights_cache=cache)
source = open_with_options(locate(folder), options)

def rows(tensor, first, n_rows):
    if tensor.name == "blk.2.attn_v.weight":
        os.kill(os.getpid(), signal.SIGKILL)
    return source.rows(tensor, first, n_rows)

StageModel(dataclasses.replace(source, rows=rows), LayerRange(1, 3), options)
"""


def test_what_a_killed_stage_leaves_is_removed_and_never_used(cache: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(LLAMA), str(cache)]
    killed = subprocess.run(command, check=False, capture_output=True, env=stage_environment())
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = cache.iterdir()
    assert left.name.endswith(".partial")
    load(opened(LLAMA), cache)
    assert len(entries(cache)) == 1
    assert not left.exists()


def test_a_load_that_fails_leaves_nothing(cache: Path) -> None:
    def stop(_done: float) -> None:
        raise KeyboardInterrupt

    options = FEW.model_copy(update={"weights_cache": str(cache)})
    with pytest.raises(KeyboardInterrupt):
        StageModel(opened(LLAMA), LayerRange(1, 3), options, progress=stop)
    assert list(cache.iterdir()) == []


def test_direct_io_is_refused_at_every_start(cache: Path) -> None:
    load(opened(LLAMA), cache, "0:5")
    with pytest.raises(OptionError, match="direct I/O is for files"):
        load(opened(LLAMA), cache, "0:5", direct_io=True)


def test_copied_weights_and_checked_ones(cache: Path) -> None:
    for values in ({}, {"mmap": False}, {"check_tensors": True}, {"mlock": True}):
        model = load(opened(LLAMA), cache, **values)
        assert model.native_model.own_bytes == sum(
            tensor.nbytes for tensor in model.source.tensors if tensor.name.startswith(("blk.1.", "blk.2."))
        )


def test_models_in_files_need_no_cache(cache: Path) -> None:
    options = StageOptions(weights_cache=str(cache))
    with pytest.raises(OptionError, match=r"weights_cache: .*reference-f32\.gguf is no checkpoint"):
        open_with_options(locate(LLAMA / "reference-f32.gguf"), options)


def test_two_processes_that_start_at_once_and_a_third(cache: Path, socket_dir: Path) -> None:
    common = ["--model", str(LLAMA), "--quant", "Q8_0", "--layers", "0:5", *SMALL, "--weights-cache", str(cache)]
    with contextlib.ExitStack() as stages:
        both = [
            stages.enter_context(StageProcess(*common, "--bind", f"ipc://{socket_dir}/{number}")) for number in range(2)
        ]
        for stage in both:
            stage.ready()
        (entry,) = entries(cache)
        third = stages.enter_context(StageProcess(*common, "--bind", f"ipc://{socket_dir}/2"))
        third.ready()
        maps = Path(f"/proc/{third.pid}/maps").read_text()
    assert f"{cache / entry}" in maps
    assert entries(cache) == {entry}


def test_a_pipeline_started_twice(cache: Path, leak_check: None) -> None:
    found = []
    options = {"ctx_size": 256, "lanes": 1, "threads": 1, "quant": "Q8_0", "weights_cache": str(cache)}
    for _ in range(2):
        with LocalPipeline(LLAMA, split=(2,), **options) as pipeline:
            answer = pipeline.generate(token_ids=[1, 2, 3], max_tokens=24)
            found.append((list(answer.token_ids), pipeline.stages[0].model))
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pipeline.process_ids]
    assert found[0] == found[1]
    assert len(entries(cache)) == 2
    assert all(any(name in text for name in entries(cache)) for text in maps)
