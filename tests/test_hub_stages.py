"""Stages and plans of models on a hub, through the programs that people start."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import GOLDEN
from hub_server import HubServer
from hub_user import ROOT, HubUser
from model_files import parrot, sparse, tiny
from package_helpers import package_of
from stage_processes import SMALL, StageProcess, error_line

from skippy_zmq import Client
from skippy_zmq.plan.planner import Machine, plan_stages
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.sources.models import open_located, open_model
from skippy_zmq.sources.references import locate, outline

pytest_plugins = ("hub_fixtures", "transport_fixtures")


def run(user: HubUser, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=user.environment(**environment),
        cwd=ROOT,
    )


def test_a_pipeline_of_a_model_on_the_hub(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    model = parrot(tmp_path / "parrot.gguf", "polly", context=512).path
    repository = server.repository("o/parrot", {"parrot.gguf": model.read_bytes(), "README.md": b"A bird."})
    command = ["skippy_zmq.client", "--model", "hf://o/parrot", "--local-stages", "2", "--prompt", "x"]
    command += ["--ctx-size", "256", "--lanes", "1", "--threads", "1"]
    online = run(user, *command)
    assert (online.returncode, online.stdout) == (0, "polly\n"), online.stderr
    assert len(server.transfers("parrot.gguf")) == 1
    assert len([r for r in server.requests if "/api/models/" in r.path]) == 1  # the stages are given the commit
    repository.commit({"other.gguf": b"x"})
    asked = len(server.requests)
    offline = run(user, *command, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, "polly\n"), offline.stderr
    assert "hf://o/parrot@main: HF_HUB_OFFLINE is set; using the cached commit" in offline.stderr
    assert len(server.requests) == asked


def test_a_branch_that_moves_between_two_stages(
    server: HubServer, user: HubUser, socket_dir: Path, tmp_path: Path
) -> None:
    """Case P04: other weights of the same shapes."""
    old, new = (tiny(tmp_path / f"{seed}.gguf", seed=seed).read_bytes() for seed in (1, 2))
    repository = server.repository("o/n", {"model.gguf": old})
    zero, one, away = (f"ipc://{socket_dir}/{index}" for index in range(3))  # or either might be refused first
    common = ("--model", "hf://o/n@main", *SMALL)
    environment = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(user.directory)}
    with contextlib.ExitStack() as stages:
        first = stages.enter_context(
            StageProcess(*common, "--layers", "0:2", "--bind", zero, "--next", one, **environment)
        )
        first.logged("loaded, listening")
        before = repository.branches["main"]
        after = repository.commit({"model.gguf": new, "README.md": b"better"})
        stages.enter_context(StageProcess(*common, "--layers", "2:4", "--bind", one, "--first", away, **environment))
        assert first.wait() == 1
        refusal = error_line(first.stderr())
        assert f"o/n at commit {before}" in refusal
        assert f"at {after}" in refusal


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("hf://o", 2, "error: 'hf://o': wanted hf://owner/name"),
        ("hf://o/none", 2, "has no such repository"),
        ("hf://o/bad", 2, "bad.gguf: "),
        ("hf://o/bad/x.gguf", 2, "no file 'x.gguf'; name one of bad.gguf"),
    ],
)
def test_a_stage_says_what_is_wrong(server: HubServer, user: HubUser, model: str, status: int, words: str) -> None:
    server.repository("o/bad", {"bad.gguf": b"this is no model" * 400})
    ended = run(user, "skippy_zmq.stage", "--model", model, "--layers", "0:1")
    assert ended.returncode == status
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_plan_without_weights(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.gguf", 8, layer_bytes=1 << 20)
    server.repository("o/n", {"model.gguf": path.read_bytes()})
    machines, options = [Machine(), Machine(speed=2.0)], StageOptions(ctx_size=512)
    with outline("hf://o/n", open_hub=user.hub) as located:
        assert plan_stages(open_model(located.path), machines, options) == plan_stages(
            open_model(path), machines, options
        )
        assert located.path.stat().st_size == path.stat().st_size
    assert not located.path.exists()
    assert {request.range for request in server.transfers("model.gguf")} == {f"bytes=0-{(4 << 20) - 1}"}
    assert not list(user.directory.rglob("model.gguf"))


def test_a_stage_of_a_package_on_the_hub_runs_with_its_parts(
    server: HubServer, user: HubUser, socket_dir: Path, tmp_path: Path
) -> None:
    bird = parrot(tmp_path / "parrot.gguf", "polly", context=512)
    package = package_of(bird.path, tmp_path / "package")
    files = {path.relative_to(package).as_posix(): path.read_bytes() for path in package.rglob("*") if path.is_file()}
    server.repository("o/p", files)
    ends = [f"ipc://{socket_dir}/{index}" for index in range(2)]
    environment = {"HF_ENDPOINT": server.endpoint}
    with contextlib.ExitStack() as stages:
        for layers, own, (key, other) in (("0:2", 0, ("--next", 1)), ("2:4", 1, ("--first", 0))):
            arguments = ("--model", "hf://o/p", *SMALL, "--layers", layers, "--bind", ends[own], key, ends[other])
            home = {"HF_HOME": str(tmp_path / f"home{own}")}  # of a machine of its own
            stages.enter_context(StageProcess(*arguments, **environment, **home))
        with Client(ends[0]) as client:
            assert client.generate(token_ids=[10, 20], max_tokens=64).token_ids == bird.token_ids
    held = [
        {path.name for path in (tmp_path / f"home{index}").rglob("snapshots/*/layers/*.gguf")} for index in range(2)
    ]
    assert held == [{"00000.gguf", "00001.gguf"}, {"00002.gguf", "00003.gguf"}]


def test_the_program_for_packages_takes_one_on_the_hub(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    model = tiny(tmp_path / "tiny.gguf")
    package = package_of(model, tmp_path / "package")
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
    server.repository("o/p", {f"q4/{name}": path.read_bytes() for name, path in files.items()})
    server.repository("o/plain", {"m.gguf": model.read_bytes()})
    shown = run(user, "skippy_zmq.package", "inspect", "hf://o/p/q4")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.endswith("absent")] == [
        "embeddings.gguf",
        *(f"layers/{layer:05d}.gguf" for layer in range(4)),
        "output.gguf",
    ]
    composed = run(user, "skippy_zmq.package", "compose", "hf://o/p/q4", str(tmp_path / "1.gguf"), "--layers", "1:2")
    assert composed.returncode == 0, composed.stderr
    assert not server.transfers("q4/layers/00000.gguf")
    assert open_model(tmp_path / "1.gguf").identity() == open_model(model).identity()
    verified = run(user, "skippy_zmq.package", "verify", "hf://o/p/q4")
    assert (verified.returncode, verified.stderr) == (0, "")
    refused = run(user, "skippy_zmq.package", "verify", "hf://o/plain")
    assert (refused.returncode, refused.stderr) == (2, "error: hf://o/plain: holds no layer package\n")
    assert all(request.range for request in server.transfers("m.gguf"))


def test_a_header_longer_than_expected_is_read_on(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    template = "x" * (5 << 20)
    path = tiny(tmp_path / "model.gguf", chat_template=template)
    server.repository("o/n", {"model.gguf": path.read_bytes()})
    with outline("hf://o/n", open_hub=user.hub) as located:
        assert open_model(located.path).chat_template == template
    assert len(server.transfers("model.gguf")) == 2


def test_a_plan_of_what_is_in_the_cache_asks_for_nothing_more(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf")
    server.repository("o/n", {"model.gguf": path.read_bytes()})
    fetched = user.locate("hf://o/n")
    with outline(fetched.reference, open_hub=lambda: user.hub(offline=True)) as located:
        assert located == fetched
    assert len(server.transfers("model.gguf")) == 1


def test_the_outline_of_a_checkpoint(server: HubServer, user: HubUser) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [0, 4 << 20]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"\1" * (4 << 20)
    config = b'{"num_hidden_layers": 1}'
    server.repository("o/n", {"config.json": config, "model.safetensors": weights, "tokenizer.json": b"{}"})
    with outline("hf://o/n", open_hub=user.hub) as located:
        assert located.kind == "checkpoint"
        assert (located.path / "config.json").read_bytes() == config
        assert (located.path / "tokenizer.json").read_bytes() == b"{}"
        stand_in = (located.path / "model.safetensors").read_bytes()
    assert len(stand_in) == len(weights)
    assert stand_in[: 8 + len(header)] == weights[: 8 + len(header)]
    assert [request.range for request in server.transfers("model.safetensors")] == [
        "bytes=0-7",
        f"bytes=0-{7 + len(header)}",
    ]


def test_a_checkpoint_and_its_importance_matrix(server: HubServer, user: HubUser) -> None:
    """What is planned without weights is what a stage then opens."""
    files = {path.name: path.read_bytes() for path in (GOLDEN / "llama").iterdir() if path.suffix != ".gguf"}
    server.repository("o/n", {**files, "extra/im.dat": b"no matrix"})
    options = StageOptions(quant="Q8_0", imatrix="extra/im.dat")
    with outline("hf://o/n", open_hub=user.hub, beside=options.imatrix) as located:
        assert (located.path / "extra" / "im.dat").read_bytes() == b"no matrix"
        plain = plan_stages(open_located(located), [Machine()] * 2, options)
    assert not server.transfers("logits.npy")
    fetched = locate("hf://o/n", open_hub=user.hub, beside=options.imatrix)
    assert (fetched.path / "extra" / "im.dat").read_bytes() == b"no matrix"
    assert plan_stages(open_located(fetched), [Machine()] * 2, options) == plain
    assert open_located(fetched).identity() == open_model(GOLDEN / "llama").identity()


def test_the_program_prints_a_plan_and_its_commands(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf", n_layers=6)
    server.repository("o/n", {"model.gguf": path.read_bytes()})
    commit = server.repositories["o/n"].branches["main"]
    arguments = ["skippy_zmq.plan", "hf://o/n", "--memory", "1G,2G", "--hosts", "localhost,node1", "-c", "512"]
    plain = run(user, *arguments)
    assert plain.returncode == 0, plain.stderr
    reference = f"hf://o/n@{commit}/model.gguf"
    commands = [line for line in plain.stdout.splitlines() if line.startswith("python -m skippy_zmq.stage")]
    assert commands == [
        f"python -m skippy_zmq.stage --model {reference} --layers 0:3 --bind tcp://localhost:7700 "
        "--next tcp://node1:7700 --ctx-size 512",
        f"python -m skippy_zmq.stage --model {reference} --layers 3:6 --bind 'tcp://*:7700' "
        "--advertise tcp://node1:7700 --first tcp://localhost:7700 --ctx-size 512",
    ]
    assert "--curve-key" in plain.stdout
    as_json = run(user, *arguments, "--json")
    values = json.loads(as_json.stdout)
    assert (values["split"], values["revision"]) == ([3], f"o/n@{commit}")
    assert [stage["command"] for stage in values["stages"]] == commands
    assert values["stages"][1]["memory_bytes"] == 2 << 30
