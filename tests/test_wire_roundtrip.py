"""What is sent is what arrives: every message, at its limits too, with payloads that are never copied."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_values import ALL, BATCH, BATCH_PAYLOADS, EXAMPLES, FACTS, example_payloads

from skippy_zmq.errors import RequestError
from skippy_zmq.wire import limits
from skippy_zmq.wire.batch import micro_batches
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.messages import (
    GENERATION,
    MESSAGE_TYPES,
    NO_TIMES,
    Activations,
    BatchFailed,
    ChatMessage,
    CrossingSpec,
    Error,
    Generate,
    Kind,
    KvAdopt,
    KvImport,
    KvMatch,
    KvSessionReply,
    SamplingParams,
    SessionOpen,
    SessionRows,
    TensorDescriptor,
    Tokens,
    Welcome,
)


@pytest.mark.parametrize("kind", Kind)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_message_round_trips(kind: Kind, data: st.DataObject) -> None:
    message, payloads = data.draw(ALL[kind])
    frames = encode(message, payloads)
    assert bytes(frames[0]) == bytes([GENERATION, kind])
    back, views = decode(frames)
    assert back == message
    assert type(back) is MESSAGE_TYPES[kind]
    assert [bytes(view) for view in views] == payloads


@pytest.mark.parametrize("kind", Kind)
def test_frames_may_be_views(kind: Kind) -> None:
    frames = [memoryview(bytes(frame)) for frame in encode(EXAMPLES[kind], example_payloads(kind))]
    assert decode(frames)[0] == EXAMPLES[kind]


def test_payloads_are_views_of_the_callers_memory_both_ways() -> None:
    first, second = bytearray(32), np.zeros((3, 4), np.float32)
    frames = encode(BATCH, [memoryview(first), second.data])
    _, views = decode(frames)
    first[0] = 7
    second[0, 0] = 1.0
    assert views[0][0] == 7
    assert bytes(views[1][:4]) == struct.pack("<f", 1.0)


def test_whole_numbers_serve_as_floats() -> None:
    message = Generate("r", 1, prompt="", sampling=SamplingParams(temperature=1, logit_bias=((3, 1),)))
    back, _ = decode(encode(message))
    assert back == message
    assert isinstance(back, Generate)
    assert type(back.sampling.temperature) is float


def _largest_batch() -> tuple[Activations, list[bytes]]:
    def name(tag: str, index: int) -> str:
        return f"{tag}{index}".ljust(limits.MAX_NAME_BYTES, "x")

    stops = tuple("s" * limits.MAX_STOP_BYTES for _ in range(limits.MAX_STOP_STRINGS))
    sampling = SamplingParams(
        dry_sequence_breakers=stops,
        logit_bias=tuple((index, 0.5) for index in range(limits.MAX_LOGIT_BIAS)),
        grammar="g" * limits.MAX_GRAMMAR_BYTES,
        seed=limits.MAX_SEED,
    )
    lanes = range(limits.MAX_LANES)
    n_rows = limits.MAX_BATCH_ROWS // limits.MAX_LANES
    prefix = struct.pack("<i", limits.MAX_TOKEN_ID) * limits.MAX_PROMPT_TOKENS
    rows = tuple(SessionRows(name("session", lane), lane, limits.MAX_POSITION - n_rows, n_rows, True) for lane in lanes)
    opens = tuple(
        SessionOpen(
            row.session,
            row.lane,
            name("request", row.lane),
            b"c" * limits.MAX_ROUTING_ID_BYTES,
            limits.MAX_PROMPT_TOKENS,
            limits.MAX_POSITION,
            sampling,
            stops,
            True,
            b"" if row.lane else prefix,
            limits.MAX_PROMPT_TOKENS,
            True,
            limits.MAX_POSITION,
            b"" if row.lane else prefix,
        )
        for row in rows
    )
    tensors = tuple(TensorDescriptor(name("t", n), n, 0, "i8", (1, 1, 1, 1), 1) for n in range(limits.MAX_TENSORS))
    tokens = struct.pack("<i", limits.MAX_TOKEN_ID) * limits.MAX_BATCH_ROWS
    largest = Activations(
        limits.MAX_INT64, name("p", 0), 0, limits.MAX_LAYERS, "prefill", rows, tokens, tensors, opens, NO_TIMES
    )
    return largest, [b"x"] * limits.MAX_TENSORS


def test_a_batch_with_every_field_at_its_limit_fits() -> None:
    message, payloads = _largest_batch()
    back, _ = decode(encode(message, payloads))
    assert back == message


def test_the_tokens_of_all_sessions_of_a_batch_are_limited_together() -> None:
    """However few sessions: what one of them may have is no measure of what a header can hold."""
    message, payloads = _largest_batch()
    first, second, *others = message.opens
    one_more = msgspec.structs.replace(message, opens=(first, dataclasses.replace(second, known=bytes(4)), *others))
    with pytest.raises(ValueError, match=rf"opens: wanted at most {limits.MAX_OPENS_TOKENS} tokens"):
        encode(one_more, payloads)
    failed = BatchFailed(1, (first.session,), one_more.opens, "native", "")
    with pytest.raises(ValueError, match=rf"opens: wanted at most {limits.MAX_OPENS_TOKENS} tokens"):
        encode(failed)


def test_facts_of_the_longest_pipeline_fit() -> None:
    spec = CrossingSpec("n" * limits.MAX_NAME_BYTES, limits.MAX_TENSORS - 1, "bf16", limits.MAX_PAYLOAD_BYTES)
    many = (spec,) * limits.MAX_CROSSING_TENSORS
    facts = dataclasses.replace(FACTS, wanted=many, offered=many)
    message = Welcome((facts,) * limits.MAX_STAGES, True)
    assert decode(encode(message))[0] == message


def test_the_largest_page_fits() -> None:
    size = limits.MAX_PAYLOAD_BYTES
    message = KvImport("r", (bytes(limits.MAX_DESCRIPTOR_BYTES),), (TensorDescriptor.of_page(size),))
    back, (view,) = decode(encode(message, [memoryview(bytes(size))]))
    assert back == message
    assert view.nbytes == size


def test_the_longest_session_fits() -> None:
    name, tokens = "5e" * 32, (limits.MAX_TOKEN_ID,) * limits.MAX_PROMPT_TOKENS
    match = KvMatch("s", bytes(limits.MAX_PAGES * limits.LINK_BYTES), limits.MAX_PAGES)
    reply = KvSessionReply("r", name, tokens, len(tokens), limits.MAX_PAGE_TOKENS)
    for message in (match, reply, KvAdopt("r", tokens, len(tokens))):
        assert decode(encode(message))[0] == message


@pytest.mark.parametrize(
    "message",
    [
        Generate("r", 1, prompt="é" * (limits.MAX_TEXT_BYTES // 2)),
        Generate("r", 1, token_ids=(limits.MAX_TOKEN_ID,) * limits.MAX_PROMPT_TOKENS),
        Generate("r", 1, messages=(ChatMessage("user", "x" * (limits.MAX_TEXT_BYTES // 2)),) * 2),
        Generate("r", 1, messages=(ChatMessage("user", ""),) * limits.MAX_CHAT_MESSAGES),
    ],
    ids=["prompt", "token ids", "chat bytes", "chat messages"],
)
def test_the_longest_prompts_fit(message: Generate) -> None:
    assert decode(encode(message))[0] == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Generate("r", 1, prompt="x" * (limits.MAX_TEXT_BYTES + 1)), "prompt"),
        (Generate("r", 1, prompt="é" * (limits.MAX_TEXT_BYTES // 2) + "x"), "prompt"),
        (Generate("r", 1, token_ids=(1,) * (limits.MAX_PROMPT_TOKENS + 1)), "token_ids"),
        (Generate("r", 1, token_ids=(1, -1)), "token_ids"),
        (Generate("r", 1, token_ids=(1, 1 << 31)), "token_ids"),
        (Generate("r", 1, token_ids=(1, True)), "token_ids"),
        (Generate("r", 1, messages=(ChatMessage("user", "x" * (limits.MAX_TEXT_BYTES // 2 + 1)),) * 2), "messages"),
        (Generate("r", 1), "exactly one"),
        (Generate("r", 1, prompt="a", token_ids=(1,)), "exactly one"),
        (Generate("r", 0, prompt="a"), "max_tokens"),
        (Generate("r", True, prompt="a"), "max_tokens"),
        (Generate("r", 1, prompt="a", stop=("",)), r"stop\[0\]"),
        (Generate("r", 1, prompt="a", stop=("x",) * (limits.MAX_STOP_STRINGS + 1)), "stop"),
        (Generate("r", 1, prompt="a", sampling=SamplingParams(top_p=float("nan"))), r"sampling\.top_p"),
        (Generate("r", 1, prompt="a", sampling=SamplingParams(temperature=10**400)), r"sampling\.temperature"),
        (Generate("r", 1, prompt="a", sampling=SamplingParams(logit_bias=((1, 10**400),))), "logit_bias"),
        (Generate("r", 1, prompt="a", sampling=SamplingParams(seed=limits.MAX_SEED + 1)), "seed"),
        (Generate("r", 1, prompt="\ud800"), "Unicode"),
    ],
)
def test_a_users_mistake_is_a_request_error_before_anything_is_sent(message: Generate, field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        encode(message)
    assert caught.value.code == "invalid_request"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("message", "payloads"),
    [
        (Error("no such code", "x"), ()),
        (Tokens("r", -1, (), ""), ()),
        (Tokens("r", 0, (), "", timings={"x": 1.5}), ()),  # type: ignore[dict-item]
        (EXAMPLES[Kind.PING], (b"x",)),
        (BATCH, ()),
        (BATCH, BATCH_PAYLOADS[:1]),
        (BATCH, (*BATCH_PAYLOADS, b"x")),
        (BATCH, (BATCH_PAYLOADS[0], BATCH_PAYLOADS[1][:-1])),
        (FACTS, ()),
    ],
)
def test_our_own_mistake_is_a_value_error(message: Any, payloads: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match=r"wanted|not a message"):
        encode(message, payloads)


def _rows(*pairs: tuple[int, int]) -> list[SessionRows]:
    return [SessionRows(f"s{lane}", lane, 0, n_rows, False) for lane, n_rows in pairs]


@pytest.mark.parametrize(
    ("rows", "spans"),
    [
        ([(0, 1)], [(0, 1)]),
        ([(0, 1), (1, 1), (2, 1)], [(0, 3)]),
        ([(3, 4), (4, 4)], [(0, 2)]),
        ([(0, 1), (2, 1)], [(0, 1), (1, 2)]),
        ([(1, 1), (0, 1)], [(0, 1), (1, 2)]),
        ([(0, 2), (1, 1), (2, 1)], [(0, 1), (1, 3)]),
        ([(0, 1), (1, 1), (3, 1), (4, 1), (5, 2)], [(0, 2), (2, 4), (4, 5)]),
    ],
)
def test_micro_batches(rows: list[tuple[int, int]], spans: list[tuple[int, int]]) -> None:
    assert micro_batches(_rows(*rows)) == spans
