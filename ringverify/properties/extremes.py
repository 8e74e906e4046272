"""`masked_rows`, `overflow`, `dtypes`: empty rows, large scores, and every declared dtype."""

from __future__ import annotations

from ringref.pattern import multiplicity
from ringverify.cases.case import Case, Cotangent, Values
from ringverify.cases.strategies import Scope, cases, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property, always, judge_everything

LARGE: tuple[Values, ...] = (
    "large_scores", "rising_blocks", "falling_blocks", "dominating_key", "float16_limits"
)  # fmt: skip
"""Families of values whose scores overflow float16, or an exponential that is not shifted by the row maximum."""


def _cotangents(c: Capabilities) -> tuple[Cotangent, ...]:
    return ("out", "both") if c.lse_gradient else ("out",)


def _masked(c: Capabilities) -> Scope:
    return Scope(want_empty_rows=True, cotangents=_cotangents(c))


def _has_empty_row(case: Case, c: Capabilities) -> bool:
    """Return whether some query of some head attends no key."""
    return bool((multiplicity(case.problem).sum(axis=3) == 0).any())


def _extreme(c: Capabilities) -> Scope:
    return Scope(values=LARGE, cotangents=_cotangents(c))


def _never_empty(c: Capabilities) -> str | None:
    # Cross lengths leave rows empty if there are more queries than keys and they are causal, or if there are no keys.
    cross = c.cross_lengths and (c.causal != "never" or c.empty_shards)
    if c.documents or c.key_lengths or c.dilation or cross:
        return None
    return "nothing declared can leave a query without keys (documents, key_lengths, dilation, cross_lengths)"


MASKED_ROWS = Property(
    id="masked_rows",
    meaning=(
        "a query without keys has out 0, lse -inf (or its sink) and gradients that are exactly 0; its neighbours are "
        "right"
    ),
    examples=120,
    cases=lambda c: cases(c, _masked(c), lambda case: _has_empty_row(case, c)),
    judge=judge_everything,
    unsupported=_never_empty,
    applies=_has_empty_row,
)
OVERFLOW = Property(
    id="overflow",
    meaning=(
        "results are right for scores around 100 and -100, for gaps of 100 between blocks in either order, and for "
        "scores above 65504, the largest float16"
    ),
    examples=120,
    cases=lambda c: cases(c, _extreme(c)),
    judge=judge_everything,
    unsupported=always,
    applies=lambda case, c: within(case, c, _extreme(c)),
)
DTYPES = Property(
    id="dtypes",
    meaning=(
        "in every declared dtype, results have the dtype of the inputs, lse is float32 or wider, and errors stay "
        "within what the declared arithmetic allows"
    ),
    examples=160,
    cases=lambda c: cases(c, Scope(cotangents=_cotangents(c))),
    judge=judge_everything,
    unsupported=always,
)
