"""Pipelines of real processes from a layer package: the answers of the GGUF file, from each stage's own parts."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from model_files import parrot, tiny
from package_helpers import edited, package_of, with_parts
from pipeline_helpers import Pipelines, greedy_ids, greedy_reference, run_client
from stage_processes import PATIENCE, StageProcess, error_line

from skippy_zmq import Client
from skippy_zmq.certify.__main__ import main as certify
from skippy_zmq.sources.demo_models import demo_model

pytest_plugins = ("pipeline_fixtures", "stage_fixtures", "transport_fixtures")

N_TOKENS = 64
QUESTION = [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
OPTIONS = {"ctx_size": 512, "lanes": 1, "batch_size": 64, "ubatch_size": 64}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return demo_model("smollm2")


@pytest.fixture(scope="module")
def package(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_of(smollm2, tmp_path_factory.mktemp("package") / "smollm2")


def _opened(pid: int, folder: Path) -> set[str]:
    """The files below ``folder`` that a process has mapped or holds open."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {Path("/" + line.partition("/")[2]) for line in maps if "/" in line}
    descriptors = f"/proc/{pid}/fd"
    paths |= {Path(os.readlink(f"{descriptors}/{name}")) for name in os.listdir(descriptors)}  # noqa: PTH115, PTH208
    return {path.relative_to(folder).as_posix() for path in paths if path.is_relative_to(folder)}


def _start_two(
    start_stage: Callable[..., StageProcess], models: tuple[Path, Path], ranges: tuple[str, str], directory: Path
) -> tuple[StageProcess, StageProcess]:
    ends = [f"ipc://{directory}/{index}" for index in (0, 1)]
    options = [text for key, value in OPTIONS.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    common = ("--threads", "1", "--no-progress", *options)
    first = start_stage("--model", models[0], "--layers", ranges[0], "--bind", ends[0], "--next", ends[1], *common)
    last = start_stage("--model", models[1], "--layers", ranges[1], "--bind", ends[1], "--first", ends[0], *common)
    return first, last


@pytest.mark.real_model
def test_two_stages_with_nothing_but_their_parts_answer_as_the_file_does(
    start_stage: Callable[..., StageProcess], smollm2: Path, package: Path, tmp_path: Path, socket_dir: Path
) -> None:
    layers = [f"layers/{layer:05d}.gguf" for layer in range(30)]
    own = (
        {"shared.gguf", "embeddings.gguf", *layers[:15]},
        {"shared.gguf", "embeddings.gguf", "output.gguf", *layers[15:]},  # its output matrix is the embedding table
    )
    folders = (with_parts(package, tmp_path / "0", own[0]), with_parts(package, tmp_path / "1", own[1]))
    stages = _start_two(start_stage, folders, ("0:15", "15:30"), socket_dir)
    stages[0].ready()
    with Client(f"ipc://{socket_dir}/0") as client:
        asked = client.generate(messages=QUESTION, max_tokens=1)
        prompts = [asked.prompt_token_ids, client.tokenize("Once upon a time, in a village")]
        answers = [greedy_ids(client, prompt, N_TOKENS) for prompt in prompts]
    assert answers == greedy_reference(smollm2, prompts, N_TOKENS, n_ctx=512, n_batch=64)
    assert len(answers[0]) == N_TOKENS
    for stage, folder, parts in zip(stages, folders, own, strict=True):
        assert _opened(stage.pid, folder) == parts
        assert _opened(stage.pid, package) == set()


@pytest.mark.real_model
def test_a_stage_of_a_whole_package_opens_its_parts_only(
    start_stage: Callable[..., StageProcess], package: Path, smollm2: Path, socket_dir: Path
) -> None:
    """One stage from the package, the other from the file: they hold the same model."""
    first, last = _start_two(start_stage, (package, smollm2), ("0:10", "10:30"), socket_dir)
    first.ready()
    assert _opened(first.pid, package) == {
        "shared.gguf",
        "embeddings.gguf",
        *(f"layers/{layer:05d}.gguf" for layer in range(10)),
    }
    assert _opened(last.pid, package) == set()
    with Client(f"ipc://{socket_dir}/0") as client:
        prompt = client.tokenize("The sky is blue because")
        assert [greedy_ids(client, prompt, N_TOKENS)] == greedy_reference(
            smollm2, [prompt], N_TOKENS, n_ctx=512, n_batch=64
        )


def test_local_pipelines_and_the_client_take_a_package(pipelines: Pipelines, tmp_path: Path) -> None:
    bird = parrot(tmp_path / "parrot.gguf", "steady as she goes")
    folder = package_of(bird.path, tmp_path / "package")
    client = pipelines(folder, split=[1, 3])
    assert tuple(greedy_ids(client, [10, 20, 30], 64)) == bird.token_ids
    for model in (folder, folder / "model-package.json"):
        done = run_client("--model", model, "--local-stages", 2, "--token-ids", "10,20", "--ctx-size", 128)
        assert (done.status, done.output) == (0, "steady as she goes\n"), done.errors


def _first_to_end(stages: Sequence[StageProcess]) -> StageProcess:
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for stage in stages:
            descriptor = os.pidfd_open(stage.pid)
            stack.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ, stage)
        ended = selector.select(PATIENCE)
        assert ended, "no stage has ended"
        stage = ended[0][0].data
        assert isinstance(stage, StageProcess)
        return stage


@pytest.mark.parametrize("other", ["model", "statement"])
def test_stages_of_different_packages_refuse_each_other(
    start_stage: Callable[..., StageProcess], tmp_path: Path, socket_dir: Path, other: str
) -> None:
    """Where the weights differ, and where one package only says that it is another model."""
    one = package_of(tiny(tmp_path / "one.gguf"), tmp_path / "one")
    two = package_of(tiny(tmp_path / "two.gguf", seed=other == "model"), tmp_path / "two")
    if other == "statement":
        edited(two, lambda content: content.update(identity="0" * 64))
    stages = _start_two(start_stage, (one, two), ("0:2", "2:4"), socket_dir)
    ended = _first_to_end(stages)
    assert ended.wait() == 1
    assert "model identity differs: " in error_line(ended.stderr())


def test_certify_takes_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models"
    package_of(tiny(tmp_path / "tiny.gguf", n_layers=2), folder / "tiny-package")
    assert certify([str(folder), "--quick", "--strict", "--jobs", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert "tiny-package" in capsys.readouterr().out
    assert '"exact"' in (tmp_path / "out.json").read_text()
