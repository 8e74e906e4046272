"""What a row is worth in a tile, by one rule for every kernel and every tile: nothing, something, or NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from by_tile import NAMES, computed, inputs_of, setting_of, worst_margin
from on_ranks import run_on_ranks, whole

from ringref.attention import attention
from ringref.problem import Dilation, Problem
from ringverify.ring.kernels import settled
from ringverify.ring.kernels.choose import KERNELS, STREAMING
from ringverify.ring.kernels.kernel import KernelTile

pytestmark = pytest.mark.timeout(120)

INF, NAN = math.inf, math.nan
BY_KERNEL = pytest.mark.parametrize(
    "kernel", [one for one in KERNELS if one.name in ("fused_cpu", "streaming")], ids=lambda kernel: kernel.name
)
BY_DTYPE = pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
LENGTHS = (1, 3, 8, 17, 600)
"""Fewer keys than a vector has elements, as many, more, and more than a block of the fused op."""


def with_keys(given, factor):
    """The inputs with q positive, and every key a positive vector times `factor(position)`."""
    factors = torch.tensor([factor(j) for j in range(given.k.size(1))], dtype=torch.float64)[:, None, None]
    return given._replace(q=given.q.abs() + 1, k=((given.k.double().abs() + 1) * factors).to(given.k.dtype))


def overflowing(problem, keys):
    """Finite inputs in which the products with the first keys are −inf in float32, and with the others ordinary."""
    given = with_keys(inputs_of(problem), lambda j: -(2.0**100) if j < keys else 2.0**-100)
    return given._replace(q=given.q * 2.0**100)


def without(problem, given, keys):
    """The same without the first keys."""
    others = given._replace(k=given.k[:, keys:], v=given.v[:, keys:])
    return problem.replace(key_length=problem.nk - keys), others


def by_oracle(problem, given):
    """out and lse of the very same numbers in float64."""
    answer = attention(problem, *given.arrays()[:3])
    return answer.out, answer.lse


def seen_alike(results, answers):
    """Whether NaN, −inf and 0 are in the same places."""
    pairs = [(result.double().numpy(), answer) for result, answer in zip(results, answers, strict=False)]
    return all(
        np.array_equal(np.isnan(result), np.isnan(answer))
        and np.array_equal(np.isneginf(result), np.isneginf(answer))
        and np.array_equal(result == 0, answer == 0)
        for result, answer in pairs
    )


@BY_KERNEL
@BY_DTYPE
@pytest.mark.parametrize("keys", LENGTHS)
def test_a_tile_whose_scores_are_minus_infinity_is_the_empty_partial(kernel, dtype, keys):
    """As the oracle has it of attended keys: exp(−inf) = 0. out 0, lse −inf, and nothing of it in a merge."""
    problem = Problem(query_length=5, key_length=keys + 2, heads=4, key_heads=2, head_dim=3, value_dim=2, dtype=dtype)
    given = with_keys(inputs_of(problem), lambda j: -INF if j < keys else 1.0)
    setting = setting_of(problem)
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    out, lse = kernel.forward(setting, KernelTile(q, k[:, :, :keys], v[:, :, :keys]))
    assert not bool(out.any())
    assert bool((lse == -INF).all())
    results, _ = computed(kernel, problem, given, ((), (keys,)))
    assert seen_alike(results, by_oracle(problem, given))
    alone, _ = computed(kernel, *without(problem, given, keys))
    assert all(torch.equal(a, b) for a, b in zip(results[:2], alone[:2], strict=True))


@BY_KERNEL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keys", LENGTHS)
def test_products_that_overflow_weigh_nothing_forward_and_backward(kernel, dtype, keys):
    """Finite inputs whose products are −inf in float32, which the oracle gives a weight of 0 beside ordinary ones."""
    problem = Problem(query_length=5, key_length=keys + 2, heads=2, head_dim=3, dtype=dtype, scale=1.0)
    given = overflowing(problem, keys)
    rest, others = without(problem, given, keys)
    assert np.array_equal(by_oracle(problem, given)[1], by_oracle(rest, others)[1])
    for cuts in (((), (keys,)), ((2,), (keys,)), ((), ())):
        out, lse, dq, dk, dv = computed(kernel, problem, given, cuts)[0]
        assert not bool(dk[:, :keys].any())
        assert not bool(dv[:, :keys].any())
        assert worst_margin(rest, others, [out, lse, dq, dk[:, keys:], dv[:, keys:]]) <= 1


@BY_KERNEL
@BY_DTYPE
@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("strange", [NAN, INF])
@pytest.mark.parametrize("kind", ["all", "first", "last", "last, others −inf", "first, others −inf", "queries"])
def test_a_score_that_is_nan_or_infinite_is_seen_by_those_who_attend_it(kernel, dtype, keys, kind, strange):
    """However few keys a tile has, and in a tile of its own too: out and lse are NaN, as the oracle's."""
    problem = Problem(query_length=5, key_length=keys + 2, heads=2, head_dim=3, dtype=dtype)
    given = inputs_of(problem)
    if kind == "queries":
        given = with_keys(given, lambda _: 1.0)
        given.q[:, 2] = strange
    else:
        at = range(keys) if kind == "all" else (0,) if kind.startswith("first") else (keys - 1,)
        other = -INF if "others" in kind else 1.0
        given = with_keys(given, lambda j: strange if j in at else other if j < keys else 1.0)
    for cuts in (((), ()), ((), (keys,)), ((), (keys, keys + 1))):
        results, _ = computed(kernel, problem, given, cuts)
        assert bool(results[0][:, 2].isnan().all())
        answer = attention(problem, *given.arrays())
        for name, result in zip(NAMES, results, strict=True):
            assert np.array_equal(np.isnan(result.double().numpy()), np.isnan(getattr(answer, name))), (name, cuts)
        assert seen_alike(results, by_oracle(problem, given)), cuts


@BY_KERNEL
@BY_DTYPE
@pytest.mark.parametrize("length", [1, 3, 8, 17, 40])
def test_a_nan_under_causality_is_seen_by_those_who_attend_it(kernel, dtype, length):
    """In the first rows, which attend few keys, too; the rows before it are as they are without."""
    problem = Problem(query_length=length, heads=2, head_dim=3, dtype=dtype, causal=True)
    for at in {0, length // 2, length - 1}:
        given = inputs_of(problem)
        given.q[:, at] = NAN
        results, kinds = computed(kernel, problem, given)
        assert kinds <= {"causal", "none"}
        assert seen_alike(results, by_oracle(problem, given)), at


@BY_KERNEL
@BY_DTYPE
def test_a_row_that_a_mask_empties_is_empty_whatever_its_query_holds(kernel, dtype):
    """Its out is 0, not NaN times 0; a NaN query of another row stays seen."""
    problem = Problem(query_length=9, heads=2, head_dim=3, dtype=dtype, documents=(2, 5, 5, 9), causal=True)
    given = inputs_of(problem)
    given.q[:, 0], given.q[:, 4] = NAN, NAN
    for cuts in (((), ()), ((), (5,)), ((2,), (2, 5))):
        results, kinds = computed(kernel, problem, given, cuts)
        assert "bias" in kinds
        assert not bool(results[0][:, 0].any())
        assert seen_alike(results, by_oracle(problem, given)), cuts


@BY_KERNEL
@pytest.mark.parametrize("by_row", [False, True])
def test_rows_under_a_bias_are_computed_anew_whatever_it_is_broadcast_over(kernel, by_row):
    """Key lengths alone make a bias of one row for all queries; keys that it lets through score −inf."""
    problem = Problem(batch=2, query_length=3, key_length=8, heads=2, head_dim=3, key_lengths=(5, 8), scale=1.0)
    given = overflowing(problem, 5)
    bias = torch.zeros(2, 1, 1, 8)
    bias[0, ..., 5:] = -INF
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    mask = bias.expand(2, 1, 3, 8) if by_row else bias
    out, lse = kernel.forward(setting_of(problem), KernelTile(q, k, v, mask))
    assert not bool(out[0].any())
    assert bool((lse[0] == -INF).all())
    assert bool(lse[1].isfinite().all())


def test_what_an_op_says_of_a_row_of_zeros_is_right(monkeypatch):
    """A true lse of 0 with out 0 stays; only such rows are computed anew, and none where values are not 0."""
    asked = []
    forward = STREAMING.forward

    def noted(setting, tile):
        asked.append(tile.q.size(2))
        return forward(setting, tile)

    monkeypatch.setattr(settled, "STREAMING", type("Noted", (), {"forward": staticmethod(noted)}))
    fused = KERNELS[0]
    problem = Problem(query_length=5, heads=2, head_dim=3, causal=True)
    given = inputs_of(problem)
    given.q[:, 0] = 0.0
    results, _ = computed(fused, problem, given)
    assert asked == []
    assert not bool(results[1][:, :, 0].any())
    given.v[:, 0] = 0.0
    results, _ = computed(fused, problem, given)
    assert asked == [1]
    assert worst_margin(problem, given, results) <= 1


# -- on ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped", "replicated_query"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_that_weighs_nothing_changes_nothing(method, sharding, dtype):
    """Half of the keys score −inf, a whole block where they are contiguous: all results are what the others make."""
    problem = Problem(query_length=6, key_length=16, heads=2, head_dim=4, dtype=dtype, scale=1.0)
    given = overflowing(problem, 8)
    run = run_on_ranks(problem, given, sharding, 2, method=method)
    out, lse, dq, dk, dv = whole(problem, run, sharding, 2)
    assert not bool(dk[:, :8].any())
    assert not bool(dv[:, :8].any())
    assert worst_margin(*without(problem, given, 8), [out, lse, dq, dk[:, 8:], dv[:, 8:]]) <= 1


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_all_keys_that_weigh_nothing_leave_rows_empty(method):
    """On every rank: out 0 and lse −inf, as the oracle says."""
    problem = Problem(query_length=6, heads=2, head_dim=4)
    given = with_keys(inputs_of(problem), lambda _: -INF)
    for world_size in (1, 2, 3):
        run = run_on_ranks(problem, given, "contiguous", world_size, method=method)
        results = whole(problem, run, "contiguous", world_size)
        assert seen_alike(results, by_oracle(problem, given))
        assert bool((results[1] == -INF).all())


@pytest.mark.parametrize("sharding", ["contiguous", "striped"])
def test_a_block_of_few_keys_that_are_nan_is_seen(sharding):
    """Three keys a rank, fewer than a vector: every row attends them."""
    problem = Problem(query_length=6, heads=2, head_dim=4)
    given = inputs_of(problem)
    given.k[:, :3] = NAN
    out, lse, *_ = whole(problem, run_on_ranks(problem, given, sharding, 2), sharding, 2)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


def shuffled(length, world_size):
    """Masks have to be looked up by position."""
    return np.array_split(np.random.default_rng(length).permutation(length), world_size)


EMPTY_ROWS = {
    "outside all documents": Problem(query_length=40, heads=2, head_dim=4, documents=(3, 25, 40)),
    "before the first key": Problem(query_length=40, key_length=37, heads=2, head_dim=4, causal=True),
    "no keys": Problem(batch=2, query_length=40, heads=2, head_dim=4, key_lengths=(0, 30)),
    "not covered": Problem(query_length=40, heads=2, head_dim=4, dilation=Dilation(((40, 20),), heads="shared")),
}


@pytest.mark.parametrize("kind", EMPTY_ROWS)
@pytest.mark.parametrize("sharding", ["contiguous", "striped", shuffled], ids=["contiguous", "striped", "shuffled"])
@pytest.mark.parametrize("kernel", ["auto", "streaming"])
def test_a_nan_query_that_attends_nothing_gives_nothing(kind, sharding, kernel):
    """out 0, lse −inf and no part in any gradient, under whatever sharding; its own dq is 0."""
    problem = EMPTY_ROWS[kind]
    given = inputs_of(problem)
    clean = whole(problem, run_on_ranks(problem, given, sharding, 3, kernel=kernel), sharding, 3)
    given.q[:1, 2] = NAN
    results = whole(problem, run_on_ranks(problem, given, sharding, 3, kernel=kernel), sharding, 3)
    empty = clean[1][0, :, 2] == -INF
    assert bool(empty.any())
    assert bool((results[1][0, :, 2][empty] == -INF).all())
    for name, result in zip(NAMES, results, strict=True):
        if name in ("out", "dq"):
            assert not bool(result[0, 2][empty].any()), name
    if bool(empty.all()):
        clean_inputs = inputs_of(problem)
        assert worst_margin(problem, clean_inputs, results) <= 1
