"""Open a stage's weights from the cache that its options name, or let it keep them there while it loads."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.weights_cache.entry import cached_model, planned_entry
from skippy_zmq.sources.weights_cache.folder import OpenEntry, WeightsCache
from skippy_zmq.topology import LayerRange


@contextlib.contextmanager
def cached_weights(
    source: GgufModel,
    layers: LayerRange,
    options: StageOptions,
    build: str,
    progress: Callable[[float], object] | None = None,
) -> Iterator[tuple[GgufModel, OpenEntry | None]]:
    """What to open in place of ``source`` within the context, and what must live as long as that is used.

    Weights that are not in the cache are put there when the context ends without an error. ``progress``: 0.0 to 1.0
    while those that are there are checked. Raises ModelFileError where the source is gone.
    """
    entry = None
    # Direct I/O is refused for weights that are made: it would not be from the second start on.
    if source.rows is not None and options.weights_cache and not options.direct_io:
        entry = planned_entry(source, layers, build)
    if entry is None:
        yield source, None
        return
    cache = WeightsCache(Path(options.weights_cache or ""), options.weights_cache_bytes)
    found = cache.find(entry, progress)
    if found is not None:
        try:
            yield cached_model(entry, found.path, found.descriptor), found
        except BaseException:
            found.close()
            raise
        return
    writer = cache.writer(entry)
    if writer is None:
        yield source, None
        return
    try:
        yield dataclasses.replace(source, rows=writer), None
        writer.finish()
    finally:
        writer.abandon()
