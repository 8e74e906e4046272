"""Faults that no report tells of, written after the suite was, to see whether it catches what it was not made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringverify.faults import arithmetic, pattern, ring
from ringverify.faults.arithmetic import highest
from ringverify.faults.fault import Faults, on_blocks
from ringverify.faults.masking import COUNTED_ONCE, LEFT_END_EXCLUSIVE
from ringverify.faults.operators import shifted
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps
from ringverify.faults.strides import given
from ringverify.faults.varlen import documents_of

Tensor = torch.Tensor
FAULTS = Faults()


def _mirrored_piece_shifted(here: Here) -> Tensor:
    positions = here.call.positions
    uneven = here.problem.nq % (2 * here.size)
    if here.call.sharding != "zigzag" or not uneven or len(positions) < 2:
        return positions
    second = torch.arange(len(positions), device=positions.device) >= (len(positions) + 1) // 2
    return torch.where(second, positions - 1, positions)


O100 = FAULTS.add(
    "O100",
    "zigzag's second piece off by one where pieces are uneven",
    story="Positions of the mirrored piece are counted as if all pieces were as long as the first. Needs zigzag, a "
    "mask and a length that twice the ranks do not divide.",
    ring=replace(STEPS, queries=_mirrored_piece_shifted),
)


O102 = FAULTS.add(
    "O102",
    "cotangent of lse dropped under a causal mask",
    story="The causal kernel has no argument for it. Needs a gradient through lse and causality.",
    ring=given("dlse", lambda here, x: torch.zeros_like(x) if here.problem.causal else x),
)
O103 = FAULTS.add(
    "O103",
    "softcap's slope taken at the capped score",
    story="1 − tanh²(s / c) of s that went through the cap already: close for small scores.",
    ring=replace(STEPS, cap_slope=lambda s, softcap: 1 - torch.tanh(s / softcap) ** 2),
    cause="derivative of the softcap is taken of the capped score",
)


O104 = FAULTS.add(
    "O104",
    "left end of the window exclusive across shards",
    story="Inclusive within a shard, exclusive on blocks of other ranks. Needs a window that ends in another shard.",
    ring=on_blocks(LEFT_END_EXCLUSIVE, others=True),
)


def _scaled_twice(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    dq, part = ring.gradients(steps, here, hop, owner, rows, block)
    twice = steps.scale(here) if here.problem.dv != here.problem.head_dim else 1.0
    return dq, Block(part.k * twice, part.v)


O105 = FAULTS.add(
    "O105",
    "dk scaled twice where value_dim differs",
    story="The path for unequal widths scales q before, and dk after. Needs value_dim other than head_dim.",
    ring=replace(STEPS, gradients=_scaled_twice),
)
O106 = FAULTS.add(
    "O106",
    "lse saved for the backward in bfloat16",
    story="What is returned is float32, what the backward has is rounded. Needs gradients in bfloat16.",
    kind="precision",
    ring=replace(
        STEPS,
        kept=lambda here, saved: (
            (*saved[:-1], saved[-1].to(here.dtype).to(here.wide)) if here.dtype is torch.bfloat16 else saved
        ),
    ),
)


O107 = FAULTS.add(
    "O107",
    "document offsets counted from the first",
    story="cu − cu[0] is right for lengths, not for places. Needs a first offset above 0.",
    ring=documents_of(lambda problem, offsets: tuple(one - offsets[0] for one in offsets)),
)


def _equals_skipped(first: Partial, second: Partial) -> Partial:
    whole, same = STEPS.merge(first, second), first.lse == second.lse
    return Partial(torch.where(same[..., None], first.out, whole.out), torch.where(same, first.lse, whole.lse))


O108 = FAULTS.add(
    "O108",
    "parts of equal mass are not merged",
    story="Equal log-sum-exps are taken for the same part seen twice. Needs blocks of exactly equal mass, as queries "
    "of zeros give.",
    ring=replace(STEPS, merge=_equals_skipped),
)
O109 = FAULTS.add(
    "O109",
    "causal mask one short where keys outnumber queries",
    story="nk − nq − 1 for nk − nq. Needs causal cross lengths, more keys than queries.",
    ring=replace(STEPS, causal=lambda problem, i, j: j <= i + problem.diagonal - (problem.nk > problem.nq)),
)
O110 = FAULTS.add(
    "O110",
    "a batch element without keys has one",
    story="max(length, 1) to save a kernel from an empty row. Needs a key length of 0.",
    ring=replace(
        STEPS,
        key_lengths=lambda problem, j: pattern.key_lengths(
            problem.replace(key_lengths=tuple(min(max(one, 1), problem.nk) for one in problem.key_lengths or ())), j
        ),
    ),
)


def _no_short_segment(steps: Steps, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    def covers(p: Tensor, w: Tensor, r: Tensor, offset: Tensor) -> Tensor:
        whole = torch.div(torch.full_like(w, problem.nq), w, rounding_mode="floor") * w
        return pattern.covers(p, w, r, offset) & ((p < whole) | (whole == 0))

    return ring.dilation(replace(steps, covers=covers), problem, i, j)


O111 = FAULTS.add(
    "O111",
    "the last, short segment left out",
    story="Segments are counted by whole division; what is left over attends nothing, unless it is all there is.",
    ring=replace(STEPS, dilation=_no_short_segment),
)


O112 = FAULTS.add(
    "O112",
    "overlapping branches count once on other ranks' blocks",
    story="Sums at home, a union abroad. Needs shared branches that overlap across a shard's edge.",
    ring=on_blocks(COUNTED_ONCE, others=True),
)
O113 = FAULTS.add(
    "O113",
    "dq of the last hop lost on more than four ranks",
    story="A fixed number of slots for partial gradients. Needs five ranks.",
    ring=replace(
        STEPS,
        add_dq=lambda here, hop, total, part: total if hop == here.size - 1 and here.size > 4 else total + part,
    ),
)


O114 = FAULTS.add(
    "O114",
    "the running maximum begins at 0",
    story="Where all scores of a row are far below 0 its weights underflow, and the row is empty. Needs scores "
    "below −88.",
    ring=shifted(lambda s, attended: highest(s, attended).clamp(min=0.0)),
)


def _empty_repeats(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    before: tuple[int, Block] | None = None
    for hop, owner, arrived in ring.visit(steps, here, block):
        if before is not None and not arrived.k.size(1):
            yield hop, *before
        else:
            yield hop, owner, arrived
        before = owner, arrived


O115 = FAULTS.add(
    "O115",
    "an empty shard leaves the block before it in the buffer",
    story="Nothing is received from a rank without tokens, and what was there is attended once more. Needs an empty "
    "shard that is not the last to be visited.",
    ring=replace(STEPS, forward=lambda steps, here, q, k, v: STEPS.forward(
        replace(steps, visit=_empty_repeats), here, q, k, v
    )),
)  # fmt: skip
O116 = FAULTS.add(
    "O116",
    "scale in float32 for float64 inputs",
    story="A kernel's argument is a float: eight digits of sixteen. Needs float64 and a scale that is no power of two.",
    ring=replace(STEPS, scale=lambda here: float(torch.tensor(here.problem.scale_value, dtype=torch.float32))),
)
O117 = FAULTS.add(
    "O117",
    "replicated queries: cotangent of lse shared out",
    story="Each rank takes its part of it, though each rank's keys have it whole. Needs a gradient through lse.",
    ring=given("dlse", lambda here, x: x / here.size if here.replicated else x),
)


def _by_places(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    if here.call.sharding != "striped":
        return ring.multiplicity(steps, here, hop, owner)

    def causal(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        return (j // here.size < i // here.size) | ((j // here.size == i // here.size) & (owner <= here.rank))

    return ring.multiplicity(replace(steps, causal=causal), here, hop, owner)


O118 = FAULTS.add(
    "O118",
    "striped: causal by places in the shard",
    story="Places in two shards are compared, and ranks where they are equal: right where queries and keys are "
    "as many.",
    ring=replace(STEPS, pattern=_by_places),
)


def _lowest(s: Tensor, attended: Tensor) -> Tensor:
    low = s.masked_fill(~attended, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(low == torch.inf, 0.0, low)


def _attend_by_products(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    lowest = replace(steps, partial=lambda s, m, v: arithmetic.partial(s, m, v, _lowest))
    return ring.attend(lowest if steps.scale(here) < 0 else steps, here, hop, owner, q, block)


O119 = FAULTS.add(
    "O119",
    "the maximum is that of q·k, before a negative scale",
    story="The largest product is the smallest score then, and the exponentials overflow. Needs a negative scale and "
    "scores that lie far apart.",
    ring=replace(STEPS, attend=_attend_by_products),
)


# -- two conditions at once --------------------------------------------------------------------------------------------


def _window_or_documents(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    return pattern.window(problem, i, j) | torch.full_like(i - j, problem.documents is not None, dtype=torch.bool)


O120 = FAULTS.add(
    "O120",
    "window ignored where there are documents",
    story="An else too many. Needs both at once.",
    ring=replace(STEPS, window=_window_or_documents),
)


def _unpadded_zigzag(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    def all_there(problem: Problem, j: Tensor) -> Tensor:
        everything = torch.ones((problem.batch, 1, 1, j.size(1)), dtype=torch.bool, device=j.device)
        return everything if problem.causal else pattern.key_lengths(problem, j)

    chosen = replace(steps, key_lengths=all_there) if here.call.sharding == "zigzag" else steps
    return ring.multiplicity(chosen, here, hop, owner)


O121 = FAULTS.add(
    "O121",
    "key lengths ignored by the causal zigzag path",
    story="The path for causal zigzag has no argument for padding. Needs all three.",
    ring=replace(STEPS, pattern=_unpadded_zigzag),
)


def _sum_in_input_dtype(here: Here, x: Tensor) -> Tensor:
    b, _, t, d = x.shape
    grouped = x.view(b, here.problem.hk, here.problem.group_size, t, d)
    return grouped.to(here.dtype).sum(dim=2).to(here.wide) if here.problem.group_size > 1 else grouped[:, :, 0]


O122 = FAULTS.add(
    "O122",
    "gradients of grouped heads summed in the input dtype",
    story="Each query head's dk and dv are rounded before they are added up. Needs grouped queries in 16 bits.",
    kind="precision",
    ring=replace(STEPS, per_key_head=_sum_in_input_dtype),
)


def _uncapped_abroad(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    if here.problem.causal and owner != here.rank:
        steps = replace(steps, cap_slope=lambda s, softcap: torch.ones_like(s))
    return ring.gradients(steps, here, hop, owner, rows, block)


O123 = FAULTS.add(
    "O123",
    "softcap's slope forgotten on causal blocks of other ranks",
    story="One of four branches of a backward. Needs softcap, causality and two ranks.",
    ring=replace(STEPS, gradients=_uncapped_abroad),
)
O124 = FAULTS.add(
    "O124",
    "seven ranks: the last hop's block taken for the next one's",
    story="A table of sources with a wrong entry for one world size.",
    ring=replace(
        STEPS,
        keys=lambda here, hop, owner: here.shards[
            (owner - 1) % here.size
            if here.size == 7 and hop == 6 and len(here.shards[owner]) == len(here.shards[owner - 1])
            else owner
        ],
    ),
)
