"""F: the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch

from ringverify.faults import arithmetic
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial, like
from ringverify.faults.ring import STEPS, Steps, gradients, multiplicity

FAULTS = Faults()

Parts = Callable[[Here, int, int], float]
"""How often the part of a hop counts, by rank, hop and owner of the block."""

PARTS: dict[str, Parts] = {
    "come from the rank's own queries only": lambda here, hop, owner: hop == 0,
    "lack the rank's own part": lambda here, hop, owner: hop > 0 or here.size == 1 or here.replicated,
    "lack the part of the last hop": lambda here, hop, owner: not 0 < hop == here.size - 1,
    "lack the part of hop 1": lambda here, hop, owner: hop != 1,
    "lack the part of hop 2": lambda here, hop, owner: hop != 2,
    "have the part of hop 1 twice": lambda here, hop, owner: 2 if hop == 1 else 1,
    "have the part of hop 2 twice": lambda here, hop, owner: 2 if hop == 2 else 1,
    "have the part of the last hop twice": lambda here, hop, owner: 2 if 0 < hop == here.size - 1 else 1,
    "have the rank's own part twice": lambda here, hop, owner: 2 if hop == 0 and here.size > 1 else 1,
    "are those of the last hop alone: nothing is added up": lambda here, hop, owner: (
        hop == here.size - 1 or here.replicated
    ),
    "lack the parts of rank 0": lambda here, hop, owner: here.rank > 0 or owner == 0,
}


@functools.cache
def counted(says: str, *names: Literal["dq", "dk", "dv"]) -> Steps:
    """Count what each hop adds to the named gradients as often as `PARTS[says]` says."""
    parts = PARTS[says]

    def times(here: Here, hop: int, owner: int, name: Literal["dq", "dk", "dv"]) -> float:
        return float(parts(here, hop, owner)) if name in names else 1

    return replace(
        STEPS,
        times_in_dq=lambda here, hop, owner: times(here, hop, owner, "dq"),
        times_in_part=lambda here, hop, owner: (times(here, hop, owner, "dk"), times(here, hop, owner, "dv")),
    )


F1a = FAULTS.add(
    "F1a",
    "dq from the first block only",
    story="An iterator made outside the loop over blocks is exhausted after the first. Needs two blocks.",
    source="lucidrains/ring-attention-pytorch a7dd365",
    ring=counted("come from the rank's own queries only", "dq"),
)
F1b = FAULTS.add(
    "F1b",
    "dk and dv from the own queries only",
    story="As F1a, for keys and values: later hops add nothing. So it is, too, where received keys are new "
    "tensors without history for autograd.",
    source="lucidrains/ring-attention-pytorch a7dd365",
    ring=counted("come from the rank's own queries only", "dk", "dv"),
)


def blocks(change: Callable[[Here, int, int, Block], Block]) -> Steps:
    """What is worked on in place of the block of a hop."""

    def visit(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
        for hop, owner, arrived in STEPS.visit(steps, here, block):
            if hop == 0:
                here.notes["own block"] = arrived
            yield hop, owner, change(here, hop, owner, arrived)

    return replace(STEPS, visit=visit)


F2 = FAULTS.add(
    "F2",
    "backward uses the first hop's keys and values",
    story="Saved once; those that came round never reach the backward. Needs two ranks.",
    source="huggingface/diffusers#14265",
    ring=blocks(lambda here, hop, owner, block: like(here.notes["own block"], here, owner)),
    when="backward",
    also=("always",),
    cause="the rank's own keys and values are used at every hop",
)


def _turned(here: Here, hop: int, owner: int, block: Block) -> Block:
    return Block(*(x.transpose(1, 2).contiguous() for x in block)) if block.k.size(1) == block.k.size(2) else block


F3 = FAULTS.add(
    "F3",
    "keys and values transposed twice in backward",
    story="Sequence and heads change places; an error unless they are equal, and silent then.",
    source="huggingface/diffusers f5e56e6720 (#14338)",
    ring=blocks(_turned),
    when="backward",
    also=("always",),
    cause="keys and values are transposed: tokens for heads",
)


def own(*, out: bool, lse: bool, dlse: bool = True) -> Steps:
    """The block's own out and lse in place of the merged ones, in the backward."""

    def of_block(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[torch.Tensor, ...], block: Block
    ) -> tuple[torch.Tensor, Block]:
        q, dout, delta, merged = rows
        own = Partial(*STEPS.attend(steps, here, hop, owner, q, block))
        if out:
            delta = steps.delta(dout, own.out, here.notes["dlse"] if dlse else torch.zeros_like(own.lse))
        return gradients(steps, here, hop, owner, (q, dout, delta, own.lse if lse else merged), block)

    def backward(
        steps: Steps, here: Here, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, dlse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        here.notes["dlse"] = dlse.to(here.wide)
        return STEPS.backward(steps, here, saved, dout, dlse)

    return replace(STEPS, gradients=of_block, backward=backward)


F4a = FAULTS.add(
    "F4a",
    "a block's own lse in its backward",
    story="P is normalised within the block instead of over all. Needs two blocks.",
    source="NATTEN#274, #299",
    ring=own(out=False, lse=True),
    cause="gradients use the block's own lse instead of the merged one",
)


F4b = FAULTS.add(
    "F4b",
    "a block's own out and lse in its backward",
    story="Every block is differentiated as if it were alone; merge weights are constants. Needs two blocks.",
    source="NATTEN#274, #299",
    ring=own(out=True, lse=True, dlse=False),
    cause="gradients use the block's own out and lse, and ignore the cotangent of lse",
)


def _full_lse_for_half(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[torch.Tensor, ...], block: Block
) -> tuple[torch.Tensor, Block]:
    q, dout, delta, lse = rows
    if here.call.sharding == "zigzag" and here.problem.causal and owner > here.rank and q.size(2) > 1:
        half = (q.size(2) + 1) // 2
        # The block is attended by the second half of the queries; they get the log-sum-exps of the first.
        lse = torch.cat([lse[:, :, :half], lse[:, :, : q.size(2) - half]], dim=2)
    return gradients(steps, here, hop, owner, (q, dout, delta, lse), block)


F6 = FAULTS.add(
    "F6",
    "zigzag's half block gets the full lse",
    story="Rows of the second half are paired with log-sum-exps of the first. Needs zigzag, causality and a backward.",
    source="TransformerEngine 17ee10980, 74eb7c33c",
    ring=replace(STEPS, gradients=_full_lse_for_half),
    cause="the half block of zigzag gets the log-sum-exps of the other half of the queries",
)


def multiplied(which: tuple[bool, bool, bool], by: Callable[[Here], float]) -> Steps:
    """Some of dq, dk and dv multiplied by a number."""
    return replace(
        STEPS,
        returned_gradients=lambda here, *found: tuple(
            by(here) * x if chosen else x for x, chosen in zip(found, which, strict=True)
        ),
    )


F7a = FAULTS.add(
    "F7a",
    "replicated queries: dq not summed over ranks",
    story="The adjoint of a replicated input is a sum; every rank returns its own block's part.",
    source="lucidrains/ring-attention-pytorch 4fc040e; VeOmni#681",
    ring=replace(STEPS, sum_queries=lambda steps, here, dq: dq),
    cause="replicated queries: dq is not summed over ranks",
)
F7b = FAULTS.add(
    "F7b",
    "replicated queries: dq averaged over ranks",
    story="A factor of the world's size: mean where the sum belongs.",
    source="Megatron-LM#1635 (r); VeOmni#1120 (r)",
    ring=replace(STEPS, add_up=lambda here, rows: STEPS.add_up(here, rows) / here.size),
)
F7c = FAULTS.add(
    "F7c",
    "replicated queries: the loss counts once a rank",
    story="dk and dv are summed over ranks' equal cotangents: the world's size times too large.",
    source="lucidrains/ring-attention-pytorch 4fc040e; VeOmni#681",
    ring=multiplied((False, True, True), lambda here: here.size if here.replicated else 1),
)


def _uninitialised(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[torch.Tensor, ...], block: Block
) -> tuple[torch.Tensor, Block]:
    dq, part = gradients(steps, here, hop, owner, rows, block)
    if not bool(multiplicity(steps, here, hop, owner).any()):
        part = Block(*(torch.empty_like(x) for x in part))
    return dq, part


F9a = FAULTS.add(
    "F9a",
    "gradient buffer not zeroed",
    story="The part of a block that nobody attends is whatever was in memory. Often zero, until it is not.",
    source="zhuzilin/ring-flash-attention 22f0e1d",
    kind="state",
    ring=replace(STEPS, gradients=_uninitialised),
)


def _between_groups(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Sum over the query heads of a key head into a buffer that still holds the previous key head."""
    summed = arithmetic.per_key_head(here, x)
    return summed.cumsum(dim=1) if here.problem.group_size > 1 else summed


F9b = FAULTS.add(
    "F9b",
    "gradient buffer kept from one head group to the next",
    story="The buffer of dk and dv is not cleared between key heads. Needs grouped queries and two key heads.",
    source="zhuzilin/ring-flash-attention 22f0e1d",
    ring=replace(STEPS, per_key_head=_between_groups),
    cause="grouped heads: dk and dv of a key head hold those of the key heads before it too",
)


def _into_the_inputs(k: torch.Tensor, v: torch.Tensor) -> Block:
    """Send the inputs themselves where they are contiguous, in place of a copy."""
    return Block(*(x.detach().contiguous() for x in (k, v)))


def _swapping(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    """Receive into two buffers in turn, the first of which is the inputs: the second hop overwrites them."""
    spare: Block | None = None
    hops = 1 if here.replicated else here.size
    for hop in range(hops):
        posted = None
        if hop + 1 < hops:
            to, source = (steps.peer(here, rank) for rank in (steps.right(here), steps.left(here)))
            shapes = here.block_shapes(steps.owner(here, hop + 1))
            fits = spare is not None and all(x.shape == torch.Size(s) for x, s in zip(spare, shapes, strict=True))
            arriving = spare if fits and spare is not None else steps.buffers(here, block, steps.owner(here, hop + 1))
            posted = steps.post(here, to, source, steps.group(here), block, arriving)
        yield hop, steps.owner(here, hop), block
        if posted is not None:
            spare, block = block, steps.arrive(posted)


F12a = FAULTS.add(
    "F12a",
    "keys and values are the ring's buffers",
    story="What comes round is received into the caller's own tensors, and backward starts from strangers' keys. Needs "
    "three ranks, dense inputs, and a look at them afterwards.",
    source="Burst-Attention cf429a6, 7d81ca9",
    kind="state",
    ring=replace(STEPS, outgoing=_into_the_inputs, visit=_swapping),
)


def _remembering(steps: Steps, here: Here, hop: int, owner: int, q: torch.Tensor, block: Block) -> object:
    here.notes["last"] = block
    return STEPS.attend(steps, here, hop, owner, q, block)


def _from_the_last(
    steps: Steps, here: Here, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    q, _, _, out, lse = saved
    k, v = like(here.notes["last"], here, here.rank)
    return STEPS.backward(steps, here, (q, k, v, out, lse), dout, dlse)


F12b = FAULTS.add(
    "F12b",
    "backward starts from the last block received",
    story="The saved tensors are the ring's buffers, which the forward went on to overwrite. Needs two ranks.",
    source="Burst-Attention cf429a6",
    ring=replace(STEPS, attend=_remembering, backward=_from_the_last),
    cause="the ring starts from the last block received instead of the rank's own",
)


R9 = FAULTS.add(
    "R9",
    "softmax treated as constant in backward",
    story="In-place updates of the online softmax break the graph; its statistics are detached to silence the error, "
    "and dq and dk lose their correction term. dv is right.",
    source="report R9",
    ring=replace(STEPS, ds=lambda p, dp, delta: p * dp),
    cause="the softmax is taken for constant: ds = p · dp, its correction delta is missing",
)
