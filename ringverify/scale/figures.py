"""What is measured at length, in a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringverify.cases.case import Case
from ringverify.events import TensorName
from ringverify.scale.comparison import EVERY
from ringverify.scale.precision import Probabilities, mean_limits, summed_squares
from ringverify.scale.task import RankReport


def figures(
    case: Case, reports: Sequence[RankReport], probabilities: Probabilities, *, asked: int, one_process: bool
) -> Iterator[str]:
    """Yield the figures of a run, a line each.

    Args:
        case: what was run.
        reports: of all ranks.
        probabilities: where weights are rounded, as is declared.
        asked: positions that were asked for.
        one_process: whether all ranks share a process.
    """
    p = case.problem
    names = [f"{name} {margin:.2g}" for name, margin in _largest(reports).items()]
    yield f"{case.describe()}; largest margins: {', '.join(names)}"
    errors = [f"{name} {rho:.3g} ({right:.3g})" for name, (rho, right) in _mean_errors(reports).items()]
    if errors:
        yield f"root mean square errors in u (of right results, rounded once): {', '.join(errors)}"
    limits = [
        f"{name} {limit:.3g}"
        for name, (_, limit) in mean_limits([one.squares for one in reports], probabilities).items()
    ]
    if limits:
        yield f"root mean square errors that the declared pipeline may have, in u: {', '.join(limits)}"
    times = []
    for name in ("inside", "verifying"):
        seconds = [getattr(one, name) for one in reports]
        wall, worked = max(of[0] for of in seconds), sum(of[1] for of in seconds)
        times.append(f"{wall:.1f} s ({worked:.1f} s of processor time of the ranks' threads)")
    figure = f"implementation {times[0]}, verification {times[1]}"
    peaks = [one.memory for one in reports if one.memory is not None]
    if peaks:
        most, after = (max(of) >> 20 for of in zip(*peaks, strict=True))
        whose = "of the process of all ranks" if one_process else "of a rank"
        figure += f"; peak memory {whose} {most} MiB in the implementation, {after} MiB in verification"
    yield figure
    if p.nq != asked:
        yield f"{p.nq:,} of {asked:,} positions: the rest would not divide as is declared"
    yield from (line for one in reports for line in one.worth)


def _mean_errors(reports: Sequence[RankReport]) -> dict[TensorName, tuple[float, float]]:
    """Return root mean square errors in units of u, and those of right results, rounded once."""
    means = {
        name: np.sqrt(x[:2, 0] / np.maximum(x[:2, 1], 1))
        for name, x in summed_squares([one.squares for one in reports]).items()
    }
    return {name: (float(x[0]), float(x[1])) for name, x in means.items()}


def _largest(reports: Sequence[RankReport]) -> dict[TensorName, float]:
    found = {name: [one.margins[name] for one in reports if name in one.margins] for name in EVERY}
    return {name: max(margins) for name, margins in found.items() if margins}
