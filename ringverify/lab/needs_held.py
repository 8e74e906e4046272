"""How often what a mutant is said to need is true: held against further cases, by counting.

Every mutant is searched, shrunk, varied and explained as for a user. Then the property draws cases with another seed,
and each is run. What is said is true if it foretells at least 95 % of those that fail, and if at least 95 % of those
that meet it fail; if none of it is "certain" something; and if what is said not to matter is changed in some that fail
and they still do, but for a tenth of them. Cases in which no query attends any key are left out, unless the smallest
is one: that there is something to attend is not said.

    python -m ringverify.lab.needs_held tests/faults/expected_kills.json 8

measures every eighth mutant, and prints a line for each and the counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ringverify import targets
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.drawing import draws
from ringverify.check.explaining import held_against_others, when_it_fails
from ringverify.check.hunting import hunt
from ringverify.diagnosis.when.conditions import HALF, Placed
from ringverify.diagnosis.when.exploring import Exploration
from ringverify.diagnosis.when.foretelling import VISIBLE
from ringverify.diagnosis.when.needs import ALL_HOLD, TOGETHER, Needs
from ringverify.events import Needed
from ringverify.faults.catalogue import MUTANTS
from ringverify.lab.expected import Expected, read
from ringverify.lab.held_out import one_of_every
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.simulated import SimulatedWorld

FRESH = 200
"""Further cases that are drawn."""

SEEDS = 4
"""Seeds with which a case that should fail has to pass: values may hide a fault by chance."""

BASES = 20
"""Cases that fail in which a factor is changed that is said not to matter."""

ENOUGH = 0.95
"""Share of the cases of which what is said has to be true."""

SELDOM = 0.1
"""Share of the changed cases that may pass, though the factor is said not to matter."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """What is said of when a mutant fails, and of how many further cases it is true.

    Attributes:
        needed: what is said.
        failing: further cases that fail.
        foretold: how many of these meet all that is said.
        meeting: further cases that meet all that is said.
        failed: how many of these fail.
        turning: by factor that is said not to matter, the share of changed cases that pass.
    """

    needed: Needed
    failing: int
    foretold: int
    meeting: int
    failed: int
    turning: Mapping[str, float]

    @property
    def true(self) -> bool:
        """Whether it is true of nearly all of them, and says what it takes."""
        return (
            self.foretold >= ENOUGH * self.failing
            and self.failed >= ENOUGH * self.meeting
            and not any(text.startswith("certain ") for text in self.needed.requires)
            and all(share <= SELDOM for share in self.turning.values())
        )


def counted(expected: Sequence[Expected], *, fresh: int = FRESH) -> Iterator[tuple[str, Counted]]:
    """Hold what is said of mutants against further cases; those that fail by their state, or survive, are left out.

    Each has a process of its own, as many at a time as there are cores: one that keeps state spoils no other.

    Args:
        expected: the property that kills each mutant, and with which seed.
        fresh: further cases that are drawn of each.
    """
    context = multiprocessing.get_context("forkserver")
    with context.Pool(initializer=torch.set_num_threads, initargs=(1,), maxtasksperchild=1) as pool:
        for one, found in zip(expected, pool.imap(functools.partial(_alone, fresh), expected), strict=True):
            if found is not None:
                yield one.mutant, found


def _alone(fresh: int, one: Expected) -> Counted | None:
    property = PROPERTIES[one.property]
    with contextlib.closing(SimulatedWorld()) as world:
        runner = Runner(MUTANTS[one.mutant].implementation, world, target=targets.MUTANT + one.mutant)
        seen = hunt(property, runner, examples=one.patience(), seed=one.seed, progress=lambda done: None)
        found = seen.counterexample
        if found is None or found.after or found.needs is None:
            return None
        needs = when_it_fails(property, runner, found.case, found.violation, shrunk_from=(found.first,))
        needs = held_against_others(runner, found.violation, needs, found.diagnosis.telling)
        if needs.exploration is None:
            return None
        return _counted(needs, needs.exploration, list(draws(property, runner.capabilities, fresh, one.seed + 1)))


def _counted(needs: Needs, x: Exploration, fresh: Sequence[Case]) -> Counted:
    def fails(case: Case, *, expected: bool) -> bool | None:
        several = (case.replace(seed=case.seed + more) for more in range(SEEDS if expected else 1))
        found = [x.fails(one) for one in several]
        return True if True in found else None if None in found else False

    def told_of(case: Case) -> bool:
        return attends(case) or not attends(x.case)

    def attends(case: Case) -> bool:
        return bool(Placed.of(case, x.varying.c).attended.any())

    half = x.case.problem.dtype in HALF
    failing, foretold, meeting, failed = list[Case](), 0, 0, 0
    for case in filter(told_of, fresh):
        meets = all(one.holds(case) for one in needs.requires)
        seen = fails(case, expected=meets)
        # Special values and 16 bits hide much by chance.
        shows = seen or (case.values == "normal" and half == (case.problem.dtype in HALF))
        if seen:
            failing.append(case)
            foretold += meets
        if meets and seen is not None and shows:
            meeting, failed = meeting + 1, failed + seen
    draw, turning = random.Random(0), {}
    bases = [one for one in failing if one.values == "normal" and half == (one.problem.dtype in HALF)][:BASES]
    for factor in _factors(needs, x):
        changed = [draw.choice(some) for base in bases if (some := list(filter(told_of, x.varying.of(base, factor))))]
        outcomes = [fails(one, expected=True) for one in changed if all(that.holds(one) for that in needs.requires)]
        known = [outcome for outcome in outcomes if outcome is not None]
        if known:
            turning[factor] = known.count(False) / len(known)
    return Counted(needs.told(), len(failing), foretold, meeting, failed, turning)


def _factors(needs: Needs, x: Exploration) -> list[str]:
    """Return the factors that are said not to matter, but for those in which a fault may not be seen by chance."""
    found = list[str]()
    for name in needs.irrelevant:
        members = TOGETHER.get(name.removeprefix("other "), ("length" if name == ALL_HOLD else name,))
        found += [one for one in members if one in x.varying.factors and all(x.outcomes.get(one, ()))]
    return [one for one in dict.fromkeys(found) if one not in VISIBLE]


def main(path: str, every: str) -> None:
    """Measure every so many mutants, and print a line for each and the counts."""
    counts: Counter[str] = Counter()
    for mutant, one in counted(one_of_every(read(Path(path)), every)):
        counts["true" if one.true else "not true"] += 1
        turning = ", ".join(f"{share:.0%} pass with other {factor}" for factor, share in one.turning.items() if share)
        sys.stdout.write(
            f"{mutant:6} {'' if one.true else 'not '}true: {one.foretold} of {one.failing} that fail, {one.failed} of "
            f"{one.meeting} foretold{turning and f'; {turning}'}\n       {one.needed}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{', '.join(f'{count} {named}' for named, count in counts.most_common())}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
