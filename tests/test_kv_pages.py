"""Pages: cut and joined as the arrays they came from, refused for the reason that is true."""

from __future__ import annotations

import dataclasses
import io

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_states import BUILD, MODEL, State, plain_layers, states, tiles
from safetensors.numpy import load

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv import limits
from skippy_zmq.kv.descriptor import (
    PageFacts,
    check_fits,
    descriptor_from_dict,
    descriptor_to_dict,
    pack_descriptor,
    unpack_descriptor,
)
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.page import KvPage, cut, join, join_payload, seal, verify
from skippy_zmq.kv.page_file import write_page
from skippy_zmq.topology import LayerRange

STATE = State(plain_layers(0, 4), tuple(range(100, 112)))
PAGE = STATE.page(4, 8)
FACTS = PageFacts(MODEL, BUILD, STATE.layers)


@given(st.data())
def test_pages_of_any_splits_join_into_any_other(data: st.DataObject) -> None:
    state = data.draw(states())
    n, n_layers = len(state.tokens), len(state.layers)
    pages = [
        state.page(first, end, state.layers[low:high])
        for low, high in data.draw(tiles(n_layers))
        for first, end in data.draw(tiles(n))
    ]
    pages = data.draw(st.permutations(pages))
    first = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(first + 1, n))
    low = data.draw(st.integers(0, n_layers - 1))
    wanted = state.layers[low : data.draw(st.integers(low + 1, n_layers))]
    joined = join(pages, wanted, first, end, (state.links.at(first), state.links.at(end)))
    assert bytes(joined.payload) == state.payload(wanted, first, end)
    assert joined.descriptor == state.page(first, end, wanted).descriptor
    verify(joined)


@given(st.data())
def test_a_cut_is_the_part_and_joins_into_the_whole(data: st.DataObject) -> None:
    state = data.draw(states())
    n = len(state.tokens)
    whole = state.page(0, n)
    parts = []
    for first, end in data.draw(tiles(n)):
        for low, high in data.draw(tiles(10)):
            kept = tuple(rows for rows in state.layers if low <= rows.layer < high)
            links = (state.links.at(first), state.links.at(end))
            if not kept:
                with pytest.raises(KvPageError, match="layers: wanted some of"):
                    cut(whole, LayerRange(low, high), (first, end), links)
                continue
            part = cut(whole, LayerRange(low, high), (first, end), links)
            assert bytes(part.payload) == state.payload(kept, first, end)
            parts.append(part)
    assert join(parts, state.layers, 0, n) == whole


def test_layers_are_cut_without_a_copy() -> None:
    assert cut(PAGE) is PAGE
    middle = cut(PAGE, LayerRange(1, 3))
    assert middle.payload.obj is PAGE.payload.obj
    assert join_payload([PAGE], STATE.layers[2:], 4, 8).obj is PAGE.payload.obj


def test_a_join_says_what_is_missing() -> None:
    with pytest.raises(KvPageError, match="layer 0, token 8: no page holds it"):
        join([PAGE], STATE.layers, 4, 9)
    half = STATE.page(4, 8, STATE.layers[:2])
    with pytest.raises(KvPageError, match="layer 2, token 4: no page holds it"):
        join([half], STATE.layers, 4, 8)
    with pytest.raises(KvPageError, match="from 0"):
        join([], STATE.layers, 4, 8)
    with pytest.raises(KvPageError, match="token chain at 5: wanted its link"):
        cut(PAGE, tokens=(5, 8))


def test_pages_of_different_texts_models_or_rows_are_not_joined() -> None:
    other = State(STATE.layers, (1, *STATE.tokens[1:]))
    with pytest.raises(KvPageError, match=r"token chain at 8: wanted .* it belongs to other tokens"):
        join([PAGE, other.page(8, 12)], STATE.layers, 4, 12)
    follower = STATE.page(8, 12)
    alien = KvPage(dataclasses.replace(follower.descriptor, build="another"), follower.payload)
    with pytest.raises(KvPageError, match=r"build: wanted llama.cpp 0.5.0 as the other pages, got another"):
        join([PAGE, alien], STATE.layers, 4, 12)
    with pytest.raises(KvPageError, match=r"token chain at 4: wanted"):
        join([PAGE], STATE.layers, 4, 8, (bytes(32), bytes(32)))
    wider = plain_layers(0, 4, row_bytes=16)
    with pytest.raises(KvPageError, match="wanted LayerRows"):
        join([PAGE], wider, 4, 8)


@given(states(), st.data())
def test_any_flipped_bit_of_the_payload_is_found(state: State, data: st.DataObject) -> None:
    page = state.page(0, len(state.tokens))
    payload = bytearray(page.payload)
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(KvPageError, match=r"checksum: wanted .* damaged"):
        verify(KvPage(page.descriptor, memoryview(payload)))


@pytest.mark.parametrize(
    ("change", "value"),
    [("model", "cd" * 32), ("build", "b"), ("link_before", bytes(32)), ("link_after", bytes(32)), ("first", 3)],
)
def test_a_changed_descriptor_is_found(change: str, value: object) -> None:
    changes = {change: value} | ({"end": 7} if change == "first" else {})
    with pytest.raises(KvPageError, match="checksum"):
        verify(KvPage(dataclasses.replace(PAGE.descriptor, **changes), PAGE.payload))


def test_the_descriptor_of_another_page_is_found() -> None:
    with pytest.raises(KvPageError, match="checksum"):
        verify(KvPage(STATE.page(8, 12).descriptor, PAGE.payload))


def test_a_payload_cut_short_or_too_long_is_refused() -> None:
    for payload in (PAGE.payload[:-1], memoryview(bytes(PAGE.payload) + b"x")):
        with pytest.raises(KvPageError, match=f"payload: wanted 256 bytes, got {payload.nbytes}"):
            KvPage(PAGE.descriptor, payload)


def test_a_page_fits_its_own_stage() -> None:
    check_fits(PAGE.descriptor, FACTS, n_ctx=8, first=4, end=8, link_before=STATE.links.at(4))


@pytest.mark.parametrize(
    ("facts", "where", "message"),
    [
        (dataclasses.replace(FACTS, model="cd" * 32), {}, f"model: wanted {'cd' * 32}, got {MODEL}"),
        (dataclasses.replace(FACTS, build="llama.cpp 0.6.0"), {}, "build: wanted llama.cpp 0.6.0, got llama.cpp 0.5.0"),
        (dataclasses.replace(FACTS, layers=plain_layers(4, 8)), {}, "layers: wanted 4:8, got 0:4"),
        (dataclasses.replace(FACTS, layers=plain_layers(0, 3)), {}, "layers: wanted 0:3, got 0:4"),
        (
            dataclasses.replace(FACTS, layers=tuple(LayerRows(n, "q8_0", "f16", 34, 8) for n in range(4))),
            {},
            "layer 0: k_type: wanted q8_0, got f16",
        ),
        (
            dataclasses.replace(FACTS, layers=plain_layers(0, 4, row_bytes=16)),
            {},
            "layer 0: k_row_bytes: wanted 16, got 8",
        ),
        (
            dataclasses.replace(FACTS, layers=tuple(LayerRows(n, "f16", "f16", 8, 8, True) for n in range(4))),
            {},
            "layer 0: v_transposed: wanted True, got False",
        ),
        (FACTS, {"n_ctx": 7}, "end: wanted at most 7, the context of a lane, got 8"),
        (FACTS, {"first": 0}, "first: wanted 0, got 4"),
        (FACTS, {"end": 12}, "end: wanted 12, got 8"),
        (FACTS, {"link_before": bytes(32)}, f"link_before: wanted {'00' * 32}, got {STATE.links.at(4).hex()}"),
        (FACTS, {"link_after": bytes(32)}, f"link_after: wanted {'00' * 32}, got {STATE.links.at(8).hex()}"),
    ],
)
def test_a_page_that_does_not_fit_is_refused_with_the_reason(
    facts: PageFacts, where: dict[str, object], message: str
) -> None:
    with pytest.raises(KvPageError) as caught:
        check_fits(PAGE.descriptor, facts, **where)
    assert str(caught.value) == f"KV page of layers 0:4, tokens 4:8: {message}"
    assert caught.value.code == "kv_page"


def test_a_page_of_another_split_fits_where_it_shares_layers() -> None:
    check_fits(PAGE.descriptor, dataclasses.replace(FACTS, layers=plain_layers(2, 9)), all_layers=False)
    with pytest.raises(KvPageError, match="layers: wanted 4:9, got 0:4"):
        check_fits(PAGE.descriptor, dataclasses.replace(FACTS, layers=plain_layers(4, 9)), all_layers=False)
    wider = dataclasses.replace(FACTS, layers=plain_layers(3, 9, row_bytes=16))
    with pytest.raises(KvPageError, match="layer 3: k_row_bytes"):
        check_fits(PAGE.descriptor, wider, all_layers=False)


@given(states())
def test_a_descriptor_travels(state: State) -> None:
    descriptor = state.page(0, len(state.tokens)).descriptor
    assert descriptor_from_dict(descriptor_to_dict(descriptor)) == descriptor
    assert unpack_descriptor(pack_descriptor(descriptor)) == descriptor


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "version: wanted 1, got 2"),
        ("version", True, "version: wanted 1, got True"),
        ("model", "", r"model: wanted a text of 1\.\.512 bytes, got no text"),
        ("model", "é" * 257, r"model: wanted a text of 1\.\.512 bytes"),
        ("model", b"x", "model: wanted a text"),
        ("build", "a\nb", "build: wanted printable characters"),
        ("layers", [], "layers: wanted an array of 1..1024"),
        ("layers", [[0, "f16", "f16", 8, 8]], "layers: wanted arrays of layer, k_type"),
        ("layers", [[1, "f16", "f16", 8, 8, False]] * 2, r"layers: wanted 2\.\.1023, got 1"),
        ("layers", [[1024, "f16", "f16", 8, 8, False]], r"layers: wanted 0\.\.1023, got 1024"),
        ("layers", [[0, "q6_K", "f16", 8, 8, False]], "layer 0: k_type: wanted one of f32"),
        ("layers", [[0, ["f16"], "f16", 8, 8, False]], "layer 0: k_type: wanted one of f32"),
        ("layers", [[0, "q8_0", "f16", 33, 8, False]], "layer 0: k_row_bytes: wanted a multiple of 34"),
        ("layers", [[0, "f16", "f16", 0, 8, False]], r"layer 0: k_row_bytes: wanted 1\.\."),
        ("layers", [[0, "f16", "f16", 8, 1 << 25, False]], r"layer 0: v_row_bytes: wanted 0\.\.16777216"),
        ("layers", [[0, "f16", "f16", 8, -8, False]], r"layer 0: v_row_bytes: wanted 0\.\."),
        ("layers", [[0, "f16", "f16", 8, 8, 1]], "layer 0: v_transposed: wanted a boolean, got 1"),
        ("layers", [[0, "f16", "q8_0", 8, 34, True]], "layer 0: v_type: wanted a type without blocks"),
        ("first", -1, "first: wanted 0..2147483647, got -1"),
        ("first", 4.0, "first: wanted"),
        ("first", 1 << 80, "first: wanted 0..2147483647, got a number of 81 bits"),
        ("end", 4, r"end: wanted 5\.\."),
        ("end", 4 + (1 << 20) + 1, r"end: wanted 5\.\.1048580"),
        ("end", 9, "payload_bytes: wanted 320, got 256"),
        ("first", 0, "link_before: wanted the root at token 0 only"),
        ("link_before", b"short", "link_before: wanted 32 bytes"),
        ("link_after", "x" * 32, "link_after: wanted 32 bytes"),
        ("payload_bytes", 255, "payload_bytes: wanted 256, got 255"),
        ("checksum", b"", "checksum: wanted 16 bytes, got no bytes"),
    ],
)
def test_no_field_of_a_descriptor_is_trusted(field: str, value: object, message: str) -> None:
    values = descriptor_to_dict(PAGE.descriptor) | {field: value}
    with pytest.raises(KvPageError, match=message):
        descriptor_from_dict(values)
    with pytest.raises(KvPageError):
        unpack_descriptor(msgpack.packb(values) if value != 1 << 80 else b"\xc1")


def test_a_page_that_would_be_too_large_is_refused() -> None:
    values = descriptor_to_dict(PAGE.descriptor)
    row = limits.MAX_ROW_BYTES
    values |= {"layers": [[0, "f16", "f16", row, row, False]], "end": 4 + 129, "payload_bytes": 129 * 2 * row}
    with pytest.raises(KvPageError, match="layers and tokens: wanted at most 4294967296 bytes, got 4328521728"):
        descriptor_from_dict(values)


def test_fields_that_are_missing_or_unknown_are_refused() -> None:
    values = descriptor_to_dict(PAGE.descriptor)
    for wrong in ({**values, "more": 1}, {key: value for key, value in values.items() if key != "end"}, {}, None, 7):
        with pytest.raises(KvPageError, match="wanted"):
            descriptor_from_dict(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_descriptor_or_a_refusal(data: bytes) -> None:
    with pytest.raises(KvPageError):
        unpack_descriptor(data)


@given(st.data())
def test_a_changed_byte_of_a_descriptor_never_passes(data: st.DataObject) -> None:
    packed = bytearray(pack_descriptor(PAGE.descriptor))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(KvPageError):
        verify(KvPage(unpack_descriptor(bytes(packed)), PAGE.payload))


@given(states())
def test_a_page_file_is_safetensors_with_a_tensor_for_each_block(state: State) -> None:
    n = len(state.tokens)
    file = io.BytesIO()
    assert write_page(file, state.page(0, n)) == len(file.getvalue())
    tensors = load(file.getvalue())
    for rows in state.layers:
        k = tensors.pop(f"layers.{rows.layer}.k")
        assert (k == state.k[rows.layer]).all()
        if not rows.v_row_bytes:
            continue
        v = tensors.pop(f"layers.{rows.layer}.v")
        if rows.v_transposed:
            size = {"f16": 2, "f32": 4}[rows.v_type]
            v = v.reshape(-1, n, size).transpose(1, 0, 2).reshape(n, -1)
        assert (v == state.v[rows.layer]).all()
    assert not tensors


def test_a_payload_with_gaps_is_refused() -> None:
    with pytest.raises(KvPageError, match="wanted contiguous bytes"):
        seal(FACTS, 4, 8, STATE.links.at(4), STATE.links.at(8), memoryview(bytes(512))[::2])
