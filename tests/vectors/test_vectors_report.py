"""What came of each vector, for machines: the report of `check`, and JUnit, with a vector in a property's place."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from report_lines import VALIDATOR, report_lines

from ringverify.cli.main import main
from ringverify.vectors import running
from ringverify.worlds.world import WorldUnavailable

ROOT = Path(__file__).resolve().parents[2]
WRONG = f"{ROOT / 'docs' / 'examples' / 'wrong_ring.py'}:attend"
FILES = ("--report", "vectors.jsonl", "--junit", "vectors.xml")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def events() -> list[dict]:
    """Those of the report, each line as the schema has it."""
    for line in Path("vectors.jsonl").read_text(encoding="utf-8").splitlines():
        VALIDATOR.validate(json.loads(line))
    return report_lines(Path("vectors.jsonl"))


def told(kind: str) -> list[dict]:
    """Events of a kind."""
    return [event for event in events() if event["event"] == kind]


def cases() -> dict[tuple[str, str], str]:
    """How each test of the JUnit file ended, by suite and name."""
    root = ET.parse("vectors.xml").getroot()
    return {
        (str(suite.get("name")), str(case.get("name"))): next(
            (ended.tag for ended in case if ended.tag in ("failure", "error", "skipped")), "passed"
        )
        for suite in root.iter("testsuite")
        for case in suite.iter("testcase")
    }


def test_an_implementation_has_a_test_a_vector(fixtures, capsys) -> None:
    """Passed, failed with what the terminal says, or skipped with what is not declared; the exit code is as without."""
    assert main(["vectors", "check", str(fixtures), "--target", WRONG, "--only", "V001,V013,V037", *FILES]) == 1
    verdicts = {event["property"]: event for event in told("property")}
    assert {id: event["verdict"] for id, event in verdicts.items()} == {
        "V001": "pass",
        "V013": "fail",
        "V037": "unsupported",
    }
    assert verdicts["V037"]["reason"] == "not declared: window"
    assert verdicts["V001"]["examples"] > 1
    assert verdicts["V001"]["margin"] <= 1 < verdicts["V013"]["margin"]
    (wrong,) = told("counterexample")
    shown = capsys.readouterr().out
    assert wrong["property"] == "V013"
    for part in ("summary", "case_text", "replay"):
        assert wrong[part] in shown
    assert wrong["case"]["world_size"] == 3
    assert events()[0]["suite"] == "vectors"
    assert (events()[-1]["verdict"], events()[-1]["exit_code"]) == ("violations", 1)
    assert told("implementation")[0]["properties"] == {"pass": 1, "fail": 1, "unsupported": 1, "inconclusive": 0}
    assert cases() == {
        ("wrong_ring.attend", "V001"): "passed",
        ("wrong_ring.attend", "V013"): "failure",
        ("wrong_ring.attend", "V037"): "skipped",
    }
    assert wrong["replay"] in Path("vectors.xml").read_text(encoding="utf-8")
    assert main(["report", "vectors.jsonl", "--html", "page.html", "--markdown", "page.md"]) == 0
    assert main(["confirm", "vectors.jsonl"]) == 1
    assert (
        "V013: this violation has no case file, so no script can be made; to see it again: ringverify vectors"
        in capsys.readouterr().out
    )


@pytest.mark.nightly
def test_more_failures_are_told_than_are_shown(fixtures, capsys, monkeypatch) -> None:
    """The terminal has the first few whole, a machine all of them."""
    monkeypatch.setattr(running, "SHOWN", 2)
    target = f"{ROOT / 'tests' / 'miniatures' / 'faulty_rings.py'}:wrong_scale"
    ids = "V001,V002,V004,V006,V008,V010,V012,V013"
    assert main(["vectors", "check", str(fixtures), "--target", target, "--only", ids, *FILES]) == 1
    failed = [event["property"] for event in told("property") if event["verdict"] == "fail"]
    assert [event["property"] for event in told("counterexample")] == failed
    assert len(failed) > 2 == capsys.readouterr().out.count("  case    V")


def test_a_world_that_ends_leaves_vectors_inconclusive(fixtures, monkeypatch) -> None:
    """Those that were tried before keep their verdict."""

    def tried(one, tensors, runner):
        if one.story.id == "V002":
            raise WorldUnavailable("no process can be started")
        return original(one, tensors, runner)

    original = running.tried
    monkeypatch.setattr(running, "tried", tried)
    assert main(["vectors", "check", str(fixtures), "--target", "ring", "--only", "V001,V002", *FILES]) == 3
    assert [(event["verdict"], event.get("reason")) for event in told("property")] == [
        ("pass", None),
        ("inconclusive", "no process can be started"),
    ]
    assert cases() == {("ring", "V001"): "passed", ("ring", "V002"): "error"}


def test_the_vectors_themselves_have_a_test_each(fixtures) -> None:
    """Whole, and what the oracle gives."""
    assert main(["vectors", "check", str(fixtures), "--only", "V001,V013", *FILES, "--markdown", "vectors.md"]) == 0
    suite = f"vectors in {fixtures}"
    assert cases() == {(suite, "V001"): "passed", (suite, "V013"): "passed"}
    assert (events()[-1]["verdict"], events()[-1]["exit_code"]) == ("conformant", 0)
    assert "vectors in" in Path("vectors.md").read_text(encoding="utf-8")


def test_after_a_damaged_vector_the_others_are_looked_into(fixtures, here, capsys) -> None:
    """The exit code and the line are those of the first one; every one that is wrong is in the files."""
    folder = shutil.copytree(fixtures, here / "vectors")
    for id in ("V002", "V013"):
        (folder / f"{id}.safetensors").write_bytes(b"")
    assert main(["vectors", "check", "vectors", "--only", "V001,V002,V013,V016", *FILES]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ringverify: vectors/V002.safetensors is truncated: 0 of ")
    assert captured.err.count("\n") == 1
    assert [ended for _, ended in sorted(cases().items())] == ["passed", "failure", "failure", "passed"]
    assert [event["summary"].split(" is ")[0] for event in told("counterexample")] == [
        "vectors/V002.safetensors",
        "vectors/V013.safetensors",
    ]
    assert (events()[-1]["verdict"], events()[-1]["exit_code"]) == ("violations", 2)


@pytest.mark.parametrize("target", [(), ("--target", "ring")])
@pytest.mark.parametrize("option", ["--report", "--junit", "--markdown"])
def test_a_file_that_cannot_be_written_is_told_before_any_work(option, target, fixtures, capsys, monkeypatch) -> None:
    """Nothing is looked into."""
    monkeypatch.setattr("ringverify.vectors.checking.load", lambda *arguments: pytest.fail("work was done"))
    assert main(["vectors", "check", str(fixtures), *target, option, "no/file"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no/file" in captured.err
    assert captured.err.count("\n") == 1
