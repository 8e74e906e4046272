"""Explain a counterexample: where its values are wrong and why, and when it fails."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from ringref.rounding import UNIT_ROUNDOFF
from ringverify.cases.case import Case
from ringverify.cases.comparing import GRADIENTS, allowed, answer, pipeline_of
from ringverify.cases.inputs import Inputs, selectable
from ringverify.cases.running import GradMode, Observation, Runner, shards
from ringverify.check.drawing import drawn
from ringverify.check.outside import unseen_by_a_program
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.diagnose import WALL, Diagnosis, diagnose, diagnose_rounding
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.poison import of_poison
from ringverify.diagnosis.when.calls import how_it_is_called
from ringverify.diagnosis.when.conditions import HALF
from ringverify.diagnosis.when.foretelling import contradicting, held_against
from ringverify.diagnosis.when.needs import MOST_RANKS, Needs, needs
from ringverify.diagnosis.when.scattering import held_against_runs
from ringverify.errors import Inconclusive
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.modes import input_of
from ringverify.properties.precision import PRECISION
from ringverify.properties.property import Judgement, Property, Violation, judge_everything, judge_observation
from ringverify.worlds.external.world import CaseRefused
from ringverify.worlds.patience import WorkLimit
from ringverify.worlds.world import WorldUnavailable

NEEDS_SECONDS = 3.0
"""Seconds for finding out when a case fails, of processor time where the world is simulated: a busy machine says the
same."""

PROGRAM_SECONDS = 15.0
"""The same of a program, which may compile what it is asked."""

CAUSE_SECONDS = 1.5
"""Seconds for holding what was found against the cause, or further runs; twice as many where gradients are wrong."""

ORDINARY = 12
"""Cases of ordinary values, at most, of which some are looked for that show a fault of rounding."""

DRAWN = 60
"""Cases of the property that are drawn for it, to be mixed with the failing one."""

NEAR = 4
"""A case that passes with an error this many times smaller than that of one that fails, or larger, proves nothing."""

WHATEVER_VALUES = ("hazard", "deadlock", "raised")
"""Violations of messages, shapes and control, which values do not decide."""

HANGING = 0.5
"""Deadline in seconds of a variant's run: a small case takes milliseconds; a program may compile first."""


def judged(property: Property, case: Case, runner: Runner) -> Judgement:
    """Judge one case. A case that cannot test the property is not run, and one that a program refuses tests nothing.

    Raises:
        WorldUnavailable: the world could not be set up, or a limit of the machine was reached.
    """
    if not property.applies(case, runner.capabilities):
        return Judgement(0.0, None, applies=False)
    try:
        return property.judge(case, runner)
    except CaseRefused as refusal:
        runner.log.refused.append(str(refusal))
        return Judgement(0.0, None, applies=False)


def afresh(property: Property, runner: Runner, cases: Sequence[Case]) -> Judgement:
    """Judge the last of some cases in a fresh process, after running the others there."""
    runner.world.close()
    return [judged(property, case, runner) for case in cases][-1]


def judged_if_possible(property: Property, case: Case, runner: Runner) -> Judgement | None:
    """Judge one case; `None` where nothing was learned."""
    try:
        return judged(property, case, runner)
    except (Inconclusive, WorldUnavailable):
        return None


def quick_place(
    property: Property, runner: Runner, watched: Callable[[], Runner | None], case: Case, violation: Violation
) -> Runner:
    """Return the runner for dozens of runs of cases like one that fails: in a simulated world, if it fails there too.

    Ranks that are processes are started anew after a run that fails, which takes long.
    """
    if runner.world.name != "simulated" and (simulated := watched()) is not None:
        alike = judged_if_possible(property, case, simulated)
        if alike is not None and alike.violation is not None and alike.violation.reason == violation.reason:
            return simulated
    return runner


def when_it_fails(
    property: Property,
    runner: Runner,
    case: Case,
    violation: Violation,
    *,
    shrunk_from: Sequence[Case] = (),
    until: float = math.inf,
) -> Needs:
    """Vary a case that violates a property, and return when it fails.

    Args:
        property: the violated property.
        runner: where to run variants; see `quick_place`.
        case: the smallest case.
        violation: how it violates the property.
        shrunk_from: as in `needs`.
        until: value of `time.monotonic()` at which to end, if that is before `NEEDS_SECONDS`.
    """
    there = runner.for_another_property()
    there = there if there.world.name == "external" else there.within(HANGING)
    finding, wrong, otherwise = violation.finding, dict[Case, frozenset[int]](), set[Case]()
    doubtful = set[Case]()
    gradients = _of_gradients(violation)
    tensors = () if finding is None else _alike(finding.tensors)
    of_sinks = finding is not None and finding.tensors == ("dsinks",)

    def plain(other: Case) -> Judgement:
        return judge_observation(other, there.capabilities, _run(there, violation, gradients)(other), tensors)

    # Where an ordinary run shows it, other dtypes, values and layouts than those of the property are varied too.
    ordinary = plain(case) if tensors else None
    wider = ordinary is not None and ordinary.violation is not None
    hidden = ordinary.margin / NEAR if ordinary is not None and wider else math.inf
    reasons = {violation.reason, *((("value", tensor) for tensor in tensors) if wider else ())}
    reasons |= {*violation.also} if violation.kind == "hazard" else set()

    def in_scope(other: Case) -> Case:
        """What a property asks of the widest dtype, or of subgroups, without numbers, holds of the others too."""
        return other.replace(dtype=case.problem.dtype, group=case.group)

    largest = [0.0 if ordinary is None else ordinary.margin]

    def too_coarse(other: Case) -> bool:
        """Whether an error as large as the largest that was seen would be within what a 16-bit dtype allows."""
        units = [UNIT_ROUNDOFF[one.problem.dtype] for one in (case, other)]
        return other.problem.dtype in HALF and units[0] < units[1] and 0 < largest[0] * units[0] < units[1]

    def fails(other: Case) -> bool | None:
        if not _possible(other, there.capabilities):
            return None
        if there.world.name == "external" and unseen_by_a_program(other) != unseen_by_a_program(case):
            return None
        if wider and not gradients and other.cotangent != case.cotangent:
            return None
        try:
            seen = plain(other) if wider else judged(property, other, there)
            if not seen.applies and violation.kind == "precision" and other.problem.dtype not in HALF:
                seen = judge_everything(other, there)  # the property is one of 16-bit dtypes
                if seen.violation is not None:
                    return True  # and what is wrong is no rounding
            elif not seen.applies and finding is None and property.applies(in_scope(other), there.capabilities):
                seen = property.judge(other, there)
        except (Inconclusive, WorldUnavailable, CaseRefused):
            return None
        if not seen.applies:
            return None
        if seen.violation is None:
            if of_sinks and _has_no_gradient_of_sinks(other, there.capabilities):
                return None
            if seen.margin > hidden or too_coarse(other):
                doubtful.add(other)
                return None
            return False
        if other.problem.dtype == case.problem.dtype:
            largest[0] = max(largest[0], seen.margin)
        if seen.violation.finding is not None and not gradients:  # other gradients may be wrong on other ranks
            wrong[other] = frozenset(seen.violation.finding.wrong)
        if not reasons & {seen.violation.reason, *seen.violation.also}:
            otherwise.add(other)
            return None
        return True

    if not _possible(case, there.capabilities):
        return Needs((), (), complete=False, tried=0)
    seconds = PROGRAM_SECONDS if there.world.name == "external" else NEEDS_SECONDS
    wall = min(seconds if _waits(there, violation) else WALL * seconds, until - time.monotonic())
    ranks = there.most_ranks if there.most_ranks is not None else MOST_RANKS
    return needs(
        case,
        fails,
        there.capabilities,
        shrunk_from=shrunk_from,
        drawn=[
            one for one in drawn(property, there.capabilities, DRAWN, seed=-1) if _possible(one, there.capabilities)
        ],
        left=WorkLimit(seconds, lambda: there.world.processes, wall=wall).left,
        most_ranks=ranks,
        wrong_ranks=wrong.get,
        otherwise=otherwise,
        doubtful=doubtful,
        chancy=case.problem.dtype in HALF and ordinary is not None and ordinary.margin < NEAR,
        whatever_values=violation.kind in WHATEVER_VALUES,
        called=_called(there, case, tensors) if violation.way is not None else None,
    )


def _called(runner: Runner, case: Case, tensors: Sequence[TensorName]) -> str | None:
    """Return how a call has to be made in order to return wrong results, in words."""

    def fails(mode: GradMode, some: str) -> bool | None:
        asked = tuple(one for one in tensors if one not in GRADIENTS or input_of(one) in some)
        if not asked:
            return None
        seen = runner.run(case, gradients=bool(some), mode=mode, requiring=some)
        return judge_observation(case, runner.capabilities, seen, asked).violation is not None

    return how_it_is_called(fails) if runner.capabilities.gradients and runner.world.name != "external" else None


@np.errstate(all="ignore")  # what came back may be NaN or infinite
def contradicting_causes(
    runner: Runner, violation: Violation, needs: Needs, causes: Sequence[Hypothesis]
) -> list[Case]:
    """Return cases that fail though a cause says that they pass: see `ringverify.diagnosis.when.foretelling`."""
    left = WorkLimit(CAUSE_SECONDS, lambda: runner.world.processes, wall=WALL * CAUSE_SECONDS).left
    return contradicting(needs, causes, runner.capabilities, gradients=_of_gradients(violation), left=left)


@np.errstate(all="ignore")  # what came back may be NaN or infinite
def held_against_others(
    runner: Runner, violation: Violation, needs: Needs, causes: Sequence[Hypothesis], *, until: float = math.inf
) -> Needs:
    """Return when a case fails, held against further cases: its causes foretell these, or they are run.

    See `ringverify.diagnosis.when.foretelling` and `ringverify.diagnosis.when.scattering`. Arguments are those of
    `when_it_fails`, and causes that are known.
    """
    gradients = _of_gradients(violation)
    seconds = CAUSE_SECONDS * (1 + gradients)
    wall = min(seconds if _waits(runner, violation) else WALL * seconds, until - time.monotonic())
    left = WorkLimit(seconds, lambda: runner.world.processes, wall=wall).left
    found = held_against(needs, causes, runner.capabilities, gradients=gradients, left=left) if causes else None
    return found or held_against_runs(needs, gradients=gradients, left=left)


def _waits(runner: Runner, violation: Violation) -> bool:
    """Whether runs are waited for: neither programs nor waiting take processor time here, the wall clock ends it."""
    return runner.world.name != "simulated" or violation.kind in ("died", "deadline")


def _of_gradients(violation: Violation) -> bool:
    """Whether gradients are wrong."""
    return violation.finding is not None and not set(GRADIENTS).isdisjoint(violation.finding.tensors)


def _has_no_gradient_of_sinks(case: Case, capabilities: Capabilities) -> bool:
    """Whether all sinks of a case are so far from its scores that none has a gradient: that it passes is no news."""
    pipeline = pipeline_of(case, capabilities, Observation((), None))
    right = [
        (answer(call).dsinks, allowed(call, pipeline).dsinks)
        for call in case.calls
        if call.problem.sinks and call.problem.nq
    ]
    return bool(right) and all(exact is not None and bool((np.abs(exact) <= limit).all()) for exact, limit in right)


def _alike(tensors: Sequence[TensorName]) -> tuple[TensorName, ...]:
    """Return the results that are wrong together: one fault shows in each of them, though not in every case."""
    both: tuple[TensorName, ...] = ("out", "lse")
    kinds = (both, GRADIENTS)
    return tuple(name for kind in kinds if not set(kind).isdisjoint(tensors) for name in kind)


def _run(runner: Runner, violation: Violation, gradients: bool) -> Callable[..., Observation]:
    """Return what runs a case in the way that a violation is about, with gradients or without."""
    if violation.way is None:
        return functools.partial(runner.run, gradients=gradients)
    mode, requiring = violation.way
    return functools.partial(runner.run, gradients=bool(requiring), mode=mode, requiring=requiring)


def _out_is_undefined(runner: Runner, case: Case) -> bool:
    """Whether out is no number somewhere, of which any gradient may become none."""
    seen = runner.run(case, gradients=False)
    return seen.failure is None and any(bool(np.isnan(rank.out).any()) for rank in seen.ranks)


def _possible(case: Case, capabilities: Capabilities) -> bool:
    """Return whether a case can be made: selectors fit, and the sharding function deals its positions out."""
    try:
        shards(case, capabilities)
    except Exception:  # what a sharding function raises is the violation, or another one
        return False
    return case.values != "selectors" or selectable(case)


@np.errstate(all="ignore")  # what came back may be NaN or infinite
def explained(
    runner: Runner,
    property: Property,
    violation: Violation,
    smallest: Case,
    first: Case,
    needs: Needs | None = None,
    known: Sequence[Hypothesis] = HYPOTHESES,
    *,
    beside: Sequence[Case] = (),
) -> Diagnosis | None:
    """Diagnose a case that violates a property; `None` if no value is wrong, or none in an ordinary run.

    A property may compare cases with each other: the first of them that is wrong is diagnosed, and where it is wrong is
    told of the case itself only.

    Args:
        runner: runs the implementation in its world.
        property: what must hold.
        violation: what is wrong on the smallest case.
        smallest: the case to explain.
        first: the case from which it was shrunk; the same cause has to explain it.
        needs: what the case needs in order to fail, if that was found.
        known: the faults that may be named.
        beside: further cases that fail, which the cause has to explain.
    """
    c = runner.capabilities
    if violation.finding is None:
        if violation.kind != "precision":
            return None
        return diagnose_rounding(functools.partial(runner.run, gradients=c.gradients), (smallest, first), c)
    # If out or lse is wrong, gradients are too, in a way that does not depend on the fault alone: leave them out.
    gradients = violation.finding.tensor in GRADIENTS and not _out_is_undefined(runner, smallest)
    observe = _run(runner, violation, gradients)

    def probe(case: Case, inputs: Inputs) -> Observation:
        return observe(case, inputs=inputs)

    def differentiate(case: Case) -> Observation:
        return runner.run(case, gradients=True)

    try:
        failing = () if needs is None else needs.failing
        if (text := of_poison(smallest, c, probe, failing)) is not None:
            return Diagnosis(text)
        for these in zip(property.compared(smallest, c), property.compared(first, c), strict=False):
            found = diagnose(
                observe,
                (these[0], *beside, these[1]) if these[0] == smallest else these,
                c,
                tensor=violation.finding.tensor,
                probe=probe if these[0] == smallest else None,
                differentiate=differentiate if c.gradients and not gradients and violation.way is None else None,
                needs=needs if these[0] == smallest else None,
                hypotheses=known,
                processes=(lambda: runner.world.processes) if runner.world.name == "simulated" else None,
            )
            if found is not None:
                found = found if these[0] == smallest else replace(found, where=None)
                if not found.causes and needs is not None and _of_16_bits(needs, c):
                    found = _with_rounding(found, runner)
                return found
    except WorldUnavailable:
        pass
    return None


def _of_16_bits(needs: Needs, capabilities: Capabilities) -> bool:
    """Whether every case that failed has a 16-bit dtype, where wider ones are declared."""
    return not set(capabilities.dtypes) <= set(HALF) and all(one.problem.dtype in HALF for one in needs.failing)


def _with_rounding(found: Diagnosis, runner: Runner) -> Diagnosis:
    """Add the cause that the digits of ordinary 16-bit cases show, in which errors are larger than declared."""
    c = runner.capabilities
    cases = drawn(PRECISION, c, ORDINARY, seed=-1)
    failing = (one for one in cases if (seen := judged_if_possible(PRECISION, one, runner)) and seen.violation)
    told = diagnose_rounding(functools.partial(runner.run, gradients=c.gradients), [*islice(failing, 2)], c)
    return found if told is None else replace(found, text=told.text, causes=told.causes, telling=told.telling)
