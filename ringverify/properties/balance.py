"""`balance`: how evenly a sharding that depends on documents deals out the work.

Each position is on one rank, the same one at each call; an inverse that is declared restores the order; and no rank
has more work than is claimed. The work of a rank are the pairs of a query that it holds and a key that this query
attends. A query is not divided between ranks, so besides what is claimed, the pairs of the longest query are allowed.
"""

from __future__ import annotations

import hashlib
import statistics
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringref.sharding import Balancer, Positions, by_documents, covering, restoring_rows
from ringverify.cases.case import SEEDS, Case
from ringverify.cases.choices import Choices, Maker, SeededChoices
from ringverify.cases.running import Runner, shards
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import affordable_world_sizes
from ringverify.errors import Inconclusive
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import Judgement, Property, Violation
from ringverify.worlds.exceptions import one_line

WORLD_SIZES = (2, 3, 8)
COUNTS = (1, 4, 64, 64)
"""Numbers of documents that are drawn."""
LONG, GIANT = 64, 2048
"""Most tokens of an ordinary document, and of the longest ones."""
DRAWS = 12
"""Draws of 64 documents of which the figure of a report is told."""


def _judge(case: Case, runner: Runner) -> Judgement:
    try:
        held, _ = shards(case, runner.capabilities)
    except Inconclusive:
        raise
    except Exception as error:  # of the declared function, or about what it returned
        return Judgement(0.0, Violation(("sharding",), None, one_line(error)))
    digest = hashlib.sha256(b"|".join(positions.tobytes() for positions in held)).hexdigest()
    if (violation := _not_restored(case, runner.capabilities, held)) is not None:
        return Judgement(0.0, violation, digest)
    if (claimed := runner.capabilities.balance) is None:
        return Judgement(0.0, None, digest)
    pairs = _pairs(case.problem)
    work = _work(pairs, held)
    mean, longest = sum(work) / len(work), int(pairs.max(initial=0))
    busiest = max(range(len(work)), key=work.__getitem__)
    allowed = claimed * mean + longest
    margin = work[busiest] / allowed if allowed else 0.0
    if margin <= 1:
        return Judgement(margin, None, digest)
    summary = (
        f"rank {busiest} has {work[busiest]} pairs of a query and a key, {work[busiest] / mean:.3g} times the mean of "
        f"{len(work)} ranks; allowed are {claimed:g} times and the {longest} pairs of the longest query"
    )
    return Judgement(margin, Violation(("balance",), busiest, summary), digest)


def _not_restored(case: Case, c: Capabilities, held: list[Positions]) -> Violation | None:
    """How the declared inverse fails to put rows back in the order of positions."""
    sharding, length = c.sharding_named(case.sharding), case.problem.nq
    if not isinstance(sharding, Balancer) or sharding.inverse is None:
        return None
    try:
        rows = restoring_rows(sharding, length, case.world_size, case.problem.documents)
    except Inconclusive:
        raise
    except Exception as error:  # of the declared function, or about what it returned
        return Violation(("inverse", "rows"), None, one_line(error))
    restored = np.concatenate(held)[rows]
    if not (wrong := np.flatnonzero(restored != np.arange(length))).size:
        return None
    summary = (
        f"the inverse of {case.sharding} does not restore the order: in place of position {wrong[0]} it puts position "
        f"{restored[wrong[0]]}; {wrong.size} of {length} are wrong"
    )
    return Violation(("inverse", "order"), None, summary)


def _pairs(problem: Problem) -> NDArray[np.int64]:
    """Return how many keys each query attends, where there are documents and causality at most."""
    found = np.zeros(problem.nq, dtype=np.int64)
    for start, end in pairwise((0, problem.nq) if problem.documents is None else problem.documents):
        found[start:end] = np.arange(1, end - start + 1) if problem.causal else end - start
    return found


def _work(pairs: NDArray[np.int64], held: list[Positions]) -> list[int]:
    return [int(pairs[positions].sum()) for positions in held]


def _cases(c: Capabilities) -> Maker[Case]:
    names = [sharding_name(sharding) for sharding in c.shardings if by_documents(sharding)]

    def make(choices: Choices) -> Case:
        sharding, size = choices.among(names), choices.among(affordable_world_sizes(c, WORLD_SIZES))
        return _case(choices, c, sharding, size, choices.among(COUNTS))

    return make


def _case(choices: Choices, c: Capabilities, sharding: str, size: int, count: int) -> Case:
    """Make a case of documents whose lengths are of one kind: uniform, power law, many of one token, or one giant."""
    kind = choices.among(("uniform", "power law", "ones", "giant"))
    lengths = [choices.integer(1, LONG) for _ in range(count)]
    if kind == "power law":
        lengths = [GIANT // choices.integer(1, GIANT) for _ in range(count)]
    elif kind == "ones":
        lengths = [choices.among((1, 1, 1, length)) for length in lengths]
    elif kind == "giant":
        lengths[choices.integer(0, count - 1)] = GIANT
    documents = tuple(int(end) for end in np.cumsum([0, *lengths]))
    problem = Problem(
        query_length=documents[-1], head_dim=1, causal=c.causal != "never", documents=documents, dtype=c.dtypes[0]
    )
    case = Case(problem=problem, sharding=sharding, world_size=size, seed=choices.integer(0, SEEDS - 1))
    case = fitted(case, c)
    return case.replace(documents=covering(documents, case.problem.nq) if c.documents else None)


def _figures(c: Capabilities) -> tuple[str, ...]:
    """Tell of each sharding the work of the busiest rank, on the largest of the worlds that are tried."""
    told, size = [], max(affordable_world_sizes(c, WORLD_SIZES))
    for sharding in filter(by_documents, c.shardings):
        choices, ratios = SeededChoices("balance"), []
        for _ in range(DRAWS):
            case = _case(choices, c, sharding_name(sharding), size, COUNTS[-1])
            work = _work(_pairs(case.problem), shards(case, c)[0])
            ratios.append(max(work) * size / sum(work))
        told.append(
            f"{sharding_name(sharding)}: of {size} ranks, the busiest has {statistics.median(ratios):.3f} times the "
            f"mean work at the median of {DRAWS} draws of {COUNTS[-1]} documents, {max(ratios):.3f} times at most"
        )
    return tuple(told)


def _applies(case: Case, c: Capabilities) -> bool:
    p = case.problem
    plain = p.window is None and p.dilation is None and p.key_lengths is None and p.nq == p.nk
    return plain and by_documents(c.sharding_named(case.sharding))


def _unsupported(c: Capabilities) -> str | None:
    return None if any(map(by_documents, c.shardings)) else "no sharding that depends on documents is declared"


BALANCE = Property(
    id="balance",
    meaning="a sharding by documents holds each position once, at each call, and its inverse restores the order; where "
    "claimed, no rank has too much work",
    examples=40,
    cases=_cases,
    judge=_judge,
    unsupported=_unsupported,
    applies=_applies,
    figures=_figures,
    results=(),
)
