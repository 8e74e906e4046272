"""Say when a case fails: which conditions it takes, and what is not a matter of it.

1. The smallest failing case is a corner: few ranks and few keys coincide there. It is enlarged to a generous case that
   fails too, so that each number can be varied in both directions.
2. Cases drawn at random are mixed with it, so that all but a few factors change at once, and one factor is changed at a
   time. What is said has to foretell whether mixed cases fail. Between one that passes unforeseen and one that fails,
   the factor is sought that turns it.
3. Of all conjunctions of conditions that every failing run meets, the cheapest is taken that the passing runs do not
   meet. As long as another one explains the runs as well, a case on which the two differ is run.

4. Each condition is put to the test: other cases that failed are changed in it alone. Values, lengths and dtypes are
   varied in the smallest case too, where no other row or key shows the fault anyway.

So what is said is never contradicted by a run: each condition was met by every run that failed. Where conditions
in words do not explain what was seen, the factor alone is named: "certain values".
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from ringverify.cases.case import Case
from ringverify.diagnosis.when.conditions import HALF, HIDING, MASKS, Condition
from ringverify.diagnosis.when.exploring import Exploration
from ringverify.diagnosis.when.scores import meets, scored
from ringverify.diagnosis.when.varying import Varying
from ringverify.events import Needed
from ringverify.implementation import Capabilities

MOST_RANKS = 8
"""Largest world that is tried."""

TOGETHER = {
    "masks": ("causal", "window", "documents", "key_lengths", "dilation"),
    "shapes": ("heads", "key heads", "dims", "batch"),
}
"""Factors that are named as one where several do not matter: "masks", or "other masks" where one of them does."""

GEOMETRY = frozenset({"length", "cross lengths", "sharding", *MASKS})
"""Factors that decide together which keys a query attends, and on which ranks these are."""

OF_HEADS = frozenset({"heads", "key heads"})
"""Factors that decide which positions a branch of a dilation keeps."""

OF_RANKS = frozenset({"ranks"})
"""Factors of a number of ranks, which seldom stands for anything else."""

OF_HIDDEN = frozenset({*HIDING, "blind_beside", "cut_far"})
"""Conditions of what masks hide, of which one is as good as another where none suffices."""

STANDING_IN = frozenset({"length", "dims", "dilation"})
"""Factors of which "at most" has always stood for something else, such as a window, or a remainder."""

LIMITS = 2
"""Two limits, of which one is none of "at least", are taken to stand for a relation that has no words."""

RARE = 1.5
"""Cost from which on a condition is rare, as "at most" is: it is said only after it was put to the test, and not where
its factor matters in a way that has no words."""

USUAL = 1.0005
"""The same of a number where the time ended first: that there are three ranks, or five keys on one, is usual."""

ALL_HOLD = "length with tokens on every rank"
"""What is no matter where a length does not matter, unless it is so short that a rank holds nothing."""

UNSAID = "something more that has no words here"
"""Condition where cases pass that meet all others."""

CHANCE = 3
"""Cases that have to fail with some of their seeds only, before values are said to matter."""


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A condition that every run that failed meets, and without which runs passed.

    Attributes:
        text: it in words, to follow "needs".
        holds: whether a case meets it.
    """

    text: str
    holds: Callable[[Case], bool]


@dataclasses.dataclass(frozen=True)
class Needs:
    """When a case fails.

    Attributes:
        requires: what it takes, all of it; empty if every variant failed.
        irrelevant: factors whose variants all failed, such as "dtype"; several may share a name, as in `TOGETHER`.
        complete: whether nothing was left to try; if not, the time ended first.
        tried: number of runs.
        failing: the cases that failed, the smallest first: a cause has to explain them too.
        passing: the cases that passed though they have every mask of the smallest: a cause must not be there.
        exploration: the runs, if any were made.
    """

    requires: tuple[Requirement, ...]
    irrelevant: tuple[str, ...]
    complete: bool
    tried: int
    failing: tuple[Case, ...] = ()
    passing: tuple[Case, ...] = ()
    exploration: Exploration | None = dataclasses.field(default=None, repr=False, compare=False)

    def told(self) -> Needed:
        """Return it in the form that events have."""
        texts = tuple(one.text for one in self.requires)
        return Needed(requires=texts, irrelevant=self.irrelevant, complete=self.complete)


def needs(
    case: Case,
    fails: Callable[[Case], bool | None],
    capabilities: Capabilities,
    *,
    shrunk_from: Sequence[Case] = (),
    drawn: Sequence[Case] = (),
    left: Callable[[], float] = lambda: math.inf,
    most_ranks: int = MOST_RANKS,
    wrong_ranks: Callable[[Case], Collection[int] | None] = lambda case: None,
    otherwise: Collection[Case] = (),
    doubtful: Collection[Case] = (),
    chancy: bool = False,
    whatever_values: bool = False,
    called: str | None = None,
) -> Needs:
    """Vary a failing case and say what it takes to fail.

    Args:
        case: the smallest failing case.
        fails: runs a variant: True if it fails for the same reason, False if it passes, `None` if nothing was learned.
        capabilities: what the implementation declares; only such variants are run.
        shrunk_from: larger cases on the way to it, which fail: what is said has to hold of them too.
        drawn: other cases, of which a run may or may not fail.
        left: returns how many seconds are left for it.
        most_ranks: largest world to try.
        wrong_ranks: returns on which ranks a variant that failed was wrong, if that is known.
        otherwise: variants of which `fails` has returned `None` because they fail for another reason.
        doubtful: likewise, because they pass, though with an error that may hide one.
        chancy: whether it depends on chance which cases fail, as with roundings that are hardly larger than allowed.
        whatever_values: whether a case that passes does so with all values, as far as these decide nothing else.
        called: how a call has to be made in order to fail, in words, if not in any way.
    """
    most_ranks = max(most_ranks, case.world_size)
    exploration = Exploration(
        case,
        fails,
        Varying(capabilities, most_ranks),
        left,
        wrong_ranks,
        otherwise,
        doubtful,
        chancy=chancy,
        whatever_values=whatever_values,
        called=called,
    )
    return said(exploration, *exploration.explained(shrunk_from, drawn))


def said(
    exploration: Exploration,
    plain: list[Condition],
    complete: bool,
    *,
    beyond: Requirement | None = None,
    more: bool = False,
    backed: Collection[str] = (),
) -> Needs:
    """Put what is known of runs in words.

    Args:
        exploration: the runs.
        plain: the conditions that explain them, none of them about scores.
        complete: as in `Needs`.
        beyond: what to say instead of "certain values" and the like.
        more: whether conditions in words are known not to be enough.
        backed: what is known, of conditions, to stand for nothing else.
    """
    by_runs_alone = beyond is None
    case, capabilities, wrong_ranks = exploration.case, exploration.varying.c, exploration.wrong_ranks
    explanation = exploration.explained_by_scores(plain)
    if any(map(scored, explanation)):  # runs of scores near a limit pass by chance: nothing is concluded of them alone
        texts = {one.text for one in plain}
        explanation = [one for one in explanation if scored(one) or one.text in texts]
    turning = exploration.unexplained(explanation)
    if exploration.chancy:
        certain = {}
        explanation = [one for one in explanation if not one.limit or one.factors == OF_RANKS]
    elif exploration.hiding:  # by chance they would be many, and none of them the reason
        chance = exploration.hiding >= CHANCE and not any(map(scored, explanation))
        certain = {"values": None} if chance else {}
        explanation = [one for one in explanation if one.most is None]
    else:
        certain = {factor: None for factor, n in turning.items() if n > 1}
    tested = [
        one
        for one in explanation
        if (one.most is None or one.factors.isdisjoint(STANDING_IN))
        and (
            complete
            or exploration.tested(one)
            or scored(one)
            or (one.cost < (USUAL if one.limit else RARE) and "values" not in one.factors)
        )
        and (one.cost < RARE or one.factors.isdisjoint(certain))
    ]
    certain |= exploration.factors_of(one for one in explanation if one not in tested)
    if not certain.keys() <= {"values"} or sum(one.limit for one in tested) > LIMITS:
        doubted = [one for one in tested if one.limit and one.text not in backed]
        certain |= exploration.factors_of(doubted)
        tested = [one for one in tested if one not in doubted]
    if "values" in certain:  # what is small with some values is within what a 16-bit dtype allows, or with some scales
        tested = [one for one in tested if one.about != ("dtype",) or any(one.meets({"dtype": x}) for x in HALF)]
    beyond = beyond if certain or more else None
    if more or not certain.keys() <= {"values"}:  # what suffices, if anything does, says more than a number does
        kept = [one for one in tested if not _stands_for_more(one)]
        dropped = [one for one in explanation if _stands_for_more(one)]
        tested = [*kept, *(exploration.simpler(dropped, kept) if dropped else ())]
    words = functools.partial(exploration.in_words, roughly=beyond is not None)
    called = [] if exploration.called is None else [Requirement(exploration.called, lambda case: True)]
    requires = [*called, *(Requirement(words(one), _holding(one, capabilities)) for one in tested if one.said)]
    if beyond is None:
        seen = [(one, wrong_ranks(one)) for one, failed in exploration.runs.items() if failed]
        requires += [] if any(map(scored, tested)) else _of_ranks(seen, most=by_runs_alone)
        vague = [f"certain {factor}{exploration.examples(factor, tested)}" for factor in certain]
        vague += [UNSAID + exploration.nearest(explanation)] if more and not certain else []
        requires += [Requirement(text, lambda case: True) for text in vague]
    else:
        requires.append(beyond)
    # What passes with some values may do so with some scales, which make scores as small.
    of_values = ("scale",) if "values" in {*certain, *turning} else ()
    about = {*turning, *exploration.undecided}.union(*(one.factors for one in explanation), of_values)
    failing = [one for one, failed in exploration.runs.items() if failed]
    about |= _standing_in(failing, about)
    if len({one.problem.dtype in HALF for one in failing}) < len({dtype in HALF for dtype in capabilities.dtypes}):
        about.add("dtype")  # both widths have to fail where both are declared
    if "out" not in {one.cotangent for one in failing}:
        about.add("cotangent")  # nothing was said of any other than those that the property gives
    dilations = [one.problem.dilation for one in failing]
    if None not in dilations and "split" in {one.heads for one in dilations if one is not None}:
        about |= OF_HEADS  # they decide which branches run
    if exploration.varying.sizes[0] not in {one.world_size for one in failing}:
        about.add("ranks")
    if "world" not in {one.group for one in failing}:
        about.add("group")
    if not certain.keys().isdisjoint(GEOMETRY) or (more and not certain):
        # What decides which keys a query attends may stand for one another in ways that have no words.
        about |= GEOMETRY if beyond is None and not more else GEOMETRY | {"ranks"}
        about |= OF_HEADS if case.problem.dilation is not None else set()
    outcomes = exploration.outcomes
    known = {name: outcomes[name] for name in exploration.varying.factors if name in outcomes}
    irrelevant = _irrelevant(known, about, exploration.undecided)
    if exploration.all_hold:
        irrelevant = tuple(ALL_HOLD if name == "length" else name for name in irrelevant)
    masks = [name for name in MASKS if getattr(case.problem, name)]
    passing = [
        one for one, failed in exploration.runs.items() if not failed and all(getattr(one.problem, n) for n in masks)
    ]
    told = tuple({one.text: one for one in requires}.values())  # two conditions may be the same in words
    return Needs(told, irrelevant, complete, exploration.tried, tuple(failing), tuple(passing), exploration)


def _stands_for_more(condition: Condition) -> bool:
    """Return whether a condition that does not suffice is likely to stand for what a cause says better."""
    limited = condition.limit and (condition.factors != OF_RANKS or condition.few)
    return bool(limited) or condition.about[0] in OF_HIDDEN


def _irrelevant(outcomes: dict[str, list[bool]], about: Collection[str], undecided: Collection[str]) -> tuple[str, ...]:
    """Return the factors whose variants all failed, as few names as possible.

    Args:
        outcomes: by factor, whether its variants failed; nothing is known of factors that it lacks.
        about: factors of which it is not to be said.
        undecided: those of them that may or may not matter: the rest is not "other" ones.
    """
    found = {factor: factor for factor, seen in outcomes.items() if seen and all(seen) and factor not in about}
    for name, members in TOGETHER.items():
        free = [factor for factor in members if factor in found]
        tried = [factor for factor in members if outcomes.get(factor)]
        if len(free) > 1 and outcomes.keys() >= set(members) and set(members).isdisjoint(undecided):
            found |= dict.fromkeys(free, name if free == tried else f"other {name}")
    return tuple(dict.fromkeys(found.values()))


def _standing_in(failing: Sequence[Case], about: Collection[str]) -> set[str]:
    """Return the masks that may do instead of those that matter, or instead of one another.

    Args:
        failing: cases that failed.
        about: factors that matter.
    """
    present = [{name for name in MASKS if getattr(one.problem, name)} for one in failing]
    others = [masks for masks in present if masks.isdisjoint(about)]
    return set[str]().union(*others) if others and set() not in others else set()


def _holding(condition: Condition, capabilities: Capabilities) -> Callable[[Case], bool]:
    return lambda case: meets(condition, case, capabilities)


# -- which ranks -------------------------------------------------------------------------------------------------------

SOME = 5
"""Runs on three ranks or more that have to agree on which ranks are wrong."""

WORLDS = 3
"""In so many worlds at least."""


def _of_ranks(seen: Sequence[tuple[Case, Collection[int] | None]], *, most: bool) -> Iterator[Requirement]:
    """Yield which ranks are wrong, if that is the same in all worlds of three ranks or more; a run may miss some.

    Args:
        seen: cases, and which ranks are wrong of each.
        most: whether it is said too that all ranks but one are: beside a cause this is no news, and may be chance.
    """
    known = [(case, frozenset(ranks)) for case, ranks in seen if ranks and case.world_size > 2]
    for where, runs in (("", known), ("where causal, ", [one for one in known if one[0].problem.causal])):
        wrong: dict[int, frozenset[int]] = {}
        for case, ranks in runs:
            wrong[case.world_size] = wrong.get(case.world_size, frozenset()) | ranks
        if len(runs) < SOME or len(wrong) < WORLDS:
            continue
        one = min(min(ranks) for ranks in wrong.values())
        patterns: list[tuple[str, Callable[[int], Collection[int]], int]] = [
            (f"wrong on rank {one} only", lambda size, one=one: {one}, one + 1),  # type: ignore[misc]
            ("wrong on the last rank only", lambda size: {size - 1}, 2),
            ("wrong on every second rank, from rank 2 on", lambda size: range(2, size, 2), 3),
            ("wrong on every rank but the first", lambda size: range(1, size), 2),
            ("wrong on every rank but the last", lambda size: range(size - 1), 2),
        ]
        for text, pattern, least in patterns[
            : 3 if where or not most else None
        ]:  # every rank but the first is no news there
            # A run may miss some ranks, unless all but one are said to be wrong: masks spare the first or last in some.
            found = wrong.items() if "but" not in text else [(case.world_size, ranks) for case, ranks in runs]
            if all(ranks == frozenset(pattern(size)) for size, ranks in found):
                yield Requirement(where + text, lambda case, least=0 if where else least: case.world_size >= least)  # type: ignore[misc]
                return
