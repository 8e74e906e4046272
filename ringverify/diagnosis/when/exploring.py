"""Run variants of a failing case until what they have in common is known; `when.needs` says how."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ringverify.cases.case import Case, sharding_names
from ringverify.cases.inputs import has_ordinary_sinks
from ringverify.diagnosis.when.board import Board
from ringverify.diagnosis.when.conditions import HALF, LARGE, MASKS, Condition, changing, features
from ringverify.diagnosis.when.scores import FAR, FAR_OFF, meets, of_scores
from ringverify.diagnosis.when.varying import FIELDS, Varying, effort

MOST_RUNS = 300
"""Runs for one failure, at most, so that a quick machine and a slow one mostly say the same."""

BASES = 12
"""Cases that failed, the smallest first, of which others are made."""

FIRST = 2
"""Variants of a factor that are run, if all of them fail; it is then no matter of this factor."""

NUMBERS = ("ranks", "length", "heads", "dims")
"""Factors of which one variant more is run: small, large, odd and even ones."""

REFUTING = 4
"""Cases that failed which are changed in one condition alone, before this is said."""

OTHERWISE = 4
"""Drawn cases without one condition, and with all others, that are run before this is said."""

ALONE = 6
"""Cases in 16 bits that have to pass on one rank before it counts that they do, where each alone may hide an error."""

ELSEWHERE = 2
"""Further cases that failed in which a factor is varied before it is said not to matter."""

CORNERS = ("ranks", "causal")
"""Factors that are then varied in the smallest case too: another branch of the code may run there."""

REPEATED = 2
"""Cases that failed which are changed as one was that passes without a reason known."""

MORE = 9
"""Variants of a factor that are run, if one of them passes."""

INSTEAD = (*MASKS, "softcap", "scale", "sinks", "cross lengths", "key heads")
"""Factors of which one may do instead of another that is needed."""

WAYS = 5
"""Variants of a mask that are tried instead of another one."""

SIMPLER = ("values", "length", "dtype", "cotangent")
"""Factors that are varied in the smallest case too: in larger ones some row, or some key, shows a fault anyway."""

HIDDEN = 5
"""Seeds with which a case is run before it counts as passing, where some were seen to fail with certain seeds only."""

MOST_SEEDS = 20
"""Seeds of which those are chosen that give ordinary sinks, at most."""

BEYOND = 2
"""What is said to fail up to a size has to pass from this many times the size on."""

SEEDS = 4
"""Seeds with which the smallest case is run where values matter: scores grow from hop to hop in some of them."""

FARTHEST = 1e4
"""Scores from which on everything fails, if scores that are far from 0 do."""

NEAR = 1.1
"""Ratio of a score that fails to one that passes at which the limit between them is known well enough."""

CLOSE = 1.25
"""Ratio of the least score that fails to the largest below it that passes up to which the limit is told as a number."""

EXCEPTIONS = 2
"""Cases that have to pass with all conditions before it is said that it takes more."""

MIXED = 5
"""Drawn cases that are mixed with the failing one before single factors are varied, and after."""

MOST_TURNED = 3
"""Cases that pass unforeseen of which the factor is sought that turns them, at most."""


SHOWN = 3
"""Values of a factor that are told where it has no words, at most, and words for a case."""


class Spent(Exception):
    """The time or the number of runs is used up."""


class Exploration:
    """Runs of variants of one case, and the explanation of them.

    Args:
        case: the smallest failing case.
        fails: as in `needs`.
        varying: makes variants.
        left: as in `needs`.
        wrong_ranks: as in `needs`.
        otherwise: as in `needs`.
        doubtful: as in `needs`.
        chancy: as in `needs`.
        whatever_values: as in `needs`.
        called: as in `needs`.

    Attributes:
        runs: whether each variant failed, with its own seed or the next; those of which nothing was learned are left
            out.
        seen: whether each variant failed with its own seed.
        outcomes: by factor, whether its variants failed.
        turning: by a case that passed, the factor in which it differs from one that failed.
        hiding: number of cases that were seen to fail with some of their seeds only.
        tried: number of runs.
        all_hold: whether a shorter sequence may pass in which a rank holds nothing.
        otherwise: variants that fail for another reason.
        undecided: factors of which a variant passes, whatever its values, with an error that may hide one.
    """

    def __init__(
        self,
        case: Case,
        fails: Callable[[Case], bool | None],
        varying: Varying,
        left: Callable[[], float],
        wrong_ranks: Callable[[Case], Collection[int] | None] = lambda case: None,
        otherwise: Collection[Case] = (),
        doubtful: Collection[Case] = (),
        *,
        chancy: bool = False,
        whatever_values: bool = False,
        called: str | None = None,
    ) -> None:
        self.called = called
        self.chancy, self._seeds = chancy, 1 if whatever_values else 2
        self.case, self.fails, self.varying, self.left, self.wrong_ranks = case, fails, varying, left, wrong_ranks
        self.otherwise, self._doubtful = otherwise, doubtful
        self._most = MOST_RUNS
        self.runs: dict[Case, bool] = {case: True}
        self.seen: dict[Case, bool] = {case: True}
        self.outcomes: dict[str, list[bool]] = {}
        self.turning: dict[Case, str] = {}
        self.tried = 0
        self.all_hold = False
        self.undecided: set[str] = set()
        self._board = Board(varying.c)
        self._unknown: set[Case] = set()
        self.hiding = 0
        self._again: set[Case] = set()
        self._changed: set[tuple[Case, str]] = set()
        self._unchanged: set[tuple[Case, str]] = set()
        self._varied: set[tuple[Case, str]] = set()
        self._otherwise: set[str] = set()
        self._with_cotangent: set[tuple[Case, str]] = set()
        self._drawn: Sequence[Case] = ()
        self._ordinary_sinks = case.problem.sinks and has_ordinary_sinks(case)
        self._generous = case

    def failed(self, case: Case, *, expected: bool = True) -> bool | None:
        """Return whether a case fails; one that passes unforeseen is run with another seed too: values may hide faults.

        Raises:
            Spent: it would be one run too many.
        """
        if case in self.runs:
            return self.runs[case]
        if case in self._unknown:
            return None
        found = self._run(case, 1 if not expected else HIDDEN if self.hiding or self.chancy else self._seeds)
        if found is None or (not found and self._attends(self.case) and not self._attends(case)):
            self._unknown.add(case)
        else:
            self.runs[case] = found
        return found

    def _attends(self, case: Case) -> bool:
        """Return whether a query attends a key: where none does, that a fault has nothing to show is no news."""
        return bool(features(case, self.varying.c)["attended"])

    def _outcome(self, factor: str, variant: Case) -> list[bool]:
        """Return whether a variant fails in the same way, alone in a list; an empty one where nothing is learned."""
        found = self.failed(variant)
        if found is None and variant in self._doubtful:
            self.undecided.add(factor)
        return [found] if found is not None else [False] if variant in self.otherwise else []

    def _run(self, case: Case, seeds: int) -> bool | None:
        """Return whether a case fails with one of so many seeds, its own the first.

        Small integers hide faults, by a factor of 0 or sums that cancel: further seeds have normal numbers then.
        """
        found: bool | None = False
        doubtful = False
        for more, one in enumerate(itertools.islice(self._tries(case), seeds)):
            if one not in self.seen:
                if self.tried >= self._most or self.left() <= 0:
                    raise Spent
                answer = self.fails(one)
                if answer is None and self.chancy and one in self._doubtful:
                    doubtful = True
                    continue
                if answer is None:
                    return found if more else None
                self.tried += 1
                self.seen[one] = answer
            if found := self.seen[one]:
                self.runs[one] = True
                if more and one.values == case.values:  # whether it is seen depends on the seed
                    self.hiding += 1
                    self.outcomes.setdefault("values", []).append(False)
                break
        return None if doubtful and not found else found

    def _tries(self, case: Case) -> Iterator[Case]:
        """Yield a case with its own seed and others: where the smallest has ordinary sinks, those that give it some."""
        plainer = case.replace(values="normal") if case.values == "integers" else case
        for number, one in enumerate((case, plainer)):
            several = [one.replace(seed=one.seed + more) for more in range(number, MOST_SEEDS)]
            ordinary = self._ordinary_sinks and case.problem.sinks
            chosen = (other for other in several if not ordinary or has_ordinary_sinks(other))
            yield from itertools.islice(itertools.chain(chosen, several), 1 if number == 0 else None)

    def explained(self, shrunk_from: Sequence[Case], drawn: Sequence[Case]) -> tuple[list[Condition], bool]:
        """Return the conditions that explain the runs, and whether no other run was left that could tell more."""
        self.runs |= dict.fromkeys(shrunk_from, True)
        self.seen |= self.runs
        try:
            generous, has = self._enlarged(), self._has()
            self._generous = generous
            short = [*self.varying.too_short(self.case), *self.varying.too_short(generous)]
            self.all_hold = bool(short)  # unless all of them are seen to fail
            # First what the case is likely to need, so that it is known when the time ends.
            factors = sorted(self.varying.factors, key=lambda factor: factor not in has)
            self._one_at_a_time(self.case, SIMPLER)
            for part, some in enumerate((factors[: len(has)], factors)):
                others = drawn[part::2]
                for other in others[:MIXED]:
                    self._foretold(generous, self.varying.mixed(generous, other, has - {"ranks", "length"}), [])
                self._one_at_a_time(generous, some)
                pool = self._pool(generous, some)
                self._held_against(generous, others[MIXED : 2 * MIXED], pool)
            self._drawn = drawn[4 * MIXED :]
            self._elsewhere(generous, self._told_apart(generous, pool))
            self._told_apart(generous, pool)
            if self._acquitted_alone():
                self._told_apart(generous, pool)
            self.all_hold = any(self.passes(one) for one in short)
            explanation = self.explanation()
            if self.all_hold and any("length" in changing(condition) for condition in explanation):
                for one in short:
                    if self.met(one, explanation):  # what is said has to hold too where a rank holds nothing
                        self.failed(one, expected=False)
                self._told_apart(generous, pool)
        except Spent:
            return self.explanation(), False
        return self.explanation(), True

    def explained_by_scores(self, explanation: list[Condition]) -> list[Condition]:
        """Return the conditions that explain the runs if they may be about scores too, where values matter."""
        if "values" not in {*self.unexplained(explanation)}.union(*(one.factors for one in explanation)):
            return explanation
        with contextlib.suppress(Spent):
            for seed, values in itertools.product(range(SEEDS), ("normal", self.case.values)):
                for one in (self.case, *self.varying.of(self.case, "causal")):
                    self.failed(one.replace(seed=seed, values=values), expected=False)
            for one, family in itertools.product((self.case, self._generous), LARGE):
                self.failed(one.replace(values=family), expected=False)
        found = self._scored()
        for sign, limit in ((-1, "lowest"), (1, "highest")):
            if self.varying.c.scale and any(limit in one.about for one in found):
                with contextlib.suppress(Spent):
                    self._limit(limit, sign)
                found = self._scored()
        return found

    def factors_of(self, some: Iterable[Condition]) -> dict[str, None]:
        """Return the factors that conditions are about, those left out that are not declared."""
        known = self.varying.factors
        factors = [factor for one in some for factor in sorted(one.factors)]
        return {factor: None for factor in factors if factor not in known or self.outcomes.get(factor)}

    def in_words(self, condition: Condition, *, roughly: bool) -> str:
        """Return a condition in words: a limit of scores in numbers only if runs passed that came near it.

        Args:
            condition: the condition.
            roughly: leave out the numbers of scores.
        """
        if condition.about[0] not in FAR_OFF:
            return condition.text
        if roughly:
            return FAR_OFF[condition.about[0]]
        sizes: dict[bool, list[float]] = {True: [], False: []}
        for case, failed in self.seen.items():
            sizes[failed].append(abs(float(of_scores(case, self.varying.c).get(condition.about[0], 0))))
        limit = min(sizes[True])
        below = max((size for size in sizes[False] if size < limit), default=0)
        return condition.text if below * CLOSE >= limit else FAR_OFF[condition.about[0]]

    def examples(self, factor: str, explanation: Sequence[Condition]) -> str:
        """Return with which values of a factor the smallest case fails and passes, in words; "" if not known.

        Only such that meet what is said beside: a run of others might contradict it, or says nothing new.
        """
        every = self.varying.of(self.case, factor) if factor in self.varying.factors else []
        variants = [one for one in every if self.met(one, explanation)][:MORE]
        self._most += len(variants)
        with contextlib.suppress(Spent):
            for one in variants:
                self.failed(one)
        passing = [one for one in variants if self.runs.get(one) is False and _news(one, self.case)]
        if not passing:
            return ""
        failing = [self.case, *(one for one in variants if self.runs.get(one))]
        for count in (1, None):  # the word for the factor itself, or what follows from it too
            fails, passes = _labels(failing, passing[0], count), _labels(passing, self.case, count)
            if fails.keys().isdisjoint(passes):
                break
        return f" (fails with {_listed(fails)}; passes with {_listed(passes)})" if fails else ""

    def nearest(self, explanation: Sequence[Condition]) -> str:
        """Return how a case that passes, though it meets all conditions, is unlike the smallest; "" if in much."""
        passing = (one for one, failed in self.runs.items() if not failed and self.met(one, explanation))
        alike = (self.varying.mixed(self.case, one, {"dtype"}) for one in passing)
        met = (one for one in alike if one is not None and self.met(one, explanation))
        told = {" ".join(news): one for one in met if (news := _news(one, self.case))}
        nearest = [words for words in sorted(told, key=len) if words.count("=") <= SHOWN][:SHOWN]
        self._most += SHOWN
        with contextlib.suppress(Spent):
            for words in nearest:
                if self.failed(told[words]) is False:
                    return f" (passes with {words})"
        return ""

    def _scored(self) -> list[Condition]:
        """Return the conditions that explain the runs, each with its own values, if they may be about scores."""
        board = Board(self.varying.c, scored=True)
        board.add(self.seen, self.seen)
        return board.explanation(self.seen)

    def _limit(self, name: str, sign: int) -> None:
        """Run the smallest case with a lowest, or highest, score ever nearer to where it begins to fail."""
        for seed in range(SEEDS):
            unit = math.copysign(1.0, self.case.problem.scale_value)
            plain = self.case.replace(seed=seed, values="normal", scale=unit, softcap=None)
            if (one := sign * float(of_scores(plain, self.varying.c).get(name, 0))) > 0:
                break
        else:
            return
        passes, fails = FAR, FARTHEST
        while fails / passes > NEAR:
            middle = math.sqrt(passes * fails)
            failed = self.failed(plain.replace(scale=unit * middle / one), expected=False)
            if failed is None:
                return
            passes, fails = (passes, middle) if failed else (middle, fails)

    def tested(self, condition: Condition) -> bool:
        """Return whether cases that failed were changed in a condition alone, and passed."""
        return sum(about == condition.text for _, about in self._changed) >= REPEATED

    def unexplained(self, explanation: Sequence[Condition]) -> Counter[str]:
        """Return the factors that turn cases which pass though they meet all conditions, and how many cases."""
        return Counter(
            factor
            for case, factor in self.turning.items()
            if (factor != "values" or case.values != "zero_queries")  # equal scores hide much, each fault in its way
            and self.met(case, explanation)
        )

    def explanation(self) -> list[Condition]:
        """Return the conditions that explain the runs."""
        self._board.add(self.runs, self.runs)
        return self._board.explanation(self.runs)

    def simpler(self, instead: Iterable[Condition], beside: Collection[Condition]) -> list[Condition]:
        """Return the plain conditions that explain what some do that are not to be said, beside those that are."""
        return self._board.simpler(self.runs, instead, beside)

    def extended(self, runs: int, left: Callable[[], float]) -> None:
        """Allow so many further runs, in another time."""
        self._most, self.left = self.tried + runs, left

    def failing(self) -> list[Case]:
        """Return the cases that failed, the smallest first, with values that hide little by chance."""
        plain = (
            one.replace(values="normal") if one.values in ("integers", "zero_queries") else one
            for one, failed in self.runs.items()
            if failed
        )
        return sorted(dict.fromkeys(plain), key=effort)

    def scattered(self, cases: Sequence[Case], draw: random.Random, *, cotangents: bool) -> Iterator[Case]:
        """Yield small cases without end, made of others; where no gradients are compared, a cotangent is no matter."""
        for case in self.varying.scattered(cases, draw):
            yield case if cotangents else case.replace(cotangent=self.case.cotangent)

    def aims(self, cases: Iterable[Case]) -> Iterator[Case]:
        """Consider further cases, and yield those whose runs teach most of all that are left, one after the other.

        One tells explanations apart; one meets all that is said and is else least like what failed; one lacks a single
        condition.
        """
        self._board.add([*self.runs, *cases], self.runs)
        for aim in (self._board.telling, self._board.least_alike, self._board.lacking_one):
            if (case := aim(self.runs, self._unknown)) is not None:
                yield case

    def foretold(self, case: Case) -> bool:
        """Run a case, and return whether its outcome is what the explanation says; if not, look for another one.

        Raises:
            Spent: it would be one run too many.
        """
        if self._foretold(self._generous, case, self.explanation()):
            return True
        self._told_apart(self._generous, ())
        return False

    def passes(self, case: Case) -> bool | None:
        """Return whether a case passes with its own seed; no condition has to explain why."""
        found = self._run(case, 1)
        return None if found is None else not found

    def passes_whatever_its_values(self, case: Case) -> bool:
        """Return whether a case passes with as many seeds as it takes for values not to hide a fault by chance.

        Raises:
            Spent: it would be one run too many.
        """
        return self._run(case, HIDDEN) is False

    def acquitted(self, case: Case) -> None:
        """Note that a case passes of which a run left it in doubt, as is known from its cause."""
        if self.failed(case) is None and case in self._doubtful:
            self.runs[case] = False

    def _acquitted_alone(self) -> bool:
        """Return whether 16-bit cases pass on one rank of which each alone is in doubt: of so many, one would fail."""
        if self.case.problem.dtype not in HALF or self.case.world_size == 1:
            return False
        failing = [case for case, failed in self.runs.items() if failed and case.problem.dtype in HALF]
        alone = dict.fromkeys(one for base in failing for one in self.varying.of(base, "ranks") if one.world_size == 1)
        asked = list(alone)[:ALONE]
        if len(asked) < ALONE or any(self.failed(one) for one in asked):
            return False
        doubted = [one for one in asked if one in self._doubtful]
        self.runs |= dict.fromkeys(doubted, False)
        return bool(doubted)

    def passes_or_may(self, case: Case) -> bool:
        """Return whether a case passes with its own seed, or a run leaves it in doubt."""
        return self.passes(case) is True or case in self._doubtful

    def _held_against(self, generous: Case, others: Sequence[Case], pool: list[Case]) -> None:
        """Run what tells explanations apart, then mixed cases, until these are foretold."""
        explanation = self._told_apart(generous, pool)
        for other in others:
            about = {factor for one in explanation for factor in one.factors}
            for kept in (about, set[str]()):
                case = self.varying.mixed(generous, other, kept)
                if not self._foretold(generous, case, explanation):
                    explanation = self._told_apart(generous, pool)
        about = {factor for one in explanation for factor in one.factors}
        if not self._foretold(generous, self.varying.without(generous, set(MASKS) - about), explanation):
            self._told_apart(generous, pool)

    def _told_apart(self, generous: Case, pool: Sequence[Case]) -> list[Condition]:
        """Run what tells explanations apart, and return the one that is left and that no other case refutes."""
        while True:
            self._board.add([*self.runs, *pool], self.runs)
            while (case := self._board.telling(self.runs, self._unknown)) is not None:
                self.failed(case)
            explanation = self._board.explanation(self.runs)
            if self.hiding and self._fails_again(explanation):
                continue
            refuted = any(self._refuted(generous, one, explanation) for one in explanation)
            if not refuted and not self._repeated(explanation):
                return explanation

    def _fails_again(self, explanation: Sequence[Condition]) -> bool:
        """Return whether a case fails with further seeds that passes though it meets all conditions.

        Those that say how large a number is, or what divides it, are left out one at a time: if values hide a fault,
        few cases pass, and a number tells these from others by chance.
        """
        numeric = [one for one in explanation if one.limit > 1]
        without = [[one for one in explanation if one is not left_out] for left_out in (None, *numeric)]
        found = False
        for case, failed in list(self.runs.items()):
            if failed or case in self._again or not any(self.met(case, some) for some in without):
                continue
            self._again.add(case)
            if self._run(case, HIDDEN):
                self.runs[case] = found = True
                self.turning.pop(case, None)
        return found

    def _bases(self, generous: Case, tried: Sequence[Case]) -> Iterator[Case]:
        """Yield cases that failed: first those with values that none before has, and least like the generous one."""
        bases = [case for case, failed in self.runs.items() if failed and case not in tried]
        bases.sort(key=lambda case: self.varying.likeness(case, generous))
        seen = {case.values for case in (self.case, *tried)}
        while bases:
            base = min(bases, key=lambda case: case.values in seen)
            bases.remove(base)
            seen.add(base.values)
            yield base

    def _refuted(self, generous: Case, condition: Condition, explanation: Sequence[Condition]) -> bool:
        """Return whether a case fails without a condition: `REFUTING` that failed are changed in this alone."""
        others = [one for one in explanation if one is not condition]
        if self._of_a_cotangent(condition, others):
            return True
        tried, known = [case for case, about in self._changed if about == condition.text], self.varying.factors.keys()
        for base in self._bases(generous, tried):
            if len(tried) >= REFUTING:
                break
            if (base, condition.text) in self._unchanged:
                continue
            changed = [
                case
                for factor in changing(condition)
                if factor in known
                for case in self.varying.of(base, factor)
                if not self.met(case, [condition]) and self.met(case, others) and self._beyond(case, condition)
            ]
            if not changed:
                self._unchanged.add((base, condition.text))
            else:
                tried.append(base)
                self._changed.add((base, condition.text))
                # The first, the last and some between: a limit may lie anywhere.
                if self.failed(changed[len(tried) * (len(changed) - 1) // REFUTING], expected=False):
                    return True
        return self._fails_otherwise(generous, condition, others)

    def _of_a_cotangent(self, condition: Condition, others: Sequence[Condition]) -> bool:
        """Return whether the smallest case fails without a condition where another cotangent is given.

        An error in a score needs two keys to be seen in out, and one in lse.
        """
        for base in self.varying.of(self.case, "cotangent"):
            if (base, condition.text) not in self._with_cotangent and self.runs.get(base):
                self._with_cotangent.add((base, condition.text))
                for factor in [one for one in changing(condition) if one in self.varying.factors]:
                    lacking = (
                        one
                        for one in self.varying.of(base, factor)
                        if not self.met(one, [condition]) and self.met(one, others) and self._beyond(one, condition)
                    )
                    if (first := next(lacking, None)) is not None and self.failed(first):
                        return True
        return False

    def _fails_otherwise(self, generous: Case, condition: Condition, others: Sequence[Condition]) -> bool:
        """Return whether a drawn case that meets the other conditions fails without this one."""
        if condition.text in self._otherwise or not self._drawn:
            return False
        self._otherwise.add(condition.text)
        kept = {factor for one in others for factor in one.factors} - condition.factors
        tried = 0
        for other in self._drawn:
            case = self.varying.mixed(generous, other, kept)
            if case is None or case in self.runs or self.met(case, [condition]) or not self.met(case, others):
                continue
            if not self._beyond(case, condition):
                continue
            if self.failed(case, expected=False):
                return True
            tried += 1
            if tried == OTHERWISE:
                break
        return False

    def _elsewhere(self, generous: Case, explanation: Sequence[Condition]) -> None:
        """Vary factors that seem not to matter in other cases that failed, each in one way."""
        about = {factor for one in explanation for factor in one.factors}
        free = [name for name, seen in self.outcomes.items() if seen and all(seen) and name not in about]
        bases = [(one, free) for one in itertools.islice(self._bases(generous, [self.case]), ELSEWHERE)]
        bases.append((self.case, [name for name in free if name in CORNERS]))
        for number, (base, factors) in enumerate(bases):
            for factor in factors:
                if variants := [one for one in self.varying.of(base, factor) if self.met(one, explanation)]:
                    self.outcomes[factor] += self._outcome(factor, variants[(number + 1) * 7 % len(variants)])

    def _beyond(self, case: Case, condition: Condition) -> bool:
        """Return whether a case goes far beyond a limit, if the condition is one: near it, values may hide a fault."""
        if condition.most is None:
            return True
        number = features(case, self.varying.c).get(condition.about[0])  # a window that is not bounded has none
        return number is None or int(number) >= BEYOND * condition.most

    def _repeated(self, explanation: Sequence[Condition]) -> bool:
        """Return whether other cases pass if they are changed as one was that no condition explains."""
        found = False
        for passing, factor in list(self.turning.items()):
            if (passing, factor) in self._changed or not self.met(passing, explanation):
                continue
            self._changed.add((passing, factor))
            for base in itertools.islice(self._bases(passing, ()), REPEATED):
                case = self.varying.mixed(base, passing, self.varying.factors.keys() - {factor})
                if case is not None and case not in self.runs:
                    found = self.failed(case) is False or found
        return found

    def met(self, case: Case, explanation: Sequence[Condition]) -> bool:
        """Return whether a case meets all conditions."""
        return all(meets(one, case, self.varying.c) for one in explanation)

    def _foretold(self, generous: Case, case: Case | None, explanation: Sequence[Condition]) -> bool:
        """Run a case, and return whether it fails if it meets all conditions, and passes if it does not."""
        if case is None:
            return True
        expected = self.met(case, explanation)
        failed = self.failed(case, expected=expected)
        if expected and failed is False and len(self.turning) < MOST_TURNED:
            self._turned(generous, case)
        return failed in (None, expected)

    def _turned(self, failing: Case, passing: Case) -> None:
        """Find a factor that turns a case that passes into one that fails, by halves."""
        factors = list(self.varying.factors)
        passes, fails = 0, len(factors)
        while fails - passes > 1:
            middle = (passes + fails) // 2
            case = self.varying.mixed(failing, passing, factors[:middle])
            failed = None if case is None else self.failed(case)
            if failed is None:
                return
            passes, fails = (passes, middle) if failed else (middle, fails)
        self.turning[passing] = factors[passes]

    def _enough(self, factor: str) -> int:
        """Return how many variants of a factor have to fail: fewer where cases failed with several values of it."""
        fields = FIELDS.get(factor, ())
        values = {
            tuple(getattr(case if hasattr(case, field) else case.problem, field) for field in fields)
            for case, failed in self.runs.items()
            if failed
        }
        return 1 if len(values) > FIRST else FIRST + (factor in NUMBERS)

    def _enlarged(self) -> Case:
        """Enlarge the case in one respect after the other, as far as it still fails."""
        case = self.case
        for growth in self.varying.growths:
            for larger in self.varying.grown(case, growth)[:4]:
                if self.failed(larger):
                    case = larger
                    break
        # What the smallest case has, but the generous one does not need, would hide what other factors do.
        for name in ("causal", *MASKS[1:], "softcap", "scale"):
            if getattr(case.problem, name):
                plain = case.replace(**{name: False if name == "causal" else None})
                if plain in self.varying.of(case, name) and self.failed(plain):
                    case = plain
        return case

    def _has(self) -> set[str]:
        """Return the factors in which the smallest case is more than the simplest one."""
        case, p = self.case, self.case.problem
        more = {
            "heads": p.heads > 1,
            "key heads": p.hk != p.heads,
            "dims": (p.head_dim, p.dv) != (1, 1),
            "batch": p.batch > 1,
            "cross lengths": p.nq != p.nk,
            "dtype": p.dtype != "float32",
            "values": case.values not in ("integers", "normal"),
            "strides": case.memory != "contiguous",
            "cotangent": case.cotangent != "out",
            "group": case.group != "world",
            "schedule": bool(case.delayed) or case.transport != "buffered",
            "sharding": len(sharding_names(case, self.varying.c)) > 1,
            "calls": bool(case.chunks),
            "page table": case.page_table is not None,
        }
        masks = (*MASKS, "softcap", "scale")
        return {"ranks", "length"} | {name for name, has in more.items() if has} | {n for n in masks if getattr(p, n)}

    def _one_at_a_time(self, case: Case, factors: Sequence[str]) -> None:
        """Vary each factor: a few variants, or more of them where one passes."""
        for factor in factors:
            if (case, factor) in self._varied:
                continue
            self._varied.add((case, factor))
            seen, enough = list[bool](), self._enough(factor)
            for variant in self.varying.of(case, factor)[: MORE if case != self.case else MORE // 2]:
                if len(seen) >= enough and False not in seen:
                    break
                seen += self._outcome(factor, variant)
                if self.runs.get(variant) is False:
                    self.turning[variant] = factor
            self.outcomes.setdefault(factor, []).extend(seen)
        # One constraint may do instead of another.
        for needed in sorted(self._has().intersection(INSTEAD)):
            if needed in factors and False in self.outcomes[needed]:
                for plain in self.varying.of(case, needed)[:1]:
                    for other in INSTEAD:
                        # Masks may hide much or little: all keys of a rank, of a batch entry, or one.
                        variants = self.varying.of(plain, other)[: WAYS if other in MASKS else 1]
                        for instead in variants if other != needed else ():
                            self.failed(instead, expected=False)

    def _pool(self, case: Case, factors: Sequence[str]) -> list[Case]:
        """Return cases that may tell explanations apart: all sizes and lengths, and pairs of factors that matter."""
        found = self.varying.sizes_and_lengths(case)
        matter = [
            factor for factor, seen in self.outcomes.items() if False in seen and factor not in ("ranks", "length")
        ]
        # Without cross lengths, a query's own key is on its rank: only with them may all of its keys be elsewhere.
        matter += [] if set(MASKS).isdisjoint(matter) or "cross lengths" in matter else ["cross lengths"]
        for factor in factors:
            variants = self.varying.of(case, factor)
            found += variants
            for one in variants[:12] if factor in matter else ():
                for other in matter:
                    if other > factor:
                        found += self.varying.of(one, other)[:12]
                found += self.varying.of(one, "ranks")[:5]
                found += self.varying.of(one, "length")[:5]
        found += [one for factor in factors for one in self.varying.of(self.case, factor)]
        return list(dict.fromkeys(found))


def _news(case: Case, other: Case) -> list[str]:
    """Return the words for what a case has, and another one has not."""
    return [word for word in case.words if word not in other.words]


def _labels(some: Iterable[Case], other: Case, count: int | None) -> dict[str, None]:
    """Return cases in words, each once: so many of those that another one has not, or all."""
    return dict.fromkeys(" ".join(news[:count]) for one in some if (news := _news(one, other)))


def _listed(some: Iterable[str]) -> str:
    return ", ".join(itertools.islice(some, SHOWN))
