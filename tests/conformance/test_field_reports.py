"""What the reports that the project started from say went wrong, and our ring: one test a report, or a few.

`docs/field-reports.md` says which test holds which report; those that are not here are older than this file.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDINGS
from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Runner
from ringverify.ring.attention import ring_attention
from ringverify.ring.declared import ring
from ringverify.ring.shards import shard
from ringverify.ring.transport import Transport
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.watch.memory import measured

pytestmark = pytest.mark.timeout(120)

EVERYTHING = ("out", "lse", "dq", "dk", "dv")


def on_ranks(program, world_size, *, observe=None, watch=False):
    """The run of `program()` on each rank of a simulated world, which may not fail."""
    run = SimulatedWorld(observe=observe).run(
        lambda _: program(), None, world_size=world_size, seed=0, deadline=60, watch=watch
    )
    assert run.failure is None, run.failure.detail
    return run


def is_right(case):
    """Whether out, lse and all gradients are the oracle's on every rank, within the error allowed."""
    observation = Runner(ring, SimulatedWorld()).run(case, gradients=True)
    assert observation.failure is None, f"{case}\n{observation.failure.detail}"
    margin, finding = worst(case, ring.capabilities, observation, EVERYTHING)
    assert margin <= 1, f"{case}\n{finding}"


def peaks(world_size, length, budget=None):
    """The most that each rank allocates, forward and backward."""

    def program():
        with measured():
            q, k, v = (shard(torch.zeros(1, length, 2, 8), sharding="zigzag").requires_grad_() for _ in range(3))
            lengths = {"query_length": length, "key_length": length, "memory_budget": budget}
            ring_attention(q, k, v, sharding="zigzag", causal=True, **lengths).sum().backward()

    return [rank.peak_bytes for rank in on_ranks(program, world_size, watch="memory").memory]


def test_float16_works_past_its_range_and_past_1024_tokens():
    """R2: scores beyond 65504, a thousand rows and more, sums and log-sum-exps in float32."""
    for length in (1030, 2050):
        problem = Problem(query_length=length, head_dim=4, dtype="float16", causal=True)
        is_right(Case(problem=problem, sharding="zigzag", world_size=2, values="float16_limits", cotangent="both"))


@pytest.mark.parametrize("heads", ["split", "shared"])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.nightly) for size in (3, 4))])
@pytest.mark.by_day(1)
def test_every_rate_and_segment_is_right_on_several_ranks(world_size, heads):
    """R3, R5: every length, segment and rate of a dense sweep, whether or not anything lines up, and gradients too."""
    sweep = itertools.product((1, 2, 3, 5, 8, 9), (1, 2, 3, 4, 7, 16), (1, 2, 3, 5))
    for place, (length, segment, rate) in enumerate(sweep):
        dilation = Dilation(((segment, rate), (2 * segment, 1)), heads=heads)
        problem = Problem(query_length=length, heads=3, head_dim=2, dilation=dilation, causal=place % 2 == 0)
        sharding = SHARDINGS[place % len(SHARDINGS)]
        is_right(Case(problem=problem, sharding=sharding, world_size=world_size, cotangent="both", seed=place))


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.by_day(1)
def test_no_length_has_to_be_divisible_by_anything(sharding):
    """R4: primes and fewer tokens than ranks, on prime worlds; causal, with a window, and with segments."""
    patterns = ({"causal": True}, {"window": (3, 2)}, {"dilation": Dilation(((4, 2), (6, 3)))})
    for world_size, length, pattern in itertools.product((3, 5, 7), (1, 2, 11, 13, 17), patterns):
        problem = Problem(query_length=length, heads=2, head_dim=2, **pattern)
        is_right(Case(problem=problem, sharding=sharding, world_size=world_size, cotangent="both"))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_query_meets_the_keys_of_every_rank(sharding):
    """R6: with equal scores, out is the mean of all values, and every value gets its share of every query."""

    def program():
        q = shard(torch.zeros(1, 6, 1, 2), sharding=sharding)
        k = shard(torch.zeros(1, 6, 1, 2), sharding=sharding, of="keys")
        v = shard(2.0 ** torch.arange(6.0).view(1, 6, 1, 1), sharding=sharding, of="keys").requires_grad_()
        out = ring_attention(q, k, v, sharding=sharding)
        out.backward(torch.full_like(out, 6.0))
        return (6 * out).round().unique().tolist(), v.grad.round().unique().tolist()

    # 63 is the sum of all values; each of six queries gives a value a sixth of its cotangent of 6.
    assert on_ranks(program, 2).results == (([63.0], [6.0]),) * 2


def test_more_ranks_hold_less_each():
    """R7: at a fixed length the peak goes down with the number of ranks, receive buffers included."""
    by_size = {world_size: max(peaks(world_size, 4096)) for world_size in (1, 2, 4, 8)}
    assert by_size[1] > by_size[2] > by_size[4] > by_size[8]
    assert by_size[8] < by_size[4] * 0.75 < by_size[2] * 0.75**2


def test_memory_is_linear_in_length_and_a_budget_bounds_the_tiles():
    """R1: twice the length takes at most twice the memory, not four times; a smaller budget, a smaller peak."""
    small, middle, large = (max(peaks(2, length, budget=50_000)) for length in (1024, 2048, 4096))
    assert large <= 2 * middle <= 4 * small
    assert large < max(peaks(2, 4096))


@pytest.mark.parametrize("causal", [False, True])
def test_a_world_of_one_holds_what_one_call_holds(causal):
    """R14: beside torch's own attention, forward and backward, a few log-sum-exps at most."""

    def plain(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    def program(attend):
        q, k, v = (torch.zeros(1, 2048, 4, 16, requires_grad=True) for _ in range(3))
        dout = torch.zeros_like(q)
        with measured():
            attend(q, k, v).backward(dout)

    ours, theirs = (
        on_ranks(functools.partial(program, attend), 1, watch="memory").memory[0].peak_bytes
        for attend in (functools.partial(ring_attention, causal=causal), plain)
    )
    lse = 2048 * 4 * 4
    assert ours <= theirs + 3 * lse


def test_a_second_derivative_is_refused_with_a_reason():
    """R10: through the ring, once; twice raises, rather than be silently zero."""
    for world_size in (1, 2):

        def program():
            q, k, v = (torch.ones(1, 2, 1, 2, requires_grad=True) for _ in range(3))
            (dq,) = torch.autograd.grad(ring_attention(q, k, v).square().sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match=r"twice|once_differentiable|second"):
                dq.sum().backward()
            return True

        assert all(on_ranks(program, world_size).results)


class Tiles(TorchDispatchMode):
    """Notes every product of matrices and every fused attention."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("mm", "attention", "matmul")):
            self.note()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_a_hop_is_posted_before_the_tiles_that_hide_it(kernel):
    """R11: a rank posts, computes, and waits then; never does it wait for a message with nothing computed meanwhile."""
    world_size = 4
    seen = [[] for _ in range(world_size)]

    def observe(event):
        seen[event.operation.rank].append(event.moment)

    def program():
        with Tiles(lambda: seen[dist.get_rank()].append("tile")):
            q, k, v = (torch.ones(1, 3, 1, 4) for _ in range(3))
            ring_attention(
                q, k, v, kernel=kernel, query_length=3 * world_size, key_length=3 * world_size, check_shards=False
            )

    on_ranks(program, world_size, observe=observe)
    for moments in seen:
        order = [moment for moment, _ in itertools.groupby(moments)]
        assert order == ["posted", "tile", "finished"] * (world_size - 1) + ["tile"]


@pytest.mark.parametrize("kernel", ["auto", "streaming"])
@pytest.mark.parametrize(("sharding", "causal"), [("contiguous", False), ("zigzag", True)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_gradient_travels_while_tiles_are_computed(monkeypatch, world_size, sharding, causal, kernel):
    """R11, backward: between the start of a gradient's exchange and the wait for it every rank computes tiles."""
    seen = [[] for _ in range(world_size)]
    start = Transport.start

    def noted(self, sends, receives):
        wait = start(self, sends, receives)
        if not any(buffer.dtype == torch.float32 for buffer, _ in [*sends, *receives]):
            return wait  # keys and values are bfloat16
        seen[self.rank].append("posted")

        def then():
            seen[self.rank].append("waited for")
            wait()

        return then

    def program():
        lengths = {"query_length": 40 * world_size, "key_length": 40 * world_size}
        q, k, v = (torch.ones(1, 40, 1, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        how = {"sharding": sharding, "causal": causal, "kernel": kernel, "memory_budget": 1}  # tiles as small as can be
        with Tiles(lambda: seen[dist.get_rank()].append("tile")):
            ring_attention(q, k, v, **how, **lengths).sum().backward()

    monkeypatch.setattr(Transport, "start", noted)
    on_ranks(program, world_size)
    for moments in seen:
        order = [moment for moment, _ in itertools.groupby(moments)]
        assert order == ["tile", *["posted", "tile", "waited for", "tile"] * (world_size - 1)]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_rows_and_blocks_without_keys_merge_to_nothing(sharding):
    """R13: positions in no document, blocks that no query needs, ranks without tokens; no NaN, and lse −inf."""
    for world_size, length in itertools.product((2, 3, 5), (1, 4, 9)):
        documents = (length // 3, length // 3, length - length // 4)
        problem = Problem(query_length=length, heads=2, head_dim=2, documents=documents, causal=True)
        is_right(Case(problem=problem, sharding=sharding, world_size=world_size, cotangent="both"))
        is_right(Case(problem=Problem(query_length=length, key_length=0, head_dim=2), world_size=world_size))
