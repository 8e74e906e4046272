"""Rings that are right in value on a friendly transport, and go well by luck alone. Each spoils one exchange."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def peers(call):
    """Global ranks of the right and the left neighbour."""
    right, left = (call.rank + 1) % call.world_size, (call.rank - 1) % call.world_size
    return dist.get_global_rank(call.group, right), dist.get_global_rank(call.group, left)


def safely(block, call):
    """Both posted, both waited for; then the block is used."""
    right, left = peers(call)
    arriving = torch.empty_like(block)
    sends = dist.P2POp(dist.isend, block, right, call.group)
    receives = dist.P2POp(dist.irecv, arriving, left, call.group)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return arriving


def send_zeroed_before_wait(block, call):
    """The send buffer is cleared for reuse before the send has completed."""
    right, left = peers(call)
    arriving = torch.empty_like(block)
    sending = dist.isend(block, right, group=call.group)
    receiving = dist.irecv(arriving, left, group=call.group)
    block.zero_()
    sending.wait()
    receiving.wait()
    return arriving


def receive_read_early(block, call):
    """The sum of what arrives is taken before it has arrived, and thrown away."""
    right, left = peers(call)
    arriving = torch.zeros_like(block)
    sending = dist.isend(block, right, group=call.group)
    receiving = dist.irecv(arriving, left, group=call.group)
    arriving.sum()
    receiving.wait()
    sending.wait()
    return arriving


def blocking_sends_first(block, call):
    """Every rank sends before it receives: it works while the transport buffers."""
    right, left = peers(call)
    arriving = torch.empty_like(block)
    dist.send(block, right, group=call.group)
    dist.recv(arriving, left, group=call.group)
    return arriving


def extra_barrier_on_one_rank(block, call):
    """Rank 0 joins a barrier that nobody else comes to, without waiting for it."""
    if call.rank == 0:
        dist.barrier(group=call.group, async_op=True)
    return safely(block, call)


def unreceived_message(block, call):
    """One more message is sent than is received."""
    right, _ = peers(call)
    dist.isend(torch.ones(1), right, group=call.group, tag=7).wait()
    return safely(block, call)


def handle_dropped(block, call):
    """The send is never waited for."""
    right, left = peers(call)
    arriving = torch.empty_like(block)
    dist.isend(block, right, group=call.group)
    dist.irecv(arriving, left, group=call.group).wait()
    return arriving


SPARE = {}


def one_buffer_for_the_process(block, call):
    """What arrives is kept in a buffer that is made once for the process: right in a process of its own."""
    right, left = peers(call)
    arriving = SPARE.setdefault((block.shape, block.dtype), torch.empty_like(block))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, arriving, left, call.group), dist.P2POp(dist.isend, block, right, call.group)]
    ):
        work.wait()
    return arriving.clone()


def ring_over(exchange):
    """Full attention over blocks that `exchange(block, call)` passes round, forward only."""

    @implementation(name=exchange.__name__, causal="never", gradients=False)
    def attend(q, k, v, call: AttentionCall):
        block = torch.cat([k, v], dim=-1).contiguous()
        blocks = [block]
        for _ in range(call.world_size - 1):
            block = exchange(block.clone(), call)
            blocks.append(block)
        k, v = torch.cat(blocks, dim=1).split(q.shape[-1], dim=-1)
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    return attend


safe = ring_over(safely)
zeroed = ring_over(send_zeroed_before_wait)
early = ring_over(receive_read_early)
blocking = ring_over(blocking_sends_first)
barrier = ring_over(extra_barrier_on_one_rank)
orphan = ring_over(unreceived_message)
dropped = ring_over(handle_dropped)
shared = ring_over(one_buffer_for_the_process)
