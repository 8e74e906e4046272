"""Print each rung's errors against the oracle on a few problems, and a ring of four virtual ranks hop by hop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.attention import Answer, attention
from ringref.ladder import blockwise, naive, online_softmax, sequential_ring
from ringref.problem import Dilation, Problem
from ringref.rounding import UNIT_ROUNDOFF
from ringref.sharding import Sharding, key_positions

Array = NDArray[np.floating]

WORLD_SIZE = 4
RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Example:
    """A problem to show, how its ring is sharded and how large its queries and keys are."""

    title: str
    problem: Problem
    sharding: Sharding
    size: float = 1.0


EXAMPLES = (
    Example("causal, zigzag", Problem(query_length=32, heads=2, causal=True), "zigzag"),
    Example(
        "dilated (8, 1) + (16, 2) + (32, 4), shared by all heads, contiguous",
        Problem(query_length=37, heads=4, dilation=Dilation(((8, 1), (16, 2), (32, 4)), heads="shared")),
        "contiguous",
    ),
    Example(
        "documents of 5, 0, 11 and 14 tokens, striped",
        Problem(query_length=30, heads=4, key_heads=2, causal=True, documents=(0, 5, 5, 16, 30)),
        "striped",
    ),
    Example(
        "scores past the range of float16, replicated queries",
        Problem(query_length=32, heads=2, causal=True),
        "replicated_query",
        size=200.0,
    ),
)


def measure(example: Example) -> tuple[float, dict[str, dict[str, float]]]:
    """Run every rung in float32 on one example and compare it with the oracle in float64 on the same numbers.

    Returns:
        The largest score and, for each rung, the errors of its results as returned by `in_units`.
    """
    problem, rng = example.problem, np.random.default_rng(0)
    query, key = (problem.batch, problem.nq, problem.heads), (problem.batch, problem.nk, problem.hk)
    shapes_and_sizes = (
        ((*query, problem.head_dim), example.size),
        ((*key, problem.head_dim), example.size),
        ((*key, problem.dv), 1.0),
        ((*query, problem.dv), 1.0),
        ((problem.batch, problem.heads, problem.nq), 1.0),
    )
    inputs = [(rng.standard_normal(shape) * size).astype(np.float32) for shape, size in shapes_and_sizes]
    expected = attention(problem, *(x.astype(np.float64) for x in inputs))

    ring: dict[str, Any] = {"sharding": example.sharding, "world_size": WORLD_SIZE}
    rungs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "naive": (naive.forward, naive.backward),
        "blockwise": (blockwise.forward, blockwise.backward),
        "online softmax": (online_softmax.forward, online_softmax.backward),
        "sequential ring": (partial(sequential_ring.forward, **ring), partial(sequential_ring.backward, **ring)),
    }
    q, k, v, dout, dlse = inputs
    errors = {}
    for name, (forward, backward) in rungs.items():
        out, lse = forward(problem, q, k, v)
        errors[name] = in_units(expected, (out, lse, *backward(problem, q, k, v, out, lse, dout, dlse)))
    return float(np.abs(expected.intermediates.scores).max(initial=0.0)), errors


def in_units(expected: Answer, actual: tuple[Array, ...]) -> dict[str, float]:
    """Return the largest error of each result relative to its largest finite element, in units of float32's u."""
    units = {}
    for name, got in zip(RESULTS, actual, strict=True):
        right = getattr(expected, name)
        finite = np.isfinite(right)
        if not np.array_equal(finite, np.isfinite(got)):
            units[name] = math.inf
            continue
        largest = np.abs(right[finite]).max(initial=0.0)
        error = np.abs(got[finite] - right[finite]).max(initial=0.0)
        units[name] = float(error / (UNIT_ROUNDOFF["float32"] * largest)) if error else 0.0
    return units


def describe(problem: Problem) -> str:
    """Describe the problem by its fields that differ from the default, dilation left out."""
    return ", ".join(f"{name}={value}" for name, value in problem.to_json().items() if name != "dilation")


def show_ring(example: Example) -> None:
    """Print the forward of a ring hop by hop: whose KV block each rank merges, and how many pairs it attends there."""
    problem = example.problem
    zeros = np.zeros((problem.batch, problem.nq, problem.heads, problem.head_dim), dtype=np.float32)
    merges: list[sequential_ring.Merge] = []
    sequential_ring.forward(
        problem, zeros, zeros, zeros, sharding=example.sharding, world_size=WORLD_SIZE, trace=merges.append
    )
    print(f"\nThe ring of {WORLD_SIZE} ranks: {example.title}")
    for rank, positions in enumerate(key_positions(example.sharding, problem.nk, WORLD_SIZE)):
        print(f"  rank {rank} owns {' '.join(map(str, positions))}")
    print(("\n  hop   " + "".join(f"{f'rank {rank}':<22}" for rank in range(WORLD_SIZE))).rstrip())
    for hop in range(WORLD_SIZE):
        seen = [f"block {merge.block}, {merge.pairs} pairs" for merge in merges if merge.hop == hop]
        print((f"  {hop}     " + "".join(f"{text:<22}" for text in seen)).rstrip())


def show_table(example: Example) -> None:
    """Print the errors of every rung on one example."""
    largest_score, errors = measure(example)
    print(f"\n{example.title}\n  {describe(example.problem)}; scores up to {largest_score:.3g}")
    print(f"  {'':<16}" + "".join(f"{result:>8}" for result in RESULTS))
    for rung, units in errors.items():
        print(f"  {rung:<16}" + "".join(f"{units[result]:>8.1f}" for result in RESULTS))


def main() -> None:
    """Print the tables and the trace."""
    print("Every rung in float32 against the oracle in float64: the largest error of each result, in units of u times")
    print(f"the largest element of that result. u = {UNIT_ROUNDOFF['float32']:.3g}, half the gap from 1 to the next.")
    for example in EXAMPLES:
        show_table(example)
    show_ring(EXAMPLES[0])


if __name__ == "__main__":
    main()
