"""JUnit, Markdown and badges: what each says of every kind of verdict, whatever text it is given."""

import html
import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import sample_events as sample

from ringverify.reports.badge import COLOURS, badge, badges
from ringverify.reports.jsonl import ReportError, read_report
from ringverify.reports.junit import junit
from ringverify.reports.markdown import MOST, markdown
from ringverify.reports.page import page
from ringverify.reports.results import results_of
from ringverify.reports.terminal import counterexample_text

FOLDER = Path(__file__).parent.parent / "snapshots"
RESULTS = results_of(sample.typed(sample.everything()))


def assert_as_recorded(name, text):
    """The text is that of the file, or becomes it if that is asked for."""
    path = FOLDER / name
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "after a change that is meant: UPDATE_SNAPSHOTS=1"


# -- JUnit -------------------------------------------------------------------------------------------------------------


def parsed():
    """The suites by name, and the cases of all by class and name."""
    root = ElementTree.fromstring(junit(RESULTS).encode())
    return root, {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}


def test_junit_looks_as_recorded():
    """To the letter."""
    assert_as_recorded("report.xml", junit(RESULTS))


def test_a_suite_is_an_implementation_and_a_case_is_a_property():
    """And the counts are those of the elements, in every suite and in all."""
    root, cases = parsed()
    assert [suite.get("name") for suite in root] == [one.name for one in RESULTS.implementations]
    for element in (root, *root):
        inner = list(element.iter("testcase"))
        assert int(element.get("tests")) == len(inner)
        for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(element.get(count)) == sum(case.find(kind) is not None for case in inner)
    assert {key for key in cases if key[1] != "verdict"} == {
        (one.name, outcome.id) for one in RESULTS.implementations for outcome in one.outcomes.values()
    }


def test_what_becomes_of_each_verdict():
    """A violation fails, what is unsupported or known is skipped, what was not learned is an error."""
    _, cases = parsed()
    kinds = {
        ("my_package.ring.attend", "forward"): None,
        ("my_package.ring.attend", "lse"): "skipped",
        ("wrong_ring.attend", "forward"): "failure",
        ("wrong_ring.attend", "lse"): "error",
        ("wrong_ring.attend", "gradients"): "skipped",
        ("odd <b>name</b> & |pipe|", "determinism"): "failure",
        ("nothing applies", "verdict"): "error",
    }
    for key, kind in kinds.items():
        assert [child.tag for child in cases[key] if child.tag != "system-out"] == ([kind] if kind else []), key
    shown = cases["wrong_ring.attend", "forward"].find("failure")
    assert shown.get("message") == "out is wrong on rank 1: 4 of 8 elements"
    assert "replay  ringverify replay .ringverify/forward-0a1b2c3d.json" in shown.text
    assert "https://example.org/issues/12" in cases["wrong_ring.attend", "gradients"].find("skipped").get("message")


def test_what_xml_cannot_hold_is_told_all_the_same():
    """A null byte, an escape and half a surrogate pair would make the file unreadable."""
    failure = parsed()[1]["odd <b>name</b> & |pipe|", "forward"].find("failure")
    for text in (failure.get("message"), markdown(RESULTS), page(RESULTS)):
        assert r"\x00\x1b[31m \ud800" in text
    assert "]]> <b>bold</b>" in failure.text


# -- Markdown ----------------------------------------------------------------------------------------------------------


def test_markdown_looks_as_recorded():
    """To the letter."""
    assert_as_recorded("report.md", markdown(RESULTS))


def test_text_does_not_become_markup():
    """Names in tables are escaped; what ranks said is fenced by more backticks than it has."""
    text = markdown(RESULTS)
    assert r"odd \<b\>name\</b\> & \|pipe\|" in text
    assert "<script>" not in re.sub(r"(?ms)^(`{4,})\n.*?^\1$", "", text)
    assert all(line.count("|") - line.count(r"\|") in (5, 6) for line in text.splitlines() if line.startswith("|"))


def test_many_failures_are_counted_rather_than_told():
    """A job's summary has a limit."""
    text = markdown(results_of(sample.typed(sample.crowd(2))))
    assert text.count("<details>") == MOST + 1
    assert f"{2 * len(sample.PROPERTIES) - MOST} more failures" in text


# -- badges ------------------------------------------------------------------------------------------------------------


def test_a_badge_looks_as_recorded():
    """To the letter."""
    assert_as_recorded("badge.svg", badge(RESULTS.implementations[0]))


def test_each_implementation_has_a_badge_and_a_file_for_badge_services():
    """With its verdict in words and in colour."""
    files = badges(RESULTS)
    assert len(files) == 2 * len(RESULTS.implementations)
    said = {"conformant": "conformant, 2 properties", "inconclusive": "inconclusive"}
    for one, (svg, endpoint) in zip(RESULTS.implementations, zip(*[iter(files)] * 2, strict=True), strict=True):
        root = ElementTree.fromstring(files[svg])
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert texts[0] == "ringverify"
        assert texts[1] == said.get(one.verdict.verdict, texts[1])
        assert COLOURS[one.verdict.verdict] in files[svg]
        assert one.name in root.get("aria-label")
        assert json.loads(files[endpoint]).keys() == {"schemaVersion", "label", "message", "color"}
        assert json.loads(files[endpoint])["message"] == texts[1]
    assert "violations, 3 of 4" in files["wrong-ring-attend.svg"]


def test_names_that_differ_only_in_signs_have_badges_of_their_own():
    """Files are named for what is left of a name."""
    names = ("a.b", "a-b", "A b", "…")
    files = badges(results_of(sample.typed(sample.run({name: ("inconclusive", []) for name in names}))))
    assert [name for name in files if name.endswith(".svg")] == [
        "a-b.svg",
        "a-b-2.svg",
        "a-b-3.svg",
        "implementation.svg",
    ]


@pytest.mark.parametrize("colour", COLOURS.values())
def test_white_text_is_readable_on_a_badge(colour):
    """By the contrast that the accessibility guidelines ask of small text."""
    assert contrast((255, 255, 255), tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))) >= 4.5


def contrast(one, other):
    """Of two colours, as WCAG 2.2 defines it."""
    light = []
    for colour in (one, other):
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        light.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


# -- another declaration -----------------------------------------------------------------------------------------------


def test_the_declaration_that_would_pass_is_said_in_every_output(tmp_path):
    """In the words of the event, which follows the schema."""
    words = 'would pass with probabilities="input": declare it if that is what your kernel does (u = 2^-8)'
    fields = {"declaration": {"probabilities": "input"}, "declare": words}
    failure = sample.counterexample("one", "dtypes", **fields)
    events = sample.run({"one": ("violations", [sample.row("one", "dtypes", "fail"), failure])})
    results = results_of(sample.typed(events))
    for text in (junit(results), page(results), markdown(results)):
        assert words in html.unescape(text)
    assert f"declare {words}" in counterexample_text(*sample.typed([failure]))
    path = tmp_path / "report.jsonl"
    path.write_text(sample.sealed(events))
    assert read_report(path) == sample.typed(events)
    path.write_text(
        sample.sealed(json.loads(json.dumps(events).replace('"probabilities": "input"', '"probabilities": 1')))
    )
    with pytest.raises(ReportError, match=r"field declaration\.probabilities"):
        read_report(path)
