"""Merging partials in place: the identity, extreme scores, what must stay seen, and the wire."""

import itertools
import math

import pytest
import torch

from ringref.rounding import UNIT_ROUNDOFF, witness_bound
from ringverify.ring.accumulate import WIDENED, PartialResult, Running, Sum, from_rows, merge_, merge_rows, to_rows

KEYS, DIM, ROWS = 12, 3, 5
CPU = torch.device("cpu")


def partial_of(scores, values):
    """out and lse over some keys, `(rows, keys)` and `(keys, dim)`, straight from the definition."""
    return PartialResult(scores.softmax(dim=-1) @ values, scores.logsumexp(dim=-1))


def merged(first, second):
    """Both as one, neither changed."""
    out, lse = first.out.clone(), first.lse.clone()
    merge_(out, lse, *second)
    return PartialResult(out, lse)


def nothing(dtype):
    """The partial over no keys, in the same shape."""
    empty = Running((1, ROWS, 1, DIM), dtype, CPU).partial
    return PartialResult(empty.out[0, :, 0], empty.lse[0, 0])


def drawn(dtype, factor=1.0, seed=3):
    """Scores (rows, keys) and values (keys, dim)."""
    generator = torch.Generator().manual_seed(seed)
    scores = factor * torch.randn(ROWS, KEYS, generator=generator, dtype=torch.float64)
    return scores.to(dtype), torch.randn(KEYS, DIM, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(first, second):
    """Whether two partials are equal in every bit that counts."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_empty_partial_is_the_identity(dtype):
    """On either side, bit for bit, and merged with itself it stays empty: out 0, lse −inf, no NaN."""
    for factor in (1.0, 1000.0):
        some = partial_of(*drawn(dtype, factor))
        assert same_bits(some, merged(some, nothing(dtype)))
        assert same_bits(some, merged(nothing(dtype), some))
    assert same_bits(nothing(dtype), merged(nothing(dtype), nothing(dtype)))
    assert not bool(nothing(dtype).out.any())
    assert bool((nothing(dtype).lse == -math.inf).all())


def test_rows_of_nothing_among_others_stay_empty():
    """Each of the four cases in one call, in place, through strided views."""
    out, lse = torch.zeros(2, 4, DIM).transpose(0, 1), torch.full((4, 2), -math.inf)
    out_b, lse_b = torch.zeros(4, 2, DIM), torch.full((4, 2), -math.inf)
    for row, (ours, theirs) in enumerate(itertools.product((False, True), repeat=2)):
        if ours:
            out[row], lse[row] = 2.0, 1.0
        if theirs:
            out_b[row], lse_b[row] = 4.0, 1.0
    merge_(out, lse, out_b, lse_b)
    assert out[:, 0, 0].tolist() == [0.0, 4.0, 2.0, 3.0]
    assert lse[:3, 0].tolist() == [-math.inf, 1.0, 1.0]
    assert torch.equal(lse[3, 0], torch.tensor(1.0).logaddexp(torch.tensor(1.0)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [1.0, 300.0])
def test_blocks_merged_in_any_order_are_the_whole(dtype, factor):
    """Three blocks, with scores that float32's exp could not hold."""
    torch_dtype = getattr(torch, dtype)
    scores, values = drawn(torch_dtype, factor)
    blocks = [partial_of(scores[:, s], values[s]) for s in (slice(0, 2), slice(2, 7), slice(7, KEYS))]
    exact = scores.double()
    weights, wide = exact.softmax(dim=-1), exact.logsumexp(dim=-1)
    # A weight is the exponential of a difference of two lse, each rounded relative to itself; lse as a whole likewise.
    bound = witness_bound(dtype, 8 * KEYS) * (1 + wide.abs())
    for order in itertools.permutations(blocks):
        total = nothing(torch_dtype)
        for block in order:
            total = merged(total, block)
        size = values.double().abs().max()
        assert bool(((total.out.double() - weights @ values.double()).abs() <= bound[:, None] * size).all())
        assert bool(((total.lse.double() - wide).abs() <= bound).all())


def test_a_wrong_weight_is_seen():
    """The bound above is far below what the weight of the other partial, or no rescaling, would differ by."""
    scores, values = drawn(torch.float32)
    first, second = partial_of(scores[:, :5], values[:5]), partial_of(scores[:, 5:], values[5:])
    right = merged(first, second)
    swapped = torch.lerp(first.out, second.out, torch.sigmoid(first.lse - second.lse)[:, None])
    bound = witness_bound("float32", 8 * KEYS) * (1 + right.lse.abs())[:, None] * values.abs().max()
    assert not bool(((right.out - swapped).abs() <= bound).all())


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_with_far_larger_scores_takes_all_whether_it_comes_first_or_last(order):
    """exp of the gap overflows float32; the weight of the smaller block is 0, exactly."""
    low = partial_of(torch.zeros(1, 2), torch.full((2, DIM), 5.0))
    high = partial_of(torch.full((1, 2), 1000.0), torch.full((2, DIM), 7.0))
    total = merged(*[low, high][::order])
    assert torch.equal(total.out, torch.full((1, DIM), 7.0))
    assert torch.equal(total.lse, high.lse)


def test_weights_of_partials_add_up_to_one_whatever_the_scores():
    """Values of 1 give 1, exactly: a convex combination of equal numbers."""
    generator = torch.Generator().manual_seed(1)
    total = nothing(torch.float32)
    for _ in range(8):
        scores = 1000 * torch.randn(ROWS, 3, generator=generator)
        total = merged(total, PartialResult(torch.ones(ROWS, DIM), scores.logsumexp(dim=-1)))
    assert torch.equal(total.out, torch.ones(ROWS, DIM))


@pytest.mark.parametrize("place", ["first", "second"])
@pytest.mark.parametrize("tensor", ["out", "lse"])
def test_a_nan_stays_seen(place, tensor):
    """In the row where it is, and in no other; not even an empty partner hides it."""
    for partner in (partial_of(*drawn(torch.float32)), nothing(torch.float32)):
        spoilt = PartialResult(*(x.clone() for x in partial_of(*drawn(torch.float32, seed=5))))
        getattr(spoilt, tensor)[2] = math.nan
        total = merged(spoilt, partner) if place == "first" else merged(partner, spoilt)
        seen = total.out.isnan().any(dim=-1) | total.lse.isnan()
        assert seen.tolist() == [False, False, True, False, False]


def test_a_narrow_partial_is_merged_into_a_wide_one():
    """A kernel's out may be in 16 bits: the sum stays in float32, and is what the widened one gives."""
    total, other = (partial_of(*drawn(torch.float32, seed=seed)) for seed in (1, 2))
    narrow = PartialResult(other.out.bfloat16(), other.lse)
    expected = merged(total, PartialResult(narrow.out.float(), other.lse))
    found = merged(total, narrow)
    assert found.out.dtype == torch.float32
    assert same_bits(expected, found)


def test_rows_on_the_wire_are_the_partial():
    """There and back, contiguous, a row a query and head, merged there as here; empty rows too."""
    generator = torch.Generator().manual_seed(0)
    batch, rows, heads = 2, 4, 3
    parts = []
    for _ in range(2):
        out = torch.randn(batch, rows, heads, DIM, generator=generator)
        lse = torch.randn(batch, heads, rows, generator=generator)
        lse[0, 1, 2], out[0, 2, 1] = -math.inf, 0.0
        parts.append(PartialResult(out, lse))
    wire = [to_rows(part) for part in parts]
    assert wire[0].shape == (batch * rows * heads, DIM + 1)
    assert wire[0].is_contiguous()
    assert same_bits(parts[0], from_rows(wire[0], batch, heads))
    total = PartialResult(parts[0].out.clone(), parts[0].lse.clone())
    merge_(total.out.transpose(1, 2), total.lse, parts[1].out.transpose(1, 2), parts[1].lse)
    before = wire[0].clone()
    found = from_rows(merge_rows(*wire), batch, heads)
    assert torch.equal(total.out, found.out)
    # Lies otherwise in memory: on some processors torch's exp and log then differ in their last bit.
    near = 2 * UNIT_ROUNDOFF["float32"] * total.lse.abs().clamp(min=1)
    assert torch.all((total.lse == found.lse) | ((total.lse - found.lse).abs() <= near))
    assert torch.equal(before, wire[0]), "a message was written to"


@pytest.mark.parametrize("layout", ["rows together", "heads together"])
def test_a_narrow_part_is_as_if_converted_at_once(layout):
    """More elements than are converted at a time, and no multiple of that: the same bits, in a sum and in a merge."""
    heads, rows, dim = 3, 2 * WIDENED // (3 * 64) + 7, 64
    generator = torch.Generator().manual_seed(5)
    shape = (1, rows, heads, dim) if layout == "rows together" else (1, heads, rows, dim)
    part = torch.randn(shape, generator=generator).to(torch.bfloat16)
    part = part.transpose(1, 2) if layout == "rows together" else part
    lse, lse_b = (torch.randn(1, heads, rows, generator=generator) for _ in range(2))
    before = torch.randn(1, rows, heads, dim, generator=generator)

    total = Sum(before.shape, before.dtype, CPU, into=before.clone(), written=rows)
    total.add(slice(0, 1), slice(0, rows), slice(0, heads), part)
    assert torch.equal(total.total, before + part.float().transpose(1, 2))

    narrow, wide = ((before.clone().transpose(1, 2), lse.clone()) for _ in range(2))
    merge_(*narrow, part, lse_b)
    merge_(*wide, part.float(), lse_b)
    assert same_bits(narrow, wide)
