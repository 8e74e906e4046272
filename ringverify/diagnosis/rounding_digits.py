"""Hypotheses of a rounding more than declared, predicted digit by digit.

A ring of the library rounds one number more, all its sums being exact: what comes back is then as predicted in most of
the elements in which the digits are other ones. Two roundings at once are tried where none of them alone explains this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ringref.rounding import UNIT_ROUNDOFF, margins
from ringverify.diagnosis.hypothesis import Hypothesis, digits
from ringverify.diagnosis.narrowing import TENSORS
from ringverify.diagnosis.reproducing import NoPrediction
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.arithmetic import rounded
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.merging import ORDERS, in_order, online
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.precision import back_through_the_ring, summed_in_input_dtype
from ringverify.faults.ring import BACKWARD, FORWARD, STEPS, Steps, travel

MOST = 0.8
"""Share of the elements in which a fault of rounding shows that have to be as predicted: orders of sums may differ."""

NEARER = 4
"""Times as near to a prediction with the fault as to the one without it an element is, if it is as predicted."""


FLIPPED = 0.1
"""Share of the elements in which a fault shows, and one, that may be off: what is rounded lay between two numbers."""

ENOUGH = 4
"""Elements of each case in which a rounding has to show, where values may be within the error allowed."""


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


def _rounded_products(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    plain = replace(steps, scores=lambda q, k, scale: rounded(here, steps.scores(q, k, 1.0)) * scale)
    return STEPS.capped(plain, here, q, k)


def _rounded_before_the_scale(steps: Steps, here: Here, dq: torch.Tensor) -> torch.Tensor:
    scale = steps.scale(here)
    return rounded(here, STEPS.sum_queries(steps, here, dq) / scale) * scale


_ROUNDING += [
    (
        "products of queries and keys are rounded to the input dtype before they are scaled",
        replace(STEPS, capped=_rounded_products),
        (),
    ),
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
    *(
        (
            f"the running sum of exponentials is kept in the input dtype{more}, and its logarithm is taken in it",
            online(total=lambda here, x: x.to(here.dtype), rescaled=rescaled),
            ("accumulates",),
        )
        for more, rescaled in (("", lambda here, x: x), (", and rescaled in it", rounded))
    ),
    (
        "dq is rounded to the input dtype before it is multiplied by the scale, and after",
        replace(STEPS, sum_queries=_rounded_before_the_scale),
        (),
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
_ROUNDING.append(
    (
        "dk and dv go back through the ring in the input dtype, those of the last hop first: what each rank adds, and "
        "every sum, is rounded to it",
        summed_in_input_dtype(step_by_step=True, order=back_through_the_ring),
        ("accumulates", "reduces"),
    )
)
ONWARD = "the rank's own, the next rank's, and so on"
"""The order in which queries that travel to the right come by the blocks."""


def _sent_on(here: Here, x: torch.Tensor) -> torch.Tensor:
    return rounded(here, x) if here.size > 1 else x


_AT_EVERY_HOP = {
    "the running maximum and both running sums travel in": online(kept=_sent_on, total=_sent_on, top=_sent_on),
    "out and lse are kept in": replace(STEPS, between=lambda here, whole: Partial(*(rounded(here, x) for x in whole))),
}
_ROUNDING += [
    (f"{what} the input dtype{where}: they are rounded at every hop", changed, ("accumulates",))
    for what, steps in _AT_EVERY_HOP.items()
    for where, changed in (
        (", where queries travel to the right", in_order(steps, ORDERS[ONWARD])),
        ("", steps),
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
