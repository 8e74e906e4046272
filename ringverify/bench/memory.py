"""Bytes a rank holds at the peak of a forward and backward call: predicted from the plan, and measured by component.

Measured in the simulated world, whose meter follows every tensor that a rank allocates, views and what autograd saves
included; what the fused operations of torch use within themselves is not seen. So the peak depends on no clock and no
machine, and one world size costs no more processors than another.

Shape letters: B batch, S a rank's queries, T its keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringverify.bench.visiting import Attending
from ringverify.bench.workload import Workload
from ringverify.errors import Inconclusive
from ringverify.ring.calls import ACCUMULATES
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.kernel import Setting
from ringverify.ring.plan.plan import make_plan
from ringverify.targets import load
from ringverify.worlds.watch.memory import Memory, PeakShare
from ringverify.worlds.world import World, WorldUnavailable

GIVEN = "k, v, positions"
"""What is the caller's own: counted and shown, and left out on both sides of the ratio."""
COMPONENTS = ("q", GIVEN, "dout", "out, lse", "dq", "KV buffers", "gradients in flight", "tile", "other")
"""Components of a peak. A rank's own dk and dv are among the gradients in flight, which return to it at the end."""
LARGEST_WORLD = 8
RUN_SECONDS = 900.0
OF_FUNCTIONS = {
    "_queries": "q",
    "_keys": GIVEN,
    "_values": GIVEN,
    "_cotangent": "dout",
    "partial": "out, lse",
    "take": "out, lse",
    "total": "dq",
    "rotate": "KV buffers",
    "block": "KV buffers",
    "packed": "KV buffers",
    "_gathered": "KV buffers",
    "own_gradients": "gradients in flight",
}
"""Component of the tensors that a function allocates, by the function's name."""
OF_FILES = {
    "kernels": "tile",
    "masks.py": "tile",
    "accumulate.py": "tile",
    "compute.py": "tile",
    "autograd.py": "out, lse",
    "one_process.py": "out, lse",
    "passes.py": "gradients in flight",
    "visiting.py": GIVEN,
}
"""Component by file or folder, for functions that `OF_FUNCTIONS` does not name."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a rank of the simulated world has to run: one call of a target, forward and backward."""

    target: str
    workload: Workload


def hold(what: Holding) -> None:
    """Make inputs, attend, and compute gradients, so that the simulated world's meter sees the peak."""
    implementation = load(what.target)
    attending = Attending(
        implementation,
        what.workload.sharding,
        what.workload,
        dist.get_world_size(),
        dist.get_rank(),
        dist.group.WORLD,
        make=(_queries, _keys, _values, _cotangent),
    )
    attending.backward(attending.forward())


def _queries(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _keys(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _values(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _cotangent(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def component(part: PeakShare) -> str:
    """Return the component that a part of a peak belongs to, by the line that allocated it."""
    file, _, function = part.place.rpartition(" in ")
    path = file.rpartition(":")[0].replace("\\", "/")
    if function in OF_FUNCTIONS:
        return OF_FUNCTIONS[function]
    return next((name for where, name in OF_FILES.items() if where in path.split("/")), "other")


def by_component(memory: Memory) -> dict[str, int]:
    """Return the bytes of every component at a rank's peak."""
    found = dict.fromkeys(COMPONENTS, 0)
    for part in memory.parts:
        found[component(part)] += part.nbytes
    return found


def predicted(work: Workload, rank: int) -> dict[str, int]:
    """Predict the bytes of every component that a rank needs, from the plan alone.

    lse counts twice, because backward keeps a copy in which rows without keys are marked. From two ranks on there are
    two KV buffers and two gradients in flight, one of each being sent and one being received. The tile is the larger of
    what a forward and a backward call of the kernel return.
    """
    p, dtype = work.problem, getattr(torch, work.problem.dtype)
    plan = make_plan(p, work.sharding, work.world_size, rank)
    wide = ACCUMULATES[dtype]
    setting = Setting("cpu", dtype, wide, p.head_dim, p.dv, p.scale_value, p.softcap)
    kernel, _ = choose_kernel("auto", setting)
    queries, keys = p.batch * plan.query_count * p.heads, p.batch * plan.key_count(rank) * p.hk
    longest = max(plan.key_count(owner) for owner in range(work.world_size))
    block = p.batch * longest * p.hk * (p.head_dim + p.dv)
    bucket = kernel.bucket(setting, max(plan.query_count, plan.key_count(plan.rank)))
    row, column = min(bucket, plan.query_count), min(bucket, longest)
    forward = p.batch * p.heads * row * (p.dv + 1)
    backward = p.batch * (p.heads * row * p.head_dim + p.hk * column * (p.head_dim + p.dv))
    travels = work.world_size > 1
    return {
        "q": queries * p.head_dim * dtype.itemsize,
        GIVEN: keys * (p.head_dim + p.dv) * dtype.itemsize,
        "dout": queries * p.dv * dtype.itemsize,
        "out, lse": queries * (p.dv * dtype.itemsize + 2 * wide.itemsize),
        "dq": queries * p.head_dim * wide.itemsize,
        "KV buffers": 2 * block * dtype.itemsize if travels else 0,
        "gradients in flight": (2 if travels else 1) * block * wide.itemsize,
        "tile": max(forward, backward) * wide.itemsize,
        "other": 0,
    }


def fitted_exponent(positions: Sequence[float], peaks: Sequence[float]) -> float | None:
    """Return the slope of log peak over log positions by least squares; `None` without two different lengths."""
    if len(set(positions)) < 2:
        return None
    return statistics.linear_regression([math.log(one) for one in positions], [math.log(one) for one in peaks]).slope


def points(lengths: Sequence[int], largest: int) -> list[tuple[int, int]]:
    """Return (length, ranks): each length on 1 to `largest` ranks, and with `length // largest` positions a rank."""
    found = [(length, ranks) for length in lengths for ranks in range(1, largest + 1)]
    found += [(length // largest * ranks, ranks) for length in lengths for ranks in range(1, largest + 1)]
    return sorted((one for one in set(found) if one[0] >= 2 * one[1]), key=lambda one: (one[1], one[0]))


def measured(world: World, target: str, works: Sequence[Workload], step: Callable[[int], None]) -> list[dict[str, Any]]:
    """Return an entry for each workload: its worst rank's peak by component, measured and predicted, in bytes.

    Raises:
        Inconclusive: the world could not be started, or a rank failed.
    """
    entries = []
    for done, work in enumerate(works, 1):
        try:
            run = world.run(
                hold,
                Holding(target, work),
                world_size=work.world_size,
                seed=0,
                deadline=RUN_SECONDS,
                watch="memory",
            )
        except WorldUnavailable as error:
            raise Inconclusive(str(error)) from None
        if run.failure is not None:
            raise Inconclusive(f"memory of {target} on {work.title}: {run.failure.message}")
        worst = max(run.memory, key=lambda one: one.peak_bytes)
        entries.append(entry(work, worst.rank, worst.peak_bytes, by_component(worst)))
        step(done)
    return entries


def entry(work: Workload, rank: int, peak: int, parts: Mapping[str, int]) -> dict[str, Any]:
    """Return the entry of a workload in a report; memory is in bytes."""
    expected = predicted(work, rank)
    own = parts[GIVEN], expected[GIVEN]
    return {
        "pattern": work.pattern,
        "sharding": work.sharding,
        "length": work.problem.nq,
        "ranks": work.world_size,
        "positions": work.problem.nq / work.world_size,
        "rank": rank,
        "peak": peak,
        "measured": dict(parts),
        "predicted": expected,
        "to_predicted": (peak - own[0]) / (sum(expected.values()) - own[1]),
    }


def report(
    world: World,
    target: str,
    lengths: Sequence[int],
    make: Callable[[int, int], Workload],
    step: Callable[[int], None],
    largest: int = LARGEST_WORLD,
) -> dict[str, Any]:
    """Return every point's entry, and the exponent of the peak in n / ranks, by number of ranks and for 3 and more."""
    entries = measured(world, target, [make(*point) for point in points(lengths, largest)], step)
    exponents = {str(ranks): _exponent(entries, {ranks}) for ranks in range(1, largest + 1)}
    exponents["3 and more"] = _exponent(entries, range(3, largest + 1))  # two ranks hold one gradient in flight less
    return {"target": target, "entries": entries, "exponents": exponents}


def _exponent(entries: Sequence[Mapping[str, Any]], ranks: Collection[int]) -> float | None:
    these = [one for one in entries if one["ranks"] in ranks]
    return fitted_exponent([one["positions"] for one in these], [one["peak"] for one in these])
