"""What others say is shown escaped, and cut at a stated length, wherever a person or a CI service reads it."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import pytest
import sample_events
from rich.console import Console

from ringverify.check.options import Options
from ringverify.check.outcome import TriedProperty
from ringverify.cli.main import main
from ringverify.errors import Inconclusive, complain
from ringverify.events import CounterexampleEvent, ImplementationEvent, Known, PropertyEvent, PropertyOutcome
from ringverify.reports.badge import badges
from ringverify.reports.jsonl import ReportWriter, read_report
from ringverify.reports.junit import junit
from ringverify.reports.markdown import markdown
from ringverify.reports.page import page
from ringverify.reports.results import results_of
from ringverify.reports.terminal import Terminal, counterexample_text
from ringverify.testing.results import ConformanceError, ConformanceResult
from ringverify.testing.session import RingVerifySession
from ringverify.words import LINE, TEXT, UNSEEN, cut, legible, legible_lines

EVIL = "::error::a\n::error file=b::b ##[error]c ##vso[task]d \x1b[2Je \x9b31mf \u202eg\u2066h \r\u2028\u2029i \ud800"
MANY = "x" * 5_000_000


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain, Σ − ·, ✅, C:\\users, a::b, # [x]", "plain, Σ − ·, ✅, C:\\users, a::b, # [x]"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("a\u2028b\u2029c\x85", r"a\u2028b\u2029c\x85"),
        ("\u202egnp.exe\u2066\u200f\u200b", r"\u202egnp.exe\u2066\u200f\u200b"),
        ("\ud800 \uffff \U000e0041", r"\ud800 \uffff \U000e0041"),
        ("::error::x", r"\x3a:error::x"),
        (" \xa0::error::x", " \xa0\\x3a:error::x"),
        ("a ##[error]x ##vso[x]", r"a #\x23[error]x #\x23vso[x]"),
    ],
)
def test_a_text_on_one_line_is_legible(text, seen):
    """What does as it pleases is escaped as in Python; what is escaped stays as it is."""
    assert legible(text) == seen
    assert legible(seen) == seen


def test_a_text_of_lines_keeps_them():
    """Each of them is looked at for orders to a CI service."""
    assert legible_lines("a\n\t::error::b\n##[c]") == "a\n\t\\x3a:error::b\n#\\x23[c]"


def test_a_long_text_keeps_its_beginning_and_its_end():
    """With how much was left out; a short one is as it was."""
    assert cut("a" * LINE) == "a" * LINE
    text = cut("begin" + MANY + "end")
    assert text.startswith("begin")
    assert text.endswith("xend")
    assert " … 4,998,008 characters left out … " in text
    assert len(text) < LINE + 60


# -- every presenter ---------------------------------------------------------------------------------------------------


def evil(value):
    """An event whose free texts mean harm."""
    fields = ("implementation", "summary", "case_text", "diagnosis", "reason", "meaning", "shrunk_from", "device")
    several = ("after", "undeclared", "not_run_in")
    return {
        name: [f"{one} {EVIL}" for one in inner] if name in several
        else EVIL + "\n" + EVIL if name == "detail"
        else {**inner, "text": [EVIL]} if name == "where" and inner
        else {"requires": [EVIL], "irrelevant": [EVIL], "complete": False} if name == "needs" and inner
        else {"reason": EVIL, "link": "https://example.org/" + EVIL} if name == "known" and isinstance(inner, dict)
        else f"{EVIL}{inner}" if name in fields and isinstance(inner, str)
        else inner
        for name, inner in value.items()
    }  # fmt: skip


LINES = [evil(event) for event in sample_events.everything()]
LINES[1]["world"] = "simulated"
for _event in LINES:
    if _event["event"] == "counterexample":
        _event["printed"] = [{"rank": 1, "text": EVIL}, {"rank": None, "text": "::debug::x\n"}]
EVENTS = sample_events.typed(LINES)


def terminal(quiet):
    """All that the terminal says."""
    told = io.StringIO()
    shown = Terminal(Console(file=told, color_system=None, width=200), verbose=not quiet, quiet=quiet)
    for event in EVENTS:
        shown.tell(event)
    return told.getvalue()


def pytest_says():
    """All that a failing test says of its property, or of a run."""
    texts = []
    for name in dict.fromkeys(event.implementation for event in EVENTS if isinstance(event, ImplementationEvent)):
        events = [EVENTS[0], *(event for event in EVENTS[1:-1] if event.implementation == name)]
        result = ConformanceResult.of(events)
        texts += [str(ConformanceError(result, verbose=verbose)) for verbose in (False, True)]
        texts += [one.describe(verbose=True) for one in result.properties.values()]
    return "\n".join(texts)


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"verdict": "unsupported"}, pytest.skip.Exception),
        ({"verdict": "fail", "known": Known(reason=EVIL, link="https://example.org")}, pytest.xfail.Exception),
        ({"verdict": "inconclusive"}, Inconclusive),
    ],
)
def test_a_test_ends_with_words_that_mean_no_harm(fields, outcome, monkeypatch):
    """What pytest prints of a test that was skipped, or failed as it was expected to."""
    plain = {"implementation": EVIL, "property": "lse", "reason": EVIL, "margin": None, "examples": 0, "seconds": 0.0}
    verdict = PropertyEvent(**plain, **fields)
    tried = TriedProperty(outcome=PropertyOutcome(verdict), world="simulated")
    session = RingVerifySession.__new__(RingVerifySession)
    session._mistake, checks = None, SimpleNamespace(try_property=lambda checked, property: tried)
    monkeypatch.setattr(session, "_checks_here", lambda: checks)
    checked = SimpleNamespace(key="a", asked=1, options=Options())
    item = SimpleNamespace(stash={}, user_properties=[])
    with pytest.raises(outcome) as ended:
        session._try(item, checked, None, name=EVIL)
    assert_harmless(str(ended.value))


def complained(capsys):
    """What stands on standard error."""
    complain(EVIL)
    return capsys.readouterr().err


PRESENTERS = {
    "terminal": lambda: terminal(quiet=False),
    "quiet terminal": lambda: terminal(quiet=True),
    "counterexample": lambda: "".join(
        counterexample_text(event, verbose=True) for event in EVENTS if isinstance(event, CounterexampleEvent)
    ),
    "pytest": pytest_says,
    "markdown": lambda: markdown(results_of(EVENTS)),
    "junit": lambda: junit(results_of(EVENTS)),
    "page": lambda: page(results_of(EVENTS)),
    "badges": lambda: "\n".join(badges(results_of(EVENTS)).values()),
}


def assert_harmless(text):
    """Nothing that cannot be seen, no order to a CI service, and still something of what was said."""
    assert UNSEEN.search(text) is None, UNSEEN.search(text)
    assert re.search(r"^\s*::\w", text, re.MULTILINE) is None
    assert re.search(r"##\w*\[", text) is None


@pytest.mark.parametrize("presenter", PRESENTERS)
def test_no_presenter_shows_what_means_harm(presenter):
    """Names, messages, tracebacks, printed lines, reasons and links."""
    text = PRESENTERS[presenter]()
    assert_harmless(text)
    assert "\\x1b" in text.replace("\\\\", "\\")


def test_a_line_on_standard_error_is_one_line_and_harmless(capsys):
    """As of an import error, or a file's name."""
    text = complained(capsys)
    assert_harmless(text)
    assert text.count("\n") == 1


def test_a_mistyped_target_and_a_file_are_named_harmlessly(capsys, tmp_path, monkeypatch):
    """What was typed comes back escaped, and cut."""
    monkeypatch.chdir(tmp_path)
    for arguments in (["check", EVIL[:-1]], ["replay", EVIL[:-1]], ["report", EVIL[:-1], "--html", "p.html"]):
        assert main(arguments) == 2
        text = capsys.readouterr().err
        assert_harmless(text)
        assert text.count("\n") == 1
    (tmp_path / "long.py").write_text(f"raise ValueError('begin' + 'x' * {len(MANY)})")
    assert main(["check", "long.py:attend"]) == 2
    assert len(capsys.readouterr().err) < 3 * LINE


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_report_holds_what_was_said_and_shows_nothing_that_means_harm(tmp_path):
    """It may go to /dev/stdout: what cannot be seen is JSON's escape of it, which readers take for the same."""
    with ReportWriter(tmp_path / "report.jsonl") as writer:
        for event in EVENTS:
            writer.write(event)
    text = (tmp_path / "report.jsonl").read_text()
    assert UNSEEN.search(text) is None
    assert read_report(tmp_path / "report.jsonl")[1].implementation == EVENTS[1].implementation
    assert json.loads(text.splitlines()[0])["device"] == EVENTS[0].device


def test_a_message_of_megabytes_makes_no_report_of_megabytes(tmp_path):
    """Each text of an event is cut at a stated length."""
    events = sample_events.typed(sample_events.everything())
    place = next(place for place, event in enumerate(events) if isinstance(event, CounterexampleEvent))
    events[place] = dataclasses.replace(events[place], summary=MANY, detail=MANY, diagnosis=MANY)
    with ReportWriter(tmp_path / "report.jsonl") as writer:
        for event in events:
            writer.write(event)
    assert (tmp_path / "report.jsonl").stat().st_size < 30_000 + 4 * TEXT
    results = results_of(events)
    assert all(len(text) < 60_000 + 12 * TEXT for text in (markdown(results), junit(results), page(results)))
    assert "characters left out" in counterexample_text(events[place])
