"""What came out: of one try, of a model, and of a whole certification. Values and their verdicts; no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from skippy_zmq.certify.compare import Difference
from skippy_zmq.wire.messages import CrossingSpec


class Verdict(StrEnum):
    EXACT = "exact"
    REFUSED = "refused"  # by the file checks, an option, the handshake or llama.cpp, in words
    CRASHED = "crashed"  # the child process died or ran out of time
    INEXACT = "inexact"


_WORST_LAST = tuple(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_WORST_LAST.index)


@dataclass(frozen=True, slots=True)
class Try:
    """One split of a model under one of the settings.

    ``compared``: "batches", or "micro-batches" where llama.cpp's own grouping of lanes with unequal rows selects other
    kernels than a stage's. ``reason``: why it was refused or crashed. ``crosses``: by boundary.
    """

    split: tuple[int, ...]
    settings: str
    verdict: Verdict
    reason: str = ""
    compared: str = ""
    difference: Difference | None = None
    crosses: Mapping[int, tuple[CrossingSpec, ...]] | None = None


@dataclass(frozen=True, slots=True)
class ModelResult:
    """``architecture``, ``n_layers``, ``can_trim``: None where the model was refused before they were known."""

    file: str
    architecture: str | None
    n_layers: int | None
    can_trim: bool | None
    tries: tuple[Try, ...]
    refusal: str = ""

    @property
    def verdict(self) -> Verdict:
        return worst(t.verdict for t in self.tries) if self.tries else Verdict.REFUSED

    @property
    def reason(self) -> str:
        """Of the first try that is not exact, or why nothing was tried."""
        for t in self.tries:
            if t.verdict is self.verdict and t.verdict is not Verdict.EXACT:
                split = ",".join(map(str, t.split)) or "none"
                what = t.reason if t.difference is None else describe(t.difference)
                return f"boundaries {split} ({t.settings}): {what}"
        return self.refusal

    @property
    def boundaries(self) -> dict[int, Verdict]:
        """The worst verdict at each boundary that was tried."""
        cuts = sorted({boundary for t in self.tries for boundary in t.split})
        return {cut: worst(t.verdict for t in self.tries if cut in t.split) for cut in cuts}

    @property
    def crosses(self) -> dict[int, tuple[CrossingSpec, ...]]:
        """What crosses each boundary at which stages could be opened."""
        found: dict[int, tuple[CrossingSpec, ...]] = {}
        for t in self.tries:
            found.update(t.crosses or {})
        return dict(sorted(found.items()))


def describe(difference: Difference) -> str:
    largest = "not a number" if difference.largest is None else f"{difference.largest:.3g}"
    return (
        f"{difference.values} logits differ, by {largest} at most, first in row {difference.row} of "
        f"step {difference.step!r}"
    )


def judged_try(split: tuple[int, ...], settings: str, result: Mapping[str, Any]) -> Try:
    """Read the result of a child process."""
    if "refused" in result:
        return Try(split, settings, Verdict.REFUSED, reason=result["refused"])
    if "crashed" in result:
        return Try(split, settings, Verdict.CRASHED, reason=result["crashed"])
    found = result["difference"]
    crosses = {int(k): tuple(CrossingSpec(**spec) for spec in specs) for k, specs in result["crosses"].items()}
    return Try(
        split,
        settings,
        Verdict.EXACT if found is None else Verdict.INEXACT,
        compared=result["compared"],
        difference=None if found is None else Difference(**found),
        crosses=crosses,
    )


def exact_names(results: Iterable[ModelResult]) -> list[str]:
    """Architecture names all of whose files were exact everywhere, sorted."""
    verdicts: dict[str, list[Verdict]] = {}
    for result in results:
        if result.architecture is not None:
            verdicts.setdefault(result.architecture, []).append(result.verdict)
    return sorted(name for name, found in verdicts.items() if worst(found) is Verdict.EXACT)
