"""Limits of rendering a chat template."""

from __future__ import annotations

RENDER_SECONDS = 2.0  # one request, compiling included
START_SECONDS = 20.0  # a loaded machine starts a Python slowly; no template runs yet
ORPHAN_SECONDS = 30  # should the parent be gone, this ends a template that does not
MEMORY_BYTES = 512 << 20  # address space of the process
MAX_TEMPLATE_CHARACTERS = 512 << 10
MAX_MESSAGES_BYTES = 8 << 20  # of one request, as JSON
MAX_OUTPUT_BYTES = 1 << 20
MAX_ERROR_CHARACTERS = 300
MAX_WAITING = 1024  # requests
