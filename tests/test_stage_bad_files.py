"""The stage program and files that are no good: exit code 2 and one line, before anything listens; never a signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import STRING, UINT32, RawGguf, scalar
from hostile_gguf import base_model, poisons
from model_files import rewrite, shards, tiny
from stage_peers import Asker
from stage_processes import StagePipeline, StageProcess, error_line, run_many
from transport_helpers import Transport

from skippy_zmq.sources.gguf_model import open_model

pytest_plugins = ("transport_fixtures", "stage_fixtures")

# An early and a late stage, with weights mapped and copied: none may serve from a file that is not whole.
_STAGES = (("0:1", "--next", "ipc:///nowhere/1"), ("3:4", "--first", "ipc:///nowhere/0", "--no-mmap"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("sound") / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1)


def _command_line(path: Path, folder: Path, *stage: str) -> tuple[str, ...]:
    return ("--model", str(path), "--bind", f"ipc://{folder}/socket", "--layers", *(stage or _STAGES[0]))


def _refusals(paths: list[Path], folder: Path, *stages: tuple[str, ...]) -> list[str]:
    """What each stage says to each file, one after another; nothing may be left behind."""
    lines = [_command_line(path, folder, *stage) for path in paths for stage in stages or ((),)]
    messages = []
    for code, stderr in run_many(lines):
        assert code == 2, stderr
        messages.append(error_line(stderr))
    assert not (folder / "socket").exists()
    return messages


def test_files_cut_short_or_too_long(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    model = open_model(sound)
    early, late = model.tensors[2], model.tensors[-1]
    sizes = [0, 3, 8, 24, 900, model.tensors[0].offset, early.offset + 1, late.offset + 1, len(data) - 1]
    paths = []
    for size in sizes:
        paths.append(tmp_path / f"cut-{size}.gguf")
        paths[-1].write_bytes(data[:size])
    messages = iter(_refusals(paths, tmp_path, *_STAGES))
    for path, size in zip(paths, sizes, strict=True):
        for _ in _STAGES:
            message = next(messages)
            assert message.startswith(f"{path}: truncated")
            assert f"has {size}" in message
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(data + b"x")
    for message in _refusals([longer], tmp_path, *_STAGES):
        assert message.startswith(f"{longer}: ")
        assert str(len(data)) in message
        assert str(len(data) + 1) in message


def test_files_that_lie(tmp_path: Path) -> None:
    cases = list(poisons(base_model(tmp_path)))
    paths = []
    for number, case in enumerate(cases):
        paths.append(tmp_path / f"poison-{number}.gguf")
        paths[-1].write_bytes(case.data)
    for case, path, message in zip(cases, paths, _refusals(paths, tmp_path), strict=True):
        assert message.startswith(f"{path}: "), case.name


def test_files_that_contradict_themselves(sound: Path, tmp_path: Path) -> None:
    def value(key: str, data: bytes) -> Callable[[RawGguf], None]:
        return lambda raw: raw.values.update({key: data})

    def without_ffn_down(raw: RawGguf) -> None:
        del raw.tensors["blk.2.ffn_down.weight"]

    def other_names(raw: RawGguf) -> None:
        raw.tensors = {name.replace("blk.", "model.layers."): tensor for name, tensor in raw.tensors.items()}

    edits: list[tuple[Callable[[RawGguf], None], tuple[str, ...]]] = [
        (value("llama.block_count", scalar(UINT32, 3)), ("'blk.3.attn_norm.weight'", "block_count", "3")),
        (value("llama.block_count", scalar(UINT32, 5)), ("'blk.4.", "block_count", "5")),
        (without_ffn_down, ("'blk.2.ffn_down.weight'",)),
        (other_names, ("'model.layers.0.", "Hugging Face")),
        (value("general.architecture", scalar(STRING, "quokka")), ("'quokka'",)),
        (value("llama.attention.head_count", scalar(UINT32, 5)), ("'blk.0.attn_q.weight'",)),
    ]
    paths = [rewrite(sound, tmp_path / f"edited-{i}.gguf", edit) for i, (edit, _) in enumerate(edits)]
    # whatever part of the file a stage runs
    messages = iter(_refusals(paths, tmp_path, *_STAGES))
    for path, (_, words) in zip(paths, edits, strict=True):
        for _ in _STAGES:
            message = next(messages)
            assert message.startswith(f"{path}: ")
            assert "truncated" not in message
            for word in words:
                assert word in message


def test_one_tensor_in_two_shards(sound: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(sound.read_bytes())
    first = shards(model, 2)
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    name = "blk.1.attn_q.weight"
    where = next(t.path == second for t in open_model(first).tensors if t.name == name)
    other = (second, first)[where]

    def double(raw: RawGguf) -> None:
        names = list(raw.tensors)
        raw.tensors[name] = raw.tensors.pop(names[-1])

    rewrite(other, other.with_suffix(".new"), double).replace(other)
    [message] = _refusals([first], tmp_path)
    for word in (name, first.name, second.name):
        assert word in message


def test_what_is_no_model_file(sound: Path, tmp_path: Path) -> None:
    missing, folder, text = tmp_path / "missing.gguf", tmp_path / "folder.gguf", tmp_path / "text.gguf"
    folder.mkdir()
    text.write_text("not a model")
    for path, message in zip((missing, folder, text), _refusals([missing, folder, text], tmp_path), strict=True):
        assert str(path) in message


def test_a_bad_file_ends_the_program_itself(
    sound: Path, tmp_path: Path, start_stage: Callable[..., StageProcess]
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(sound.read_bytes()[:-1])
    stage = start_stage(*_command_line(path, tmp_path))
    assert stage.wait() == 2
    assert stage.silent
    assert error_line(stage.stderr()).startswith(f"{path}: truncated")


def test_an_architecture_that_is_not_certified(
    sound: Path, tmp_path: Path, make_pipeline: Callable[..., StagePipeline], transport: Transport
) -> None:
    def other_architecture(raw: RawGguf) -> None:
        raw.values = {key.replace("llama.", "xverse."): data for key, data in raw.values.items()}
        raw.values["general.architecture"] = scalar(STRING, "xverse")

    path = rewrite(sound, tmp_path / "other.gguf", other_architecture)
    [message] = _refusals([path], tmp_path)
    assert "'xverse' has not been proven exact" in message
    assert f"python -m skippy_zmq.certify {path}" in message
    assert "--uncertified" in message
    pipeline = make_pipeline(path, "0:2 2:4", "--uncertified").start_all()
    assert len(Asker(transport, pipeline.endpoint).tokens((5, 6, 7), max_tokens=4)) == 4
