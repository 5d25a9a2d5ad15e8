"""Nothing a peer sends gets past the codec wrong, raises anything but ProtocolError, or costs more than its limits."""

from __future__ import annotations

import math
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_values import ALL, BATCH_PAYLOADS, EXAMPLES, example_payloads

from skippy_zmq.errors import ProtocolError
from skippy_zmq.wire import limits
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.messages import GENERATION, MESSAGE_TYPES, Kind
from skippy_zmq.wire.schema import ALL_FIELDS, MESSAGE_FIELDS

MEGABYTE = 1 << 20


def frames_of(kind: Kind) -> list[bytes]:
    return [bytes(frame) for frame in encode(EXAMPLES[kind], example_payloads(kind))]


def peak_of_refusal(frames: list[bytes]) -> int:
    """Most bytes that Python held while the frames were refused with code "protocol"."""
    tracemalloc.start()
    try:
        error = refusal(frames)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.code == "protocol"
    return peak


def refusal(frames: list[bytes]) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    words = str(caught.value)
    assert "\n" not in words
    assert len(words) < 400
    assert caught.value.code in limits.ERROR_CODES
    return caught.value


def accepted_or_refused(frames: list[bytes]) -> None:
    """What is accepted is within all limits, so it can be sent on."""
    try:
        message, payloads = decode(frames)
    except ProtocolError:
        return
    encode(message, payloads)


@pytest.mark.parametrize("kind", Kind)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_damaged_messages(kind: Kind, data: st.DataObject) -> None:
    message, payloads = data.draw(ALL[kind])
    frames = [bytearray(frame) for frame in encode(message, payloads)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        place = data.draw(st.integers(0, max(len(frame) - 1, 0)))
        match data.draw(st.sampled_from(["set", "insert", "cut", "drop", "twice"])):
            case "set" if frame:
                frame[place] = data.draw(st.integers(0, 255))
            case "insert":
                frame[place:place] = data.draw(st.binary(max_size=6))
            case "cut":
                del frame[place:]
            case "drop" if len(frames) > 1:
                frames.remove(frame)
            case "twice":
                frames.append(bytearray(frame))
    accepted_or_refused([bytes(frame) for frame in frames])


@given(st.lists(st.binary(max_size=80), max_size=5))
@settings(max_examples=300, deadline=None)
def test_noise(frames: list[bytes]) -> None:
    refusal(frames)


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", Kind)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_well_formed_msgpack_of_any_shape(kind: Kind, data: st.DataObject) -> None:
    """Half of the time, the right number of fields, so that the noise reaches the fields themselves."""
    values: Any = data.draw(_ANYTHING)
    if data.draw(st.booleans()):
        values = list(msgpack.unpackb(frames_of(kind)[1], use_list=False))
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(_ANYTHING)
    accepted_or_refused([bytes([GENERATION, kind]), msgpack.packb(values)])


@pytest.mark.parametrize("kind", Kind)
def test_every_field_refuses_what_it_is_not_and_is_named(kind: Kind) -> None:
    name = MESSAGE_TYPES[kind].__name__
    values = msgpack.unpackb(frames_of(kind)[1])
    fields = [key.split(".")[1] for key in ALL_FIELDS if key.startswith(f"{name}.")]
    assert len(fields) == len(values)
    for index, field in enumerate(fields):
        for wrong in ([[[0]]], 1.5, -(1 << 63)):
            broken = [*values[:index], wrong, *values[index + 1 :]]
            error = refusal([bytes([GENERATION, kind]), msgpack.packb(broken), *example_payloads(kind)])
            assert str(error).startswith(f"{name}.{field}")
            assert error.code == "protocol"
        short = refusal([bytes([GENERATION, kind]), msgpack.packb(values[:index]), *example_payloads(kind)])
        assert str(short).startswith(f"{name}.{field}: ")
    longer = [bytes([GENERATION, kind]), msgpack.packb([*values, 0]), *example_payloads(kind)]
    assert name in str(refusal(longer))


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.ACTIVATIONS])
def test_no_message_has_a_payload_too_many(kind: Kind) -> None:
    assert "payload" in str(refusal([*frames_of(kind), b"x"]))


@pytest.mark.parametrize("generation", [0, GENERATION + 1, 128, 231])
def test_another_generation_is_named_with_ours(generation: int) -> None:
    error = refusal([bytes([generation, Kind.HELLO]), b"\x90"])
    assert error.code == "generation_mismatch"
    assert str(generation) in str(error)
    assert str(GENERATION) in str(error)


@pytest.mark.parametrize("kind", sorted(set(range(256)) - set(Kind)))
def test_unknown_kinds(kind: int) -> None:
    error = refusal([bytes([GENERATION, kind]), b"\x90"])
    assert error.code == "unknown_kind"
    assert str(kind) in str(error)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [bytes([GENERATION, Kind.PING])],
        [b"", msgpack.packb([1])],
        [bytes([GENERATION]), msgpack.packb([1])],
        [bytes([GENERATION, Kind.PING, 0]), msgpack.packb([1])],
        [bytes([GENERATION, Kind.PING]), b""],
    ],
)
def test_frames_missing_or_of_wrong_length(frames: list[bytes]) -> None:
    assert refusal(frames).code == "protocol"


@pytest.mark.parametrize(
    "frames",
    [
        [bytes([GENERATION, Kind.PING]), *[b"\x91\x01"] * 1000],
        [bytes([GENERATION, Kind.ACTIVATIONS]), b"\x90", *[b""] * (limits.MAX_TENSORS + 1)],
        [bytes([GENERATION, Kind.PING]), bytes(limits.MAX_HEADER_BYTES + 1)],
    ],
    ids=["1000 frames", "a frame too many", "header"],
)
def test_too_much(frames: list[bytes]) -> None:
    assert refusal(frames).code == "too_large"


def test_a_payload_beyond_its_limit_and_payloads_beyond_the_message_limit() -> None:
    values = msgpack.unpackb(frames_of(Kind.ACTIVATIONS)[1])
    memory = memoryview(bytes(limits.MAX_PAYLOAD_BYTES + 1))
    values[7] = [["t", 0, 0, "i8", [1], 1]]
    prefix = bytes([GENERATION, Kind.ACTIVATIONS])
    with pytest.raises(ProtocolError) as caught:
        decode([prefix, msgpack.packb(values), memory])
    assert caught.value.code == "too_large"
    size = limits.MAX_PAYLOAD_BYTES
    values[7] = [["t", occurrence, 0, "i8", [size], size] for occurrence in range(2)]
    with pytest.raises(ProtocolError) as caught:
        decode([prefix, msgpack.packb(values), memory[:-1], memory[:-1]])
    assert caught.value.code == "too_large"


BOMBS = {
    "array of 2^32-1": b"\xdd\xff\xff\xff\xff",
    "map of 2^32-1": b"\xdf\xff\xff\xff\xff",
    "text of 2^32-1": b"\xdb\xff\xff\xff\xff",
    "bytes of 2^32-1": b"\xc6\xff\xff\xff\xff",
    "extension of 2^32-1": b"\xc9\xff\xff\xff\xff\x01",
    "100,000 nested arrays": b"\x91" * 100_000,
    "100,000 nested wide arrays": b"\xdc\x04\x00" * 100_000,
    "30,000 nested arrays of 65,535": b"\xdc\xff\xff" * 30_000,
    "100,000 nested maps": b"\x81\xa1k" * 100_000,
    "nested to the limit that msgpack has": b"\x91" * 1000 + b"\x00",
    "nested once too deep": b"\x91" * (limits.MAX_NESTING + 1) + b"\x00",
    "a million tiny arrays": (b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x91\x00" * 1024) * 1024),
    "a million short texts": (b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\xa2ab" * 1024) * 1024),
    "wide arrays that never end": (b"\xdc\x04\x00" + b"\xcb@\x09!\xfbTD-\x18" * 1023) * 1000,
    "short texts in arrays that never end": (b"\xdc\x04\x00" + b"\xa2ab" * 1023) * 1000,
    "empty map": b"\x80",
    "map": msgpack.packb({"nonce": 1}),
    "nothing": b"",
    "reserved byte": b"\xc1",
    "two values": b"\x91\x01\x91\x01",
    "cut short": b"\x92\x01",
    "text that is no UTF-8": b"\x91\xa2\xff\xfe",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "random": random.Random(7).randbytes(4096),
    "timestamp": msgpack.packb([msgpack.Timestamp(1, 2)]),
    "bad timestamp": b"\x91\xc7\x00\xff",
    "object array": msgpack.packb({"nd": True, "type": "O", "kind": "O", "data": pickle.dumps([1])}),
    **{f"extension {code}": msgpack.packb([msgpack.ExtType(code, b"x")]) for code in (0, 1, 5, 127)},
    "empty extension": b"\x91\xc7\x00\x07",
}


@pytest.mark.parametrize("kind", [Kind.PING, Kind.GENERATE, Kind.ACTIVATIONS, Kind.WELCOME])
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_and_cost_little_memory(bomb: str, kind: Kind) -> None:
    assert peak_of_refusal([bytes([GENERATION, kind]), BOMBS[bomb]]) < 96 * MEGABYTE


@pytest.mark.parametrize("bomb", [name for name in BOMBS if " of " in name])
def test_an_announced_length_is_refused_before_memory_is_taken_for_it(bomb: str) -> None:
    assert peak_of_refusal([bytes([GENERATION, Kind.GENERATE]), BOMBS[bomb]]) < MEGABYTE


def test_the_number_of_values_in_a_header_is_bounded() -> None:
    rows = limits.MAX_HEADER_ITEMS // limits.MAX_ARRAY_ITEMS
    full = msgpack.packb([0] * limits.MAX_ARRAY_ITEMS)
    header = b"\xdc" + struct.pack(">H", rows) + full * rows
    error = refusal([bytes([GENERATION, Kind.WELCOME]), header])
    assert f"more than {limits.MAX_HEADER_ITEMS} values" in str(error)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Opens:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (marker,)

    bomb = pickle.dumps(Opens())
    refusal([bytes([GENERATION, Kind.PING]), bomb])
    refusal([bomb, bomb])
    refusal([bytes([GENERATION, Kind.ACTIVATIONS]), msgpack.packb([bomb]), bomb])
    assert not marker.exists()


BIG = 1 << 63
# Where in the header of the example batch, what to put there, and which field the error must name.
BATCH_CASES: list[tuple[tuple[int, ...], Any, str]] = [
    ((0,), -1, "batch"),
    ((0,), BIG, "batch"),
    ((0,), True, "batch"),
    ((1,), "", "producer"),
    ((1,), "x" * 129, "producer"),
    ((2,), 15, "layer_end"),
    ((3,), limits.MAX_LAYERS + 1, "layer_end"),
    ((4,), "verify", "phase"),
    ((5,), [], "rows"),
    ((5,), [[f"s{n}", 0, 0, 1, True] for n in range(257)], "rows"),
    ((5, 0, 1), -1, r"rows\[0\].lane"),
    ((5, 0, 1), 256, r"rows\[0\].lane"),
    ((5, 0, 1), False, r"rows\[0\].lane"),
    ((5, 1, 1), 0, "rows"),
    ((5, 1, 0), "s-1", "rows"),
    ((5, 2, 2), -1, r"rows\[2\].position"),
    ((5, 2, 2), 1 << 31, r"rows\[2\].position"),
    ((5, 2, 2), (1 << 31) - 2, r"rows\[2\].position"),
    ((5, 2, 2), BIG, r"rows\[2\].position"),
    ((5, 0, 3), 0, r"rows\[0\].n_rows"),
    ((5, 0, 3), 2, "tokens"),
    ((5, 0, 3), 2048, "rows"),
    ((5, 0, 3), 2049, r"rows\[0\].n_rows"),
    ((5, 0, 4), 1, r"rows\[0\].sample"),
    ((6,), b"", "tokens"),
    ((6,), b"\0" * 16, "tokens"),
    ((6,), b"\0" * 19, "tokens"),
    ((6,), struct.pack("<5i", 1, 2, -3, 4, 5), "tokens"),
    ((6,), "\0" * 20, "tokens"),
    ((7, 0, 0), "", r"tensors\[0\].name"),
    ((7, 0, 1), -1, r"tensors\[0\].occurrence"),
    ((7, 0, 2), 1, "tensors"),
    ((7, 1, 2), 0, "tensors"),
    ((7, 1, 2), 2, r"tensors\[1\].micro_batch"),
    ((7, 0, 3), "f16", r"tensors\[0\].nbytes"),
    ((7, 0, 3), "O", r"tensors\[0\].dtype"),
    ((7, 0, 3), "q4_0", r"tensors\[0\].dtype"),
    ((7, 0, 3), "float32", r"tensors\[0\].dtype"),
    ((7, 0, 4), [], r"tensors\[0\].shape"),
    ((7, 0, 4), [1, 1, 1, 2, 4], r"tensors\[0\].shape"),
    ((7, 0, 4), [4, 0], r"tensors\[0\].shape\[1\]"),
    ((7, 0, 4), [-4, -2], r"tensors\[0\].shape\[0\]"),
    ((7, 0, 4), [4, BIG], r"tensors\[0\].shape\[1\]"),
    ((7, 0, 4), [4, -BIG], r"tensors\[0\].shape\[1\]"),
    ((7, 0, 4), [5, 2], r"tensors\[0\].nbytes"),
    ((7, 0, 4), [1 << 20, 1 << 20], r"tensors\[0\].nbytes"),
    ((7, 0, 4), [1 << 27] * 4, r"tensors\[0\].nbytes"),
    ((7, 0, 4), [4.0, 2], r"tensors\[0\].shape\[0\]"),
    ((7, 0, 5), 0, r"tensors\[0\].nbytes"),
    ((7, 0, 5), 31, r"tensors\[0\].nbytes"),
    ((7, 0, 5), 1 << 40, r"tensors\[0\].nbytes"),
    ((8, 0, 0), "s-9", r"opens\[0\].lane"),
    ((8, 0, 1), 3, r"opens\[0\].lane"),
    ((8, 0, 3), b"", r"opens\[0\].client"),
    ((8, 0, 3), "client", r"opens\[0\].client"),
    ((8, 0, 4), 0, r"opens\[0\].n_prompt"),
    ((8, 0, 6, 0), math.nan, r"opens\[0\].sampling.temperature"),
    ((8, 0, 6, 0), math.inf, r"opens\[0\].sampling.temperature"),
    ((8, 0, 6, 0), 1, r"opens\[0\].sampling.temperature"),
    ((8, 0, 6, 20), struct.pack("<id", 3, math.inf), r"opens\[0\].sampling.logit_bias"),
    ((8, 0, 6, 20), struct.pack("<id", -3, 1.0), r"opens\[0\].sampling.logit_bias"),
    ((8, 0, 6, 20), b"\0" * 13, r"opens\[0\].sampling.logit_bias"),
    ((8, 0, 7), [1], r"opens\[0\].stop\[0\]"),
    ((8, 0, 13), b"\0" * 5, r"opens\[0\].known"),
    ((8, 0, 13), struct.pack("<i", -1), r"opens\[0\].known"),
]


@pytest.mark.parametrize(("place", "value", "field"), BATCH_CASES)
def test_one_wrong_field_of_a_batch(place: tuple[int, ...], value: Any, field: str) -> None:
    prefix, header, *payloads = frames_of(Kind.ACTIVATIONS)
    values = inner = msgpack.unpackb(header)
    for index in place[:-1]:
        inner = inner[index]
    inner[place[-1]] = value
    with pytest.raises(ProtocolError, match=rf"^Activations\.{field}[:.\[]"):
        decode([prefix, msgpack.packb(values), *payloads])


@pytest.mark.parametrize(
    "payloads",
    [
        (),
        BATCH_PAYLOADS[:1],
        (*BATCH_PAYLOADS, b""),
        (*BATCH_PAYLOADS, bytes(32)),
        BATCH_PAYLOADS[::-1],
        (b"", BATCH_PAYLOADS[1]),
        (BATCH_PAYLOADS[0] + b"x", BATCH_PAYLOADS[1]),
        (BATCH_PAYLOADS[0][:16], BATCH_PAYLOADS[1]),
    ],
)
def test_payload_frames_that_do_not_match_their_descriptors(payloads: tuple[bytes, ...]) -> None:
    prefix, header, *_ = frames_of(Kind.ACTIVATIONS)
    assert "payload" in str(refusal([prefix, header, *payloads]))


@pytest.mark.parametrize(
    ("kind", "place", "value", "words"),
    [
        (Kind.HELLO, (0,), "downstream", "Hello.role: "),
        (Kind.HELLO, (0,), "client", "Hello.facts: "),
        (Kind.HELLO, (2,), None, "Hello.facts: "),
        (Kind.HELLO, (2, 6), 15, "Hello.facts.layer_end: "),
        (Kind.HELLO, (2, 8), 14, "Hello.facts.layer_end: "),
        (Kind.HELLO, (2, 19, 0, 2), "q8_0", "Hello.facts.offered[0].dtype: "),
        (Kind.WELCOME, (0,), [], "Welcome.stages: "),
        (Kind.ERROR, (0,), "teapot", "Error.code: "),
        (Kind.ERROR, (3,), 1, "Error.retry: "),
        (Kind.GENERATE, (2,), "both", "Generate: wanted exactly one"),
        (Kind.GENERATE, (3,), None, "Generate: wanted exactly one"),
        (Kind.GENERATE, (3, 0, 0), "root", "Generate.messages[0].role: "),
        (Kind.TOKENS, (2,), b"\0\0\0", "Tokens.token_ids: "),
        (Kind.TOKENS, (2,), b"\0\0\0\xff", "Tokens.token_ids: "),
        (Kind.TOKENS, (4,), "eos", "Tokens.finish_reason: "),
        (Kind.TOKENS, (5,), ["a"], "Tokens.timings: "),
        (Kind.TOKENS, (5,), ["a", 1, "a", 2], "Tokens.timings: "),
        (Kind.TOKENS, (5,), [1, "a"], "Tokens.timings: "),
        (Kind.SESSION_CLOSE, (2,), "", "SessionClose.reason: "),
        (Kind.BATCH_DONE, (2, 0), ["s", "native"], "BatchDone.failed[0]: "),
        (Kind.BATCH_DONE, (2, 0, 1), "boom", "BatchDone.failed[0][1]: "),
        (Kind.BATCH_DONE, (1, 1, 3), -1, "BatchDone.tokens[1].token: "),
        (Kind.RESUME, (1,), -1, "Resume.received: "),
        (Kind.KEPT, (1,), "x" * 129, "Kept.session: "),
        (Kind.KEPT, (2,), limits.MAX_PROMPT_TOKENS + 1, "Kept.n_tokens: "),
        (Kind.KV_MATCH, (1,), b"", "KvMatch.links: "),
        (Kind.KV_MATCH, (1,), bytes(33), "KvMatch.links: "),
        (Kind.KV_MATCH, (1,), bytes(32 * limits.MAX_PAGES + 32), "KvMatch.links: "),
        (Kind.KV_MATCH, (2,), 3, "KvMatch.links: "),
        (Kind.KV_MATCH, (2,), -1, "KvMatch.pages: "),
        (Kind.KV_KEEP, (1,), limits.MAX_LANES, "KvKeep.lane: "),
        (Kind.KV_ANSWER, (1,), limits.MAX_PAGES + 1, "KvAnswer.pages: "),
        (Kind.KV_EXPORT, (1,), bytes(31), "KvExport.links: "),
        (Kind.KV_EXPORT, (1,), bytes(33), "KvExport.links: "),
        (Kind.KV_EXPORT, (1,), bytes(32 * limits.MAX_PAGES_AT_ONCE + 32), "KvExport.links: "),
        (Kind.KV_EXPORT, (1,), "x" * 32, "KvExport.links: "),
        (Kind.KV_PAGES, (1,), [], "KvPages.descriptors: "),
        (Kind.KV_PAGES, (1,), [b""], "KvPages.descriptors[0]: "),
        (Kind.KV_PAGES, (1,), [b"a", b"b"], "KvPages.tensors: "),
        (Kind.KV_PAGES, (1,), [b"a"] * (limits.MAX_PAGES_AT_ONCE + 1), "KvPages.descriptors: "),
        (Kind.KV_IMPORT, (1,), [bytes(limits.MAX_DESCRIPTOR_BYTES + 1)], "KvImport.descriptors[0]: "),
        (Kind.KV_IMPORT, (1,), [b"a", b"b"], "KvImport.tensors: "),
        (Kind.KV_IMPORT, (2,), [], "KvImport.tensors: "),
        (Kind.KV_IMPORT, (2, 0, 5), 1 << 40, "KvImport.tensors[0].nbytes: "),
        (Kind.KV_SESSION, (1,), "", "KvSession.session: "),
        (Kind.KV_ADOPT, (1,), b"", "KvAdopt.token_ids: "),
        (Kind.KV_ADOPT, (2,), -1, "KvAdopt.n_prompt: "),
        (Kind.KV_ADOPT, (2,), 4, "KvAdopt.n_prompt: "),
        (Kind.KV_SESSION_REPLY, (3,), 4, "KvSessionReply.n_prompt: "),
        (Kind.KV_SESSION_REPLY, (4,), limits.MAX_PAGE_TOKENS + 1, "KvSessionReply.page_tokens: "),
    ],
)
def test_one_wrong_field_of_other_messages(kind: Kind, place: tuple[int, ...], value: Any, words: str) -> None:
    prefix, header, *payloads = frames_of(kind)
    values = inner = msgpack.unpackb(header)
    for index in place[:-1]:
        inner = inner[index]
    inner[place[-1]] = value
    assert str(refusal([prefix, msgpack.packb(values), *payloads])).startswith(words)


@pytest.mark.parametrize("kind", [Kind.TOKENS, Kind.KV_PAGES, Kind.KV_IMPORT])
def test_a_payload_of_another_size_than_its_descriptor(kind: Kind) -> None:
    prefix, header, payload = frames_of(kind)
    assert "wanted 16 bytes" in str(refusal([prefix, header, bytes(payload)[:-4]]))
    assert "wanted 1 payload frames" in str(refusal([prefix, header]))
    assert "wanted 1 payload frames" in str(refusal([prefix, header, payload, payload]))


def test_no_field_needs_more_nesting_than_the_limit_says() -> None:
    assert max(field.depth for field in MESSAGE_FIELDS.values()) == limits.MAX_NESTING
