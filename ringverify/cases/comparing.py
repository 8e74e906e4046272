"""Compare what the ranks returned with the oracle, and find the worst element."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ringref.attention import Answer, attention
from ringref.rounding import Allowed, Pipeline, allowed_error, margins
from ringverify.cases.case import Case
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.running import Observation, shards
from ringverify.events import AXES, TensorName
from ringverify.implementation import Capabilities

Array = NDArray[np.float64]
GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")
KEPT = 512
"""Size of the caches of answers and bounds: mutants are tried on the same cases one after another; few are large."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The element of a run with the largest margin.

    Attributes:
        tensor: which result it is in.
        rank: the rank that returned it, within the ring.
        index: its index in that rank's tensor, canonical layout.
        position: global position of its row, a query (out, lse, dq) or a key (dk, dv).
        actual: the value that came back.
        expected: the oracle's value.
        error: absolute difference of the two.
        allowed: largest error allowed for this element.
        margin: error over allowed; above 1 is a violation.
        wrong: for each rank with a wrong element of this tensor, how many.
        of: number of elements of this tensor on all ranks together.
        tensors: every result with a wrong element, this one included.
    """

    tensor: TensorName
    rank: int
    index: tuple[int, ...]
    position: int
    actual: float
    expected: float
    error: float
    allowed: float
    margin: float
    wrong: dict[int, int]
    of: int
    tensors: tuple[TensorName, ...]


@functools.lru_cache(maxsize=KEPT)
def answer(case: Case) -> Answer:
    """Return the oracle's answer to a case, gradients included."""
    x = make_inputs(case)
    return attention(case.problem, x.q, x.k, x.v, x.dout, x.dlse)


@functools.lru_cache(maxsize=KEPT)
def allowed(case: Case, pipeline: Pipeline) -> Allowed:
    """Return the largest error allowed for each element of the answer to a case."""
    x = make_inputs(case)
    return allowed_error(case.problem, answer(case), x.q, x.k, x.v, x.dout, x.dlse, pipeline)


def allowed_on(case: Case, inputs: Inputs, pipeline: Pipeline) -> Allowed:
    """Return the errors allowed on a case that is run with other inputs than its own; not cached."""
    x = inputs
    exact = attention(case.problem, x.q, x.k, x.v, x.dout, x.dlse)
    return allowed_error(case.problem, exact, x.q, x.k, x.v, x.dout, x.dlse, pipeline)


def pipeline_of(case: Case, capabilities: Capabilities, observation: Observation) -> Pipeline:
    """Return the declared pipeline for a case, with the dtype in which lse really came back."""
    returned = observation.ranks[0].lse_dtype if observation.ranks else ""
    return Pipeline(
        dtype=case.problem.dtype,
        accumulates=capabilities.accumulates,
        probabilities=capabilities.probabilities,
        lse_dtype="float64" if returned == "float64" else "float32",
        blocks=case.world_size,
        reduces=capabilities.reduces,
    )


@dataclasses.dataclass(frozen=True)
class RankComparison:
    """One result of one rank, the expected values and the errors allowed, all of one shape; `positions` of its rows."""

    tensor: TensorName
    rank: int
    positions: NDArray[np.int64]
    actual: Array
    expected: Array
    allowed: Array


@dataclasses.dataclass(frozen=True, eq=False)
class Right:
    """Expected global results of a run on other inputs than the case's own, and the errors allowed for them."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    allowed: Allowed


def side_by_side(
    case: Case,
    capabilities: Capabilities,
    observation: Observation,
    tensors: tuple[TensorName, ...],
    right: Right | None = None,
) -> Iterator[RankComparison]:
    """Yield each of `tensors` on every rank that returned it, with the expected values and the errors allowed.

    Expected values come from `right`, or by default from the oracle on the case's own inputs.
    """
    truth = answer(case) if right is None else right
    bound = allowed(case, pipeline_of(case, capabilities, observation)) if right is None else right.allowed
    queries, keys = shards(case, capabilities)
    for name in tensors:
        exact, limit = getattr(truth, name), getattr(bound, name)
        for rank, result in enumerate(observation.ranks):
            if (actual := getattr(result, name)) is None:
                continue
            rows = keys[rank] if name in ("dk", "dv") else queries[rank]
            where = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
            yield RankComparison(name, rank, rows, actual, exact[where], limit[where])


def worst(
    case: Case,
    capabilities: Capabilities,
    observation: Observation,
    tensors: tuple[TensorName, ...],
    right: Right | None = None,
) -> tuple[float, Finding | None]:
    """Return the largest margin of a run, and its element if the margin is above 1; `right` as in `side_by_side`."""
    largest, finding = 0.0, None
    wrong: dict[TensorName, dict[int, int]] = {}
    sizes: dict[TensorName, int] = {}
    for pair in side_by_side(case, capabilities, observation, tensors, right):
        if not pair.actual.size:
            continue
        sizes[pair.tensor] = sizes.get(pair.tensor, 0) + pair.actual.size
        # lse is returned in float32 or wider even for 16-bit inputs, so the range of float32 applies to it.
        dtype = "float32" if pair.tensor == "lse" and case.problem.dtype != "float64" else case.problem.dtype
        margin = margins(pair.actual, pair.expected, pair.allowed, dtype)
        top = float(margin.max())
        if top > 1:
            wrong.setdefault(pair.tensor, {})[pair.rank] = int((margin > 1).sum())
        if top > largest:
            largest = top
            if top > 1:
                finding = finding_at(pair, margin)
    if finding is not None:
        finding = dataclasses.replace(
            finding, wrong=wrong[finding.tensor], of=sizes[finding.tensor], tensors=tuple(wrong)
        )
    return largest, finding


def finding_at(pair: RankComparison, margin: Array) -> Finding:
    """Return the element of one rank's tensor with the largest margin; `wrong` and `of` count that tensor only."""
    index = tuple(int(i) for i in np.unravel_index(int(margin.argmax()), margin.shape))
    row = index[AXES[pair.tensor].index("key" if pair.tensor in ("dk", "dv") else "query")]
    with np.errstate(invalid="ignore"):
        error = float(np.abs(pair.actual[index] - pair.expected[index]))
    return Finding(
        tensor=pair.tensor,
        rank=pair.rank,
        index=index,
        position=int(pair.positions[row]),
        actual=float(pair.actual[index]),
        expected=float(pair.expected[index]),
        error=error,
        allowed=float(pair.allowed[index]),
        margin=float(margin[index]),
        wrong={pair.rank: int((margin > 1).sum())},
        of=pair.actual.size,
        tensors=(pair.tensor,),
    )
