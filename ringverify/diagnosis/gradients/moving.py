"""Rows of results that are returned elsewhere, and gradients that are added to other rows, or written over."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from ringref.sharding import pieces
from ringverify.diagnosis.gradients.terms import Gradients, Terms, fits, fitted, measured
from ringverify.diagnosis.gradients.weights import by_branch
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.masks.positions import POSITIONS, At, late
from ringverify.diagnosis.pairs import Ints, Mask, OneSide, Pairs, kept
from ringverify.diagnosis.parts import EVERYWHERE, PARTS, PartOfPairs
from ringverify.diagnosis.scene import Array, Scene
from ringverify.events import TensorName
from ringverify.faults.merging import TILES

Writers = Callable[[Pairs], tuple[Ints, Sequence[Ints]]]
"""Who adds to gradients one after the other: numbers of the writers, by pair, and the blocks in which each writes."""


APART = -1
"""Number of a writer that adds to what others write."""


def _tiles_of(tile: int, pairs: Pairs) -> tuple[Ints, Sequence[Ints]]:
    return pairs.queries.p // tile, [np.arange(pairs.keys.total)]


def _beside_the_own(number: Callable[[Pairs], Ints]) -> Writers:
    """Return the other ranks as writers, by number; what the rank itself adds is added to that."""
    return lambda pairs: (np.where(pairs.hop == 0, APART, number(pairs)), pairs.keys.shards)


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
    "that come from other ranks, one rank after the other, are written over one another, beside the rank's own": (
        _beside_the_own(lambda pairs: pairs.rank)
    ),
    "of each hop are written over those of the hop before": lambda pairs: (pairs.hop, pairs.keys.shards),
}  # fmt: skip
"""Who may write over what others have added."""

WHOLLY: dict[str, Writers] = {
    f"that come from other ranks, {order}, are written over one another, shard by shard, beside the rank's own": writers
    for order, writers in {
        "one rank after the other": _beside_the_own(lambda pairs: pairs.rank),
        "the next rank first": _beside_the_own(lambda pairs: pairs.hop),
        "the rank before first": _beside_the_own(lambda pairs: pairs.size - pairs.hop),
    }.items()
}
"""Who may write over it whole blocks of which a row is read."""

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

ADDED: tuple[tuple[TensorName, ...], ...] = (("dv",), ("dk",), ("dk", "dv"), ("dq",))
"""Gradients of which what is added may go to other rows, together."""

RETURNED: tuple[tuple[TensorName, ...], ...] = (("out",), ("dq",), ("dk", "dv"), ("dk",), ("dv",))
"""Results whose rows may be taken from the whole sequence at other positions, together."""

SLICES = {text: at for text, at in POSITIONS.items() if text.startswith(("counted", "of ")) and "tile" not in text}
"""Positions at which rows of results may be taken."""


Past = Literal["the end", "padding", "one row for all"]
"""What follows where rows are too few: none; those that pad shorter shards; or the last, if it is the only one."""

FOLLOWS: dict[Past, str] = {
    "the end": "",
    "padding": ", padded to the longest",
    "one row for all": ", a single one that is left being taken for all",
}


def _in_order_of_shards(of: Callable[[Pairs, OneSide], Ints], past: Past) -> At:
    """Return the positions of rows of the whole in the order of the shards, beginning with one for each rank."""

    def at(pairs: Pairs, x: OneSide) -> Ints:
        longest = max(map(len, x.shards)) if past == "padding" else 0
        order = np.concatenate([np.pad(held, (0, max(0, longest - len(held))), constant_values=x.total)
                                for held in x.shards])  # fmt: skip
        first = of(pairs, x)
        row = first + x.place
        if past == "one row for all":
            row = np.where(first == len(order) - 1, first, row)
        inside = (row >= 0) & (row < len(order))
        return np.where(inside, order[np.clip(row, 0, max(0, len(order) - 1))], x.total) if len(order) else row

    return at


SLICES |= {
    f"of rows from the rank times {what} on, in the order of the shards{follows}": _in_order_of_shards(of, past)
    for past, follows in FOLLOWS.items()
    for what, of in {
        "the rank's own number of rows": lambda pairs, x: x.rank * x.count,
        "rows // ranks": lambda pairs, x: x.rank * (x.total // pairs.size),
        "the longest shard": lambda pairs, x: x.rank * max(map(len, x.shards)),
        "the first rank's number of rows": lambda pairs, x: x.rank * len(x.shards[0]),
    }.items()
}


def _of_other_piece(pairs: Pairs, x: OneSide) -> Ints:
    """Return the positions of rows at the same places in the rank's other zigzag piece, or past the end without one."""
    if pairs.case.sharding != "zigzag":
        return x.p
    lengths, after = np.array([len(piece) for piece in pieces(x.total, 2 * pairs.size)]), late(x, pairs)
    early, behind = lengths[x.rank], lengths[2 * pairs.size - 1 - x.rank]
    place = np.where(after, x.place - early, x.place)
    there = place < np.where(after, early, behind)
    return np.where(there, x.at(x.rank, np.where(after, place, early + place)), x.total)


SLICES["of the rank's other zigzag piece"] = _of_other_piece


def _past_padding(pairs: Pairs, x: OneSide) -> Ints:
    """Return the positions of rows as many further on in the shard as it lacks of the longest, or past the end."""
    place = x.place + max(map(len, x.shards)) - x.count
    return np.where(place < x.count, x.at(x.rank, place), x.total)


SLICES["of the last rows of their shard padded to the longest, as if padding came before them"] = _past_padding

KEPT: dict[str, Callable[[Pairs, OneSide], Ints]] = {
    "rows // ranks": lambda pairs, x: np.array(x.total // pairs.size),
    "the last rank's number of rows": lambda pairs, x: np.array(len(x.shards[-1])),
    "the last but one of a shard": lambda pairs, x: x.count - 1,
}
"""How many rows of a shard of results come back, where there are more."""


def _of_none_past(count: Callable[[Pairs, OneSide], Ints], pairs: Pairs, x: OneSide) -> Ints:
    return np.where(x.place < count(pairs, x), x.p, x.total)


def _added_elsewhere(names: tuple[TensorName, ...], part: PartOfPairs, target: Moved, terms: Terms) -> Gradients:
    at = target(terms.pairs, terms.pairs.queries if names == ("dq",) else terms.pairs.keys)
    return {name: _to(at, x) for name, x in terms.sums_over(names, part.holds(terms.pairs)).items()}


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


Stream = Callable[[int, int], Sequence[int]]
"""The ranks that a block visits one after the other, by owner and number of ranks."""

STREAMS: dict[str, Sequence[Stream]] = {
    "": [lambda owner, size: [owner + hop for hop in range(size)]],
    ", in a ring that sends to the left": [lambda owner, size: [owner - hop for hop in range(size)]],
    ", in a ring both ways": [
        lambda owner, size: [owner + hop for hop in range(1, size // 2 + 1)],
        lambda owner, size: [owner - hop for hop in range(1, (size + 1) // 2)],
    ],
}
"""The ways that blocks go, in words: round the ring from their owner, or half round it to either side."""


def _lost_on_the_way(streams: Sequence[Stream], names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if a rank that attends nothing of a block hands on none of its gradients."""
    pairs = terms.pairs
    gone, size = np.zeros(np.broadcast_shapes(pairs.rank.shape, pairs.owner.shape), dtype=bool), pairs.size
    if terms.scene.replicated:
        return {}
    for owner, stream in itertools.product(range(size), streams):
        ranks = [rank % size for rank in stream(owner, size)]
        idle = [
            number
            for number, rank in enumerate(ranks)
            if not pairs.true[:, :, pairs.queries.shards[rank]][..., pairs.keys.shards[owner]].any()
        ]
        gone |= np.isin(pairs.rank, ranks[: max(idle, default=0)]) & (pairs.owner == owner)
    return {name: -y for name, y in terms.sums_over(names, gone).items()}


def _lost_at_an_end(streams: Sequence[Stream], last: bool, names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if what the first, or last, rank on a block's way adds is lost, unless it is the only one."""
    pairs = terms.pairs
    gone, size = np.zeros(np.broadcast_shapes(pairs.rank.shape, pairs.owner.shape), dtype=bool), pairs.size
    if terms.scene.replicated:
        return {}
    for owner, stream in itertools.product(range(size), streams):
        ranks = [rank % size for rank in stream(owner, size) if rank % size != owner]
        if len(ranks) > 1:
            gone |= (pairs.rank == ranks[-1 if last else 0]) & (pairs.owner == owner)
    return {name: -y for name, y in terms.sums_over(names, gone).items()}


def _written_over(order: Writers, wholly: bool, names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if a key has what the last writer adds that reads it, or if `wholly` any key of its block.

    A writer that is not to write wholly writes from the first key that it reads to the last.
    """
    pairs = terms.pairs

    def read() -> Mask:
        plain = pairs.queries.p, pairs.keys.p
        found: Mask = np.any(pairs.counts(lambda name: None if name == "key_lengths" else plain), axis=(0, 1))
        return found

    seen = terms.scene.once("read whatever the key_lengths", read)
    number, blocks = order(pairs)
    number, last = np.broadcast_to(number, seen.shape), np.full(seen.shape[1], APART)
    for block in blocks:
        for one in np.unique(number[:, block][number[:, block] != APART]):
            read_here = np.flatnonzero((seen & (number == one))[:, block].any(axis=0))
            if len(read_here):
                last[block if wholly else block[read_here[0] : read_here[-1] + 1]] = one
    gone = (number != last) & (number != APART)
    return {name: -y for name, y in terms.sums_over(names, gone).items()}


def _to_an_end(names: tuple[TensorName, ...], last: bool, terms: Terms) -> Gradients:
    """Return what changes if what is added to the rows of a shard that a rank reads goes to as many at an end of it."""
    pairs, found = terms.pairs, {name: np.zeros_like(getattr(terms.scene.truth, name)) for name in names}
    read = np.any(pairs.true, axis=(0, 1))
    for rank, owner in itertools.permutations(range(pairs.size), 2):
        of, held = pairs.rank == rank, pairs.keys.shards[owner]
        places = np.flatnonzero((read & of)[:, held].any(axis=0))
        if len(places):
            rows = held[places[0] : places[-1] + 1]
            for name, y in terms.sums_over(names, of & (pairs.owner == owner)).items():
                found[name][:, rows] -= y[:, rows]
                found[name][:, held[-len(rows) :] if last else held[: len(rows)]] += y[:, rows]
    return found


def _kept_of_last(apart: bool, names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if a row has what the last rank adds that has queries in its segment, of lanes the last one.

    A lane is what the heads of one offset do in a branch of a dilation. Without one, the sequence is one segment.

    Args:
        apart: whether lanes are exchanged apart from each other, and then added up.
        names: the gradients.
        terms: the case.
    """
    pairs, p = terms.pairs, terms.scene.problem
    if not p.nk:
        return {}
    i, j, whole = pairs.queries.p, pairs.keys.p, np.where(terms.p == 0, 1.0, terms.p)
    branches = ((max(1, p.nq, p.nk), 1),) if p.dilation is None else p.dilation.branches
    lanes = len(branches) * max(w for w, _ in branches)
    parts, writers = by_branch(terms), list[Ints]()
    for number, (w, _) in enumerate(branches):
        held = np.ones((p.heads, p.nk), dtype=bool) if p.dilation is None else kept(pairs, number)
        offset = np.argmax(held, axis=1)[:, None, None] % w
        lane = (pairs.queries.rank * len(branches) + number) * lanes + offset
        writer = pairs.queries.rank if apart else lane
        writers.append(np.where(held[:, None] & (i // w == j // w), writer, APART))
    writers = writers if len(parts) == len(writers) else [np.max(writers, axis=0)]
    each = [one.max(axis=1, initial=APART) for one in writers]
    each = each if apart else [np.max(each, axis=0)] * len(each)
    last = [x.reshape(p.hk, p.group_size, p.nk).max(axis=1).repeat(p.group_size, axis=0)[:, None] for x in each]
    gone = sum(part / whole * (one != of_last) for part, one, of_last in zip(parts, writers, last, strict=True))
    return {name: -y for name, y in terms.sums_over(names, np.asarray(gone)).items()}


def _lost_to_padding(names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if a head adds nothing to a shard's first row where it has fewer rows than somewhere else.

    In a dilation, each branch has rows of its own.
    """
    pairs, keys, dilation = terms.pairs, terms.pairs.keys, terms.scene.problem.dilation
    held: list[Mask] = [np.ones((terms.scene.problem.heads, keys.total), dtype=bool)]
    if dilation is not None:
        held = [kept(pairs, number) for number in range(len(dilation.branches))]
        held = [np.logical_or.reduce(held)] if dilation.heads == "split" else held
    gone, whole = np.zeros_like(terms.p), np.where(terms.p == 0, 1.0, terms.p)
    for part, rows in zip(by_branch(terms), held, strict=True):
        counted = [(shard[0], rows[:, shard].sum(axis=1)) for shard in keys.shards if len(shard)]
        most = max((count.max(initial=0) for _, count in counted), default=0)
        lost = np.zeros(rows.shape)
        for first, count in counted:
            lost[:, first] = count < most
        gone += part / whole * lost[:, None, :]
    return {name: -y for name, y in terms.sums_over(names, gone).items()}


def _behind_its_own_early_rows(names: tuple[TensorName, ...], terms: Terms) -> Gradients:
    """Return what changes if a rank adds to late pieces from the row on where its own begins; past the end is lost."""
    pairs, found = terms.pairs, {name: np.zeros_like(getattr(terms.scene.truth, name)) for name in names}
    after = late(pairs.keys, pairs).ravel()
    begins = [int((~after[held]).sum()) for held in pairs.keys.shards]
    if pairs.case.sharding != "zigzag":
        return found
    for rank, owner in itertools.permutations(range(pairs.size), 2):
        held = pairs.keys.shards[owner]
        rows, into = held[begins[owner] :], held[begins[rank] : begins[rank] + len(held) - begins[owner]]
        if begins[owner] != begins[rank]:
            for name, y in terms.sums_over(names, (pairs.rank == rank) & (pairs.owner == owner)).items():
                found[name][:, rows] -= y[:, rows]
                found[name][:, into] += y[:, rows[: len(into)]]
    return found


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains results whose rows are in the wrong place, and gradients that are, if out and lse are right.

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
        for text, count in KEPT.items():
            says = f"the rows of {' and '.join(names)} past {text} come back as 0"
            yield measured(
                says, functools.partial(_of_positions, names, functools.partial(_of_none_past, count), False)
            )
    if terms := fitted(scenes):
        for says, change in _changes():
            if all(fits(one, change(one)) for one in terms):
                yield measured(says, change)


def _changes() -> Iterator[tuple[str, Callable[[Terms], Gradients]]]:
    """Yield where what is added may go, in words, and what changes then."""
    for part in (EVERYWHERE, *PARTS):
        told = f"{part.text}: " if part.text else ""
        for (where, target), names in itertools.product(MOVED.items(), ADDED):
            says = f"{told}what is added to {' and '.join(names)} is added to {where}"
            yield says, functools.partial(_added_elsewhere, names, part, target)
    for names in WRITTEN:
        says = (
            f"what a head, or a branch of a dilation, adds to {' and '.join(names)} of a shard's first row is lost "
            "where it has fewer rows there than elsewhere: what pads them is written to that row"
        )
        yield says, functools.partial(_lost_to_padding, names)
    for names in WRITTEN:
        for apart, lanes in ((True, ""), (False, ", and of several branches or offsets the last")):
            says = (
                f"the {' and '.join(names)} of a row are what the last rank adds that has queries (in a dilation: in "
                f"the row's segment{lanes}): it is written over what the others added"
            )
            yield says, functools.partial(_kept_of_last, apart, names)
        for end, last in (("last", True), ("first", False)):
            says = (
                f"the {' and '.join(names)} that come back from a rank that reads a part of a shard are added to its "
                f"{end} rows, as many as that part has"
            )
            yield says, functools.partial(_to_an_end, names, last)
    for names in WRITTEN:
        says = f"what a rank adds to {' and '.join(names)} of other late zigzag pieces goes to the rows of the shard"
        yield f"{says} from where its own late piece begins", functools.partial(_behind_its_own_early_rows, names)
    for (way, streams), names in itertools.product(STREAMS.items(), WRITTEN):
        says = f"the {' and '.join(names)} that travel with a block are lost at a rank that attends nothing of it{way}"
        yield says, functools.partial(_lost_on_the_way, streams, names)
        for end, last in (("first", False), ("last", True)):
            says = (
                f"what the {end} rank on a block's way adds to its {' and '.join(names)} is lost, unless it is the only"
            )
            yield f"{says} one{way}", functools.partial(_lost_at_an_end, streams, last, names)
    for wholly, writers in ((False, WRITERS), (True, WHOLLY)):
        for (says, order), names in itertools.product(writers.items(), WRITTEN):
            yield f"the {' and '.join(names)} {says}", functools.partial(_written_over, order, wholly, names)
