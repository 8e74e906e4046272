"""`ringverify mutants`: run the suite on mutants, and on correct implementations that look wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ringverify.errors import UsageError
from ringverify.faults.catalogue import MUTANTS
from ringverify.files import write_named
from ringverify.lab import expected as expectations
from ringverify.lab import kill_report, merge_kills
from ringverify.lab.expected import Expected
from ringverify.lab.false_alarms import CORRECT, acquittals
from ringverify.lab.kill_tables import markdown
from ringverify.lab.killing import Effort, Kill, expected_kills, first_kills, line, matrix
from ringverify.lab.variants_of_merges import CORRECT as CORRECT_MERGES
from ringverify.lab.variants_of_merges import WRONG
from ringverify.merging.properties import MergeProperty, select_merge
from ringverify.properties.catalogue import select
from ringverify.properties.property import Property

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutantsRequest:
    """Options of `ringverify mutants`.

    Attributes:
        ids: mutants to try, or with `variants` correct implementations; empty for all.
        only: properties to try; `None` for all.
        skip: properties to leave out.
        every: try all properties on every mutant.
        variants: try correct implementations instead of mutants.
        merges: try merges of partial results instead, wrong ones and correct ones.
        expected: file of the expected kills, which are tried instead of all properties.
        write_expected: where to write the cheapest kill of each mutant; needs `every`.
        report: file to which the results are added.
        table: file for the tables that are made from `report`; nothing is run.
        seed: decides which cases are tried.
        most: examples of each property at most; with `variants`, of all properties together.
        jobs: processes that work side by side.
    """

    ids: Sequence[str] = ()
    only: Iterable[str] | None = None
    skip: Iterable[str] = ()
    every: bool = False
    variants: bool = False
    merges: bool = False
    expected: Path | None = None
    write_expected: Path | None = None
    report: Path | None = None
    table: Path | None = None
    seed: int = 0
    most: int | None = None
    jobs: int = 1


def run(request: MutantsRequest, say: Say) -> int:
    """Run the command, and return 1 if a mutant survives or a correct implementation is rejected, else 0.

    Raises:
        UsageError: an id, a property, a file or a combination of options is wrong.
        Inconclusive: the world could not be set up.
    """
    _look_at(request)
    if request.table is not None:
        return _write_table(request.table, request.report, say)
    if request.report is not None:
        kill_report.read(request.report)  # a damaged file is refused before the run rather than after it
    choose: Callable[..., Sequence[Property | MergeProperty]] = select_merge if request.merges else select
    effort = Effort(
        properties=tuple(property.id for property in choose(request.only, request.skip)),
        seed=request.seed,
        most=request.most,
        jobs=request.jobs,
    )
    ids = request.ids or tuple(_known(request))
    if request.merges:
        return _merges(ids, effort, request.report, say)
    if request.variants:
        return _variants(ids, effort, request.report, say)
    if request.expected is not None:
        entries = [one for one in expectations.read(request.expected) if one.mutant in ids]
        kills = list(_told(expected_kills(entries, request.jobs), say))
        return _survivors([one.mutant for one in kills if one.verdict != "killed"], len(kills), say)
    if request.every:
        return _matrix(ids, effort, request.report, request.write_expected, say)
    return _first(ids, effort, request.report, say)


def _known(request: MutantsRequest) -> Iterable[str]:
    return (*WRONG, *CORRECT_MERGES) if request.merges else CORRECT if request.variants else MUTANTS


def _look_at(request: MutantsRequest) -> None:
    """Check the ids, and that options do not contradict one another.

    Raises:
        UsageError: they do, or an id is unknown.
    """
    known, what = _known(request), "merge" if request.merges else "implementation" if request.variants else "mutant"
    for id in request.ids:
        if id not in known:
            hint = "`ringverify list mutants` names them" if what == "mutant" else f"known: {', '.join(known)}"
            raise UsageError(f"unknown {what} {id!r}: {hint}")
    if request.write_expected is not None and not request.every:
        raise UsageError("--write-expected takes the cheapest kill of each mutant, which needs --matrix")
    others = {"--matrix": request.every, "--variants": request.variants, "--expected": request.expected is not None}
    if request.merges and (other := next((name for name, given in others.items() if given), None)):
        raise UsageError(f"{other} is for implementations of attention: leave it out, or --merges")


def _merges(ids: Sequence[str], effort: Effort, report: Path | None, say: Say) -> int:
    found = merge_kills.run(ids, effort, say)
    if report is not None:
        kill_report.add(report, found)
    examples = sum(found.each.values())
    say(f"{len(found.alarms)} false alarms in {examples} examples of {len(found.each)} correct merges")
    return max(_survivors(found.survivors, len(found.kills), say), int(bool(found.alarms)))


def _told(kills: Iterable[Kill], say: Say) -> Iterable[Kill]:
    for one in kills:
        say(line(one))
        yield one


def _first(ids: Sequence[str], effort: Effort, report: Path | None, say: Say) -> int:
    started = time.monotonic()
    kills = list(_told(first_kills(ids, effort), say))
    found = kill_report.first_kills_section(kills, effort, time.monotonic() - started)
    if report is not None:
        kill_report.add(report, found)
    code = _survivors(found.survivors, len(kills), say)
    if found.killed:
        say(f"median: {found.median_examples:g} examples and {found.median_seconds:.2f} s to the first kill")
    if found.value_mutants:
        small = found.value_mutants_shrunk_small
        say(f"value mutants shrunk to at most 3 ranks and 6 tokens: {small} of {found.value_mutants}")
    return code


def _matrix(ids: Sequence[str], effort: Effort, report: Path | None, kept: Path | None, say: Say) -> int:
    started = time.monotonic()
    rows: list[list[Kill]] = []
    try:
        for row in matrix(ids, effort):
            rows.append(row)
            by = {one.property: one.examples for one in row if one.verdict == "killed"}
            say(f"  {row[0].mutant:<7}" + (", ".join(f"{id} {count}" for id, count in by.items()) or "survived"))
    finally:  # an hour's rows outlive Ctrl-C and a machine that gives up
        found = kill_report.matrix_section(rows, effort, time.monotonic() - started)
        if report is not None and rows:
            kill_report.add(report, found)
        if len(rows) < len(ids):
            say(f"{len(rows)} of {len(ids)} mutants were tried; the others: {' '.join(ids[len(rows) :])}")
    if kept is not None:
        cheapest = []
        for row in rows:
            killed = [one for one in row if one.verdict == "killed"]
            if killed:
                best = min(killed, key=lambda one: (one.seconds, one.examples))
                cheapest.append(Expected(best.mutant, best.property, effort.seed, best.examples))
        expectations.write(kept, cheapest)
    say(f"{found.pairs} pairs in {found.seconds:.0f} s")
    return _survivors(found.survivors, len(rows), say)


def _variants(names: Sequence[str], effort: Effort, report: Path | None, say: Say) -> int:
    started = time.monotonic()
    found = []
    for one in acquittals(names, effort):
        found.append(one)
        say(f"  {one.name:<32}{sum(one.examples.values()):>6} examples, {len(one.alarms)} false alarms")
        for alarm in one.alarms:
            say(f"    {alarm.property}: {alarm.summary}\n      {alarm.case}")
    total = kill_report.false_alarms_section(found, effort, time.monotonic() - started)
    if report is not None:
        kill_report.add(report, total)
    say(f"{len(total.alarms)} false alarms in {total.examples} examples of {len(found)} correct implementations")
    return 1 if total.alarms else 0


def _survivors(survivors: Sequence[str], of: int, say: Say) -> int:
    say(f"{of - len(survivors)} of {of} mutants killed")
    if survivors:
        say(f"survivors: {', '.join(survivors)}")
    return 1 if survivors else 0


def _write_table(path: Path, report: Path | None, say: Say) -> int:
    if report is None or not report.is_file():
        raise UsageError("--table is made of what runs found: name their file with --json")
    write_named(path, markdown(kill_report.read(report), report.as_posix()))
    say(f"wrote {path}")
    return 0
