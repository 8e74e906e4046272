"""`masked_rows`, `overflow`, `dtypes`: empty rows, large scores, and every declared dtype."""

from __future__ import annotations

from ringverify.cases.case import Cotangent, Values
from ringverify.cases.strategies import Scope, cases
from ringverify.implementation import Capabilities
from ringverify.properties.property import Property, always, judge_everything


def _cotangents(c: Capabilities) -> tuple[Cotangent, ...]:
    return ("out", "both") if c.lse_gradient else ("out",)


def _never_empty(c: Capabilities) -> str | None:
    if c.documents or c.key_lengths or c.dilation or c.cross_lengths:
        return None
    return "nothing declared can leave a query without keys (documents, key_lengths, dilation, cross_lengths)"


LARGE: tuple[Values, ...] = (
    "large_scores", "rising_blocks", "falling_blocks", "dominating_key", "float16_limits"
)  # fmt: skip
"""Families of values whose scores overflow what is narrow or not shifted."""

MASKED_ROWS = Property(
    id="masked_rows",
    meaning="a query without keys has out 0, lse -inf and gradients that are exactly 0; its neighbours are right",
    examples=120,
    cases=lambda c: cases(c, Scope(want_empty_rows=True, cotangents=_cotangents(c))),
    judge=judge_everything,
    unsupported=_never_empty,
)
OVERFLOW = Property(
    id="overflow",
    meaning="scores of 100, gaps of 100 between blocks in either visiting order, and scores past 65504 are exact work",
    examples=120,
    cases=lambda c: cases(
        c,
        Scope(
            values=LARGE,
            cotangents=_cotangents(c),
        ),
    ),
    judge=judge_everything,
    unsupported=always,
)
DTYPES = Property(
    id="dtypes",
    meaning="every declared dtype comes back as it went in, rounded once, with sums and lse in float32 or wider",
    examples=160,
    cases=lambda c: cases(c, Scope(cotangents=_cotangents(c))),
    judge=judge_everything,
    unsupported=always,
)
