"""From which length on to prefer an all-gather to one rank alone, and a ring to both, by their measured times.

Beside the times stand latency and bandwidth of a hop on this machine, by which `ringverify.ring.choosing` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringverify.bench.sides import Side, chosen_sides
from ringverify.bench.speed import measured
from ringverify.bench.workload import Workload
from ringverify.errors import Inconclusive
from ringverify.reports.progress import Progress
from ringverify.ring.choosing import ASSUMED, Link
from ringverify.ring.link import measured_link
from ringverify.worlds.world import World, WorldUnavailable

METHODS = ("local", "allgather", "ring")
SHORTEST = 64
LINK_SECONDS = 60.0


def lengths_up_to(longest: int, world_size: int) -> list[int]:
    """Return lengths that double, up to the longest asked for."""
    shortest = max(SHORTEST, 2 * world_size)
    steps = max(0, math.floor(math.log2(max(longest, 1) / shortest)))
    return [shortest << step for step in range(steps + 1)]


def report(world: World, works: Sequence[Workload], rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the times of the three methods on every length, and the lengths from which on the fastest method changes.

    Raises:
        Inconclusive: a rank raised, died or hung.
    """
    sides: list[Side] = chosen_sides(METHODS)[0]
    first = works[0]
    points = []
    for work in works:
        entry = measured(world, work, sides, rounds, progress, phases=False)
        seconds = {row["side"]: row["both"]["seconds"] for row in entry["rows"]}
        points.append({"length": work.problem.nq, "seconds": seconds})
    link = of_group(world, first.world_size)
    of_ranks = [won_from(points, method, ["local"]) for method in ("ring", "allgather")]
    return {
        "pattern": first.pattern,
        "ranks": first.world_size,
        "link": {"latency": link.latency, "bandwidth": link.bandwidth},
        "assumed": dict(ASSUMED["cpu"]._asdict()),
        "points": points,
        "ring_from": won_from(points, "ring", ["allgather", "local"]),
        "allgather_from": won_from(points, "allgather", ["local"]),
        "ranks_from": min((length for length in of_ranks if length is not None), default=None),
    }


def won_from(points: Sequence[Mapping[str, Any]], method: str, others: Sequence[str]) -> int | None:
    """Return the shortest measured length from which on a method is always at least as fast as others, or `None`."""
    won: int | None = None
    for point in sorted(points, key=lambda one: -one["length"]):
        seconds = {name: spread["median"] for name, spread in point["seconds"].items()}
        if any(seconds[method] > seconds[other] for other in others):
            break
        won = point["length"]
    return won


def of_group(world: World, world_size: int) -> Link:
    """Measure latency and bandwidth of a hop between processes of this machine.

    Raises:
        Inconclusive: the ranks could not be started, or did not return.
    """
    try:
        run = world.run(on_rank, None, world_size=world_size, seed=0, deadline=LINK_SECONDS)
    except WorldUnavailable as error:
        raise Inconclusive(str(error)) from None
    if run.failure is not None:
        raise Inconclusive(f"measuring a hop on {world_size} ranks: {run.failure.message}")
    link: Link = run.results[0]
    return link


def on_rank(argument: None) -> Link:
    """Measure a hop; run by every rank."""
    del argument
    return measured_link()
