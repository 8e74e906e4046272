"""Gradients to which a workspace adds once more what an earlier block has left in it.

A rank computes what it adds to dk and dv of a block in a workspace, and writes the rows that its queries attend. If the
others are not cleared they still hold what the block before left there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ringverify.diagnosis.gradients.terms import Gradients, Terms, measured
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.masks.positions import late
from ringverify.diagnosis.pairs import Mask, Pairs
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


def hypotheses() -> Iterator[Hypothesis]:
    """Yield what may be left in a workspace."""
    for what, written in WRITTEN.items():
        for names in (("dk", "dv"), ("dk",), ("dv",)):
            says = (
                f"the workspace of {' and '.join(names)} is not cleared between blocks: {what} of a block that no "
                "query of the rank attends get once more what an earlier block left there"
            )
            yield measured(says, functools.partial(_left, names, written))


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
