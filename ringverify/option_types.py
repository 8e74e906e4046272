"""Types of command-line options: each parses a text, or refuses it with the text and what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringverify.errors import complain


class Repeatable(argparse.Action):
    """Adds the values of an option that is given several times, each of which holds some."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Add the values to those given before."""
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), *values))


def names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names separated by commas")
    return found


def sizes(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1, separated by commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers of at least 1, separated by commas")
    return found


def count(text: str) -> int:
    """Parse a whole number of at least 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _whole(text, 1)


AUTO = "auto"


def jobs(text: str) -> int | str:
    """Parse a number of processes, or "auto"."""
    if text == AUTO:
        return text
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1, or auto") from None


def _whole(text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {minimum}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of seconds")
    return found


def branches(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the branches of a dilation, `W:R,…`: segment length and dilation rate of each."""
    try:
        found = tuple((int(w), int(r)) for w, r in (one.split(":") for one in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(min(one) for one in found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected W:R,… such as 2048:1,4096:2")
    return found


OUTPUTS = {
    "html": ("FILE.html", "write a page with the verdicts and pictures"),
    "junit": ("FILE.xml", "write the verdicts as JUnit XML"),
    "markdown": ("FILE.md", "write a summary for a CI job"),
}
"""Options for files that several commands write: the metavar and the help text of each."""


class Renamed(argparse.Action):
    """Action for the old name of an option: stores the value under the new name, and prints that name."""

    def __init__(self, *arguments: Any, now: str, **fields: Any) -> None:
        super().__init__(*arguments, **{**fields, "help": argparse.SUPPRESS, "type": Path})
        self._now = now

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store the value, and print the new name on standard error."""
        complain(f"{option_string} was renamed to {self._now} in this command: use {self._now}")
        setattr(namespace, self.dest, values)
