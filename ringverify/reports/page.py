"""A run as one page that needs nothing else: no network, no script, light and dark, on paper-thin and wide screens.

The words and the layout are in `page.html` and `page.css`; this fills them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ringverify.reports.jsonl import Event, replay_line
from ringverify.reports.picture import Picture, picture
from ringverify.reports.results import Checked, Outcome, Results
from ringverify.reports.terminal import margin_text, story

FOLDER = Path(__file__).parent
SIGNS = {"pass": "✓", "fail": "✗", "known": "!", "unsupported": "–", "inconclusive": "?"}
WORDS = {
    "pass": "pass",
    "fail": "fail",
    "known": "known violation",
    "unsupported": "unsupported",
    "inconclusive": "inconclusive",
}
DETAIL_LINES = 14
NAME = 36
"""Letters of a name above a column."""

LARGEST = 950_000
"""Letters of a page, if coarser pictures and shorter tracebacks can keep it so."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much of a failure is shown; all of it is in the report.

    Attributes:
        cells: cells of an axis of a picture.
        letters: of a traceback.
        json: whether the case is shown as JSON too.
    """

    cells: int
    letters: int
    json: bool = True


EFFORTS = (Effort(24, 1600), Effort(12, 800), Effort(6, 0, json=False))


def page(results: Results) -> str:
    """The whole page."""
    text = ""
    for effort in EFFORTS:
        text = _page(results, effort)
        if len(text) <= LARGEST:
            break
    return text


def _page(results: Results, effort: Effort) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"margin": margin_text, "count": lambda number: f"{number:,}", "seconds": _seconds}
    environment.filters["replay_line"] = replay_line
    environment.globals |= {"SIGNS": SIGNS, "WORDS": WORDS}
    return environment.get_template("page.html").render(
        results=results,
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        implementations=[
            _implementation(f"i{number}", one, effort) for number, one in enumerate(results.implementations)
        ],
        meanings=_meanings(results),
        verdicts=[one.verdict for one in results.implementations],
    )


def _implementation(anchor: str, one: Checked, effort: Effort) -> dict[str, Any]:
    examples = sum(outcome.told["examples"] for outcome in one.outcomes.values())
    return {
        "one": one,
        "id": anchor,
        "short": one.name if len(one.name) <= NAME else f"{one.name[: NAME // 2]}…{one.name[-NAME // 2 + 1 :]}",
        "examples": examples,
        "shares": [(kind, count) for kind, count in one.counts.items()],
        "outcomes": list(one.outcomes.values()),
        "failures": [_failure(f"{anchor}-{outcome.id}", outcome, effort) for outcome in one.failures],
        "exchange": _lines(one.exchange),
    }


def _lines(exchange: Event | None) -> list[str]:
    if exchange is None:
        return []
    return [exchange.get("case_text", ""), *exchange["traffic"], *exchange["memory"]]


def _failure(anchor: str, outcome: Outcome, effort: Effort) -> dict[str, Any]:
    event = outcome.counterexample
    drawn: Picture | None = None if event is None else picture(event, most=effort.cells)
    return {
        "id": anchor,
        "outcome": outcome,
        "event": event,
        "told": {} if event is None else _told(event),
        "picture": None if drawn is None else drawn.svg,
        "caption": () if drawn is None else drawn.caption,
        "detail": "" if event is None else _detail(str(event.get("detail", "")), effort.letters),
        "case": json.dumps(event["case"], ensure_ascii=False) if event is not None and effort.json else "",
        "link": _link(outcome.told.get("known", {}).get("link", "")),
    }


def _told(event: Event) -> dict[str, list[str]]:
    """The lines of the story by label."""
    found: dict[str, list[str]] = {}
    label = ""
    for name, text in story(event):
        label = name or label or "summary"
        found.setdefault(label, []).append(text)
    return found


def _detail(text: str, letters: int) -> str:
    """The end of it, where what happened is said."""
    if not letters:
        return ""
    lines = text.rstrip().splitlines()
    shown = lines[-DETAIL_LINES:]
    while len(shown) > 1 and sum(map(len, shown)) > letters:
        shown = shown[1:]
    left = len(lines) - len(shown)
    told = "\n".join(shown)[-letters:]
    return f"… {left} more lines in the report\n{told}" if left else told


def _link(text: str) -> str:
    """An address, if it is one that a page may lead to."""
    return text if text.startswith(("https://", "http://")) else ""


def _meanings(results: Results) -> dict[str, str]:
    """What each property means, as far as the reports say."""
    found: dict[str, str] = {}
    for one in results.implementations:
        for outcome in one.outcomes.values():
            found.setdefault(outcome.id, outcome.told.get("meaning", ""))
    return found


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
