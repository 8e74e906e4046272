"""What options may be given as; anything else is refused with the value and what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringverify.errors import complain


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names separated by commas")
    return found


def sizes(text: str) -> tuple[int, ...]:
    """World sizes separated by commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected world sizes of at least 1, separated by commas")
    return found


def count(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def _whole(text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {minimum}")
    return int(text)


def seconds(text: str) -> float:
    """A positive, finite number of seconds."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of seconds")
    return found


def branches(text: str) -> tuple[tuple[int, int], ...]:
    """Branches of a dilation, `W:R,…`."""
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
"""Files that `check` and `report` both write: what stands for the file in `--help`, and what that says."""


class Renamed(argparse.Action):
    """The old name of an option: it does what the new one does, and says which that is."""

    def __init__(self, *arguments: Any, now: str, **fields: Any) -> None:
        fields |= {"dest": now.removeprefix("--"), "help": argparse.SUPPRESS, "type": Path}
        super().__init__(*arguments, **fields)
        self._now = now

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Take the value, with a line on standard error."""
        complain(f"{option_string} is called {self._now} here now: please write that")
        setattr(namespace, self.dest, values)
