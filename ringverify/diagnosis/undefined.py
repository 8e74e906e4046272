"""Which rows of out, or of gradients, are NaN where all others are right: those that attend nothing in some block.

exp(−inf − (−inf)) is NaN, so a merge or an online softmax spoils the rows that attend nothing in some block, unless it
guards against it. Which block that is depends on the order in which an implementation visits them. A backward that
takes exp(scores − lse) spoils the gradients of all keys that it holds against a row without keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Ints, Mask, Pairs, pairs_of
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.merging import TILES
from ringverify.faults.ring import STEPS

Rows = Callable[["Blocks"], Mask]


class Blocks:
    """How many keys every row attends in every block of a case, and every rank in every block.

    Attributes:
        of_row: `(B, H, Nq, P)` by owner.
        visited: likewise, of all rows of the rank together.
        rank: `(Nq, 1)`.
        size: P.
        holds: whether each block holds any keys, `(P,)`.
        pairs: the pairs of a query and a key.
        computed: whether a rank has to look at each block, `(Nq, P)`: it holds keys, and a causal mask does not hide
            its first key from the rank's last query.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.of_row = np.stack([pairs.true[..., held].sum(axis=-1) for held in pairs.keys.shards], axis=-1)
        self.pairs, self.rank, self.size = pairs, pairs.queries.rank, pairs.size
        self.holds = np.array([len(held) > 0 for held in pairs.keys.shards])
        self.visited = np.zeros_like(self.of_row)
        self.computed = np.broadcast_to(self.holds, (pairs.queries.total, self.size)).copy()
        first = np.array([held.min(initial=pairs.keys.total) for held in pairs.keys.shards])
        for held in pairs.queries.shards:
            self.visited[:, :, held] = self.of_row[:, :, held].sum(axis=(0, 1, 2))
            if pairs.problem.causal and len(held):
                self.computed[held] &= first <= held.max() + pairs.problem.diagonal

    def empty(self, owner: Ints) -> Mask:
        """Rows that attend nothing in the block of these owners, `(Nq, 1)` or a number."""
        at = np.broadcast_to(owner, (self.of_row.shape[2], 1)) % self.size
        found: Mask = np.take_along_axis(self.of_row, at[None, None], axis=-1)[..., 0] == 0
        return found

    def empty_at_first(self, owners: Ints, *, computed: bool = False) -> Mask:
        """Rows that attend nothing in the first block of which their rank attends anything, in an order of owners.

        Args:
            owners: the order, `(Nq, P)`, or `(P,)` if it is the same on every rank.
            computed: whether it is the first block at which the rank has to look.
        """
        owners = np.broadcast_to(owners, self.visited.shape[2:]) % self.size
        seen = np.take_along_axis(self.computed if computed else (self.visited > 0)[0, 0], owners, axis=1)
        found: Mask = self.empty(np.take_along_axis(owners, seen.argmax(axis=1)[:, None], axis=1))
        return found & seen.any(axis=1)


def _empty_in_first_tile(tile: int, of_all: bool, blocks: Blocks) -> Mask:
    """Rows that attend nothing in the first tile of keys of which a row of their own tile attends anything.

    Args:
        tile: rows of a tile, of queries of a shard and of keys.
        of_all: whether tiles are cut from all keys in the order of positions, instead of each block, hop by hop.
        blocks: the blocks.
    """
    pairs = blocks.pairs
    attends = pairs.true > 0
    found = np.zeros(attends.shape[:3], dtype=bool)
    for rank, held in enumerate(pairs.queries.shards):
        each = [pairs.keys.shards[(rank - hop) % pairs.size] for hop in range(pairs.size)]
        every = [np.arange(pairs.keys.total)] if of_all else each
        tiles = [keys[at : at + tile] for keys in every for at in range(0, len(keys), tile)]
        for at in range(0, len(held), tile):
            rows = held[at : at + tile]
            first = next((keys for keys in tiles if attends[:, :, rows][..., keys].any()), None)
            if first is not None:
                found[:, :, rows] = ~attends[:, :, rows][..., first].any(axis=-1)
    return found


def _empty_in_first_piece(blocks: Blocks) -> Mask:
    """Rows that attend nothing in the first piece of keys, hop by hop, the early one of a zigzag shard first.

    Pieces that a causal mask and a window hide whole from the row's own piece do not count.
    """
    pairs = blocks.pairs
    attends = pairs.true > 0
    by_piece, found = pairs.of_pieces(), np.zeros(attends.shape[:3], dtype=bool)
    last = len(by_piece.keys.shards) - 1
    held = [[rank] if by_piece is pairs else [rank, last - rank] for rank in range(pairs.size)]
    for rank, own in enumerate(held):
        order = [piece for hop in range(pairs.size) for piece in held[(rank - hop) % pairs.size]]
        for rows in (by_piece.queries.shards[piece] for piece in own):
            every = (by_piece.keys.shards[piece] for piece in order)
            first = next((keys for keys in every if pairs.within_bounds[np.ix_(rows, keys)].any()), None)
            if first is not None:
                found[:, :, rows] = ~attends[:, :, rows][..., first].any(axis=-1)
    return found


def _without_keys(blocks: Blocks) -> Mask:
    found: Mask = (blocks.of_row == 0).all(axis=-1)
    return found


ROWS: dict[str, Rows] = {
    "no key at all, on a rank that attends any,": lambda blocks: (
        (blocks.of_row == 0).all(axis=-1) & (blocks.visited > 0).any(axis=-1)
    ),
    "no key of the rank's own block": lambda blocks: blocks.empty(blocks.rank),
    "no key of the block of hop 1": lambda blocks: blocks.empty(blocks.rank - 1),
    "no key of the next rank's block": lambda blocks: blocks.empty(blocks.rank + 1),
    "no key of the block of rank 0": lambda blocks: blocks.empty(np.array(0)),
    "no key of the block of the last rank": lambda blocks: blocks.empty(np.array(-1)),
    "no key of the first block of which the rank attends any": lambda blocks: blocks.empty_at_first(
        np.arange(blocks.size)
    ),
    "no key of the last block of which the rank attends any": lambda blocks: blocks.empty_at_first(
        np.arange(blocks.size)[::-1]
    ),
    "no key of the first block, hop by hop, of which the rank attends any": lambda blocks: blocks.empty_at_first(
        blocks.rank - np.arange(blocks.size)
    ),
    "no key of the first block, hop by hop, that holds keys and is not hidden whole by causality": lambda blocks: (
        blocks.empty_at_first(blocks.rank - np.arange(blocks.size), computed=True)
    ),
    "no key of the first block that holds keys and is not hidden whole by causality": lambda blocks: (
        blocks.empty_at_first(np.arange(blocks.size), computed=True)
    ),
    "no key of the first piece of a shard, hop by hop, that causality and windows do not hide whole from theirs": (
        _empty_in_first_piece
    ),
    **{
        f"no key of the first tile of {tile} keys{of_all} of which their tile of {tile} queries attends any": (
            functools.partial(_empty_in_first_tile, tile, bool(of_all))
        )
        for of_all in (" of all", "")
        for tile in TILES
    },
    "no key of some block of which the rank attends any": lambda blocks: (
        (blocks.of_row == 0) & (blocks.visited > 0)
    ).any(axis=-1),
    "no key of some block that holds any": lambda blocks: ((blocks.of_row == 0) & blocks.holds).any(axis=-1),
    "no key of some block": lambda blocks: (blocks.of_row == 0).any(axis=-1),
    "no key at all": _without_keys,
}
"""Rows that are NaN, by what they attend; that which concerns the fewest rows first, as long as that can be said."""

OF_ALL = (
    "no key of some block that holds any",
    "no key of some block",
    "no key at all",
)
"""Rows of which it can be said without the rank of the query."""


HELD_AGAINST_EMPTY = (
    "dk and dv are NaN of keys whose {keys} is held against a {queries} with a row without any key{skipping}: its lse "
    "is -inf, and -inf - (-inf) is not guarded in the backward"
)


def _keys_held_against_empty(of_pieces: bool, skipping: bool, blocks: Blocks) -> Mask:
    """Keys held against a row that attends nothing, `(B, K, Nk)`: of blocks or zigzag pieces, and all of a rank's rows.

    With `skipping`, those of which the rank, or its piece, attends nothing are left out.
    """
    pairs = blocks.pairs.of_pieces() if of_pieces else blocks.pairs
    attends: Mask = pairs.true > 0
    empty: Mask = np.all(~attends, axis=-1)
    found: Mask = np.zeros((*attends.shape[:2], attends.shape[3]), dtype=bool)
    for rows, keys in itertools.product(pairs.queries.shards, pairs.keys.shards):
        if not skipping or attends[:, :, rows][..., keys].any():
            found[:, :, keys] |= np.any(empty[:, :, rows], axis=-1, keepdims=True)
    grouped: Mask = np.any(found.reshape(len(found), pairs.problem.hk, -1, found.shape[2]), axis=2)
    return grouped


def _of_keys(*, zigzag: bool) -> Iterator[Hypothesis]:
    """Yield what explains NaN in dk and dv where out is right, of pieces too if some case is of zigzag shards."""
    held = (("block", "rank's block of queries"), ("zigzag piece", "piece of queries"))
    for (of_pieces, (keys, queries)), skipping in itertools.product(enumerate(held[: 1 + zigzag]), (True, False)):
        rows = functools.partial(_keys_held_against_empty, bool(of_pieces), skipping)
        more = ", and attended by some of its rows" if skipping else ""
        text = HELD_AGAINST_EMPTY.format(keys=keys, queries=queries, skipping=more)
        yield Hypothesis(text, STEPS, judge=functools.partial(_judged_of_keys, rows))


def _judged_of_keys(keys: Rows, scene: Scene) -> float | None:
    """Return 0 if just these keys have NaN in dk and dv, but for padding, which may be cleared, and all else is right.

    Rows that attend nothing may have NaN in dq.
    """
    blocks = Blocks(pairs_of(scene))
    spoilt, padding, empty = keys(blocks), blocks.pairs.padding[:, 0], _without_keys(blocks)
    nothing = np.zeros_like(empty)
    for rank, (rows, held) in enumerate(zip(*scene.shards, strict=True)):
        here: dict[TensorName, tuple[Mask, Mask]] = {
            "dq": (nothing[:, :, rows], empty[:, :, rows]),
            **dict.fromkeys(("dk", "dv"), (spoilt[:, :, held], padding[:, :, held])),
        }
        for name in scene.tensors:
            told, free = here.get(name, (nothing[:, :, rows], nothing[:, :, rows]))
            nan = np.isnan(scene.seen(name, rank))
            if ((scene.margins(name, rank) > 1) & ~nan).any():
                return None
            rest = nan[..., None] if name == "lse" else nan.swapaxes(1, 2)
            if ((rest != told[..., None]) & ~free[..., None]).any():
                return None
    return None if wrong_tensors(scene) and not spoilt.any() else 0.0


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the NaN in the out of cases, or in gradients where out is right.

    Args:
        scenes: cases, those that fail first.
    """
    found: tuple[tuple[TensorName, str], ...] = (
        ("out", "rows that attend {} are NaN: -inf - (-inf) is not guarded"),
        ("dq", "gradients of rows that attend {} are NaN, and out is not: 0 · NaN in the backward"),
    )
    first, zigzag = scenes[0], any(scene.case.sharding == "zigzag" for scene in scenes)
    for name, says in found:
        if name in first.tensors and any(np.isnan(first.seen(name, rank)).any() for rank in range(first.size)):
            for text, rows in ROWS.items():
                no_pieces = rows is _empty_in_first_piece and not zigzag
                if not no_pieces and (not first.replicated or text in OF_ALL):  # replicated queries have no own rank
                    yield Hypothesis(says.format(text), STEPS, judge=functools.partial(_judged, name, rows))
            break
    if "dk" in first.tensors and any(np.isnan(first.seen("dk", rank)).any() for rank in range(first.size)):
        yield from _of_keys(zigzag=zigzag)


def _judged(name: TensorName, rows: Rows, scene: Scene) -> float | None:
    """Return 0 if just these rows of a result are NaN, and all others right."""
    spoilt = rows(Blocks(pairs_of(scene)))
    seen: Mask = np.zeros_like(spoilt)
    for rank in range(scene.size):
        nan = np.isnan(scene.seen(name, rank))
        whole: Mask = np.all(nan, axis=-1)
        if (np.any(nan, axis=-1) != whole).any() or ((scene.margins(name, rank) > 1) & ~nan).any():
            return None
        seen[:, :, scene.shards[0][rank]] = whole.swapaxes(1, 2)
    if not seen.any() and wrong_tensors(scene):
        return None
    return 0.0 if (seen == spoilt).all() else None
