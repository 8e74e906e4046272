"""Asking what is wrong with an implementation, once a case is found on which its values are."""

from __future__ import annotations

from ringverify.cases.case import Case
from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.inputs import Inputs
from ringverify.cases.running import Observation, Runner
from ringverify.diagnosis.diagnose import Diagnosis, diagnose
from ringverify.properties.property import Violation
from ringverify.worlds.world import WorldUnavailable

BROKEN = "the diagnosis ended with"
"""How a diagnosis begins that raised an exception of ours."""


def explained(runner: Runner, violation: Violation, smallest: Case, first: Case) -> Diagnosis | None:
    """The diagnosis of a case that violates a property; `None` where no value is wrong, or none when it is run plainly.

    Args:
        runner: the implementation in its world.
        violation: what is wrong on the smallest case.
        smallest: the case to explain.
        first: the case from which it was shrunk, which the same has to explain.
    """
    if violation.finding is None or runner.hangs:
        return None
    # Where out or lse is wrong, gradients are too, and how depends on more than the fault: they are left out.
    gradients = violation.finding.tensor in GRADIENTS

    def observe(case: Case) -> Observation:
        return runner.run(case, gradients=gradients)

    def probe(case: Case, inputs: Inputs) -> Observation:
        return runner.run(case, gradients=gradients, inputs=inputs)

    def differentiate(case: Case) -> Observation:
        return runner.run(case, gradients=True)

    try:
        return diagnose(
            observe,
            (smallest, first),
            runner.capabilities,
            tensor=violation.finding.tensor,
            probe=probe,
            differentiate=differentiate if runner.capabilities.gradients and not gradients else None,
        )
    except WorldUnavailable:
        return None
    except Exception as error:  # what is wrong was found all the same: the verdict stands
        return Diagnosis(broken(error))


def broken(error: Exception) -> str:
    """What is said where a cause would be, after an exception of ours."""
    return f"{BROKEN} {type(error).__name__} ({error}): a bug of ringverify, please report it with the case"
