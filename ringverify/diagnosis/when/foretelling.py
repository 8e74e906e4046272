"""Hold what is said of when a case fails against the cause: a rule that foretells every run foretells others too.

The conditions of `when.needs` have words for much, and not for every relation of lengths, masks and tiles. The cause,
where it is exact, is such a relation. So cases that nobody has run are judged by it, and where it contradicts what was
said, the case is run: one that fails without a condition refutes the condition, one that passes with all of them shows
that it takes more, and one that passes where only a factor differs shows that this matters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from ringref.rounding import margins
from ringverify.cases.case import Case, sharding_names
from ringverify.cases.inputs import selectable
from ringverify.cases.local import RankResult
from ringverify.cases.running import Observation
from ringverify.diagnosis.hypothesis import Hypothesis, predicted
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.when.conditions import HALF, LARGE, MASKS, Condition, changing
from ringverify.diagnosis.when.exploring import BASES, EXCEPTIONS, Exploration, Spent
from ringverify.diagnosis.when.needs import Needs, Requirement, said
from ringverify.diagnosis.when.varying import effort
from ringverify.implementation import Capabilities

CHECKED = 60
"""Runs, the smallest first, of which a cause has to foretell the outcome before it is used."""

FEWEST = 12
"""The same where time is short."""

FURTHER = 400
"""Cases that may be judged by a cause, at most: those that say nothing new are not."""

RUNS = 60
"""Further runs, at most, for cases where the cause contradicts what was said."""

TURNED = 16
"""Cases that fail of which a factor is varied that is said not to matter."""

MOST = 6
"""Such cases that are run, at most: further runs may drop a condition that some of them need."""

SPARED = 12
"""Cases that pass by the causes, and may fail by all else that is known, which are run to contradict them, at most."""

SEEDS = 4
"""Seeds with which a case has to pass: values may hide a fault by chance."""

LIKELY = 60
"""Cases of another sharding that are judged by a cause, at most, until some fail by it."""

ALONE = 4
"""Cases that are run on as few ranks as there may be, if they pass there by the cause."""

DRAWN = 300
"""Further cases that are drawn for each condition that was said, of which those that lack it are judged by a cause."""

EACH = 4
"""Variants of a case in one factor that may be judged so, at most: other cases have others."""

BELOW = 40
"""Cases that are judged by a cause for each condition that was said, and lack it."""

VARIANTS = 2
"""Variants of such a factor, in each of these cases."""

VISIBLE = frozenset({"values", "dtype", "strides", "schedule", "dims", "batch"})
"""Factors of which a variant may pass by chance, or has no part in what is attended: they are not varied once more."""

SHOWS = "a case in which what the cause says makes a difference"
"""Condition for what only the cause has words for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Foretelling:
    """Says by its causes whether cases fail, without running them.

    Attributes:
        causes: the hypotheses.
        capabilities: what the implementation declares.
        shardings: those in which it is known to say so: in others, other code may run.
        gradients: whether gradients are compared too.
        harmless: say only which cases pass, as no digit in them is another with a cause: of others it takes the
            rounding of every sum to know that.
    """

    causes: tuple[Hypothesis, ...]
    capabilities: Capabilities
    shardings: frozenset[str]
    gradients: bool
    harmless: bool = False

    @functools.cache  # noqa: B019 - lives as long as one explanation
    def __call__(self, case: Case) -> bool | None:
        """Return whether a case fails by all causes; `None` where they differ, other code may run, or nothing can."""
        if case.sharding not in self.shardings or (case.values == "selectors" and not selectable(case)):
            return None
        calls = [self._right(call) for call in case.calls]
        if self.harmless:
            return False if all(cause.is_harmless(call) for cause in self.causes for call in calls) else None
        told = {any(_wrong(cause, call) for call in calls) for cause in self.causes}
        return told.pop() if len(told) == 1 else None

    def _right(self, case: Case) -> Scene:
        """Return a case as if the right results had come back."""
        unseen = Scene(case, self.capabilities, Observation((), None))

        def of(rank: int) -> RankResult:
            dq, dk, dv = (
                unseen.local(name, getattr(unseen.truth, name), rank) if self.gradients else None
                for name in ("dq", "dk", "dv")
            )
            lse = unseen.local("lse", unseen.truth.lse, rank) if self.capabilities.lse else None
            out = unseen.local("out", unseen.truth.out, rank)
            return RankResult(out, lse, dq, dk, dv, "" if lse is None else "float32", (), {}, 0.0)

        found = Scene(case, self.capabilities, Observation(tuple(map(of, range(case.world_size))), None))
        found.__dict__["truth"] = unseen.truth  # the oracle's answer is computed once
        return found

    def in_other_shardings(self, x: Exploration, failing: Sequence[Case], left: Callable[[], float]) -> Foretelling:
        """Return it for all shardings in which it foretells some failures, and the outcome of all runs.

        Where no run failed yet, cases are run that fail by the cause.
        """
        soon, known = left() * 3 / 4, self.shardings
        for sharding in sorted({*sharding_names(x.case, self.capabilities)} - self.shardings):
            there = dataclasses.replace(self, shardings=frozenset({sharding}))
            for case in there._likely(x, sharding, failing) if left() > soon else ():
                x.failed(case, expected=False)
            those = {case: failed for case, failed in _ordinary(x).items() if case.sharding == sharding}
            smallest = {case: those[case] for case in sorted(those, key=effort)[:FEWEST]}
            if left() > soon and True in those.values() and there.agrees(smallest, left):
                known |= {sharding}
        return dataclasses.replace(self, shardings=known)

    def _likely(self, x: Exploration, sharding: str, failing: Sequence[Case]) -> Iterator[Case]:
        """Yield a few cases of a sharding that fail by the cause, if no run of it failed."""
        if any(failed for case, failed in x.runs.items() if case.sharding == sharding):
            return
        bases = [one for base in failing for one in x.varying.of(base, "sharding") if one.sharding == sharding]
        drawn = x.scattered(bases, random.Random(0), cotangents=self.gradients) if bases else iter(())
        yield from itertools.islice(filter(self, itertools.islice(drawn, LIKELY)), EXCEPTIONS)

    def agrees(self, runs: Mapping[Case, bool], left: Callable[[], float]) -> bool:
        """Whether it foretells the outcome of runs; a few may pass unforeseen, by what is allowed of roundings."""
        soon, checked = left() * 3 / 4, sorted(runs, key=effort)[:CHECKED]
        in_time = (case for number, case in enumerate(checked) if number < FEWEST or left() > soon)
        told = [(runs[case], found) for case in in_time if (found := self(case)) is not None]
        missed = sum(failed and not found for failed, found in told)
        return bool(told) and not missed and 20 * sum(found and not failed for failed, found in told) <= len(told)


def _wrong(cause: Hypothesis, scene: Scene) -> bool:
    """Return whether a case that was given the right results fails by a cause."""
    if not cause.may_be_in(scene.case):
        return False
    if cause.whole is not None:
        whole = cause.whole(scene)
        found = [{name: scene.local(name, x, rank) for name, x in whole.items()} for rank in range(scene.size)]
    elif cause.explains(scene) is None:
        return True  # it predicts something else than the right results
    else:
        found = predicted(scene, cause.steps)
    return any(
        not bool((margins(x, scene.true(name, rank), scene.limit(name, rank), scene.dtype_of(name)) <= 1).all())
        for rank, results in enumerate(found)
        for name, x in results.items()
        if name in scene.tensors
    )


def held_against(
    needs: Needs,
    causes: Sequence[Hypothesis],
    capabilities: Capabilities,
    *,
    gradients: bool,
    left: Callable[[], float],
) -> Needs | None:
    """Return what a case needs in order to fail, held against its causes; `None` where these do not foretell its runs.

    Args:
        needs: what was found by runs alone.
        causes: the causes, each limited to cases in which it is there.
        capabilities: what the implementation declares.
        gradients: whether the violation is one of gradients.
        left: returns how many seconds are left for it.
    """
    x = needs.exploration
    if x is None or any(cause.partial for cause in causes):
        return None
    seen = _ordinary(x)
    for harmless in (False, True):
        foretells = Foretelling(tuple(causes), capabilities, frozenset({x.case.sharding}), gradients, harmless)
        if foretells.agrees(seen, left):
            break
    else:
        return None
    x.extended(RUNS, left)
    smallest = x.failing()
    with contextlib.suppress(Spent):
        foretells = foretells.in_other_shardings(x, smallest[:BASES], left)
    explanation, complete = x.explanation(), needs.complete
    failing = list(itertools.islice((case for case in smallest if foretells(case) is not False), BASES))
    others = (case for case, failed in x.runs.items() if failed and case.sharding != x.case.sharding)
    failing += itertools.islice((case for case in others if foretells(case) and case not in failing), BASES)
    draw, soon = random.Random(0), left() / 2
    exceptions = list[Case]()
    with contextlib.suppress(Spent):
        for case in _on_fewest_ranks(x, failing):
            if foretells(case) is False and x.met(case, explanation):
                x.acquitted(case)
        explanation = x.explanation()
        for case in itertools.islice(x.scattered(failing[:], draw, cotangents=gradients), FURTHER if failing else 0):
            if left() <= soon:
                break
            met = x.met(case, explanation)
            if met and len(exceptions) == MOST:
                continue
            fails = foretells(case)
            if fails and not met and x.failed(case, expected=False):
                explanation = x.explanation()
            elif fails is False and met and _steadily(foretells, case) and x.passes_or_may(case):
                exceptions.append(case)
            if fails:
                failing.append(case)
        wrongly = 0  # a cause may foretell too much
        while wrongly < EXCEPTIONS:
            refuting = _without_one(x, explanation, failing, foretells, draw, soon / 2)
            if refuting is None:
                break
            wrongly += not x.failed(refuting, expected=False)
            explanation = x.explanation()
        for factor in [name for name, seen in x.outcomes.items() if seen and all(seen) and name not in VISIBLE]:
            bases = draw.sample(failing, min(len(failing), TURNED))
            if (turned := _turned(x, factor, bases, explanation, foretells, draw)) is not None:
                x.outcomes[factor].append(False)
                exceptions.append(turned)
    more = any(x.met(case, explanation) for case in exceptions)  # each of them was foretold, and run
    requirement = Requirement(SHOWS, lambda case: foretells(case) is not False)
    return said(x, explanation, complete, beyond=requirement, more=more)


def contradicting(
    needs: Needs,
    causes: Sequence[Hypothesis],
    capabilities: Capabilities,
    *,
    gradients: bool,
    left: Callable[[], float],
) -> list[Case]:
    """Return cases that failed of which one of the causes says that they pass, though of others it says the truth.

    If none of those that were run is such a one, others are run that meet all that was said, and pass by the causes.
    Arguments are those of `held_against`.
    """
    x, found = needs.exploration, dict[Case, None]()
    if x is None or any(cause.partial for cause in causes):
        return []
    those = frozenset({x.case.sharding})
    failing, true = sorted((case for case, failed in _ordinary(x).items() if failed), key=effort)[:CHECKED], []
    for cause in causes:
        foretells = Foretelling((cause,), capabilities, those, gradients)
        told = {case: foretells(case) for case in failing if left() > 0}
        if True in told.values():
            true.append(cause)
            found |= dict.fromkeys(case for case, fails in told.items() if fails is False)
    if found or not true:
        return list(found)
    foretells, explanation, passing = Foretelling(tuple(true), capabilities, those, gradients), x.explanation(), 0
    x.extended(SPARED, left)
    with contextlib.suppress(Spent):
        for case in itertools.islice(x.scattered(x.failing()[:BASES], random.Random(3), cotangents=gradients), FURTHER):
            if left() <= 0 or passing == SPARED:
                break
            wide = case.problem.dtype not in HALF or x.case.problem.dtype in HALF
            if wide and case not in x.runs and x.met(case, explanation) and foretells(case) is False:
                passing += 1
                found |= {case: None} if _steadily(foretells, case) and x.failed(case, expected=False) else {}
    return list(found)


def _ordinary(x: Exploration) -> dict[Case, bool]:
    """Return whether cases failed, but for those with scores far apart, unless the smallest has such.

    They may show rounding errors that a fault has made larger, where the fault itself shows nothing.
    """
    return {one: failed for one, failed in x.seen.items() if one.values not in LARGE or x.case.values in LARGE}


def _on_fewest_ranks(x: Exploration, failing: Sequence[Case]) -> list[Case]:
    """Return some of these cases on as few ranks as there may be, where much is right; those with most keys."""
    found = dict.fromkeys(one for base in failing[:ALONE] for one in x.varying.of(base, "ranks"))
    alone = [one for one in found if one.world_size == x.varying.sizes[0]]
    return sorted(alone, key=lambda one: -one.problem.nk)[:ALONE]


def _steadily(foretells: Foretelling, case: Case) -> bool:
    """Return whether a case passes by its cause, whatever the values."""
    return all(foretells(case.replace(seed=case.seed + more)) is False for more in range(SEEDS))


def _without_one(
    x: Exploration,
    explanation: Sequence[Condition],
    failing: Sequence[Case],
    foretells: Foretelling,
    draw: random.Random,
    until: float,
) -> Case | None:
    """Return a case that fails by its cause though it lacks a condition that was said; `None` if none is found.

    What is said of lengths comes first: a limit often stands for a relation with a length, a segment or a tile, and a
    smaller one does with others.
    """
    several = sorted(explanation, key=lambda one: not (one.limit or "length" in one.factors))
    for number, condition in enumerate(several):
        ends = x.left() - (x.left() - until) / (len(several) - number)  # each has its share of the time
        others = [one for one in explanation if one is not condition]
        scattered = itertools.islice(x.scattered(failing, draw, cotangents=foretells.gradients), DRAWN)
        bases = draw.sample(failing, len(failing))
        short = (one for base in bases for one in x.varying.too_short(base))
        for cases in (short, _beyond(x, condition, bases, draw), scattered):
            below = 0
            for case in cases:
                if below == BELOW or x.left() <= ends:
                    break
                if case not in x.runs and x.met(case, others) and not x.met(case, [condition]):
                    below += 1
                    if foretells(case):
                        return case
    return None


def _beyond(x: Exploration, condition: Condition, failing: Sequence[Case], draw: random.Random) -> Iterator[Case]:
    """Yield cases that do not meet a condition, made of ones that fail: with their masks and sharding, and others.

    What masks hide depends on the length and the ranks as well.
    """
    for base in failing:
        for factor in dict.fromkeys((*changing(condition), "length", "ranks")):
            variants = x.varying.of(base, factor) if factor in x.varying.factors else []
            for one in draw.sample(variants, min(len(variants), EACH)):
                names = ["sharding", *(name for name in MASKS if getattr(one.problem, name))]
                several = [one, *(other for name in names for other in x.varying.of(one, name))]
                yield from (other for other in several if not x.met(other, [condition]))


def _turned(
    x: Exploration,
    factor: str,
    failing: Sequence[Case],
    explanation: Sequence[Condition],
    foretells: Foretelling,
    draw: random.Random,
) -> Case | None:
    """Return one of these cases, with a factor changed, that passes as the cause foretells, though it meets all."""
    for base in failing:
        if x.left() <= 0:
            break
        for case in draw.sample(others := x.varying.of(base, factor), min(len(others), VARIANTS)):
            if x.met(case, explanation) and _steadily(foretells, case) and x.passes_or_may(case):
                return case
    return None
