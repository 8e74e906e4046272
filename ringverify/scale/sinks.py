"""The gradient of learned sinks, a sum over rows, held to that of rows whose out and lse are known.

    dsink_h = Σ_i w_i (dlse_i − dout_i·out_i)        w_i = exp(sink_h − lse_i)

over the queries of a rank, or of all ranks, as is declared. Out and lse are those of an oracle, or the returned ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringref.rounding import LongBounds
from ringverify.cases.comparing import sinks_in_parts
from ringverify.scale.long_run import LongRun
from ringverify.scale.numbers import Positions

Float = NDArray[np.float64]

IDENTITY = 4
"""Number of the identity of returned results, after those of `ringverify.scale.identities`."""


class SinkGradient:
    """The sums of the rows that were added, by head; nothing where the problem has no sinks, or no gradient came back.

    Args:
        run: this rank's part.
        bounds: of the problem on its inputs.
        returned: whether out and lse are those that the implementation returned.
    """

    def __init__(self, run: LongRun, bounds: LongBounds, *, returned: bool = False) -> None:
        self._run, self._bounds, self._returned = run, bounds, returned
        self._sums = np.zeros((3, run.problem.heads))  # gradient, squared errors and sizes of rows

    def add(self, b: int, h: int, at: Positions, keys: Float, out: Float, lse: Float, least: Float) -> None:
        """Add rows of queries of a head.

        Args:
            b: element of the batch.
            h: query head.
            at: positions `(n,)`.
            keys: how many keys each attends `(n,)`.
            out: `(n, E)`.
            lse: `(n,)`.
            least: y_i of `ringref.classes`, or more, `(n,)`.
        """
        run, sink = self._run, self._run.sink(h)
        if run.compared.dsinks is None or sink == -np.inf:
            return
        dout, dlse = run.numbers.dout(b, h, at), run.dlse(b, h, at)
        weights = np.exp(sink - lse)
        terms = weights * (dlse - (dout * out).sum(axis=-1))
        errors = self._bounds.sink_terms(keys, weights, least, dout, out, dlse)
        if self._returned:
            of_lse, (_, of_scores) = self._bounds.lse(keys, lse), self._bounds.rows_in_sums(keys, np.ones(len(at)))
            errors += (np.expm1(of_lse) + of_scores) * weights * least
        self._sums[:, h] += terms.sum(), (errors**2).sum(), (weights * least).sum()

    def compare(self) -> None:
        """Compare what came back with the sums: of this rank's queries, or of all."""
        run, actual = self._run, self._run.compared.dsinks
        if actual is None:
            return
        parts = sinks_in_parts(run.case, run.capabilities)
        together = run.shared and (self._returned or not parts)
        sums = run.summed(self._sums) if together else self._sums
        if together and parts:
            actual = run.summed(actual)
        if self._returned and run.rank and (parts or not run.shared):
            return  # one rank has everything
        expected, squares, sizes = sums
        allowed = self._bounds.sink_gradient(squares, sizes) * (sizes > 0)
        whose = "this rank's" if parts and not together else "all"
        says = [f"what {whose} queries give to the sink of head {h}" for h in range(len(expected))]
        which = (IDENTITY, 0, 0) if self._returned else None
        run.compared.compare_sums("dsinks", actual, expected, allowed, says, which)
