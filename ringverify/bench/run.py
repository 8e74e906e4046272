"""A benchmark from wish to report: what is asked for is looked at first, then measured, shown and written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringverify.bench import machine, speed
from ringverify.bench.sides import Side, chosen_sides
from ringverify.bench.table import Tables
from ringverify.bench.workload import PatternName, Shape, Workload, chosen_patterns, workload
from ringverify.errors import UsageError
from ringverify.reports.jsonl import finite, write_whole
from ringverify.worlds.gloo import MOST_PROCESSES, GlooWorld

SCHEMA = 1
Report = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What a user asked of a benchmark.

    Attributes:
        lengths: positions over all ranks.
        ranks: numbers of ranks.
        shape: heads and dtype.
        patterns: by name; none is dense and causal.
        causal: for patterns that can be either.
        rounds: how many are measured.
        sides: by name; `None` is ours and the installed peers.
        phases: take our ring apart.
        report: where to write the report.
    """

    lengths: tuple[int, ...] = (4096,)
    ranks: tuple[int, ...] = (2,)
    shape: Shape = Shape()
    patterns: tuple[PatternName, ...] = ()
    causal: bool | None = None
    rounds: int = 5
    sides: tuple[str, ...] | None = None
    phases: bool = False
    report: Path | None = None


def run(wish: Wish, tables: Tables, progress: speed.Progress) -> int:
    """Measure what was asked for, show it as it comes, write it, and return 0.

    Raises:
        UsageError: an option is wrong.
        Inconclusive: a world died, so that there is nothing to report.
    """
    sides, remarks = chosen_sides(wish.sides)
    workloads = list(_workloads(wish))
    _look_at(wish, workloads, sides)
    report: Report = {
        "bench": SCHEMA,
        **machine.versions(),
        "machine": machine.machine(),
        "options": _options(wish, sides),
        "remarks": remarks,
        "speed": [],
    }
    tables.header(report)
    with contextlib.closing(GlooWorld()) as world:
        for one in workloads:
            entry = speed.measured(world, one, sides, wish.rounds, progress, phases=wish.phases)
            report["speed"].append(entry)
            tables.speed(entry)
    report["machine"]["load_after"] = machine.load()
    tables.footer(report)
    if wish.report is not None:
        write(wish.report, json.dumps(finite(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return 0


def _workloads(wish: Wish) -> Iterator[Workload]:
    for world_size in wish.ranks:
        for length in wish.lengths:
            for pattern in chosen_patterns(wish.patterns, wish.causal):
                yield workload(pattern, length, world_size, wish.shape, wish.causal)


def _look_at(wish: Wish, workloads: list[Workload], sides: list[Side]) -> None:
    """Find out before anything is measured what could not end well."""
    if max(wish.ranks) > MOST_PROCESSES:
        raise UsageError(f"--ranks {max(wish.ranks)}: at most {MOST_PROCESSES} processes are started on one machine")
    available = machine.available_bytes()
    for one in workloads:
        needed = machine.needed_bytes(one, len(sides))
        if available is not None and needed > available:
            raise UsageError(
                f"--length {one.problem.nq}: about {needed / 2**30:.1f} GiB are needed for {len(sides)} sides, and "
                f"{available / 2**30:.1f} GiB are available; use a shorter length, fewer --heads or fewer --sides"
            )
    if wish.report is not None:
        writable(wish.report)


def writable(path: Path) -> None:
    """Find out that a file could not be written.

    Raises:
        UsageError: it is a folder, or its folder is not there.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from None


def _options(wish: Wish, sides: list[Side]) -> dict[str, Any]:
    return {
        "lengths": list(wish.lengths),
        "ranks": list(wish.ranks),
        **dataclasses.asdict(wish.shape),
        "patterns": list(chosen_patterns(wish.patterns, wish.causal)),
        "causal": wish.causal,
        "rounds": wish.rounds,
        "sides": [side.name for side in sides],
        "phases": wish.phases,
    }
