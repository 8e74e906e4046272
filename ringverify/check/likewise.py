"""Explain a run that ends without results by a case like it that ends with wrong ones: the fault is mostly the same.

A rank that talks to the wrong peer, or hops too often, gets rows of another shape where shards have different lengths,
and wrong numbers where they have not. Only numbers tell causes apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from ringverify.cases.case import Case, even_multiple, why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted
from ringverify.check.explaining import explained, judged_if_possible, when_it_fails
from ringverify.diagnosis.diagnose import Diagnosis
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.when.needs import Needs
from ringverify.implementation import Capabilities
from ringverify.properties.values import FORWARD, GRADIENTS_OF_OUT

MOST_RANKS = 6
"""Largest world of such cases."""

OTHERWISE = 12
"""Cases that were seen to fail for another reason than the given one, the smallest first, that are tried."""

TOKENS = (2, 3, 4)
"""Tokens on each rank, the same on all of them."""


def explained_likewise(
    runner: Runner, case: Case, needs: Needs | None, known: Sequence[Hypothesis], left: Callable[[], float]
) -> tuple[Case, Diagnosis] | None:
    """Return a case like one that ends without results, and the cause that its numbers have; `None` if none is found.

    Args:
        runner: runs the implementation.
        case: the case.
        needs: when it fails; a case that passes by what was found is left out.
        known: the hypotheses among which the cause is sought.
        left: returns how many seconds are left for it.
    """
    c, x = runner.capabilities, None if needs is None else needs.exploration
    passing = {other for other, failed in x.runs.items() if not failed} if x is not None else set()
    otherwise = sorted(x.otherwise, key=lambda one: one.problem.nq * one.problem.nk) if x is not None else []
    likely = [one for one in dict.fromkeys((*otherwise[:OTHERWISE], *_even(case, c))) if one not in passing]
    for property in (FORWARD, GRADIENTS_OF_OUT) if c.gradients else (FORWARD,):
        for other in likely:
            if left() <= 0:
                return None
            seen = judged_if_possible(property, other, runner)
            if seen is not None and seen.violation is not None and seen.violation.finding is not None:
                found = when_it_fails(property, runner, other, seen.violation)
                diagnosis = explained(runner, property, seen.violation, other, other, found, known)
                return (other, diagnosis) if diagnosis is not None and diagnosis.causes else None
    return None


def _even(case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """Yield cases with as many tokens on each rank, on as many ranks and more, with masks and without."""
    bare = {"window": None, "documents": None, "key_lengths": None, "dilation": None}
    for masks, size in itertools.product(({}, bare), range(case.world_size, MOST_RANKS + 1)):
        for tokens in TOKENS:
            n = tokens * even_multiple(case.sharding, size)
            try:
                one = case.replace(query_length=n, key_length=None, world_size=size, values="normal", **masks)
            except ValueError:  # masks that do not fit this length
                continue
            one = fitted(one, capabilities)
            if why_unsupported(one, capabilities) is None:
                yield one
