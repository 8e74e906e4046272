"""A backward whose weights, delta or derivative of the softcap are others than those of the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.attention import per_key_head
from ringverify.cases.comparing import QKV_GRADIENTS
from ringverify.diagnosis.gradients.terms import Gradients, Terms, fits, fitted, measured
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Mask, Pairs, branch
from ringverify.diagnosis.scene import Array, Scene, slope_of_cap

Change = Callable[[Terms], Gradients]
"""Gradients of a case, by its terms."""

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


def _by_block_and_branch(terms: Terms) -> list[Array]:
    return [
        np.where(terms.pairs.owner == block, part, 0.0)
        for part in by_branch(terms)
        for block in range(terms.pairs.size)
    ]


DETACHED: dict[str, Callable[[Terms], list[Array]]] = {
    "blocks": _by_block,
    "branches of a dilation": by_branch,
    "blocks, and branches of a dilation in each,": _by_block_and_branch,
}
"""Parts of all weights `(B, H, Nq, Nk)` that may be merged with weights that have no gradient."""

MAXIMA: dict[str, Callable[[Terms], list[Array]]] = {
    "a block": _by_block,
    "a row": lambda terms: [terms.p],
}
"""Parts of all weights `(B, H, Nq, Nk)` of which the largest score may be subtracted."""

OF_LARGEST = {
    "the maximum of {} is detached in its log-sum-exp and not in its weights: the largest score lacks the gradient of "
    "that log-sum-exp": -1.0,
    "the maximum of {} is detached in its weights and not in its log-sum-exp: the largest score has the gradient of "
    "that log-sum-exp twice": 1.0,
}
"""How often the largest score may have the gradient of lse beside its weight's part of it, in words."""

AFTER: dict[str, Callable[[Terms], Array]] = {
    "the multiplication by the scale": lambda terms: terms.factor / terms.scene.problem.scale_value,
    "the derivative of the softcap": lambda terms: terms.flat,
    "the derivative of the softcap and the scale": lambda terms: terms.p,
}
"""What the cotangent of lse is then multiplied by, `(B, H, Nq, Nk)`, by what comes before it."""

NORMALISERS: dict[str, Callable[[Terms], Array | None]] = {
    "the largest score of a row": lambda terms: _largest(terms, terms.scene.truth.intermediates.scores),
    "the lse of the keys without the sink": lambda terms: _without_sink(terms),
    "the lse of the scores before the softcap": lambda terms: _before_softcap(terms),
    "the log of the number of keys": lambda terms: np.log(np.maximum(terms.pairs.true.sum(axis=-1), 1)),
}
"""What the backward may subtract from scores instead of lse, `(B, H, Nq)`; `None` where it is the same."""


def _largest(terms: Terms, scores: Array) -> Array:
    return _largest_of(scores, terms.pairs.true > 0)


def _largest_of(scores: Array, there: Mask) -> Array:
    found: Array = np.max(scores, axis=-1, where=there, initial=-np.inf)
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


def _with_cotangent_added(weight: Callable[[Terms], Array], terms: Terms) -> Gradients:
    """Return what changes if the cotangent of lse has another factor in the gradient of the scores."""
    return terms.sums(("dq", "dk"), (weight(terms) - terms.factor) * terms.dlse, terms.p)


def _with_detached(parts: Callable[[Terms], list[Array]], terms: Terms) -> Gradients:
    """Return what changes if each part has a softmax of its own, and the part's share of all weights is a constant."""
    ds, whole = np.zeros_like(terms.p), np.where(terms.p == 0, 1.0, terms.p)
    for part in parts(terms):
        share, own = (x.sum(axis=-1, keepdims=True) for x in (part, part * terms.dp))
        ds += terms.factor * part / whole * (terms.delta - own / np.where(share == 0, 1.0, share))
    return terms.sums(("dq", "dk"), ds, terms.p)


def _with_part_of_largest(parts: Callable[[Terms], list[Array]], times: float, terms: Terms) -> Gradients:
    """Return what changes if the largest score of each part has so many times the gradient of the part's lse too.

    That is what all scores of the part have together. Of equal scores, each has its share of it, as `amax` deals it
    out.
    """
    inner, g = terms.scene.truth.intermediates, terms.p * (terms.dp - terms.delta + terms.dlse)
    slope = terms.scene.problem.scale_value * slope_of_cap(terms.scene.problem, inner.raw_scores)
    ds, whole = np.zeros_like(terms.p), np.where(terms.p == 0, 1.0, terms.p)
    for part in parts(terms):
        there: Mask = (part > 0) & (inner.m > 0)
        top: Mask = there & (inner.scores == _largest_of(inner.scores, there)[..., None])
        of_lse = (g * part / whole).sum(axis=-1, keepdims=True)
        ds += times * slope * of_lse * top / np.maximum(top.sum(axis=-1, keepdims=True), 1)
    return terms.sums(("dq", "dk"), ds, terms.p)


def _with_own_weights(parts: Callable[[Terms], list[Array]], terms: Terms) -> Gradients:
    """Return what changes if the weights of each part add up to 1, as those of its own softmax do."""
    own = np.zeros_like(terms.p)
    for part in parts(terms):
        share = part.sum(axis=-1, keepdims=True)
        own += part / np.where(share == 0, 1.0, share)
    return _with_weights(own / np.where(terms.p == 0, 1.0, terms.p), terms.delta, terms)


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the gradients of cases whose out and lse are right.

    Args:
        scenes: cases, those that fail first.
    """
    if terms := fitted(scenes):
        for text, change, sizes in _changes():
            if all(fits(one, change(one)) for one in terms):
                yield measured(text, change, sizes)


def _changes() -> Iterator[tuple[str, Change, Change]]:
    """Yield what may be another, in words, what changes then, and how large terms of sums are, if that grows."""
    for text, blocks in SUBSETS.items():
        for says, (out, lse) in TAKEN.items():
            yield says.format(text), functools.partial(_with_part, blocks, out, lse), _no_larger
    for text, slope in SLOPES.items():
        sizes = functools.partial(_sizes_with_slope, slope)
        yield f"the derivative of the softcap is taken to be {text}", functools.partial(_with_slope, slope), sizes
    for text, normaliser in NORMALISERS.items():
        says = f"the backward takes {text} for lse: its weights do not add up to 1"
        yield says, functools.partial(_with_normaliser, normaliser), _no_larger
    says = "the backward takes the weights of each branch of a dilation from its own lse, not the merged one"
    yield says, functools.partial(_with_own_weights, by_branch), _no_larger
    for text, weighed in DETACHED.items():
        says = f"the weights with which {text} are merged have no gradient: they are detached"
        yield says, functools.partial(_with_detached, weighed), _no_larger
    for text, weight in AFTER.items():
        says = f"the cotangent of lse is added to the gradient of the scores after {text} instead of before"
        yield says, functools.partial(_with_cotangent_added, weight), _no_larger
    for text, parts in MAXIMA.items():
        for what, times in OF_LARGEST.items():
            yield what.format(text), functools.partial(_with_part_of_largest, parts, times), _no_larger


def _no_larger(terms: Terms) -> Gradients:
    return {}
