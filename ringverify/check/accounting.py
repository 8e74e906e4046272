"""Say of a counterexample what its numbers do not: its cause, when it fails, what would pass, and hints."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence

from ringverify.cases.case import Case
from ringverify.cases.running import Runner, shards
from ringverify.check.beside import SHARED_STATE, beside
from ringverify.check.declaring import Declaration, contradicted, would_pass
from ringverify.check.explaining import (
    afresh,
    contradicting_causes,
    explained,
    held_against_others,
    judged_if_possible,
    quick_place,
    when_it_fails,
)
from ringverify.check.likewise import explained_likewise
from ringverify.check.mishap import Mishap, attempt
from ringverify.check.searching import Counterexample
from ringverify.check.suggesting import suggested
from ringverify.diagnosis.conduct import differing, of_deadlock, of_group, of_messages, of_state, untied
from ringverify.diagnosis.diagnose import WALL, Diagnosis
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.sizes import SizedError, of_sizes
from ringverify.diagnosis.when.needs import Needs
from ringverify.events import Hint, Needed
from ringverify.properties.adversity import HAZARDS
from ringverify.properties.buffers import INPUTS_UNTOUCHED
from ringverify.properties.property import Property, Violation, judge_observation
from ringverify.properties.uninitialised import UNINITIALISED
from ringverify.worlds.foreign_text import sizes_in
from ringverify.worlds.patience import WorkLimit
from ringverify.worlds.world import WorldUnavailable

UNWRITTEN = "memory of torch.empty is used before it is written: the result is what happens to lie there"
"""The cause of a failure that comes and goes, where the case always fails once new memory holds NaN."""

LIKEWISE_SECONDS = 3.0
"""Seconds for finding a case like one that raises whose numbers are wrong instead."""

BESIDE = 6
"""Cases that contradict a cause, at most, that another one has to explain."""

WATCHING = "watching its messages"
"""A step, as `Mishap` says it."""

RAISING = 16
"""Cases in which sizes in messages have to be what they stand for, at most."""

TELLING: dict[str, tuple[tuple[str, str], ...]] = {
    "value": tuple(
        ("hazard", kind) for kind in ("receive_read", "receive_changed", "send_changed", "overlap", "not_waited")
    ),
    "raised": (("hazard", "mismatch"),),
    "deadlock": (("hazard", "wrong_group"),),
}
"""By kind of a violation, the hazards that make it: what a rank computes with is not what arrives, say."""


class Account:
    """What is found out about one counterexample. A step that fails is noted, and the others go on.

    Args:
        property: what is violated.
        runner: runs the implementation.
        watched: returns a runner of a simulated world, if there can be one, for ranks that run elsewhere.
        shown: the counterexample.
        known: the hypotheses among which its cause is sought.
        mishaps: failing steps are appended here.
        late: value of `time.monotonic()` by which to be done; `None` if it is too late, and only hints are added.
        hangs: whether it was found because it does not end.
    """

    def __init__(
        self,
        property: Property,
        runner: Runner,
        watched: Callable[[], Runner | None],
        shown: Counterexample,
        known: Sequence[Hypothesis],
        mishaps: list[Mishap],
        late: float | None,
        *,
        hangs: bool,
    ) -> None:
        self._property, self._runner, self._watched, self._shown = property, runner, watched, shown
        self._known, self._mishaps, self._late, self._hangs = known, mishaps, late, hangs
        self._case, self._violation = shown.case, shown.violation
        # A failure that depends on earlier cases, or on chance, cannot be explained from this case.
        self._steady = shown.repeats and not shown.after

    def told(self, larger: Sequence[Case], *, alone: bool) -> Counterexample:
        """Return the counterexample with what was found out.

        Args:
            larger: failing cases that it was shrunk from.
            alone: the case fails in a fresh process, without others before it.
        """
        # That a process of another environment ended is no matter of what it keeps.
        ended = self._violation.kind == "died" and self._runner.world.name == "external"
        unsteady = not self._steady and not ended
        unwritten = _of_unwritten(self._case, self._simulated()) if unsteady else None
        needs = self._when_it_fails(larger) if alone else None
        diagnosis, needs = self._cause(needs)
        declaration = self._declaration(diagnosis)
        hints = self._hints(sought=declaration is None and not (diagnosis.causes or self._violation.cause))
        told = self._needed(needs)
        if unwritten is not None:
            diagnosis, told = Diagnosis(UNWRITTEN), self._when_it_is_read(unwritten) or told
        elif unsteady and self._shown.after:
            requires, cause = of_state(untied(differing(self._case, self._shown.after[0])))
            diagnosis, told = Diagnosis(cause), Needed(requires=(requires,), irrelevant=(), complete=True)
        elif diagnosis.text is None and self._late is not None:
            conduct = attempt(self._mishaps, "naming the cause", lambda: self._conduct(needs), None)
            diagnosis = dataclasses.replace(diagnosis, text=conduct)
            hints = [hint for hint in hints if conduct is None or hint.text not in conduct]  # it is said once
        return dataclasses.replace(
            self._shown, diagnosis=diagnosis, declaration=declaration, needs=told, hints=tuple(hints)
        )

    # -- when it fails -------------------------------------------------------------------------------------------------

    def _when_it_fails(self, larger: Sequence[Case]) -> Needs | None:
        if self._late is None or (self._hangs and self._runner.world.name != "simulated"):
            return None
        if self._after_another_call:
            return None  # both would have to be varied
        there = self._simulated()
        watched = attempt(self._mishaps, WATCHING, lambda: self._watched_hazard, None)
        if there is not None and watched is not None and self._violation.kind == "value":
            return self._varied(HAZARDS, lambda: there, watched)  # of what is read too early, chance decides
        return self._varied(self._property, lambda: self._place, self._violation, larger)

    @property
    def _after_another_call(self) -> bool:
        """Whether a call is wrong after another one, by its judge."""
        wrong = () if self._violation.finding is None else self._violation.finding.tensors
        return self._violation.needs is not None and bool({"out", "lse"} & set(wrong))

    def _when_it_is_read(self, unwritten: Violation) -> Needed | None:
        """Return when memory is read that was not written."""
        there = self._simulated()
        if self._late is None or there is None:
            return None
        needs = self._varied(UNINITIALISED, lambda: there, unwritten)
        return None if needs is None else needs.told()

    def _varied(
        self, property: Property, place: Callable[[], Runner], violation: Violation, larger: Sequence[Case] = ()
    ) -> Needs | None:
        def varied() -> Needs:
            assert self._late is not None
            return when_it_fails(property, place(), self._case, violation, shrunk_from=larger, until=self._late)

        return attempt(self._mishaps, "finding out when the case fails", varied, None)

    def _needed(self, needs: Needs | None) -> Needed | None:
        """Return when it fails as the report has it, with what the judge itself says of it."""
        told = None if needs is None else needs.told()
        if self._violation.needs is None:
            return told
        plain = told or Needed(requires=(), irrelevant=(), complete=True)
        return dataclasses.replace(plain, requires=(self._violation.needs, *plain.requires))

    # -- its cause -----------------------------------------------------------------------------------------------------

    def _cause(self, needs: Needs | None) -> tuple[Diagnosis, Needs | None]:
        """Return the cause that values tell, and when it fails, held against that."""
        if not self._steady or self._late is None or self._after_another_call:
            return Diagnosis(), needs
        case, first, violation = self._case, self._shown.first, self._violation
        explain = functools.partial(explained, self._runner, self._property, violation, case, first, needs, self._known)
        diagnosis = attempt(self._mishaps, "explaining the case", explain, None) or Diagnosis()
        if needs is not None and diagnosis.telling and violation.way is None:
            contradict = functools.partial(contradicting_causes, self._runner, violation, needs, diagnosis.telling)
            none = list[Case]()
            against = attempt(self._mishaps, "looking for cases that contradict its cause", contradict, none)
            if against:
                explain = functools.partial(explain, beside=against[:BESIDE])
                diagnosis = attempt(self._mishaps, "explaining these too", explain, None) or Diagnosis()
        if diagnosis.text is not None and violation.kind in TELLING:
            hazard = attempt(self._mishaps, WATCHING, self._hazard, None)
            if hazard is not None:
                diagnosis = dataclasses.replace(diagnosis, text=f"{hazard}; what comes of it: {diagnosis.text}")
        if needs is not None:
            telling = diagnosis.telling if violation.way is None else ()
            held = functools.partial(held_against_others, self._place, violation, needs, telling, until=self._late)
            needs = attempt(self._mishaps, "holding when it fails against other cases", held, needs)
        return diagnosis, needs

    def _conduct(self, needs: Needs | None) -> str | None:
        """Return the cause that no value tells: of an earlier call, messages, who waits for whom, or the group."""
        case, violation, finding = self._case, self._violation, self._violation.finding
        seen = violation.cause
        if case.chunks and finding is not None and finding.position is not None:
            seen = self._left_by_earlier_call(case.call_of(finding.position))
        elif seen is None and violation.kind in TELLING and (there := self._simulated()) is not None:
            seen = self._seen_by_watching(there, needs)
        seen = seen or (None if needs is None else of_group(needs, violation.failure))
        return seen or self._of_raising(needs)

    def _of_raising(self, needs: Needs | None) -> str | None:
        """Return what raised, a line of the user's or autograd, and what sizes in its message stand for."""
        failure = self._violation.failure
        if failure is None or failure.line is None or failure.limit is not None:
            return None
        runs = {} if needs is None or needs.exploration is None else needs.exploration.runs
        failing = (self._case, *(case for case, failed in runs.items() if failed))
        unlike: dict[tuple[int, int, int], Case] = {}
        for case in failing:
            unlike.setdefault((case.world_size, case.problem.nq, case.problem.nk), case)
        seen = [self._raised(case) for case in itertools.islice(unlike.values(), RAISING)]
        sizes = of_sizes([one for one in seen if one is not None], self._place.capabilities)
        return f"raised {failure.line}" + (f"; {sizes}" if sizes is not None else "")

    def _raised(self, case: Case) -> SizedError | None:
        """Return what a rank raises in a case, if one does."""
        seen = judged_if_possible(self._property, case, self._place)
        failure = None if seen is None or seen.violation is None else seen.violation.failure
        if failure is None or failure.rank not in case.ring_ranks:
            return None
        return SizedError(case, case.ring_ranks.index(failure.rank), *sizes_in(failure.message))

    def _left_by_earlier_call(self, place: int) -> str | None:
        call = self._case.calls[place]
        alone = place > 0 and afresh(self._property, self._runner, [call]).violation is None
        return f"call {place + 1} uses something that an earlier call left: alone it is right" if alone else None

    def _seen_by_watching(self, there: Runner, needs: Needs | None) -> str | None:
        violation = self._violation
        hazard = self._hazard()
        if violation.kind == "raised" and (likewise := self._likewise(there, needs)) is not None:
            return likewise if hazard is None else f"{likewise}; what comes of it here: {hazard}"
        if hazard is not None:
            return hazard
        if violation.kind == "value":
            return self._of_changed_input() or self._of_changed_result()
        if violation.failure is None or violation.kind != "deadlock":
            return None
        if needs is not None and (other := of_group(needs, violation.failure)) is not None:
            return other
        requires = () if needs is None else needs.told().requires
        full = needs is not None and _without_an_empty_rank(needs, there)
        conduct = of_deadlock(self._case, there.capabilities, violation.failure, requires, full=full)
        return conduct or self._likewise(there, needs) or of_messages(violation.failure)

    def _likewise(self, there: Runner, needs: Needs | None) -> str | None:
        """Return the cause of wrong numbers in a case like this one, which has none, unless a contract is broken."""
        failure = self._violation.failure
        if failure is not None and failure.rule is not None:
            return None
        seconds = min(LIKEWISE_SECONDS, math.inf if self._late is None else self._late - time.monotonic())
        left = WorkLimit(seconds, lambda: there.world.processes, wall=WALL * seconds).left
        found = explained_likewise(there, self._case, needs, self._known, left)
        if found is None:
            return None
        case, diagnosis = found
        return f"{diagnosis.text}, as wrong numbers tell where nothing is raised: {case.describe()}"

    @functools.cached_property
    def _watched_hazard(self) -> Violation | None:
        """What goes wrong with messages, if it makes a violation of this kind."""
        there = self._simulated()
        if there is None or self._violation.kind not in TELLING:
            return None
        beside = judged_if_possible(HAZARDS, self._case, there)
        found = None if beside is None else beside.violation
        return found if found is not None and found.reason in TELLING[self._violation.kind] else None

    def _hazard(self) -> str | None:
        if (hazard := self._watched_hazard) is None:
            return None
        cause = hazard.cause or "sender and receiver do not mean the same rows, or the same dtype"
        return cause if self._violation.kind == "deadlock" else f"{cause}: {hazard.summary}"

    def _of_changed_input(self) -> str | None:
        """Return that an input is changed in place, if it is: the backward, or another rank, reads what it is then."""
        seen = judged_if_possible(INPUTS_UNTOUCHED, self._case, self._runner)
        if seen is None or seen.violation is None or seen.violation.kind != "changed":
            return None
        return f"{seen.violation.cause or 'an input is changed in place'}: {seen.violation.summary}"

    def _of_changed_result(self) -> str | None:
        """Return that a backward changes what the forward has returned, if that is right without a backward."""
        finding, runner = self._violation.finding, self._runner
        if finding is None or finding.tensor not in ("out", "lse") or not runner.capabilities.gradients:
            return None
        try:
            runs = [runner.run(self._case, gradients=gradients) for gradients in (False, True)]
        except WorldUnavailable:
            return None
        alone, followed = (judge_observation(self._case, runner.capabilities, run, (finding.tensor,)) for run in runs)
        if alone.violation is None and followed.violation is not None:
            return f"{finding.tensor} is right until the backward runs, which changes what the forward has returned"
        return None

    # -- what would pass -----------------------------------------------------------------------------------------------

    def _declaration(self, diagnosis: Diagnosis) -> Declaration | None:
        """Return what to declare so that the case passes, unless the cause says that the code is wrong."""
        if not self._steady or self._late is None:
            return None
        there = functools.partial(
            would_pass, self._property, self._runner, self._violation, (self._case, self._shown.first)
        )
        found = attempt(self._mishaps, "looking for a declaration", there, None)
        return None if found is None or contradicted(found, diagnosis) else found

    def _hints(self, *, sought: bool) -> list[Hint]:
        """Return what ranks tried that cannot be done, and, if they are `sought`, hints at what else would pass."""
        hints = [Hint(note) for note in self._runner.log.notes]
        if self._runner.world.name == "simulated" and self._shown.after and not hints:
            hints.append(Hint(SHARED_STATE))
        if not sought or self._late is None or self._hangs:
            return hints
        if self._steady:
            hints += attempt(self._mishaps, "looking for hints", self._capabilities_that_exclude_it, [])
        around = functools.partial(beside, self._property, self._runner, self._simulated(), self._case, self._violation)
        return hints or attempt(self._mishaps, "looking for hints", around, [])

    def _capabilities_that_exclude_it(self) -> list[Hint]:
        """Return a hint at the capability that would keep the suite from drawing such a case, if there is one."""

        def passes(other: Case) -> bool:
            seen = judged_if_possible(self._property, other, self._place)
            return seen is not None and seen.applies and seen.violation is None

        failure = self._violation.failure
        refused = failure is not None and failure.kind == "raised" and failure.rule in (None, "shape")
        found = suggested(self._case, self._place.capabilities, passes, refused=refused)
        return [] if found is None else [Hint(found)]

    # -- where cases run -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _place(self) -> Runner:
        return quick_place(self._property, self._runner, self._watched, self._case, self._violation)

    def _simulated(self) -> Runner | None:
        return self._runner if self._runner.world.name == "simulated" else self._watched()


def _without_an_empty_rank(needs: Needs, there: Runner) -> bool:
    """Return whether some case fails in which every rank holds queries and keys."""
    runs = {} if needs.exploration is None else needs.exploration.runs
    failing = (case for case, failed in runs.items() if failed)
    return any(all(len(rows) for held in shards(case, there.capabilities) for rows in held) for case in failing)


def depends_on_messages(case: Case, there: Runner) -> bool:
    """Return whether it is chance when a case fails, since its messages are read, or written to, at the wrong time."""
    seen = judged_if_possible(HAZARDS, case, there)
    return seen is not None and seen.violation is not None and seen.violation.kind == "hazard"


def _of_unwritten(case: Case, there: Runner | None) -> Violation | None:
    """Return what is wrong of a case that fails at times only whenever new memory holds NaN; `None` if nothing is."""
    if there is None or not UNINITIALISED.applies(case, there.capabilities):
        return None
    there.world.close()  # nothing that an earlier case left
    if depends_on_messages(case, there):
        return None  # what arrives too late was not written either
    seen = judged_if_possible(UNINITIALISED, case, there)
    violation = None if seen is None else seen.violation
    if violation is None or violation.finding is None or not math.isnan(violation.finding.actual):
        return None  # what is wrong without NaN is so whatever new memory holds
    return violation
