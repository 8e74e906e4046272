"""`ringverify report`, and the outputs of `check`: files whole or not at all, and one line for what cannot be done."""

import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sample_events as sample

from ringverify.cli.main import main
from ringverify.reports.jsonl import ReportWriter

pytestmark = pytest.mark.timeout(60)
USAGE = 2


def put(name, events):
    """A report in the current folder."""
    with ReportWriter(Path(name)) as writer:
        for event in sample.typed(events):
            writer.write(event)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with two reports, a file that is none, and a folder."""
    monkeypatch.chdir(tmp_path)
    put("a.jsonl", sample.everything())
    put("b.jsonl", sample.run({"another": ("conformant", [sample.row("another", "forward", "pass")])}, device="cuda"))
    Path("file").write_text("a file\n")
    Path("folder").mkdir()
    return tmp_path


def tree():
    """Every file below the current folder, and what is in it."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_a_site_is_a_page_and_badges(capsys):
    """Of all reports together, in a folder that is made; each file is named with its size."""
    assert main(["report", "a.jsonl", "b.jsonl", "--site", "site/"]) == 0
    text = Path("site/index.html").read_text(encoding="utf-8")
    assert all(f'id="i{number}"' in text for number in range(5))
    badges = sorted(path.name for path in Path("site/badges").iterdir())
    assert len(badges) == 10
    assert "another.svg" in badges
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 11
    assert printed[-1].startswith("site/index.html  ")
    assert not list(Path().rglob("*.partial"))


def test_all_outputs_at_once():
    """One page, JUnit, Markdown, and badges elsewhere."""
    outputs = ["--html", "p.html", "--junit", "j.xml", "--markdown", "m.md", "--badges", "badges"]
    assert main(["report", "a.jsonl", *outputs]) == 0
    assert ElementTree.parse("j.xml").getroot().tag == "testsuites"
    assert Path("m.md").read_text(encoding="utf-8").startswith("### RingVerify: violations")
    assert Path("p.html").is_file()
    assert len(list(Path("badges").iterdir())) == 8


def test_what_was_there_is_replaced_and_what_is_not_ours_stays():
    """A site is written over; other files in its folder are left alone."""
    Path("site").mkdir()
    Path("site/CNAME").write_text("example.org\n")
    for report in ("a.jsonl", "b.jsonl"):
        assert main(["report", report, "--site", "site"]) == 0
    assert "another" in Path("site/index.html").read_text(encoding="utf-8")
    assert Path("site/CNAME").read_text() == "example.org\n"


def test_the_verdicts_do_not_decide_the_exit_code():
    """They were given when check ran; this wrote what it was asked for."""
    assert main(["report", "a.jsonl", "--markdown", "m.md"]) == 0


def changed(field, value):
    """Writes a report whose header has another value."""
    lines = [json.loads(line) for line in Path("b.jsonl").read_text().splitlines()]
    del lines[-1]["seal"]
    lines[0][field] = value
    Path("c.jsonl").write_text(sample.sealed(lines))


BAD = {
    "no output": (["a.jsonl"], ["nothing to write", "--html"]),
    "no report": ([], ["FILE.jsonl", "--help"]),
    "report that is not there": (["c.jsonl", "--site", "site"], ["c.jsonl", "name a file that check --report wrote"]),
    "report that is a folder": (["folder", "--site", "site"], ["folder", "name a file"]),
    "report that is none": (["file", "--site", "site"], ["file", "damaged at line 1"]),
    "report named twice": (["a.jsonl", "./a.jsonl", "--site", "site"], ["a.jsonl is named twice"]),
    "label without a file": (["gpu=", "--site", "site"], ["'gpu='", "LABEL=FILE"]),
    "one name twice": (
        ["a.jsonl", "same.jsonl", "--site", "site"],
        ["a.jsonl", "same.jsonl", "'my_package.ring.attend'", "label", "new=same.jsonl"],
    ),
    "page in no folder": (["a.jsonl", "--html", "x/p.html"], ["--html x/p.html", "no folder x", "make it first"]),
    "site in no folder": (["a.jsonl", "--site", "x/site"], ["--site x/site", "no folder x", "make it first"]),
    "site that is a file": (["a.jsonl", "--site", "file"], ["--site file is a file", "name a folder"]),
    "site in a file": (["a.jsonl", "--site", "file/site"], ["--site file/site", "no folder file"]),
    "junit that is a folder": (["a.jsonl", "--junit", "folder"], ["--junit folder is a folder", "name a file"]),
    "junit in no folder": (["a.jsonl", "--junit", "x/j.xml"], ["--junit x/j.xml", "no folder x"]),
    "badges that are a file": (["a.jsonl", "--badges", "file"], ["--badges file is a file", "name a folder"]),
    "badges where a page is": (["a.jsonl", "--site", "site", "--badges", "site"], ["--badges site", "named by --site"]),
    "an output where the page is": (
        ["a.jsonl", "--site", "folder", "--junit", "folder/index.html"],
        ["--junit folder/index.html is named by --site too"],
    ),
    "two outputs of one name": (
        ["a.jsonl", "--junit", "x", "--markdown", "./x"],
        ["--markdown x is named by --junit too", "name another"],
    ),
    "an output that is read": (["a.jsonl", "--junit", "a.jsonl"], ["--junit a.jsonl is a report that is read"]),
    "another schema": (["a.jsonl", "c.jsonl", "--site", "site"], ["c.jsonl", "schema 2", "this reads 1", "upgrade"]),
    "incomplete": (["b.jsonl", "short.jsonl", "--site", "site"], ["short.jsonl", "incomplete", "no footer"]),
    "cut off": (["b.jsonl", "cut.jsonl", "--site", "site"], ["cut.jsonl", "cut off or damaged at line"]),
    "edited": (["edited.jsonl", "--site", "site"], ["edited.jsonl", "was edited"]),
}


@pytest.mark.parametrize("mistake", BAD)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(mistake, capsys):
    """The line names the value and the way out, and nothing is written."""
    text = Path("a.jsonl").read_text(encoding="utf-8")
    shutil.copy("a.jsonl", "same.jsonl")
    Path("short.jsonl").write_text("".join(text.splitlines(keepends=True)[:-1]), encoding="utf-8")
    Path("cut.jsonl").write_text(text[:-40], encoding="utf-8")
    Path("edited.jsonl").write_text(text.replace('"pass"', '"fail"', 1), encoding="utf-8")
    if mistake == "another schema":
        changed("schema", 2)
    before = tree()
    arguments, words = BAD[mistake]
    assert main(["report", *arguments]) == USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ringverify: ")
    assert printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err
    assert tree() == before
    assert not Path("site").exists()


def test_a_disk_that_is_full_leaves_what_was_there(monkeypatch, capsys):
    """A file is seen whole or not at all, and the page is not replaced when its badges could not be."""
    assert main(["report", "b.jsonl", "--site", "site"]) == 0
    before = tree()

    def full(source, target):
        raise OSError(28, "No space left on device")

    capsys.readouterr()
    monkeypatch.setattr(os, "replace", full)
    assert main(["report", "b.jsonl", "--site", "site"]) == USAGE
    assert "No space left on device; name another place" in capsys.readouterr().err
    assert tree() == before


# -- the outputs of check ----------------------------------------------------------------------------------------------

CHECK = ["check", "ring", "--only", "forward,lse", "--max-examples", "2"]


def test_check_writes_what_report_makes_of_its_events():
    """To the letter: the events are the one source."""
    outputs = ["--html", "p.html", "--junit", "j.xml", "--markdown", "m.md"]
    assert main([*CHECK, "--report", "r.jsonl", *outputs]) == 0
    again = ["--html", "p2.html", "--junit", "j2.xml", "--markdown", "m2.md"]
    assert main(["report", "r.jsonl", *again]) == 0
    for name in ("p.html", "j.xml", "m.md"):
        other = Path(name).with_stem(Path(name).stem + "2")
        assert Path(name).read_bytes() == other.read_bytes()
        assert "ring" in Path(name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (["--html", "x/p.html"], ["--html x/p.html", "no folder x"]),
        (["--junit", "folder"], ["--junit folder is a folder"]),
        (["--markdown", "r.jsonl", "--report", "r.jsonl"], ["--markdown r.jsonl is named by --report too"]),
    ],
)
def test_an_output_of_check_that_cannot_be_written_is_refused_before_any_work(outputs, words, capsys):
    """Found out at the end, it would cost the run."""
    before = tree()
    assert main([*CHECK, *outputs]) == USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err
    assert tree() == before


def test_a_check_that_is_refused_writes_nothing(capsys):
    """Not even an empty page."""
    before = tree()
    assert main([*CHECK, "--device", "abacus", "--html", "p.html", "--junit", "j.xml"]) == USAGE
    assert tree() == before
