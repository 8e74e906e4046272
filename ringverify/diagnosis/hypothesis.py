"""A hypothesis about what is wrong, and whether it explains what an implementation returned.

It does if its predictions agree with what was returned, on every rank and in every result, within the rounding that
`ringref.rounding` allows: wrong values are reproduced, and right values stay right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np
import torch

from ringref.attention import Answer, Intermediates
from ringref.problem import DtypeName, Problem
from ringref.rounding import LARGEST, UNDERFLOW, UNIT_ROUNDOFF, Allowed, allowed_error, margins, witness_bound
from ringverify.cases.case import Case
from ringverify.cases.inputs import Inputs
from ringverify.diagnosis import reproducing
from ringverify.diagnosis.reproducing import NoPrediction
from ringverify.diagnosis.rows import on_wrong_rows
from ringverify.diagnosis.scene import Array, Results, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.fault import Cause, When
from ringverify.faults.ring import BACKWARD, STEPS, Steps

SCORING = frozenset(
    {
        *reproducing.MASK,
        "given",
        "widen",
        "per_query_head",
        "scale",
        "scores",
        "cap",
        "capped",
        "visit",
        "hop_of",
        "arrive",
    }
)
"""Steps that change the scores or which of them count: the allowed error is then derived from the changed scores."""

T = TypeVar("T")

CONCERNS = {
    "causal": "causal",
    "window": "window",
    "documents": "documents",
    "key_lengths": "key_lengths",
    "branches": "dilation",
    "covers": "dilation",
    "segment": "dilation",
    "dilation": "dilation",
    "cap": "softcap",
    "cap_slope": "softcap",
    "sink": "sinks",
}
"""Steps that run only if the problem has this field set."""


@dataclasses.dataclass(frozen=True)
class Hypothesis(Cause):
    """A fault that an implementation may have.

    Attributes:
        ranks: the ranks of a case that have the fault; `None` is all.
        rows: whether only those rows of a result have the fault that are wrong, whichever these are on a case.
        scored: the steps from whose scores the allowed error is derived, where these are hidden in `steps`.
        allowed_by: of a fault of rounding that is predicted digit by digit, the capabilities by which it is allowed if
            they are declared. Right results show it too: a case in which they do not rules it out.
        judge: replaces the prediction by steps, for faults of rounding: returns the largest difference left, or `None`.
        measured: whether a number was fitted to what came back: that it is the same in many cases is no chance.
        only: whether it may be there in a case; `None` is all of them.
        whole: returns the results, of all positions, that `judge` expects instead of the right ones, if it has such.
    """

    ranks: Callable[[Scene], tuple[int, ...]] | None = None
    rows: bool = False
    scored: Steps | None = None
    allowed_by: tuple[str, ...] | None = None
    judge: Callable[[Scene], float | None] | None = None
    measured: bool = False
    only: Callable[[Case], bool] | None = None
    whole: Callable[[Scene], Mapping[TensorName, Array]] | None = None

    def advised(self, scene: Scene) -> str:
        """Return what to try first in a case; empty if nothing is known."""
        return self.advice if isinstance(self.advice, str) else self.advice(scene)

    @property
    def partial(self) -> bool:
        """Whether the fault is limited to some rows, blocks or ranks of a case, which were chosen so that it fits."""
        return self.rows or self.ranks is not None or self.scored is not None

    def may_be_in(self, case: Case) -> bool:
        """Whether a case has what it takes for the fault to be there."""
        return self.only is None or self.only(case)

    def idle(self, scene: Scene) -> bool:
        """Whether a case is too small for the fault: nothing in it is longer than the tile that was fitted."""

        def longest() -> int:
            return max(scene.problem.head_dim, *(len(rows) for held in scene.shards for rows in held))

        return bool(self.tile) and scene.once("longest", longest) <= self.tile

    def covers(self, other: Hypothesis) -> bool:
        """Whether another hypothesis is a variant of this one, or the same fault in fewer directions."""
        return (
            self.says == other.says
            and self.more in ("", other.more)
            and self.when in ("always", other.when)
            and self.rows == other.rows
        )

    def explains(self, scene: Scene) -> float | None:
        """Return the largest difference between prediction and observation; `None` if it does not explain the case."""
        if not self.may_be_in(scene.case):
            return None if wrong_tensors(scene) else 0.0
        if self.judge is not None:
            with np.errstate(all="ignore"):  # what is predicted may be no number
                return self.judge(scene)
        if not comparable(scene):
            return None
        steps, hidden = self.steps, self.scored or self.steps
        if self.idle(scene) or not _concerns(scene.problem, hidden):
            return None if wrong_tensors(scene) else 0.0
        ranks = range(scene.size) if self.ranks is None else self.ranks(scene)

        def steps_of(direction: When) -> reproducing.StepsOfRank:
            there = self.when in ("always", direction)
            return lambda rank: steps if there and rank in ranks else STEPS

        @functools.cache
        def limits() -> Allowed:
            scoring = hidden.changed & SCORING
            return _limits_of(scene, lambda rank: hidden if rank in ranks else STEPS) if scoring else scene.allowed

        def limits_in(direction: When) -> Callable[[], Allowed]:
            return limits if self.when in ("always", direction) else lambda: scene.allowed

        exact = not hidden.changed & SCORING.difference(reproducing.MASK)

        def agrees(rank: int, results: Results) -> bool:
            near = fitted(rank, results).items()
            return all(_near(scene, name, rank, found, exact=exact) for name, found in near)

        def fitted(rank: int, results: Results) -> Results:
            return on_wrong_rows(scene, rank, results) if self.rows else results

        def agreed(found: list[Results], tensors: tuple[TensorName, ...], direction: When) -> float | None:
            scene.shared["predicted", steps, tensors] = found
            those = [fitted(rank, results) for rank, results in enumerate(found)]
            return agree(scene, those, tensors, limits_in(direction))

        def of_forward() -> tuple[list[reproducing.Forward], float] | None:
            wide = torch.float32 if self.overflows and scene.pipeline.sums == "float32" else torch.float64
            forwards = reproducing.forward(scene, steps_of("forward"), wide=wide, agrees=agrees)
            left = agreed([one.results for one in forwards], ("out", "lse"), "forward")
            return None if left is None else (forwards, left)

        with np.errstate(all="ignore"):
            try:
                if alone := self.when == "backward" or hidden.changed <= BACKWARD:
                    explained = _right(scene)
                else:
                    explained = _shared(scene, ("forward", steps, tuple(ranks), self.overflows, self.rows), of_forward)
                if explained is None or "dq" not in scene.tensors:
                    return None if explained is None else explained[1]
                if self.rows and not alone:
                    return None  # what the backward starts from is not known
                forwards, left = explained
                results = reproducing.backward(scene, steps_of("backward"), forwards, agrees=agrees)
                more = agreed(results, ("dq", "dk", "dv"), "backward")
            except NoPrediction:
                return None
        return None if more is None else max(left, more)

    def is_harmless(self, scene: Scene) -> bool:
        """Whether a ring with this fault on all ranks returns the digits of one without it, sums being exact."""
        if not self.may_be_in(scene.case):
            return True
        if not self.steps.changed:
            return False  # it is none of a step
        try:
            right = scene.once("digits", lambda: digits(scene, STEPS))
            found = digits(scene, self.steps, self.when)
        except NoPrediction:
            return False
        return all(
            np.array_equal(found[rank][name], right[rank][name], equal_nan=True)
            for name in scene.tensors
            for rank in range(scene.size)
        )


def digits(scene: Scene, steps: Steps, when: When = "always") -> list[Results]:
    """Predict the digits that each rank returns, sums being exact.

    Raises:
        NoPrediction: as in `reproducing.forward`.
    """
    dtype, there = getattr(torch, scene.problem.dtype), scene.tensors
    of_forward, of_backward = (steps if when in ("always", way) else STEPS for way in ("forward", "backward"))
    forwards = reproducing.forward(scene, lambda rank: of_forward, dtype=dtype)
    found = [one.results for one in forwards]
    if "dq" in there:
        backward = reproducing.backward(scene, lambda rank: of_backward, forwards)
        found = [results | more for results, more in zip(found, backward, strict=True)]
    return found


def predicted(scene: Scene, steps: Steps) -> list[Results]:
    """Return what a hypothesis of these steps has predicted of a case, by rank; empty before it is compared."""
    found: list[Results] = [{} for _ in range(scene.size)]
    for tensors in (("out", "lse"), ("dq", "dk", "dv")):
        for into, results in zip(found, scene.shared.get(("predicted", steps, tensors), found), strict=True):
            into.update(results)
    return found


def _concerns(problem: Problem, steps: Steps) -> bool:
    """Whether a problem has a field that the changed steps read."""
    # A changed `pattern` beside other steps may only limit them to some blocks (`on_blocks`).
    about = steps.changed - {"pattern"} or steps.changed
    return not about or any(name not in CONCERNS or getattr(problem, CONCERNS[name]) for name in about)


def _shared(scene: Scene, key: Hashable, compute: Callable[[], T | None]) -> T | None:
    """Compute something of a scene once for all hypotheses, by key; `None` if there is no prediction."""

    def predicted() -> T | None:
        with contextlib.suppress(NoPrediction):
            return compute()
        return None

    return scene.once(key, predicted)


def _right(scene: Scene) -> tuple[list[reproducing.Forward], float] | None:
    """Return the right forward and its largest difference from what was seen; `None` if out or lse is wrong."""

    def compared() -> tuple[list[reproducing.Forward], float] | None:
        found = reproducing.right(scene)
        left = agree(scene, [one.results for one in found], ("out", "lse"), lambda: scene.allowed)
        return None if left is None else (found, left)

    return _shared(scene, "right and compared", compared)


def _limits_of(scene: Scene, steps_of: reproducing.StepsOfRank) -> Allowed:
    """Return the allowed error for the scores and multiplicities that a ring with these steps has."""
    if (scored := reproducing.scores(scene, steps_of)) is None:
        return scene.allowed
    m, s, scale = scored
    p = scene.problem
    s = np.where((m > 0) & np.isfinite(s), s, 0.0)
    top = np.max(s, axis=-1, keepdims=True, where=m > 0, initial=-np.inf)
    sinks = None if scene.inputs.sinks is None else scene.inputs.sinks[:, None, None]
    top = top if sinks is None else np.maximum(top, sinks)
    shift = np.where(top == -np.inf, 0.0, top)
    w = np.where(m > 0, m * np.exp(s - shift), 0.0)
    sunk = None if sinks is None else np.exp(sinks - shift)
    total = w.sum(axis=-1, keepdims=True) + (0.0 if sunk is None else sunk)
    lse = (shift + np.log(total))[..., 0]
    whole = np.where(total == 0, 1.0, total)
    weights = None if sunk is None else (sunk / whole)[..., 0]
    inner = Intermediates(m, s, s, w / whole, lse, scene.inputs.sinks, weights)
    t, x = scene.truth, scene.inputs
    answer = Answer(t.out, lse, t.dq, t.dk, t.dv, inner)
    problem = p.replace(scale=max(abs(scale), abs(p.scale_value)))
    v = np.where(np.isfinite(x.v), x.v, 0.0)
    k = np.where(np.isfinite(x.k), x.k, 0.0)
    return allowed_error(problem, answer, x.q, k, v, x.dout, x.dlse, scene.pipeline)


def agree(
    scene: Scene,
    found: list[Results],
    tensors: tuple[TensorName, ...],
    limits: Callable[[], Allowed],
) -> float | None:
    """Return the largest difference between prediction and observation, or `None` if one exceeds what is allowed.

    Differences of numbers larger than 1 are relative.
    """
    worst = 0.0
    found = [_left_empty(scene, rank, results) for rank, results in enumerate(found)]
    names = [name for name in tensors if name in scene.tensors]
    pairs = [(name, rank, found[rank][name], scene.seen(name, rank)) for name in names for rank in range(scene.size)]
    if any(predicted.shape != seen.shape for _, _, predicted, seen in pairs):
        return None
    if not all(_near(scene, name, rank, predicted) for name, rank, predicted, _ in pairs):
        return None  # far off: the allowed error need not be derived
    suspected = limits() if pairs else None
    violated = told = False  # whether a value is wrong, and the prediction nearer to it than the right answer
    for name, rank, predicted, seen in pairs:
        if not seen.size:
            continue
        dtype = scene.dtype_of(name)
        true, allowed = scene.true(name, rank), scene.limit(name, rank)
        limit = np.maximum(allowed, scene.local(name, getattr(suspected, name), rank))
        relative = relative_rounding(scene, name)
        finite = np.where(np.isfinite(predicted), np.abs(predicted), 0.0)
        limit = np.maximum(limit, relative * finite)
        # A wrong value may be what is left of larger terms that cancel: allow the rounding of the largest prediction.
        wrong = margins(predicted, true, allowed, dtype) > 1
        limit = np.where(wrong, np.maximum(limit, relative * finite.max(initial=0.0)), limit)
        if bool((_margins(seen, predicted, limit, dtype) > 1).any()):
            return None
        with np.errstate(invalid="ignore"):  # infinities that are equal
            difference = np.where(seen == predicted, 0.0, np.abs(seen - predicted))
            distance = np.abs(seen - true)
        # Where the limit is wide, the prediction must still be nearer to what was seen than the right answer is.
        margin = margins(seen, true, allowed, dtype)
        if bool((margin > 1).any()):
            violated = True
            off = np.where(margin > 1, _margins(seen, true, limit, dtype), 0.0)
            sure = bool((off > 1).any())
            most = np.unravel_index(int((off if sure else margin).argmax()), margin.shape)
            nearer = bool(np.isnan(seen[most]) or difference[most] < distance[most] / 2)
            if sure and not nearer:
                return None
            told = told or nearer
        difference = difference / np.maximum(1.0, np.abs(seen))
        worst = max(worst, float(np.max(difference, where=np.isfinite(difference), initial=0.0)))
    return worst if told or not violated else None


def _left_empty(scene: Scene, rank: int, found: Results) -> Results:
    """Return a prediction with NaN where NaN was seen in rows of out that are left without keys, as their lse says.

    That such a row is 0 / 0, where none of the kind was meant to be, follows from what left it empty. What NaN makes of
    gradients is not predicted.
    """
    if "dq" in scene.tensors or not {"out", "lse"} <= set(found).intersection(scene.tensors):
        return found
    seen, out = scene.seen("lse", rank), scene.seen("out", rank)
    if not found["lse"].shape == seen.shape == scene.true("lse", rank).shape or found["out"].shape != out.shape:
        return found
    empty = np.isneginf(found["lse"]) & np.isneginf(seen) & np.isfinite(scene.true("lse", rank))
    undefined = empty.swapaxes(1, 2)[..., None] & np.isnan(out)
    return found | {"out": np.where(undefined, np.nan, found["out"])} if undefined.any() else found


def agree_with(scene: Scene, answer: Answer, x: Inputs) -> float | None:
    """As `agree`, with all that an answer to these inputs has, and the errors that are allowed in it."""
    found: list[Results] = [
        {name: scene.local(name, getattr(answer, name), rank) for name in scene.tensors} for rank in range(scene.size)
    ]
    return agree(
        scene,
        found,
        scene.tensors,
        lambda: allowed_error(scene.problem, answer, x.q, x.k, x.v, x.dout, x.dlse, scene.pipeline),
    )


def agree_but_for(
    scene: Scene, whole: Mapping[TensorName, Array], limits: Callable[[], Allowed] | None = None
) -> float | None:
    """As `agree`, with the right results but for some, which are given of all positions."""
    found: list[Results] = [
        {
            name: scene.local(name, whole[name], rank) if name in whole else scene.true(name, rank)
            for name in scene.tensors
        }
        for rank in range(scene.size)
    ]
    return agree(scene, found, scene.tensors, limits or (lambda: scene.allowed))


def _margins(seen: Array, predicted: Array, limit: Array, dtype: DtypeName) -> Array:
    """Like `ringref.rounding.margins`, but a NaN that was predicted has margin 0."""
    margin = margins(seen, predicted, np.where(np.isnan(limit), 0.0, limit), dtype)
    return np.where(np.isnan(seen) & np.isnan(predicted), 0.0, margin)


def _near(scene: Scene, name: TensorName, rank: int, predicted: Array, *, exact: bool = False) -> bool:
    """Whether a prediction has NaN where the observation has, and a similar magnitude: a first, cheap comparison.

    Args:
        scene: the case.
        name: the result; one that did not come back agrees with everything.
        rank: the rank.
        predicted: the rank's result, as predicted.
        exact: whether half of the digits have to agree, as they do if the fault leaves all scores as they are.
    """
    if name not in scene.tensors:
        return True
    seen, limit = scene.seen(name, rank), scene.limit(name, rank)
    if predicted.shape != seen.shape or bool((np.isnan(predicted) != np.isnan(seen)).any()):
        return False
    finite = np.isfinite(predicted) & np.isfinite(seen)
    there = [np.where(finite, x, 0.0) for x in (seen, predicted)]
    off = np.abs(there[0] - there[1]).max(initial=0.0)
    slack = np.where(np.isfinite(limit), limit, 0.0).max(initial=0.0)  # where both are only rounding errors
    size = max(np.abs(x).max(initial=0.0) for x in there)
    return bool(off <= max(slack, size * (min(1.0, relative_rounding(scene, name) ** 0.5) if exact else 1.0)))


def comparable(scene: Scene) -> bool:
    """Whether the sums of a case keep at least one digit in the declared dtype: without it causes cannot be told apart.

    A sum of n terms in a dtype of unit roundoff u may be off by 2 n u / (1 - n u) of its size: in bfloat16 by all of it
    from 86 terms on.
    """
    return _sums_rounding(scene) < 1


def _sums_rounding(scene: Scene) -> float:
    """Return the relative error that the sums of a case may have; the largest float64 where no bound exists."""
    p, sums = scene.problem, scene.pipeline.sums
    terms = (p.head_dim + p.dv + p.nk + p.nq * p.group_size) * (1 + scene.size)
    return witness_bound(sums, terms) if terms * UNIT_ROUNDOFF[sums] < 1 else LARGEST["float64"]


def relative_rounding(scene: Scene, name: TensorName) -> float:
    """Return the relative error that the largest value of a result may have: the error allowed in predicted values."""

    def derived() -> float:
        answer, allowed = getattr(scene.truth, name), getattr(scene.allowed, name)
        p = scene.problem
        returned: DtypeName = scene.pipeline.lse_dtype if name == "lse" else p.dtype
        rounding = _sums_rounding(scene) + witness_bound(returned, 1)
        finite = np.isfinite(answer) & np.isfinite(allowed)
        size = np.abs(np.where(finite, answer, 0.0)).max(initial=0.0)
        tiny = size <= UNDERFLOW[p.dtype] or size >= LARGEST[p.dtype]
        return rounding if tiny else max(rounding, float(np.where(finite, allowed, 0.0).max(initial=0.0) / size))

    return scene.once(("rounding", name), derived)
