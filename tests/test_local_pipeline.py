"""A pipeline on this machine: starts whole or not at all, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from gguf_bytes import STRING, RawGguf, scalar
from model_files import Parrot, parrot, rewrite, tiny
from pipeline_helpers import PATIENCE, SMALL, child_processes

import skippy_zmq
from skippy_zmq import LocalPipeline
from skippy_zmq.errors import DeadlineError, EndpointError, ModelFileError, OptionError, SkippyError
from skippy_zmq.runtime.options import StageOptions

pytest_plugins = ("pipeline_fixtures",)
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "polly", context=512)


def test_a_pipeline_answers_and_says_what_it_is(model: Parrot) -> None:
    with LocalPipeline(model.path, stages=3, **SMALL) as pipeline:
        assert [str(layers) for layers in pipeline.layers] == ["0:1", "1:3", "3:4"]  # the last one has the output head
        assert pipeline.generate("x").text == "polly"
        assert pipeline.generate("x", max_tokens=2).text == "po"
        with pipeline.client() as client:
            assert [stage.stage for stage in client.stages] == [stage.stage for stage in pipeline.stages]
            assert client.generate("x").text == "polly"
        assert len(child_processes() & set(pipeline.process_ids)) == 3
    assert pipeline.process_ids == ()


def test_options_reach_the_stages(model: Parrot) -> None:
    options = StageOptions(ctx_size=256, lanes=2, threads=1)
    with LocalPipeline(model.path, split=[1], options=options, lanes=3, flash_attn="off") as pipeline:
        for stage in pipeline.stages:
            assert (stage.n_ctx, stage.lanes, stage.threads, stage.flash_attn) == (256, 3, 1, "off")
        assert [(stage.layer_start, stage.layer_end) for stage in pipeline.stages] == [(0, 1), (1, 4)]


def test_several_pipelines_run_beside_each_other(model: Parrot) -> None:
    with LocalPipeline(model.path, stages=1, **SMALL) as one, LocalPipeline(model.path, stages=2, **SMALL) as two:
        assert one.endpoint != two.endpoint
        assert one.generate("x").text == two.generate("x").text == "polly"


def test_a_directory_of_the_caller_keeps_the_logs_and_no_sockets(model: Parrot, nothing_left: Path) -> None:
    directory = nothing_left / "mine"
    directory.mkdir()
    with LocalPipeline(model.path, stages=2, directory=directory, **SMALL) as pipeline:
        assert pipeline.endpoint == f"ipc://{directory}/s0"
        assert pipeline.generate("x").text == "polly"
    assert sorted(path.name for path in directory.iterdir()) == ["s0.log", "s1.log"]
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_a_long_path_for_temporary_files_does_not_matter(
    model: Parrot, nothing_left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = nothing_left / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with LocalPipeline(model.path, stages=1, **SMALL) as pipeline:
        assert pipeline.generate("x").text == "polly"
        private = Path(pipeline.endpoint.removeprefix("ipc://")).parent
        assert private.stat().st_mode & 0o077 == 0
    assert not private.exists()
    deep.rmdir()


def test_a_directory_with_too_long_a_path_is_refused(model: Parrot, nothing_left: Path) -> None:
    deep = nothing_left / ("x" * 120)
    deep.mkdir()
    with pytest.raises(EndpointError, match="107"):
        LocalPipeline(model.path, directory=deep, **SMALL).start()
    deep.rmdir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": 0}, "0 stages"),
        ({"stages": 5}, "5 stages: the model has 4 layers"),
        ({"split": [2, 2]}, "split 2,2"),
        ({"split": [4]}, "split 4"),
        ({"ctx_size": -1}, "ctx_size"),
        ({"colour": "red"}, "colour: no such option"),
        ({"flash_attn": "maybe"}, "flash_attn"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    model: Parrot, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        LocalPipeline(model.path, **arguments)  # type: ignore[arg-type]


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model")
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        LocalPipeline(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        LocalPipeline(tmp_path / "none.gguf")


def test_a_stage_that_cannot_start_stops_the_others_and_says_why(model: Parrot, nothing_left: Path) -> None:
    directory = nothing_left / "mine"
    directory.mkdir()
    # The socket path of the second stage is taken by a file, which must stay as it is. Both stages object to it.
    (directory / "s1").write_text("precious")
    with pytest.raises(SkippyError, match=r"stage of layers \d:\d ended with status 2: .*s1.*ordinary file") as caught:
        LocalPipeline(model.path, stages=2, directory=directory, **SMALL).start()
    assert caught.value.exit_code == 2
    assert (directory / "s1").read_text() == "precious"
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_an_architecture_outside_the_table_needs_a_word(tmp_path: Path) -> None:
    plain = tiny(tmp_path / "tiny.gguf")

    def rename(raw: RawGguf) -> None:
        for key in [key for key in raw.values if key.startswith("llama.")]:
            raw.values["arcee." + key.removeprefix("llama.")] = raw.values.pop(key)
        raw.values["general.architecture"] = scalar(STRING, "arcee")

    other = rewrite(plain, tmp_path / "other.gguf", rename)
    with pytest.raises(SkippyError, match="--uncertified") as caught:
        LocalPipeline(other, stages=1, **SMALL).start()
    assert "arcee" in str(caught.value)
    assert "skippy_zmq.certify" in str(caught.value)


def test_a_pipeline_that_is_not_ready_in_time_is_stopped(model: Parrot) -> None:
    with pytest.raises(DeadlineError, match="not ready within"):
        LocalPipeline(model.path, stages=2, startup_timeout=0.01, **SMALL).start()


def test_starting_twice_is_refused_and_closing_twice_is_not(model: Parrot) -> None:
    pipeline = LocalPipeline(model.path, stages=1, **SMALL)
    with pytest.raises(OptionError, match="not started"):
        _ = pipeline.endpoint
    with pipeline, pytest.raises(OptionError, match="started already"):
        pipeline.start()
    pipeline.close()
    pipeline.close()


def test_a_pipeline_starts_again_after_it_was_closed(model: Parrot) -> None:
    pipeline = LocalPipeline(model.path, stages=1, **SMALL)
    for _ in range(2):
        with pipeline:
            assert pipeline.generate("x").text == "polly"


def test_an_error_of_the_caller_stops_the_stages(model: Parrot) -> None:
    pipeline = LocalPipeline(model.path, stages=2, **SMALL)
    with pytest.raises(ZeroDivisionError), pipeline:
        len(pipeline.process_ids) / 0
    assert pipeline.process_ids == ()


def test_a_stage_that_does_not_leave_is_killed(model: Parrot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy_zmq.supervision.STOP_SECONDS", 0.2)
    with LocalPipeline(model.path, stages=2, **SMALL) as pipeline:
        os.kill(pipeline.process_ids[1], signal.SIGSTOP)


PARENT = """
import json, sys
from skippy_zmq import LocalPipeline
with LocalPipeline(sys.argv[1], stages=2, directory=sys.argv[2], ctx_size=256) as pipeline:
    print(json.dumps(pipeline.process_ids), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_stages_end_with_the_process_that_started_them(model: Parrot, tmp_path: Path, how: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(prefix="sk") as directory:
        command = [sys.executable, "-c", PARENT, str(model.path), directory]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            handles = [os.pidfd_open(pid) for pid in json.loads(parent.stdout.readline())]
            parent.send_signal(how)
            parent.wait(PATIENCE)
        for handle in handles:
            assert select.select([handle], [], [], PATIENCE)[0] == [handle]
            os.close(handle)


def test_a_program_that_is_asked_to_end_takes_its_stages_along(nothing_left: Path, tmp_path: Path) -> None:
    endless = parrot(tmp_path / "endless.gguf", "polly ", end="loop", context=100_000)
    command = [sys.executable, "-m", "skippy_zmq.client", "--model", str(endless.path), "--ctx-size", "65536"]
    command += ["--lanes", "1", "--prompt", "x", "--max-tokens", "60000"]
    environment = {**os.environ, "TMPDIR": str(nothing_left)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.read(6) == b"polly "
        program.terminate()
        _, errors = program.communicate(timeout=PATIENCE)
    assert (program.returncode, errors) == (143, b"")


def test_the_package_has_few_public_names() -> None:
    assert skippy_zmq.__all__ == sorted(skippy_zmq.__all__)
    for name in skippy_zmq.__all__:
        assert getattr(skippy_zmq, name) is not None
        assert name in dir(skippy_zmq)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = skippy_zmq.Nothing


def test_importing_the_package_loads_neither_zmq_nor_llama_cpp() -> None:
    probe = "import sys, skippy_zmq; print([m for m in ('zmq', 'llama_cpp', 'skippy_zmq._native') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
