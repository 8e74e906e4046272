"""A run as JUnit XML, which CI services read: a suite an implementation, a test a property."""

from __future__ import annotations

from xml.etree import ElementTree

from ringverify.reports.jsonl import Event
from ringverify.reports.results import Checked, Outcome, Results
from ringverify.reports.terminal import margin_text, story

KINDS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def junit(results: Results) -> str:
    """The text of the file: violations are failures, what is unsupported or known is skipped."""
    root = ElementTree.Element("testsuites", name="ringverify")
    for one in results.implementations:
        _suite(root, one)
    _count(root, [*root.iter("testcase")])
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, one: Checked) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=one.name)
    if "started" in one.header:
        suite.set("timestamp", str(one.header["started"]).removesuffix("+00:00"))
    about = ElementTree.SubElement(suite, "properties")
    known = ("ringverify", "torch", "python", "platform", "device", "suite", "seed")
    told = {name: one.header[name] for name in known} | {"world": one.told.get("world", ""), "verdict": one.verdict}
    for name, value in told.items():
        ElementTree.SubElement(about, "property", name=name, value=str(value))
    for outcome in one.outcomes.values():
        _case(suite, one, outcome)
    if one.verdict == "inconclusive" and "inconclusive" not in one.counts:
        # Nothing but what is unsupported: a suite that only skips would pass for one that passes.
        case = ElementTree.SubElement(suite, "testcase", classname=one.name, name="verdict", time="0.000")
        ElementTree.SubElement(case, "error", message="inconclusive: nothing applicable ran", type="inconclusive")
    _count(suite, suite.findall("testcase"))


def _case(suite: ElementTree.Element, one: Checked, outcome: Outcome) -> None:
    told = outcome.told
    case = ElementTree.SubElement(suite, "testcase", classname=one.name, name=outcome.id, time=f"{told['seconds']:.3f}")
    what: ElementTree.Element | None = None
    match outcome.kind:
        case "fail":
            shown = outcome.counterexample
            message = f"{outcome.id} does not hold" if shown is None else shown.get("summary", "")
            what = ElementTree.SubElement(case, "failure", message=message, type="violation")
        case "known":
            message = f"known violation: {told['known']['reason']} ({told['known']['link']})"
            what = ElementTree.SubElement(case, "skipped", message=message, type="known")
        case "unsupported":
            ElementTree.SubElement(case, "skipped", message=told.get("reason", ""), type="unsupported")
        case "inconclusive":
            what = ElementTree.SubElement(case, "error", message=told.get("reason", ""), type="inconclusive")
            what.text = told.get("traceback")
        case "pass" if "unexpected" in told:
            ElementTree.SubElement(case, "failure", message=told["unexpected"], type="unexpected pass")
    if what is not None and outcome.counterexample is not None:
        what.text = "\n".join(_lines(outcome.counterexample))
    if told["examples"]:
        numbers = f"{told['examples']} examples, margin {margin_text(told['margin'])}"
        notes = [f" ({told['reason']})"] if "reason" in told else []
        notes += [f" in the {told['world']} world"] if "world" in told else []
        ElementTree.SubElement(case, "system-out").text = "".join([numbers, *notes])


def _lines(event: Event) -> list[str]:
    lines = [f"{label:<8}{text}" if label else text for label, text in story(event)]
    return [*lines, "", *event["detail"].rstrip().splitlines()] if event.get("detail") else lines


def _count(element: ElementTree.Element, cases: list[ElementTree.Element]) -> None:
    element.set("tests", str(len(cases)))
    for kind, name in KINDS.items():
        element.set(name, str(sum(case.find(kind) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")
