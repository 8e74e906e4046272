"""Say what the sizes that an exception names stand for, such as 4 and 5 that do not match.

Each is held against numbers that a rank may have meant, such as the rows of rank 0, in every case that fails so: what
is the same in all of them it stands for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.implementation import Capabilities

NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")

FEWEST = 4
"""Cases in which a size has to be what it stands for."""


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception: the case, its rank in the ring, and the message."""

    case: Case
    rank: int
    message: str

    @property
    def words(self) -> str:
        """The message without its sizes."""
        return NUMBER.sub("#", self.message)

    @property
    def sizes(self) -> list[int]:
        """The sizes that it names."""
        return [int(found) for found in NUMBER.findall(self.message)]


def of_sizes(seen: Sequence[Raised], capabilities: Capabilities) -> str | None:
    """Return what sizes in the message of the first stand for, if two that vary are different numbers of rows or heads.

    Args:
        seen: exceptions, of which those count that say the same as the first but for sizes.
        capabilities: what the implementation declares.
    """
    alike = [one for one in seen if one.words == seen[0].words]
    if len(alike) < FEWEST:
        return None
    meant = [dict(_numbers(one.case, one.rank, capabilities)) for one in alike]
    told: dict[str, int] = {}
    for sizes in zip(*(one.sizes for one in alike), strict=True):
        if len(set(sizes)) > 1:
            names = (n for n in meant[0] if all(n in m and m[n] == size for m, size in zip(meant, sizes, strict=True)))
            if (name := next(names, None)) is not None:
                told.setdefault(name, sizes[0])
    rows = {name: size for name, size in told.items() if name not in SHAPES}
    if len(rows) < 2:
        return None
    return "of the sizes in its message, " + ", and ".join(f"{size} is {name}" for name, size in rows.items())


SHAPES = ("heads", "key heads", "head_dim", "value_dim", "batch")
"""Sizes that any tensor has: they say nothing about which one is meant."""


def _numbers(case: Case, rank: int, capabilities: Capabilities) -> Iterator[tuple[str, int]]:
    """Yield what a size may stand for on a rank, the likeliest first, in words and as a number."""
    p, ranks = case.problem, case.world_size
    yield from zip(SHAPES, (p.heads, p.hk, p.head_dim, p.dv, p.batch), strict=True)
    queries, keys = ([len(rows) for rows in held] for held in shards(case, capabilities))
    kinds = [("tokens", keys, p.nk)] if keys == queries else [("keys", keys, p.nk), ("queries", queries, p.nq)]
    for what, held, n in kinds:
        owners = {"the rank's own": rank, "rank 0's": 0, "the previous rank's": rank - 1, "the next rank's": rank + 1}
        for whose, owner in (owners | {"the last rank's": -1}).items():
            yield f"{whose} number of {what}", held[owner % ranks]
        yield f"the largest number of {what} of a rank", max(held)
        yield f"the smallest number of {what} of a rank", min(held)
        yield f"the number of {what} of all ranks", n
        yield f"the number of {what} of all ranks, divided by the ranks", n // ranks
        yield f"the number of {what} of all ranks, divided by the ranks and rounded up", -(-n // ranks)
        yield f"the largest number of {what} of a rank, times the ranks", max(held) * ranks
        pair = sum(held[rank - rank % 2 :][:2])
        yield f"the number of {what} of two neighbours", pair
        yield f"half of the number of {what} of two neighbours", pair // 2
        yield f"half of the number of {what} of two neighbours, rounded up", -(-pair // 2)
