"""Options of the stage program: a config file under the command line, and mistakes said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import tiny
from stage_processes import StageProcess, error_line, run_many

from skippy_zmq.errors import OptionError
from skippy_zmq.stage.config import parse_config

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_REQUIRED = ("--model", "m.gguf", "--layers", "0:2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_stage_runs_from_its_config_file(
    suffix: str, model: Path, socket_dir: Path, tmp_path: Path, start_stage: Callable[..., StageProcess]
) -> None:
    values = {
        "model": str(model),
        "layers": "0:4",
        "bind": f"ipc://{socket_dir}/s",
        "name": "from-the-file",
        "ctx_size": 512,
        "lanes": 3,
        "threads": 1,
        "ubatch-size": 32,
        "cache_type_k": "f32",
        "exit_with_stdin": True,
        "log_level": "warning",
        "drain_seconds": 1,
    }
    path = tmp_path / f"stage{suffix}"
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    path.write_text(json.dumps(values) if suffix == ".json" else toml)
    stage = start_stage("--config", path, "--lanes", 2, "--no-swa-full")
    [facts] = stage.ready()["stages"]
    assert facts["stage"].startswith("from-the-file-")
    assert {key: facts[key] for key in ("n_ctx", "lanes", "threads", "n_ubatch", "cache_type_k", "swa_full")} == {
        "n_ctx": 512,
        "lanes": 2,
        "threads": 1,
        "n_ubatch": 32,
        "cache_type_k": "f32",
        "swa_full": False,
    }
    assert stage.stop() == 0
    assert stage.stderr() == ""  # nothing to warn of


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(
        'model = "file.gguf"\nlayers = "2:4"\nbind = "ipc:///file"\nfirst = "ipc:///file-first"\nuncertified = true\n'
        'ctx-size = 1024\nlanes = 7\nflash_attn = "off"\ndrain_seconds = 3\nprogress = false\nmmap = false\n'
    )
    config = parse_config(
        ["--config", str(path), "--model", "m.gguf", "--bind", "ipc:///line", "--lanes", "2", "--mmap", "--progress"]
    )
    assert (str(config.model), config.bind, config.first) == ("m.gguf", "ipc:///line", "ipc:///file-first")
    assert (config.uncertified, config.drain_seconds, config.progress) == (True, 3.0, True)
    options = config.options
    assert (options.lanes, options.ctx_size, options.flash_attn, options.mmap) == (2, 1024, "off", True)
    assert config.name == "stage-2-4"


def test_defaults() -> None:
    config = parse_config([*_REQUIRED])
    assert (config.next, config.first, config.advertise, config.curve_key) == (None, None, None, None)
    assert (config.uncertified, config.exit_with_stdin, config.allow_plaintext) == (False, False, False)
    assert (config.drain_seconds, config.progress, config.log_level) == (10.0, True, "info")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("frobnicate = 1", "no such option: frobnicate"),
        ("lanez = 1\nn_ctx = 2", "no such option: lanez, n_ctx"),
        ("lanes = 0", "lanes: .* greater than or equal to 1 .*got 0"),
        ('lanes = "two"', "lanes: .*got 'two'"),
        ("lanes = 2.5", "lanes: "),
        ("lanes = true", "lanes: "),
        ('cache_type_k = "f8"', "cache_type_k: "),
        ('cache_type_v = "q8_0"\nflash_attn = "off"', "a q8_0 V cache needs flash_attn"),
        ("ubatch_size = 512\nbatch_size = 64", "ubatch_size 512 is larger than batch_size 64"),
        ("model = 3", "model: wanted a text, got 3"),
        ("uncertified = 1", "uncertified: wanted true or false, got 1"),
        ("exit_with_stdin = 'yes'", "exit_with_stdin: wanted true or false, got 'yes'"),
        ("progress = 1", "progress: wanted true or false, got 1"),
        ("drain_seconds = -1", "drain_seconds: wanted 0 to 3600, got -1"),
        ("drain_seconds = nan", "drain_seconds: wanted 0 to 3600, got nan"),
        ("drain_seconds = true", "drain_seconds: wanted 0 to 3600, got True"),
        ('drain_seconds = "1"', "drain_seconds: wanted 0 to 3600, got '1'"),
        ("log_level = 'loud'", "log_level: wanted one of debug, info, warning, error, got 'loud'"),
        ("log_level = 3", "log_level: wanted one of"),
        ("lanes = ", "config file .*stage.toml"),
    ],
)
def test_mistakes_in_a_config_file(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=complaint) as refusal:
        parse_config([*_REQUIRED, "--config", str(path)] if not text.startswith("model") else ["--config", str(path)])
    assert "\n" not in str(refusal.value)


def test_mistakes_on_the_command_line(tmp_path: Path, model: Path) -> None:
    listing = tmp_path / "list.json"
    listing.write_text("[1]")
    whole = ("--model", str(model), "--layers", "0:4", "--bind", f"ipc://{tmp_path}/s")
    table: dict[tuple[str, ...], str] = {
        (): "--model and --layers are needed",
        ("--model", str(model)): "--model and --layers are needed",
        ("--layers", "0:4"): "--model and --layers are needed",
        (*_REQUIRED, "--config", str(tmp_path / "none.toml")): "config file",
        (*_REQUIRED, "--config", str(listing)): "wanted a table of options, got a list",
        (*_REQUIRED, "--lanes", "0"): "lanes: ",
        (*_REQUIRED, "--lanes", "two"): "argument -np/--parallel/--lanes: invalid int value: 'two'",
        (*_REQUIRED, "--drain-seconds", "4000"): "drain_seconds: wanted 0 to 3600, got 4000",
        (*_REQUIRED, "--drain-seconds", "soon"): "argument --drain-seconds: invalid float value: 'soon'",
        (*_REQUIRED, "--frobnicate"): "unrecognized arguments: --frobnicate",
        (*_REQUIRED, "--cache-type-k", "f8"): "argument -ctk/--cache-type-k: invalid choice: 'f8'",
        (*whole, "--name", "x" * 101): "--name: wanted at most 100 characters, got 101",
        (*whole, "--name", "two\nlines"): "printable ASCII characters, no spaces",
        (*whole, "--advertise", "x" * 600): "endpoint",
        (*whole, "--advertise", f"ipc:///{'x' * 600}"): "--advertise: wanted at most 512 bytes",
        (*whole, "--advertise", "nonsense://x"): "endpoint 'nonsense://x': transport 'nonsense' is not supported",
        (*whole, "--curve-allow", "keys"): "need --curve-key",
        (*whole, "--device", "Frobnicator0"): "Frobnicator0",
    }
    for arguments, wanted, (code, stderr) in zip(table, table.values(), run_many(list(table)), strict=True):
        assert code == 2, arguments
        assert wanted in error_line(stderr)


def test_help_names_every_option() -> None:
    [(code, _)] = run_many([["--help"]])
    assert code == 0
