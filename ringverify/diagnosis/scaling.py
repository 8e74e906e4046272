"""Fit a number: out or lse of some rows is right but for a factor, or lse for something that is added to it.

The factor is fitted freely to the failing cases. It is said only if it is the same number in all of them, or one that
follows from the case, such as the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.rounding import UNIT_ROUNDOFF
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for
from ringverify.diagnosis.pairs import Mask, pairs_of
from ringverify.diagnosis.parts import EVERYWHERE, PARTS, PartOfPairs
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS

LEFT = 1e-3
"""Share of what is wrong that a fit may leave over, before it is compared within rounding."""

FITTED = 3
"""Failing cases on which a number is fitted."""

Number = Callable[[Scene], float]

FACTORS: dict[str, Number] = {
    "the number of ranks": lambda scene: scene.size,
    "1 / the number of ranks": lambda scene: 1 / scene.size,
    "the scale": lambda scene: scene.problem.scale_value,
    "1 / the scale": lambda scene: 1 / scene.problem.scale_value,
    "the number of query heads of a key head": lambda scene: scene.problem.group_size,
}
"""Factors that follow from the case."""

ADDENDS: dict[str, Number] = {
    "log of the number of ranks": lambda scene: float(np.log(scene.size)),
    "log of the scale": lambda scene: float(np.log(scene.problem.scale_value)),
    "log of the number of keys": lambda scene: float(np.log(max(1, scene.problem.nk))),
}
"""What may be added to lse, or taken from it."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a number changes a result.

    Attributes:
        name: the result.
        adds: whether the number is added to it; it is a factor otherwise.
    """

    name: TensorName
    adds: bool

    def unit(self, scene: Scene) -> Array:
        """Return what the result changes by, for each 1 by which the number is above that which changes nothing."""
        right: Array = getattr(scene.truth, self.name)
        finite = np.isfinite(right)
        found: Array = np.where(finite, 1.0 if self.adds else right, 0.0)
        return found

    def told(self, number: float | str) -> str:
        """Say what the result is."""
        if isinstance(number, str):
            return f"is larger by {number}" if self.adds else f"is multiplied by {number}"
        return f"is larger by {number:.4g}" if self.adds else f"is {number:.4g} times what it should be"


WAYS = (Way("out", False), Way("lse", False), Way("lse", True))


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the out and lse of cases by one number.

    Args:
        scenes: cases, those that fail first.
    """
    failing = [scene for scene in scenes if {"out", "lse"} & set(wrong_tensors(scene))]
    if not failing or failing[0].replicated:
        return
    fitted = with_most_digits(failing)[:FITTED]
    for way in WAYS:
        if not all(way.name in scene.tensors and np.isfinite(_off(scene, way.name)).all() for scene in fitted):
            continue
        for part in (EVERYWHERE, *PARTS):
            seen = [found for scene in fitted if (found := _fit(scene, way, part)) is not None]
            if len(seen) < len(fitted):
                continue
            where = f"{way.name} {part.text}".strip()
            for text, number in named(seen, fitted, ADDENDS if way.adds else FACTORS, none=0.0 if way.adds else 1.0):
                yield _hypothesis(f"{where} {way.told(text)}", way, part, number)


def with_most_digits(scenes: Sequence[Scene]) -> list[Scene]:
    """Return the cases of the widest dtype, the largest first: in 16 bits, a fit leaves over what rounding does."""
    widest = min(UNIT_ROUNDOFF[scene.problem.dtype] for scene in scenes)
    found = [one for one in scenes if UNIT_ROUNDOFF[one.problem.dtype] <= max(widest, UNIT_ROUNDOFF["float32"])]
    return sorted(found or scenes, key=lambda scene: -scene.size * scene.problem.nk)


def named(
    seen: Sequence[float], scenes: Sequence[Scene], known: dict[str, Number], *, none: float
) -> Iterator[tuple[float | str, Number]]:
    """Yield what the numbers seen in some cases are: one that follows from the case, in words, or the same in all.

    Args:
        seen: the numbers.
        scenes: the cases.
        known: numbers in words.
        none: the number that changes nothing.
    """

    def near(numbers: Sequence[float]) -> bool:
        return all(abs(x - y) <= 10 * LEFT * abs(y - none) for x, y in zip(seen, numbers, strict=True))

    for text, number in known.items():
        if near([number(scene) for scene in scenes]):
            yield text, number
    first = seen[0]
    short = round(first, 3)
    value = short if abs(short - first) <= LEFT * abs(first - none) else first
    if near([value] * len(seen)):
        yield value, lambda scene: value


def _rows(scene: Scene, part: PartOfPairs) -> Mask | None:
    """Return the rows of a part of all pairs, `(B, H, Nq)`; `None` if some pairs of a row are not in it."""
    p = scene.problem
    holds = np.broadcast_to(part.holds(pairs_of(scene)), (p.batch, p.heads, p.nq, p.nk))
    found: Mask = np.any(holds, axis=-1)
    return found if p.nk and bool((found == np.all(holds, axis=-1)).all()) else None


def _off(scene: Scene, name: TensorName) -> Array:
    """Return what was seen of out or lse less what is right, of all positions; 0 where both are infinite."""

    def computed() -> Array:
        right: Array = getattr(scene.truth, name)
        found = np.zeros_like(right)
        for rank in range(scene.size):
            seen, true, held = scene.seen(name, rank), scene.true(name, rank), scene.shards[0][rank]
            with np.errstate(invalid="ignore"):
                off = np.where(seen == true, 0.0, seen - true)
            if name == "lse":
                found[:, :, held] = off
            else:
                found[:, held] = off
        return found

    return scene.once(("seen off", name), computed)


def _change(scene: Scene, way: Way, part: PartOfPairs) -> Array | None:
    """Return what a result changes by in a part of its rows; `None` if that is not a part of rows."""
    if (rows := _rows(scene, part)) is None:
        return None
    found: Array = way.unit(scene) * (rows if way.name == "lse" else rows.swapaxes(1, 2)[..., None])
    return found


def _fit(scene: Scene, way: Way, part: PartOfPairs) -> float | None:
    """Return the number that explains what was seen in a part of the rows, nearly; `None` if none does."""
    unit, off = _change(scene, way, part), _off(scene, way.name)
    if unit is None or not (size := float((unit**2).sum())):
        return None
    times = float((unit * off).sum()) / size
    if not times or float(((off - times * unit) ** 2).sum()) > LEFT**2 * float((off**2).sum()):
        return None
    return times if way.adds else 1 + times


def _hypothesis(text: str, way: Way, part: PartOfPairs, number: Number) -> Hypothesis:
    def judge(scene: Scene) -> float | None:
        change = _change(scene, way, part)
        if change is None or way.name not in scene.tensors:
            return None if wrong_tensors(scene) else 0.0
        right: Array = getattr(scene.truth, way.name)
        return agree_but_for(scene, {way.name: right + change * (number(scene) - (not way.adds))})

    return Hypothesis(text, STEPS, judge=judge, measured=True)
