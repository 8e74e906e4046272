"""A recorded counterexample of the suite `scale`, run and verified again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ringverify.check.casefile import CaseFile
from ringverify.check.options import Options
from ringverify.check.planning import WorldName, planned
from ringverify.errors import Inconclusive
from ringverify.events import Event
from ringverify.implementation import Implementation
from ringverify.properties.suites import Method
from ringverify.reports.progress import HIDDEN
from ringverify.scale.checked import Checked
from ringverify.scale.estimating import refuse_too_long
from ringverify.scale.trials import Trials, open_fast


def replay_at_length(
    recorded: CaseFile,
    method: Method,
    world: WorldName,
    implementation: Implementation,
    options: Options,
    *,
    say: Callable[[str], None],
    show: Callable[[Event], None],
) -> str | None:
    """Verify the case of a file again, by the method that found it wrong, and show what is wrong.

    Returns:
        SHA-256 of what is wrong; `None` if nothing is.

    Raises:
        UsageError: the world does not suit what is declared, or the length does not fit into memory.
        Inconclusive: the run did not come to its end.
    """
    case, name = recorded.case, recorded.target
    plan = planned(name, implementation, world=world, world_sizes=(case.world_size,), crew=None)
    refuse_too_long(case, plan, case.world_size)
    with contextlib.closing(open_fast(world)) as opened:
        checked = Checked(Trials(plan, opened, options, HIDDEN), case.problem.nq, recording=False)
        outcome = checked.by(method, [case]).outcome
    say(f"{name}: {method} on {case.describe()}")
    if outcome.counterexample is not None:
        show(outcome.counterexample)
    if outcome.verdict.verdict not in ("pass", "fail"):
        raise Inconclusive(str(outcome.verdict.reason))
    return checked.digest if outcome.counterexample is not None else None
