"""Stages that do not fit together are refused, and the refusal names both."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from skippy_zmq.errors import HandshakeError
from skippy_zmq.stage.handshake import check_crossing, check_neighbours, check_pipeline, check_ring
from skippy_zmq.wire.messages import CrossingSpec, StageFacts

_CROSSING = CrossingSpec("l_out-1", 0, "f32", 256)
_TWICE = (CrossingSpec("mix (view)", 0, "f32", 256), CrossingSpec("mix (view)", 1, "f32", 256))


def _stage(start: int, end: int, **changes: Any) -> StageFacts:
    facts = StageFacts(
        stage=f"stage-{start}-{end}-00",
        endpoint=f"ipc:///run/{start}",
        build="b1",
        model="aaaa",
        model_name="one.gguf",
        architecture="llama",
        layer_start=start,
        layer_end=end,
        n_layers=4,
        n_vocab=300,
        lanes=4,
        n_ctx=256,
        n_batch=64,
        n_ubatch=64,
        cache_type_k="f16",
        cache_type_v="f16",
        flash_attn="on",
        swa_full=True,
        wanted=(_CROSSING,) if start else (),
        offered=(_CROSSING,) if end < 4 else (),
    )
    return dataclasses.replace(facts, **changes)


def _refused(code: str, *words: str) -> Any:
    pattern = ".*".join(map(re.escape, words))
    return pytest.raises(HandshakeError, match=pattern, check=lambda error: error.code == code)


def test_stages_that_fit() -> None:
    first, middle, last = _stage(0, 1), _stage(1, 2), _stage(2, 4)
    check_neighbours(first, middle)
    check_crossing(first, middle)
    check_ring(first, last)
    check_pipeline((first, middle, last))
    check_pipeline((_stage(0, 4),))


def test_memory_threads_and_names_may_differ() -> None:
    other = _stage(2, 4, weights_bytes=9, kv_bytes=9, compute_bytes=9, threads=9, model_name="copy.gguf")
    check_neighbours(_stage(0, 2), other)
    check_pipeline((_stage(0, 2), other))


def test_two_commits_of_one_repository_are_not_mixed() -> None:
    ours, theirs = "o/n@" + "a" * 40, "o/n@" + "b" * 40
    one, other = _stage(0, 2, revision=ours), _stage(2, 4, revision=theirs)
    words = ("0:2", "2:4", f"o/n at commit {'a' * 40} on one stage, at {'b' * 40} on the other")
    for check in (check_neighbours, check_ring):
        with _refused("model_mismatch", *words):
            check(one, other)
    with _refused("model_mismatch", "o/n at commit"):  # whatever is said of their contents
        check_neighbours(one, dataclasses.replace(other, model="bbbb"))


@pytest.mark.parametrize("theirs", ["o/n@" + "a" * 40, "", "o/copy@" + "b" * 40])
def test_the_contents_decide_where_revisions_cannot(theirs: str) -> None:
    one, other = _stage(0, 2, revision="o/n@" + "a" * 40), _stage(2, 4, revision=theirs)
    check_pipeline((one, other))
    with _refused("model_mismatch", "model identity differs: aaaa", "bbbb"):
        check_neighbours(one, dataclasses.replace(other, model="bbbb"))


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [((0, 2), (3, 4), "leave a gap"), ((0, 3), (2, 4), "overlap"), ((2, 4), (0, 2), "overlap")],
)
def test_ranges_that_do_not_meet(one: tuple[int, int], other: tuple[int, int], kind: str) -> None:
    ranges = f"{one[0]}:{one[1]} and {other[0]}:{other[1]} {kind}"
    with _refused("layer_mismatch", ranges, f"would have to begin at layer {one[1]}"):
        check_neighbours(_stage(*one), _stage(*other))


def test_an_earlier_layer_behind_a_later_one_is_no_gap() -> None:
    with _refused("layer_mismatch", "1:2 and 1:2 overlap"):
        check_neighbours(_stage(1, 2), _stage(1, 2))


@pytest.mark.parametrize(
    ("field", "value", "label"),
    [("model", "bbbb", "model identity"), ("n_layers", 5, "layers of the model"), ("build", "b2", "llama.cpp build")],
)
def test_other_models(field: str, value: object, label: str) -> None:
    one, other = _stage(0, 2), _stage(2, 4, model_name="two.gguf", **{field: value})
    named = (f"{label} differs: {getattr(one, field)} on stage 0:2", "one.gguf", f"{value} on stage 2:4", "two.gguf")
    with _refused("model_mismatch", *named):
        check_neighbours(one, other)
    with _refused("model_mismatch", *named):
        check_ring(one, other)
    with _refused("model_mismatch", *named):
        check_pipeline((one, other))


@pytest.mark.parametrize(
    ("field", "value", "label"),
    [
        ("lanes", 5, "--lanes"),
        ("n_ctx", 512, "--ctx-size"),
        ("n_batch", 128, "--batch-size"),
        ("n_ubatch", 32, "--ubatch-size"),
        ("cache_type_k", "f32", "--cache-type-k"),
        ("cache_type_v", "f32", "--cache-type-v"),
        ("flash_attn", "off", "--flash-attn"),
        ("swa_full", False, "--swa-full"),
        ("reproducible", True, "--reproducible"),
    ],
)
def test_other_settings(field: str, value: object, label: str) -> None:
    one, other = _stage(0, 2), _stage(2, 4, **{field: value})
    named = (f"{label} differs: {getattr(one, field)} on stage 0:2", f"{value} on stage 2:4")
    with _refused("settings_mismatch", *named):
        check_neighbours(one, other)
    with _refused("settings_mismatch", *named):
        check_ring(one, other)


@pytest.mark.parametrize(
    ("offered", "shown"),
    [
        ((), "no tensor of that name"),
        ((CrossingSpec("l_out-2", 0, "f32", 256),), "no tensor of that name"),
        ((CrossingSpec("l_out-1", 1, "f32", 256),), "no tensor of that name"),
        ((CrossingSpec("l_out-1", 0, "f16", 256),), "tensor 'l_out-1' #0 (f16, 256 bytes a row)"),
        ((CrossingSpec("l_out-1", 0, "f32", 384),), "tensor 'l_out-1' #0 (f32, 384 bytes a row)"),
        ((CrossingSpec("l_out-1", 0, "f32", 256, 8),), "tensor 'l_out-1' #0 (f32, 256 bytes a row + 8)"),
    ],
)
def test_a_wanted_tensor_that_is_not_offered(offered: tuple[CrossingSpec, ...], shown: str) -> None:
    wanted = "stage 2:4 (stage-2-4-00) wants tensor 'l_out-1' #0 (f32, 256 bytes a row) from stage 0:2 (stage-0-2-00)"
    with _refused("crossing_mismatch", wanted, shown, "cannot be cut at layer 2"):
        check_crossing(_stage(0, 2, offered=offered), _stage(2, 4))


def test_more_offered_than_wanted_is_fine() -> None:
    check_crossing(_stage(0, 2, offered=(_CROSSING, CrossingSpec("other", 0, "f32", 4))), _stage(2, 4))


def test_tensors_of_one_name_must_be_equally_many() -> None:
    check_crossing(_stage(0, 2, offered=_TWICE), _stage(2, 4, wanted=_TWICE))
    with _refused("crossing_mismatch", "wants 1 tensors named 'mix (view)'", "offers 2"):
        check_crossing(_stage(0, 2, offered=_TWICE), _stage(2, 4, wanted=_TWICE[:1]))


def test_the_ring_is_closed_from_the_last_stage_to_the_first() -> None:
    with _refused("layer_mismatch", "--first of stage 2:4", "begins at layer 0, not stage 1:2"):
        check_ring(_stage(1, 2), _stage(2, 4))
    with _refused("layer_mismatch", "stage 2:3", "ends at layer 3 of 4"):
        check_ring(_stage(0, 2), _stage(2, 3))


@pytest.mark.parametrize("ranges", [[(0, 1), (1, 3)], [(1, 2), (2, 4)], [(1, 3)]])
def test_a_pipeline_that_misses_an_end(ranges: list[tuple[int, int]]) -> None:
    shown = ", ".join(f"{start}:{end}" for start, end in ranges)
    with _refused("layer_mismatch", f"layer ranges {shown} do not cover layers 0:4"):
        check_pipeline(tuple(_stage(*layers) for layers in ranges))


def test_a_pipeline_with_a_gap_inside() -> None:
    with _refused("layer_mismatch", "1:2 and 3:4 leave a gap"):
        check_pipeline((_stage(0, 1), _stage(1, 2), _stage(3, 4)))
