"""Reports and case files that are refused, cut off, damaged or edited: nothing is lost or taken for what it is not."""

import functools
import json
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature

from ringverify.check import casefile, run
from ringverify.cli.main import main
from ringverify.errors import UsageError
from ringverify.reports.jsonl import ReportError, read_report

pytestmark = pytest.mark.timeout(60)

USAGE, INCONCLUSIVE, INTERRUPTED = 2, 3, 130


# -- reports of runs that were refused or cut off ----------------------------------------------------------------------


def test_a_refused_run_leaves_an_older_report_as_it_was(ringverify):
    """Refused after the report's path was looked at, before anything was said."""
    report = Path("report.jsonl")
    assert ringverify("check", "ring", "--only", "forward", "--max-examples", 1, "--report", report).code == 0
    before = report.read_bytes()
    target = miniature("right:attend_in_processes")
    assert ringverify("check", target, "--world", "simulated", "--report", report).code == USAGE
    assert report.read_bytes() == before
    assert not Path("report.jsonl.partial").exists()


def test_a_refused_run_leaves_the_remains_of_an_earlier_one(ringverify):
    """What a cut-off run had found out is not lost to a typing mistake."""
    Path("report.jsonl.partial").write_text("what was known\n")
    target = miniature("right:attend_in_processes")
    assert ringverify("check", target, "--world", "simulated", "--report", "report.jsonl").code == USAGE
    assert Path("report.jsonl.partial").read_text() == "what was known\n"


def test_a_run_that_is_cut_off_keeps_what_it_knew_apart(ringverify, monkeypatch):
    """The older report stays, and what was known is in a partial file that no reader takes for a report."""
    arguments = ("check", "ring", "--only", "forward,lse", "--max-examples", 1, "--report", "report.jsonl")
    assert ringverify(*arguments).code == 0
    before = Path("report.jsonl").read_bytes()
    hunt = run.hunt

    def cut(property, *rest, **options):
        if property.id == "lse":
            raise KeyboardInterrupt
        return hunt(property, *rest, **options)

    monkeypatch.setattr(run, "hunt", cut)
    outcome = ringverify(*arguments)
    assert outcome.code == INTERRUPTED
    assert outcome.err.splitlines()[-1].startswith("ringverify: ")
    assert Path("report.jsonl").read_bytes() == before
    with pytest.raises(ReportError, match="incomplete: it has no footer"):
        read_report(Path("report.jsonl.partial"))
    kept = [json.loads(line)["event"] for line in Path("report.jsonl.partial").read_text().splitlines()]
    assert kept == ["header", "property"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a report"),
        ('{"event":"property"}\n', "does not begin with a header"),
        ('{"event":"header","schema":1}\n', "no footer"),
        ('{"event":"header","schema":1}\n{"event":"foo', "cut off or damaged at line 2"),
        ('{"event":"header","schema":2}\n{"event":"footer"}\n', "schema 2, this reads 1: upgrade"),
        ("[1, 2]\n", "line 1: not an event"),
    ],
)
def test_what_is_not_a_whole_report_is_refused_as_such(text, words, tmp_path):
    """In one line that names the file."""
    path = tmp_path / "report.jsonl"
    path.write_text(text)
    with pytest.raises(ReportError, match=words) as refusal:
        read_report(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


# -- case files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The text of a case file, as `check` writes it."""
    folder = tmp_path_factory.mktemp("cases")
    target = miniature("faulty_rings:wrong_scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["check", target, "--only", "forward", "--max-examples", "5"]) == 1
    (path,) = (folder / ".ringverify").glob("*.json")
    return path.read_text()


def cut_short(text):
    """The first half."""
    return text[: len(text) // 2]


def with_another_seed(text):
    """The seed of the inputs, changed by hand."""
    content = json.loads(text)
    content["case"]["seed"] += 1
    return json.dumps(content)


def from_the_future(text):
    """A schema that there is not yet."""
    return json.dumps({"schema": 2, "something": "new"})


def from_the_past(text):
    """A schema that was never written."""
    return json.dumps({"schema": 0, "something": "old"})


BAD_CASES = {
    "truncated": (cut_short, ["truncated or not JSON", "run check again"]),
    "edited": (with_another_seed, ["was edited", "--edited"]),
    "newer": (from_the_future, ["schema 2", "reads schema 1", "upgrade ringverify"]),
    "older": (from_the_past, ["schema 0", "reads schema 1", "the version that wrote it"]),
    "not JSON": (lambda text: "dear diary", ["not JSON", "get the whole file"]),
    "other JSON": (lambda text: "[1, 2, 3]", ["not a case file"]),
    "not text": (lambda text: b"\xff\xfe\x00", ["not UTF-8 text"]),
    "empty": (lambda text: "", ["truncated or not JSON"]),
}


@pytest.mark.parametrize("damage", BAD_CASES)
def test_a_damaged_case_file_is_refused_in_one_line(damage, ringverify, recorded):
    """Exit code 2, the file's name, and the way out."""
    spoil, words = BAD_CASES[damage]
    spoiled = spoil(recorded)
    Path("case.json").write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    outcome = ringverify("replay", "case.json")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["case.json", *words])
    assert outcome.out == ""


def test_an_edited_case_file_runs_when_that_is_asked_for(ringverify, recorded):
    """The edit decides what runs: other inputs, other bits."""
    Path("case.json").write_text(with_another_seed(recorded))
    outcome = ringverify("replay", "case.json", "--edited", "--trust")
    assert outcome.code == 1
    assert "other bits than recorded" in outcome.out


def test_an_edited_case_that_its_target_does_not_declare_is_refused(ringverify, recorded):
    """Not a violation: nobody claimed that it works."""
    content = json.loads(recorded)
    content["case"]["sharding"] = "zigzag"
    Path("case.json").write_text(json.dumps(content))
    outcome = ringverify("replay", "case.json", "--edited", "--trust")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["case.json", "sharding zigzag is not declared"])


def test_a_case_for_a_device_that_is_not_here_is_inconclusive(ringverify, recorded, monkeypatch):
    """The recorded failure may be there or not; this machine cannot tell."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    content = json.loads(recorded) | {"device": "cuda"}
    Path("case.json").write_text(json.dumps(content))
    outcome = ringverify("replay", "case.json", "--edited")
    assert outcome.code == INCONCLUSIVE
    assert_one_line(outcome.err, ["no cuda device"])


def test_a_case_of_an_unknown_world_or_property_is_refused(ringverify, recorded):
    """Names that this version does not know."""
    for field, words in (("world", "unknown world 'moon'"), ("property", "unknown property 'moon'")):
        Path("case.json").write_text(json.dumps(json.loads(recorded) | {field: "moon"}))
        outcome = ringverify("replay", "case.json", "--edited")
        assert outcome.code == USAGE
        assert_one_line(outcome.err, [words])


ODD = (None, True, -1, 0, 10**40, 0.5, float("nan"), float("inf"), "", "odd", [], [[]], {}, {"a": None})


def test_no_edit_of_a_case_file_gets_past_its_reading(recorded, tmp_path):
    """Every field of the file, replaced by every odd value or left out: read, or refused in one line."""
    path = tmp_path / "case.json"
    content = json.loads(recorded)
    refused = 0
    places = [(name,) for name in content] + [("case", name) for name in content["case"]]
    places += [("case", "problem", name) for name in content["case"]["problem"]]
    for place in places:
        for odd in (*ODD, "left out"):
            edited = json.loads(recorded)
            inner = functools.reduce(dict.__getitem__, place[:-1], edited)
            if odd == "left out":
                del inner[place[-1]]
            else:
                inner[place[-1]] = odd
            path.write_text(json.dumps(edited))
            refused += refusal_of(path) is not None
    assert refused > len(places)


def refusal_of(path):
    """The line with which an edited case file is refused, if it is."""
    try:
        casefile.read(path, edited=True)
    except UsageError as error:
        line = str(error)
        assert "\n" not in line, line
        return line
    return None
