"""The map of a counterexample as data: two axes cut into pieces, and a digit for each cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import groupby

from ringverify.events import Digits, Piece, Region


@dataclasses.dataclass(frozen=True)
class Cells:
    """The content of a report's `region`, with neighbouring cells joined where there are too many.

    Attributes:
        tensor: name of the result that is wrong; `None` where no values came back.
        queries: pieces of the query axis, rank by rank.
        keys: pieces of the key axis, rank by rank.
        pattern: how often a query attends a key, by piece of queries and of keys.
        pairs: the error between query and key, by the same pieces.
        strip: the error of the result, by piece of its own axis and by head.
    """

    tensor: str | None
    queries: Sequence[Piece]
    keys: Sequence[Piece]
    pattern: Digits | None
    pairs: Digits | None
    strip: Digits | None

    @classmethod
    def of(cls, region: Region, most: int) -> Cells:
        """Make the cells of a region.

        Args:
            region: the field of an event.
            most: about how many pieces an axis may have; pieces of different ranks are never joined.
        """
        rows, columns = (_joints(axis, most) for axis in (region.queries, region.keys))
        strip = region.rows if region.tensor is not None else None
        heads = [[head] for head in range(len(strip[0]))] if strip else []
        return cls(
            region.tensor,
            _joined(region.queries, rows),
            _joined(region.keys, columns),
            _digits(region.pattern, rows, columns),
            _digits(region.pairs, rows, columns),
            _digits(strip, columns if region.tensor in ("dk", "dv") else rows, heads) if heads else None,
        )

    @property
    def of_keys(self) -> bool:
        """Whether the rows of the result are keys, as those of dk and dv are."""
        return self.tensor in ("dk", "dv")


def _joints(pieces: Sequence[Piece], most: int) -> list[list[int]]:
    """Group the indices of pieces to be joined, neighbours of one rank each, into about `most` groups."""
    each = -(-len(pieces) // most) if pieces else 1
    found = []
    for _, first, count in spans(pieces):
        found += [list(range(at, min(at + each, first + count))) for at in range(first, first + count, each)]
    return found


def _joined(pieces: Sequence[Piece], joints: list[list[int]]) -> list[Piece]:
    return [(pieces[some[0]][0], pieces[some[0]][1], pieces[some[-1]][2]) for some in joints]


def _digits(digits: Digits | None, rows: list[list[int]], columns: list[list[int]]) -> Digits | None:
    """Return the largest digit of each joined cell; `None` if there are no digits of the size of these axes."""
    high, wide = (sum(map(len, joints)) for joints in (rows, columns))
    if digits is None or len(digits) != high or any(len(row) != wide for row in digits):
        return None
    return tuple("".join(max(digits[y][x] for y in some for x in others) for others in columns) for some in rows)


def spans(pieces: Iterable[Piece]) -> list[tuple[int, int, int]]:
    """Return for each rank its number, the index of its first piece, and how many pieces it has."""
    found: list[tuple[int, int, int]] = []
    for rank, some in groupby(enumerate(pieces), key=lambda numbered: numbered[1][0]):
        places = [place for place, _ in some]
        found.append((rank, places[0], len(places)))
    return found


def holding(pieces: Sequence[Piece], rank: int, positions: Iterable[int] | None) -> list[int]:
    """Return the indices of a rank's pieces that hold any of these positions; of all its pieces for `None`."""
    wanted = None if positions is None else list(positions)
    return [
        place
        for place, (owner, first, last) in enumerate(pieces)
        if owner == rank and (wanted is None or any(first <= position <= last for position in wanted))
    ]


def runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in `places`: the first number and the length of each."""
    found: list[tuple[int, int]] = []
    for place in sorted(set(places)):
        if found and place == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((place, 1))
    return found
