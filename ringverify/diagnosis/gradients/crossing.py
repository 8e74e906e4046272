"""Hypotheses of a backward that takes what belongs to another row or head: its delta, lse, cotangent, query or key.

Out and lse are right, and so is the row to which is added; pieces and halves of shards are what rows are mixed up by,
and heads by the order in which those of a group follow each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.attention import per_key_head
from ringverify.cases.comparing import QKV_GRADIENTS
from ringverify.diagnosis.gradients.moving import MOVED, Moved
from ringverify.diagnosis.gradients.terms import Gradients, Terms, fits, fitted, measured
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.masks.documents import bounds
from ringverify.diagnosis.pairs import Ints, Mask
from ringverify.diagnosis.parts import EVERYWHERE, PARTS, PartOfPairs
from ringverify.diagnosis.scene import Array, Scene
from ringverify.events import TensorName

Other = Callable[[Array], Array]
"""Something of each head and row, `(B, H, Nq, …)`, of other rows or heads."""
Taken = Callable[[Terms, Other, Mask], Gradients]
"""What changes if something of other rows or heads is taken, for these pairs."""


def _of_rows(rows: Ints) -> Other:
    return lambda x: x[:, :, rows]


def _delta(terms: Terms, other: Other, here: Mask) -> Gradients:
    return _through_delta(terms.delta, terms, other, here)


def _delta_less_dlse(terms: Terms, other: Other, here: Mask) -> Gradients:
    return _through_delta(terms.delta - terms.dlse, terms, other, here)


def _out_in_delta(terms: Terms, other: Other, here: Mask) -> Gradients:
    out = other(terms.scene.truth.out.swapaxes(1, 2))
    more = terms.delta - (terms.dout * out).sum(axis=-1, keepdims=True)
    return terms.sums(("dq", "dk"), terms.factor * more * here, terms.p)


def _through_delta(delta: Array, terms: Terms, other: Other, here: Mask | Array) -> Gradients:
    return terms.sums(("dq", "dk"), terms.factor * (delta - other(delta)) * here, terms.p)


def _lse(terms: Terms, other: Other, here: Mask) -> Gradients:
    times = (_times(terms, other) - 1) * here
    return terms.sums(QKV_GRADIENTS, times * terms.ds, times * terms.p)


def _lse_and_delta(terms: Terms, other: Other, here: Mask) -> Gradients:
    found = _lse(terms, other, here)
    of_delta = _through_delta(terms.delta - terms.dlse, terms, other, _times(terms, other) * here)
    return found | {name: found[name] + y for name, y in of_delta.items()}


def _times(terms: Terms, other: Other) -> Array:
    """Return how many times as large weights are, `(B, H, Nq, 1)`; once, where a row has no keys; infinite for its."""
    lse = terms.scene.truth.intermediates.lse
    there = np.isfinite(lse)
    found: Array = np.exp(np.where(there, lse, 0.0) - np.where(there, other(lse), 0.0))[..., None]
    return found


def _dout(terms: Terms, other: Other, here: Mask) -> Gradients:
    more = other(terms.dout) - terms.dout
    found = terms.sums(("dq", "dk"), terms.factor * (more @ terms.v.swapaxes(2, 3)) * here, terms.p)
    return found | terms.sums(("dv",), terms.ds, terms.p * here, dout=more)


def _dout_and_delta(terms: Terms, other: Other, here: Mask) -> Gradients:
    """That of out, of which delta is computed with the right out."""
    more = other(terms.dout) - terms.dout
    dp = more @ terms.v.swapaxes(2, 3)
    found = terms.sums(("dq", "dk"), terms.factor * (dp - (terms.p * dp).sum(axis=-1, keepdims=True)) * here, terms.p)
    return found | terms.sums(("dv",), terms.ds, terms.p * here, dout=more)


def _dlse(terms: Terms, other: Other, here: Mask) -> Gradients:
    return terms.sums(("dq", "dk"), terms.factor * (_other_dlse(terms, other) - terms.dlse) * here, terms.p)


def _other_dlse(terms: Terms, other: Other) -> Array:
    return np.where(terms.has_keys, other(terms.given_dlse), 0.0)


def _cotangents(terms: Terms, other: Other, here: Mask) -> Gradients:
    """Those of out and lse, and delta, which is computed of them."""
    dout = other(terms.dout)
    dp = dout @ terms.v.swapaxes(2, 3)
    delta = (terms.p * dp).sum(axis=-1, keepdims=True) - _other_dlse(terms, other)
    found = terms.sums(("dq", "dk"), (terms.factor * (dp - delta) - terms.ds) * here, terms.p)
    return found | terms.sums(("dv",), terms.ds, terms.p * here, dout=dout - terms.dout)


TAKEN: dict[str, Taken] = {
    "delta": _delta,
    "delta less the cotangent of lse": _delta_less_dlse,
    "out, in delta,": _out_in_delta,
    "lse": _lse,
    "lse, and delta less its cotangent,": _lse_and_delta,
    "the cotangent of out": _dout,
    "the cotangent of out, for delta too,": _dout_and_delta,
    "the cotangent of lse": _dlse,
    "the cotangents of out and lse": _cotangents,
}
"""What is taken of other rows in the backward."""


def _first_of_document(terms: Terms) -> Ints:
    """Return as positions the first rows of each shard, as many as it has of the document of each row."""
    x, offsets = terms.pairs.queries, np.array(terms.scene.problem.documents or (0, terms.pairs.queries.total))
    found = np.arange(x.total)
    for held in x.shards:
        number = bounds(offsets, held)
        for one in np.unique(number[number >= 0]):
            rows = held[number == one]
            found[rows] = held[: len(rows)]
    return found


def _rows_of(moved: Moved, terms: Terms) -> Ints:
    return moved(terms.pairs, terms.pairs.queries)


ROWS: dict[str, Callable[[Terms], Ints]] = {
    "the first rows of a shard instead of those of a document": _first_of_document,
    **{where: functools.partial(_rows_of, moved) for where, moved in MOVED.items()},
}
"""Rows of which something may be taken: the position of one for each position."""

OF_HOLDER = "the rows at the same places on the rank that holds the keys, which computes them where queries travel"
"""Whose rows may be taken instead of those that have come."""

HEADS: dict[str, Callable[[Ints, int], Ints]] = {
    "in turn, as if query head h read key head h mod key heads": lambda h, group: (
        h % group * (len(h) // group) + h // group
    ),
    "in groups, where they lie in turn": lambda h, group: h % (len(h) // group) * group + h // (len(h) // group),
}
"""Orders in which query heads may be taken for those of the key heads: the head for each, by head and group size."""

OF_HEADS: dict[tuple[TensorName, ...], str] = {
    ("dk",): "dk is made with the queries of other heads",
    ("dv",): "dv is made with the cotangents of out of other heads",
    ("dk", "dv"): "dk and dv are made with the queries and cotangents of other heads",
}
"""What a backward may make with other query heads than it should."""

CROSSED: dict[tuple[TensorName, ...], str] = {
    ("dk",): "dk is made of the sums of ds and of queries",
    ("dv",): "dv is made of the sums of weights and of cotangents of out",
    ("dk", "dv"): "dk and dv are made of the sums of ds and of weights, and of queries and of cotangents of out",
}
"""What a backward may add up over the heads of a group before it multiplies."""

PLACES: tuple[PartOfPairs, ...] = (EVERYWHERE, *(part for part in PARTS if part.limits == "blocks"))


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the gradients of failing cases whose out and lse are right.

    Args:
        scenes: cases, those that fail first.
    """
    if not (terms := fitted(scenes)):
        return
    if any(one.scene.problem.group_size > 1 for one in terms):
        for order, of in HEADS.items():
            for names, says in OF_HEADS.items():
                change = functools.partial(_of_heads, names, of)
                if all(fits(one, change(one)) for one in terms):
                    yield measured(f"{says}: heads are taken {order}", change)
        for names, says in CROSSED.items():
            change = functools.partial(_multiplied_as_sums, names)
            if all(fits(one, change(one)) for one in terms):
                yield measured(f"{says} over the heads of a group: each head meets every other one", change)
    for where, rows in ROWS.items():
        for part in PLACES:
            told = f"{part.text}: " if part.text else ""
            for what, taken in TAKEN.items():
                change = functools.partial(_changed, taken, rows, part)
                if all(fits(one, change(one)) for one in terms):
                    yield measured(f"{told}the backward takes {what} of {where}", change)
    for part, (what, taken) in itertools.product(PLACES, TAKEN.items()):
        told = f"{part.text}: " if part.text else ""
        change = functools.partial(_on_rank_of_keys, taken, part)
        if all(fits(one, change(one)) for one in terms):
            yield measured(f"{told}the backward takes {what} of {OF_HOLDER}", change)


def _on_rank_of_keys(taken: Taken, part: PartOfPairs, terms: Terms) -> Gradients:
    """Return what changes if something is taken of the rank's rows that holds the keys, as far as it has such.

    A single row of it is taken for all.
    """
    queries, here, found = terms.pairs.queries, part.holds(terms.pairs), Gradients()
    place, own = queries.place[:, 0], np.arange(queries.total)
    for owner, held in enumerate(queries.shards):
        there = (place < len(held)) | (len(held) == 1)
        rows = np.where(there, held[np.minimum(place, len(held) - 1)], own) if len(held) else own
        for name, y in taken(terms, _of_rows(rows), here & (terms.pairs.owner == owner)).items():
            found[name] = found[name] + y if name in found else y
    return found


def _changed(taken: Taken, rows: Callable[[Terms], Ints], part: PartOfPairs, terms: Terms) -> Gradients:
    return taken(terms, _of_rows(rows(terms)), part.holds(terms.pairs))


def _of_heads(names: tuple[TensorName, ...], of: Callable[[Ints, int], Ints], terms: Terms) -> Gradients:
    heads = of(np.arange(terms.scene.problem.heads), terms.scene.problem.group_size)
    return made_with(names, terms, lambda x: x[:, heads])


def _multiplied_as_sums(names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    group = terms.scene.problem.group_size

    def summed(x: Array) -> Array:
        found: Array = x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)
        return found

    sides = {"dk": (terms.ds, terms.q), "dv": (terms.p, terms.dout)}
    found = Gradients()
    for name in names:
        weights, rows = sides[name]
        crossed = summed(weights).swapaxes(2, 3) @ summed(rows)
        found[name] = crossed.swapaxes(1, 2) - getattr(terms.scene.truth, name)
    return found


def made_with(names: tuple[TensorName, ...], terms: Terms, other: Other) -> Gradients:
    """Return what changes if dk and dv are made with the queries and cotangents of other heads or rows."""
    taken: Gradients = {
        "dk": terms.ds.swapaxes(2, 3) @ (other(terms.q) - terms.q),
        "dv": terms.p.swapaxes(2, 3) @ (other(terms.dout) - terms.dout),
    }
    return {name: per_key_head(taken[name], terms.scene.problem.group_size) for name in names}
