"""What a source hands to llama.cpp for one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageFiles:
    """``paths``: one per entry of the source's ``files``, in that order, to be opened while the source lets them live.

    ``names``: what messages call those paths where they are not what the user gave. ``own_bytes``: bytes of the stage's
    own tensors where the other bytes are not there, so that native code must not want more; None where all are.
    ``check``: to be called before the first weight is read, by the thread that opened the files; raises ModelFileError
    where they are not what they should be.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...] = ()
    own_bytes: int | None = None
    check: Callable[[], object] | None = None

    def readable(self, message: str) -> str:
        """``message`` with ``names`` in place of ``paths``."""
        pairs = zip(self.paths, self.names, strict=True) if self.names else ()
        for path, name in sorted(pairs, key=lambda pair: -len(pair[0])):  # /fd/12 before /fd/1
            message = message.replace(path, name)
        return message
