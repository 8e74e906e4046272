"""A badge for each implementation: an SVG picture of its verdict, and JSON from which shields.io draws the same.

Each half is as wide as its text in Verdana at 11 pixels; `textLength` makes the text fit in other fonts.
"""

from __future__ import annotations

import json
import re
from html import escape

from ringverify.reports.results import ImplementationResult, Results

LABEL = "ringverify"
COLOURS = {"conformant": "#2a7f3f", "violations": "#b3261e", "inconclusive": "#7a5c00"}
"""Background of each verdict; white text has a contrast of at least 4.5 on it."""

NAMED = {"conformant": "brightgreen", "violations": "red", "inconclusive": "yellow"}
NARROW, WIDE = 3.9, 9.4
PADDING = 6


def badges(results: Results) -> dict[str, str]:
    """Return the files of all badges by file name: an SVG and a JSON file for each implementation."""
    found: dict[str, str] = {}
    for one in results.implementations:
        name = plain = re.sub(r"[^a-z0-9]+", "-", one.name.lower()).strip("-") or "implementation"
        number = 1
        while f"{name}.svg" in found:
            name = f"{plain}-{(number := number + 1)}"
        found[f"{name}.svg"] = badge(one)
        found[f"{name}.json"] = endpoint(one)
    return found


def message(one: ImplementationResult) -> str:
    """Return the text of a badge: the verdict, and how many properties it rests on."""
    counts = one.counts
    ran = sum(number for kind, number in counts.items() if kind != "unsupported")
    match one.verdict.verdict:
        case "conformant":
            return f"conformant, {ran} propert{'y' if ran == 1 else 'ies'}"
        case "violations":
            return f"violations, {counts.get('fail', 0) + counts.get('known', 0)} of {ran}"
        case verdict:
            return verdict


def endpoint(one: ImplementationResult) -> str:
    """Return a badge as JSON for shields.io: https://shields.io/badges/endpoint-badge."""
    told = {"schemaVersion": 1, "label": LABEL, "message": message(one), "color": NAMED[one.verdict.verdict]}
    return json.dumps(told) + "\n"


def badge(one: ImplementationResult) -> str:
    """Return a badge as SVG."""
    said = message(one)
    left, right = _width(LABEL), _width(said)
    whole = left + right + 4 * PADDING
    middle = left + 2 * PADDING
    halves = ((left, PADDING, LABEL), (right, middle + PADDING, said))
    texts = "".join(
        f'<text x="{x}" y="14" textLength="{width}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
        for width, x, text in halves
    )
    told = escape(f"{one.name}: {said}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="20" role="img" aria-label="{told}">'
        f"<title>{told}</title>"
        f'<clipPath id="r"><rect width="{whole}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{middle}" height="20" fill="#444"/>'
        f'<rect x="{middle}" width="{whole - middle}" height="20" fill="{COLOURS[one.verdict.verdict]}"/></g>'
        f'<g fill="#fff" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


def _width(text: str) -> int:
    """Estimate the width of a text in pixels."""
    pixels = 0.0
    for letter in text:
        pixels += NARROW if letter in "fijlrt.,:;'|! " else WIDE if letter in "mwMW" else 7.0
    return round(pixels)
