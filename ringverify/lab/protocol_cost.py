"""`python -m ringverify.lab.protocol_cost`: the processor time of a program's case, besides that of its implementation.

The numpy worker that `ringverify worker --write` writes gets one case again and again: 16 tokens on 4 ranks, gradients
included. Processor time is that of both sides, without the start of the worker and its first case; on a machine that
does other work it is the same, where time on the wall is not.
"""

from __future__ import annotations

import resource
import shlex
import sys
import time
from pathlib import Path

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.programs import describe_program
from ringverify.worlds.external.world import ExternalWorld

WORKER = Path(__file__).parents[1] / "cli" / "workers" / "numpy_worker.py"
CASE = Case(problem=Problem(query_length=16, heads=2, head_dim=8), sharding="zigzag", world_size=4)
TIMES = 200


def main() -> None:
    """Measure, and print the result."""
    print(f"{1e3 * cost(TIMES):.1f} ms of processor time a case, besides that of the implementation: {CASE.describe()}")


def cost(times: int) -> float:
    """Return the seconds of processor time that each of so many more cases costs."""
    one = min(_spent(1) for _ in range(3))  # the first start reads from disk what others find in memory
    return (_spent(1 + times) - one) / times


def _spent(times: int) -> float:
    """Return the seconds that a worker, from its start to its end, and this process spend on so many cases."""
    target = f"program: {shlex.join([sys.executable, str(WORKER)])}"
    implementation, world = describe_program(target), ExternalWorld()
    runner = Runner(implementation, world, target=target)
    before, inside = _processor_time(), 0.0
    try:
        for _ in range(times):
            seen = runner.run(CASE, gradients=True)
            assert seen.failure is None, seen.failure
            inside += sum(rank.seconds for rank in seen.ranks)
    finally:
        world.close()
    return _processor_time() - before - inside


def _processor_time() -> float:
    """Return the seconds that this process and those that it has waited for have computed."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


if __name__ == "__main__":
    main()
