"""A fault that several properties see is one story in every output, with what to replay for each."""

import io
from xml.etree import ElementTree

import pytest
import sample_events as sample
from report_lines import report_lines
from rich.console import Console

from ringverify.reports.jsonl import ReportWriter
from ringverify.reports.junit import junit
from ringverify.reports.markdown import markdown
from ringverify.reports.page import page
from ringverify.reports.results import results_of
from ringverify.reports.terminal import Terminal

NAME = "wrong_ring.attend"
HINT = {"property": "hazards", "text": "rank 1 read a buffer before its receive completed"}
FIRST = sample.counterexample(
    NAME, "forward", diagnosis=None, hints=[HINT],
    needs={"requires": ["at least 2 ranks"], "irrelevant": [], "complete": True},
    printed=[{"rank": 0, "text": "hop 1\n"}], first_margin=3.0, same_as=None,
)  # fmt: skip
AGAIN = FIRST | {"property": "gradients", "same_as": "forward", "file": "a folder/again.json"}
TOLD = sample.run(
    {
        NAME: (
            "violations",
            [sample.row(NAME, "forward", "fail"), FIRST, sample.row(NAME, "gradients", "fail"), AGAIN],
        )
    }
)
EVENTS = sample.typed(TOLD)


def test_markdown_gives_a_repeated_failure_one_line():
    """Its property, whose failure it is once more, and the line to paste."""
    text = markdown(results_of(EVENTS))
    (line,) = [line for line in text.splitlines() if "gradients: the same as forward" in line]
    assert "<code>ringverify replay 'a folder/again.json'</code>" in line
    assert text.count(f"beside  hazards: {HINT['text']}") == 1


@pytest.mark.parametrize(("first", "told"), [(None, True), ("another cause", False)])
def test_a_cause_that_only_the_repeated_failure_has_is_told(first, told):
    """On the terminal and in Markdown: where the first one has a cause, that stands for both."""
    events = sample.typed(
        sample.run(
            {
                NAME: (
                    "violations",
                    [
                        *(sample.row(NAME, "forward", "fail"), FIRST | {"diagnosis": first}),
                        *(sample.row(NAME, "gradients", "fail"), AGAIN | {"diagnosis": "a <tile> is skipped"}),
                    ],
                )
            }
        )
    )
    terminal = Terminal(Console(file=io.StringIO(), width=200))
    for event in events:
        terminal.tell(event)
    assert ("cause   a <tile> is skipped\n" in terminal.console.file.getvalue()) is told
    assert ("; cause: a &lt;tile&gt; is skipped" in markdown(results_of(events))) is told


def test_the_page_names_the_failure_that_is_repeated_and_what_stands_beside_it():
    """As words of the article, and no cause in a box."""
    text = page(results_of(EVENTS))
    assert "as forward" in text
    assert f"hazards: {HINT['text']}" in text
    assert 'class="cause"' not in text


def test_junit_tells_both_in_the_failures():
    """A failure each, since CI counts them."""
    root = ElementTree.fromstring(junit(results_of(EVENTS)).split("\n", 1)[1])
    first, again = (failure.text for failure in root.iter("failure"))
    assert f"beside  hazards: {HINT['text']}" in first
    assert again.startswith("same    as forward")


def test_a_report_keeps_every_field_of_it(tmp_path):
    """Under the schema that is published."""
    with ReportWriter(tmp_path / "report.jsonl") as writer:
        for event in EVENTS:
            writer.write(event)
    told = [event for event in report_lines(tmp_path / "report.jsonl") if event["event"] == "counterexample"]
    assert [event["same_as"] for event in told] == [None, "forward"]
    assert told[0]["hints"] == [HINT]
    assert told[0]["printed"] == [{"rank": 0, "text": "hop 1\n"}]
