"""One problem on several ranks of the simulated world, whole again: results, hazards and traffic."""

import contextlib

import numpy as np
import torch
import torch.distributed as dist

from ringref.sharding import key_positions, query_positions, replicates_queries
from ringverify.ring.attention import attend
from ringverify.ring.calls import Engine
from ringverify.ring.group import Ring
from ringverify.worlds.simulated import SimulatedWorld

WORLD = SimulatedWorld()


def run_on_ranks(
    problem,
    inputs,
    sharding,
    world_size,
    *,
    seed=0,
    conditions=None,
    watch=False,
    lay=torch.clone,
    products=contextlib.nullcontext,
    **how,
):
    """The run, every rank returning out, lse, dq, dk and dv.

    `lay` copies what a rank is given to where it shall lie, and ranks compute within `products`.
    """
    queries, keys = (positions(problem, sharding, world_size, of=of) for of in ("queries", "keys"))

    def program(_):
        rank = dist.get_rank()
        q, k, v = inputs.q[:, queries[rank]], inputs.k[:, keys[rank]], inputs.v[:, keys[rank]]
        leaves = [lay(x).requires_grad_() for x in (q, k, v)]
        ring = Ring(None, rank, world_size)
        with products():
            out, lse = attend(*leaves, problem=problem, sharding=sharding, ring=ring, engine=Engine(**how))
            dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse[:, :, queries[rank]]
            gradients = torch.autograd.grad([out, lse], leaves, [lay(inputs.dout[:, queries[rank]]), lay(dlse)])
        return [out.detach(), lse.detach(), *gradients]

    run = WORLD.run(program, None, world_size=world_size, seed=seed, deadline=30, conditions=conditions, watch=watch)
    assert run.failure is None, f"{run.failure.message}\n{run.failure.detail}"
    return run


def positions(problem, sharding, world_size, *, of):
    """Of every rank, as tensors."""
    made = query_positions if of == "queries" else key_positions
    length = problem.nq if of == "queries" else problem.nk
    return [torch.as_tensor(one) for one in made(sharding, length, world_size)]


def whole(problem, run, sharding, world_size):
    """out, lse, dq, dk and dv by position; with replicated queries every rank must return the same bits."""
    queries, keys = (positions(problem, sharding, world_size, of=of) for of in ("queries", "keys"))
    together = []
    for number, (at, axis) in enumerate(((queries, 1), (queries, 2), (queries, 1), (keys, 1), (keys, 1))):
        shards = [results[number] for results in run.results]
        if replicates_queries(sharding) and at is queries:
            assert all(torch.equal(shards[0], shard) for shard in shards)
            together.append(shards[0])
        else:
            order = torch.from_numpy(np.argsort(torch.cat(at).numpy()))
            together.append(torch.cat(shards, dim=axis).index_select(axis, order))
    return together


def bits(run):
    """Everything that came back."""
    return [tensor.contiguous().view(torch.uint8) for results in run.results for tensor in results if tensor.numel()]


def same(first, second):
    """Whether two runs gave the same bits."""
    return all(torch.equal(a, b) for a, b in zip(bits(first), bits(second), strict=True))
