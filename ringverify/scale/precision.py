"""`precision` at length: in bfloat16 and float16, no more rounding than declared, over the mean of the sampled rows.

The ordinary property emulates the declared pipeline with all of its scores; here `ringref.sampled_variance` has its
mean error in linear time, and what is allowed above that is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ringref.rounding import declared_rms, precision_allowed, unit_in_words
from ringverify.cases.case import Case
from ringverify.events import TensorName
from ringverify.properties.precision import FEWEST
from ringverify.properties.property import Violation
from ringverify.scale.task import RankReport

Float = NDArray[np.float64]
Probabilities = Literal["accumulates", "input"]
Squares = dict[TensorName, Float]


def summed_squares(squares: Sequence[Squares]) -> Squares:
    """Return the sums of all ranks' `RankReport.squares`."""
    names = dict.fromkeys(name for one in squares for name in one)
    return {name: np.sum([one.get(name, np.zeros((4, 2))) for one in squares], axis=0) for name in names}


def mean_limits(squares: Sequence[Squares], probabilities: Probabilities) -> dict[TensorName, tuple[float, float]]:
    """Return the root mean square error of each result that is judged, and the largest allowed, in units of u."""
    found: dict[TensorName, tuple[float, float]] = {}
    for name, of in summed_squares(squares).items():
        (error, once, more, cancelled), rows = of[:, 0] / np.maximum(of[:, 1], 1), int(of[2, 1])
        if rows >= FEWEST:
            declared = declared_rms(float(np.sqrt(once)), float(more))
            found[name] = float(np.sqrt(error)), precision_allowed(declared, rows, probabilities, float(cancelled))
    return found


def rounded_more(
    case: Case, reports: Sequence[RankReport], probabilities: Probabilities
) -> tuple[float, Violation | None]:
    """Return the largest error divided by the largest allowed, and the violation if it is above 1."""
    margin, violation = 0.0, None
    for name, (rho, limit) in mean_limits([one.squares for one in reports], probabilities).items():
        one = rho / limit if np.isfinite(rho) else np.inf
        if one > max(margin, 1.0):
            text = (
                f"{name} in {case.problem.dtype} is rounded more than declared: root mean square error {rho:.3g} u, "
                f"where the declared pipeline's is at most {limit:.3g} u ({unit_in_words(case.problem.dtype)})"
            )
            violation = Violation(("precision", name), None, text)
        margin = max(margin, one)
    return margin, violation
