"""Try properties on mutants: which one kills each, after how many examples, and on how small a case."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ringverify import targets
from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.check.units import Call
from ringverify.check.workers import Workers
from ringverify.errors import Inconclusive
from ringverify.faults.catalogue import MUTANTS
from ringverify.lab.expected import Expected
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.world import WorldUnavailable

DEADLINE = 4.0
"""Seconds for one run of a mutant. A mutant that hangs takes this, and then twice this when the run is repeated."""

_Asked = TypeVar("_Asked")
_Told = TypeVar("_Told")


@dataclasses.dataclass(frozen=True)
class Kill:
    """Result of one property on one mutant.

    Attributes:
        mutant: the mutant's id.
        property: id of the property.
        verdict: "killed", "survived" or "unsupported".
        examples: cases tried, the one that kills included.
        seconds: until the kill, or until all were tried; shrinking not included.
        ranks: world size of the smallest case found, if it was looked for.
        tokens: number of queries or of keys of that case, whichever is larger.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How many examples of which properties to try, in how many processes.

    Attributes:
        properties: ids of the properties to try, in order.
        seed: decides which cases are tried.
        most: examples of each property, at most; `None` takes the number of the quick suite.
        jobs: processes that try mutants side by side.
    """

    properties: tuple[str, ...]
    seed: int = 0
    most: int | None = None
    jobs: int = 1

    def examples(self, property: str) -> int:
        """Return how many examples of a property to try."""
        quick = PROPERTIES[property].examples_in("quick")
        return quick if self.most is None else min(quick, self.most)


def kill(mutant: str, property: str, *, examples: int, seed: int, shrinking: bool, world: ContainedWorld) -> Kill:
    """Try one property on one mutant.

    Raises:
        Inconclusive: the world could not be set up, or the machine gave up.
    """
    tried, implementation = PROPERTIES[property], MUTANTS[mutant].implementation
    if tried.unsupported(implementation.capabilities) is not None:
        return Kill(mutant, property, "unsupported")
    runner = Runner(implementation, world, target=targets.MUTANT + mutant, deadline=DEADLINE)
    started = time.monotonic()
    seconds = 0.0

    def progress(_: int) -> None:
        nonlocal seconds
        seconds = time.monotonic() - started

    try:
        found = hunt(tried, runner, examples=examples, seed=seed, progress=progress, shrinking=shrinking)
    except WorldUnavailable as error:
        raise Inconclusive(str(error)) from None
    shown = found.counterexample
    if shown is None:
        return Kill(mutant, property, "survived", found.examples, round(found.seconds, 3))
    p = shown.case.problem
    return Kill(
        mutant,
        property,
        "killed",
        found.examples,
        round(seconds, 3),
        shown.case.world_size if shrinking else None,
        max(p.nq, p.nk) if shrinking else None,
        shown.case.describe(),
        shown.violation.summary,
    )


def first_kills(mutants: Sequence[str], effort: Effort) -> Iterator[Kill]:
    """Yield for each mutant its first kill, by properties in the order given, or its survival.

    Examples and seconds are those of all properties that were tried; the case is shrunk.
    """
    yield from side_by_side(functools.partial(_first, effort), mutants, effort.jobs)


def matrix(mutants: Sequence[str], effort: Effort) -> Iterator[list[Kill]]:
    """Yield a list per mutant with the results of all properties; cases are not shrunk.

    A mutant that nothing kills within `effort.most` examples is tried again with as many as in the quick suite.
    """
    yield from side_by_side(functools.partial(_row, effort), mutants, effort.jobs)


def expected_kills(expected: Sequence[Expected], jobs: int) -> Iterator[Kill]:
    """Yield the result of each expected kill, tried again with a few times the examples that it once took."""
    yield from side_by_side(_again, expected, jobs)


def side_by_side(work: Callable[[_Asked], _Told], over: Sequence[_Asked], jobs: int) -> Iterator[_Told]:
    """Yield `work(item)` for each item, in order, computed in `jobs` processes.

    Raises:
        Inconclusive: two processes that were given the same item have ended.
    """
    with contextlib.closing(Workers()) as workers:
        if not workers.ready(min(jobs, len(over)), None):
            yield from map(work, over)
            return
        for answer in workers.in_order([Call(_called, (work, item)) for item in over]):
            if isinstance(answer, WorldUnavailable):
                raise Inconclusive(str(answer))
            if isinstance(answer, Exception):
                raise answer
            yield answer


def _called(_: None, argument: tuple[Callable[[_Asked], _Told], _Asked]) -> _Told:
    work, item = argument
    return work(item)


def _first(effort: Effort, mutant: str) -> Kill:
    examples, seconds = 0, 0.0
    with contextlib.closing(ContainedWorld()) as world:  # one process per mutant: some leave state behind
        for property in effort.properties:
            found = kill(
                mutant, property, examples=effort.examples(property), seed=effort.seed, shrinking=True, world=world
            )
            examples, seconds = examples + found.examples, round(seconds + found.seconds, 3)
            if found.verdict == "killed":
                return dataclasses.replace(found, examples=examples, seconds=seconds)
    return Kill(mutant, "", "survived", examples, seconds)


def _row(effort: Effort, mutant: str) -> list[Kill]:
    with contextlib.closing(ContainedWorld()) as world:

        def tried(property: str, examples: int) -> Kill:
            return kill(mutant, property, examples=examples, seed=effort.seed, shrinking=False, world=world)

        kills = [tried(property, effort.examples(property)) for property in effort.properties]
        if effort.most is None or any(one.verdict == "killed" for one in kills):
            return kills
        for place, property in enumerate(effort.properties):
            if kills[place].verdict != "unsupported":
                kills[place] = tried(property, PROPERTIES[property].examples_in("quick"))
                if kills[place].verdict == "killed":
                    break
        return kills


def _again(one: Expected) -> Kill:
    with contextlib.closing(ContainedWorld()) as world:
        return kill(one.mutant, one.property, examples=one.patience(), seed=one.seed, shrinking=False, world=world)


def line(one: Kill) -> str:
    """Return a result as a line of text."""
    size = "" if one.ranks is None else f"{one.ranks} ranks, {one.tokens} tokens"
    return (
        f"  {one.mutant:<7}{one.verdict:<12}{one.property:<22}{one.examples:>4} examples {one.seconds:>6.1f} s  "
        f"{size:<20}{MUTANTS[one.mutant].sentence}"
    ).rstrip()
