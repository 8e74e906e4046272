"""What a rank's results are held to, row by row, what is wrong with them, and whose keys explain that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.classes import pieces_of
from ringref.rounding import UNIT_ROUNDOFF, margins, rms_error, rows_of_rms
from ringref.sampled import SampledRows, merged
from ringverify.cases.case import Case
from ringverify.cases.inputs import DTYPE
from ringverify.events import TensorName, What, WrongPair
from ringverify.scale.checksums import RESULTS
from ringverify.scale.numbers import Numbers, Positions
from ringverify.worlds.whose import theirs

Float = NDArray[np.float64]

Shards = tuple[Sequence[Positions], Sequence[Positions]]

EVERY: tuple[TensorName, ...] = (*RESULTS, "dsinks")
"""Results in the order in which they depend on one another, that of learned sinks too."""
CHANGES: tuple[tuple[float, What], ...] = ((0.0, "missing"), (2.0, "repeated"))
"""How often what is left out or counted twice counts."""
RANGES = 6
"""Ranges of wrong rows that travel."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result of one rank that is wrong.

    Attributes:
        tensor: the result.
        rows: number of wrong rows, of a head at a position.
        ranges: first and last of some runs of positions of wrong rows.
        index: of the worst element in the rank's tensor, canonical layout.
        position: global position of its row.
        actual: what came back.
        expected: the oracle's value.
        allowed: largest error allowed.
        margin: of that element.
        pair: the queries and keys of two ranks that explain the worst row, if two do, and what happened to them.
        identity: what should have been equal, where no row is known to be wrong but a sum over all of them.
        sum: then, the number of the identity, element of the batch, key head and dimension.
    """

    tensor: TensorName
    rows: int
    ranges: tuple[tuple[int, int], ...]
    index: tuple[int, ...]
    position: int
    actual: float
    expected: float
    allowed: float
    margin: float
    pair: WrongPair | None = None
    identity: str | None = None
    sum: tuple[int, int, int, int] | None = None


class RankResults:
    """What one rank returned, and what was found of it so far.

    Args:
        case: what was computed.
        rank: this rank.
        shards: positions of the queries and of the keys of every rank.
        numbers: the inputs.

    Attributes:
        returned: by name, `(B, rows, heads, dims)`; lse has one dim.
        dsinks: the gradient of learned sinks `(H,)`, if one came back.
        rows: number of rows verified, by result.
        margins: the largest margin, by result.
        rows_known: by element and query head, lse and `dlse − dout·out` of all queries `(2, N)`; lse is infinite where
            a query has no cotangent.
        squares: in low precision, by result, sums of rows' squared relative errors in units of u, and number of rows:
            of what came back, of the oracle's results, rounded once, what `ringref.sampled_variance` adds to them, and
            by how much squares of what blocks add to them are larger.
        unequal: the sum over all rows that is off by most, if one is.
    """

    def __init__(self, case: Case, rank: int, shards: Shards, numbers: Numbers) -> None:
        self.returned: dict[TensorName, torch.Tensor] = {}
        self.dsinks: Float | None = None
        self.rows: dict[TensorName, int] = {}
        self.margins: dict[TensorName, float] = {}
        self._case, self._rank, self._numbers = case, rank, numbers
        self._queries, self._keys = shards
        self.rows_known: dict[tuple[int, ...], Float] = {}
        self.squares: dict[TensorName, Float] = {}
        self.unequal: Difference | None = None
        self._found: dict[TensorName, tuple[list[Positions], Difference]] = {}
        self._worst: dict[TensorName, tuple[Float, Float, Float]] = {}  # that row: actual, expected, allowed

    @property
    def wrong(self) -> dict[TensorName, int]:
        """The number of wrong rows, by result."""
        return {name: sum(map(len, rows)) for name, (rows, _) in self._found.items()}

    def compare(
        self,
        name: TensorName,
        b: int,
        h: int,
        rows: Positions,
        at: Positions,
        expected: Float,
        allowed: Float,
        variance: Sequence[Float] | None = None,
    ) -> None:
        """Compare rows of a result, by their places in this rank's tensor, with what they have to be.

        `variance` is that of `ringref.sampled_variance`, where it is known, and squares of what blocks add, if they do.
        """
        if name not in self.returned or not len(rows):
            return
        actual = self.actual(name, b, h, rows)
        dtype = self._case.problem.lse_dtype if name == "lse" else self._case.problem.dtype
        margin = margins(actual, expected, allowed, dtype)
        if name != "lse" and UNIT_ROUNDOFF[dtype] > UNIT_ROUNDOFF["float32"]:
            rho, count = rms_error(actual, expected, dtype, allowed)
            self.averaged(name, expected, allowed, variance)
            self.squares[name][0] += rho**2 * count, count
        self.rows[name] = self.rows.get(name, 0) + len(rows)
        worst = float(margin.max())
        self.margins[name] = max(self.margins.get(name, 0.0), worst)
        wrong = (margin > 1).any(axis=-1)
        if not wrong.any():
            return
        row, d = (int(i) for i in np.unravel_index(int(margin.argmax()), margin.shape))
        known = self._found.setdefault(name, ([], Difference(name, 0, (), (), 0, 0, 0, 0, -1.0)))
        known[0].append(at[wrong])
        if worst > known[1].margin:
            local = int(rows[row])
            index = (b, h, local) if name == "lse" else (b, local, h, d)
            value, right, most = (float(x[row, d]) for x in (actual, expected, allowed))
            self._worst[name] = actual[row], expected[row], allowed[row]
            self._found[name] = known[0], Difference(name, 0, (), index, int(at[row]), value, right, most, worst)

    def averaged(
        self, name: TensorName, expected: Float, allowed: Float, variance: Sequence[Float] | None
    ) -> NDArray[np.bool_]:
        """Add what right results of these rows are off by to `squares`, and return which rows count."""
        dtype = self._case.problem.dtype
        rounded: Float = torch.from_numpy(expected).to(DTYPE[dtype]).to(torch.float64).numpy()
        rho, count = rms_error(rounded, expected, dtype, allowed)
        kept, found = rows_of_rms(expected, allowed), self.squares.setdefault(name, np.zeros((4, 2)))
        found[1] += rho**2 * count, count
        if variance is not None:
            for number, of in enumerate(variance):
                relative = of[kept].sum(axis=-1) / (expected[kept] ** 2).sum(axis=-1)
                found[2 + number] += (np.maximum(relative - 1, 0) if number else relative).sum(), count
        return kept

    def actual(self, name: TensorName, b: int, h: int, rows: Positions) -> Float:
        """Return rows of a result, by their places in this rank's tensor."""
        tensor = self.returned[name]
        with theirs():
            chosen = tensor[b, torch.from_numpy(rows).to(tensor.device), h]
            actual: Float = chosen.to(device="cpu", dtype=torch.float64).numpy()
        return actual

    def compare_sums(
        self,
        name: TensorName,
        actual: Float,
        expected: Float,
        allowed: Float,
        says: Sequence[str],
        identity: tuple[int, int, int] | None = None,
    ) -> None:
        """Compare sums over rows, of which `says` names each; of an identity: its number, element and key head."""
        margin = margins(actual, expected, allowed, "float64")
        worst, d = float(margin.max()), int(margin.argmax())
        self.margins[name] = max(self.margins.get(name, 0.0), worst)
        if worst > max(1.0, self.unequal.margin if self.unequal else 0.0):
            value, right, most = (float(x[d]) for x in (actual, expected, allowed))
            text = f"{says[d]}: {value:.9g}, expected {right:.9g}"
            self.unequal = Difference(name, 0, (), (), 0, value, right, most, worst, identity=text)
            if identity is not None:
                self.unequal = dataclasses.replace(self.unequal, sum=(*identity, d))

    def explained(self) -> Iterator[Difference]:
        """Yield what is wrong, and whose keys or queries explain it."""
        if self.unequal:
            yield self.unequal
        for name, (wrong, worst) in self._found.items():
            rows = np.concatenate(wrong)
            positions = np.unique(rows)
            cuts = np.flatnonzero(np.diff(positions) > 1)
            firsts, lasts = positions[np.r_[0, cuts + 1]], positions[np.r_[cuts, len(positions) - 1]]
            ranges = tuple((int(a), int(z)) for a, z in zip(firsts[:RANGES], lasts[:RANGES], strict=True))
            whole = dataclasses.replace(worst, rows=len(rows), ranges=ranges)
            if name in ("out", "lse") or not self._found.keys() & {"out", "lse"}:
                explains = list(self._by_owner(whole) if name in ("out", "lse") else self._by_part(whole))
                whole = dataclasses.replace(whole, pair=explains[0] if len(explains) == 1 else None)
            yield whole

    def _by_owner(self, one: Difference) -> Iterator[WrongPair]:
        """Yield the ranks whose keys, left out or counted twice, give what came back in the worst row of queries."""
        p = self._case.problem
        at = np.array([one.position])
        b, h = one.index[0], one.index[1 if one.tensor == "lse" else 2]
        q, zeros = stacked(self._numbers.q, p.batch, p.heads, at), np.zeros((p.batch, 1, p.heads, p.dv))
        seen = []
        for keys in self._keys:
            row = SampledRows(p, at, q, zeros, np.zeros((p.batch, p.heads, 1)))
            for piece in pieces_of(keys, 1 << 14):
                row.see(piece, *self._keys_at(piece))
            seen.append((row.out[b, 0, h], row.lse[b, h, 0]))
        outs, lses = (np.stack(of) for of in zip(*seen, strict=True))
        owners = np.flatnonzero(lses > -np.inf).tolist()
        if self._numbers.sinks is not None:  # one more partial result, which is nobody's
            outs, lses = np.append(outs, np.zeros_like(outs[:1]), axis=0), np.append(lses, self._numbers.sinks[h])
        for owner in owners:
            for times, what in CHANGES:
                counted = np.ones(len(lses))
                counted[owner] = times
                out, lse = merged(outs[:, None], lses[:, None], counted)
                actual, _, allowed = self._worst[one.tensor]
                if (np.abs((lse if one.tensor == "lse" else out[0]) - actual) <= allowed).all():
                    yield self._pair(self._rank, owner, what)

    def _by_part(self, one: Difference) -> Iterator[WrongPair]:
        """Yield the ranks whose part, left out or counted twice, gives what came back in the worst row of a gradient.

        A part of dq is that of a rank's keys, and one of dk or dv that of a rank's queries.
        """
        at, (b, _, h, _) = np.array([one.position]), one.index
        actual, expected, allowed = self._worst[one.tensor]
        for other in range(self._case.world_size if self.rows_known else 0):
            if one.tensor == "dq":
                row = self._row(at)
                for piece in pieces_of(self._keys[other], 1 << 14):
                    row.differentiate(piece, *self._keys_at(piece))
                part, ranks = row.dq[b, 0, h], (self._rank, other)
            else:
                which, key = ("dk", "dv").index(one.tensor), self._keys_at(at)
                pieces = pieces_of(self._queries[other], 1 << 12)
                parts = [self._row(piece).differentiate(at, *key)[which][b, 0, h] for piece in pieces]
                part, ranks = np.sum([np.zeros_like(expected), *parts], axis=0), (other, self._rank)
            for times, what in CHANGES:
                explained = np.abs(expected + (times - 1) * part - actual) <= allowed
                if explained.all() and (np.abs(part) > allowed).any():
                    yield self._pair(*ranks, what)

    def _row(self, at: Positions) -> SampledRows:
        """Return rows of queries with their lse and an out of zero: `dlse − dout·out` is in the place of dlse."""
        p = self._case.problem
        lse, towards = np.stack([self.rows_known[x][:, at] for x in np.ndindex(p.batch, p.heads)], axis=1)
        q, dout = (stacked(make, p.batch, p.heads, at) for make in (self._numbers.q, self._numbers.dout))
        row = SampledRows(p, at, q, dout, towards.reshape(p.batch, p.heads, len(at)))
        row.lse = lse.reshape(p.batch, p.heads, len(at))
        return row

    def _keys_at(self, at: Positions) -> tuple[Float, Float]:
        p = self._case.problem
        return stacked(self._numbers.k, p.batch, p.hk, at), stacked(self._numbers.v, p.batch, p.hk, at)

    def _pair(self, rank: int, owner: int, what: What) -> WrongPair:
        replicated = self._case.sharding == "replicated_query"
        return WrongPair(rank, owner, None if replicated else (rank - owner) % self._case.world_size, (), what)


def stacked(make: Callable[[int, int, Positions], Float], batch: int, heads: int, at: Positions) -> Float:
    """Return what is made of each element of a batch and each head, `(B, n, heads, dims)`."""
    return np.stack([np.stack([make(b, h, at) for h in range(heads)], axis=1) for b in range(batch)])
