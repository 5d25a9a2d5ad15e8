"""What planning needs to know of a model, whatever it comes from; no weights among it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from skippy_zmq.sources.gguf_header import TensorInfo


class Outline(Protocol):
    """The description of an opened model: metadata and tensor table, as ``sources.gguf_model.GgufModel`` has them."""

    @property
    def metadata(self) -> Mapping[str, int | float | bool | str]: ...
    @property
    def tensors(self) -> Sequence[TensorInfo]: ...
    @property
    def architecture(self) -> str: ...
    @property
    def n_blocks(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def embedding_length(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def tied_output(self) -> bool: ...
    def array(self, key: str) -> list[int] | list[float] | list[bool] | list[str]: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """Typed access to whole numbers of the metadata, under ``<architecture>.<key>``."""

    outline: Outline

    def count(self, key: str, default: int = 0) -> int:
        """The number under ``key``; ``default`` where there is none, or an array."""
        value = self.outline.metadata.get(f"{self.outline.architecture}.{key}")
        return int(value) if isinstance(value, int | float) else default

    def per_layer(self, key: str, default: int = 0) -> tuple[int, ...]:
        """One number for each block: that of the array under ``key``, or the same for all."""
        try:
            values = self.outline.array(f"{self.outline.architecture}.{key}")
        except KeyError:
            return (self.count(key, default),) * self.outline.n_blocks
        numbers = tuple(int(value) for value in values)
        return numbers + (default,) * (self.outline.n_blocks - len(numbers))
