"""Values for the tests of the wire: one plain example of every message, and hypothesis strategies for all of them."""

from __future__ import annotations

import itertools
import struct
from typing import Any

from hypothesis import strategies as st

from skippy_zmq.wire import limits, messages
from skippy_zmq.wire.messages import (
    Accepted,
    Activations,
    BatchDone,
    BatchTimes,
    Cancel,
    ChatMessage,
    CrossingSpec,
    Detokenize,
    Detokenized,
    Error,
    Generate,
    Hello,
    Kept,
    Kind,
    KvAdopt,
    KvAnswer,
    KvExport,
    KvImport,
    KvImported,
    KvKeep,
    KvMatch,
    KvPages,
    KvSession,
    KvSessionReply,
    NextToken,
    Ping,
    Pong,
    Ready,
    Resume,
    SampledToken,
    SamplingParams,
    SessionClose,
    SessionOpen,
    SessionRows,
    StageFacts,
    Stats,
    StatsReply,
    TensorDescriptor,
    Tokenize,
    Tokenized,
    Tokens,
    TokensEach,
    Welcome,
)

FACTS = StageFacts(
    stage="stage-0-5e1f",
    endpoint="ipc:///run/stage-0.sock",
    build="llama.cpp 0.5.0",
    model="00ff" * 8,
    model_name="tiny",
    architecture="llama",
    layer_start=0,
    layer_end=15,
    n_layers=30,
    n_vocab=49152,
    lanes=8,
    n_ctx=2048,
    n_batch=512,
    n_ubatch=512,
    cache_type_k="f16",
    cache_type_v="f16",
    flash_attn="on",
    swa_full=True,
    wanted=(),
    offered=(CrossingSpec("l_out-14", 0, "f32", 2304),),
    weights_bytes=50_000_000,
    kv_bytes=1 << 33,
    compute_bytes=0,
    threads=2,
    row_class_low=2,
    row_class_high=12,
    reproducible=True,
    kv_page_tokens=64,
    kv_page_bytes=64 * 1536,
    window_rows=4,
    revision="owner/name@" + "0f" * 20,
)
_SAMPLING = SamplingParams(temperature=0.8, logit_bias=((5, -1.5), (7, 2.0)), seed=42, grammar='root ::= "a"')
BATCH = Activations(
    batch=12,
    producer="stage-0-5e1f",
    layer_start=0,
    layer_end=15,
    phase="mixed",
    rows=(
        SessionRows("s-1", 0, 10, 1, True),
        SessionRows("s-2", 1, 20, 1, True),
        SessionRows("s-3", 4, 0, 3, False),
    ),
    tokens=struct.pack("<5i", 100, 200, 1, 2, 3),
    tensors=(
        TensorDescriptor("l_out-14", 0, 0, "f32", (4, 2), 32),
        TensorDescriptor("l_out-14", 0, 1, "f32", (4, 3), 48),
    ),
    opens=(
        SessionOpen("s-3", 4, "r-3", b"client-9", 3, 64, _SAMPLING, ("\n\n",), False, bytes(8), 1, True, 2, bytes(12)),
    ),
    times=BatchTimes(9_000, 8_500, 8_500),
)
BATCH_PAYLOADS = (bytes(range(32)), bytes(range(48)))

PAGE = TensorDescriptor("page", 0, 0, "i8", (16,), 16)

EXAMPLES: dict[Kind, Any] = {
    Kind.HELLO: Hello("upstream", "stage-0-5e1f", FACTS),
    Kind.WELCOME: Welcome((FACTS,), False),
    Kind.READY: Ready((FACTS,)),
    Kind.ERROR: Error("busy", "8 lanes and 64 places in the queue are taken", "r-1", True),
    Kind.PING: Ping(77),
    Kind.PONG: Pong(77, True),
    Kind.GENERATE: Generate(
        "r-1",
        32,
        messages=(ChatMessage("user", "Grüße 🦙"),),
        sampling=_SAMPLING,
        stop=("###",),
        keep=True,
        session="5e" * 32,
    ),
    Kind.CANCEL: Cancel("r-1"),
    Kind.ACCEPTED: Accepted("r-1", (1, 2, 49151), 2),
    Kind.TOKENS: Tokens(
        "r-1",
        3,
        (17, 18),
        " lama",
        "stop",
        {"prefill": 12_000, "decode": 90_000},
        (TensorDescriptor("logits", 0, 0, "f32", (4,), 16),),
    ),
    Kind.TOKENS_EACH: TokensEach((NextToken("r-1", 3, 17, " lama"), NextToken("r-2", 0, 49151, ""))),
    Kind.RESUME: Resume("r-1", 17),
    Kind.KEPT: Kept("r-1", "5e" * 32, 130),
    Kind.ACTIVATIONS: BATCH,
    Kind.SESSION_CLOSE: SessionClose("s-1", 0, "cancelled"),
    Kind.BATCH_DONE: BatchDone(
        12,
        (SampledToken("s-1", 0, 11, 300, ""), SampledToken("s-2", 1, 21, 2, "stop")),
        (("s-3", "native", "llama_decode returned -3"),),
        BatchTimes(18_000, 17_000, 9_000),
    ),
    Kind.BATCH_FAILED: messages.BatchFailed(13, ("s-3",), BATCH.opens, "native", "llama_decode returned -3"),
    Kind.KV_MATCH: KvMatch("s-1", bytes(range(64)), 1, b"client-9"),
    Kind.KV_KEEP: KvKeep("s-1", 0, 3),
    Kind.KV_ANSWER: KvAnswer("s-1", 2),
    Kind.TOKENIZE: Tokenize("r-2", "hello", False, True),
    Kind.TOKENIZED: Tokenized("r-2", (31, 32)),
    Kind.DETOKENIZE: Detokenize("r-3", (31, 32)),
    Kind.DETOKENIZED: Detokenized("r-3", b"\xf0\x9f\xa6"),
    Kind.STATS: Stats("r-4"),
    Kind.STATS_REPLY: StatsReply("r-4", FACTS, {"batches.run": 12, "now.lanes_used": 3}),
    Kind.KV_EXPORT: KvExport("r-5", bytes(range(64))),
    Kind.KV_PAGES: KvPages("r-5", (b"\x80",), (PAGE,)),
    Kind.KV_IMPORT: KvImport("r-6", (b"\x80",), (PAGE,)),
    Kind.KV_IMPORTED: KvImported("r-6"),
    Kind.KV_SESSION: KvSession("r-7", "5e" * 32),
    Kind.KV_ADOPT: KvAdopt("r-8", (1, 2, 3), 2),
    Kind.KV_SESSION_REPLY: KvSessionReply("r-7", "5e" * 32, (1, 2, 3), 2, 64),
}


def example_payloads(kind: Kind) -> tuple[bytes, ...]:
    if kind in (Kind.TOKENS, Kind.KV_PAGES, Kind.KV_IMPORT):
        return (bytes(range(16)),)
    return BATCH_PAYLOADS if kind is Kind.ACTIVATIONS else ()


def texts(low: int, high: int) -> st.SearchStrategy[str]:
    """Texts whose UTF-8 form has ``low`` to ``high`` bytes, kept short unless at the very limit."""
    short = st.text(st.characters(exclude_categories=["Cs"]), min_size=low, max_size=min(high // 4, 20))
    return short | st.just("x" * high) if high <= 4096 else short


NAMES = texts(1, limits.MAX_NAME_BYTES)
LABELS = texts(1, limits.MAX_LABEL_BYTES)
POSITIONS = st.integers(0, limits.MAX_POSITION)
COUNTS = st.integers(0, limits.MAX_INT64)
SIGNED = st.integers(-limits.MAX_POSITION, limits.MAX_POSITION)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TOKEN_ID = st.integers(0, limits.MAX_TOKEN_ID)
IDS = st.lists(TOKEN_ID, max_size=20).map(tuple)
SOME_IDS = st.lists(TOKEN_ID, min_size=1, max_size=20).map(tuple)
STOPS = st.lists(texts(1, limits.MAX_STOP_BYTES), max_size=limits.MAX_STOP_STRINGS).map(tuple)
CODES = st.sampled_from(sorted(limits.ERROR_CODES))
DTYPES = st.sampled_from(sorted(limits.DTYPE_BYTES))
FINISH = st.sampled_from(["", "stop", "length", "cancelled"])

SPECS = st.builds(
    CrossingSpec,
    NAMES,
    st.integers(0, limits.MAX_TENSORS - 1),
    DTYPES,
    st.integers(0, limits.MAX_PAYLOAD_BYTES),
    st.integers(0, limits.MAX_PAYLOAD_BYTES),
)
SAMPLING = st.builds(
    SamplingParams,
    **dict.fromkeys(
        [
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "top_n_sigma",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "dry_multiplier",
            "dry_base",
            "xtc_probability",
            "xtc_threshold",
            "mirostat_tau",
            "mirostat_eta",
        ],
        FLOATS,
    ),
    **dict.fromkeys(["top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n"], SIGNED),
    mirostat=st.integers(0, 2),
    dry_sequence_breakers=STOPS,
    logit_bias=st.lists(st.tuples(TOKEN_ID, FLOATS), max_size=5).map(tuple),
    grammar=texts(0, limits.MAX_GRAMMAR_BYTES),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, limits.MAX_SEED),
)


@st.composite
def facts(draw: st.DrawFn) -> StageFacts:
    n_layers = draw(st.integers(1, limits.MAX_LAYERS))
    end = draw(st.integers(1, n_layers))
    specs = st.lists(SPECS, max_size=3).map(tuple)
    return draw(
        st.builds(
            StageFacts,
            **dict.fromkeys(["stage", "model", "architecture", "cache_type_k", "cache_type_v", "flash_attn"], NAMES),
            **dict.fromkeys(["endpoint", "build", "model_name"], LABELS),
            layer_start=st.integers(0, end - 1),
            layer_end=st.just(end),
            n_layers=st.just(n_layers),
            n_vocab=st.integers(1, limits.MAX_TOKEN_ID),
            lanes=st.integers(1, limits.MAX_LANES),
            n_ctx=st.integers(1, limits.MAX_POSITION),
            n_batch=st.integers(1, limits.MAX_POSITION),
            n_ubatch=st.integers(1, limits.MAX_BATCH_ROWS),
            row_class_low=st.integers(1, 4),
            row_class_high=st.integers(4, limits.MAX_BATCH_ROWS),
            swa_full=st.booleans(),
            wanted=specs,
            offered=specs,
            **dict.fromkeys(["weights_bytes", "kv_bytes", "compute_bytes", "kv_page_bytes"], COUNTS),
            threads=st.integers(0, limits.MAX_POSITION),
            kv_page_tokens=st.integers(0, limits.MAX_PAGE_TOKENS),
            window_rows=st.integers(1, limits.MAX_BATCH_ROWS),
            revision=st.just("") | LABELS,
        )
    )


TIMES = st.builds(BatchTimes, COUNTS, COUNTS, COUNTS)
STAGES = st.lists(facts(), min_size=1, max_size=3).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Activations, list[bytes]]:
    """A batch and its payloads; every micro-batch has zero or more tensors."""
    lanes = draw(st.lists(st.integers(0, limits.MAX_LANES - 1), min_size=1, max_size=8, unique=True))
    sessions = draw(st.lists(NAMES, min_size=len(lanes), max_size=len(lanes), unique=True))
    rows = tuple(
        SessionRows(session, lane, draw(st.integers(0, 1 << 30)), draw(st.integers(1, 20)), draw(st.booleans()))
        for session, lane in zip(sessions, lanes, strict=True)
    )
    total = sum(row.n_rows for row in rows)
    micro_batches = 1 + sum(b.lane != a.lane + 1 or b.n_rows != a.n_rows for a, b in itertools.pairwise(rows))
    tensors: list[TensorDescriptor] = []
    for index in range(micro_batches):
        for occurrence in range(draw(st.integers(0, 2))):
            shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
            dtype = draw(DTYPES)
            size = limits.DTYPE_BYTES[dtype]
            for dim in shape:
                size *= dim
            tensors.append(TensorDescriptor(draw(NAMES), occurrence, index, dtype, shape, size))
    opened = draw(st.lists(st.sampled_from(rows), max_size=2, unique=True))
    prefix, known = draw(IDS), draw(IDS)
    opens = tuple(
        SessionOpen(
            row.session,
            row.lane,
            draw(NAMES),
            draw(st.binary(min_size=1, max_size=limits.MAX_ROUTING_ID_BYTES)),
            draw(st.integers(1, limits.MAX_PROMPT_TOKENS)),
            draw(st.integers(1, limits.MAX_POSITION)),
            draw(SAMPLING),
            draw(STOPS),
            draw(st.booleans()),
            prefix=struct.pack(f"<{len(prefix)}i", *prefix),
            plain=draw(st.integers(0, limits.MAX_PROMPT_TOKENS)),
            keep=draw(st.booleans()),
            received=draw(POSITIONS),
            known=struct.pack(f"<{len(known)}i", *known),
        )
        for row in opened
    )
    start = draw(st.integers(0, limits.MAX_LAYERS - 1))
    message = Activations(
        draw(COUNTS),
        draw(NAMES),
        start,
        draw(st.integers(start + 1, limits.MAX_LAYERS)),
        draw(st.sampled_from(["prefill", "decode", "replay", "mixed"])),
        rows,
        struct.pack(f"<{total}i", *(draw(TOKEN_ID) for _ in range(total))),
        tuple(tensors),
        opens,
        draw(TIMES),
    )
    return message, [draw(st.binary(min_size=t.nbytes, max_size=t.nbytes)) for t in tensors]


_CHAT = st.builds(ChatMessage, st.sampled_from(["system", "developer", "user", "assistant", "tool"]), texts(0, 1 << 20))
_PROMPTS: st.SearchStrategy[dict[str, Any]] = (
    st.fixed_dictionaries({"prompt": texts(0, limits.MAX_TEXT_BYTES)})
    | st.fixed_dictionaries({"messages": st.lists(_CHAT, min_size=1, max_size=3).map(tuple)})
    | st.fixed_dictionaries({"token_ids": SOME_IDS})
)


@st.composite
def generates(draw: st.DrawFn) -> Generate:
    limit = draw(st.integers(1, limits.MAX_POSITION))
    rest: dict[str, Any] = {"sampling": draw(SAMPLING), "stop": draw(STOPS), "timeout_ms": draw(COUNTS)}
    rest |= {"logits": draw(st.booleans()), "keep": draw(st.booleans())}
    rest["session"] = draw(texts(0, limits.MAX_NAME_BYTES))
    return Generate(draw(NAMES), limit, **draw(_PROMPTS), **rest)


@st.composite
def matches(draw: st.DrawFn) -> KvMatch:
    count = draw(st.integers(1, 5))
    size = count * limits.LINK_BYTES
    links = draw(st.binary(min_size=size, max_size=size))
    owner = draw(st.binary(max_size=limits.MAX_ROUTING_ID_BYTES))
    return KvMatch(draw(NAMES), links, draw(st.integers(0, count)), owner)


@st.composite
def adoptions(draw: st.DrawFn) -> KvAdopt:
    token_ids = draw(SOME_IDS)
    return KvAdopt(draw(NAMES), token_ids, draw(st.integers(0, len(token_ids))))


@st.composite
def session_replies(draw: st.DrawFn) -> KvSessionReply:
    token_ids = draw(SOME_IDS)
    n_prompt = draw(st.integers(0, len(token_ids)))
    return KvSessionReply(draw(NAMES), draw(NAMES), token_ids, n_prompt, draw(st.integers(1, limits.MAX_PAGE_TOKENS)))


@st.composite
def pages(draw: st.DrawFn, kind: type[KvPages] | type[KvImport]) -> tuple[KvPages | KvImport, list[bytes]]:
    some = st.binary(min_size=1, max_size=64)
    payloads = draw(st.lists(some, min_size=1, max_size=limits.MAX_PAGES_AT_ONCE))
    tensors = tuple(TensorDescriptor.of_page(len(payload)) for payload in payloads)
    return kind(draw(NAMES), tuple(draw(some) for _ in payloads), tensors), payloads


SIMPLE: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.HELLO: st.builds(Hello, st.just("client"), NAMES)
    | st.builds(Hello, st.sampled_from(["upstream", "ring"]), NAMES, facts()),
    Kind.WELCOME: st.builds(Welcome, STAGES, st.booleans()),
    Kind.READY: st.builds(Ready, STAGES),
    Kind.ERROR: st.builds(
        Error, CODES, texts(0, limits.MAX_ERROR_BYTES), texts(0, limits.MAX_NAME_BYTES), st.booleans()
    ),
    Kind.PING: st.builds(Ping, COUNTS),
    Kind.PONG: st.builds(Pong, COUNTS, st.booleans()),
    Kind.GENERATE: generates(),
    Kind.CANCEL: st.builds(Cancel, NAMES),
    Kind.ACCEPTED: st.builds(Accepted, NAMES, SOME_IDS, st.integers(0, limits.MAX_PROMPT_TOKENS)),
    Kind.TOKENS: st.builds(
        Tokens,
        NAMES,
        COUNTS,
        IDS,
        texts(0, limits.MAX_TEXT_BYTES),
        FINISH,
        st.dictionaries(NAMES, COUNTS, max_size=5),
    ),
    Kind.TOKENS_EACH: st.builds(
        TokensEach,
        st.lists(
            st.builds(NextToken, NAMES, COUNTS, TOKEN_ID, texts(0, limits.MAX_TEXT_BYTES)), min_size=2, max_size=4
        ).map(tuple),
    ),
    Kind.RESUME: st.builds(Resume, NAMES, POSITIONS),
    Kind.KEPT: st.builds(Kept, NAMES, texts(0, limits.MAX_NAME_BYTES), st.integers(0, limits.MAX_PROMPT_TOKENS)),
    Kind.KV_MATCH: matches(),
    Kind.KV_KEEP: st.builds(KvKeep, NAMES, st.integers(0, limits.MAX_LANES - 1), st.integers(0, limits.MAX_PAGES)),
    Kind.KV_ANSWER: st.builds(KvAnswer, NAMES, st.integers(0, limits.MAX_PAGES)),
    Kind.KV_EXPORT: st.builds(
        KvExport,
        NAMES,
        st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=limits.MAX_PAGES_AT_ONCE).map(b"".join),
    ),
    Kind.KV_IMPORTED: st.builds(KvImported, NAMES),
    Kind.KV_SESSION: st.builds(KvSession, NAMES, NAMES),
    Kind.KV_ADOPT: adoptions(),
    Kind.KV_SESSION_REPLY: session_replies(),
    Kind.SESSION_CLOSE: st.builds(
        messages.SessionClose,
        NAMES,
        st.integers(0, limits.MAX_LANES - 1),
        st.sampled_from(["done", "cancelled", "error"]),
    ),
    Kind.BATCH_DONE: st.builds(
        BatchDone,
        COUNTS,
        st.lists(
            st.builds(SampledToken, NAMES, st.integers(0, limits.MAX_LANES - 1), POSITIONS, TOKEN_ID, FINISH),
            max_size=8,
        ).map(tuple),
        st.lists(st.tuples(NAMES, CODES, texts(0, limits.MAX_ERROR_BYTES)), max_size=3).map(tuple),
        TIMES,
    ),
    Kind.BATCH_FAILED: st.builds(
        messages.BatchFailed,
        COUNTS,
        st.lists(NAMES, min_size=1, max_size=3).map(tuple),
        st.sampled_from([(), BATCH.opens]),
        CODES,
        texts(0, limits.MAX_ERROR_BYTES),
    ),
    Kind.TOKENIZE: st.builds(Tokenize, NAMES, texts(0, limits.MAX_TEXT_BYTES), st.booleans(), st.booleans()),
    Kind.TOKENIZED: st.builds(Tokenized, NAMES, IDS),
    Kind.DETOKENIZE: st.builds(Detokenize, NAMES, IDS),
    Kind.DETOKENIZED: st.builds(Detokenized, NAMES, st.binary(max_size=50)),
    Kind.STATS: st.builds(Stats, NAMES),
    Kind.STATS_REPLY: st.builds(
        StatsReply,
        NAMES,
        facts(),
        st.dictionaries(NAMES, st.integers(-limits.MAX_INT64, limits.MAX_INT64), max_size=5),
    ),
}
ALL: dict[Kind, st.SearchStrategy[tuple[Any, list[bytes]]]] = {
    Kind.ACTIVATIONS: batches(),
    Kind.KV_PAGES: pages(KvPages),
    Kind.KV_IMPORT: pages(KvImport),
    **{kind: strategy.map(lambda message: (message, [])) for kind, strategy in SIMPLE.items()},
}
