"""How often a cause is named rightly, wrongly and not at all, where the fault library lacks the fault's own entry.

Every mutant whose numbers show it is diagnosed by the rest of the library. Right is then a relative: a fault of the
same file, such as another fault of the mask for one of the mask. A name from another file counts as wrong, though it
may be true: that a gradient is 0 is true of what never arrives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.diagnose import diagnose
from ringverify.faults.catalogue import GROUPS, MUTANTS
from ringverify.lab.expected import Expected
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.simulated import SimulatedWorld

Named = Literal["right", "wrong", "missing"]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What the rest of the library says of a mutant.

    Attributes:
        mutant: the mutant's id.
        named: "right" if the first cause is of the same file as the mutant's fault, "missing" if none is named.
        text: the diagnosis; `None` if no cause is known.
    """

    mutant: str
    named: Named
    text: str | None


Says = str | Callable[[Any], str]


def files() -> dict[Says, str]:
    """Return the file in which each fault is written that is a cause, by its sentence without variants."""
    return {cause.says: group.__name__ for group in GROUPS for cause in group.FAULTS.causes}


def held_out(expected: Sequence[Expected]) -> Iterator[HeldOut]:
    """Diagnose mutants by hypotheses without their own, and yield what is named; mutants that survive are left out.

    Args:
        expected: the property that kills each mutant, and with which seed.
    """
    file_of = files()
    for one in expected:
        fault, implementation = MUTANTS[one.mutant].fault, MUTANTS[one.mutant].implementation
        with contextlib.closing(SimulatedWorld()) as world:
            runner = Runner(implementation, world)
            found = hunt(
                PROPERTIES[one.property], runner, examples=one.patience(), seed=one.seed, progress=lambda done: None
            ).counterexample
            if found is None or found.violation.finding is None:
                continue
            gradients = found.violation.finding.tensor in GRADIENTS
            told = diagnose(
                functools.partial(runner.run, gradients=gradients),
                (found.case, found.first),
                implementation.capabilities,
                hypotheses=[hypothesis for hypothesis in HYPOTHESES if hypothesis.says != fault.says],
            )
        named: Named = "missing"
        if told is not None and told.causes:
            named = "right" if file_of.get(told.causes[0].says) == file_of[fault.says] else "wrong"
        yield HeldOut(one.mutant, named, None if told is None else told.text)
