"""What is wrong, and the causes that reproduce it, from what the ranks and one process computed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringref.rounding import scaled_bound, visible_share, witness_bound
from ringref.sharding import Positions
from ringverify.reach.expected import (
    OWN_SHARD,
    Matrix,
    Reach,
    attended,
    composed,
    faults,
    inferred,
    ranks_of,
    same_shard,
)
from ringverify.reach.rank import Array, Computed, ComputedAlone, Precision, Probed
from ringverify.words import plural

DeviationKind = Literal["nan", "leaked", "lost", "values", "loss", "gradients", "silent", "failed"]

UNREACHED, REACHED, LOST, LEAKED, NAN = range(5)
"""What became of a pair of an output and a token."""


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One thing that is wrong: a word for it, and a sentence."""

    kind: DeviationKind
    text: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What the ranks and one process computed, and what was declared.

    Attributes:
        problem: the declared pattern of a layer, if any.
        layers: how many layers compose it.
        whole: every rank has the whole sequence outside the model.
        loss: what a step's loss is, of what ranks return.
        gradients: what training does with those of the ranks.
        precision: dtype of the probes.
        shards: positions of each rank.
        alone, ranks: outputs, losses and gradients.
        alone_probed, ranks_probed: which outputs move.
        recount: computes the outputs of one process that counts positions within shards; see `rank.recount`.
        first_nan: runs the ranks again and says where they first compute NaN, or `None`.
    """

    problem: Problem | None
    layers: int | None
    whole: bool
    loss: Literal["mean", "sum", "whole"] | None
    gradients: Literal["mean", "sum", "whole"] | None
    precision: Precision
    shards: Sequence[Positions]
    alone: ComputedAlone
    ranks: Sequence[Computed]
    alone_probed: Probed
    ranks_probed: Sequence[Probed]
    recount: Callable[[], list[tuple[str, Array]]]
    first_nan: Callable[[], str | None]


@dataclasses.dataclass(frozen=True)
class ReachVerdict:
    """The verdict.

    Attributes:
        findings: what is wrong.
        causes: which known faults reproduce it.
        pairs: what became of each pair of an output and a token, `(N, N)`.
        allowed: by how much outputs may differ.
        differ: by how much they do.
        expectation: what the picture is compared with, in words.
    """

    findings: tuple[Deviation, ...]
    causes: tuple[str, ...]
    pairs: NDArray[np.int8]
    allowed: float
    differ: float
    expectation: str


def judge(evidence: Evidence) -> ReachVerdict:
    """Compare the ranks with one process, and both with what is declared."""
    judging = _Judging(evidence)
    judging.nan()
    pairs = judging.reach()
    differ = judging.values()
    judging.silence()
    judging.loss()
    judging.gradients()
    judging.modules()
    expectation = "what one process reads" if evidence.problem is None else "the declared pattern"
    return ReachVerdict(
        tuple(judging.findings), tuple(dict.fromkeys(judging.causes)), pairs, judging.allowed, differ, expectation
    )


class _Judging:
    def __init__(self, evidence: Evidence) -> None:
        self.given = evidence
        self.length = len(evidence.alone_probed.positions)
        self.rank_of = ranks_of(evidence.shards, self.length)
        self.right = evidence.alone.exact or evidence.alone.plain
        self.allowed = self._bound(evidence.alone.plain.out, self.right.out)
        self.hidden = self._nan(np.all)
        self.findings: list[Deviation] = []
        self.causes: list[str] = []

    def _found(self, kind: DeviationKind, text: str) -> None:
        self.findings.append(Deviation(kind, text))

    def _bound(self, plain: Array | float, exact: Array | float) -> float:
        """How far results may be from those of one process: by what rounding costs that process, and some units."""
        precision: Precision = self.given.alone.precision
        error, size = (float(one[np.isfinite(one)].max(initial=0.0)) for one in (_off(plain, exact), np.abs(exact)))
        return max(scaled_bound(error, precision, precision), witness_bound(precision, self.length) * size)

    # -- which outputs are numbers

    def nan(self) -> None:
        """Report outputs that are NaN: no change of a token shows in them, and nothing can be compared with them."""
        alone, *ranks = self._nan(np.any)
        if alone.any():
            self._found("nan", f"outputs are NaN in one process: {self._tokens(alone)}")
            self.causes.append("the model itself computes NaN, and not its context parallelism")
        more = [one & ~alone for one in ranks]
        if wrong := [str(rank) for rank, one in enumerate(more) if one.any()]:
            where = f"{plural('rank', len(wrong))} {', '.join(wrong)}"
            tokens = self._tokens(np.logical_or.reduce(more))
            self._found("nan", f"outputs are NaN on {where}, and not in one process: {tokens}")
            if (cause := self.given.first_nan()) is not None:
                self.causes.append(cause)

    def _nan(self, reduced: Callable[..., NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
        """Tokens of which any or all outputs are NaN, as `reduced` says: in one process, and on each rank."""
        found = []
        for some in ([self.given.alone.plain, self.right], *([one] for one in self.given.ranks)):
            tokens = np.zeros(self.length, dtype=bool)
            for one in some:
                by_token = np.isnan(one.out).swapaxes(0, 1).reshape(len(one.positions), -1)
                tokens[one.positions] |= reduced(by_token, axis=1)
            found.append(tokens)
        return found

    def _is_nan(self) -> bool:
        return any(one.kind == "nan" for one in self.findings)

    def _tokens(self, chosen: NDArray[np.bool_]) -> str:
        first = int(chosen.argmax())
        return f"{int(chosen.sum())} of {self.length} tokens, first token {first} of rank {self.rank_of[first]}"

    # -- which outputs move

    def reach(self) -> NDArray[np.int8]:
        """Compare which outputs move with what is declared, or with one process; return the map of pairs."""
        given = self.given
        amounts = _gathered([given.alone_probed])[0], self._amounts()
        alone, moved = (one > 0 for one in amounts)
        if given.problem is None:  # then a pair counts if its change is larger than what rounding may hide
            shown = [one > visible_share("float32") * given.alone_probed.size for one in amounts]
            expected = Reach(alone, shown[0].astype(np.float64))
            leaked = moved & ~alone & shown[1]
        else:
            expected = composed(attended(given.problem), given.layers)
            leaked = moved & ~expected.pairs
            self._alone(alone, expected)
        lost = self._missing(moved, expected)
        if leaked.any():
            too = ", in one process too" if (alone & leaked).any() else ""
            self._found("leaked", f"tokens leak: {self._told(leaked)} read {self._kind(leaked)}{too}")
        if lost.any():
            too = ", in one process too" if (lost & ~alone).any() else ""
            self._found("lost", f"tokens are lost: {self._told(lost)} do not read what they should{too}")
        if leaked.any() or lost.any():
            self.causes += self._reproduced(moved, alone)
        pairs = np.where(moved, REACHED, UNREACHED)
        pairs[lost], pairs[leaked] = LOST, LEAKED
        pairs[np.logical_or.reduce(self.hidden)] = NAN
        return pairs.astype(np.int8)

    def _amounts(self) -> Array:
        """By how much outputs move; where each rank has the whole sequence, on the one that differs most from one."""
        matrices = _gathered(self.given.ranks_probed, apart=self.given.whole)
        alone = _gathered([self.given.alone_probed])[0] > 0
        return max(matrices, key=lambda one: int(((one > 0) != alone).sum()))

    def _missing(self, moved: Matrix, expected: Reach) -> Matrix:
        missing: Matrix = expected.pairs & ~moved & (expected.share > visible_share(self.given.precision))
        missing &= ~np.logical_or.reduce(self.hidden)[:, None]
        return missing

    def _alone(self, alone: Matrix, expected: Reach) -> None:
        leaked, lost = alone & ~expected.pairs, self._missing(alone, expected)
        if leaked.any():
            self._found("leaked", f"one process does not keep to what is declared: {self._told(leaked)} read more")
        if lost.any():
            self._found("lost", f"one process does not keep to what is declared: {self._told(lost)} read less")

    def _told(self, pairs: Matrix) -> str:
        i, j = (int(one) for one in np.argwhere(pairs)[0])
        outputs = int(pairs.any(1).sum())
        return (
            f"{outputs} {plural('output', outputs)} ({int(pairs.sum())} of {pairs.size} pairs, such as output {i} of "
            f"rank {self.rank_of[i]} and token {j} of rank {self.rank_of[j]})"
        )

    def _kind(self, leaked: Matrix) -> str:
        problem = self.given.problem or inferred(_gathered([self.given.alone_probed])[0] > 0)
        kinds = []
        if problem is not None:
            together = composed(attended(problem.replace(causal=False, window=None)), None).pairs
            if problem.causal and np.triu(leaked, 1).any():
                kinds.append("later tokens")
            if (leaked & ~together).any():
                kinds.append("other documents")
            if problem.window is not None and not kinds:
                kinds.append("tokens beyond the window")
        return " and ".join(kinds) or "tokens that they should not"

    def _reproduced(self, moved: Matrix, alone: Matrix) -> list[str]:
        """The known faults that have just this reach, as few of them as it takes."""
        known = list(self._known(alone))
        for causes, reach in sorted(known, key=lambda one: len(one[0])):
            if not (moved & ~reach.pairs).any() and not self._missing(moved, reach).any():
                return list(causes)
        return []

    def _known(self, alone: Matrix) -> Iterator[tuple[tuple[str, ...], Reach]]:
        problem = self.given.problem or inferred(alone)
        if problem is not None:
            yield from faults(problem, self.given.layers, self.given.shards)
        else:
            yield (OWN_SHARD,), composed(alone & same_shard(self.given.shards, self.length), 1)

    # -- what is computed

    def values(self) -> float:
        """Compare outputs; return by how much they differ."""
        given = self.given
        off = [_off(one.out, self.right.out[:, one.positions]) for one in given.ranks]
        differ = max((_largest(one) for one in off), default=0.0)
        if differ <= self.allowed:
            return differ
        wrong = [rank for rank, one in enumerate(off) if not _largest(one) <= self.allowed]
        by_token = [
            (int(one.positions[at]), rank) for rank, one in enumerate(given.ranks) for at in self._wrong(off[rank])
        ]
        token, rank = min(by_token)
        self._found(
            "values",
            f"outputs differ from one process on {plural('rank', len(wrong))} {', '.join(map(str, wrong))}: by up to "
            f"{differ:.2g}, allowed {self.allowed:.1g}; {len({token for token, _ in by_token})} of {self.length} "
            f"tokens, first token {token} of rank {rank}",
        )
        if not self.causes:
            self.causes += [
                f"positions count from the rank's own first token (at {line})"
                for line, outputs in given.recount()
                if all(_largest(_off(one.out, outputs[:, one.positions])) <= self.allowed for one in given.ranks)
            ][:1]
        return differ

    def _wrong(self, off: Array) -> list[int]:
        by_token = ~(off <= self.allowed).reshape(off.shape[0], off.shape[1], -1).all(axis=(0, 2))
        return [int(at) for at in np.flatnonzero(by_token)]

    def loss(self) -> None:
        """Compare the loss of a training step."""
        given, right = self.given, self.right.loss
        losses = [one.loss for one in given.ranks if one.loss is not None]
        if right is None or given.loss is None or self._is_nan():
            return
        steps = {"mean": [float(np.mean(losses))], "sum": [float(np.sum(losses))], "whole": losses}[given.loss]
        allowed = self._bound(given.alone.plain.loss or 0.0, right)
        worst = max(steps, key=lambda one: abs(one - right) if np.isfinite(one) else np.inf)
        if abs(worst - right) <= allowed:
            return
        self._found("loss", f"the loss of a step is {worst:.6g}, in one process {right:.6g}")
        step = np.sum if given.loss == "sum" else np.mean
        of_shards, without_first = (
            abs(step(one) - worst) <= allowed for one in given.alone.shard_losses or ((0,), (0,))
        )
        if of_shards and given.loss != "sum":
            self.causes.append("the loss is a mean of means over unequal shards")
        elif without_first:
            self.causes.append("labels are shifted within each shard, so that each shard's first label is lost")

    def gradients(self) -> None:
        """Compare the parameter gradients of a training step."""
        given, size = self.given, len(self.given.ranks)
        if (
            self.right.gradients is None
            or self._is_nan()
            or any(one.kind == "silent" for one in self.findings)
            or any(one.gradients is None for one in given.ranks)
        ):
            return
        each = [one.gradients or {} for one in given.ranks]
        total = {name: np.sum([one[name] for one in each], axis=0) for name in self.right.gradients}
        asked = given.gradients or ("mean" if given.loss == "mean" else "sum")
        training = {name: one / size if asked == "mean" else one for name, one in total.items()}
        steps = each if asked == "whole" else [training]
        wrong = max((self._other(one) for one in steps), key=len)
        if not wrong:
            return
        name, by = max(wrong.items(), key=lambda one: one[1])
        self._found(
            "gradients",
            f"gradients of {len(wrong)} of {len(self.right.gradients)} parameters differ from one process, most "
            f"{name}: by {by:.2g} of its largest",
        )
        if any(one.kind == "values" for one in self.findings) or self.causes:
            return
        if asked == "whole" and not self._other(training):
            self.causes.append("the backward does not add up parameter gradients over ranks")
        elif all(not self._other({name: part / size for name, part in one.items()}) for one in steps):
            self.causes.append(f"parameter gradients are {size} times too large, as if added up over ranks twice")
        elif all(not self._other({name: part * size for name, part in one.items()}) for one in steps):
            self.causes.append(f"parameter gradients are {size} times too small, as if averaged over ranks")
        elif not sum(one.sent[1] for one in given.ranks):
            self.causes.append("the backward sends nothing: gradients stop at the edge of a shard")

    def _other(self, gradients: dict[str, Array]) -> dict[str, float]:
        """The parameters whose gradients differ from one process, and by which share of their largest element."""
        found, plain, right = {}, self.given.alone.plain.gradients or {}, self.right.gradients or {}
        largest = max((float(np.abs(one).max(initial=0.0)) for one in right.values()), default=0.0)
        for name, exact in right.items():
            off = _largest(np.abs(gradients[name] - exact))
            # A gradient that is zero but for rounding is as large as the rounding of what cancels in it.
            allowed = self._bound(plain[name], exact) + witness_bound(self.given.alone.precision, 1) * largest
            if not off <= allowed:
                found[name] = off / max(float(np.abs(exact).max(initial=0.0)), allowed)
        return found

    def silence(self) -> None:
        """Report that nothing was sent, where something has to be."""
        if any(one.sent[0] for one in self.given.ranks):
            return
        if self.given.whole:
            self._found("silent", "nothing was sent: every rank computes the whole sequence by itself")
            self.causes.append("context parallelism did not happen")
        elif any(one.kind in ("lost", "values") for one in self.findings):
            self._found("silent", "nothing was sent in the forward")

    def modules(self) -> None:
        """Where no cause is known, say which modules send nothing while others of their class do."""
        if self.causes or not self.findings:
            return
        total: dict[str, Counter[str]] = {}
        for one in self.given.ranks:
            for kind, by in one.sent_by.items():
                total.setdefault(kind, Counter()).update(by)
        for kind, by in total.items():
            mute = [name for name, count in by.items() if not count]
            if mute and len(mute) < len(by):
                other = next(name for name, count in by.items() if count)
                self.causes.append(
                    f"context parallelism does not reach every layer: of {len(by)} modules {kind}, {', '.join(mute)} "
                    f"{'sends' if len(mute) == 1 else 'send'} nothing in the forward, and {other} does"
                )
                return


def _off(one: Array | float, other: Array | float) -> Array:
    """By how much numbers differ: 0 where either is NaN, which is reported by itself, or both are the same infinity."""
    with np.errstate(invalid="ignore"):
        found: Array = np.abs(np.subtract(one, other))
    return np.where(np.isnan(one) | np.isnan(other) | np.equal(one, other), 0.0, found)


def _largest(off: Array) -> float:
    """The largest number, inf for a NaN, 0 for none."""
    return float(np.nan_to_num(off, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _gathered(probed: Sequence[Probed], *, apart: bool = False) -> list[Array]:
    """Put rows in the order of positions: one matrix of all ranks, or one for each that has all rows."""
    parts = [[one] for one in probed] if apart else [probed]
    found = []
    for some in parts:
        positions, moved = (np.concatenate(one) for one in zip(*((p.positions, p.moved) for p in some), strict=True))
        found.append(moved[np.argsort(positions, kind="stable")])
    return found
