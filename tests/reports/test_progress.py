"""The bar of a run under way."""

import io

import pytest
from rich.console import Console

from ringverify.reports.terminal import ProgressBar


def _written(*, terminal):
    """What a bar that starts, moves and stops twice writes."""
    stream = io.StringIO()
    bar = ProgressBar(Console(file=stream, force_terminal=terminal, width=80), live=False)
    for property in ("forward", "gradients"):
        bar.start("ring", property, 3)
        bar.step(2)
        bar.stop()
    return stream.getvalue()


def test_a_bar_writes_nothing_where_there_is_no_terminal():
    """Not even an empty line, which rich 13 and 14 end a bar with that is not shown; a log stays a log."""
    assert _written(terminal=False) == ""


def test_a_bar_shows_how_far_a_property_is():
    """On a terminal."""
    assert "ring gradients" in _written(terminal=True)
    assert "2/3" in _written(terminal=True)


def test_a_bar_shows_a_violation_while_it_is_made_smaller():
    """That takes seconds; nobody waits for them to learn that there is one."""
    stream = io.StringIO()
    bar = ProgressBar(Console(file=stream, force_terminal=True, width=80), live=False)
    bar.start("ring", "forward", 3)
    bar.found("forward: out is wrong on rank 1")
    assert "forward: out is wrong on rank 1: making it smaller" in stream.getvalue()
    bar.stop()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_has_a_line_for_the_first_violation_of_an_implementation(quiet):
    """As soon as it is found; of the others nothing before all is known, and of none where verdicts alone are told."""
    stream = io.StringIO()
    bar = ProgressBar(Console(file=stream, force_terminal=False, width=80), quiet=quiet)
    for implementation in ("one", "other"):
        for property in ("forward", "lse"):
            bar.start(implementation, property, 3)
            bar.found(f"{property}: it is wrong in {implementation}")
            bar.stop()
    first = "  forward: it is wrong in one: making it smaller\n  forward: it is wrong in other: making it smaller\n"
    assert stream.getvalue() == ("" if quiet else first)
