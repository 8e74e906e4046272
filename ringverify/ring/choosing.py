"""Which method computes a call: on this rank alone, by gathering everything, or hop by hop; and why.

The ring hides a hop behind the tiles of the block before it; what it cannot hide is a fixed cost a hop: starting the
messages, waiting for the slowest neighbour, merging. Gathering pays that once, and the transfer of all blocks in full,
because nothing is computed meanwhile; and it holds the keys of all ranks. So gathering wins while

    hops · latency  >  bytes gathered / bandwidth

and as long as the gathered keys fit the budget. Nothing here looks at a clock: every rank has to choose the same, so
latency and bandwidth are given by the caller, the same on all ranks (`measured_link` in `ringverify.ring.link` measures
them), or else are those of `ASSUMED`.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, NamedTuple, get_args

from ringverify.ring.kernels.kernel import Setting
from ringverify.ring.plan.plan import Plan

MethodName = Literal["auto", "ring", "allgather", "local"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)


class Link(NamedTuple):
    """What a hop costs between two neighbours.

    Attributes:
        latency: seconds a hop takes whatever its size, and that tiles do not hide.
        bandwidth: bytes a second.
    """

    latency: float
    bandwidth: float


ASSUMED: dict[str, Link] = {"cpu": Link(1.53e-4, 1.46e9), "cuda": Link(3e-5, 5e10)}
"""By type of device: gloo over the loopback of one machine, the medians of all hops that `bench --crossover` timed for
published pages (`docs/hops.csv`); NVLink by its data sheet, not measured."""


class Choice(NamedTuple):
    """A method, never `auto`, and the reason in a few words."""

    method: MethodName
    reason: str


def choose_method(
    plan: Plan,
    setting: Setting,
    method: MethodName,
    memory_budget: int | None,
    bandwidth: float | None,
    latency: float | None,
) -> Choice:
    """The method of a call; the same on every rank, because it depends on what all ranks know.

    Args:
        plan: of this rank.
        setting: of the call.
        method: asked for.
        memory_budget: bytes that one rank may use beside inputs and outputs, the same on all ranks.
        bandwidth: bytes a second between two neighbours, the same on all ranks; `None` assumes it.
        latency: seconds of a hop that carries next to nothing, likewise.

    Raises:
        ValueError: `local` was asked for, but some rank needs keys of another; a bandwidth is not positive, or
            a latency negative.
    """
    if bandwidth is not None and not (isinstance(bandwidth, Real) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r}: expected a positive number of bytes a second")
    if latency is not None and not (isinstance(latency, Real) and 0 <= latency < math.inf):
        raise ValueError(f"latency={latency!r}: expected a finite number of seconds, at least 0")
    hops = max(plan.schedule.reach)
    combines = plan.replicated and plan.world_size > 1
    if method == "local" and (hops or combines):
        raise ValueError(
            f"method='local' on {plan.world_size} ranks: queries need keys of other ranks, up to {hops} hops away; "
            "use 'ring', 'allgather' or 'auto'"
        )
    if method != "auto":
        return Choice(method, "asked for")
    if plan.world_size == 1:
        return Choice("local", "there is one rank")
    if combines:
        return Choice("ring", "queries are replicated: partial results are combined round the ring")
    if not hops:
        return Choice("local", "no query needs a key of another rank")
    link = ASSUMED.get(setting.device, ASSUMED["cuda"])
    link = Link(link.latency if latency is None else latency, link.bandwidth if bandwidth is None else bandwidth)
    return _ring_or_gather(plan, setting, hops, link, memory_budget)


def _ring_or_gather(plan: Plan, setting: Setting, hops: int, link: Link, memory_budget: int | None) -> Choice:
    longest = max(plan.whole(owner).numel for owner in range(plan.world_size))
    gathered = (plan.world_size - 1) * longest * setting.dtype.itemsize
    # In backward the gradients of all blocks are held as well, in the accumulation dtype.
    held = gathered + plan.world_size * longest * setting.accumulates.itemsize
    if memory_budget is not None and held > memory_budget:
        return Choice("ring", f"gathered keys and gradients take {held:,} bytes of a budget of {memory_budget:,}")
    waits, transfer = hops * link.latency, gathered / link.bandwidth
    if waits > transfer:
        return Choice(
            "allgather",
            f"{hops} hops cost {waits:.1e} s whatever they carry, gathering {gathered:,} bytes {transfer:.1e} s",
        )
    return Choice(
        "ring",
        f"gathering {gathered:,} bytes costs {transfer:.1e} s that nothing hides, {hops} hops {waits:.1e} s",
    )
