"""Learned sinks: the two oracles, numeric differences and a witness that knows no sinks agree; bounds hold; doors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from comparing import ELEMENTARY_ROUNDINGS
from drawing import Inputs, normal_inputs, problems, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ringref import attention_loops
from ringref.attention import Answer, attention
from ringref.classes import Coded, class_attention
from ringref.emulation import emulate
from ringref.ladder import blockwise, naive, online_softmax, sequential_ring
from ringref.problem import Problem
from ringref.rounding import Pipeline, allowed_error, margins, witness_bound
from ringref.sampled import SampledRows

RESULTS = ("out", "lse", "dq", "dk", "dv")
logits = st.one_of(st.floats(-8, 8), st.sampled_from([-np.inf, -1e4, 300.0]))
"""Ordinary sinks; none; one of no weight; one that takes all the weight."""


@st.composite
def with_sinks(draw: st.DrawFn, max_length: int = 6) -> tuple[Problem, Inputs, np.ndarray]:
    """Any problem with sinks, and inputs."""
    problem = draw(problems(max_length=max_length)).replace(sinks=True)
    return problem, normal_inputs(problem, seed=draw(seeds)), np.array([draw(logits) for _ in range(problem.heads)])


def answered(problem: Problem, inputs: Inputs, sinks: np.ndarray) -> Answer:
    """The oracle's answer."""
    return attention(problem, *inputs.arrays(), sinks)


def close(one: np.ndarray, other: np.ndarray, problem: Problem) -> bool:
    """Whether two computations in float64 agree, up to the rounding of as many operations as a row has."""
    terms = 8 * (problem.head_dim + problem.dv + problem.nk + problem.nq * problem.heads + ELEMENTARY_ROUNDINGS)
    return np.allclose(one, other, rtol=witness_bound("float64", terms), atol=witness_bound("float64", terms) * 300)


@given(drawn=with_sinks())
def test_loops_and_vectorised_agree_on_sinks(drawn: tuple[Problem, Inputs, np.ndarray]) -> None:
    """Forward, gradients, and the gradient of the sinks by a formula of out and lse."""
    problem, x, sinks = drawn
    found = answered(problem, x, sinks)
    out, lse = attention_loops.forward(problem, x.q, x.k, x.v, sinks)
    gradients = attention_loops.backward(problem, *x.arrays(), sinks)
    for one, other in zip((found.out, found.lse, found.dq, found.dk, found.dv), (out, lse, *gradients), strict=True):
        assert close(one, other, problem)
    by_formula = attention_loops.sink_gradient(out, lse, x.dout, x.dlse, sinks)
    assert close(found.dsinks.sum(axis=1), by_formula, problem)


@given(drawn=with_sinks())
def test_a_sink_is_a_key_of_that_score_and_value_0(drawn: tuple[Problem, Inputs, np.ndarray]) -> None:
    """A witness without sinks: torch's softmax over one more column, differentiated by torch."""
    import torch

    from ringref.pattern import multiplicity

    problem, x, sinks = drawn
    q, k, v, dout, dlse = (torch.from_numpy(array.copy()) for array in x.arrays())
    s_H = torch.from_numpy(sinks.copy())
    for leaf in (q, k, v, s_H):
        leaf.requires_grad_()
    by_head = [one.transpose(1, 2).repeat_interleave(problem.group_size, dim=1) for one in (k, v)]
    scores = problem.scale_value * (q.transpose(1, 2) @ by_head[0].mT)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores + torch.from_numpy(multiplicity(problem)).double().log()
    scores = torch.cat([scores, s_H[:, None, None].expand(problem.batch, -1, problem.nq, 1)], dim=-1)
    some = ~(scores == -torch.inf).all(dim=-1)
    lse = torch.where(some[..., None], scores, 0.0).logsumexp(dim=-1)
    weights = torch.where(some[..., None], torch.exp(scores - lse[..., None]), 0.0)
    out = (weights[..., :-1] @ by_head[1]).transpose(1, 2)
    loss = (dout * out).sum() + torch.where(some, dlse * lse, 0.0).sum()
    found = answered(problem, x, sinks)
    assert close(found.out, out.detach().numpy(), problem)
    assert close(np.where(some, found.lse, 0.0), torch.where(some, lse, 0.0).detach().numpy(), problem)
    if np.isfinite(sinks).all() and loss.requires_grad:
        for one, leaf in zip((found.dq, found.dk, found.dv, found.dsinks.sum(axis=1)), (q, k, v, s_H), strict=True):
            (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
            assert close(one, np.zeros_like(one) if gradient is None else gradient.numpy(), problem)


@settings(max_examples=40)
@given(drawn=with_sinks(max_length=4))
def test_the_gradient_of_sinks_is_the_central_difference_of_the_forward(
    drawn: tuple[Problem, Inputs, np.ndarray],
) -> None:
    """Through out and lse; of finite sinks, since nothing moves a sink of -inf."""
    problem, x, sinks = drawn

    def loss(moved: np.ndarray) -> float:
        found = attention(problem, x.q, x.k, x.v, sinks=moved)
        return float((x.dout * found.out).sum() + (x.dlse * np.where(np.isinf(found.lse), 0.0, found.lse)).sum())

    gradient, step = answered(problem, x, sinks).dsinks.sum(axis=1), np.cbrt(witness_bound("float64", 100))
    size = 1 + np.abs(x.dout).sum() * np.abs(x.v).max(initial=0.0) + np.abs(x.dlse).sum()
    for head in np.flatnonzero(np.abs(sinks) < 10):
        apart = np.where(np.arange(problem.heads) == head, step, 0.0)
        numeric = (loss(sinks + apart) - loss(sinks - apart)) / (2 * step)
        assert abs(numeric - gradient[head]) <= 10 * step**2 * size


def test_a_row_without_keys_has_out_0_and_its_sink_as_lse() -> None:
    """And its gradient is that of lse alone; a sink of -inf is none: the row is empty."""
    problem = Problem(query_length=2, key_length=0, heads=2, head_dim=1, sinks=True)
    x = normal_inputs(problem)
    found = answered(problem, x, np.array([0.5, -np.inf]))
    assert not found.out.any()
    assert found.lse[0].tolist() == [[0.5, 0.5], [-np.inf, -np.inf]]
    assert np.array_equal(found.dsinks, [x.dlse[0, 0], [0.0, 0.0]])


def test_sinks_of_minus_infinity_change_nothing() -> None:
    """Every result is that of the problem without sinks, bit for bit."""
    problem = Problem(query_length=5, heads=2, causal=True, key_lengths=(3,))
    x = normal_inputs(problem)
    plain = attention(problem, *x.arrays())
    found = answered(problem.replace(sinks=True), x, np.array([-np.inf, -np.inf]))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert np.array_equal(getattr(plain, name), getattr(found, name)), name
    assert not found.dsinks.any()


@given(drawn=with_sinks(), dtype=st.sampled_from(["float32", "float64"]))
def test_a_computation_in_the_dtype_stays_within_the_bound(
    drawn: tuple[Problem, Inputs, np.ndarray], dtype: str
) -> None:
    """The plain formula in numpy, every operation rounded to the dtype; and half of the sinks' weight is too much."""
    problem, x, sinks = drawn
    rounded = [array.astype(dtype).astype(np.float64) for array in (*x.arrays(), sinks)]
    exact = attention(problem, *rounded)
    bound = allowed_error(problem, exact, *rounded[:5], Pipeline(dtype, accumulates=dtype, lse_dtype=dtype))
    q, k, v, dout, dlse, s_H = (array.astype(dtype) for array in rounded)
    with np.errstate(all="ignore"):
        m, by = exact.intermediates.m.astype(dtype), problem.group_size
        k, v = np.repeat(k, by, axis=2).swapaxes(1, 2), np.repeat(v, by, axis=2).swapaxes(1, 2)
        s = (q.swapaxes(1, 2) @ k.swapaxes(2, 3)) * np.dtype(dtype).type(problem.scale_value)
        if problem.softcap is not None:
            s = (problem.softcap * np.tanh(s / problem.softcap)).astype(dtype)
        column = np.broadcast_to(s_H[:, None, None], (*s.shape[:3], 1))
        masked = np.concatenate([np.where(m > 0, s, -np.inf), column], axis=3).astype(dtype)
        top = masked.max(axis=3, keepdims=True)
        weights = np.concatenate([m, np.ones_like(column)], axis=3) * np.exp(masked - np.where(top == -np.inf, 0, top))
        total = weights.sum(axis=3, keepdims=True)
        p = weights / np.where(total == 0, 1, total)
        lse = (np.where(top == -np.inf, 0, top) + np.log(total))[..., 0]
        out = (p[..., :-1] @ v).swapaxes(1, 2)
        delta = (dout * out).sum(axis=3).swapaxes(1, 2) - np.where(np.isneginf(lse), 0, dlse)
        dsinks = -(p[..., -1] * delta).sum(axis=(0, 2)).astype(np.float32)
    assert margins(out, exact.out, bound.out, dtype).max(initial=0.0) <= 1
    assert margins(lse, exact.lse, bound.lse, dtype).max(initial=0.0) <= 1
    limit = bound.dsinks.sum(axis=1)
    assert margins(dsinks, exact.dsinks.sum(axis=1), limit, "float32").max(initial=0.0) <= 1


@given(drawn=with_sinks(max_length=9), seed=seeds, block=st.integers(1, 4))
def test_the_oracle_of_classes_agrees_on_sinks(
    drawn: tuple[Problem, Inputs, np.ndarray], seed: int, block: int
) -> None:
    """With the dense one, over every constraint; and by query in the gradient of the sinks."""
    problem, x, sinks = drawn
    rng = np.random.default_rng(seed)
    queries, keys = (
        Coded(rng.standard_normal((heads, 4, problem.head_dim)), rng.integers(0, 4, (problem.batch, length, heads)))
        for heads, length in ((problem.heads, problem.nq), (problem.hk, problem.nk))
    )
    found = class_attention(problem, queries, keys, x.v, x.dout, x.dlse, sinks, block=block)
    right = attention(problem, queries.vectors(), keys.vectors(), x.v, x.dout, x.dlse, sinks)
    for name in (*RESULTS, "dsinks"):
        assert close(getattr(found, name), getattr(right, name), problem), name


@given(drawn=with_sinks(max_length=9), seed=seeds, first=st.booleans())
def test_sampled_rows_agree_on_sinks(drawn: tuple[Problem, Inputs, np.ndarray], seed: int, *, first: bool) -> None:
    """With the dense oracle, whether sinks join before the keys or after them."""
    problem, x, sinks = drawn
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(problem.nq) < 0.5)
    others = np.setdiff1d(np.arange(problem.nq), rows)
    x.dout[:, others], x.dlse[:, :, others] = 0.0, 0.0
    found = SampledRows(problem, rows, x.q[:, rows], x.dout[:, rows], x.dlse[:, :, rows])
    pieces = np.array_split(rng.permutation(problem.nk), 3)
    if first:
        found.join(sinks)
    for piece in pieces:
        found.see(piece, x.k[:, piece], x.v[:, piece])
    if not first:
        found.join(sinks)
    dk, dv = np.zeros_like(x.k), np.zeros_like(x.v)
    for piece in pieces:
        dk[:, piece], dv[:, piece], _ = found.differentiate(piece, x.k[:, piece], x.v[:, piece])
    right = answered(problem, x, sinks)
    pairs = (found.out, right.out[:, rows]), (found.lse, right.lse[:, :, rows]), (found.dq, right.dq[:, rows])
    by_query = found.gradient_of_sinks(sinks).sum(axis=0)
    for one, other in (*pairs, (dk, right.dk), (dv, right.dv), (by_query, right.dsinks[:, rows])):
        assert close(one, other, problem)


def test_a_sink_does_not_let_nan_out_of_rows_without_keys() -> None:
    """A cotangent of out there is nothing to the oracle of classes either: out is 0 whatever the inputs are."""
    problem = Problem(query_length=6, head_dim=2, documents=(2, 4), sinks=True)
    x, coded = normal_inputs(problem), Coded(np.ones((1, 1, 2)), np.zeros((1, 6, 1), dtype=np.int64))
    x.dout[:, 4:] = np.nan
    found = class_attention(problem, coded, coded, x.v, x.dout, x.dlse, np.zeros(1), block=2)
    for name in (*RESULTS, "dsinks"):
        assert np.isfinite(getattr(found, name)).all(), name
    assert np.array_equal(found.dsinks[0, 4:], x.dlse[0, 0, 4:])


def test_the_oracle_of_classes_needs_the_sinks_that_the_problem_names() -> None:
    """And no others."""
    problem = Problem(query_length=2, head_dim=2, sinks=True)
    x, coded = normal_inputs(problem), Coded(np.zeros((1, 1, 2)), np.zeros((1, 2, 1), dtype=np.int64))
    with pytest.raises(ValueError, match="sinks=True says the problem, and no are given"):
        class_attention(problem, coded, coded, x.v)
    with pytest.raises(ValueError, match=r"sinks has shape \(2,\): the problem says \(1,\)"):
        class_attention(problem, coded, coded, x.v, sinks=np.zeros(2))
    with pytest.raises(ValueError, match="sinks=False says the problem, and some are given"):
        class_attention(problem.replace(sinks=False), coded, coded, x.v, sinks=np.zeros(1))


def test_the_bound_tells_a_gradient_of_half_the_queries() -> None:
    """The bound is no blank cheque."""
    problem = Problem(query_length=8, heads=2, sinks=True)
    x = normal_inputs(problem)
    exact = answered(problem, x, np.zeros(2))
    bound = allowed_error(problem, exact, *x.arrays(), Pipeline("float32")).dsinks.sum(axis=1)
    assert (np.abs(exact.dsinks[:, 4:].sum(axis=1)) > 100 * bound).all()


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        (None, "sinks=True says the problem, and no are given"),
        (np.zeros(3), r"sinks has shape \(3,\): the problem says \(2,\)"),
        (np.zeros(2, dtype=np.float32), "sinks has dtype float32"),
        (np.array([0.0, np.nan]), "expected finite numbers, or -inf for a head without a sink"),
        (np.array([0.0, np.inf]), "expected finite numbers, or -inf for a head without a sink"),
    ],
)
def test_sinks_that_do_not_fit_the_problem_are_refused(sinks: np.ndarray | None, said: str) -> None:
    """Missing, or of another shape or dtype, or no sinks at all."""
    problem = Problem(query_length=2, heads=2, sinks=True)
    x = normal_inputs(problem)
    # A shape check of the tests may come first.
    with pytest.raises((ValueError, TypeError), match=f"{said}|parameter 'sinks'"):
        attention(problem, x.q, x.k, x.v, sinks=sinks)


def test_what_is_no_array_is_refused_in_one_line() -> None:
    """In a process of its own, where no shape check of the tests comes first."""
    program = (
        "import numpy as np\n"
        "from ringref.attention import attention\n"
        "from ringref.problem import Problem\n"
        "x = np.zeros((1, 2, 2, 2))\n"
        "for arguments in ((x, x, x, None, None, [0.0, 0.0]), (x, x, x.tolist(), None, None, np.zeros(2))):\n"
        "    try:\n"
        "        attention(Problem(query_length=2, heads=2, head_dim=2, sinks=True), *arguments)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    assert said.splitlines() == [
        "sinks is of type list: expected a float64 array (2,)",
        "v is of type list: expected a float64 array (1, 2, 2, 2)",
    ]


def test_sinks_that_the_problem_does_not_name_are_refused() -> None:
    """They would be left out of the answer."""
    problem = Problem(query_length=2)
    x = normal_inputs(problem)
    with pytest.raises(ValueError, match="sinks=False says the problem, and some are given"):
        attention(problem, x.q, x.k, x.v, sinks=np.zeros(1))


def test_oracles_that_know_no_sinks_say_so() -> None:
    """In one line each, rather than answer another problem."""
    problem = Problem(query_length=2, head_dim=2, sinks=True)
    x = normal_inputs(problem)
    for refusing in (
        lambda: naive.forward(problem, x.q, x.k, x.v),
        lambda: blockwise.forward(problem, x.q, x.k, x.v),
        lambda: online_softmax.forward(problem, x.q, x.k, x.v),
        lambda: sequential_ring.forward(problem, x.q, x.k, x.v, world_size=2),
        lambda: emulate(problem, x.q, x.k, x.v, x.dout, Pipeline("float32")),
    ):
        with pytest.raises(ValueError, match=r"^sinks=True: the .* has no learned sinks; ringref.attention has$"):
            refusing()
