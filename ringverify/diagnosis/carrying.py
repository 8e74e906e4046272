"""Hypotheses of gradients that end elsewhere than at the keys that they belong to: on another rank, in another head.

What each rank and each query head adds to dk and dv of each block is computed from the right forward, and a rule says
where it arrives. On a rank with other rows it arrives place by place, as far as there are places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringverify.diagnosis.adding import terms_of
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for
from ringverify.diagnosis.masks import Ints
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS

Home = Callable[[int, int, int], int]
"""The rank at which arrives what a rank adds to the gradients of a block: by rank, hop of the block, and ranks."""

HOMES: dict[str, Home] = {
    "travel on the way of the keys instead of back": lambda rank, hop, size: rank + hop,
    "stay on the rank that computes them": lambda rank, hop, size: rank,
    "arrive at the rank after the owner": lambda rank, hop, size: rank - hop + 1,
    "arrive at the rank before the owner": lambda rank, hop, size: rank - hop - 1,
    "travel twice as far back": lambda rank, hop, size: rank - 2 * hop,
    "arrive at the opposite rank, counted from the last": lambda rank, hop, size: size - 1 - rank + hop,
    "of all hops but the first stay one hop short of the owner": lambda rank, hop, size: rank - hop + (hop > 0),
    "of all hops but the first go one hop too far": lambda rank, hop, size: rank - hop - (hop > 0),
}

CARRIED: tuple[tuple[TensorName, ...], ...] = (("dk", "dv"), ("dk",), ("dv",))


HEADS: dict[str, Callable[[int, int], Ints]] = {
    "h mod key heads": lambda heads, key_heads: np.arange(heads) % key_heads,
    "h mod (query heads of a key head), cut off": lambda heads, key_heads: (
        np.arange(heads) % (heads // key_heads) % key_heads
    ),
}
"""Key heads to which goes what query head h adds, by the numbers of both."""

Gradients = dict[TensorName, Array]
Arrived = Callable[[Scene, tuple[TensorName, ...]], "Gradients | None"]
"""Gradients of all positions if they end elsewhere; `None` of a case in which they do not."""


def _in_heads(of: Callable[[int, int], Ints], scene: Scene, names: tuple[TensorName, ...]) -> Gradients | None:
    """Return gradients if what query heads add goes to these key heads."""
    terms, problem = terms_of(scene), scene.problem
    heads = of(problem.heads, problem.hk)
    if (heads == np.arange(problem.heads) // problem.group_size).all():
        return None
    each = {"dk": terms.ds.swapaxes(2, 3) @ terms.q, "dv": terms.p.swapaxes(2, 3) @ terms.dout}
    found = {name: np.zeros_like(getattr(scene.truth, name)) for name in names}
    for head, into in enumerate(heads):
        for name in names:
            found[name][:, :, into] += each[name][:, head]
    return found


def _on_ranks(home: Home, scene: Scene, names: tuple[TensorName, ...]) -> Gradients | None:
    """Return gradients if what is added goes to these ranks."""
    terms, held, size = terms_of(scene), scene.shards[1], scene.size
    if scene.replicated:
        return None
    pairs = terms.pairs
    found = {name: np.zeros_like(getattr(scene.truth, name)) for name in names}
    for rank in range(size):
        here = pairs.rank == rank
        for name, added in terms.sums(names, terms.ds * here, terms.p * here).items():
            for owner in range(size):
                into, of = held[home(rank, (rank - owner) % size, size) % size], held[owner]
                both = min(len(into), len(of))
                found[name][:, into[:both]] += added[:, of[:both]]
    return found


def _judge(names: tuple[TensorName, ...], arrived: Arrived) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        found = arrived(scene, names) if set(names) <= set(scene.tensors) else None
        if found is None:
            return None if wrong_tensors(scene) else 0.0
        wide = {name: np.full_like(x, getattr(scene.allowed, name).max(initial=0.0)) for name, x in found.items()}
        return agree_but_for(scene, found, lambda: dataclasses.replace(scene.allowed, **wide))

    return judge


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains dk and dv of cases whose other results are right.

    Args:
        scenes: cases, those that fail first.
    """
    wrong = set(wrong_tensors(scenes[0]))
    if not wrong or not wrong <= {"dk", "dv"}:
        return
    ends: dict[str, Arrived] = {text: functools.partial(_on_ranks, home) for text, home in HOMES.items()}
    for text, of in HEADS.items():
        ends[f"of query head h are added to key head {text}"] = functools.partial(_in_heads, of)
    for text, arrived in ends.items():
        for names in CARRIED:
            if wrong <= set(names):
                says = f"gradients of {' and '.join(name[1:] for name in names)} {text}"
                yield Hypothesis(says, STEPS, judge=_judge(names, arrived))
