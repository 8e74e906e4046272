"""What a length needs, said before it starts: inputs and results by their shapes, all else by runs at short lengths."""

from __future__ import annotations

import torch

from ringref.classes import BLOCK
from ringverify.bench.machine import PROCESS_BYTES, TENSORS_A_SIDE
from ringverify.cases.case import Case
from ringverify.check.planning import RunPlan
from ringverify.errors import UsageError
from ringverify.scale.growth import Growth, Point
from ringverify.scale.numbers import MOST_CLASSES, QUERY_CLASSES
from ringverify.scale.trials import Trials
from ringverify.worlds.limits import available_memory
from ringverify.worlds.world import WorldUnavailable

SHORTEST = 1024
"""Positions of the first short run, and at least so many on each rank's share of it."""
LEAST_ON_A_RANK = 128
FEWEST_RUNS = 4
"""Differences of peaks are compared, and the first one is of what is loaded then."""
ENOUGH_SECONDS = 1.0
"""A run that takes so long in the implementation is the last short one."""
TELLING = 16
"""A peak that would not fit so many times tells what is quadratic from tiles that have not reached their size yet."""
SHORT_DEADLINE = 120.0
HOST_TENSORS = 2
"""Tensors of the size of q that a rank with a GPU holds beside it."""


def refuse_too_long(case: Case, plan: RunPlan, here: int) -> None:
    """Refuse a length for whose inputs and results the ranks on this machine, `here` at most, have too little memory.

    Raises:
        UsageError: with the estimate.
    """
    p, on_gpus = case.problem, plan.world == "nccl"
    numbers = p.batch * p.heads * (p.nq + p.nk) // 2 * max(p.head_dim, p.dv)
    width = {"float64": 8}.get(p.dtype, 4)
    sums = 2 * (p.nq + p.nk) // BLOCK * (MOST_CLASSES + QUERY_CLASSES) * (p.dv + 3) * 8 * p.group_size
    tensors = TENSORS_A_SIDE * width * numbers // case.world_size
    if on_gpus:
        _refuse(case, f"{tensors / 2**30:.1f} GiB are needed on each GPU", tensors, _free_on_gpus())
        tensors = HOST_TENSORS * width * numbers // case.world_size
    ranks = min(case.world_size, here)
    processes = 1 if plan.world == "simulated" else ranks
    needed = (tensors + sums + 64 * (p.nq + p.nk)) * ranks + PROCESS_BYTES * processes
    _refuse(case, f"{needed / 2**30:.1f} GiB are needed for {ranks} ranks", needed, available_memory())


def growth_of(trials: Trials, case: Case, here: int) -> Growth | None:
    """Run the case at short lengths, each twice the one before; `None` where all scores at once would fit anyway.

    Of ranks that fail there nothing is said: the run at length will say it.
    """
    p, on_gpus = case.problem, trials.plan.world == "nccl"
    available = _free_on_gpus() if on_gpus else available_memory()
    if available is None or 32 * p.batch * p.heads * p.nq * p.nk < available:
        return None
    points: list[Point] = []
    length = max(SHORTEST, LEAST_ON_A_RANK * case.world_size)
    while 4 * length <= p.nq and (short := trials.shorter(case, length)) is not None:
        try:
            run, _ = trials.run("every_row", short, deadline=SHORT_DEADLINE)
        except WorldUnavailable:
            break
        if run.failure is not None:
            break
        peaks = [one.memory[0] for one in run.results if one.memory is not None]
        together = 1 if on_gpus or trials.plan.world == "simulated" else min(case.world_size, here)
        inside, verifying = (max(getattr(one, name)[0] for one in run.results) for name in ("inside", "verifying"))
        points.append(Point(short.problem, inside, verifying, max(peaks) * together if peaks else None))
        expected = Growth(tuple(points)).bytes_at(p) or 0
        enough = len(points) >= FEWEST_RUNS and inside > ENOUGH_SECONDS
        if enough and (expected < available or (points[-1].peak or 0) * TELLING > available):
            break
        length *= 2
    return Growth(tuple(points))


def refuse_growth(case: Case, plan: RunPlan, growth: Growth) -> None:
    """Refuse a length at which the implementation will need more than there is, as its peaks at short lengths say.

    Raises:
        UsageError: with the estimate.
    """
    needed, on_gpus = growth.bytes_at(case.problem), plan.world == "nccl"
    available = _free_on_gpus() if on_gpus else available_memory()
    last = growth.points[-1] if growth.points else None
    if needed is None or available is None or last is None:
        return
    if (last.peak or 0) * TELLING <= available and 8 * last.problem.nq <= case.problem.nq:
        return  # too far from what was measured
    peaks = ", ".join(f"{(one.peak or 0) >> 20} MiB at {one.problem.nq:,}" for one in growth.points[-3:])
    whose = "on each GPU" if on_gpus else f"for {case.world_size} ranks"
    text = f"{needed / 2**30:.1f} GiB are needed {whose}, as {plan.target} took {peaks} positions"
    _refuse(case, text, needed, available)


def _refuse(case: Case, text: str, needed: int, available: int | None) -> None:
    if available is not None and needed > available:
        raise UsageError(
            f"--length {case.problem.nq}: about {text}, and {available / 2**30:.1f} GiB are available; use a shorter "
            "length, fewer heads or fewer ranks"
        )


def _free_on_gpus() -> int | None:
    """Return the bytes that are free on the GPU of this machine that has least; `None` without one."""
    free = [torch.cuda.mem_get_info(one)[0] for one in range(torch.cuda.device_count())]
    return min(free, default=None)
