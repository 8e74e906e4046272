"""Attentions under shardings by documents: right ones, each under another balancer, and wrong ones, by a step each."""

import dataclasses
import itertools

import torch
from ten_faults import INF, Gathered, visible

from ringref.sharding import key_positions
from ringverify import balancer, implementation

DECLARED = {"documents": True, "window": True, "world_sizes": (2, 3, 4)}
CONSTRAINTS = ("causal", "window", "documents")


@balancer
def dealt(documents, world_size):
    """The tokens of every document in turn, to one rank after another: equal shards, and nearly equal work."""
    return [list(range(rank, documents[-1], world_size)) for rank in range(world_size)]


@balancer
def backwards(documents, world_size):
    """The same, the last one first."""
    return [list(range(rank, documents[-1], world_size))[::-1] for rank in range(world_size)]


@balancer
def long_first(documents, world_size):
    """Documents by length, the longest first, cut into shards of equal length."""
    starts = sorted(itertools.pairwise(documents), key=lambda one: one[0] - one[1])
    order = torch.tensor([position for start, end in starts for position in range(start, end)], dtype=torch.int64)
    return list(order.tensor_split(world_size))


def attention(q, k, v, call, **of):
    """This rank's output; `of` are constraints that are looked up at other positions than the right ones."""
    k, v = (Gathered.apply(x, call, True) for x in (k, v))
    right = call.positions, Gathered.apply(call.key_positions[None], call, True)[0]
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    for name in CONSTRAINTS:
        absent = {other: False if other == "causal" else None for other in CONSTRAINTS if other != name}
        alone = dataclasses.replace(call, problem=call.problem.replace(**absent))
        s = s.masked_fill(~visible(alone, *of.get(name, right)), -INF)
    empty = ~s.isfinite().any(dim=-1, keepdim=True)
    p = s.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhe->bqhe", p, v)


@implementation(sharding="zigzag_documents", balance=1.05, **DECLARED)
def right(q, k, v, call):
    """As it should be, under our sharding."""
    return attention(q, k, v, call)


@implementation(sharding=dealt, **DECLARED)
def right_dealt(q, k, v, call):
    """As it should be, under a balancer."""
    return attention(q, k, v, call)


@implementation(sharding=(backwards, "contiguous"), **DECLARED)
def right_backwards(q, k, v, call):
    """As it should be, where positions descend, beside a sharding by length."""
    return attention(q, k, v, call)


@implementation(sharding=long_first, **DECLARED)
def right_long_first(q, k, v, call):
    """As it should be, where documents change places."""
    return attention(q, k, v, call)


def in_shard_order(call):
    """Queries and keys numbered as they lie on the ranks, one rank after another."""
    n = len(call.positions)
    return torch.arange(call.rank * n, (call.rank + 1) * n), torch.arange(call.problem.nk)


def as_if_of(held, call):
    """Queries and keys at the positions of another sharding, given by rank."""
    shards = [torch.as_tensor(one) for one in held]
    return shards[call.rank], torch.cat(shards)


@implementation(sharding="zigzag_documents", **DECLARED)
def causal_by_index(q, k, v, call):
    """The causal mask compares indices in the shard."""
    n = len(call.positions)
    return attention(q, k, v, call, causal=(torch.arange(n), torch.arange(call.problem.nk) % n))


@implementation(sharding="zigzag_documents", **DECLARED)
def window_in_shard_order(q, k, v, call):
    """The window is measured between rows as they lie on the ranks."""
    return attention(q, k, v, call, window=in_shard_order(call))


@implementation(sharding="zigzag_documents", **DECLARED)
def documents_in_shard_order(q, k, v, call):
    """The boundaries of documents are looked up for rows as they lie on the ranks."""
    return attention(q, k, v, call, documents=in_shard_order(call))


@implementation(sharding="zigzag_documents", **DECLARED)
def pieces_of_the_whole(q, k, v, call):
    """A rank's pieces are those of the whole sequence instead of every document."""
    whole = as_if_of(key_positions("zigzag", call.problem.nk, call.world_size), call)
    return attention(q, k, v, call, **dict.fromkeys(CONSTRAINTS, whole))


@implementation(sharding="zigzag_documents", **DECLARED)
def without_documents(q, k, v, call):
    """Positions are made without documents."""
    whole = as_if_of(key_positions(call.sharding, call.problem.nk, call.world_size), call)
    return attention(q, k, v, call, causal=whole)


@implementation(sharding="zigzag_documents", **DECLARED)
def order_within_a_document(q, k, v, call):
    """Documents are put together again from the ranks' parts, one rank after another: their order is not restored."""
    held = key_positions(call.sharding, call.problem.nk, call.world_size, call.documents)
    ends = torch.tensor(call.documents or ())
    gathered = torch.cat([torch.as_tensor(one) for one in held])
    of = torch.searchsorted(ends, gathered, right=True)
    wrong = torch.empty_like(gathered)
    wrong[of.argsort(stable=True)] = torch.arange(len(gathered))
    return attention(q, k, v, call, causal=(call.positions, wrong))
