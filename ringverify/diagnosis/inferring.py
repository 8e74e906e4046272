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

import numpy as np
from numpy.typing import NDArray

from ringverify.diagnosis.pairs import Ints, Mask, Otherwise, Pairs
from ringverify.diagnosis.quantities import COMPARED, Quantity, Relation, Value, related
from ringverify.diagnosis.scene import Counts

NEAR = 1
"""How far apart the two sides of a comparison may be beyond what it says: `a ≥ b + 1`."""

ENOUGH = 4
"""Pairs that have to be seen for every comparison of a rule, and for the rule itself."""

KEPT = 120
"""Comparisons of which all combinations are tried, at most; of three, fewer."""

FEW = 40

POOLED = 400
"""Pairs of each kind that are looked at in a case, at most: cases of many heads have more of the same."""

RULES = 6
"""Rules of each kind, at most."""


Chosen = Callable[[int], Mask]
"""Of the case of a number, which of its pairs `(B, H, Nq, Nk)`."""


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


def _pooled(cases: Sequence[Pairs], having: Sequence[Mask], others: Sequence[Mask], value: Values) -> _Pooled:
    return _Pooled(cases, [_some(each) for each in having], [_some(each) for each in others], value)


def _some(chosen: Mask) -> Places:
    """At most `POOLED` of the pairs that are chosen, evenly spread."""
    places = np.nonzero(chosen)
    return tuple(of[:: max(1, -(-len(of) // POOLED))] for of in places)


def separating(pooled: _Pooled) -> list[tuple[Relation, ...]]:
    """Return the fewest comparisons that hold of some pairs and, together, of no other; the simplest first."""
    seen = sum(len(places[0]) for places in pooled.having)
    if seen < 2 * ENOUGH:
        return []
    values, fixed = functools.cache(pooled.values), functools.cache(pooled.fixed)
    survivors: dict[bytes, tuple[float, Relation, Mask]] = {}
    for a, b in COMPARED:
        if fixed(a) and fixed(b):
            continue
        (of_a, other_a), (of_b, other_b) = values(a), values(b)
        apart, others = of_a - of_b, other_a - other_b
        for relation, more in _true_of(apart):
            one = Relation(a, relation, b, more)
            left = related(others, relation, more)
            if left.all() and others.size:
                continue
            key = np.packbits(left).tobytes()
            if key not in survivors or one.cost < survivors[key][0]:
                survivors[key] = one.cost, one, left
    kept = sorted(survivors.values(), key=lambda each: each[0] + 4 * each[2].mean() if each[2].size else each[0])[:KEPT]
    if not kept:
        return []
    table = np.stack([left for _, _, left in kept])
    columns = np.unique(np.packbits(table, axis=0), axis=1, return_index=True)[1]
    table = table[:, columns]
    for size, of in ((1, len(kept)), (2, len(kept)), (3, FEW)):
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


def inferred(cases: Sequence[Pairs], seen: Sequence[Counts], unsure: Sequence[bool] = ()) -> Iterator[Otherwise]:
    """Yield masks that give what was read of cases, and are the right ones of cases where this was right.

    Args:
        cases: the pairs of each.
        seen: how often each pair counts in it.
        unsure: whether padding that was not seen in a case may be attended as keys and values of 0; none if empty.
    """
    told = zip(cases, seen, unsure or [False] * len(cases), strict=True)
    read = [one for one in told if len(one[0].of_branches) == 1]
    both, cases = [(pairs, count) for pairs, count, _ in read], [pairs for pairs, *_ in read]
    value = functools.cache(lambda quantity, pairs: quantity.of(pairs))
    free = [np.broadcast_to(pairs.padding & zeros, count.shape) & (count == 0) for pairs, count, zeros in read]
    missing = [(pairs.true > 0) & (count == 0) for pairs, count in both]
    extra = [(pairs.true == 0) & (count > 0) for pairs, count in both]
    twice = [(pairs.true > 0) & (count == 2 * pairs.true) for pairs, count in both]
    whole = all(
        ((count == pairs.true) | a | b | c).all()
        for (pairs, count), a, b, c in zip(both, missing, extra, twice, strict=True)
    )
    if not whole or any((count > 1)[one].any() for one, (_, count) in zip(extra, both, strict=True)):
        return
    kinds = (
        (
            "keys are left out",
            0,
            missing,
            [(pairs.true > 0) & ~one for (pairs, _), one in zip(both, missing, strict=True)],
        ),
        (
            "keys that the mask hides are attended",
            1,
            extra,
            [(pairs.true == 0) & ~one & ~out for (pairs, _), one, out in zip(both, extra, free, strict=True)],
        ),
        ("keys count twice", 2, twice, [(pairs.true > 0) & ~one for (pairs, _), one in zip(both, twice, strict=True)]),
    )
    there = [kind for kind in kinds if any(one.any() for one in kind[2])]
    found = [separating(_pooled(cases, having, others, value)) for _, _, having, others in there]
    for chosen in itertools.islice(itertools.product(*found), RULES) if found else ():
        what = [(text, times, rule) for (text, times, *_), rule in zip(there, chosen, strict=True)]
        says = "; ".join(f"{text} where {_clause(rule)}" for text, _, rule in what)
        cost = sum(_cost(rule) for _, _, rule in what)
        yield Otherwise(says, functools.partial(_changed, what), cost)
    for names in REPLACED:
        yield from _replacing(names, both, free, value)


def _replacing(
    names: tuple[str, ...], both: Sequence[tuple[Pairs, Counts]], free: Sequence[Mask], value: Values
) -> Iterator[Otherwise]:
    """Yield what stands for constraints, in the cases that have them."""
    having_them = [any(getattr(pairs.problem, name) for name in names) for pairs, _ in both]
    if not all(there or (count == pairs.true).all() for there, (pairs, count) in zip(having_them, both, strict=True)):
        return
    cases = list(itertools.compress((pairs for pairs, _ in both), having_them))
    counts = list(itertools.compress((count for _, count in both), having_them))
    rest = [_without(pairs, names) for pairs in cases]
    if not cases or not all(((count == 0) | (count == base)).all() for count, base in zip(counts, rest, strict=True)):
        return
    having = [count > 0 for count in counts]
    others = [
        (base > 0) & (count == 0) & ~out
        for base, count, out in zip(rest, counts, itertools.compress(free, having_them), strict=True)
    ]
    for rule in separating(_pooled(cases, having, others, value)):
        says = f"instead of {REPLACED[names]}, keys count where {_clause(rule)}"
        yield Otherwise(says, functools.partial(_instead, names, rule), _cost(rule))


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


def _changed(what: Sequence[tuple[str, int, tuple[Relation, ...]]], whole: Pairs) -> Counts:
    found = np.zeros_like(whole.true)
    for pairs in whole.of_branches:
        counts = pairs.true.copy()
        for _, times, rule in what:
            here = _holds(rule, pairs) & ((pairs.true == 0) if times == 1 else (pairs.true > 0))
            counts[here] = 1 if times == 1 else times * pairs.true[here]
        found += counts
    return found


def _instead(names: tuple[str, ...], rule: tuple[Relation, ...], whole: Pairs) -> Counts | None:
    if not any(getattr(whole.problem, name) for name in names):
        return None
    found = np.zeros_like(whole.true)
    for pairs in whole.of_branches:
        found += np.where(_holds(rule, pairs), _without(pairs, names), 0)
    return found
