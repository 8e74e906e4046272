"""Say what the sizes that an exception names stand for, such as 4 and 5 that do not match.

Each is held against numbers that a rank may have meant, such as the rows of rank 0, in every case that fails so: what
is the same in all of them it stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.implementation import Capabilities

FEWEST = 4
"""Cases in which a size has to be what it stands for."""


@dataclasses.dataclass(frozen=True)
class SizedError:
    """An exception that may name sizes.

    Attributes:
        case: the case.
        rank: the rank of the ring that raised it.
        words: what it says but for sizes: the same for one kind of exception.
        sizes: the sizes, in the order in which it names them.
    """

    case: Case
    rank: int
    words: str
    sizes: tuple[int, ...]


def of_sizes(seen: Sequence[SizedError], capabilities: Capabilities) -> str | None:
    """Return what sizes in a message stand for, if two that vary from case to case are different numbers of rows.

    Args:
        seen: exceptions of one mistake, that of the smallest case first. It may be told in several messages.
        capabilities: what the implementation declares.
    """
    for words in dict.fromkeys(one.words for one in seen):
        alike = [one for one in seen if one.words == words]
        rows = _rows(alike, capabilities) if len(alike) >= FEWEST else {}
        if len(rows) > 1:
            case = alike[0].case
            where = "" if case == seen[0].case else f" on {case.world_size} ranks with n={case.problem.nk}"
            told = ", and ".join(f"{size} is {name}" for name, size in rows.items())
            return f"of the sizes in its message{where}, {told}"
    return None


def _rows(alike: Sequence[SizedError], capabilities: Capabilities) -> dict[str, int]:
    """Return which numbers of rows exceptions with one message name, and how large they are in the first.

    Of two that are the same in all of them, such as that of rank 0 and the largest, both are told.
    """
    meant = [dict(_numbers(one.case, one.rank, capabilities)) for one in alike]
    found: dict[str, int] = {}
    for sizes in zip(*(one.sizes for one in alike), strict=True):
        if len(set(sizes)) > 1:
            fits = [name for name in meant[0] if all(m.get(name) == n for m, n in zip(meant, sizes, strict=True))]
            if fits and fits[0] not in SHAPES:
                found.setdefault(" or ".join(fits[: 1 if fits[0].startswith(OWN) else 2]), sizes[0])
    return found


OWN = "the rank's own"

SHAPES = ("heads", "key heads", "head_dim", "value_dim", "batch")
"""Sizes that any tensor has: they say nothing about which one is meant."""


def _numbers(case: Case, rank: int, capabilities: Capabilities) -> Iterator[tuple[str, int]]:
    """Yield what a size may stand for on a rank, the likeliest first, in words and as a number."""
    p, ranks = case.problem, case.world_size
    yield from zip(SHAPES, (p.heads, p.hk, p.head_dim, p.dv, p.batch), strict=True)
    queries, keys = ([len(rows) for rows in held] for held in shards(case, capabilities))
    kinds = [("tokens", keys, p.nk)] if keys == queries else [("keys", keys, p.nk), ("queries", queries, p.nq)]
    for what, held, n in kinds:
        owners = {OWN: rank, "rank 0's": 0, "the previous rank's": rank - 1, "the next rank's": rank + 1}
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
