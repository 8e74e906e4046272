"""One block's attention and gradients against the dense formula under autograd, and what a mask keeps out."""

import math

import pytest
import torch

from ringref.rounding import witness_bound
from ringverify.ring.block import Queries, attend, cotangents, gradients
from ringverify.ring.mask import FULL, Mask
from ringverify.ring.merge import finish, merge

B, S, T, D, E = 2, 5, 7, 3, 4
SPLIT = 4  # keys of the first of two blocks
TERMS = 64  # roundings on the longest path here, generously: dot products of at most 7, exp, a sum, a merge, a product


def drawn(seed, heads, groups, dtype=torch.float64):
    """q scaled (B, H, S, D), k (P, T, D), v (P, T, E), dout (B, H, S, E), dlse (B, H, S)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    pairs = B * groups
    return (
        normal(B, heads, S, D),
        normal(pairs, T, D),
        normal(pairs, T, E),
        normal(B, heads, S, E),
        normal(B, heads, S),
    )


def multiplicities(seed, heads, largest):
    """Random, with some empty rows and some keys that nobody attends."""
    generator = torch.Generator().manual_seed(seed)
    m = torch.randint(0, largest + 1, (B, heads, S, T), generator=generator)
    m[0, :, 1] = 0
    m[..., 2] = 0
    return m


def mask_of(m, dtype):
    """The mask of multiplicities."""
    return Mask(m > 0, m.to(dtype) if bool((m > 1).any()) else None)


def dense(q, k, v, m, softcap):
    """out and lse by the definition, for autograd; empty rows are cut off before anything divides by zero."""
    heads, groups = q.size(1), k.size(0) // B
    k, v = (x.view(B, groups, T, -1).repeat_interleave(heads // groups, dim=1) for x in (k, v))
    s = q @ k.transpose(2, 3)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    some = m.sum(dim=-1) > 0
    total = torch.where(some, (m * s.exp()).sum(dim=-1), 1.0)
    out = ((m * s.exp()) @ v) / total[..., None]
    return out, torch.where(some, total.log(), -math.inf), some


def ours(q, k, v, m, softcap, dout, dlse):
    """out, lse, dq, dk, dv from two blocks."""
    groups = k.size(0) // B
    queries = Queries(q, softcap, groups)
    blocks = [(slice(0, SPLIT), 0), (slice(SPLIT, T), 1)]
    masks = [FULL if m is None else mask_of(m[..., rows], q.dtype) for rows, _ in blocks]
    finite = [bool(torch.isfinite(torch.cat([k[:, rows], v[:, rows]], dim=-1)).all()) for rows, _ in blocks]
    parts = [
        attend(queries, k[:, rows].contiguous(), v[:, rows].contiguous(), masks[i], finite=finite[i])
        for rows, i in blocks
    ]
    partial = merge(*parts)
    out, lse = finish(partial)
    rows_of = cotangents(queries, (partial.max, partial.sum), out, dout, dlse)
    got = [
        gradients(queries, rows_of, k[:, rows].contiguous(), v[:, rows].contiguous(), masks[i], finite=finite[i])
        for rows, i in blocks
    ]
    dq = (got[0][0] + got[1][0]).view(q.shape)
    return out, lse, dq, torch.cat([got[0][1], got[1][1]], dim=1), torch.cat([got[0][2], got[1][2]], dim=1)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("largest", [None, 1, 3])
def test_two_blocks_are_dense_attention_forward_and_backward(heads, groups, softcap, largest):
    """In float64 against torch's autograd of the definition, with and without masks and multiplicities."""
    q, k, v, dout, dlse = drawn(heads, heads, groups)
    m = None if largest is None else multiplicities(5, heads, largest)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    times = torch.ones(B, heads, S, T) if m is None else m
    out, lse, some = dense(*leaves, times, softcap)
    expected = torch.autograd.grad([out, lse[some]], leaves, [dout, dlse[some]])
    actual = ours(q, k, v, m, softcap, dout, dlse)
    # Sums of at most T or S terms of size about 1 each cancel at worst to 0: the bound is absolute, in units of the
    # largest that the terms could add up to.
    size = 1 + max(float(x.abs().max()) for x in (q, k, v, dout, dlse)) ** 4 * T * S * D
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, (out, lse, *expected), strict=True):
        e = e.detach()
        assert bool(((a == e) | ((a - e).abs() <= witness_bound("float64", TERMS) * size)).all()), name


def test_empty_rows_ignore_even_a_cotangent_that_is_not_finite():
    """The derivative of something of lse = −inf often is not."""
    q, k, v, dout, dlse = drawn(1, 2, 2)
    m = multiplicities(5, 2, 1)
    clean = ours(q, k, v, m, None, dout, dlse)
    dout[0, :, 1], dlse[0, :, 1] = math.nan, math.inf
    for a, e in zip(ours(q, k, v, m, None, dout, dlse), clean, strict=True):
        assert torch.equal(a, e)
    assert torch.equal(clean[2][0, :, 1], torch.zeros(2, D, dtype=q.dtype))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_key_that_nobody_attends_may_hold_anything(poison, softcap):
    """Not one bit of any result moves, and its own gradients are zero."""
    q, k, v, dout, dlse = drawn(2, 4, 2)
    m = multiplicities(5, 4, 2)
    clean = ours(q, k, v, m, softcap, dout, dlse)
    k[:, 2], v[:, 2] = poison, poison
    poisoned = ours(q, k, v, m, softcap, dout, dlse)
    for a, e in zip(poisoned, clean, strict=True):
        assert torch.equal(a, e)
    assert not bool(poisoned[3][:, 2].any())
    assert not bool(poisoned[4][:, 2].any())


@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_the_queries_that_attend_it(tensor, poison):
    """A key that some rows attend and others do not: the others' out, lse and dq keep their bits."""
    heads = 2
    q, k, v, dout, dlse = drawn(3, heads, heads)
    m = multiplicities(6, heads, 1)
    m[:, :, :, 0] = torch.tensor([1, 0, 0, 1, 0])
    spared = [2, 4]
    clean = ours(q, k, v, m, None, dout, dlse)
    {"k": k, "v": v}[tensor][:, 0] = poison
    poisoned = ours(q, k, v, m, None, dout, dlse)
    for a, e in zip(poisoned[:3], clean[:3], strict=True):
        assert torch.equal(a[:, :, spared], e[:, :, spared])
    assert not bool(torch.isfinite(poisoned[0][:, :, [0, 3]]).all())


@pytest.mark.parametrize("tensor", ["q", "dout"])
def test_a_query_that_is_not_finite_stays_with_the_keys_that_it_attends(tensor):
    """dk and dv of the other keys keep their bits."""
    heads = 2
    q, k, v, dout, dlse = drawn(4, heads, heads)
    m = multiplicities(7, heads, 1)
    m[:, :, 3] = torch.tensor([1, 1, 0, 0, 0, 1, 0])
    spared = [2, 3, 4, 6]
    clean = ours(q, k, v, m, None, dout, dlse)
    {"q": q, "dout": dout}[tensor][:, :, 3] = math.nan
    poisoned = ours(q, k, v, m, None, dout, dlse)
    for a, e in zip(poisoned[3:], clean[3:], strict=True):
        assert torch.equal(a[:, spared], e[:, spared])
    assert bool(torch.isnan(poisoned[3][:, [0, 1, 5]]).all())


def test_a_large_excluded_score_does_not_reach_the_maximum():
    """Else every weight of the row would vanish; and its own, far past exp's range, is 0 and not inf · 0."""
    q, k, v, dout, dlse = drawn(5, 1, 1, torch.float32)
    m = torch.ones(B, 1, S, T, dtype=torch.int64)
    m[..., 2] = 0
    clean = ours(q, k, v, m, None, dout, dlse)
    k[:, 2] *= 2.0**20
    for a, e in zip(ours(q, k, v, m, None, dout, dlse), clean, strict=True):
        assert torch.equal(a, e)
