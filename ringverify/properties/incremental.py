"""`incremental`: chunked prefill and decoding give, row by row, what one whole call gives.

A case is a sequence of calls in one run: chunks of any size, then single tokens. In each call the queries are those of
the new tokens, and the keys are all that the cache holds by then, these included; so a call is a causal problem whose
last query is aligned with the last key. Keys lie contiguous, in stripes or by page, queries on every rank or sharded.
Rows of all calls are compared with the oracle's answer to the whole problem.
"""

from __future__ import annotations

import dataclasses

from ringref.sharding import PageTable
from ringverify.cases.case import SEEDS, Case
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.running import Runner
from ringverify.cases.shapes import fitted, length_unit
from ringverify.cases.strategies import (
    GENERAL_VALUES,
    Scope,
    affordable_world_sizes,
    problem_of,
    shortest,
    widest,
)
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, all_tensors, judge_observation, needs

WORLD_SIZES = (1, 2, 3, 4, 5)
PAGE_SIZES = (1, 2, 3, 4)
SPARE = 2
"""Most pages that a table has beyond the end of the sequence, as a cache has that is to grow."""
WIDE_TO_NARROW = 3
"""Cases in a wide dtype for each one in 16 bits, where as many of both are declared."""
PAGED = frozenset({"pages"})
"""The sharding of keys that is drawn twice as often: most can go wrong there."""
LONGEST_WINDOW = 6
"""Longest window that half of the cases with pages have, where windows are declared: it ends in no order of pages."""
MOST_TOKENS = 4
"""Most single tokens after a prefill in chunks."""


def _judge(case: Case, runner: Runner) -> Judgement:
    names = all_tensors(runner.capabilities, gradients=False)
    judgement = judge_observation(case, runner.capabilities, runner.run(case, gradients=False, mode="no_grad"), names)
    violation = judgement.violation
    if violation is None or violation.finding is None or violation.finding.position is None or not case.chunks:
        return judgement
    place = case.call_of(violation.finding.position)
    p = case.calls[place].problem
    rows = "1 query" if p.nq == 1 else f"{p.nq} queries"
    summary = f"{violation.summary}, the worst in call {place + 1} of {len(case.calls)}, {rows} on a cache of {p.nk}"
    return dataclasses.replace(judgement, violation=dataclasses.replace(violation, summary=summary))


def _cases(c: Capabilities) -> Maker[Case]:
    narrow = tuple(dtype for dtype in c.dtypes if dtype not in widest(c))
    scope = Scope(dtypes=(*widest(c) * WIDE_TO_NARROW, *narrow), world_sizes=WORLD_SIZES)
    of_calls = dataclasses.replace(c, causal="always", documents=False, dilation=(), cross_lengths=False)

    def make(choices: Choices) -> Case:
        size = choices.among(affordable_world_sizes(c, scope.world_sizes))
        queries, keys = (
            choices.among(c.query_sharding),
            choices.among((*c.key_sharding, *PAGED.intersection(c.key_sharding))),
        )
        sharding = f"{queries}/{keys}"
        problem = problem_of(choices, of_calls, scope, size, sharding)
        if keys == "pages" and c.window and choices.among((False, True)):
            problem = problem.replace(window=(choices.integer(0, LONGEST_WINDOW), None))
        problem = problem.replace(sinks=bool(c.sinks) and choices.integer(0, 4) == 4)
        unit = length_unit(c, sharding, size)
        page = choices.among(PAGE_SIZES) if c.uneven else unit // size
        least = 1 if c.empty_shards else max(unit, size if keys != "pages" else page * (size - 1) + 1)
        length = max(problem.nq, unit, least)
        problem = problem.replace(query_length=length, key_length=None)
        case = Case(
            problem=problem,
            sharding=sharding,
            world_size=size,
            values=choices.among(GENERAL_VALUES),
            memory=choices.among(("contiguous", "strided")),
            seed=choices.integer(0, SEEDS - 1),
            schedule=choices.integer(0, SEEDS - 1),
            chunks=(length,),
            page_table=_table(choices, c, size, length, page) if keys == "pages" else None,
        )
        several = shortest(c, sharding, size) if queries != "replicated" else 0
        chunks = _chunks(choices, length, unit, first=max(least, several), others=max(1, several))
        return fitted(dataclasses.replace(case, chunks=chunks), c)

    return make


def _chunks(choices: Choices, length: int, unit: int, *, first: int, others: int) -> tuple[int, ...]:
    """Make numbers of queries: a prefill, whole or in chunks, then single tokens, as far as tokens may come alone."""
    least = -(-others // unit) * unit
    begin = -(-first // unit) * unit
    tokens = min(choices.integer(0, MOST_TOKENS), max(0, (length - begin) // least))
    prefill, chunks = length - tokens * least, []
    while prefill > begin and prefill - begin >= least and choices.among((False, True)):
        chunk = min(unit * choices.integer(1, max(1, prefill // unit)), prefill - begin) // unit * unit
        chunk = max(chunk, least)
        chunks.append(chunk)
        prefill -= chunk
    return (prefill, *chunks, *(least,) * tokens)


def _table(choices: Choices, c: Capabilities, size: int, length: int, page_size: int) -> PageTable:
    """Deal out pages: to any rank where ranks may be uneven and empty, else one a rank in turn; in any order."""
    held: list[list[int]] = [[] for _ in range(size)]
    order: list[int] = []
    for page in range(-(-length // page_size) + choices.integer(0, SPARE)):
        order = order or list(range(size))
        any_rank = choices.integer(0, size - 1) if c.uneven and c.empty_shards else None
        pages = held[order.pop(choices.integer(0, len(order) - 1)) if any_rank is None else any_rank]
        pages.insert(choices.integer(0, len(pages)), page)
    return PageTable(page_size, tuple(map(tuple, held)))


INCREMENTAL = Property(
    id="incremental",
    meaning="chunked prefill and decoding on a sharded cache give, row by row, what one whole call gives",
    examples=80,
    cases=_cases,
    judge=_judge,
    unsupported=needs("incremental"),
    applies=lambda case, c: case.apart is not None,
    results=("out", "lse"),
)
