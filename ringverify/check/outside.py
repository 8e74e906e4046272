"""What cannot be tried on a program, whose ranks nobody sees, and what it refused to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringverify.cases.case import Case
from ringverify.events import Verdict
from ringverify.implementation import Implementation
from ringverify.programs import ProgramElsewhere
from ringverify.properties.property import Property
from ringverify.words import cut, plural

UNSEEN: dict[str, str] = {
    "strided_inputs": "a program reads its inputs from a file, where tensors have one layout",
    "uninitialised": "a program allocates memory that is not seen here",
    "reentrancy": "a program is asked for one call at a time",
    "incremental": "a program is asked for one call at a time",
    "subgroups": "a program makes its groups itself",
    "hazards": "a program's ranks cannot be watched, nor its messages delayed",
    "progress": "a program's ranks cannot be watched, nor its messages delayed",
    "traffic": "a program's messages cannot be counted",
    "memory": "the memory of a program's ranks cannot be measured",
}
"""Properties that need to see ranks, by id, and why each cannot be tried on a program."""


def why_not_outside(property: Property, implementation: Implementation) -> str | None:
    """Return why a property is not tried on a program; `None` if it is."""
    if property.id == "modes" and not implementation.capabilities.gradients:
        return "gradients=False is declared, so a program has one way to be called"
    if property.id != "inputs_untouched":
        return UNSEEN.get(property.id)
    seen = isinstance(implementation.function, ProgramElsewhere) and implementation.function.hello.reports_changes
    return None if seen else "the program does not say which inputs it changes (reports_changes in its hello)"


def of_refusals(reasons: Sequence[str], examples: int) -> tuple[Verdict, str]:
    """Return the verdict and its reason where a program refused cases, and no violation was found.

    Args:
        reasons: the reason of each refusal, at least one.
        examples: number of cases that tested the property.
    """
    others = len(dict.fromkeys(reasons)) - 1
    further = f", and for {others} other {plural('reason', others)}" if others else ""
    asked = len(reasons) + examples
    said = f"the program refused {len(reasons)} of {asked} cases: {cut(reasons[0])}{further}"
    return ("pass" if examples else "unsupported"), said


def unseen_by_a_program(case: Case) -> tuple[object, ...]:
    """Return the fields of a case that are not told to a program, so that nothing can depend on them."""
    return case.memory, case.group, case.transport, case.delayed, case.schedule


def versions_of(implementation: Implementation) -> Mapping[str, str] | None:
    """Return what a program says that it runs on, by name; `None` if it says nothing, or is none."""
    function = implementation.function
    return (function.hello.versions or None) if isinstance(function, ProgramElsewhere) else None
