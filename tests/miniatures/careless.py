"""What people write by mistake, each in the way they write it: what a failure says of them is held by tests."""

import threading

import torch
import torch.distributed as dist
from faulty_rings import Swapped
from right import Gathered, attention, scores

from ringverify import AttentionCall, implementation


def neighbours(call):
    """Global ranks of the right and the left neighbour."""
    right, left = (call.rank + 1) % call.world_size, (call.rank - 1) % call.world_size
    return dist.get_global_rank(call.group, right), dist.get_global_rank(call.group, left)


def wait_forgotten(block, call):
    """The send is waited for, the receive is not."""
    right, left = neighbours(call)
    arriving = torch.empty_like(block)
    sending = dist.isend(block, right, group=call.group)
    dist.irecv(arriving, left, group=call.group)
    sending.wait()
    return arriving


def one_buffer(block, call):
    """What arrives goes into the buffer that is being sent."""
    right, left = neighbours(call)
    sending = dist.isend(block, right, group=call.group)
    dist.recv(block, left, group=call.group)
    sending.wait()
    return block


def ring_over(exchange):
    """A ring, forward only, that passes keys and values round by `exchange(block, call)`."""

    @implementation(name=exchange.__name__, causal="never", gradients=False)
    def attend(q, k, v, call: AttentionCall):
        block = torch.cat([k, v], dim=-1).contiguous()
        out = lse = None
        for hop in range(call.world_size):
            keys, values = block.split([k.shape[-1], v.shape[-1]], dim=-1)
            found = torch.einsum("bqhd,bkhd->bhqk", q, keys) * call.scale
            part, weight = torch.einsum("bhqk,bkhd->bhqd", found.softmax(-1), values), found.logsumexp(-1)
            if out is None:
                out, lse = part, weight
            else:
                share = torch.sigmoid(weight - lse)[..., None]
                out, lse = out + share * (part - out), torch.logaddexp(lse, weight)
            if hop + 1 < call.world_size:
                block = exchange(block, call)
        return out.transpose(1, 2)

    return attend


forgotten = ring_over(wait_forgotten)
overwritten = ring_over(one_buffer)

_GROUP = None


@implementation(name="group cached")
def cached(q, k, v, call: AttentionCall):
    """The module remembers the first group that it is given."""
    global _GROUP
    _GROUP = _GROUP or call.group
    pieces = [torch.empty_like(k).contiguous() for _ in range(call.world_size)]
    dist.all_gather(pieces, k.detach().contiguous(), group=_GROUP)
    return attention(q, k, v, call)


@implementation(name="rank asked in a thread")
def in_a_thread(q, k, v, call: AttentionCall):
    """A thread of its own asks which rank this is."""
    ranks = []
    helper = threading.Thread(target=lambda: ranks.append(dist.get_rank()))
    helper.start()
    helper.join()
    return attention(q, k, v, call) if ranks == [call.rank] else attention(q, k, v, call) * 2


@implementation(name="heads first", causal="always")
def heads_first(q, k, v, call: AttentionCall):
    """Reads (batch, heads, tokens, dim), and does not say so."""
    k, v = (Gathered.apply(x.transpose(1, 2), call).transpose(1, 2) for x in (k, v))
    found = torch.einsum("bhqd,bhkd->bhqk", q, k) * call.scale
    later = torch.arange(call.problem.nk)[None, :] > call.positions[:, None]
    return torch.einsum("bhqk,bhkd->bhqd", found.masked_fill(later, float("-inf")).softmax(-1), v)


@implementation(name="strange and talkative")
def talkative(q, k, v, call: AttentionCall):
    """Wrong in a way that no one has thought of, and prints."""
    print(f"rows of rank {call.rank}:", list(q.shape))
    print("one line", "and another", sep="\n")
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    out = torch.einsum("bhqk,bkhd->bqhd", scores(q, k, call, call.scale).softmax(-1), v)
    return torch.cat([out[:, :1] * 1.0371 + 0.01, out[:, 1:]], dim=1)


@implementation(name="wrong dv")
def wrong_dv(q, k, v, call: AttentionCall):
    """dV of rank 1 is a hundredth too large."""
    if call.rank == 1 and v.requires_grad:
        v = v * 1
        v.register_hook(lambda gradient: gradient * 1.01)
    return attention(q, k, v, call)


@implementation(name="twice wrong")
def twice_wrong(q, k, v, call: AttentionCall):
    """The output is doubled where the mask is causal; dK and dV are swapped everywhere."""
    out = attention(q, *Swapped.apply(k, v), call)
    return out * 2 if call.causal else out


class Unfinished(torch.autograd.Function):
    """The identity, whose backward nobody has written yet."""

    @staticmethod
    def forward(ctx, x):
        """Return it."""
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Raise."""
        raise NotImplementedError("no backward yet")


@implementation(name="wrong and unfinished")
def wrong_and_unfinished(q, k, v, call: AttentionCall):
    """Every output is doubled, and the backward pass raises."""
    return 2 * attention(Unfinished.apply(q), k, v, call)


@implementation(name="every second key", lse=True, lse_gradient=True, subgroups=True)
def every_second_key(q, k, v, call: AttentionCall):
    """Every other key has a score that is lower by a quarter."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    found = scores(q, k, call, call.scale)
    found = found - 0.25 * (torch.arange(k.shape[1]) % 2 == 1)
    return torch.einsum("bhqk,bkhd->bqhd", found.softmax(-1), v), found.logsumexp(-1)


@implementation(name="top left in inference", causal="both", cross_lengths=True)
def top_left_in_inference(q, k, v, call: AttentionCall):
    """Where no gradients are taken, another path is: its causal mask is aligned with the first key."""
    k, v = Gathered.apply(k, call), Gathered.apply(v, call)
    found = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale
    diagonal = call.problem.nk - call.problem.nq if torch.is_grad_enabled() else 0
    hidden = torch.arange(k.shape[1])[None, :] > call.positions[:, None] + diagonal
    if call.causal:
        found = found.masked_fill(hidden, float("-inf"))
    some = (found > float("-inf")).any(-1, keepdim=True)
    weights = found.masked_fill(~some, 0.0).softmax(-1) * some
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
