"""Whether a case fails as it did before."""

from __future__ import annotations

from ringverify.cases.comparing import Finding
from ringverify.properties.property import Judgement


def same_failure(one: Judgement, other: Judgement) -> bool:
    """Whether two runs of one case are violations, and the same one.

    Equal bits always are. Others are if the same element is the worst one in both, with the same number up to the
    rounding that is allowed there: products may have other last bits where their operands lie elsewhere in memory, and
    GPUs add up gradients in any order. What a race or unwritten memory leaves is further apart.
    """
    if one.violation is None or other.violation is None:
        return False
    if one.digest == other.digest:
        return True
    first, second = one.violation.finding, other.violation.finding
    if first is None or second is None or one.violation.reason != other.violation.reason:
        return False
    return _same_number(first, second)


def _same_number(first: Finding, second: Finding) -> bool:
    if (first.tensor, first.rank, first.index) != (second.tensor, second.rank, second.index):
        return False
    a, b = first.actual, second.actual
    return a == b or (a != a and b != b) or abs(a - b) <= first.allowed + second.allowed
