"""A decoder whose queries go to all ranks: right, and wrong by a step each, as people write them."""

import torch
import torch.distributed as dist

from ringverify import implementation

INF = float("inf")


def partial(q, k, v, call, queries_at, keys_at):
    """Attention of some queries to this rank's keys."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if call.causal:
        s = s.masked_fill(keys_at[None] > queries_at[:, None], -INF)
    top = s.amax(-1) if s.shape[-1] else torch.full(s.shape[:-1], -INF)
    top = torch.where(top == -INF, 0.0, top)
    w = torch.exp(s - top[..., None])
    z = w.sum(-1)
    some = torch.where(z == 0, 1.0, z)
    out = torch.einsum("bhqk,bkhd->bqhd", w, v) / some.transpose(1, 2)[..., None]
    return out, torch.where(z == 0, -INF, torch.log(some) + top)


def merged(partials, exp=torch.exp, log=torch.log):
    """The partials of all ranks as one."""
    outs, lses = map(torch.stack, zip(*partials, strict=True))
    top = lses.amax(0)
    top = torch.where(top == -INF, 0.0, top)
    w = exp(lses - top)
    z = w.sum(0)
    some = torch.where(z == 0, 1.0, z)
    out = ((w / some).transpose(-1, -2)[..., None] * outs).sum(0)
    return out, torch.where(z == 0, -INF, log(some) + top)


def merged_in_base_2(partials):
    """As kernels have it whose lse is in base 2; this one is natural."""
    return merged(partials, torch.exp2, torch.log2)


def gathered(what, call):
    """What each rank has."""
    parts = [None] * call.world_size
    dist.all_gather_object(parts, what, group=call.group)
    return parts


def decode(q, k, v, call, offset=None, keys_at=None, merge=merged):
    """All queries on all ranks, each with the rank's own keys; then this rank's rows of all partials."""
    keys_at = call.key_positions if keys_at is None else keys_at
    offset = call.offset if offset is None else offset
    everyone = gathered((q, call.positions), call)
    mine = [partial(queries, k, v, call, at + offset, keys_at) for queries, at in everyone]
    return merge([of_rank[call.rank] for of_rank in gathered(mine, call)])


decoder = implementation(
    gradients=False,
    lse=True,
    gqa=True,
    uneven=True,
    empty_shards=True,
    cross_lengths=True,
    incremental=True,
    query_sharding=("replicated", "striped"),
    key_sharding=("contiguous", "striped", "pages"),
)


@decoder
def attend(q, k, v, call):
    """Right."""
    return decode(q, k, v, call)


@decoder
def forgets_the_prefix(q, k, v, call):
    """A chunk attends its own tokens."""
    own = call.key_positions >= call.offset
    if 1 < call.problem.nq < call.problem.nk:
        k, v, keys_at = k[:, own], v[:, own], call.key_positions[own]
        return decode(q, k, v, call, keys_at=keys_at)
    return decode(q, k, v, call)


@decoder
def pages_of_the_next_rank(q, k, v, call):
    """The table is read one rank further."""
    keys_at = call.key_positions.clone()
    if call.page_table is not None:
        pages, size = call.page_table.pages[(call.rank + 1) % call.world_size], call.page_table.page_size
        found = torch.tensor([page * size + row for page in pages for row in range(size)], dtype=torch.int64)
        found = found[found < call.problem.nk][: len(keys_at)]
        keys_at[: len(found)] = found
    return decode(q, k, v, call, keys_at=keys_at)


@decoder
def merges_in_base_2(q, k, v, call):
    """Its log-sum-exps are natural."""
    return decode(q, k, v, call, merge=merged_in_base_2)


@decoder
def single_tokens_one_earlier(q, k, v, call):
    """A single token's position is that of the last one before."""
    return decode(q, k, v, call, offset=call.offset - (call.problem.nq == 1 and call.offset > 0))


@decoder
def takes_the_cache_for_contiguous(q, k, v, call):
    """Whatever the table says."""
    first = sum(gathered(len(call.key_positions), call)[: call.rank])
    return decode(q, k, v, call, keys_at=torch.arange(first, first + len(call.key_positions)))
