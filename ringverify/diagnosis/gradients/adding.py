"""Fit what is added to gradients: what some pairs add counts otherwise, its delta is another, or it goes to other rows.

After a right forward, gradients are sums over pairs of a query and a key. The sum over a part of them (`parts.PARTS`)
is computed from the right forward, and the factor that it takes to give the gradients that were seen is fitted freely.
A factor is said only if it is that of one rule in every case: 0, the number of ranks, the scale; or one number.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.attention import per_key_head, per_query_head
from ringref.rounding import LARGEST, rounding_of_wrong
from ringverify.cases.comparing import QKV_GRADIENTS
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for
from ringverify.diagnosis.masks.positions import POSITIONS, At, late
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Pairs, branch, pairs_of
from ringverify.diagnosis.parts import EVERYWHERE, PARTS, PartOfPairs
from ringverify.diagnosis.scaling import FITTED, LEFT, named, with_most_digits
from ringverify.diagnosis.scene import Array, Scene, slope_of_cap
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.merging import TILES
from ringverify.faults.ring import STEPS

Gradients = dict[TensorName, Array]


class Terms:
    """What every pair of a case adds to its gradients, after a right forward."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.pairs = scene, pairs_of(scene)
        p, x = scene.problem, scene.inputs
        inner = scene.truth.intermediates
        self.k, self.v = (per_query_head(np.where(np.isfinite(y), y, 0.0), p.group_size) for y in (x.k, x.v))
        self.q, self.dout = x.q.swapaxes(1, 2), x.dout.swapaxes(1, 2)
        self.p, self.dp = inner.probabilities, self.dout @ self.v.swapaxes(2, 3)
        slope = slope_of_cap(p, inner.raw_scores)
        self.flat = self.p * p.scale_value
        self.factor = self.flat * slope
        self.has_keys, self.given_dlse = np.isfinite(inner.lse)[..., None], x.dlse[..., None]
        self.dlse = np.where(self.has_keys, self.given_dlse, 0.0)
        self.delta = (self.p * self.dp).sum(axis=-1, keepdims=True)
        self.ds = self.factor * (self.dp - self.delta + self.dlse)

    def sums(self, names: Sequence[TensorName], ds: Array, p: Array, dout: Array | None = None) -> Gradients:
        """Return gradients of these ds and p `(B, H, Nq, Nk)`, of all positions; of another cotangent than given."""
        group, found = self.scene.problem.group_size, Gradients()
        for name in names:
            match name:
                case "dq":
                    found[name] = (ds @ self.k).swapaxes(1, 2)
                case "dk":
                    found[name] = per_key_head(ds.swapaxes(2, 3) @ self.q, group)
                case _:
                    found[name] = per_key_head(p.swapaxes(2, 3) @ (self.dout if dout is None else dout), group)
        return found

    @functools.cached_property
    def blocks(self) -> Array:
        """What the keys of each rank add to delta, `(B, H, Nq, P)`."""
        return self._of_ranks(self.p * self.dp)

    @functools.cached_property
    def shares(self) -> Array:
        """What the keys of each rank have of all weights, `(B, H, Nq, P)`."""
        return self._of_ranks(self.p)

    def _of_ranks(self, each: Array) -> Array:
        return np.stack([each[..., held].sum(axis=-1) for held in self.scene.shards[1]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Changed:
    """What changes with a factor: gradients are the right ones and (factor − 1) times `unit`."""

    text: str
    unit: Callable[[Terms, Mask], Gradients]


def _sums_over(names: Sequence[TensorName], terms: Terms, here: Mask) -> Gradients:
    return terms.sums(names, terms.ds * here, terms.p * here)


IN_DS: dict[str, Callable[[Terms], Array]] = {
    "delta": lambda t: -t.factor * t.delta,
    "delta, with the cotangent of lse,": lambda t: t.ds - t.factor * t.dp,
    "the cotangent of lse": lambda t: t.factor * t.dlse,
    "dout·v": lambda t: t.factor * t.dp,
    "the derivative of the softcap": lambda t: t.ds - t.flat * (t.dp - t.delta + t.dlse),
}
"""Parts of ds, `(B, H, Nq, Nk)`; of the derivative, what it changes."""


SLOPES: dict[str, Callable[[Array], Array]] = {
    "1 - (score / softcap)² of scores before the cap": lambda x: 1 - x**2,
    "1 - tanh² of scores that have had the cap": lambda x: np.cosh(np.tanh(x)) ** -2,
    "1 - tanh of scores, not squared": lambda x: 1 - np.tanh(x),
    "tanh² of scores": lambda x: np.tanh(x) ** 2,
    "1 + tanh² of scores": lambda x: 1 + np.tanh(x) ** 2,
}
"""What may be taken for the derivative of the softcap, 1 - tanh², of scores divided by it."""


def _with_slope(slope: Callable[[Array], Array], terms: Terms) -> Gradients:
    """Return what changes with another derivative of the softcap."""
    flat = _sloped(slope, terms)
    if flat is None:
        return {}
    return terms.sums(("dq", "dk"), (flat - terms.factor) * (terms.dp - terms.delta + terms.dlse), terms.p)


def _sizes_with_slope(slope: Callable[[Array], Array], terms: Terms) -> Gradients:
    """Return how large the terms are of which gradients are then sums: they may cancel."""
    flat = _sloped(slope, terms)
    if flat is None:
        return {}
    ds = np.abs(flat) * (np.abs(terms.dp) + np.abs(terms.delta) + np.abs(terms.dlse))
    of_keys = per_key_head(ds.swapaxes(2, 3) @ np.abs(terms.q), terms.scene.problem.group_size)
    return {"dq": (ds @ np.abs(terms.k)).swapaxes(1, 2), "dk": of_keys}


def _sloped(slope: Callable[[Array], Array], terms: Terms) -> Array | None:
    softcap, raw = terms.scene.problem.softcap, terms.scene.truth.intermediates.raw_scores
    return None if softcap is None else terms.flat * slope(np.where(np.isfinite(raw), raw, 0.0) / softcap)


def _in_ds(names: Sequence[TensorName], part: Callable[[Terms], Array], terms: Terms, here: Mask) -> Gradients:
    return terms.sums(names, part(terms) * here, terms.p)


CHANGED: tuple[Changed, ...] = (
    *(
        Changed(
            f"what is added to {' and '.join(names)}",
            functools.partial(_sums_over, names),
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


SUBSETS: dict[str, Callable[[Pairs, int], Mask]] = {
    "the block in hand": lambda pairs, block: pairs.owner == block,
    "the blocks up to the one in hand": lambda pairs, block: (pairs.rank - block) % pairs.size <= pairs.hop,
    "the blocks from the one in hand on": lambda pairs, block: (pairs.rank - block) % pairs.size >= pairs.hop,
    "the rank's own block": lambda pairs, block: pairs.rank == block,
    "all blocks but the one in hand": lambda pairs, block: pairs.owner != block,
    "all blocks but that of the last hop": lambda pairs, block: (pairs.rank - block) % pairs.size < pairs.size - 1,
    "the block of the last hop": lambda pairs, block: (pairs.rank - block) % pairs.size == pairs.size - 1,
}
"""Blocks of which the backward may take out or lse instead of all, by block."""

TAKEN: dict[str, tuple[bool, bool]] = {
    "delta takes the part of out that comes from {} instead of the whole out": (True, False),
    "the backward uses the lse of {} instead of all": (False, True),
    "the backward uses out and lse of {} instead of all": (True, True),
}
"""What it takes of them, as a sentence; whether that is out, and whether it is lse."""


def _by_block(terms: Terms) -> list[Array]:
    return [np.where(terms.pairs.owner == block, terms.p, 0.0) for block in range(terms.pairs.size)]


def by_branch(terms: Terms) -> list[Array]:
    """Return the parts of all weights that are of one branch of a shared dilation each."""
    pairs, dilation = terms.pairs, terms.scene.problem.dilation
    if dilation is None or dilation.heads == "split":
        return [terms.p]
    plain, once = (pairs.queries.p, pairs.keys.p), terms.p / np.maximum(pairs.true, 1)
    return [once * branch(pairs, number, *plain) for number in range(len(dilation.branches))]


DETACHED: dict[str, Callable[[Terms], list[Array]]] = {
    "blocks": _by_block,
    "branches of a dilation": by_branch,
}
"""Parts of all weights `(B, H, Nq, Nk)` that may be merged with weights that have no gradient."""

NORMALISERS: dict[str, Callable[[Terms], Array | None]] = {
    "the largest score of a row": lambda terms: _largest(terms, terms.scene.truth.intermediates.scores),
    "the lse of the keys without the sink": lambda terms: _without_sink(terms),
    "the lse of the scores before the softcap": lambda terms: _before_softcap(terms),
    "the log of the number of keys": lambda terms: np.log(np.maximum(terms.pairs.true.sum(axis=-1), 1)),
}
"""What the backward may subtract from scores instead of lse, `(B, H, Nq)`; `None` where it is the same."""


def _largest(terms: Terms, scores: Array) -> Array:
    found: Array = np.max(scores, axis=-1, where=terms.pairs.true > 0, initial=-np.inf)
    return found


def _without_sink(terms: Terms) -> Array | None:
    inner = terms.scene.truth.intermediates
    if inner.sink_weights is None:
        return None
    with np.errstate(divide="ignore"):
        found: Array = inner.lse + np.log1p(-inner.sink_weights)
    return found


def _before_softcap(terms: Terms) -> Array | None:
    if terms.scene.problem.softcap is None:
        return None
    inner = terms.scene.truth.intermediates
    top = _largest(terms, inner.raw_scores)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        found: Array = safe + np.log((terms.pairs.true * np.exp(inner.raw_scores - safe[..., None])).sum(axis=-1))
    return found


Writers = Callable[[Pairs], tuple[Ints, Sequence[Ints]]]
"""Who adds to gradients one after the other: numbers of the writers, by pair, and the blocks in which each writes."""


def _tiles_of(tile: int, pairs: Pairs) -> tuple[Ints, Sequence[Ints]]:
    return pairs.queries.p // tile, [np.arange(pairs.keys.total)]


WRITERS: dict[str, Writers] = {
    **{
        f"of each tile of {tile} queries, cut from position 0 on, are written over those of the tile before": (
            functools.partial(_tiles_of, tile)
        )
        for tile in TILES
    },
    "that come from each rank, one rank after the other, are written over those that were there": lambda pairs: (
        np.where(pairs.hop == 0, 0, 1 + pairs.rank), pairs.keys.shards
    ),
    "of each hop are written over those of the hop before": lambda pairs: (pairs.hop, pairs.keys.shards),
}  # fmt: skip
"""Who may write over what others have added."""

WRITTEN: tuple[tuple[TensorName, ...], ...] = (("dk", "dv"), ("dk",), ("dv",))
"""Gradients that may be written over, together."""

Moved = Callable[[Pairs, OneSide], Ints]
"""The position to whose row goes what belongs to the row of each position."""


def _moved(place: Callable[[Ints, Ints, Ints], Ints]) -> Moved:
    def target(pairs: Pairs, x: OneSide) -> Ints:
        early = ~late(x, pairs).ravel()
        count = np.array([early[held].sum() for held in x.shards])[x.rank]
        found: Ints = x.of[x.rank, place(x.place, x.count, count) % np.maximum(x.count, 1)].ravel()
        return found

    return target


def _by_order(order: Callable[[Ints], Ints]) -> Moved:
    """Return as positions what the order of the rows in the shards, one after the other, makes of positions."""
    return lambda pairs, x: order(np.concatenate(x.shards))


MOVED: dict[str, Moved] = {
    "the rows that the order of the shards gives, where they are in the order of positions": _by_order(lambda o: o),
    "the rows that the inverse order of the shards gives, where they are in the order of positions": _by_order(
        np.argsort
    ),
    "the rows that the order of the shards gives where its inverse is needed": _by_order(lambda o: o[o]),
    "the rows that the inverse order of the shards gives where the order itself is needed": _by_order(
        lambda o: np.argsort(o)[np.argsort(o)]
    ),
    "the rows of the other piece": _moved(
        lambda place, count, early: np.where(place < early, place + count - early, place - early)
    ),
    "the rows in reverse": _moved(lambda place, count, early: count - 1 - place),
    "the next row": _moved(lambda place, count, early: place + 1),
    "the row before": _moved(lambda place, count, early: place - 1),
}
"""Rows in which what belongs to a row may be instead."""


RETURNED: tuple[tuple[TensorName, ...], ...] = (("out",), ("dq",), ("dk", "dv"), ("dk",), ("dv",))
"""Results whose rows may be taken from the whole sequence at other positions, together."""

SLICES = {text: at for text, at in POSITIONS.items() if text.startswith(("counted", "of ")) and "tile" not in text}
"""Positions at which rows of results may be taken."""


def _in_order_of_shards(of: Callable[[Pairs, OneSide], Ints]) -> At:
    """Return the positions of rows of the whole in the order of the shards, beginning with one for each rank."""

    def at(pairs: Pairs, x: OneSide) -> Ints:
        order = np.concatenate(x.shards)
        row = of(pairs, x) + x.place
        inside = (row >= 0) & (row < len(order))
        return np.where(inside, order[np.clip(row, 0, max(0, len(order) - 1))], x.total) if len(order) else row

    return at


SLICES |= {
    f"of rows from the rank times {what} on, in the order of the shards": _in_order_of_shards(of)
    for what, of in {
        "the rank's own number of rows": lambda pairs, x: x.rank * x.count,
        "rows // ranks": lambda pairs, x: x.rank * (x.total // pairs.size),
        "the longest shard": lambda pairs, x: x.rank * max(map(len, x.shards)),
        "the first rank's number of rows": lambda pairs, x: x.rank * len(x.shards[0]),
    }.items()
}


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the gradients of cases whose out and lse are right, and rows that are in the wrong place.

    Args:
        scenes: cases, those that fail first.
    """
    for where, target in MOVED.items():
        for name in ("out", "dq"):
            yield measured(f"rows of {name} are returned as {where}", functools.partial(_returned, name, target))
    for names in RETURNED:
        for text, at in SLICES.items():
            says = f"the rows of {' and '.join(names)} that are returned are those at positions {text}"
            for cleared in (False, True):
                yield measured(says, functools.partial(_of_positions, names, at, cleared))
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
        for where, target in MOVED.items():
            for names in (("dv",), ("dk",), ("dk", "dv"), ("dq",)):
                change = functools.partial(_added_elsewhere, names, part, target)
                if all(fits(one, change(one)) for one in terms):
                    yield measured(f"{told}what is added to {' and '.join(names)} is added to {where}", change)
    for text, blocks in SUBSETS.items():
        for says, (out, lse) in TAKEN.items():
            change = functools.partial(_with_part, blocks, out, lse)
            if all(fits(one, change(one)) for one in terms):
                yield measured(says.format(text), change)
    for text, slope in SLOPES.items():
        change = functools.partial(_with_slope, slope)
        if all(one.scene.problem.softcap is not None and fits(one, change(one)) for one in terms):
            sizes = functools.partial(_sizes_with_slope, slope)
            yield measured(f"the derivative of the softcap is taken to be {text}", change, sizes)
    for text, normaliser in NORMALISERS.items():
        change = functools.partial(_with_normaliser, normaliser)
        if all(fits(one, change(one)) for one in terms):
            yield measured(f"the backward takes {text} for lse: its weights do not add up to 1", change)
    change = functools.partial(_with_own_weights, by_branch)
    if all(fits(one, change(one)) for one in terms):
        yield measured(
            "the backward takes the weights of each branch of a dilation from its own lse, not the merged one", change
        )
    for (says, order), names in itertools.product(WRITERS.items(), WRITTEN):
        change = functools.partial(_written_over, order, names)
        if all(fits(one, change(one)) for one in terms):
            yield measured(f"the {' and '.join(names)} {says}", change)
    for text, weighed in DETACHED.items():
        change = functools.partial(_with_detached, weighed)
        if all(fits(one, change(one)) for one in terms):
            yield measured(f"the weights with which {text} are merged have no gradient: they are detached", change)


def fitted(scenes: Sequence[Scene], most: int = FITTED) -> list[Terms]:
    """Return the terms of the largest cases of which only gradients are wrong, for a first fit; `[]` without any."""
    failing = [scene for scene in scenes if (names := wrong_tensors(scene)) and not {"out", "lse"} & set(names)]
    if not failing or "dq" not in failing[0].tensors:
        return []
    failing = [one for one in failing if all(np.isfinite(_seen(one, name)).all() for name in QKV_GRADIENTS)]
    return [terms_of(one) for one in with_most_digits(failing)[:most]] if failing else []


def terms_of(scene: Scene) -> Terms:
    """Return the terms of a case, which are made once."""
    return scene.once("terms", lambda: Terms(scene))


def _seen(scene: Scene, name: TensorName) -> Array:
    """Return a gradient as it was seen, of all positions."""
    found: Array = np.zeros_like(getattr(scene.truth, name))
    for rank in range(scene.size):
        found[:, scene.shards[name != "dq"][rank]] = scene.seen(name, rank)
    return found


def off(terms: Terms) -> Gradients:
    """Return what was seen of gradients less what is right."""
    scene = terms.scene
    return scene.once("off", lambda: {name: _seen(scene, name) - getattr(scene.truth, name) for name in QKV_GRADIENTS})


def _size(x: Gradients) -> float:
    return float(sum((y**2).sum() for y in x.values()))


def fits(terms: Terms, change: Gradients) -> bool:
    """Return whether a change of gradients is that which was seen, nearly."""
    wrong = off(terms)
    left = {name: y - change[name] if name in change else y for name, y in wrong.items()}
    return _size(left) <= LEFT**2 * _size(wrong)


def _factor(terms: Terms, changed: Changed, part: PartOfPairs) -> float | None:
    """Return the factor with which a change fits what was seen; `None` if it does not, with any factor."""
    unit, wrong = changed.unit(terms, part.holds(terms.pairs)), off(terms)
    if not (size := _size(unit)):
        return None
    times = float(sum((y * wrong[name]).sum() for name, y in unit.items())) / size
    return 1 + times if fits(terms, {name: times * y for name, y in unit.items()}) else None


def _multiplied(changed: Changed, part: PartOfPairs, factor: Callable[[Scene], float], terms: Terms) -> Gradients:
    times = factor(terms.scene) - 1
    return {name: times * y for name, y in changed.unit(terms, part.holds(terms.pairs)).items()}


def _added_elsewhere(names: tuple[TensorName, ...], part: PartOfPairs, target: Moved, terms: Terms) -> Gradients:
    at = target(terms.pairs, terms.pairs.queries if names == ("dq",) else terms.pairs.keys)
    return {name: _to(at, x) for name, x in _sums_over(names, terms, part.holds(terms.pairs)).items()}


def _of_positions(names: tuple[TensorName, ...], at: At, cleared: bool, terms: Terms) -> Gradients:
    """Return what changes if each row is that of another position; of none past the end, nor in padding if cleared."""
    found, gone = Gradients(), terms.pairs.padding[:, 0, 0, :, None, None]
    for name in names:
        x = terms.pairs.queries if name in ("out", "dq") else terms.pairs.keys
        rows, y = at(terms.pairs, x).ravel(), getattr(terms.scene.truth, name)
        inside = ((rows >= 0) & (rows < x.total))[:, None, None]
        inside = inside & ~gone if cleared and x is terms.pairs.keys else inside
        found[name] = np.where(inside, y[:, rows % max(1, x.total)], 0.0) - y if x.total else 0 * y
    return found


def _returned(name: TensorName, target: Moved, terms: Terms) -> Gradients:
    return {name: _to(target(terms.pairs, terms.pairs.queries), getattr(terms.scene.truth, name))}


def _to(rows: Ints, x: Array) -> Array:
    """Return what changes if every row of a result goes to one of these rows, each of which is taken once."""
    found = -x
    found[:, rows] += x
    return found


def _with_part(blocks: Callable[[Pairs, int], Mask], out: bool, lse: bool, terms: Terms) -> Gradients:
    """Return what changes if delta, and the log-sum-exp in the weights, are those of some blocks; of none, of all."""
    pairs, every = terms.pairs, range(terms.pairs.size)
    share, part = (sum(x[..., [block]] * blocks(pairs, block) for block in every) for x in (terms.shares, terms.blocks))
    times = np.where(share > 0, 1 / np.where(share > 0, share, 1.0), 1.0) if lse else np.ones_like(share)
    return _with_weights(times, part * times if out else terms.delta, terms)


def _with_weights(times: Array, delta: Array, terms: Terms) -> Gradients:
    """Return what changes with another delta, and weights that are so many times as large."""
    ds = terms.factor * (times * (terms.dp - delta + terms.dlse) - (terms.dp - terms.delta + terms.dlse))
    return terms.sums(QKV_GRADIENTS, ds, terms.p * (times - 1))


def _with_normaliser(normaliser: Callable[[Terms], Array | None], terms: Terms) -> Gradients:
    """Return what changes if scores are taken less something else than lse."""
    lse, other = terms.scene.truth.intermediates.lse, normaliser(terms)
    if other is None:
        return Gradients()
    there = np.isfinite(lse) & np.isfinite(other)
    times = np.exp(np.where(there, lse, 0.0) - np.where(there, other, 0.0))[..., None]
    return _with_weights(times, terms.delta, terms)


def _with_detached(parts: Callable[[Terms], list[Array]], terms: Terms) -> Gradients:
    """Return what changes if each part has a softmax of its own, and the part's share of all weights is a constant."""
    ds, whole = np.zeros_like(terms.p), np.where(terms.p == 0, 1.0, terms.p)
    for part in parts(terms):
        share, own = (x.sum(axis=-1, keepdims=True) for x in (part, part * terms.dp))
        ds += terms.factor * part / whole * (terms.delta - own / np.where(share == 0, 1.0, share))
    return terms.sums(("dq", "dk"), ds, terms.p)


def _with_own_weights(parts: Callable[[Terms], list[Array]], terms: Terms) -> Gradients:
    """Return what changes if the weights of each part add up to 1, as those of its own softmax do."""
    own = np.zeros_like(terms.p)
    for part in parts(terms):
        share = part.sum(axis=-1, keepdims=True)
        own += part / np.where(share == 0, 1.0, share)
    return _with_weights(own / np.where(terms.p == 0, 1.0, terms.p), terms.delta, terms)


def _written_over(order: Writers, names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if a key has what the last writer adds that reads it, from its first key to its last."""
    pairs = terms.pairs

    def read() -> Mask:
        plain = pairs.queries.p, pairs.keys.p
        found: Mask = np.any(pairs.counts(lambda name: None if name == "key_lengths" else plain), axis=(0, 1))
        return found

    seen = terms.scene.once("read whatever the key_lengths", read)
    number, blocks = order(pairs)
    number, last = np.broadcast_to(number, seen.shape), np.full(seen.shape[1], -1)
    for block in blocks:
        for one in np.unique(number[:, block]):
            read_here = np.flatnonzero((seen & (number == one))[:, block].any(axis=0))
            if len(read_here):
                last[block[read_here[0] : read_here[-1] + 1]] = one
    gone = number != last
    return {name: -y for name, y in terms.sums(names, terms.ds * gone, terms.p * gone).items()}


def _spoilt(scene: Scene, whole: Gradients) -> bool:
    """Whether a factor of results overflows: what becomes of sums with an infinite weight, their order decides."""
    large = any((np.abs(x) > LARGEST[scene.dtype_of(name)] ** 0.5).any() for name, x in whole.items())
    return large and not all(np.isfinite(_seen(scene, name)).all() for name in QKV_GRADIENTS)


def measured(
    text: str, change: Callable[[Terms], Gradients], sizes: Callable[[Terms], Gradients] = lambda terms: {}
) -> Hypothesis:
    """Return the hypothesis that a case's results are the right ones and this change.

    Args:
        text: what is wrong.
        change: returns what changes.
        sizes: how large the terms are of which those results are then sums, if they are larger than the change.
    """

    def judge(scene: Scene) -> float | None:
        changes = change(terms_of(scene))
        if not set(changes) <= set(scene.tensors):
            return None if wrong_tensors(scene) else 0.0
        whole = {name: getattr(scene.truth, name) + y for name, y in changes.items()}
        if _spoilt(scene, whole):
            return 0.0
        # A row takes its rounding errors to where it is moved. What is wrong has errors of its own, and a weight the
        # relative error of its score, as many times as that is large.
        scores = scene.truth.intermediates.scores
        large = 1 + np.abs(scores).max(where=np.isfinite(scores), initial=0.0)
        terms = sizes(terms_of(scene))
        wide = {
            name: getattr(scene.allowed, name).max(initial=0.0)
            + rounding_of_wrong(large * np.maximum(np.abs(y), terms.get(name, 0.0)), scene.pipeline)
            for name, y in changes.items()
        }
        return agree_but_for(scene, whole, lambda: dataclasses.replace(scene.allowed, **wide))

    return Hypothesis(text, STEPS, judge=judge, measured=True)
