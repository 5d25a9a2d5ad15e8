"""Whatever stands in the JSON files of a checkpoint: it opens, or is refused in one line that names the file."""

from __future__ import annotations

import copy
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import CASES, edited, write_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint

CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
FAMILIES = ("granite", "gemma3-with-vision", "phi3-long-sentencepiece", "mixtral", "qwen2-yarn", "smollm3")

LENGTH = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "more layers than llama.cpp has": ("granite", CONFIG, {"num_hidden_layers": 2**32 - 1}, "wanted at most 512"),
    "heads of gigabytes": (
        "llama-old-spelling",
        CONFIG,
        {
            "head_dim": 2**32 - 2,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "head_dim: wanted heads of at most 1048576 elements, got 4294967294",
    ),
    "a number beyond 32 bits": ("granite", CONFIG, {"rms_norm_eps": 1e300}, r"rms_norm_eps: wanted .* got 1e\+300"),
    "a theta beyond 32 bits": ("granite", CONFIG, {"rope_theta": 1e39}, "rope_theta: wanted a finite number of 32"),
    "a length whose logarithm is 0": (
        "phi3-long-sentencepiece",
        CONFIG,
        {"original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope", **LENGTH}},
        "original_max_position_embeddings: wanted a whole number from 2, got 1",
    ),
    "a kind that is a list": ("granite", CONFIG, {"rope_scaling": {"type": []}}, "rope_type: wanted a name"),
    "half a sign in a template": ("granite", SETTINGS, {"chat_template": "\ud800"}, "half of a surrogate pair"),
    "half a sign in a token": (
        "llama-f32-sentencepiece",
        SETTINGS,
        {"added_tokens_decoder": {"511": {"content": "\udfff"}}},
        "half of a surrogate pair",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_no_header_holds_are_refused(name: str, tmp_path: Path) -> None:
    case, file, changes, complaint = REFUSED[name]
    folder = write_case(CASES[case], tmp_path / "model")
    edited(folder, changes, file)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=complaint) as refused:
            open_checkpoint(folder).model()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(folder) in str(refused.value)
    assert peak < 64 << 20


def test_pairs_of_escapes_are_one_sign(tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    edited(folder, {"chat_template": "\U0001f600"}, SETTINGS)
    assert "\\ud83d" in (folder / SETTINGS).read_text()
    assert open_checkpoint(folder).model().chat_template == "\U0001f600"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_case(CASES[name], tmp_path_factory.mktemp("hostile") / name) for name in FAMILIES}


_NUMBERS = [0, 1, -1, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64, 10**400, 0.0, -0.5, 1e-300, 1e39, 1e300, -1e300]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.sampled_from(["", "x", "\ud800", "a\0b", "x" * 100_000, "default", "yarn", "longrope", "full_attention"]),
    st.sampled_from([[], {}, [[]], [None], [{}], {"type": []}, {"content": 1}, [1] * 600]),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with each of its keys or first indices."""
    keys = value.keys() if isinstance(value, dict) else range(min(len(value), 8)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *(_places(value[key]) if key != "vocab" else [])]]


@given(st.sampled_from(FAMILIES), st.sampled_from([CONFIG, CONFIG, SETTINGS, TOKENIZER]), st.floats(0, 1), _VALUES)
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_document_with_a_strange_value_opens_or_is_refused_in_one_line(
    folders: dict[str, Path], family: str, file: str, where: float, value: Any
) -> None:
    folder = folders[family]
    path = folder / file
    if not path.exists():  # SentencePiece has no tokenizer.json
        return
    original = path.read_text()
    content = json.loads(original)
    places = _places(content)
    container, key = places[min(int(where * len(places)), len(places) - 1)]
    container[key] = copy.deepcopy(value)
    refusal = ""
    try:
        path.write_text(json.dumps(content))
        open_checkpoint(folder).model()
    except ModelFileError as error:
        refusal = str(error)
    finally:
        path.write_text(original)
    assert not refusal or str(folder) in refusal
    assert "\n" not in refusal
    assert len(refusal) < 2000
