"""Calls that overlap, and memory that holds anything: each fault is found, and what is right is let through."""

from __future__ import annotations

import _thread
import dataclasses
import subprocess
import sys
import threading

import hunts
import overlapping
import pytest
import right
import torch
import torch.distributed as dist

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.unwritten import Unwritten
from ringverify.faults.ring import STEPS, ring_of
from ringverify.implementation import Implementation, implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(90)


def hunted(attend, property):
    """What is found of one property, by an implementation that has kept nothing."""
    overlapping.KEPT.clear()
    return hunts.hunted(attend, property)


@pytest.mark.parametrize(
    ("attend", "reason", "summary"),
    [
        (overlapping.on_the_module, "value", "when a second call came between its forward and its backward"),
        (overlapping.second_backward_stumbles, "raised", "TypeError"),
        (overlapping.second_backward_adds, "value", "when the backward runs a second time (retain_graph=True)"),
        (overlapping.one_output_buffer, "overwritten", "out of the first call on rank 0 is overwritten"),
    ],
    ids=lambda one: one.name if isinstance(one, Implementation) else "",
)
@pytest.mark.by_day(2)
def test_calls_that_meet_are_found_where_plain_calls_are_right(attend, reason, summary):
    """On one rank and two tokens at most, in words that say what was unusual."""
    assert hunted(attend, "gradients" if attend.capabilities.gradients else "forward").counterexample is None
    shown = hunted(attend, "reentrancy").counterexample
    assert shown is not None
    assert shown.violation.reason[0] == reason
    assert summary in shown.violation.summary
    assert shown.case.world_size == 1
    assert shown.case.problem.nq <= 2
    if reason == "raised":
        assert shown.diagnosis.text.startswith("what a call keeps or has returned is used up")
        assert shown.needs.requires[0] == "a second call before the backward of the first, or a second backward"


def test_a_call_that_is_wrong_alone_is_not_said_to_disturb_others():
    """Its gradients are wrong among others too."""
    attend = Implementation(
        ring_of(dataclasses.replace(STEPS, ds=lambda p, dp, delta: p * dp)), "wrong", right.attend.capabilities
    )
    assert hunted(attend, "gradients").counterexample is not None
    shown = hunted(attend, "reentrancy").counterexample
    assert shown.violation.cause is None


@pytest.mark.parametrize(
    "attend",
    [
        right.attend,
        right.attend_with_lse,
        overlapping.layer,
        overlapping.second_backward_refused,
        overlapping.empty_then_written,
    ],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize("property", ["reentrancy", "uninitialised"])
@pytest.mark.by_day(3)
def test_what_is_right_is_let_through(attend, property):
    """A second backward that is refused in words included."""
    assert hunted(attend, property).counterexample is None


def test_a_thread_that_cannot_be_joined_is_let_through():
    """C code and `_thread` start some; Python knows it once it has asked who it is."""
    over, known = threading.Event(), threading.Event()

    @implementation()
    def attend(q, k, v, call):
        def left():
            dist.is_initialized()
            known.set()
            over.wait(60)

        known.clear()
        _thread.start_new_thread(left, ())
        known.wait(10)
        return right.attend(q, k, v, call)

    try:
        assert hunted(attend, "reentrancy").counterexample is None
    finally:
        over.set()


def test_a_plain_fault_is_not_blamed_on_what_was_unusual():
    """Where a call that is alone is wrong as well, the summary says no more than that."""
    import lenses

    for property in ("reentrancy", "uninitialised"):
        shown = hunted(lenses.half_of_dv, property).counterexample
        assert shown is not None
        assert shown.violation.summary.endswith("elements")


@pytest.mark.parametrize("kept", ["documents", "key_lengths", "window"])
def test_what_is_kept_for_one_mask_is_not_right_for_the_next(kept):
    """Batches differ in their documents, and layers in their window: both calls are on one group."""
    memory = {}

    @implementation(causal="both", lse=True, window=True, documents=True, key_lengths=True, gradients=False)
    def attend(q, k, v, call):
        p = call.problem
        there = memory.setdefault((call.group, call.rank, p.replace(**{kept: None})), getattr(p, kept))
        return ring_of(STEPS)(q, k, v, dataclasses.replace(call, problem=p.replace(**{kept: there})))

    assert hunted(attend, "forward").counterexample is None
    shown = hunts.hunted(attend, "reentrancy", examples=50, explain=True).counterexample
    assert shown is not None
    assert shown.diagnosis.text == f"what an earlier call keeps is used again by one with other {kept}"
    assert shown.needs.requires == (f"an earlier call on the same group with other {kept}",)


def test_what_a_process_keeps_is_told_though_there_the_next_call_alone_is_wrong_too(monkeypatch):
    """In a fresh process it is right."""
    memory = {}
    monkeypatch.setattr(SimulatedWorld, "close", lambda world: memory.clear())

    @implementation(causal="never", lse=True, key_lengths=True, gradients=False)
    def attend(q, k, v, call):
        p = call.problem
        there = memory.setdefault((call.rank, call.world_size, p.nk, p.batch), p.key_lengths)
        return ring_of(STEPS)(q, k, v, dataclasses.replace(call, problem=p.replace(key_lengths=there)))

    case = Case(problem=Problem(query_length=1, key_lengths=(0,)), world_size=1, seed=1)
    violation = PROPERTIES["reentrancy"].judge(case, Runner(attend, SimulatedWorld())).violation
    assert violation.cause == "what an earlier call keeps is used again by one with other key_lengths"


def test_what_is_added_to_new_memory_is_found():
    """Whether or not such memory mostly holds zeros."""
    shown = hunted(overlapping.added_to_empty, "uninitialised").counterexample
    assert shown is not None
    assert shown.violation.reason == ("value", "out")


def test_new_memory_holds_nan_or_the_largest_integer_and_nothing_else_changes():
    """By every way to ask for it; zeros are zeros."""
    like = torch.zeros(2, 3)
    with Unwritten():
        found = [
            torch.empty(2), torch.empty_like(like), torch.empty_strided((2, 2), (1, 2)), like.new_empty(2),
            like.new_empty_strided((2,), (1,)), torch.empty(3, dtype=torch.bfloat16),
        ]  # fmt: skip
        whole, zeros = torch.empty(2, dtype=torch.int64), torch.zeros(2)
    assert all(bool(one.isnan().all()) for one in found)
    assert bool((whole == torch.iinfo(torch.int64).max).all())
    assert bool((zeros == 0).all())
    assert bool((like == 0).all())


def test_new_memory_is_filled_without_dynamo():
    """Torch's guard would import it, for over a second, in every process that tries `uninitialised`."""
    program = (
        "import sys, torch; from ringverify.cases.unwritten import Unwritten\n"
        "with Unwritten(): torch.empty(1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
