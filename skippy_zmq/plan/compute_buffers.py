"""An estimate of a stage's compute buffers, fitted to what llama.cpp allocates on CPUs.

llama.cpp plans them from the graph, where tensors share space once they are used up, so only a model's largest moments
count. The figures are floats for each row of a micro-batch. Meant to err upwards: from 0.95 to 3 times what is
allocated, more for stages of recurrent models.
"""

from __future__ import annotations

from skippy_zmq.plan.kv_cache import CELL_PADDING, CacheSettings
from skippy_zmq.plan.outline import Counts, Outline

_FLOAT_BYTES = 4
_FEED_FORWARD = 3  # gate, up and their product
_RESIDUAL = 5  # the stream itself, its norm, what is added to it
_ATTENTION = 2
_RECURRENT = 24  # chunks of a recurrent layer: projections, convolution and the pieces of its scan


def compute_bytes(outline: Outline, settings: CacheSettings, *, has_head: bool) -> int:
    """Bytes of compute buffers of any stage of the model; ``has_head``: whether it holds the output matrix."""
    counts = Counts(outline)
    cells = -(-settings.n_ctx // CELL_PADDING) * CELL_PADDING
    rows = min(settings.n_ubatch, cells * settings.lanes)
    heads = max(counts.per_layer("attention.head_count"))
    head_length = counts.count("attention.key_length", outline.embedding_length // max(1, heads))
    used = max(counts.per_layer("expert_used_count"))
    dense = max(counts.per_layer("feed_forward_length"))
    expert = max(counts.per_layer("expert_feed_forward_length")) or dense
    shared = max(counts.per_layer("expert_shared_feed_forward_length"))
    feed_forward = max(dense, used * expert + shared)
    masks = 2 if counts.count("attention.sliding_window") else 1
    residual = (_RESIDUAL + used) * outline.embedding_length + _ATTENTION * max(1, heads) * head_length
    inner = max(counts.count("ssm.inner_size"), max(1, heads) * counts.count("kda.head_dim"))
    wide = max(_FEED_FORWARD * feed_forward, _RECURRENT * inner)
    if settings.flash_attention:
        mask = masks * cells // 2  # f16
    else:
        mask = masks * cells + 2 * outline.embedding_length
        wide = max(wide, heads * cells)
    floats = rows * (wide + residual + mask)
    if has_head:
        floats = max(floats, settings.lanes * (outline.n_vocab + residual))
    return floats * _FLOAT_BYTES
