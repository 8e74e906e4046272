"""From a story to the tensors of its file: inputs, the answer, and what error is allowed."""

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
from ringverify.vectors import inputs
from ringverify.vectors.story import Story
from ringverify.vectors.tensorfile import Tensor

Array = NDArray[np.float64]

Probabilities = Literal["accumulates", "input"]

INPUTS = ("q", "k", "v", "dout", "dlse")
RESULTS = ("out", "lse", "dq", "dk", "dv")
EXACT = ("out", "dv")
"""What has to come back bit for bit where a vector is exact."""


def make(story: Story) -> dict[str, Tensor]:
    """All tensors of a vector, made from its id and its story alone."""
    return answered(story, inputs.make(story))


def answered(story: Story, given: Inputs) -> dict[str, Tensor]:
    """The inputs and what is right for them.

    The answer is that of `ringref.attention_decimal`, so it has the same bits on every machine. What error is allowed
    follows `ringref.rounding` for sums in float32 or the input dtype, if that is wider, on as many ranks as the
    vector is tried on at most; it is rounded up to eight bits, which is more than anybody's last bits matter to.
    """
    p = story.problem
    lse_dtype = lse_dtype_of(p)
    tensors = {name: Tensor(getattr(given, name), p.dtype) for name in INPUTS}
    tensors["dlse"] = Tensor(given.dlse, lse_dtype)
    exact = attention_decimal.attention(p, given.q, given.k, given.v, given.dout, given.dlse)
    tensors |= {name: Tensor(x, "float64") for name, x in zip(RESULTS, exact, strict=True)}
    float64 = float64_answer(p, given)
    for probabilities in roundings(p):
        pipeline = Pipeline(p.dtype, probabilities=probabilities, lse_dtype=lse_dtype, blocks=story.most_ranks)
        bounds = allowed_error(p, float64, given.q, given.k, given.v, given.dout, given.dlse, pipeline)
        for name in RESULTS:
            bound = np.zeros_like(tensors[name].values) if story.exact and name in EXACT else getattr(bounds, name)
            tensors[f"allowed.{probabilities}.{name}"] = Tensor(upwards(bound), "bfloat16")
    return tensors


def roundings(problem: Problem) -> tuple[Probabilities, ...]:
    """For which roundings of the probabilities a vector says what is allowed: narrow dtypes have two kinds."""
    return get_args(Probabilities) if problem.dtype in ("bfloat16", "float16") else ("accumulates",)


def lse_dtype_of(problem: Problem) -> Literal["float64", "float32"]:
    """In which dtype lse and its cotangent are, at least."""
    return "float64" if problem.dtype == "float64" else "float32"


def float64_answer(problem: Problem, given: Inputs) -> Answer:
    """The answer of the float64 oracle."""
    return attention(problem, given.q, given.k, given.v, given.dout, given.dlse)


def given_in(tensors: Mapping[str, Tensor]) -> Inputs:
    """The inputs among a file's tensors."""
    return Inputs(*(tensors[name].values for name in INPUTS))


def shapes(story: Story) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor that a vector has to have, by name."""
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
        "dlse": (rows, lse_dtype_of(p)),
    }
    found |= {name: (shape, "float64") for name, shape in results.items()}
    for probabilities in roundings(p):
        found |= {f"allowed.{probabilities}.{name}": (shape, "bfloat16") for name, shape in results.items()}
    return found


def upwards(values: Array) -> Array:
    """Numbers of at least 0, rounded up to bfloat16.

    Raises:
        ValueError: one is too large, or no number.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    narrow = np.where(narrow < values, np.nextafter(narrow, np.float32(np.inf)), narrow)
    bits = (narrow.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    rounded: Array = bits.view(np.float32).astype(np.float64)
    if not np.isfinite(rounded).all():
        raise ValueError("an allowed error is not finite: nothing is said of the result")
    return rounded
