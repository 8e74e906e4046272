"""Faults of communication (D in the reports): what is sent, to whom, in which order, and who waits for it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ringref.sharding import SHARDINGS
from ringverify.faults.fault import Faults
from ringverify.faults.masking import keys_of
from ringverify.faults.place import Block, Here, Partial, like
from ringverify.faults.ring import EVERYTHING, STEPS, Steps, forward, multiplicity, travel
from ringverify.faults.strides import as_dense, given
from ringverify.faults.wire import Posted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FAULTS = Faults()
TRAVELLING = dataclasses.replace(
    EVERYTHING,
    sharding=tuple(sharding for sharding in SHARDINGS if sharding != "replicated_query"),
    traffic="neighbours",
    memory="sharded",
)
"""What the plain ring can claim of its traffic and memory where nothing is gathered."""

D1 = FAULTS.add(
    "D1",
    "group rank where the world's is wanted",
    story="Point-to-point calls name ranks by their number in the world. Needs a group that does not start at 0.",
    source="zhuzilin/ring-flash-attention 7895974; MagiAttention b56c16fc",
    kind="group",
    ring=replace(STEPS, peer=lambda here, rank: rank),
)


def _world(here: Here) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


D2a = FAULTS.add(
    "D2a",
    "messages on the world's group",
    story="Ranks and their order are right, the group is not: messages of two lanes share a communicator. Values are "
    "right on a transport that pairs sender and receiver alone.",
    source="Megatron-LM 360e15290f",
    kind="hazard",
    ring=replace(STEPS, group=_world),
)


def _gathered_in_world(here: Here, rows: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, rows)
    return everyone


D2c = FAULTS.add(
    "D2c",
    "collectives on the world instead of the group",
    story="Partials of another lane are merged too, or it is waited for. Needs replicated queries and a smaller group.",
    source="Megatron-LM 360e15290f",
    kind="group",
    ring=replace(STEPS, gather=_gathered_in_world),
)
D2b = FAULTS.add(
    "D2b",
    "neighbours in the world instead of the group",
    story="Left and right are taken from the world's rank and size: rings of two lanes are coupled.",
    source="Megatron-LM 360e15290f",
    kind="group",
    ring=replace(
        STEPS,
        right=lambda here: (dist.get_rank() + 1) % dist.get_world_size(),
        left=lambda here: (dist.get_rank() - 1) % dist.get_world_size(),
        peer=lambda here, rank: rank,
        group=_world,
    ),
)


def _all_send_first(here: Here, to: int, source: int, group: ProcessGroup, leaving: Block, arriving: Block) -> Posted:
    for x in leaving:
        if x.numel():
            dist.send(x, to, group=group)
    for x in arriving:
        if x.numel():
            dist.recv(x, source, group=group)
    return Posted([], arriving)


D3a = FAULTS.add(
    "D3a",
    "every rank sends before it receives",
    story="Blocking sends round the ring: right where messages are buffered, a deadlock where they are not.",
    source="lucidrains/ring-attention-pytorch#9; NVIDIA/nccl#479; torchcomms#2885",
    kind="progress",
    ring=replace(STEPS, post=_all_send_first),
)


def _waited_sends(here: Here, to: int, source: int, group: ProcessGroup, leaving: Block, arriving: Block) -> Posted:
    for x in leaving:
        if x.numel():
            work = dist.isend(x, to, group=group)
            assert work is not None
            work.wait()
    received = [dist.irecv(x, source, group=group) for x in arriving if x.numel()]
    return Posted([work for work in received if work is not None], arriving)


D3b = FAULTS.add(
    "D3b",
    "isend waited for before irecv is posted",
    story="As D3a, with handles: nothing is in flight while the rank waits.",
    source="lucidrains/ring-attention-pytorch#9",
    kind="progress",
    ring=replace(STEPS, post=_waited_sends),
)


def _continue(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    if carried is not None and not bool(multiplicity(steps, here, hop, owner).any()):
        return carried
    return travel(steps, here, hop, owner, carried, part)


D4 = FAULTS.add(
    "D4",
    "a skipped hop does not pass gradients on",
    story="`continue` on a masked step: this rank neither sends nor receives dk and dv, the others wait for it.",
    source="lucidrains/ring-attention-pytorch c452069",
    kind="failure",
    ring=replace(STEPS, travel=_continue),
)


def _not_relayed(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    skipped = not bool(multiplicity(steps, here, hop, owner).any())
    return travel(steps, here, hop, owner, None if skipped else carried, part)


D5a = FAULTS.add(
    "D5a",
    "a skipped hop passes on zeros",
    story="What earlier ranks had added to dk and dv is dropped by one that adds nothing. Needs a mask.",
    source="zhuzilin/ring-flash-attention 4072701",
    ring=replace(STEPS, travel=_not_relayed),
    cause="a rank that skips a hop passes on zeros: dk and dv lose what ranks before it had added",
)


def _last_hop_missing(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    if hop + 1 < here.size or here.size == 1 or here.replicated:
        return travel(steps, here, hop, owner, carried, part)
    total = part if carried is None else steps.add_part(hop, carried, part)
    return like(total, here, here.rank)  # shards may differ in length; gradients of a stranger's block


D5b = FAULTS.add(
    "D5b",
    "gradients stop one hop from home",
    story="As many hops as keys need, where gradients need one more: every rank has its right neighbour's.",
    source="lucidrains/ring-attention-pytorch cfb1990",
    ring=replace(STEPS, travel=_last_hop_missing),
    cause="dk and dv are those of rank r + 1: sent one hop too few",
)


def _unwaited(posted: Posted) -> Block:
    return posted.arriving


D6a = FAULTS.add(
    "D6a",
    "keys and values read before they arrive",
    story="Nobody waits for a hop, or for the first handle of several only, which is that of a send. Needs a "
    "transport that is not instantaneous.",
    source="TransformerEngine#1624, 611d876e3",
    ring=replace(STEPS, arrive=_unwaited),
    cause="keys and values of other ranks are zeros: they are read before they arrive",
    also=("backward",),
)


def _only_first(posted: Posted) -> Block:
    for work in posted.works[:-1]:
        work.wait()
    return posted.arriving


D6b = FAULTS.add(
    "D6b",
    "values read before they arrive",
    story="All handles but the last are waited for: keys are there, values are not.",
    source="TransformerEngine 557bd8092",
    ring=replace(STEPS, arrive=_only_first),
    cause="values of other ranks are zeros: they are read before they arrive",
    also=("backward",),
)
D6c = FAULTS.add(
    "D6c",
    "gradients read before they arrive",
    story="The forward waits, the backward does not.",
    source="TransformerEngine 557bd8092",
    ring=replace(STEPS, arrive_gradients=_unwaited),
    cause="dk and dv never come home: they are 0",
)


def _receives_only(posted: Posted) -> Block:
    received = sum(x.numel() > 0 for x in posted.arriving)
    for work in posted.works[len(posted.works) - received :]:
        work.wait()
    return posted.arriving


D6d = FAULTS.add(
    "D6d",
    "sends are never waited for",
    story="The buffer that is being sent is freed and reused while it may still be read.",
    source="TransformerEngine#1624",
    kind="hazard",
    ring=replace(STEPS, arrive=_receives_only, arrive_gradients=_receives_only),
)
D9a = FAULTS.add(
    "D9a",
    "strided tensors on the wire",
    story="Keys and values are sent as they lie in memory; some backends refuse them, some scramble them.",
    source="pytorch#192920, #158903; zhuzilin/ring-flash-attention 1cad320",
    kind="failure",
    ring=replace(STEPS, outgoing=lambda k, v: Block(k.detach(), v.detach())),
)


D9b = FAULTS.add(
    "D9b",
    "strided tensors sent as if dense",
    story="The backend moves the elements that lie next in memory. Needs keys that are a view, and data that varies.",
    source="pytorch#192920, #24836",
    ring=given("k v", as_dense),
    cause="strides of k and v ignored: their elements are read as they lie in memory",
)


def _returns_early(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    if not q.numel():
        return STEPS.nothing(here, steps.widen(here, q), here.problem.dv)  # type: ignore[no-any-return]
    return forward(steps, here, q, k, v)


D10 = FAULTS.add(
    "D10",
    "a rank without tokens returns early",
    story="It takes no part in the ring, and the others wait for it. Needs an empty shard.",
    source="uccl#940; sgl-kernel-npu#69",
    kind="failure",
    ring=replace(STEPS, forward=_returns_early),
)


D11 = FAULTS.add(
    "D11",
    "backward uses the last forward hop's positions",
    story="Metadata kept from the forward is that of its last hop, for every hop of the backward. Needs a mask.",
    source="pytorch#185493",
    ring=keys_of(lambda here, hop, owner: here.rank if here.replicated else here.rank + 1),
    when="backward",
    cause="every block is masked as that of the last hop",
    also=("always", "forward"),
)


def _in_place(steps: Steps, here: Here, leaving: Block, expected: int) -> Posted:
    """Use one buffer on each rank: the next block is received into the buffer that is being sent."""
    to, source = (steps.peer(here, rank) for rank in (steps.right(here), steps.left(here)))
    shapes = here.block_shapes(expected)
    same = all(x.shape == torch.Size(shape) for x, shape in zip(leaving, shapes, strict=True))
    arriving = leaving if same else steps.buffers(here, leaving, expected)
    return steps.post(here, to, source, steps.group(here), leaving, arriving)


R12 = FAULTS.add(
    "R12",
    "one buffer sends and receives",
    story="Buffers swap too early: a block arrives in the memory that is still being sent and worked on.",
    source="report R12",
    kind="hazard",
    ring=replace(STEPS, move=_in_place),
)
