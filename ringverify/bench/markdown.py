"""A report as a page: every number on it comes from the report, none is typed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ringverify.bench import serving
from ringverify.bench.sides import MEANING, ONE_PROCESS_PER_RANK
from ringverify.bench.table import (
    busy,
    dilation_lines,
    load,
    memory_table,
    phases_table,
    serving_table,
    sinks_lines,
    speed_table,
    versions,
)
from ringverify.reports.markdown import table


def page(report: Mapping[str, Any]) -> str:
    """Return the whole page as Markdown."""
    return "\n".join([*_head(report), *_speed(report), *_serving(report), *_memory(report), *_cuda(report)]) + "\n"


def _head(report: Mapping[str, Any]) -> Iterable[str]:
    here, options = report["machine"], report["options"]
    yield "# Benchmark"
    yield ""
    yield "Written by `ringverify bench --markdown`; no number here was typed."
    yield ""
    yield f"- {versions(report)}"
    yield f"- {here['cpu']}, {here['processors']} processors, load average {load(here['load_before'])} before and "
    yield f"  {load(here['load_after'])} after{': other programs were running' if busy(here) else ''}"
    if options["rounds"]:
        yield f"- {options['rounds']} rounds in which all sides take turns; medians, with quartiles in brackets"
        together = ", from forward and backward together" if report["speed"] else ""
        yield f"- a ratio is formed within each round{together}; its median is shown"
    for remark in report["remarks"]:
        yield f"- {remark}"
    yield ""


def _speed(report: Mapping[str, Any]) -> Iterable[str]:
    if not report["speed"]:
        return
    yield "## Speed"
    yield ""
    for side in report["options"]["sides"]:
        yield f"- {side}: {MEANING.get(side, f'{ONE_PROCESS_PER_RANK}, with the sharding that it declares')}"
    yield ""
    for entry in report["speed"]:
        yield f"### {entry['title']}"
        yield ""
        yield table(*speed_table(entry, "× plain", "× floor"))
        for one in entry["left_out"]:
            yield f"Left out: {one['side']}: {one['reason']}."
            yield ""
        for line in (*dilation_lines(entry.get("dilation")), *sinks_lines(entry.get("sinks", {}))):
            yield f"{line}."
            yield ""
        if entry["phases"] is not None:
            yield table(*phases_table(entry["phases"]))


def _serving(report: Mapping[str, Any]) -> Iterable[str]:
    found = report.get("serving", ())
    if not found:
        return
    yield "## Against a cache"
    yield ""
    for side in dict.fromkeys(row["side"] for entry in found for row in entry["rows"]):
        yield f"- {side}: {serving.MEANING[side]}"
    yield "- bytes sent: in one call, by the rank that sends the most"
    yield ""
    for entry in found:
        yield f"### {entry['title']}"
        yield ""
        yield table(*serving_table(entry))


def _memory(report: Mapping[str, Any]) -> Iterable[str]:
    for found in report["memory"]:
        yield f"## Memory, {found['pattern']}"
        yield ""
        yield "MiB of the worst rank at its peak, forward and backward; k, v and positions, which are the caller's, are"
        yield "left out of the ratio to what was predicted."
        yield ""
        yield table(*memory_table(found))
        lines = [[ranks, f"{one:.3f}"] for ranks, one in found["exponents"].items() if one is not None]
        if lines:
            yield table(["ranks", "exponent of the peak in n / ranks"], lines)


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
        yield table(*speed_table(entry, "× flash"))
