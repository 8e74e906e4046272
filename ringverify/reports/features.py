"""What was tried, as tables: how many examples had a feature, and how many had two of them together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ringverify.events import ABSENT, PRESENT, Feature, ImplementationEvent, TriedEvent

LAYOUT = ("world size", "sharding", "causal", "dtype")
CONSTRAINTS = (
    "window", "documents", "key_lengths", "dilation", "softcap", "sinks", "scale", "cross_lengths", "gqa", "value_dim"
)  # fmt: skip
RESULTS = ("lengths", "empty rows", "lse", "gradients")
ASIDE = ("keys on a rank", "head_dim", "dimensions", "values", "memory", "transport", "delayed", "property")
"""Dimensions that say little of what was computed: they have rows on a page, and none on a terminal."""

WITHOUT_MEANING = (
    {"dilation", "documents"},
    {"dilation", "cross_lengths"},
    {"documents", "cross_lengths"},
)
"""Pairs of dimensions that no problem may have together."""

MOST = 160
"""Most rows and most columns of a table; a report from elsewhere may tell of any number of features."""

NAMED = 12
"""Most declared features that were not tried and that a summary names."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A row or a column: a feature, or all features of one dimension.

    Attributes:
        dimension: the dimension.
        value: the value; `None` stands for all values but the one of cases that do without.
        features: the features whose examples are counted.
    """

    dimension: str
    value: str | None
    features: tuple[Feature, ...]

    @property
    def label(self) -> str:
        """The feature in words."""
        if self.value is None or self.value == PRESENT:
            return self.dimension
        if self.value == ABSENT:
            return f"not {self.dimension}"
        return self.value if self.dimension == "property" else f"{self.dimension} {self.value}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        line: its features.
        examples: how many examples had one of them.
        cells: how many of these each column has; `None` where no example can have both.
    """

    line: Line
    examples: int
    cells: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """How many examples had a feature of a row, alone and with one of each column."""

    columns: tuple[Line, ...]
    rows: tuple[Row, ...]


def lines(event: TriedEvent, dimensions: Sequence[str], *, together: bool = False) -> list[Line]:
    """Return the features of dimensions that some example had, but for those of cases that do without.

    Args:
        event: what was tried.
        dimensions: their names, in order.
        together: one line for each dimension rather than for each value.
    """
    found: list[Line] = []
    for name in dimensions:
        values = [value for value in event.features.get(name, {}) if value != ABSENT or name == "causal"]
        if together and values:
            found.append(Line(name, None, tuple((name, value) for value in values)))
        elif not together:
            found += [Line(name, value, ((name, value),)) for value in values]
    return found[:MOST]


def table(event: TriedEvent, rows: Sequence[Line], columns: Sequence[Line]) -> Table:
    """Return how many examples had a feature of each row, alone and with one of each column."""
    both = event.together()

    def cell(row: Line, column: Line) -> int | None:
        if row.dimension == column.dimension or {row.dimension, column.dimension} in WITHOUT_MEANING:
            return None
        return sum(both.get((one, other), 0) for one in row.features for other in column.features)

    def examples(row: Line) -> int:
        return sum(event.features[name][value] for name, value in row.features)

    return Table(
        tuple(columns), tuple(Row(row, examples(row), tuple(cell(row, one) for one in columns)) for row in rows)
    )


def short_tables(event: TriedEvent) -> list[Table]:
    """Return the tables for a terminal: what was computed by layout, and constraints by one another."""
    computed = [name for name in event.features if name not in ASIDE]
    constraints = lines(event, CONSTRAINTS, together=True)
    found = [table(event, lines(event, computed), lines(event, LAYOUT))]
    return [*found, table(event, constraints, constraints)] if len(constraints) > 1 else found


def long_table(event: TriedEvent) -> Table:
    """Return the table for a page: every feature by layout, constraints and results."""
    columns = [*lines(event, LAYOUT), *lines(event, CONSTRAINTS, together=True), *lines(event, RESULTS)]
    return table(event, lines(event, list(event.features)), columns)


def untried_line(event: ImplementationEvent, *, most: int | None = NAMED) -> str | None:
    """Return the line on declared features that no example had; `None` if there is nothing to say.

    There is nothing to say after a new violation either: it ends the search before other features have their turn.

    Args:
        event: the summary of the implementation.
        most: most features to name; `None` names all.
    """
    failed = (event.properties or {}).get("fail", 0)
    if not event.untried or failed > (event.known or 0):
        return None
    named = event.untried if most is None else event.untried[:most]
    more = len(event.untried) - len(named)
    return (
        f"declared but in no example, so not tested: {', '.join(_joined(named))}{f' and {more} more' if more else ''}"
    )


def _joined(names: Sequence[str]) -> Iterator[str]:
    """Yield names, those of one dimension as one: "world size 1 or 2" for "world size 1" and "world size 2"."""
    for dimension, alike in itertools.groupby(names, lambda name: name.rpartition(" ")[0] or name):
        values = [name.rpartition(" ")[2] for name in alike]
        yield f"{dimension} {' or '.join(values)}" if values != [dimension] else dimension
