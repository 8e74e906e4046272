"""A failure tells a newcomer what to do next: the answer that was there beside it, one story once, what ranks print."""

import shlex

import pytest
from command_line import miniature

from ringref.problem import Problem
from ringverify import targets
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.beside import beside
from ringverify.properties.property import Violation
from ringverify.properties.values import FORWARD
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(240)

FEW = ("--max-examples", 6)


def test_a_failure_that_numbers_do_not_explain_has_the_cause_that_the_hazard_watcher_names(ringverify):
    """A receive that nobody waits for: what was in memory may be anything. It is not said beside it once more."""
    outcome = ringverify.check(miniature("careless:forgotten"), "--only", "forward", *FEW)
    (event,) = outcome.told("counterexample")
    cause = event["diagnosis"]
    assert cause.startswith("a buffer is read while a receive into it is in flight: ")
    assert "before it completed, at careless.py:" in cause
    assert f"        cause   {cause}" in outcome.out
    assert event["hints"] == []


def test_a_failure_in_a_real_world_shows_what_the_simulated_one_sees_beside_it():
    """A receive into what is being sent: wrong with processes, where nothing is watched, and not every time."""
    implementation = targets.load(miniature("careless:overwritten"))
    case = Case(problem=Problem(query_length=4, head_dim=2), world_size=2)
    seen_elsewhere = Violation(("value", "out"), 0, "out is wrong on rank 0: 4 of 8 elements")
    watched = Runner(implementation, SimulatedWorld())
    (hint,) = beside(FORWARD, watched, watched, case, seen_elsewhere)
    assert hint.property == "hazards"
    assert "receives into memory that its send" in hint.text


def test_a_fault_seen_by_several_properties_is_told_once(ringverify):
    """The later ones have one line each, with what to replay; the report has all of each."""
    outcome = ringverify.check(miniature("faulty_rings:wrong_scale"), "--only", "forward,gradients,overflow", *FEW)
    counterexamples = outcome.told("counterexample")
    assert [event["same_as"] for event in counterexamples] == [None, "forward", "forward"]
    for event in counterexamples[1:]:
        line = f"        the same as forward: {event['summary']}; {event['replay']}\n"
        assert line in outcome.out
        assert event["case"]
        assert event["diagnosis"]
    assert outcome.out.count("        cause ") == 1


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_fault_of_one_gradient_is_told_once_whatever_is_special_about_a_property(ringverify, jobs):
    """Though one is about strides, one about world sizes and one about integers; each has its smallest case."""
    special = "overflow,dtypes,world_size_invariance,exact_selection,strided_inputs,reentrancy"
    outcome = ringverify.check(miniature("careless:wrong_dv"), "--only", f"gradients,{special}", *FEW, "--jobs", jobs)
    first, *others = outcome.told("counterexample")
    assert first["same_as"] is None
    assert {event["property"] for event in others} == {*special.split(",")}
    assert {event["same_as"] for event in others} == {"gradients"}
    assert all(event["needs"] == first["needs"] and event["tried"] <= 6 for event in others)
    strided, integers = (
        next(event for event in others if event["property"] == name) for name in ("strided_inputs", "exact_selection")
    )
    assert strided["case"]["memory"] != "contiguous"
    assert integers["case"]["values"] == "selectors"
    assert outcome.out.count("        needs ") == 1


def test_a_fault_without_a_cause_is_told_once_though_a_property_needs_what_others_lack(ringverify):
    """Ranks that are not the first of the world, a cotangent of lse alone: earlier cases are given what it needs."""
    properties = ("forward", "lse", "lse_gradient", "overflow", "subgroups", "strided_inputs")
    outcome = ringverify.check(miniature("careless:every_second_key"), "--only", ",".join(properties), *FEW)
    first, *others = outcome.told("counterexample")
    assert first["property"] == "forward"
    assert first["diagnosis"] is None
    assert {event["property"]: event["same_as"] for event in others} == dict.fromkeys(properties[1:], "forward")


def test_a_path_of_its_own_for_inference_is_explained_as_it_is_called(ringverify):
    """The training step is right: cause, place and needs are those of calls under no_grad."""
    outcome = ringverify.check(miniature("careless:top_left_in_inference"), "--only", "forward,modes")
    (event,) = outcome.told("counterexample")
    assert event["property"] == "modes"
    assert "under torch.no_grad" in event["summary"]
    assert event["diagnosis"].startswith("causal mask aligned top-left instead of bottom-right")
    assert {"causal", "queries and keys of different lengths"} <= {*event["needs"]["requires"]}
    assert event["where"]


def test_two_faults_are_two_stories(ringverify):
    """A wrong number of some rows, and k and v exchanged on the way back."""
    outcome = ringverify.check(miniature("careless:twice_wrong"), "--only", "forward,gradients", *FEW)
    assert [event["same_as"] for event in outcome.told("counterexample")] == [None, None]
    assert outcome.out.count("        case ") == 2


def test_an_exception_is_not_told_as_the_wrong_number_beside_it(ringverify):
    """Though each of their cases shows both: to mend the one leaves the other."""
    properties = "forward,overflow,gradients,dtypes"
    outcome = ringverify.check(miniature("careless:wrong_and_unfinished"), "--only", properties, *FEW, "--jobs", "1")
    told = {event["property"]: event["same_as"] for event in outcome.told("counterexample")}
    assert told == {"forward": None, "gradients": None, "overflow": "gradients", "dtypes": "gradients"}


def test_a_cached_group_is_told_to_declare_processes(ringverify):
    """And the run goes on to a verdict: the group of an earlier run ends no run of the tool."""
    outcome = ringverify.check(miniature("careless:cached"), "--only", "forward", *FEW)
    assert outcome.code == 1
    (event,) = outcome.told("counterexample")
    assert any("processes=True" in hint["text"] and "group" in hint["text"] for hint in event["hints"])
    assert "processes=True" in outcome.out


def test_a_thread_that_is_no_rank_is_told_what_ranks_are(ringverify):
    """It asks for its rank where there is none."""
    outcome = ringverify.check(miniature("careless:in_a_thread"), "--only", "forward", *FEW)
    (event,) = outcome.told("counterexample")
    assert any("each rank is one thread" in hint["text"] for hint in event["hints"])


def test_what_is_wrong_or_raises_is_tried_in_the_other_layout(ringverify):
    """Where shapes do not fit it raises; where as many tokens as heads are on a rank, it is wrong."""
    outcome = ringverify.check(miniature("careless:heads_first"), "--only", "forward", *FEW)
    (event,) = outcome.told("counterexample")
    assert [hint["text"] for hint in event["hints"] if 'declare tensor_layout="bhsd"' in hint["text"]]


def test_what_nothing_explains_says_what_to_do(ringverify):
    """No cause is shown; what it takes is, and both margins have a name."""
    outcome = ringverify.check(miniature("careless:talkative"), "--only", "forward", *FEW)
    (event,) = outcome.told("counterexample")
    assert event["diagnosis"] is None
    assert "        cause " not in outcome.out
    assert "        next    Cause unknown." in outcome.out
    assert "in the smallest case" in outcome.out
    assert "rows of rank" not in outcome.out


@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_what_ranks_print_is_shown_with_v_and_in_a_replay(world, ringverify):
    """Each rank's lines in order, under its name."""
    target = miniature("careless:talkative")
    outcome = ringverify.check(target, "--only", "forward", *FEW, "--world", world, "--world-sizes", "2", "-v")
    (event,) = outcome.told("counterexample")
    assert [one["rank"] for one in event["printed"]] == [0, 1]
    for one in event["printed"]:
        assert one["text"].startswith(f"rows of rank {one['rank']}: [")
        assert one["text"].endswith("one line\nand another\n")
    assert "        printed by rank 1\n        | rows of rank 1: [" in outcome.out
    out, _ = ringverify.apart(*shlex.split(event["replay"])[1:]).communicate(timeout=100)
    assert "[rank 1] rows of rank 1: [" in out
    assert "[rank 1] and another\n" in out


def test_the_replay_line_works_as_pasted(ringverify):
    """Also where a folder's name has spaces and quotes."""
    folder = "it's a folder"
    target = miniature("faulty_rings:wrong_scale")
    outcome = ringverify.check(target, "--only", "forward", *FEW, "--cases", folder)
    (event,) = outcome.told("counterexample")
    words = shlex.split(event["replay"])
    assert words == ["ringverify", "replay", event["file"]]
    assert ringverify(*words[1:]).code == 1
