"""The plots of a run, as SVG beside its results. What a run has not measured is not drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from bench.comparison import FIGURES, RESULTS
from skippy_zmq.schedule.simulator import steady_decode

Lines = Mapping[str, Mapping[str, float]]  # by line, x as text: y

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "svg.hashsalt": "skippy-zmq",
}
# Distinguishable without colour vision (Okabe and Ito).
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#767676"
# Of the bubble plot.
_STAGES, _STREAMS = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)


def draw_all() -> list[Path]:
    """Draw what the results hold; the files."""
    curves = json.loads(FIGURES.read_text(encoding="utf-8"))["curves"]
    plots: list[tuple[str, Callable[[Axes, Lines], None]]] = [
        ("decode throughput", _streams),
        ("link delay", _delay),
        ("link throughput", _messages),
    ]
    with mpl.rc_context(_STYLE):
        drawn = [_saved(name, draw, curves[name]) for name, draw in plots if name in curves]
        return [*drawn, _saved("bubble share", _bubbles, {})]


def _saved(name: str, draw: Callable[[Axes, Lines], None], lines: Lines) -> Path:
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    draw(figure.add_subplot(), lines)
    path = RESULTS / f"{name.replace(' ', '-')}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def _line(axes: Axes, points: Mapping[str, float], label: str, color: str, style: str = "o-") -> None:
    axes.plot([float(x) for x in points], list(points.values()), style, label=label, color=color)


def _title(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _doubling(axes: Axes, values: Sequence[float], label: Callable[[float], str] = "{:g}".format) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [label(value) for value in values])
    axes.minorticks_off()


def _streams(axes: Axes, lines: Lines) -> None:
    styles = {
        "ours": ("skippy-zmq, two stages of one thread", _BLUE, "o-"),
        "two_threads": ("llama.cpp in process, two threads", _ORANGE, "s-"),
        "rpc": ("llama.cpp RPC, two servers of one thread", _GREY, "^-"),
    }
    for name, (label, color, style) in styles.items():
        _line(axes, lines[name], label, color, style)
    _doubling(axes, [float(x) for x in lines["ours"]])
    axes.set_ylim(0, 1.3 * max(max(points.values()) for points in lines.values()))  # room for the legend
    axes.legend(loc="upper left")
    _title(axes, "Decoding SmolLM2-135M on two cores", "streams at once", "tokens per second, all streams")


def _delay(axes: Axes, lines: Lines) -> None:
    _line(axes, lines["bound of eight streams"], "eight streams, bound", _GREY, "--")
    _line(axes, lines["eight streams"], "eight streams", _BLUE)
    _line(axes, lines["one stream"], "one stream", _ORANGE, "s-")
    axes.set_xticks([float(x) for x in lines["one stream"]])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    _title(axes, "Decoding over a long ring of two stages", "delay of each hop, ms", "tokens per second, all streams")


def _messages(axes: Axes, lines: Lines) -> None:
    colors = {"ipc": _BLUE, "tcp": _ORANGE}
    for name, points in lines.items():
        kind, _, transport = name.partition(", ")
        ours = kind == "link"
        label = f"{'skippy-zmq' if ours else 'raw pyzmq'}, {transport}"
        _line(axes, points, label, colors[transport], "o-" if ours else "x--")
    _doubling(axes, [float(x) for x in next(iter(lines.values()))], _bytes)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(loc="lower right")
    _title(axes, "A stream of messages between two processes", "payload of a message", "MiB per second")


def _bytes(value: float) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} B"


def _bubbles(axes: Axes, _lines: Lines) -> None:
    for n_stages, color in zip(_STAGES, (_GREY, _BLUE, _ORANGE, _GREEN), strict=True):
        points = {str(streams): steady_decode(n_stages, streams).bubble for streams in _STREAMS}
        _line(axes, points, f"{n_stages} stage{'s' if n_stages > 1 else ''}", color)
    _doubling(axes, _STREAMS)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(-0.02, 1)
    axes.legend(loc="upper right")
    _title(axes, "Idle time of stages while decoding (simulated)", "streams at once", "share of time without work")


if __name__ == "__main__":
    for written in draw_all():
        print(written)
