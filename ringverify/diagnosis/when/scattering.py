"""Hold what is said of when a case fails against further cases, drawn at random and run: no cause foretells them."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable

from ringverify.diagnosis.when.exploring import BASES, EXCEPTIONS, HIDDEN, Spent
from ringverify.diagnosis.when.needs import Needs, said

RUNS = 90
"""Further runs, at most."""

ROUND = 6
"""Cases that are drawn between runs; all that were drawn are there to choose from."""

BACKED = 8
"""Cases that have to pass without one condition alone before it is said beside one without words."""


def held_against_runs(needs: Needs, *, gradients: bool, left: Callable[[], float]) -> Needs:
    """Return what a case needs in order to fail, held against further cases.

    Args:
        needs: what was found by varying one factor at a time.
        gradients: whether the violation is one of gradients.
        left: returns how many seconds are left for it.
    """
    x = needs.exploration
    if x is None:
        return needs
    explanation = x.explanation()
    if "values" in {*x.unexplained(explanation)}.union(*(one.factors for one in explanation)):
        return needs  # what passes by its values would be explained by chance
    x.extended(RUNS, left)
    failing = x.failing()[:BASES]
    scattered = x.scattered(failing, random.Random(0), cotangents=gradients)
    with contextlib.suppress(Spent):
        for _ in range(RUNS if failing else 0):
            for case in x.aims(itertools.islice(scattered, ROUND)):
                x.foretold(case)
                failing += [case] if x.runs.get(case) else []
    explanation = x.explanation()
    passing = [case for case, failed in x.runs.items() if not failed]
    backed = {
        one.text
        for one in explanation
        if one.limit == 1  # what divides a number stands for a tile
        and sum(not x.met(case, [one]) for case in passing if x.met(case, [o for o in explanation if o is not one]))
        >= BACKED
    }
    exceptions = [case for case in passing if x.met(case, explanation)][:EXCEPTIONS]
    x.extended(EXCEPTIONS * HIDDEN, left)
    try:
        more = any(x.passes_whatever_its_values(case) for case in exceptions)
    except Spent:
        more = len(exceptions) == EXCEPTIONS
    return said(x, explanation, needs.complete, more=more, backed=backed)
