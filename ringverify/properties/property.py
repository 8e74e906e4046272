"""What a property is, and what judging one case of it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis.strategies import SearchStrategy

from ringverify.cases.case import Case
from ringverify.cases.comparing import Finding, TensorName, worst
from ringverify.cases.running import Observation, Runner
from ringverify.implementation import Capabilities
from ringverify.properties.suites import Suite, examples_in
from ringverify.worlds.world import Failure

Reason = tuple[str, ...]
"""Why a case fails, without what differs from case to case: the kind, and what it is about. Shrinking keeps it."""


@dataclasses.dataclass(frozen=True)
class Violation:
    """A case that breaks a property.

    Attributes:
        reason: kind of failure: the tensor that is wrong, or how the run ended.
        rank: the rank that shows it, if it is one rank's.
        summary: one line.
        detail: further lines, such as a rank's traceback; may be empty.
        finding: the worst element, where values are wrong.
        also: further reasons for which the same case fails, such as other tensors that are wrong but less so.
        failure: how the run ended, where it ended without results.
    """

    reason: Reason
    rank: int | None
    summary: str
    detail: str = ""
    finding: Finding | None = None
    also: tuple[Reason, ...] = ()
    failure: Failure | None = None

    @property
    def kind(self) -> str:
        """The kind of failure: "value", "raised", "deadlock" and so on."""
        return self.reason[0]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What one case says of one property.

    Attributes:
        margin: largest error over allowed error; 0 where nothing numeric was compared.
        violation: how the property is broken, or `None`.
        digest: SHA-256 of the bits that came back.
        applies: False if the case could not put the property to the test, and does not count.
        delayed: the messages that a simulated world really held back.
    """

    margin: float
    violation: Violation | None
    digest: str = ""
    applies: bool = True
    delayed: tuple[int, ...] = ()


def _any_case(case: Case, capabilities: Capabilities) -> bool:
    """Most properties can be put to the test by any case."""
    return True


def _itself(case: Case, capabilities: Capabilities) -> list[Case]:
    """Most properties are about one case."""
    return [case]


@dataclasses.dataclass(frozen=True)
class Property:
    """One thing that must hold.

    Attributes:
        id: how users name it.
        meaning: what must hold, in a sentence.
        examples: cases tried in the quick suite.
        cases: a strategy that draws cases within declared capabilities, or a sweep that lists them.
        judge: runs a case and says whether the property holds on it.
        unsupported: why it does not apply to an implementation, or `None` if it does.
        simulated_only: whether it needs the simulated world, where ranks are watched and messages held back.
        applies: whether a case can put it to the test. Cases that are drawn, shrunk, remembered and replayed are asked
            alike: what its own strategy could not have drawn accuses nobody.
        compared: the cases whose results are compared, where it is about several; the case itself is the first.
    """

    id: str
    meaning: str
    examples: int
    cases: Callable[[Capabilities], SearchStrategy[Case] | list[Case]]
    judge: Callable[[Case, Runner], Judgement]
    unsupported: Callable[[Capabilities], str | None]
    simulated_only: bool = False
    applies: Callable[[Case, Capabilities], bool] = _any_case
    compared: Callable[[Case, Capabilities], list[Case]] = _itself

    def examples_in(self, suite: Suite) -> int:
        """How many cases a suite tries."""
        return examples_in(suite, self.examples)


def always(capabilities: Capabilities) -> str | None:
    """For properties that every implementation must have."""
    return None


def judge_values(case: Case, runner: Runner, tensors: tuple[TensorName, ...], *, gradients: bool) -> Judgement:
    """Run a case and hold the named results, on every rank, to the oracle within the error allowed."""
    observation = runner.run(case, gradients=gradients)
    if observation.failure is not None:
        return Judgement(0.0, violation_of(observation), observation.digest)
    margin, finding = worst(case, runner.capabilities, observation, tensors)
    violation = None
    if finding is not None:
        also = tuple(("value", tensor) for tensor in finding.tensors)
        violation = Violation(("value", finding.tensor), finding.rank, where(finding), "", finding, also)
    return Judgement(margin, violation, observation.digest)


def judge_everything(case: Case, runner: Runner) -> Judgement:
    """Run a case and hold every declared result to the oracle, gradients included if they are declared."""
    return judge_values(case, runner, all_tensors(runner.capabilities), gradients=runner.capabilities.gradients)


def violation_of(observation: Observation) -> Violation:
    """The violation that a run without results is."""
    failure = observation.failure
    assert failure is not None
    return Violation(failure.manner, failure.rank, failure.message, failure.detail, failure=failure)


def where(finding: Finding) -> str:
    """One line on which ranks a result is wrong, and how much of it."""
    ranks = sorted(finding.wrong)
    total = sum(finding.wrong.values())
    listed = ", ".join(map(str, ranks))
    return (
        f"{finding.tensor} is wrong on rank{'s' if len(ranks) > 1 else ''} {listed}: {total} of {finding.of} elements"
    )


def all_tensors(capabilities: Capabilities) -> tuple[TensorName, ...]:
    """Every result that an implementation declares."""
    tensors: tuple[TensorName, ...] = ("out", "lse") if capabilities.lse else ("out",)
    return (*tensors, "dq", "dk", "dv") if capabilities.gradients else tensors


def judged_where(case: Case, runner: Runner, observation: Observation, *, when: str) -> Judgement:
    """Hold all results of an unusual run to the oracle, and say what was unusual if a usual run is not wrong.

    Args:
        case: what was run.
        runner: the implementation in its world.
        observation: what became of it.
        when: what was unusual, for "dk is wrong on rank 0, when …".
    """
    if observation.failure is not None:
        return Judgement(0.0, violation_of(observation), observation.digest)
    margin, finding = worst(case, runner.capabilities, observation, all_tensors(runner.capabilities))
    if finding is None:
        return Judgement(margin, None, observation.digest)
    usual = judge_everything(case, runner).violation
    summary = f"{where(finding)}, when {when}" if usual is None else where(finding)
    also = tuple(("value", tensor) for tensor in finding.tensors)
    violation = Violation(("value", finding.tensor), finding.rank, summary, "", finding, also)
    return Judgement(margin, violation, observation.digest)
