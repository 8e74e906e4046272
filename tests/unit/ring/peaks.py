"""The most that a rank holds during a call, in the simulated world."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ringref.sharding import Sharding, query_positions
from ringverify.ring.attention import ring_attention
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.watch.memory import measured

DIM = 16


class Call(NamedTuple):
    """A call on several ranks."""

    n: int
    ranks: int
    causal: bool = False
    sharding: Sharding = "contiguous"
    method: str = "ring"
    memory_budget: int | None = None
    dtype: torch.dtype = torch.float32
    backward: bool = True
    heads: int = 1
    window: tuple[int, int] | None = None
    softcap: float | None = None
    kernel: str = "auto"

    @property
    def positions(self) -> int:
        """Of the rank that has most."""
        return max(len(one) for one in query_positions(self.sharding, self.n, self.ranks))


def peak(call):
    """The largest peak of a rank in bytes, q counted, and what it was made of."""

    def program(_):
        rows = len(query_positions(call.sharding, call.n, call.ranks)[dist.get_rank()])
        q, k, v = (
            torch.ones(1, rows, call.heads, DIM, dtype=call.dtype, requires_grad=call.backward) for _ in range(3)
        )
        with measured():
            out = ring_attention(
                q,
                k,
                v,
                sharding=call.sharding,
                query_length=call.n,
                key_length=call.n,
                causal=call.causal,
                window=call.window,
                softcap=call.softcap,
                kernel=call.kernel,
                method=call.method,
                memory_budget=call.memory_budget,
                check_shards=False,
            )
            gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if call.backward else ()
        return q.nbytes, len(gradients)

    run = SimulatedWorld().run(program, None, world_size=call.ranks, seed=0, deadline=100, watch="memory")
    assert run.failure is None, f"{run.failure.message}\n{run.failure.detail}"
    worst = max(run.memory, key=lambda memory: memory.peak_bytes)
    return worst.peak_bytes + run.results[worst.rank][0], "\n".join(worst.describe())
