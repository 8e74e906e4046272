"""A report as a page: every number on it comes from the report, none is typed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringverify.bench.memory import COMPONENTS
from ringverify.bench.phases import PHASES
from ringverify.bench.sides import MEANING
from ringverify.bench.table import (
    PASSES,
    busy,
    crossover_lines,
    dilation_lines,
    load,
    mebibytes,
    milliseconds,
    ratio,
    versions,
)


def page(report: Mapping[str, Any]) -> str:
    """Return the whole page as Markdown."""
    return "\n".join([*_head(report), *_speed(report), *_memory(report), *_crossover(report), *_cuda(report)]) + "\n"


def _head(report: Mapping[str, Any]) -> Iterable[str]:
    here, options = report["machine"], report["options"]
    yield "# Benchmark"
    yield ""
    yield "Written by `ringverify bench --markdown`; no number here was typed."
    yield ""
    yield f"- {versions(report)}"
    yield f"- {here['cpu']}, {here['processors']} processors, load average {load(here['load_before'])} before and "
    yield f"  {load(here['load_after'])} after{': others were at work' if busy(here) else ''}"
    if options["rounds"]:
        yield f"- {options['rounds']} rounds in which all sides take turns; medians, with quartiles in brackets"
        yield "- a ratio is formed within each round, from forward and backward together; its median is shown"
    for remark in report["remarks"]:
        yield f"- {remark}"
    yield ""


def _speed(report: Mapping[str, Any]) -> Iterable[str]:
    if not report["speed"]:
        return
    yield "## Speed"
    yield ""
    for side in report["options"]["sides"]:
        yield f"- {side}: {MEANING.get(side, 'a process a rank, 1 thread each, with the sharding that it declares')}"
    yield ""
    for entry in report["speed"]:
        yield f"### {entry['title']}"
        yield ""
        lines = [
            [
                row["side"],
                *(milliseconds(row[name]["seconds"]) for name in PASSES),
                ratio(row["both"].get("to_plain")),
                ratio(row["both"].get("to_floor")),
            ]
            for row in entry["rows"]
        ]
        yield from _table(["side", *(f"{name} ms" for name in PASSES), "× plain", "× floor"], lines)
        for one in entry["left_out"]:
            yield f"Left out: {one['side']}: {one['reason']}."
            yield ""
        for line in dilation_lines(entry.get("dilation")):
            yield f"{line}."
            yield ""
        if entry["phases"] is not None:
            yield from _phases(entry["phases"])


def _phases(phases: Mapping[str, Any]) -> Iterable[str]:
    lines = [
        [
            f"{name}, rank {rank}",
            *(f"{1e3 * one[phase]:.1f}" for phase in PHASES),
            f"{100 * one['communication'] / one['total']:.1f} %",
        ]
        for name, ranks in phases.items()
        for rank, one in enumerate(ranks)
    ]
    yield from _table(["ring, by phase", *(f"{phase} ms" for phase in PHASES), "exposed communication"], lines)


def _memory(report: Mapping[str, Any]) -> Iterable[str]:
    for found in report["memory"]:
        yield f"## Memory, {found['pattern']}"
        yield ""
        yield "MiB of the worst rank at its peak, forward and backward; k, v and positions, which are the caller's, are"
        yield "left out of the ratio to what was predicted."
        yield ""
        lines = [
            [
                str(entry["length"]),
                str(entry["ranks"]),
                mebibytes(entry["peak"]),
                *(mebibytes(entry["measured"][name]) for name in COMPONENTS),
                f"{entry['to_predicted']:.3f}",
            ]
            for entry in found["entries"]
        ]
        yield from _table(["n", "ranks", "peak", *COMPONENTS, "÷ predicted"], lines)
        lines = [[ranks, f"{one:.3f}"] for ranks, one in found["exponents"].items() if one is not None]
        if lines:
            yield from _table(["ranks", "exponent of the peak in n / ranks"], lines)


def _crossover(report: Mapping[str, Any]) -> Iterable[str]:
    for found in report["crossover"]:
        yield f"## Crossover, {found['pattern']}, {found['ranks']} ranks"
        yield ""
        names = list(found["points"][0]["seconds"])
        lines = [
            [str(point["length"]), *(milliseconds(point["seconds"][name]) for name in names)]
            for point in found["points"]
        ]
        yield from _table(["n", *(f"{name} ms" for name in names)], lines)
        for line in crossover_lines(found):
            yield f"- {line}"
        yield ""


def _cuda(report: Mapping[str, Any]) -> Iterable[str]:
    found = report["cuda"]
    if found is None:
        return
    yield "## CUDA"
    yield ""
    if found["reason"] is not None:
        yield f"{found['reason'][:1].upper()}{found['reason'][1:]}: these rows are empty."
        return
    for entry in found["speed"]:
        yield f"### {found['device']}: {entry['title']}"
        yield ""
        lines = [
            [row["side"], *(milliseconds(row[name]["seconds"]) for name in PASSES), ratio(row["both"].get("to_plain"))]
            for row in entry["rows"]
        ]
        yield from _table(["side", *(f"{name} ms" for name in PASSES), "× flash"], lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for line in lines:
        yield f"| {' | '.join(line)} |"
    yield ""
