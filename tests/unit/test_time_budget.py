"""The time of a run is shared: who comes first does not take it all, and what is left over passes on."""

import math

import pytest

from ringverify.check import budget
from ringverify.check.budget import ENDLESS, Budget


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


def test_time_is_divided_evenly_among_what_is_to_come(clock):
    """Each property that takes all of its share leaves as much to the next."""
    whole = Budget(30, 3)
    for end in (110, 120, 130):
        share = whole.share()
        assert (share.until, share.end) == (end, 130)
        clock.now = share.until


def test_what_is_not_used_passes_on_and_what_is_overdrawn_is_lost_evenly(clock):
    """To all who come, not to the next alone."""
    whole = Budget(30, 3)
    whole.share()
    clock.now += 2
    assert whole.share().until == clock.now + 14
    overdrawn = Budget(30, 3)
    overdrawn.share()
    clock.now += 20
    assert overdrawn.share().until == clock.now + 5
    clock.now += 20
    late = overdrawn.share()
    assert late.until == clock.now > late.end


def test_explaining_may_borrow_half_of_what_is_left_for_the_others(clock):
    """So that there is something left for them."""
    share = Budget(30, 3).share()
    assert share.late == 120
    assert Budget(30, 1).share().late == 130


def test_without_a_budget_nothing_ends():
    """And more properties than were expected are no mistake."""
    whole = Budget(None, 0)
    for _ in range(3):
        assert whole.share() == ENDLESS
    assert math.isinf(ENDLESS.late)


def test_properties_that_are_tried_side_by_side_have_longer_shares(clock):
    """Four in 30 s, two at a time, have 15 s each, and never more than there is."""
    whole = Budget(30, 4)
    assert [whole.share(2).until for _ in range(4)] == [115, 120, 130, 130]
