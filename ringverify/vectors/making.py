"""Make the tensors of a vector's file from its story: inputs, the right results, and the errors allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ringref import attention_decimal
from ringref.attention import Answer, attention
from ringref.problem import Problem
from ringref.rounding import Allowed, Pipeline, allowed_error
from ringverify.cases.inputs import Inputs
from ringverify.cases.tensorfile import Tensor
from ringverify.vectors import inputs
from ringverify.vectors.story import Story

Array = NDArray[np.float64]

Probabilities = Literal["accumulates", "input"]

EXACT = ("out", "dv")
"""Results that have to be right bit for bit where a vector is exact."""


def inputs_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the inputs of a problem."""
    return ("q", "k", "v", "dout", "dlse", *["sinks"] * problem.sinks)


def results_of(problem: Problem) -> tuple[str, ...]:
    """Return the names of the results of a problem."""
    return ("out", "lse", "dq", "dk", "dv", *["dsinks"] * problem.sinks)


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
    tensors = {name: Tensor(getattr(given, name), p.dtype) for name in inputs_of(p)}
    tensors["dlse"] = Tensor(given.dlse, p.lse_dtype)
    if given.sinks is not None:
        tensors["sinks"] = Tensor(given.sinks, "float32")
    exact = attention_decimal.attention(p, given.q, given.k, given.v, given.dout, given.dlse, given.sinks)
    tensors |= {name: Tensor(x, "float64") for name, x in zip(results_of(p), exact, strict=True)}
    float64 = float64_answer(p, given)
    for probabilities in roundings(p):
        pipeline = Pipeline(p.dtype, probabilities=probabilities, lse_dtype=p.lse_dtype, blocks=story.most_ranks)
        bounds = allowed_error(p, float64, given.q, given.k, given.v, given.dout, given.dlse, pipeline)
        for name in results_of(p):
            bound = np.zeros_like(tensors[name].values) if story.exact and name in EXACT else whole(bounds, name)
            tensors[f"allowed.{probabilities}.{name}"] = Tensor(upwards(bound), "bfloat16")
    return tensors


def roundings(problem: Problem) -> tuple[Probabilities, ...]:
    """Return the roundings of the probabilities for which errors are allowed in the file: 16-bit dtypes have two."""
    return get_args(Probabilities) if problem.dtype in ("bfloat16", "float16") else ("accumulates",)


def float64_answer(problem: Problem, given: Inputs) -> Answer:
    """Return the answer of the float64 oracle."""
    return attention(problem, given.q, given.k, given.v, given.dout, given.dlse, given.sinks)


def given_in(tensors: Mapping[str, Tensor]) -> Inputs:
    """Return the inputs among a file's tensors."""
    names = ("q", "k", "v", "dout", "dlse", *["sinks"] * ("sinks" in tensors))
    return Inputs(**{name: tensors[name].values for name in names})


def whole(found: Answer | Allowed, name: str) -> Array:
    """Return a result, or the error allowed in it, as the file has it: the gradient of sinks is over all queries."""
    values: Array = getattr(found, name)
    return values.sum(axis=1) if name == "dsinks" else values


def shapes(story: Story) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor that a vector's file has to hold, by name."""
    p = story.problem
    query, key = (p.batch, p.nq, p.heads), (p.batch, p.nk, p.hk)
    rows = (p.batch, p.heads, p.nq)
    results: dict[str, tuple[int, ...]] = {
        "out": (*query, p.dv), "lse": rows, "dq": (*query, p.head_dim), "dk": (*key, p.head_dim), "dv": (*key, p.dv),
    }  # fmt: skip
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "q": ((*query, p.head_dim), p.dtype),
        "k": ((*key, p.head_dim), p.dtype),
        "v": ((*key, p.dv), p.dtype),
        "dout": ((*query, p.dv), p.dtype),
        "dlse": (rows, p.lse_dtype),
    }
    if p.sinks:
        results["dsinks"] = (p.heads,)
        found["sinks"] = (p.heads,), "float32"
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
