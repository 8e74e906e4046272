"""A fault that is not in the library is mostly not named, or by a relative of it."""

from pathlib import Path

from hunts import unexplained

from ringverify.lab.expected import read
from ringverify.lab.held_out import held_out

KILLS = read(Path(__file__).with_name("expected_kills.json"))


def told_of(ids):
    """What is said of some mutants, by id."""
    return {one.mutant: one for one in held_out([kill for kill in KILLS if kill.mutant in ids])}


def test_a_relative_is_named_where_there_is_one(monkeypatch):
    """One key too few instead of one too many; and nothing is like a scale of D + 1."""
    unexplained(monkeypatch)  # by the whole library
    found = told_of(["B9b", "O14"])
    assert found["O14"].named == "missing"
    assert found["B9b"].named in ("right", "missing")
