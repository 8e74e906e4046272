"""`Property`, the `Judgement` of one case by it, and the `Violation` that a judgement may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np

from ringverify.cases.case import Case
from ringverify.cases.choices import Maker
from ringverify.cases.comparing import GRADIENTS, QKV_GRADIENTS, Finding, Right, worst
from ringverify.cases.running import GradMode, Observation, Runner
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.suites import SMOKE_EXAMPLES, TIMES, Suite
from ringverify.words import plural
from ringverify.worlds.world import Failure

Reason = tuple[str, ...]
"""Why a case fails: the kind of failure and what it concerns, such as `("value", "dk")`; equal for similar cases.

Shrinking keeps only those smaller cases that fail for the same reason.
"""

CAUSALS = {"both": (False, True), "always": (True,), "never": (False,)}
"""Values of `Problem.causal` that are tried, by the declared `Capabilities.causal`."""


@dataclasses.dataclass(frozen=True)
class Violation:
    """A case that breaks a property.

    Attributes:
        reason: the kind of failure, and the tensor that is wrong or how the run ended.
        rank: the rank on which it was seen; `None` if it is not that of a single rank.
        summary: one line that says what is wrong.
        detail: further lines, such as a rank's traceback; may be empty.
        finding: the worst element, where values are wrong.
        also: further reasons for which the case fails, such as other tensors that are wrong by less.
        failure: how the run ended, where it ended without results.
        cause: what is done wrongly, in a sentence, where the judge itself can tell.
        needs: what it takes to fail, where the judge itself can tell.
        way: the mode of autograd, and which of q, k and v require gradients, where the results of such a call are wrong
            rather than those of a training step.
    """

    reason: Reason
    rank: int | None
    summary: str
    detail: str = ""
    finding: Finding | None = None
    also: tuple[Reason, ...] = ()
    failure: Failure | None = None
    cause: str | None = None
    needs: str | None = None
    way: tuple[GradMode, str] | None = None

    @property
    def kind(self) -> str:
        """The kind of failure: "value", "raised", "deadlock" and so on."""
        return self.reason[0]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The result of judging one case by one property.

    Attributes:
        margin: largest error divided by the error allowed; 0 where no numbers were compared.
        violation: how the property is broken, or `None`.
        digest: SHA-256 of all results, or of the way in which the run failed.
        applies: False if the case could not test the property; it is then not counted as an example.
        delayed: numbers of the messages that the simulated world held back in this run.
    """

    margin: float
    violation: Violation | None
    digest: str = ""
    applies: bool = True
    delayed: tuple[int, ...] = ()


def _any_case(case: Case, capabilities: Capabilities) -> bool:
    """Return True: the default of `Property.applies`, for properties that any case can test."""
    return True


def _itself(case: Case, capabilities: Capabilities) -> list[Case]:
    """Return the case alone: the default of `Property.compared`, for properties that are about one case."""
    return [case]


def _nothing(capabilities: Capabilities) -> tuple[str, ...]:
    """Return no line: the default of `Property.figures`."""
    return ()


@dataclasses.dataclass(frozen=True)
class Property:
    """One thing that must hold.

    Attributes:
        id: its name on the command line and in reports.
        meaning: what must hold, in a sentence.
        examples: number of cases that the quick suite tries.
        cases: a maker of cases within declared capabilities, or all cases to choose among, which can test it.
        judge: runs a case and says whether the property holds on it.
        unsupported: why it does not apply to an implementation, or `None` if it does.
        simulated_only: whether it needs the simulated world, which can watch ranks and hold messages back.
        applies: whether a case can test it. This is asked of every case, whether drawn, shrunk, remembered or
            replayed, so that no violation comes from a case that the property is not about.
        compared: the cases whose results are compared with each other, the given case first.
        results: the results that it judges, where they are declared; by default all.
        figures: what is measured of an implementation that holds to it, a line each.
    """

    id: str
    meaning: str
    examples: int
    cases: Callable[[Capabilities], Maker[Case] | Sequence[Case]]
    judge: Callable[[Case, Runner], Judgement]
    unsupported: Callable[[Capabilities], str | None]
    simulated_only: bool = False
    applies: Callable[[Case, Capabilities], bool] = _any_case
    compared: Callable[[Case, Capabilities], list[Case]] = _itself
    results: tuple[TensorName, ...] = get_args(TensorName)
    figures: Callable[[Capabilities], tuple[str, ...]] = _nothing

    def examples_in(self, suite: Suite) -> int:
        """Return how many cases of this property a suite tries."""
        return min(self.examples, SMOKE_EXAMPLES) if suite == "smoke" else self.examples * TIMES[suite]


def always(capabilities: Capabilities) -> str | None:
    """Return `None`: the `unsupported` of properties that apply to every implementation."""
    return None


def needs(capability: str, value: object = True) -> Callable[[Capabilities], str | None]:
    """Return an `unsupported` for properties that apply where a capability is declared with this value."""
    written = repr(value).replace("'", '"')
    return lambda c: None if getattr(c, capability) == value else f"{capability}={written} is not declared"


def judge_values(case: Case, runner: Runner, tensors: tuple[TensorName, ...], *, gradients: bool) -> Judgement:
    """Run a case and compare the named results, on every rank, with the oracle's, within the error allowed."""
    return judge_observation(case, runner.capabilities, runner.run(case, gradients=gradients), tensors)


def judge_observation(
    case: Case,
    capabilities: Capabilities,
    observation: Observation,
    tensors: tuple[TensorName, ...],
    right: Right | None = None,
) -> Judgement:
    """Compare the named results of a run with the oracle's, or with `right`, within the error allowed."""
    if (judgement := failed(observation)) is not None:
        return judgement
    margin, finding = worst(case, capabilities, observation, tensors, right)
    if finding is None:
        return Judgement(margin, None, observation.digest, delayed=observation.delayed)
    also = tuple(("value", tensor) for tensor in finding.tensors)
    violation = Violation(("value", finding.tensor), finding.rank, where(finding), "", finding, also)
    return Judgement(margin, violation, observation.digest, delayed=observation.delayed)


def judge_everything(case: Case, runner: Runner) -> Judgement:
    """Run a case and compare every declared result with the oracle's, gradients included if they are declared."""
    return judge_values(case, runner, all_tensors(runner.capabilities), gradients=runner.capabilities.gradients)


def failed(*observations: Observation) -> Judgement | None:
    """Return the judgement of the first run that ended without results; `None` if there is none."""
    for observation in observations:
        if (failure := observation.failure) is not None:
            violation = Violation(failure.manner, failure.rank, failure.message, failure.detail, failure=failure)
            return Judgement(0.0, violation, observation.digest, delayed=observation.delayed)
    return None


def where(finding: Finding) -> str:
    """Say in one line on which ranks a result is wrong, and in how many elements."""
    ranks = sorted(finding.wrong)
    total = sum(finding.wrong.values())
    listed = ", ".join(map(str, ranks))
    return (
        f"{finding.tensor} is wrong on rank{'s' if len(ranks) > 1 else ''} {listed}: {total} of {finding.of} elements"
    )


def undefined(seen: Observation, name: TensorName) -> str:
    """Say in how many rows a result is NaN or infinite, and on which ranks; "" if it is nowhere, or was not returned.

    A row is a position in a head. The lse of a row without keys is -inf, so that is left out.
    """
    found = [values for result in seen.ranks if (values := getattr(result, name)) is not None]
    nan = [np.isnan(values) for values in found]
    infinite = [np.isposinf(values) if name == "lse" else np.isinf(values) for values in found]
    amiss = [one | other for one, other in zip(nan, infinite, strict=True)]
    rows = [one if name == "lse" else one.any(axis=-1) for one in amiss]
    ranks = [str(rank) for rank, one in enumerate(rows) if one.any()]
    if not ranks:
        return ""
    what = " and ".join(word for word, each in (("NaN", nan), ("infinities", infinite)) if any(x.any() for x in each))
    count, total = sum(int(one.sum()) for one in rows), sum(one.size for one in rows)
    return f"{what} in {count} of {total} rows, on {plural('rank', len(ranks))} {', '.join(ranks)}"


def all_tensors(capabilities: Capabilities, *, gradients: bool = True) -> tuple[TensorName, ...]:
    """Return the names of all results that an implementation declares, with or without the gradients."""
    tensors: tuple[TensorName, ...] = ("out", "lse") if capabilities.lse else ("out",)
    of_inputs = GRADIENTS if capabilities.sinks else QKV_GRADIENTS
    return (*tensors, *of_inputs) if gradients and capabilities.gradients else tensors


def judged_where(case: Case, runner: Runner, observation: Observation, *, when: str) -> Judgement:
    """Compare all results of a run under an unusual condition with the oracle's.

    If they are wrong, the case is run again without the condition. The summary names the condition only if that run is
    right.

    Args:
        case: the case that was run.
        runner: the implementation in its world.
        observation: what the run under the condition returned.
        when: the condition, for "dk is wrong on rank 0, when …".
    """
    judgement = judge_observation(case, runner.capabilities, observation, all_tensors(runner.capabilities))
    violation = judgement.violation
    if violation is None or violation.finding is None or judge_everything(case, runner).violation is not None:
        return judgement
    told = dataclasses.replace(violation, summary=f"{violation.summary}, when {when}")
    return dataclasses.replace(judgement, violation=told)
