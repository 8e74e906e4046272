"""The float64 merge against witnesses that share nothing with it: attention over all keys, and torch's autograd."""

import itertools
import math

import numpy as np
import pytest
import torch

from ringref.attention import attention
from ringref.merge import merged
from ringref.problem import Problem
from ringref.rounding import Pipeline, merge_allowed, witness_bound

DRAW = np.random.default_rng(0)


def partials(keys):
    """Attention of 3 queries over pieces of 6 keys, and over all of them."""
    shape = {"batch": 2, "heads": 2, "head_dim": 4}
    q = DRAW.standard_normal((2, 3, 2, 4))
    k, v = DRAW.standard_normal((2, 2, 6, 2, 4))

    def over(piece):
        problem = Problem(query_length=3, key_length=piece.stop - piece.start, **shape)
        return attention(problem, q, k[:, piece], v[:, piece])

    return [over(slice(a, b)) for a, b in itertools.pairwise(keys)], over(slice(0, 6))


@pytest.mark.parametrize("keys", [(0, 6), (0, 2, 6), (0, 1, 2, 6), (0, 0, 6), (0, 6, 6), (0, 3, 3, 6)])
def test_merged_partials_are_the_attention_over_all_keys(keys):
    """Some pieces have no keys."""
    parts, whole = partials(keys)
    found = merged(np.stack([one.out for one in parts]), np.stack([one.lse for one in parts]))
    close = witness_bound("float64", 100)
    np.testing.assert_allclose(found.out, whole.out, rtol=close, atol=close)
    np.testing.assert_allclose(found.lse, whole.lse, rtol=close, atol=close)


def test_two_empty_partials_are_an_empty_one():
    """out 0 and lse −inf; gradients of 0."""
    out, lse = np.zeros((2, 1, 1, 1, 2)), np.full((2, 1, 1, 1), -np.inf)
    found = merged(out, lse, np.ones((1, 1, 1, 2)), np.ones((1, 1, 1)))
    assert (found.out == 0).all()
    assert (found.lse == -np.inf).all()
    assert (found.dout == 0).all()
    assert (found.dlse == 0).all()


def test_far_apart_the_larger_one_is_the_result():
    """Nothing overflows, and what is 20,000 smaller has no weight at all."""
    out = np.array([2.0, -3.0]).reshape(2, 1, 1, 1, 1)
    found = merged(out, np.array([1e4, -1e4]).reshape(2, 1, 1, 1))
    assert found.out.item() == 2.0
    assert found.lse.item() == 1e4
    equal = merged(out, np.full((2, 1, 1, 1), 1e4))
    assert equal.out.item() == -0.5
    assert equal.lse.item() == 1e4 + math.log(2.0)


def test_gradients_are_those_of_autograd():
    """Of out and of lse of every partial, through out and through lse."""
    out, lse = DRAW.standard_normal((3, 2, 4, 2, 5)), DRAW.standard_normal((3, 2, 2, 4))
    dout, dlse = DRAW.standard_normal((2, 4, 2, 5)), DRAW.standard_normal((2, 2, 4))
    leaves = [torch.tensor(one, requires_grad=True) for one in (out, lse)]
    weights = torch.softmax(leaves[1], 0).transpose(2, 3)[..., None]
    results = [(weights * leaves[0]).sum(0), torch.logsumexp(leaves[1], 0)]
    expected = torch.autograd.grad(results, leaves, [torch.tensor(dout), torch.tensor(dlse)])
    found = merged(out, lse, dout, dlse)
    close = witness_bound("float64", 100)
    for mine, theirs in zip((found.dout, found.dlse), expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=close, atol=close)


def test_the_bound_is_wider_where_less_is_promised_and_exact_where_all_is_empty():
    """In bfloat16, in sixteen-bit sums, of large log-sum-exps, of lse in base 2; and 0 in empty rows."""
    out, lse = DRAW.standard_normal((2, 1, 2, 1, 3)), DRAW.standard_normal((2, 1, 1, 2))

    def bound(lse=lse, natural=True, **pipeline):
        allowed = merge_allowed(out, lse, merged(out, lse), Pipeline(**pipeline), natural=natural)
        return np.concatenate([allowed.out.ravel(), allowed.lse.ravel()]).max()

    narrow = bound(dtype="float32")
    assert bound(dtype="float64") < narrow
    assert narrow < bound(dtype="bfloat16")
    assert bound(dtype="bfloat16") < bound(dtype="bfloat16", accumulates="bfloat16")
    assert narrow < bound(lse + 1e4, dtype="float32")
    assert narrow < bound(natural=False, dtype="float32")
    lse[:, 0, 0, 0] = -np.inf
    allowed = merge_allowed(np.where(out > 9, out, 0.0), lse, merged(0 * out, lse), Pipeline(dtype="float32"))
    assert (allowed.out[0, 0] == 0).all()
    assert allowed.lse[0, 0, 0] == 0
    assert (allowed.lse[0, 0, 1:] > 0).all()
