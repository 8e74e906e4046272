"""Conditions about the scores of a case: how large they are, and whether a query's largest one grows at a later hop."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from ringref.attention import per_query_head
from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs
from ringverify.diagnosis.when.conditions import MASKS, Condition, Feature, Features, Placed, features
from ringverify.implementation import Capabilities

SCORED = ("lowest", "highest", "spread", "hidden_above", "growth", "rising", "unlike", "capped")
"""Names of the features of scores."""

FAR_OFF = {
    "lowest": "a query whose scores are all far below 0",
    "highest": "a score far above 0",
    "spread": "a query with scores that lie far apart",
    "hidden_above": "a query from which a mask hides a key with a score far above its others",
    "growth": "a query whose running maximum grows far at a later hop",
}
"""Conditions on the size of scores in words, where their limit is not known."""

FAR = 10.0
"""Scores as far from 0 as this may underflow, or overflow, when they are taken to the exponential."""


@functools.lru_cache(maxsize=1024)
def of_scores(case: Case, capabilities: Capabilities) -> Features:
    """Return what conditions look at in the attended scores of a case.

    That is the lowest and the highest of what is each query's largest score, how far scores of one query lie apart,
    and how far one that a mask hides from it lies above them; and whether, and how far, that of some
    query, known from an earlier hop, grows at a later one: a rank's own block is followed by those of rank − 1,
    rank − 2 and so on. And the largest score before a softcap, divided by that.
    """
    p, x, placed = case.problem, make_inputs(case), Placed.of(case, capabilities)
    products = x.q.swapaxes(1, 2) @ per_query_head(x.k, p.group_size).swapaxes(2, 3)
    scores = np.nan_to_num(products) * p.scale_value
    found: dict[str, Feature] = {"growth": 0.0, "unlike": False}
    if p.softcap is not None:
        found["capped"] = float(np.abs(scores / p.softcap).max(initial=0.0, where=placed.pairs))
        scores = p.softcap * np.tanh(scores / p.softcap)
    hidden = np.where(placed.pairs, -np.inf, scores).max(axis=-1, initial=-np.inf)
    scores = np.where(placed.pairs, scores, -np.inf)
    tops = scores.max(axis=-1, initial=-np.inf)
    if (some := tops[np.isfinite(tops)]).size:
        found |= {"lowest": float(some.min()), "highest": float(some.max())}
        least = np.where(placed.pairs, scores, np.inf).min(axis=-1, initial=np.inf)
        found["hidden_above"] = float((hidden[np.isfinite(tops)] - some).max(initial=-np.inf))
        found["spread"] = float((some - least[np.isfinite(tops)]).max())
    blocks = np.stack([scores[..., held].max(axis=-1, initial=-np.inf) for held in placed.keys], axis=-1)
    for rank, held in enumerate(placed.queries):
        by_hop = blocks[:, :, held][..., (rank - np.arange(case.world_size)) % case.world_size]
        before = np.maximum.accumulate(by_hop, axis=-1)[..., :-1]
        known = np.isfinite(before) & np.isfinite(by_hop[..., 1:])
        grown = np.subtract(by_hop[..., 1:], before, where=known, out=np.zeros_like(before)).max(initial=0.0)
        found["growth"] = max(float(found["growth"]), float(grown))
    found["rising"] = float(found["growth"]) > 0
    there = np.isfinite(blocks)
    most, least = blocks.max(axis=-1, initial=-np.inf), np.where(there, blocks, np.inf).min(axis=-1, initial=np.inf)
    found["unlike"] = bool((least < most).any())
    return found


def scored(condition: Condition) -> bool:
    """Return whether a condition is about scores."""
    return condition.about[0] in SCORED


def meets(condition: Condition, case: Case, capabilities: Capabilities) -> bool:
    """Return whether a case meets a condition, be it about scores or not."""
    return condition.meets((of_scores if scored(condition) else features)(case, capabilities))


def conditions_on_scores(seen: Iterable[Features]) -> Iterator[Condition]:
    """Yield the statements about scores that the cases at hand can tell apart."""
    text = "a query whose running maximum grows at a later hop"
    yield Condition(text, frozenset({"values", "length", "ranks"}), 1.45, ("rising",), lambda one: bool(one["rising"]))
    text = "a query whose largest scores in the blocks of two ranks differ"
    yield Condition(text, frozenset({"values", "length", "ranks"}), 1.4, ("unlike",), lambda one: bool(one["unlike"]))
    cases, about = list(seen), frozenset({"values"})
    for lowest in {float(one["lowest"]) for one in cases if float(one.get("lowest", 0)) <= -FAR}:
        text = f"a query whose scores are all below about −{_about(-lowest)}"
        cost = 1.1 - lowest * 1e-9
        yield Condition(text, about, cost, ("lowest",), lambda one, n=lowest: float(one.get("lowest", 0)) <= n)  # type: ignore[misc]
    for highest in {float(one["highest"]) for one in cases if float(one.get("highest", 0)) >= FAR}:
        text = f"a score above about {_about(highest)}"
        cost = 1.15 + highest * 1e-9
        yield Condition(text, about, cost, ("highest",), functools.partial(_at_least, "highest", highest))

    for spread in {float(one["spread"]) for one in cases if float(one.get("spread", 0)) >= FAR}:
        text = f"a query with scores that lie more than about {_about(spread)} apart"
        cost = 1.2 + spread * 1e-9
        yield Condition(text, about, cost, ("spread",), functools.partial(_at_least, "spread", spread))

    for above in {float(one["hidden_above"]) for one in cases if float(one.get("hidden_above", 0)) >= FAR}:
        text = f"a query from which a mask hides a key whose score is more than about {_about(above)} above its others"
        cost = 1.14 + above * 1e-9
        meets = functools.partial(_at_least, "hidden_above", above)
        yield Condition(text, frozenset({"values", *MASKS}), cost, ("hidden_above",), meets)

    for growth in {float(one["growth"]) for one in cases if float(one["growth"]) >= FAR}:
        text = f"a query whose running maximum grows by more than about {_about(growth)} at a later hop"
        cost = 1.6 + growth * 1e-9
        yield Condition(text, about | {"ranks"}, cost, ("growth",), functools.partial(_at_least, "growth", growth))

    for ratio in {float(one["capped"]) for one in cases if float(one.get("capped", 0)) > 0}:
        text, cost = "scores that are not small beside the softcap", 1.15 + ratio * 1e-9
        yield Condition(text, about | {"softcap"}, cost, ("capped",), functools.partial(_at_least, "capped", ratio))


def _at_least(name: str, limit: float, one: Features) -> bool:
    return float(one.get(name, 0)) >= limit


def _about(size: float) -> str:
    """Return a size of at least 10, rounded down to two digits."""
    unit = 10 ** (math.floor(math.log10(size)) - 1)
    return str(math.floor(size / unit) * unit)
