"""Amounts and tables as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = "-"


def aligned(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = (), gap: str = "  "
) -> list[str]:
    """Lines of a table: columns ``gap`` apart, to the right but for those in ``left``."""
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    return [
        gap.join(
            cell.ljust(width) if heading in left else cell.rjust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def count(n: float | None) -> str:
    """A whole number, shortened beyond five digits."""
    if n is None:
        return NOTHING
    if abs(n) < 99_999.5:
        return f"{n:.0f}"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(n) >= 0.9995 * size:
            return f"{_three_digits(n / size)}{unit}"
    return f"{_three_digits(n / 1e3)}k"


def number(n: float | None) -> str:
    """With the digits after the point that small ones need."""
    return _three_digits(n) if n and abs(n) < 999.5 else count(n)


def duration(us: float | None) -> str:
    if us is None:
        return NOTHING
    for size, unit in ((3.6e9, "h"), (60e6, "min"), (1e6, "s"), (1e3, "ms")):
        # Minutes and hours only where seconds would be long.
        if abs(us) >= (10 * size if unit in ("h", "min") else 0.9995 * size):
            return f"{_three_digits(us / size)} {unit}"
    return f"{us:.0f} us"


def data(n_bytes: float) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(n_bytes) >= 0.9995 * 1024**power:
            return f"{_three_digits(n_bytes / 1024**power)} {unit}"
    return f"{n_bytes:.0f} B"


def share(part: float | None) -> str:
    return NOTHING if part is None else f"{100 * part:.0f}%"


def bar(part: float | None, width: int) -> str:
    """``part`` of ``width`` characters filled, between brackets."""
    filled = round(min(1.0, max(0.0, part or 0.0)) * (width - 2))
    return f"[{'|' * filled}{' ' * (width - 2 - filled)}]"


def shortened(text: str, width: int | None) -> str:
    """At most ``width`` characters, the middle left out; None: any."""
    if width is None or len(text) <= width:
        return text
    if width <= 3:
        return text[: max(0, width)]
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def printable(text: str) -> str:
    """What peers say, without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _three_digits(n: float) -> str:
    return f"{n:.{2 if abs(n) < 9.995 else 1 if abs(n) < 99.95 else 0}f}"
