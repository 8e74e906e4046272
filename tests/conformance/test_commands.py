"""What commands have in common, and what only people see of them."""

import subprocess
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature

pytestmark = pytest.mark.timeout(120)

WRONG = (miniature("faulty_rings:wrong_scale"), "--only", "forward", "--max-examples", 2)


def test_the_folder_of_cases_tells_git_to_leave_it_out(ringverify):
    """When it is made; one that was named with --cases is its owner's, who may want to keep it."""
    subprocess.run(["git", "init", "--quiet"], check=True, timeout=30)
    assert ringverify("check", *WRONG).code == 1
    assert len(list(Path(".ringverify").glob("*.json"))) == 1
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(status, check=True, capture_output=True, text=True, timeout=30).stdout == ""
    assert ringverify("check", *WRONG, "--cases", "kept").code == 1
    assert [path.suffix for path in Path("kept").iterdir()] == [".json"]


def test_a_folder_of_cases_that_was_there_is_left_as_it_is(ringverify):
    """Somebody who deleted the file, or who keeps the folder in git, is not overruled."""
    Path(".ringverify").mkdir()
    assert ringverify("check", *WRONG).code == 1
    assert [path.suffix for path in Path(".ringverify").iterdir()] == [".json"]


def test_a_file_without_an_attribute_lists_what_it_holds(ringverify):
    """As it is to be typed, with exit code 2; what it says works."""
    file = miniature("right:")[:-1]
    outcome = ringverify("check", file)
    assert outcome.code == 2
    assert_one_line(outcome.err, ["right.py holds ", f" {file}:attend ", f" {file}:attend_with_lse"])
    named = outcome.err.split(" several of ")[1].split()
    assert ringverify("check", named[0], "--only", "forward", "--max-examples", 1).code == 0


def test_what_confirm_exits_by_stands_in_its_help(ringverify, capsys):
    """One rule for all violations."""
    with pytest.raises(SystemExit):
        ringverify("confirm", "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 every violation of the reports is shown by its script, 1 at least one is not" in said
    assert "3 the reports hold no violation." in said
