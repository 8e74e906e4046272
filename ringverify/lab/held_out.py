"""How often a cause is named rightly, wrongly and not at all, where the fault library lacks the fault's own entry.

Every mutant whose numbers show it is searched, shrunk, varied and explained as for a user, by the rest of the library
and by what is read off further runs. A name is right if it foretells the numbers of every further case that fails, as
the property draws them with another seed: whoever mends what it says mends those too. It is wrong if it foretells those
of some only, though it may be true of the case that is shown.

    python -m ringverify.lab.held_out tests/faults/expected_kills.json 8

measures every eighth mutant, and prints a line for each and the counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ringverify import targets
from ringverify.cases.case import Case
from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.running import Runner
from ringverify.check.drawing import draws
from ringverify.check.hunting import hunt
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis, comparable
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.errors import UsageError
from ringverify.faults.catalogue import MUTANTS
from ringverify.lab.expected import Expected, read
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.processes.contained import ContainedWorld

Named = Literal["right", "wrong", "missing"]

FRESH = 60
"""Further cases that are drawn, at most, to judge a name by."""

FAILING = 10
"""Further cases that fail, at most, on which a name has to foretell the numbers."""


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What the rest of the library says of a mutant.

    Attributes:
        mutant: the mutant's id.
        named: "right" if the first cause foretells all further cases that fail, "missing" if none is named.
        foretold: of how many further cases that fail it foretells the numbers.
        failing: how many there were.
        text: the diagnosis; `None` if no cause is known.
        needs: when the mutant fails, in a line.
    """

    mutant: str
    named: Named
    foretold: int
    failing: int
    text: str | None
    needs: str


def held_out(expected: Sequence[Expected]) -> Iterator[HeldOut]:
    """Diagnose mutants by hypotheses without their own, and yield what is named.

    Mutants that survive are left out, and those that no wrong value of a single case shows.

    Args:
        expected: the property that kills each mutant, and with which seed.
    """
    for one in expected:
        fault, implementation = MUTANTS[one.mutant].fault, MUTANTS[one.mutant].implementation
        with contextlib.closing(ContainedWorld()) as world:
            runner = Runner(implementation, world, target=targets.MUTANT + one.mutant)
            found = hunt(
                PROPERTIES[one.property],
                runner,
                examples=one.patience(),
                seed=one.seed,
                progress=lambda done: None,
                known=[hypothesis for hypothesis in HYPOTHESES if hypothesis.says != fault.says],
            ).counterexample
            if found is None or found.violation.finding is None or found.after:
                continue
            told, causes = found.diagnosis.text, found.diagnosis.causes
            gradients = found.violation.finding.tensor in GRADIENTS
            failing = list(_failing(one, runner, found.case, gradients=gradients)) if causes else []
        named, foretold = judged(causes[0] if causes else None, failing)
        yield HeldOut(one.mutant, named, foretold, len(failing), told, str(found.needs))


def judged(cause: Hypothesis | None, failing: Sequence[Scene]) -> tuple[Named, int]:
    """Return how a cause is named, and of how many cases that fail it foretells the numbers."""
    if cause is None:
        return "missing", 0
    foretold = sum(cause.explains(scene) is not None for scene in failing)
    return "right" if foretold == len(failing) else "wrong", foretold


def _failing(one: Expected, runner: Runner, smallest: Case, *, gradients: bool) -> Iterator[Scene]:
    """Yield further cases that fail, with the values of the smallest: others may hide all digits."""
    left = FAILING
    for case in draws(PROPERTIES[one.property], runner.capabilities, FRESH, one.seed + 1):
        case = case.replace(values=smallest.values)
        seen = runner.run(case, gradients=gradients)
        scene = Scene(case, runner.capabilities, seen) if seen.failure is None else None
        if scene is not None and comparable(scene) and wrong_tensors(scene):
            yield scene
            if not (left := left - 1):
                return


def one_of_every(expected: Sequence[Expected], every: str) -> Sequence[Expected]:
    """Return every so many of them, from the first on.

    Raises:
        UsageError: `every` is no whole number of at least 1.
    """
    if not every.isdecimal() or not int(every):
        raise UsageError(f"{every!r}: expected a whole number of at least 1, every how many mutants to measure")
    return expected[:: int(every)]


def main(path: str, every: str) -> None:
    """Measure every so many mutants, and print a line for each and the counts."""
    counts: Counter[Named] = Counter()
    for one in held_out(one_of_every(read(Path(path)), every)):
        counts[one.named] += 1
        sys.stdout.write(f"{one.mutant:6} {one.named:8} {one.foretold}/{one.failing} {one.text}\n       {one.needs}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{', '.join(f'{count} {named}' for named, count in counts.most_common())}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
