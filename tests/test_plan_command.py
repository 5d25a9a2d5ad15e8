"""The planner's command line, on local files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import GOLDEN
from model_files import tiny
from package_helpers import package_of, with_parts
from pipeline_helpers import FLOAT32, greedy_ids
from stage_processes import StageProcess

from skippy_zmq import Client
from skippy_zmq.plan.__main__ import main
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.references import locate
from skippy_zmq.stage.config import check_role, parse_config

pytest_plugins = ("stage_fixtures", "transport_fixtures")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "a model.gguf", n_layers=6)


def test_the_commands_are_ones_that_stages_understand(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ctx-size", "1024", "--lanes", "2", "--cache-type-k", "q8_0", "--no-mmap"]
    assert main([str(model), "--stages", "3", "--json", *options]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    configs = [parse_config(shlex.split(stage["command"])[3:]) for stage in stages]
    for config, stage in zip(configs, stages, strict=True):
        check_role(config, 6)
        assert (config.model, str(config.layers)) == (str(model), stage["layers"])
        assert (config.options.ctx_size, config.options.lanes, config.options.mmap) == (1024, 2, False)
    assert [config.next for config in configs] == [configs[1].bind, configs[2].bind, None]
    assert configs[2].first == configs[0].bind


@pytest.mark.parametrize("kind", ["gguf", "package", "checkpoint"])
def test_stages_start_from_the_printed_lines(
    kind: str,
    start_stage: Callable[..., StageProcess],
    socket_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And answer as transformers does, whatever the model comes from."""
    folder = GOLDEN / "llama"
    sources = {"gguf": folder / "reference-f32.gguf", "checkpoint": folder, "package": tmp_path / "a package"}
    if kind == "package":
        package_of(sources["gguf"], sources["package"])
    ends = [f"ipc://{socket_dir}/{index}" for index in range(2)]
    options = ["--endpoints", ",".join(ends), "-c", "256", "--lanes", "1", "--threads", "1"]
    options += [text for key, value in FLOAT32.items() for text in (f"--{key.replace('_', '-')}", value)]
    options += ["--quant", "f32"] if kind == "checkpoint" else []
    assert main([str(sources[kind]), "--stages", "2", *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python -m skippy_zmq.stage ")]
    stages = [start_stage(*shlex.split(line)[3:], "--no-progress") for line in lines]
    assert len(stages) == 2
    stages[0].ready()
    expected = json.loads((folder / "expected.json").read_text())
    with Client(ends[0]) as client:
        assert greedy_ids(client, expected["prompt_ids"], len(expected["greedy_ids"])) == expected["greedy_ids"]


def _stages(model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert main([str(model), "--stages", "2", "--ctx-size", "256", "--json", *options]) == 0
    stages: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["stages"]
    return stages


def test_a_package_is_planned_as_its_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = package_of(model, tmp_path / "package")
    outline = with_parts(whole, tmp_path / "outline", {"shared.gguf"})  # no weights
    wanted = [{k: v for k, v in stage.items() if k != "command"} for stage in _stages(model, capsys)]
    assert [{k: v for k, v in stage.items() if k != "command"} for stage in _stages(outline, capsys)] == wanted


@pytest.mark.parametrize("quant", ["preserve", "Q8_0"])
def test_a_checkpoint_is_planned_as_it_will_be_loaded(quant: str, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in _stages(GOLDEN / "llama", capsys, "--quant", quant, "--threads", "1"):
        config = parse_config(shlex.split(stage["command"])[3:])
        assert config.options.quant == quant
        source = open_with_options(locate(config.model), config.options)
        opened = StageModel(source, config.layers, config.options)
        assert stage["weights_bytes"] == opened.native_model.own_bytes


def test_the_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--stages", "2", "--memory", "1G", "--decode-share", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 layers, 4 lanes of 4096 tokens, 100 % of the time for generating" in lines[0]
    assert " ".join(lines[2].split()) == "stage layers weights KV caches buffers, about in all of busy"
    assert [line.split()[1] for line in lines[3:5]] == ["0:3", "3:6"]
    assert all("1.0 GiB" in line for line in lines[3:5])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "wanted --stages N or --memory A,B"),
        (["--stages", "0"], "--stages: wanted at least 1, got 0"),
        (["--stages", "7"], "7 stages: the model has 6 layers"),
        (["--stages", "2", "--memory", "1G,1G,1G"], "--memory: wanted one value or 2, one for each stage, got 3"),
        (["--memory", "1G,x"], "--memory 'x': wanted a size like 8G or 512M"),
        (["--memory", "100K,100K"], "the model does not fit: layers 0:6 of 6 are left over"),
        (["--stages", "2", "--speed", "1,-1"], "--speed '-1': wanted numbers above 0"),
        (["--stages", "2", "--hosts", "a"], "--hosts: wanted 2"),
        (["--stages", "2", "--endpoints", "a,"], "--endpoints: wanted 2"),
        (["--stages", "2", "--decode-share", "2"], "decode share: wanted 0 to 1, got 2"),
        (["--stages", "x"], "--stages: invalid int value"),
        (["--stages", "2", "--lanes", "0"], "options: lanes:"),
    ],
    ids=str,
)
def test_what_does_not_fit(model: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1
