"""The contenders of a benchmark, called sides: our ring, what it is compared with, and its floor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from ringverify.bench.workload import DILATED, PatternName, Workload
from ringverify.cases.case import Case, why_unsupported
from ringverify.describing import describe
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, sharding_name

Kind = Literal["ranks", "alone", "local", "plain", "floor", "dense", "sinkless"]

OURS: dict[str, tuple[Kind, str]] = {
    "plain": ("plain", ""),
    "ring": ("ranks", "ring"),
    "floor": ("floor", "ring"),
    "allgather": ("ranks", "allgather"),
    "world-of-1": ("alone", "ring"),
    "local": ("local", "ring"),
    "dense-ring": ("dense", "ring"),
    "sinkless-ring": ("sinkless", "ring"),
    "sinkless-allgather": ("sinkless", "allgather"),
}
"""Sides by name: the kind, and the target."""
BY_DEFAULT = ("plain", "ring", "floor", "allgather", "world-of-1")
DILATED_BY_DEFAULT = ("plain", "ring", "floor", "dense-ring", "world-of-1")
SINKS_BY_DEFAULT = ("ring", "sinkless-ring", "floor", "allgather", "sinkless-allgather")
SINKLESS = {"ring": "sinkless-ring", "allgather": "sinkless-allgather"}
"""Sides by name, and those that do the same without the sinks."""
PEERS_BY_DEFAULT = ("peer:ring-attention-pytorch",)
"""Peers that run on a CPU as they are. Others need a stand-in for their kernels, whose time says nothing of them."""

ONE_PROCESS_PER_RANK = "one process per rank, 1 thread each"
MEANING = {
    "plain": "one process, as many threads as there are ranks, scaled_dot_product_attention; a dilation is run as its "
    "dense segments, gathered before timing",
    "ring": ONE_PROCESS_PER_RANK,
    "floor": "the ring's tile work, each rank its own, without communication and without merges",
    "allgather": ONE_PROCESS_PER_RANK,
    "world-of-1": "our ring in one process, as many threads as there are ranks",
    "local": "our ring in one process with one thread",
    "dense-ring": "our ring on the same inputs without the dilation: what a ring with a mask computes, the mask not "
    "counted",
    "sinkless-ring": "our ring on the same inputs without the sinks",
    "sinkless-allgather": "our all-gather on the same inputs without the sinks",
}
MASK_BYTES = 2 << 30
"""Most bytes for a mask of the plain call, which has no argument for a window, and takes a mask of all pairs."""
BYTES_A_PAIR = 5
"""Bytes for each pair of that mask: one as it is given, four as torch converts it."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One contender of a benchmark.

    Attributes:
        name: its name in tables.
        kind: ranks: an implementation, one process per rank. alone: an implementation in a world of 1, with as many
            threads as there are ranks. local: the same with one thread. plain: torch's attention, without ranks.
            floor: the ring's tile work alone. dense: the ring on a dilated problem without its dilation. sinkless: an
            implementation on a problem without its sinks.
        target: the implementation, as `ringverify.targets` knows it; empty for the plain call.
    """

    name: str
    kind: Kind
    target: str

    def processes(self, workload: Workload) -> int:
        """How many processes the side runs in."""
        return workload.world_size if self.kind in ("ranks", "floor", "dense", "sinkless") else 1

    def threads(self, workload: Workload) -> int:
        """Threads of each process: 1 for `local`, else together as many as there are ranks."""
        return 1 if self.kind == "local" else workload.world_size // self.processes(workload)


def chosen_sides(names: Sequence[str] | None, patterns: Sequence[PatternName]) -> tuple[list[Side], list[str]]:
    """Return the sides of these names, by default ours and the installed peers, and remarks on peers that are left out.

    Args:
        names: names as the user gave them; `None` for the default.
        patterns: what is run; no peer runs dilations on several ranks, or sinks.

    Raises:
        UsageError: there is no such side.
        Inconclusive: a peer was named whose package is not installed.
    """
    if names is not None:
        return [side(name) for name in dict.fromkeys(names)], []
    for apart, by_default in ((DILATED, DILATED_BY_DEFAULT), (("sinks",), SINKS_BY_DEFAULT)):
        if set(patterns) <= set(apart):
            return [side(name) for name in by_default], []
    sides, remarks = [side(name) for name in BY_DEFAULT], []
    for name in PEERS_BY_DEFAULT:
        try:
            sides.append(side(name))
        except Inconclusive as error:
            remarks.append(f"left out: {error}")
    return sides, remarks


def side(name: str) -> Side:
    """Return the side of a name.

    Raises:
        UsageError: there is no such side.
        Inconclusive: the side is a peer whose package is not installed.
    """
    if name in OURS:
        return Side(name, *OURS[name])
    try:
        declared(name)
    except UsageError as error:
        raise UsageError(f"--sides {name}: {error}; sides of our own are {', '.join(OURS)}") from None
    return Side(name, "ranks", name)


@functools.cache
def declared(target: str) -> Capabilities:
    """Return what an implementation declares; another process imports it, once for each target.

    Raises:
        UsageError: there is no such implementation.
        Inconclusive: it is a peer whose package is not installed.
    """
    return describe(target).capabilities


def sharding_of(capabilities: Capabilities, workload: Workload) -> str:
    """Return the workload's sharding if an implementation declares it, else the first one that it declares."""
    names = [sharding_name(one) for one in capabilities.shardings]
    return workload.sharding if workload.sharding in names else names[0]


def why_not(side: Side, workload: Workload) -> str | None:
    """Return why a side cannot run a workload, or `None` if it can."""
    problem = workload.problem
    if side.kind == "plain":
        if problem.sinks:
            return "scaled_dot_product_attention has no sinks"
        needed = BYTES_A_PAIR * problem.nq * problem.nk
        if problem.window is not None and needed > MASK_BYTES:
            return (
                "scaled_dot_product_attention has no window argument, and a mask of all pairs would take "
                f"{needed / 2**30:.1f} GiB, more than {MASK_BYTES / 2**30:.1f} GiB"
            )
        return None
    if side.kind == "dense":
        return "there is no dilation to leave out" if problem.dilation is None else None
    if side.kind == "sinkless" and not problem.sinks:
        return "there are no sinks to leave out"
    capabilities = declared(side.target)
    if not capabilities.gradients:
        return "gradients=False is declared"
    case = Case(
        problem=problem, sharding=sharding_of(capabilities, workload), world_size=side.processes(workload), seed=0
    )
    lacking = why_unsupported(case, capabilities)
    return None if lacking is None else str(lacking)
