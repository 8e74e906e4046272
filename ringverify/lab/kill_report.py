"""The results of `ringverify mutants` in one file: first kills, the matrix, false alarms. A run writes its section.

The file is JSON, one line per mutant. `ringverify.lab.kill_tables` makes docs/mutants.md from it.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

import ringverify
from ringverify.errors import UsageError
from ringverify.events import as_json
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.fault import FaultKind
from ringverify.files import laid_out, read_json, write_named
from ringverify.lab.false_alarms import Acquittal, Alarm
from ringverify.lab.killing import Effort, Kill
from ringverify.lab.stored import read_back

SCHEMA: Literal[2] = 2

BY_VALUE: tuple[FaultKind, ...] = ("value",)
"""Kinds of mutants that return a wrong result on ordinary inputs, whose shrunk cases have to be small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """How and when a run was made, which every section begins with.

    Attributes:
        date: day of the run, ISO 8601, UTC.
        ringverify: version.
        torch: version.
        python: version.
        seed: see `Effort`.
        max_examples: `Effort.most`.
        jobs: see `Effort`.
        properties: see `Effort`.
        seconds: how long the run took.
    """

    date: str
    ringverify: str
    torch: str
    python: str
    seed: int
    max_examples: int | None
    jobs: int
    properties: tuple[str, ...]
    seconds: float

    @classmethod
    def of(cls, effort: Effort, seconds: float) -> Section:
        """Return what is said of a run that ends now."""
        return Section(
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            ringverify=ringverify.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            seed=effort.seed,
            max_examples=effort.most,
            jobs=effort.jobs,
            properties=effort.properties,
            seconds=round(seconds, 1),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstKill:
    """The first kill of a mutant; see `Kill`.

    Attributes:
        property: `None` if the mutant survived.
        examples: of all properties that were tried.
        seconds: of all properties that were tried.
        ranks: of the shrunk case.
        tokens: of the shrunk case.
    """

    property: str | None
    examples: int
    seconds: float
    ranks: int | None
    tokens: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstKills(Section):
    """The first kill of each mutant.

    Attributes:
        mutants: how many were tried.
        killed: how many were killed.
        survivors: ids of the others.
        median_seconds: to the first kill; `None` if nothing was killed.
        median_examples: to the first kill; `None` if nothing was killed.
        value_mutants: how many mutants of `BY_VALUE` were killed.
        value_mutants_shrunk_small: how many of these by a case of at most 3 ranks and 6 tokens.
        kills: by mutant.
    """

    mutants: int
    killed: int
    survivors: tuple[str, ...]
    median_seconds: float | None
    median_examples: float | None
    value_mutants: int
    value_mutants_shrunk_small: int
    kills: Mapping[str, FirstKill]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KillMatrix(Section):
    """Every property on every mutant.

    Attributes:
        mutants: how many were tried.
        killed: how many were killed.
        survivors: ids of the others.
        pairs: how many pairs of a mutant and a property were tried.
        unsupported: by mutant, the properties that do not apply to it; without mutants to which all apply.
        kills: by mutant and by each property that kills it, examples until the kill.
    """

    mutants: int
    killed: int
    survivors: tuple[str, ...]
    pairs: int
    unsupported: Mapping[str, tuple[str, ...]]
    kills: Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalseAlarms(Section):
    """The suite on correct implementations.

    Attributes:
        implementations: how many were tried.
        examples: of all of them.
        fewest: examples of the implementation that was tried least.
        alarms: the false alarms.
        by_property: examples of each property.
        largest_margin: largest error over error allowed, by property.
        each: examples of each implementation.
    """

    implementations: int
    examples: int
    fewest: int
    alarms: tuple[Alarm, ...]
    by_property: Mapping[str, int]
    largest_margin: Mapping[str, float]
    each: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeKills(Section):
    """Wrong merges and correct ones.

    Attributes:
        kills: by fault and by each property that kills it, examples until the kill.
        survivors: faults that none kills.
        each: examples of each correct merge.
        alarms: the false alarms.
    """

    kills: Mapping[str, Mapping[str, int]]
    survivors: tuple[str, ...]
    each: Mapping[str, int]
    alarms: tuple[Alarm, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KillReport:
    """The whole file; a section is `None` until a run writes it."""

    schema: Literal[2]
    first: FirstKills | None = None
    matrix: KillMatrix | None = None
    variants: FalseAlarms | None = None
    merges: MergeKills | None = None


def merges_section(
    kills: Mapping[str, Mapping[str, int]],
    each: Mapping[str, int],
    alarms: Sequence[Alarm],
    effort: Effort,
    seconds: float,
) -> MergeKills:
    """Return the section with wrong and correct merges."""
    return MergeKills(
        **vars(Section.of(effort, seconds)),
        kills=kills,
        survivors=tuple(id for id, found in kills.items() if not found),
        each=each,
        alarms=tuple(alarms),
    )


def first_kills_section(kills: Sequence[Kill], effort: Effort, seconds: float) -> FirstKills:
    """Return the section with the first kill of each mutant."""
    killed = [one for one in kills if one.verdict == "killed"]
    by_value = [one for one in killed if MUTANTS[one.mutant].kind in BY_VALUE]
    small = [one for one in by_value if (one.ranks or 0) <= 3 and (one.tokens or 0) <= 6]
    return FirstKills(
        **vars(Section.of(effort, seconds)),
        mutants=len(kills),
        killed=len(killed),
        survivors=tuple(one.mutant for one in kills if one.verdict != "killed"),
        median_seconds=round(statistics.median(one.seconds for one in killed), 2) if killed else None,
        median_examples=statistics.median(one.examples for one in killed) if killed else None,
        value_mutants=len(by_value),
        value_mutants_shrunk_small=len(small),
        kills={
            one.mutant: FirstKill(
                property=one.property or None,
                examples=one.examples,
                seconds=one.seconds,
                ranks=one.ranks,
                tokens=one.tokens,
            )
            for one in kills
        },
    )


def matrix_section(rows: Sequence[Sequence[Kill]], effort: Effort, seconds: float) -> KillMatrix:
    """Return the section with all pairs."""
    killed = {row[0].mutant: {one.property: one.examples for one in row if one.verdict == "killed"} for row in rows}
    unsupported = {row[0].mutant: tuple(one.property for one in row if one.verdict == "unsupported") for row in rows}
    return _matrix(Section.of(effort, seconds), killed, unsupported)


def _matrix(
    how: Section, killed: Mapping[str, Mapping[str, int]], unsupported: Mapping[str, tuple[str, ...]]
) -> KillMatrix:
    return KillMatrix(
        **{field.name: getattr(how, field.name) for field in dataclasses.fields(Section)},
        mutants=len(killed),
        killed=sum(bool(kills) for kills in killed.values()),
        survivors=tuple(id for id, kills in killed.items() if not kills),
        pairs=sum(len(how.properties) - len(unsupported.get(id, ())) for id in killed),
        unsupported={id: properties for id, properties in unsupported.items() if properties},
        kills=killed,
    )


def _with_earlier(earlier: KillMatrix, now: KillMatrix) -> KillMatrix:
    """Add an earlier matrix's other mutants, if it was made with the same versions, seed, examples and properties."""
    same = ("ringverify", "torch", "python", "seed", "max_examples", "properties")
    killed, unsupported = {**earlier.kills, **now.kills}, {**earlier.unsupported, **now.unsupported}
    kept = [id for id in MUTANTS if id in killed]
    if kept == list(now.kills) or any(getattr(earlier, name) != getattr(now, name) for name in same):
        return now
    how = dataclasses.replace(now, jobs=earlier.jobs, seconds=round(earlier.seconds + now.seconds, 1))
    return _matrix(how, {id: killed[id] for id in kept}, {id: unsupported.get(id, ()) for id in kept})


def false_alarms_section(found: Sequence[Acquittal], effort: Effort, seconds: float) -> FalseAlarms:
    """Return the section with the correct implementations."""
    return FalseAlarms(
        **vars(Section.of(effort, seconds)),
        implementations=len(found),
        examples=sum(sum(one.examples.values()) for one in found),
        fewest=min((sum(one.examples.values()) for one in found), default=0),
        alarms=tuple(alarm for one in found for alarm in one.alarms),
        by_property={property: sum(one.examples.get(property, 0) for one in found) for property in effort.properties},
        largest_margin={
            property: max((one.margin.get(property, 0.0) for one in found), default=0.0)
            for property in effort.properties
        },
        each={one.name: sum(one.examples.values()) for one in found},
    )


def read(path: Path) -> KillReport:
    """Read what earlier runs wrote; if there is no such file, there are no sections.

    Raises:
        UsageError: the file cannot be read, or is not such a file.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return KillReport(schema=SCHEMA)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is not a report of `ringverify mutants --json`") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a report of `ringverify mutants --json` of schema {SCHEMA}: name another")
    try:
        return read_back(KillReport, content)
    except ValueError as error:
        raise UsageError(
            f"{path} is damaged: {error} is missing or not what `ringverify mutants --json` writes; name another"
        ) from None


def add(path: Path, section: FirstKills | KillMatrix | FalseAlarms | MergeKills) -> None:
    """Write a section to the file, in place of an older one; other sections stay.

    A matrix of some mutants is added to that of the others.

    Raises:
        UsageError: the file is not such a file, or cannot be written.
    """
    report = read(path)
    if isinstance(section, FirstKills):
        report = dataclasses.replace(report, first=section)
    elif isinstance(section, MergeKills):
        report = dataclasses.replace(report, merges=section)
    elif isinstance(section, FalseAlarms):
        report = dataclasses.replace(report, variants=section)
    else:
        matrix = section if report.matrix is None else _with_earlier(report.matrix, section)
        report = dataclasses.replace(report, matrix=matrix)
    write_named(path, laid_out(as_json(report)) + "\n")
