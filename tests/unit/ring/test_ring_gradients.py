"""Sums and partials whose memory holds nothing until tiles write to it: in any order, of any rows, batch and heads."""

import random

import pytest
import torch

from ringref.problem import Problem
from ringverify.ring.accumulate import PartialResult, Running, Sum, merge_
from ringverify.ring.gradients import Gradients, TileGradient
from ringverify.ring.plan.kv_slices import KVTensors, everything
from ringverify.ring.plan.rectangles import Rectangle
from ringverify.ring.plan.rows import Span

B, R, H, D = 2, 7, 3, 2
CPU = torch.device("cpu")


def places(rng):
    """Where tiles lie: whole rows in order first, as a dense call has them, then anything."""
    yield slice(0, B), slice(0, 3, 1), slice(0, H, 1)
    for _ in range(rng.randint(0, 6)):
        start = rng.randrange(R)
        rows = slice(start, rng.randint(start + 1, R), rng.randint(1, 2))
        heads = rng.choice([slice(0, H, 1), slice(1, H, 1), slice(0, 1, 1)])
        yield rng.choice([slice(0, B), slice(1, 2)]), rows, heads


@pytest.fixture(autouse=True)
def _memory_is_not_clean(monkeypatch):
    """What has not been written is NaN, so that reading it shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_sum_of_what_was_added(dtype):
    """Against zeros to which the same is added, 300 orders; small whole numbers, so that sums are exact."""
    for seed in range(300):
        rng = random.Random(seed)
        total, right = Sum(torch.Size((B, R, H, D)), torch.float32, CPU), torch.zeros(B, R, H, D)
        for batch, rows, heads in places(rng):
            part = torch.randint(-9, 9, right[batch, rows, heads].shape).to(dtype).transpose(1, 2)
            total.add(batch, rows, heads, part)
            right[batch, rows, heads] += part.transpose(1, 2)
            if rng.random() < 0.2:
                assert torch.equal(total.total, right), seed
        assert torch.equal(total.total, right), seed


def test_all_rows_at_once_are_taken_without_a_copy():
    """The first tile of a dense call is the sum so far, as the kernel returned it; what follows is added to it."""
    part = torch.ones(B, R, H, D).transpose(1, 2)
    total = Sum(torch.Size((B, R, H, D)), torch.float32, CPU)
    whole = slice(0, B), slice(0, R, 1), slice(0, H, 1)
    total.add(*whole, part)
    assert total.total.data_ptr() == part.data_ptr()
    total.add(*whole, part.clone())
    assert torch.equal(total.total, torch.full((B, R, H, D), 2.0))


@pytest.mark.parametrize(("narrow", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_partial_is_the_merge_of_what_was_merged(narrow, wide):
    """Against the empty partial merged with the same, 300 orders, looked at in between or not; in either dtype."""
    for seed in range(300):
        rng = random.Random(seed)
        running = Running((B, R, H, D), wide, CPU)
        right = PartialResult(torch.zeros(B, R, H, D, dtype=wide), torch.full((B, H, R), -torch.inf, dtype=wide))
        every = slice(0, B), slice(0, R, 1), slice(0, H, 1)
        start = rng.randrange(R)
        part = every[0], slice(start, rng.randint(start + 1, R), 1), every[2]
        first = rng.choice([[], [every], [every, part], [every, part], [every, every]])
        for batch, rows, heads in (*first, *(places(rng) if rng.random() < 0.6 else ())):
            out, lse = right.out[batch, rows, heads].transpose(1, 2), right.lse[batch, heads, rows]
            out_b, lse_b = torch.randn(out.shape).to(narrow), torch.randn(lse.shape).to(wide)
            out_b, lse_b = out_b.masked_fill(lse_b[..., None] < -1, 0.0), lse_b.masked_fill(lse_b < -1, -torch.inf)
            merge_(out, lse, out_b, lse_b)
            running.merge(batch, rows, heads, out_b, lse_b)
            if rng.random() < 0.1:
                assert all(torch.equal(got, one) for got, one in zip(running.partial, right, strict=True)), seed
        for _ in range(2):  # asking changes nothing
            found = running.result(narrow)
            assert found.out.dtype == narrow
            assert torch.equal(found.out, right.out.to(narrow)), seed
            assert torch.equal(found.lse, right.lse), seed


def test_the_gradient_of_a_block_is_the_sum_of_its_tiles():
    """In memory that holds nothing yet, or holds what came before; rows that no tile touches are 0, or as they were."""
    problem = Problem(query_length=R, heads=H, head_dim=D, value_dim=D + 1)
    whole = everything(problem, (Span(0, H),), R)
    for seed in range(200):
        rng, empty = random.Random(seed), bool(seed % 2)
        before = torch.full((whole.numel,), torch.nan) if empty else torch.arange(float(whole.numel))
        block = KVTensors.of_flat(whole, before)
        gradients = Gradients(block, empty=empty)
        right = [x.clone() for x in KVTensors.of_flat(whole, before.nan_to_num(0.0)).parts[0]]
        start = 0
        for _ in range(rng.randint(0, 4)):
            stop = rng.randint(start + 1, R) if start < R else rng.randint(1, R)
            tile = slice(start if start < R else 0, stop)
            region = Rectangle(0, (0, 1), Span(0, 1), Span(0, H), Span(0, 1), Span(0, R))
            parts = [torch.randint(-9, 9, (1, H, tile.stop - tile.start, x.size(3))).float() for x in right]
            gradients.add(TileGradient(region, tile, *parts))
            for total, part in zip(right, parts, strict=True):
                total[:, tile] += part.transpose(1, 2)
            start = stop
        gradients.complete()
        assert all(torch.equal(got, one) for got, one in zip(block.parts[0], right, strict=True)), seed
