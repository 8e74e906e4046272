"""A run as short Markdown, for the summary of a CI job or a comment on a pull request."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterable

from ringverify.events import PropertyOutcome
from ringverify.reports.features import untried_line
from ringverify.reports.results import ImplementationResult, Results
from ringverify.reports.story import later_cause, margin_text, replay_of, story_lines

SIGNS = {"pass": "✅", "fail": "❌", "known": "⚠️", "unsupported": "➖", "inconclusive": "❔"}
VERDICT_SIGNS = {"conformant": "✅", "violations": "❌", "inconclusive": "❔"}
MOST = 30
"""Largest number of failures shown in full: CI services limit the size of a job's summary."""


def markdown(results: Results) -> str:
    """Return a table of verdicts, a matrix of properties, and each failure in a folded section."""
    blocks = [_verdicts(results), *(f"**{_text(line)}**" for line in results.unexpected)]
    said = ((one, untried_line(one.verdict)) for one in results.implementations)
    blocks += [f"{_text(one.name)}: {_text(line)}" for one, line in said if line is not None]
    if results.properties:
        blocks.append(_matrix(results))
    failures = [(one, outcome) for one in results.implementations for outcome in one.failures]
    blocks += [_failure(one, outcome) for one, outcome in failures[:MOST]]
    if len(failures) > MOST:
        blocks.append(f"{len(failures) - MOST} more failures are in the report.")
    blocks += [
        f"<sub>ringverify {_text(header.ringverify)}, torch {_text(header.torch)}, python {_text(header.python)}, "
        f"{_text(header.platform)}, {_text(header.device)}, suite {header.suite}, seed {header.seed}</sub>"
        for header in results.headers
    ]
    return "\n\n".join(blocks) + "\n"


def _verdicts(results: Results) -> str:
    lines = [f"### RingVerify: {results.verdict}", "", "| implementation | verdict | properties | examples |"]
    lines.append("|---|---|---|---:|")
    for one in results.implementations:
        counts = ", ".join(f"{number} {kind}" for kind, number in one.counts.items())
        sign = VERDICT_SIGNS[one.verdict.verdict]
        verdict = _text(one.verdict.verdict + one.where)
        lines.append(f"| {_text(one.name)} | {sign} {verdict} | {counts} | {one.examples:,} |")
    return "\n".join(lines)


def _matrix(results: Results) -> str:
    """Return a table of properties by implementations, with verdicts and margins."""
    names = [_text(one.name) for one in results.implementations]
    lines = [f"| property | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for name in results.properties:
        cells = [_cell(one.outcomes.get(name)) for one in results.implementations]
        lines.append(f"| {_text(name)} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    title = "Properties: verdict and margin (error divided by the error allowed)"
    return f"<details><summary>{title}</summary>\n\n{table}\n\n</details>"


def _cell(outcome: PropertyOutcome | None) -> str:
    if outcome is None:
        return ""
    verdict = outcome.verdict
    return SIGNS[verdict.kind] + (f" {margin_text(verdict.margin)}" if verdict.margin is not None else "")


def _failure(one: ImplementationResult, outcome: PropertyOutcome) -> str:
    event = outcome.counterexample
    title = f"{SIGNS[outcome.verdict.kind]} {_html(one.name)}: {_html(outcome.id)}"
    if event is None:
        return title
    said = "\n".join(story_lines(event))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", said)), default=0))
    summary = _html(event.summary or "")
    if event.same_as is not None:
        again = f"<code>{_html(replay_of(event))}</code>"
        earlier = next((other.counterexample for other in one.failures if other.id == event.same_as), None)
        cause = "" if (text := later_cause(event, earlier)) is None else f"; cause: {_html(text)}"
        return f"{title}: the same as {_html(event.same_as)}: {summary} ({again}){cause}"
    known = outcome.verdict.known
    note = "" if known is None else f"Known: {_text(known.reason)} ({_text(known.link)})\n\n"
    told = f"{title}: {summary}"
    return f"<details><summary>{told}</summary>\n\n{note}{fence}\n{said}\n{fence}\n\n</details>"


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table of cells that are Markdown already; only `|`, which would end a cell, is escaped."""
    titles = list(head)
    lines: Iterable[Iterable[object]] = itertools.chain([titles, ["---"] * len(titles)], rows)
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _text(text: object) -> str:
    """Return a text on one line, escaped so that Markdown and its tables show it literally."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~-])", r"\\\1", " ".join(str(text).split()))


def _html(text: object) -> str:
    """Return a text on one line, escaped for HTML, in which Markdown is not interpreted."""
    return html.escape(" ".join(str(text).split()), quote=False)
