"""Documents told apart in another way: by which number a position has that lies at, before or after an offset."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts
from ringverify.faults.merging import TILES


def document_before(pairs: Pairs) -> Counts | None:
    """Return counts if a document's first position is taken for one of the document before."""
    p = pairs.problem
    if p.documents is None:
        return None
    ends = np.array(p.documents[1:])
    of_i, of_j = (np.searchsorted(ends, x.p, side="left") for x in (pairs.queries, pairs.keys))
    inside = (pairs.queries.p >= p.documents[0]) & (pairs.queries.p < p.documents[-1])
    rest = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    return np.where((of_i == of_j) & inside & ~pairs.padding, rest, 0)


Numbered = Callable[[Ints, Ints], Ints]
"""Numbers of documents of positions, by offsets; a negative number is none, and attends nothing."""


def bounds(offsets: Ints, at: Ints) -> Ints:
    """Numbers as they are: a document is what lies from its offset up to the next."""
    number = np.searchsorted(offsets, at, side="right") - 1
    return np.where(number < len(offsets) - 1, number, -1)


def bounds_past(offsets: Ints, at: Ints) -> Ints:
    """Numbers if each offset, the last one included, is taken for the document before."""
    number = np.searchsorted(offsets, at, side="left") - 1
    return np.where(number < len(offsets) - 1, number, -1)


def bounds_before(offsets: Ints, at: Ints) -> Ints:
    """Numbers if each offset but the last is taken for the document before."""
    return np.where(at < offsets[-1], bounds_past(offsets, at), -1)


def first_alone(offsets: Ints, at: Ints) -> Ints:
    """Numbers if each offset is taken for the document before, and that of the first document for one of its own."""
    return np.where((at >= offsets[0]) & (at < offsets[-1]), np.searchsorted(offsets, at, side="left"), -1)


def together(offsets: Ints, at: Ints) -> Ints:
    """Numbers if all positions in no document are taken for one."""
    number = np.searchsorted(offsets, at, side="right")
    return np.where(number < len(offsets), number, 0)


def behind(offsets: Ints, at: Ints) -> Ints:
    """Numbers if positions after the last document are taken for one."""
    return np.searchsorted(offsets, at, side="right") - 1


def in_front(offsets: Ints, at: Ints) -> Ints:
    """Numbers if positions before the first document are taken for one."""
    number = np.searchsorted(offsets, at, side="right")
    return np.where(number < len(offsets), number, -1)


def apart(offsets: Ints, at: Ints) -> Ints:
    """Numbers if positions before the first document are taken for one, and those after the last for another."""
    return np.searchsorted(offsets, at, side="right")


def apart_past(offsets: Ints, at: Ints) -> Ints:
    """The same if each offset is taken for what lies before it."""
    return np.searchsorted(offsets, at, side="left")


def nearest(offsets: Ints, at: Ints) -> Ints:
    """Numbers if positions before the first document are taken for its, and those after the last for that one's."""
    return np.searchsorted(offsets[1:-1], at, side="right")


def bounds_next(offsets: Ints, at: Ints) -> Ints:
    """Numbers if the position before each offset is taken for the document after it."""
    return bounds(offsets, at + 1)


def documents_numbered(numbered: Numbered, sides: str, always: bool, pairs: Pairs) -> Counts | None:
    """Return counts if documents of positions are numbered otherwise.

    Args:
        numbered: how.
        sides: "qk", or the one side of which it is so.
        always: whether a sequence without documents is one.
        pairs: the pairs.
    """
    documents = pairs.problem.documents
    if documents is None and not always:
        return None
    offsets = np.array(documents or (0, pairs.problem.nk))
    at = {"q": pairs.queries.p + (0 if documents else pairs.problem.diagonal), "k": pairs.keys.p}
    of_i, of_j = ((numbered if side in sides else bounds)(offsets, p) for side, p in at.items())
    rest = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    return np.where((of_i == of_j) & (of_i >= 0), rest, 0)


def one_end_ignored(beginning: bool, pairs: Pairs) -> Counts | None:
    """Return counts if keys before a document, or after it, are attended too."""
    if pairs.problem.documents is None:
        return None
    offsets = np.array(pairs.problem.documents)
    number = bounds(offsets, pairs.queries.p)
    begins, ends = offsets[np.maximum(number, 0)], offsets[number + 1]
    rest = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    inside = pairs.keys.p < ends if beginning else pairs.keys.p >= begins
    return np.where((number >= 0) & inside, rest, 0)


def _begun_by_window(pairs: Pairs) -> Counts | None:
    """Return counts if keys before a document are attended too, where a window is bounded on the left."""
    return one_end_ignored(True, pairs) if (pairs.problem.window or (None,))[0] is not None else None


def _runs_of_documents(pairs: Pairs, held: Ints) -> list[Ints]:
    """Return the queries of a rank of each document, and those of none."""
    number = bounds(np.array(pairs.problem.documents or (0, pairs.problem.nq)), held)
    return [held[number == document] for document in np.unique(number)]


def _tiles(tile: int, pairs: Pairs, held: Ints) -> list[Ints]:
    """Return the queries of a rank, so many at a time."""
    return np.split(held, range(tile, len(held), tile))


Runs = Callable[[Pairs, Ints], list[Ints]]
"""What is taken for consecutive of the queries that a rank holds."""

CONSECUTIVE: dict[str, Runs] = {
    "a rank's queries attend": lambda pairs, held: [held],
    "a rank's queries of each document, or of a sequence without documents, attend": _runs_of_documents,
    **{f"each tile of {tile} queries of a shard attends": functools.partial(_tiles, tile) for tile in TILES},
}
"""Which queries these may be, in words."""


def _as_if_consecutive(runs: Runs, pairs: Pairs) -> Counts | None:
    """Return counts if queries attend as many keys as they are, from where the first of them may attend on."""
    p, found = pairs.problem, pairs.true.copy()
    if not p.causal or pairs.case.replicated:
        return None
    for held in pairs.queries.shards:
        for rows in runs(pairs, held) if len(held) else ():
            found[:, :, rows, max(0, rows[0] + p.diagonal + len(rows)) :] = 0
    return found


def _slices_exchanged(pairs: Pairs) -> Counts | None:
    """Return counts if slices of a document, which two ranks have, are moved the wrong way by a causal mask."""
    if not pairs.problem.causal or pairs.case.sharding != "contiguous" or pairs.problem.diagonal:
        return None
    offsets = np.array(pairs.problem.documents or (0, pairs.problem.nk))

    def begins(x: OneSide) -> Ints:
        start = np.array([held[0] if len(held) else 0 for held in x.shards])[x.rank]
        found: Ints = np.maximum(start, offsets[np.maximum(bounds(offsets, x.p), 0)])
        return found

    of_query, of_key = begins(pairs.queries), begins(pairs.keys)
    rest = pairs.counts(lambda name: None if name == "causal" else (pairs.queries.p, pairs.keys.p))
    return np.where(pairs.keys.p - of_key + of_query <= pairs.queries.p - of_query + of_key, rest, 0)


def _spanning(before: bool, after: bool, pairs: Pairs) -> Counts | None:
    """Return counts if queries attend nothing whose document begins before their rank's shard, ends after it, or both.

    A sequence without documents is one.
    """
    if pairs.case.sharding != "contiguous" or pairs.problem.diagonal:
        return None
    offsets = np.array(pairs.problem.documents or (0, pairs.problem.nk))
    number, held = bounds(offsets, pairs.queries.p), pairs.queries.shards
    first, last = (np.array([one[at] if len(one) else 0 for one in held])[pairs.queries.rank] for at in (0, -1))
    lost = (not before) | (offsets[np.maximum(number, 0)] < first)
    lost &= (not after) | (offsets[number + 1] - 1 > last)
    return np.where(lost & (number >= 0), 0, pairs.true)


def _until_one_is_absent(sides: str, pairs: Pairs, of: Callable[[Pairs], Pairs] | None = None) -> Counts | None:
    """Return counts without what shards have of documents after the first one of which they have nothing.

    Args:
        sides: "qk", or the one side of which it is so.
        pairs: the pairs.
        of: of which pairs' shards it is so, from where they begin on; by default from the very first document on.
    """
    documents = pairs.problem.documents
    if documents is None or pairs.case.replicated:
        return None
    offsets = np.array(documents)

    def lost(x: OneSide) -> Ints:
        number, first = bounds(offsets, x.p), np.full(len(x.shards), len(offsets))
        for rank, held in enumerate(x.shards):
            there = {*bounds(offsets, held).tolist()}
            begins = int(max(0, offsets.searchsorted(held[0], side="right") - 1)) if of and len(held) else 0
            first[rank] = next((n for n in range(begins, len(offsets) - 1) if n not in there), len(offsets))
        return (number > first[x.rank]).astype(np.int64)

    found, those = pairs.true, pairs if of is None else of(pairs)
    for side, x in (("q", those.queries), ("k", those.keys)):
        found = np.where(lost(x) > 0, 0, found) if side in sides else found
    return found


def _in_turn(pairs: Pairs) -> Counts | None:
    """Return counts if a rank's first queries attend the first document that holds anything, its next ones the next."""
    documents = pairs.problem.documents
    if documents is None:
        return None
    offsets = np.array(sorted(set(documents)))
    of_i, of_j = (bounds(offsets, x.p) for x in (pairs.queries, pairs.keys))
    turn = np.full(of_i.shape, -1)
    for rank in range(len(pairs.queries.shards)):
        mine = (pairs.queries.rank == rank) & (of_i >= 0)
        turn = np.where(mine, np.searchsorted(np.unique(of_i[mine]), of_i), turn)
    rest = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    return np.where((turn == of_j) & (turn >= 0), rest, 0)


def _whole_blocks(pairs: Pairs) -> Mask:
    """Return the pairs of blocks of which a causal mask and a window let every pair through, without key_lengths."""
    found: Mask = np.zeros_like(pairs.within_bounds)
    for queries in pairs.queries.shards if pairs.problem.key_lengths is None else ():
        for keys in pairs.keys.shards:
            found[np.ix_(queries, keys)] = pairs.within_bounds[np.ix_(queries, keys)].all()
    return found


WHERE_IGNORED: dict[str, Callable[[Pairs], Mask]] = {
    "": lambda pairs: np.ones((1, 1), dtype=bool),
    ", in blocks of which no causal mask, window or key_lengths hide anything": _whole_blocks,
    ", in blocks of pieces of zigzag shards of which no causal mask, window or key_lengths hide anything": (
        lambda pairs: _whole_blocks(pairs.of_pieces())
    ),
}
"""In which blocks documents are ignored."""


def _ignored(alone: bool, where: Callable[[Pairs], Mask], pairs: Pairs) -> Counts | None:
    """Return counts without documents, or without one that is alone, in some blocks."""
    documents = pairs.problem.documents
    if documents is None or (alone and len(documents) > 2):
        return None
    bare = pairs.counts(lambda name: None if name == "documents" else (pairs.queries.p, pairs.keys.p))
    return np.where(where(pairs), bare, pairs.true)


def _cleared(counts: Callable[[Pairs], Counts | None], pairs: Pairs) -> Counts | None:
    """Return counts of keys that are no padding."""
    return None if (found := counts(pairs)) is None else np.where(pairs.padding, 0, found)


def _of_cleared(counts: Callable[[Pairs], Counts | None], pairs: Pairs) -> Counts:
    """Return how often padding is attended."""
    found = counts(pairs)
    zeros: Counts = np.where(pairs.padding, pairs.true if found is None else found, 0).sum(axis=-1)
    return zeros


def ways_to_tell_documents() -> Iterator[Otherwise]:
    """Yield masks whose documents begin or end elsewhere, or that take what lies outside of all for a document."""
    yield Otherwise("the first position of each document is taken for one of the document before", document_before, 0.5)
    for alone, (where, blocks) in itertools.product((False, True), WHERE_IGNORED.items()):
        if not (alone or where):
            continue  # that is told of every mask
        says = f"{'a document that is alone is' if alone else 'documents are'} ignored{where}"
        way = functools.partial(_ignored, alone, blocks)
        yield Otherwise(says, way, 0.75)
        says += ", and keys and values of padding are 0"
        yield Otherwise(says, functools.partial(_cleared, way), 1, functools.partial(_of_cleared, way))
    for says, numbers in (
        (
            "the first position of each document is taken for one of the document before, of the first for one of none",
            bounds_before,
        ),
        (
            "the first position of each document is taken for one of the document before, of the first for one of its "
            "own",
            first_alone,
        ),
        (
            "the first position of each document is taken for one of the document before, and positions up to that of "
            "the first, and after the last one's, for documents",
            apart_past,
        ),
        (
            "the first position of each document, and the one past the last, are taken for the document before",
            bounds_past,
        ),
        (
            "the last position of each document, and the one before the first, are taken for the document after",
            bounds_next,
        ),
        ("positions that are in no document attend each other", together),
        ("positions before the first document attend each other, and so do those after the last", apart),
        (
            "positions before the first document are taken for its, and those after the last one for that one's",
            nearest,
        ),
        ("positions after the last document attend each other", behind),
        ("positions before the first document attend each other", in_front),
    ):
        for sides, whose in (("qk", ""), ("k", ", in the keys only"), ("q", ", in the queries only")):
            for always in (False, True):
                one = ", and a sequence without documents is one" if always else ""
                if numbers in (bounds_before, first_alone, bounds_past, bounds_next) or (sides == "qk" and not always):
                    way = functools.partial(documents_numbered, numbers, sides, always)
                    yield Otherwise(says + whose + one, way, 0.5 + 0.25 * (sides != "qk") + 0.25 * always)
    yield Otherwise(
        "the causal mask moves the slices apart that two ranks have of a document, or of all, with the wrong sign: as "
        "if that of the keys began where that of the queries does, and the other way round",
        _slices_exchanged,
        1.25,
    )
    yield Otherwise(
        "a rank's first queries that are in a document attend the first of all documents, those in another one the "
        "next, whichever these are",
        _in_turn,
        0.5,
    )
    for sides, whose in (("qk", ", of queries and keys"), ("q", ", of queries"), ("k", ", of keys")):
        says = f"what a rank has of documents after the first one of which it has nothing is left out{whose}"
        yield Otherwise(says, functools.partial(_until_one_is_absent, sides), 0.5)
        for what, of in {"rank": lambda pairs: pairs, "zigzag piece": Pairs.of_pieces}.items():
            says = f"what a {what} has of documents after an empty one between them is left out{whose}"
            yield Otherwise(says, functools.partial(_until_one_is_absent, sides, of=of), 0.6)
    for before, after, which in (
        (True, True, "begins before the rank's shard and ends after it"),
        (True, False, "begins before the rank's shard"),
        (False, True, "ends after the rank's shard"),
    ):
        says = f"a rank leaves out its queries whose document, or sequence without documents, {which}"
        yield Otherwise(says, functools.partial(_spanning, before, after), 0.5)
    for who, runs in CONSECUTIVE.items():
        yield Otherwise(
            f"under a causal mask, {who} no key from the first one's position + their number on, as if they were "
            "consecutive",
            functools.partial(_as_if_consecutive, runs),
            0.5,
        )
    yield Otherwise(
        "keys before a document are attended by its queries where a window is bounded on the left: that takes the "
        "place of the document's beginning",
        _begun_by_window,
        0.5,
    )
    for beginning, which in ((True, "before"), (False, "after")):
        bound = "end" if beginning else "beginning"
        says = f"keys {which} a document are attended by its queries: only its {bound} bounds"
        yield Otherwise(says, functools.partial(one_end_ignored, beginning), 0.5)
