"""Generic mutants (O) of masks, positions, ranks and hops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringverify.faults import pattern
from ringverify.faults.autograd import counted
from ringverify.faults.fault import Faults, on_blocks
from ringverify.faults.masking import keys_of, wider, window_of
from ringverify.faults.pattern import Branch
from ringverify.faults.ring import STEPS, Steps, Times, multiplicity, together

FAULTS = Faults()

TOO_WIDE = replace(STEPS, causal=lambda problem, i, j: j <= i + problem.diagonal + 1)
TOO_NARROW = replace(STEPS, causal=lambda problem, i, j: j < i + problem.diagonal)

O40 = FAULTS.add(
    "O40",
    "causal mask one key too wide",
    story="j ≤ i + 1: every query sees the next token.",
    ring=TOO_WIDE,
    cause="causal mask shifted by one: every query sees one key too many",
    masks=True,
)
O41 = FAULTS.add(
    "O41",
    "causal mask one key too narrow",
    story="j < i: no query sees its own token.",
    ring=TOO_NARROW,
    cause="causal mask shifted by one: every query sees one key too few",
    masks=True,
)
O42 = FAULTS.add(
    "O42",
    "causal mask one too wide on other ranks' blocks",
    story="Right within the own block. Needs a query whose next token is on another rank.",
    ring=on_blocks(TOO_WIDE, others=True),
)
O43 = FAULTS.add(
    "O43",
    "causal mask one too narrow on other ranks' blocks",
    story="As O42. In contiguous shards the diagonal never meets another rank's block: needs zigzag, striped or cross "
    "lengths.",
    ring=on_blocks(TOO_NARROW, others=True),
)
O44 = FAULTS.add(
    "O44",
    "right end of the window exclusive",
    story="One key too few on the right.",
    ring=wider(0, -1),
    cause="window off by one: one key too few on the right",
    masks=True,
)
O45 = FAULTS.add(
    "O45",
    "right end of the window one too far",
    story="One key too many on the right.",
    ring=wider(0, 1),
    cause="window off by one: one key too many on the right",
    masks=True,
)
O46 = FAULTS.add(
    "O46",
    "window's sides exchanged",
    story="(right, left). Needs sides that differ.",
    ring=window_of(lambda left, right: (right, left)),
    cause="left and right of the window exchanged",
    masks=True,
)


def documents_by(first: int, *, right: bool = True, inside: bool = False) -> Steps:
    """Tell documents by how many offsets lie before a position, those before `first` left out.

    Args:
        first: the first offset that counts.
        right: whether a position's own offset counts.
        inside: whether what lies in no document attends nothing.
    """

    def together(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor((problem.documents or ())[first:], device=i.device)
        of_i, of_j = (torch.bucketize(p, offsets, right=right) for p in (i, j))
        return (of_i == of_j) & ((of_i > 0) & (of_i < len(offsets)) if inside else True)

    return replace(STEPS, documents=together)


O47 = FAULTS.add(
    "O47",
    "documents begin one token late",
    story="The first token of a document belongs to the one before it.",
    ring=documents_by(0, right=False, inside=True),
    cause="documents begin one token late",
    masks=True,
)


O48 = FAULTS.add(
    "O48",
    "what lies in no document attends itself",
    story="Positions before the first offset, and after the last, are documents of their own.",
    ring=documents_by(0),
    cause="what lies in no document attends itself",
    masks=True,
)


def _lengths(more: int) -> Callable[[Problem, torch.Tensor], torch.Tensor]:
    return lambda problem, j: (
        j < (torch.tensor(problem.key_lengths, device=j.device) + more)[:, None, None, None]
    )  # fmt: skip


O49 = FAULTS.add(
    "O49",
    "one padded key attended",
    story="j ≤ length.",
    ring=replace(STEPS, key_lengths=_lengths(1)),
    cause="key_lengths off by one: one padded key is attended",
    masks=True,
)
O50 = FAULTS.add(
    "O50",
    "the last valid key left out",
    story="j < length − 1.",
    ring=replace(STEPS, key_lengths=_lengths(-1)),
    cause="key_lengths off by one: the last valid key is left out",
    masks=True,
)
O51 = FAULTS.add(
    "O51",
    "one key length for the batch",
    story="The first batch element's. Needs two that differ.",
    ring=replace(STEPS, key_lengths=lambda problem, j: pattern.key_lengths(problem, j)[:1]),
    cause="key_lengths of the first batch element used for all",
    masks=True,
)


def branched(change: Callable[[Problem, int, Branch], Branch]) -> Steps:
    """Change the branches of every head."""

    def changed(problem: Problem) -> list[list[Branch]]:
        runs = pattern.branches(problem)
        return [[change(problem, head, branch) for branch in run] for head, run in enumerate(runs)]

    return replace(STEPS, branches=changed)


O52 = FAULTS.add(
    "O52",
    "dilation offset one too large",
    story="(offset + 1) % r. Needs a rate above 1.",
    ring=branched(lambda problem, head, branch: (branch[0], branch[1], (branch[2] + 1) % branch[1])),
    cause="dilation offset one too large",
    also=("backward", "forward"),
)
O53 = FAULTS.add(
    "O53",
    "dilation offset 0 in every head",
    story="Heads do not take turns. Needs a rate above 1 and two heads or branches.",
    ring=branched(lambda problem, head, branch: (branch[0], branch[1], 0)),
    cause="dilation offset ignored: every head starts at 0",
    also=("backward", "forward"),
)
O54 = FAULTS.add(
    "O54",
    "dilation rate one too small",
    story="r − 1.",
    ring=branched(lambda problem, head, branch: (branch[0], max(1, branch[1] - 1), branch[2])),
    cause="dilation rate one too small",
    also=("backward", "forward"),
)
O55 = FAULTS.add(
    "O55",
    "segments of one token more",
    story="w + 1.",
    ring=branched(lambda problem, head, branch: (branch[0] + 1, *branch[1:])),
    cause="segments one token too long",
    also=("backward", "forward"),
)
O56 = FAULTS.add(
    "O56",
    "segments begin one token late",
    story="(p + 1) // w for p // w: the places within a segment are right, its borders are not.",
    ring=replace(STEPS, segment=lambda p, w: (p + 1) // w),
    cause="segments begin one token late",
    also=("backward", "forward"),
)
O57 = FAULTS.add(
    "O57",
    "segments ignored",
    story="Covered positions attend one another across segments.",
    ring=replace(STEPS, segment=lambda p, w: torch.zeros_like(p // w)),
    cause="segments ignored",
    also=("backward", "forward"),
)
O58 = FAULTS.add(
    "O58",
    "place counted from the start of the sequence",
    story="p % r for p % w % r. Needs segments that r does not divide.",
    ring=replace(STEPS, covers=lambda p, w, r, offset: p % r == offset % r),
    cause="place counted from the start of the sequence instead of the segment",
    also=("backward", "forward"),
)


def _offset_where(field: str, value: str, offset: Callable[[int, int, int], int]) -> Steps:
    """Another offset, by head, number of heads and rate, where the dilation is of that kind."""

    def changed(problem: Problem, head: int, branch: Branch) -> Branch:
        w, r, _ = branch
        return (w, r, offset(head, problem.heads, r)) if getattr(problem.dilation, field) == value else branch

    return branched(changed)


O59 = FAULTS.add(
    "O59",
    "split heads: offset from the head",
    story="h % r for b % r. Needs branches of several heads.",
    ring=_offset_where("heads", "split", lambda head, heads, r: head % r),
    cause="split heads: dilation offset taken from the head instead of the branch",
    also=("backward", "forward"),
)


O60 = FAULTS.add(
    "O60",
    "block offset rounded down",
    story="h // floor(H / r) for h // ceil(H / r). Needs a rate that does not divide the heads.",
    ring=_offset_where("head_offset", "block", lambda head, heads, r: head // max(1, heads // r)),
    cause="shared heads: block offset h // floor(H / r) instead of h // ceil(H / r)",
    also=("backward", "forward"),
)


O61 = FAULTS.add(
    "O61",
    "block offset taken for cyclic",
    story="h % r whatever was asked for.",
    ring=_offset_where("heads", "shared", lambda head, heads, r: head % r),
    cause="shared heads: block offset taken for cyclic",
    also=("backward", "forward"),
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


O62 = FAULTS.add(
    "O62",
    "split heads: groups cut in proportion",
    story="h · G // H for larger groups first. The same up to three branches: needs four.",
    ring=dealt(lambda head, heads, count: head * count // heads),
    cause="split heads: groups cut in proportion, h · G // H",
    also=("backward", "forward"),
)
O63 = FAULTS.add(
    "O63",
    "source off by one hop",
    story="The block of hop h is masked as that of hop h + 1. Needs a mask.",
    ring=keys_of(lambda here, hop, owner: owner - 1),
    cause="every block is masked as that of the next hop",
    also=("backward", "forward"),
)
O64 = FAULTS.add(
    "O64",
    "queries placed one rank to the right",
    story="Positions of the next rank's queries. Needs a mask.",
    ring=replace(
        STEPS,
        queries=lambda here: (
            here.call.positions
            if here.replicated
            else (here.call.positions + max(1, len(here.call.positions))).clamp(max=max(0, here.problem.nq - 1))
        ),
    ),
    cause="queries are placed one rank to the right",
    also=("backward", "forward"),
)

# -- blocks that are left out or counted twice -------------------------------------------------------------------------

BLOCKS: dict[str, Times] = {
    "each rank attends its own block only: keys and values never rotate": lambda here, hop, owner: int(hop == 0),
    "the block of the last hop is never merged": lambda here, hop, owner: int(not 0 < hop == here.size - 1),
    "every rank leaves its own block out": lambda here, hop, owner: int(hop > 0 or here.size == 1 or here.replicated),
    "every rank's own block is counted twice": lambda here, hop, owner: 2 if hop == 0 and here.size > 1 else 1,
    "the block of the last hop is counted twice": lambda here, hop, owner: 2 if 0 < hop == here.size - 1 else 1,
    "the block of hop 1 is never merged": lambda here, hop, owner: int(hop != 1),
    "the block of hop 2 is never merged": lambda here, hop, owner: int(hop != 2),
    "the block of hop 1 is counted twice": lambda here, hop, owner: 2 if hop == 1 else 1,
    "the block of hop 2 is counted twice": lambda here, hop, owner: 2 if hop == 2 else 1,
    "the block of rank 0 is counted twice on every other rank": lambda here, hop, owner: (
        2 if owner == 0 and here.rank else 1
    ),
    "the block of rank 0 is never merged on other ranks": lambda here, hop, owner: int(owner > 0 or here.rank == 0),
    "the block of the last rank is never merged on other ranks": lambda here, hop, owner: int(
        owner < here.size - 1 or here.rank == owner
    ),
}


def in_pattern(times: Times) -> Steps:
    """Multiply the multiplicities of blocks, in forward and backward alike."""
    return replace(
        STEPS,
        pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner) * times(here, hop, owner),
    )


MISCOUNTED: dict[str, Steps] = {says: in_pattern(times) for says, times in BLOCKS.items()}


O65 = FAULTS.add(
    "O65",
    "last hop left out",
    story="range(world − 1): the block of the right neighbour is never attended. The backward is complete.",
    ring=MISCOUNTED["the block of the last hop is never merged"],
    when="forward",
)
O66 = FAULTS.add(
    "O66",
    "own block counted twice",
    story="It is merged before the loop and in its first turn.",
    ring=MISCOUNTED["every rank's own block is counted twice"],
    when="forward",
)
O67 = FAULTS.add(
    "O67",
    "own block left out",
    story="The loop starts at hop 1.",
    ring=MISCOUNTED["every rank leaves its own block out"],
    when="forward",
)
O68 = FAULTS.add(
    "O68",
    "last block merged twice",
    story="Once in the loop and once behind it. Needs two ranks.",
    ring=MISCOUNTED["the block of the last hop is counted twice"],
    when="forward",
)
O69 = FAULTS.add(
    "O69",
    "block of rank 0 counted twice",
    story="By every rank but its owner.",
    ring=MISCOUNTED["the block of rank 0 is counted twice on every other rank"],
    when="forward",
)


O70 = FAULTS.add(
    "O70",
    "the owner's own part of dk and dv lost",
    story="The second rank starts the sum anew. Needs two ranks.",
    ring=counted("lack the rank's own part", "dk", "dv"),
)


O71 = FAULTS.add(
    "O71",
    "one rank's part of dk and dv counted twice",
    story="That of the second rank on the way. Needs two ranks.",
    ring=counted("have the part of hop 1 twice", "dk", "dv"),
)
O72 = FAULTS.add(
    "O72",
    "dk and dv not summed over ranks",
    story="What arrives is not added to: each rank returns the part of the last one on the way.",
    ring=counted("are those of the last hop alone: nothing is added up", "dk", "dv"),
)


O73 = FAULTS.add(
    "O73",
    "dk and dv one row off",
    story="Rows of the gradient are shifted by one.",
    ring=replace(STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, dk.roll(1, dims=1), dv.roll(1, dims=1))),
    cause="the rows of dk and dv are shifted by one",
)
O74 = FAULTS.add(
    "O74",
    "replicated queries: own partial merged last",
    story="Merged as it comes, without the first rank's: range(1, world).",
    ring=replace(STEPS, together=lambda steps, here, own: together(steps, here, own, slice(1, None))),
    cause="replicated queries: the partial result of rank 0 is left out",
)
