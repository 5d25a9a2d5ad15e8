"""Building, resuming, verifying and composing packages; the program around that."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from checkpoint_files import GOLDEN
from gguf_bytes import STRING, scalar
from model_files import rewrite, shards, tiny
from package_helpers import check_stage, contents, edited, flip, package_of, sha256
from stage_processes import stage_environment

from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.package.__main__ import main
from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.checkpoint.safetensors_table import read_table
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.package.building import build_package
from skippy_zmq.sources.package.weight_source import GgufWeights
from skippy_zmq.topology import LayerRange

ARCH = Path(__file__).parent / "data" / "arch"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def package(model: Path) -> Path:
    return package_of(model, model.with_name("package"))


def _tensor_bytes(model: GgufModel) -> dict[str, bytes]:
    files = {path: path.read_bytes() for path in model.files}
    return {t.name: files[t.path][t.offset : t.offset + t.nbytes] for t in model.tensors}


def test_parts_hold_the_tensors_and_nothing_else_is_there(model: Path, package: Path) -> None:
    assert _tensor_bytes(open_model(package)) == _tensor_bytes(open_model(model))
    content = contents(package)
    assert {p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()} == {
        "model-package.json",
        *(part["path"] for part in content["parts"]),
    }
    for part in content["parts"]:
        path = package / part["path"]
        assert (part["size"], part["sha256"]) == (path.stat().st_size, sha256(path))


def test_llama_cpp_takes_the_parts_for_shards(package: Path) -> None:
    """Their numbers, counts and tensors are right for llama.cpp itself, without anything of ours."""
    parts = [str(path).encode() for path in open_model(package).files]
    array = (llama_cpp.ctypes.c_char_p * len(parts))(*parts)
    loaded = llama_cpp.llama_model_load_from_splits(array, len(parts), llama_cpp.llama_model_default_params())
    assert loaded
    assert llama_cpp.llama_model_n_layer(loaded) == 4
    llama_cpp.llama_model_free(loaded)


@pytest.mark.parametrize("name", ["llama-moe", "granitehybrid-dense", "tied", "sharded"])
def test_composing_gives_the_source_back(tmp_path: Path, name: str) -> None:
    single = tiny(tmp_path / "tiny.gguf", tied=name == "tied") if name in ("tied", "sharded") else ARCH / f"{name}.gguf"
    package = package_of(shards(single, 3) if name == "sharded" else single, tmp_path / "package")
    whole = tmp_path / "whole.gguf"
    assert main(["compose", str(package), str(whole)]) == 0
    assert _tensor_bytes(open_model(whole)) == _tensor_bytes(open_model(single))
    assert list(_tensor_bytes(open_model(whole))) == list(_tensor_bytes(open_model(single)))
    assert open_model(whole).identity() == open_model(single).identity()


def test_a_checkpoint_becomes_a_package(tmp_path: Path) -> None:
    """Its tensors are what llama.cpp's converter makes of the checkpoint."""
    package = tmp_path / "package"
    assert main(["build", str(GOLDEN / "llama"), str(package), "--no-progress"]) == 0
    assert main(["verify", str(package), "--no-progress"]) == 0
    expected = json.loads((GOLDEN / "llama" / "reference-bf16.json").read_text())["tensors"]
    found = _tensor_bytes(open_model(package))
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == {
        name: digest for name, (_, _, digest) in expected.items()
    }
    check_stage(package)


def test_a_checkpoint_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "llama", folder)
    before = GgufWeights(open_model(folder)).fingerprint()
    assert GgufWeights(open_model(folder)).fingerprint() == before
    weights = folder / "model.safetensors"
    status = weights.stat()
    flip(weights, 400_001)  # between the samples that a model is known by
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # as tools do that keep times
    assert GgufWeights(open_model(folder)).fingerprint() != before
    (folder / "weights").mkdir()
    inner = weights.rename(folder / "weights" / weights.name)
    names = {tensor.name: "weights/model.safetensors" for tensor in read_table(inner)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    before = GgufWeights(open_model(index)).fingerprint()
    flip(inner, 400_001)
    assert GgufWeights(open_model(index)).fingerprint() != before, "wherever an index says that weights are"


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_a_source_that_is_written_meanwhile(kind: str, tmp_path: Path) -> None:
    """Its package would hold parts of both."""
    weights = tmp_path / "checkpoint" / "model.safetensors"
    shutil.copytree(GOLDEN / "llama", weights.parent)
    if kind == "gguf":
        weights = weights.with_name("reference-f32.gguf")
    left = [weights]

    def progress(_bytes: int) -> None:
        if left:
            flip(left.pop(), 400_001)

    folder = tmp_path / "package"
    with pytest.raises(ModelFileError, match="was written while its package was built; build again"):
        build_package(GgufWeights(open_model(weights)), folder, progress=progress)
    assert not (folder / "model-package.json").exists()
    package_of(weights, folder)
    assert _tensor_bytes(open_model(folder)) == _tensor_bytes(open_model(package_of(weights, tmp_path / "fresh")))


def test_a_sparse_file_holds_one_stage(tmp_path: Path) -> None:
    model = tiny(tmp_path / "tiny.gguf", hidden=256, ffn=1024)
    package = package_of(model, tmp_path / "package")
    sparse = tmp_path / "sparse.gguf"
    assert main(["compose", str(package), str(sparse), "--layers", "1:2"]) == 0
    opened, source = open_model(sparse), open_model(model)
    assert opened.identity() == source.identity()
    assert [(t.name, t.type, t.shape) for t in opened.tensors] == [(t.name, t.type, t.shape) for t in source.tensors]
    whole, held = _tensor_bytes(source), _tensor_bytes(opened)
    for name, data in held.items():
        assert data == (whole[name] if name.startswith("blk.1.") else bytes(len(whole[name])))
    own = sum(len(data) for name, data in whole.items() if name.startswith("blk.1."))
    stored = sparse.stat().st_blocks * 512
    assert sparse.stat().st_size >= model.stat().st_size
    assert own <= stored < own + 256 * 1024 < model.stat().st_size / 2
    options = check_options({"ctx_size": 64}, "test")
    assert StageModel(opened, LayerRange(1, 2), options).source is opened
    with pytest.raises(OptionError, match=r"layers 1:3: .* holds the bytes of layers 1:2 only; compose a file for 1:3"):
        StageModel(opened, LayerRange(1, 3), options)
    with pytest.raises(ModelFileError, match=r"holds layers 1:2 only"):
        opened.full_hash()
    with pytest.raises(ModelFileError, match=r"holds layers 1:2 only; give the whole model"):
        GgufWeights(opened)


def test_the_mark_of_a_sparse_file_is_checked(package: Path, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.gguf"
    assert main(["compose", str(package), str(sparse), "--layers", "0:2"]) == 0
    for key, value in (
        ("skippy_zmq.stage.layers", "2:9"),
        ("skippy_zmq.stage.layers", "x"),
        ("skippy_zmq.stage.identity", "12"),
    ):
        wrong = rewrite(
            sparse, tmp_path / "wrong.gguf", lambda raw, k=key, v=value: raw.values.update({k: scalar(STRING, v)})
        )
        with pytest.raises(ModelFileError, match=key):
            open_model(wrong)


_KILLED = """
import os, signal, sys
from pathlib import Path
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.sources.package.building import build_package
from skippy_zmq.sources.package.weight_source import GgufWeights
done = 0
def progress(n):
    global done
    done += n
    if done > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
build_package(GgufWeights(open_model(Path(sys.argv[1]))), Path(sys.argv[2]), progress=progress)
"""


def _start_and_kill(model: Path, folder: Path, after_bytes: int) -> None:
    arguments = [sys.executable, "-c", _KILLED, str(model), str(folder), str(after_bytes)]
    assert subprocess.run(arguments, check=False, env=stage_environment()).returncode == -signal.SIGKILL
    assert not (folder / "model-package.json").exists()
    with pytest.raises(ModelFileError):
        open_model(folder)


def _inodes(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_ino for path in folder.rglob("*.gguf")}


def test_a_killed_build_goes_on(model: Path, package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    for after in (100, 100_000, 500_000):
        _start_and_kill(model, folder, after)
    complete = {path: inode for path, inode in _inodes(folder).items() if not Path(path).name.startswith(".")}
    assert len(complete) >= 3
    flip(folder / "layers/00000.gguf")  # a part that was damaged since is written anew
    package_of(model, folder)
    after_all = _inodes(folder)
    assert {path for path, inode in complete.items() if after_all[path] == inode} == set(complete) - {
        "layers/00000.gguf"
    }
    assert contents(folder) == contents(package)
    assert {p.relative_to(folder) for p in folder.rglob("*")} == {p.relative_to(package) for p in package.rglob("*")}
    for path in after_all:
        assert (folder / path).read_bytes() == (package / path).read_bytes()


def test_parts_of_another_model_are_not_kept(model: Path, package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    _start_and_kill(tiny(tmp_path / "other.gguf", seed=1), folder, 500_000)
    assert contents(package_of(model, folder)) == contents(package)


def test_two_builds_at_once_and_finished_packages(model: Path, package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    inner: list[str] = []

    def begin(_total: int) -> None:
        with pytest.raises(OptionError, match="another build is writing") as refusal:
            package_of(model, folder)
        inner.append(str(refusal.value))

    build_package(GgufWeights(open_model(model)), folder, begin=begin)
    assert len(inner) == 1
    with pytest.raises(OptionError, match="holds a finished package; check it with"):
        package_of(model, folder)
    with pytest.raises(ModelFileError, match="is a package already"):
        package_of(package, tmp_path / "again")


def test_a_full_disk_is_said_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(OptionError, match=r"the package needs \d+ bytes more, 1 are free"):
        package_of(model, tmp_path / "package")
    assert not list((tmp_path / "package").rglob("*.gguf"))


def test_composing_where_it_cannot_be(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compose", str(package), str(tmp_path / "absent" / "x.gguf")]) == 2
    assert capsys.readouterr().err.endswith("absent: cannot be written: No such file or directory\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1, 1, 1))
    assert main(["compose", str(package), str(tmp_path / "x.gguf")]) == 2
    assert re.search(r"x\.gguf: wanted \d+ bytes of space, 1 are free there\n$", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_files_that_no_build_wrote_are_not_replaced(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    mine = folder / "output.gguf"
    mine.write_bytes(model.read_bytes())
    with pytest.raises(OptionError, match=r"mine/output\.gguf: is there already, and no build wrote it"):
        package_of(mine, folder)
    assert list(folder.iterdir()) == [mine]
    assert mine.read_bytes() == model.read_bytes()
    with pytest.raises(OptionError, match="is a file, wanted a folder for the package"):
        package_of(model, mine)


def test_parts_that_the_model_does_not_have_are_removed(package: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    _start_and_kill(tiny(tmp_path / "longer.gguf", n_layers=6), folder, 1_250_000)
    assert (folder / "layers/00004.gguf").exists()
    package_of(model, folder)
    assert _inodes(folder).keys() == _inodes(package).keys()


def test_a_refused_source_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="wanted a projector"):
        build_package(GgufWeights(open_model(model)), tmp_path / "package", [model])
    assert not (tmp_path / "package").exists()


def test_verify_lists_all_problems(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(package)]) == 0
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    (folder / "layers/00001.gguf").unlink()
    (folder / "layers/00003.gguf").unlink()
    (folder / "layers/00003.gguf").symlink_to("/etc/passwd")
    flip(folder / "output.gguf")
    os.truncate(folder / "embeddings.gguf", 100)
    capsys.readouterr()
    assert main(["verify", str(folder), "--no-progress"]) == 1
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert len(lines) == 4
    for part, text in (
        ("layers/00001.gguf", "is missing"),
        ("layers/00003.gguf", "is a link to '/etc/passwd', outside of the package"),
        ("output.gguf", "wanted sha256"),
        ("embeddings.gguf", "has 100"),
    ):
        assert any(line.startswith(part) and text in line for line in lines)
    assert "4 problems" in output.err
    # also where the manifest is wrong itself, which hides nothing of the files
    edited(folder, lambda content: content.update(n_layers=6))
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "no part for layer 4, 5" in lines[0]


def test_verify_computes_the_identity(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    edited(folder, lambda content: content.update(identity="0" * 64))
    assert main(["verify", str(folder)]) == 1
    assert "identity: wanted" in capsys.readouterr().out


def test_inspect(package: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(package, folder)
    (folder / "output.gguf").unlink()
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny: llama, 4 layers, 39 tensors"
    rows = {line.split()[0]: line for line in lines[4:] if line}
    assert rows["layers/00002.gguf"].split()[1:4] == ["layer", "2", "9"]
    assert rows["output.gguf"].endswith("absent")
    assert main(["inspect", str(folder), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["n_layers"] == 4
    assert [part["present"] for part in values["parts"]] == [True] * 6 + [False]
    assert values["identity"] == open_model(package).identity()
    edited(folder, lambda content: content.update(name="\x1b[31mtiny\nx"))  # a terminal obeys none of it
    assert main(["inspect", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "?[31mtiny?x: llama, 4 layers, 39 tensors"


def test_the_program_in_a_process_of_its_own(model: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "skippy_zmq.package", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=stage_environment())

    done = run("build", model, tmp_path / "package")
    assert (done.returncode, done.stderr) == (0, "")
    assert "7 parts" in done.stdout
    assert run("verify", tmp_path / "package").returncode == 0
    again = run("build", model, tmp_path / "package")
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert again.stderr.count("\n") == 1
    existing = run("compose", tmp_path / "package", model)
    assert (existing.returncode, "is there already" in existing.stderr) == (2, True)
    assert run("inspect", tmp_path / "nope").stderr == f"error: {tmp_path / 'nope'}: no such file or folder\n"
    assert "is a file, wanted the folder of a package" in run("verify", model).stderr
    assert run("inspect", tmp_path).stderr.startswith(f"error: {tmp_path}: no model-package.json there")
    assert run("compose", tmp_path / "package", tmp_path / "x.gguf", "--layers", "3:9").returncode == 2
    assert not (tmp_path / "x.gguf").exists()
