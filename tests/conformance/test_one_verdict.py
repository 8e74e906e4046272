"""One verdict in every world: what gloo refuses the simulated world refuses, and a pass says where it is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import miniature

from ringverify.lab import expected
from ringverify.lab.agreeing import Compared, Comparison, Seen, everything, line, main

pytestmark = pytest.mark.timeout(240)

WORLDS = ("simulated", "gloo")
KILLS = Path(__file__).resolve().parents[1] / "faults" / "expected_kills.json"


def checked(ringverify, name, world, *arguments):
    """`check` on one to three ranks in a world."""
    return ringverify.check(
        miniature(f"sends_to_itself:{name}"), "--world", world, "--world-sizes", "1,2,3", *arguments
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.by_day(1)
def test_a_ring_that_sends_to_itself_alone_gets_the_same_verdict_in_both_worlds(ringverify, world):
    """Its violation is that message, in the same words, smallest on one rank."""
    outcome = checked(ringverify, "attend", world, "--only", "forward", "--max-examples", "12")
    assert outcome.code == 1
    (shown,) = outcome.told("counterexample")
    assert shown["summary"].startswith("rank 0 raised RuntimeError: rank 0 sends to itself: gloo refuses that")
    assert shown["case"]["world_size"] == 1
    assert shown["repeats"]
    assert "refused" not in shown


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.nightly
def test_a_message_to_oneself_does_not_hide_what_is_wrong_elsewhere(ringverify, world):
    """Wrong values are the violation, on two ranks or three; the message is shown beside them."""
    outcome = checked(ringverify, "wrong", world, "--only", "forward", "--max-examples", "20")
    assert outcome.code == 1
    (shown,) = outcome.told("counterexample")
    assert shown["summary"].startswith("out is wrong on ")
    assert shown["case"]["world_size"] == 2
    assert "sends to itself" in shown["refused"]["summary"]
    assert shown["refused"]["case"]["world_size"] == 1
    assert "also    rank 0 raised RuntimeError: rank 0 sends to itself" in outcome.out


def test_looking_for_what_else_is_wrong_ends(ringverify):
    """Where every case is refused, after some tens of them."""
    outcome = checked(ringverify, "always", "simulated", "--only", "gradients")
    assert outcome.code == 1
    assert outcome.told("property")[0]["examples"] == 40


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.nightly
def test_a_failure_whose_message_is_never_the_same_is_repeatable(ringverify, world):
    """A port, a process and an address differ each time; that it raises, and what, does not."""
    outcome = checked(ringverify, "says_a_port", world, "--only", "forward", "--max-examples", "12")
    (shown,) = outcome.told("counterexample")
    assert "ConnectionError: no connection from port " in shown["summary"]
    assert shown["repeats"]
    assert "not repeatable" not in outcome.out
    process = ringverify.apart(*shown["replay"].split()[1:])
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exactly the recorded bits" in out


def test_what_only_gloo_refuses_is_a_finding_and_no_violation(ringverify):
    """It works here and over NCCL: the verdict stands, and the finding has a name and an example."""
    outcome = checked(ringverify, "stacked", "simulated", "--only", "forward", "--max-examples", "6")
    assert outcome.code == 0
    (told,) = outcome.told("implementation")
    (finding,) = told["gloo_refuses"]
    assert finding.startswith("a gathered tensor that does not lie along the first axis: all_gather_into_tensor of [")
    assert f"works here, gloo refuses it: {finding}" in outcome.out
    over_gloo = checked(ringverify, "stacked", "gloo", "--only", "forward", "--max-examples", "6")
    assert over_gloo.code == 1
    assert "gloo_refuses" not in over_gloo.told("implementation")[0]


@pytest.mark.parametrize("world", WORLDS)
def test_a_pass_says_in_which_world_it_is_one_and_that_it_was_not_run_on_gloo(ringverify, world):
    """On the terminal, and as fields of the report."""
    arguments = ("--world", world, "--world-sizes", "1,2", "--only", "forward", "--max-examples", "3")
    outcome = ringverify.check(miniature("right:attend"), *arguments)
    (told,) = outcome.told("implementation")
    assert told["world"] == world
    assert told["not_run_in"] == (["gloo"] if world == "simulated" else [])
    elsewhere = "; not run on gloo" if world == "simulated" else ""
    untried = f"; {len(told['untried'])} declared features not tried"
    assert f"  conformant in the {world} world: 1 pass{elsewhere}{untried}\n" in outcome.out
    assert {"world size 3-4", "world size 5-8"} <= {*told["untried"]}


SAMPLE = ("ring", "allgather", "ringverify.faults.ring:PLAIN", "mutant:A1", "mutant:D1", "mutant:G1")
"""Of what `python -m ringverify.lab.agreeing` compares: built in, right and wrong."""


def test_both_worlds_say_the_same_of_a_sample_of_implementations_and_mutants():
    """The same cases, the same verdict, the same reason; all of the project is compared by the command."""
    wanted = everything({one.mutant: one.property for one in expected.read(KILLS)})
    comparison = Comparison(examples=4, sizes=(1, 2))
    try:
        found = [one for name in SAMPLE for one in comparison.of(name, wanted[name])]
    finally:
        comparison.close()
    assert len({one.name for one in found}) == len(SAMPLE)
    assert not [line(one) for one in found if not one.agrees]


def test_worlds_that_disagree_are_told_apart():
    """A pass and a fail, and a fail on another case, are disagreements; a deadlock and a deadline are one thing."""
    held, wrong, later = Seen(4, None, ""), Seen(4, ("value", "out"), "out is wrong"), Seen(5, ("value", "out"), "")
    assert Compared("a", "forward", held, held).alike
    assert not Compared("a", "forward", held, wrong).agrees
    assert not Compared("a", "forward", wrong, later).agrees
    waits = Seen(4, ("waits",), "waits")
    assert Compared("a", "forward", wrong, waits).agrees
    assert not Compared("a", "forward", wrong, waits).alike


def test_the_comparison_of_worlds_is_a_command(capsys):
    """A line a property, and a count; what cannot be in both worlds is named."""
    names = [miniature("right:attend_in_processes"), miniature("right:attend")]
    assert main([*names, "--examples", "2", "--world-sizes", "1"]) == 0
    out = capsys.readouterr().out
    assert "declares processes=True" in out
    assert "2 same, 0 other words, 0 disagree, 1 not compared" in out
