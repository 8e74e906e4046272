"""Known ways in which a merge is wrong, each once: caught as a mutant, recognised as a cause.

Each takes all partials of a case at once: outs `(P, B, S, H, D)` and log-sum-exps `(P, B, H, S)` in base e, −inf for an
empty one, in the dtype in which the merge accumulates. What a fault does to two partials it does to any number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from ringverify.merge_contract import Base
from ringverify.merging.case import LN2

Tensor = torch.Tensor
Both = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class MergeFault:
    """A fault.

    Attributes:
        id: its name in tests.
        sentence: what is wrong.
        function: the wrong merge, `(outs, lses, base)` to `(out, lse)`, differentiable.
    """

    id: str
    sentence: str
    function: Callable[[Tensor, Tensor, Base], Both]


def by_query(lse_like: Tensor) -> Tensor:
    """Return `(…, H, S)` as `(…, S, H, 1)`."""
    return lse_like.transpose(-1, -2)[..., None]


def weights(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the right weights, and the right lse, for a fault to change."""
    top = lses.detach().amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    terms = torch.exp(lses - top)
    total = terms.sum(0)
    some = torch.where(total == 0, 1.0, total)
    return terms / some, torch.where(total == 0, -math.inf, some.log() + top)


def summed(weights: Tensor, outs: Tensor) -> Tensor:
    """Return the sum of outs, each times its weight."""
    return (by_query(weights) * outs).sum(0)


def _other_base(outs: Tensor, lses: Tensor, base: Base) -> Both:
    factor = LN2 if base == "e" else 1 / LN2
    w, lse = weights(lses * factor)
    return summed(w, outs), lse / factor


def _given_in_other_base(outs: Tensor, lses: Tensor, base: Base) -> Both:
    w, lse = weights(lses * (LN2 if base == "e" else 1 / LN2))
    return summed(w, outs), lse


def _returned_times(factor: Callable[[Base], float]) -> Callable[[Tensor, Tensor, Base], Both]:
    def function(outs: Tensor, lses: Tensor, base: Base) -> Both:
        w, lse = weights(lses)
        return summed(w, outs), lse * factor(base)

    return function


def _without_shift(outs: Tensor, lses: Tensor, base: Base) -> Both:
    terms = torch.exp(lses)
    total = terms.sum(0)
    return summed(terms, outs) / by_query(total), total.log()


def _not_normalised(outs: Tensor, lses: Tensor, base: Base) -> Both:
    top = torch.nan_to_num(lses.amax(0), neginf=0.0)
    return summed(torch.exp(lses - top), outs), weights(lses)[1]


def _one_by_one(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Base], Both]:
    """Merge one after another, with an lse of two by `step` from which the weights are computed."""

    def function(outs: Tensor, lses: Tensor, base: Base) -> Both:
        out, lse = outs[0], lses[0]
        for out_b, lse_b in zip(outs[1:], lses[1:], strict=True):
            both = step(lse, lse_b)
            out = by_query(torch.exp(lse - both)) * out + by_query(torch.exp(lse_b - both)) * out_b
            lse = both
        return out, lse

    return function


def _sigmoids(outs: Tensor, lses: Tensor, base: Base) -> Both:
    out, lse = outs[0], lses[0]
    for out_b, lse_b in zip(outs[1:], lses[1:], strict=True):
        out = out - by_query(torch.sigmoid(lse_b - lse)) * (out - out_b)
        lse = lse - torch.nn.functional.logsigmoid(lse - lse_b)
    return out, lse


def _zero_for_empty(outs: Tensor, lses: Tensor, base: Base) -> Both:
    w, lse = weights(lses)
    return summed(w, outs), torch.where(lse == -math.inf, 0.0, lse)


def _empty_counts(outs: Tensor, lses: Tensor, base: Base) -> Both:
    w, lse = weights(torch.where(lses == -math.inf, 0.0, lses))
    return summed(w, outs), lse


def _equal_lost(outs: Tensor, lses: Tensor, base: Base) -> Both:
    lost = (lses == lses[0]) & (torch.arange(len(lses)) > 0).reshape(-1, 1, 1, 1)
    w, lse = weights(torch.where(lost, -math.inf, lses))
    return summed(w, outs), lse


def _of_the_first_two(outs: Tensor, lses: Tensor, base: Base) -> Both:
    w, lse = weights(lses[:2])
    return summed(w, outs[:2]), lse


def _guarded_behind(outs: Tensor, lses: Tensor, base: Base) -> Both:
    """Replace what came out as NaN, which leaves the NaN in the gradient: 0 times NaN."""
    w, lse = weights(lses)
    empty = (lses == -math.inf).any(0)
    naive_out, naive_lse = _sigmoids(outs, lses, base)
    return torch.where(by_query(empty), summed(w, outs), naive_out), torch.where(empty, lse, naive_lse)


def _with(change: Callable[[Tensor, Tensor, Tensor, Tensor], Both]) -> Callable[[Tensor, Tensor, Base], Both]:
    """Change the weights or the lse: `change` is given the outs, the lses, the right weights and the right lse."""
    return lambda outs, lses, base: change(outs, lses, *weights(lses))


FAULTS: dict[str, MergeFault] = {
    id: MergeFault(id, sentence, function)
    for id, sentence, function in (
        ("sigmoid", "empty partials give NaN: -inf - (-inf)", _sigmoids),
        ("base", "lse is taken for one of another base: base e and base 2 are mixed up", _other_base),
        (
            "given_base",
            "the weights are of an lse of another base, and lse has the right one: base e and base 2 are mixed up",
            _given_in_other_base,
        ),
        (
            "returned_base",
            "the weights are right, and lse is returned in another base: base e and base 2 are mixed up",
            _returned_times(lambda base: 1 / LN2 if base == "e" else LN2),
        ),
        (
            "converted",
            "the weights are right, and lse is converted from another base that it does not have",
            _returned_times(lambda base: LN2 if base == "e" else 1 / LN2),
        ),
        ("no_shift", "the weights are exp(lse), without a shift: they overflow or vanish", _without_shift),
        ("not_normalised", "the weights are not normalised: they do not add up to 1", _not_normalised),
        (
            "log1p",
            "log(1 + exp(lse_b - lse_a)) overflows",
            _one_by_one(lambda a, b: a + torch.log1p(torch.exp(b - a))),
        ),
        ("empty_lse_0", "where all partials are empty, lse is 0 instead of the mark of an empty one", _zero_for_empty),
        ("empty_counts", "the lse of an empty partial is taken for 0, so it has a weight", _empty_counts),
        ("mean", "out is the plain mean of the partials", _with(lambda o, s, w, lse: (o.mean(0), lse))),
        ("exchanged", "the weights are exchanged", _with(lambda o, s, w, lse: (summed(w.flip(0), o), lse))),
        ("lse_is_max", "the merged lse is the largest one", _with(lambda o, s, w, lse: (summed(w, o), s.amax(0)))),
        ("lse_is_first", "the merged lse is that of the first", _with(lambda o, s, w, lse: (summed(w, o), s[0]))),
        ("lse_is_last", "the merged lse is that of the last", _with(lambda o, s, w, lse: (summed(w, o), s[-1]))),
        ("lse_is_sum", "the log-sum-exps are added", _with(lambda o, s, w, lse: (summed(w, o), s.sum(0)))),
        ("equal_lost", "of partials of equal lse, only the first has a weight", _equal_lost),
        ("first_only", "the result is the first partial alone", lambda o, s, base: (o[0], s[0])),
        ("two_only", "of more than two partials at once, only the first two are merged", _of_the_first_two),
        ("last_lost", "the last partial is left out", lambda o, s, base: _without_last(o, s)),
        (
            "nan_hidden",
            "NaN is replaced by 0, so what went wrong before is hidden",
            _with(lambda o, s, w, lse: (torch.nan_to_num(summed(w, o)), torch.nan_to_num(lse, neginf=-math.inf))),
        ),
        (
            "guarded_behind",
            "the gradient is NaN where a partial is empty: NaN is replaced in the result, and not before it comes up",
            _guarded_behind,
        ),
        (
            "detached",
            "the gradient of the log-sum-exps lacks what comes through the weights: they are detached",
            _with(lambda o, s, w, lse: (summed(w.detach(), o), lse)),
        ),
        (
            "out_detached",
            "the gradient of the outs is lost: they are detached",
            _with(lambda o, s, w, lse: (summed(w, o.detach()), lse)),
        ),
    )
}
"""By id, what is likeliest first: a case may look like several."""


def _without_last(outs: Tensor, lses: Tensor) -> Both:
    w, lse = weights(lses[:-1])
    return summed(w, outs[:-1]), lse
