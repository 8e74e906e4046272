"""What commands have in common, and what only people see of them."""

import argparse
import json
import re
import subprocess
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature

from ringverify.check.configuration import WRITTEN, configured
from ringverify.cli import check as command
from ringverify.cli.main import _Parser, _parser

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("unexplained")]

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
    subprocess.run(["git", "init", "--quiet"], check=True, timeout=30)
    Path(".ringverify").mkdir()
    assert ringverify("check", *WRONG).code == 1
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    seen = subprocess.run(status, check=True, capture_output=True, text=True, timeout=30).stdout.split()
    assert [Path(name).suffix for name in seen] == ["", ".json"], "one case, and not the key that signs it"


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


# -- one name, one meaning ---------------------------------------------------------------------------------------------


def test_an_option_of_one_name_takes_the_same_kind_of_file_in_every_command():
    """`--report` is a report of events, `--html` a page; JSON of another kind is `--json`, a folder `--site`."""
    metavars = {}
    for parser in parsers(_parser()):
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                for option in action.option_strings:
                    metavars.setdefault(option, set()).add(action.metavar)
    assert {
        option: metavars[option] for option in ("--report", "--html", "--json", "--site", "--junit", "--markdown")
    } == {
        "--report": {"FILE.jsonl"},
        "--html": {"FILE.html"},
        "--json": {"FILE.json"},
        "--site": {"DIR"},
        "--junit": {"FILE.xml"},
        "--markdown": {"FILE.md"},
    }


def parsers(parser):
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@pytest.mark.parametrize(
    "arguments", [("mutants", "--table", "t.md"), ("confirm", "none.jsonl"), ("bench", "--saved", "no.json")]
)
def test_the_old_name_of_an_option_still_works_and_names_the_new_one(arguments, ringverify):
    """What they say besides is about other mistakes."""
    outcome = ringverify(*arguments, "--report", "found.json")
    assert outcome.code == 2
    first, second = outcome.err.splitlines()
    assert first == "ringverify: --report was renamed to --json in this command: use --json"
    assert "--report found.json" not in second


def test_a_folder_given_as_a_page_is_taken_for_a_site_with_a_word(ringverify):
    """As `report --html DIR` was."""
    assert ringverify("check", miniature("right:attend"), "--only", "lse", "--report", "a.jsonl").code == 3
    outcome = ringverify("report", "a.jsonl", "--html", "site")
    assert outcome.code == 0
    assert_one_line(outcome.err, ["--html site does not name a file FILE.html", "--site site"])
    assert Path("site/index.html").is_file()


# -- quiet -------------------------------------------------------------------------------------------------------------


def test_quiet_prints_what_did_not_pass_and_the_verdicts(ringverify):
    """Of a conformant implementation one line."""
    right = (miniature("right:attend"), "--only", "forward,lse", "--max-examples", 2, "-q")
    told = (
        "right: conformant in the simulated world: 1 pass, 1 unsupported; not run on gloo; "
        "N declared features not tried\n"
    )
    assert re.sub(r"\d+ declared", "N declared", ringverify("check", *right).out) == told
    outcome = ringverify("check", WRONG[0], "--only", "forward,inputs_untouched", "--max-examples", 2, "--quiet")
    lines = outcome.out.strip().splitlines()
    assert lines[0] == "wrong scale"
    assert lines[1].startswith("  fail         forward")
    assert "replay  ringverify replay " in outcome.out
    assert lines[-1] == "wrong scale: violations: 1 pass, 1 fail"
    assert "inputs_untouched" not in outcome.out


def test_quiet_and_verbose_exclude_each_other(ringverify):
    """One line."""
    outcome = ringverify("check", "ring", "-q", "-v")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["-v/--verbose", "-q/--quiet", "ringverify check --help"])


# -- [tool.ringverify] -------------------------------------------------------------------------------------------------


def written(text, folder="."):
    """A pyproject.toml with such a table."""
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "pyproject.toml").write_text(f"[project]\nname = 'theirs'\n\n{text}")


TABLE = """
[tool.ringverify]
targets = ["attend.py:attend"]
only = ["forward", "inputs_untouched"]
max-examples = 2
world-sizes = [1, 2]
time-budget = 60.5
cases = "found"
quiet = true
"""


def test_a_project_says_in_pyproject_how_it_is_checked(ringverify, monkeypatch):
    """From any folder below; paths are those of the file."""
    Path("attend.py").write_text(Path(miniature("right:").removesuffix(":")).read_text())
    written(TABLE)
    told = ringverify("check").out
    assert told.startswith("right: conformant in the simulated world: 2 pass; not run on gloo; ")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert ringverify("check").out == told


def test_the_command_line_wins(ringverify):
    """Option by option, also where it says what would be done anyway; a target for all targets."""
    written(TABLE + 'suite = "full"\nworld = "gloo"\n')
    parser = _Parser()
    command.add_options(parser)
    typed = ["ring", "--suite", "quick", "--only", "lse", "-v", "--cases", ".ringverify"]
    options = configured(parser.parse_args(typed), Path.cwd())
    assert (options.targets, options.suite, options.only, options.cases) == (
        ["ring"],
        "quick",
        ("lse",),
        Path(".ringverify"),
    )
    assert (options.verbose, options.quiet) == (True, False)
    assert (options.world, options.world_sizes, options.max_examples, options.time_budget) == ("gloo", (1, 2), 2, 60.5)


def test_every_option_of_check_may_be_written_and_nothing_else(ringverify):
    """The keys are the command's own options: a new one is a key without a second list."""
    parser = _Parser()
    command.add_options(parser)
    values = {int: 3, list: ["forward"], str: "simulated", float: 2.5}
    lines = []
    for action in parser._actions:
        name = action.option_strings[-1].removeprefix("--") if action.option_strings else action.dest
        if name in ("help", "quiet"):
            continue
        kind = WRITTEN.get(action.type, ((str,), ""))[0][-1]
        value = True if action.nargs == 0 else ["x.py:a"] if not action.option_strings else values[kind]
        value = {"world-sizes": [2], "suite": "smoke", "jobs": 2}.get(name, value)
        lines.append(f"{name} = {json.dumps(value)}")
    written("[tool.ringverify]\n" + "\n".join(lines))
    options = configured(parser.parse_args([]), Path.cwd())
    assert all(getattr(options, action.dest) for action in parser._actions if action.dest not in ("help", "quiet"))


WRONG_TABLES = {
    "unknown key": ("suit = 'full'", ["[tool.ringverify]: suit", "did you mean 'suite'?"]),
    "key with underscores": ("max_examples = 3", ["max_examples", "did you mean 'max-examples'?"]),
    "a key like none": ("zzz = 3", ["zzz", "known: ", "max-examples"]),
    "number as text": ("max-examples = '3'", ["max-examples is '3'", "expected a whole number"]),
    "flag for a number": ("seed = true", ["seed is True", "expected a whole number"]),
    "number too small": ("max-examples = 0", ["max-examples is '0'", "at least 1"]),
    "text for a list": ("only = 'forward'", ["only is 'forward'", "expected a list of texts"]),
    "list of other things": ("world-sizes = ['2']", ["world-sizes is ['2']", "expected a list of whole numbers"]),
    "unknown word": ("suite = 'slow'", ["suite is 'slow'", "smoke, quick, full, nightly"]),
    "text for a flag": ("exitfirst = 'yes'", ["exitfirst is 'yes'", "true or false"]),
    "both of two": ("quiet = true\nverbose = true", ["verbose and quiet", "leave one out"]),
    "unknown property": ("only = ['forwad']", ["'forwad'", "did you mean 'forward'?"]),
}


@pytest.mark.parametrize("mistake", WRONG_TABLES)
def test_a_mistake_in_the_table_is_one_line_and_exit_code_2(mistake, ringverify):
    """With the file, the key, the value and what was expected."""
    text, words = WRONG_TABLES[mistake]
    written(f"[tool.ringverify]\n{text}\n")
    outcome = ringverify("check", "ring")
    assert outcome.code == 2
    assert_one_line(outcome.err, words if mistake == "unknown property" else ["pyproject.toml", *words])
    assert outcome.out == ""


def test_a_file_without_the_table_is_passed_over_and_one_that_is_no_toml_is_not(ringverify, monkeypatch):
    """The table may be in a folder above; other commands do not look."""
    written("[tool.ringverify]\nsuit = 'full'\n")
    written("", "below")
    monkeypatch.chdir("below")
    assert "did you mean 'suite'?" in ringverify("check", "ring").err
    assert ringverify("list", "implementations").code == 0
    Path("pyproject.toml").write_text("[tool")
    outcome = ringverify("check", "ring")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["pyproject.toml cannot be read as TOML"])
