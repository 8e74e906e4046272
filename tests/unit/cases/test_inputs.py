"""Inputs: every family is what it says, every memory layout holds the same values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_address import ALIGNMENT

from ringref.attention import attention
from ringref.problem import DTYPES, Dilation, Problem
from ringref.rounding import LARGEST
from ringverify.cases.case import MEMORY, VALUES, Case
from ringverify.cases.inputs import DTYPE, GAP, lay_out, make_inputs, round_to

BASE = Case(problem=Problem(batch=2, query_length=8, heads=4, key_heads=2, head_dim=8, value_dim=3), world_size=2)


def scores(case):
    """The oracle's scores of a case's inputs, (B, H, Nq, Nk)."""
    x = make_inputs(case)
    return attention(case.problem, x.q, x.k, x.v).intermediates.scores


@pytest.mark.parametrize("values", [values for values in VALUES if not values.startswith("poisoned")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_have_their_shapes_are_finite_and_representable(values, dtype):
    """Every family in every dtype: rounding again changes nothing, and the arrays cannot be written to."""
    case = BASE.replace(values=values, dtype=dtype, cotangent="both")
    x = make_inputs(case)
    assert x.q.shape == (2, 8, 4, 8)
    assert x.k.shape == (2, 8, 2, 8)
    assert x.v.shape == (2, 8, 2, 3)
    assert x.dout.shape == (2, 8, 4, 3)
    assert x.dlse.shape == (2, 4, 8)
    for array in (x.q, x.k, x.v, x.dout):
        assert np.isfinite(array).all()
        assert np.array_equal(round_to(array, dtype), array)
        assert not array.flags.writeable


def test_the_seed_decides_the_values():
    """The same seed draws the same bits, another seed others."""
    first = make_inputs(BASE)
    make_inputs.cache_clear()
    assert np.array_equal(make_inputs(BASE).q, first.q)
    assert not np.array_equal(make_inputs(BASE.replace(seed=1)).q, first.q)


@pytest.mark.parametrize(
    ("cotangent", "dout", "dlse"), [("out", True, False), ("lse", False, True), ("both", True, True)]
)
def test_only_the_named_results_have_a_cotangent(cotangent, dout, dlse):
    """The other cotangent is zero; none is ever constant."""
    x = make_inputs(BASE.replace(cotangent=cotangent))
    assert bool(x.dout.any()) == dout
    assert bool(x.dlse.any()) == dlse
    if dout:
        assert len(np.unique(x.dout)) > x.dout.size // 2


def test_large_scores_reach_a_hundred():
    """Their size, not their spread around a common value, is what overflows an unshifted exponential."""
    assert 80 < np.abs(scores(BASE.replace(values="large_scores"))).max() < 1000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("values", "sign"), [("rising_blocks", 1), ("falling_blocks", -1)])
def test_blocks_differ_by_more_than_float32_can_hold_in_either_order(values, sign, dtype):
    """Every score of one half of the keys is more than log(largest float32) above all of the other half."""
    s = sign * scores(BASE.replace(values=values, dtype=dtype))
    assert (s[..., 4:].min(axis=-1) - s[..., :4].max(axis=-1)).min() > np.log(LARGEST["float32"])
    assert np.log(LARGEST["float32"]) < GAP


def test_zero_queries_give_a_log_sum_exp_of_the_logarithm_of_the_count():
    """All scores are 0, so lse is log 8; with one key it would be exactly 0."""
    x = make_inputs(BASE.replace(values="zero_queries"))
    lse = attention(BASE.problem, x.q, x.k, x.v).lse
    assert (lse == np.log(8)).all()


def test_unit_values_are_all_one():
    """V = 1, for which out is 1 whatever the weights are."""
    assert (make_inputs(BASE.replace(values="unit_values")).v == 1).all()


def test_a_dominating_key_takes_nearly_all_the_weight():
    """One key of each head is far ahead of the others for every query."""
    x = make_inputs(BASE.replace(values="dominating_key"))
    p = attention(BASE.problem, x.q, x.k, x.v).intermediates.probabilities
    assert (p.max(axis=-1) > 0.99).all()


def test_float16_limits_pass_the_largest_float16_before_and_after_the_scale():
    """The products overflow half precision, the inputs do not."""
    case = BASE.replace(values="float16_limits", dtype="float16")
    assert np.abs(scores(case)).max() > LARGEST["float16"]
    assert np.abs(make_inputs(case).v).max() > LARGEST["float16"] / 2


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_memory_layout_changes_where_values_lie_and_not_what_they_are(memory, dtype):
    """Values are equal, and the layout is truly what its name says."""
    values = make_inputs(BASE.replace(memory=memory, dtype=dtype)).q
    tensor, buffer = lay_out(values, DTYPE[dtype], memory, "cpu")
    assert torch.equal(tensor.to(torch.float64), torch.from_numpy(values.copy()))
    assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert tensor.is_contiguous() == (memory in ("contiguous", "offset"))
    assert bool(buffer.isnan().any()) == (memory in ("strided", "offset", "packed"))
    assert (tensor.storage_offset() > 0) == (memory in ("strided", "offset", "packed"))
    if memory == "expanded":
        assert tensor.stride()[0] == 0
        assert tensor.stride()[2] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", MEMORY)
def test_a_case_lies_alike_each_time_it_is_run(memory, dtype):
    """Its buffers begin at aligned addresses, wherever numpy's memory is: bits of products may depend on that."""
    kept = []  # not given back, so that memory is found elsewhere each time
    for length in range(1, 40):
        values = np.ones((2, length, 3, 1))
        kept.append((values, lay_out(values, DTYPE[dtype], memory, "cpu"), np.empty(length)))
    assert {buffer.data_ptr() % ALIGNMENT for _, (_, buffer), _ in kept} == {0}


@pytest.mark.parametrize("memory", MEMORY)
def test_empty_tensors_can_lie_in_any_layout(memory):
    """A rank may hold nothing."""
    tensor, _ = lay_out(np.zeros((2, 0, 3, 4)), torch.float32, memory, "cpu")
    assert tensor.shape == (2, 0, 3, 4)


def test_poison_lies_where_no_query_looks_and_nowhere_else():
    """NaN in keys and values past the key lengths; everything else is finite."""
    x = make_inputs(BASE.replace(values="poisoned", key_lengths=(5, 8)))
    for array in (x.k, x.v):
        assert np.isnan(array[0, 5:]).all()
        assert np.isfinite(array[0, :5]).all()
        assert np.isfinite(array[1]).all()


def test_what_a_window_or_a_dilation_skips_is_no_padding():
    """Under both only what lies in no document is NaN; every other key that no query attends is an ordinary number."""
    skipping = {"window": (0, 0), "dilation": Dilation(((4, 2),))}
    for name, value in skipping.items():
        plain = make_inputs(BASE.replace(values="poisoned", **{name: value}))
        assert np.isfinite(plain.k).all()
    x = make_inputs(BASE.replace(values="poisoned", window=(0, 0), documents=(2, 3, 6)))
    assert np.isnan(x.k).all(axis=(0, 2, 3)).tolist() == [True] * 2 + [False] * 4 + [True] * 2
    everything = make_inputs(BASE.replace(values="poisoned_skips", dilation=Dilation(((4, 2),))))
    assert np.isnan(everything.v).all(axis=(0, 2, 3)).tolist() == [False, True] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": (1, 0)}, {"key_lengths": (3, 8)}])
def test_selectors_have_an_answer_that_is_exact(dtype, changes):
    """out is one value of one key, an integer, the log-sum-exp is 0, and what is forbidden scores higher."""
    case = BASE.replace(values="selectors", dtype=dtype, head_dim=8, **changes)
    x = make_inputs(case)
    answer = attention(case.problem, x.q, x.k, x.v, x.dout)
    assert np.array_equal(answer.out, np.round(answer.out))
    assert np.array_equal(answer.dv, np.round(answer.dv))
    assert not answer.lse.any()
    p = answer.intermediates.probabilities
    assert np.array_equal(np.sort(p, axis=-1)[..., -1], np.ones(p.shape[:-1]))
    if changes:
        raw = np.einsum("bqhd,bkhd->bhqk", x.q, np.repeat(x.k, 2, axis=2))
        forbidden = np.where(answer.intermediates.m == 0, raw, -np.inf)
        decoyed = forbidden.max(axis=-1)
        assert (decoyed[np.isfinite(decoyed)] > 0).all()


def test_selectors_need_a_dimension_for_every_key():
    """Otherwise nothing is exact, and the case is refused."""
    with pytest.raises(ValueError, match="selectors need head_dim >= key_length"):
        make_inputs(BASE.replace(values="selectors", head_dim=7))
