"""Faults of dilation: branches, offsets, segments, multiplicities (H in the reports)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringverify.faults import pattern, ring
from ringverify.faults.fault import Faults
from ringverify.faults.pattern import Branch
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, multiplicity, whole

Tensor = torch.Tensor
FAULTS = Faults()


def branched(change: Callable[[int, int, int], Branch]) -> Steps:
    """Change every branch, by its segment length, rate and offset."""
    return replace(
        STEPS, branches=lambda problem: [[change(*branch) for branch in run] for run in pattern.branches(problem)]
    )


FAULTS.add("O52", "dilation offset one too large", branched(lambda w, r, offset: (w, r, (offset + 1) % r)))
FAULTS.add("O53", "dilation offset ignored: every head starts at 0", branched(lambda w, r, offset: (w, r, 0)))
FAULTS.add("O54", "dilation rate one too small", branched(lambda w, r, offset: (w, max(1, r - 1), offset)))
FAULTS.cause("dilation rate one too large", branched(lambda w, r, offset: (w, r + 1, offset)))


for which, of in {
    "twice as long": lambda w, r: 2 * w,
    "half as long": lambda w, r: max(1, w // 2),
    "as many times longer as the rate": lambda w, r: w * r,
    "as many times shorter as the rate": lambda w, r: max(1, w // r),
}.items():
    FAULTS.cause(f"segments are {which}", branched(lambda w, r, offset, of=of: (of(w, r), r, offset)))  # type: ignore[misc]
for which, rate in {"twice": lambda r: 2 * r, "half of": lambda r: max(1, r // 2)}.items():
    FAULTS.cause(
        f"dilation rate is {which} what it should be",
        branched(lambda w, r, offset, rate=rate: (w, rate(r), offset)),  # type: ignore[misc]
    )
RATE_IGNORED = branched(lambda w, r, offset: (w, 1, 0))

FAULTS.cause("dilation rate ignored", RATE_IGNORED)


def _undilated(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    return multiplicity(RATE_IGNORED if here.size > 1 else steps, here, hop, owner)


FAULTS.add("R3", "dilation is off on several ranks: its rate is ignored", replace(STEPS, pattern=_undilated))
FAULTS.add("O55", "segments one token too long", branched(lambda w, r, offset: (w + 1, r, offset)))
FAULTS.cause("segments one token too short", branched(lambda w, r, offset: (max(1, w - 1), r, offset)))
FAULTS.add("O56", "segments begin one token late", replace(STEPS, segment=lambda p, w: (p + 1) // w))
FAULTS.add("O57", "segments ignored", replace(STEPS, segment=lambda p, w: torch.zeros_like(p // w)))
FAULTS.add(
    "O58",
    "place counted from the start of the sequence instead of the segment",
    replace(STEPS, covers=lambda p, w, r, offset: p % r == offset % r),
)


def _by_segment(p: Tensor, w: Tensor, r: Tensor, offset: Tensor) -> Tensor:
    return p % w % r == (offset + p // w) % r


FAULTS.add("H3", "dilation offset depends on the segment: (offset + segment) % r", replace(STEPS, covers=_by_segment))


def _no_short_segment(spared: bool, steps: Steps, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    def covers(p: Tensor, w: Tensor, r: Tensor, offset: Tensor) -> Tensor:
        whole = torch.div(torch.full_like(w, problem.nq), w, rounding_mode="floor") * w
        return pattern.covers(p, w, r, offset) & ((p < whole) | (whole == 0) & spared)

    return ring.dilation(replace(steps, covers=covers), problem, i, j)


FAULTS.add(
    "O111",
    "the last segment is left out if it is shorter than the others",
    replace(STEPS, dilation=functools.partial(_no_short_segment, True)),
)
FAULTS.cause(
    "the last segment is left out if it is shorter than the segment length, even if it is the only one",
    replace(STEPS, dilation=functools.partial(_no_short_segment, False)),
)


def _last_branch(of_keys: bool, steps: Steps, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    """Count the last branch alone of those that cover a query, or a key, `(H, S, T)`."""
    table = torch.tensor(steps.branches(problem), device=i.device).transpose(0, 1)[..., None, None]
    w, r, offset = table.unbind(dim=2)  # each (R, H, 1, 1)
    covered = steps.covers(i, w, r, offset), steps.covers(j, w, r, offset)
    own = covered[of_keys]
    last = own & (own.flip(0).cumsum(0).flip(0) == 1)
    return (covered[0] & covered[1] & (steps.segment(i, w) == steps.segment(j, w)) & last).sum(dim=0)


def _overwritten_by_branches(names: str) -> Steps:
    """The gradient of each branch written over that of the branches before it."""

    def gradients(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        def of(steps: Steps) -> tuple[Tensor, Block]:
            return ring.gradients(steps, here, hop, owner, rows, block)

        dq, (dk, dv) = of(steps)
        if here.problem.dilation is not None:
            (last, _), (_, of_keys) = (
                of(replace(steps, pattern=multiplicity, dilation=functools.partial(_last_branch, side)))
                for side in (False, True)
            )
            dq = last if "q" in names else dq
            dk, dv = (mine if name in names else x for name, x, mine in zip("kv", (dk, dv), of_keys, strict=True))
        return dq, Block(dk, dv)

    return replace(STEPS, gradients=gradients)


for names, what in {"q": "dq", "kv": "dk and dv", "k": "dk", "v": "dv"}.items():
    whose = "a query" if names == "q" else "a key"
    FAULTS.cause(
        f"of the branches of a dilation that cover {whose}, the last one overwrites the {what} of the others",
        _overwritten_by_branches(names),
    )


def _offset_where(field: str, value: str, offset: Callable[[int, int, int], int]) -> Steps:
    """Another offset, by head, number of heads and rate, where the dilation is of that kind."""

    def changed(problem: Problem) -> list[list[Branch]]:
        runs = pattern.branches(problem)
        if getattr(problem.dilation, field) != value:
            return runs
        return [[(w, r, offset(head, problem.heads, r)) for w, r, _ in run] for head, run in enumerate(runs)]

    return replace(STEPS, branches=changed)


FAULTS.add(
    "O59",
    "split heads: dilation offset taken from the head instead of the branch",
    _offset_where("heads", "split", lambda head, heads, r: head % r),
)
FAULTS.add(
    "O60",
    "shared heads: block offset h // floor(H / r) instead of h // ceil(H / r)",
    _offset_where("head_offset", "block", lambda head, heads, r: head // max(1, heads // r)),
)
FAULTS.add(
    "O61",
    "shared heads: block offset taken for cyclic",
    _offset_where("heads", "shared", lambda head, heads, r: head % r),
)


def dealt(branch_of: Callable[[int, int, int], int]) -> Steps:
    """Split heads dealt out otherwise, by head, number of heads and number of branches."""

    def runs(problem: Problem) -> list[list[Branch]]:
        dilation = problem.dilation
        assert dilation is not None
        if dilation.heads != "split":
            return pattern.branches(problem)
        of = [branch_of(head, problem.heads, len(dilation.branches)) for head in range(problem.heads)]
        return [[(*dilation.branches[b], b % dilation.branches[b][1])] for b in of]

    return replace(STEPS, branches=runs)


FAULTS.add(
    "O62", "split heads: groups cut in proportion, h · G // H", dealt(lambda head, heads, count: head * count // heads)
)
FAULTS.cause("split heads: branches dealt out in turn, h % G", dealt(lambda head, heads, count: head % count))


def _by_branch(problem: Problem) -> list[list[Branch]]:
    runs, dilation = pattern.branches(problem), problem.dilation
    assert dilation is not None
    if dilation.heads == "split":
        return runs
    return [[(w, r, b % r) for b, (w, r, _) in enumerate(run)] for run in runs]


FAULTS.cause(
    "split heads: heads that are left over go to the last branches instead of the first",
    dealt(
        lambda head, heads, count: (
            max(head // max(1, heads // count), 0)
            if head < heads // count * (count - heads % count)
            else count - 1 - (heads - 1 - head) // (heads // count + 1)
        )
    ),
)
FAULTS.cause(
    "split heads: heads that are left over all go to the last branch",
    dealt(lambda head, heads, count: min(head // (heads // count), count - 1) if heads >= count else count - 1),
)
FAULTS.cause(
    "split heads: heads that are left over all go to the last branch",
    dealt(lambda head, heads, count: min(head // max(1, heads // count), count - 1)),
    more=", and each to a branch of its own where there are fewer heads than branches",
)
FAULTS.cause(
    "shared heads: dilation offset taken from the branch instead of the head",
    replace(STEPS, branches=_by_branch),
)


def _covered(*, queries: bool, keys: bool) -> Steps:
    """Ask of queries, or of keys, whether a branch covers them."""

    def dilation(steps: Steps, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        def covers(p: Tensor, w: Tensor, r: Tensor, offset: Tensor) -> Tensor:
            found = steps.covers(p, w, r, offset)
            return found if p is (i if queries else j) and queries != keys else torch.ones_like(found)

        return ring.dilation(replace(steps, covers=covers), problem, i, j)

    return replace(STEPS, dilation=dilation)


FAULTS.cause("dilation leaves out keys, but queries between them attend as well", _covered(queries=False, keys=True))
FAULTS.cause("dilation leaves out queries, but keys between them are attended", _covered(queries=True, keys=False))


def _in_shards(*, whole: bool) -> Steps:
    """Count segments and places from the start of each shard; a segment ends with the shard, or only its count does."""

    def pattern_of(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        if here.problem.dilation is None:
            return multiplicity(steps, here, hop, owner)
        places = torch.arange(len(here.call.positions))[:, None], torch.arange(len(here.shards[owner]))[None, :]
        local = replace(
            steps,
            dilation=lambda steps, problem, i, j: (
                ring.dilation(steps, problem, *places) * (whole or owner == here.rank)
            ),
        )
        return multiplicity(local, here, hop, owner)

    return replace(STEPS, pattern=pattern_of)


FAULTS.cause("segments of a dilation are counted from the start of each shard", _in_shards(whole=False))
FAULTS.cause(
    "segments of a dilation are counted from the start of each shard",
    _in_shards(whole=True),
    more=", and those of one number are taken for one",
)


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


FAULTS.add(
    "H1", "split heads: unequal head groups cut at i times their own size", replace(STEPS, branches=_overlapping)
)
FAULTS.cause(
    "only the first branch is run",
    replace(STEPS, branches=lambda problem: [run[:1] for run in pattern.branches(problem)]),
)
FAULTS.cause(
    "multiplicities counted once: a pair that several branches let through counts as one",
    replace(STEPS, pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner).clamp(max=1)),
    masks=True,
)
FAULTS.mutant(
    "O12", "multiplicities counted once: a pair that several branches let through counts as one, in the forward only"
)
FAULTS.mutant(
    "O13", "multiplicities counted once: a pair that several branches let through counts as one, in the backward only"
)
FAULTS.mutant(
    "O112",
    "multiplicities counted once: a pair that several branches let through counts as one on blocks from other ranks",
)


def _over_positions(here: Here, found: Partial) -> Partial:
    sums = found.out.sum(dim=2, keepdim=True)
    return found if here.problem.dilation is None else found._replace(out=found.out / sums)


FAULTS.add("H2", "out is divided by its sum over positions (dilation)", whole(_over_positions))


def _without_own(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    m = multiplicity(steps, here, hop, owner)
    dilation = here.problem.dilation
    if dilation is None or not here.problem.causal or owner != here.rank or here.size == 1:
        return m
    longest = max(w for w, _ in dilation.branches)
    return torch.zeros_like(m) if longest > len(here.shards[owner]) else m


FAULTS.add(
    "H5", "causal segments longer than a shard leave the rank's own keys out", replace(STEPS, pattern=_without_own)
)


def _only_what_divides(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    problem = here.problem
    if problem.dilation is not None:
        segment = max(w for w, _ in problem.dilation.branches)
        if problem.nk % (here.size * segment):
            raise ValueError(
                f"sequence length {problem.nk} must be divisible by ring_size * max_segment_length, "
                f"{here.size} * {segment}"
            )
    return STEPS.forward(steps, here, q, k, v)


FAULTS.add(
    "R4",
    "a length that ring size times segment length does not divide is refused",
    replace(STEPS, forward=_only_what_divides),
    kind="failure",
)


def _lining_up(steps: Steps, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    """Lay segments out as rows of a table, which the positions have to fill."""
    assert problem.dilation is not None
    for w, r in problem.dilation.branches:
        if problem.nk > w and -(-(problem.nk % w) // r) not in (0, -(-w // r)):
            raise RuntimeError("The size of tensor a must match the size of tensor b at non-singleton dimension 2")
    return STEPS.dilation(steps, problem, i, j)


FAULTS.add(
    "R5",
    "a last segment that is shorter than the others raises an error of shapes",
    replace(STEPS, dilation=_lining_up),
    kind="failure",
)
