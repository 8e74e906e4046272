"""What short runs say of long ones: how long they take, and what they need."""

from __future__ import annotations

import dataclasses

import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.scale.growth import Growth, Point, pairs_of

MIB = 1 << 20
DENSE = Problem(query_length=1024, causal=True)
WINDOW = Problem(query_length=1024, causal=True, window=(2047, 0))


def growth(problem: Problem, *peaks: float) -> Growth:
    """Runs at 1,024, 2,048, … positions."""
    lengths = [problem.replace(query_length=1024 << number) for number in range(len(peaks))]
    return Growth(tuple(Point(p, 0.1, 0.2, int(peak * MIB)) for p, peak in zip(lengths, peaks, strict=True)))


@pytest.mark.parametrize(
    ("problem", "peaks", "expected"),
    [
        (DENSE, (20, 40, 80), 80 * 32),  # in proportion to the length
        (DENSE, (50, 30, 40), 40 + 10 / 2048 * (131_072 - 4096)),  # what is loaded first counts once
        (DENSE, (50, 70, 70), 70),
        (DENSE, (16, 64, 256), 256 * 1024),  # as scores do
        (DENSE, (1, 2, 6), 6 + 4 / 2048 * (131_072 - 4096)),  # too little to tell
        (WINDOW, (16, 64, 256), 256 * 1024),  # all pairs, though few of them are attended
    ],
)
def test_peaks_are_continued(problem: Problem, peaks: tuple[float, ...], expected: float) -> None:
    """Linear or quadratic, by how their differences grow."""
    found = growth(problem, *peaks).bytes_at(problem.replace(query_length=131_072))
    assert found is not None
    assert round(found / MIB / expected, 2) == 1


def test_too_few_or_unknown_peaks_say_nothing() -> None:
    """And no run says nothing of time."""
    long = DENSE.replace(query_length=131_072)
    assert growth(DENSE, 1, 2).bytes_at(long) is None
    unknown = dataclasses.replace(growth(DENSE, 1, 2, 3))
    assert Growth((*unknown.points[:2], unknown.points[2]._replace(peak=None))).bytes_at(long) is None
    assert Growth(()).seconds_at(long) is None


def test_time_grows_with_the_pairs_and_verification_with_the_positions() -> None:
    """A window has as many pairs a query at every length."""
    for problem, times in ((DENSE, 64.0), (WINDOW, 15.0)):
        inside, verifying = growth(problem, 1, 1).seconds_at(problem.replace(query_length=16_384)) or (0, 0)
        assert round(inside / (0.1 * times), 1) == 1
        assert round(verifying, 6) == 1.6


@pytest.mark.parametrize(
    "problem",
    [
        Problem(query_length=50, key_length=30, heads=2, causal=True, window=(7, 2)),
        Problem(query_length=64, heads=3, batch=2, dilation=Dilation(((16, 1), (64, 3)), "shared")),
        Problem(query_length=40, documents=(3, 3, 20, 33)),
    ],
)
def test_pairs_are_those_of_the_pattern(problem: Problem) -> None:
    """With multiplicity."""
    assert pairs_of(problem) == multiplicity(problem).sum()
