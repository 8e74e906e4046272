"""Hypotheses of precision: computed in a narrower dtype than that of the inputs, or rounded to one in the end.

Rounding cannot be predicted digit by digit, so these hypotheses have no steps but a judge. What is computed in float32
is returned as numbers that float32 holds, whatever their dtype, and is off by no more than float32 allows; a result
that is wrong for another reason is neither. The same holds for a right result that is rounded to a narrower dtype than
the one in which it is returned. Where a coarser dtype holds the wrong numbers too, it is not this one that is named.
Sums over ranks in the input dtype (`SUMMED`) are predicted by steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ringref.problem import DtypeName
from ringref.rounding import UNIT_ROUNDOFF, Pipeline, allowed_error, margins
from ringverify.cases.inputs import round_to
from ringverify.diagnosis.hypothesis import Hypothesis, digits
from ringverify.diagnosis.pairs import pairs_of
from ringverify.diagnosis.reproducing import NoPrediction
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.undefined import Blocks
from ringverify.diagnosis.where import wrong_elements, wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.arithmetic import rounded
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.merging import ORDERS, in_order, online
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.precision import summed_in_input_dtype
from ringverify.faults.ring import BACKWARD, FORWARD, STEPS, Steps, travel

TENSORS: tuple[tuple[TensorName, ...], ...] = (("out", "lse"), ("dq", "dk", "dv"))


COARSE = {"float32": 11, "float16": 8, "bfloat16": 4}
"""Significant bits with which the numbers of a dtype are those of a coarser one: float16, bfloat16, an 8-bit dtype."""

ENOUGH = 4
"""Different wrong numbers of which it is no chance that a coarser dtype holds them all."""


def _coarser(narrow: DtypeName, numbers: Array) -> bool:
    """Whether a coarser dtype holds wrong numbers too, so that it would be too narrow a cause to name this one."""
    some = np.unique(numbers[np.isfinite(numbers) & (numbers != 0)])
    significands = np.ldexp(np.frexp(some)[0], COARSE[narrow])
    return len(some) >= ENOUGH and bool((significands == np.rint(significands)).all())


def _judge(narrow: DtypeName, tensors: tuple[TensorName, ...], *, computed: bool) -> Callable[[Scene], float | None]:
    """Judge whether these results were computed in a narrower dtype, or only rounded to it; the others are right."""

    def limits_of(scene: Scene, name: TensorName, rank: int) -> Array:
        if not computed:
            limit = scene.limit(name, rank)
            return limit + UNIT_ROUNDOFF[narrow] * (np.abs(scene.true(name, rank)) + limit)
        lse_dtype: DtypeName = "float64" if narrow == "float64" else "float32"
        pipeline = Pipeline(narrow, narrow, lse_dtype=lse_dtype, blocks=scene.size)
        problem, t, x = scene.problem.replace(dtype=narrow), scene.truth, scene.inputs
        allowed = scene.once(narrow, lambda: allowed_error(problem, t, x.q, x.k, x.v, x.dout, x.dlse, pipeline))
        return scene.local(name, getattr(allowed, name), rank)

    def judge(scene: Scene) -> float | None:
        worst, dtype = 0.0, scene.problem.dtype
        off: list[Array] = []
        for name in scene.tensors:
            for rank in range(scene.size):
                if name not in tensors or UNIT_ROUNDOFF[narrow] <= UNIT_ROUNDOFF[dtype]:
                    if wrong_elements(scene, name, rank).any():
                        return None
                    continue
                seen, true, limit = scene.seen(name, rank), scene.true(name, rank), limits_of(scene, name, rank)
                with np.errstate(all="ignore"):
                    margin = margins(seen, true, limit, narrow if computed else dtype)
                    if not (round_to(seen, narrow) == seen).all() or (margin > 1).any():
                        return None
                    worst = max(worst, float(np.abs(np.where(seen == true, 0.0, seen - true)).max(initial=0.0)))
                    off.append(seen[wrong_elements(scene, name, rank)])
        return None if off and _coarser(narrow, np.concatenate(off)) else worst

    return judge


def _narrowed(narrow: DtypeName, what: str, tensors: tuple[TensorName, ...]) -> Hypothesis:
    says = f"{what} computed in {narrow}: every returned value is one of {narrow}, with errors of its rounding"
    return Hypothesis(says, STEPS, judge=_judge(narrow, tensors, computed=True))


def _rounded(narrow: DtypeName, tensor: TensorName) -> Hypothesis:
    says = f"{tensor} is rounded to {narrow}, whatever dtype it is returned in: all its numbers are of {narrow}"
    return Hypothesis(says, STEPS, judge=_judge(narrow, (tensor,), computed=False))


def _says_summed(scene: Scene) -> str:
    return f"dk and dv are summed over ranks in {scene.problem.dtype}, as the backward of an all-gather does"


SUMMED: list[Hypothesis] = [
    Hypothesis(_says_summed, summed_in_input_dtype(step_by_step=step_by_step)) for step_by_step in (True, False)
]
NARROWED: list[Hypothesis] = [
    found
    for narrow in ("bfloat16", "float16", "float32")
    for found in (
        _narrowed(narrow, "inputs of a wider dtype are", (*TENSORS[0], *TENSORS[1])),
        _narrowed(narrow, "gradients of inputs of a wider dtype are", TENSORS[1]),
    )
]
NARROWED += [_rounded(narrow, tensor) for narrow in ("bfloat16", "float16") for tensor in ("out", "dq", "dk", "dv")]

NEAR = 2.0**-22
"""How near to a number of the input dtype a sum of exponentials has to be, times 1 + |maximum| + |lse|."""


def _judge_total(scene: Scene) -> float | None:
    """Judge whether sums of exponentials are numbers of the input dtype, whichever way they were added up.

    Gradients that start from them are off too; they are not looked at.
    """
    dtype, inner, sinks = scene.problem.dtype, scene.truth.intermediates, scene.inputs.sinks
    if dtype not in COARSE or dtype == "float32" or "lse" not in wrong_tensors(scene):
        return None if wrong_tensors(scene) else 0.0
    top = np.where(inner.m > 0, inner.scores, -np.inf).max(axis=-1, initial=-np.inf)
    sunk = np.full(top.shape, -np.inf) if sinks is None else np.broadcast_to(sinks[:, None], top.shape)
    top = np.maximum(top, sunk)
    tiles = UNIT_ROUNDOFF[dtype] * np.maximum(1, (inner.m > 0).sum(axis=-1))
    worst, largest = 0.0, np.abs(scene.inputs.v).max(initial=0.0, where=np.isfinite(scene.inputs.v))
    for rank in range(scene.size):
        seen, true = scene.seen("lse", rank), scene.true("lse", rank)
        most, sink, off = (scene.local("lse", x, rank) for x in (top, sunk, tiles))
        there = true > sink
        with np.errstate(all="ignore"):
            total, right, of_sink = (np.exp(x - most) for x in (seen, true, sink))
            near = NEAR * (1 + np.abs(most) + np.abs(true)) * total
            kept = total - of_sink
            as_kept = (np.abs(kept - round_to(kept, dtype)) <= near) & (
                np.abs(total - right) <= off * (right - of_sink) + near
            )
            if not np.where(there, as_kept, (seen == true) | (np.abs(total - right) <= near)).all():
                return None
            share = np.where(there, right / total, 1.0).swapaxes(1, 2)[..., None]
            out, limit = scene.true("out", rank) * share, scene.limit("out", rank)
            limit = limit + off.swapaxes(1, 2)[..., None] * largest
            if (margins(scene.seen("out", rank), out, limit, dtype) > 1).any():
                return None
            worst = max(worst, float(np.abs(np.where(there, kept - round_to(kept, dtype), 0.0)).max(initial=0.0)))
    return worst


NARROWED.append(
    Hypothesis(
        "the sum of exponentials is kept in the input dtype: exp(lse - maximum) is one of its numbers in every row",
        STEPS,
        allowed_by=("accumulates",),
        judge=_judge_total,
    )
)


def _judge_in_float32(concerned: Callable[[Scene], Array]) -> Callable[[Scene], float | None]:
    """Judge whether float64 results are off by roundings of float32, out and lse in some rows alone, `(B, H, Nq)`."""

    def judge(scene: Scene) -> float | None:
        wrong = bool(wrong_tensors(scene))
        if scene.problem.dtype != "float64" or scene.pipeline.sums != "float64":
            return None if wrong else 0.0
        rows = concerned(scene)
        wider, worst = UNIT_ROUNDOFF["float32"] / UNIT_ROUNDOFF["float64"], 0.0
        off: list[Array] = []
        for name in scene.tensors:
            for rank in range(scene.size):
                seen, true, limit = scene.seen(name, rank), scene.true(name, rank), scene.limit(name, rank)
                if (margins(seen, true, wider * limit, "float64") > 1).any():
                    return None
                there = wrong_elements(scene, name, rank)
                if name in ("out", "lse"):
                    right = scene.local("lse", rows, rank) == 0
                    if (there & (right if name == "lse" else right.swapaxes(1, 2)[..., None])).any():
                        return None
                off.append(seen[there])
                worst = max(worst, float(np.abs(np.where(there, seen - true, 0.0)).max(initial=0.0)))
        return None if wrong and bool((round_to(some := np.concatenate(off), "float32") == some).all()) else worst

    return judge


def _of_several_blocks(scene: Scene) -> Array:
    several: Array = ((Blocks(pairs_of(scene)).of_row > 0).sum(axis=-1) > 1).astype(float)
    return several


def _of_a_softcap(scene: Scene) -> Array:
    return np.full(scene.truth.lse.shape, float(scene.problem.softcap is not None))


NARROWED += [
    Hypothesis(
        "parts of blocks, or the weights with which they are merged, are computed in float32: results of one block are "
        "right, and those of several are off by its rounding",
        STEPS,
        judge=_judge_in_float32(_of_several_blocks),
    ),
    Hypothesis(
        "the softcap is computed in float32: without one results are right, and with one they are off by its rounding",
        STEPS,
        judge=_judge_in_float32(_of_a_softcap),
    ),
]


# -- rounding once more than declared ----------------------------------------------------------------------------------

MOST = 0.8
"""Share of the elements in which a fault of rounding shows that have to be as predicted: orders of sums may differ."""

NEARER = 4
"""Times as near to a prediction with the fault as to the one without it an element is, if it is as predicted."""


FLIPPED = 0.1
"""Share of the elements in which a fault shows, and one, that may be off: what is rounded lay between two numbers."""


def _shown(scene: Scene, steps: Steps, names: Sequence[TensorName]) -> tuple[int, int] | None:
    """Return in how many elements a fault of rounding would show, and in how many it does; `None` if more is wrong.

    Results of other names are not looked at.
    """
    shown = told = 0
    try:
        right, found = scene.once("digits", lambda: digits(scene, STEPS)), digits(scene, steps)
    except NoPrediction:
        return None
    for name in set(scene.tensors) & set(names):
        for rank in range(scene.size):
            seen, with_it, without = scene.seen(name, rank), found[rank][name], right[rank][name]
            with np.errstate(all="ignore"):
                limit, of = scene.limit(name, rank), scene.dtype_of(name)
                off = np.minimum(*(margins(seen, x, limit, of) for x in (with_it, scene.true(name, rank)))) > 1
                concerned = with_it != without
                if off.sum() > math.ceil(FLIPPED * concerned.sum()):
                    return None
                if name == "lse":  # it is returned in float32, and has a rounding error of its own
                    concerned = np.abs(with_it - without) > NEARER * UNIT_ROUNDOFF["float32"] * np.abs(without)
                as_told = NEARER * np.abs(seen - with_it) <= np.abs(seen - without)
            shown += int(concerned.sum())
            told += int((concerned & as_told).sum())
    return shown, told


def _judge_digits(steps: Steps, names: Sequence[TensorName]) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        wrong = bool(wrong_tensors(scene))
        if scene.problem.dtype not in ("bfloat16", "float16"):
            return None if wrong else 0.0
        if (found := _shown(scene, steps, names)) is None:
            return None
        shown, told = found
        return 0.0 if told >= MOST * shown and (shown or not wrong) else None

    return judge


ALLOWED_BY: dict[str, tuple[str, ...]] = {
    "A12a": ("accumulates",),
    "A12b": ("accumulates",),
    "A12d": ("accumulates",),
    "O77": ("probabilities",),
    "O82": ("accumulates", "probabilities", "reduces"),
    "O122": ("accumulates", "reduces"),
    "A12c": ("accumulates", "reduces"),
}
"""Which declarations allow what mutants round."""

_ROUNDING: list[tuple[str, Steps, tuple[str, ...]]] = [
    (mutant.fault.sentence(), mutant.fault.steps, ALLOWED_BY.get(id, ()))
    for id, mutant in MUTANTS.items()
    if mutant.kind == "precision"
]


def _rounded_lse(steps: Steps, here: Here, hop: int, owner: int, q: torch.Tensor, block: Block) -> Partial:
    found = Partial(*STEPS.attend(steps, here, hop, owner, q, block))
    return found._replace(lse=rounded(here, found.lse))


def _rounded_out(steps: Steps, here: Here, hop: int, owner: int, q: torch.Tensor, block: Block) -> Partial:
    found = Partial(*STEPS.attend(steps, here, hop, owner, q, block))
    return found._replace(out=rounded(here, found.out))


def _rounded_partial(steps: Steps, here: Here, hop: int, owner: int, q: torch.Tensor, block: Block) -> Partial:
    return Partial(*(rounded(here, x) for x in STEPS.attend(steps, here, hop, owner, q, block)))


_ROUNDING += [
    (
        "each block's out and lse are rounded to the input dtype before they are merged",
        replace(STEPS, attend=_rounded_partial),
        (),
    ),
    ("each block's lse is rounded to the input dtype before it is merged", replace(STEPS, attend=_rounded_lse), ()),
    (
        "the running sum of weighted values is rounded to the input dtype after every hop",
        online(kept=rounded),
        ("accumulates",),
    ),
    (
        "the running sum of exponentials is rounded to the input dtype after every hop",
        online(total=rounded),
        ("accumulates",),
    ),
    (
        "the factor by which running sums are rescaled is rounded to the input dtype",
        online(factor=rounded),
        ("accumulates",),
    ),
    (
        "exponentials are rounded to the input dtype before they are multiplied with v",
        online(weights=rounded),
        ("probabilities",),
    ),
]


def _carried(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    total = Block(*(rounded(here, x) for x in part))
    if carried is not None:
        total = Block(*(rounded(here, a + b) for a, b in zip(carried, total, strict=True)))
    return travel(steps, here, hop, owner, None, total)


_ROUNDING.append(
    (
        "dk and dv travel in the input dtype: what each rank adds, and every sum, is rounded to it",
        replace(STEPS, travel=_carried),
        ("accumulates", "reduces"),
    )
)
ONWARD = "the rank's own, the next rank's, and so on"
"""The order in which queries that travel to the right come by the blocks."""


def _sent_on(here: Here, x: torch.Tensor) -> torch.Tensor:
    return rounded(here, x) if here.size > 1 else x


_TRAVELLING = online(kept=_sent_on, total=_sent_on, top=_sent_on)
_ROUNDING += [
    (
        f"the running maximum and both running sums travel in the input dtype{where}: they are rounded at every hop",
        steps,
        ("accumulates",),
    )
    for where, steps in (
        (", where queries travel to the right", in_order(_TRAVELLING, ORDERS[ONWARD])),
        ("", _TRAVELLING),
    )
]
_ROUNDING.append(
    ("each block's out is rounded to the input dtype before it is merged", replace(STEPS, attend=_rounded_out), ())
)


def _together(way: frozenset[str]) -> Iterator[tuple[str, Steps]]:
    """Yield two faults of rounding in one: both of the forward, or both of the backward."""
    some = [(says, steps) for says, steps, _ in _ROUNDING if steps.changed <= way]
    for (says, steps), (more, others) in itertools.combinations(some, 2):
        if steps.changed.isdisjoint(others.changed):
            yield f"{says}, and {more}", replace(steps, **{name: getattr(others, name) for name in others.changed})


ALL = (*TENSORS[0], *TENSORS[1])

ROUNDED: list[Hypothesis] = [
    Hypothesis(says, steps, allowed_by=allowed_by, judge=_judge_digits(steps, names))
    # What is rounded in the forward spoils more than one digit of gradients, and these may be rounded too.
    for names in (ALL, TENSORS[0])
    for says, steps, allowed_by in _ROUNDING
    if names == ALL or steps.changed & FORWARD
]
TWICE: list[Hypothesis] = [
    Hypothesis(says, steps, judge=_judge_digits(steps, names))
    for names, way in ((TENSORS[0], (FORWARD | {"capped"}) - {"kept", "together"}), (ALL, BACKWARD))
    for says, steps in _together(way)
]
"""Two faults of rounding at once: to be tried where none of them alone explains the digits."""


def rounding(scenes: Sequence[Scene]) -> list[Hypothesis]:
    """Return the faults of rounding that the digits of all 16-bit cases show, those that show most first.

    Args:
        scenes: the cases; their values may be within the error allowed, as only their mean error may be too large.
    """
    found: list[tuple[int, Hypothesis]] = []
    for names, those in ((ALL, ROUNDED), (TENSORS[0], ROUNDED), (TENSORS[0], TWICE), (ALL, TWICE)):
        for one in those:
            seen = [_shown(scene, one.steps, names) for scene in scenes]
            if seen and all(each is not None and each[0] >= ENOUGH and each[1] >= MOST * each[0] for each in seen):
                found.append((sum(each[1] for each in seen if each is not None), one))
        if found:
            break
    return [one for _, one in sorted(found, key=lambda each: -each[0])]
