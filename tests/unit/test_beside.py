"""What is found beside a failure is news: nothing that is known of the case, and nothing that the machine did."""

import dataclasses

import pytest
import torch

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


@pytest.mark.parametrize("declared_right", [True, False])
def test_another_layout_is_told_only_where_the_declared_one_is_wrong(monkeypatch, declared_right):
    """A case may be right in both, and have failed by chance: here the axis of two tokens is told by its length."""
    monkeypatch.setattr(subject, "NEIGHBOURS", ())

    def attend(q, k, v, call):
        declared = q.size(1) == 2
        q, k, v = (x if declared else x.transpose(1, 2) for x in (q, k, v))
        weights = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return (out if declared else out.transpose(1, 2)) + (declared and not declared_right)

    declared = Capabilities(world_sizes=(1,), causal="never", gradients=False)
    case = Case(problem=Problem(query_length=2), world_size=1)
    runner = Runner(Implementation(attend, "two tokens", declared), SimulatedWorld())
    hints = subject.beside(FORWARD, runner, runner, case, WRONG)
    assert [("bhsd" in hint.text) for hint in hints] == ([] if declared_right else [True])
