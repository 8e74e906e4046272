"""What a rank's results are held to, row by row, what is wrong with them, and whose keys explain that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.classes import pieces_of
from ringref.rounding import margins
from ringref.sampled import SampledRows
from ringverify.cases.case import Case
from ringverify.events import TensorName, What
from ringverify.scale.numbers import Numbers, Positions
from ringverify.worlds.whose import theirs

Float = NDArray[np.float64]

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
        owner: rank whose keys explain the worst row, if one does.
        hop: passes that its block has made when it gets there.
        what: what happened to these keys.
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
    owner: int | None = None
    hop: int | None = None
    what: What = "wrong"


class RankResults:
    """What one rank returned, and what was found of it so far.

    Args:
        case: what was computed.
        rank: this rank.
        keys: positions of the keys of every rank.
        numbers: the inputs.

    Attributes:
        returned: by name, `(B, rows, heads, dims)`; lse has one dim.
        rows: number of rows verified, by result.
        margins: the largest margin, by result.
    """

    def __init__(self, case: Case, rank: int, keys: Sequence[Positions], numbers: Numbers) -> None:
        self.returned: dict[TensorName, torch.Tensor] = {}
        self.rows: dict[TensorName, int] = {}
        self.margins: dict[TensorName, float] = {}
        self._case, self._rank, self._keys, self._numbers = case, rank, keys, numbers
        self._found: dict[TensorName, tuple[list[Positions], Difference]] = {}

    @property
    def wrong(self) -> dict[TensorName, int]:
        """The number of wrong rows, by result."""
        return {name: sum(map(len, rows)) for name, (rows, _) in self._found.items()}

    def compare(
        self, name: TensorName, b: int, h: int, rows: Positions, at: Positions, expected: Float, allowed: Float
    ) -> None:
        """Compare rows of a result, by their places in this rank's tensor, with what they have to be."""
        tensor = self.returned.get(name)
        if tensor is None or not len(rows):
            return
        with theirs():
            chosen = tensor[b, torch.from_numpy(rows).to(tensor.device), h]
            actual: Float = chosen.to(device="cpu", dtype=torch.float64).numpy()
        dtype = self._case.problem.lse_dtype if name == "lse" else self._case.problem.dtype
        margin = margins(actual, expected, allowed, dtype)
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
            self._found[name] = known[0], Difference(name, 0, (), index, int(at[row]), value, right, most, worst)

    def explained(self) -> Iterator[Difference]:
        """Yield what is wrong, and whose keys explain it."""
        for name, (wrong, worst) in self._found.items():
            rows = np.concatenate(wrong)
            positions = np.unique(rows)
            cuts = np.flatnonzero(np.diff(positions) > 1)
            firsts, lasts = positions[np.r_[0, cuts + 1]], positions[np.r_[cuts, len(positions) - 1]]
            ranges = tuple((int(a), int(z)) for a, z in zip(firsts[:RANGES], lasts[:RANGES], strict=True))
            whole = dataclasses.replace(worst, rows=len(rows), ranges=ranges)
            if name in ("out", "lse"):
                whole = self._attributed(whole)
            yield whole

    def _attributed(self, one: Difference) -> Difference:
        """Look for the one rank whose keys, left out or counted twice, give what came back in the worst row."""
        p, replicated = self._case.problem, self._case.sharding == "replicated_query"
        at = np.array([one.position])
        b, h = one.index[0], one.index[1 if one.tensor == "lse" else 2]
        q, zeros = stacked(self._numbers.q, p.batch, p.heads, at), np.zeros((p.batch, 1, p.heads, p.dv))
        seen = []
        for keys in self._keys:
            row = SampledRows(p, at, q, zeros, np.zeros((p.batch, p.heads, 1)))
            for piece in pieces_of(keys, 1 << 14):
                k, v = (stacked(make, p.batch, p.hk, piece) for make in (self._numbers.k, self._numbers.v))
                row.see(piece, k, v)
            seen.append((row.out[b, 0, h], row.lse[b, h, 0]))
        outs, lses = (np.stack(of) for of in zip(*seen, strict=True))
        explains: list[tuple[int, What]] = []
        changes: tuple[tuple[float, What], ...] = ((0.0, "missing"), (2.0, "repeated"))
        for owner in np.flatnonzero(lses > -np.inf).tolist():
            for times, what in changes:
                counted = np.ones(len(lses))
                counted[owner] = times
                out, lse = merged(outs[:, None], lses[:, None], counted)
                value = float(lse[0]) if one.tensor == "lse" else float(out[0, one.index[-1]])
                if abs(value - one.actual) <= one.allowed:
                    explains.append((owner, what))
        if len(explains) != 1:
            return one
        owner, what = explains[0]
        hop = None if replicated else (self._rank - owner) % self._case.world_size
        return dataclasses.replace(one, owner=owner, hop=hop, what=what)


def stacked(make: Callable[[int, int, Positions], Float], batch: int, heads: int, at: Positions) -> Float:
    """Return what is made of each element of a batch and each head, `(B, n, heads, dims)`."""
    return np.stack([np.stack([make(b, h, at) for h in range(heads)], axis=1) for b in range(batch)])


def merged(out: Float, lse: Float, counted: Float) -> tuple[Float, Float]:
    """Merge partial results `(P, …, H, E)` and `(P, …)` by their log-sum-exps, each as often as `counted` `(P,)`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = lse + np.log(counted).reshape(-1, *[1] * (lse.ndim - 1))
        top = logs.max(axis=0)
        weights = np.exp(logs - np.where(top == -np.inf, 0.0, top))
        total = weights.sum(axis=0)
        weights = weights / np.where(total == 0, 1.0, total)
        shaped = weights.swapaxes(-1, -2)[..., None] if lse.ndim == 4 else weights[..., None]
        return (shaped * out).sum(axis=0), np.where(total == 0, -np.inf, top + np.log(total))
