"""Faults of merges, of the log-sum-exps of blocks, and of how often a block counts (A in the reports)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ringref.sharding import pieces
from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import weight
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial, smallest_divisor
from ringverify.faults.ring import STEPS, Steps, Times, Visit, multiplicity, together

Tensor = torch.Tensor
FAULTS = Faults()

Online = tuple[Tensor, Tensor, Tensor]
"""Sums over keys that are not normalised: Σ w v, Σ w, and the maximum that is subtracted in w."""


def _weights_from(lse: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    """Merge with another lse, from which the weights of both partials are computed too."""

    def merge(a: Partial, b: Partial) -> Partial:
        found = lse(a.lse, b.lse)
        shift = torch.where(found == -math.inf, 0.0, found)
        return Partial(weight(a.lse, shift) * a.out + weight(b.lse, shift) * b.out, found)

    return replace(STEPS, merge=merge)


FAULTS.add(
    "A1",
    "the merge overflows: log(1 + exp(difference)) is infinite and the row becomes 0",
    # Empty partials are guarded, so that only the overflow is wrong.
    _weights_from(lambda a, b: torch.where(a == -math.inf, b, a + torch.log1p(torch.exp(b - a)))),
    overflows=True,
)
_UNSHIFTED = _weights_from(lambda a, b: torch.log(torch.exp(a) + torch.exp(b)))
FAULTS.add("A2a", "the merge overflows: log-sum-exps are added without a shift", _UNSHIFTED, overflows=True)


def _both_there(first: Partial, second: Partial) -> Partial:
    merged: Partial = _UNSHIFTED.merge(first, second)
    for one, other in ((first, second), (second, first)):
        empty = other.lse == -math.inf
        merged = Partial(torch.where(empty[..., None], one.out, merged.out), torch.where(empty, one.lse, merged.lse))
    return merged


FAULTS.cause(
    "the merge overflows: log-sum-exps are added without a shift",
    replace(STEPS, merge=_both_there),  # a part without keys is not merged
    overflows=True,
)


def _lse_by(of: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    """Merge with right weights, and another lse of two parts that both have keys."""

    def merge(first: Partial, second: Partial) -> Partial:
        right = arithmetic.merge(first, second)
        both = (first.lse > -math.inf) & (second.lse > -math.inf)
        return right._replace(lse=torch.where(both, of(first.lse, second.lse), right.lse))

    return replace(STEPS, merge=merge)


FAULTS.cause(
    "the merged lse is lse + log(1 + exp(lse - new)): the difference has the wrong sign",
    _lse_by(lambda a, b: a - F.logsigmoid(b - a)),
)
FAULTS.cause(
    "the merged lse is lse - log(1 + exp(new - lse)): what is added is subtracted",
    _lse_by(lambda a, b: a + F.logsigmoid(a - b)),
)
FAULTS.cause("the merged lse is the mean of both", _lse_by(lambda a, b: (a + b) / 2))
FAULTS.cause("the merged lse is the sum of both", _lse_by(lambda a, b: a + b))


def _plain_weights(first: Partial, second: Partial) -> Partial:
    a, b = torch.exp(first.lse)[..., None], torch.exp(second.lse)[..., None]
    total = a + b
    out = (a * first.out + b * second.out) / torch.where(total == 0, 1.0, total)
    return Partial(out, torch.logaddexp(first.lse, second.lse))


FAULTS.add(
    "A2b",
    "the merge overflows: its weights are exp(lse), without a shift",
    replace(STEPS, merge=_plain_weights),
    overflows=True,
)


def _plain_weights_and_lse(first: Partial, second: Partial) -> Partial:
    whole = _plain_weights(first, second)
    return whole._replace(lse=(torch.exp(first.lse) + torch.exp(second.lse)).log())


FAULTS.cause(
    "the merge overflows: its weights are exp(lse), without a shift",
    replace(STEPS, merge=_plain_weights_and_lse),
    more=", and lse is the logarithm of their sum",
    overflows=True,
)


def _stacked(steps: Steps, here: Here, hop: int, running: list[Partial] | None, new: Partial) -> list[Partial]:
    return [*(running or ()), new]


def _without_shift(running: list[Partial]) -> Partial:
    lses = torch.stack([one.lse for one in running])
    lse = torch.log(torch.exp(lses).sum(dim=0))
    shift = torch.where((lses == -math.inf).all(dim=0), 0.0, lse)
    return Partial((weight(lses, shift) * torch.stack([one.out for one in running])).sum(dim=0), lse)


FAULTS.cause(
    "the log-sum-exps of all blocks are added at the end without a shift",
    replace(STEPS, accumulate=_stacked, normalise=_without_shift),
    overflows=True,
)


def _unguarded(first: Partial, second: Partial) -> Partial:
    top = torch.maximum(first.lse, second.lse)
    a, b = torch.exp(first.lse - top), torch.exp(second.lse - top)
    return Partial((a / (a + b))[..., None] * first.out + (b / (a + b))[..., None] * second.out, top + torch.log(a + b))


FAULTS.add("A3", "the merge of two empty parts is NaN: -inf - (-inf)", replace(STEPS, merge=_unguarded))


def _sigmoid(first: Partial, second: Partial) -> Partial:
    share = torch.sigmoid(second.lse - first.lse)[..., None]
    return Partial(first.out - share * (first.out - second.out), first.lse - F.logsigmoid(first.lse - second.lse))


FAULTS.add(
    "R13", "the merge of two empty parts is NaN: -inf - (-inf)", replace(STEPS, merge=_sigmoid), more=", by sigmoids"
)


def _unguarded_out(a: Partial, b: Partial) -> Partial:
    whole = arithmetic.merge(a, b)
    return whole._replace(out=torch.where((whole.lse == -math.inf)[..., None], math.nan, whole.out))


FAULTS.cause("the merge of two empty parts is NaN: -inf - (-inf)", replace(STEPS, merge=_unguarded_out))
FAULTS.cause(
    "the merge overflows: log(1 + exp(difference)) is infinite or no number",
    _weights_from(lambda a, b: a + torch.log1p(torch.exp(b - a))),
    overflows=True,
)


GUARDED = len(FAULTS.causes)
"""The first cause of numbers that are wrong though they are finite."""


def merging(
    *,
    first: float = 1.0,
    second: float = 1.0,
    lse: Callable[[Tensor, Tensor], Tensor] = torch.logaddexp,
    crossed: bool = False,
) -> Steps:
    """Merge with the terms multiplied, with another lse, or with the weights exchanged."""

    def merge(a: Partial, b: Partial) -> Partial:
        right = torch.logaddexp(a.lse, b.lse)
        shift = torch.where(right == -math.inf, 0.0, right)
        of_a, of_b = weight(a.lse, shift) * first, weight(b.lse, shift) * second
        if crossed:
            of_a, of_b = of_b, of_a
        return Partial(of_a * a.out + of_b * b.out, lse(a.lse, b.lse))

    return replace(STEPS, merge=merge)


FAULTS.add("O01", "the merge drops what came before: its out is the new block's term alone", merging(first=0.0))
FAULTS.add("O02", "the merge drops the new block's term of out", merging(second=0.0))
FAULTS.add("O03", "the merge subtracts the new block's term of out", merging(second=-1.0))
FAULTS.add("O04", "the weights of the merge are exchanged", merging(crossed=True))
FAULTS.add("O05", "the merged lse is the larger of both", merging(lse=torch.maximum))
FAULTS.cause(
    "the merged lse is the larger of both", _weights_from(torch.maximum), more=", and the weights come from it"
)
FAULTS.add("O06", "the merged lse is the new block's", merging(lse=lambda a, b: b))
FAULTS.add("O07", "the merged lse is the earlier one: it is never updated", merging(lse=lambda a, b: a))
FAULTS.cause(
    "the merge leaves a block out of lse where the block's own is the smaller one",
    merging(lse=lambda a, b: torch.where(b < a, a, torch.logaddexp(a, b))),
)
FAULTS.cause("the merged lse is the mean of both", merging(lse=lambda a, b: (a + b) / 2))
FAULTS.cause("the merged lse is the sum of both", merging(lse=lambda a, b: a + b))


def _of_late_pieces(steps: Steps) -> Steps:
    """Merge otherwise where zigzag shards are causal, of a later rank's block what the late piece of queries attends.

    Such a block is merged into this piece alone, by a line of its own.
    """

    def accumulate(right: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
        found = Partial(*STEPS.accumulate(right, here, hop, running, new))
        of_later = (here.rank - hop) % here.size > here.rank
        if running is None or not of_later or here.call.sharding != "zigzag" or not here.problem.causal:
            return found
        late = torch.arange(new.lse.size(-1)) >= len(pieces(here.problem.nq, 2 * here.size)[here.rank])
        wrong = Partial(*steps.merge(running, new))
        return Partial(torch.where(late[:, None], wrong.out, found.out), torch.where(late, wrong.lse, found.lse))

    return replace(STEPS, accumulate=accumulate)


for cause in FAULTS.causes[GUARDED:]:
    more = f"{cause.more}, where a later rank's block meets a late zigzag piece"
    FAULTS.causes.append(replace(cause, steps=_of_late_pieces(cause.steps), more=more))


def _started(first: Callable[[Partial], Partial]) -> Steps:
    """Merge the first block with something that was there before."""

    def accumulate(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
        return Partial(*steps.merge(first(new) if running is None else running, new))

    return replace(STEPS, accumulate=accumulate)


for cause in [one for one in FAULTS.causes if one.overflows and one.steps.changed == {"merge"}]:
    from_nothing = _started(lambda new: Partial(torch.zeros_like(new.out), torch.full_like(new.lse, -math.inf)))
    steps = replace(cause.steps, accumulate=from_nothing.accumulate)
    FAULTS.causes.append(replace(cause, steps=steps, more=f"{cause.more}, from the first block on"))
FAULTS.cause(
    "the running lse starts at 0 instead of -inf: a key of score 0 and value 0 counts beside all others",
    _started(lambda new: Partial(torch.zeros_like(new.out), torch.zeros_like(new.lse))),
)
FAULTS.cause(
    "each block's softmax counts a key of score 0 and value 0 beside its own",
    replace(
        STEPS,
        partial=lambda s, m, v: arithmetic.merge(
            found := arithmetic.partial(s, m, v), Partial(torch.zeros_like(found.out), torch.zeros_like(found.lse))
        ),
    ),
)

LSE_COUNTS: dict[str, Times] = {
    "counts the rank's own block twice": lambda here, hop, owner: 2 if owner == here.rank else 1,
    "counts the block of the last hop twice": lambda here, hop, owner: 2 if 0 < hop == here.size - 1 else 1,
    "lacks the block of the last hop": lambda here, hop, owner: not 0 < hop == here.size - 1,
    "is that of the last hop's block alone": lambda here, hop, owner: hop == here.size - 1,
}


def _lse_alone(times: Times) -> Steps:
    """Count blocks otherwise in the lse that is returned; weights and out are right."""

    def accumulate(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
        found = STEPS.accumulate(steps, here, hop, running, new)
        count = torch.tensor(float(times(here, hop, (here.rank - hop) % here.size)), dtype=new.lse.dtype)
        before = here.notes.get("lse", torch.full_like(new.lse, -math.inf))
        here.notes["lse"] = torch.logaddexp(before, new.lse + count.log())
        return Partial(*found)

    def returned(here: Here, found: Partial) -> tuple[Tensor, Tensor]:
        return STEPS.returned(here, found if here.replicated else found._replace(lse=here.notes["lse"]))

    return replace(STEPS, accumulate=accumulate, returned=returned)


for says, times in LSE_COUNTS.items():
    FAULTS.cause(f"lse {says}, out is right", _lse_alone(times))


def _halved(a: Partial, b: Partial) -> Partial:
    return Partial((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))


FAULTS.cause("each merge is the plain average of both parts", replace(STEPS, merge=_halved))
FAULTS.add(
    "A9",
    "out is the sum of the blocks' own softmaxes, without log-sum-exp weights",
    replace(STEPS, merge=lambda first, second: Partial(first.out + second.out, torch.logaddexp(first.lse, second.lse))),
)


def _against_the_merged(*, new: bool) -> Steps:
    """Merge by sigmoids of the difference to the merged lse, which one part's own lse is taken for."""

    def merge(a: Partial, b: Partial) -> Partial:
        lse = torch.logaddexp(a.lse, b.lse)
        difference = b.lse - lse if new else lse - a.lse
        share = torch.sigmoid(difference).nan_to_num(nan=0.0)[..., None]  # of two empty parts
        return Partial(a.out + share * (b.out - a.out), lse)

    return replace(STEPS, merge=merge)


FAULTS.cause(
    "the new block's weight in the merge is sigmoid(its lse - merged lse): lse is updated before out, so that it "
    "counts too little",
    _against_the_merged(new=True),
)
FAULTS.cause(
    "the earlier part's weight in the merge is sigmoid(its lse - merged lse): lse is updated before out",
    _against_the_merged(new=False),
)


def _average(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if running is None:
        return new
    return Partial((hop * running.out + new.out) / (hop + 1), torch.logaddexp(running.lse, new.lse))


FAULTS.cause("out is the plain average over blocks", replace(STEPS, accumulate=_average))


def _average_of_attended(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if bool((new.lse == -math.inf).all()):
        return new if running is None else running
    here.notes["merged"] = count = here.notes.get("merged", 0) + 1
    return new if count == 1 else _average(steps, here, count - 1, running, new)


FAULTS.cause(
    "out is the plain average over blocks", replace(STEPS, accumulate=_average_of_attended), more=" that are attended"
)


def _unscaled(*, earlier: bool, new: bool) -> Steps:
    """Merge with a term of out as it is, its weight left out; a term of no keys has none."""

    def merge(a: Partial, b: Partial) -> Partial:
        lse = torch.logaddexp(a.lse, b.lse)
        shift = torch.where(lse == -math.inf, 0.0, lse)
        of_a, of_b = (
            (x.lse > -math.inf)[..., None].to(x.out.dtype) if unscaled else weight(x.lse, shift)
            for x, unscaled in ((a, earlier), (b, new))
        )
        return Partial(of_a * a.out + of_b * b.out, lse)

    return replace(STEPS, merge=merge)


FAULTS.cause("the merge does not rescale the out that came before", _unscaled(earlier=True, new=False))
FAULTS.cause("the merge does not weigh the new block's out", _unscaled(earlier=False, new=True))


Merge = Callable[[Partial, Partial], Partial]

OF_PARTS: dict[str, Merge] = {
    "do not rescale the out that came before": _unscaled(earlier=True, new=False).merge,
    "do not weigh the new one's out": _unscaled(earlier=False, new=True).merge,
    "keep the larger of both log-sum-exps": merging(lse=torch.maximum).merge,
    "keep the new one's lse": merging(lse=lambda a, b: b).merge,
    "keep the earlier lse": merging(lse=lambda a, b: a).merge,
    "weigh the new one by sigmoid(its lse - merged lse)": _against_the_merged(new=True).merge,
    "exchange the weights": merging(crossed=True).merge,
    "are plain averages": _halved,
}
"""What merges may do wrongly that are made of tiles of a block, in words."""

TILES = range(2, 9)
"""Sizes of tiles that are tried, of queries and of keys: small shards have several of them."""


def _of_tiles(tile: int, merge: Merge) -> Steps:
    """Merge tiles of so many keys of a block in this way; blocks are merged rightly."""

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        ends = [slice(at, at + tile) for at in range(0, s.size(-1), tile)]
        found = [arithmetic.partial(s[..., some], m[..., some], v[..., some, :]) for some in ends]
        return functools.reduce(merge, found) if found else arithmetic.partial(s, m, v)

    return replace(STEPS, partial=partial)


def _rescaled_in_tiles(tile: int, *, sums: bool, totals: bool) -> Steps:
    """Keep sums over tiles of a block that are not normalised, and do not rescale all of them as the maximum grows."""

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        top = s.new_full(s.shape[:3], -math.inf)
        out, total = s.new_zeros((*s.shape[:3], v.size(-1))), torch.zeros_like(top)
        for at in range(0, s.size(-1), tile):
            s_t, m_t, v_t = s[..., at : at + tile], m[..., at : at + tile], v[..., at : at + tile, :]
            most = torch.maximum(top, s_t.masked_fill(m_t == 0, -math.inf).amax(dim=-1))
            shift = torch.where(most == -math.inf, 0.0, most)
            factor, w = torch.exp(top - shift), arithmetic.probabilities(s_t, m_t, shift)
            out = (factor[..., None] if sums else 1) * out + arithmetic.weighted_sum(w, v_t, m_t > 0)
            total, top = (factor if totals else 1) * total + w.sum(dim=-1), most
        return Partial(out / torch.where(total == 0, 1.0, total)[..., None], top + total.log())

    return replace(STEPS, partial=partial)


UNSCALED = (
    ("weighted values", False, True),
    ("exponentials", True, False),
    ("weighted values and of exponentials", False, False),
)
"""Which running sums are not rescaled: in words, whether that of weighted values is, and that of exponentials."""

for tile in TILES:
    whose = f"tiles of {tile} keys of a block"
    for says, merge in OF_PARTS.items():
        FAULTS.cause(f"merges of {whose} {says}", _of_tiles(tile, merge), tile=tile)
    for says, sums, totals in UNSCALED:
        FAULTS.cause(
            f"the running sum of {says} over {whose} is not rescaled where the maximum grows",
            _rescaled_in_tiles(tile, sums=sums, totals=totals),
            tile=tile,
        )


def online(
    *,
    sums: bool = True,
    totals: bool = True,
    kept: Callable[[Here, Tensor], Tensor] = lambda here, x: x,
    total: Callable[[Here, Tensor], Tensor] = lambda here, x: x,
    rescaled: Callable[[Here, Tensor], Tensor] = lambda here, x: x,
    weights: Callable[[Here, Tensor], Tensor] = lambda here, x: x,
    way: Callable[[Tensor], Tensor] = lambda x: x,
    factor: Callable[[Here, Tensor], Tensor] = lambda here, x: x,
    top: Callable[[Here, Tensor], Tensor] = lambda here, x: x,
    of_first: bool = False,
    of_block: bool = False,
) -> Steps:
    """Merge sums that are not normalised, kept with the running maximum; normalise after the last hop.

    Args:
        sums: whether Σ w v is rescaled where the maximum grows.
        totals: whether Σ w is.
        kept: what is kept of Σ w v after every hop.
        total: what is kept of Σ w after every hop.
        rescaled: what is kept of Σ w once it is rescaled.
        weights: what w is taken for where it is multiplied with v.
        way: changes the difference of maxima from which the factor is computed.
        factor: what the factor is taken for.
        top: what is kept of the maximum after every hop.
        of_first: whether the maximum remains that of the first block.
        of_block: whether sums over a block are added as they are, relative to its own maximum.
    """

    def attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Online:
        def partial(s: Tensor, m: Tensor, v: Tensor) -> Online:
            found = arithmetic.partial(s, m, v)
            most = s.masked_fill(m == 0, -math.inf).amax(dim=-1) if s.size(-1) else found.lse
            if of_first:
                most = here.notes.setdefault("top", torch.where(most == -math.inf, 0.0, most))
            shift = torch.where(most == -math.inf, 0.0, most)
            w = weights(here, arithmetic.probabilities(s, m, shift))
            return arithmetic.weighted_sum(w, v, m > 0), torch.exp(found.lse - shift), most

        online: Online = STEPS.attend(replace(steps, partial=partial), here, hop, owner, q, block)
        return online

    def accumulate(steps: Steps, here: Here, hop: int, running: Online | None, new: Online) -> Online:
        if running is None:
            return kept(here, new[0]), total(here, new[1]), top(here, new[2])
        most = torch.maximum(running[2], new[2])
        shift = torch.where(most == -math.inf, 0.0, most)
        before, of_new = factor(here, torch.exp(way(running[2] - shift))), torch.exp(new[2] - shift)
        of_new = torch.ones_like(of_new) if of_block else of_new
        # What no key has been added to is 0, rescaled or not.
        of_sums, of_totals = (before if scaled else torch.ones_like(before) for scaled in (sums, totals))
        return (
            kept(here, of_sums[..., None] * running[0] + of_new[..., None] * new[0]),
            total(here, rescaled(here, of_totals * running[1]) + of_new * new[1]),
            top(here, most),
        )

    def normalise(running: Online) -> Partial:
        out, whole, most = running
        return Partial(out / torch.where(whole == 0, 1.0, whole)[..., None], most + whole.log())

    def nothing(here: Here, q: Tensor, dim: int) -> Online:
        none = q.new_zeros(q.shape[:3])
        return q.new_zeros((*q.shape[:3], dim)), none, none - math.inf

    return replace(STEPS, attend=attend, accumulate=accumulate, normalise=normalise, nothing=nothing)


FAULTS.cause(
    "the running sum of exponentials starts at 1 instead of 0, beside the first block's maximum",
    replace(
        online(),
        accumulate=lambda steps, here, hop, running, new: online().accumulate(
            steps, here, hop, running, new if running is not None else (new[0], new[1] + 1, new[2])
        ),
    ),
)

LSE_AS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lacks {top}: it is the logarithm of the sum of exp(… - {top}) alone": lambda lse, top: lse - top,
    "is {top}: the logarithm of the sum is missing": lambda lse, top: top,
    "has {top} twice": lambda lse, top: lse + top,
    "is {top} less the logarithm of the sum": lambda lse, top: 2 * top - lse,
    "is {top} and the sum, not its logarithm": lambda lse, top: top + (lse - top).exp(),
    "is {top} and the logarithm of the sum in base 2": lambda lse, top: top + (lse - top) / math.log(2),
    "is {top} in base 2 and the natural logarithm of the sum": lambda lse, top: lse - top + top / math.log(2),
}
"""What lse may be instead of a maximum and the logarithm of the sum of exponentials less of it."""

MAXIMA = ("the maximum of the scores", "the largest lse of the parts that are merged")


def lse_as(of: Callable[[Tensor, Tensor], Tensor], lse: Tensor, top: Tensor) -> Tensor:
    """Return what lse is by a mistaken formula of it and of the maximum; it is right in rows without keys."""
    return torch.where(top == -math.inf, lse, of(lse, torch.where(top == -math.inf, 0.0, top)))


def _ends_as(of: Callable[[Tensor, Tensor], Tensor], *, of_scores: bool) -> Steps:
    """Return another lse, from which the backward starts too, of running sums or of partial results."""
    if of_scores:

        def normalise(running: Online) -> Partial:
            whole: Partial = online().normalise(running)
            return whole._replace(lse=lse_as(of, whole.lse, running[2]))

        return replace(online(), normalise=normalise)

    def merged(running: list[Partial]) -> Partial:
        whole = functools.reduce(arithmetic.merge, running)
        return whole._replace(lse=lse_as(of, whole.lse, torch.stack([one.lse for one in running]).amax(dim=0)))

    return replace(STEPS, accumulate=_stacked, normalise=merged)


for of_scores, top in zip((True, False), MAXIMA, strict=True):
    for says, of in LSE_AS.items():
        FAULTS.cause(f"lse {says.format(top=top)}, and the backward starts from it", _ends_as(of, of_scores=of_scores))


def _of_latest_block(*, skipping: bool, spared: bool = False) -> Steps:
    """Take the maximum of each block for that of all so far; blocks of which a rank attends nothing may be skipped.

    One without keys always is: it has no maximum. If spared, nothing is lost where the last block has no key for a
    row: its maximum counts as 0 at the end.
    """

    def accumulate(steps: Steps, here: Here, hop: int, running: Online | None, new: Online) -> Online:
        if running is None:
            return new
        if not len(here.shards[(here.rank - hop) % here.size]) or (skipping and not bool((new[2] > -math.inf).any())):
            return running
        factor = torch.exp(running[2] - torch.where(new[2] == -math.inf, 0.0, new[2]))
        return factor[..., None] * running[0] + new[0], factor * running[1] + new[1], new[2]

    def normalise(running: Online) -> Partial:
        out, whole, most = running
        most = torch.where(most == -math.inf, 0.0, most) if spared else most
        return online().normalise((out, whole, most))

    return replace(online(), accumulate=accumulate, normalise=normalise)


def _of_own_maximum() -> Steps:
    """Add sums over blocks as they are, on a ring or, of replicated queries, over ranks; lse has the largest maximum.

    Sums are those of `online`: Σ w v, Σ w, and the maximum of which both are taken less.
    """
    steps = online(sums=False, totals=False, of_block=True)

    def accumulate(steps_: Steps, here: Here, hop: int, running: Online | None, new: Online) -> Online:
        found: Online = steps.accumulate(steps_, here, hop, running, new)
        here.notes["sums"] = found
        return found

    def added(steps_: Steps, here: Here, partial: Partial) -> Partial:
        if not here.replicated or here.size == 1:
            return together(steps_, here, partial)
        sums, totals, tops = (torch.stack([*steps_.gather(here, x.contiguous())]) for x in here.notes["sums"])
        return steps.normalise((sums.sum(dim=0), totals.sum(dim=0), tops.amax(dim=0)))

    return replace(steps, accumulate=accumulate, together=added)


for skipping, where in {False: "", True: ", where a rank attends some of it"}.items():
    FAULTS.cause(
        f"the running maximum is that of the latest block alone{where}: rows without a key in it lose what came before",
        _of_latest_block(skipping=skipping),
    )
FAULTS.cause(
    "the running maximum is that of the latest block alone: rows without a key in it lose what came before, unless it "
    "is the last one",
    _of_latest_block(skipping=False, spared=True),
)
FAULTS.cause("the running sum of exponentials is not rescaled where the maximum grows", online(totals=False))
FAULTS.cause("the running sum of weighted values is not rescaled where the maximum grows", online(sums=False))
FAULTS.cause("running sums are not rescaled where the maximum grows", online(sums=False, totals=False))
FAULTS.cause(
    "sums over blocks are added as they are, each relative to the largest score of its own block",
    _of_own_maximum(),
)
FAULTS.cause(
    "running sums are rescaled by the inverse of the factor, exp(new - old)", online(way=lambda difference: -difference)
)
BASES = {"exp of what are logarithms in base 2": 1 / math.log(2), "2 to the power of natural logarithms": math.log(2)}
"""What the factor may be by which running sums are rescaled, and by what its exponent is multiplied then."""

for says, by in BASES.items():
    way = functools.partial(torch.mul, torch.tensor(by, dtype=torch.float64))
    FAULTS.cause(f"the factor by which running sums are rescaled is {says}", online(way=way))
FAULTS.cause(
    "the maximum that scores are taken less of is that of the first block, and later blocks do not raise it",
    online(of_first=True),
    overflows=True,
)


def _in_two_bases(to_2: bool, first: Partial, second: Partial) -> Partial:
    """Merge natural logarithms as if in base 2 (`to_2`), or ones in base 2 as if natural, with weights in their own."""
    unit = 1.0 if to_2 else math.log(2)
    added = torch.logaddexp2 if to_2 else torch.logaddexp
    lse = unit * added(first.lse / unit, second.lse / unit)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    return Partial(weight(first.lse, shift) * first.out + weight(second.lse, shift) * second.out, lse)


for to_2, says in (
    (False, "logaddexp, where they are logarithms in base 2"),
    (True, "logaddexp2, where they are natural logarithms"),
):
    FAULTS.cause(f"log-sum-exps are merged by {says}", replace(STEPS, merge=functools.partial(_in_two_bases, to_2)))


def _inner_first(here: Here, hop: int) -> int:
    """The place of a block where a rank visits its neighbours, as many as the smallest divisor, before all others."""
    inner = smallest_divisor(here.size)
    (team, member), (of_team, of_member) = (divmod(rank, inner) for rank in (here.rank, (here.rank - hop) % here.size))
    return (team - of_team) % (here.size // inner) * inner + (member - of_member) % inner


ORDERS: dict[str, Callable[[Here, int], int]] = {
    "that of a ring of rings": _inner_first,
    "the rank's own, the next rank's, and so on": lambda here, hop: -hop % here.size,
    "one from the left, one from the right": lambda here, hop: min(2 * hop, 2 * (here.size - hop) + 1),
    "one from the right, one from the left": lambda here, hop: min(2 * hop + 1, 2 * (here.size - hop)) if hop else 0,
    "that of ranks": lambda here, hop: (here.rank - hop) % here.size,
    "that of ranks, the rank's own first": lambda here, hop: (here.rank - hop) % here.size if hop else -1,
}
"""Orders in which blocks may be merged instead of that in which a ring sends them to the right, by hop."""


def in_order(steps: Steps, key: Callable[[Here, int], int]) -> Steps:
    """Merge blocks in another order: it matters only if the merge is wrong."""

    def order(here: Here, every: Iterable[Visit]) -> Iterable[Visit]:
        return sorted(every, key=lambda visit: key(here, visit[0]))

    return replace(steps, order=order)


for cause in [one for one in FAULTS.causes[GUARDED:] if one.steps.changed & {"merge", "normalise"}]:
    for which, key in ORDERS.items():
        more = f"{cause.more}, where the order of blocks is {which}"
        FAULTS.causes.append(replace(cause, steps=in_order(cause.steps, key), more=more))


def _in_parts(cuts: Callable[[Here, int, int], list[int]], steps: Steps) -> Steps:
    """Accumulate parts of a block one after the other, from one block to the next.

    Args:
        cuts: where a block of an owner that has so many keys is cut, both ends included.
        steps: the steps that accumulate.
    """

    def attend(now: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> list[Any]:
        def of_part(some: slice) -> Any:
            m = now.pattern(now, here, hop, owner)[..., some]
            there = replace(now, pattern=lambda *those: m)
            return steps.attend(there, here, hop, owner, q, Block(*(x[:, some] for x in block)))

        return [of_part(slice(*ends)) for ends in pairwise(cuts(here, owner, block.k.size(1)))]

    def accumulate(now: Steps, here: Here, hop: int, running: Any, new: list[Any]) -> Any:
        for one in new:
            running = steps.accumulate(now, here, hop, running, one)
        return running

    return replace(steps, attend=attend, accumulate=accumulate)


def _pieces_of(here: Here, owner: int, keys: int) -> list[int]:
    early = len(pieces(here.problem.nk, 2 * here.size)[owner]) if here.call.sharding == "zigzag" else 0
    return sorted({0, early, keys}) if keys else [0, 0]


for cause in [one for one in FAULTS.causes[GUARDED:] if one.steps.changed == {"merge"}]:
    steps = replace(_in_parts(_pieces_of, cause.steps), skip=lambda here, hop, owner, m: False)
    more = f"{cause.more}, where zigzag pieces are merged one by one"
    FAULTS.causes.append(replace(cause, steps=steps, more=more, narrow=True))


def _in_tiles(tile: int, steps: Steps) -> Steps:
    """Keep the running sums of `online` steps over tiles of so many keys, from one block to the next."""
    return _in_parts(lambda here, owner, keys: [*range(0, max(1, keys), tile), keys], steps)


for tile in TILES:
    for says, by in BASES.items():
        way = functools.partial(torch.mul, torch.tensor(by, dtype=torch.float64))
        whose = f"the factor by which running sums over tiles of {tile} keys of all blocks are rescaled is {says}"
        FAULTS.cause(whose, _in_tiles(tile, online(way=way)))
    for says, sums, totals in UNSCALED:
        text = (
            f"the running sum of {says} over tiles of {tile} keys of all blocks is not rescaled where the maximum grows"
        )
        FAULTS.cause(text, _in_tiles(tile, online(sums=sums, totals=totals)))


def _of_all_keys(partial: Callable[[Tensor, Tensor, Tensor], Partial]) -> Steps:
    """Attend the keys of all blocks at once, in the order of positions."""

    def accumulate(steps: Steps, here: Here, hop: int, running: list[Any] | None, new: tuple[Tensor, ...]) -> list[Any]:
        return [*(running or ()), (here.shards[(here.rank - hop) % here.size], *new)]

    def normalise(running: list[Any]) -> Partial:
        order = torch.argsort(torch.cat([positions for positions, *_ in running]))
        s, m = (torch.cat([one[n] for one in running], dim=-1)[..., order] for n in (1, 2))
        return partial(s, m, torch.cat([one[3] for one in running], dim=2)[:, :, order])

    return replace(
        STEPS,
        skip=lambda here, hop, owner, m: False,
        partial=lambda s, m, v: (s, m, v),
        accumulate=accumulate,
        normalise=normalise,
    )


for tile in TILES:
    for says, sums, totals in UNSCALED:
        FAULTS.cause(
            f"the running sum of {says} over tiles of {tile} keys of all, in the order of positions, is not rescaled "
            "where the maximum grows",
            _of_all_keys(_rescaled_in_tiles(tile, sums=sums, totals=totals).partial),
        )


def _stale(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if bool((new.lse == -math.inf).all()) and "last" in here.notes:
        new = here.notes["last"]
    here.notes["last"] = new
    return new if running is None else Partial(*steps.merge(running, new))


FAULTS.add(
    "A11",
    "a block in which nothing is visible leaves the block before it to be merged again",
    replace(STEPS, accumulate=_stale),
)


def _equals_skipped(first: Partial, second: Partial) -> Partial:
    whole, same = STEPS.merge(first, second), first.lse == second.lse
    return Partial(torch.where(same[..., None], first.out, whole.out), torch.where(same, first.lse, whole.lse))


FAULTS.add(
    "O108",
    "parts of equal lse are not merged: the second is left out",
    replace(STEPS, merge=_equals_skipped),
    narrow=True,
)


# -- log-sum-exps of blocks --------------------------------------------------------------------------------------------


def lse_of_blocks(change: Callable[[Tensor], Tensor], *, skipped: bool = True) -> Steps:
    """Another log-sum-exp of each block, by the right one: of blocks that are skipped whole, too, or not."""

    def changed(found: Partial) -> Partial:
        return found._replace(lse=change(found.lse))

    steps = replace(STEPS, partial=lambda s, m, v: changed(arithmetic.partial(s, m, v)))
    return replace(steps, nothing=lambda *those: changed(STEPS.nothing(*those))) if skipped else steps


def taken(value: float, other: float) -> Callable[[Tensor], Tensor]:
    """One value taken for another."""
    return lambda lse: torch.where(lse == value, other, lse)


FAULTS.add("A4a", "a block without visible keys has lse +inf", lse_of_blocks(taken(-math.inf, math.inf)))
FAULTS.add("A4b", "a block without visible keys has lse 0", lse_of_blocks(taken(-math.inf, 0.0)))
for value, name in ((math.inf, "+inf"), (0.0, "0")):
    FAULTS.cause(
        f"a block without visible keys has lse {name}",
        lse_of_blocks(taken(-math.inf, value), skipped=False),
        more=", unless it is skipped whole",
    )


def _lse_without_keys(value: float) -> Steps:
    """Another log-sum-exp of blocks that hold no keys at all."""

    def attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Partial:
        found: Partial = STEPS.attend(steps, here, hop, owner, q, block)
        return found if block.k.size(1) else found._replace(lse=torch.full_like(found.lse, value))

    return replace(STEPS, attend=attend)


for value, name in ((math.inf, "+inf"), (0.0, "0")):
    FAULTS.cause(f"the block of a rank that holds no keys has lse {name}", _lse_without_keys(value))
for value in (-1e8, -1e9, -1e10, -1e30, torch.finfo(torch.float32).min):  # what has been used for -inf
    says = f"a block without visible keys has lse {value:.3g} instead of -inf"
    FAULTS.cause(says, lse_of_blocks(taken(-math.inf, value)), overflows=True)
    says = "an lse of exactly 0 is taken for one that was not computed"
    FAULTS.cause(says, lse_of_blocks(taken(0.0, value)), overflows=True)
FAULTS.cause("an lse of exactly 0 is taken for one that was not computed", lse_of_blocks(taken(0.0, -math.inf)))
FAULTS.mutant("A4c", "a block without visible keys has lse -1e+08 instead of -inf")
FAULTS.add("A6", says, lse_of_blocks(taken(0.0, -1e8)), recognised=False)


def _times(found: Partial, factor: float) -> Partial:
    return found._replace(lse=factor * found.lse)


FAULTS.add(
    "A8a",
    "base-2 log-sum-exps of blocks are merged as natural ones",
    replace(
        lse_of_blocks(lambda lse: lse / math.log(2)),
        together=lambda steps, here, running: _times(together(steps, here, running), math.log(2)),
    ),
)
FAULTS.cause(
    "base-2 log-sum-exps of blocks are merged as natural ones",
    lse_of_blocks(lambda lse: lse / math.log(2)),
    more=", and returned",
)
FAULTS.cause(
    "natural log-sum-exps of blocks are merged as base-2 ones",
    replace(
        lse_of_blocks(lambda lse: lse * math.log(2)),
        together=lambda steps, here, running: _times(together(steps, here, running), 1 / math.log(2)),
    ),
)
FAULTS.cause(
    "the lse of every block is 0: blocks are merged with equal weights, whatever they attend",
    lse_of_blocks(lambda lse: torch.where(lse == -math.inf, lse, 0.0)),
)


def _narrow_lse(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Round each block's lse as `lse.to(q.dtype)` does, and merge in that dtype with sigmoids."""
    dtype = getattr(torch, here.problem.dtype)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(here.wide)

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        found = arithmetic.partial(s, m, v)
        return found._replace(lse=rounded(found.lse))

    def merge(a: Partial, b: Partial) -> Partial:
        share = rounded(torch.sigmoid(rounded(b.lse - a.lse)))
        out = a.out - share[..., None] * (a.out - b.out)
        lse = rounded(a.lse - rounded(torch.log(torch.sigmoid(rounded(a.lse - b.lse)))))
        none = b.lse == -math.inf
        first = (a.lse == -math.inf) & ~none
        out = torch.where(none[..., None], a.out, torch.where(first[..., None], b.out, out))
        return Partial(out, torch.where(none, a.lse, torch.where(first, b.lse, lse)))

    return STEPS.forward(replace(steps, partial=partial, merge=merge), here, q, k, v)


FAULTS.cause(
    "log-sum-exps of blocks are rounded to the dtype of the inputs, and merged in it",
    replace(STEPS, forward=_narrow_lse),
)


# -- blocks that are left out or counted twice -------------------------------------------------------------------------


BLOCKS: dict[str, Times] = {
    "each rank attends its own block only: keys and values never rotate": lambda here, hop, owner: hop == 0,
    "the block of the last hop is never merged": lambda here, hop, owner: not 0 < hop == here.size - 1,
    "every rank leaves its own block out": lambda here, hop, owner: hop > 0 or here.size == 1 or here.replicated,
    "every rank's own block is counted twice": lambda here, hop, owner: 2 if hop == 0 and here.size > 1 else 1,
    "the block of the last hop is counted twice": lambda here, hop, owner: 2 if 0 < hop == here.size - 1 else 1,
    "the block of hop 1 is never merged": lambda here, hop, owner: hop != 1,
    "the block of hop 2 is never merged": lambda here, hop, owner: hop != 2,
    "the blocks from hop 2 on are never merged": lambda here, hop, owner: hop < 2,
    "the block of hop 1 is counted twice": lambda here, hop, owner: 2 if hop == 1 else 1,
    "the block of hop 2 is counted twice": lambda here, hop, owner: 2 if hop == 2 else 1,
    "the block of rank 0 is counted twice on every other rank": lambda here, hop, owner: 1 + (owner == 0 < here.rank),
    "the block of rank 0 is never merged on other ranks": lambda here, hop, owner: owner > 0 or here.rank == 0,
    "the block of the last rank is never merged on other ranks": lambda here, hop, owner: (
        owner < here.size - 1 or here.rank == owner
    ),
}


def in_pattern(times: Times) -> Steps:
    """Multiply the multiplicities of blocks, in forward and backward alike."""
    return replace(
        STEPS, pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner) * times(here, hop, owner)
    )


for says, times in BLOCKS.items():
    FAULTS.cause(says, in_pattern(times))
FAULTS.mutant("O65", "the block of the last hop is never merged, in the forward only")
FAULTS.mutant("O66", "every rank's own block is counted twice, in the forward only")
FAULTS.mutant("O67", "every rank leaves its own block out, in the forward only")
FAULTS.mutant("O68", "the block of the last hop is counted twice, in the forward only")
FAULTS.mutant("O69", "the block of rank 0 is counted twice on every other rank, in the forward only")


def _stays(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    return part


FAULTS.add(
    "R6a",
    "each rank attends its own block only: keys and values never rotate",
    replace(STEPS, hops=lambda here: 1, travel=_stays),
    recognised=False,
)
FAULTS.add(
    "R6b",
    "replicated queries: partial results are never merged, each rank returns its own block's",
    replace(STEPS, together=lambda steps, here, whole: whole),
)
FAULTS.cause(
    "replicated queries: partial results are merged, but each rank returns the lse of its own keys",
    replace(STEPS, together=lambda steps, here, own: together(steps, here, own)._replace(lse=own.lse)),
)
FAULTS.add(
    "O74",
    "replicated queries: the partial result of rank 0 is left out",
    replace(STEPS, together=lambda steps, here, own: together(steps, here, own, slice(1, None))),
)
FAULTS.cause(
    "replicated queries: the partial result of the last rank is left out",
    replace(STEPS, together=lambda steps, here, own: together(steps, here, own, slice(None, -1))),
)
