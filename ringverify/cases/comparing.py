"""Compare what the ranks returned with the oracle, and find the worst element."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ringref.attention import Answer, attention
from ringref.rounding import Allowed, Pipeline, allowed_error, margins, rounding_of_wrong
from ringverify.cases.case import Case
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.running import Observation, shards
from ringverify.events import AXES, TensorName
from ringverify.implementation import Capabilities

Array = NDArray[np.float64]
QKV_GRADIENTS: tuple[TensorName, ...] = ("dq", "dk", "dv")
GRADIENTS: tuple[TensorName, ...] = (*QKV_GRADIENTS, "dsinks")
KEPT = 512
"""Size of the caches of answers and bounds: mutants are tried on the same cases one after another; few are large."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The element of a run with the largest margin.

    Attributes:
        tensor: which result it is in.
        rank: the rank that returned it, within the ring.
        index: its index in that rank's tensor, canonical layout.
        position: global position of its row, a query (out, lse, dq) or a key (dk, dv); `None` of dsinks.
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
    position: int | None
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
    return attention(case.problem, x.q, x.k, x.v, x.dout, x.dlse, x.sinks)


@functools.lru_cache(maxsize=KEPT)
def allowed(case: Case, pipeline: Pipeline) -> Allowed:
    """Return the largest error allowed for each element of the answer to a case."""
    x = make_inputs(case)
    return allowed_error(case.problem, answer(case), x.q, x.k, x.v, x.dout, x.dlse, pipeline)


def allowed_on(case: Case, inputs: Inputs, pipeline: Pipeline) -> Allowed:
    """Return the errors allowed on a case that is run with other inputs than its own; not cached."""
    x = inputs
    exact = attention(case.problem, x.q, x.k, x.v, x.dout, x.dlse, x.sinks)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Right:
    """Global results that those of a run are compared with, and the errors allowed; `None` for what is not compared.

    NaN in the same place of both is no difference.
    """

    allowed: Allowed
    out: Array | None = None
    lse: Array | None = None
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dsinks: Array | None = None


def gathered(case: Case, capabilities: Capabilities, observation: Observation, name: TensorName) -> Array:
    """Assemble one result of all ranks into a tensor over all positions, in canonical layout.

    Under `replicated_query` each rank returns out, lse and dq of all queries; those of the last rank are taken. The
    gradient of sinks comes as `(Hq, 1)`, the sum over all ranks' queries; without sinks it is empty.
    """
    if name == "dsinks":
        parts = [np.zeros(0) if rank.dsinks is None else rank.dsinks for rank in observation.ranks]
        return (np.sum(parts, axis=0) if sinks_in_parts(case, capabilities) else parts[-1])[:, None]
    queries, keys = shards(case, capabilities)
    rows, length = (keys, case.problem.nk) if name in ("dk", "dv") else (queries, case.problem.nq)
    axis = 2 if name == "lse" else 1
    shape = list(getattr(observation.ranks[0], name).shape)
    shape[axis] = length
    whole = np.zeros(shape)
    for rank, result in enumerate(observation.ranks):
        whole[(slice(None),) * axis + (rows[rank],)] = getattr(result, name)
    return whole


def sinks_in_parts(case: Case, capabilities: Capabilities) -> bool:
    """Return whether a rank's gradient of sinks is that of its own queries, and these are not all queries."""
    return capabilities.sinks == "partial" and not case.replicated


def allowed_between(one: Allowed, other: Allowed) -> Allowed:
    """Return the largest difference allowed between two results, each with its own error allowed: the sums of both."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in GRADIENTS]
    gradients = (None if a is None or b is None else a + b for a, b in pairs)
    return Allowed(one.out + other.out, one.lse + other.lse, *gradients)


def other_run(
    one: Mapping[TensorName, Array],
    other: Mapping[TensorName, Array],
    truth: Answer,
    bound: Allowed,
    pipeline: Pipeline,
) -> Right:
    """Return a run's results as those to compare another run's with, where both may be wrong alike.

    What both are off by rounds too, by more than the right answer may: the largest such error of any result counts,
    for a gradient whose terms cancel tells little of their sizes.

    Args:
        one: global results of the run that is compared.
        other: those that it is compared with, by the same names.
        truth: the oracle's answer to both.
        bound: the difference allowed between right results.
        pipeline: the arithmetic of both.
    """
    alike = 0.0
    for name, exact, limit in _known(truth, bound, one):
        with np.errstate(invalid="ignore"):  # lse of an empty row
            common = np.minimum(np.abs(one[name] - exact), np.abs(other[name] - exact))
        alike = max(alike, float(common[np.isfinite(common) & (common > limit)].max(initial=0.0)))
    if alike:
        more = rounding_of_wrong(alike, pipeline)
        grown = {str(name): limit + more for name, _, limit in _known(truth, bound, one)}
        bound = dataclasses.replace(bound, **grown)
    return Right(bound, **{str(name): result for name, result in other.items()})


def _known(truth: Answer, bound: Allowed, names: Iterable[TensorName]) -> Iterator[tuple[TensorName, Array, Array]]:
    """Yield the name of each result that has exact values, these, and its bounds, in the shapes of `gathered`."""
    for name in names:
        exact, limit = getattr(truth, name), getattr(bound, name)
        if exact is not None and name == "dsinks":
            exact, limit = (x.sum(axis=1, keepdims=True) for x in (exact, limit))
        if exact is not None:
            yield name, exact, limit


def worst(
    case: Case,
    capabilities: Capabilities,
    observation: Observation,
    tensors: tuple[TensorName, ...],
    right: Right | None = None,
) -> tuple[float, Finding | None]:
    """Return the largest margin of a run, and its element if the margin is above 1.

    The results are compared with `right`, by default with the oracle's answer on the case's own inputs.
    """
    truth = answer(case) if right is None else right
    bound = allowed(case, pipeline_of(case, capabilities, observation)) if right is None else right.allowed
    queries, keys = shards(case, capabilities)
    largest, found = 0.0, None
    wrong: dict[TensorName, dict[int, int]] = {}
    sizes: dict[TensorName, int] = {}
    for name in tensors:
        # lse is returned in float32 or wider even for 16-bit inputs, so the range of float32 applies to it.
        dtype = {"lse": case.problem.lse_dtype, "dsinks": "float32"}.get(name, case.problem.dtype)
        for rank, result in enumerate(observation.ranks):
            actual = getattr(result, name)
            if actual is None or not actual.size:
                continue
            rows = keys[rank] if name in ("dk", "dv") else queries[rank]
            where = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
            if name == "dsinks":
                # By query and so in parts, as the oracle has it; what is compared with another run is the sum of all.
                in_parts = sinks_in_parts(case, capabilities)
                if in_parts and right is not None:
                    actual = gathered(case, capabilities, observation, name)[:, 0]
                mine = rows if in_parts and right is None else slice(None)
                expected, limit = (getattr(x, name)[:, mine].sum(axis=1) for x in (truth, bound))
            else:
                expected, limit = getattr(truth, name)[where], getattr(bound, name)[where]
            margin = margins(actual, expected, limit, dtype)
            if right is not None:
                margin = np.where(np.isnan(actual) & np.isnan(expected), 0.0, margin)
            top = float(margin.max())
            sizes[name] = sizes.get(name, 0) + actual.size
            if top > 1:
                wrong.setdefault(name, {})[rank] = int((margin > 1).sum())
            if top > largest:
                largest, found = top, (name, rank, rows, actual, expected, limit, margin)
    if found is None or largest <= 1:
        return largest, None
    name, rank, rows, actual, expected, limit, margin = found
    index = tuple(int(i) for i in np.unravel_index(int(margin.argmax()), margin.shape))
    row = {"dk": "key", "dv": "key", "dsinks": None}.get(name, "query")
    with np.errstate(invalid="ignore"):
        error = float(np.abs(actual[index] - expected[index]))
    finding = Finding(
        tensor=name,
        rank=rank,
        index=index,
        position=None if row is None else int(rows[index[AXES[name].index(row)]]),
        actual=float(actual[index]),
        expected=float(expected[index]),
        error=error,
        allowed=float(limit[index]),
        margin=largest,
        wrong=wrong[name],
        of=sizes[name],
        tensors=tuple(wrong),
    )
    return largest, finding
