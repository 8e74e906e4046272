"""The map of a counterexample as SVG: which query attends which key, which of these pairs are wrong, and by how much.

Both axes run rank by rank, so the keys that one rank got from another are a rectangle. Colours are CSS classes, which
the page's style sheet defines for light and dark. Cells are drawn as strokes, in units of a cell: a run of cells then
takes six characters, and a page may hold hundreds of pictures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from html import escape

from ringverify.events import AXES, CounterexampleEvent, Digits, Piece, RecordedCase
from ringverify.reports.cells import Cells, holding, runs, spans

GRID = 240
"""Approximate length of the longer side of the grid, in pixels."""

SMALLEST, LARGEST = 8, 60
"""Smallest and largest side of a cell, in pixels."""

LEFT, TOP, GAP, STRIP, MARGIN = 74, 44, 16, 96, 10
"""Pixels for the labels of ranks and positions, and for the strip of errors by head."""

LETTER, HIGH = 6.2, 12
"""Width of a character and height of a line of text, in pixels."""

PATTERN = {"0": "", "1": "p1"}
"""CSS class by how often the pairs of a cell attend: never or once; several times is "p2"."""

SHADES = {"0": "", "1": "w1", "2": "w1", "3": "w2", "4": "w2", "5": "w3", "6": "w3"}
"""CSS class by digit of error, the power of ten times what is allowed: up to 10², 10⁴, 10⁶; more is "w4"."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture and what it shows.

    Attributes:
        svg: an element to put into a page.
        caption: sentences that say how to read it.
    """

    svg: str
    caption: tuple[str, ...]


def picture(event: CounterexampleEvent, *, most: int = 24) -> Picture | None:
    """Draw a counterexample; return `None` where there is nothing to draw.

    Args:
        event: the counterexample.
        most: about how many cells an axis may have; neighbours within a rank are joined where there are more.
    """
    region = event.region
    if region is None or event.case is None or not region.queries or not region.keys:
        return None
    return _Drawing(event, event.case, Cells.of(region, most)).picture()


class _Drawing:
    def __init__(self, event: CounterexampleEvent, case: RecordedCase, cells: Cells) -> None:
        self.event, self.case, self.map = event, case, cells
        self.known = [] if event.where is None else [pair for pair in event.where.pairs if pair.what != "scaled"]
        self.cell = max(SMALLEST, min(LARGEST, GRID // max(len(cells.queries), len(cells.keys))))
        self.width, self.height = self.cell * len(cells.keys), self.cell * len(cells.queries)
        self.parts: list[str] = []

    def picture(self) -> Picture:
        """Draw the layers one above the other."""
        self._add(f'<rect class="p0" x="{LEFT}" y="{TOP}" width="{self.width}" height="{self.height}"/>')
        if (pattern := self.map.pattern) is not None:
            self._cells(pattern, lambda digit: PATTERN.get(digit, "p2"), (LEFT, TOP), (self.cell, self.cell))
        if (pairs := self.map.pairs) is not None:
            self._cells(pairs, lambda digit: SHADES.get(digit, "w4"), (LEFT, TOP), (self.cell, self.cell))
        self._concerned()
        self._edges()
        hops = self._hops()
        self._labels()
        right, bottom = self._strip()
        caption = self._caption(hops)
        label = "queries by keys" if self.map.tensor is None else f"where {self.map.tensor} is wrong"
        svg = (
            f'<svg class="map" viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}" role="img" '
            f'aria-label="{label}">{"".join(self.parts)}</svg>'
        )
        return Picture(svg, caption)

    # -- layers

    def _concerned(self) -> None:
        """Hatch the pairs of queries and keys that are wrong, or the queries of the rank that failed."""
        wrong: list[tuple[list[int], list[int]]] = []
        rows = {} if self.event.where is None else self.event.where.rows
        for pair in self.known:
            asking = None if self.map.of_keys else rows.get(pair.rank, ())
            owned = rows.get(pair.owner, ()) if self.map.of_keys else pair.keys
            wrong.append((holding(self.map.queries, pair.rank, asking), holding(self.map.keys, pair.owner, owned)))
        if self.map.tensor is None and self.event.rank is not None:
            wrong.append((holding(self.map.queries, self.event.rank, None), list(range(len(self.map.keys)))))
        path = []
        for queries, keys in wrong:
            for top, high in runs(queries):
                for left, wide in runs(keys):
                    x, y, w, h = (n * self.cell for n in (left, top, wide, high))
                    path.append(f"M{LEFT + x} {TOP + y}h{w}v{h}h-{w}z")
        if path:
            self._add(f'<path class="x" d="{"".join(path)}"/>')

    def _edges(self) -> None:
        """Draw lines between shards, and a frame around the grid."""
        lines = [f"M{LEFT + first * self.cell} {TOP - 6}v{self.height + 6}" for _, first, _ in spans(self.map.keys)[1:]]
        lines += [
            f"M{LEFT - 6} {TOP + first * self.cell}h{self.width + 6}" for _, first, _ in spans(self.map.queries)[1:]
        ]
        self._add(f'<path class="e" d="{"".join(lines)}M{LEFT} {TOP}h{self.width}v{self.height}h-{self.width}z"/>')

    def _hops(self) -> list[int]:
        """Outline the blocks that hold wrong pairs, with the hop at which each arrives; return these hops, sorted."""
        rows = {rank: (first, count) for rank, first, count in spans(self.map.queries)}
        columns = {rank: (first, count) for rank, first, count in spans(self.map.keys)}
        concerned = {(pair.rank, pair.owner): pair.hop for pair in self.known}
        size, hop = self.case.world_size, self.event.hop
        if hop is not None and not concerned:
            concerned = {(rank, (rank - hop) % size): hop for rank in range(size)}
        drawn = []
        for (rank, owner), at in sorted(concerned.items()):
            if rank not in rows or owner not in columns:
                continue
            (top, high), (left, wide) = rows[rank], columns[owner]
            x, y, w, h = (n * self.cell for n in (left, top, wide, high))
            self._add(f'<rect class="h" x="{LEFT + x}" y="{TOP + y}" width="{w}" height="{h}"/>')
            if at is not None:
                drawn.append(at)
                self._text("ht", LEFT + x + w / 2, TOP + y + h / 2 + 4, _that_fits(w, f"hop {at}", str(at)))
        return sorted(set(drawn))

    def _labels(self) -> None:
        """Label the ranks and positions of both axes."""
        self._text("t", LEFT + self.width / 2, 11, "keys")
        self._add(f'<text class="t" transform="translate(11 {TOP + self.height / 2:g}) rotate(-90)">queries</text>')
        blamed = self.event.rank if self.map.tensor is None else None
        for rank, first, count in spans(self.map.keys):
            text = _that_fits(count * self.cell, f"rank {rank}", str(rank))
            self._text("t b", LEFT + (first + count / 2) * self.cell, 24, text)
        for rank, first, count in spans(self.map.queries):
            if count * self.cell >= HIGH - 2:
                kind = "t b bad" if rank == blamed else "t b"
                self._text(kind, 34, TOP + (first + count / 2) * self.cell + 4, f"rank {rank}")
        for place, told in _ticks(self.map.keys, self.cell, lambda text: LETTER * len(text) + 2):
            self._text("t", LEFT + (place + 0.5) * self.cell, 37, told)
        for place, told in _ticks(self.map.queries, self.cell, lambda text: HIGH):
            self._text("t r", LEFT - 4, TOP + (place + 0.5) * self.cell + 4, told)

    def _strip(self) -> tuple[int, int]:
        """Draw the error by position and head beside the grid; return the width and the height of the picture."""
        right, bottom = LEFT + self.width + MARGIN, TOP + self.height + MARGIN
        if (strip := self.map.strip) is None:
            return right, bottom
        heads, below = len(strip[0]), self.map.of_keys
        thick = max(5, min(self.cell, 18, STRIP // heads))
        x, y = (LEFT, TOP + self.height + GAP) if below else (LEFT + self.width + GAP, TOP)
        size = (self.cell, thick) if below else (thick, self.cell)
        shown = tuple("".join(row[head] for row in strip) for head in range(heads)) if below else strip
        w, h = size[0] * len(shown[0]), size[1] * len(shown)
        self._add(f'<rect class="p0" x="{x}" y="{y}" width="{w}" height="{h}"/>')
        self._cells(shown, lambda digit: SHADES.get(digit, "w4"), (x, y), size)
        if (worst := self._worst(heads)) is not None:
            along, across = worst if below else worst[::-1]
            at = (x + (along + 0.5) * size[0], y + (across + 0.5) * size[1])
            self._add(f'<circle class="o" cx="{at[0]:g}" cy="{at[1]:g}" r="{min(size) / 2 - 1.5:g}"/>')
        if below:
            self._text("t l", LEFT, y + h + 13, f"{self.map.tensor} by head")
            return max(right, LEFT + 80), y + h + 18
        self._text("t l", x, TOP - 20, str(self.map.tensor))
        self._text("t l", x, TOP - 7, "by head")
        return x + max(w, 44) + MARGIN, bottom

    def _worst(self, heads: int) -> tuple[int, int] | None:
        """Return the piece and the column of the worst element, or `None` where it is not known."""
        event = self.event
        if event.tensor is None or event.tensor != self.map.tensor or event.rank is None:
            return None
        if event.index is None or event.position is None:
            return None
        held = holding(self.map.keys if self.map.of_keys else self.map.queries, event.rank, [event.position])
        problem = self.case.problem
        count = problem.get("heads") or 1
        if self.map.of_keys:
            count = problem.get("key_heads") or count
        head = event.index[AXES[event.tensor].index("head")]
        # `count` heads were joined into `heads` columns, of which the first `more` hold one head more.
        each, more = divmod(count, heads)
        column = head // (each + 1) if head < more * (each + 1) else more + (head - more * (each + 1)) // max(each, 1)
        return (held[0], column) if held and column < heads else None

    # -- words

    def _caption(self, hops: Sequence[int]) -> tuple[str, ...]:
        said, tensor = [], self.map.tensor
        if tensor is None:
            if self.event.failure is not None:
                said.append("The run returned no values.")
            said.append("The map shows which rank holds which positions, and which query attends which key.")
            if self.event.rank is not None:
                said.append(f"Hatched: the queries of rank {self.event.rank}.")
        elif self.map.pairs is not None:
            what = f"each key's weight in the rows of {tensor}" if tensor == "out" else "each key's weight in a row"
            said.append(f"Error of {f'what each query adds to {tensor}' if self.map.of_keys else what}.")
        elif not self.known:
            said.append("It is not known which keys are wrong.")
        if self.known:
            said.append(f"Hatched: {', '.join(dict.fromkeys(pair.what for pair in self.known))}.")
        if hops:
            said.append(f"Outlined: hop{'s' if len(hops) > 1 else ''} {', '.join(map(str, hops))}.")
        if self.map.strip is not None:
            said.append(f"Strip: error of {tensor} by position and head; the ring is the worst element.")
        return tuple(said)

    # -- marks

    def _cells(
        self, digits: Digits, kind: Callable[[str], str], corner: tuple[int, int], size: tuple[int, int]
    ) -> None:
        """Draw the cells of each CSS class as one path, with neighbours in a row joined."""
        paths: dict[str, list[str]] = {}
        for y, row in enumerate(digits):
            kinds = [kind(digit) for digit in row]
            for name in dict.fromkeys(kinds):
                if name:
                    at = (place for place, other in enumerate(kinds) if other == name)
                    paths.setdefault(name, []).extend(f"M{x} {y}h{wide}" for x, wide in runs(at))
        drawn = "".join(f'<path class="{name}" d="{"".join(path)}"/>' for name, path in sorted(paths.items()))
        if drawn:
            move = f"translate({corner[0]} {corner[1] + size[1] / 2:g}) scale({size[0]} {size[1]})"
            self._add(f'<g class="c" transform="{move}">{drawn}</g>')

    def _text(self, kind: str, x: float, y: float, text: str) -> None:
        if text:
            self._add(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def _add(self, part: str) -> None:
        self.parts.append(part)


def _that_fits(pixels: int, *texts: str) -> str:
    """Return the first text that fits into so many pixels, or ""."""
    return next((text for text in texts if LETTER * len(text) < pixels), "")


def _ticks(pieces: Sequence[Piece], cell: int, room: Callable[[str], float]) -> list[tuple[int, str]]:
    """Choose the pieces whose first position is labelled, so that labels do not overlap.

    Where pieces hold several positions, only those at which a shard begins are labelled.

    Returns:
        The index of each chosen piece, and its label.
    """
    texts = [str(first) for _, first, _ in pieces]
    every = max(1, -(-round(max(map(room, texts))) // cell))
    shown = [place for place in range(len(pieces)) if place % every == 0]
    if any(first != last for _, first, last in pieces):
        starts = [first for _, first, _ in spans(pieces)]
        shown = [start for start, before in zip(starts, [-every, *starts], strict=False) if start - before >= every]
    return [(place, texts[place]) for place in shown]
