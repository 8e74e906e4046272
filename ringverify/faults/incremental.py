"""Faults of chunked prefill and decoding: the prefix, what is kept from call to call, and who holds which page.

Mutants declare `incremental`, and so are tried on growing caches; all others are tried on the cases of before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.sharding import KEY_SHARDINGS, QUERY_SHARDINGS, PageTable, key_positions
from ringverify.faults.arithmetic import rounded
from ringverify.faults.fault import FaultKind, Faults
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import EVERYTHING, STEPS, Steps

Tensor = torch.Tensor
Attended = Callable[[Here, Tensor, Tensor], Tensor]
FAULTS = Faults()
CACHES = replace(EVERYTHING, incremental=True, query_sharding=QUERY_SHARDINGS, key_sharding=(*KEY_SHARDINGS, "pages"))
"""What these mutants claim."""


def _add(id: str, says: str, steps: Steps, *, kind: FaultKind = "value") -> None:
    FAULTS.add(id, says, steps, kind=kind, claims=CACHES)


def _only(attended: Attended) -> Steps:
    """The ring that attends fewer pairs: `attended` of query positions in the cache `(S, 1)` and keys `(1, T)`."""

    def pattern(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        i = steps.queries(here)[:, None] + here.call.offset
        return STEPS.pattern(steps, here, hop, owner) * attended(here, i, steps.keys(here, hop, owner)[None, :])

    return replace(STEPS, pattern=pattern)


_add(
    "O170",
    "a chunk forgets the prefix: it attends its own tokens alone",
    _only(lambda here, i, j: (j >= here.call.offset) | (i < here.call.offset)),
)
_add(
    "O171",
    "while decoding, each rank attends its own part of the cache alone",
    replace(
        STEPS,
        together=lambda steps, here, partial: partial if here.problem.nq == 1 else STEPS.together(steps, here, partial),
        hops=lambda here: 1 if here.problem.nq == 1 and not here.replicated else here.size,
    ),
)
_add(
    "O172",
    "a single query does without the window",
    replace(STEPS, window=lambda p, i, j: torch.ones_like(i - j) if p.nq == 1 else STEPS.window(p, i, j)),
)


def _in_order(here: Here, hop: int, owner: int) -> Tensor:
    return here.shards[owner].sort().values if here.call.page_table is not None else here.shards[owner]


def _in_turn(here: Here, hop: int, owner: int) -> Tensor:
    """Positions of a block as if pages were dealt one a rank in turn, as far as there are rows for them."""
    table, own = here.call.page_table, here.shards[owner]
    if table is None:
        return own
    count = max(1, max((page + 1 for pages in table.pages for page in pages), default=1))
    turns = tuple(tuple(range(rank, count, here.size)) for rank in range(here.size))
    found = torch.from_numpy(key_positions(PageTable(table.page_size, turns), here.problem.nk, here.size)[owner].copy())
    return torch.cat([found.to(own.device), own[len(found) :]])[: len(own)]


_add("O173", "pages are taken to lie in the order of the sequence", replace(STEPS, keys=_in_order))
_add("O174", "pages are taken to be dealt to the ranks in turn", replace(STEPS, keys=_in_turn))


def _one_after_another(here: Here, hop: int, owner: int) -> Tensor:
    """Positions of a block as if the cache lay contiguous."""
    first = sum(map(len, here.shards[:owner]))
    return torch.arange(first, first + len(here.shards[owner]), device=here.shards[owner].device)


def _of_rank(by: int) -> Steps:
    """The ring that takes a block for the pages of another rank, as far as there are rows for them."""

    def keys(here: Here, hop: int, owner: int) -> Tensor:
        own, other = here.shards[owner], here.shards[(owner + by) % here.size]
        return own if here.call.page_table is None else torch.cat([other, own[len(other) :]])[: len(own)]

    return replace(STEPS, keys=keys)


FAULTS.cause("the cache is taken to lie contiguous", replace(STEPS, keys=_one_after_another))
FAULTS.cause("pages are taken to be those of the next rank", _of_rank(1))
FAULTS.cause("pages are taken to be those of the rank before", _of_rank(-1))


def _whole_pages(here: Here, i: Tensor, j: Tensor) -> Tensor:
    table = here.call.page_table
    whole = here.problem.nk if table is None else here.problem.nk // table.page_size * table.page_size
    return (j < whole) | (j >= here.call.offset)


FAULTS.cause(
    "a single query is masked as if it were one position earlier: it does not attend its own token",
    _only(lambda here, i, j: (j < i) | (here.problem.nq > 1) | (here.call.offset == 0)),
)
_add("O175", "of earlier tokens, those of a page that is not full are left out", _only(_whole_pages))


def _leaving(steps: Steps, here: Here, partial: Partial) -> Partial:
    return STEPS.together(steps, here, partial) if len(here.call.key_positions) else partial


_add(
    "O176",
    "a rank without keys does not take part in the merge",
    replace(STEPS, together=_leaving),
    kind="failure",
)
_add(
    "O177",
    "queries are taken to follow one another from the rank's first one on",
    replace(STEPS, queries=lambda here: here.call.positions[:1] + torch.arange(len(here.call.positions))),
)

_LENGTHS: dict[int, int] = {}
"""Keys of the first call of a sequence, by rank."""


def _as_at_first(here: Here, i: Tensor, j: Tensor) -> Tensor:
    if not here.call.offset:
        _LENGTHS[here.rank] = here.problem.nk
    return (j < _LENGTHS.get(here.rank, here.problem.nk)) | (j == i)


_add("O178", "the length of the cache is kept from the first call", _only(_as_at_first), kind="state")


def _narrow_partials(steps: Steps, here: Here, partial: Partial) -> Partial:
    """Round what a rank found before it is merged with what others did, where a single query is decoded."""
    if here.problem.nq == 1:
        partial = Partial(*(rounded(here, one) for one in partial))
    return STEPS.together(steps, here, partial)


_add(
    "O187",
    "while decoding, out and lse of a rank are rounded to the input dtype before they are merged",
    replace(STEPS, together=_narrow_partials),
    kind="precision",
)

_MASKS: dict[tuple[object, ...], Tensor] = {}


def _kept_mask(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    """Keep masks under a key that has all but the length of the cache."""
    p, block = here.problem, here.shards[owner]
    key = (here.rank, owner, here.size, here.call.sharding, p.replace(key_length=p.nq, key_lengths=None), len(block))
    return _MASKS.setdefault(key, STEPS.pattern(steps, here, hop, owner))


_add(
    "O179",
    "masks are kept without the length of the cache in their key",
    replace(STEPS, pattern=_kept_mask),
    kind="state",
)
