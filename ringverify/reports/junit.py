"""A run as JUnit XML for CI services: a test suite for each implementation, a test case for each property."""

from __future__ import annotations

from xml.etree import ElementTree

from ringverify.events import PropertyOutcome
from ringverify.reports.results import ImplementationResult, Results
from ringverify.reports.story import margin_text, story_lines
from ringverify.words import plural

KINDS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def junit(results: Results) -> str:
    """Return the XML: a violation is a failure, inconclusive an error, unsupported or a known violation is skipped."""
    root = ElementTree.Element("testsuites", name="ringverify")
    for one in results.implementations:
        _suite(root, one)
    _count(root, [*root.iter("testcase")])
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, one: ImplementationResult) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=one.name)
    if one.header.started is not None:
        suite.set("timestamp", one.header.started.removesuffix("+00:00"))
    about = ElementTree.SubElement(suite, "properties")
    known = ("ringverify", "torch", "python", "platform", "device", "suite", "seed")
    told = {name: getattr(one.header, name) for name in known}
    told |= {"world": one.verdict.world or "", "verdict": one.verdict.verdict}
    for name, value in told.items():
        ElementTree.SubElement(about, "property", name=name, value=str(value))
    for outcome in one.outcomes.values():
        _case(suite, one, outcome)
    if one.verdict.verdict == "inconclusive" and "inconclusive" not in one.counts:
        # All is unsupported: CI services would show a suite of nothing but skipped tests as passed.
        case = ElementTree.SubElement(suite, "testcase", classname=one.name, name="verdict", time="0.000")
        ElementTree.SubElement(case, "error", message="inconclusive: nothing applicable ran", type="inconclusive")
    _count(suite, suite.findall("testcase"))


def _case(suite: ElementTree.Element, one: ImplementationResult, outcome: PropertyOutcome) -> None:
    told = outcome.verdict
    case = ElementTree.SubElement(suite, "testcase", classname=one.name, name=outcome.id, time=f"{told.seconds:.3f}")
    what: ElementTree.Element | None = None
    match told.kind:
        case "fail":
            shown = outcome.counterexample
            message = f"{outcome.id} does not hold" if shown is None else shown.summary or ""
            what = ElementTree.SubElement(case, "failure", message=message, type="violation")
        case "known" if told.known is not None:
            message = f"known violation: {told.known.reason} ({told.known.link})"
            what = ElementTree.SubElement(case, "skipped", message=message, type="known")
        case "unsupported":
            ElementTree.SubElement(case, "skipped", message=told.reason or "", type="unsupported")
        case "inconclusive":
            what = ElementTree.SubElement(case, "error", message=told.reason or "", type="inconclusive")
            what.text = told.traceback
        case "pass" if told.unexpected is not None:
            ElementTree.SubElement(case, "failure", message=told.unexpected, type="unexpected pass")
    if what is not None and outcome.counterexample is not None:
        what.text = "\n".join(story_lines(outcome.counterexample, most=None))
    if told.examples:
        numbers = f"{told.examples} {plural('example', told.examples)}, margin {margin_text(told.margin)}"
        notes = [] if told.reason is None else [f" ({told.reason})"]
        notes += [] if told.world is None else [f" in the {told.world} world"]
        ElementTree.SubElement(case, "system-out").text = "".join([numbers, *notes])


def _count(element: ElementTree.Element, cases: list[ElementTree.Element]) -> None:
    element.set("tests", str(len(cases)))
    for kind, name in KINDS.items():
        element.set(name, str(sum(case.find(kind) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")
