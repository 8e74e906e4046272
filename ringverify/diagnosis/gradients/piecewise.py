"""Gradients put together from what each rank contributes to each block, where no rule says what becomes of which part.

Which contributions are lost, counted otherwise or taken elsewhere is read off each case anew. So the sentence is about
all cases, with an example, and not about which these are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ringverify.cases.comparing import QKV_GRADIENTS
from ringverify.diagnosis.gradients.adding import FACTORS
from ringverify.diagnosis.gradients.terms import Gradients, Terms, fits, fitted, measured
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.scaling import LEFT
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName

TRIED = 10
"""Contributions of which every choice is tried, where there are too few numbers to solve for it."""

READ = 8
"""Failing cases that are read at most."""

ENOUGH = 2
"""Cases of which contributions have to be read, if there are so many."""

SHOWN = 2
"""Contributions that are given as examples."""


class TooFew(Exception):
    """Too few numbers came back to tell which contributions they are made of."""


class Contribution(NamedTuple):
    """What one rank's queries and one owner's keys add to the rows of a gradient.

    Attributes:
        rank: whose queries.
        owner: whose keys.
        rows: `(B, rows of the rank or of the owner, heads, dim)`.
    """

    rank: int
    owner: int
    rows: Array


def contributions(terms: Terms, name: TensorName) -> list[Contribution]:
    """Return the contributions to a gradient that are larger somewhere than what that element may be off by."""

    def made() -> list[Contribution]:
        pairs, shards, found = terms.pairs, terms.scene.shards[name != "dq"], []
        least = getattr(terms.scene.allowed, name)
        for number in range(terms.scene.size):
            here = (pairs.owner if name == "dq" else pairs.rank) == number
            whole = terms.sums_over([name], here)[name]
            for at, held in enumerate(shards):
                if (np.abs(rows := whole[:, held]) > least[:, held]).any():
                    found.append(Contribution(at, number, rows) if name == "dq" else Contribution(number, at, rows))
        return found

    return terms.scene.once(("contributions", name), made)


def chosen(columns: Sequence[Array], seen: Array, limit: Array | float) -> tuple[int, ...] | None:
    """Return which of some arrays add up to what was seen; `None` if none do.

    Raises:
        TooFew: more arrays than numbers, and too many to try every choice.
    """

    def enough(numbers: Sequence[int]) -> bool:
        left = np.abs(seen - sum((columns[n] for n in numbers), np.zeros_like(seen)))
        return bool((left <= limit + LEFT * np.abs(seen).max(initial=0.0)).all())

    if enough(()):
        return ()
    if not columns:
        return None
    sizes = [float(np.abs(column).max(initial=0.0)) or 1.0 for column in columns]
    table = np.stack([column.ravel() / size for column, size in zip(columns, sizes, strict=True)], axis=1)
    share, _, rank, singular = np.linalg.lstsq(table, seen.ravel(), rcond=None)
    if rank == len(columns) and singular[-1] > LEFT * singular[0]:
        numbers = tuple(np.flatnonzero(share > np.array(sizes) / 2).tolist())
        return numbers if enough(numbers) else None
    if len(columns) > TRIED:
        raise TooFew
    for size in range(1, len(columns) + 1):
        for numbers in itertools.combinations(range(len(columns)), size):
            if enough(numbers):
                return numbers
    return None


# -- contributions that count otherwise --------------------------------------------------------------------------------

COUNTED = {
    "is lost": FACTORS["is missing"],
    "is added twice": FACTORS["counts twice"],
    "is multiplied by the scale once more": FACTORS["is multiplied by the scale once more"],
    "lacks the scale": FACTORS["lacks the scale"],
    "is added negated": FACTORS["is negated"],
}
"""What becomes of a contribution, and how often it counts."""


def _counted_otherwise(name: TensorName, factor: Callable[[Scene], float], terms: Terms) -> list[Contribution] | None:
    """Return the contributions that count otherwise; `None` if what was seen cannot be put together so."""
    scene, found, times = terms.scene, [], factor(terms.scene) - 1
    if not times:
        return None
    for rank in range(scene.size):
        here = [one for one in contributions(terms, name) if (one.rank if name == "dq" else one.owner) == rank]
        off = scene.seen(name, rank) - scene.true(name, rank)
        numbers = chosen([one.rows * times for one in here], off, scene.limit(name, rank))
        if numbers is None:
            return None
        found += [here[number] for number in numbers]
    return found


def _changed(names: Sequence[TensorName], factor: Callable[[Scene], float], terms: Terms) -> Gradients:
    changes, times = Gradients(), factor(terms.scene) - 1
    for name in names:
        if (found := _counted_otherwise(name, factor, terms)) is None:
            return {}
        changes[name] = np.zeros_like(getattr(terms.scene.truth, name))
        for one in found:
            held = terms.scene.shards[name != "dq"][one.rank if name == "dq" else one.owner]
            changes[name][:, held] += times * one.rows
    return changes


def _example(name: TensorName, found: Sequence[Contribution]) -> str:
    shown = [
        f"what the keys of rank {one.owner} add to that of rank {one.rank}"
        if name == "dq"
        else f"what the queries of rank {one.rank} add to that of rank {one.owner}"
        for one in found[:SHOWN]
    ]
    return " and ".join(shown) + (", and more" if len(found) > SHOWN else "")


# -- contributions that arrive elsewhere -------------------------------------------------------------------------------


class Bundle(NamedTuple):
    """What travels together: all contributions to a block, or one, in one batch entry.

    Attributes:
        rank: whose queries; `None` of a whole block.
        owner: whose keys.
        batch: the batch entry.
        rows: by gradient, `(rows of the owner, key heads, dim)`.
    """

    rank: int | None
    owner: int
    batch: int
    rows: dict[TensorName, Array]


class Move(NamedTuple):
    """Where a bundle arrives."""

    bundle: Bundle
    rank: int
    batch: int

    @property
    def elsewhere(self) -> bool:
        """Whether that is not where it belongs."""
        return (self.rank, self.batch) != (self.bundle.owner, self.bundle.batch)

    def __str__(self) -> str:
        what = "that" if self.bundle.rank is None else f"what the queries of rank {self.bundle.rank} add to that"
        of = to = ""
        if self.batch != self.bundle.batch:
            of, to = f" in batch entry {self.bundle.batch}", f" in batch entry {self.batch}"
        there = f"at rank {self.rank}" if self.rank != self.bundle.owner else "there"
        return f"{what} of rank {self.bundle.owner}{of} arrives {there}{to}"


def _bundles(names: Sequence[TensorName], terms: Terms, *, whole: bool) -> list[Bundle]:
    found: dict[tuple[int | None, int, int], dict[TensorName, Array]] = {}
    for name in names:
        for one, batch in itertools.product(contributions(terms, name), range(terms.scene.problem.batch)):
            held = terms.scene.shards[1][one.owner]
            nothing = {name: 0 * getattr(terms.scene.truth, name)[batch, held] for name in names}
            here = found.setdefault((None if whole else one.rank, one.owner, batch), nothing)
            here[name] = here[name] + one.rows[batch]
    least = {name: getattr(terms.scene.allowed, name).max(initial=0.0) for name in names}
    large = (key for key, rows in found.items() if any((np.abs(rows[name]) > least[name]).any() for name in names))
    return [Bundle(*key, found[key]) for key in large]


def _moves(names: Sequence[TensorName], whole: bool, terms: Terms) -> list[Move] | None:
    """Return where each bundle arrives, if it does and is seen; `None` if what was seen is not made of them.

    Whole blocks have to arrive once each.
    """

    def joined(rows: dict[TensorName, Array], count: int) -> Array:
        return np.concatenate(
            [_placed(rows[name], count).reshape(count, math.prod(rows[name].shape[1:])) for name in names], axis=1
        )

    scene, moves, bundles = terms.scene, list[Move](), _bundles(names, terms, whole=whole)
    for rank, batch in itertools.product(range(scene.size), range(scene.problem.batch)):
        count = len(scene.shards[1][rank])
        seen, limit = ({name: of(name, rank)[batch] for name in names} for of in (scene.seen, scene.limit))
        # Two contributions too small to be among the bundles may add up in one place.
        limit = {name: limit[name] + 2 * getattr(scene.allowed, name).max(initial=0.0) for name in names}
        numbers = chosen([joined(one.rows, count) for one in bundles], joined(seen, count), joined(limit, count))
        if numbers is None:
            return None
        moves += [Move(bundles[number], rank, batch) for number in numbers]
    room = all(map(len, scene.shards[1]))  # what arrives at a rank that holds no keys is not seen
    once = len({id(one.bundle) for one in moves}) == len(moves) and (len(moves) == len(bundles) or not room)
    return moves if (once or not whole) and any(one.elsewhere for one in moves) else None


def _placed(rows: Array, count: int) -> Array:
    """Return rows place by place, as far as there are places."""
    found = np.zeros((count, *rows.shape[1:]))
    found[: len(rows)] = rows[:count]
    return found


def _arrived(names: Sequence[TensorName], whole: bool, terms: Terms) -> Gradients:
    if (moves := _moves(names, whole, terms)) is None:
        return {}
    changes: Gradients = {name: -getattr(terms.scene.truth, name) for name in names}
    for one, name in itertools.product(moves, names):
        held = terms.scene.shards[1][one.rank]
        changes[name][one.batch, held] += _placed(one.bundle.rows[name], len(held))
    return changes


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the gradients of cases whose out and lse are right.

    Args:
        scenes: cases, those that fail first.
    """
    terms = fitted(scenes, most=READ)
    if not terms or any(one.scene.replicated for one in terms) or all(one.scene.size == 1 for one in terms):
        return
    wrong = set(itertools.chain.from_iterable(wrong_tensors(one.scene) for one in terms))
    names = tuple(name for name in QKV_GRADIENTS if name in wrong)
    for says, factor in COUNTED.items():
        change = functools.partial(_changed, names, factor)
        if (example := _first_that_fits(terms, change)) is not None:
            parts = ((name, _counted_otherwise(name, factor, example)) for name in names)
            here = next(_example(name, found) for name, found in parts if found)
            what = f"a part of {' and '.join(names)} {says}, by no rule that is known"
            yield read_off(f"{what}: for example on {example.scene.size} ranks, {here}", change)
    if names and set(names) <= {"dk", "dv"}:
        for whole in (True, False):
            change = functools.partial(_arrived, names, whole)
            if (example := _first_that_fits(terms, change)) is not None:
                moves = _moves(names, whole, example) or []
                order = _in_order(moves, example)
                how = order or next(str(one) for one in moves if one.elsewhere)
                what = f"{'' if whole else 'a part of '}{' and '.join(names)}"
                arrives = "arrive" if whole and len(names) > 1 else "arrives"
                there = ":" if order else ", by no rule that is known: for example"
                yield read_off(f"{what} {arrives} elsewhere{there} on {example.scene.size} ranks, {how}", change)


def _in_order(moves: Sequence[Move], terms: Terms) -> str | None:
    """Return in which order ranks and batch entries are read instead of that in which they lie, if that is it."""
    ranks, entries = terms.scene.size, terms.scene.problem.batch
    if entries == 1:
        return None
    if all((one.rank, one.batch) == divmod(one.bundle.batch * ranks + one.bundle.owner, entries) for one in moves):
        return "what lies by batch entry and rank is taken by rank and batch entry"
    if all((one.batch, one.rank) == divmod(one.bundle.owner * entries + one.bundle.batch, ranks) for one in moves):
        return "what lies by rank and batch entry is taken by batch entry and rank"
    return None


def _first_that_fits(terms: Sequence[Terms], change: Callable[[Terms], Gradients]) -> Terms | None:
    """Return the smallest case that a change fits, if it fits all that tell and these are enough."""
    found = []
    for one in terms:
        try:
            if not fits(one, change(one)):
                return None
        except TooFew:
            continue
        found.append(one)
    return found[-1] if len(found) >= min(ENOUGH, len(terms)) else None


def read_off(text: str, change: Callable[[Terms], Gradients]) -> Hypothesis:
    """Return the hypothesis that a change explains all cases that tell."""
    plain = measured(text, change)
    assert plain.judge is not None
    judge = plain.judge

    def judged(scene: Scene) -> float | None:
        try:
            return judge(scene)
        except TooFew:
            return 0.0

    return dataclasses.replace(plain, judge=judged, whole=None)
