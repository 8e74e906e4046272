"""A benchmark on the terminal: the machine that it ran on, and a table for each workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringverify.bench.machine import BUSY
from ringverify.bench.memory import COMPONENTS
from ringverify.bench.phases import PHASES
from ringverify.bench.timing import PASSES

Cells = tuple[list[str], list[list[str]]]
"""Head and rows of a table."""
WIDEST = 200
"""Console width in columns, which no table exceeds."""


class Tables:
    """Prints the parts of a report as they come. The console is widened, because rich would cut what does not fit."""

    def __init__(self, console: Console) -> None:
        console.width = max(console.width, WIDEST)
        self.console = console

    def header(self, report: Mapping[str, Any]) -> None:
        """Print the versions, the machine, and the remarks."""
        here, options = report["machine"], report["options"]
        self._line(versions(report))
        self._line(
            f"{here['cpu']}, {here['processors']} processors, load {load(here['load_before'])}; "
            + (f"{options['rounds']} rounds of all sides in turn" if options["rounds"] else "no times are taken")
        )
        if busy(here):
            self._line(
                f"load average {load(here['load_before'])} on {here['processors']} processors: other programs are "
                "running; expect wide spreads, widest for calls of several threads",
                "yellow",
            )
        for remark in report["remarks"]:
            self._line(remark, "dim")

    def speed(self, entry: Mapping[str, Any]) -> None:
        """Print times and ratios of one workload: medians, with quartiles in brackets."""
        self._line(f"\n{entry['title']}", "bold")
        table = _table(*speed_table(entry, "× plain", "× floor"))
        for one in entry["left_out"]:
            table.add_row(one["side"], Text(one["reason"], style="dim"), "", "", "", "")
        self.console.print(table)
        for line in (*dilation_lines(entry.get("dilation")), *sinks_lines(entry.get("sinks", {}))):
            self._line(line)
        if entry["phases"] is not None:
            self.phases(entry["phases"])

    def serving(self, entry: Mapping[str, Any]) -> None:
        """Print times, ratios and bytes of a token or a chunk against a cache."""
        self._line(f"\n{entry['title']}", "bold")
        self.console.print(_table(*serving_table(entry)))

    def phases(self, phases: Mapping[str, Any]) -> None:
        """Print where our ring's time goes, a line for each pass and rank."""
        self.console.print(_table(*phases_table(phases)))

    def memory(self, found: Mapping[str, Any]) -> None:
        """Print the peaks of the worst rank, by component."""
        self._line(f"\nmemory, {found['pattern']}: MiB of the worst rank at its peak, forward and backward", "bold")
        self.console.print(_table(*memory_table(found)))
        told = ", ".join(
            f"{exponent:.3f} on {ranks} {'rank' if ranks == '1' else 'ranks'}"
            for ranks, exponent in found["exponents"].items()
            if exponent is not None
        )
        self._line(f"peak memory grows as (n / ranks)^e, with e = {told or '?, which takes two lengths'}")

    def cuda(self, found: Mapping[str, Any]) -> None:
        """Print the comparisons on one CUDA device, or why there are none."""
        if found["reason"] is not None:
            self._line(f"\ncuda: {found['reason']}")
            return
        for entry in found["speed"]:
            self._line(f"\n{found['device']}: {entry['title']}", "bold")
            self.console.print(_table(*speed_table(entry, "× flash")))

    def everything(self, report: Mapping[str, Any]) -> None:
        """Print a whole report."""
        self.header(report)
        for show, part in ((self.speed, "speed"), (self.serving, "serving"), (self.memory, "memory")):
            for entry in report.get(part, ()):  # reports of before have no serving
                show(entry)
        if report["cuda"] is not None:
            self.cuda(report["cuda"])
        self.footer(report)

    def footer(self, report: Mapping[str, Any]) -> None:
        """Print the load average at the end."""
        self._line(f"\nload at the end {load(report['machine']['load_after'])}", "dim")

    def _line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)


def busy(machine: Mapping[str, Any]) -> bool:
    """Whether other programs were at work when the benchmark began."""
    average = machine["load_before"]
    return average is not None and average > BUSY * machine["processors"]


def milliseconds(spread: Mapping[str, float]) -> str:
    """Format a time in milliseconds: the median, with quartiles in brackets."""
    median, low, high = (1e3 * spread[name] for name in ("median", "low", "high"))
    digits = 0 if median >= 1000 else 1 if median >= 10 else 2
    return f"{median:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"


def ratio(spread: Mapping[str, float] | None) -> str:
    """Format a ratio: the median, with quartiles in brackets."""
    if spread is None:
        return "-"
    return f"{spread['median']:.2f} [{spread['low']:.2f}–{spread['high']:.2f}]"


def mebibytes(count: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{count / 2**20:.{2 if count >= 2**20 else 4}f}"


def dilation_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Return lines on what a dilation saves; none without a dilation."""
    if found is None:
        return []
    fewer = found["dense_pairs"] / found["pairs"]
    lines = [f"pairs: {found['pairs']:,}, {fewer:.2f} times fewer than dense"]
    if found["faster"] is not None:
        gained = found["faster"]["median"] / fewer
        lines.append(
            f"the ring is {ratio(found['faster'])} times as fast as the dense ring, {100 * gained:.0f} % of the "
            f"{fewer:.2f} that fewer pairs allow"
        )
    return lines


def sinks_lines(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each side on what sinks cost it; none without sinks."""
    return [
        f"{side} with sinks takes "
        + ", ".join(f"{by[name]['median']:.3f} [{by[name]['low']:.3f}–{by[name]['high']:.3f}] ({name})" for name in by)
        + " times what it takes without"
        for side, by in found.items()
    ]


def speed_table(entry: Mapping[str, Any], *against: str) -> Cells:
    """Times and ratios of one workload; `against` titles the ratios to the plain call and to the floor."""
    head = ["side", *(f"{name} ms" for name in PASSES), *against]
    ratios = ("to_plain", "to_floor")[: len(against)]
    return head, [
        [
            row["side"],
            *(milliseconds(row[name]["seconds"]) for name in PASSES),
            *(ratio(row["both"].get(name)) for name in ratios),
        ]
        for row in entry["rows"]
    ]


def serving_table(entry: Mapping[str, Any]) -> Cells:
    """Times, ratios to the first side and bytes of a token or a chunk against a cache."""
    return ["side", "forward ms", f"× {entry['rows'][0]['side']}", "bytes sent"], [
        [row["side"], milliseconds(row["seconds"]), ratio(row["to_first"]), f"{row['sent']:,}"] for row in entry["rows"]
    ]


def phases_table(phases: Mapping[str, Any]) -> Cells:
    """Where our ring's time goes, a row for each pass and rank."""
    return ["ring, by phase", *(f"{name} ms" for name in PHASES), "exposed communication"], [
        [
            f"{name}, rank {rank}",
            *(f"{1e3 * one[phase]:.1f}" for phase in PHASES),
            f"{100 * one['communication'] / one['total']:.1f} %",
        ]
        for name, ranks in phases.items()
        for rank, one in enumerate(ranks)
    ]


def memory_table(found: Mapping[str, Any]) -> Cells:
    """Peaks of the worst rank, by component."""
    return ["n", "ranks", "n / ranks", "peak", *COMPONENTS, "÷ predicted"], [
        [
            str(entry["length"]),
            str(entry["ranks"]),
            f"{entry['positions']:.0f}",
            mebibytes(entry["peak"]),
            *(mebibytes(entry["measured"][name]) for name in COMPONENTS),
            f"{entry['to_predicted']:.3f}",
        ]
        for entry in found["entries"]
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def load(average: float | None) -> str:
    """Format a load average, which may be unknown."""
    return "unknown" if average is None else f"{average:.1f}"


def versions(report: Mapping[str, Any]) -> str:
    """Format the versions and the platform."""
    return (
        f"ringverify {report['ringverify']}, torch {report['torch']}, python {report['python']}, {report['platform']}"
    )
