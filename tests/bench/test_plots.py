"""What a report looks like when it is drawn: lines along lengths or ranks, and bars where there is only one."""

import pytest

from ringverify.bench import plots

pytest.importorskip("matplotlib")

SIDES = {"plain": 1.0, "ring": 1.25, "peer:ring-attention-pytorch": 3.5}


def spread(seconds):
    """Of five rounds."""
    return {"median": seconds, "low": 0.75 * seconds, "high": 1.5 * seconds}


def speed(length, ranks):
    """One workload."""
    rows = [{"side": side, "both": {"seconds": spread(seconds * length / ranks)}} for side, seconds in SIDES.items()]
    return {"pattern": "causal", "length": length, "ranks": ranks, "rows": rows}


def panels(**parts):
    """The panels of a report that has these parts."""
    return plots.figure({"speed": [], "memory": [], **parts}).axes


def labels(axes):
    """Who has a line."""
    return [line.get_label() for line in axes.lines]


def test_of_one_length_there_are_bars():
    """From nothing, longest below, with spread and number; the length is in the title."""
    (axes,) = panels(speed=[speed(4, 2)])
    assert "sequence length 4" in axes.get_title()
    assert axes.get_xlabel() == "seconds"
    assert [text.get_text() for text in axes.get_yticklabels()] == list(reversed(SIDES))
    widths = [bar.get_width() for bar in axes.patches]
    assert [width / widths[-1] for width in widths] == [3.5, 1.25, 1.0]
    assert [text.get_text() for text in axes.texts] == [f"{width:.3g}" for width in widths]
    low, high = axes.get_xlim()
    assert low == 0
    assert high > 1.5 * widths[0]
    assert (axes.get_xscale(), axes.get_legend()) == ("linear", None)


def test_of_several_lengths_or_ranks_there_are_lines():
    """A side each, with a legend, and a tick at every length."""
    by_length, by_ranks = panels(speed=[speed(length, ranks) for length in (1024, 4096) for ranks in (1, 2, 4)])
    for axes, along, ticks in (
        (by_length, "sequence length", ["1,024", "4,096"]),
        (by_ranks, "ranks", ["1", "2", "4"]),
    ):
        assert labels(axes) == list(SIDES)
        assert axes.get_xlabel() == along
        assert [text.get_text() for text in axes.get_xticklabels()] == ticks
        assert axes.get_legend() is not None
        assert not axes.patches


def test_of_one_length_on_several_ranks_there_are_lines_alone():
    """No panel of one point a side beside them."""
    (axes,) = panels(speed=[speed(64, ranks) for ranks in (1, 2)])
    assert axes.get_xlabel() == "ranks"
    assert labels(axes) == list(SIDES)


def test_of_several_lengths_on_one_number_of_ranks_there_are_lines_alone():
    """Nor the other way round."""
    (axes,) = panels(speed=[speed(length, 2) for length in (64, 128)])
    assert axes.get_xlabel() == "sequence length"
    assert labels(axes) == list(SIDES)


def test_labels_of_an_axis_do_not_run_into_one_another():
    """Of lengths that several numbers of ranks have, powers of two are named first, and never two that are close."""
    assert plots.apart({512, 1024, 1536, 2048, 3072, 3584, 4096, 65536}) == [512, 1024, 2048, 4096, 65536]
    assert plots.apart({100, 300, 900}) == [100, 300, 900]
    assert plots.apart({2, 3, 4}) == [2, 3, 4]
