"""How much may be under way on the ring at once: batches, and bytes of activations."""

from __future__ import annotations

from dataclasses import dataclass, field

_NEW_SHARE = 0.2  # of the latest batch in the running mean


@dataclass(slots=True)
class OnLinks:
    """How many batches of a kind the links of a ring hold, beside those at its stages, when all stages are busy."""

    _travel_us: int | None = field(init=False, default=None)  # the least ever seen: the rest is waiting for busy stages
    _slowest_us: float = field(init=False, default=0.0)

    @property
    def count(self) -> int:
        return int((self._travel_us or 0) / self._slowest_us) if self._slowest_us else 0

    def observe(self, travel_us: int, slowest_us: int) -> None:
        """A batch spent ``travel_us`` outside of stages and ``slowest_us`` computing at the slowest of them."""
        self._travel_us = max(0, travel_us if self._travel_us is None else min(self._travel_us, travel_us))
        share = _NEW_SHARE if self._slowest_us else 1.0
        self._slowest_us += share * (max(1, slowest_us) - self._slowest_us)


@dataclass(slots=True)
class Credit:
    """``max_batches`` on the ring, ``max_bytes`` of activations in them; one batch may always go, whatever its size.

    ``waits``: how often something was ready and had no credit.
    """

    max_batches: int
    max_bytes: int
    waits: int = field(init=False, default=0)
    _bytes: dict[int, int] = field(init=False, default_factory=dict)  # of the batches under way, by number
    _total: int = field(init=False, default=0)

    @property
    def batches(self) -> int:
        return len(self._bytes)

    @property
    def bytes(self) -> int:
        return self._total

    def allows(self, n_bytes: int) -> bool:
        if not self._bytes:
            return True
        return len(self._bytes) < self.max_batches and self._total + n_bytes <= self.max_bytes

    def take(self, number: int, n_bytes: int) -> None:
        self._bytes[number] = n_bytes
        self._total += n_bytes

    def give_back(self, number: int) -> bool:
        """The batch has left the ring; False where it was not under way."""
        n_bytes = self._bytes.pop(number, None)
        if n_bytes is None:
            return False
        self._total -= n_bytes
        return True

    def reset(self) -> None:
        """The ring broke: nothing is under way any more."""
        self._bytes.clear()
        self._total = 0
