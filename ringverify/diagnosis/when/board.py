"""Conditions held against runs: the cheapest conjunction that explains them, and the case that tells two apart."""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ringverify.cases.case import Case
from ringverify.diagnosis.when.conditions import (
    LEAST,
    REACHED,
    SPANNED,
    Condition,
    Feature,
    Features,
    conditions,
    features,
)
from ringverify.diagnosis.when.scores import conditions_on_scores, of_scores
from ringverify.implementation import Capabilities

UNEXPLAINED = 0.6
"""Cost of a passing run that an explanation does not account for: a value may hide a fault by chance.

So two runs are enough to name a common condition; rare ones take three or four.
"""

DOUBT = 3.0
"""The same while runs are still chosen: a rare condition that would explain one is tried again before it is dropped."""

SUPPORTED = 3
"""A condition is not doubted any more when it alone explains this many passing runs."""

MOST_STEPS = 20_000
"""Sets of runs that are left to explain which are looked at for one explanation, at most."""

DEARER = 1.0
"""Other conditions are compared with one if they cost at most this much more."""

PLAIN = 1.25
"""Most that a condition costs which only says what a case has."""

LARGEST = 6
"""Most conditions in one explanation."""


@dataclasses.dataclass
class _HeldCondition:
    """A condition, held against the first cases of a board.

    Attributes:
        condition: the condition.
        met: bits of those that meet it.
        cases: number of cases that it was held against.
        failing: number of cases that failed, the first of a board, that are known to meet it.
        refuted: whether one of these does not.
    """

    condition: Condition
    met: int = 0
    cases: int = 0
    failing: int = 0
    refuted: bool = False


class Board:
    """Conditions held against cases; sets of cases are bits of an integer.

    Args:
        capabilities: what the implementation declares.
        scored: whether conditions may be about scores.

    Attributes:
        cases: cases that were run, and cases that could be.
    """

    def __init__(self, capabilities: Capabilities, *, scored: bool = False) -> None:
        self.cases: list[Case] = []
        self._capabilities, self._scored = capabilities, scored
        self._places: dict[Case, int] = {}
        self._seen: list[Features] = []
        self._values: defaultdict[str, set[Feature]] = defaultdict(set)
        self._failing: dict[int, Features] = {}
        self._held: dict[tuple[str, tuple[str, ...]], _HeldCondition] = {}

    def add(self, cases: Iterable[Case], runs: Mapping[Case, bool]) -> None:
        """Make conditions of further cases; those that are known already are left out.

        Args:
            cases: the cases.
            runs: whether each case that was run failed.
        """
        failing = self._failed(runs)
        spanned = [*SPANNED, *(name for name in REACHED if all(int(one[name]) >= LEAST for one in failing))]
        news = False
        for case in cases:
            if case not in self._places:
                self._places[case] = len(self.cases)
                self.cases.append(case)
                seen = features(case, self._capabilities)
                self._seen.append(ChainMap(of_scores(case, self._capabilities), seen) if self._scored else seen)  # type: ignore[arg-type]  # only read
                news |= self._spans(seen, spanned)
        if news or self._scored:
            of_scored = conditions_on_scores(self._seen) if self._scored else ()
            of_both = [*conditions(self._values, self._capabilities), *of_scored]
            held = (self._held.get((one.text, one.about)) or _HeldCondition(one) for one in of_both)
            self._held = {(one.condition.text, one.condition.about): one for one in held}

    def _spans(self, seen: Features, spanned: Iterable[str]) -> bool:
        """Add the values of features to those that the cases have, and return whether one of them is new."""
        values = {(name, seen[name]) for name in spanned if name in seen}
        new = [(name, value) for name, value in values if value not in self._values[name]]
        for name, value in new:
            self._values[name].add(value)
        return bool(new)

    def explanation(self, runs: Mapping[Case, bool]) -> list[Condition]:
        """Return the cheapest conditions that all runs that failed meet, and runs that passed do not."""
        return [condition for condition, _ in self._cheapest(*self._sides(runs), UNEXPLAINED)]

    def simpler(
        self, runs: Mapping[Case, bool], instead: Iterable[Condition], beside: Collection[Condition]
    ) -> list[Condition]:
        """Return what plain conditions explain of runs if some others are not to be said.

        Args:
            runs: whether each case that was run failed.
            instead: the conditions that are not to be said; plain ones are about the same factors.
            beside: those that are.
        """
        found, passed = self._sides(runs)
        factors = frozenset[str]().union(*(one.factors for one in instead))
        for condition, met in found:
            passed &= met if condition in beside else -1
        plain = [one for one in found if not one[0].limit and one[0].cost <= PLAIN and one[0].factors <= factors]
        return [condition for condition, _ in self._cheapest(plain, passed, UNEXPLAINED)]

    def telling(self, runs: Mapping[Case, bool], unknown: Collection[Case]) -> Case | None:
        """Return the case that halves the explanations best; `None` if all of them say the same of all cases.

        Args:
            runs: whether each case that was run failed.
            unknown: cases of which a run teaches nothing.
        """
        found, passed = self._sides(runs)
        left = self._left(runs, unknown)
        chosen = self._cheapest(found, passed, DOUBT)
        best: tuple[int, int] | None = None
        for place, (condition, met) in enumerate(chosen):
            others = -1
            for at, (_, other) in enumerate(chosen):
                others &= other if at != place else -1
            alone = passed & others & ~met  # only this condition explains that these pass
            rivals = [other for rival, other in found if rival.cost <= condition.cost + DEARER and not alone & other]
            if alone.bit_count() < SUPPORTED:
                rivals.append(-1)  # perhaps they pass by chance
            for index in _places(left & others):
                agree = sum(other >> index & 1 for other in rivals)
                split = min(agree, len(rivals) - agree)
                if split and (best is None or split > best[0]):
                    best = (split, index)
        return None if best is None else self.cases[best[1]]

    def least_alike(self, runs: Mapping[Case, bool], unknown: Collection[Case]) -> Case | None:
        """Return the case that meets what is said and lacks most of what else all runs that failed have in common.

        Whether it fails or passes, much that might have been the reason is told apart from it. `None` if none lacks
        anything.
        """
        found, passed = self._sides(runs)
        left = self._left(runs, unknown)
        for _, met in self._cheapest(found, passed, UNEXPLAINED):
            left &= met
        # In some of them numbers stand for relations.
        common = [met for condition, met in found if condition.said and not condition.limit]
        lacking = {index: sum(not met >> index & 1 for met in common) for index in _places(left)}
        best = max(lacking, key=lacking.__getitem__, default=None)
        return None if best is None or not lacking[best] else self.cases[best]

    def lacking_one(self, runs: Mapping[Case, bool], unknown: Collection[Case]) -> Case | None:
        """Return a case that lacks one condition of what is said: the one that fewest runs lack alone."""
        chosen = self._cheapest(*self._sides(runs), UNEXPLAINED)
        run, left = sum(1 << self._places[case] for case in runs if case in self._places), self._left(runs, unknown)
        best: tuple[int, int] | None = None
        for place, (_, met) in enumerate(chosen):
            alone = ~met
            for at, (_, other) in enumerate(chosen):
                alone &= other if at != place else -1
            tried = (alone & run).bit_count()
            if alone & left and (best is None or tried < best[0]):
                best = tried, next(_places(alone & left))
        return None if best is None else self.cases[best[1]]

    def _left(self, runs: Mapping[Case, bool], unknown: Collection[Case]) -> int:
        """Return the cases of which nothing is known."""
        return sum(1 << place for place, case in enumerate(self.cases) if case not in runs and case not in unknown)

    def _sides(self, runs: Mapping[Case, bool]) -> tuple[list[tuple[Condition, int]], int]:
        """Return the conditions that all runs that failed meet, and the runs that passed."""
        failing = self._failed(runs)
        alike: dict[tuple[tuple[str, ...], int], list[tuple[Features, int]]] = {}
        for one in self._held.values():
            self._hold(one, failing, alike)
        passed = sum(1 << self._places[case] for case, failed in runs.items() if not failed and case in self._places)
        return [(one.condition, one.met) for one in self._held.values() if not one.refuted], passed

    def _failed(self, runs: Mapping[Case, bool]) -> list[Features]:
        """Return the features of cases that failed, in the order in which they became known: none passes later."""
        places = (self._places[case] for case, failed in runs.items() if failed and case in self._places)
        self._failing |= {place: self._seen[place] for place in places if place not in self._failing}
        return list(self._failing.values())

    def _hold(
        self,
        held: _HeldCondition,
        failing: Sequence[Features],
        alike: dict[tuple[tuple[str, ...], int], list[tuple[Features, int]]],
    ) -> None:
        """Hold a condition against cases that failed, and against all others unless it is refuted."""
        condition = held.condition
        held.refuted = held.refuted or not all(map(condition.meets, failing[held.failing :]))
        if held.refuted:
            return
        held.failing = len(failing)
        if held.cases == len(self.cases):
            return
        if (groups := alike.get((condition.about, held.cases))) is None:
            groups = alike[condition.about, held.cases] = self._groups(condition.about, held.cases)
        for one, bits in groups:
            if condition.meets(one):
                held.met |= bits
        held.cases = len(self.cases)

    def _groups(self, about: tuple[str, ...], since: int) -> list[tuple[Features, int]]:
        """Return cases that are alike in some features, one of each kind, and the bits of all of its kind."""
        found: dict[tuple[object, ...], tuple[Features, int]] = {}
        for place, one in enumerate(self._seen[since:], since):
            values = tuple(map(one.get, about))
            found[values] = (one, found[values][1] | 1 << place if values in found else 1 << place)
        return list(found.values())

    @staticmethod
    def _cheapest(
        found: Sequence[tuple[Condition, int]], passed: int, unexplained: float
    ) -> list[tuple[Condition, int]]:
        """Return the conditions of least cost; each run that passed and meets all of them costs `unexplained` too."""
        able: dict[int, tuple[Condition, int]] = {}
        for condition, met in sorted(found, key=lambda one: one[0].cost):
            excluded = passed & ~met
            if excluded and not any(excluded | earlier == earlier for earlier in able):
                able[excluded] = (condition, met)
        explaining = {run: [(e, one) for e, one in able.items() if e >> run & 1] for run in _places(passed)}
        rarest = sorted(explaining, key=lambda run: len(explaining[run]))
        reached: dict[tuple[int, int], float] = {}
        best: tuple[float, list[tuple[Condition, int]]] = (unexplained * passed.bit_count(), [])

        def extend(chosen: list[tuple[Condition, int]], cost: float, rest: int) -> None:
            nonlocal best
            whole, here = cost + unexplained * rest.bit_count(), (rest, len(chosen))
            if whole < best[0]:
                best = (whole, chosen)
            full = not rest or len(chosen) == LARGEST or len(reached) > MOST_STEPS
            if full or reached.get(here, math.inf) <= cost:
                return
            reached[here] = cost
            run = next(run for run in rarest if rest >> run & 1)  # some condition explains it, or none does
            for excluded, one in explaining[run]:
                if cost + one[0].cost >= best[0]:
                    break
                extend([*chosen, one], cost + one[0].cost, rest & ~excluded)
            if rest != 1 << run and cost + unexplained < best[0]:
                extend(chosen, cost + unexplained, rest & ~(1 << run))

        extend([], 0.0, passed)
        return sorted(best[1], key=lambda one: one[0].cost)


def _places(bits: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
