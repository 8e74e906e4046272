"""Faults of learned sinks: where they join, how often, and what their gradient is a sum of.

Mutants declare `sinks`, and so are tried on a share of cases with them; all others are tried on the cases of before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.fault import Faults, When
from ringverify.faults.merging import Online, online
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import EVERYTHING, STEPS, Steps
from ringverify.faults.scores import DEALT_IN_TURN, IN_TURN

Tensor = torch.Tensor
FAULTS = Faults()
SINKS = replace(EVERYTHING, sinks=True)
"""What these mutants claim."""


def _add(id: str, says: str, steps: Steps, *, when: When = "always", recognised: bool = True) -> None:
    FAULTS.add(id, says, steps, when=when, claims=SINKS, recognised=recognised)


def _joined(here: Here, whole: Partial, change: Callable[[Tensor], Tensor]) -> Partial:
    """Join other sinks than those given, which are `(H, 1)`."""
    other = change(arithmetic.sinks_of(here))
    return arithmetic.merge(whole, Partial(torch.zeros_like(whole.out), other.expand_as(whole.lse)))


def _with(change: Callable[[Here, Tensor], Tensor]) -> Steps:
    """The ring with other sinks in the forward; the backward takes the lse that it finds."""
    return replace(STEPS, sink=lambda here, whole: _joined(here, whole, lambda sinks: change(here, sinks)))


_add("O151", "the sinks are left out", _with(lambda here, sinks: torch.full_like(sinks, -math.inf)))
_add("O152", "the sink counts once for every rank", _with(lambda here, sinks: sinks + math.log(here.size)))
FAULTS.cause(
    "the sink counts once for every merge of two blocks, of which there is one less than ranks",
    _with(lambda here, sinks: sinks + (math.log(here.size - 1) if here.size > 1 else -math.inf)),
)


def _dealt_in_runs(here: Here) -> Tensor:
    """The sink that each query head meets if heads are dealt out in turn to a team, and sinks in runs."""
    ranks, head = math.gcd(here.size, here.problem.hk), torch.arange(here.problem.heads)
    return head % ranks * (here.problem.heads // ranks) + head // ranks


def _gradient_of_runs(here: Here, lse: Tensor, delta: Tensor) -> Tensor:
    sinks, of = arithmetic.sinks_of(here), _dealt_in_runs(here)
    parts = -torch.where(sinks[of] == -math.inf, 0.0, torch.exp(sinks[of] - lse) * delta).sum(dim=(0, 2))
    return torch.zeros_like(parts).index_add(0, of, parts)


FAULTS.cause(
    f"{DEALT_IN_TURN}, and sinks that are dealt out in runs",
    replace(
        IN_TURN,
        sink=lambda here, whole: _joined(here, whole, lambda sinks: sinks[_dealt_in_runs(here)]),
        sink_gradient=_gradient_of_runs,
    ),
)


def _on_every_block(here: Here, whole: Partial) -> Partial:
    """Join the sink as often as blocks were merged that some query of the rank attends."""
    return _joined(here, whole, lambda sinks: sinks + math.log(max(1, len(here.notes.get("hops", ())))))


def _noting(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if bool((new.lse > -math.inf).any()):
        here.notes.setdefault("hops", set()).add(hop)
    merged: Partial = STEPS.accumulate(steps, here, hop, running, new)
    return merged


_add("O153", "the sink counts at every hop that has keys", replace(STEPS, sink=_on_every_block, accumulate=_noting))


def _told_before_it_joins(here: Here, whole: Partial) -> Partial:
    """Join the sink, and note of which rows the keys alone leave nothing."""
    joined = arithmetic.with_sink(here, whole)
    here.notes["nothing"] = torch.exp((whole.lse - joined.lse).float()) == 0
    return joined


def _without_lse_of_nothing(here: Here, whole: Partial) -> Partial:
    nothing = here.notes.get("nothing")
    return whole if nothing is None else Partial(whole.out, whole.lse.masked_fill(nothing, -math.inf))


FAULTS.cause(
    "a row whose keys leave nothing has the lse -inf, and not that of its sink: that is told before the sink joins",
    replace(
        STEPS,
        sink=_told_before_it_joins,
        returned=lambda here, found: STEPS.returned(here, _without_lse_of_nothing(here, found)),
        sink_gradient=lambda here, lse, delta: arithmetic.sink_gradient(
            here, lse, delta.masked_fill(here.notes["nothing"], 0.0)
        ),
    ),
)


def _as_a_key(here: Here, whole: Partial) -> Partial:
    """Join the sink as a key whose value is 1."""
    ones = torch.ones_like(whole.out)
    return arithmetic.merge(whole, Partial(ones, arithmetic.sinks_of(here).expand_as(whole.lse)))


_add("O154", "the sink is merged as a key with a value, of ones", replace(STEPS, sink=_as_a_key))
_add(
    "O155",
    "the sink is left out of lse",
    replace(STEPS, sink=lambda here, whole: Partial(arithmetic.with_sink(here, whole).out, whole.lse)),
)
_add(
    "O156",
    "the sink is in lse and left out of out",
    replace(STEPS, sink=lambda here, whole: Partial(whole.out, arithmetic.with_sink(here, whole).lse)),
)


def _above_the_scores(*, totals: bool) -> Steps:
    """Let the sink join running sums of which one is not rescaled where the sink exceeds the maximum of the scores."""
    plain = online()

    def accumulate(steps: Steps, here: Here, hop: int, running: Online | None, new: Online) -> Online:
        found: Online = plain.accumulate(steps, here, hop, running, new)
        here.notes["top"] = found[2]
        return found

    def sink(here: Here, whole: Partial) -> Partial:
        right, top = arithmetic.with_sink(here, whole), here.notes["top"]
        above = (arithmetic.sinks_of(here) - top).clamp(min=0.0).exp()
        above = torch.where(top == -math.inf, 1.0, above)
        if not totals:
            return right._replace(out=right.out * above[..., None])
        sinks = arithmetic.sinks_of(here).expand_as(top)
        most = torch.maximum(sinks, top)
        total = torch.where(top == -math.inf, 0.0, (whole.lse - top).exp()) + (sinks - most).exp()
        share = torch.where(top == -math.inf, 0.0, (whole.lse - top).exp() / above / total)
        return Partial(whole.out * share[..., None], most + total.log())

    return replace(plain, accumulate=accumulate, sink=sink)


for totals, what in ((False, "weighted values"), (True, "exponentials")):
    FAULTS.cause(
        f"the running sum of {what} is not rescaled where the sink exceeds the maximum of the scores",
        _above_the_scores(totals=totals),
    )
_add("O157", "the sink is multiplied by the scale", _with(lambda here, sinks: sinks * here.problem.scale_value))
_add("O158", "each head takes the sink of the head before it", _with(lambda here, sinks: sinks.roll(1, dims=0)))
_add("O159", "the exponential of the sink is not shifted", _with(lambda here, sinks: torch.log(torch.exp(sinks))))


def _keeping(kept: Callable[[tuple[Tensor, ...], Partial], tuple[Tensor, ...]]) -> Steps:
    """Keep something else for the backward, by what would be kept and the result of the keys alone."""

    def noted(here: Here, whole: Partial) -> Partial:
        here.notes["keys"] = whole
        return STEPS.sink(here, whole)

    return replace(
        STEPS,
        sink=noted,
        kept=lambda here, saved: kept(saved, here.notes["keys"]) if here.problem.sinks else saved,
    )


_add(
    "O160",
    "the backward leaves the sink out: its weights are those of the keys alone",
    _keeping(lambda saved, keys: (*saved[:4], keys.lse)),
)
FAULTS.cause(
    "the backward leaves the sink out: its weights are those of the keys alone, and so is its out",
    _keeping(lambda saved, keys: (*saved[:3], *keys)),
)
FAULTS.cause(
    "delta is computed of out as it is before the sink joins",
    _keeping(lambda saved, keys: (*saved[:3], keys.out, saved[4])),
)


def _gradient(change: Callable[[Here, Tensor, Tensor], Tensor]) -> Steps:
    return replace(STEPS, sink_gradient=change)


def _summed(change: Callable[[Here, Tensor], Tensor]) -> Steps:
    return replace(STEPS, sum_sinks=change)


right = arithmetic.sink_gradient
_add(
    "O161", "the gradient of the sinks is not summed over the ranks", _summed(lambda here, part: part), recognised=False
)
_add(
    "O162",
    "the gradient of the sinks is the mean over the ranks",
    _summed(lambda here, part: STEPS.sum_sinks(here, part) / here.size),
    recognised=False,
)
_add(
    "O163",
    "the gradient of the sinks is 0",
    _gradient(lambda here, lse, delta: torch.zeros_like(right(here, lse, delta))),
    recognised=False,
)
_add(
    "O164",
    "the gradient of the sinks has the wrong sign",
    _gradient(lambda here, lse, delta: -right(here, lse, delta)),
    recognised=False,
)
_add(
    "O165",
    "the gradient of the sinks is that of the first element of the batch",
    _gradient(lambda here, lse, delta: right(here, lse[:1], delta[:1])),
    recognised=False,
)


def _without_dlse(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> Tensor | None:
    return STEPS.sinks_backward(steps, here, saved, dout, torch.zeros_like(dlse))


_add(
    "O166",
    "the gradient of the sinks ignores the cotangent of lse",
    replace(STEPS, sinks_backward=_without_dlse),
    recognised=False,
)
