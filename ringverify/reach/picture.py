"""The map of outputs by tokens: for the terminal, as SVG, and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from ringverify.reach.expected import ranks_of
from ringverify.reach.judging import LEAKED, LOST, NAN, REACHED
from ringverify.reach.run import ReachResult
from ringverify.reports.cells import runs

Pairs = NDArray[np.int8]

MOST = 32
"""Most cells along an axis of the picture in a terminal."""
SIGNS = ("·", "█", "░", "X", "?")
WORDS = ("not read", "read", "lost", "leaked", "NaN")
COLOURS = ("#f3f4f6", "#4c78a8", "#f2a33a", "#c62828", "#8e6bb0")
PIXELS, LEFT, TOP, WORD = 384, 64, 40, 110
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere}svg{max-width:100%;height:auto}figure{margin:1rem 0}"
)
MOST_PIECES = 16
"""Most pieces of shards that are marked on an axis."""


def lines(result: ReachResult) -> list[str]:
    """Draw the map in text: a row of cells for some outputs, two characters for as many tokens."""
    assert result.pairs is not None
    each = -(-result.length // MOST)
    cells = _joined(result.pairs, each)
    shown = [(at // each, rank) for at, rank in _pieces(result) if at % each == 0]
    labels = dict(shown if len(shown) <= MOST_PIECES else [])
    head = ["  "] * len(cells)
    for at, rank in labels.items():
        head[at] = f"{rank:<2}"
    drawn = [f"{'':8}tokens of rank", f"{'':8}{''.join(head).rstrip()}"]
    for at, row in enumerate(cells):
        label = f"rank {labels[at]}" if at in labels else ""
        drawn.append(f"{label:<8}{''.join(SIGNS[cell] * 2 for cell in row)}")
    known = [f"{SIGNS[one] * 2} {WORDS[one]}" for one in range(len(SIGNS)) if one <= REACHED or (cells == one).any()]
    size = f"; a cell is {each} outputs by {each} tokens, and shows the worst" if each > 1 else ""
    return [*drawn, f"{'':8}{'   '.join(known)}{size}"]


def svg(result: ReachResult) -> str:
    """Draw the map as an SVG file."""
    assert result.pairs is not None
    n = result.length
    cell = max(1.0, PIXELS / n)
    side, ranks = cell * n, _pieces(result)
    paths = []
    kinds = [REACHED, LOST, LEAKED, *([NAN] if (result.pairs == NAN).any() else [])]
    for kind in kinds:
        drawn = [
            f"M{x} {y + 0.5}h{wide}"
            for y, row in enumerate(result.pairs == kind)
            for x, wide in runs(int(at) for at in np.flatnonzero(row))
        ]
        if drawn:
            paths.append(f'<path stroke="{COLOURS[kind]}" stroke-width="1.02" d="{"".join(drawn)}"/>')
    marks, words = [], []
    if len(ranks) <= MOST_PIECES:
        ends = [at for at, _ in ranks[1:]] + [n]
        for (at, rank), end in zip(ranks, ends, strict=True):
            middle = (at + end) / 2 * cell
            if at:
                marks.append(
                    f"M{LEFT + at * cell:g} {TOP - 6}v{side + 6:g}M{LEFT - 6} {TOP + at * cell:g}h{side + 6:g}"
                )
            name = f"rank {rank}" if (end - at) * cell > 40 else str(rank)
            words.append(_text(LEFT + middle, TOP - 8, name, "middle"))
            words.append(_text(LEFT - 8, TOP + middle + 4, name, "end"))
    words += [_text(LEFT + side / 2, 14, "tokens", "middle"), _text(LEFT - 8, 14, "outputs", "end")]
    for place, kind in enumerate(kinds):
        x, y = LEFT + place * WORD, TOP + side + 14
        words.append(f'<rect x="{x}" y="{y:g}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        words.append(_text(x + 18, y + 10, f"{WORDS[kind]} ({int((result.pairs == kind).sum())})", "start"))
    wide, high = LEFT + max(side + 16, len(kinds) * WORD), TOP + side + 36
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}" '
        'role="img" aria-label="which output reads which token" font-family="sans-serif" font-size="12">'
        f'<rect width="{wide:g}" height="{high:g}" fill="#ffffff"/>'
        f'<rect x="{LEFT}" y="{TOP}" width="{side:g}" height="{side:g}" fill="{COLOURS[0]}"/>'
        f'<g transform="translate({LEFT} {TOP}) scale({cell:g})" fill="none">{"".join(paths)}</g>'
        f'<path d="{"".join(marks)}M{LEFT} {TOP}h{side:g}v{side:g}h-{side:g}z" fill="none" stroke="#3d454e"/>'
        f"{''.join(words)}</svg>\n"
    )


def page(result: ReachResult, said: Sequence[str]) -> str:
    """Return an HTML page with the verdict's lines and the picture; it needs no network and no script."""
    drawn = ""
    if result.pairs is not None:
        drawn = f"<figure>{svg(result)}<figcaption>Compared with {escape(result.expectation)}.</figcaption></figure>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>reach {escape(result.target)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(result.verdict)}</h1><pre>{escape(chr(10).join(said))}</pre>{drawn}</body></html>\n"
    )


def _pieces(result: ReachResult) -> list[tuple[int, int]]:
    """The tokens at which the rank changes, each with the rank that begins there."""
    ranks = ranks_of(result.shards, result.length)
    return [(at, int(rank)) for at, rank in enumerate(ranks) if at == 0 or ranks[at - 1] != rank]


def _joined(pairs: Pairs, each: int) -> Pairs:
    """Join cells; the worst of them counts."""
    starts = np.arange(0, len(pairs), each)
    joined: Pairs = np.maximum.reduceat(np.maximum.reduceat(pairs, starts, axis=0), starts, axis=1)
    return joined


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#1b1f24">{escape(text)}</text>'
