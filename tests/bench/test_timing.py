"""Times, ratios and fits, from numbers that are made up: no clock decides anything here."""

import pytest

from ringverify.bench import memory
from ringverify.bench.sides import Side
from ringverify.bench.timing import LEAST_SECONDS, MOST_CALLS, Seconds, interleaved, rows, spread

PLAIN, RING = Side("plain", "plain", ""), Side("ring", "ranks", "ring")


def machine(slowness, forward):
    """A machine that gets slower turn by turn; notes who had a turn, and how many calls it made."""
    turns = []

    def take(side, calls):
        turns.append((side.name, calls))
        slow = slowness(len(turns))
        return [Seconds(slow * forward[side.name], 2 * slow * forward[side.name])] * calls

    return take, turns


def test_sides_take_turns_after_a_round_that_is_not_measured():
    """A B, then A B A B A B; long calls are made once a turn."""
    take, turns = machine(lambda turn: 1.0, {"plain": 1.0, "ring": 2.0})
    steps = []
    found = interleaved([PLAIN, RING], take, 3, lambda: steps.append(1))
    assert turns == [("plain", 1), ("ring", 1)] * 4
    assert len(steps) == 8
    assert [len(samples) for samples in found.values()] == [3, 3]


def test_short_calls_are_repeated_within_a_turn():
    """As often as fills the least time, and no more often than the limit."""
    take, turns = machine(lambda turn: 1.0, {"plain": LEAST_SECONDS / 30, "ring": LEAST_SECONDS / 3e6})
    interleaved([PLAIN, RING], take, 1, lambda: None)
    assert turns == [("plain", 1)] * 2 + [("ring", 1)] * 2 + [("plain", 10), ("ring", MOST_CALLS)]


def test_a_ratio_is_of_neighbours_in_time():
    """The machine doubles its times from round to round; the ratio within a round is what it is all the same."""
    take, _ = machine(lambda turn: 2.0 ** ((turn - 1) // 2), {"plain": 1.0, "ring": 1.5})
    found = interleaved([PLAIN, RING], take, 4, lambda: None)
    by_side = {row["side"]: row for row in rows(found, "plain", {"ring": "plain"})}
    for name in ("forward", "backward", "both"):
        assert by_side["ring"][name]["to_plain"] == {"median": 1.5, "low": 1.5, "high": 1.5}
        assert by_side["ring"][name]["to_floor"] == by_side["ring"][name]["to_plain"]
        assert by_side["plain"][name]["to_plain"]["median"] == 1.0
        assert len(by_side["ring"][name]["rounds"]) == 4
    assert by_side["ring"]["both"]["seconds"]["high"] > 2 * by_side["ring"]["both"]["seconds"]["low"]


def test_a_ratio_needs_both_sides():
    """Without the plain call there is none, rather than one from another run."""
    row = rows({"ring": [Seconds(1.0, 2.0)]}, "plain", {"ring": "floor"})[0]
    assert set(row["both"]) == {"seconds", "rounds"}


def test_a_spread_is_the_median_with_quartiles():
    """Of one value too."""
    assert spread([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}


@pytest.mark.parametrize("exponent", [1, 2])
def test_the_exponent_of_a_power_is_fitted(exponent):
    """By least squares of logarithms; one length has none."""
    positions = [64.0, 256.0, 1024.0]
    assert round(memory.fitted_exponent(positions, [3 * one**exponent for one in positions]), 6) == exponent
    assert memory.fitted_exponent([64.0, 64.0], [1.0, 2.0]) is None
