"""``python -m skippy_zmq.certify``: what it reports of exact, inexact, refused and crashed models, and its tables."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import shards, sparse, tiny
from pipeline_helpers import children_of

from skippy_zmq.certify.__main__ import exit_code
from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.job import reference_job, trial_job
from skippy_zmq.certify.plan import model_files, parse_boundaries, splits
from skippy_zmq.certify.report import line, names_json, table
from skippy_zmq.certify.results import ModelResult, Try, Verdict, exact_names, judged_try
from skippy_zmq.certify.worker import Worker
from skippy_zmq.certify.workload import ALL_SETTINGS, DEFAULTS, PLAIN, Step, micro_batches, script
from skippy_zmq.errors import OptionError
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.stage.facts import architecture_name, certified_architectures

ROOT = Path(__file__).parent.parent
ARCH = Path(__file__).parent / "data" / "arch"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skippy_zmq.certify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=ROOT)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker(tmp_path, 100) as value:
        yield value


def test_reports_of_a_folder(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("gpt2-dense.gguf", "granitehybrid-dense.gguf"):
        shutil.copy(ARCH / name, models)
    (models / "truncated.gguf").write_bytes((ARCH / "gpt2-dense.gguf").read_bytes()[:5000])
    files = {name: tmp_path / name for name in ("out.json", "table.md", "names.json")}
    result = run(models, "--json", files["out.json"], "--table", files["table.md"], "--names", files["names.json"])
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("gpt2-dense.gguf: gpt2: exact at 1-3, 21 tries; crosses: l_out-N f32, 256 bytes a row")
    assert lines[2].startswith("truncated.gguf: unknown architecture: refused: ")
    assert lines[3] == "3 models: 2 exact, 1 refused"

    document = json.loads(files["out.json"].read_text())
    assert document["exact"] == ["gpt2", "granitehybrid"]
    assert [s["name"] for s in document["settings"]] == [s.name for s in ALL_SETTINGS]
    gpt2, hybrid, truncated = document["models"]
    assert (gpt2["file"], gpt2["architecture"], gpt2["n_layers"]) == ("gpt2-dense.gguf", "gpt2", 4)
    assert (gpt2["can_trim"], hybrid["can_trim"], truncated["can_trim"]) == (True, False, None)
    assert (gpt2["verdict"], hybrid["verdict"], truncated["verdict"]) == ("exact", "exact", "refused")
    assert "truncated inside" in truncated["reason"]
    assert [b["layer"] for b in gpt2["boundaries"]] == [1, 2, 3]
    crossing = {"name": "l_out-0", "occurrence": 0, "dtype": "f32", "row_bytes": 256, "fixed_bytes": 0}
    assert gpt2["boundaries"][0] == {"layer": 1, "verdict": "exact", "crosses": [crossing]}
    tried = {(tuple(t["split"]), t["settings"]) for t in gpt2["tries"]}
    cuts = [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]
    assert tried == {(cut, settings.name) for cut in cuts for settings in ALL_SETTINGS}
    assert all(t["difference"] is None and t["compared"] in ("batches", "micro-batches") for t in gpt2["tries"])

    assert json.loads(files["names.json"].read_text()) == ["gpt2", "granitehybrid"]
    text = files["table.md"].read_text()
    assert "| `gpt2` | `gpt2-dense.gguf` | 4 | 1-3 | `l_out-N` f32, 256 bytes a row | yes |" in text
    assert "| `granitehybrid` | `granitehybrid-dense.gguf` | 4 | 1-3 | `l_out-N` f32, 256 bytes a row | no |" in text
    assert "truncated.gguf`: refused" in text


def test_refused_fails_only_if_strict(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    assert run(bad).returncode == 0
    strict = run(bad, "--strict")
    assert strict.returncode == 1
    assert strict.stdout.startswith("bad.gguf: unknown architecture: refused: ")


def test_shards_and_chosen_boundaries(tmp_path: Path) -> None:
    shards(tiny(tmp_path / "model.gguf", n_layers=8), 3)
    (tmp_path / "model.gguf").unlink()
    result = run(tmp_path, "--quick", "--boundaries", "2,7", "--json", tmp_path / "out.json", "--strict")
    assert result.returncode == 0, result.stdout
    (model,) = json.loads((tmp_path / "out.json").read_text())["models"]
    assert model["file"] == "model-00001-of-00003.gguf"
    assert [(t["split"], t["settings"]) for t in model["tries"]] == [(s, "defaults") for s in ([], [2], [7])]


def test_a_model_that_could_not_show_a_difference_is_refused(tmp_path: Path) -> None:
    path = sparse(tmp_path / "zeros.gguf", n_layers=2, layer_bytes=48 << 20)
    result = run(path, "--quick", "--strict")
    assert result.returncode == 1
    assert "own logits are all equal" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no-such-file.gguf"], "no-such-file.gguf: no such file"),
        ([ARCH, "--boundaries", "3,2"], "wanted rising layer numbers"),
        ([ARCH, "--boundaries", "x"], "wanted all, or layer numbers"),
        ([ARCH, "--jobs", "0"], "--jobs 0: wanted at least 1"),
        ([ARCH, "--timeout", "nan"], "--timeout nan"),
        ([ARCH, "--json", "no-such-folder/out.json"], "there is no folder"),
    ],
)
def test_wrong_options(arguments: list[str | Path], complaint: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_interrupt_ends_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skippy_zmq.certify", str(ARCH)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert ": exact at 1-3" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        # all who hold the pipe are gone when it ends, the children too
        assert process.stderr.read() == "certify: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_other_weights_are_inexact(worker: Worker, tmp_path: Path) -> None:
    one, other = (tiny(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    folder = tmp_path / "reference"
    folder.mkdir()
    assert worker.run(reference_job(one, DEFAULTS, folder)) == {"can_trim": True}
    same = judged_try((2,), DEFAULTS.name, worker.run(trial_job(one, DEFAULTS, (2,), folder)))
    found = judged_try((2,), DEFAULTS.name, worker.run(trial_job(other, DEFAULTS, (2,), folder)))
    assert (same.verdict, found.verdict) == (Verdict.EXACT, Verdict.INEXACT)
    assert found.difference is not None
    assert (found.difference.step, found.difference.row) == ("prompt", 0)
    assert found.difference.largest is not None
    assert found.difference.largest > 0.1

    result = ModelResult("tiny.gguf", "llama", 4, True, (same, found))
    assert result.verdict is Verdict.INEXACT
    assert result.boundaries == {2: Verdict.INEXACT}
    assert exit_code([result], strict=False) == 1
    assert line(result).startswith("tiny.gguf: llama: inexact: boundaries 2 (defaults): ")
    assert names_json([result]) == "[]\n"
    assert "Not exact everywhere, so not certified:\n\n- `tiny.gguf`: inexact" in table([result], ALL_SETTINGS)


def test_settings_that_change_bits_are_seen(worker: Worker, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf")
    folder = tmp_path / "reference"
    folder.mkdir()
    worker.run(reference_job(path, PLAIN, folder))
    found = judged_try((2,), "mixed", worker.run(trial_job(path, DEFAULTS, (2,), folder)))
    assert found.verdict is Verdict.INEXACT


def test_one_file_that_is_not_exact_spoils_its_name() -> None:
    def result(architecture: str, verdict: Verdict) -> ModelResult:
        return ModelResult(f"{architecture}.gguf", architecture, 4, True, (Try((1,), "defaults", verdict),))

    results = [
        result("llama", Verdict.EXACT),
        result("gpt2", Verdict.EXACT),
        result("llama", Verdict.CRASHED),
        result("bloom", Verdict.REFUSED),
        ModelResult("unknown.gguf", None, None, None, (), "not a model"),
    ]
    assert exact_names(results) == ["gpt2"]


def test_one_bit_is_a_difference() -> None:
    steps = [Step("one", ((0, 0, 2),), (0, 1)), Step("two", ((0, 2, 3),), (2,))]
    logits = np.linspace(-1.0, 1.0, 30, dtype=np.float32).reshape(3, 10)
    assert first_difference(steps, logits, logits.copy()) is None
    for position, value in ((7, np.nextafter(logits[2, 7], np.float32(9))), (0, np.float32(np.nan))):
        changed = logits.copy()
        changed[2, position] = value
        found = first_difference(steps, logits, changed)
        assert found is not None
        assert (found.step, found.row, found.values) == ("two", 2, 1)
        assert (found.largest is None) == bool(np.isnan(value))
    zeros = np.zeros((3, 10), np.float32)
    assert first_difference(steps, zeros, -zeros) is not None


def test_a_killed_child_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "facts.json")  # a try that reads it waits until somebody writes
    job = trial_job(ARCH / "gpt2-dense.gguf", DEFAULTS, (2,), tmp_path)
    (tmp_path / "files").mkdir()
    with Worker(tmp_path / "files", 100) as worker:
        results: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: results.append(worker.run(job)))
        thread.start()
        (tmp_path / "facts.json").open("w").close()  # returns when the child has opened it for reading
        thread.join()
        assert "JSONDecodeError" in results.pop()["crashed"]  # it read nothing

        thread = threading.Thread(target=lambda: results.append(worker.run(job)))
        thread.start()
        with (tmp_path / "facts.json").open("w"):
            (child,) = children_of(worker.pid)
            os.kill(child, signal.SIGSEGV)
            thread.join()
        assert results == [{"crashed": "was killed by SIGSEGV"}]
        facts = {"can_trim": True}
        folder = tmp_path / "reference"
        folder.mkdir()
        assert worker.run(reference_job(ARCH / "gpt2-dense.gguf", DEFAULTS, folder)) == facts


def test_time_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "facts.json")
    with Worker(tmp_path, 0.2) as worker:
        result = worker.run(trial_job(ARCH / "gpt2-dense.gguf", DEFAULTS, (2,), tmp_path))
    assert result == {"crashed": "stopped after 0.2 s"}


def test_splits() -> None:
    assert splits(1, None, quick=False) == [()]
    assert splits(4, None, quick=False) == [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]
    assert splits(4, None, quick=True) == [(), (1,), (2,), (3,)]
    large = splits(30, None, quick=False)
    assert large == [(), *((k,) for k in range(1, 30)), *((k, k + 1) for k in range(1, 29))]
    assert splits(30, (5, 20, 29), quick=False) == [(), (5,), (20,), (29,), (5, 20), (20, 29)]
    with pytest.raises(OptionError, match="boundary 4: the model has 4 layers, so wanted 1 to 3"):
        splits(4, (2, 4), quick=False)


def test_boundaries_option() -> None:
    assert parse_boundaries("all") is None
    assert parse_boundaries("3,9") == (3, 9)
    for text in ("0", "2,2", "", "1,,2"):
        with pytest.raises(OptionError):
            parse_boundaries(text)


def test_model_files(tmp_path: Path) -> None:
    names = ("b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "sub/c.gguf", "d.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = model_files([tmp_path, tmp_path / "b.gguf"])
    assert [path.name for path in found] == ["a-00001-of-00002.gguf", "b.gguf", "c.gguf"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=r"holds no \.gguf file"):
        model_files([tmp_path / "empty"])


@pytest.mark.parametrize(("n_ctx", "can_trim"), [(256, True), (256, False), (48, True), (48, False)])
def test_the_script_is_runnable(n_ctx: int, can_trim: bool) -> None:
    held = [0, 0, 0]
    for step in script(n_ctx, can_trim=can_trim):
        if step.forget is not None:
            lane, position = step.forget
            assert position < held[lane]
            assert can_trim or position == 0
            held[lane] = position
        for lane, position, count in step.rows:
            assert position == held[lane]
            held[lane] += count
            assert held[lane] <= n_ctx
        assert [row for group in micro_batches(step.rows) for row in group] == list(step.rows)
    assert all(held)


def test_the_committed_tables_agree() -> None:
    text = (ROOT / "docs" / "architectures.md").read_text()
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.M))
    assert listed == certified_architectures()
    assert "Not exact everywhere" not in text
    assert {architecture_name(open_model(path)) for path in ARCH.glob("*.gguf")} <= listed
