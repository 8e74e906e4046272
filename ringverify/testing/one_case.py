"""`check_case`: one drawn case, run and judged in a user's own test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Implementation
from ringverify.words import legible

if TYPE_CHECKING:
    from ringverify.cases.case import Case


def check_case(attend: Implementation, case: Case, *, deadline: float = 30.0) -> None:
    """Run one case in the simulated world of this process, and hold every declared result to the oracle's.

    Args:
        attend: a function decorated with `@ringverify.implementation`, a local one too.
        case: a case within what it declares; `ringverify.strategies.cases(attend.capabilities)` draws such.
        deadline: seconds that the run may take.

    Raises:
        AssertionError: a result is wrong, or a rank raised or hung; the message has the case and what is wrong.
        UsageError: it is no implementation, or does not declare what the case needs.
        Inconclusive: the world could not be set up.
    """
    __tracebackhide__ = True
    if not isinstance(attend, Implementation):
        raise UsageError(f"{attend!r} is not an implementation: decorate it with @ringverify.implementation(...)")

    from ringverify.cases.case import why_unsupported
    from ringverify.cases.running import Runner
    from ringverify.properties.property import judge_everything
    from ringverify.testing.undisturbed import undisturbed
    from ringverify.worlds.simulated import SimulatedWorld
    from ringverify.worlds.world import WorldUnavailable

    if (lacking := why_unsupported(case, attend.capabilities)) is not None:
        raise UsageError(f"{lacking} by {attend.name}: draw cases from its capabilities, or declare it")
    if attend.capabilities.processes:
        raise UsageError(f"{attend.name} declares processes=True, and ranks are threads here: call run_conformance")
    try:
        with undisturbed(Path.cwd()):
            violation = judge_everything(case, Runner(attend, SimulatedWorld(), deadline=deadline)).violation
    except WorldUnavailable as error:
        raise Inconclusive(str(error)) from None
    if violation is not None:
        lines = [f"{attend.name}: {violation.summary}", f"case    {case.describe()}"]
        if (worst := violation.finding) is not None:
            lines.append(
                f"worst   {worst.tensor}{list(worst.index)} on rank {worst.rank} is {worst.actual:.6g}, expected "
                f"{worst.expected:.6g} ± {worst.allowed:.2g}"
            )
        raise AssertionError("\n".join(map(legible, [*lines, *violation.detail.splitlines()])))
