"""Case G02: a model file with one poison is refused by name, at once, in bounded memory, and nothing else happens."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import hostile_gguf
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import parse_header
from skippy_zmq.sources.gguf_model import open_model

# far more than the interpreter needs, far less than a poison asks for
_ADDRESS_SPACE = 1 << 30
_CHILD = """
import resource, sys
from pathlib import Path
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import parse_header
from skippy_zmq.sources.gguf_model import open_model
for path in sorted(Path(sys.argv[2]).glob("*.gguf")):
    try:
        open_model(path)
    except ModelFileError:
        print("refused", path.stem)
    else:
        print("opened", path.stem)
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_gguf.base_model(tmp_path_factory.mktemp("sound"))


def test_sound_file_opens(sound: Path) -> None:
    assert open_model(sound).n_layers == 2


def test_every_poison_is_refused_in_one_line_that_names_it(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "poison.gguf"
    names = set()
    for poison in hostile_gguf.poisons(sound):
        path.write_bytes(poison.data)
        with pytest.raises(ModelFileError, match=poison.complaint) as refusal:
            open_model(path)
        message = str(refusal.value)
        assert message.startswith(str(path)), poison.name
        assert "\n" not in message
        assert len(message) < 500 + len(str(path))
        names.add(poison.name)
    assert len(names) > 70


def test_poisons_need_little_memory(sound: Path, tmp_path: Path) -> None:
    for number, poison in enumerate(hostile_gguf.poisons(sound)):
        (tmp_path / f"{number:03}.gguf").write_bytes(poison.data)
    # announced sizes that the file could hold, as far as its length says
    huge = tmp_path / "huge-string.gguf"
    huge.write_bytes(next(p.data for p in hostile_gguf.poisons(sound) if p.name == "string of 1099511627776"))
    with huge.open("r+b") as file:
        file.truncate(2**41)
    result = subprocess.run(
        [sys.executable, "-c", _CHILD, str(_ADDRESS_SPACE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(list(tmp_path.glob("*.gguf")))
    assert [line for line in lines if not line.startswith("refused")] == []


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=6))
@example(flips=[(8, 255)])
def test_flipped_bytes_are_refused_or_harmless(
    sound: Path, flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(sound.read_bytes())
    header_length = len(parse_header(sound).raw)
    for position, mask in flips:
        data[position % header_length] ^= mask
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(data)
    # anything but a refusal would end the test
    with contextlib.suppress(ModelFileError):
        assert len(open_model(path).identity()) == 64
