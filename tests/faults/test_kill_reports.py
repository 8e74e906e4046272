"""`ringverify mutants`: what runs write, what tables are made of it, and how a run that finds something amiss ends."""

import json
from pathlib import Path

import pytest

from ringverify.cli.main import main
from ringverify.lab import false_alarms, kill_report, merge_kills, mutant_runs
from ringverify.lab.kill_tables import LENSES, markdown
from ringverify.lab.killing import Kill
from ringverify.properties.catalogue import PROPERTIES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(200)


def test_every_property_is_of_one_lens():
    """So that the table that justifies them leaves none out."""
    listed = [id for ids in LENSES.values() for id in ids]
    assert sorted(listed) == sorted(PROPERTIES)


HOW = {"ringverify": "1", "torch": "2", "python": "3", "max_examples": 5, "properties": ("forward", "lse")}


def matrix(kills, *, date="2026-01-02", seed=0, jobs=2):
    """A section of a matrix in which `lse` was not tried."""
    return kill_report.KillMatrix(
        **HOW, date=date, seed=seed, jobs=jobs, seconds=1.5, mutants=len(kills), killed=0, survivors=(), pairs=0,
        unsupported=dict.fromkeys(kills, ("lse",)), kills=kills,
    )  # fmt: skip


def test_a_matrix_of_some_mutants_is_added_to_that_of_the_others(tmp_path):
    """Where both were made in the same way; a mutant that is no more is left out."""
    path = tmp_path / "kills.json"
    kill_report.add(path, matrix({"gone": {"forward": 1}, "A9": {"forward": 3}, "O96": {}}))
    kill_report.add(path, matrix({"O96": {"forward": 2}, "A1": {}}, date="2026-01-03", jobs=1))
    found = kill_report.read(path).matrix
    assert found.kills == {"A1": {}, "A9": {"forward": 3}, "O96": {"forward": 2}}
    assert (found.date, found.seconds, found.jobs, found.pairs) == ("2026-01-03", 3.0, 2, 3)
    assert (found.mutants, found.killed, found.survivors) == (3, 2, ("A1",))
    kill_report.add(path, matrix({"A9": {"forward": 1}}, seed=1))
    assert list(kill_report.read(path).matrix.kills) == ["A9"]


def test_what_is_published_is_what_would_be_written(tmp_path):
    """The file that docs/mutants.md is made from: read, and written again, it is the same, and so is the page."""
    report = kill_report.read(ROOT / "docs/kills.json")
    again = tmp_path / "kills.json"
    again.write_bytes((ROOT / "docs/kills.json").read_bytes())
    kill_report.add(again, report.variants)
    assert again.read_text(encoding="utf-8") == (ROOT / "docs/kills.json").read_text(encoding="utf-8")
    assert markdown(report, "docs/kills.json") == (ROOT / "docs/mutants.md").read_text(encoding="utf-8")


def test_merges_have_a_run_and_a_section_of_their_own(tmp_path, capsys):
    """Which properties kill a wrong one, examples of a correct one; what nothing kills ends the run with 1."""
    path = tmp_path / "kills.json"
    asked = ["mutants", "--merges", "sigmoid", "nan_hidden", "by_softmax", "--max-examples", "3", "--json", str(path)]
    assert main([*asked, "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 mutants killed" in said
    found = kill_report.read(path).merges
    assert found.kills["nan_hidden"] == {"nan_seen": 1}
    assert "all_empty" in found.kills["sigmoid"]
    assert list(found.each) == ["by_softmax"]
    page = markdown(kill_report.read(path), "kills.json")
    assert "2 of 2 wrong merges are killed; 1 correct ones" in page
    assert "| `nan_hidden` | NaN is replaced by 0, so what went wrong before is hidden | nan_seen 1 |" in page
    assert main(["mutants", "--merges", "sigmoid", "--only", "merged_out", "--jobs", "1"]) == 1
    assert "survivors: sigmoid" in capsys.readouterr().out


def test_a_correct_merge_that_is_accused_ends_the_run_with_1(monkeypatch, capsys):
    """And the case is named."""
    monkeypatch.setitem(merge_kills.CORRECT, "by_softmax", merge_kills.WRONG["mean"][1])
    assert main(["mutants", "--merges", "by_softmax", "--only", "merged_out", "--jobs", "1"]) == 1
    assert "merged_out: out is wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["A1"], "unknown merge 'A1': known: sigmoid, base"),
        (["--matrix"], "--matrix is for implementations of attention"),
        (["--only", "forward"], "unknown property 'forward' of a merge"),
    ],
)
def test_what_is_not_of_merges_is_refused(arguments, words, capsys):
    """In a line."""
    assert main(["mutants", "--merges", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A file to which three kinds of runs have added."""
    path = tmp_path_factory.mktemp("mutants") / "kills.json"
    for arguments in (
        ["A9", "O96", "--only", "forward,reentrancy"],
        ["A9", "O96", "--only", "forward,reentrancy", "--matrix", "--max-examples", "5"],
        ["plain ring", "--variants", "--only", "forward,exact_selection", "--max-examples", "12"],
    ):
        assert main(["mutants", *arguments, "--json", str(path)]) == 0
    return path


@pytest.mark.nightly
def test_each_run_adds_its_section(report):
    """First kills with their sizes, pairs that kill, examples without a false alarm."""
    assert list(json.loads(report.read_text(encoding="utf-8"))) == ["schema", "first", "matrix", "variants", "merges"]
    found = kill_report.read(report)
    first, matrix, variants = found.first, found.matrix, found.variants
    assert (first.killed, first.mutants, first.survivors) == (2, 2, ())
    assert [kill.property for kill in first.kills.values()] == ["forward", "reentrancy"]
    assert first.kills["O96"].examples > PROPERTIES["forward"].examples, "those that forward tried in vain count"
    assert all(kill.ranks <= 2 and kill.tokens <= 3 for kill in first.kills.values())
    assert list(matrix.kills["A9"]) == ["forward", "reentrancy"]
    assert list(matrix.kills["O96"]) == ["reentrancy"]
    assert variants.alarms == ()
    assert variants.examples >= 12


@pytest.mark.nightly
def test_the_table_says_what_each_property_kills_alone(report, tmp_path, capsys):
    """And how it was made, in commands that exist."""
    page = tmp_path / "mutants.md"
    assert main(["mutants", "--table", str(page), "--json", str(report)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "| `reentrancy` | semantic | 2 | 1 | O96 | 0 in 0 |" in text
    assert "| `forward` | semantic | 1 | 0 |  | 0 in " in text
    assert "| mutants killed | 2 of 2 |" in text
    assert "**0 false alarms**" in text
    assert "| O96 | state | out is overwritten by the next call | reentrancy " in text
    assert "$ ringverify mutants --matrix --max-examples 5 --jobs 1 --json" in text


@pytest.mark.nightly
def test_a_false_alarm_is_told_and_fails(monkeypatch, capsys):
    """The gate can fail: a mutant among what is said to be correct."""
    monkeypatch.setitem(false_alarms.CORRECT, "mutant:A9", "mutant:A9")
    assert main(["mutants", "mutant:A9", "--variants", "--only", "forward", "--max-examples", "20"]) == 1
    out = capsys.readouterr().out
    assert "forward: out is wrong on rank" in out
    assert "1 false alarms in " in out


@pytest.mark.nightly
def test_two_processes_find_what_one_finds(capsys):
    """In the same order."""
    found = []
    for jobs in ("1", "2"):
        assert main(["mutants", "A9", "A2a", "B1", "--only", "forward", "--matrix", "--jobs", jobs]) == 0
        found.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")])
    assert found[0] == found[1]


def test_an_interrupted_matrix_keeps_its_rows(monkeypatch, capsys, tmp_path):
    """And names the mutants that are left, so that a second run adds them."""
    row = [Kill("A9", "forward", "killed", 3), Kill("A9", "lse", "survived", 80)]

    def interrupted(ids, effort):
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(mutant_runs, "matrix", interrupted)
    path = tmp_path / "kills.json"
    assert main(["mutants", "A9", "A2a", "B1", "--only", "forward,lse", "--matrix", "--json", str(path)]) == 130
    assert kill_report.read(path).matrix.kills == {"A9": {"forward": 3}}
    assert "1 of 3 mutants were tried; the others: A2a B1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["X9"], "unknown mutant 'X9'"),
        (["A9", "--variants"], "unknown implementation 'A9'"),
        (["--write-expected", "kills.json"], "needs --matrix"),
        (["--table", "mutants.md"], "name their file with --json"),
        (["--table", "mutants.md", "--json", "nowhere.json"], "name their file with --json"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments, words, capsys, monkeypatch, tmp_path):
    """Before anything is run."""
    monkeypatch.chdir(tmp_path)
    assert main(["mutants", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_report_of_something_else_is_not_overwritten(tmp_path, capsys):
    """It is refused, and stays as it was."""
    path = tmp_path / "other.json"
    path.write_text('{"schema": 1}')
    assert main(["mutants", "A9", "--only", "forward", "--json", str(path)]) == 2
    assert "schema 2" in capsys.readouterr().err
    assert path.read_text() == '{"schema": 1}'


def test_a_damaged_report_is_refused_with_the_place_of_the_damage(tmp_path, capsys):
    """Before anything is run."""
    path = tmp_path / "kills.json"
    content = json.loads((ROOT / "docs/kills.json").read_text(encoding="utf-8"))
    content["matrix"]["kills"]["A1"]["forward"] = "7"
    path.write_text(json.dumps(content))
    assert main(["mutants", "A9", "--only", "forward", "--json", str(path)]) == 2
    line = capsys.readouterr().err
    assert "$.matrix.kills.A1.forward is missing or not what" in line
    assert line.count("\n") == 1
