"""Plot a report: time and memory against sequence length and against ranks. Needs matplotlib.

Several lengths or ranks are drawn as lines; a single one as bars, the shortest on top.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringverify.errors import Inconclusive, UsageError
from ringverify.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
PER_RANK = "n / ranks"
CLOSEST_LABELS = 0.08
"""Least distance of two labels of an axis, as a fraction of the axis."""
MOST_WITHIN = 6
"""Largest number of lines whose legend is drawn among them; the legend of more is put beside the axes."""
Series = dict[str, list[tuple[float, float, float, float]]]
"""By label: (x, y, lower and upper end of the spread)."""


def look_at(path: Path) -> None:
    """Check, before anything is measured, that a plot can be drawn.

    Raises:
        UsageError: the file's suffix is not one of `SUFFIXES`.
        Inconclusive: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Inconclusive("--plot needs matplotlib: pip install 'ringverify[plots]'")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a report."""
    drawn = io.BytesIO()
    figure(report).savefig(drawn, format=path.suffix[1:])
    write_whole(path, drawn.getvalue())


def figure(report: Mapping[str, Any]) -> Figure:
    """Return the plot of a report."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in _panels(report) if panel[3]]
    across = min(2, max(1, len(panels)))
    down = max(1, -(-len(panels) // across))
    drawn = Figure(figsize=(7 * across, 4.5 * down), layout="constrained")
    FigureCanvasAgg(drawn)
    for number, (title, x, y, series) in enumerate(panels, 1):
        axes = drawn.add_subplot(down, across, number)
        places = {place for points in series.values() for place, *_ in points}
        if len(places) == 1:
            _bars(axes, series)
            axes.set(title=f"{title}\n{x} {places.pop():g}", xlabel=y)
        else:
            _lines(axes, series)
            axes.set(title=title, xlabel=x, ylabel=y)
            ticks = apart(places)
            axes.set_xticks(ticks, labels=[f"{place:,.0f}" for place in ticks])
    return drawn


def apart(places: Collection[float]) -> list[float]:
    """Choose places on a logarithmic axis whose labels do not run into one another, powers of two first."""
    width = math.log(max(places) / min(places))
    chosen: list[float] = []
    for place in sorted(places, key=lambda one: (not math.log2(one).is_integer(), one)):
        if all(abs(math.log(place / other)) >= CLOSEST_LABELS * width for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _lines(axes: Axes, series: Series) -> None:
    """Draw a line for each label, with its spread as a band."""
    for label, points in series.items():
        places, middle, low, high = zip(*sorted(points), strict=True)
        style = "--" if label.startswith(PER_RANK) else "-"
        line = axes.plot(places, middle, style, marker="o", label=label)[0]
        axes.fill_between(places, low, high, alpha=0.2, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    if len(series) > MOST_WITHIN:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.legend(fontsize="small")


def _bars(axes: Axes, series: Series) -> None:
    """Draw a bar for each label, with its value, and its spread as a whisker."""
    found = sorted(((middle, low, high, label) for label, [(_, middle, low, high)] in series.items()), reverse=True)
    middle, low, high, labels = zip(*found, strict=True)
    whiskers = [[m - bottom for m, bottom in zip(middle, low, strict=True)]]
    whiskers.append([top - m for m, top in zip(middle, high, strict=True)])
    axes.barh(labels, middle, xerr=whiskers, height=0.6, capsize=3, ecolor="black", color="tab:blue")
    room = 0.02 * max(high)
    for place, (value, end) in enumerate(zip(middle, high, strict=True)):
        axes.text(end + room, place, f"{value:.3g}", va="center", fontsize="small")
    axes.set_xlim(0, 1.15 * max(high))
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _panels(report: Mapping[str, Any]) -> Iterable[tuple[str, str, str, Series]]:
    """Yield title, label of x, label of y, and series of each panel."""
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
        yield title, "sequence length", "MiB", _peaks(one["entries"], "length", "ranks", "{} rank{}")
        by_ranks = _peaks(one["entries"], "ranks", "length", "n = {}")
        by_ranks |= _peaks(one["entries"], "ranks", "positions", PER_RANK + " = {:.0f}")
        longest = max(map(len, by_ranks.values()), default=0)
        whole = {label: points for label, points in by_ranks.items() if len(points) == longest}
        yield title, "ranks", "MiB", whole


def _times(entries: Iterable[Mapping[str, Any]], along: str) -> Series:
    series: Series = {}
    for entry in entries:
        for row in entry["rows"]:
            spread = row["both"]["seconds"]
            series.setdefault(row["side"], []).append((entry[along], spread["median"], spread["low"], spread["high"]))
    return series


def _peaks(entries: Iterable[Mapping[str, Any]], along: str, of: str, label: str) -> Series:
    series: Series = {}
    for entry in sorted(entries, key=lambda one: one[of]):
        peak = entry["peak"] / 2**20
        series.setdefault(label.format(entry[of], "s" * (entry[of] != 1)), []).append((entry[along], peak, peak, peak))
    return {name: points for name, points in series.items() if len(points) > 1}
