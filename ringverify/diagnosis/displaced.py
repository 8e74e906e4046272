"""Rows that are right, but stand in the place of others; and rows of gradients that are right but for a factor.

A row is what one query gets in one head and batch entry. Which row stands where, and what it is multiplied by, is read
off each case anew. So the sentence is about all cases, with an example, and not about which rows these are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ringref.rounding import UNIT_ROUNDOFF
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Ints
from ringverify.diagnosis.rows import Group
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS

MOST = 600
"""Rows of a case, at most: every one that is wrong is compared with all others."""

ENOUGH = 4
"""Rows in all cases that have to stand elsewhere, or to be multiplied."""

NUMBERS = 2
"""Numbers of a row that tell which one it is, at least."""

GROUPS: tuple[Group, ...] = (("out", "lse"), ("out",), ("lse",), ("dq",))
"""Results that may be displaced together, by query."""

SHOWN = 2
"""Rows that are given as examples."""

POWERS = 12
"""Largest power of the number of ranks that rows may be multiplied by."""


class RowPlace(NamedTuple):
    """The place of a row."""

    batch: int
    query: int
    head: int


class RowTable(NamedTuple):
    """The rows of a result, or of several with the same rows: `(rows, numbers)`, in order of batch, query and head.

    Attributes:
        seen: as they came back.
        true: as they should be.
        limit: the error allowed.
        wrong: which of them are wrong, `(rows,)`.
    """

    seen: Array
    true: Array
    limit: Array
    wrong: Ints


def _table(names: Group, scene: Scene) -> RowTable | None:
    """Return the rows of a case; `None` if ranks that hold the same queries have other results of them."""

    def computed() -> RowTable | None:
        if scene.replicated and any(
            not np.array_equal(scene.seen(name, 0), scene.seen(name, rank), equal_nan=True)
            for name in names
            for rank in range(scene.size)
        ):
            return None
        shape = scene.truth.out.shape[:3]

        def rows(of: Callable[[TensorName], Array]) -> Array:
            every = [of(name)[..., None].swapaxes(1, 2) if name == "lse" else of(name) for name in names]
            return np.concatenate([x.reshape(int(np.prod(shape)), -1) for x in every], axis=1)

        def together(name: TensorName) -> Array:
            found = np.array(getattr(scene.truth, name))
            for rank, held in enumerate(scene.shards[0]):
                if name == "lse":
                    found[:, :, held] = scene.seen(name, rank)
                else:
                    found[:, held] = scene.seen(name, rank)
            return found

        seen, true, limit = (
            rows(together),
            rows(functools.partial(getattr, scene.truth)),
            rows(functools.partial(getattr, scene.allowed)),
        )
        return RowTable(seen, true, limit, np.flatnonzero(~_near(seen, true, limit).all(axis=1)))

    return scene.once(("rows", names), computed)


def _near(seen: Array, true: Array, limit: Array) -> Array:
    with np.errstate(invalid="ignore"):
        found: Array = (seen == true) | (np.abs(seen - true) <= limit)
    return found


def _place(number: int, scene: Scene) -> RowPlace:
    return RowPlace(*map(int, np.unravel_index(number, scene.truth.out.shape[:3])))


def _displaced(names: Group, scene: Scene) -> list[tuple[int, int]] | None:
    """Return which row stands where, -1 for that of a query without keys; `None` if one is none of the right rows."""
    table, found = _table(names, scene), list[tuple[int, int]]()
    if table is None:
        return None
    of_lse = "lse" in names
    nothing = np.array([*[0.0] * (table.seen.shape[1] - of_lse), *[-np.inf] * of_lse])
    for place in table.wrong:
        one = table.seen[place]
        if np.array_equal(one, nothing):
            found.append((-1, int(place)))
            continue
        same = np.flatnonzero(_near(one, table.true, table.limit).all(axis=1))
        if not len(same):
            return None
        found.append((int(same[0]), int(place)))
    return found


def _factors(scene: Scene) -> list[int] | None:
    """Return to which power of the number of ranks each wrong row of dq is multiplied; `None` if one is not so."""
    table, found = _table(("dq",), scene), list[int]()
    if table is None or scene.size == 1:
        return [] if table is not None and not len(table.wrong) else None
    for place in table.wrong:
        seen, true, limit = (x[place] for x in (table.seen, table.true, table.limit))
        for power in (*range(1, POWERS + 1), *range(-1, -POWERS - 1, -1)):
            times = float(scene.size) ** power
            if _near(seen, times * true, max(times, 1.0) * limit).all():
                found.append(power)
                break
        else:
            return None
    return found


def _how(row: int, place: int, scene: Scene) -> str:
    there = _place(place, scene)
    if row < 0:
        return f"nothing stands at query {there.query}"
    of = _place(row, scene)
    words = {"batch": "batch entry", "query": "query", "head": "head"}
    differ = [name for name in RowPlace._fields if getattr(of, name) != getattr(there, name)]
    what, where = (", ".join(f"{words[name]} {getattr(x, name)}" for name in differ) for x in (of, there))
    return f"that of {what} stands at {where}"


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains rows of cases of which nothing else is wrong.

    Args:
        scenes: cases, those that fail first.
    """
    failing = [one for one in scenes if wrong_tensors(one)]
    small = [one for one in failing if one.truth.out[..., 0].size <= MOST]
    if not small:
        return
    for names in GROUPS:
        if all(set(wrong_tensors(one)) <= set(names) for one in failing) and set(names) <= set(failing[0].tensors):
            yield from _of_names(names, small)
            break


def _of_names(names: Group, scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    of_lse = "lse" in names
    telling = [one for one in scenes if min(one.problem.dv + of_lse, one.problem.head_dim) >= NUMBERS]
    every = [(one, _displaced(names, one)) for one in telling]
    moved = [(one, [each for each in rows if each[0] >= 0]) for one, rows in every if rows is not None]
    if len(moved) == len(every) and sum(len(rows) for _, rows in moved) >= ENOUGH:
        scene, rows = max(moved, key=lambda each: (len(each[1]) > 0, -each[0].truth.out.size))
        every_one = list(dict.fromkeys(_how(*each, scene) for each in rows))
        shown = " and ".join(every_one[:SHOWN]) + (", and more" if len(every_one) > SHOWN else "")
        what = " and ".join(names)
        says = f"rows of {what} are right, and stand in other places: on {_ranks(scene)}, {shown}"
        yield Hypothesis(
            says, STEPS, judge=functools.partial(_judge, functools.partial(_displaced, names)), measured=True
        )
    powers = [(one, _factors(one)) for one in telling] if names == ("dq",) else []
    if powers and all(found is not None for _, found in powers):
        numbers = sorted({power for _, found in powers for power in found or ()})
        if sum(len(found or ()) for _, found in powers) >= ENOUGH and len(numbers) > 1:
            says = (
                f"rows of dq are right but for a power of the number of ranks, which differs by row ({numbers[0]} to "
                f"{numbers[-1]}): some are summed over the ranks, or divided by their number, more often than others"
            )
            yield Hypothesis(says, STEPS, judge=functools.partial(_judge, _factors), measured=True)


def _judge(read: Callable[[Scene], object], scene: Scene) -> float | None:
    """Return 0 if all rows of a case are explained, or if it is too large to tell."""
    if scene.truth.out[..., 0].size > MOST:
        return 0.0
    return None if read(scene) is None else UNIT_ROUNDOFF[scene.problem.dtype]


def _ranks(scene: Scene) -> str:
    return f"{scene.size} rank" + "s" * (scene.size > 1)
