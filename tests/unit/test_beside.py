"""What is found beside a failure is news: nothing that is known of the case, and nothing that the machine did."""

import dataclasses

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check import beside as subject
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.property import Judgement, Violation
from ringverify.properties.values import FORWARD
from ringverify.worlds.simulated import SimulatedWorld

CASE = Case(problem=Problem(query_length=4), world_size=2)
WRONG = Violation(("value", "out"), 0, "out is wrong on rank 0: 4 of 8 elements")


def found_beside(monkeypatch, reason):
    """What is said where one neighbour has a violation of a kind."""
    judgement = Judgement(0.0, Violation(reason, 0, "what the neighbour says"))
    neighbour = dataclasses.replace(subject.PROGRESS, judge=lambda case, runner: judgement)
    monkeypatch.setattr(subject, "NEIGHBOURS", (neighbour,))
    wrong = Implementation(lambda q, k, v, call: v * 0, "zeros", Capabilities(gradients=False))
    runner = Runner(wrong, SimulatedWorld())
    deadline = runner.deadline
    found = subject.beside(FORWARD, runner, runner, CASE, WRONG)
    assert runner.deadline == deadline
    return [(hint.property, hint.text) for hint in found]


def test_a_message_left_over_is_told(monkeypatch):
    """Its property is named."""
    assert found_beside(monkeypatch, ("orphan", "message")) == [("progress", "what the neighbour says")]


@pytest.mark.parametrize("reason", [("value", "out"), ("value", "dk"), ("raised", "TypeError"), ("deadline", "")])
def test_what_is_known_and_what_is_slow_is_not_told(monkeypatch, reason):
    """Wrong values beside wrong values, and a deadline that is shorter than usual."""
    assert found_beside(monkeypatch, reason) == []
