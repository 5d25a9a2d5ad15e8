"""Which stages hold the tensors that belong to none of the layers they run. The rule is that of StageModel::owns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

# Tables that only the first stage reads, one row of them for each token. The token embedding is also the output matrix
# of models that have none of their own, and its norm their output norm.
_TABLES = ("token_embd", "token_embd_norm", "token_types", "position_embd", "per_layer_token_embd")

Holder = Literal["first", "last", "both", "every"]


def holder(name: str, *, tied_output: bool, tied_norm: bool) -> Holder:
    """Who holds the tensor ``name``, which is in none of the layers that a pipeline runs."""
    if name.startswith(("blk.", "output")):  # blocks past the layers predict further tokens
        return "last"
    table, dot, _ = name.partition(".")
    if not dot or table not in _TABLES:
        return "every"
    if (table == "token_embd" and tied_output) or (table == "token_embd_norm" and tied_norm):
        return "both"
    return "first"


def has_tied_norm(names: Iterable[str]) -> bool:
    return not any(name.startswith("output_norm") for name in names)
