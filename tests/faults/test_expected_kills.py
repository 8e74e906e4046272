"""Every mutant is killed by what is known to kill it: whoever makes the suite blind to one of them hears of it here."""

import json
from pathlib import Path

import pytest

from ringverify.cli.main import main
from ringverify.lab import expected
from ringverify.lab.killing import expected_kills

FILE = Path(__file__).with_name("expected_kills.json")

BATCHES = 16
"""The mutants are tried in so many tests, which run side by side."""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_mutant_is_killed_as_expected(batch):
    """By the property, with the seed and within a few times the examples of `expected_kills.json`."""
    entries = expected.read(FILE)[batch::BATCHES]
    survivors = [one.mutant for one in expected_kills(entries, jobs=1) if one.verdict != "killed"]
    assert not survivors, f"write the file anew if another property kills them: {survivors}"


@pytest.mark.parametrize("family", sorted({one.mutant[0] for one in expected.read(FILE)}))
@pytest.mark.by_day(4)
def test_one_mutant_of_each_family_is_killed_as_expected(family):
    """The one that takes the fewest examples; a night tries all."""
    entry = min((one for one in expected.read(FILE) if one.mutant[0] == family), key=lambda one: one.examples)
    (killed,) = expected_kills([entry], jobs=1)
    assert killed.verdict == "killed", entry


@pytest.fixture
def doctored(tmp_path):
    """Write the file with some entries changed, or left out where they are `None`."""

    def write(**changes):
        content = {**json.loads(FILE.read_text()), **changes}
        path = tmp_path / "expected.json"
        path.write_text(json.dumps({id: one for id, one in content.items() if one is not None}))
        return path

    return write


def test_a_mutant_that_is_not_killed_any_more_is_named(doctored, capsys):
    """The gate can fail: a wrong scale changes nothing about determinism."""
    path = doctored(A1={"property": "determinism", "seed": 0, "examples": 1})
    assert main(["mutants", "A1", "--expected", str(path)]) == 1
    assert "survivors: A1" in capsys.readouterr().out


def test_a_mutant_that_is_killed_as_expected_is_counted(capsys):
    """The same, with the file as it is."""
    assert main(["mutants", "A1", "A2a", "--expected", str(FILE)]) == 0
    assert "2 of 2 mutants killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"A1": None, "O10": None}, "has no expected kill of A1, O10: write it again with ringverify mutants --matrix"),
        ({"X9": {"property": "forward", "seed": 0, "examples": 1}}, "unknown mutant 'X9'"),
        ({"A1": {"property": "backward", "seed": 0, "examples": 1}}, "unknown property 'backward'"),
        ({"A1": {"property": "forward"}}, "is no list of expected kills"),
    ],
)
def test_a_file_that_does_not_fit_the_mutants_is_refused(doctored, capsys, changes, words):
    """A mutant that is missing, one that is unknown, a property that is unknown, something else altogether."""
    assert main(["mutants", "--expected", str(doctored(**changes))]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.nightly
def test_what_a_matrix_writes_is_what_is_read(tmp_path):
    """The cheapest kill of each mutant."""
    path = tmp_path / "kills.json"
    arguments = ["--matrix", "--only", "forward,determinism", "--max-examples", "20", "--write-expected", str(path)]
    assert main(["mutants", "A2a", "A9", *arguments]) == 0
    assert [(one.mutant, one.property) for one in expected.read(path, ["A2a", "A9"])] == [
        ("A2a", "forward"),
        ("A9", "forward"),
    ]
    with pytest.raises(Exception, match="unknown mutant 'A9'"):
        expected.read(path, ["A2a"])
