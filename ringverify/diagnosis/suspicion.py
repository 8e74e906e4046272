"""A suspicion, and whether it explains what was seen.

It does if what would come back under it agrees with what did come back, on every rank, in every result, within the
rounding that `ringref.rounding` allows: what is wrong is reproduced, and what is right stays right.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import numpy as np

from ringref.attention import Answer, Intermediates
from ringref.problem import DtypeName
from ringref.rounding import LARGEST, UNDERFLOW, UNIT_ROUNDOFF, Allowed, allowed_error, margins, witness_bound
from ringverify.cases.comparing import TensorName
from ringverify.diagnosis.model import STEPS, ByRank, Steps, backward, forward, returned, scored
from ringverify.diagnosis.scene import Array, Partial, Results, Scene, visits

When = Literal["always", "forward", "backward"]
SCORING = ("q", "block", "products", "pattern", "scale", "heads", "cap", "widen")
"""Steps that change which scores there are, so that their rounding is that of another problem."""

FORWARD = (*SCORING, "partial", "times", "arrived", "merge", "everyone", "whole", "returned")
"""Steps that the forward takes."""


@dataclasses.dataclass(frozen=True)
class Suspicion:
    """One thing that may be wrong.

    Attributes:
        says: it, as a sentence without its full stop; may depend on the case.
        steps: the ring with this one thing wrong.
        when: whether it is wrong throughout, in the forward only, or in the backward only.
        ranks: on which ranks of a case it is wrong; `None` is all.
        narrow: whether it concerns some blocks only, and comes after what concerns all.
        judge: decides in place of the steps, for what they cannot say: the largest difference left, or `None`.
        advice: what to try first, as a sentence without its full stop; may depend on the case.
    """

    says: str | Callable[[Scene], str]
    steps: Steps
    when: When = "always"
    ranks: Callable[[Scene], tuple[int, ...]] | None = None
    narrow: bool = False
    judge: Callable[[Scene], float | None] | None = None
    advice: str | Callable[[Scene], str] = ""

    def advised(self, scene: Scene) -> str:
        """What to try first in a case; empty where nothing is known."""
        return self.advice if isinstance(self.advice, str) else self.advice(scene)

    def sentence(self, scene: Scene) -> str:
        """What it says of a case."""
        text = self.says if isinstance(self.says, str) else self.says(scene)
        if self.when == "backward":
            text += ", in the backward only"
        if self.when == "forward":
            text += ", in the forward only"
        if self.ranks is not None:
            ranks = self.ranks(scene)
            text += f", on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} only"
        return text

    def explains(self, scene: Scene) -> float | None:
        """The largest difference left between what it predicts and what was seen, or `None` if it does not explain."""
        if self.judge is not None:
            return self.judge(scene)
        if not comparable(scene):
            return None
        there, back = self._by_rank(scene)
        with np.errstate(all="ignore"):
            if self.when == "backward" or all(getattr(self.steps, name) is getattr(STEPS, name) for name in FORWARD):
                whole, left = _undisturbed(scene)
            else:
                whole = forward(scene, there)
                found = returned(scene, there, whole)
                left = _agree(scene, found, ("out", "lse"), lambda: self._limits(scene, there))
            if left is None or "dq" not in scene.tensors:
                return left
            pulled = backward(scene, back, whole)
            more = _agree(scene, pulled, ("dq", "dk", "dv"), lambda: self._limits(scene, back))
        return None if more is None else max(left, more)

    def explains_rank(self, scene: Scene, rank: int) -> bool:
        """Whether it explains out and lse of one rank."""
        there, _ = self._by_rank(scene)
        with np.errstate(all="ignore"):
            found = returned(scene, there, forward(scene, there))
            return _agree(scene, found, ("out", "lse"), lambda: self._limits(scene, there), (rank,)) is not None

    def _by_rank(self, scene: Scene) -> tuple[ByRank, ByRank]:
        ranks = range(scene.size) if self.ranks is None else self.ranks(scene)

        def there(rank: int) -> Steps:
            return self.steps if rank in ranks and self.when != "backward" else STEPS

        def back(rank: int) -> Steps:
            return self.steps if rank in ranks and self.when != "forward" else STEPS

        return there, back

    def _limits(self, scene: Scene, steps_of: ByRank) -> Allowed:
        """What error the suspected computation is allowed: of its own problem where that differs from the case's."""
        if all(getattr(self.steps, name) is getattr(STEPS, name) for name in SCORING):
            return scene.allowed
        return _suspected_limits(scene, steps_of)


@functools.lru_cache(maxsize=16)
def _undisturbed(scene: Scene) -> tuple[list[Partial], float | None]:
    """The forward as it should be, and whether it agrees with what was seen: many suspicions share it."""
    whole = forward(scene, lambda rank: STEPS)
    found = returned(scene, lambda rank: STEPS, whole)
    return whole, _agree(scene, found, ("out", "lse"), lambda: scene.allowed)


def _suspected_limits(scene: Scene, steps_of: ByRank) -> Allowed:
    """The allowed error for the scores and multiplicities that the steps make."""
    p, inner = scene.problem, scene.truth.intermediates
    m, s = inner.m.copy(), np.zeros_like(inner.scores)
    for rank in range(scene.size):
        for at in visits(scene, rank):
            scores, counts, _, _, _ = scored(at, steps_of(rank))
            place = np.ix_(np.arange(p.batch), np.arange(p.heads), at.i, at.j)
            if counts.shape != m[place].shape:
                return scene.allowed  # heads taken for tokens: no score is one of the case's
            m[place], s[place] = counts, scores
    s = np.where((m > 0) & np.isfinite(s), s, 0.0)
    top = np.max(s, axis=-1, keepdims=True, where=m > 0, initial=-np.inf)
    shift = np.where(top == -np.inf, 0.0, top)
    w = np.where(m > 0, m * np.exp(s - shift), 0.0)
    total = w.sum(axis=-1, keepdims=True)
    lse = (shift + np.log(total))[..., 0]
    inner = Intermediates(m, s, s, w / np.where(total == 0, 1.0, total), lse)
    t, x = scene.truth, scene.inputs
    answer = Answer(t.out, lse, t.dq, t.dk, t.dv, inner)
    first = next(iter(visits(scene, 0)))
    problem = p.replace(scale=max(abs(steps_of(0).scale(first)), abs(p.scale_value)))
    v = np.where(np.isfinite(x.v), x.v, 0.0)
    k = np.where(np.isfinite(x.k), x.k, 0.0)
    return allowed_error(problem, answer, x.q, k, v, x.dout, x.dlse, scene.pipeline)


def _agree(
    scene: Scene,
    found: list[Results],
    tensors: tuple[TensorName, ...],
    limits: Callable[[], Allowed],
    ranks: tuple[int, ...] | None = None,
) -> float | None:
    """The largest difference between prediction and observation, or `None` where one passes what is allowed.

    It is relative for numbers larger than 1.
    """
    worst = 0.0
    names = [name for name in tensors if name in scene.tensors]
    where = range(scene.size) if ranks is None else ranks
    pairs = [(name, rank, found[rank][name], scene.seen(name, rank)) for name in names for rank in where]
    if any(predicted.shape != seen.shape for _, _, predicted, seen in pairs):
        return None
    if not all(_near(predicted, seen, scene.limit(name, rank)) for name, rank, predicted, seen in pairs):
        return None  # far off: no need to derive by how much it may be
    suspected = limits() if pairs else None
    violated = told = False  # whether anything is wrong, and the suspicion nearer to it than the right answer is
    for name, rank, predicted, seen in pairs:
        if not seen.size:
            continue
        wide = name == "lse" and scene.problem.dtype != "float64"
        dtype: DtypeName = "float32" if wide else scene.problem.dtype
        true, allowed = scene.true(name, rank), scene.limit(name, rank)
        limit = np.maximum(allowed, scene.local(name, getattr(suspected, name), rank))
        relative = relative_rounding(scene, name)
        limit = np.maximum(limit, relative * np.abs(predicted))
        # What is wrong may be the rest of larger terms that cancel: its rounding is that of the largest of its kind.
        finite = np.where(np.isfinite(predicted), np.abs(predicted), 0.0)
        wrong = margins(predicted, true, allowed, dtype) > 1
        limit = np.where(wrong, np.maximum(limit, relative * finite.max(initial=0.0)), limit)
        if bool((_margins(seen, predicted, limit, dtype) > 1).any()):
            return None
        difference = np.where(seen == predicted, 0.0, np.abs(seen - predicted))
        # Where the limit is wide, it must still be the suspicion rather than the right answer that is near.
        margin = margins(seen, true, allowed, dtype)
        if bool((margin > 1).any()):
            violated = True
            off = np.where(margin > 1, _margins(seen, true, limit, dtype), 0.0)
            sure = bool((off > 1).any())
            most = np.unravel_index(int((off if sure else margin).argmax()), margin.shape)
            nearer = bool(np.isnan(seen[most]) or difference[most] < np.abs(seen - true)[most] / 2)
            if sure and not nearer:
                return None
            told = told or nearer
        difference = difference / np.maximum(1.0, np.abs(seen))
        worst = max(worst, float(np.max(difference, where=np.isfinite(difference), initial=0.0)))
    return worst if told or not violated else None


def _margins(seen: Array, predicted: Array, limit: Array, dtype: DtypeName) -> Array:
    """As `ringref.rounding.margins`; NaN where NaN is predicted agrees, and so does the infinity that is."""
    margin = margins(seen, predicted, np.where(np.isnan(limit), 0.0, limit), dtype)
    return np.where(np.isnan(seen) & np.isnan(predicted), 0.0, margin)


def _near(predicted: Array, seen: Array, limit: Array) -> bool:
    """Whether they agree in where they are no numbers, and in magnitude as a whole."""
    finite = np.isfinite(predicted) & np.isfinite(seen)
    if bool((np.isnan(predicted) != np.isnan(seen)).any()):
        return False
    size = np.abs(np.where(finite, seen, 0.0)).max(initial=0.0)
    off = np.abs(np.where(finite, predicted - seen, 0.0)).max(initial=0.0)
    slack = np.where(np.isfinite(limit), limit, 0.0).max(initial=0.0)  # where both are nothing but rounding
    return bool(off <= slack or off <= size or off <= np.abs(np.where(finite, predicted, 0.0)).max(initial=0.0))


def comparable(scene: Scene) -> bool:
    """Whether sums over as many terms as a case has keep a digit in the declared dtype, by which to tell causes apart.

    A sum of n terms in a dtype of unit roundoff u may be off by 2 n u / (1 - n u) of its size: in bfloat16 by all of it
    from 86 terms on.
    """
    return _sums_rounding(scene) < 1


def _sums_rounding(scene: Scene) -> float:
    """How much, relatively, the sums of a case may be off; all that there is where rounding leaves nothing of them."""
    p, sums = scene.problem, scene.pipeline.sums
    terms = (p.head_dim + p.dv + p.nk + p.nq * p.group_size) * (1 + scene.size)
    return witness_bound(sums, terms) if terms * UNIT_ROUNDOFF[sums] < 1 else LARGEST["float64"]


def relative_rounding(scene: Scene, name: TensorName) -> float:
    """How much, relatively, the largest right value may be off: for predictions with no right value beside them."""
    answer, allowed = getattr(scene.truth, name), getattr(scene.allowed, name)
    p = scene.problem
    returned: DtypeName = scene.pipeline.lse_dtype if name == "lse" else p.dtype
    rounding = _sums_rounding(scene) + witness_bound(returned, 1)
    finite = np.isfinite(answer) & np.isfinite(allowed)
    size = np.abs(np.where(finite, answer, 0.0)).max(initial=0.0)
    tiny = size <= UNDERFLOW[p.dtype] or size >= LARGEST[p.dtype]
    return rounding if tiny else max(rounding, float(np.where(finite, allowed, 0.0).max(initial=0.0) / size))
