"""Rings that are right by luck: each is a `fail` of `hazards` or `progress` that names rank, operation and line."""

from __future__ import annotations

import inspect

import hazardous
import pytest
from hunts import hunted

from ringverify.ring.declared import allgather, ring

pytestmark = pytest.mark.timeout(90)


def line_of(function, text: str) -> str:
    """`file:line` of the line of a function that contains a text."""
    lines, start = inspect.getsourcelines(function)
    (at,) = [number for number, line in enumerate(lines) if text in line]
    return f"hazardous.py:{start + at}"


HAZARDOUS = {
    "zeroed": ("hazards", "send", line_of(hazardous.send_zeroed_before_wait, "block.zero_()")),
    "early": ("hazards", "receive", line_of(hazardous.receive_read_early, "arriving.sum()")),
    "dropped": ("hazards", "send", line_of(hazardous.handle_dropped, "dist.isend")),
    "barrier": ("hazards", "barrier", line_of(hazardous.extra_barrier_on_one_rank, "dist.barrier")),
    "orphan": ("hazards", "send to rank", line_of(hazardous.unreceived_message, "dist.isend")),
    "blocking": ("progress", "waits for a send to rank", None),
}


@pytest.mark.parametrize("name", HAZARDOUS)
@pytest.mark.by_day(2)
def test_a_ring_that_is_right_by_luck_passes_forward(name):
    """On an ordinary transport nothing shows."""
    assert hunted(getattr(hazardous, name), "forward", 25).counterexample is None


@pytest.mark.parametrize("name", HAZARDOUS)
@pytest.mark.by_day(2)
def test_a_ring_that_is_right_by_luck_is_named_with_rank_operation_and_line(name):
    """On the smallest ring that shows it, two ranks."""
    property, operation, line = HAZARDOUS[name]
    shown = hunted(getattr(hazardous, name), property, 25).counterexample
    assert shown is not None
    assert shown.case.world_size == 2
    assert shown.repeats
    assert "rank" in shown.violation.summary
    assert operation in shown.violation.summary
    if line is None:
        assert shown.violation.reason[0] == "deadlock"
        assert shown.case.transport == "rendezvous"
    else:
        assert line in shown.violation.summary + shown.violation.detail


def test_an_orphan_message_is_no_progress_either():
    """`progress` sees what is left in the mail."""
    shown = hunted(hazardous.orphan, "progress", 25).counterexample
    assert shown is not None
    assert shown.violation.summary.startswith("a message that nobody received: from rank ")
    assert "tag 7" in shown.violation.summary


@pytest.mark.parametrize("property", ["hazards", "progress"])
@pytest.mark.parametrize("attend", [hazardous.safe, ring, allgather], ids=lambda one: one.name)
@pytest.mark.by_day(1)
def test_a_ring_that_waits_for_what_it_posts_passes_under_every_transport(attend, property):
    """No false alarm, for a plain ring and for ours, forward and backward, on groups and under delays."""
    for seed in range(2):
        assert hunted(attend, property, 40, seed=seed).counterexample is None
