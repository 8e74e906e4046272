"""Why NaN in keys and values that no query attends reaches the results, where all is right without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringverify.cases.case import POISONED, Case
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.running import Observation
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, pairs_of
from ringverify.diagnosis.reading import finite
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import Probe, wrong_tensors
from ringverify.implementation import Capabilities

PRODUCT = "{what} that no query attends are multiplied by a weight of 0, not left out: 0 times NaN is NaN"
"""A product with what should not count; the values in out and dq, the keys in dq."""

REPLACED = (
    "{what} that no query attends are left out by arithmetic (times 0, plus -inf), not replaced: NaN in them stays NaN"
)
"""Keys whose scores are changed, or that are multiplied by 0 themselves, and perhaps values."""

OTHERWISE = "{what} past key_lengths are replaced {rule}, and the others stay: {product}"

LARGER = 3
"""Other cases in which each key is looked at alone, at most."""

MOST = 16
"""Keys that are looked at alone in a case, at most."""

Replaced = Callable[[OneSide, Sequence[int], int], Ints | Mask]
"""Which keys are replaced: by the keys, key_lengths and a batch entry."""


def _in_order_of_shards(x: OneSide) -> Ints:
    found = np.empty(x.total, dtype=np.int64)
    found[np.concatenate(x.shards)] = np.arange(x.total)
    return found


REPLACED_BY: dict[str, Replaced] = {
    "by the row in the shard instead of the position": lambda x, lengths, entry: x.place >= lengths[entry],
    "by the row in the order of the shards instead of the position": (
        lambda x, lengths, entry: _in_order_of_shards(x) >= lengths[entry]
    ),
    "as if the length of the first batch entry were that of all": lambda x, lengths, entry: x.p >= lengths[0],
    "as if the longest of key_lengths were that of all": lambda x, lengths, entry: x.p >= max(lengths),
    "as if each batch entry had the length of the next": lambda x, lengths, entry: (
        x.p >= lengths[(entry + 1) % len(lengths)]
    ),
    "in whole shards only": lambda x, lengths, entry: x.of[x.rank, 0] >= lengths[entry],
    "from the second position past them on": lambda x, lengths, entry: x.p > lengths[entry],
}
"""What may be replaced in the place of all that lies past key_lengths."""


@dataclasses.dataclass(frozen=True)
class _Poisoned:
    """What NaN in one key or value alone does.

    Attributes:
        scene: the case.
        entry: the batch entry.
        key: the position.
        reaches: whether it reaches results.
    """

    scene: Scene
    entry: int
    key: int
    reaches: bool


def of_poison(case: Case, capabilities: Capabilities, probe: Probe, larger: Sequence[Case] = ()) -> str | None:
    """Return how NaN gets from keys and values that no query attends to results; `None` if that is not what is wrong.

    Args:
        case: a case that fails.
        capabilities: what the implementation declares.
        probe: runs it on a case with other inputs than its own.
        larger: other cases that fail.
    """
    if case.values not in POISONED:
        return None
    given = make_inputs(case)
    plain = finite(given)

    def wrong(one: Case, inputs: Inputs) -> set[str] | None:
        seen = probe(one, inputs)
        return None if seen.failure is not None else set(wrong_tensors(Scene(one, capabilities, seen)))

    if wrong(case, plain) != set():
        return None
    by_keys = wrong(case, dataclasses.replace(plain, k=given.k))
    by_values = wrong(case, dataclasses.replace(plain, v=given.v))
    if by_keys is None or by_values is None or not by_keys | by_values:
        return None
    what = " and ".join(n for n, one in (("keys", by_keys), ("values", by_values)) if one)
    product = (REPLACED if {"out", "lse"} & by_keys else PRODUCT).format(what=what)

    def alone() -> Iterator[_Poisoned]:
        for one in (case, *_with_little(larger)):
            x = make_inputs(one)
            name, of = ("v", x.v) if by_values else ("k", x.k)
            scene = Scene(one, capabilities, Observation((), None))
            for entry, key in np.argwhere(~np.isfinite(of).all(axis=(2, 3)))[:MOST]:
                only = finite(x)
                getattr(only, name)[entry, key] = of[entry, key]
                if (found := wrong(one, only)) is not None:
                    yield _Poisoned(scene, int(entry), int(key), bool(found))

    if case.problem.key_lengths is None:
        return product
    seen = list(alone())
    return OTHERWISE.format(what=what, rule=rule, product=product) if (rule := _replaced_by(seen)) else product


def _with_little(cases: Sequence[Case]) -> list[Case]:
    """Return cases with short key_lengths, other ones in each batch entry: much is padding then, on every rank."""
    found = dict[Case, None]()
    for one in cases:
        p = one.problem
        if one.values in POISONED and p.key_lengths and p.nk > 1 and not one.chunks:
            lengths = tuple(min(1 + entry, p.nk - 1) for entry in range(p.batch))
            found[one.replace(key_lengths=lengths)] = None
    few = [one for one in found if one.problem.batch * one.problem.nk <= MOST]
    return sorted(few, key=lambda one: one.problem.batch * one.problem.nk)[-LARGER:]


def _replaced_by(seen: Sequence[_Poisoned]) -> str | None:
    """Return what is replaced, if some keys past key_lengths are and others are not; `None` if no rule says which."""
    past = [one for one in seen if one.key >= (one.scene.problem.key_lengths or ())[one.entry]]
    if all(one.reaches for one in past) or all(one.reaches == _computed(one) for one in past):
        return None
    return next(
        (text for text, rule in REPLACED_BY.items() if all(_left(one, rule) == one.reaches for one in past)), None
    )


def _left(one: _Poisoned, rule: Replaced) -> bool:
    """Whether a key stays as it is by a rule."""
    replaced = rule(pairs_of(one.scene).keys, one.scene.problem.key_lengths or (), one.entry)
    return not np.ravel(replaced)[one.key]


def _computed(one: _Poisoned) -> bool:
    """Whether a key lies in a block of which some query attends something, so that a ring may compute it."""
    pairs = pairs_of(one.scene)
    here = np.broadcast_to(pairs.owner == pairs.keys.rank[0, one.key], pairs.true.shape[-2:])
    return bool((pairs.true * here).any())
