"""Find the known fault that explains a failing case.

Many faults return the same numbers on a small case: with one key, every mask is the same. A hypothesis therefore has to
explain the smallest failing case, the case found first, and further cases like them; a wrong prediction of a failing
case rules it out. Of the hypotheses that remain, the simplest are named. If none remains, no cause is named.

A fault may be there only under a condition: on three ranks or more, under a causal mask. Then a hypothesis explains all
cases that fail, and is wrong of cases that the implementation computes rightly. It is named with what those cases lack
of what a case needs in order to fail.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

import numpy as np

from ringverify.cases.case import Case
from ringverify.cases.running import Observation
from ringverify.diagnosis import displaced, overflowing, reading, scaling, undefined
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.fitting import Alike, in_ring_of_teams, in_some_places, in_some_rows
from ringverify.diagnosis.further_cases import (
    cost,
    fresh,
    in_other_heads,
    in_other_numbers,
    like,
    runnable,
    unlike,
    with_scores_far_below_0,
)
from ringverify.diagnosis.gradients import (
    adding,
    carrying,
    crossing,
    moving,
    other_heads,
    piecewise,
    sinks,
    stale,
    weights,
)
from ringverify.diagnosis.hypothesis import Hypothesis, comparable
from ringverify.diagnosis.in_half import DELTA, in_half
from ringverify.diagnosis.probing import Asked
from ringverify.diagnosis.region import FailureMap, region
from ringverify.diagnosis.rounding_digits import TWICE, rounding
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.standing import Standing, padded
from ringverify.diagnosis.when.conditions import HALF, LARGE
from ringverify.diagnosis.when.exploring import BASES, Exploration
from ringverify.diagnosis.when.foretelling import Foretelling
from ringverify.diagnosis.when.needs import Needs
from ringverify.diagnosis.where import Probe, locate, of_other_code, wrong_tensors
from ringverify.events import TensorName, Where
from ringverify.faults.fault import When
from ringverify.implementation import Capabilities
from ringverify.worlds.patience import Patience, WorkLimit

SECONDS = 5.0
"""Seconds for further cases that tell hypotheses apart; a case in a simulated world takes a hundredth of that."""

WALL = 6
"""Times as many seconds of the wall clock as of processor time are allowed."""

LOOK = 16
"""Hypotheses that are tried between two looks at the clock."""

FURTHER = 20
"""Variants beside those that a cause has to explain which is not there in every case, or beside which another fits."""

SCATTERED = 50
"""Further cases, with several choices and all lengths changed at once, against which what is named is held."""

FEW = 16
"""One in so many of those that fail, at most, may be left unexplained."""

PARTING = 60
"""Further cases of which the first hypotheses left say whether they fail: those are run on which they differ."""

PARTED = 4
"""Hypotheses that are held against one another in this way, at most."""

OF_SINKS = 10
"""Cases beside the smallest in which a gradient of sinks has to be explained."""

ALTERNATIVES = 2
"""Hypotheses that are named, at most, if no case tells them apart."""

NO_DIGIT = "cause unknown: sums in {sums} over so many terms have a rounding error as large as the result"
"""Message for a case whose sums, in the declared dtype, may have a rounding error as large as the sums themselves."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The cause of a failing case, and where the case is wrong.

    Attributes:
        text: the cause in a sentence, and what to try first; or why no cause can be told; `None` if none is known.
        causes: the hypotheses that explain what was seen, the simplest first; empty if there is none.
        telling: those of them that the text names, if it is known of each in which cases it is there: what all of them
            say of other cases is known of these too.
        residual: the largest difference between what the first cause predicts and what was seen.
        where: where the smallest case is wrong, whether or not a cause is known.
        region: where the smallest case is wrong, as a map.
    """

    text: str | None = None
    causes: tuple[Hypothesis, ...] = ()
    telling: tuple[Hypothesis, ...] = ()
    residual: float | None = None
    where: Where | None = None
    region: FailureMap | None = None

    @property
    def hop(self) -> int | None:
        """The hop of the blocks that are treated wrongly, where it is known and one hop.

        The block of rank o reaches rank r at hop (r − o) mod P, in a ring that sends to the right.
        """
        return None if self.where is None else self.where.hop


def diagnose(
    observe: Callable[[Case], Observation],
    cases: Sequence[Case],
    capabilities: Capabilities,
    *,
    tensor: TensorName | None = None,
    probe: Probe | None = None,
    differentiate: Callable[[Case], Observation] | None = None,
    needs: Needs | None = None,
    hypotheses: Sequence[Hypothesis] = HYPOTHESES,
    seconds: float = SECONDS,
    processes: Callable[[], Iterable[int]] | None = None,
) -> Diagnosis | None:
    """Name the hypothesis that explains a failing case and others like it.

    Args:
        observe: runs the implementation on a case; all results that it returns have to be explained.
        cases: the smallest failing case, then others that fail in the same way, such as the case found first.
        capabilities: what the implementation declares.
        tensor: the result whose wrong rows are reported; `None` takes the first result that is wrong.
        probe: runs the implementation on a case with other inputs, to find the queries and keys concerned; `None`
            leaves them out.
        differentiate: runs a case with gradients, if `observe` leaves them out: they may tell apart hypotheses that
            agree in out and lse.
        needs: what the smallest case needs in order to fail, if that was found: the condition that a fault may have.
        hypotheses: the faults that may be named, the first of those that explain the same cases first.
        seconds: time for running further cases; cases that are not reached by then are left out.
        processes: returns the ids of the processes that run cases, whose processor time is then what counts; `None` if
            running a case takes time otherwise.

    Returns:
        the diagnosis; `None` if the first case returns no values, or only right ones.
    """
    if not cases[0].chunks:  # faults are predicted a call at a time
        cases = [call for case in cases for call in case.calls[-2:]]
    smallest = _seen(observe, cases[0], capabilities)
    if smallest is None:
        return None
    if not (wrong := wrong_tensors(smallest)):
        return _of_sinks(observe, smallest, cases, capabilities)

    def patience(seconds: float) -> WorkLimit | Patience:
        # The cause that is named must not depend on the load of the machine.
        return (
            Patience(seconds, [os.getpid()])
            if processes is None
            else WorkLimit(seconds, processes, wall=WALL * seconds)
        )

    if comparable(smallest):
        inquiry = _Inquiry(smallest, cases, observe, differentiate, probe, needs, seconds, patience, hypotheses)
        found = inquiry.diagnosis()
    else:
        found = Diagnosis(_without_digits(smallest))
    shown = tensor if tensor in wrong else wrong[0]
    if probe is None:
        return dataclasses.replace(found, where=locate(smallest, shown, ()))
    asked = Asked(smallest, probe)
    where = locate(smallest, shown, asked.pairs(shown))
    return dataclasses.replace(found, where=where, region=region(smallest, shown, asked))


def _of_sinks(
    observe: Callable[[Case], Observation], smallest: Scene, cases: Sequence[Case], capabilities: Capabilities
) -> Diagnosis | None:
    """Return the diagnosis of a gradient of sinks beside which nothing is wrong."""
    if not sinks.wrong(smallest):
        return None
    asked = runnable((*cases[1:], *like(cases[0], cases[-1])), capabilities)[:OF_SINKS]
    scenes = [smallest, *(one for case in asked if (one := _seen(observe, case, capabilities)) is not None)]
    # What makes other results wrong too is no fault of the gradient of sinks.
    text = None if any(map(wrong_tensors, scenes)) else sinks.cause(scenes)
    return None if text is None else Diagnosis(text)


class _Inquiry:
    """A failing case whose cause is sought, and what has been seen of cases like it.

    Hypotheses are tried in stages: those of the catalogue; the same in a ring of teams; what is fitted to cases that
    were seen; those of the catalogue in some rows; on some blocks or ranks; two roundings; roundings of which the size
    alone is known. Later ones take more to say.

    Args:
        smallest: the smallest failing case.
        cases: it, and others that fail in the same way, the case found first at the end.
        observe, differentiate, probe, needs, seconds: those of `diagnose`.
        patience_of: makes a limit on the work of some seconds.
        known: the hypotheses of the catalogue.
    """

    def __init__(
        self,
        smallest: Scene,
        cases: Sequence[Case],
        observe: Callable[[Case], Observation],
        differentiate: Callable[[Case], Observation] | None,
        probe: Probe | None,
        needs: Needs | None,
        seconds: float,
        patience_of: Callable[[float], WorkLimit | Patience],
        known: Sequence[Hypothesis],
    ) -> None:
        self._smallest, self._first, self._capabilities = smallest, cases[-1], smallest.capabilities
        self._observe, self._differentiate, self._probe = observe, differentiate, probe
        self._seconds, self._patience_of = seconds, patience_of
        # A call on a cache that passes may do so for the calls before it, which are not part of it.
        self._requires = () if needs is None else needs.requires
        self._failing = () if needs is None else needs.failing
        self._passing = () if needs is None or smallest.case.apart else needs.passing
        self._exploration = None if needs is None or smallest.case.apart else needs.exploration
        # Without gradients, a fault of one direction cannot be told from the same fault in both.
        ways = get_args(When) if "dq" in smallest.tensors else ("always",)
        self._known = [one for one in known if one.when in ways]
        self._whole = self._standing(self._known)
        self._asked = self._further(cases)
        self._patience = patience_of(seconds)
        # Failing cases rule out most hypotheses: those are asked first.
        self._scenes = sorted(self._answered(self._asked), key=lambda scene: not wrong_tensors(scene))
        if self._first != smallest.case and not (self._scenes and wrong_tensors(self._scenes[0])):
            self._scenes += self._answered([self._first])  # no other case failed; this one does

    def diagnosis(self) -> Diagnosis:
        """Return a diagnosis with the hypotheses that explain all cases, without `where` and `region`."""
        sometimes: list[Standing] = []
        first = (self._in_every_place, self._in_ring_of_teams, self._fitted)
        last = (self._in_some_rows, self._in_some_places, self._rounded_twice, self._in_delta, self._in_half)
        for stage in (*first, *last):
            if sometimes and stage not in first:
                break
            left = self._held_against_scenes(stage())
            named = self._told_apart(self._settled(left))
            if named:
                left = self._withstanding(left)
                named = self._told_apart(self._settled(left))
            if stage == self._fitted:
                named, left = self._measured(named), []
            named = self._told_apart_by_gradients(named)
            if _in_all(named):
                return self._told(named)
            # What is not so in some right case may be there under a condition, unless something else is so in all.
            sometimes = sometimes or named or [one.with_unknown_condition() for one in left if one.may_be]
        if sometimes:  # it is held against more of the cases that fail
            for scene in self._answered_later(self._failing):
                sometimes = [one for one in sometimes if one.stands(scene)]
        return self._told(sometimes) if sometimes else Diagnosis()

    # -- the stages ----------------------------------------------------------------------------------------------------

    def _in_every_place(self) -> Iterable[Standing]:
        return self._whole

    def _in_ring_of_teams(self) -> Iterator[Standing]:
        explaining = [one.hypothesis for one in self._whole]
        for number, alike in enumerate(in_ring_of_teams(self._known, explaining, self._smallest)):
            if number % LOOK == 0 and self._patience.left() <= 0:
                return
            yield from self._alike(alike)

    def _fitted(self) -> Iterator[Standing]:
        """Yield what is measured or read of the cases that were seen; more cases are seen for it."""
        if self._probe is None:
            return
        there, left = [self._smallest, *self._scenes], self._patience.left()
        # Cases that nobody has run, other in every number.
        cases = runnable(in_other_numbers(self._smallest.case), self._capabilities)
        others = (Scene(case, self._capabilities, Observation((), None)) for case in cases)
        found = [
            *undefined.hypotheses(there),
            *overflowing.hypotheses(there),
            *scaling.hypotheses(there),
            *carrying.hypotheses(there),
            *moving.hypotheses(there),
            *adding.hypotheses(there),
            *weights.hypotheses(there),
            *crossing.hypotheses(there),
            *stale.hypotheses(),
            *reading.hypotheses(there, self._probe, self._patience_of(reading.SECONDS).left, others),
            *other_heads.hypotheses(there),
            *piecewise.hypotheses(there),
            *displaced.hypotheses(there),
        ]
        # A rule was made to fit the cases that were read: others have to follow it too.
        more = runnable(fresh(self._smallest.case, self._first), self._capabilities) if found else ()
        self._scenes += self._answered(more)
        yield from self._standing(found)
        self._patience = self._patience_of(left)  # reading has its own time

    def _in_some_rows(self) -> Iterator[Standing]:
        explaining = [one.hypothesis for one in self._whole]
        for alike in in_some_rows(self._known, explaining, self._smallest):
            yield from self._alike(alike)

    def _in_some_places(self) -> Iterator[Standing]:
        for number, alike in enumerate(in_some_places(self._known, self._smallest)):
            if number % LOOK == 0 and self._patience.left() <= 0:
                return
            yield from self._alike(alike)

    def _rounded_twice(self) -> Iterable[Standing]:
        return self._standing(TWICE) if self._smallest.problem.dtype in HALF else ()

    def _in_delta(self) -> Iterable[Standing]:
        return self._standing([DELTA])

    def _in_half(self) -> Iterable[Standing]:
        seen = [one for one in (self._smallest, *self._scenes) if one.problem.dtype in HALF]
        return self._standing(in_half(seen)) if self._smallest.problem.dtype in HALF else ()

    # -- what is left of them ------------------------------------------------------------------------------------------

    def _standing(self, hypotheses: Iterable[Hypothesis]) -> list[Standing]:
        """Return the hypotheses that explain the smallest case."""
        return [standing for one in hypotheses for standing in self._alike([one])]

    def _alike(self, alike: Alike) -> list[Standing]:
        """Return hypotheses that predict the same of the smallest case, if they explain it."""
        residual = alike[0].explains(self._smallest)
        return [] if residual is None else [Standing(one, residual) for one in alike]

    def _held_against_scenes(self, standing: Iterable[Standing]) -> list[Standing]:
        """Return the hypotheses that may be true of all cases that were seen, as far as time allows."""
        left = list(standing)
        for number, scene in enumerate(self._scenes):
            if not left or (number and not wrong_tensors(scene) and self._patience.left() <= 0):
                break
            left = [one for one in left if self._stands(one, scene)]
        return left

    def _stands(self, one: Standing, scene: Scene) -> bool:
        return one.stands(scene, elsewhere=of_other_code(scene, self._smallest.case))

    def _settled(self, left: Iterable[Standing]) -> list[Standing]:
        """Return the hypotheses whose condition is known, those with the fewest words for it."""
        named = [told for one in left if (told := one.settled(self._smallest, self._requires)) is not None]
        fewest = min((len(one.only) for one in named), default=0)
        return [one for one in named if len(one.only) == fewest]

    @functools.cached_property
    def _of_heads(self) -> Sequence[Case]:
        """Cases with other numbers of heads and key heads."""
        return runnable(in_other_heads(self._smallest.case.replace(values="normal")), self._capabilities)

    @functools.cached_property
    def _scattered(self) -> list[Scene]:
        """What is seen of cases that are unlike those at hand."""
        if self._exploration is None:
            return []
        has, x = [self._smallest.case, self._first], self._exploration
        # Scores that are far apart show rounding errors that a fault has made larger; padding may have been cleared.
        hides = () if has[0].values in LARGE else LARGE
        scattered = x.scattered(x.failing()[:BASES], random.Random(1), cotangents=True)
        drawn = (case.replace(values="normal") if case.values in hides else case for case in scattered)
        heads = [*self._of_heads]
        heads += {(case.problem.heads, case.problem.hk): case for case in self._failing}.values()
        cases = [
            case
            for case in dict.fromkeys((*heads, *itertools.islice(drawn, SCATTERED)))
            if not case.chunks and (any(map(padded, has)) or not padded(case))
        ]
        return list(self._answered(cases, self._patience_of(self._seconds / 2)))

    def _withstanding(self, left: Iterable[Standing]) -> list[Standing]:
        """Return those that explain most scattered cases, and all that fail but a few that may show something else."""
        spared = sum(bool(wrong_tensors(scene)) for scene in self._scattered) // FEW

        def unexplained(one: Standing) -> int:
            missed = 0
            for scene in self._scattered:
                if not self._stands(one, scene):
                    # Which heads go together is a relation of numbers, of which few cases show much.
                    missed += spared + 1 if scene.case in self._of_heads and wrong_tensors(scene) else 1
                if missed > spared:
                    break
            return missed

        counted = [(one, unexplained(one)) for one in left]
        fewest = min((count for _, count in counted), default=0)
        return [one for one, count in counted if count == fewest <= spared]

    def _told_apart(self, named: list[Standing]) -> list[Standing]:
        """Return the hypotheses that further cases leave, some of which part those that are alike so far."""
        smallest = self._smallest.case
        heads, numbers = (runnable(of(smallest), self._capabilities) for of in (in_other_heads, in_other_numbers))
        left = _refuted(named, self._answered_later(heads, self._failing, self._passing, numbers), self._stands)
        return left if self._exploration is None else self._parted(left, self._exploration)

    def _parted(self, named: list[Standing], x: Exploration) -> list[Standing]:
        """Return the hypotheses that are left by cases of which some of them say that they fail, and others not."""
        apart, patience = _apart(named), self._patience_of(self._seconds / 4)
        if len(apart) < 2:
            return named
        with_gradients = "dq" in self._smallest.tensors
        those = frozenset({self._smallest.case.sharding})
        foretold = [Foretelling((one.hypothesis,), self._capabilities, those, with_gradients) for one in apart[:PARTED]]
        drawn = x.scattered(x.failing()[:BASES], random.Random(2), cotangents=with_gradients)
        for case in itertools.islice(drawn, PARTING):
            if patience.left() <= 0 or len(_apart(named)) < 2:
                break
            if case.chunks or len({one(case) for one in foretold}) < 2:
                continue
            scene = _seen(self._observe, case, self._capabilities)
            if scene is not None and comparable(scene):
                named = _refuted(named, iter([scene]), self._stands)
        return named

    def _measured(self, named: list[Standing]) -> list[Standing]:
        """Return the first of the hypotheses that were fitted to some cases, if it is so in all others."""
        needed = {one.text for one in self._requires}
        return [one for one in named[:1] if one.in_all_like_it or one.when_it_fails(needed)]

    def _told_apart_by_gradients(self, named: list[Standing]) -> list[Standing]:
        """Return the hypotheses that explain gradients too; all if none does, as gradients may have another fault."""
        if len(_apart(named)) > 1 and self._differentiate is not None:
            for case in (self._smallest.case, *self._asked[:1]):
                scene = _seen(self._differentiate, case, self._capabilities)
                if scene is not None and comparable(scene):
                    named = [one for one in named if one.stands(scene)] or named
        return named

    def _told(self, named: list[Standing]) -> Diagnosis:
        """Return the diagnosis that names these hypotheses, the first ones in words."""
        first, apart, needed = named[0], _apart(named), {one.text for one in self._requires}
        text = "; or ".join(one.sentence(self._smallest, needed) for one in apart[:ALTERNATIVES])
        text += f" (residual {first.residual:.0e})"
        if advice := first.hypothesis.advised(self._smallest):
            text += f". {advice}"
        sure = len(apart) <= ALTERNATIVES and not any(one.somewhere for one in apart)
        telling = tuple(one.with_its_condition() for one in apart if sure)
        return Diagnosis(text, tuple(one.hypothesis for one in named), telling, first.residual)

    # -- cases ---------------------------------------------------------------------------------------------------------

    def _further(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases that a cause has to explain too, beside the smallest."""
        smallest = cases[0]
        # Extreme values hide a fault in rounding errors; shrinking left the smallest case with the simplest values.
        others = [*(case.replace(values=smallest.values) for case in cases[1:]), *like(smallest, cases[-1])]
        if not all(np.isfinite(self._smallest.seen("out", rank)).all() for rank in range(self._smallest.size)):
            others += with_scores_far_below_0(smallest)  # what is NaN may be so of small weights too
        asked = [case for case in runnable(others, self._capabilities) if case != smallest]
        for several in (self._failing, self._passing):
            varied = (case for case in several if case.values in (smallest.values, "normal") and not case.chunks)
            asked += [case for case in unlike(varied) if case not in (smallest, *asked)]
        return sorted(asked, key=cost)  # many small cases tell more hypotheses apart than one large case

    def _answered_later(self, *several: Iterable[Case]) -> Iterator[Scene]:
        """Yield what is seen of further cases of one call, the last of each kind, in time of their own."""
        new = ([case for case in cases if case not in self._asked and not case.chunks] for cases in several)
        further = [case for cases in new for case in cases[-FURTHER:]]
        yield from self._answered(further, self._patience_of(self._seconds))

    def _answered(self, asked: Iterable[Case], patience: WorkLimit | Patience | None = None) -> Iterator[Scene]:
        """Yield what is seen of cases, the first of them at least; of a case without digits nothing can be told."""
        patience = patience or self._patience
        for number, case in enumerate(asked):
            if number and patience.left() <= 0:
                return
            scene = _seen(self._observe, case, self._capabilities)
            if scene is not None and comparable(scene):
                yield scene


def _refuted(
    named: list[Standing], scenes: Iterator[Scene], stands: Callable[[Standing, Scene], bool]
) -> list[Standing]:
    """Return the hypotheses that further cases leave, of which as many are run as it takes to leave one sentence."""
    while len(_apart(named)) > 1 and (scene := next(scenes, None)) is not None:
        named = [one for one in named if stands(one, scene)] or named
        fewest = min(one.unexplained for one in named)
        named = [one for one in named if one.unexplained == fewest]
    return named


def _in_all(named: Sequence[Standing]) -> bool:
    """Whether there are some, and no right case lacks any of them."""
    return bool(named) and all(one.in_all_like_it for one in named)


def diagnose_rounding(
    observe: Callable[[Case], Observation], cases: Sequence[Case], capabilities: Capabilities
) -> Diagnosis | None:
    """Name what is rounded once more than declared, by the digits of 16-bit cases whose values may be within bounds."""
    scenes = [scene for case in dict.fromkeys(cases) if (scene := _seen(observe, case, capabilities)) is not None]
    found = rounding(scenes)
    return Diagnosis(found[0].sentence(), tuple(found), tuple(found[:1])) if found else None


def _without_digits(scene: Scene) -> str:
    """Return the message that rounding hides the cause, and which dtype to declare so that it can be named."""
    text, declared = NO_DIGIT.format(sums=scene.pipeline.sums), scene.capabilities.dtypes
    wider = [dtype for dtype in ("float32", "float64") if dtype not in declared]
    return f"{text}. Add {wider[0]} to dtypes to get a cause" if len(wider) == 2 else text


def _apart(named: list[Standing]) -> list[Standing]:
    """Return the hypotheses without those that an earlier one covers."""
    found: list[Standing] = []
    for one in named:
        if not any(earlier.hypothesis.covers(one.hypothesis) for earlier in found):
            found.append(one)
    return found


def _seen(observe: Callable[[Case], Observation], case: Case, capabilities: Capabilities) -> Scene | None:
    observation = observe(case)
    return None if observation.failure is not None else Scene(case, capabilities, observation)
