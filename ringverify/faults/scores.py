"""Faults of one block's scores and softmax: scale, softcap, grouped heads, the maximum, tiles (E in the reports)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from ringref.problem import Problem
from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import Shift, highest
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, attend, gradients, multiplicity

Tensor = torch.Tensor
FAULTS = Faults()


# -- scale -------------------------------------------------------------------------------------------------------------


def _scale(of: Callable[[Problem], float]) -> Steps:
    return replace(STEPS, scale=lambda here: float(of(here.problem)))


def _default(of: Callable[[Problem], float]) -> Steps:
    """Use another default scale, where the problem names none."""
    return _scale(lambda p: of(p) if p.scale is None else p.scale)


FAULTS.add("O14", "scale is 1/sqrt(D + 1)", _scale(lambda p: (p.head_dim + 1) ** -0.5))
FAULTS.cause(
    "scale is 1/sqrt(D + 1)", _default(lambda p: (p.head_dim + 1) ** -0.5), more=" where the default is wanted"
)
FAULTS.add("O15", "scale applied twice", _scale(lambda p: p.scale_value**2))
FAULTS.add("O18", "sign of the scale lost", _scale(lambda p: abs(p.scale_value)))
FAULTS.add(
    "O116", "scale is rounded to float32", _scale(lambda p: torch.tensor(p.scale_value, dtype=torch.float32).item())
)
FAULTS.add(
    "E3a", "scale is that of D rounded up to a multiple of 8", _default(lambda p: (-(-p.head_dim // 8) * 8) ** -0.5)
)
FAULTS.add("E3b", "scale is 1/8, that of D = 64", _default(lambda p: 0.125))
FAULTS.add("E3c", "scale ignored: 1/sqrt(D) is used whatever was asked for", _scale(lambda p: p.head_dim**-0.5))
FAULTS.cause("scale is 1/8, that of D = 64", _scale(lambda p: 0.125), more=", whatever was asked for")
FAULTS.cause("scale not applied", _scale(lambda p: 1.0))
FAULTS.cause("scale is 1/sqrt(Dv)", _scale(lambda p: p.dv**-0.5))
FAULTS.cause(
    "scale is that of D rounded up to a multiple of 16", _default(lambda p: (-(-p.head_dim // 16) * 16) ** -0.5)
)
FAULTS.cause(
    "scale is that of D rounded up to a power of 2", _default(lambda p: 2.0 ** (-math.ceil(math.log2(p.head_dim)) / 2))
)
FAULTS.cause("scale is 1/D", _default(lambda p: 1 / p.head_dim))
FAULTS.cause("scale is sqrt(D)", _default(lambda p: p.head_dim**0.5))
FAULTS.cause("scale is 1/sqrt(D - 1)", _default(lambda p: max(1, p.head_dim - 1) ** -0.5))
FAULTS.cause("scale is 1/sqrt(H · D), that of all heads together", _default(lambda p: (p.heads * p.head_dim) ** -0.5))
DIMENSIONS: dict[str, Callable[[Here], int]] = {
    "the number of heads": lambda here: here.problem.heads,
    "the number of heads a rank": lambda here: here.problem.heads // here.size,
    "the number of key heads": lambda here: here.problem.hk,
    "the number of keys": lambda here: here.problem.nk,
    "the number of keys a rank": lambda here: here.problem.nk // here.size,
    "the number of ranks": lambda here: here.size,
}
"""What may be taken for head_dim, if the wrong axis is."""


for axis, of in DIMENSIONS.items():
    FAULTS.cause(
        f"scale is 1/sqrt of {axis} instead of head_dim",
        replace(
            STEPS,
            scale=lambda here, of=of: float(
                max(1, of(here)) ** -0.5 if here.problem.scale is None else here.problem.scale
            ),  # type: ignore[misc]
        ),
    )
FAULTS.cause("scale lacks the factor log2(e)", _scale(lambda p: p.scale_value * math.log(2)))
FAULTS.cause("scale has a factor log2(e) too many", _scale(lambda p: p.scale_value / math.log(2)))


# -- softcap -----------------------------------------------------------------------------------------------------------

FAULTS.add("O19", "softcap ignored in the forward, its derivative is there", replace(STEPS, cap=lambda s, softcap: s))
for factor, says in ((math.log(2), "lack the factor log2(e)"), (1 / math.log(2), "have a factor log2(e) too many")):
    FAULTS.cause(
        f"scores {says} where they are capped",
        replace(STEPS, cap=lambda s, c, factor=factor: factor * STEPS.cap(s, c)),  # type: ignore[misc]
    )
FAULTS.cause("softcap ignored", replace(STEPS, cap=lambda s, c: s, cap_slope=lambda s, c: torch.ones_like(s)))


def _capped_first(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    if (softcap := here.problem.softcap) is None:
        return STEPS.capped(steps, here, q, k)
    return steps.cap(steps.scores(q, k, 1.0), softcap) * steps.scale(here)


FAULTS.cause("softcap applied before the scale", replace(STEPS, capped=_capped_first))
FAULTS.add("O20", "derivative of the softcap missing", replace(STEPS, cap_slope=lambda s, softcap: torch.ones_like(s)))


def _uncapped_abroad(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    if here.problem.causal and owner != here.rank:
        steps = replace(steps, cap_slope=lambda s, softcap: torch.ones_like(s))
    return gradients(steps, here, hop, owner, rows, block)


FAULTS.add(
    "O123",
    "derivative of the softcap missing",
    replace(STEPS, gradients=_uncapped_abroad),
    more=" on causal blocks from other ranks",
    narrow=True,
)
FAULTS.add(
    "O21", "softcap by clipping instead of tanh", replace(STEPS, cap=lambda s, softcap: s.clamp(-softcap, softcap))
)
FAULTS.cause(
    "softcap by clipping instead of tanh",
    replace(STEPS, cap=lambda s, c: s.clamp(-c, c), cap_slope=lambda s, c: (s.abs() < c).to(s.dtype)),
)
FAULTS.cause(
    "softcap is tanh(s / c), without its factor c",
    replace(STEPS, cap=lambda s, c: torch.tanh(s / c), cap_slope=lambda s, c: (1 - s**2) / c),
)
FAULTS.add(
    "O22",
    "derivative of the softcap is 1 + tanh² instead of 1 - tanh²",
    replace(STEPS, cap_slope=lambda s, softcap: 1 + (s / softcap) ** 2),
)
FAULTS.cause(
    "derivative of the softcap is 1 - s² of the capped score, which is not divided by the softcap",
    replace(STEPS, cap_slope=lambda s, softcap: 1 - s**2),
)


def _slope_of_raw(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    # The capped score of a large one is the softcap, which no longer tells the score: it is computed anew.
    raw = steps.scores(rows[0], steps.per_query_head(here, steps.widen(here, block.k)), steps.scale(here))
    return gradients(
        replace(steps, cap_slope=lambda s, softcap: 1 - (raw / softcap) ** 2), here, hop, owner, rows, block
    )


FAULTS.cause(
    "derivative of the softcap is 1 - (s / c)², of the score before the softcap",
    replace(STEPS, gradients=_slope_of_raw),
)


def _slope_of_dp_alone(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    if (softcap := here.problem.softcap) is None:
        return gradients(steps, here, hop, owner, rows, block)
    s = steps.capped(steps, here, rows[0], steps.per_query_head(here, steps.widen(here, block.k)))
    slope = arithmetic.cap_slope(s, softcap)
    alone = replace(
        steps,
        dp=lambda dout, v: arithmetic.dp(dout, v) * slope,
        cap_slope=lambda s, softcap: torch.ones_like(s),
    )
    return gradients(alone, here, hop, owner, rows, block)


FAULTS.cause(
    "derivative of the softcap is applied to dout·v alone, before delta is subtracted",
    replace(STEPS, gradients=_slope_of_dp_alone),
)
FAULTS.add(
    "O103",
    "derivative of the softcap is taken of the capped score",
    replace(STEPS, cap_slope=lambda s, softcap: 1 - torch.tanh(s / softcap) ** 2),
)


def _other_cap(of: Callable[[float], float]) -> Steps:
    return replace(
        STEPS,
        cap=lambda s, softcap: arithmetic.cap(s, of(softcap)),
        cap_slope=lambda s, softcap: arithmetic.cap_slope(s, of(softcap)),
    )


OTHER: dict[str, Callable[[float], float]] = {
    "half of": lambda x: x / 2,
    "twice": lambda x: 2 * x,
    "the square of": lambda x: x * x,
    "the inverse of": lambda x: 1 / x,
    "the root of": lambda x: abs(x) ** 0.5,
}
"""What a number may be taken for."""

for which, other in OTHER.items():
    FAULTS.cause(f"softcap is {which} what was asked for", _other_cap(other))
    FAULTS.cause(f"scale is {which} what it should be", _scale(lambda p, other=other: other(p.scale_value)))  # type: ignore[misc]


# -- grouped heads -----------------------------------------------------------------------------------------------------


def _sum_by_turns(here: Here, x: Tensor) -> Tensor:
    return x.view(x.size(0), -1, here.problem.hk, *x.shape[2:]).sum(dim=1)


FAULTS.add(
    "O28",
    "grouped heads: query head h reads key head h % Hk",
    replace(
        STEPS, per_query_head=lambda here, x: x.repeat(1, here.problem.group_size, 1, 1), per_key_head=_sum_by_turns
    ),
)
FAULTS.cause(
    "dk and dv of a key head are summed over h % Hk instead of its group", replace(STEPS, per_key_head=_sum_by_turns)
)


def _sum_by_turns_of(together: int, here: Here, x: Tensor) -> Tensor:
    """Sum by turns among so many key heads, and then among the next ones."""
    parts = torch.split(x, together * here.problem.group_size, dim=1)
    return torch.cat([torch.unflatten(part, 1, (here.problem.group_size, -1)).sum(dim=1) for part in parts], dim=1)


for together in (2, 3):  # 4 at a time are all that most cases have
    FAULTS.cause(
        f"dk and dv of a key head are summed over h % {together} instead of its group, {together} key heads at a time",
        replace(STEPS, per_key_head=functools.partial(_sum_by_turns_of, together)),
    )


def _dealt_in_turn(here: Here) -> Tensor:
    """The key head that each query head meets if both are dealt out in turn to as many ranks as divide key heads."""
    ranks, head = math.gcd(here.size, here.problem.hk), torch.arange(here.problem.heads)
    return head // ranks // here.problem.group_size * ranks + head % ranks


def _sum_as_dealt(here: Here, x: Tensor) -> Tensor:
    found = x.new_zeros((x.size(0), here.problem.hk, *x.shape[2:]))
    return found.index_add(1, _dealt_in_turn(here), x)


DEALT_IN_TURN = (
    "grouped heads: an all-to-all deals heads out in turn (rank u has u, u + U, …; U divides ranks and key heads), so "
    "that query heads meet other key heads than their own"
)
IN_TURN = replace(STEPS, per_query_head=lambda here, x: x[:, _dealt_in_turn(here)], per_key_head=_sum_as_dealt)
FAULTS.cause(DEALT_IN_TURN, IN_TURN)


def _copies(here: Here) -> int:
    """Return how often a key head is repeated so that the ranks divide them; 1 where the query heads do not fit."""
    times = math.lcm(here.problem.hk, here.size) // here.problem.hk
    return times if here.problem.group_size % times == 0 else 1


def _first_copy(here: Here, x: Tensor) -> Tensor:
    b, _, t, d = x.shape
    return x.view(b, here.problem.hk, _copies(here), -1, t, d)[:, :, 0].sum(dim=2)


def _key_head(of: Callable[[int, int, int, int, int], int]) -> Steps:
    """Read another key head, by query head, size of a group, number of key heads, of their copies and of ranks."""

    def heads(here: Here) -> list[int]:
        p = here.problem
        return [of(head, p.group_size, p.hk, _copies(here), here.size) for head in range(p.heads)]

    def per_key_head(here: Here, x: Tensor) -> Tensor:
        found = x.new_zeros((x.size(0), here.problem.hk, *x.shape[2:]))
        return found.index_add_(1, torch.tensor(heads(here)), x)

    return replace(STEPS, per_query_head=lambda here, x: x[:, heads(here)], per_key_head=per_key_head)


def _dealt(heads: int, ranks: int) -> list[range]:
    """The query heads of each rank after an exchange of heads: runs, of which the first ones are longer by one."""
    least, more = divmod(heads, ranks)
    begins = [rank * least + min(rank, more) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in itertools.pairwise(begins)]


def _first_of_rank(head: int, heads: int, ranks: int) -> int:
    return next(run.start for run in _dealt(heads, ranks) if head in run)


def _from_first_of_rank(head: int, group: int, heads: int, ranks: int) -> int:
    """The key head of a query head if groups are cut from the first query head of every rank."""
    first = _first_of_rank(head, heads, ranks)
    return first // group + (head - first) // group


for which, key_head in {
    "that of the next group": lambda head, group, count, copies, ranks: (head // group + 1) % count,
    "that of the group before": lambda head, group, count, copies, ranks: (head // group - 1) % count,
    "that of its group counted from the last": lambda head, group, count, copies, ranks: count - 1 - head // group,
    "where copies of key heads that the ranks divide are made by turns": lambda head, group, count, copies, ranks: (
        head // (group // copies) % count
    ),
    "where copies of key heads that teams of two ranks divide are made by turns": (
        lambda head, group, count, copies, ranks: (
            head // group if ranks % 2 or group % 2 or count % 2 == 0 else head // (group // 2) % count
        )
    ),
    "where query heads and key heads are dealt to the ranks by turns": lambda head, group, count, copies, ranks: (
        head % ranks + head // ranks // group * ranks if count % ranks == 0 else head // group
    ),
    "one of its rank by turns, where the ranks divide the key heads": lambda head, group, count, copies, ranks: (
        head // group
        if count % ranks
        else head // (group * count // ranks) * (count // ranks) + head % (count // ranks)
    ),
    "that of its rank's first query head, where the ranks do not divide the key heads": (
        lambda head, group, count, copies, ranks: (
            head // group if count % ranks == 0 else _first_of_rank(head, count * group, ranks) // group
        )
    ),
    "counted from its rank's first query head on, as if a group began with it": (
        lambda head, group, count, copies, ranks: _from_first_of_rank(head, group, count * group, ranks)
    ),
    "that of groups of heads that are padded to a multiple of the ranks": lambda head, group, count, copies, ranks: (
        head // (-(-count * group // ranks) * ranks // count)
    ),
    "the one of its own number, or the last": lambda head, group, count, copies, ranks: min(head, count - 1),
}.items():
    FAULTS.cause(f"grouped heads: a query head reads the wrong key head, {which}", _key_head(key_head))


def _of_the_last_rank(here: Here, x: Tensor) -> Tensor:
    """Sum over the query heads of a key head that the last of its ranks has, after an exchange of heads."""
    runs = _dealt(here.problem.heads, here.size)
    of_heads = [rank for rank, run in enumerate(runs) for _ in run]
    ranks = torch.tensor(of_heads).view(here.problem.hk, -1)
    return arithmetic.per_key_head(here, x * (ranks == ranks[:, -1:]).view(-1)[:, None, None])


FAULTS.cause(
    "grouped heads: of a key head whose query heads an exchange gives to several ranks, dk and dv are what those on "
    "the last of them add",
    replace(STEPS, per_key_head=_of_the_last_rank),
)


def _head_0(here: Here, x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, here.problem.heads, -1, -1)


def _sum_in_head_0(here: Here, x: Tensor) -> Tensor:
    found = x.new_zeros((x.size(0), here.problem.hk, *x.shape[2:]))
    found[:, 0] = x.sum(dim=1)
    return found


FAULTS.cause(
    "grouped heads: every query head reads key head 0",
    replace(STEPS, per_query_head=_head_0, per_key_head=_sum_in_head_0),
)
FAULTS.add(
    "O29",
    "grouped heads: dk and dv are means over the query heads of a group",
    replace(STEPS, per_key_head=lambda here, x: arithmetic.per_key_head(here, x) / here.problem.group_size),
)
FAULTS.add(
    "O30",
    "grouped heads: dk and dv come from the first query head of a group alone",
    replace(STEPS, per_key_head=lambda here, x: x[:, :: here.problem.group_size].contiguous()),
)
FAULTS.cause(
    "grouped heads: dk and dv come from the last query head of a group alone",
    replace(STEPS, per_key_head=lambda here, x: x[:, here.problem.group_size - 1 :: here.problem.group_size]),
)


FAULTS.cause(
    "grouped heads: key heads are repeated so that the ranks divide them, and dk and dv come from the first copy alone",
    replace(STEPS, per_key_head=_first_copy),
)


def of_one_tensor(name: Literal["dk", "dv"], counts: Callable[[int, int], bool]) -> Steps:
    """Let some query heads of a group alone add to dk, or to dv, by their number in it and the size of the group."""

    def limited(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        group = here.problem.group_size
        heads = torch.tensor([counts(head % group, group) for head in range(here.problem.heads)])[:, None, None]

        def dk(ds: Tensor, q: Tensor, scale: float, attended: Tensor) -> Tensor:
            return arithmetic.dk(ds, q, scale, attended) * heads

        def dv(p: Tensor, dout: Tensor, attended: Tensor) -> Tensor:
            return arithmetic.dv(p, dout, attended) * heads

        return gradients(
            replace(steps, dk=dk) if name == "dk" else replace(steps, dv=dv), here, hop, owner, rows, block
        )

    return replace(STEPS, gradients=limited)


NAMES: tuple[Literal["dk", "dv"], ...] = ("dk", "dv")
for name in NAMES:
    FAULTS.cause(
        f"grouped heads: {name} comes from the first query head of a group alone",
        of_one_tensor(name, lambda head, group: head == 0),
    )
    FAULTS.cause(
        f"grouped heads: {name} comes from the last query head of a group alone",
        of_one_tensor(name, lambda head, group: head == group - 1),
    )


def _between_groups(here: Here, x: Tensor) -> Tensor:
    """Sum over the query heads of a key head into a buffer that still holds the previous key head."""
    summed = arithmetic.per_key_head(here, x)
    return summed.cumsum(dim=1) if here.problem.group_size > 1 else summed


FAULTS.add(
    "F9b",
    "grouped heads: dk and dv of a key head hold those of the key heads before it too",
    replace(STEPS, per_key_head=_between_groups),
)


# -- softmax of one block ----------------------------------------------------------------------------------------------


def shifted(shift: Shift) -> Steps:
    """Scores stabilised by another number than the largest that is attended."""
    return replace(STEPS, partial=lambda s, m, v: arithmetic.partial(s, m, v, shift))


FAULTS.add(
    "O10",
    "the stabiliser is taken over masked keys too: the row vanishes",
    shifted(lambda s, attended: s.amax(dim=-1, keepdim=True)),
    overflows=True,
)
FROM_ZERO = shifted(lambda s, attended: highest(s, attended).clamp(min=0.0))

EMPTY_FROM_0 = "the running maximum begins at 0: rows whose scores lie far below it are empty"

EMPTY_BELOW = "one maximum is taken for {}: rows whose scores lie far below it are empty"

FAULTS.add(
    "O114",
    EMPTY_FROM_0,
    FROM_ZERO,
    overflows=True,
)
FAULTS.cause(
    "the running maximum begins at 0: rows whose scores lie far below it are 0 / 0",
    replace(FROM_ZERO, normalise=lambda running: running._replace(
        out=running.out.masked_fill((running.lse == -torch.inf)[..., None], torch.nan))),
    overflows=True,
)  # fmt: skip


def _lowest(s: Tensor, attended: Tensor) -> Tensor:
    low = s.masked_fill(~attended, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(low == torch.inf, 0.0, low)


def _attend_by_products(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    lowest = replace(steps, partial=lambda s, m, v: arithmetic.partial(s, m, v, _lowest))
    return attend(lowest if steps.scale(here) < 0 else steps, here, hop, owner, q, block)


FAULTS.add(
    "O119",
    "scores are stabilised by the largest q·k, which is the smallest score where scale is negative",
    replace(STEPS, attend=_attend_by_products),
)


def _largest_of(dims: tuple[int, ...]) -> Shift:
    return lambda s, attended: highest(s, attended).amax(dim=dims, keepdim=True).expand(*s.shape[:-1], 1)


for whole, dims in {"a head": (2,), "a batch entry": (1, 2), "all rows, heads and batch entries": (0, 1, 2)}.items():
    FAULTS.cause(
        EMPTY_BELOW.format(whole),
        shifted(_largest_of(dims)),
        overflows=True,
    )
FAULTS.cause(
    "scores are not stabilised: exp overflows",
    shifted(lambda s, attended: torch.zeros_like(s[..., :1])),
    overflows=True,
)


def _in_half(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return arithmetic.scores(q.half(), k.half(), scale).to(q.dtype)


def _half_scores(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    return STEPS.capped(replace(steps, scores=_in_half) if here.dtype is torch.float16 else steps, here, q, k)


FAULTS.add("R2a", "scores are held in float16: past 65504 they are infinite", replace(STEPS, capped=_half_scores))


def _partial(change: Callable[[Tensor, Tensor, Tensor, Partial], Partial]) -> Steps:
    return replace(STEPS, partial=lambda s, m, v: change(s, m, v, arithmetic.partial(s, m, v)))


FAULTS.add(
    "O08",
    "a block's lse lacks its maximum",
    _partial(
        lambda s, m, v, found: found._replace(
            lse=found.lse - s.masked_fill(m == 0, -math.inf).amax(dim=-1).nan_to_num(neginf=0.0)
        )
    ),
)
FAULTS.add(
    "O09",
    "a block's lse is its maximum: the logarithm of the sum is missing",
    _partial(lambda s, m, v, found: found._replace(lse=s.masked_fill(m == 0, -math.inf).amax(dim=-1))),
)


def _over_queries(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    """Sum over queries instead of keys, where there are as many."""
    found = arithmetic.partial(s, m, v)
    if s.size(2) != s.size(3):
        return found
    return found._replace(lse=arithmetic.partial(s.transpose(2, 3), m.transpose(2, 3), v).lse)


FAULTS.add("O11", "lse sums over queries instead of keys", replace(STEPS, partial=_over_queries))


def lowest_fill(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    """Attention over one block whose masked scores are the smallest finite number."""
    s = torch.where(m > 0, s, torch.finfo(s.dtype).min)
    top = s.amax(dim=-1, keepdim=True)
    w = torch.where(m > 0, m, 1) * torch.exp(s - top)
    total = w.sum(dim=-1, keepdim=True)
    return Partial(w @ v / total, (top + total.log()).squeeze(-1))


FAULTS.add(
    "B13",
    "a finite number stands for -inf: a row without keys in a block becomes the block's average",
    replace(STEPS, partial=lowest_fill),
    overflows=True,
)
FAULTS.cause(
    "a finite number stands for -inf: a row without keys becomes the average of all",
    replace(STEPS, partial=lowest_fill, skip=lambda here, hop, owner, m: not m.numel()),
    overflows=True,
)


def _one_key(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    found = arithmetic.partial(s, m, v)
    return found._replace(lse=torch.zeros_like(found.lse)) if s.size(-1) == 1 else found


FAULTS.add("G5c", "the lse of a block of one key is not written: it is 0", replace(STEPS, partial=_one_key))


# -- tiles and dimensions of kernels -----------------------------------------------------------------------------------


TILES = (2, 4, 8, 16, 32, 64, 128)
"""Keys, or dimensions, that a kernel works on at once."""


def first_dimensions(limit: int) -> Steps:
    """Compute scores from the first dimensions only."""
    return replace(STEPS, scores=lambda q, k, scale: arithmetic.scores(q[..., :limit], k[..., :limit], scale))


def last_tile(tile: int) -> Steps:
    """Attend only the last tile of each block, forward and backward alike."""

    def cut(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        return m * (torch.arange(m.size(3)) >= max(0, m.size(3) - 1) // tile * tile)

    return replace(STEPS, pattern=cut)


def first_keys(limit: int) -> Steps:
    """Attend only the first keys of each block, forward and backward alike."""

    def cut(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        return m * (torch.arange(m.size(3)) < limit)

    return replace(STEPS, pattern=cut)


def forgetting(tile: int, resets: Callable[[Here, int, Tensor], bool]) -> Steps:
    """Attend a block in tiles; a tile that `resets` loses what the tiles before it have added."""

    def tiled(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Any:
        def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
            running: Partial | None = None
            for start in range(0, max(1, m.size(3)), tile):
                run = slice(start, start + tile)
                found = arithmetic.partial(s[..., run], m[..., run], v[:, :, run])
                lost = running is None or resets(here, owner, m[..., run])
                running = found if running is None or lost else arithmetic.merge(running, found)
            assert running is not None
            return running

        return attend(replace(steps, partial=partial), here, hop, owner, q, block)

    return replace(STEPS, attend=tiled)


def never(here: Here, owner: int, m: Tensor) -> bool:
    """Reset at no tile, which is right."""
    return False


def masked(here: Here, owner: int, m: Tensor) -> bool:
    """Reset at a tile that is masked in part."""
    return bool((m == 0).any())


def own_and_masked(here: Here, owner: int, m: Tensor) -> bool:
    """Reset at a tile of the rank's own block that is masked in part."""
    return owner == here.rank and masked(here, owner, m)


def whole_tiles(tile: int, *, fewer: bool) -> Steps:
    """Leave out the keys past the last whole tile of each block; of fewer keys than a tile too, or not."""

    def cut(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        count = m.size(3)
        return m if count < tile and not fewer else m * (torch.arange(count) < count // tile * tile)

    return replace(STEPS, pattern=cut)


def some_dimensions(tile: int, *, last: bool) -> Steps:
    """Compute scores from the last tile of dimensions, or from whole tiles only."""

    def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
        dim = q.size(-1)
        run = slice((dim - 1) // tile * tile, dim) if last else slice(0, dim // tile * tile or dim)
        return arithmetic.scores(q[..., run], k[..., run], scale)

    return replace(STEPS, scores=scores)


Run = Callable[[int, int], slice]
"""Which of so many keys or queries count, by their number and the size of a tile."""


def gradients_of_tiles(tile: int, run_of: Run, *, of_q: bool, filled: bool) -> Steps:
    """Let only some of a block's keys add to dq; or, of a rank's queries, to dk and dv.

    Args:
        tile: the size of a tile.
        run_of: which keys, or queries, count.
        of_q: whether it is dq.
        filled: whether blocks, or queries, are filled up to as many as the rank with most has, before they are cut.
    """

    def chosen(here: Here, x: Tensor) -> slice:
        own = len(here.call.positions)
        return run_of(max(map(len, here.shards)) if filled and own == len(here.shards[here.rank]) else x.size(2), tile)

    def limited(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        def dq(ds: Tensor, k: Tensor, scale: float, attended: Tensor) -> Tensor:
            run = chosen(here, k)
            return arithmetic.dq(ds[..., run], k[:, :, run], scale, attended[..., run])

        def dk(ds: Tensor, q: Tensor, scale: float, attended: Tensor) -> Tensor:
            run = chosen(here, q)
            return arithmetic.dk(ds[:, :, run], q[:, :, run], scale, attended[:, :, run])

        def dv(p: Tensor, dout: Tensor, attended: Tensor) -> Tensor:
            run = chosen(here, dout)
            return arithmetic.dv(p[:, :, run], dout[:, :, run], attended[:, :, run])

        some = replace(steps, dq=dq) if of_q else replace(steps, dk=dk, dv=dv)
        return gradients(some, here, hop, owner, rows, block)

    return replace(STEPS, gradients=limited)


def _last(count: int, tile: int) -> slice:
    return slice(max(0, count - 1) // tile * tile, count)


def _whole(count: int, tile: int) -> slice:
    return slice(0, count // tile * tile or count)


def padded(length: Callable[[Here, int], int], *, first: bool = False) -> Steps:
    """Attend keys of 0 with which each block is filled up to some length, by the keys it has.

    Args:
        length: returns to how many keys, from the rank and how many there are.
        first: whether the mask takes them for the first position; else they are attended whatever the mask.
    """

    def attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Partial:
        found = Partial(*STEPS.attend(steps, here, hop, owner, q, block))
        filling = torch.tensor(length(here, block.k.size(1)) - block.k.size(1), dtype=q.dtype).log()
        if first:
            beginning = replace(steps, keys=lambda here, hop, owner: here.call.positions.new_zeros(1))
            filling = filling + multiplicity(beginning, here, hop, owner)[..., 0].to(q.dtype).log()
        return arithmetic.merge(found, Partial(torch.zeros_like(found.out), filling.expand_as(found.lse)))

    return replace(STEPS, attend=attend)


def _unmasked(steps: Steps) -> Steps:
    """Limit a fault to problems without a mask by position, which covers what follows the last key."""

    def attend(now: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Any:
        p = here.problem
        positional = p.causal or p.window is not None or p.documents is not None or p.key_lengths is not None
        return (STEPS if positional else steps).attend(now, here, hop, owner, q, block)

    return replace(STEPS, attend=attend)


def chunked(count: int) -> Steps:
    """Cut keys in tiles of `count` and the mask in `count` chunks: key c of tile t is masked as key c of chunk t."""

    def misplaced(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        keys = m.size(3)
        size = -(-keys // count)
        return m[..., [min(key // count * size + key % count, keys - 1) for key in range(keys)]] if keys else m

    return replace(STEPS, pattern=misplaced)


for limit in TILES[1:]:
    FAULTS.cause(f"dimensions past the first {limit} are left out of the scores", first_dimensions(limit), tile=limit)
for tile in TILES:
    says = f"a block of more than {tile} keys is attended in tiles of {tile}, and only its last tile counts"
    FAULTS.cause(says, last_tile(tile), tile=tile)
for limit in TILES:
    FAULTS.cause(f"keys past the first {limit} of a block are never attended", first_keys(limit), tile=limit)
for tile in TILES:
    says = f"keys past the last whole tile of {tile} of a block are never attended"
    FAULTS.cause(says, whole_tiles(tile, fewer=True), tile=1)
    FAULTS.cause(says, whole_tiles(tile, fewer=False), more=", unless it has fewer", tile=tile)
    says = f"dimensions in tiles of {tile}: only the last tile enters the scores"
    FAULTS.cause(says, some_dimensions(tile, last=True), tile=tile)
    says = f"dimensions past the last whole tile of {tile} are left out of the scores"
    FAULTS.cause(says, some_dimensions(tile, last=False), tile=tile)
    for of_q, what in ((True, "each block's keys count in dq"), (False, "queries count in dk and dv")):
        for run, which in ((_last, "last tile"), (_whole, "whole tiles")):
            says = f"tiles of {tile}: only the {which} of {what}"
            FAULTS.cause(says, gradients_of_tiles(tile, run, of_q=of_q, filled=False), tile=tile)
        says = f"tiles of {tile}: only the last tile of {what}"
        steps = gradients_of_tiles(tile, _last, of_q=of_q, filled=True)
        FAULTS.cause(says, steps, more=", where short shards are filled up", tile=tile)
    says = f"blocks are filled up with zero keys to a multiple of {tile}, which are attended"
    FAULTS.cause(says, padded(lambda here, count, tile=tile: -(-count // tile) * tile), tile=1)  # type: ignore[misc]
says = "short blocks are filled up with zero keys, which are attended"
FAULTS.cause(says, _unmasked(padded(lambda here, count: max(map(len, here.shards)))), more=" where no mask covers them")
FAULTS.cause(says, padded(lambda here, count: max(map(len, here.shards))))
says = "short blocks are filled up with zero keys at position 0, which are attended where the mask allows it"
FAULTS.cause(says, padded(lambda here, count: max(map(len, here.shards)), first=True))
for tile in TILES:
    says = f"tiles of {tile} keys: every tile that is masked in part forgets the tiles before it"
    FAULTS.cause(f"own block in {says}", forgetting(tile, own_and_masked), tile=tile)
    FAULTS.cause(says, forgetting(tile, masked), tile=tile)
for count in TILES[:4]:
    FAULTS.cause(f"the mask is cut in {count} chunks, the keys in tiles of {count}", chunked(count), tile=count)
FAULTS.mutant("O93", "dimensions past the first 32 are left out of the scores")
FAULTS.mutant(
    "O92", "a block of more than 32 keys is attended in tiles of 32, and only its last tile counts, in the forward only"
)
FAULTS.mutant("A10", "own block in tiles of 2 keys: every tile that is masked in part forgets the tiles before it")
FAULTS.mutant("G6", "the mask is cut in 2 chunks, the keys in tiles of 2, in the forward only")
