"""Clients that left something here and are gone: for how long it is held for them. Pure; the time is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

LOSS_SETTLES_SECONDS = 0.05  # from the end of a connection until sending to its peer fails


class Absences:
    """``patience``: seconds that a client may take to connect again."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._look_at: float | None = None
        self._ended_at = 0.0  # the latest connection
        self._gone: dict[bytes, float] = {}  # since when

    @property
    def due(self) -> float | None:
        """When to call ``look``, if at all."""
        times = [gone + self._patience for gone in self._gone.values()]
        return min([*times, *([] if self._look_at is None else [self._look_at])], default=None)

    def connection_ended(self, now: float) -> None:
        """Somebody's connection ended, perhaps that of one who left something."""
        self._ended_at = now
        if self._look_at is None:
            self._look_at = now + LOSS_SETTLES_SECONDS

    def is_back(self, client: bytes) -> None:
        """It has connected again: another absence of it begins anew."""
        self._gone.pop(client, None)

    def look(self, now: float, clients: Iterable[bytes], is_there: Callable[[bytes], bool]) -> list[bytes]:
        """See which of ``clients``, all who have something here, are there; those who were not for too long."""
        settled_at = self._ended_at + LOSS_SETTLES_SECONDS
        self._look_at = settled_at if settled_at > now else None
        self._gone = {client: self._gone.get(client, now) for client in clients if not is_there(client)}
        over = [client for client, since in self._gone.items() if now >= since + self._patience]
        for client in over:
            del self._gone[client]
        return over
