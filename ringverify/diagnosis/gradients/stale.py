"""Gradients to which a workspace adds once more what an earlier block has left in it.

A rank computes what it adds to dk and dv of a block in a workspace, and writes the rows that its queries attend. If the
others are not cleared they still hold what the block before left there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from ringverify.diagnosis.gradients.terms import Gradients, Terms, measured
from ringverify.diagnosis.grids import EVEN, Grid
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.masks.positions import late
from ringverify.diagnosis.pairs import Mask, Pairs
from ringverify.diagnosis.scene import Array
from ringverify.events import TensorName

Written = Callable[[Pairs, Mask], Mask]
"""Which rows of keys are written, `(Nk,)` of one block, of those that are attended."""


def _pieces(pairs: Pairs, attended: Mask) -> Mask:
    found = np.zeros_like(attended)
    in_late = late(pairs.keys, pairs).ravel()
    for piece in (in_late, ~in_late):
        found |= piece & (attended & piece).any()
    return found


WRITTEN: dict[str, Written] = {
    "rows": lambda pairs, attended: attended,
    "pieces": _pieces,
    "blocks": lambda pairs, attended: np.full_like(attended, attended.any()),
}


GIVEN: tuple[tuple[TensorName, ...], ...] = (("dk", "dv"), ("dk",), ("dv",))
"""Gradients of which that may be so, together."""


def hypotheses() -> Iterator[Hypothesis]:
    """Yield what may be left in a workspace."""
    for names in GIVEN:
        of = f"{' and '.join(names)} "
        for what, written in WRITTEN.items():
            says = (
                f"the workspace of {of}is not cleared between blocks: {what} of a block that no "
                "query of the rank attends get once more what an earlier block left there"
            )
            yield measured(says, functools.partial(_left, names, written))
        says = f"the buffer of {of}of a block is not cleared between hops: what went to the blocks before is in it too"
        for grid, teams in ((None, ""), (EVEN, f", teams being {EVEN.text}")):
            for cleared in (False, True):
                yield measured(says + teams, functools.partial(_heaped, names, grid, cleared))


def _heaped(names: tuple[TensorName, ...], grid: Grid | None, cleared: bool, terms: Terms) -> Gradients:
    """Return what changes if what is added to a block is added to what the blocks before it were given, place by place.

    Of teams, the places are those in the shards of their members. What lies in padding is dropped if `cleared`.
    """
    pairs, shards = terms.pairs, terms.pairs.keys.shards
    changes = {name: np.zeros_like(getattr(terms.scene.truth, name)) for name in names}
    if terms.scene.replicated:
        return changes
    teams = [[rank] for rank in range(pairs.size)] if grid is None else grid.teams(pairs.case)
    for number, team in enumerate(teams):
        heap: dict[tuple[TensorName, int], Array] = {}
        parts = terms.sums_over(names, np.isin(pairs.rank, team))
        for owners in (teams[number - hop] for hop in range(len(teams))):
            for (member, owner), (name, part) in itertools.product(enumerate(owners), parts.items()):
                rows, longest = shards[owner], max(map(len, shards))
                added = np.zeros((part.shape[0], longest, *part.shape[2:]))
                added[:, : len(rows)] = part[:, rows]
                earlier = heap.get((name, member), np.zeros_like(added))
                changes[name][:, rows] += earlier[:, : len(rows)]
                heap[name, member] = earlier + added
    gone = pairs.padding[:, 0, 0, :, None, None] & cleared
    return {name: np.where(gone, 0.0, change) for name, change in changes.items()}


def _left(names: tuple[TensorName, ...], written: Written, terms: Terms) -> Gradients:
    """Return what changes."""
    pairs, shards = terms.pairs, terms.pairs.keys.shards
    changes = {name: np.zeros_like(getattr(terms.scene.truth, name)) for name in names}
    if terms.scene.replicated:
        return changes
    for rank in range(pairs.size):
        before: Gradients = {}
        for hop in range(pairs.size):
            owner = (rank - hop) % pairs.size
            rows, here = shards[owner], (pairs.rank == rank) & (pairs.owner == owner)
            attended = ((pairs.true > 0) & here).any(axis=(0, 1, 2))
            own = np.zeros_like(attended)
            own[rows] = True
            wrote = (written(pairs, attended) & own)[rows][:, None, None]
            for name, part in terms.sums_over(names, here).items():
                added, left = part[:, rows], before.get(name)
                room = np.zeros((added.shape[0], max(map(len, shards)), *added.shape[2:])) if left is None else left
                held = np.where(wrote, added, room[:, : len(rows)])
                changes[name][:, rows] += held - added
                before[name] = np.concatenate([held, room[:, len(rows) :]], axis=1)
    return changes
