"""Fit what is added to gradients: what some pairs add counts otherwise.

After a right forward, gradients are sums over pairs of a query and a key. The sum over a part of them (`parts.PARTS`)
is computed from the right forward, and the factor that it takes to give the gradients that were seen is fitted freely.
A factor is said only if it is that of one rule in every case: 0, the number of ranks, the scale; or one number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringverify.diagnosis.gradients.terms import Gradients, Terms, fits, fitted, measured, off, size
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Mask
from ringverify.diagnosis.parts import EVERYWHERE, PARTS, PartOfPairs
from ringverify.diagnosis.scaling import named
from ringverify.diagnosis.scene import Array, Scene
from ringverify.events import TensorName


@dataclasses.dataclass(frozen=True)
class Changed:
    """What changes with a factor: gradients are the right ones and (factor − 1) times `unit`."""

    text: str
    unit: Callable[[Terms, Mask], Gradients]


def _of_pairs(names: Sequence[TensorName], terms: Terms, here: Mask) -> Gradients:
    return terms.sums_over(names, here)


IN_DS: dict[str, Callable[[Terms], Array]] = {
    "delta": lambda t: -t.factor * t.delta,
    "delta, with the cotangent of lse,": lambda t: t.ds - t.factor * t.dp,
    "the cotangent of lse": lambda t: t.factor * t.dlse,
    "dout·v": lambda t: t.factor * t.dp,
    "the derivative of the softcap": lambda t: t.ds - t.flat * (t.dp - t.delta + t.dlse),
}
"""Parts of ds, `(B, H, Nq, Nk)`; of the derivative, what it changes."""


def _in_ds(names: Sequence[TensorName], part: Callable[[Terms], Array], terms: Terms, here: Mask) -> Gradients:
    return terms.sums(names, part(terms) * here, terms.p)


CHANGED: tuple[Changed, ...] = (
    *(
        Changed(
            f"what is added to {' and '.join(names)}",
            functools.partial(_of_pairs, names),
        )
        for names in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk"), ("dq", "dk", "dv"))
    ),
    *(
        Changed(f"{what} in ds{'' if len(names) > 1 else f' of {names[0]}'}", functools.partial(_in_ds, names, part))
        for names in (("dq", "dk"), ("dq",), ("dk",))
        for what, part in IN_DS.items()
    ),
)


FACTORS: dict[str, Callable[[Scene], float]] = {
    "is missing": lambda scene: 0,
    "counts twice": lambda scene: 2,
    "is negated": lambda scene: -1,
    "counts half": lambda scene: 0.5,
    "is divided by the number of ranks": lambda scene: 1 / scene.size,
    "is multiplied by the number of ranks": lambda scene: scene.size,
    "is multiplied by the scale once more": lambda scene: scene.problem.scale_value,
    "lacks the scale": lambda scene: 1 / scene.problem.scale_value,
    "is divided by the number of query heads of a key head": lambda scene: 1 / scene.problem.group_size,
    "is multiplied by the number of query heads of a key head": lambda scene: scene.problem.group_size,
    "is divided by the number of times that a key head is repeated so that the ranks divide them": lambda scene: (
        1 / _repeated(scene)
    ),
    "is multiplied by the number of times that a key head is repeated so that the ranks divide them": (
        lambda scene: _repeated(scene)
    ),
    "has the default scale, head_dim ** -0.5, and not that which was asked for": lambda scene: (
        scene.problem.head_dim**-0.5 / scene.problem.scale_value
    ),
    "counts three times": lambda scene: 3,
    "is multiplied by ln 2": lambda scene: float(np.log(2)),
    "is divided by ln 2": lambda scene: float(1 / np.log(2)),
}
"""What a factor may be, in words."""


def _repeated(scene: Scene) -> float:
    return math.lcm(scene.problem.hk, scene.size) / scene.problem.hk


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the gradients of cases whose out and lse are right.

    Args:
        scenes: cases, those that fail first.
    """
    terms = fitted(scenes)
    if not terms:
        return
    cases = [one.scene for one in terms]
    for part in (EVERYWHERE, *PARTS):
        told = f"{part.text}: " if part.text else ""
        for changed in CHANGED:
            factors = [fit for one in terms if (fit := _factor(one, changed, part)) is not None]
            if len(factors) < len(terms):
                continue
            for number, factor in named(factors, cases, FACTORS, none=1.0):
                says = number if isinstance(number, str) else f"is multiplied by {number:.4g}"
                yield measured(f"{told}{changed.text} {says}", functools.partial(_multiplied, changed, part, factor))


def _factor(terms: Terms, changed: Changed, part: PartOfPairs) -> float | None:
    """Return the factor with which a change fits what was seen; `None` if it does not, with any factor."""
    unit, wrong = changed.unit(terms, part.holds(terms.pairs)), off(terms)
    if not (whole := size(unit)):
        return None
    times = float(sum((y * wrong[name]).sum() for name, y in unit.items())) / whole
    return 1 + times if fits(terms, {name: times * y for name, y in unit.items()}) else None


def _multiplied(changed: Changed, part: PartOfPairs, factor: Callable[[Scene], float], terms: Terms) -> Gradients:
    times = factor(terms.scene) - 1
    return {name: times * y for name, y in changed.unit(terms, part.holds(terms.pairs)).items()}
