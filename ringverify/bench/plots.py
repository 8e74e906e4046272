"""A report drawn: time and memory against sequence length and against ranks. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ringverify.errors import Inconclusive, UsageError

SUFFIXES = (".svg", ".png")
Series = dict[str, list[tuple[float, float, float, float]]]
"""By label: (x, y, lower and upper end of the spread)."""


def look_at(path: Path) -> None:
    """Find out before anything is measured that nothing could be drawn.

    Raises:
        UsageError: not a kind of file that is drawn.
        Inconclusive: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Inconclusive("--plot needs matplotlib: pip install 'ringverify[plots]'")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a report."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in _panels(report) if panel[3]]
    across = min(2, max(1, len(panels)))
    down = max(1, -(-len(panels) // across))
    figure = Figure(figsize=(7 * across, 4.5 * down), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, x, y, series) in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number)
        for label, points in series.items():
            places, middle, low, high = zip(*sorted(points), strict=True)
            line = axes.plot(places, middle, marker="o", label=label)[0]
            axes.fill_between(places, low, high, alpha=0.2, color=line.get_color())
        axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _panels(report: Mapping[str, Any]) -> Iterable[tuple[str, str, str, Series]]:
    """Title, axes and lines of each panel that has any."""
    speed, memory = report["speed"], report["memory"]
    for pattern in dict.fromkeys(entry["pattern"] for entry in speed):
        entries = [entry for entry in speed if entry["pattern"] == pattern]
        lengths, ranks = {one["length"] for one in entries}, {one["ranks"] for one in entries}
        if len(lengths) > 1 or len(ranks) == 1:
            widest = max(ranks)
            shown = [one for one in entries if one["ranks"] == widest]
            title = f"{pattern}, {widest} ranks, forward and backward"
            yield title, "sequence length", "seconds", _times(shown, "length")
        if len(ranks) > 1:
            longest = max(lengths)
            shown = [one for one in entries if one["length"] == longest]
            yield f"{pattern}, n = {longest}, forward and backward", "ranks", "seconds", _times(shown, "ranks")
    for one in memory:
        title = f"{one['pattern']}, peak of a rank"
        yield title, "sequence length", "MiB", _peaks(one["entries"], "length", "ranks", "{} ranks")
        by_ranks = _peaks(one["entries"], "ranks", "length", "n = {}")
        by_ranks |= _peaks(one["entries"], "ranks", "positions", "n / ranks = {:.0f}")
        longest = max(map(len, by_ranks.values()), default=0)
        whole = {label: points for label, points in by_ranks.items() if len(points) == longest}
        yield title, "ranks", "MiB", whole
    for one in report["crossover"]:
        series: Series = {}
        for point in one["points"]:
            for name, spread in point["seconds"].items():
                series.setdefault(name, []).append(_point(point["length"], spread))
        yield f"crossover, {one['pattern']}, {one['ranks']} ranks", "sequence length", "seconds", series


def _times(entries: Iterable[Mapping[str, Any]], along: str) -> Series:
    series: Series = {}
    for entry in entries:
        for row in entry["rows"]:
            series.setdefault(row["side"], []).append(_point(entry[along], row["both"]["seconds"]))
    return series


def _point(x: float, spread: Mapping[str, float]) -> tuple[float, float, float, float]:
    return x, spread["median"], spread["low"], spread["high"]


def _peaks(entries: Iterable[Mapping[str, Any]], along: str, of: str, label: str) -> Series:
    series: Series = {}
    for entry in sorted(entries, key=lambda one: one[of]):
        peak = entry["peak"] / 2**20
        series.setdefault(label.format(entry[of]), []).append((entry[along], peak, peak, peak))
    return {name: points for name, points in series.items() if len(points) > 1}
