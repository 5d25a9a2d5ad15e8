"""Z12: what a peer says of a batch is believed by nobody until it is checked; one field wrong, one refusal, no crash.

The same fields at the codec alone: test_wire_hostile. A stage in the hands of a test, which sends broken batches
from the right place in the ring, where their sessions end and others go on: test_stage_failures.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from fault_helpers import N_GOOD_TOKENS, Scene, recited
from stage_peers import Asker, Peer
from transport_helpers import Transport
from wire_values import FACTS

from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.limits import MAX_LAYERS
from skippy_zmq.wire.messages import GENERATION, Kind

pytest_plugins = ("transport_fixtures", "stage_fixtures", "fault_fixtures")

_HIDDEN, _ROWS, _LANES, _CONTEXT = 32, 3, 4, 8192
_BIG = 1 << 63
Change = tuple[tuple[int, ...], Any]


def _batch() -> tuple[wire.Activations, list[bytes]]:
    """One that would be right for the second of the two stages, were it of the first: three rows of one session."""
    tensor = wire.TensorDescriptor("l_out-1", 0, 0, "f32", (_HIDDEN, _ROWS), 4 * _HIDDEN * _ROWS)
    opened = wire.SessionOpen("s-1", 0, "r-1", b"nobody", _ROWS, 5, wire.SamplingParams())
    rows = (wire.SessionRows("s-1", 0, 0, _ROWS, True),)
    ids = struct.pack(f"<{_ROWS}i", 5, 6, 7)
    message = wire.Activations(1, "stage-0-2", 0, 2, "prefill", rows, ids, (tensor,), (opened,), wire.NO_TIMES)
    return message, [np.ones((_ROWS, _HIDDEN), "<f4").tobytes()]


def _with(*changes: Change, payloads: Sequence[bytes] | None = None) -> list[bytes]:
    """The frames of the batch with values of its header replaced, each at its place."""
    message, own = _batch()
    prefix, header = encode(message, own)[:2]
    fields = msgpack.unpackb(header)
    for place, value in changes:
        inner = fields
        for index in place[:-1]:
            inner = inner[index]
        inner[place[-1]] = value
    return [bytes(prefix), msgpack.packb(fields), *(own if payloads is None else payloads)]


def _tensor(**values: Any) -> Change:
    fields = ["l_out-1", 0, 0, "f32", [_HIDDEN, _ROWS], 4 * _HIDDEN * _ROWS]
    names = wire.TensorDescriptor.__struct_fields__
    for name, value in values.items():
        fields[names.index(name)] = value
    return (7, 0), fields


_NBYTES = 4 * _HIDDEN * _ROWS
_HALF = bytes(_NBYTES // 2)
# Refused for what they say, whoever says it.
_MALFORMED: dict[str, list[bytes]] = {
    "dtype unknown": _with(_tensor(dtype="q4_0")),
    "dtype of objects": _with(_tensor(dtype="O")),
    "dtype empty": _with(_tensor(dtype="")),
    "dtype a number": _with(_tensor(dtype=0)),
    "f16 announced, f32 sent": _with(_tensor(dtype="f16")),
    "f16 announced with its size, f32 sent": _with(_tensor(dtype="f16", nbytes=_NBYTES // 2)),
    "f32 announced, f16 sent": _with(payloads=[_HALF]),
    "f64 announced, f32 sent": _with(_tensor(dtype="f64", nbytes=2 * _NBYTES)),
    "shape above the payload": _with(_tensor(shape=[_HIDDEN, _ROWS + 1])),
    "shape below the payload": _with(_tensor(shape=[_HIDDEN, _ROWS - 1])),
    "shape of another product, its size": _with(_tensor(shape=[_HIDDEN, 4], nbytes=16 * _HIDDEN)),
    "hidden size one above": _with(_tensor(shape=[_HIDDEN + 1, _ROWS])),
    "hidden size one below": _with(_tensor(shape=[_HIDDEN - 1, _ROWS])),
    "no dimensions": _with(_tensor(shape=[])),
    "five dimensions": _with(_tensor(shape=[_HIDDEN, _ROWS, 1, 1, 1])),
    "shape no array": _with(_tensor(shape=_HIDDEN * _ROWS)),
    "shape of floats": _with(_tensor(shape=[float(_HIDDEN), _ROWS])),
    **{
        f"dimension {value}": _with(_tensor(shape=[_HIDDEN, value]))
        for value in (0, -1, -_ROWS, 1 << 31, 1 << 32, _BIG, -_BIG, 2**64 - 1)
    },
    "two negative dimensions": _with(_tensor(shape=[-_HIDDEN, -_ROWS])),
    "dimensions that overflow to the size": _with(_tensor(shape=[1 << 32, 1 << 32, _HIDDEN, _ROWS])),
    **{f"nbytes {value}": _with(_tensor(nbytes=value)) for value in (0, -1, _NBYTES - 1, _NBYTES + 1, 1 << 40, _BIG)},
    "occurrence -1": _with(_tensor(occurrence=-1)),
    "micro-batch that is not there": _with(_tensor(micro_batch=1)),
    "micro-batch -1": _with(_tensor(micro_batch=-1)),
    "name empty": _with(_tensor(name="")),
    "name too long": _with(_tensor(name="x" * 129)),
    "name no text": _with(_tensor(name=b"l_out-1")),
    "one tensor twice": _with(((7,), [_tensor()[1], _tensor()[1]]), payloads=[bytes(_NBYTES)] * 2),
    "payload missing": _with(payloads=[]),
    "payload extra": _with(payloads=[bytes(_NBYTES)] * 2),
    "payload empty": _with(payloads=[b""]),
    "payload without a descriptor": _with(((7,), [])),
    "payload too short": _with(payloads=[bytes(_NBYTES - 1)]),
    "payload too long": _with(payloads=[bytes(_NBYTES + 1)]),
    "no rows": _with(((5,), [])),
    **{f"{value} rows": _with(((5, 0, 3), value)) for value in (0, -1, _ROWS - 1, _ROWS + 1, 2048, 2049, _BIG)},
    "no tokens": _with(((6,), b"")),
    "a token missing": _with(((6,), struct.pack("<2i", 5, 6))),
    "a token too many": _with(((6,), struct.pack("<4i", 5, 6, 7, 8))),
    "half a token": _with(((6,), struct.pack("<3i", 5, 6, 7)[:-1])),
    "a negative token": _with(((6,), struct.pack("<3i", 5, -6, 7))),
    "the lowest token": _with(((6,), struct.pack("<3i", 5, -(1 << 31), 7))),
    **{f"position {value}": _with(((5, 0, 2), value)) for value in (-1, (1 << 31) - 2, 1 << 31, _BIG, -_BIG)},
    **{f"lane {value}": _with(((5, 0, 1), value)) for value in (-1, 256, _BIG)},
    "a lane for two sessions": _with(
        ((5,), [["s-1", 0, 0, _ROWS, True], ["s-2", 0, 0, 1, True]]), ((6,), struct.pack("<4i", 5, 6, 7, 8))
    ),
    "a session on two lanes": _with(
        ((5,), [["s-1", 0, 0, _ROWS, True], ["s-1", 1, 0, 1, True]]), ((6,), struct.pack("<4i", 5, 6, 7, 8))
    ),
    "opened on another lane": _with(((8, 0, 1), 1)),
    "opened twice": _with(((8,), [msgpack.unpackb(_with()[1])[8][0]] * 2)),
    "opened without rows": _with(((8, 0, 0), "s-2")),
    "layers backwards": _with(((2,), 2)),
    "layers beyond any model": _with(((3,), MAX_LAYERS + 1)),
    "layer -1": _with(((2,), -1)),
    "no producer": _with(((1,), "")),
    "phase unknown": _with(((4,), "verify")),
    **{f"batch {value}": _with(((0,), value)) for value in (-1, _BIG, True, 1.0)},
}
_OTHER: dict[str, tuple[list[bytes], str]] = {
    **{
        f"kind {kind}": ([bytes((GENERATION, kind)), *_with()[1:]], "unknown_kind")
        for kind in sorted({0, 7, 99, 255} - set(Kind))
    },
    **{
        f"generation {generation}": ([bytes((generation, Kind.ACTIVATIONS)), *_with()[1:]], "generation_mismatch")
        for generation in (0, GENERATION + 1, 999 % 256, 255)
    },
    "generation 999 in two bytes": ([struct.pack("<HB", 999, Kind.ACTIVATIONS), *_with()[1:]], "generation_mismatch"),
}
# Well-formed, and wrong for the stage or from the wrong peer.
_MISPLACED: dict[str, list[bytes]] = {
    "right, from nobody it knows": _with(),
    "NaN": _with(payloads=[np.full(_HIDDEN * _ROWS, np.nan, "<f4").tobytes()]),
    "infinity": _with(payloads=[np.full(_HIDDEN * _ROWS, np.inf, "<f4").tobytes()]),
    "a lane the stage has not": _with(((5, 0, 1), _LANES), ((8, 0, 1), _LANES)),
    "a position beyond the context": _with(((5, 0, 2), _CONTEXT)),
    "layers of another stage": _with(((2,), 1), ((3,), 3)),
    "a token beyond the vocabulary": _with(((6,), struct.pack("<3i", 5, 6, 1 << 20))),
    "a batch number again": _with(((0,), 0)),
    "an end of a session": [bytes(frame) for frame in encode(wire.SessionClose("s-1", 0, "done"))],
    "tokens for stage 0": [
        bytes(frame)
        for frame in encode(wire.BatchDone(1, (wire.SampledToken("s-1", 0, 3, 1 << 30, ""),), (), wire.NO_TIMES))
    ],
    "a failed batch": [bytes(frame) for frame in encode(wire.BatchFailed(1, ("s-1",), (), "native", "no"))],
}


def _all(code: str) -> Iterator[tuple[str, list[bytes], str]]:
    """Every message, and the code of its answer; ``code``: of those that are refused for their sender alone."""
    yield from ((name, frames, "protocol") for name, frames in _MALFORMED.items())
    yield from ((name, frames, answer) for name, (frames, answer) in _OTHER.items())
    yield from ((name, frames, code) for name, frames in _MISPLACED.items())


def _check(peer: Peer, messages: Iterator[tuple[str, list[bytes], str]]) -> None:
    """Each gets one answer, of its code, in its turn."""
    for name, frames, code in messages:
        peer.send_frames(frames)
        error = peer.expect(wire.Error)
        assert (name, error.code, error.retry) == (name, code, code == "not_ready")
        assert 0 < len(error.message) < 400
        assert "\n" not in error.message


@pytest.mark.parametrize("index", [0, 1])
def test_before_the_handshake(index: int, scene: Scene) -> None:
    peer = scene.peer(index, greeted=False)
    _check(peer, _all("not_ready"))
    assert peer.greet().ready  # and nothing else was on its way
    scene.good.wait_for(2)


@pytest.mark.parametrize("index", [0, 1])
def test_from_a_client(index: int, scene: Scene) -> None:
    peer = scene.peer(index)
    _check(peer, _all("protocol"))
    assert peer.ready()
    scene.good.wait_for(2)


def _forged(asker: Asker, index: int, peer: Peer, **changes: Any) -> wire.StageFacts:
    """What a stage says of itself, in the name of a peer."""
    return dataclasses.replace(asker.stages[index], stage=peer.identity.decode(), **changes)


def test_from_a_second_upstream(scene: Scene, transport: Transport) -> None:
    """One that has the facts of stage 0 is let in only when that is gone; nothing it sends meanwhile counts."""
    asker = Asker(transport, scene.pipeline.endpoint)
    peer = scene.peer(1, greeted=False)
    refusal = peer.refusal("upstream", _forged(asker, 0, peer))
    assert (refusal.code, refusal.retry) == ("retry", True)
    assert "in front of" in refusal.message
    _check(peer, _all("not_ready"))
    assert asker.tokens((5, 6), max_tokens=N_GOOD_TOKENS) == recited(scene.model, N_GOOD_TOKENS)
    scene.good.wait_for(2)


_WRONG_FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "00" * 16}, "model_mismatch"),
    "another build": ({"build": "llama.cpp 0.0.0"}, "model_mismatch"),
    "more layers": ({"n_layers": 5}, "model_mismatch"),
    "layers that overlap": ({"layer_start": 0, "layer_end": 3}, "layer_mismatch"),
    "layers that leave a gap": ({"layer_start": 0, "layer_end": 1}, "layer_mismatch"),
    "more lanes": ({"lanes": _LANES + 1}, "settings_mismatch"),
    "a longer context": ({"n_ctx": 2 * _CONTEXT}, "settings_mismatch"),
    "larger micro-batches": ({"n_ubatch": 128}, "settings_mismatch"),
    "another cache": ({"cache_type_k": "q8_0"}, "settings_mismatch"),
    "nothing offered": ({"offered": ()}, "crossing_mismatch"),
    "half the row": ({"offered": (wire.CrossingSpec("l_out-1", 0, "f16", 2 * _HIDDEN),)}, "crossing_mismatch"),
    "a longer row": ({"offered": (wire.CrossingSpec("l_out-1", 0, "f32", 8 * _HIDDEN),)}, "crossing_mismatch"),
}


@pytest.mark.parametrize("name", _WRONG_FACTS)
def test_from_a_stage_that_does_not_fit(name: str, ipc_scene: Scene, transport: Transport) -> None:
    changes, code = _WRONG_FACTS[name]
    asker = Asker(transport, ipc_scene.pipeline.endpoint)
    peer = ipc_scene.peer(1, greeted=False)
    refusal = peer.refusal("upstream", _forged(asker, 0, peer, **changes))
    assert (refusal.code, refusal.retry) == (code, False)
    _check(peer, iter([("right, from one that was refused", _with(), "not_ready")]))


def test_facts_that_are_none(ipc_scene: Scene) -> None:
    """HELLO itself, one value wrong at a time: the ends of every range, and types that are not the field's."""
    peer = ipc_scene.peer(1, greeted=False)
    facts = dataclasses.replace(FACTS, stage=peer.identity.decode(), revision="")  # which may be empty
    prefix, header = encode(wire.Hello("upstream", peer.identity.decode(), facts))
    for index, field in enumerate(dataclasses.fields(wire.StageFacts)):
        for value in (None, -1, 1.5, _BIG, "", "x" * 513, [[]], [["x", 0, "f32", -1, 0]], [["x", 0, "f32", _BIG, 0]]):
            fields = msgpack.unpackb(header)
            if value == fields[2][index]:
                continue
            fields[2][index] = value
            peer.send_frames([bytes(prefix), msgpack.packb(fields)])
            error = peer.expect(wire.Error)
            assert (field.name, value, error.code) == (field.name, value, "protocol")
    assert peer.greet().ready


def test_tokens_of_a_false_last_stage_change_nothing(scene: Scene, transport: Transport) -> None:
    """Somebody else closes the ring with the facts of the last stage, and says that tokens have come."""
    asker = Asker(transport, scene.pipeline.endpoint)
    peer = scene.peer(0, greeted=False)
    assert peer.greet("ring", _forged(asker, 1, peer)).ready
    running = asker.ask((5, 6), max_tokens=400)
    asker.wait(running, lambda answer: bool(answer.token_ids))
    for batch in range(200):
        tokens = tuple(wire.SampledToken(f"s-{lane}", lane, 3, 1 << 30, "") for lane in range(_LANES))
        peer.send(wire.BatchDone(batch, tokens, (), wire.NO_TIMES))
    assert peer.ready()
    assert asker.answer(running).token_ids == recited(scene.model, 400)


_REUSE: dict[str, Callable[[Asker], None]] = {
    "as it is": lambda asker: asker.first.send(wire.Generate("mine", 4000, token_ids=(5,))),
    "with other values": lambda asker: asker.first.send(wire.Generate("mine", 1, prompt="x", stop=("y",))),
}


@pytest.mark.parametrize("how", _REUSE)
def test_a_request_id_used_again(how: str, scene: Scene, transport: Transport) -> None:
    """Refused with its code; the one that has it goes on and keeps its tokens."""
    asker = Asker(transport, scene.pipeline.endpoint)
    asker.ask((5,), request="mine", max_tokens=4000)
    asker.wait("mine", lambda answer: bool(answer.token_ids))
    _REUSE[how](asker)
    answer = asker.wait("mine", lambda answer: answer.error is not None)
    assert answer.code == "duplicate_request"
    answer.error = None
    assert asker.answer("mine").token_ids == recited(scene.model, 4000)
