"""The build finds llama.cpp and refuses another version before anything is compiled."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import skippy_zmq

ROOT = Path(__file__).parent.parent


def configure(tmp_path: Path, *definitions: str) -> subprocess.CompletedProcess[str]:
    cmake = Path(sys.executable).parent / "cmake"
    return subprocess.run(
        [
            str(cmake) if cmake.exists() else "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(tmp_path / "build"),
            f"-DPython_EXECUTABLE={sys.executable}",
            *definitions,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An install prefix whose libllama says that it is another version."""
    include, libraries = tmp_path / "llama" / "include", tmp_path / "llama" / "lib"
    include.mkdir(parents=True)
    libraries.mkdir()
    (include / "llama.h").touch()
    source = tmp_path / "llama.c"
    source.write_text('const char *llama_version(void) { return "9.9.9"; }\n')
    for name in ("llama", "ggml", "ggml-base", "ggml-cpu"):
        compiler = shutil.which("cc") or "cc"
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(libraries / f"lib{name}.so")], check=True)
    return tmp_path / "llama"


def test_another_version_stops_the_build(tmp_path: Path, prefix: Path) -> None:
    result = configure(tmp_path, f"-DSKIPPY_LLAMA_CPP_DIR={prefix}")
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "'9.9.9' was found" in message
    assert "wanted '0.5.0-dev'" in message


def test_a_prefix_without_llama_cpp_stops_the_build(tmp_path: Path) -> None:
    result = configure(tmp_path, f"-DSKIPPY_LLAMA_CPP_DIR={tmp_path}")
    assert result.returncode != 0
    assert "llama.h was not found" in result.stderr


def test_the_pin_is_the_same_everywhere() -> None:
    pin = (ROOT / "third_party/llama.cpp/pin.cmake").read_text()
    version = pin.split('SKIPPY_PIN_PACKAGE "')[1].split('"')[0]
    for name in ("pyproject.toml", "Makefile"):
        assert f"llama-cpp-python=={version}" in (ROOT / name).read_text()


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert skippy_zmq.__version__ == version


def test_a_prefix_of_the_pinned_version_is_taken(tmp_path: Path) -> None:
    import llama_cpp

    package = Path(llama_cpp.__file__).parent
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    (prefix / "include").symlink_to(package.parent / "include")
    (prefix / "lib").symlink_to(package / "lib")
    result = configure(tmp_path, f"-DSKIPPY_LLAMA_CPP_DIR={prefix}")
    assert result.returncode == 0, result.stderr
    assert f"from the prefix {prefix}" in result.stdout
