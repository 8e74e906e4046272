"""Merging partials: the identity, extreme scores, and the weights' sum."""

import math

import pytest
import torch

from ringref.rounding import witness_bound
from ringverify.ring.merge import Partial, empty, finish, from_rows, merge, merge_rows, to_rows

KEYS, DIM = 12, 3


def partial_of(scores, values):
    """The partial over some keys, (rows, keys) and (keys, dim), straight from its definition."""
    largest = scores.max(dim=-1, keepdim=True).values
    weights = (scores - largest).exp()
    return Partial(largest, weights.sum(dim=-1, keepdim=True), weights @ values)


def drawn(dtype, factor=1.0):
    """Scores (rows, keys) and values (keys, dim)."""
    generator = torch.Generator().manual_seed(3)
    scores = factor * torch.randn(5, KEYS, generator=generator, dtype=torch.float64)
    return scores.to(dtype), torch.randn(KEYS, DIM, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(first, second):
    """Whether two partials are equal in every bit that counts."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_empty_partial_is_the_identity(dtype):
    """On either side, bit for bit, and merged with itself it stays empty."""
    some = partial_of(*drawn(dtype))
    nothing = empty((5,), DIM, dtype, torch.device("cpu"))
    assert same_bits(some, merge(some, nothing))
    assert same_bits(some, merge(nothing, some))
    assert same_bits(nothing, merge(nothing, nothing))


def test_an_empty_row_has_output_zero_and_lse_minus_infinity():
    """Neither NaN nor a finite stand-in."""
    out, lse = finish(empty((2, 3), DIM, torch.float32, torch.device("cpu")))
    assert torch.equal(out, torch.zeros(2, 3, DIM))
    assert torch.equal(lse, torch.full((2, 3), -math.inf))


def test_merging_commutes_bit_for_bit():
    """So that all ranks agree on a pair, whoever receives."""
    scores, values = drawn(torch.float32, 10.0)
    first, second = partial_of(scores[:, :5], values[:5]), partial_of(scores[:, 5:], values[5:])
    assert same_bits(merge(first, second), merge(second, first))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [1.0, 300.0])
@pytest.mark.parametrize("order", [1, -1])
def test_blocks_merged_are_the_whole(dtype, factor, order):
    """Three blocks visited in either order, with scores that float32's exp could not hold."""
    torch_dtype = getattr(torch, dtype)
    scores, values = drawn(torch_dtype, factor)
    blocks = [partial_of(scores[:, s], values[s]) for s in (slice(0, 2), slice(2, 7), slice(7, KEYS))][::order]
    out, lse = finish(merge(merge(blocks[0], blocks[1]), blocks[2]))
    exact = scores.double()
    weights = exact.softmax(dim=-1)
    # A score less its maximum is rounded relative to itself, so a weight is wrong by u · |shift|, but it is also
    # exp(−|shift|): the product is below u, and a sum of terms each wrong by a few u is allowed a few u more.
    bound = witness_bound(dtype, 4 * KEYS) * (weights @ values.double().abs())
    assert bool(((out.double() - weights @ values.double()).abs() <= bound).all())
    wide = exact.logsumexp(dim=-1)
    assert bool(((lse.double() - wide).abs() <= witness_bound(dtype, 4 * KEYS) * (1 + wide.abs())).all())


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_with_far_larger_scores_takes_all_whether_it_comes_first_or_last(order):
    """exp of the gap overflows float32 (FIELD_REPORTS A1); the weight of the smaller block is 0, exactly."""
    low = partial_of(torch.zeros(1, 2), torch.full((2, DIM), 5.0))
    high = partial_of(torch.full((1, 2), 1000.0), torch.full((2, DIM), 7.0))
    out, lse = finish(merge(*[low, high][::order]))
    assert torch.equal(out, torch.full((1, DIM), 7.0))
    assert torch.equal(lse, torch.tensor([1000.0]) + torch.tensor([2.0]).log())


def test_weights_of_partials_add_up_to_one_whatever_the_scores():
    """Values of 1 give 1: nothing is shifted by a rounded log-sum-exp on the way."""
    generator = torch.Generator().manual_seed(1)
    merged = empty((4,), DIM, torch.float32, torch.device("cpu"))
    for _ in range(8):
        scores = 1000 * torch.randn(4, 3, generator=generator)
        merged = merge(merged, partial_of(scores, torch.ones(3, DIM)))
    out, _ = finish(merged)
    assert bool(((out - 1).abs() <= witness_bound("float32", 24)).all())


def test_rows_on_the_wire_are_the_partial():
    """There and back, and merged as rows."""
    scores, values = drawn(torch.float32)
    first, second = partial_of(scores[:, :5], values[:5]), partial_of(scores[:, 5:], values[5:])
    assert same_bits(first, from_rows(to_rows(first)))
    assert to_rows(first).is_contiguous()
    assert same_bits(merge(first, second), from_rows(merge_rows(to_rows(first), to_rows(second))))
