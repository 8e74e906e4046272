"""Faults of the reports that this project started from (R).

R3, R4 and R5 are with the dilation, R9 with the backward (R10 is F1b), R12 with communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringverify.faults import arithmetic
from ringverify.faults.communication import TRAVELLING
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, attend

SHARDED = dataclasses.replace(TRAVELLING, memory="sharded")
"""Claims besides that a rank's memory does not grow with the world."""

FAULTS = Faults()


def _full_size(steps: Steps, here: Here, hop: int, owner: int, q: torch.Tensor, block: Block) -> object:
    """Allocate room for all rows of all ranks at every hop and keep it to the end."""
    problem = here.problem
    room = q.new_zeros((problem.batch, problem.heads, problem.nq, problem.dv + 1))
    here.notes.setdefault("rooms", []).append(room)
    return attend(steps, here, hop, owner, q, block)


R1 = FAULTS.add(
    "R1",
    "a full-size output for every bucket",
    story="Every hop allocates out and lse for the whole sequence. Values are right; memory grows as n² over the ring.",
    source="report R1",
    kind="memory",
    ring=replace(STEPS, attend=_full_size),
    claims=SHARDED,
)


def _in_half(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return arithmetic.scores(q.half(), k.half(), scale).to(q.dtype)


def _half_scores(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return STEPS.capped(replace(steps, scores=_in_half) if here.dtype is torch.float16 else steps, here, q, k)


R2a = FAULTS.add(
    "R2a",
    "scores in float16",
    story="For float16 inputs a score past 65504 is inf. Needs large queries and keys in half precision.",
    source="report R2",
    ring=replace(STEPS, capped=_half_scores),
    cause="scores are held in float16: past 65504 they are infinite",
)


def _sentinel(here: Here, q: torch.Tensor, dim: int) -> object:
    torch.full_like(q.to(here.dtype), -1e10)
    return STEPS.nothing(here, q, dim)


R2b = FAULTS.add(
    "R2b",
    "a sentinel that float16 does not hold",
    story='"value cannot be converted to type at::Half without overflow": −1e10 in half. Needs float16 and an empty '
    "block.",
    source="report R2",
    kind="failure",
    ring=replace(STEPS, nothing=_sentinel),
)


def _stays(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    return part


R6a = FAULTS.add(
    "R6a",
    "keys and values never rotate",
    story="The query is divided and each rank attends its own block alone. Any world of two.",
    source="report R6",
    ring=replace(STEPS, hops=lambda here: 1, travel=_stays),
)
R6b = FAULTS.add(
    "R6b",
    "replicated queries: partials never merged",
    story="As R6a where all ranks hold all queries: each returns the attention to its own keys.",
    source="report R6",
    ring=replace(STEPS, together=lambda steps, here, whole: whole),
    cause="replicated queries: partial results are never merged, each rank returns its own block's",
)


def _all_at_once(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    yield from list(STEPS.visit(steps, here, block))


R7 = FAULTS.add(
    "R7",
    "every rank ends up with all keys",
    story="Blocks that came round are kept: memory a rank does not fall with the world's size. Values are right.",
    source="report R7",
    kind="memory",
    ring=replace(STEPS, visit=_all_at_once),
    claims=SHARDED,
)


def _wants_contiguous(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    for x in (q, k, v):
        if not x.is_contiguous():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return STEPS.forward(steps, here, q, k, v)


R8 = FAULTS.add(
    "R8",
    "views crash",
    story="index_select on a view that is not contiguous. Needs such inputs.",
    source="report R8",
    kind="failure",
    ring=replace(STEPS, forward=_wants_contiguous),
)


def all_blocks(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    """Gather the blocks of all ranks with one collective, padded to the longest."""
    if here.replicated or here.size == 1:
        yield from STEPS.visit(steps, here, block)
        return
    longest = max(len(shard) for shard in here.shards)
    padded = [F.pad(x, (0, 0, 0, 0, 0, longest - x.size(1))) for x in block]
    everyone = [[torch.empty_like(x) for _ in here.shards] for x in padded]
    for all_of_it, x in zip(everyone, padded, strict=True):
        dist.all_gather(all_of_it, x, group=here.group)
    for hop in range(here.size):
        owner = steps.owner(here, hop)
        count = len(here.shards[owner])
        yield hop, owner, Block(*(all_of_it[owner][:, :count] for all_of_it in everyone))


R11 = FAULTS.add(
    "R11",
    "an all-gather where a ring is claimed",
    story="Collectives on the critical path of what says that only neighbours exchange. Values are right.",
    source="report R11",
    kind="traffic",
    ring=replace(STEPS, visit=all_blocks),
    claims=TRAVELLING,
)


def _sigmoid(first: Partial, second: Partial) -> Partial:
    share = torch.sigmoid(second.lse - first.lse)[..., None]
    return Partial(first.out - share * (first.out - second.out), first.lse - F.logsigmoid(first.lse - second.lse))


R13 = FAULTS.add(
    "R13",
    "the sigmoid merge of two empty parts",
    story="−inf − (−inf) in sigmoid(bl − l) is NaN: a row that the first two visited blocks do not attend.",
    source="report R13",
    ring=replace(STEPS, merge=_sigmoid),
    cause="the merge of two empty parts is NaN: -inf - (-inf)",
)


def _keeps_scores(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    s = STEPS.capped(steps, here, q, k)
    here.notes.setdefault("scores", []).append(s.expand(4, *s.shape).contiguous())
    return s


R14 = FAULTS.add(
    "R14",
    "scores of every block kept",
    story="Copies of every score matrix live until the backward ends: on one device many times what attention takes.",
    source="report R14",
    kind="memory",
    ring=replace(STEPS, capped=_keeps_scores),
    claims=SHARDED,
)
