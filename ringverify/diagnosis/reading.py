"""Read off which query attends which key, and put what differs from the mask in a sentence.

1. With q = k = 0 all scores are equal, and with values of 1 at one key, out is how often this key counts among all that
   the query attends. Likewise dv, with a cotangent of 1 at one query, in the backward.
2. Of what is read, every wrong count has to be that of one rule: a mask made in another way (`masks.made.MADE`), in the
   part of the pairs that it concerns (`parts.PARTS`): blocks, pieces, rows. The fewest parts are taken.
3. A rule was made for the cases that were read. It is named only if it predicts the numbers of all others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from ringref.attention import Answer, Intermediates, attention, per_key_head, per_query_head
from ringref.rounding import LARGEST, allowed_error
from ringverify.cases.inputs import Inputs
from ringverify.diagnosis import inferring
from ringverify.diagnosis.hypothesis import Hypothesis, agree
from ringverify.diagnosis.masks.made import MADE
from ringverify.diagnosis.pairs import Mask, Otherwise, Pairs, pairs_of
from ringverify.diagnosis.parts import PARTS, PartOfPairs
from ringverify.diagnosis.scene import Array, Counts, Results, Scene, slope_of_cap
from ringverify.diagnosis.where import Probe, of_other_code, wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.fault import When
from ringverify.faults.ring import STEPS

RUNS = 40
"""Runs in which counts are read, at most, of all cases together."""

SECONDS = 2.0
"""Seconds after which no further case is read."""

READ = 8
"""Failing cases that are read, at most."""

WHOLE = 0.05
"""How far from a whole number a count may be read."""

MOST = 24
"""How often a key may count in a row."""

WRONG = 4
"""Wrong counts that have to be seen for every part of a rule, and for the rule itself."""

EXCUSED = 1.5
"""What a rule costs that is wrong of right cases, in parts: the fault is not there in every case."""

PLAIN = 3.0
"""What an inferred rule costs, at most, that is wrong of right cases: one that takes more words may fit by chance."""

LIMITED = 0.4
"""What it costs, in parts, to limit a rule to one for the sake of right cases alone."""

TRIED = 24
"""Rules whose numbers are compared, at most."""


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """What was attended in a case.

    Attributes:
        pairs: the queries and keys of the case.
        true: what the mask says, `(B, H, Nq, Nk)`.
        counts: what was read, of the forward; of the backward, if the forward is right.
        zeros: how often keys and values of 0 were, `(B, H, Nq)`, where lse tells.
    """

    pairs: Pairs
    true: Counts
    counts: Counts
    zeros: Counts


@dataclasses.dataclass(frozen=True)
class Rule:
    """A mask made in another way in some part of all pairs, or one that was inferred from what was read."""

    made: Otherwise
    parts: tuple[PartOfPairs, ...]
    inferred: bool = False
    as_zeros: bool = False

    def counts(self, pairs: Pairs) -> tuple[Counts, Counts] | None:
        """Return how often keys are attended `(B, H, Nq, Nk)`, and how often zeros are `(B, H, Nq)`."""
        true, made = pairs.true, self.made.counts(pairs)
        zeros = np.zeros(true.shape[:3], dtype=np.int64)
        if made is None:
            return true, zeros
        if self.made.zeros is not None and not self.parts:
            zeros = self.made.zeros(pairs)
        here = np.ones(true.shape, dtype=bool)
        for part in self.parts:
            here &= part.holds(pairs)
        counts = np.where(here, made, true)
        return counts, zeros + _lost(true, counts) if self._instead else zeros

    @property
    def _instead(self) -> bool:
        """Whether zeros are attended in the place of keys; a mask that says itself where they are needs no more."""
        return self.as_zeros and self.made.zeros is None

    def sentence(self) -> str:
        """Return the rule in words: where, and how."""
        where = ", ".join(part.text for part in self.parts)
        text = f"{where}: {self.made.text}" if where else self.made.text
        return f"{text}; instead of them keys and values of 0 are attended" if self._instead else text


def _lost(true: Counts, counts: Counts) -> Counts:
    """Return how many keys each query lacks, `(B, H, Nq)`."""
    found: Counts = np.maximum(true - counts, 0).sum(axis=-1)
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def runs_of(scene: Scene, *, backward: bool) -> int:
    """Return in how many runs a case is read."""
    p = scene.problem
    return -(-(p.nq * p.group_size if backward else p.nk) // p.dv)


def read(scene: Scene, probe: Probe, *, backward: bool) -> Read | None:
    """Read what is attended in a case; `None` if counts are no whole numbers, or a run fails."""
    p, x = scene.problem, scene.inputs
    group, shape = p.group_size, (p.batch, p.heads, p.nq, p.nk)
    weights, totals = np.zeros(shape), np.full(shape[:3], np.nan)
    true = scene.truth.intermediates.m
    for start in range(0, p.nq * group if backward else p.nk, p.dv):
        v, dout = np.zeros_like(x.v), np.zeros_like(x.dout)
        if backward:
            chosen = np.arange(start, min(start + p.dv, p.nq * group))
            for channel, number in enumerate(chosen):
                dout[:, number // group, number % group :: group, channel] = 1.0
        else:
            chosen = np.arange(start, min(start + p.dv, p.nk))
            v[:, chosen, :, chosen - start] = 1.0
        inputs = Inputs(np.zeros_like(x.q), np.zeros_like(x.k), v, dout, np.zeros_like(x.dlse))
        seen = probe(scene.case, inputs)
        if seen.failure is not None:
            return None
        for rank, result in enumerate(seen.ranks):
            queries, keys = (held[rank] for held in scene.shards)
            if backward:
                if result.dv is None:
                    return None
                for channel, number in enumerate(chosen):
                    weights[:, number % group :: group, number // group, keys] = result.dv[..., channel].swapaxes(1, 2)
            else:
                out = result.out.swapaxes(1, 2)
                if result.lse is not None:
                    totals[:, :, queries] = np.exp(result.lse)
                    out = np.where(np.isneginf(result.lse)[..., None], 0.0, out)  # it may be 0 / 0 where nothing is
                weights[:, :, queries[:, None], chosen] = out[..., : len(chosen)]
    if backward:
        totals = true.sum(axis=-1).astype(np.float64)
        if weights[totals == 0].any():
            return None  # what such weights are shares of, no lse says
    counts = _whole(weights, totals)
    if counts is None:
        return None
    shares = weights.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):  # no lse came back: what the weights lack of 1, zeros have
        totals = np.where(np.isnan(totals) & (shares > 0) & (not p.sinks), counts.sum(axis=-1) / shares, totals)
    beside = np.rint(np.where(np.isfinite(totals), totals - counts.sum(axis=-1), 0.0)).astype(np.int64)
    return Read(pairs_of(scene), true, counts, np.maximum(beside, 0))


def _whole(weights: Array, totals: Array) -> Counts | None:
    """Return weights times the number of keys in a row, where these are whole numbers; that number may be unknown."""
    if not np.isfinite(weights).all() or (weights < -WHOLE).any():
        return None
    found = np.zeros(weights.shape, dtype=np.int64)
    for place in np.ndindex(*weights.shape[:3]):
        row, total = weights[place], totals[place]
        least = row[row > WHOLE / MOST].min(initial=np.inf)
        if np.isinf(least):
            continue
        tried = [total] if np.isfinite(total) else [times / least for times in range(1, 5)]
        whole = next((n * row for n in tried if (np.abs(n * row - np.rint(n * row)) < WHOLE).all()), None)
        if whole is None:
            return None
        found[place] = np.rint(whole)
    return found


# -- fitting -----------------------------------------------------------------------------------------------------------


def rules(failing: Sequence[Read], right: Sequence[Pairs]) -> Iterator[Rule]:
    """Yield the rules that give what was read, those with the fewest parts first.

    Args:
        failing: what was read of cases that fail.
        right: cases that are right: a rule that is wrong of them comes after those that are not.
    """
    every = [*(one.pairs for one in failing), *right]
    true = np.concatenate([pairs.true.ravel() for pairs in every])
    seen = np.concatenate([*(one.counts.ravel() for one in failing), *(pairs.true.ravel() for pairs in right)])
    free = np.concatenate([np.broadcast_to(pairs.padding, pairs.true.shape).ravel() for pairs in every]) & (seen == 0)
    fails = np.concatenate([np.full(pairs.true.size, n < len(failing)) for n, pairs in enumerate(every)])
    wrong = seen != true
    if not wrong.any():
        yield from _of_padding(failing)
        return

    def told(holds: object) -> Array:
        return np.concatenate([np.broadcast_to(holds(pairs), pairs.true.shape).ravel() for pairs in every])  # type: ignore[operator]

    parts, masks = [], []
    for part in PARTS:
        mask = told(part.holds)
        if mask[wrong].all() and not mask.all():
            parts.append(part)
            masks.append(mask)
    table = np.array(masks, dtype=bool).reshape(len(parts), len(true))
    limits = [part.limits for part in parts]
    of_cases = np.array([limit is None for limit in limits], dtype=bool)
    found: list[tuple[float, int, int, Rule]] = []
    most = wrong.sum() // WRONG - 1
    for order, made in enumerate(MADE):
        # Most rules are none of the first case.
        if not all(_gives_what_is_wrong(made, one) for one in failing):
            continue
        off = np.concatenate([_counts(made, pairs).ravel() for pairs in every]) != seen
        # A padded key that is not seen may be attended with a value of 0, or not be attended at all.
        for differs in dict.fromkeys((False, bool((off & free).any()))):
            for excused in (False, True):
                columns = off & (~free | differs) & (fails | (not excused))
                # What holds of all pairs of failing cases is limited to some of them for right ones' sake at a cost.
                free_of = bool((columns & fails).any())
                usable = table[:, columns] | ~(of_cases | free_of)[:, None]
                chosen, limited = _fewest(usable, limits, most), 0.0
                if chosen is None and not free_of:
                    chosen, limited = _fewest(table[:, columns], limits, min(most, 1)), LIMITED
                if chosen is not None:
                    cost = made.cost + len(chosen) + EXCUSED * excused + limited
                    found.append((cost, order, sum(chosen), Rule(made, tuple(parts[n] for n in chosen))))
                    if len(chosen) < 2:
                        break
    for *_, rule in sorted(found, key=lambda each: each[:3]):
        yield rule


def _counts(made: Otherwise, pairs: Pairs) -> Counts:
    counts = made.counts(pairs)
    return pairs.true if counts is None else np.broadcast_to(counts, pairs.true.shape)


def _gives_what_is_wrong(made: Otherwise, one: Read) -> bool:
    wrong = one.counts != one.pairs.true
    return not wrong.any() or bool((_counts(made, one.pairs) == one.counts)[wrong].all())


def _of_padding(failing: Sequence[Read]) -> Iterator[Rule]:
    """Yield the rules by which all keys of a mask count rightly, and padding as keys and values of 0."""
    if not any(one.zeros.any() for one in failing):
        return
    none = np.zeros(1, dtype=np.int64)
    for made in sorted(MADE, key=lambda made: made.cost):
        counted = [(one, made.counts(one.pairs), made.zeros(one.pairs) if made.zeros else none) for one in failing]
        if all(
            np.array_equal(np.where(one.pairs.padding, 0, counts), one.true)
            and np.array_equal(np.where(one.pairs.padding, counts, 0).sum(axis=-1) + zeros, one.zeros)
            for one, counts, zeros in ((one, one.true if c is None else c, zeros) for one, c, zeros in counted)
        ):
            yield Rule(made, ())


def _fewest(table: Mask, limits: Sequence[str | None], most: int) -> tuple[int, ...] | None:
    """Return the fewest rows of a table of which no column is true in all; `None` if that takes more than 3.

    Args:
        table: parts by pairs.
        limits: what each part chooses among; no two that are chosen may be alike in it, where it is not `None`.
        most: the most rows.
    """
    columns = np.unique(table, axis=1)
    for size in range(min(3, most) + 1):
        for chosen in itertools.combinations(range(len(table)), size):
            about = [limit for part in chosen if (limit := limits[part]) is not None]
            if len(set(about)) == len(about) and not columns[list(chosen)].all(axis=0).any():
                return chosen
    return None


# -- predicting --------------------------------------------------------------------------------------------------------


def hypotheses(
    scenes: Sequence[Scene], probe: Probe, left: Callable[[], float], others: Iterable[Scene] = ()
) -> list[Hypothesis]:
    """Return what explains the counts that are read of cases, as hypotheses about their numbers.

    Args:
        scenes: cases, those that fail first.
        probe: runs the implementation on a case with other inputs.
        left: returns how many of `SECONDS` are left.
        others: cases that may be right or wrong, for rules that the first few would not tell apart.
    """
    failing = [scene for scene in scenes if wrong_tensors(scene)]
    if not failing:
        return []
    backward = all(not {"out", "lse"} & set(wrong_tensors(scene)) for scene in failing)
    if backward and "dv" not in failing[0].tensors:
        return []

    def told(scenes: Iterable[Scene]) -> Iterator[Read]:
        runs_left = RUNS
        for scene in scenes:
            runs = runs_of(scene, backward=backward)
            if runs <= runs_left and left() > 0:
                runs_left -= runs
                if (one := read(scene, probe, backward=backward)) is not None:
                    yield one

    found = list(itertools.islice(told(_various(failing)), READ))
    if not found:
        return []
    same_code = (scene for scene in scenes if not of_other_code(scene, failing[0].case))
    right = [pairs_of(scene) for scene in same_code if not wrong_tensors(scene)]
    whens: tuple[When, ...] = (
        ("backward",) if backward else ("always", "forward") if "dq" in failing[0].tensors else ("always",)
    )
    more = list(told(others))
    wrong = [one for one in more if one.zeros.any() or (one.counts != one.pairs.true).any()]
    alike = [*right, *(one.pairs for one in more if one not in wrong)]
    # What only groups have is seen in one group, of whose rank numbers much may be said that another would refute.
    inferred = _inferred([*found, *more], right) if scenes[0].case.group == "world" else ()
    told_by = (*itertools.islice(rules([*found, *wrong], alike), TRIED), *inferred)
    if (
        not backward
        and any(one.zeros.any() for one in found)
        and all(np.array_equal(one.zeros, _lost(one.true, one.counts)) for one in found)
    ):
        told_by = tuple(dataclasses.replace(rule, as_zeros=True) for rule in told_by)
    return [
        dataclasses.replace(hypothesis_of(rule, when, padding), measured=rule.inferred)
        for rule in told_by
        for when in whens
        for padding in (get_args(Padding) if any(pairs_of(scene).padding.any() for scene in scenes) else ("given",))
    ]


def _inferred(failing: Sequence[Read], right: Sequence[Pairs]) -> Iterator[Rule]:
    """Yield rules of comparisons that give what was read; those that are wrong of right cases are dearer."""
    cases, seen = [one.pairs for one in failing], [one.counts for one in failing]
    unsure = [bool(one.zeros.any()) for one in failing]
    every = [*cases, *right], [*seen, *(pairs.true for pairs in right)], [*unsure, *([False] * len(right))]
    found = [(made.cost, made) for made in inferring.inferred(*every)]
    if right:
        excused = (made for made in inferring.inferred(cases, seen, unsure) if made.cost <= PLAIN)
        found += [(made.cost + EXCUSED, made) for made in excused]
    for _, made in sorted(found, key=lambda each: each[0])[:TRIED]:
        yield Rule(made, (), inferred=True)


def _various(scenes: Sequence[Scene]) -> list[Scene]:
    """Return cases with the first of every number of ranks in front: they tell relations of ranks apart."""
    alike: Counter[int] = Counter()
    places = []
    for number, scene in enumerate(scenes):
        places.append((alike[scene.size], -scene.size if number else -math.inf, number))
        alike[scene.size] += 1
    return [scenes[number] for *_, number in sorted(places)]


Padding = Literal["given", "zeros", "cleared", "idle", "apart"]
"""What keys and values of padding are: as given, zeros that get no gradient, or 0 in the place of what is given.

If "idle", they are as given, and queries in no document are 0; if "apart", all of these are 0 and get no gradient.
"""


def hypothesis_of(rule: Rule, when: When, padding: Padding = "given") -> Hypothesis:
    """Return a rule as a hypothesis."""
    return Hypothesis(rule.sentence(), STEPS, when, judge=lambda scene: _residual(scene, rule, when, padding))


def _residual(scene: Scene, rule: Rule, when: When, padding: Padding) -> float | None:
    """Return the largest difference between what a rule predicts of a case and what was seen; `None` if it is wrong."""
    pairs = pairs_of(scene)
    counted = rule.counts(pairs)
    if counted is None:
        return None if wrong_tensors(scene) else 0.0
    counts, zeros = counted
    if padding in ("zeros", "apart"):
        gone = np.broadcast_to(pairs.padding, counts.shape)
        zeros = zeros + np.where(gone, counts, 0).sum(axis=-1)
        counts = np.where(gone, 0, counts)
    if (counts == pairs.true).all() and not zeros.any():
        return None if wrong_tensors(scene) else 0.0

    def judged() -> float | None:
        return _agreeing(scene, counts, zeros, when, padding, rule.made.lse)

    # Rules that give what was read mostly give the same of other cases too.
    given = hashlib.blake2b(counts.tobytes() + zeros.tobytes()).digest()
    return scene.once(("residual", given, when, padding if pairs.padding.any() else "given", rule.made.lse), judged)


def _agreeing(scene: Scene, counts: Counts, zeros: Counts, when: When, padding: Padding, empty: float) -> float | None:
    """Return the largest difference between what counts of keys, and of zeros, give and what was seen, if they agree.

    Args:
        scene: the case.
        counts: of keys.
        zeros: of keys and values of 0.
        when: whether that is so of the forward, the backward or both.
        padding: what keys and values of padding are.
        empty: the lse of rows that attend nothing then.
    """
    pairs, none = pairs_of(scene), np.zeros_like(zeros)
    of_forward = (pairs.true, none) if when == "backward" else (counts, zeros)
    of_backward = (pairs.true, none) if when == "forward" else (counts, zeros)
    answer = _attention(scene, *of_forward, *of_backward, padding)
    if empty != -np.inf and when != "backward":
        gone = (counts.sum(axis=-1) + zeros == 0) & (pairs.true.sum(axis=-1) > 0)
        answer = dataclasses.replace(answer, lse=np.where(gone, empty, answer.lse))
    p, x, clean = scene.problem, scene.inputs, finite(scene.inputs)
    found: list[Results] = [
        {name: _returned(scene, name, scene.local(name, getattr(answer, name), rank)) for name in scene.tensors}
        for rank in range(scene.size)
    ]
    return agree(
        scene,
        found,
        scene.tensors,
        lambda: allowed_error(p, answer, x.q, clean.k, clean.v, x.dout, x.dlse, scene.pipeline),
    )


def _returned(scene: Scene, name: TensorName, x: Array) -> Array:
    """Return a result as its dtype holds it: infinite past its largest number."""
    found: Array = np.where(np.abs(x) > LARGEST[scene.dtype_of(name)], np.copysign(np.inf, x), x)
    return found


def finite(x: Inputs) -> Inputs:
    """Return inputs whose keys and values are 0 where they are no finite numbers."""
    return dataclasses.replace(x, k=np.where(np.isfinite(x.k), x.k, 0.0), v=np.where(np.isfinite(x.v), x.v, 0.0))


def unmasked(scene: Scene) -> tuple[Array, Array]:
    """Return the scores of all pairs, excluded or not, and the slope of the softcap there, both `(B, H, Nq, Nk)`."""

    def computed() -> tuple[Array, Array]:
        p, x = scene.problem, finite(scene.inputs)
        bare = p.replace(causal=False, window=None, documents=None, key_lengths=None, dilation=None, sinks=False)
        inner = attention(bare, x.q, x.k, x.v).intermediates
        return inner.scores, slope_of_cap(p, inner.raw_scores)

    return scene.once("unmasked", computed)


def _attention(
    scene: Scene, m: Counts, zeros: Counts, again: Counts, again_zeros: Counts, padding: Padding = "given"
) -> Answer:
    """Return attention with these counts of keys, and of keys and values of 0, in the forward and in the backward."""
    p, x = scene.problem, finite(scene.inputs)
    s, slope = unmasked(scene)
    i, without = np.arange(p.nq), np.zeros(p.nq, dtype=bool)
    if padding in ("idle", "apart") and p.documents is not None:
        without = (i < p.documents[0]) | (i >= p.documents[-1])
        s, slope = np.where(without[:, None], 0.0, s), np.where(without[:, None], 1.0, slope)
        x = dataclasses.replace(x, q=np.where(without[:, None, None], 0.0, x.q))
    if padding == "cleared":
        gone = pairs_of(scene).padding
        s, slope = np.where(gone, 0.0, s), np.where(gone, 1.0, slope)
        x = dataclasses.replace(x, **{n: np.where(gone[:, 0, 0, :, None, None], 0.0, getattr(x, n)) for n in "kv"})
    k, v = (per_query_head(y, p.group_size) for y in (x.k, x.v))
    q, dout = x.q.swapaxes(1, 2), x.dout.swapaxes(1, 2)
    with np.errstate(all="ignore"):
        top = np.max(np.where(m > 0, s, -np.inf), axis=-1, initial=-np.inf)
        top = np.where(zeros > 0, np.maximum(top, 0.0), top)
        top = np.where(np.isinf(top), 0.0, top)
        total = (m * np.exp(np.where(m > 0, s, -np.inf) - top[..., None])).sum(axis=-1) + np.where(
            zeros > 0, zeros * np.exp(-top), 0.0
        )
        lse = top + np.log(total)
        sunk = None if x.sinks is None else x.sinks[:, None]
        lse = lse if sunk is None else np.logaddexp(lse, sunk)
        exponent = np.where(np.isinf(lse), 0.0, lse)[..., None]

        def weights(m: Counts) -> Array:
            return np.asarray(m * np.exp(np.where(m > 0, s, -np.inf) - exponent))

        w, weight = weights(m), weights(again)
        out = w @ v
        dp = dout @ v.swapaxes(2, 3)
        delta = (dout * out).sum(axis=-1) - np.where(np.isinf(lse), 0.0, x.dlse)
        ds = weight * (dp - delta[..., None]) * slope * p.scale_value
        of_sinks = None if sunk is None else np.exp(sunk - exponent[..., 0])

    dk, dv = (per_key_head(part, p.group_size) for part in (ds.swapaxes(2, 3) @ q, weight.swapaxes(2, 3) @ dout))
    # Keys that only the backward attends may have any weight there; rounding errors grow with it.
    inner = Intermediates(np.maximum(m, again), s, s, np.maximum(w, weight), lse, x.sinks, of_sinks)
    dsinks = None if of_sinks is None else -(of_sinks * delta).sum(axis=0)
    dq = (ds @ k).swapaxes(1, 2)
    dq = np.where(without[:, None, None], 0.0, dq) if padding == "apart" else dq
    return Answer(out.swapaxes(1, 2), lse, dq, dk, dv, inner, dsinks)
