"""Infer a rule from what was read, where no mask that is known gives it.

Keys that are left out, or attended though they are hidden, are told from all others by the fewest comparisons of
quantities that code on a rank has at hand: positions, rows of a shard, ends of documents and windows, lengths, ranks,
heads. So the rule says what these pairs have in common. That it is no chance, cases show that it was not made for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringverify.diagnosis.pairs import Ints, Mask, Otherwise, Pairs
from ringverify.diagnosis.quantities import COMPARED, COMPARED_IN_PIECES, Quantity, Relation, Value, related
from ringverify.diagnosis.scene import Counts

NEAR = 1
"""How far apart the two sides of a comparison may be beyond what it says: `a ≥ b + 1`."""

ENOUGH = 4
"""Pairs that have to be seen for every comparison of a rule, and for the rule itself."""

KEPT = {1: 120, 2: 120, 3: 40}
"""Of how many comparisons, the simplest ones, all combinations of one, two or three are tried."""

POOLED = 400
"""Pairs of each kind that are looked at in a case, at most: cases of many heads have more of the same."""

RULES = 6
"""Rules of each kind, at most."""


Places = tuple[NDArray[np.intp], ...]
Values = Callable[[Quantity, Pairs], Value]


@dataclasses.dataclass(frozen=True)
class _Pooled:
    """Pairs of several cases in one row: those that have something in common, and all others that do not."""

    cases: Sequence[Pairs]
    having: Sequence[Places]
    others: Sequence[Places]
    value: Values

    def values(self, of: Quantity) -> tuple[Ints, Ints]:
        """A quantity of each, of those and of the others."""
        found: tuple[list[Ints], list[Ints]] = [], []
        for pairs, *chosen in zip(self.cases, self.having, self.others, strict=True):
            value = np.broadcast_to(self.value(of, pairs), pairs.true.shape)
            for into, places in zip(found, chosen, strict=True):
                into.append(value[places])
        having, others = map(np.concatenate, found)
        return having, others

    def fixed(self, of: Quantity) -> bool:
        """Whether a quantity is the same for all pairs of a case: of what cases have, `needs` speaks."""
        return all(np.size(self.value(of, pairs)) == 1 for pairs in self.cases)


def _some(chosen: Mask) -> Places:
    """At most `POOLED` of the pairs that are chosen, evenly spread."""
    places = np.nonzero(chosen)
    return tuple(of[:: max(1, -(-len(of) // POOLED))] for of in places)


def separating(pooled: _Pooled) -> list[tuple[Relation, ...]]:
    """Return the fewest comparisons that hold of some pairs and, together, of no other; the simplest first.

    Where there are no others, nothing is said: it would be so by chance.
    """
    seen = sum(len(places[0]) for places in pooled.having)
    if seen < 2 * ENOUGH or not any(len(places[0]) for places in pooled.others):
        return []
    values, fixed = functools.cache(pooled.values), functools.cache(pooled.fixed)
    survivors: dict[bytes, tuple[float, Relation, Mask]] = {}
    zigzag = any(pairs.case.sharding == "zigzag" for pairs in pooled.cases)
    for a, b in COMPARED_IN_PIECES if zigzag else COMPARED:
        if fixed(a) and fixed(b):
            continue
        (of_a, other_a), (of_b, other_b) = values(a), values(b)
        apart, others = of_a - of_b, other_a - other_b
        for relation, more in _true_of(apart):
            one = Relation(a, relation, b, more)
            left = related(others, relation, more)
            if left.all():
                continue
            key = np.packbits(left).tobytes()
            if key not in survivors or one.cost < survivors[key][0]:
                survivors[key] = one.cost, one, left
    kept = sorted(survivors.values(), key=lambda each: each[0] + 4 * each[2].mean() if each[2].size else each[0])[
        : max(KEPT.values())
    ]
    if not kept:
        return []
    table = np.stack([left for _, _, left in kept])
    columns = np.unique(np.packbits(table, axis=0), axis=1, return_index=True)[1]
    table = table[:, columns]
    for size, of in KEPT.items():
        if seen < ENOUGH * (size + 1):
            break
        found = [
            (sum(kept[n][0] for n in chosen), chosen)
            for chosen in itertools.combinations(range(min(of, len(kept))), size)
            if not functools.reduce(np.logical_and, (table[n] for n in chosen)).any()
        ]
        if found:
            return [tuple(kept[n][1] for n in chosen) for _, chosen in sorted(found)[:RULES]]
    return []


def _true_of(difference: Ints) -> Iterator[tuple[str, int]]:
    """The relations that hold of all differences."""
    low, high = int(difference.min()), int(difference.max())
    for more in dict.fromkeys((min(low, NEAR), 0)):
        if -NEAR <= more <= low:
            yield "≥", more
    for more in dict.fromkeys((max(high + 1, -NEAR), 0)):
        if high < more <= NEAR:
            yield "<", more
    if low == high and abs(low) <= NEAR:
        yield "=", low
    if low < 0 < high and not (difference == 0).any():
        yield "≠", 0


# -- rules -------------------------------------------------------------------------------------------------------------

REPLACED: dict[tuple[str, ...], str] = {
    ("causal",): "the causal mask",
    ("window",): "the window",
    ("documents",): "the documents",
    ("key_lengths",): "the key lengths",
    ("dilation",): "the dilation",
    ("causal", "window"): "causal mask and window",
}


class _ReadCase(NamedTuple):
    """What was read of a case.

    Attributes:
        pairs: its pairs.
        counts: how often each counts.
        unsure: of which pairs that cannot be told.
    """

    pairs: Pairs
    counts: Counts
    unsure: Mask


class Kind(NamedTuple):
    """What is wrong with pairs.

    Attributes:
        text: what becomes of the keys.
        hidden: whether the mask hides them.
        times: how often they count instead; of keys that it does not hide, times as often as they should.
    """

    text: str
    hidden: bool
    times: int

    def among(self, pairs: Pairs) -> Mask:
        """The pairs that it may befall."""
        found: Mask = (pairs.true == 0) == self.hidden
        return found

    def counted(self, pairs: Pairs) -> Counts | int:
        """How often these count then."""
        return self.times if self.hidden else self.times * pairs.true

    def of(self, one: _ReadCase) -> Mask:
        """The pairs that it has befallen."""
        found: Mask = self.among(one.pairs) & (one.counts == self.counted(one.pairs))
        return found


KINDS = (
    Kind("keys are left out", hidden=False, times=0),
    Kind("keys that the mask hides are attended", hidden=True, times=1),
    Kind("keys count twice", hidden=False, times=2),
)


def inferred(cases: Sequence[Pairs], seen: Sequence[Counts], unsure: Sequence[bool] = ()) -> Iterator[Otherwise]:
    """Yield masks that give what was read of cases, and are the right ones of cases where this was right.

    Args:
        cases: the pairs of each; of a dilation of several branches, nothing is read.
        seen: how often each pair counts in it.
        unsure: whether padding that was not seen in a case may be attended as keys and values of 0; none if empty.
    """
    read = [
        _ReadCase(pairs, count, np.broadcast_to(pairs.padding & zeros, count.shape) & (count == 0))
        for pairs, count, zeros in zip(cases, seen, unsure or [False] * len(cases), strict=True)
        if len(pairs.of_branches) == 1
    ]
    value = functools.cache(lambda quantity, pairs: quantity.of(pairs))
    kinds = [kind for kind in KINDS if any(kind.of(one).any() for one in read)]
    if kinds and all((sum(kind.of(one) for kind in kinds) | (one.counts == one.pairs.true)).all() for one in read):
        found = [_having(read, kind.of, kind.among, value) for kind in kinds]
        for rules in itertools.islice(itertools.product(*found), RULES):
            what = list(zip(kinds, rules, strict=True))
            says = "; ".join(f"{kind.text} where {_clause(rule)}" for kind, rule in what)
            yield Otherwise(says, functools.partial(_changed, what), sum(map(_cost, rules)))
    for names in REPLACED:
        yield from _replacing(names, read, value)


def _replacing(names: tuple[str, ...], read: Sequence[_ReadCase], value: Values) -> Iterator[Otherwise]:
    """Yield what stands for some constraints, in the cases that have them; others have to be right."""
    concerned = [one for one in read if any(getattr(one.pairs.problem, name) for name in names)]
    others = (one for one in read if one not in concerned)
    rest = functools.partial(_without, names=names)
    if (
        concerned
        and all((one.counts == one.pairs.true).all() for one in others)
        and all(((one.counts == 0) | (one.counts == rest(one.pairs))).all() for one in concerned)
    ):
        for rule in _having(concerned, lambda one: one.counts > 0, lambda pairs: rest(pairs) > 0, value):
            says = f"instead of {REPLACED[names]}, keys count where {_clause(rule)}"
            yield Otherwise(says, functools.partial(_instead, names, rule), _cost(rule))


def _having(
    read: Sequence[_ReadCase], which: Callable[[_ReadCase], Mask], among: Callable[[Pairs], Mask], value: Values
) -> list[tuple[Relation, ...]]:
    """Return what sets some pairs apart from all others among which they are, as far as these are known."""
    having = [which(one) for one in read]
    others = [among(one.pairs) & ~had & ~one.unsure for one, had in zip(read, having, strict=True)]
    cases = [one.pairs for one in read]
    return separating(_Pooled(cases, [_some(each) for each in having], [_some(each) for each in others], value))


def _without(pairs: Pairs, names: tuple[str, ...]) -> Counts:
    """Return the counts without some constraints; of one branch of a dilation."""
    rest = pairs.counts(lambda each: None if each in (*names, "dilation") else (pairs.queries.p, pairs.keys.p))
    return rest if pairs.problem.dilation is None or "dilation" in names else rest * pairs.in_branch


def _clause(rule: tuple[Relation, ...]) -> str:
    return " and ".join(one.text for one in rule)


def _holds(rule: tuple[Relation, ...], pairs: Pairs) -> Mask:
    found = np.ones(pairs.true.shape, dtype=bool)
    for one in rule:
        found &= one.holds(pairs)
    return found


def _cost(rule: tuple[Relation, ...]) -> float:
    return sum(one.cost for one in rule)


def _changed(what: Sequence[tuple[Kind, tuple[Relation, ...]]], whole: Pairs) -> Counts:
    found = np.zeros_like(whole.true)
    for pairs in whole.of_branches:
        counts = pairs.true
        for kind, rule in what:
            counts = np.where(_holds(rule, pairs) & kind.among(pairs), kind.counted(pairs), counts)
        found += counts
    return found


def _instead(names: tuple[str, ...], rule: tuple[Relation, ...], whole: Pairs) -> Counts | None:
    if not any(getattr(whole.problem, name) for name in names):
        return None
    found = np.zeros_like(whole.true)
    for pairs in whole.of_branches:
        found += np.where(_holds(rule, pairs), _without(pairs, names), 0)
    return found
