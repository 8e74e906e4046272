"""Variants of a failing case: one factor changed and all else kept, within what an implementation declares."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from ringref.problem import Dilation
from ringref.sharding import PageTable
from ringverify.cases.case import Case, even_multiple, sharding_names, why_unsupported
from ringverify.cases.inputs import selectable
from ringverify.cases.shapes import fitted, length_unit
from ringverify.diagnosis.when.conditions import LARGE, MASKS
from ringverify.implementation import Capabilities

LONGEST = 72
"""Longest sequence that is tried, unless the failing case is longer: larger ones take longer than they teach."""

LONG = 40
"""Longest sequence of a larger world, if the tokens on a rank are kept, and of mixed cases, for the same reason."""

SHORT = 12
"""Longest sequence of scattered cases, unless a factor that is changed makes it longer."""

SHORTENED = 0.75
"""Share of scattered cases whose lengths are drawn anew."""

EMPTY = 0.5
"""Share of these that may leave a rank empty, though the case that they are made of does not."""

BARE = 0.3
"""Share of scattered cases that begin without masks: another one may do what theirs did."""

SCATTERED = (
    (MASKS, 2),
    (("ranks", "length", "cross lengths", "sharding", "heads", "key heads", "page table", "calls"), 2),
    (("cotangent",), 1),
)
"""Factors that scattered cases differ in, with how many of them at most: those that decide who attends what."""

RARELY = ("world_size", "query_length", "key_length", *MASKS[1:4], "heads", "key_heads", "sharding")
"""Fields by whose values a case is drawn of which another one is made."""

CAPS = (1.0, 5.0, 30.0)
"""Softcaps of scattered cases: with the largest, a key whose score is its negative has no weight in most dtypes."""

TOKENS = 6
"""Tokens on a rank of the generous case; odd and even, multiples of 4 and others lie within reach of it."""


FIELDS: dict[str, tuple[str, ...]] = {
    "causal": ("causal",),
    "window": ("window",),
    "documents": ("documents",),
    "key_lengths": ("key_lengths",),
    "dilation": ("dilation",),
    "softcap": ("softcap",),
    "sinks": ("sinks",),
    "scale": ("scale",),
    "sharding": ("sharding",),
    "heads": ("heads", "key_heads"),
    "key heads": ("heads", "key_heads"),
    "dims": ("head_dim", "value_dim"),
    "batch": ("batch",),
    "dtype": ("dtype",),
    "values": ("values",),
    "strides": ("memory",),
    "cotangent": ("cotangent",),
    "group": ("group",),
    "calls": ("chunks",),
    "page table": ("page_table",),
    "schedule": ("schedule", "transport", "delayed"),
}
"""What a factor is in a case, but for ranks and lengths, which are two factors each."""


def _with(case: Case, **changes: Any) -> Iterator[Case]:
    """Yield the case with some fields changed, unless that has no meaning."""
    try:
        yield case.replace(**changes)
    except ValueError:
        return


def _each(case: Case, name: str, values: Iterable[Any]) -> Iterator[Case]:
    for value in values:
        yield from _with(case, **{name: value})


def _stretched(case: Case, nq: int, nk: int, **changes: Any) -> Iterator[Case]:
    """Yield the case with other lengths; documents and key_lengths are stretched alike."""
    p = case.problem
    if min(nq, nk) < 0 or max(nq, nk) > max(LONGEST, p.nq, p.nk):
        return
    changes |= {"query_length": nq, "key_length": None if nq == nk else nk}
    if p.documents is not None:
        changes["documents"] = tuple(_place(cut, p.nq, nq) for cut in p.documents)
    if p.key_lengths is not None:
        changes["key_lengths"] = tuple(_place(length, p.nk, nk) for length in p.key_lengths)
    yield from _with(case, **changes)


def _place(place: int, before: int, now: int) -> int:
    """Return a place in a sequence at its new length: 0 and the end stay such, and what is inside stays inside."""
    if place in (0, before):
        return now if place else 0
    return min(max(1, round(place * now / before)), max(1, now - 1), now)


class Varying:
    """Makes variants of cases within what an implementation declares.

    Args:
        capabilities: what it declares.
        most_ranks: largest world to try.

    Attributes:
        factors: what can be varied: by its name, a function that yields a case with this one factor changed.
        growths: functions that enlarge a case in one respect each, yielding the best way first.
    """

    def __init__(self, capabilities: Capabilities, most_ranks: int) -> None:
        self.c = c = capabilities
        self.sizes = [n for n in range(1, most_ranks + 1) if c.world_sizes is None or n in c.world_sizes]
        scales = (None, 0.3, 1.0, -0.7) if c.negative_scale else (None, 0.3, 1.0)
        self.factors: dict[str, Callable[[Case], Iterator[Case]]] = {
            "ranks": lambda case: self._on(case, [n for n in self.sizes if n != case.world_size]),
            "length": self._lengths,
            "causal": lambda case: _each(case, "causal", (not case.problem.causal,)),
            "window": self._window,
            "documents": self._documents,
            "key_lengths": self._key_lengths,
            "dilation": self._dilation,
            "softcap": lambda case: _each(case, "softcap", (None, 5.0)),
            "sinks": lambda case: _each(case, "sinks", (False, True)),
            "scale": lambda case: _each(case, "scale", scales),
            "cross lengths": self._cross,
            "sharding": lambda case: _each(case, "sharding", sharding_names(case, c)),
            "heads": self._heads,
            "key heads": self._key_heads,
            "dims": self._dims,
            "batch": lambda case: self._batches(case, (1, 2, 3, 2 * case.problem.batch)),
            "dtype": lambda case: _each(case, "dtype", c.dtypes),
            "values": self._values,
            "strides": lambda case: _each(
                case, "memory", ("contiguous", "transposed", "strided", "offset", "packed", "expanded")
            ),
            "cotangent": lambda case: _each(case, "cotangent", ("out", "lse", "both")),
            "group": lambda case: _each(case, "group", ("world", "leading", "offset", "strided")),
            "calls": self._calls,
            "page table": self._pages,
            "schedule": self._schedule,
        }
        self._of: dict[tuple[Case, str], list[Case]] = {}
        self.growths = (self._longer, self._wider_world, self._plain, self._wider, self._more_heads, self._more_batch)

    def of(self, case: Case, factor: str) -> list[Case]:
        """Return the variants of a case in one factor, each once, without the case itself."""
        if (case, factor) not in self._of:
            self._of[case, factor] = self._allowed(case, self.factors[factor](case))
        return list(self._of[case, factor])

    def grown(self, case: Case, growth: Callable[[Case], Iterator[Case]]) -> list[Case]:
        """Return ways to enlarge a case in one respect."""
        return self._allowed(case, growth(case))

    def sizes_and_lengths(self, case: Case) -> list[Case]:
        """Return the case on every world at many lengths: they tell keys on a rank from keys in all."""
        p = case.problem
        here = -(-max(p.nq, p.nk) // case.world_size)
        tokens = sorted({*range(1, 10), here - 1, here, here + 1, 2 * here} - {0})
        return self._allowed(
            case, (one for size in self.sizes for n in tokens for one in self._of_length(case, n, world_size=size))
        )

    def likeness(self, case: Case, other: Case) -> int:
        """Return in how many fields two cases agree."""
        return sum(
            getattr(case if hasattr(case, field) else case.problem, field)
            == getattr(other if hasattr(other, field) else other.problem, field)
            for field in {field for fields in FIELDS.values() for field in fields} | {"world_size", "query_length"}
        )

    def mixed(self, case: Case, other: Case, kept: Collection[str]) -> Case | None:
        """Return a case that is like `case` in its values and the factors `kept`, and like `other` in all else.

        `None` if there is none, or if it is long. Values are kept since some hide faults.
        """
        size = (case if "ranks" in kept else other).world_size
        p = (case if not {"length", "cross lengths"}.isdisjoint(kept) else other).problem
        if max(p.nq, p.nk) > max(LONG, case.problem.nq, case.problem.nk):
            return None
        stays = {"values"} | {field for factor in kept for field in FIELDS.get(factor, ())}
        for one in _stretched(case, p.nq, p.nk, world_size=size):
            for else_ in _stretched(other, p.nq, p.nk, world_size=size):
                changes = {
                    field: getattr(else_ if hasattr(else_, field) else else_.problem, field)
                    for fields in FIELDS.values()
                    for field in fields
                    if field not in stays
                }
                lengths = (one if "key_lengths" in stays else else_).problem.key_lengths
                if lengths is not None:
                    batch = (one if "batch" in stays else else_).problem.batch
                    changes["key_lengths"] = tuple(lengths[i % len(lengths)] for i in range(batch))
                found = self._allowed(case, _with(one, seed=other.seed, **changes))
                return found[0] if found else None
        return None

    def scattered(self, cases: Sequence[Case], draw: random.Random) -> Iterator[Case]:
        """Yield small cases without end: one of the cases with a few factors and the lengths changed at once."""
        while True:
            one = _one_of(cases, draw)
            if draw.random() < BARE:
                one = self.without(one, MASKS) or one
            nq, nk = (draw.randint(1, SHORT) for _ in range(2))
            if draw.random() < SHORTENED:
                stretched = _stretched(one, nq, nk if self.c.cross_lengths else nq)
                one = next(iter(self._allowed(one, stretched, empty=draw.random() < EMPTY)), one)
            masks, rest, cotangent = (draw.sample(some, draw.randint(0, most)) for some, most in SCATTERED)
            for factor in (*masks, *rest, *cotangent):
                one = draw.choice([one, *self.of(one, factor)])
                found: Iterator[Case] = iter(())
                if factor == "window":
                    left, right = (draw.choice((None, 0, 1, 2, draw.randint(3, SHORT))) for _ in range(2))
                    found = _with(one, window=(left, right))
                elif factor == "documents" and one.problem.documents is not None:
                    cuts = draw.choices(range(one.problem.nq + 1), k=draw.randint(2, 4))  # some documents are empty
                    found = _with(one, documents=tuple(sorted(cuts)))
                elif factor == "dilation" and one.problem.dilation is not None:
                    branches = ((draw.randint(1, SHORT), draw.randint(1, 4)) for _ in range(draw.randint(1, 3)))
                    found = _with(one, dilation=dataclasses.replace(one.problem.dilation, branches=tuple(branches)))
                elif factor == "key_lengths" and one.problem.key_lengths is not None:
                    lengths = (draw.randint(0, one.problem.nk) for _ in range(one.problem.batch))
                    found = _with(one, key_lengths=tuple(lengths))
                elif factor in ("heads", "key heads"):
                    heads, group = draw.randint(1, 6), draw.randint(1, 3)
                    found = _with(one, heads=heads * group, key_heads=None if group == 1 else heads)
                one = next(iter(self._allowed(one, found)), one)
            if one.problem.softcap is not None:
                one = next(_with(one, softcap=draw.choice(CAPS)))
            yield one

    def too_short(self, case: Case) -> list[Case]:
        """Return a case with so few positions that a rank holds nothing, if that is declared and the case has more."""
        if not self.c.empty_shards or min(case.problem.nq, case.problem.nk) < case.world_size:
            return []
        last = case.world_size - 1
        found = (one for n in dict.fromkeys((1, last, last - 1)) if n > 0 for one in _stretched(case, n, n))
        return [one for one in found if why_unsupported(one, self.c) is None]

    def without(self, case: Case, factors: Collection[str]) -> Case | None:
        """Return a case without some of its masks, all of them at once; `None` if that is not declared."""
        absent = {name: False if name == "causal" else None for name in factors if getattr(case.problem, name)}
        return next(iter(self._allowed(case, _with(case, **absent))), None)

    def _allowed(self, case: Case, variants: Iterable[Case], *, empty: bool = False) -> list[Case]:
        """Return what is declared of the variants and can be made.

        Args:
            case: the case.
            variants: the variants.
            empty: whether they may leave a rank empty though the case does not.
        """
        found: dict[Case, Case] = {}
        for one in variants:
            one = fitted(one, self.c)
            possible = (empty or _full(one) or not _full(case)) and (one.values != "selectors" or selectable(one))
            if possible and one.world_size in self.sizes and why_unsupported(one, self.c) is None:
                found.setdefault(_in_short(one), one)
        found.pop(_in_short(case), None)
        return list(found.values())

    # -- the world and lengths -----------------------------------------------------------------------------------------

    def _of_length(self, case: Case, tokens: int, **changes: Any) -> Iterator[Case]:
        """Yield the case with this many tokens on a rank, then with one more and one less in all; cross stays cross."""
        p = case.problem
        size = changes.get("world_size", case.world_size)
        for n in (tokens * size, tokens * size + 1, tokens * size - 1):
            yield from _stretched(case, n - max(0, p.nk - p.nq), n - max(0, p.nq - p.nk), **changes)

    def _on(self, case: Case, sizes: Iterable[int]) -> Iterator[Case]:
        """Yield the case on other numbers of ranks: with as many tokens on a rank, and with as many in all."""
        p, now = case.problem, case.world_size
        for size in sizes:
            nq, nk = (n // now * size + min(n % now, size - 1) for n in (p.nq, p.nk))
            if max(nq, nk) <= LONG:
                yield from _stretched(case, nq, nk, world_size=size)
        for size in sizes:
            yield from _with(case, world_size=size)

    def _lengths(self, case: Case) -> Iterator[Case]:
        p, size = case.problem, case.world_size
        unit = even_multiple(case.sharding, size) // size
        here = -(-max(p.nq, p.nk) // size)
        of_unit = (unit, 4 * unit, here + unit, here - unit, 8 * unit, 2 * unit, 3 * unit)
        tokens = [n for n in (*of_unit, 2 * here, 3 * here) if n > 0]
        for of_all in (slice(0, 1), slice(1, 2)):  # even first
            for n in tokens:
                yield from list(self._of_length(case, n))[of_all]
        if p.documents is not None or p.key_lengths is not None:  # as they are, in a longer sequence
            yield from _with(case, query_length=p.nq + size * unit, key_length=p.nk + size * unit)

    def _cross(self, case: Case) -> Iterator[Case]:
        p, size = case.problem, case.world_size
        step = length_unit(self.c, case.sharding, size)
        step = max(step, size)
        pairs = [(p.nk, p.nk), (p.nq, p.nq), (p.nk, p.nq), (p.nq, p.nk + step), (p.nq + step, p.nk)]
        for nq, nk in [*pairs, (p.nq, 2 * p.nk), (2 * p.nq, p.nk), (p.nq, step), (step, p.nk)]:
            yield from _stretched(case, nq, nk)

    # -- constraints ---------------------------------------------------------------------------------------------------

    def _window(self, case: Case) -> Iterator[Case]:
        p = case.problem
        here = max(1, p.nk // case.world_size)
        if p.window is None:
            # The first one leaves each query one key, which lies on its own rank where queries and keys are as many.
            yield from _each(case, "window", ((0, 0), (here // 2, here // 2), (here, 1), (2, None), (None, 0)))
            return
        left, right = p.window
        sides = (0, 1, 2, here - 1, here, here + 1, 2 * here, p.nk)
        yield from _each(case, "window", (None, (left, None), (None, right), (here, here), (here - 1, here - 1)))
        yield from _each(case, "window", ((side, right) for side in sides if left is not None))
        yield from _each(case, "window", ((left, side) for side in sides if right is not None))

    def _documents(self, case: Case) -> Iterator[Case]:
        n, size = case.problem.nq, case.world_size
        ends = (*(rank * (n // size) + min(rank, n % size) for rank in range(size)), n)
        cut = ((0, n // 2, n), ends, (0, n // size + 1, n), (0, n), (0, 1, n), (1, n), (0, n - 1))
        yield from _each(case, "documents", (None, *cut))

    def _key_lengths(self, case: Case) -> Iterator[Case]:
        p, size = case.problem, case.world_size
        yield from _with(case, key_lengths=None)
        whole = (p.nk,) * (p.batch - 1)
        yield from _with(case, key_lengths=(p.nk - 1,) * p.batch)
        yield from _with(case, key_lengths=(*whole, 0))
        for length in (p.nk // 2 + 1, p.nk - p.nk // size, p.nk):
            yield from _with(case, key_lengths=(length,) * p.batch)
        if p.batch > 1:
            yield from _with(case, key_lengths=(p.nk, *(p.nk - 1,) * (p.batch - 1)))

    def _dilation(self, case: Case) -> Iterator[Case]:
        p, c = case.problem, self.c
        here, n = max(1, p.nk // case.world_size), max(1, p.nq)
        yield from _with(case, dilation=None)
        if p.dilation is None:
            yield from _each(
                case, "dilation", (Dilation(((w, r),), m) for w, r in ((n, 2), (here, 1)) for m in c.dilation)
            )
            return
        d = p.dilation
        yield from _each(case, "dilation", (Dilation(d.branches, mode) for mode in c.dilation))
        if d.heads == "shared":
            offsets = (dataclasses.replace(d, head_offset=offset) for offset in ("cyclic", "block"))
            yield from _each(case, "dilation", offsets)
        others = [d.branches[:1], *([d.branches[:-1]] if len(d.branches) > 2 else [])]
        others += [tuple((max(1, n // place), 1) for place, _ in enumerate(d.branches, 1))]
        others += [tuple((w, rate) for w, _ in d.branches) for rate in (1, 2, 3, 4, 5)]
        others += [tuple((w, r) for _, r in d.branches) for w in (1, 2, here - 1, here, here + 1, 2 * here, n) if w > 0]
        others += [(*d.branches, (n, 1)), tuple((n, place) for place, _ in enumerate(d.branches, 1))]
        yield from _each(case, "dilation", (dataclasses.replace(d, branches=branches) for branches in others))

    # -- shapes --------------------------------------------------------------------------------------------------------

    def _heads(self, case: Case) -> Iterator[Case]:
        group = case.problem.group_size
        yield from _with(case, heads=1, key_heads=None)
        for n in (1, 2, 3, 4, 5, 2 * case.problem.hk, 3 * case.problem.hk):
            yield from _with(case, heads=n * group, key_heads=None if group == 1 else n)

    def _key_heads(self, case: Case) -> Iterator[Case]:
        p = case.problem
        for heads, key_heads in ((p.heads, p.heads), (p.hk, p.hk), (2 * p.hk, p.hk), (3 * p.hk, p.hk), (p.heads, 1)):
            yield from _with(case, heads=heads, key_heads=None if heads == key_heads else key_heads)

    def _dims(self, case: Case) -> Iterator[Case]:
        p = case.problem
        dims = [8, 1, 16, 3, 4, 2, 5, 7, 9, 12, 17, p.head_dim + 1, 2 * p.head_dim, p.head_dim - 1]
        dims = [dim for dim in dims if dim]
        if p.dv != p.head_dim:
            yield from _with(case, value_dim=None)
            yield from (one for dim in dims for one in _with(case, head_dim=dim, value_dim=p.dv))
            yield from _each(case, "value_dim", dims)
        yield from (one for dim in dims for one in _with(case, head_dim=dim, value_dim=None))
        yield from _each(case, "value_dim", (dim for dim in (p.head_dim + 1, p.head_dim - 1) if dim))

    def _batches(self, case: Case, counts: Iterable[int]) -> Iterator[Case]:
        lengths = case.problem.key_lengths
        for n in counts:
            repeated = None if lengths is None else tuple(lengths[i % len(lengths)] for i in range(n))
            yield from _with(case, batch=n, key_lengths=repeated)

    def _values(self, case: Case) -> Iterator[Case]:
        yield from _each(case, "values", ("normal", "zero_queries", "integers", "large_scores"))
        if case.values in LARGE:
            yield from _each(case, "values", LARGE)

    # -- how it is run -------------------------------------------------------------------------------------------------

    def _calls(self, case: Case) -> Iterator[Case]:
        """Yield a case on a cache with its queries in one call, or in other ones."""
        n = case.problem.nq
        if case.apart is not None and n == case.problem.nk and n:
            others = ((n,), (n - 1, 1), (n - n // 2, n // 2), (1, n - 1), (1,) * n)
            yield from _each(case, "chunks", [one for one in others if all(one)])

    def _pages(self, case: Case) -> Iterator[Case]:
        """Yield a case with other pages: in order, dealt in turn, larger or smaller."""
        table = case.page_table
        if table is not None:
            size, dealt = case.world_size, PageTable(table.page_size, ((),) * case.world_size)
            ordered = PageTable(table.page_size, tuple(tuple(sorted(held)) for held in table.pages))
            yield from _each(case, "page_table", (ordered, dealt))
            sizes = (1, table.page_size + 1, -(-case.problem.nk // size) or 1)
            yield from _each(case, "page_table", (PageTable(n, ((),) * size) for n in sizes))

    def _schedule(self, case: Case) -> Iterator[Case]:
        yield from _each(case, "schedule", (case.schedule + 1, case.schedule + 2))
        yield from _each(case, "transport", ("buffered", "rendezvous"))
        yield from _each(case, "delayed", ((),))

    # -- larger cases --------------------------------------------------------------------------------------------------

    def _longer(self, case: Case) -> Iterator[Case]:
        """Yield the case with about `TOKENS` tokens on a rank, or more than it has; then a little more or less."""
        p, size = case.problem, case.world_size
        here = -(-max(p.nq, p.nk) // size)
        unit = length_unit(self.c, case.sharding, size) // size or 1
        tokens = -(-max(TOKENS, here + 2) // unit) * unit
        yield from self._of_length(case, tokens)
        yield from self._of_length(case, tokens + unit)
        yield from self._of_length(case, here + unit)

    def _wider_world(self, case: Case) -> Iterator[Case]:
        now = case.world_size
        for one in self._on(case, [n for n in (4, 5, 3, 6, 2, 7, 8) if n > now]):
            yield one
            if case.problem.window is not None:  # that reaches as many ranks away, as a part of them
                sides = (side and -(-side * one.world_size // now) for side in case.problem.window)
                yield from _with(one, window=tuple(sides))

    def _plain(self, case: Case) -> Iterator[Case]:
        yield from _with(case, values="normal")  # equal ones, or some that dominate, hide faults

    def _wider(self, case: Case) -> Iterator[Case]:
        p = case.problem
        dim = max(8, p.head_dim + 2)
        for head_dim in (dim, dim + 1, 2 * dim):
            yield from _with(case, head_dim=head_dim, value_dim=max(1, head_dim + p.dv - p.head_dim))

    def _more_heads(self, case: Case) -> Iterator[Case]:
        p = case.problem
        for times in (4, 3, 2):
            if p.heads * times <= 8:
                yield from _with(case, heads=p.heads * times, key_heads=None if p.hk == p.heads else p.hk * times)

    def _more_batch(self, case: Case) -> Iterator[Case]:
        now = case.problem.batch
        return self._batches(case, (now + 1, now + 2) if now < 3 else ())


def _one_of(cases: Sequence[Case], draw: random.Random) -> Case:
    """Return one of the cases: a field is drawn, then one of the values that they have there, then a case with it.

    So what few of them have is drawn as often as what most have.
    """
    field = draw.choice(RARELY)
    by_value = defaultdict[object, list[Case]](list)
    for case in cases:
        by_value[getattr(case if hasattr(case, field) else case.problem, field)].append(case)
    return draw.choice(draw.choice(list(by_value.values())))


def effort(case: Case) -> int:
    """Return about how much there is to compute in a case, for an order."""
    return case.problem.nq * case.problem.nk * case.world_size**2


def _in_short(case: Case) -> Case:
    """Return a case without what follows from the rest of it: as many keys as queries, and key heads as heads."""
    p = case.problem
    pairs = (("key_length", p.nq), ("key_heads", p.heads), ("value_dim", p.head_dim))
    follow = {name: None for name, other in pairs if getattr(p, name) == other}
    return case.replace(**follow) if follow else case


def _full(case: Case) -> bool:
    """Whether every rank holds queries and keys."""
    return min(case.problem.nk if case.replicated else case.problem.nq, case.problem.nk) >= case.world_size
