"""The oracle in linear time agrees with the dense one on coded inputs."""

from __future__ import annotations

import numpy as np
import pytest
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs, problems, seeds, sizes
from hypothesis import given
from hypothesis import strategies as st

from ringref.attention import attention
from ringref.classes import ClassAnswer, ClassHead, Coded, class_attention
from ringref.intervals import parts
from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.rounding import witness_bound
from ringref.sampled import SampledRows


def coded(problem: Problem, *, seed: int, size: float = 1.0, classes: tuple[int, int] = (3, 5)) -> tuple[Coded, Coded]:
    """Queries and keys of normal vectors, drawn from codebooks of so many; `size` multiplies the queries."""
    rng = np.random.default_rng(seed)
    p = problem
    return tuple(
        Coded(
            rng.standard_normal((heads, count, p.head_dim)) * factor,
            rng.integers(0, count, (p.batch, length, heads)),
        )
        for heads, length, count, factor in ((p.heads, p.nq, classes[0], size), (p.hk, p.nk, classes[1], 1.0))
    )


def by_name(answer: ClassAnswer) -> dict[str, np.ndarray]:
    """Its results, as `assert_agree` takes them."""
    return results(answer.out, answer.lse, answer.dq, answer.dk, answer.dv)


@given(problem=problems(max_length=9), batch=st.integers(0, 1), head=st.integers(0, 5))
def test_intervals_are_the_pattern(problem: Problem, batch: int, head: int) -> None:
    """Multiplicities counted from the parts of a head are those of the pattern; interval ends never fall."""
    batch, head = batch % problem.batch, head % problem.heads
    counted = np.zeros((problem.nq, problem.nk), dtype=np.int64)
    for part in parts(problem, batch, head):
        assert (np.diff(part.first) >= 0).all()
        assert (np.diff(part.last) >= 0).all()
        for query, first, last in zip(part.queries, part.first, part.last, strict=True):
            counted[query, part.keys[first:last]] += 1
    np.testing.assert_array_equal(counted, multiplicity(problem)[batch, head])


@given(problem=problems(max_length=12), seed=seeds, size=sizes, block=st.integers(1, 4))
def test_agrees_with_the_dense_oracle(problem: Problem, seed: int, size: float, block: int) -> None:
    """Over every constraint and combination, with blocks so small that many count by class."""
    queries, keys = coded(problem, seed=seed, size=size)
    drawn = normal_inputs(problem, seed=seed)
    inputs = Inputs(queries.vectors(), keys.vectors(), drawn.v, drawn.dout, drawn.dlse)
    found = class_attention(problem, queries, keys, inputs.v, inputs.dout, inputs.dlse, block=block)
    assert_agree(problem, inputs, by_name(found), oracle(problem, inputs))


@given(problem=problems(max_length=12), seed=seeds, block=st.integers(1, 4))
def test_sizes_are_those_of_every_pair(problem: Problem, seed: int, block: int) -> None:
    """The sums of `p_ij H_ij` with sizes of keys and queries, by classes and by pieces, are those over all pairs.

    And H_ij is at least `|dout_i·v_j − dout_i·out_i + dlse_i|`.
    """
    queries, keys = coded(problem, seed=seed)
    drawn = normal_inputs(problem, seed=seed)
    q, k = queries.vectors(), keys.vectors()
    inner = attention(problem, q, k, drawn.v, drawn.dout, drawn.dlse).intermediates
    group, everything = problem.group_size, np.arange(problem.nq)
    rows = SampledRows(problem, everything, q, drawn.dout, drawn.dlse)
    rows.see(np.arange(problem.nk), k, drawn.v)
    dk_size = rows.differentiate(np.arange(problem.nk), k, drawn.v)[2]
    for b, h in np.ndindex(problem.batch, problem.heads):
        p, v, dout = inner.probabilities[b, h], drawn.v[b, :, h // group], drawn.dout[b, :, h]
        change = np.where(p.sum(axis=1) > 0, drawn.dlse[b, h], 0.0)
        norms, sizes = np.linalg.norm(dout, axis=1)[:, None], np.linalg.norm(v, axis=1)[None, :]
        most = norms * sizes + norms * (p @ sizes.T) + np.abs(change)[:, None]
        least = np.abs(dout @ v.T - (dout * (p @ v)).sum(axis=1, keepdims=True) + change[:, None])
        size = witness_bound("float64", 1000) * most.max(initial=0.0)
        assert (np.where(p > 0, least - most, 0.0) <= size).all()
        head = ClassHead(
            problem,
            b,
            h,
            (queries.codebook[h], queries.classes[b, :, h]),
            (keys.codebook[h // group], keys.classes[b, :, h // group]),
            v.__getitem__,
            dout.__getitem__,
            drawn.dlse[b, h],
            block=block,
        )
        of_keys = (p * most) @ np.abs(k[b, :, h // group])
        of_queries = (p * most).T @ np.abs(q[b, :, h])
        reach = max(np.abs(x).max(initial=0.0) for x in (q, k)) * max(problem.nq, problem.nk, 1) * size
        for found in (head.rows(everything)[3], rows.dq_size[b, :, h]):
            np.testing.assert_allclose(found, of_keys, atol=reach)
        np.testing.assert_allclose(head.gradients_of_keys(np.arange(problem.nk))[2], of_queries, atol=reach)
        if group == 1:
            np.testing.assert_allclose(dk_size[b, :, h], of_queries, atol=reach)


def test_agrees_far_apart() -> None:
    """Scores that differ by thousands: a class that some rows have not seen yet dominates the others."""
    problem = Problem(query_length=40, heads=2, head_dim=2, causal=True, window=(9, None))
    queries, keys = coded(problem, seed=3, size=1000.0)
    drawn = normal_inputs(problem, seed=4)
    inputs = Inputs(queries.vectors(), keys.vectors(), drawn.v, drawn.dout, drawn.dlse)
    found = class_attention(problem, queries, keys, inputs.v, inputs.dout, inputs.dlse, block=4)
    assert_agree(problem, inputs, by_name(found), oracle(problem, inputs))


def test_what_nothing_attends_may_hold_anything() -> None:
    """NaN in values of padding and in cotangents of empty rows changes nothing."""
    problem = Problem(query_length=10, head_dim=2, documents=(2, 5, 8), key_lengths=(7,))
    queries, keys = coded(problem, seed=1)
    drawn = normal_inputs(problem, seed=1)
    expected = class_attention(problem, queries, keys, drawn.v, drawn.dout, drawn.dlse, block=2)
    for outside in (slice(0, 2), slice(8, 10)):
        drawn.v[:, outside], drawn.dout[:, outside], drawn.dlse[:, :, outside] = np.nan, np.nan, np.nan
    found = class_attention(problem, queries, keys, drawn.v, drawn.dout, drawn.dlse, block=2)
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


LONG = [
    Problem(query_length=750, head_dim=4, causal=True),
    Problem(query_length=750, head_dim=4, causal=True, window=(150, 0), softcap=3.0),
    Problem(query_length=450, key_length=750, heads=2, key_heads=1, head_dim=4, causal=True),
    Problem(query_length=750, head_dim=4, documents=(0, 1, 2, 100, 550, 750)),
    Problem(query_length=750, head_dim=4, dilation=Dilation(((100, 1), (500, 3)), heads="shared")),
]


@pytest.mark.parametrize("problem", LONG, ids=["causal", "window", "cross", "documents", "dilation"])
def test_agrees_over_many_blocks(problem: Problem) -> None:
    """Nearly all keys of a row count by class here, over several floors of the tree."""
    queries, keys = coded(problem, seed=7, classes=(8, 16))
    drawn = normal_inputs(problem, seed=8)
    inputs = Inputs(queries.vectors(), keys.vectors(), drawn.v, drawn.dout, drawn.dlse)
    found = class_attention(problem, queries, keys, inputs.v, inputs.dout, inputs.dlse, block=16)
    assert_agree(problem, inputs, by_name(found), oracle(problem, inputs))


def test_refusals() -> None:
    """Each wrong argument is named, with what the problem says."""
    problem = Problem(query_length=4, head_dim=2)
    queries, keys = coded(problem, seed=0)
    drawn = normal_inputs(problem)
    with pytest.raises(ValueError, match=r"classes of keys have shape \(1, 3, 1\)"):
        class_attention(problem, queries, Coded(keys.codebook, keys.classes[:, :3]), drawn.v)
    with pytest.raises(ValueError, match=r"the codebook of queries has shape \(1, 3, 1\): .* 1 heads of 2 dimensions"):
        class_attention(problem, Coded(queries.codebook[:, :, :1], queries.classes), keys, drawn.v)
    beyond = keys.classes.copy()
    beyond[0, :2, 0] = 0, 9
    with pytest.raises(ValueError, match=r"classes of keys go from 0 to 9: there are 5"):
        class_attention(problem, queries, Coded(keys.codebook, beyond), drawn.v)
    with pytest.raises(ValueError, match=r"v has shape \(1, 3, 1, 2\)"):
        class_attention(problem, queries, keys, drawn.v[:, :3])
    with pytest.raises(ValueError, match="dlse without dout"):
        class_attention(problem, queries, keys, drawn.v, None, drawn.dlse)


def test_rows_can_be_shared_out() -> None:
    """Two heads that each compute every second row, and exchange two numbers a row, give what one does."""
    problem = Problem(query_length=50, head_dim=4, causal=True, window=(20, 0))
    queries, keys = coded(problem, seed=5)
    drawn = normal_inputs(problem, seed=6)
    expected = class_attention(problem, queries, keys, drawn.v, drawn.dout, drawn.dlse, block=4)
    given = (queries.codebook[0], queries.classes[0, :, 0]), (keys.codebook[0], keys.classes[0, :, 0])
    numbers = drawn.v[0, :, 0].__getitem__, drawn.dout[0, :, 0].__getitem__, drawn.dlse[0, 0]
    size = witness_bound("float64", 1000) * np.abs(expected.dv).max()
    heads = [ClassHead(problem, 0, 0, *given, *numbers, block=4) for _ in range(2)]
    shares = [np.arange(50)[start::2] for start in range(2)]
    for head, rows in zip(heads, shares, strict=True):
        answers = (expected.out, expected.lse.swapaxes(1, 2), expected.dq)
        for found, right in zip(head.rows(rows)[:3], answers, strict=True):
            np.testing.assert_allclose(found, right[0, rows, 0], atol=size)
    for head, other, rows in zip(heads, heads[::-1], shares[::-1], strict=True):
        for mine, others in zip(*([one.lse, one.towards, one.sizes] for one in (head, other)), strict=True):
            mine[rows] = others[rows]
    for head, rows in zip(heads, shares, strict=True):
        dk, dv, _ = head.gradients_of_keys(rows)
        np.testing.assert_allclose(dk, expected.dk[0, rows, 0], atol=size)
        np.testing.assert_allclose(dv, expected.dv[0, rows, 0], atol=size)
