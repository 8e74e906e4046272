"""A cache that grows: a prompt in chunks and then single tokens, call by call, as a program of a rank."""

import itertools
import random

import torch
import torch.distributed as dist
from by_tile import inputs_of

from ringref.problem import Problem
from ringref.sharding import PageTable, key_positions, query_positions
from ringverify.ring import ring_attention


def page_table(rng, length, world_size, size=None):
    """A table with room for a length and some more: dealt out in turn, in one piece a rank, or in no order at all."""
    size = size or rng.choice((1, 2, 3, 5, 16))
    pages = list(range(-(-length // size) + rng.randint(0, 2)))
    match rng.choice(("in turn", "together", "shuffled")):
        case "in turn":
            held = [pages[rank::world_size] for rank in range(world_size)]
        case "together":
            cuts = [0, *sorted(rng.choices(range(len(pages) + 1), k=world_size - 1)), len(pages)]
            held = [pages[a:b] for a, b in itertools.pairwise(cuts)]
        case _:
            rng.shuffle(pages)
            held = [[page for page in pages if page % 7 % world_size == rank] for rank in range(world_size)]
    return PageTable(size, tuple(map(tuple, held)))


def chunks(rng, length):
    """Sizes of calls: a few chunks of a prompt, and tokens."""
    found = []
    while (left := length - sum(found)) > 0:
        found.append(min(left, rng.choice((1, 1, rng.randint(1, 9), rng.randint(1, 30)))))
    return found


def whole_problem(seed, length):
    """Causal attention of a whole sequence, of which a cache gives row by row the same."""
    rng = random.Random(seed)
    return Problem(
        batch=rng.choice((1, 2)),
        query_length=length,
        heads=4,
        key_heads=rng.choice((1, 2, 4)),
        head_dim=4,
        value_dim=rng.choice((4, 6)),
        causal=True,
        window=rng.choice((None, (6, 0), (19, 0))),
        softcap=rng.choice((None, 2.0)),
        sinks=rng.random() < 0.5,
    )


def sinks_of(problem):
    """One a head, of unlike sizes, or none."""
    return torch.linspace(-2, 3, problem.heads) if problem.sinks else None


def grown(asked):
    """`(positions, out, lse)` of every call on this rank, as arrays."""
    problem, sharding, sizes, how = asked
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, _, _ = inputs_of(problem)
    found, cached = [], 0
    for rows in sizes:
        cached += rows
        at = query_positions(sharding, rows, size)[rank] + cached - rows
        held = key_positions(sharding, cached, size)[rank]
        with torch.no_grad():
            out, lse = ring_attention(
                q[:, at],
                k[:, held],
                v[:, held],
                sharding=sharding,
                query_length=rows,
                key_length=cached,
                causal=True,
                window=problem.window,
                softcap=problem.softcap,
                sinks=sinks_of(problem),
                return_lse=True,
                **how,
            )
        found.append((at, out.numpy(), lse.numpy()))
    return found
