"""A dilated ring as it is often written: every weight is computed, and those that the pattern skips are times 0."""

import functools

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


def counts(call: AttentionCall, heads, queries, keys):
    """How many branches let each pair through: `(heads, queries, keys)`."""
    found = torch.zeros(heads, len(queries), len(keys))
    if call.dilation is None:
        return found + 1
    branches = call.dilation.branches
    groups = torch.arange(heads).tensor_split(len(branches))  # the first ones are a head larger
    for branch, ((segment, rate), group) in enumerate(zip(branches, groups, strict=True)):
        together = queries[:, None] // segment == keys // segment
        covered = [(places % segment) % rate == branch % rate for places in (queries, keys)]
        found[group] = (together & covered[0][:, None] & covered[1]).float()
    return found


def allowed(call: AttentionCall, heads, queries, keys):
    """1 where a query attends a key, 0 where it skips it: `(batch or 1, heads, queries, keys)`."""
    found = counts(call, heads, queries, keys)[None]
    if call.causal:
        found = found * (keys <= queries[:, None])
    if call.window is not None:
        left, right = call.window
        ahead = keys - queries[:, None]
        found = found * (ahead >= -(len(call_range(call)) if left is None else left))
        found = found * (ahead <= (len(call_range(call)) if right is None else right))
    if call.key_lengths is not None:
        found = found * (keys < torch.tensor(call.key_lengths)[:, None, None, None])
    return found


def call_range(call: AttentionCall):
    """All positions."""
    return range(call.problem.nk)


def ring(q, k, v, call: AttentionCall, *, clears=()):
    """Blocks passed to the right, numerators and denominators added up; forward only.

    Args:
        q: this rank's queries.
        k: its keys.
        v: its values.
        call: what to compute.
        clears: which keys are set to 0 before they are used: those of "padding", or all that are "skipped".
    """
    block, keys = torch.cat([k, v], dim=-1), call.key_positions
    numerator = torch.zeros(*q.shape[:3], v.shape[-1]).transpose(1, 2)
    denominator = torch.zeros(*numerator.shape[:3], 1)
    highest = torch.full_like(denominator, -1e30)
    for hop in range(call.world_size):
        here = block
        if call.key_lengths is not None and clears:
            padding = keys >= torch.tensor(call.key_lengths)[:, None]
            here = block.masked_fill(padding[:, :, None, None], 0.0)
        weights = allowed(call, q.shape[2], call.positions, keys)
        if "skipped" in clears:
            whole = allowed(call, q.shape[2], torch.arange(call.problem.nq), keys).amax(2)
            here = here.masked_fill((whole == 0).transpose(1, 2)[..., None], 0.0)
        k_here, v_here = here.split([k.shape[-1], v.shape[-1]], dim=-1)
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k_here)
        top = torch.maximum(highest, s.masked_fill(weights == 0, -1e30).amax(-1, keepdim=True))
        p = weights * (s - top).clamp(max=0.0).exp()
        again = (highest - top).exp()
        numerator = numerator * again + p @ v_here.transpose(1, 2)
        denominator = denominator * again + p.sum(-1, keepdim=True)
        highest = top
        if hop + 1 < call.world_size:
            block, keys = passed(block, call), sent_keys(keys, call)
    return (numerator / denominator.clamp(min=1e-38)).transpose(1, 2)


def passed(block, call: AttentionCall):
    """The left neighbour's block."""
    ranks = dist.get_process_group_ranks(call.group)
    theirs = torch.empty_like(block)
    exchange = [
        dist.P2POp(dist.isend, block.contiguous(), ranks[(call.rank + 1) % call.world_size], call.group),
        dist.P2POp(dist.irecv, theirs, ranks[call.rank - 1], call.group),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return theirs


def sent_keys(keys, call: AttentionCall):
    """Its positions: shards are even and contiguous."""
    return (keys - len(keys)) % call.problem.nk


declared = functools.partial(
    implementation, gradients=False, dilation=("split",), window=True, key_lengths=True, scale=True
)


@declared(name="times 0")
def times_zero(q, k, v, call: AttentionCall):
    """What is skipped is multiplied by 0, padding is cleared: right."""
    return ring(q, k, v, call, clears=("padding",))


@declared(name="times 0 of padding")
def times_zero_of_padding(q, k, v, call: AttentionCall):
    """Padding is multiplied by 0 too: 0 times NaN is NaN."""
    return ring(q, k, v, call)


@declared(name="times 0, called safe", poison_safe=True)
def called_safe(q, k, v, call: AttentionCall):
    """The first one, with a claim that does not hold."""
    return ring(q, k, v, call, clears=("padding",))


@declared(name="cleared", poison_safe=True)
def cleared(q, k, v, call: AttentionCall):
    """All that is skipped is cleared: the claim holds."""
    return ring(q, k, v, call, clears=("padding", "skipped"))
