"""Faults of dilation and segments (H in the reports)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringref.problem import Problem
from ringverify.faults import pattern
from ringverify.faults.fault import Faults
from ringverify.faults.operators_of_index import branched
from ringverify.faults.pattern import Branch
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, multiplicity, whole

FAULTS = Faults()
COVERS_NOTHING: Branch = (1, 2, 1)
"""Place 0 of every segment of one, never at offset 1."""


def _overlapping(problem: Problem) -> list[list[Branch]]:
    dilation = problem.dilation
    assert dilation is not None
    if dilation.heads != "split":
        return pattern.branches(problem)
    size, larger = divmod(problem.heads, len(dilation.branches))
    runs = [[COVERS_NOTHING] for _ in range(problem.heads)]
    for number, (w, r) in enumerate(dilation.branches):
        group = size + (number < larger)
        for head in range(number * group, min((number + 1) * group, problem.heads)):
            runs[head] = [(w, r, number % r)]
    return runs


H1 = FAULTS.add(
    "H1",
    "unequal head groups sliced as i · size",
    story="12 heads over 5 groups of 3, 3, 2, 2, 2: slices overlap and the last heads stay 0.",
    source="fkodom/dilated-attention-pytorch e8f2d3d, still at HEAD (s)",
    ring=replace(STEPS, branches=_overlapping),
    cause="split heads: unequal head groups cut at i times their own size",
    also=("backward", "forward"),
)


def _over_positions(here: Here, found: Partial) -> Partial:
    sums = found.out.sum(dim=2, keepdim=True)
    return found if here.problem.dilation is None else found._replace(out=found.out / sums)


H2 = FAULTS.add(
    "H2",
    "divided by the sum of the output over positions",
    story="x / x.sum over positions stands for the softmax mass: blows up near 0, and does not scale with V.",
    source="fkodom/dilated-attention-pytorch HEAD (s)",
    ring=whole(_over_positions),
    cause="out is divided by its sum over positions (dilation)",
)


def _by_segment(p: torch.Tensor, w: torch.Tensor, r: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return p % w % r == (offset + p // w) % r


H3 = FAULTS.add(
    "H3",
    "offset depends on the segment",
    story="(head + segment) % r: the first segment is right. Needs two segments and r > 1.",
    source="DarcStar-Solutions-Tech/dilated-attention-pytorch 7b6e7d4",
    ring=replace(STEPS, covers=_by_segment),
    cause="dilation offset depends on the segment: (offset + segment) % r",
    also=("backward", "forward"),
)


def _without_own(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
    m = multiplicity(steps, here, hop, owner)
    dilation = here.problem.dilation
    if dilation is None or not here.problem.causal or owner != here.rank or here.size == 1:
        return m
    longest = max(w for w, _ in dilation.branches)
    return torch.zeros_like(m) if longest > len(here.shards[owner]) else m


H5 = FAULTS.add(
    "H5",
    "causal gather leaves the own shard out",
    story="`x[:rank]` of the gathered keys, where a segment spans shards: own keys are never among them.",
    source="microsoft/torchscale gather_kv (s)",
    ring=replace(STEPS, pattern=_without_own),
    cause="causal segments longer than a shard leave the rank's own keys out",
)


RATE_IGNORED = branched(lambda problem, head, branch: (branch[0], 1, 0))


def _undilated(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
    return multiplicity(RATE_IGNORED if here.size > 1 else steps, here, hop, owner)


R3 = FAULTS.add(
    "R3",
    "dilation off in a group",
    story="Rates above 1 are taken for 1 on several ranks.",
    source="report R3",
    ring=replace(
        STEPS,
        pattern=_undilated,
    ),
    cause="dilation is off on several ranks: its rate is ignored",
)


def _only_what_divides(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    problem = here.problem
    if problem.dilation is not None:
        segment = max(w for w, _ in problem.dilation.branches)
        if problem.nk % (here.size * segment):
            raise ValueError(
                f"sequence length {problem.nk} must be divisible by ring_size * max_segment_length, "
                f"{here.size} * {segment}"
            )
    return STEPS.forward(steps, here, q, k, v)


R4 = FAULTS.add(
    "R4",
    "length must be divisible by ring size times segment",
    story="A rule that the semantics do not have; every other length raises.",
    source="report R4",
    kind="failure",
    ring=replace(STEPS, forward=_only_what_divides),
)


def _lining_up(steps: Steps, problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Lay segments out as rows of a table, which the positions have to fill."""
    assert problem.dilation is not None
    for w, r in problem.dilation.branches:
        if problem.nk > w and -(-(problem.nk % w) // r) not in (0, -(-w // r)):
            raise RuntimeError("The size of tensor a must match the size of tensor b at non-singleton dimension 2")
    return STEPS.dilation(steps, problem, i, j)


R5 = FAULTS.add(
    "R5",
    "segments and rates that do not line up",
    story='"The size of tensor a must match the size of tensor b": a short last segment keeps fewer positions.',
    source="report R5",
    kind="failure",
    ring=replace(STEPS, dilation=_lining_up),
)
