"""Limits of pages, of the store and of saved sessions; docs/kv-pages.md lists them with the same values."""

from __future__ import annotations

from types import MappingProxyType

FORMAT = 1  # of pages, their files and saved sessions
PAGE_TOKENS = 64  # of a page, unless chosen otherwise; prompts are computed in chunks of multiples of it

# One page.
MAX_LAYERS = 1024
MAX_POSITION = (1 << 31) - 1  # llama_pos is an int32
MAX_TOKEN_ID = (1 << 31) - 1  # llama_token is an int32
MAX_PAGE_TOKENS = 1 << 20
MAX_ROW_BYTES = 16 << 20  # what one layer keeps of K, or of V, for one token
MAX_PAGE_BYTES = 4 << 30
MAX_TEXT_BYTES = 512  # a model's identity, a build, the name of a session
MAX_DESCRIPTOR_BYTES = 256 << 10

# The store.
MAX_PAGES_HELD = 1 << 18
MAX_DAMAGED_FILES = 16  # kept for inspection; older ones are deleted
MAX_QUEUED_WRITES = 4096

# Saved sessions.
MAX_SESSION_TOKENS = 1 << 20
MAX_SESSION_FILES = 1 << 16
MAX_MANIFEST_BYTES = 64 << 20
MAX_OPAQUE_BYTES = 1 << 20  # what a manifest keeps for others, as JSON

# Types that llama.cpp offers for caches: bytes of a block and its elements, as ggml defines them.
CACHE_TYPES = MappingProxyType(
    {
        "f32": (4, 1),
        "f16": (2, 1),
        "bf16": (2, 1),
        "q8_0": (34, 32),
        "q4_0": (18, 32),
        "q4_1": (20, 32),
        "q5_0": (22, 32),
        "q5_1": (24, 32),
        "iq4_nl": (18, 32),
    }
)
