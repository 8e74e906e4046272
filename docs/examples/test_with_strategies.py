"""Property-based tests of one's own: a kernel held to the oracle, and an adapter case by case."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringverify
from ringref.attention import attention
from ringverify import AttentionCall, implementation
from ringverify.implementation import Capabilities
from ringverify.strategies import cases, inputs, problems


def windowed(q, k, v, left, right):
    """Attention of one head within a window: the function under test. Tensors are `(sequence, head_dim)`."""
    distance = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None]
    inside = (distance >= -left) & (distance <= right)
    scores = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~inside, -torch.inf)
    return scores.softmax(dim=-1) @ v


windows = problems(Capabilities(causal="never", window=True, dtypes=("float64",)), max_length=16).filter(
    lambda problem: problem.window is not None and None not in problem.window
)


@settings(deadline=None)
@given(windows.flatmap(lambda problem: st.tuples(st.just(problem), inputs(problem, values=("normal", "integers")))))
def test_a_window_is_the_oracles(drawn):
    """Every batch entry and head of a problem with a window, drawn with inputs of its shape."""
    problem, x = drawn
    right = attention(problem, x.q, x.k, x.v, x.dout, x.dlse)
    for batch, head in np.ndindex(problem.batch, problem.heads):
        q, k, v = (torch.from_numpy(each[batch, :, head].copy()) for each in (x.q, x.k, x.v))
        np.testing.assert_allclose(windowed(q, k, v, *problem.window), right.out[batch, :, head], rtol=1e-9, atol=1e-9)


@implementation(sharding="contiguous", causal="never", window=True, gradients=False)
def gathered(q, k, v, call: AttentionCall):
    """The same function on a ring: each rank gathers all keys and computes its own queries."""
    rank, size = call.rank, call.world_size
    every = [torch.empty_like(torch.stack((k, v))) for _ in range(size)]
    torch.distributed.all_gather(every, torch.stack((k, v)), group=call.group)
    k, v = torch.cat(every, dim=2)
    left, right = (k.shape[1] if side is None else side for side in call.window or (None, None))
    start = rank * q.shape[1]
    padded = torch.cat((q.new_zeros(q.shape[0], start, *q.shape[2:]), q), dim=1)  # rows before this rank's
    out = [
        torch.stack([windowed(padded[b, :, h], k[b, :, h], v[b, :, h], left, right) for h in range(q.shape[2])], 1)
        for b in range(q.shape[0])
    ]
    return torch.stack(out)[:, start:]


@settings(deadline=None, max_examples=30)
@given(cases(gathered.capabilities, world_sizes=(1, 2, 3), max_length=12))
def test_the_ring_is_right_on_every_case(case):
    """What fails is shrunk by Hypothesis: fewer ranks, shorter, fewer heads, plain values."""
    ringverify.check_case(gathered, case)
