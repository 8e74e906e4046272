"""Faults of the backward: its formula, what it starts from, what hops add, what is returned (F in the reports, K1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from ringref.sharding import pieces
from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import permuted
from ringverify.faults.fault import Faults
from ringverify.faults.masking import no_padding
from ringverify.faults.merging import TILES
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, Times, gradients, multiplicity
from ringverify.faults.tensors import given

Tensor = torch.Tensor
FAULTS = Faults()


# -- the formula -------------------------------------------------------------------------------------------------------

FAULTS.add(
    "R9",
    "the softmax is taken for constant: ds = p · dp, its correction delta is missing",
    replace(STEPS, ds=lambda p, dp, delta: p * dp),
)
FAULTS.add(
    "O24",
    "delta is added instead of subtracted: ds = p · (dp + delta)",
    replace(STEPS, ds=lambda p, dp, delta: p * (dp + delta[..., None])),
)
FAULTS.cause(
    "delta is missing from ds, the cotangent of lse is there", replace(STEPS, delta=lambda dout, out, dlse: -dlse)
)
FAULTS.cause("delta counts twice in ds", replace(STEPS, delta=lambda dout, out, dlse: 2 * (dout * out).sum(-1) - dlse))
FAULTS.cause("delta counts half in ds", replace(STEPS, delta=lambda dout, out, dlse: (dout * out).sum(-1) / 2 - dlse))


Chunks = Callable[[Here], Tensor]
"""The number of the chunk that each query of a rank is in, `(S,)`."""


Last = Callable[[Here, int, int], Tensor]
"""The last chunk that writes to each key of a block, by hop and owner, `(T,)`; −1 if none does."""


def _written_over(chunks: Chunks, last: Last, names: str) -> Steps:
    """Write what each chunk of queries adds to dk or dv over what the chunks before it have."""

    def overwriting(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        kept = chunks(here)[:, None] == last(here, hop, owner)
        changed: dict[str, Any] = {}
        if "k" in names:
            changed["dk"] = lambda ds, q, scale, attended: steps.dk(ds * kept, q, scale, attended)
        if "v" in names:
            changed["dv"] = lambda p, dout, attended: steps.dv(p * kept, dout, attended)
        return gradients(replace(steps, **changed), here, hop, owner, rows, block)

    return replace(STEPS, gradients=overwriting)


def _that_reads(chunks: Chunks) -> Last:
    """A chunk writes to the keys that it reads.

    These are all keys from the first of its first query's to the last of its last query's, as far as causal mask and
    window bound them.
    """

    def last(here: Here, hop: int, owner: int) -> Tensor:
        p, of, j = here.problem, chunks(here), here.shards[owner]
        i, (left, right) = here.call.positions + p.diagonal, p.window or (None, None)
        ends = [side for side in (right, 0 if p.causal else None) if side is not None]
        found = torch.full_like(j, -1)
        for chunk in sorted(set(of.tolist())):
            here_i = i[of == chunk]
            read = torch.ones_like(j, dtype=torch.bool) if left is None else j >= here_i.min() - left
            found = torch.where(read & (j <= here_i.max() + min(ends)) if ends else read, chunk, found)
        return found

    return last


def _that_attends_the_piece(chunks: Chunks) -> Last:
    """A chunk writes to a whole piece of keys, of a zigzag shard, if it attends any of it."""

    def last(here: Here, hop: int, owner: int) -> Tensor:
        attended = multiplicity(STEPS, here, hop, owner).amax(dim=(0, 1)) > 0
        of, piece = chunks(here), _later(here, owner, here.problem.nk, len(here.shards[owner]))
        found = torch.full_like(piece, -1)
        for chunk, number in itertools.product(sorted(set(of.tolist())), (0, 1)):
            if attended[of == chunk][:, piece == number].any():
                found[piece == number] = chunk
        return found

    return last


def _later(here: Here, rank: int, total: int, rows: int) -> Tensor:
    """Number the pieces of a rank's zigzag shard of so many rows, of so many in all; another shard is one piece."""
    place = torch.arange(rows)
    if here.call.sharding != "zigzag":
        return 0 * place
    return (place >= len(pieces(total, 2 * here.size)[rank])).long()


def _pieces(here: Here) -> Tensor:
    return _later(here, here.rank, here.problem.nq, len(here.call.positions))


def _tiles(tile: int) -> Chunks:
    return lambda here: torch.arange(len(here.call.positions)) // tile


for which, what in {"kv": "dk and dv", "k": "dk", "v": "dv"}.items():
    for keys, writer in {
        "": _that_reads(_pieces),
        ", piece by piece of keys": _that_attends_the_piece(_pieces),
    }.items():
        FAULTS.cause(
            f"zigzag: the {what} of a rank's later piece of queries are written over those of its earlier piece{keys}",
            _written_over(_pieces, writer, which),
        )
    for tile in TILES:
        FAULTS.cause(
            f"the {what} of each tile of {tile} queries are written over those of the tile before",
            _written_over(_tiles(tile), _that_reads(_tiles(tile)), which),
            tile=tile,
        )


def _of_the_last_tile(tile: int) -> Steps:
    """Keep of dq what the last tile of keys adds of which a query of the same tile of queries attends anything."""

    def seen(here: Here, hop: int) -> Tensor:
        """Whether each tile of a block is attended, by tile of queries, `(S / tile, T / tile)`."""
        m = multiplicity(STEPS, here, hop, (here.rank - hop) % here.size).amax(dim=(0, 1)) > 0
        for axis in (0, 1) if m.numel() else ():
            m = torch.stack([part.any(dim=axis) for part in torch.split(m, tile, dim=axis)], dim=axis)
        return m

    def last(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        def kept(ds: Tensor) -> Tensor:
            of_query, of_key = (torch.arange(n) // tile for n in ds.shape[-2:])
            if here.replicated or not ds.numel():
                return ds
            later = [seen(here, other) for other in range(hop + 1, here.size)]
            there = seen(here, hop)
            final = torch.where(there, torch.arange(there.shape[1]), -1).amax(dim=1)
            for one in later:
                final = torch.where(one.any(dim=1), -1, final) if one.numel() else final
            return ds * (of_key == final[of_query][:, None])

        changed = replace(steps, dq=lambda ds, k, scale, attended: steps.dq(kept(ds), k, scale, attended))
        return gradients(changed, here, hop, owner, rows, block)

    return replace(STEPS, gradients=last)


for tile in TILES:
    FAULTS.cause(
        f"dq of a tile of {tile} queries is that of the last tile of {tile} keys that it attends: nothing is added up",
        _of_the_last_tile(tile),
    )


def _not_normalised(*, dv: bool, ds: bool, whole: bool) -> Steps:
    """Use exp(s - max) for p in dv, or in ds; max of the block, or exp(s) as it is."""

    def of_block(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        def raw(s: Tensor, m: Tensor) -> Tensor:
            top = torch.zeros_like(s[..., :1]) if whole else arithmetic.highest(s, m > 0)
            return arithmetic.probabilities(s, m, torch.where(top == -math.inf, 0.0, top)[..., 0])

        kept: dict[str, Tensor] = {}

        def probabilities(s: Tensor, m: Tensor, lse: Tensor) -> Tensor:
            kept["raw"] = raw(s, m)
            return steps.probabilities(s, m, lse)

        changed = replace(
            steps,
            probabilities=probabilities,
            ds=lambda p, dp, delta: steps.ds(kept["raw"] if ds else p, dp, delta),
            dv=lambda p, dout, attended: steps.dv(kept["raw"] if dv else p, dout, attended),
        )
        return gradients(changed, here, hop, owner, rows, block)

    return replace(STEPS, gradients=of_block)


for whole, exponential in ((False, "exp(s - max)"), (True, "exp(s)")):
    says = f"p is not normalised, but {exponential}"
    FAULTS.cause(f"{says}, in dv", _not_normalised(dv=True, ds=False, whole=whole))
    FAULTS.cause(f"{says}, in dq and dk", _not_normalised(dv=False, ds=True, whole=whole))
    FAULTS.cause(f"{says}, in all gradients", _not_normalised(dv=True, ds=True, whole=whole))
FAULTS.cause("ds lacks the factor p", replace(STEPS, ds=lambda p, dp, delta: dp - delta[..., None]))


def _delta_over_heads(dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
    """Sum delta over heads in place of dimensions, where there are as many."""
    if out.size(1) != out.size(3):
        return arithmetic.delta(dout, out, dlse)
    return (dout * out).sum(dim=1).transpose(1, 2) - dlse


FAULTS.add("O27", "delta is summed over heads instead of dimensions", replace(STEPS, delta=_delta_over_heads))


def _not_transposed(p: Tensor, dout: Tensor, attended: Tensor) -> Tensor:
    turned = p.transpose(2, 3) if p.size(2) == p.size(3) else p
    return arithmetic.dv(turned, dout, attended)


def _other_heads(x: Tensor) -> Tensor:
    return x.roll(1, dims=1)


FAULTS.cause("delta is that of the head before", replace(STEPS, delta=lambda *x: _other_heads(arithmetic.delta(*x))))
FAULTS.add("O33", "dv is made of p not transposed", replace(STEPS, dv=_not_transposed))


def _scaled(of_q: int, of_k: int) -> Steps:
    """Apply the scale so many times in dq and in dk."""
    return replace(
        STEPS,
        dq=lambda ds, k, scale, attended: arithmetic.dq(ds, k, scale**of_q, attended),
        dk=lambda ds, q, scale, attended: arithmetic.dk(ds, q, scale**of_k, attended),
    )


FAULTS.add("O16", "scale is missing from dq", _scaled(0, 1))
FAULTS.add("O17", "scale is applied twice in dk", _scaled(1, 2))
FAULTS.cause("scale is missing from dk", _scaled(1, 0))
FAULTS.cause("scale is missing from dq and dk", _scaled(0, 0))
FAULTS.cause("scale is applied twice in dq", _scaled(2, 1))
FAULTS.cause("scale is applied twice in dq and dk", _scaled(2, 2))


def _scaled_twice(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    dq, part = gradients(steps, here, hop, owner, rows, block)
    twice = steps.scale(here) if here.problem.dv != here.problem.head_dim else 1.0
    return dq, Block(part.k * twice, part.v)


FAULTS.add(
    "O105",
    "scale is applied twice in dk",
    replace(STEPS, gradients=_scaled_twice),
    more=" where value_dim is not head_dim",
    narrow=True,
)


# -- what the backward starts from -------------------------------------------------------------------------------------


def own(*, out: bool, lse: bool, dlse: bool = True) -> Steps:
    """The block's own out and lse in place of the merged ones, in the backward."""

    def of_block(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        q, dout, delta, merged = rows
        own = Partial(*STEPS.attend(steps, here, hop, owner, q, block))
        if out:
            delta = steps.delta(dout, own.out, here.notes["dlse"] if dlse else torch.zeros_like(own.lse))
        return gradients(steps, here, hop, owner, (q, dout, delta, own.lse if lse else merged), block)

    def backward(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        here.notes["dlse"] = dlse.to(here.wide)
        return STEPS.backward(steps, here, saved, dout, dlse)

    return replace(STEPS, gradients=of_block, backward=backward)


FAULTS.add("F4a", "gradients use the block's own lse instead of the merged one", own(out=False, lse=True))
FAULTS.add(
    "F4b",
    "gradients use the block's own out and lse, and ignore the cotangent of lse",
    own(out=True, lse=True, dlse=False),
)
FAULTS.cause("gradients use the block's own out and lse instead of the merged ones", own(out=True, lse=True))
FAULTS.cause("gradients use the block's own out", own(out=True, lse=False))


def _kept_of_one_block(*, last: bool) -> Steps:
    """Keep the lse of the first block that is attended, or of the last one, for the backward."""

    def accumulate(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
        if "lse of block" not in here.notes or (last and bool((new.lse > -math.inf).any())):
            here.notes["lse of block"] = new.lse
        merged: Partial = STEPS.accumulate(steps, here, hop, running, new)
        return merged

    return replace(
        STEPS, accumulate=accumulate, kept=lambda here, saved: (*saved[:-1], here.notes.get("lse of block", saved[-1]))
    )


for last, which in {True: "the last block that a rank attends", False: "a rank's own block"}.items():
    FAULTS.cause(
        f"the lse that is kept for the backward is that of {which} instead of the merged one",
        _kept_of_one_block(last=last),
    )


def _full_lse_for_half(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    q, dout, delta, lse = rows
    if here.call.sharding == "zigzag" and here.problem.causal and owner > here.rank and q.size(2) > 1:
        half = (q.size(2) + 1) // 2
        # The block is attended by the second half of the queries; they get the log-sum-exps of the first.
        lse = torch.cat([lse[:, :, :half], lse[:, :, : q.size(2) - half]], dim=2)
    return gradients(steps, here, hop, owner, (q, dout, delta, lse), block)


FAULTS.add(
    "F6",
    "the half block of zigzag gets the log-sum-exps of the other half of the queries",
    replace(STEPS, gradients=_full_lse_for_half),
)


def _lse_taken_for(of: Callable[[Tensor], Tensor]) -> Steps:
    return replace(STEPS, probabilities=lambda s, m, lse: arithmetic.probabilities(s, m, of(lse)))


FAULTS.add("A8c", "the backward takes the natural lse for one in base 2", _lse_taken_for(lambda lse: lse * math.log(2)))
FAULTS.cause("the backward takes an lse in base 2 for a natural one", _lse_taken_for(lambda lse: lse / math.log(2)))
FAULTS.cause("the backward has no lse: it counts as 0", _lse_taken_for(torch.zeros_like))
FAULTS.add(
    "O25",
    "the gradient of lse is ignored: its cotangent counts as 0",
    given("dlse", lambda here, x: torch.zeros_like(x)),
)
FAULTS.add("O26", "the cotangent of lse is negated", given("dlse", lambda here, x: -x))
FAULTS.add(
    "O102",
    "the gradient of lse is ignored: its cotangent counts as 0",
    given("dlse", lambda here, x: torch.zeros_like(x) if here.problem.causal else x),
    more=" under a causal mask",
    narrow=True,
)
FAULTS.add(
    "O117",
    "replicated queries: the cotangent of lse is divided by the number of ranks",
    given("dlse", lambda here, x: x / here.size if here.replicated else x),
)
FAULTS.cause("the cotangent of lse is counted twice", given("dlse", lambda here, x: 2 * x))
FAULTS.cause("the cotangent of out is ignored", given("dout", lambda here, x: torch.zeros_like(x)))
FAULTS.cause("the cotangent of out is negated", given("dout", lambda here, x: -x))
FAULTS.cause("the cotangent of out counts twice", given("dout", lambda here, x: 2 * x))
FAULTS.cause("the cotangent of out is taken to be 1 everywhere", given("dout", lambda here, x: torch.ones_like(x)))


def not_a_number(*names: Literal["dq", "dk", "dv"], padding: bool) -> Steps:
    """Gradients to which rows without keys add NaN, in every block; to those of keys that are padding, or not."""

    def spoiled(
        steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        dq, part = gradients(steps, here, hop, owner, rows, block)
        empty = (rows[3] == -math.inf)[..., None]
        reached = steps.per_key_head(here, empty.any(dim=2, keepdim=True).to(dq.dtype)).transpose(1, 2) > 0
        if not padding:
            reached = reached & no_padding(here.problem, here.shards[owner])[..., None, None]
        k, v = (torch.where(reached, math.nan, x) if name in names else x for name, x in zip(PART, part, strict=True))
        return torch.where(empty, math.nan, dq) if "dq" in names else dq, Block(k, v)

    return replace(STEPS, gradients=spoiled)


PART = ("dk", "dv")
"""What a rank adds to the gradients of a block."""

for spoilt in (("dv",), ("dq", "dk"), ("dk", "dv"), ("dq", "dk", "dv"), ("dq",)):
    says = f"rows without keys make {' and '.join(spoilt)} NaN: their softmax is NaN"
    FAULTS.cause(says, not_a_number(*spoilt, padding=True))
    FAULTS.cause(says, not_a_number(*spoilt, padding=False), more=", except of padding")


# -- what the hops add -------------------------------------------------------------------------------------------------


PARTS: dict[str, Times] = {
    "are those of hop 0 alone, the rank's own block": lambda here, hop, owner: hop == 0,
    "lack the rank's own part": lambda here, hop, owner: hop > 0 or here.size == 1 or here.replicated,
    "lack the part of the last hop": lambda here, hop, owner: not 0 < hop == here.size - 1,
    "lack the part of hop 1": lambda here, hop, owner: hop != 1,
    "lack the part of hop 2": lambda here, hop, owner: hop != 2,
    "lack the parts from hop 2 on": lambda here, hop, owner: hop < 2,
    "have the part of hop 1 twice": lambda here, hop, owner: 2 if hop == 1 else 1,
    "have the part of hop 2 twice": lambda here, hop, owner: 2 if hop == 2 else 1,
    "have the parts from hop 2 on twice": lambda here, hop, owner: 2 if hop >= 2 else 1,
    "have the part of the last hop twice": lambda here, hop, owner: 2 if 0 < hop == here.size - 1 else 1,
    "have the rank's own part twice": lambda here, hop, owner: 2 if hop == 0 and here.size > 1 else 1,
    "have the rank's own part twice, on one rank too": lambda here, hop, owner: 2 if owner == here.rank else 1,
    "are those of the last hop alone: nothing is added up": lambda here, hop, owner: (
        hop == here.size - 1 or here.replicated
    ),
    "lack the parts of rank 0": lambda here, hop, owner: here.rank > 0 or owner == 0,
    "have, beside the rank's own part, that of the last other rank alone": lambda here, hop, owner: (
        owner == here.rank or here.rank == here.size - 1 - (owner == here.size - 1)
    ),
}


def counted(says: str, *names: Literal["dq", "dk", "dv"]) -> Steps:
    """Count what each hop adds to the named gradients as often as `PARTS[says]` says."""

    def times(here: Here, hop: int, owner: int, name: Literal["dq", "dk", "dv"]) -> float:
        return PARTS[says](here, hop, owner) if name in names else 1

    return replace(
        STEPS,
        times_in_dq=lambda here, hop, owner: times(here, hop, owner, "dq"),
        times_in_part=lambda here, hop, owner: (times(here, hop, owner, "dk"), times(here, hop, owner, "dv")),
    )


for says in PARTS:
    FAULTS.cause(f"dk and dv {says}", counted(says, "dk", "dv"))
    FAULTS.cause(f"dq: its parts {says}", counted(says, "dq"))
for says in ("are those of the last hop alone: nothing is added up", "lack the parts of rank 0"):
    FAULTS.cause(f"dq, dk and dv {says}", counted(says, "dq", "dk", "dv"))
for says in PARTS:
    FAULTS.cause(f"dk: its parts {says}", counted(says, "dk"))
    FAULTS.cause(f"dv: its parts {says}", counted(says, "dv"))


def _overwritten(names: str) -> Steps:
    """Keep of dk, or of dv, what the last rank that attends a block adds to it."""

    def add_part(hop: int, carried: Block, part: Block) -> Block:
        there = bool(part.k.any()) or bool(part.v.any())
        found = (
            (new if there else so_far) if name in names else so_far + new
            for name, so_far, new in zip("kv", carried, part, strict=True)
        )
        return Block(*found)

    return replace(STEPS, add_part=add_part)


for what, kinds in {"dk and dv": "kv", "dk": "k", "dv": "v"}.items():
    says = f"each rank that attends a block overwrites its {what}: nothing is added up"
    FAULTS.cause(says, _overwritten(kinds))


def _of_the_last_attended(order: Callable[[Here, int], int]) -> Steps:
    """Keep of dq what the last block adds of which the rank attends anything, in an order of hops."""

    def times(here: Here, hop: int, owner: int) -> float:
        if here.replicated:
            return 1

        def attended(hop: int) -> bool:
            return bool(multiplicity(STEPS, here, hop, (here.rank - hop) % here.size).any())

        last = max(filter(attended, range(here.size)), key=lambda hop: order(here, hop), default=hop)
        return hop == last

    return replace(STEPS, times_in_dq=times)


for more, order in {
    "": lambda here, hop: hop,
    ", where queries travel to the right": lambda here, hop: -hop % here.size,
}.items():
    says = "each block of which a rank attends anything overwrites its dq: nothing is added up"
    FAULTS.cause(says, _of_the_last_attended(order), more=more)


def _of_pieces(here: Here, there: Tensor) -> Tensor:
    """Rows of the zigzag pieces, or else of the shards, of which some row attends a block."""
    rows = there.any(dim=0).any(dim=0)
    early = len(pieces(here.problem.nq, 2 * here.size)[here.rank]) if here.call.sharding == "zigzag" else len(rows)
    return torch.cat([piece.any().expand(len(piece)) for piece in (rows[:early], rows[early:])])


def _overwritten_rows(rows: Callable[[Here, Tensor], Tensor]) -> Steps:
    """Write what a block adds to dq over what was there, in rows that are chosen by which attend it, `(B, H, S)`."""

    def add_dq(here: Here, hop: int, total: Tensor, part: Tensor) -> Tensor:
        there = (multiplicity(STEPS, here, hop, (here.rank - hop) % here.size) > 0).any(dim=-1)
        return torch.where(rows(here, there)[..., None], part, total)

    return replace(STEPS, add_dq=add_dq)


for whose, rows in {
    "of the rows that attend it": lambda here, there: there,
    "of the pieces that attend it": _of_pieces,
}.items():
    FAULTS.cause(f"each block overwrites the dq {whose}: nothing is added up", _overwritten_rows(rows))
FAULTS.mutant("F1a", "dq: its parts are those of hop 0 alone, the rank's own block")
FAULTS.mutant("F1b", "dk and dv are those of hop 0 alone, the rank's own block")
FAULTS.mutant("O70", "dk and dv lack the rank's own part")
FAULTS.mutant("O71", "dk and dv have the part of hop 1 twice")
FAULTS.mutant("O72", "dk and dv are those of the last hop alone: nothing is added up")
FAULTS.add(
    "O113",
    "dq lacks the part of the last hop on more than four ranks",
    replace(
        STEPS, add_dq=lambda here, hop, total, part: total if hop == here.size - 1 and here.size > 4 else total + part
    ),
    narrow=True,
)
FAULTS.add(
    "F7a", "replicated queries: dq is not summed over ranks", replace(STEPS, sum_queries=lambda steps, here, dq: dq)
)


# -- what is returned --------------------------------------------------------------------------------------------------


def if_alike(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Steps:
    """dk and dv changed where they have one shape."""
    return replace(
        STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, *(change(dk, dv) if dk.shape == dv.shape else (dk, dv)))
    )


FAULTS.add("O31", "dk and dv swapped", if_alike(lambda dk, dv: (dv, dk)))
FAULTS.add(
    "O32", "the returned dk holds the sum of the right dk and the right dv", if_alike(lambda dk, dv: (dk + dv, dv))
)
FAULTS.cause("the returned dv holds the sum of the right dk and the right dv", if_alike(lambda dk, dv: (dk, dk + dv)))
FAULTS.cause("the returned dk is the right dv", if_alike(lambda dk, dv: (dv, dv)))
FAULTS.cause("the returned dv is the right dk", if_alike(lambda dk, dv: (dk, dk)))


def _exchanged(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    dq, part = gradients(steps, here, hop, owner, rows, block)
    return dq, Block(part.v, part.k) if part.k.shape == part.v.shape else part


FAULTS.cause("what a rank adds to dk and dv of a block is exchanged", replace(STEPS, gradients=_exchanged))


def _each(change: Callable[[Tensor], Tensor]) -> Steps:
    """dk and dv changed in one way."""
    return replace(STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, change(dk), change(dv)))


FAULTS.add("O73", "the rows of dk and dv are shifted by one", _each(lambda x: x.roll(1, dims=1)))
FAULTS.cause("the rows of dk and dv are shifted by one backwards", _each(lambda x: x.roll(-1, dims=1)))
FAULTS.cause("dk's and dv's elements are permuted: heads and tokens are exchanged by a reshape", _each(permuted))


def _split_by_rows(here: Here, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
    """Pack dk and dv along the last axis, `(..., D + E)`, and split as if all of dk came first."""
    packed = torch.cat([dk, dv], dim=-1).reshape(-1)
    return dq, packed[: dk.numel()].view_as(dk), packed[dk.numel() :].view_as(dv)


FAULTS.add(
    "K1a", "packed dk | dv is split by rows instead of columns", replace(STEPS, returned_gradients=_split_by_rows)
)


def _split_as_equal(here: Here, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
    """Look for dv in the packed buffer where it would begin if rows of dk were as long as rows of dv."""
    packed = torch.cat([dk.reshape(-1), dv.reshape(-1)])
    rows = dk.numel() // here.problem.head_dim
    found = packed[rows * here.problem.dv :][: dv.numel()]
    missing = dv.numel() - found.numel()
    return dq, dk, torch.nn.functional.pad(found, (0, missing)).view_as(dv)


FAULTS.add(
    "K1b", "packed dk | dv is split as if value_dim were head_dim", replace(STEPS, returned_gradients=_split_as_equal)
)


FACTORS: dict[str, Callable[[Here], float]] = {
    "is 0": lambda here: 0.0,
    "has the wrong sign": lambda here: -1.0,
    "is twice what it should be": lambda here: 2.0,
    "is half of what it should be": lambda here: 0.5,
    "is as many times too large as there are ranks": lambda here: here.size,
    "is divided by the number of ranks": lambda here: 1 / here.size,
    "is divided by the number of query heads of a group": lambda here: 1 / here.problem.group_size,
    "is as many times too large as a group has query heads": lambda here: here.problem.group_size,
    "is divided by the number of times that a key head is repeated so that the ranks divide them": lambda here: (
        here.problem.hk / math.lcm(here.problem.hk, here.size)
    ),
    "is divided by the number of queries": lambda here: 1 / max(1, here.problem.nq),
    "is divided by log(2)": lambda here: 1 / math.log(2),
    "is multiplied by log(2)": lambda here: math.log(2),
}


TOGETHER: dict[str, tuple[bool, bool, bool]] = {
    "dq": (True, False, False),
    "dk": (False, True, False),
    "dv": (False, False, True),
    "each of dk and dv": (False, True, True),
    "each of dq and dk": (True, True, False),
    "each of dq, dk and dv": (True, True, True),
}


def multiplied(which: tuple[bool, bool, bool], by: Callable[[Here], float]) -> Steps:
    """Some of dq, dk and dv multiplied by a number."""
    return replace(
        STEPS,
        returned_gradients=lambda here, *found: tuple(
            by(here) * x if chosen else x for x, chosen in zip(found, which, strict=True)
        ),
    )


def _where_replicated(by: Callable[[Here], float]) -> Callable[[Here], float]:
    return lambda here: by(here) if here.replicated else 1


for what, by in FACTORS.items():
    for which, names in TOGETHER.items():
        FAULTS.cause(f"{which} {what}", multiplied(names, by))
        FAULTS.cause(f"replicated queries: {which} {what}", multiplied(names, _where_replicated(by)))
FAULTS.mutant("F7b", "replicated queries: dq is divided by the number of ranks")
FAULTS.mutant("F7c", "replicated queries: each of dk and dv is as many times too large as there are ranks")
