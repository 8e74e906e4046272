"""Measure all sides on a workload, in processes that are kept from turn to turn; the result is a report's entry."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ringverify.bench.gathered import pairs
from ringverify.bench.phases import PHASES
from ringverify.bench.sides import SINKLESS, Side, why_not
from ringverify.bench.timing import PASSES, Seconds, interleaved, ratios, rows, spread
from ringverify.bench.visiting import TimedCall, Visit, visit
from ringverify.bench.workload import Workload
from ringverify.errors import Inconclusive
from ringverify.reports.progress import Progress
from ringverify.worlds.world import World, WorldUnavailable

VISIT_SECONDS = 900.0
"""How long one turn may take before its ranks are given up."""
PLAIN = "plain"
DENSE = "dense-ring"
FLOORS = {"ring": "floor", "allgather": "floor"}


def taken(
    world: World, side: Side, workload: Workload, calls: int, *, phases: bool = False
) -> list[tuple[TimedCall, ...]]:
    """Run a turn of a side; for every call, return what each rank measured.

    Raises:
        Inconclusive: the ranks could not be started, or did not return.
    """
    turn = Visit(side, workload, calls, phases)
    try:
        run = world.run(visit, turn, world_size=side.processes(workload), seed=0, deadline=VISIT_SECONDS)
    except WorldUnavailable as error:
        raise Inconclusive(str(error)) from None
    if run.failure is not None:
        raise Inconclusive(f"{side.name} on {workload.title}: {run.failure.message}")
    return list(zip(*run.results, strict=True))


def seconds(ranks: Sequence[TimedCall]) -> Seconds:
    """Return the time of one call, from the first rank's beginning to the last one's end."""
    forward = max(call.forward[1] for call in ranks) - min(call.forward[0] for call in ranks)
    backward = max(call.backward[1] for call in ranks) - min(call.backward[0] for call in ranks)
    return Seconds(forward, backward)


def measured(
    world: World, workload: Workload, sides: Sequence[Side], rounds: int, progress: Progress, *, phases: bool
) -> dict[str, Any]:
    """Measure one workload, and return its entry in the report.

    Args:
        world: a world of processes.
        workload: what to compute.
        sides: the sides to measure; those that cannot run the workload are left out, with the reason.
        rounds: rounds to measure.
        progress: shows how many turns are done.
        phases: also measure where our ring's time goes, in further rounds.

    Raises:
        Inconclusive: a rank raised, died or hung.
    """
    reasons = {side.name: why_not(side, workload) for side in sides}
    taking = [side for side in sides if reasons[side.name] is None]
    apart = next((side for side in taking if side.name == "ring"), None) if phases else None
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress.step(done)

    progress.start(workload.pattern, f"n={workload.problem.nq}", (rounds + 1) * len(taking) + (rounds if apart else 0))
    try:
        found = interleaved(
            taking,
            lambda side, calls: [seconds(ranks) for ranks in taken(world, side, workload, calls)],
            rounds,
            step,
        )
        passes = []
        for _ in range(rounds if apart else 0):
            assert apart is not None
            passes += taken(world, apart, workload, 1, phases=True)
            step()
    finally:
        progress.stop()
    problem = workload.problem
    return {
        "pattern": workload.pattern,
        "title": workload.title,
        "length": problem.nq,
        "ranks": workload.world_size,
        "causal": problem.causal,
        "sharding": workload.sharding,
        "batch": problem.batch,
        "heads": problem.heads,
        "head_dim": problem.head_dim,
        "dtype": problem.dtype,
        "rows": rows(found, PLAIN, FLOORS),
        "left_out": [{"side": name, "reason": reason} for name, reason in reasons.items() if reason is not None],
        "phases": phases_of(passes) if passes else None,
        "dilation": None if problem.dilation is None else _dilation(workload, found),
        "sinks": {
            one: {name: spread(ratios(found[one], found[without], name)) for name in PASSES}
            for one, without in SINKLESS.items()
            if {one, without} <= found.keys()
        },
    }


def _dilation(workload: Workload, found: Mapping[str, Sequence[Seconds]]) -> dict[str, Any]:
    """Return the pairs with and without the dilation, and how many times faster our ring is with it."""
    problem = workload.problem
    dense = problem.batch * problem.heads * (problem.nq * (problem.nq + 1) // 2 if problem.causal else problem.nq**2)
    faster = None
    if "ring" in found and DENSE in found:
        faster = spread(ratios(found[DENSE], found["ring"], "both"))
    return {"pairs": pairs(problem), "dense_pairs": dense, "faster": faster}


def phases_of(calls: Sequence[Sequence[TimedCall]]) -> dict[str, list[dict[str, float]]]:
    """Return the median seconds of every phase, by pass and by rank."""
    by_rank = list(zip(*calls, strict=True))
    return {name: [_medians(one, number) for one in by_rank] for number, name in enumerate(("forward", "backward"))}


def _medians(seen: Sequence[TimedCall], number: int) -> dict[str, float]:
    """Return the median seconds of one rank's phases, in its forward (0) or backward (1) passes."""
    values: dict[str, list[float]] = {name: [] for name in (*PHASES, "total")}
    for call in seen:
        assert call.phases is not None
        one, (began, ended) = call.phases[number], (call.forward, call.backward)[number]
        for name in PHASES[:-1]:
            values[name].append(getattr(one, name))
        values["total"].append(ended - began)
        values["other"].append(ended - began - one.compute - one.communication - one.merge)
    return {name: statistics.median(several) for name, several in values.items()}
