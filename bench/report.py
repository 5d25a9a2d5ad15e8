"""The results of the last run as tables of docs/benchmarks.md: ``python -m bench.report`` writes them there.

Processors with AMX have tables of their own: it changes what a row costs, and so every ratio.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.comparison import FIGURES, SUMMARY

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGINS = {
    "no": "<!-- figures without AMX: python -m bench.report -->",
    "yes": "<!-- figures with AMX: python -m bench.report -->",
}
END = "<!-- end of figures -->"


def tables(results: dict[str, Any]) -> str:
    """Markdown: the machine, the ratios with their targets, the other figures."""
    ratios = json.loads(SUMMARY.read_text(encoding="utf-8"))
    machine = ", ".join(f"{name}: {value}" for name, value in results["machine"].items())
    missed = sum(not ratio["reached"] for ratio in ratios)
    return "\n".join(
        [
            f"{machine}. {len(ratios) - missed} of {len(ratios)} targets reached.",
            "",
            *_table(["measured: against", "ours", "other", "unit", "ratio", "target", ""], map(_ratio_row, ratios)),
            "",
            *_table(
                ["figure", "value", "unit"],
                ([name, _number(item["value"]), item["unit"]] for name, item in results["figures"].items()),
            ),
        ]
    )


def _ratio_row(ratio: dict[str, Any]) -> Sequence[str]:
    word = "reached" if ratio["reached"] else "**missed**"
    sign = "≥" if ratio["direction"] == "at least" else "≤"
    aim = f" (aim {ratio['aim']:g})" if ratio["aim"] is not None else ""
    target = f"{sign} {ratio['target']:g}{aim}"
    values = (_number(ratio["ours"]), _number(ratio["other"]), ratio["unit"], f"{ratio['ratio']:.3g}")
    return [ratio["name"], *values, target, word]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main() -> None:
    results = json.loads(FIGURES.read_text(encoding="utf-8"))
    begin = BEGINS[results["machine"]["AMX"]]
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{begin}\n{tables(results)}\n{END}{after}", encoding="utf-8")
    print(f"written: {DOCUMENT}")


if __name__ == "__main__":
    main()
