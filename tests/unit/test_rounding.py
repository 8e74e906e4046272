"""The derived bound: never passed by pipelines that do what they declare, passed by those that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ringref.attention import attention
from ringref.problem import DTYPES, Problem
from ringref.rounding import LARGEST, UNDERFLOW, UNIT_ROUNDOFF, Pipeline, allowed_error, margins, witness_bound

Array = NDArray[np.float64]
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
TORCH = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def plain(q, k, v, scale):
    """Softmax at once."""
    s = (q @ k.mT) * scale
    return s.softmax(-1) @ v, s.logsumexp(-1)


def base_two(q, k, v, scale):
    """Exponentials to base 2, as GPU kernels compute them."""
    s = (q @ k.mT) * (scale * 1.4426950408889634)
    top = s.amax(-1, keepdim=True)
    weights = torch.exp2(s - top)
    total = weights.sum(-1, keepdim=True)
    return (weights / total) @ v, ((top + total.log2()) * 0.6931471805599453).squeeze(-1)


def scaled_inputs(q, k, v, scale):
    """The square root of the scale on both inputs."""
    root = abs(scale) ** 0.5
    return plain(q * root, k * root * (1 if scale > 0 else -1), v, 1.0)


def running_maximum(q, k, v, scale):
    """Online softmax, two tiles of keys."""
    n = k.shape[-2]
    top = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=q.dtype)
    total, acc = torch.zeros_like(top), torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    for tile in (slice(0, n // 2), slice(n // 2, n)):
        s = (q @ k[..., tile, :].mT) * scale
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        weights, decay = (s - new).exp(), (top - new).exp()
        total, acc = total * decay + weights.sum(-1, keepdim=True), acc * decay + weights @ v[..., tile, :]
        top = new
    return acc / total, (top + total.log()).squeeze(-1)


def merged(q, k, v, scale):
    """Four partial results merged by their log-sum-exps."""
    out, lse = None, None
    for tile_k, tile_v in zip(k.chunk(4, -2), v.chunk(4, -2), strict=True):
        part, part_lse = plain(q, tile_k, tile_v, scale)
        if out is None:
            out, lse = part, part_lse
            continue
        both = torch.logaddexp(lse, part_lse)
        out = out * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
        lse = both
    return out, lse


def wrong_scale(q, k, v, scale):
    """One part in a thousand off."""
    return plain(q, k, v, scale * 1.001)


def dropped_key(q, k, v, scale):
    """The last key is not seen."""
    return plain(q, k[..., :-1, :], v[..., :-1, :], scale)


def unshifted(q, k, v, scale):
    """No maximum is taken off before the exponential."""
    weights = ((q @ k.mT) * scale).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total) @ v, total.log().squeeze(-1)


def low_precision_merge(q, k, v, scale):
    """Partial results are kept in bfloat16 between blocks."""
    half = k.shape[-2] // 2
    first, first_lse = plain(q, k[..., :half, :], v[..., :half, :], scale)
    second, second_lse = plain(q, k[..., half:, :], v[..., half:, :], scale)
    first, second = first.bfloat16().to(q.dtype), second.bfloat16().to(q.dtype)
    lse = torch.logaddexp(first_lse, second_lse)
    return first * (first_lse - lse).exp()[..., None] + second * (second_lse - lse).exp()[..., None], lse


RIGHT = (plain, base_two, scaled_inputs, running_maximum, merged)
WRONG = (wrong_scale, dropped_key, low_precision_merge)


def largest_margins(
    pipeline: Forward, *, dtype: str, accumulate: str, seed: int, spread: float, declared: Pipeline
) -> dict[str, float]:
    """Margins of each result of a pipeline on random inputs whose scores have a standard deviation of `spread`."""
    rng = np.random.default_rng(seed)
    n, m, d, dv = 8, 4 + 8 * int(rng.integers(1, 6)), int(rng.integers(1, 17)), 5
    problem = Problem(batch=2, query_length=n, key_length=m, heads=3, head_dim=d, value_dim=dv, dtype=dtype)
    width = (spread / (problem.scale_value * d**0.5)) ** 0.5
    shapes = ((2, n, 3, d), (2, m, 3, d), (2, m, 3, dv), (2, n, 3, dv))
    drawn = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    drawn = [drawn[0] * width, drawn[1] * width, *drawn[2:]]
    q, k, v, dout = (x.to(TORCH[dtype]) for x in drawn)
    dlse = torch.from_numpy(rng.standard_normal((2, 3, n))).to(TORCH[declared.lse_dtype])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [leaf.to(TORCH[accumulate]).transpose(1, 2) for leaf in leaves]
    out, lse = pipeline(*wide, problem.scale_value)
    out = out.transpose(1, 2).to(TORCH[dtype])
    lse = lse.to(TORCH[declared.lse_dtype])
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    exact = [x.to(torch.float64).numpy() for x in (q, k, v, dout, dlse)]
    answer = attention(problem, *exact)
    bound = allowed_error(problem, answer, *exact, declared)
    actual = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    return {
        name: float(
            margins(
                tensor.detach().to(torch.float64).numpy(),
                getattr(answer, name),
                getattr(bound, name),
                declared.lse_dtype if name == "lse" else dtype,
            ).max()
        )
        for name, tensor in actual.items()
    }


@pytest.mark.parametrize("pipeline", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")],
)
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_a_pipeline_that_does_what_it_declares_stays_within_the_bound(pipeline, dtype, accumulate, spread):
    """Five ways to compute the same, in every dtype, forward and autograd's backward: no margin reaches 1."""
    declared = Pipeline(dtype=dtype, lse_dtype=accumulate, blocks=2)
    for seed in range(12):
        found = largest_margins(
            pipeline, dtype=dtype, accumulate=accumulate, seed=seed, spread=spread, declared=declared
        )
        assert all(margin <= 1 for margin in found.values()), (seed, found)


@pytest.mark.parametrize("pipeline", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_pipeline_passes_the_bound_by_far(pipeline):
    """A scale off by 0.1 %, a dropped key and a bfloat16 merge are each more than ten times over, in float32."""
    declared = Pipeline(dtype="float32", blocks=2)
    for seed in range(6):
        found = largest_margins(
            pipeline, dtype="float32", accumulate="float32", seed=seed, spread=1.0, declared=declared
        )
        assert found["out"] > 10, (seed, found)


def test_scores_of_hundreds_break_an_unshifted_exponential():
    """Without the shift the result is not a number, and a NaN has margin inf."""
    declared = Pipeline(dtype="float32", blocks=2)
    found = largest_margins(unshifted, dtype="float32", accumulate="float32", seed=0, spread=300.0, declared=declared)
    assert found["out"] == np.inf


def test_accumulating_in_bfloat16_is_rejected_unless_it_is_declared():
    """The same pipeline is over the line under the default declaration and within it under its own."""
    honest = Pipeline(dtype="bfloat16", accumulates="bfloat16", lse_dtype="float32", blocks=2)
    found = [
        (max(largest_margins(plain, dtype="bfloat16", accumulate="bfloat16", seed=s, spread=1.0, declared=d).values()))
        for d in (Pipeline(dtype="bfloat16", blocks=2), honest)
        for s in range(6)
    ]
    assert min(found[:6]) > 1
    assert max(found[6:]) <= 1


def test_probabilities_rounded_to_the_input_dtype_are_allowed_when_declared():
    """P rounded to bfloat16 before it meets V is over the default line in some element, and within the declared one."""

    def rounded(q, k, v, scale):
        s = (q @ k.mT) * scale
        p = s.softmax(-1)
        return (p + (p.bfloat16().to(p.dtype) - p).detach()) @ v, s.logsumexp(-1)

    def worst(declared: Pipeline) -> float:
        return max(
            largest_margins(rounded, dtype="bfloat16", accumulate="float32", seed=s, spread=1.0, declared=declared)[
                "out"
            ]
            for s in range(8)
        )

    assert worst(Pipeline(dtype="bfloat16", blocks=2)) > 1
    assert worst(Pipeline(dtype="bfloat16", blocks=2, probabilities="input")) <= 1


def test_the_bound_grows_with_the_unit_roundoff_and_with_the_number_of_blocks():
    """Monotone: a coarser dtype or more merges never allow less."""
    rng = np.random.default_rng(0)
    problem = Problem(query_length=5, heads=2, head_dim=4)
    q, k, v, dout = (rng.standard_normal((1, 5, 2, 4)) for _ in range(4))
    answer = attention(problem, q, k, v, dout)

    def bound(**changes: object) -> dict[str, Array]:
        pipeline = dataclasses.replace(Pipeline(dtype="float32"), **changes)
        found = allowed_error(problem, answer, q, k, v, dout, None, pipeline)
        return {name: getattr(found, name) for name in ("out", "lse", "dq", "dk", "dv")}

    base, blocks, coarse = bound(), bound(blocks=8), bound(dtype="bfloat16")
    for name in base:
        assert (blocks[name] > base[name]).all()
    for name in ("out", "dq", "dk", "dv"):
        assert (coarse[name] > base[name]).all()


def test_an_empty_row_is_allowed_no_error_at_all():
    """Where nothing is attended the answer is exact, so the allowed error is 0."""
    rng = np.random.default_rng(1)
    problem = Problem(query_length=4, heads=1, head_dim=2, key_lengths=(0,))
    q, k, v, dout = (rng.standard_normal((1, 4, 1, 2)) for _ in range(4))
    answer = attention(problem, q, k, v, dout)
    found = allowed_error(problem, answer, q, k, v, dout, None, Pipeline(dtype="float16"))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert not getattr(found, name).any()


@pytest.mark.parametrize(
    ("actual", "expected", "allowed", "margin"),
    [
        (1.0, 1.0, 0.0, 0.0),
        (1.5, 1.0, 1.0, 0.5),
        (1.5, 1.0, 0.0, np.inf),
        (np.nan, 1.0, 1.0, np.inf),
        (np.nan, np.nan, 1.0, np.inf),
        (-np.inf, -np.inf, 0.0, 0.0),
        (np.inf, -np.inf, 0.0, np.inf),
        (0.0, -np.inf, 0.0, np.inf),
        (np.inf, 65500.0, 100.0, 0.0),
        (-np.inf, 65500.0, 100.0, np.inf),
        (np.inf, 60000.0, 100.0, np.inf),
        (-np.inf, 60000.0, 200000.0, 0.0),
        (np.nan, 1.0, np.inf, 0.0),
        (np.inf, 1.0, np.inf, 0.0),
    ],
)
def test_margins_follow_their_definition(actual, expected, allowed, margin):
    """Exact agreement, division, NaN, infinities of either sign, honest float16 overflow, no bound at all."""
    found = margins(np.array([actual]), np.array([expected]), np.array([allowed]), "float16")
    assert found[0] == margin


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_constants_of_a_dtype_are_those_of_torch(dtype):
    """Unit roundoff is half of eps; the largest number and the underflow threshold are the format's."""
    info = torch.finfo(TORCH[dtype])
    assert UNIT_ROUNDOFF[dtype] == info.eps / 2
    assert LARGEST[dtype] == info.max
    assert UNDERFLOW[dtype] == (info.smallest_normal * info.eps if dtype == "float16" else info.smallest_normal)


def test_a_witness_bound_refuses_to_say_anything_about_too_many_roundings():
    """With n u of 1 and more, a relative bound would be meaningless."""
    assert 0 < witness_bound("float64", 10) - 20 * UNIT_ROUNDOFF["float64"] < UNIT_ROUNDOFF["float64"]
    with pytest.raises(ValueError, match="terms=2048 in float16: "):
        witness_bound("float16", 2**11)


def test_an_error_that_underflows_still_leaves_room_for_a_result_that_does():
    """Gradients near the smallest float64 are allowed to vanish, although the derived error itself has vanished."""
    problem = Problem(query_length=2, heads=1, head_dim=1, dtype="float64", causal=True)
    q, k = np.array([0.0, 1.0]).reshape(1, 2, 1, 1), np.array([0.0, 724.0]).reshape(1, 2, 1, 1)
    v, dout = np.ones((1, 2, 1, 1)), np.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    answer = attention(problem, q, k, v, dout)
    found = allowed_error(problem, answer, q, k, v, dout, None, Pipeline(dtype="float64", accumulates="float64"))
    assert 0 < answer.dv[0, 0, 0, 0] < UNDERFLOW["float64"]
    assert margins(np.zeros_like(v), answer.dv * [[[[1]], [[0]]]], found.dv, "float64").max() <= 1


def in_parts(reduces: str, seed: int) -> dict[str, float]:
    """Largest margins of dk and dv whose parts, of four ranks each, are rounded to bfloat16 and summed in it."""
    rng = np.random.default_rng(seed)
    problem = Problem(query_length=64, heads=2, head_dim=8, dtype="bfloat16")
    drawn = [torch.from_numpy(rng.standard_normal((1, 64, 2, 8))).bfloat16() for _ in range(4)]
    q, k, v, dout = (x.float().transpose(1, 2) for x in drawn)
    dk, dv = torch.zeros_like(k).bfloat16(), torch.zeros_like(v).bfloat16()
    for rows in torch.arange(64).chunk(4):
        leaves = [x.clone().requires_grad_() for x in (k, v)]
        out, _ = plain(q[..., rows, :], *leaves, problem.scale_value)
        part_k, part_v = torch.autograd.grad(out, leaves, dout[..., rows, :])
        dk, dv = dk + part_k.bfloat16(), dv + part_v.bfloat16()
    exact = [x.double().numpy() for x in drawn]
    answer = attention(problem, *exact)
    bound = allowed_error(problem, answer, *exact, None, Pipeline(dtype="bfloat16", blocks=4, reduces=reduces))
    found = {"dk": dk.transpose(1, 2), "dv": dv.transpose(1, 2)}
    return {
        name: float(margins(x.double().numpy(), getattr(answer, name), getattr(bound, name), "bfloat16").max())
        for name, x in found.items()
    }


def test_gradients_summed_over_ranks_in_the_input_dtype_are_allowed_when_declared():
    """Over the default line in dk or dv, within the declared one in both."""
    for seed in range(6):
        assert max(in_parts("accumulates", seed).values()) > 1
        assert max(in_parts("input", seed).values()) <= 1


def two_keys(apart: float) -> tuple[Problem, Array, Array, Array, Array]:
    """One query, and two keys whose scores are about 166,000 and so far apart."""
    problem = Problem(query_length=1, key_length=2, heads=1, head_dim=1, scale=1.0, dtype="bfloat16")
    q, k = np.full((1, 1, 1, 1), 1.0), np.array([166000.0 + apart, 166000.0]).reshape(1, 2, 1, 1)
    return problem, q, k, np.array([1.0, -1.0]).reshape(1, 2, 1, 1), np.ones((1, 1, 1, 1))


def test_two_scores_that_one_dtype_cannot_tell_apart_may_share_the_weight():
    """938 apart at 166,000: exactly p is 1 and 0, in bfloat16 half and half; float32 tells them apart, and has to."""
    problem, q, k, v, dout = two_keys(938.0)
    answer = attention(problem, q, k, v, dout)
    assert answer.intermediates.probabilities.ravel().tolist() == [1.0, 0.0]
    tied = {"out": np.zeros_like(answer.out), "dv": np.full_like(v, 0.5), "dq": np.zeros_like(q)}

    def largest(accumulates: str) -> list[float]:
        bound = allowed_error(problem, answer, q, k, v, dout, None, Pipeline("bfloat16", accumulates))
        return [
            float(margins(x, getattr(answer, name), getattr(bound, name), "bfloat16").max()) for name, x in tied.items()
        ]

    assert max(largest("bfloat16")) <= 1
    assert min(largest("float32")[:2]) > 2


def test_out_is_a_mean_of_values_however_large_the_error_of_scores():
    """Weights add up to no more than the number of results that are merged, so what is allowed of out stays finite."""
    problem, q, k, v, dout = two_keys(938.0)
    answer = attention(problem, q, k, v, dout)
    bound = allowed_error(problem, answer, q, k, v, dout, None, Pipeline("bfloat16", "bfloat16", blocks=1))
    assert bound.out.max() < 20


def test_scores_past_the_largest_float16_may_be_anything_in_float16_sums_and_nothing_else():
    """Declared float16 sums overflow there: a NaN is within the bound. Float32 sums do not, and no NaN is."""
    rng = np.random.default_rng(0)
    problem = Problem(query_length=3, heads=1, head_dim=4, dtype="float16", causal=True)
    q, k = (np.full((1, 3, 1, 4), 200.0) for _ in range(2))
    v, dout = (rng.standard_normal((1, 3, 1, 4)).round(2) for _ in range(2))
    answer = attention(problem, q, k, v, dout)
    for accumulates, margin in (("float16", 0.0), ("float32", np.inf)):
        bound = allowed_error(problem, answer, q, k, v, dout, None, Pipeline("float16", accumulates))
        for name in ("out", "dq", "dk", "dv"):
            exact = getattr(answer, name)
            assert margins(np.full_like(exact, np.nan), exact, getattr(bound, name), "float16").max() == margin, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_in_the_other_narrow_dtype_are_sums_in_the_input_dtype(dtype):
    """Neither holds the numbers of the other, so a declaration of both dtypes and one of them means each its own."""
    other = {"bfloat16": "float16", "float16": "bfloat16"}[dtype]
    assert Pipeline(dtype, other).sums == dtype
