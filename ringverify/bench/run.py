"""Run a benchmark: check the options first, then measure, show the tables, and write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringverify.bench import cuda, machine, markdown, memory, plots, serving, speed
from ringverify.bench.sides import Side, chosen_sides, side
from ringverify.bench.table import Tables
from ringverify.bench.workload import PatternName, Shape, Workload, chosen_patterns, workload
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import as_json
from ringverify.files import look_at_place, read_json, write_named
from ringverify.reports.progress import Progress
from ringverify.reports.story import presentable
from ringverify.worlds.limits import available_memory
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.gloo import MOST_PROCESSES, GlooWorld
from ringverify.worlds.processes.rank import ThisMachine

SCHEMA = 1
Report = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `ringverify bench`.

    Attributes:
        lengths: positions over all ranks.
        ranks: numbers of ranks.
        shape: batch, heads, head_dim, dtype, and branches of dilations.
        patterns: names of patterns; empty for dense and causal, or for dilations if `dilated`.
        dilated: run the dilated patterns where no pattern is named.
        causal: whether the patterns are causal; `None` for each pattern's default.
        rounds: rounds to measure; 0 measures no times, only memory.
        sides: names of sides; `None` for ours and the installed peers.
        phases: also measure where our ring's time goes.
        memory: also measure peaks by component.
        caches: kinds of serving to measure, each with the positions in its cache.
        report: where to write the report.
        plot: where to draw it, as SVG or PNG.
        markdown: where to write it as a page.
        saved: a report to show again; nothing is measured.
    """

    lengths: tuple[int, ...] = (4096,)
    ranks: tuple[int, ...] = (2,)
    shape: Shape = Shape()
    patterns: tuple[PatternName, ...] = ()
    dilated: bool = False
    causal: bool | None = None
    rounds: int = 5
    sides: tuple[str, ...] | None = None
    phases: bool = False
    memory: bool = False
    caches: tuple[tuple[serving.Kind, int], ...] = ()
    report: Path | None = None
    plot: Path | None = None
    markdown: Path | None = None
    saved: Path | None = None


def run(asked: BenchOptions, tables: Tables, progress: Progress) -> int:
    """Measure what was asked for, show it as it comes, write it, and return 0.

    Raises:
        UsageError: an option is wrong.
        Inconclusive: a rank failed or could not be started, or matplotlib is needed and not installed.
    """
    for path in (asked.report, asked.plot, asked.markdown):
        if path is not None and (reason := look_at_place(path)) is not None:
            raise UsageError(f"cannot write {path}{reason}")
    if asked.plot is not None:
        plots.look_at(asked.plot)
    if not (asked.rounds or asked.memory or asked.saved):
        raise UsageError("--repeat 0 measures no times: pass at least 1, or add --memory")
    if asked.saved is not None:
        report = read(asked.saved)
        tables.everything(report)
    else:
        report = _begun(asked)
        try:
            _measure(asked, report, tables, progress)
        except (Inconclusive, KeyboardInterrupt) as error:
            if report["speed"] or report["serving"] or report["memory"]:  # what was measured is kept
                report["remarks"].append(f"ended early: {error or 'interrupted'}")
                report["machine"]["load_after"] = machine.load()
                _write(asked, report)
            raise
    _write(asked, report)
    return 0


def _write(asked: BenchOptions, report: Report) -> None:
    if asked.report is not None:
        write_named(asked.report, json.dumps(as_json(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if asked.markdown is not None:
        write_named(asked.markdown, markdown.page(report))
    if asked.plot is not None:
        plots.draw(report, asked.plot)


def _begun(asked: BenchOptions) -> Report:
    sides, remarks = chosen_sides(asked.sides, _patterns(asked))
    _look_at(asked, list(_workloads(asked)), sides)
    return {
        "bench": SCHEMA,
        **machine.versions(),
        "machine": machine.machine(),
        "options": _options(asked, sides),
        "remarks": remarks,
        "speed": [],
        "serving": [],
        "memory": [],
        "cuda": None,
    }


def _measure(asked: BenchOptions, report: Report, tables: Tables, progress: Progress) -> None:
    """Fill in a report, part by part."""
    sides = [side(name) for name in report["options"]["sides"]]
    tables.header(report)
    with contextlib.closing(GlooWorld(ThisMachine(reproducible=False))) as world:
        for one in _workloads(asked) if asked.rounds else ():
            entry = speed.measured(world, one, sides, asked.rounds, progress, phases=asked.phases)
            report["speed"].append(entry)
            tables.speed(entry)
        for kind, cached in asked.caches if asked.rounds else ():
            for ranks in asked.ranks:
                asking = serving.Serving(kind, cached, ranks, asked.shape)
                report["serving"].append(serving.measured(world, asking, asked.rounds, progress))
                tables.serving(report["serving"][-1])
    if asked.memory:
        for pattern in _patterns(asked):
            report["memory"].append(_memory(asked, pattern, progress))
            tables.memory(report["memory"][-1])
    if asked.rounds and asked.lengths:
        report["cuda"] = _cuda(asked, progress)
        tables.cuda(report["cuda"])
    report["machine"]["load_after"] = machine.load()
    tables.footer(report)


def _patterns(asked: BenchOptions) -> tuple[PatternName, ...]:
    return chosen_patterns(asked.patterns, asked.causal, dilated=asked.dilated)


def _memory(asked: BenchOptions, pattern: PatternName, progress: Progress) -> dict[str, Any]:
    def make(length: int, ranks: int) -> Workload:
        return workload(pattern, length, ranks, asked.shape, asked.causal)

    progress.start("memory", pattern, len(memory.points(asked.lengths, memory.LARGEST_WORLD)))
    try:
        with contextlib.closing(ContainedWorld()) as world:
            found = memory.report(world, "ring", asked.lengths, make, progress.step)
    finally:
        progress.stop()
    return {"pattern": pattern, **found}


def _cuda(asked: BenchOptions, progress: Progress) -> dict[str, Any]:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress.step(done)

    progress.start("cuda", "one device", 2 * 3 * (asked.rounds + 1))
    try:
        return cuda.report(asked.rounds, step)
    finally:
        progress.stop()


def _workloads(asked: BenchOptions) -> Iterator[Workload]:
    for world_size in asked.ranks:
        for length in asked.lengths:
            for pattern in _patterns(asked):
                yield workload(pattern, length, world_size, asked.shape, asked.causal)


def _look_at(asked: BenchOptions, workloads: list[Workload], sides: list[Side]) -> None:
    """Check, before anything is measured, the number of processes and the memory that they need."""
    if asked.caches and min(asked.ranks) < 2:
        raise UsageError(f"--{asked.caches[0][0]} on one rank: a cache that lies sharded takes at least --ranks 2")
    if max(asked.ranks) > MOST_PROCESSES:
        raise UsageError(f"--ranks {max(asked.ranks)}: at most {MOST_PROCESSES} processes are started on one machine")
    available = available_memory()
    for kind, cached in asked.caches:
        needed = machine.cache_bytes(asked.shape, cached, max(asked.ranks))
        if available is not None and needed > available:
            raise UsageError(
                f"--{kind} {cached}: about {needed / 2**30:.1f} GiB are needed, and {available / 2**30:.1f} GiB are "
                "available; use a shorter cache or fewer --heads"
            )
    for one in workloads:
        needed = machine.needed_bytes(one, len(sides))
        if available is not None and needed > available:
            raise UsageError(
                f"--length {one.problem.nq}: about {needed / 2**30:.1f} GiB are needed for {len(sides)} sides, and "
                f"{available / 2**30:.1f} GiB are available; use a shorter length, fewer --heads or fewer --sides"
            )


def read(path: Path) -> Report:
    """Read a report that was written before.

    Raises:
        UsageError: the file cannot be read, or is not such a report.
    """
    try:
        report = read_json(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(report, dict) or report.get("bench") != SCHEMA:
        raise UsageError(f"{path} is no report of ringverify bench with schema {SCHEMA}; --json FILE.json writes one")
    shown: Report = presentable(report)
    return shown


def _options(asked: BenchOptions, sides: list[Side]) -> dict[str, Any]:
    return {
        "lengths": list(asked.lengths),
        "ranks": list(asked.ranks),
        **dataclasses.asdict(asked.shape),
        "patterns": list(_patterns(asked)),
        "causal": asked.causal,
        "rounds": asked.rounds,
        "sides": [side.name for side in sides],
        "phases": asked.phases,
        "memory": asked.memory,
    }
