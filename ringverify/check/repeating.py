"""Decide whether a case fails again as it did before."""

from __future__ import annotations

from ringverify.cases.comparing import Finding
from ringverify.properties.property import Judgement


def same_failure(one: Judgement, other: Judgement) -> bool:
    """Return whether two runs of one case both violate the property, and in the same way.

    Equal digests are the same failure. So are results whose worst element is the same one, with the same value up to
    the errors allowed there: the last bits of a matrix product may depend on the alignment of its operands, and GPUs
    may add up gradients in any order. A race or uninitialised memory makes larger differences.
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
