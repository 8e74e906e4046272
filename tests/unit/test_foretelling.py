"""What is said of when a case fails is held against its cause: what that contradicts is not said."""

import dataclasses
import functools
import itertools
import random

import pytest
import torch

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.when import foretelling
from ringverify.diagnosis.when.conditions import FLAGS, features
from ringverify.diagnosis.when.foretelling import SHOWS, Foretelling, contradicting, held_against
from ringverify.diagnosis.when.needs import OF_HIDDEN, needs
from ringverify.diagnosis.when.varying import Varying
from ringverify.faults.precision import summed_in_input_dtype
from ringverify.faults.ring import STEPS, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.values import FORWARD
from ringverify.worlds.simulated import SimulatedWorld

DECLARED = Capabilities(sharding=("contiguous",), uneven=True, causal="both", window=True, cross_lengths=True, lse=True)


def tile_of_the_last(steps, here, hop, owner):
    """A tile of 4 keys is skipped if it begins after the rank's last query, as if lengths were the same."""
    kept = here.shards[owner] // 4 * 4 <= here.call.positions[-1] if here.problem.causal else True
    return multiplicity(steps, here, hop, owner) * torch.as_tensor(kept)


@pytest.mark.nightly
def test_what_conditions_have_no_words_for_is_said_by_the_cause():
    """Lengths and ranks decide whether a tile begins there: they are not called no matter, nor "certain"."""
    steps = dataclasses.replace(STEPS, pattern=tile_of_the_last)
    declared = dataclasses.replace(DECLARED, window=False)
    runner = Runner(Implementation(ring_of(steps), "a tile too few", declared), SimulatedWorld())
    seen = hunt(FORWARD, runner, examples=60, seed=0, progress=lambda number: None)
    assert seen.mishaps == []
    said = seen.counterexample.needs
    assert [*said.requires] == ["causal", "more keys than queries", SHOWS]
    assert not {"ranks", "length", "cross lengths"} & set(said.irrelevant)


def named(text):
    """The cause that says this of both directions."""
    return next(one for one in HYPOTHESES if one.when == "always" and isinstance(one.says, str) and text in one.says)


def planted(cause, problem, size=2, **how):
    """What runs of a fault say, which is there as its cause foretells, and what foretells it."""
    case = Case(problem=Problem(**problem), world_size=size, values="normal")
    foretells = Foretelling((cause,), DECLARED, frozenset({case.sharding}), gradients=False)
    return needs(case, foretells, DECLARED, most_ranks=4, **how), foretells


def failing(foretells, smallest, count=150):
    """Cases that fail, unlike those that were run."""
    stream = Varying(DECLARED, 4).scattered([smallest], random.Random(5))
    return [case for case in itertools.islice(stream, count) if foretells(case)]


@pytest.mark.parametrize("text", ["window uses local indices", "left and right of the window exchanged"])
@pytest.mark.by_day(1)
def test_a_condition_that_the_cause_contradicts_is_put_to_the_test(text, monkeypatch):
    """A few runs leave conditions that are met by chance: cases that fail without them are found by the cause."""
    monkeypatch.setattr("ringverify.diagnosis.when.exploring.MOST_RUNS", 30)
    cause = named(text)
    found, foretells = planted(cause, {"query_length": 4, "window": (1, None)})
    held = held_against(found, [cause], DECLARED, gradients=False, left=lambda: 60.0)
    wrong = [
        [one.text for one in said.requires if not all(map(one.holds, failing(foretells, found.exploration.case)))]
        for said in (found, held)
    ]
    assert wrong[0]
    assert not wrong[1]


def test_a_cause_that_does_not_foretell_the_runs_says_nothing():
    """Further cases are run instead."""
    cause = named("window off by one: one key too many on both sides")
    found, _ = planted(cause, {"query_length": 4, "window": (1, 0)})
    other = named("lse has the wrong sign")
    assert held_against(found, [other], DECLARED, gradients=False, left=lambda: 60.0) is None
    assert held_against(found, [cause], DECLARED, gradients=False, left=lambda: 60.0) is not None


@pytest.mark.nightly
def test_a_cause_with_a_condition_says_that_others_pass():
    """A window that is off by one under a causal mask alone is right without one."""
    cause = named("window off by one: one key too many on the left")
    under = dataclasses.replace(cause, only=lambda case: case.problem.causal)
    found, foretells = planted(under, {"query_length": 4, "window": (1, 0), "causal": True})
    everywhere = dataclasses.replace(foretells, causes=(cause,))
    plain = found.exploration.case.replace(causal=False)
    assert (foretells(found.exploration.case), foretells(plain), everywhere(plain)) == (True, False, True)
    held = held_against(found, [under], DECLARED, gradients=False, left=lambda: 60.0)
    assert "causal" in [one.text for one in held.requires]


def test_causes_that_cannot_be_told_apart_say_what_they_agree_in():
    """Where one says that a case fails and the other that it passes, nothing is known."""
    problem = {"query_length": 6, "window": (1, 0)}
    left, both = (named(f"window off by one: one key too many on {side}") for side in ("the left", "both sides"))
    found, foretells = planted(left, problem)
    together = dataclasses.replace(foretells, causes=(left, both))
    for case in itertools.islice(Varying(DECLARED, 4).scattered([found.exploration.case], random.Random(1)), 60):
        each = {dataclasses.replace(foretells, causes=(one,))(case) for one in (left, both)}
        assert together(case) == (each.pop() if len(each) == 1 else None)


def test_of_a_sum_that_is_rounded_it_is_known_where_no_digit_is_another():
    """On one rank nothing is summed over ranks, whatever the rounding does elsewhere."""
    cause = Hypothesis("dk and dv are summed in 16 bits", summed_in_input_dtype(step_by_step=True))
    declared = dataclasses.replace(DECLARED, gradients=True, dtypes=("float32", "bfloat16"))
    case = Case(problem=Problem(query_length=6, dtype="bfloat16"), world_size=3, values="normal")
    foretells = Foretelling((cause,), declared, frozenset({case.sharding}), gradients=True, harmless=True)
    assert foretells(case) is None
    assert foretells(case.replace(world_size=1)) is False
    assert foretells(case.replace(dtype="float32")) is False


@pytest.mark.nightly
def test_what_passes_on_one_rank_by_the_cause_is_run_there(monkeypatch):
    """Few runs have shown that it takes two: by the cause that is looked for."""
    monkeypatch.setattr("ringverify.diagnosis.when.exploring.MOST_RUNS", 6)
    cause = Hypothesis("dk and dv are summed in 16 bits", summed_in_input_dtype(step_by_step=True))
    declared = dataclasses.replace(DECLARED, gradients=True, dtypes=("bfloat16",), sharding=("contiguous",))
    case = Case(problem=Problem(query_length=6, dtype="bfloat16"), world_size=2, values="normal")
    found = needs(case, lambda other: other.world_size > 1, declared, most_ranks=4)
    found.exploration.runs[case.replace(world_size=1)] = found.exploration.seen[case.replace(world_size=1)] = False
    held = held_against(found, [cause], declared, gradients=True, left=lambda: 60.0)
    assert "at least 2 ranks" not in [one.text for one in found.requires]
    assert "at least 2 ranks" in [one.text for one in held.requires]


def test_a_cause_of_another_sharding_than_that_of_all_runs_says_nothing():
    """It foretells none of them: that it contradicts none proves nothing."""
    cause = named("window uses local indices")
    found, foretells = planted(cause, {"query_length": 4, "window": (1, None)})
    elsewhere = dataclasses.replace(foretells, shardings=frozenset({"striped"}))
    assert foretells.agrees(found.exploration.seen, lambda: 60.0)
    assert not elsewhere.agrees(found.exploration.seen, lambda: 60.0)


def test_a_cause_is_held_against_other_shardings_where_it_foretells_them():
    """A limit that another sharding does not have is found by a case of that sharding."""

    def fails(case):
        return case.problem.causal and case.world_size >= (2 if case.sharding == "zigzag" else 3)

    declared = dataclasses.replace(DECLARED, sharding=("contiguous", "zigzag"))
    cause = Hypothesis("made up", STEPS, judge=lambda scene: None if fails(scene.case) else 0.0)
    case = Case(problem=Problem(query_length=8, causal=True), world_size=3, values="normal")
    found = needs(case, fails, declared, most_ranks=4)
    foretells = Foretelling((cause,), declared, frozenset({"contiguous"}), gradients=False)
    assert foretells(case.replace(sharding="zigzag")) is None
    found.exploration.extended(60, lambda: 60.0)
    known = foretells.in_other_shardings(found.exploration, [case], lambda: 60.0)
    assert "zigzag" in known.shardings
    assert known(case.replace(sharding="zigzag", world_size=2))
    held = held_against(found, [cause], declared, gradients=False, left=lambda: 60.0)
    assert not [one.text for one in held.requires if not one.holds(case.replace(sharding="zigzag", world_size=2))]


def test_cases_of_a_sharding_are_run_that_fail_by_the_cause_where_no_run_did():
    """Contiguous shards fail only where they differ, on three ranks or more: of them runs know nothing."""

    def fails(case):
        uneven = case.problem.nk % case.world_size != 0
        return case.world_size > 1 and (case.sharding == "striped" or (uneven and case.world_size > 2))

    declared = dataclasses.replace(DECLARED, sharding=("contiguous", "striped"))
    cause = Hypothesis("made up", STEPS, judge=lambda scene: None if fails(scene.case) else 0.0)
    case = Case(problem=Problem(query_length=4), sharding="striped", world_size=2, values="normal")
    found = needs(case, lambda one: one.sharding == "striped" and fails(one), declared, most_ranks=4)
    assert "striped sharding" in [one.text for one in found.requires]
    found.exploration.fails = fails
    for one in [one for one in found.exploration.runs if one.sharding == "contiguous" and fails(one)]:
        del found.exploration.runs[one], found.exploration.seen[one]
    held = held_against(found, [cause], declared, gradients=False, left=lambda: 60.0)
    assert "striped sharding" not in [one.text for one in held.requires]
    assert any(one.sharding == "contiguous" for one in held.failing)


def test_cases_that_contradict_a_cause_are_those_that_it_takes_for_right():
    """A cause that foretells nothing, such as what was seen of one case, contradicts nothing."""
    true = named("window off by one: one key too many on both sides")
    found, _ = planted(true, {"query_length": 4, "window": (1, 1)})
    left, sign = named("window off by one: one key too many on the left"), named("lse has the wrong sign")
    silent = Hypothesis("what was seen", STEPS, judge=lambda scene: 0.0)
    against = functools.partial(contradicting, found, capabilities=DECLARED, gradients=False, left=lambda: 60.0)
    assert against([true]) == against([silent]) == against([sign]) == []
    assert against([left])
    assert all(one.problem.window[0] is None for one in against([left]))
    assert against([true, left]) == against([left])


def test_a_cause_that_is_true_of_all_runs_is_held_against_cases_that_pass_by_it():
    """Further cases are run that meet all that was said: one that fails contradicts the cause."""
    true = named("window off by one: one key too many on both sides")
    found, foretells = planted(true, {"query_length": 4, "window": (1, 1)})
    known = {case for case, failed in found.exploration.seen.items() if failed}
    of_these = Hypothesis("of what was run", STEPS, judge=lambda scene: None if scene.case in known else 0.0)
    against = contradicting(found, [of_these], DECLARED, gradients=False, left=lambda: 60.0)
    assert against
    assert known.isdisjoint(against)
    assert all(foretells(case) for case in against)
    assert contradicting(found, [true], DECLARED, gradients=False, left=lambda: 60.0) == []


@pytest.mark.parametrize("exceptions", [0, 1])
def test_one_case_that_passes_as_foretold_shows_that_it_takes_more(exceptions, monkeypatch):
    """It is foretold with several seeds, and run; without any, the conditions are all that it takes."""
    monkeypatch.setattr(foretelling, "MOST", exceptions)
    monkeypatch.setattr(foretelling, "_turned", lambda *those: None)
    cause = named("aligned top-left")
    found, _ = planted(cause, {"query_length": 4, "key_length": 6, "causal": True})
    held = held_against(found, [cause], DECLARED, gradients=False, left=lambda: 60.0)
    plain = ["causal", "queries and keys of different lengths"]
    assert [one.text for one in held.requires] == [*plain, *[SHOWS] * exceptions]


def test_where_a_number_stands_for_more_than_itself_only_what_is_plain_is_said():
    """Windows held against the number of ranks are not said beside a cause that says when: that they are bounded is."""

    def fails(case):
        left, p = (case.problem.window or (None,))[0], case.problem
        return left is not None and left < case.world_size and (left + p.nq + p.heads) % 3 != 0

    cause = Hypothesis("made up", STEPS, judge=lambda scene: None if fails(scene.case) else 0.0)
    found, _ = planted(cause, {"query_length": 5, "window": (1, None)}, size=3)
    below = "a window shorter to the left than the number of ranks"
    assert below in [one.text for one in found.exploration.explanation()]
    held = held_against(found, [cause], DECLARED, gradients=False, left=lambda: 60.0)
    assert [one.text for one in held.requires] == ["a window bounded on the left", SHOWS]


def test_what_masks_hide_is_not_said_where_the_cause_says_it_better():
    """That a rank's last query attends nothing of a block is not enough here."""

    def fails(case):
        return features(case, DECLARED)["last_blind"] and (case.problem.nq + case.problem.heads) % 3 != 0

    cause = Hypothesis("made up", STEPS, judge=lambda scene: None if fails(scene.case) else 0.0)
    found, _ = planted(cause, {"query_length": 10, "window": (2, None)}, size=2)
    assert any(one.about[0] in OF_HIDDEN for one in found.exploration.explanation())
    held = held_against(found, [cause], DECLARED, gradients=False, left=lambda: 60.0)
    said = [one.text for one in held.requires]
    assert SHOWS in said
    assert not {FLAGS[name][0] for name in OF_HIDDEN} & set(said)
