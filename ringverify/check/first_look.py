"""Look at a few cases of every property before trying any property whole: with `-x`, for the first violation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from ringverify.cases.running import Runner
from ringverify.check.drawing import draws
from ringverify.check.explaining import judged
from ringverify.check.units import CaseToJudge, Judge, Wanted
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.world import REFUSED

ROUNDS = (3, 10)
"""How many cases of each property have been looked at after each round. Over the fault library, the first violation is
then the 8th case in the median, where it is the 127th of properties that are tried whole, one after another."""


def rounds(asked: Mapping[str, tuple[Wanted, Runner]]) -> Iterator[list[Judge]]:
    """Yield units with the first cases of every property, round by round; what is no longer in `asked` is left out."""
    cases = {property: _first_cases(wanted, runner) for property, (wanted, runner) in asked.items()}
    for already, upto in itertools.pairwise((0, *ROUNDS)):
        yield [
            Judge(wanted, 0, tuple(itertools.islice(cases[property], upto - already)))
            for property, (wanted, _) in asked.items()
        ]


def _first_cases(wanted: Wanted, runner: Runner) -> Iterator[CaseToJudge]:
    yield from (CaseToJudge(known.case, known.after) for known in wanted.first)
    for case in draws(PROPERTIES[wanted.property], runner.capabilities, wanted.examples, wanted.seed):
        if runner.most_ranks is None or case.ranks <= runner.most_ranks:
            yield CaseToJudge(case)


def is_violated(unit: Judge, runner: Runner) -> bool:
    """Return whether a case of the unit violates its property; that the transport refuses a call does not count."""
    property = PROPERTIES[unit.wanted.property]
    for trial in unit.trials:
        for earlier in trial.after:
            judged(property, earlier, runner)
        violation = judged(property, trial.case, runner).violation
        if violation is not None and violation.kind != REFUSED:
            return True
    return False
