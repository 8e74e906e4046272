"""Make the tensors of a vector's file from its story: inputs, the right results, and the errors allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ringref import attention_decimal
from ringref.attention import Answer, attention
from ringref.problem import Problem
from ringref.rounding import Pipeline, allowed_error
from ringverify.cases.inputs import Inputs
from ringverify.cases.tensorfile import Tensor
from ringverify.vectors import inputs
from ringverify.vectors.story import Story

Array = NDArray[np.float64]

Probabilities = Literal["accumulates", "input"]

INPUTS = ("q", "k", "v", "dout", "dlse")
RESULTS = ("out", "lse", "dq", "dk", "dv")
EXACT = ("out", "dv")
"""Results that have to be right bit for bit where a vector is exact."""


def make(story: Story) -> dict[str, Tensor]:
    """Return all tensors of a vector; they depend on its id and its story alone."""
    return answered(story, inputs.make(story))


def answered(story: Story, given: Inputs) -> dict[str, Tensor]:
    """Return the inputs, the right results and the errors allowed, by the names that they have in the file.

    The results are those of `ringref.attention_decimal`, so they have the same bits on every machine. The errors
    allowed follow `ringref.rounding`, for sums in float32 (in the input dtype, if that is wider) and for the largest
    world size that the vector is tried on. They are rounded up to bfloat16, eight significant bits, so that differences
    between machines in the last bits of the float64 oracle do not matter.
    """
    p = story.problem
    tensors = {name: Tensor(getattr(given, name), p.dtype) for name in INPUTS}
    tensors["dlse"] = Tensor(given.dlse, p.lse_dtype)
    exact = attention_decimal.attention(p, given.q, given.k, given.v, given.dout, given.dlse)
    tensors |= {name: Tensor(x, "float64") for name, x in zip(RESULTS, exact, strict=True)}
    float64 = float64_answer(p, given)
    for probabilities in roundings(p):
        pipeline = Pipeline(p.dtype, probabilities=probabilities, lse_dtype=p.lse_dtype, blocks=story.most_ranks)
        bounds = allowed_error(p, float64, given.q, given.k, given.v, given.dout, given.dlse, pipeline)
        for name in RESULTS:
            bound = np.zeros_like(tensors[name].values) if story.exact and name in EXACT else getattr(bounds, name)
            tensors[f"allowed.{probabilities}.{name}"] = Tensor(upwards(bound), "bfloat16")
    return tensors


def roundings(problem: Problem) -> tuple[Probabilities, ...]:
    """Return the roundings of the probabilities for which errors are allowed in the file: 16-bit dtypes have two."""
    return get_args(Probabilities) if problem.dtype in ("bfloat16", "float16") else ("accumulates",)


def float64_answer(problem: Problem, given: Inputs) -> Answer:
    """Return the answer of the float64 oracle."""
    return attention(problem, given.q, given.k, given.v, given.dout, given.dlse)


def given_in(tensors: Mapping[str, Tensor]) -> Inputs:
    """Return the inputs among a file's tensors."""
    return Inputs(*(tensors[name].values for name in INPUTS))


def shapes(story: Story) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor that a vector's file has to hold, by name."""
    p = story.problem
    query, key = (p.batch, p.nq, p.heads), (p.batch, p.nk, p.hk)
    rows = (p.batch, p.heads, p.nq)
    results = {
        "out": (*query, p.dv), "lse": rows, "dq": (*query, p.head_dim), "dk": (*key, p.head_dim), "dv": (*key, p.dv),
    }  # fmt: skip
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "q": ((*query, p.head_dim), p.dtype),
        "k": ((*key, p.head_dim), p.dtype),
        "v": ((*key, p.dv), p.dtype),
        "dout": ((*query, p.dv), p.dtype),
        "dlse": (rows, p.lse_dtype),
    }
    found |= {name: (shape, "float64") for name, shape in results.items()}
    for probabilities in roundings(p):
        found |= {f"allowed.{probabilities}.{name}": (shape, "bfloat16") for name, shape in results.items()}
    return found


def upwards(values: Array) -> Array:
    """Round non-negative float64 numbers up to bfloat16, and return them as float64.

    Raises:
        ValueError: a number is NaN, or too large for bfloat16.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    narrow = np.where(narrow < values, np.nextafter(narrow, np.float32(np.inf)), narrow)
    bits = (narrow.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    rounded: Array = bits.view(np.float32).astype(np.float64)
    if not np.isfinite(rounded).all():
        raise ValueError("an allowed error is not finite: nothing is said of the result")
    return rounded
