"""A fault that is not in the library is named by a relative, by what is read off further runs, or not at all."""

from pathlib import Path

import pytest

from ringverify.errors import UsageError
from ringverify.lab import held_out
from ringverify.lab.expected import read

KILLS = read(Path(__file__).with_name("expected_kills.json"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mutant", "named", "text"),
    [
        ("O14", "missing", None),  # nothing is like a scale of D + 1
        ("B9a", "right", "the window is laid with queries and keys at positions"),  # read off further runs
    ],
)
@pytest.mark.nightly
def test_a_name_is_judged_by_further_cases(mutant, named, text):
    """It foretells the numbers of each that fails, and is found as a user finds it, without its own entry."""
    (found,) = held_out.held_out([kill for kill in KILLS if kill.mutant == mutant])
    assert found.named == named
    assert (found.text is None) if text is None else (text in found.text)
    assert found.foretold == found.failing
    assert (found.failing > 0) == (named != "missing")


def test_a_name_that_further_cases_refute_is_wrong(monkeypatch):
    """The first cause of a diagnosis that foretells some of them only."""
    from ringverify.diagnosis.hypothesis import Hypothesis

    monkeypatch.setattr(Hypothesis, "explains", lambda self, scene: None)
    assert held_out.judged(Hypothesis("a fault", None), [object()]) == ("wrong", 0)
    assert held_out.judged(None, [object()]) == ("missing", 0)


def test_how_many_are_left_out_is_a_number():
    """It is said in a line."""
    with pytest.raises(UsageError, match="'0': expected a whole number of at least 1"):
        held_out.one_of_every(KILLS, "0")
