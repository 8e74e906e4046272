"""Mutants against properties: what kills each, how soon, and how small the case is that shows it."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringverify import targets
from ringverify.cases.running import Runner
from ringverify.check.hunting import Hunt, hunt
from ringverify.errors import Inconclusive, UsageError
from ringverify.mutants.catalogue import MUTANTS
from ringverify.mutants.mutant import Mutant
from ringverify.properties.catalogue import PROPERTIES, select
from ringverify.properties.property import Property
from ringverify.reports.jsonl import finite, write_whole
from ringverify.worlds.contained import ContainedWorld
from ringverify.worlds.world import WorldUnavailable

DEADLINE = 4.0
"""Seconds for one run of a mutant: some hang, and each of those takes this and twice this."""

PATIENCE = 3
"""A mutant that was once killed within n examples is given this many times as many, and a few more, to be killed."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """What one property makes of one mutant.

    Attributes:
        mutant: its id.
        property: id of the property.
        verdict: "killed", "survived" or "unsupported".
        examples: cases tried, the one that kills included.
        seconds: until the kill, or until all were tried; shrinking not included.
        ranks: world size of the smallest case found, if it was looked for.
        tokens: its longer length.
        case: the case in words.
        summary: what was wrong, in a line.
    """

    mutant: str
    property: str
    verdict: str
    examples: int = 0
    seconds: float = 0.0
    ranks: int | None = None
    tokens: int | None = None
    case: str = ""
    summary: str = ""


def kill(
    mutant: Mutant, property: Property, *, examples: int, seed: int, shrinking: bool, world: ContainedWorld
) -> Kill:
    """Try one property on one mutant.

    Raises:
        Inconclusive: the world could not be set up, or the machine gave up.
    """
    if property.unsupported(mutant.implementation.capabilities) is not None:
        return Kill(mutant.id, property.id, "unsupported")
    runner = Runner(mutant.implementation, world, target=targets.MUTANT + mutant.id, deadline=DEADLINE)
    started = time.monotonic()
    seconds = 0.0

    def progress(_: int) -> None:
        nonlocal seconds
        seconds = time.monotonic() - started

    try:
        found: Hunt = hunt(
            property,
            runner,
            examples=examples,
            seed=seed,
            until=float("inf"),
            progress=progress,
            shrinking=shrinking,
        )
    except WorldUnavailable as error:
        raise Inconclusive(str(error)) from None
    shown = found.counterexample
    if shown is None:
        return Kill(mutant.id, property.id, "survived", found.examples, round(found.seconds, 3))
    p = shown.case.problem
    return Kill(
        mutant.id,
        property.id,
        "killed",
        found.examples,
        round(seconds, 3),
        shown.case.world_size if shrinking else None,
        max(p.nq, p.nk) if shrinking else None,
        shown.case.describe(),
        shown.violation.summary,
    )


def first_kills(
    mutants: Sequence[Mutant], properties: Sequence[Property], *, seed: int, tell: Callable[[Kill], None]
) -> list[Kill]:
    """For each mutant the first property, in the order given, that kills it in the quick suite, or its survival."""
    return list(_each(mutants, lambda mutant, world: _first(mutant, properties, seed, world), tell))


def matrix(
    mutants: Sequence[Mutant], properties: Sequence[Property], *, seed: int, tell: Callable[[Kill], None]
) -> list[Kill]:
    """Every property on every mutant; cases are not shrunk."""
    kills = []
    for mutant in mutants:
        world = ContainedWorld()
        try:
            for property in properties:
                examples = property.examples_in("quick")
                kills.append(kill(mutant, property, examples=examples, seed=seed, shrinking=False, world=world))
                tell(kills[-1])
        finally:
            world.close()
    return kills


def expected_kills(
    expected: Mapping[str, Any], properties: Mapping[str, Property], *, seed: int, tell: Callable[[Kill], None]
) -> list[Kill]:
    """Each mutant of a former run against the property that killed it, within a few times the examples it took then.

    Raises:
        UsageError: a mutant or a property of the file is unknown.
    """
    kills = []
    world = ContainedWorld()
    try:
        for id, entry in expected.items():
            if id not in MUTANTS:
                raise UsageError(f"unknown mutant {id!r} among the expected kills: write the file anew with --report")
            if entry["property"] not in properties:
                raise UsageError(f"unknown property {entry['property']!r} among the expected kills of {id}")
            examples = PATIENCE * entry["examples"] + 20
            kills.append(
                kill(
                    MUTANTS[id],
                    properties[entry["property"]],
                    examples=examples,
                    seed=seed,
                    shrinking=False,
                    world=world,
                )
            )
            tell(kills[-1])
    finally:
        world.close()
    return kills


def _each(
    mutants: Sequence[Mutant], judge: Callable[[Mutant, ContainedWorld], Kill], tell: Callable[[Kill], None]
) -> Iterable[Kill]:
    for mutant in mutants:
        world = ContainedWorld()  # a process a mutant: some leave state behind
        try:
            found = judge(mutant, world)
        finally:
            world.close()
        tell(found)
        yield found


def _first(mutant: Mutant, properties: Sequence[Property], seed: int, world: ContainedWorld) -> Kill:
    examples, started = 0, time.monotonic()
    for property in properties:
        found = kill(mutant, property, examples=property.examples_in("quick"), seed=seed, shrinking=True, world=world)
        if found.verdict == "killed":
            return found
        examples += found.examples
    return Kill(mutant.id, "", "survived", examples, round(time.monotonic() - started, 3))


def run(
    ids: Sequence[str],
    *,
    only: Iterable[str] | None,
    skip: Iterable[str],
    every: bool,
    expected: Path | None,
    seed: int,
    report: Path | None,
    say: Callable[[str], None],
) -> int:
    """Try mutants, tell each kill as it comes, and return 0 if all are killed, 1 if one survives.

    Raises:
        UsageError: an id, a property or a file is wrong.
        Inconclusive: the world could not be set up.
    """
    for id in ids:
        if id not in MUTANTS:
            raise UsageError(f"unknown mutant {id!r}: `ringverify list mutants` names them")
    properties = select(only, skip)
    chosen = [MUTANTS[id] for id in ids or MUTANTS]

    def tell(one: Kill) -> None:
        size = "" if one.ranks is None else f"{one.ranks} ranks, {one.tokens} tokens"
        title = MUTANTS[one.mutant].title
        say(
            f"  {one.mutant:<7}{one.verdict:<12}{one.property:<22}{one.examples:>4} examples {one.seconds:>6.1f} s  "
            f"{size:<20}{title}".rstrip()
        )

    if expected is not None:
        known = {id: entry for id, entry in _read_expected(expected).items() if not ids or id in ids}
        kills = expected_kills(known, PROPERTIES, seed=seed, tell=tell)
    elif every:
        kills = matrix(chosen, properties, seed=seed, tell=tell)
    else:
        kills = first_kills(chosen, properties, seed=seed, tell=tell)
    if report is not None:
        write(report, kills)
    total = summary(kills)
    say(f"{total['killed']} of {total['mutants']} mutants killed")
    if total["median_seconds"] is not None:
        say(f"median: {total['median_examples']:g} examples and {total['median_seconds']:.2f} s to the kill")
    if total["shrunk_small"] is not None:
        say(f"shrunk to at most 3 ranks and 6 tokens: {total['shrunk_small']}")
    if total["survivors"]:
        say(f"survivors: {', '.join(total['survivors'])}")
    return 1 if total["survivors"] else 0


def _read_expected(path: Path) -> dict[str, Any]:
    """The first kill of each mutant in a report of `ringverify mutants`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kills = [one for one in content["kills"] if one["verdict"] == "killed"]
        best: dict[str, Any] = {}
        for one in kills:
            if one["mutant"] not in best or one["examples"] < best[one["mutant"]]["examples"]:
                best[one["mutant"]] = one
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a report of `ringverify mutants --report`") from None
    return best


def summary(kills: Sequence[Kill]) -> dict[str, Any]:
    """Score, median seconds and examples to the first kill, and how many cases shrank to three ranks and six tokens."""
    killed = [one for one in kills if one.verdict == "killed"]
    by_mutant = {one.mutant for one in killed}
    everyone = {one.mutant for one in kills}
    sized = [one for one in killed if one.ranks is not None and one.tokens is not None]
    small = [one for one in sized if (one.ranks or 0) <= 3 and (one.tokens or 0) <= 6]
    return {
        "mutants": len(everyone),
        "killed": len(by_mutant),
        "survivors": sorted(everyone - by_mutant),
        "median_seconds": statistics.median(one.seconds for one in killed) if killed else None,
        "median_examples": statistics.median(one.examples for one in killed) if killed else None,
        "shrunk_small": f"{len(small)} of {len(sized)}" if sized else None,
    }


def write(path: Path, kills: Sequence[Kill]) -> None:
    """Write kills and their summary as JSON, whole or not at all.

    Raises:
        UsageError: the path cannot be written.
    """
    content = {
        "schema": 1,
        "summary": summary(kills),
        "titles": {id: mutant.title for id, mutant in MUTANTS.items()},
        "kills": [dataclasses.asdict(one) for one in kills],
    }
    try:
        write_whole(path, json.dumps(finite(content), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from None
