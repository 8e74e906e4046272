"""Hypotheses of gradients that end elsewhere than at the keys that they belong to: on another rank, in another head.

What each rank and each query head adds to dk and dv of each block is computed from the right forward, and a rule says
where it arrives. On a rank with other rows it arrives place by place, as far as there are places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from ringverify.diagnosis.gradients.terms import Gradients, Terms, measured
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName

Way = Literal["right", "left"]

Home = Callable[[int, int, int], int]
"""The rank at which arrives what a rank adds to the gradients of a block: by rank, hop of the block, and ranks."""

HOMES: dict[str, Home] = {
    "stay on the rank that computes them": lambda rank, hop, size: rank,
    "arrive at the rank after the owner": lambda rank, hop, size: rank - hop + 1,
    "arrive at the rank before the owner": lambda rank, hop, size: rank - hop - 1,
    "go on as far as their block has come, in the same direction, instead of back": lambda rank, hop, size: rank + hop,
}


def _both_ways(way: Way, further: Way, rank: int, hop: int, size: int) -> int:
    """Home of what blocks carry in a ring both ways, if those of one way take as many hops back as those of the other.

    A block that goes to the right has come the number of hops, one that goes to the left the ranks less of it; on an
    even number of ranks one way is a hop longer.
    """
    to_the_right = 0 < hop <= (size // 2 if further == "right" else (size - 1) // 2)
    right, left = (size // 2, (size - 1) // 2)[:: 1 if further == "right" else -1]
    there = hop and to_the_right == (way == "right")
    return rank - hop + ((right - left) if there else 0)


HOMES |= {
    f"of blocks that travel to the {way}, in a ring both ways, are sent home as many hops as the others have come, of "
    f"which there is one more to the {further} on an even number of ranks": functools.partial(_both_ways, way, further)
    for way in get_args(Way)
    for further in get_args(Way)
}

CARRIED: tuple[tuple[TensorName, ...], ...] = (("dk", "dv"), ("dk",), ("dv",))

Arrived = Callable[[Terms, tuple[TensorName, ...]], Gradients]
"""Gradients of all positions if they end elsewhere; none of a case in which they do not."""


def _by_turns(terms: Terms, names: tuple[TensorName, ...]) -> Gradients:
    """Return gradients if what query head h adds goes to key head h mod key heads."""
    scene, problem = terms.scene, terms.scene.problem
    heads = np.arange(problem.heads) % problem.hk
    each: Gradients = {"dk": terms.ds.swapaxes(2, 3) @ terms.q, "dv": terms.p.swapaxes(2, 3) @ terms.dout}
    found: Gradients = {name: np.zeros_like(getattr(scene.truth, name)) for name in names}
    for head, into in enumerate(heads):
        for name in names:
            found[name][:, :, into] += each[name][:, head]
    return found


def _on_ranks(home: Home, cleared: bool, terms: Terms, names: tuple[TensorName, ...]) -> Gradients:
    """Return gradients if what is added goes to these ranks, and what arrives in padding is dropped if `cleared`."""
    scene, pairs = terms.scene, terms.pairs
    held, size = scene.shards[1], scene.size
    if scene.replicated:
        return {}
    found: Gradients = {name: np.zeros_like(getattr(scene.truth, name)) for name in names}
    for rank in range(size):
        here = pairs.rank == rank
        for name, added in terms.sums_over(names, here).items():
            for owner in range(size):
                into, of = held[home(rank, (rank - owner) % size, size) % size], held[owner]
                both = min(len(into), len(of))
                found[name][:, into[:both]] += added[:, of[:both]]
    gone = pairs.padding[:, 0, 0, :, None, None]
    return {name: np.where(gone, 0.0, y) for name, y in found.items()} if cleared else found


def _changed(arrived: Arrived, names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    return {name: x - getattr(terms.scene.truth, name) for name, x in arrived(terms, names).items()}


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains dk and dv of cases whose other results are right.

    Args:
        scenes: cases, those that fail first.
    """
    wrong = set(wrong_tensors(scenes[0]))
    if not wrong or not wrong <= {"dk", "dv"}:
        return
    ends: list[tuple[str, Arrived]] = [
        (text, functools.partial(_on_ranks, home, cleared)) for text, home in HOMES.items() for cleared in (False, True)
    ]
    ends.append(("of query head h are added to key head h mod key heads", _by_turns))
    for text, arrived in ends:
        for names in CARRIED:
            if wrong <= set(names):
                says = f"gradients of {' and '.join(name[1:] for name in names)} {text}"
                yield measured(says, functools.partial(_changed, arrived, names))
