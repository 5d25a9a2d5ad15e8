"""Every message of the wire protocol, as frozen values. No logic, no sockets; docs/protocol.md is the contract.

Units: positions and counts are tokens, sizes bytes, times microseconds unless a name says otherwise. Ids of requests
are chosen by the client, ids of sessions by stage 0; both are opaque strings.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

GENERATION = 4


class Kind(enum.IntEnum):
    """The second byte of every message."""

    HELLO = 1
    WELCOME = 2
    READY = 3
    ERROR = 4
    PING = 5
    PONG = 6
    GENERATE = 10
    CANCEL = 11
    ACCEPTED = 12
    TOKENS = 13
    RESUME = 14
    KEPT = 15
    TOKENS_EACH = 16
    ACTIVATIONS = 20
    SESSION_CLOSE = 21
    BATCH_DONE = 22
    BATCH_FAILED = 23
    KV_MATCH = 24
    KV_KEEP = 25
    KV_ANSWER = 26
    TOKENIZE = 30
    TOKENIZED = 31
    DETOKENIZE = 32
    DETOKENIZED = 33
    STATS = 40
    STATS_REPLY = 41
    KV_EXPORT = 50
    KV_PAGES = 51
    KV_IMPORT = 52
    KV_IMPORTED = 53
    KV_SESSION = 54
    KV_ADOPT = 55
    KV_SESSION_REPLY = 56


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every step of decoding sends: msgspec reads and writes it in one call, an array of its fields in order.

    No field has a default: msgspec would take it where an array is too short.
    """


@dataclass(frozen=True, slots=True)
class CrossingSpec:
    """A tensor that crosses a boundary. For a micro-batch of n rows it has ``fixed_bytes + n * row_bytes`` bytes.

    ``occurrence`` tells tensors of one name apart, in the scheduler's copy order.
    """

    name: str
    occurrence: int
    dtype: str
    row_bytes: int
    fixed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a stage is; neighbours compare these at the handshake."""

    stage: str  # "<name>-<boot nonce>": a restarted stage is a new peer
    endpoint: str  # where peers and clients reach it
    build: str  # llama.cpp pin and library version
    model: str  # identity by content, hex
    model_name: str
    architecture: str
    layer_start: int
    layer_end: int
    n_layers: int
    n_vocab: int
    lanes: int
    n_ctx: int  # cells per lane
    n_batch: int
    n_ubatch: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: str
    swa_full: bool
    wanted: tuple[CrossingSpec, ...] = ()
    offered: tuple[CrossingSpec, ...] = ()
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    threads: int = 0
    row_class_low: int = 1
    row_class_high: int = 1
    reproducible: bool = False
    kv_page_tokens: int = 0  # of a page of attention state; 0: this stage keeps none
    kv_page_bytes: int = 0  # of such a page
    window_rows: int = 1  # consecutive tokens of a lane that get, in one batch, the bits of one by one
    revision: str = ""  # "owner/name@commit" of a model that came from a hub


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of every connection.

    ``role``: "upstream" (the previous stage), "ring" (the last stage, at stage 0) or "client".
    ``facts``: the sender's where it is a stage, None where it is a client.
    """

    kind: ClassVar[Kind] = Kind.HELLO
    role: str
    peer: str
    facts: StageFacts | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """The peer is accepted. ``stages``: facts of this stage and, once known, of all behind it, in layer order."""

    kind: ClassVar[Kind] = Kind.WELCOME
    stages: tuple[StageFacts, ...]
    ready: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The sender and every stage behind it are ready. ``stages``: theirs, in layer order."""

    kind: ClassVar[Kind] = Kind.READY
    stages: tuple[StageFacts, ...]


@dataclass(frozen=True, slots=True)
class Error:
    """``code`` is one of limits.ERROR_CODES; ``retry`` says whether the same message may succeed later."""

    kind: ClassVar[Kind] = Kind.ERROR
    code: str
    message: str
    request: str = ""
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    kind: ClassVar[Kind] = Kind.PING
    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    kind: ClassVar[Kind] = Kind.PONG
    nonce: int
    ready: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; names, meanings and defaults are llama.cpp's, except temperature 0 = greedy by default.

    ``seed`` None: a fresh random one per request. ``logit_bias``: (token id, bias) pairs.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Generate:
    """A request: exactly one of ``prompt``, ``messages`` and ``token_ids`` is set. Client to stage 0.

    ``timeout_ms``: the whole request, queueing included; 0 = the stage's own limit. ``logits``: send those that each
    token was chosen by. ``keep``: hold on to the attention state when the answer is complete, which KEPT then names.
    ``session``: the name of a kept or adopted state to begin with, as far as its tokens begin the prompt.
    """

    kind: ClassVar[Kind] = Kind.GENERATE
    request: str
    max_tokens: int
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    timeout_ms: int = 0
    logits: bool = False
    keep: bool = False
    session: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    kind: ClassVar[Kind] = Kind.CANCEL
    request: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """Stage 0 to client: the request has a lane, its prompt is this; its first ``reused`` tokens need not be run."""

    kind: ClassVar[Kind] = Kind.ACCEPTED
    request: str
    prompt_token_ids: tuple[int, ...]
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """Client to stage 0, the pipeline being ready once more: go on with the answer, of which ``received`` tokens came.

    Sent for every request that was under way; one that was not interrupted is none the wiser.
    """

    kind: ClassVar[Kind] = Kind.RESUME
    request: str
    received: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Stage 0 to client: every stage keeps the state of the ``n_tokens`` tokens of ``session``; 0: it was not kept."""

    kind: ClassVar[Kind] = Kind.KEPT
    request: str
    session: str
    n_tokens: int


class TensorDescriptor(Step, frozen=True):
    """One payload frame: which tensor, of which micro-batch, and its exact layout (shape innermost first)."""

    name: str
    occurrence: int
    micro_batch: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of_page(cls, nbytes: int) -> TensorDescriptor:
        """A page's bytes, whose layout its own descriptor says."""
        return cls("page", 0, 0, "i8", (nbytes,), nbytes)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Last stage to client. ``index``: number of tokens sent before these, so that a gap shows.

    ``finish_reason``: "" while running, then "stop", "length" or "cancelled". ``text`` is whole characters, without any
    part of a stop string. ``timings`` (last message only): microseconds by name. ``tensors``: where the request asked
    for it, "logits", f32 [n_vocab], those that the token of this message (or the end) was chosen by.
    """

    kind: ClassVar[Kind] = Kind.TOKENS
    request: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str = ""
    timings: Mapping[str, int] = field(default_factory=dict)
    tensors: tuple[TensorDescriptor, ...] = ()


class NextToken(Step, frozen=True):
    """What TOKENS would say of one more token of a request that goes on."""

    request: str
    index: int
    token: int
    text: str


class TokensEach(Step, frozen=True):
    """Last stage to client: several tokens that one batch gave to its requests, in one message instead of several."""

    kind: ClassVar[Kind] = Kind.TOKENS_EACH
    tokens: tuple[NextToken, ...]


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """Travels with the first rows of a session down to the last stage, which samples for it.

    ``prefix``: int32 little-endian ids of the tokens that the lane begins with, from the pages that KV_MATCH found;
    ``plain`` of them come from pages that anybody's prompt may use. ``known``: likewise the tokens that were generated
    before a stage was lost, which have to come out again; the client has the first ``received`` of them, which are not
    sent.
    """

    session: str
    lane: int
    request: str
    client: bytes  # routing id of the client at the last stage
    n_prompt: int
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    logits: bool = False
    prefix: bytes = b""
    plain: int = 0
    keep: bool = False
    received: int = 0
    known: bytes = b""


class SessionRows(Step, frozen=True):
    """``n_rows`` consecutive rows of a batch belong to ``session`` on ``lane``, from ``position`` on.

    ``sample``: a token is to be chosen after the last of them; in a "replay" batch after each of them.
    """

    session: str
    lane: int
    position: int
    n_rows: int
    sample: bool


class BatchTimes(Step, frozen=True):
    """What a batch has cost so far, in microseconds; each stage adds its own. No clock of another machine is used."""

    spent_us: int
    compute_us: int
    slowest_us: int


NO_TIMES = BatchTimes(0, 0, 0)


class Activations(Step, frozen=True):
    """A batch on its way down the ring. ``tokens``: int32 little-endian ids of all rows, in the order of ``rows``.

    ``phase``: "replay" runs tokens that were generated before a stage was lost, several of a session at once.
    """

    kind: ClassVar[Kind] = Kind.ACTIVATIONS
    batch: int  # rises by one per batch of stage 0
    producer: str
    layer_start: int
    layer_end: int
    phase: str  # "prefill" | "decode" | "replay" | "mixed"
    rows: tuple[SessionRows, ...]
    tokens: bytes
    tensors: tuple[TensorDescriptor, ...]
    opens: tuple[SessionOpen, ...]
    times: BatchTimes


@dataclass(frozen=True, slots=True)
class SessionClose:
    """Stage 0 down the ring: the session is over, its lane may be reused.

    ``reason``: "done" | "cancelled" | "error".
    """

    kind: ClassVar[Kind] = Kind.SESSION_CLOSE
    session: str
    lane: int
    reason: str


class SampledToken(Step, frozen=True):
    """``position`` is where the token goes when it is fed back. ``finish_reason`` non-empty: the session is over."""

    session: str
    lane: int
    position: int
    token: int
    finish_reason: str


class BatchDone(Step, frozen=True):
    """Last stage to stage 0: batch ``batch`` has left the ring; its tokens, and the sessions that failed in it."""

    kind: ClassVar[Kind] = Kind.BATCH_DONE
    batch: int
    tokens: tuple[SampledToken, ...]
    failed: tuple[tuple[str, str, str], ...]  # (session, error code, message)
    times: BatchTimes


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A stage could not run batch ``batch``: sent down the ring in the batch's place, so that only its sessions end."""

    kind: ClassVar[Kind] = Kind.BATCH_FAILED
    batch: int
    sessions: tuple[str, ...]
    opens: tuple[SessionOpen, ...]
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class KvMatch:
    """Down the ring: how many of these pages does every stage have? They stay until the session opens or is closed.

    ``links``: the 32-byte names of consecutive pages from token 0 on. ``pages``: how many of them every stage in front
    has, from the first on. ``owner``: the client whose imported pages are meant; empty: the stage's own.
    """

    kind: ClassVar[Kind] = Kind.KV_MATCH
    session: str
    links: bytes
    pages: int
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class KvKeep:
    """Down the ring, before the end of ``session``: keep the pages of all of its tokens. ``pages``: kept in front."""

    kind: ClassVar[Kind] = Kind.KV_KEEP
    session: str
    lane: int
    pages: int


@dataclass(frozen=True, slots=True)
class KvAnswer:
    """Last stage to stage 0: what became of KV_MATCH or KV_KEEP: pages from the first on that all stages have."""

    kind: ClassVar[Kind] = Kind.KV_ANSWER
    session: str
    pages: int


@dataclass(frozen=True, slots=True)
class KvExport:
    """Client to any stage: send the pages named ``links``, 32 bytes each, in this order."""

    kind: ClassVar[Kind] = Kind.KV_EXPORT
    request: str
    links: bytes


@dataclass(frozen=True, slots=True)
class KvPages:
    """Pages: of each its descriptor (skippy_zmq.kv.descriptor, packed) and, as a payload, its bytes."""

    kind: ClassVar[Kind] = Kind.KV_PAGES
    request: str
    descriptors: tuple[bytes, ...]
    tensors: tuple[TensorDescriptor, ...]


@dataclass(frozen=True, slots=True)
class KvImport:
    """Client to any stage: hold these pages, as KvPages describes them; their layers have to be the stage's."""

    kind: ClassVar[Kind] = Kind.KV_IMPORT
    request: str
    descriptors: tuple[bytes, ...]
    tensors: tuple[TensorDescriptor, ...]


@dataclass(frozen=True, slots=True)
class KvImported:
    kind: ClassVar[Kind] = Kind.KV_IMPORTED
    request: str


@dataclass(frozen=True, slots=True)
class KvSession:
    """Client to stage 0: what are the tokens of the kept state ``session``?"""

    kind: ClassVar[Kind] = Kind.KV_SESSION
    request: str
    session: str


@dataclass(frozen=True, slots=True)
class KvAdopt:
    """Client to stage 0: the pages of these tokens are on all stages now. ``n_prompt`` as in KvSessionReply."""

    kind: ClassVar[Kind] = Kind.KV_ADOPT
    request: str
    token_ids: tuple[int, ...]
    n_prompt: int


@dataclass(frozen=True, slots=True)
class KvSessionReply:
    """The state ``session``: its tokens, and how many a page has.

    ``n_prompt``: pages within so many tokens are plain, fit for any prompt that begins like this one.
    """

    kind: ClassVar[Kind] = Kind.KV_SESSION_REPLY
    request: str
    session: str
    token_ids: tuple[int, ...]
    n_prompt: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    kind: ClassVar[Kind] = Kind.TOKENIZE
    request: str
    text: str
    add_special: bool = True
    parse_special: bool = True


@dataclass(frozen=True, slots=True)
class Tokenized:
    kind: ClassVar[Kind] = Kind.TOKENIZED
    request: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Detokenize:
    kind: ClassVar[Kind] = Kind.DETOKENIZE
    request: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Detokenized:
    kind: ClassVar[Kind] = Kind.DETOKENIZED
    request: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Stats:
    kind: ClassVar[Kind] = Kind.STATS
    request: str


@dataclass(frozen=True, slots=True)
class StatsReply:
    """``counters``: integers by dotted name, monotonic since start unless docs/protocol.md says gauge."""

    kind: ClassVar[Kind] = Kind.STATS_REPLY
    request: str
    facts: StageFacts
    counters: Mapping[str, int]


Message = (
    Hello
    | Welcome
    | Ready
    | Error
    | Ping
    | Pong
    | Generate
    | Cancel
    | Accepted
    | Tokens
    | Resume
    | Kept
    | TokensEach
    | Activations
    | SessionClose
    | BatchDone
    | BatchFailed
    | KvMatch
    | KvKeep
    | KvAnswer
    | Tokenize
    | Tokenized
    | Detokenize
    | Detokenized
    | Stats
    | StatsReply
    | KvExport
    | KvPages
    | KvImport
    | KvImported
    | KvSession
    | KvAdopt
    | KvSessionReply
)
MESSAGE_TYPES: dict[Kind, Any] = {t.kind: t for t in Message.__args__}
