"""What became of a hypothesis on the cases that were asked: what it explains, and of which right cases it is wrong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set

from ringverify.cases.case import Case
from ringverify.diagnosis import reproducing
from ringverify.diagnosis.hypothesis import Hypothesis, predicted
from ringverify.diagnosis.rows import FaultyRows
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.when.conditions import LARGE
from ringverify.diagnosis.when.needs import Requirement
from ringverify.diagnosis.where import wrong_tensors

SURE = 2
"""Failing cases, besides the smallest, that a fault has to explain to be named without the condition that it needs."""

MEASURED = 4
"""Failing cases, besides the smallest, that a measured fault has to explain if some right cases lack it."""

DIGITS = 8
"""Wrong rows with numbers that a fault of some rows has to reproduce: of NaN alone, much can be the cause."""


def finite_window(case: Case) -> bool:
    """Whether a window ends on both sides, on the right by causality too."""
    left, right = case.problem.window or (None, None)
    return left is not None and (right is not None or case.problem.causal)


PLAIN: tuple[Requirement, ...] = (
    Requirement("causal", lambda case: case.problem.causal),
    Requirement("not causal", lambda case: not case.problem.causal),
    Requirement("window", lambda case: case.problem.window is not None),
    Requirement("a window that ends on both sides, on the right by causality too", finite_window),
    Requirement("documents", lambda case: case.problem.documents is not None),
    Requirement("key_lengths", lambda case: case.problem.key_lengths is not None),
    Requirement("dilation", lambda case: case.problem.dilation is not None),
    Requirement("softcap", lambda case: case.problem.softcap is not None),
    Requirement("learned sinks", lambda case: case.problem.sinks),
    Requirement("fewer key heads than heads (GQA)", lambda case: case.problem.hk != case.problem.heads),
)
"""Conditions that are tried where those found for the smallest case do not account for other cases."""


@dataclasses.dataclass
class Standing:
    """A hypothesis that explains every failing case so far.

    Attributes:
        hypothesis: the hypothesis.
        residual: the largest difference between what it predicts and what was seen.
        confirmed: failing cases that it explains, besides the smallest.
        excused: right cases of which it predicts that they are wrong.
        elsewhere: likewise, cases of another sharding, for which other code may have run.
        right: right cases that it explains.
        only: what a case needs for the fault to be there, beyond what the fault itself needs.
        somewhere: whether the fault is not there in every case, and what it needs is not known.
    """

    hypothesis: Hypothesis
    residual: float
    confirmed: list[Scene] = dataclasses.field(default_factory=list)
    excused: list[Scene] = dataclasses.field(default_factory=list)
    elsewhere: list[Scene] = dataclasses.field(default_factory=list)
    right: list[Scene] = dataclasses.field(default_factory=list)
    only: tuple[Requirement, ...] = ()
    somewhere: bool = False

    def stands(self, scene: Scene, *, elsewhere: bool = False) -> bool:
        """Note a further case, and return whether the hypothesis may still be true."""
        wrong = bool(wrong_tensors(scene))
        if (more := self.hypothesis.explains(scene)) is not None:
            self.residual = max(self.residual, more)
            (self.confirmed if wrong else self.right).append(scene)
        elif not wrong:
            (self.elsewhere if elsewhere else self.excused).append(scene)
        if more is None and wrong and self._undetermined(scene):
            return True
        return more is not None or not (wrong or self.hypothesis.allowed_by is not None)

    def _undetermined(self, scene: Scene) -> bool:
        """Whether more than the fault decides what is seen.

        A mask of the backward alone may give keys to rows without any: what stands for their lse decides. A slope that
        is too large makes the rounding errors of scores far apart so many times larger. Another block, or one
        that is taken for another, has padding in other places, which may have been cleared before it is sent; likewise
        gradients that come to another rank.
        """
        if self.hypothesis.steps.changed & {"hop_of", "keys", "travel"} and padded(scene.case):
            return True
        if "cap_slope" in self.hypothesis.steps.changed and scene.case.values in LARGE:
            return True
        masks = not self.hypothesis.steps.changed.isdisjoint(reproducing.MASK)
        return (
            masks and self.hypothesis.when == "backward" and bool((scene.truth.intermediates.m == 0).all(axis=-1).any())
        )

    def settled(self, smallest: Scene, requires: Sequence[Requirement]) -> Standing | None:
        """Return the hypothesis with the condition under which it explains every case; `None` if there is none.

        Args:
            smallest: the smallest failing case.
            requires: what it needs in order to fail, as far as that is known.
        """
        if not self.confirmed and (self.excused or self.hypothesis.partial):
            return None
        failing = (smallest, *self.confirmed)
        known = [*requires, *(PLAIN if len(self.confirmed) >= SURE else ())]
        # What is not so in every case that the fault explains is no condition of it.
        known = [each for each in known if all(each.holds(scene.case) for scene in failing)]
        for one in self._in_rows(smallest) if self.hypothesis.rows else [self]:
            for excused in ([*one.excused, *one.elsewhere], one.excused):
                lacking = [{n for n, each in enumerate(known) if not each.holds(scene.case)} for scene in excused]
                if (only := _fewest(lacking, len(known))) is not None:
                    return dataclasses.replace(one, only=tuple(known[n] for n in only))
        return None

    def _in_rows(self, smallest: Scene) -> Iterator[Standing]:
        """Yield the hypothesis with what the wrong rows have in common, and the right cases that have it too."""
        steps = self.hypothesis.steps
        failing = FaultyRows((scene, predicted(scene, steps)) for scene in (smallest, *self.confirmed))
        right = [(scene, FaultyRows([(scene, predicted(scene, steps))])) for scene in self.right]
        for text, rule in failing.alike() if failing.digits >= DIGITS else ():
            excused = [scene for scene, rows in right if bool(rule(rows).any())]
            hypothesis = dataclasses.replace(self.hypothesis, more=f"{self.hypothesis.more}, {text}")
            yield dataclasses.replace(self, hypothesis=hypothesis, excused=excused)

    @property
    def in_all_like_it(self) -> bool:
        """Whether no right case lacks it but some of another sharding, for which other code may have run."""
        return not self.only or not self.excused

    @property
    def unexplained(self) -> int:
        """Number of right cases of which it predicts that they are wrong, though they have what it takes."""
        return sum(all(one.holds(scene.case) for one in self.only) for scene in self.excused)

    @property
    def may_be(self) -> bool:
        """Whether so much is explained that the fault can be named though its condition is not known."""
        return len(self.confirmed) >= SURE and not (self.hypothesis.partial or self.hypothesis.tile)

    def when_it_fails(self, known: Set[str]) -> bool:
        """Whether a fitted fault is there in all cases that have what the smallest needs in order to fail.

        Of many cases the plain conditions are known beside that; it takes as many for what nothing was measured of.
        """
        if many := len(self.confirmed) >= 2 * MEASURED:
            known = {*known, *(each.text for each in PLAIN)}
        enough = many or (self.hypothesis.measured and len(self.confirmed) >= MEASURED)
        return enough and known >= self._conditions

    @property
    def _conditions(self) -> Set[str]:
        return {one.text for one in self.only}

    def with_its_condition(self) -> Hypothesis:
        """Return the hypothesis, limited to cases that have what it takes for the fault to be there."""
        if self.in_all_like_it:
            return self.hypothesis
        return dataclasses.replace(self.hypothesis, only=lambda case: all(one.holds(case) for one in self.only))

    def with_unknown_condition(self) -> Standing:
        """Return the hypothesis with the remark that it is not there in every case."""
        return dataclasses.replace(self, somewhere=True)

    def sentence(self, smallest: Scene, needed: Set[str]) -> str:
        """Return the fault as a sentence about the smallest case, with a remark if it is not said when it is there.

        Args:
            smallest: the smallest failing case.
            needed: what that needs in order to fail, which is said beside.
        """
        said = self.in_all_like_it or needed >= self._conditions
        text = self.hypothesis.sentence(smallest)
        return text if said and not self.somewhere else f"{text}, though not in every case"


def padded(case: Case) -> bool:
    """Whether some keys are no query's: those past key_lengths, or outside all documents."""
    p = case.problem
    outside = p.documents is not None and (p.documents[0], p.documents[-1]) != (0, p.nk)
    return outside or (p.key_lengths is not None and min(p.key_lengths) < p.nk)


def _fewest(lacking: list[set[int]], count: int) -> tuple[int, ...] | None:
    """Return the fewest numbers of which every set holds one; `None` if one is empty."""
    for size in range(count + 1):
        for chosen in itertools.combinations(range(count), size):
            if all(each & set(chosen) for each in lacking):
                return chosen
    return None
