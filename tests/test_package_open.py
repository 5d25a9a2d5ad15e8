"""Stages from a layer package: the bits of the whole model, from nothing but their own parts."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gguf_bytes import BOOL, STRING, UINT32, scalar
from model_files import rewrite, shards, tiny
from package_helpers import contents, edited, flip, package_of, with_parts
from stage_processes import stage_environment

from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import DEFAULTS, context_size, script, stage_options
from skippy_zmq.errors import ModelFileError
from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources import gguf_model
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.needed_files import package_parts
from skippy_zmq.sources.package.building import build_package
from skippy_zmq.sources.package.opening import PackageModel, open_package
from skippy_zmq.sources.package.weight_source import GgufWeights
from skippy_zmq.topology import LayerRange

ARCH = Path(__file__).parent / "data" / "arch"
SPLITS = [(), (1,), (2,), (3,), (1, 2, 3)]
PAGE = resource.getpagesize()
MODELS = ["tiny", "tied", "q8_0", "sharded", "llama-moe", "gemma3-dense", "gpt2-dense", "granitehybrid-dense"]


def _model(name: str, folder: Path) -> Path:
    path = folder / "model.gguf"
    if name == "sharded":
        return shards(tiny(path), 3)
    if name in ("tiny", "tied", "q8_0"):
        return tiny(path, tied=name == "tied", quant=name if name == "q8_0" else None)
    return ARCH / f"{name}.gguf"


def _parts_of_stage(layers: LayerRange, *, tied: bool) -> set[str]:
    """What a stage of a model of four layers needs, by the description of the format."""
    parts = {"shared.gguf", *(f"layers/{layer:05d}.gguf" for layer in range(layers.start, layers.end))}
    if layers.start == 0 or (layers.end == 4 and tied):
        parts.add("embeddings.gguf")
    return parts | ({"output.gguf"} if layers.end == 4 else set())


@pytest.mark.parametrize("name", MODELS)
def test_every_stage_needs_its_own_parts_only_and_gives_the_bits_of_the_whole(tmp_path: Path, name: str) -> None:
    model = _model(name, tmp_path)
    package = package_of(model, tmp_path / "package")
    whole = open_model(model)
    assert open_model(package).identity() == whole.identity()
    n_ctx = context_size(whole)
    with Unsplit(model, DEFAULTS, n_ctx) as unsplit:
        steps = script(n_ctx, can_trim=unsplit.can_trim)
        wanted = unsplit.run(steps, whole=False)
    for boundaries in SPLITS:
        edges = [0, *boundaries, 4]
        sources = []
        for start, end in itertools.pairwise(edges):
            parts = _parts_of_stage(LayerRange(start, end), tied=whole.tied_output)
            folder = tmp_path / f"{boundaries}-{start}"
            sources.append(open_model(with_parts(package, folder, parts)))
        staged = StagedModel(sources, boundaries, stage_options(DEFAULTS, n_ctx))
        assert first_difference(steps, wanted, staged.run(steps)) is None, boundaries


@pytest.mark.parametrize("name", MODELS)
def test_what_is_fetched_for_a_stage_is_what_it_opens(tmp_path: Path, name: str) -> None:
    package = open_package(package_of(_model(name, tmp_path), tmp_path / "package"))
    text = (package.path / "model-package.json").read_bytes()
    for start, end in itertools.combinations(range(5), 2):
        layers = LayerRange(start, end)
        opened = {package.manifest.parts[index].path for index in package.used_parts(layers)}
        assert set(package_parts(text, "m", layers)) == opened, layers


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    return package_of(tiny(folder / "tiny.gguf"), folder / "package")


def _load(folder: Path, layers: str, **options: object) -> StageModel:
    return StageModel(open_model(folder), LayerRange.parse(layers), check_options({"ctx_size": 64, **options}, "test"))


def test_the_folder_and_the_manifest_name_the_same_package(package: Path) -> None:
    by_folder, by_manifest = open_model(package), open_model(package / "model-package.json")
    assert isinstance(by_folder, PackageModel)
    assert by_folder.path == by_manifest.path == package
    assert by_folder.manifest == by_manifest.manifest


def test_a_package_describes_the_model_as_the_file_does(tmp_path: Path) -> None:
    for name in ("tiny", "llama-moe"):
        model = open_model(_model(name, tmp_path))
        package = open_model(package_of(model.path, tmp_path / name))
        for field in (
            "architecture",
            "n_layers",
            "n_blocks",
            "n_vocab",
            "context_length",
            "tied_output",
            "n_positions",
        ):
            assert getattr(package, field) == getattr(model, field)
        assert [(t.name, t.type, t.shape) for t in package.tensors] == [
            (t.name, t.type, t.shape) for t in model.tensors
        ]
        assert package.full_hash() == model.full_hash()


def _mapped(folder: Path) -> dict[str, int]:
    """Bytes that this process maps of each file below ``folder``, last pages apart, which llama.cpp leaves."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, rest = line.partition(" ")
        start, end = (int(address, 16) for address in addresses.split("-"))
        if str(folder) in rest and end - start > PAGE:
            path = Path("/" + rest.partition("/")[2]).relative_to(folder).as_posix()
            sizes[path] = sizes.get(path, 0) + end - start
    return sizes


@pytest.mark.parametrize("mmap", [True, False])
def test_weights_are_mapped_from_the_parts_themselves(package: Path, mmap: bool) -> None:
    stage = _load(package, "1:3", mmap=mmap, repack=False)
    own = {f"layers/{layer:05d}.gguf" for layer in (1, 2)}
    mapped = _mapped(package)
    assert set(mapped) == (own if mmap else set())
    assert all((package / path).stat().st_size <= size + PAGE for path, size in mapped.items())
    assert stage.native_model.own_bytes == sum(
        tensor.nbytes for tensor in stage.source.tensors if tensor.name.startswith(("blk.1.", "blk.2."))
    )


@pytest.mark.parametrize("layers", ["0:2", "1:3", "2:4", "0:4"])
def test_a_damaged_part_of_the_stage_is_refused_and_one_of_another_stage_not_looked_at(
    package: Path, tmp_path: Path, layers: str
) -> None:
    wanted = LayerRange.parse(layers)
    for name in _parts_of_stage(LayerRange(0, 4), tied=False) - {"shared.gguf"}:
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(package, folder)
        flip(folder / name)
        if name in _parts_of_stage(wanted, tied=False):
            with pytest.raises(
                ModelFileError, match=rf"{name}: wanted sha256 [0-9a-f]{{64}}, has [0-9a-f]{{64}}; fetch"
            ):
                _load(folder, layers)
        else:
            _load(folder, layers)


@pytest.mark.parametrize("mmap", [True, False])
def test_no_weight_is_looked_at_before_its_hash_is_known(package: Path, tmp_path: Path, mmap: bool) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    part = folder / "layers/00001.gguf"
    with part.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\xff" * 64)  # numbers that are not finite, which would be said otherwise
    with pytest.raises(ModelFileError, match=r"layers/00001\.gguf: wanted sha256"):
        _load(folder, "1:3", mmap=mmap, check_tensors=True)


@pytest.mark.parametrize("mmap", [True, False])
def test_progress_rises_from_hashes_to_weights(package: Path, mmap: bool) -> None:
    """Weights count only after the hashes: without the native side's call for them it would end at a half."""
    seen: list[float] = []
    options = check_options({"ctx_size": 64, "mmap": mmap}, "test")
    StageModel(open_model(package), LayerRange(0, 4), options, progress=seen.append)
    assert seen == sorted(seen)
    assert (seen[-1], 0.5 in seen) == (1.0, True)


class StopError(Exception):
    pass


@pytest.mark.parametrize("at", [0.0, 0.5])
def test_a_load_can_be_stopped(package: Path, at: float) -> None:
    def stop(done: float) -> None:
        if done >= at:
            raise StopError

    threads, files = threading.active_count(), os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(StopError):
        StageModel(open_model(package), LayerRange(0, 4), check_options({"ctx_size": 64}, "test"), progress=stop)
    assert (threading.active_count(), os.listdir("/proc/self/fd")) == (threads, files)  # noqa: PTH208


def test_all_parts_that_are_no_good_are_named_at_once(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    (folder / "layers/00001.gguf").unlink()
    with (folder / "layers/00002.gguf").open("ab") as file:
        file.write(b"x")
    flip(folder / "output.gguf")
    with pytest.raises(ModelFileError) as refusal:
        _load(folder, "1:4")
    for text in ("3 problems", "00001.gguf is missing; fetch it", "00002.gguf: wanted", "output.gguf: wanted sha256"):
        assert text in str(refusal.value)


def test_what_is_checked_is_what_is_opened(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    model = open_package(folder)
    part = folder / "layers/00001.gguf"
    good = part.read_bytes()
    with model.stage_files(LayerRange(1, 2)) as files:
        part.rename(part.with_suffix(".old"))
        part.write_bytes(b"another file")
        assert Path(files.paths[3]).read_bytes() == good
    part.write_bytes(good)
    with pytest.raises(ModelFileError, match=r"00001\.gguf changed while"), model.stage_files(LayerRange(1, 2)):
        flip(part)


def test_stand_ins_take_no_memory_and_leave_nothing(package: Path) -> None:
    model = open_package(package)
    with model.stage_files(LayerRange(1, 2)) as files:
        sizes = {path: (Path(path).stat().st_size, Path(path).stat().st_blocks * 512) for path in files.paths}
        for index, (path, part) in enumerate(zip(files.paths, model.files, strict=True)):
            assert sizes[path][0] == part.stat().st_size
            assert index in (0, 3) or sizes[path][1] <= 4096
    assert not any(Path(path).exists() for path in files.paths)


def test_the_stage_of_another_model_is_told_apart(package: Path, tmp_path: Path) -> None:
    other = package_of(tiny(tmp_path / "other.gguf", seed=1), tmp_path / "other")
    assert open_model(other).identity() != open_model(package).identity()


def test_a_manifest_that_contradicts_the_metadata_is_refused(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    edited(folder, lambda content: content.update(architecture="qwen2"))
    with pytest.raises(ModelFileError, match=r"architecture is 'qwen2', but the metadata in shared\.gguf says 'llama'"):
        open_model(folder)


def test_projectors_are_exposed(package: Path, tmp_path: Path) -> None:
    def clip(raw: object) -> None:
        raw.values = {  # type: ignore[attr-defined]
            "general.architecture": scalar(STRING, "clip"),
            "clip.has_vision_encoder": scalar(BOOL, True),
            "clip.projector_type": scalar(STRING, "mlp"),
            "clip.vision.image_size": scalar(UINT32, 224),
        }

    model = tiny(tmp_path / "tiny.gguf")
    eye = rewrite(model, tmp_path / "eye.gguf", clip)
    folder = tmp_path / "package"
    build_package(GgufWeights(gguf_model.open_model(model)), folder, [eye])
    source = open_package(folder)
    (projector,) = source.projectors
    assert (projector.type, projector.vision, projector.audio) == ("mlp", True, False)
    assert projector.size == eye.stat().st_size
    assert source.projector_file(projector).read_bytes() == eye.read_bytes()
    assert source.identity() == open_model(model).identity()
    _load(folder, "0:4")
    flip(projector.path)
    _load(folder, "0:4")  # a stage does not need it
    with pytest.raises(ModelFileError, match=r"projectors/eye\.gguf: wanted sha256"):
        source.projector_file(projector)
    with pytest.raises(ModelFileError, match="wanted a projector"):
        build_package(GgufWeights(gguf_model.open_model(model)), tmp_path / "wrong", [model])
    assert contents(folder)["parts"][-1]["kind"] == "mmproj"


def test_more_parts_than_files_may_usually_be_open(tmp_path: Path) -> None:
    """In a process of its own: the limit is raised for the whole process."""
    package = package_of(
        tiny(tmp_path / "tiny.gguf", n_layers=60, hidden=32, ffn=32, heads=1, kv_heads=1), tmp_path / "p"
    )
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))\n"
        "from skippy_zmq.runtime.options import check_options\n"
        "from skippy_zmq.runtime.stage_model import StageModel\n"
        "from skippy_zmq.sources.models import open_model\n"
        "from skippy_zmq.topology import LayerRange\n"
        "StageModel(open_model(sys.argv[1]), LayerRange(10, 50), check_options({'ctx_size': 64}, 'test'))\n"
    )
    command = [sys.executable, "-c", program, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=stage_environment())
    assert done.returncode == 0, done.stderr
