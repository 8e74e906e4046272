"""Faults of communication: what is sent, to whom, in which order, and who waits for it (D in the reports)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringref.sharding import SHARDINGS
from ringverify.faults.fault import Cause, Faults
from ringverify.faults.place import Block, Here, Partial, like
from ringverify.faults.ring import EVERYTHING, STEPS, Steps, forward, gradients, multiplicity, travel, visit
from ringverify.faults.wire import Posted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor
FAULTS = Faults()


TRAVELLING = dataclasses.replace(
    EVERYTHING,
    sharding=tuple(sharding for sharding in SHARDINGS if sharding != "replicated_query"),
    traffic="neighbours",
    memory="sharded",
)
"""What the plain ring can claim of its traffic and memory where nothing is gathered."""


# -- groups and order --------------------------------------------------------------------------------------------------

FAULTS.add(
    "D1",
    "point-to-point calls name ranks by their number in the group instead of the world",
    replace(STEPS, peer=lambda here, rank: rank),
    kind="group",
)


def _world(here: Here) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


FAULTS.add(
    "D2a",
    "messages travel on the world's process group instead of the ring's",
    replace(STEPS, group=_world),
    kind="hazard",
)


def _gathered_in_world(here: Here, rows: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, rows)
    return everyone


FAULTS.add(
    "D2c",
    "partial results are gathered from the whole world instead of the group",
    replace(STEPS, gather=_gathered_in_world),
    kind="group",
)
FAULTS.add(
    "D2b",
    "left and right neighbours are those of the world instead of the group",
    replace(
        STEPS,
        right=lambda here: (dist.get_rank() + 1) % dist.get_world_size(),
        left=lambda here: (dist.get_rank() - 1) % dist.get_world_size(),
        peer=lambda here, rank: rank,
        group=_world,
    ),
    kind="group",
)


def _all_send_first(here: Here, to: int, source: int, group: ProcessGroup, leaving: Block, arriving: Block) -> Posted:
    for x in leaving:
        if x.numel():
            dist.send(x, to, group=group)
    for x in arriving:
        if x.numel():
            dist.recv(x, source, group=group)
    return Posted([], arriving)


FAULTS.add(
    "D3a",
    "every rank sends before it receives: a deadlock where messages are not buffered",
    replace(STEPS, post=_all_send_first),
    kind="progress",
)


def _waited_sends(here: Here, to: int, source: int, group: ProcessGroup, leaving: Block, arriving: Block) -> Posted:
    for x in leaving:
        if x.numel():
            work = dist.isend(x, to, group=group)
            assert work is not None
            work.wait()
    received = [dist.irecv(x, source, group=group) for x in arriving if x.numel()]
    return Posted([work for work in received if work is not None], arriving)


FAULTS.add(
    "D3b",
    "every rank waits for its isend before it posts its irecv: a deadlock where messages are not buffered",
    replace(STEPS, post=_waited_sends),
    kind="progress",
)


def _returns_early(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    if not q.numel():
        return STEPS.nothing(here, steps.widen(here, q), here.problem.dv)  # type: ignore[no-any-return]
    return forward(steps, here, q, k, v)


FAULTS.add(
    "D10",
    "a rank without tokens returns early: the others wait for it",
    replace(STEPS, forward=_returns_early),
    kind="failure",
)


def _receives_only(posted: Posted) -> Block:
    received = sum(x.numel() > 0 for x in posted.arriving)
    for work in posted.works[len(posted.works) - received :]:
        work.wait()
    return posted.arriving


FAULTS.add(
    "D6d",
    "sends are not waited for: their buffers are reused while they may still be read",
    replace(STEPS, arrive=_receives_only, arrive_gradients=_receives_only),
    kind="hazard",
)
FAULTS.add(
    "D9a",
    "keys and values are sent as they lie in memory: some backends refuse strided tensors",
    replace(STEPS, outgoing=lambda k, v: Block(k.detach(), v.detach())),
    kind="failure",
)


def _in_place(steps: Steps, here: Here, leaving: Block, expected: int) -> Posted:
    """Use one buffer on each rank: the next block is received into the buffer that is being sent."""
    to, source = (steps.peer(here, rank) for rank in (steps.right(here), steps.left(here)))
    shapes = here.block_shapes(expected)
    same = all(x.shape == torch.Size(shape) for x, shape in zip(leaving, shapes, strict=True))
    arriving = leaving if same else steps.buffers(here, leaving, expected)
    return steps.post(here, to, source, steps.group(here), leaving, arriving)


FAULTS.add(
    "R12",
    "one buffer sends and receives: a block arrives in memory that is still being sent",
    replace(STEPS, move=_in_place),
    kind="hazard",
)


def _one_more_hop(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    """Send blocks one more hop, back to their owner, which does not need them."""
    for hop in range(here.size):
        posted = steps.move(steps, here, block, steps.owner(here, hop + 1)) if here.size > 1 else None
        yield hop, steps.owner(here, hop), block
        if posted is not None:
            block = steps.arrive(posted)


FAULTS.add(
    "O84",
    "keys and values travel one hop more than needed, home again",
    replace(STEPS, visit=_one_more_hop),
    kind="traffic",
    claims=TRAVELLING,
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


FAULTS.add(
    "R11",
    "blocks are gathered by one collective, though only neighbours are claimed to exchange",
    replace(STEPS, visit=all_blocks),
    kind="traffic",
    claims=TRAVELLING,
)


def _never_received(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    home = travel(steps, here, hop, owner, carried, part)
    if here.size > 1 and hop == here.size - 1 and part.k.numel():
        to = steps.peer(here, steps.right(here))
        steps.post(here, to, to, steps.group(here), part, Block(*(x[:, :0] for x in part)))
    return home


FAULTS.add(
    "O87",
    "a message that nobody receives is sent after the last hop",
    replace(STEPS, travel=_never_received),
    kind="progress",
)


# -- gradients on their way home ---------------------------------------------------------------------------------------


def _continue(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    if carried is not None and not bool(multiplicity(steps, here, hop, owner).any()):
        return carried
    return travel(steps, here, hop, owner, carried, part)


FAULTS.add(
    "D4",
    "a rank that skips a hop neither sends nor receives dk and dv: the others wait for it",
    replace(STEPS, travel=_continue),
    kind="failure",
)


def _not_relayed(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    skipped = not bool(multiplicity(steps, here, hop, owner).any())
    return travel(steps, here, hop, owner, None if skipped else carried, part)


FAULTS.add(
    "D5a",
    "a rank that skips a hop passes on zeros: dk and dv lose what ranks before it had added",
    replace(STEPS, travel=_not_relayed),
)


def _sent_again(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Leave the dk and dv that arrive where a hop is skipped, and send those of the hop before once more."""
    if carried is not None and not bool(multiplicity(steps, here, hop, owner).any()):
        part, carried = like(here.notes["sent"], here, owner), None
    here.notes["sent"] = part if carried is None else steps.add_part(hop, carried, part)
    return travel(steps, here, hop, owner, None, here.notes["sent"])


FAULTS.cause(
    "a rank that skips a hop does not take the dk and dv that arrive: it sends those of the hop before once more",
    replace(STEPS, travel=_sent_again),
)


def _last_hop_missing(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    if hop + 1 < here.size or here.size == 1 or here.replicated:
        return travel(steps, here, hop, owner, carried, part)
    total = part if carried is None else steps.add_part(hop, carried, part)
    return like(total, here, here.rank)  # shards may differ in length; gradients of a stranger's block


FAULTS.add("D5b", "dk and dv are those of rank r + 1: sent one hop too few", replace(STEPS, travel=_last_hop_missing))


def _farthest(here: Here) -> int:
    """By how many hops some block has come where some query attends it; queries are sharded like keys."""
    if here.problem.nq != here.problem.nk:
        return here.size - 1

    def attended(rank: int, hop: int) -> bool:
        steps = replace(STEPS, queries=lambda _: here.shards[rank])
        return bool(multiplicity(steps, here, hop, (rank - hop) % here.size).any())

    return max((hop for rank in range(here.size) for hop in range(here.size) if attended(rank, hop)), default=0)


def _sent_on(hops: Callable[[Here], int]) -> Steps:
    """Send dk and dv so many hops past their owner."""

    def sent(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
        found = travel(steps, here, hop, owner, carried, part)
        if hop + 1 < here.size or here.size == 1 or here.replicated:
            return found
        for past in range(1, hops(here) % here.size + 1):
            found = steps.arrive_gradients(steps.move(steps, here, found, (here.rank - past) % here.size))
        return like(found, here, here.rank)

    return replace(STEPS, travel=sent)


FAULTS.cause("dk and dv are those of rank r - 1: sent one hop too many", _sent_on(lambda here: 1))
FAULTS.cause("dk and dv are those of rank r - 2: sent two hops too many", _sent_on(lambda here: 2))
FAULTS.cause(
    "dk and dv are sent one hop more than their block had come, which is home only after a whole round",
    _sent_on(lambda here: _farthest(here) + 1),
)
FAULTS.cause(
    "dk and dv are sent on by as many hops as their block had come, instead of home",
    _sent_on(lambda here: 2 * _farthest(here)),
)


def _unwaited(posted: Posted) -> Block:
    return posted.arriving


FAULTS.add("D6c", "dk and dv never come home: they are 0", replace(STEPS, arrive_gradients=_unwaited))


def to_the_owner(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Send each part of dk and dv straight to the owner of its block."""
    if here.size == 1:
        return part
    if hop == 0:
        here.notes["own"] = part
        return part
    posted = steps.post(
        here,
        steps.peer(here, owner),
        steps.peer(here, (here.rank + hop) % here.size),
        steps.group(here),
        part,
        steps.buffers(here, part, here.rank),
    )
    arrived = steps.arrive_gradients(posted)
    here.notes["own"] = Block(here.notes["own"].k + arrived.k, here.notes["own"].v + arrived.v)
    return Block(*here.notes["own"])


FAULTS.add(
    "O85",
    "parts of dk and dv are sent straight to their owner, though only neighbours are claimed to exchange",
    replace(STEPS, travel=to_the_owner),
    kind="traffic",
    claims=TRAVELLING,
)


def _unpacked_as_a_pair(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Take two buffers that each hold dk and dv, the one sent and the one received, for dk and for dv."""
    home = travel(steps, here, hop, owner, carried, part)
    lasts = hop + 1 == here.size > 1 and not here.replicated
    if not lasts or part.k.shape[2:] != part.v.shape[2:] or here.problem.head_dim != here.problem.dv:
        return home
    both = Block(home.k + home.v, home.k + home.v)
    right, left = steps.right(here), steps.left(here)
    room = steps.buffers(here, both, right)
    of_right = steps.arrive_gradients(
        steps.post(here, steps.peer(here, left), steps.peer(here, right), steps.group(here), both, room)
    )
    return Block(both.k, like(of_right, here, here.rank).v)


FAULTS.cause(
    "dk equals dk + dv, and dv is that sum of rank r + 1: the buffers sent and received are unpacked as dk and dv",
    replace(STEPS, travel=_unpacked_as_a_pair),
)


def _the_same_way(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Send blocks and their gradients the same way: rank r adds its part of block r + hop to that of block r - hop."""
    if here.replicated:
        return travel(steps, here, hop, owner, carried, part)
    parts = here.notes.setdefault("parts", {})
    parts[owner] = part
    if hop + 1 < here.size:
        return part
    total: Block | None = None
    for step in range(here.size):
        met = like(parts[(here.rank + step) % here.size], here, steps.owner(here, step))
        total = travel(steps, here, step, steps.owner(here, step), total, met)
    del here.notes["parts"]
    assert total is not None
    return total


FAULTS.cause(
    "gradients of blocks are sent on in the wrong direction: that is right on two ranks, and on more dk and dv "
    "hold parts of other blocks",
    replace(STEPS, travel=_the_same_way),
)


# -- blocks that arrive ------------------------------------------------------------------------------------------------


FAULTS.add(
    "D6a",
    "keys and values of other ranks are zeros: they are read before they arrive",
    replace(STEPS, arrive=_unwaited),
)


def blocks(change: Callable[[Here, int, int, Block], Block]) -> Steps:
    """What is worked on in place of the block of a hop."""

    def changed(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
        for hop, owner, arrived in visit(steps, here, block):
            if hop == 0:
                here.notes["own block"] = arrived
            yield hop, owner, change(here, hop, owner, arrived)

    return replace(STEPS, visit=changed)


def _keys_are_zeros(here: Here, hop: int, owner: int, block: Block) -> Block:
    return block if hop == 0 else block._replace(k=torch.zeros_like(block.k))


FAULTS.cause("keys of other ranks are zeros: they are read before they arrive", blocks(_keys_are_zeros))


def _only_first(posted: Posted) -> Block:
    for work in posted.works[:-1]:
        work.wait()
    return posted.arriving


FAULTS.add(
    "D6b", "values of other ranks are zeros: they are read before they arrive", replace(STEPS, arrive=_only_first)
)
FAULTS.add(
    "F2",
    "the rank's own keys and values are used at every hop",
    blocks(lambda here, hop, owner, block: like(here.notes["own block"], here, owner)),
    when="backward",
)


def _both(of: str) -> Steps:
    """Take the keys of a block for its values too, or its values for its keys, where they have the same shape."""

    def changed(here: Here, hop: int, owner: int, block: Block) -> Block:
        one: Tensor = getattr(block, of)
        return Block(one, one) if block.k.shape == block.v.shape else block

    return blocks(changed)


FAULTS.cause("values stand in the place of keys, where both have the same shape", _both("v"))
FAULTS.cause("keys stand in the place of values, where both have the same shape", _both("k"))


def of_another_hop(hop_of: Callable[[int, int], int], names: str) -> Steps:
    """Work on keys, or values, of another hop's block, by hop and number of ranks, masked as those of this one."""
    return replace(STEPS, hop_of=lambda name, hop, size: hop_of(hop, size) if name in names else hop)


HOPS: dict[str, Callable[[int, int], int]] = {
    "that of the hop before": lambda hop, size: max(hop - 1, 0),
    "from hop 2 on that of the hop before": lambda hop, size: hop - (hop >= 2),
    "in the last hop that of the hop before": lambda hop, size: hop - (0 < hop == size - 1),
    "up to the last hop that of the next one": lambda hop, size: min(hop + 1, size - 1),
    "that of the next hop, and in the last hop the rank's own": lambda hop, size: hop + 1,
    "in the last hop the rank's own": lambda hop, size: 0 if hop == size - 1 else hop,
    "in every hop the rank's own": lambda hop, size: 0,
    "that of the last hop that arrived in the same of two buffers": lambda hop, size: (
        hop and hop + (size - 1 - hop) // 2 * 2
    ),
    "that of the last hop that was in the same of two buffers": lambda hop, size: hop + (size - 1 - hop) // 2 * 2,
    "from hop 1 on that of the last hop": lambda hop, size: hop and size - 1,
    "from hop 1 on that of hop 1, as every rank sends its own": lambda hop, size: min(hop, 1),
    "the rank's own was one of two buffers, and its place on the way is taken by the last one received into it": (
        lambda hop, size: (hop + (size - 1) // 2 * 2) % size
    ),
}
"""Whose keys or values are used in place of those of a hop."""

for which, hop_of in HOPS.items():
    for of, names in {"keys and values": "kv", "keys": "k", "values": "v"}.items():
        FAULTS.cause(f"{of} of the wrong block: {which}", of_another_hop(hop_of, names))


def _in_dq(hop_of: Callable[[int, int], int]) -> Steps:
    """Compute dq from the keys of another hop's block, by hop and number of ranks."""

    def mixing(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        every = here.notes["blocks"]
        other = like(every[hop_of(hop, here.size) % len(every)][2], here, owner).k
        k = steps.per_query_head(here, steps.widen(here, other))
        of_other = replace(steps, dq=lambda ds, _, scale, attended: steps.dq(ds, k, scale, attended))
        return gradients(of_other, here, hop, owner, rows, block)

    return replace(STEPS, gradients=mixing, hop_of=lambda name, hop, size: hop)


for which, hop_of in HOPS.items():
    FAULTS.causes.append(Cause(f"dq is made of the wrong block's keys: {which}", _in_dq(hop_of), "backward"))


def _garbled(change: Callable[[Tensor], Tensor], names: str) -> Steps:
    """Change keys, or values, of every block before they are used."""
    return _used(lambda block: Block(*(change(x) if name in names else x for name, x in zip("kv", block, strict=True))))


def _used(changed: Callable[[Block], Block]) -> Steps:
    """Change every block before it is used."""
    return replace(
        STEPS,
        attend=lambda steps, here, hop, owner, q, block: STEPS.attend(steps, here, hop, owner, q, changed(block)),
        gradients=lambda steps, here, hop, owner, rows, block: gradients(steps, here, hop, owner, rows, changed(block)),
    )


GARBLED: dict[str, Callable[[Tensor], Tensor]] = {
    "those of the first batch element for all": lambda x: x[:1].expand_as(x),
    "those of another batch element": lambda x: x.roll(1, dims=0),
    "those of the token before": lambda x: x.roll(1, dims=1),
    "those of the token after": lambda x: x.roll(-1, dims=1),
}
"""How a block may be garbled: what its keys or values are."""

for what, change in GARBLED.items():
    for of, names in {"keys and values": "kv", "keys": "k", "values": "v"}.items():
        FAULTS.cause(f"{of} of a block are {what}", _garbled(change, names))


FAULTS.cause(
    "keys and values of a block are exchanged",
    _used(lambda block: Block(block.v, block.k) if block.k.shape == block.v.shape else block),
)


def _turned(here: Here, hop: int, owner: int, block: Block) -> Block:
    return Block(*(x.transpose(1, 2).contiguous() for x in block)) if block.k.size(1) == block.k.size(2) else block


FAULTS.add("F3", "keys and values are transposed: tokens for heads", blocks(_turned), when="backward")


def _remembering(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    here.notes["last"] = block
    return STEPS.attend(steps, here, hop, owner, q, block)


def _from_the_last(
    steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor
) -> tuple[Tensor, ...]:
    q, _, _, out, lse = saved
    k, v = like(here.notes["last"], here, here.rank)
    return STEPS.backward(steps, here, (q, k, v, out, lse), dout, dlse)


FAULTS.add(
    "F12b",
    "the ring starts from the last block received instead of the rank's own",
    replace(STEPS, attend=_remembering, backward=_from_the_last),
)


def _empty_repeats(steps: Steps, here: Here, block: Block) -> Iterator[tuple[int, int, Block]]:
    before: tuple[int, Block] | None = None
    for hop, owner, arrived in visit(steps, here, block):
        if before is not None and not arrived.k.size(1):
            yield hop, *before
        else:
            yield hop, owner, arrived
        before = owner, arrived


FAULTS.add(
    "O115",
    "an empty shard leaves the block before it in the buffer, which is attended once more",
    replace(
        STEPS, forward=lambda steps, here, q, k, v: STEPS.forward(replace(steps, visit=_empty_repeats), here, q, k, v)
    ),
    narrow=True,
)
