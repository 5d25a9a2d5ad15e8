"""Names and links in a package that lead out of it, or to no file: refused with words (case P01)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import tiny
from package_helpers import Content, check_stage, copied, edited, package_of, part_of, refusal_of, sha256

MANIFEST = "model-package.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return package_of(tiny(folder / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1), folder / "package")


def _rename(content: Content, path: str, other: str) -> None:
    part_of(content, path)["path"] = other
    for tensor in content["tensors"]:
        if tensor["part"] == path:
            tensor["part"] = other


_BAD_PATHS = [
    "../x.gguf",
    "/abs/x",
    "a/../../x",
    "layers/../output.gguf",
    "..",
    "",
    ".",
    "./",
    "output.gguf/",
    "a//b",
    "a\\b",
    "output.gguf\0",
    "a\nb",
    "\ud800",
    "x" * 5000,
]


@pytest.mark.parametrize("path", _BAD_PATHS, ids=lambda path: ascii(path[:20]))
@pytest.mark.parametrize("part", ["output.gguf", "layers/00002.gguf", "shared.gguf"])
def test_names_that_leave_the_package(sound: Path, tmp_path: Path, path: str, part: str) -> None:
    folder = copied(sound, tmp_path / "package")
    (tmp_path / "x.gguf").write_bytes((sound / "output.gguf").read_bytes())
    message = refusal_of(edited(folder, lambda content: _rename(content, part, path)))
    assert ascii(path[:20]).strip("'") in message
    assert len(message) < 2000


@pytest.mark.parametrize("path", ["./output.gguf", "sub/ok.gguf", "././sub/./ok.gguf"])
def test_names_inside_the_package(sound: Path, tmp_path: Path, path: str) -> None:
    folder = copied(sound, tmp_path / "package")
    (folder / "sub").mkdir()
    target = folder / path
    if target != folder / "output.gguf":
        (folder / "output.gguf").rename(target)
    check_stage(edited(folder, lambda content: _rename(content, "output.gguf", path)))


def _link_out(part: Path) -> None:
    part.rename(part.parents[1] / "outside.gguf")
    part.symlink_to("../outside.gguf")


def _link_folder_out(part: Path) -> None:
    (part.parents[1] / "elsewhere").mkdir()
    part.rename(part.parents[1] / "elsewhere" / part.name)
    part.symlink_to(part.parents[1] / "elsewhere" / part.name)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(part: Path) -> None:
        part.unlink()
        make(part)

    return replace


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_link_out, "outside of the package"),
        (_link_folder_out, "outside of the package"),
        (_replace(lambda part: part.symlink_to("/dev/zero")), "outside of the package"),
        (_replace(lambda part: part.symlink_to(part.name)), "cannot be reached"),
        (_replace(lambda part: part.symlink_to("nowhere")), "is missing"),
        (_replace(os.mkfifo), "is a pipe, wanted a regular file"),
        (_replace(Path.mkdir), "is a folder, wanted a regular file"),
        (Path.unlink, "is missing"),
    ],
    ids=["link", "absolute link", "device", "loop", "dangling", "pipe", "folder", "absent"],
)
@pytest.mark.parametrize("name", ["output.gguf", "shared.gguf", MANIFEST])
def test_what_is_no_file_of_the_package(
    sound: Path, tmp_path: Path, change: Callable[[Path], object], words: str, name: str
) -> None:
    folder = copied(sound, tmp_path / "package")
    change(folder / name)
    message = refusal_of(folder)
    assert name in message
    if not (name == MANIFEST and change is Path.unlink):
        assert words in message


def test_links_inside_the_package_and_those_of_a_hub_cache(sound: Path, tmp_path: Path) -> None:
    inside = copied(sound, tmp_path / "inside")
    (inside / "output.gguf").rename(inside / "blob")
    (inside / "output.gguf").symlink_to("blob")
    check_stage(inside)
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    for path in [path for path in sound.rglob("*") if path.is_file()]:
        blob = repository / "blobs" / sha256(path)
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(sound)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    check_stage(snapshot)
    (tmp_path / "stranger").write_bytes((sound / "output.gguf").read_bytes())
    (snapshot / "output.gguf").unlink()
    (snapshot / "output.gguf").symlink_to(tmp_path / "stranger")
    assert "outside of the package" in refusal_of(snapshot)
