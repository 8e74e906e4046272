"""A benchmark on the terminal: what it was measured on, and a table a workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringverify.bench.machine import BUSY
from ringverify.bench.phases import PHASES

PASSES = ("forward", "backward", "both")
WIDEST = 200
"""Columns that no table exceeds."""


class Tables:
    """Shows the parts of a report as they come. Tables are as wide as they are: rich would cut what does not fit."""

    def __init__(self, console: Console) -> None:
        console.width = max(console.width, WIDEST)
        self.console = console

    def header(self, report: Mapping[str, Any]) -> None:
        """What measures, on what."""
        here, options = report["machine"], report["options"]
        self._line(
            f"ringverify {report['ringverify']}, torch {report['torch']}, python {report['python']}, "
            f"{report['platform']}"
        )
        self._line(
            f"{here['cpu']}, {here['processors']} processors, load {_load(here['load_before'])}; "
            f"{options['rounds']} rounds of all sides in turn"
        )
        if busy(here):
            self._line("others are at work on this machine: expect a wide spread", "yellow")
        for remark in report["remarks"]:
            self._line(f"left out: {remark}", "dim")

    def speed(self, entry: Mapping[str, Any]) -> None:
        """Times and ratios of one workload: medians, and quartiles in brackets."""
        self._line(f"\n{entry['title']}", "bold")
        table = _table("side", "forward ms", "backward ms", "both ms", "× plain", "× floor")
        for row in entry["rows"]:
            table.add_row(
                row["side"],
                *(milliseconds(row[name]["seconds"]) for name in PASSES),
                ratio(row["both"].get("to_plain")),
                ratio(row["both"].get("to_floor")),
            )
        for one in entry["left_out"]:
            table.add_row(one["side"], Text(one["reason"], style="dim"), "", "", "", "")
        self.console.print(table)
        if entry["phases"] is not None:
            self.phases(entry["phases"])

    def phases(self, phases: Mapping[str, Any]) -> None:
        """Where our ring's time goes, a line a rank and pass."""
        table = _table("ring, by phase", *(f"{name} ms" for name in PHASES), "exposed communication")
        for name, ranks in phases.items():
            for rank, one in enumerate(ranks):
                share = one["communication"] / one["total"]
                table.add_row(
                    f"{name}, rank {rank}", *(f"{1e3 * one[phase]:.1f}" for phase in PHASES), f"{100 * share:.1f} %"
                )
        self.console.print(table)

    def footer(self, report: Mapping[str, Any]) -> None:
        """What the machine was like at the end."""
        self._line(f"\nload at the end {_load(report['machine']['load_after'])}", "dim")

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)


def busy(machine: Mapping[str, Any]) -> bool:
    """Whether others were at work when it began."""
    load = machine["load_before"]
    return load is not None and load > BUSY * machine["processors"]


def milliseconds(spread: Mapping[str, float]) -> str:
    """A time with its quartiles."""
    median, low, high = (1e3 * spread[name] for name in ("median", "low", "high"))
    digits = 0 if median >= 1000 else 1 if median >= 10 else 2
    return f"{median:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


def ratio(spread: Mapping[str, float] | None) -> str:
    """A ratio with its quartiles."""
    if spread is None:
        return "-"
    return f"{spread['median']:.2f} [{spread['low']:.2f}–{spread['high']:.2f}]"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _load(load: float | None) -> str:
    return "unknown" if load is None else f"{load:.1f}"
