"""From reports and what their scripts show to the page of published packages."""

import json
from importlib.util import find_spec

import pytest

from ringverify.lab import publishing

pytestmark = pytest.mark.timeout(300)

FACTS = """
[[package]]
name = "ring-attention-pytorch"
version = "0.5.20"
source = "https://example.org"
adapter = "ring_attention_pytorch.py"
targets = ["peer:ring-attention-pytorch"]
about = "Its ring."

[[script]]
title = "A script"
file = "show.py"
text = "It says what it sees."
"""
FINDING = """
[[finding]]
title = "dk and dv are mixed up"
targets = ["peer:ring-attention-pytorch"]
properties = ["gradients"]
text = "On the way home."
"""


@pytest.mark.nightly
def test_a_survey_becomes_a_page(ringverify, capsys):
    """A package's violation is found, shown by its script, explained, and published with its case file."""
    pytest.importorskip("ring_attention_pytorch")
    published = ringverify.folder / publishing.FOLDER
    published.mkdir(parents=True)
    (ringverify.folder / publishing.FACTS).write_text(FACTS)
    (published / "show.py").write_text("print('seen')")
    survey = ringverify.folder / "survey"
    survey.mkdir()
    only = ("--only", "gradients", "--max-examples", 2, "--cases", "survey/cases")
    assert ringverify("check", "peer:ring-attention-pytorch", *only, "--report", survey / "one.jsonl").code == 1
    assert ringverify("confirm", survey / "one.jsonl", "--json", survey / "confirmed.json").code == 0
    capsys.readouterr()
    assert publishing.main(["survey"]) == 1
    assert (
        "cannot publish: peer:ring-attention-pytorch violates gradients; 0 findings in packages.toml explain it"
        in capsys.readouterr().out
    )
    assert not (ringverify.folder / publishing.PAGE).exists()
    (ringverify.folder / publishing.FACTS).write_text(FACTS + FINDING)
    assert publishing.main([]) == 0
    assert "1 targets, 1 violations shown by their scripts, 0 withheld" in capsys.readouterr().out
    text = (ringverify.folder / publishing.PAGE).read_text()
    assert "dk and dv are mixed up" in text
    assert "\nseen\n" in text
    (case,) = (ringverify.folder / publishing.CASES).iterdir()
    assert f"published/cases/{case.name}" in text
    assert ringverify("replay", case).code == 1
    wrong = FACTS.replace("0.5.20", "0.5.19")
    (ringverify.folder / publishing.FACTS).write_text(wrong)
    assert publishing.main(["survey"]) == 2
    assert "runs ring-attention-pytorch 0.5.20" in capsys.readouterr().err


def test_a_folder_without_reports_is_one_line(ringverify, capsys):
    """Nothing is written."""
    (ringverify.folder / publishing.FOLDER).mkdir(parents=True)
    (ringverify.folder / publishing.FACTS).write_text(FACTS)
    (ringverify.folder / "empty").mkdir()
    assert publishing.main(["empty"]) == 2
    assert capsys.readouterr().err == "publishing: empty holds no reports\n"
    assert not (ringverify.folder / publishing.VERDICTS).exists()
    (ringverify.folder / publishing.VERDICTS).write_text(json.dumps({"schema": 7}))
    assert publishing.main([]) == 2
    assert "does not hold verdicts of schema 1" in capsys.readouterr().err


def test_a_survey_without_violations_needs_no_confirmation(ringverify, capsys):
    """`ringverify confirm` writes nothing then; here of a merge, with which the page has the command that shows it."""
    if find_spec("ring_flash_attn") is None:  # the adapter brings what importing it needs
        pytest.skip("ring-flash-attn is not installed")
    (ringverify.folder / publishing.FOLDER).mkdir(parents=True)
    package = FACTS.partition("[[script]]")[0].replace("ring_attention_pytorch.py", "ring_flash_attn.py")
    package = package.replace("peer:ring-attention-pytorch", "merge:ring-flash-attn").replace("0.5.20", "0.1.8")
    (ringverify.folder / publishing.FACTS).write_text(package)
    report = ringverify.folder / "survey" / "merges.jsonl"
    report.parent.mkdir()
    assert ringverify("check", "merge:ring-flash-attn", "--only", "far_apart", "--report", report).code == 0
    capsys.readouterr()
    assert publishing.main(["survey"]) == 0
    assert "1 targets, 0 violations shown by their scripts, 0 withheld" in capsys.readouterr().out
    assert "`ringverify check merge:ring-flash-attn`" in (ringverify.folder / publishing.PAGE).read_text()
