"""A run as one HTML page that needs no network and no script, for light and dark, narrow and wide screens.

The words and the layout are in `page.html` and `page.css`; this module fills them in.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ringverify.events import CounterexampleEvent, PropertyOutcome, as_json
from ringverify.reports.features import long_table, untried_line
from ringverify.reports.picture import picture
from ringverify.reports.results import ImplementationResult, Results
from ringverify.reports.story import detail_lines, margin_text, replay_of, story

FOLDER = Path(__file__).parent
SIGNS = {"pass": "✓", "fail": "✗", "known": "!", "unsupported": "–", "inconclusive": "?"}
WORDS = {
    "pass": "pass",
    "fail": "fail",
    "known": "known violation",
    "unsupported": "unsupported",
    "inconclusive": "inconclusive",
}
NAME = 36
"""Characters of a name above a column; a longer name is shortened in its middle."""

LARGEST = 950_000
"""Bytes of a page above which pictures are made coarser and tracebacks shorter."""


@dataclasses.dataclass(frozen=True)
class Detail:
    """How much of a failure the page shows; the report has all of it.

    Attributes:
        cells: about how many cells a picture has along an axis.
        letters: characters of a traceback.
        json: whether the case is shown as JSON too.
        tried: whether the table of what was tried is shown.
    """

    cells: int
    letters: int
    json: bool = True
    tried: bool = True


DETAILS = (
    Detail(24, 1600),
    Detail(12, 800),
    Detail(6, 0, json=False, tried=False),
    Detail(4, 0, json=False, tried=False),
)


def page(results: Results) -> str:
    """Return the page, in the finest detail that keeps it within `LARGEST`, else in the coarsest."""
    text = ""
    for detail in DETAILS:
        text = _page(results, detail)
        if len(text.encode(errors="replace")) <= LARGEST:
            break
    return text


def _page(results: Results, detail: Detail) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"margin": margin_text, "count": lambda number: f"{number:,}", "seconds": _seconds}
    environment.filters["replay_line"] = replay_of
    environment.globals |= {"SIGNS": SIGNS, "WORDS": WORDS}
    return environment.get_template("page.html").render(
        results=results,
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        implementations=[
            _implementation(f"i{number}", one, detail) for number, one in enumerate(results.implementations)
        ],
        meanings=_meanings(results),
        verdicts=[one.verdict.verdict for one in results.implementations],
    )


def _implementation(anchor: str, one: ImplementationResult, detail: Detail) -> dict[str, Any]:
    exchange = (
        () if one.exchange is None else (one.exchange.case_text or "", *one.exchange.traffic, *one.exchange.memory)
    )
    return {
        "one": one,
        "id": anchor,
        "short": one.name if len(one.name) <= NAME else f"{one.name[: NAME // 2]}…{one.name[-NAME // 2 + 1 :]}",
        "failures": [_failure(f"{anchor}-{outcome.id}", outcome, detail) for outcome in one.failures],
        "exchange": exchange,
        "untried": untried_line(one.verdict, most=None),
        "tried": None if one.tried is None or not detail.tried else long_table(one.tried),
    }


def _failure(anchor: str, outcome: PropertyOutcome, detail: Detail) -> dict[str, Any]:
    event, known = outcome.counterexample, outcome.verdict.known
    drawn = None if event is None else picture(event, most=detail.cells)
    return {
        "id": anchor,
        "verdict": outcome.verdict,
        "event": event,
        "told": {} if event is None else _told(event),
        "picture": None if drawn is None else drawn.svg,
        "caption": () if drawn is None else drawn.caption,
        "detail": "" if event is None else _detail(event, detail.letters),
        "case": json.dumps(as_json(event.case or event.merge_case), ensure_ascii=False)
        if event is not None and detail.json
        else "",
        "link": "" if known is None else _link(known.link),
    }


def _told(event: CounterexampleEvent) -> dict[str, list[str]]:
    """Return the lines that describe a counterexample, by label."""
    found: dict[str, list[str]] = {}
    label = ""
    for name, text in story(event):
        label = name or label or "summary"
        found.setdefault(label, []).append(text)
    return found


def _detail(event: CounterexampleEvent, letters: int) -> str:
    """Return the end of a failure's detail, such as tracebacks, which says what happened."""
    if not letters:
        return ""
    left, shown = detail_lines(event)
    while len(shown) > 1 and sum(map(len, shown)) > letters:
        left, shown = left + 1, shown[1:]
    told = "\n".join(shown)[-letters:]
    return f"… {left} more lines in the report\n{told}" if left else told


def _link(text: str) -> str:
    """Return a text if it is a web address, which a page may link to, else ""."""
    return text if text.startswith(("https://", "http://")) else ""


def _meanings(results: Results) -> dict[str, str]:
    """Return what each property means, as far as the reports say."""
    found: dict[str, str] = {}
    for one in results.implementations:
        for outcome in one.outcomes.values():
            found.setdefault(outcome.id, outcome.verdict.meaning or "")
    return found


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
