"""Sums of results held to those of a golden vector, and the oracle's sums that a vector is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.classes import pieces_of
from ringverify.cases.case import Case
from ringverify.events import TensorName
from ringverify.scale.checksums import RESULTS, Checksums
from ringverify.scale.comparison import RankResults
from ringverify.scale.every_row import every_row
from ringverify.scale.long_run import ROWS, LongRun
from ringverify.scale.numbers import Numbers, Positions
from ringverify.scale.task import LongTask

Float = NDArray[np.float64]


def checksums(run: LongRun) -> None:
    """Hold sums of rows and of blocks of rows to those of a golden vector."""
    p, golden = run.problem, run.asked.golden
    assert golden is not None
    found = Checksums(run.case.seed, p, golden.rows)
    of_queries = run.queries if run.case.sharding != "replicated_query" or run.rank == 0 else run.queries[:0]
    for name in run.compared.returned:
        at, heads = (run.keys, p.hk) if name in ("dk", "dv") else (of_queries, p.heads)
        for b, h in np.ndindex(p.batch, heads):
            for piece in pieces_of(np.arange(len(at)), ROWS):
                found.add(name, h, at[piece], run.compared.actual(name, b, h, piece))
        run.compared.rows[name] = p.batch * heads * len(at)
        total = run.summed(found.values[name])
        if run.rank == 0:
            run.compared.compare_sums(name, total, golden.expected[name], golden.allowed[name], found.names(name))


def expected_checksums(case: Case, rows: Sequence[int]) -> Checksums:
    """Return the oracle's sums, and the errors allowed in them on as many ranks as the case has."""
    run = LongRun(LongTask("ring", case, "checksums", "cpu"), 1)
    run.queries = run.keys = np.arange(case.problem.nq)
    run.shared = False
    run.compared = collected = _Collected(case, run.shards, run.numbers, rows)
    every_row(run)
    return collected.sums


class _Collected(RankResults):
    """Adds up what each row has to be, instead of comparing."""

    def __init__(self, case: Case, shards: Any, numbers: Numbers, rows: Sequence[int]) -> None:
        super().__init__(case, 1, shards, numbers)
        self.returned = {name: torch.empty(0) for name in RESULTS}
        self.sums = Checksums(case.seed, case.problem, rows)

    def compare(
        self,
        name: TensorName,
        b: int,
        h: int,
        rows: Positions,
        at: Positions,
        expected: Float,
        allowed: Float,
        variance: Sequence[Float] | None = None,
    ) -> None:
        """Add rows of the oracle's results to the sums."""
        self.sums.add(name, h, at, expected, allowed)
