"""Messages between neighbours: to the rank on the right, from the rank on the left.

Every hop posts its send and its receive together, so no order of ranks can deadlock, not even on a transport that
blocks until both sides have arrived. An empty message is left out; both sides know its length, so both leave it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ringverify.ring.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """The two ranks next to this one in the ring.

    Attributes:
        group: the process group that is the ring.
        rank: this rank within the group.
        world_size: ranks in the group.
        left: the rank that it receives from, as the world numbers it: point-to-point calls want that one.
        right: the rank that it sends to, likewise.
    """

    group: ProcessGroup
    rank: int
    world_size: int
    left: int
    right: int

    @classmethod
    def of(cls, plan: Plan) -> Neighbours:
        """The neighbours of a plan's rank."""
        group, rank, size = plan.group, plan.rank, plan.world_size
        if size == 1:  # no messages, so that no process group is needed either
            return cls(group, rank, size, rank, rank)
        left, right = (dist.get_global_rank(group, (rank + step) % size) for step in (-1, 1))
        return cls(group, rank, size, left, right)

    def post(self, send: torch.Tensor, receive: torch.Tensor) -> list[dist.Work]:
        """Start sending to the right and receiving from the left; neither buffer may be touched until both are waited.

        Args:
            send: contiguous; may be empty.
            receive: contiguous, of exactly the size that the left neighbour sends; may be empty.
        """
        messages = []
        if send.numel():
            messages.append(dist.P2POp(dist.isend, send, self.right, self.group))
        if receive.numel():
            messages.append(dist.P2POp(dist.irecv, receive, self.left, self.group))
        return dist.batch_isend_irecv(messages) if messages else []


def wait(works: Sequence[dist.Work]) -> None:
    """Wait until all of `works` are done."""
    for work in works:
        work.wait()


def rotate(neighbours: Neighbours, block: torch.Tensor, numels: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Every rank's block in turn, the own one first, the next one on its way while the caller works on one.

    Args:
        neighbours: of this rank.
        block: this rank's block, flat. It is sent from where it is and never written to.
        numels: number of elements of every rank's block.

    Yields:
        (owner, its block); the block is valid until the next one is asked for.
    """
    rank, size = neighbours.rank, neighbours.world_size
    if size == 1:
        yield rank, block
        return
    # Two buffers are enough: what is received in one hop is sent in the next while the other buffer receives, and a
    # hop is waited for as a whole before its buffers change roles.
    buffers = [block.new_empty(max(numels)) for _ in range(min(2, size - 1))]
    current = block
    for hop in range(size):
        owner, following = (rank - hop) % size, (rank - hop - 1) % size
        works: list[dist.Work] = []
        arriving = current
        if hop < size - 1:
            arriving = buffers[hop % 2][: numels[following]]
            works = neighbours.post(current, arriving)
        yield owner, current
        wait(works)
        current = arriving


def all_reduce(
    neighbours: Neighbours, rows: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`rows` of all ranks combined elementwise by row, the same bits on every rank.

    The bandwidth-optimal ring (Patarasuk & Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of
    workstations*): each piece of the rows is combined on its way round, then the finished pieces go round once more.

    Args:
        neighbours: of this rank.
        rows: `(R, columns)`, of one shape on all ranks; not written to.
        combine: of the left neighbours' rows so far and this rank's.
    """
    rank, size = neighbours.rank, neighbours.world_size
    share, larger = divmod(rows.size(0), size)
    ends = accumulate([share + (piece < larger) for piece in range(size)], initial=0)
    pieces = [rows[start:end].contiguous() for start, end in pairwise(ends)]
    for hop in range(size - 1):
        sent, received = (rank - hop) % size, (rank - hop - 1) % size
        arriving = torch.empty_like(pieces[received])
        wait(neighbours.post(pieces[sent], arriving))
        pieces[received] = combine(arriving, pieces[received])
    for hop in range(size - 1):
        sent, received = (rank + 1 - hop) % size, (rank - hop) % size
        arriving = torch.empty_like(pieces[received])
        wait(neighbours.post(pieces[sent], arriving))
        pieces[received] = arriving
    return torch.cat(pieces)
