"""Which method of the suite `scale` finds which fault that needs length, and at which length.

`python -m ringverify.lab.faults_at_length` writes the table of docs/scale.md: the largest margins of all results.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import get_args

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.faults.length import AT_LENGTH
from ringverify.properties.suites import Method
from ringverify.scale.rank import verify
from ringverify.scale.sampling import rows_to_sample
from ringverify.scale.task import LongTask
from ringverify.targets import load
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.world import World

RANKS = {"far_block_lost": 16, "far_block_twice": 16, "small_tiles_dropped": 16}
"""Of the other faults 2."""
SETTINGS = ((1000, 8), (2048, 16))
"""Positions, and the most ranks: the first is below where all but one begin."""


def case_of(name: str, length: int, most: int = 16) -> Case:
    """Return a causal case of one head, with a window where the fault is one of windows, on at most `most` ranks."""
    window = (300, 0) if name == "window_forgets" else None
    size = min(RANKS.get(name, 2), most)
    problem = Problem(query_length=length, head_dim=32, causal=True, window=window)
    return Case(problem=problem, world_size=size, sharding="zigzag", cotangent="both")


def largest_margin(world: World, target: str, case: Case, method: Method) -> tuple[float, bool]:
    """Return the largest margin of a run, and whether anything was found wrong.

    Raises:
        RuntimeError: the run gave no results.
    """
    with tempfile.TemporaryDirectory() as notes:
        task = LongTask(target, case, method, "cpu", rows_to_sample(case, load(target).capabilities, 96), notes)
        run = world.run(verify, task, world_size=case.world_size, seed=0, deadline=600.0)
    if run.failure is not None:
        raise RuntimeError(run.failure.message)
    margins = [margin for report in run.results for margin in report.margins.values()]
    return max(margins), any(report.differences for report in run.results)


def row(name: str) -> str:
    """Return the row of a fault: what each method says at each setting, in bold where the fault is found."""
    cells = [f"`{name}`"]
    with contextlib.closing(ContainedWorld()) as world:
        for length, most in SETTINGS:
            for method in get_args(Method):
                case = case_of(name, length, most)
                margin, found = largest_margin(world, f"ringverify.faults.length:{name}", case, method)
                cells.append(f"**{margin:.2g}**" if found else f"{margin:.2g}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for fault in sys.argv[1:] or AT_LENGTH:
        print(row(fault), flush=True)
