"""Correct implementations that look wrong: other directions, orders, tiles, messages and layouts."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringref.sharding import SHARDINGS
from ringverify.faults.communication import all_blocks, to_the_owner
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import EVERYTHING, STEPS, Steps, attend, gradients, ring_of
from ringverify.faults.scores import forgetting, never
from ringverify.faults.wire import Posted
from ringverify.implementation import AttentionCall
from ringverify.lab import gathered
from ringverify.lab.variant import Variants

ROWS = Variants()
Tensor = torch.Tensor

reversed_ring = ROWS.add(
    "reversed_ring",
    "Blocks travel to the left; whose they are is counted the other way too.",
    replace(
        STEPS,
        owner=lambda here, hop: (here.rank + hop) % here.size,
        right=lambda here: (here.rank - 1) % here.size,
        left=lambda here: (here.rank + 1) % here.size,
    ),
)


def _scattered(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Keep the parts of dk and dv until the last hop, and sum them by one reduce-scatter."""
    parts = here.notes.setdefault("parts", {})
    parts[owner] = part
    if here.size == 1 or here.replicated or hop + 1 < here.size:
        return part
    sizes = [sum(x.numel() for x in parts[rank]) for rank in range(here.size)]
    flat = [torch.cat([x.reshape(-1) for x in parts[rank]]) for rank in range(here.size)]
    own = parts[here.rank]
    here.notes.pop("parts")
    if not max(sizes):
        return Block(*own)
    total = own.k.new_empty(max(sizes))
    dist.reduce_scatter(total, [F.pad(x, (0, max(sizes) - x.numel())) for x in flat], group=here.group)
    count = own.k.numel()
    return Block(total[:count].view_as(own.k), total[count : count + own.v.numel()].view_as(own.v))


allgather = ROWS.add(
    "allgather",
    "All blocks by one all-gather, their gradients home by one reduce-scatter: no neighbours at all.",
    replace(STEPS, visit=all_blocks, travel=_scattered),
)
new_first = ROWS.add(
    "new_first",
    "Partials are merged in the opposite order: newest on the left.",
    replace(
        STEPS,
        accumulate=lambda steps, here, hop, running, new: new if running is None else steps.merge(new, running),
        add_part=lambda hop, carried, part: Block(part.k + carried.k, part.v + carried.v),
    ),
)


def _pairwise(steps: Steps, here: Here, hop: int, running: object, new: Partial) -> object:
    partials = [*here.notes.pop("partials", []), new]
    if hop + 1 < (1 if here.replicated else here.size):
        here.notes["partials"] = partials
        return new
    while len(partials) > 1:
        merged = [steps.merge(a, b) for a, b in zip(partials[::2], partials[1::2], strict=False)]
        partials = merged + partials[len(merged) * 2 :]
    return partials[0]


tree_merge = ROWS.add(
    "tree_merge",
    "Partials are kept and merged two by two, so that rounding grows with the logarithm of the world.",
    replace(STEPS, accumulate=_pairwise),
)


def _flipped(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    turned = replace(steps, pattern=lambda *_: steps.pattern(steps, here, hop, owner).flip(-1))
    return attend(turned, here, hop, owner, q, Block(*(x.flip(1) for x in block)))


keys_flipped = ROWS.add(
    "keys_flipped", "Every block is summed from its last key to its first.", replace(STEPS, attend=_flipped)
)


tiles_of_three = ROWS.add("tiles_of_three", "Blocks in tiles of three keys, merged like blocks.", forgetting(3, never))
direct_gradients = ROWS.add(
    "direct_gradients",
    "A part of dk and dv goes straight to the owner of its block instead of travelling with it.",
    replace(
        STEPS,
        travel=lambda steps, here, hop, owner, carried, part: (
            part if here.replicated else to_the_owner(steps, here, hop, owner, carried, part)
        ),
    ),
)


def _in_turns(here: Here, to: int, source: int, group: Any, leaving: Block, arriving: Block) -> Posted:
    """Even ranks send first, odd ranks receive first; in an odd ring the last rank's send waits for the first's."""

    def send() -> None:
        for x in leaving:
            if x.numel():
                dist.send(x, to, group=group)

    def receive() -> None:
        for x in arriving:
            if x.numel():
                dist.recv(x, source, group=group)

    for turn in (send, receive) if here.rank % 2 == 0 else (receive, send):
        turn()
    return Posted([], arriving)


blocking = ROWS.add(
    "blocking", "Blocking send and recv in an order that cannot deadlock.", replace(STEPS, post=_in_turns)
)


def _one_message(here: Here, to: int, source: int, group: Any, leaving: Block, arriving: Block) -> Posted:
    flat = torch.cat([x.reshape(-1) for x in leaving])
    room = flat.new_empty(sum(x.numel() for x in arriving))
    messages = [dist.P2POp(dist.isend, flat, to, group)] if flat.numel() else []
    messages += [dist.P2POp(dist.irecv, room, source, group)] if room.numel() else []
    works = dist.batch_isend_irecv(messages) if messages else []
    k, v = torch.split(room, [x.numel() for x in arriving])
    return Posted(works, Block(k.view_as(arriving.k), v.view_as(arriving.v)))


one_message = ROWS.add(
    "one_message", "Keys and values packed in one message, and unpacked as views.", replace(STEPS, post=_one_message)
)


def _padded_keys(steps: Steps, here: Here) -> Steps:
    def padded(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = STEPS.pattern(steps, here, hop, owner)
        return F.pad(m, (0, _longest(here) - m.size(-1)))

    return replace(steps, pattern=padded)


def _longest(here: Here) -> int:
    return max(len(shard) for shard in here.shards) + 1


def _pad(here: Here, block: Block) -> Block:
    return Block(*(F.pad(x, (0, 0, 0, 0, 0, _longest(here) - x.size(1))) for x in block))


def _padded_gradients(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    dq, part = gradients(_padded_keys(steps, here), here, hop, owner, rows, _pad(here, block))
    return dq, Block(*(x[:, : block.k.size(1)].contiguous() for x in part))


overestimated = ROWS.add(
    "overestimated",
    "Every block is padded past the longest one, the padding masked: a length that is an over-estimate "
    "(zhuzilin/ring-flash-attention#78).",
    replace(
        STEPS,
        attend=lambda steps, here, hop, owner, q, block: attend(
            _padded_keys(steps, here), here, hop, owner, q, _pad(here, block)
        ),
        gradients=_padded_gradients,
    ),
)


def _by_head_first(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse = ring_of(STEPS)(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call)
    return out.transpose(1, 2), lse


heads_first = ROWS.add(
    "heads_first",
    "Tensors are (batch, heads, sequence, dim), and come back as views.",
    _by_head_first,
    dataclasses.replace(EVERYTHING, tensor_layout="bhsd"),
)
differentiable_gather = ROWS.add(
    "differentiable_gather",
    "No backward of its own: autograd through an all-gather whose adjoint is written.",
    gathered.by_allgather,
)
ulysses = ROWS.add(
    "ulysses",
    "Sequence to heads and back by all-to-all, uneven where heads do not divide; autograd does the rest.",
    gathered.by_heads,
    dataclasses.replace(EVERYTHING, sharding=tuple(s for s in SHARDINGS if s != "replicated_query")),
)
