"""Limits and error codes of the wire protocol. Every one is listed in docs/protocol.md with the same value."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

# Message layout.
MAX_TENSORS = 512  # descriptors, and so payload frames, in one message
MAX_FRAMES = 2 + MAX_TENSORS
MAX_HEADER_BYTES = 32 << 20  # holds any ACTIVATIONS whose fields keep their own limits
MAX_PAYLOAD_BYTES = 128 << 20  # one frame: 2048 rows of 16384 f32
MAX_MESSAGE_BYTES = 256 << 20  # all frames together
MAX_HEADER_ITEMS = 262_144  # values in a header: bounds the objects that parsing makes
MAX_ARRAY_ITEMS = 1024  # values in one msgpack array
MAX_NESTING = 5  # arrays within arrays; no field of this generation needs more

# Numbers.
MAX_INT64 = (1 << 63) - 1
MAX_TOKEN_ID = (1 << 31) - 1  # llama_token is an int32
MAX_POSITION = (1 << 31) - 1  # llama_pos is an int32
MAX_SEED = (1 << 32) - 2  # the next one is llama.cpp's "choose one for me"

# Batches.
MAX_BATCH_ROWS = 2048
MAX_LANES = 256  # LLAMA_MAX_SEQ
MAX_DIMS = 4  # GGML_MAX_DIMS

# Pages of attention state.
MAX_PAGE_TOKENS = 4096
MAX_PAGES = 16_384  # of one session
LINK_BYTES = 32  # the name of a page: SHA-256
MAX_DESCRIPTOR_BYTES = 256 << 10
MAX_PAGES_AT_ONCE = 16  # in one message

# Models and pipelines.
MAX_LAYERS = 1024
MAX_STAGES = 128
MAX_CROSSING_TENSORS = 128  # at one boundary

# Texts, in bytes of UTF-8.
MAX_NAME_BYTES = 128  # ids, names of tensors, types and counters
MAX_LABEL_BYTES = 512  # endpoints, model names, builds
MAX_ROUTING_ID_BYTES = 255  # ZeroMQ's own limit
MAX_TEXT_BYTES = 4 << 20  # a prompt; all chat messages of a request together
MAX_GRAMMAR_BYTES = 64 << 10
MAX_STOP_BYTES = 256  # one stop string or sequence breaker
MAX_ERROR_BYTES = 4096

# Lists.
MAX_PROMPT_TOKENS = 1 << 20
MAX_OPENS_TOKENS = 2 << 20  # prefix and known of all sessions that one batch opens: any one session's fit
MAX_STOP_STRINGS = 16  # also sequence breakers
MAX_CHAT_MESSAGES = 1024
MAX_LOGIT_BIAS = 1024
MAX_TIMINGS = 32
MAX_COUNTERS = 512

DTYPE_BYTES = MappingProxyType({"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8})


class ErrorCode(NamedTuple):
    """What a code says, and whether the same message may succeed later."""

    meaning: str
    retry: bool


ERROR_CODES = MappingProxyType(
    {
        # The request.
        "invalid_request": ErrorCode("a field of the request has a value that cannot be served", False),
        "invalid_token": ErrorCode("a token id outside the vocabulary", False),
        "context_length_exceeded": ErrorCode("the prompt does not fit the context of a lane", False),
        "chat_template": ErrorCode("the chat template is missing, not supported or refused the messages", False),
        "grammar": ErrorCode("the grammar cannot be parsed", False),
        "duplicate_request": ErrorCode("a request of this id is already known", False),
        "unknown_request": ErrorCode("no request of this id is known", False),
        "cancelled": ErrorCode("the request was cancelled", False),
        "kv_page": ErrorCode("a KV page or saved session is damaged, does not fit, or is not here", False),
        # The moment.
        "retry": ErrorCode("nothing is wrong with the request: try again", True),
        "busy": ErrorCode(
            "all lanes and the queue are full; or the client has not read the pages that it asked for before", True
        ),
        "not_ready": ErrorCode("the pipeline is not ready yet", True),
        "deadline": ErrorCode("the answer did not come in time", True),
        "stage_lost": ErrorCode("a stage of the pipeline went away", True),
        "shutting_down": ErrorCode("the stage is about to end", True),
        # The peer.
        "peer": ErrorCode("the other side refused or failed", False),
        "protocol": ErrorCode("a message that does not follow this page", False),
        "too_large": ErrorCode("a message, frame or header beyond its limit", False),
        "unknown_kind": ErrorCode("a kind byte that this generation does not have", False),
        "generation_mismatch": ErrorCode("the two sides speak different generations", False),
        # The handshake.
        "handshake": ErrorCode("two stages that do not fit together", False),
        "model_mismatch": ErrorCode("the stages hold different models or builds", False),
        "layer_mismatch": ErrorCode("the layer ranges leave a gap, overlap, or miss an end of the model", False),
        "crossing_mismatch": ErrorCode("the tensors wanted and offered at a boundary differ", False),
        "settings_mismatch": ErrorCode("lanes, context, cache types or batch sizes differ", False),
        # The stage itself.
        "bad_model_file": ErrorCode("a model file is damaged, incomplete or unsupported", False),
        "bad_option": ErrorCode("an option has a wrong value or cannot be honoured here", False),
        "bad_endpoint": ErrorCode("an address cannot be bound or reached", False),
        "native": ErrorCode("llama.cpp refused or failed", False),
        "internal": ErrorCode("a fault of this program", False),
    }
)
