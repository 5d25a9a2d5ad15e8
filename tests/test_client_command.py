"""The client's command line: what it takes, what it refuses, what it prints."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import FIRST_BYTE_TOKEN, Parrot, parrot, tiny
from pipeline_helpers import PATIENCE, Pipelines, read_exactly, run_client, wait_until_idle

from skippy_zmq.client.__main__ import main
from skippy_zmq.client.arguments import parse_arguments
from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.wire.messages import SamplingParams

pytest_plugins = ("pipeline_fixtures",)

ASK = ("--connect", "7700", "--prompt", "x")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "alpha beta ", end="loop", context=100_000)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--connect --model"),
        (["--connect", "7700"], "wanted a prompt"),
        (["--connect", "7700", "--json"], "wanted a prompt"),
        (["--connect", "7700", "--model", "m.gguf", "--prompt", "x"], "not allowed with"),
        (["--connect", "7700", "--prompt", "x", "--chat", "y"], "not allowed with"),
        ([*ASK, "--system", "x"], "--system: only with --chat"),
        ([*ASK, "--max-tokens", "0"], "--max-tokens 0"),
        ([*ASK, "--max-tokens", "many"], "--max-tokens"),
        ([*ASK, "--max-tok", "5"], "unrecognized"),
        ([*ASK, "--timeout", "0"], "--timeout 0"),
        ([*ASK, "--timeout", "nan"], "--timeout nan"),
        ([*ASK, "--logit-bias", "5"], "TOKEN+BIAS"),
        ([*ASK, "--logit-bias", "5+1+1"], "TOKEN+BIAS"),
        ([*ASK, "--grammar", "x", "--grammar-file", "y"], "not allowed with"),
        ([*ASK, "--grammar-file", "/nowhere/g.gbnf"], "/nowhere/g.gbnf: No such file"),
        ([*ASK, "--curve-key", "k"], "--curve-key and --server-key"),
        (["--connect", "7700", "--load-session", "s"], "--load-session: wanted a prompt to go on with: --prompt"),
        (["--connect", "7700", "--load-session", "s", "--chat", "x"], "--load-session: not with --chat"),
        (["--connect", "7700", "--save-session", "s"], "--save-session: wanted a prompt"),
        (["--connect", "7700", "--save-session", "s", "--stats"], "--save-session: wanted a prompt"),
        ([*ASK, "--load-session", "/nowhere/s"], "session /nowhere/s: session.json: No such file"),
        (["--connect", "7700", "--prompt-file", "/nowhere/p.txt"], "/nowhere/p.txt: No such file"),
        (["--connect", "7700", "--token-ids", "1,x"], "--token-ids"),
        (["--connect", "7700", "--token-ids", ""], "--token-ids"),
        (["--connect", "http://x:1", "--prompt", "x"], "http"),
        (["--connect", "tcp://127.0.0.1:0", "--prompt", "x"], "tcp://127.0.0.1:0"),
        (["--connect", "ipc:///" + "x" * 200, "--prompt", "x"], "bytes"),
        (["--model", "/nowhere/m.gguf", "--prompt", "x"], "/nowhere/m.gguf"),
        (["--model", "m.gguf", "--local-stages", "2", "--split", "1,2", "--prompt", "x"], "not allowed with"),
        (["--model", "m.gguf", "--split", "1;2", "--prompt", "x"], "--split"),
        (["--model", "m.gguf", "--ctx-size", "-5", "--prompt", "x"], "ctx_size"),
        (["--model", "m.gguf", "--server-key", "k", "--prompt", "x"], "--server-key: only with --connect"),
        (["--model", "m.gguf", "--config", "/nowhere/c.toml", "--prompt", "x"], "/nowhere/c.toml"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def flag_of(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


OPTIONS: dict[str, object] = {
    "ctx_size": 1024,
    "lanes": 3,
    "batch_size": 1024,
    "ubatch_size": 64,
    "threads": 3,
    "threads_batch": 2,
    "cache_type_k": "q8_0",
    "cache_type_v": "f32",
    "flash_attn": "auto",
    "swa_full": False,
    "kv_offload": False,
    "op_offload": False,
    "n_gpu_layers": 4,
    "device": ("GPU0", "GPU1"),
    "main_gpu": 1,
    "split_mode": "none",
    "tensor_split": (3.0, 1.0),
    "mmap": False,
    "mlock": True,
    "direct_io": True,
    "repack": False,
    "check_tensors": True,
    "host_buffer": False,
    "quant": "Q4_K_M",
    "quant_strict": True,
    "imatrix": "im.dat",
    "weights_cache": "kept",
    "weights_cache_bytes": 1 << 30,
    "reproducible": True,
    "chunk_policy": "fixed",
    "chunk_sizes": (32,),
    "chunk_target_ms": 50,
    "groups": 2,
    "queue": 8,
    "queue_seconds": 30,
    "in_flight_mib": 64,
    "busy_poll_ms": 20,
    "warm_bytes": 1 << 20,
    "kv_cache_bytes": 1 << 20,
    "kv_page_tokens": 128,
    "kv_cache_dir": "pages",
    "recover_seconds": 5,
}
# What an option cannot be given without.
WITH: dict[str, dict[str, object]] = {"chunk_sizes": {"chunk_policy": "fixed"}}


def test_no_option_of_stages_is_left_out_here() -> None:
    assert set(OPTIONS) == set(StageOptions.model_fields)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_stages_are_passed_on_and_refused_where_there_are_none_to_start(name: str, tmp_path: Path) -> None:
    flags = flag_of(name, OPTIONS[name])
    others = WITH.get(name, {})
    beside = [word for other, value in others.items() for word in flag_of(other, value)]
    arguments = parse_arguments(["--model", "m.gguf", "--prompt", "x", *flags, *beside])
    assert getattr(arguments.options, name) == OPTIONS[name]
    config = tmp_path / "stage.json"
    config.write_text(json.dumps({name: OPTIONS[name], **others}))
    arguments = parse_arguments(["--model", "m.gguf", "--prompt", "x", "--config", str(config)])
    assert getattr(arguments.options, name) == OPTIONS[name]
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}: only with --model"):
        parse_arguments([*ASK, *flags])


@pytest.mark.parametrize(
    "flags", [["--local-stages", "2"], ["--split", "5"], ["--uncertified"], ["--config", "c.toml"]]
)
def test_what_is_about_local_stages_is_refused_with_connect(flags: list[str]) -> None:
    with pytest.raises(OptionError, match=f"{flags[0]}: only with --model"):
        parse_arguments([*ASK, *flags])


def test_a_config_key_that_no_local_stage_has_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "stage.toml"
    config.write_text('ctx-size = 512\nbind = "tcp://127.0.0.1:1"\n')
    with pytest.raises(OptionError, match="bind"):
        parse_arguments(["--model", "m.gguf", "--prompt", "x", "--config", str(config)])


SAMPLERS: dict[str, tuple[list[str], object]] = {
    "temperature": (["--temp", "0.7"], 0.7),
    "top_k": (["--top-k", "7"], 7),
    "top_p": (["--top-p", "0.5"], 0.5),
    "min_p": (["--min-p", "0.2"], 0.2),
    "typical_p": (["--typical", "0.9"], 0.9),
    "top_n_sigma": (["--top-nsigma", "2"], 2.0),
    "repeat_last_n": (["--repeat-last-n", "-1"], -1),
    "repeat_penalty": (["--repeat-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.25"], 0.25),
    "dry_multiplier": (["--dry-multiplier", "0.8"], 0.8),
    "dry_base": (["--dry-base", "2"], 2.0),
    "dry_allowed_length": (["--dry-allowed-length", "3"], 3),
    "dry_penalty_last_n": (["--dry-penalty-last-n", "128"], 128),
    "dry_sequence_breakers": (["--dry-sequence-breaker", "a", "--dry-sequence-breaker", "b"], ("a", "b")),
    "xtc_probability": (["--xtc-probability", "0.5"], 0.5),
    "xtc_threshold": (["--xtc-threshold", "0.2"], 0.2),
    "mirostat": (["--mirostat", "2"], 2),
    "mirostat_tau": (["--mirostat-ent", "4"], 4.0),
    "mirostat_eta": (["--mirostat-lr", "0.2"], 0.2),
    "logit_bias": (["--logit-bias", "5+1.5", "--logit-bias", "6-2"], ((5, 1.5), (6, -2.0))),
    "grammar": (["--grammar", 'root ::= "a"'], 'root ::= "a"'),
    "ignore_eos": (["--ignore-eos"], True),
    "seed": (["--seed", "42"], 42),
}


def test_no_sampler_parameter_is_left_out_here() -> None:
    assert set(SAMPLERS) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert parse_arguments(ASK).sampling == SamplingParams()


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_flag_sets_its_parameter_and_no_other(name: str) -> None:
    flags, value = SAMPLERS[name]
    sampling = parse_arguments([*ASK, *flags]).sampling
    assert sampling == dataclasses.replace(SamplingParams(), **{name: value})


def test_a_grammar_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "g.gbnf").write_text('root ::= "ü"')
    assert parse_arguments([*ASK, "--grammar-file", str(tmp_path / "g.gbnf")]).sampling.grammar == 'root ::= "ü"'


def test_dry_without_breakers() -> None:
    assert parse_arguments([*ASK, "--dry-sequence-breaker", "none"]).sampling.dry_sequence_breakers == ()


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:" in printed
    for flag in ("--connect", "--model", "--split", "--json", "--temp", "--ctx-size", "--stop", "--watch"):
        assert flag in printed


def test_local_stages_answer_in_json_with_the_options_given(tmp_path: Path) -> None:
    model = tiny(tmp_path / "tiny.gguf")
    options = ["--split", "1,3", "--ctx-size", "256", "--lanes", "2", "--threads", "1", "--cache-type-k", "f32"]
    ended = run_client("--model", model, *options, "--token-ids", "5,6,7", "--max-tokens", 4, "--ignore-eos", "--json")
    assert (ended.status, ended.errors) == (0, "")
    answer = ended.json()
    assert set(answer) == {
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "timings",
        "stages",
        "session",
        "reused_tokens",
    }
    assert (answer["prompt_token_ids"], len(answer["token_ids"])) == ([5, 6, 7], 4)
    assert answer["finish_reason"] == "length"
    assert set(answer["timings"]) == {"ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert all(value > 0 for value in answer["timings"].values())
    assert [stage["layers"] for stage in answer["stages"]] == ["0:1", "1:3", "3:4"]
    assert {(stage["n_ctx"], stage["lanes"], stage["threads"]) for stage in answer["stages"]} == {(256, 2, 1)}


@pytest.mark.parametrize("text", ["hi", "ü 漢字\n"])
def test_a_prompt_file_is_taken_as_it_is(pipelines: Pipelines, endless: Parrot, tmp_path: Path, text: str) -> None:
    client = pipelines(endless.path)
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    wanted = [FIRST_BYTE_TOKEN + byte for byte in text.encode()]
    asked = ("--connect", client.endpoint, "--max-tokens", 1, "--json", "--prompt-file")
    assert run_client(*asked, tmp_path / "prompt.txt").json()["prompt_token_ids"] == wanted
    assert run_client(*asked, "-", stdin=text.encode()).json()["prompt_token_ids"] == wanted


def test_a_prompt_that_is_no_text_is_refused(pipelines: Pipelines, endless: Parrot) -> None:
    ended = run_client("--connect", pipelines(endless.path).endpoint, "--prompt-file", "-", stdin=b"\xff\xfe")
    assert (ended.status, ended.output, ended.errors.count("\n")) == (2, "", 1)


def start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "skippy_zmq.client", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_text_comes_while_it_is_made_and_ctrl_c_keeps_it(pipelines: Pipelines, endless: Parrot) -> None:
    client = pipelines(endless.path, 2, ctx_size=65536, lanes=1)
    with start("--connect", client.endpoint, "--prompt", "x", "--max-tokens", 60_000) as program:
        assert program.stdout is not None
        begun = read_exactly(program.stdout, len("alpha beta "))
        assert program.poll() is None
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=PATIENCE)
    assert (program.returncode, errors) == (130, b"")
    text = (begun + rest).decode()
    assert text == ("alpha beta " * len(text))[: len(text) - 1] + "\n"
    wait_until_idle(client)


def test_ctrl_c_leaves_one_json_object(pipelines: Pipelines, endless: Parrot) -> None:
    client = pipelines(endless.path, 2, ctx_size=65536, lanes=1)
    before = client.stats()[0].counters["sessions"]
    with start("--connect", client.endpoint, "--prompt", "x", "--max-tokens", 60_000, "--json") as program:
        while client.stats()[0].counters["sessions"] == before:
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=PATIENCE)
    assert (program.returncode, errors) == (130, b"")
    answer = json.loads(output)
    assert answer["finish_reason"] == "cancelled"
    assert answer["text"] == ("alpha beta " * 60_000)[: len(answer["text"])]


def test_a_reader_that_goes_away_ends_the_program_quietly(pipelines: Pipelines, endless: Parrot) -> None:
    client = pipelines(endless.path, 2, ctx_size=65536, lanes=1)
    with start("--connect", client.endpoint, "--prompt", "x", "--max-tokens", 60_000) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        os.read(program.stdout.fileno(), 5)
        program.stdout.close()
        errors = program.stderr.read()
        assert program.wait(PATIENCE) == 141
    assert errors == b""
    wait_until_idle(client)
