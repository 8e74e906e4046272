"""Make foreign text safe to show: escape it for terminals, logs and pages, and cut it at a stated length.

Names, messages, printed lines and the content of files go through here before a person or a CI service sees them.
Importing this module imports little.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import IO

LINE = 2_000
"""Largest number of characters of a message or a name; of a longer one, the beginning and the end are kept."""

TEXT = 16_000
"""Largest number of characters of a traceback, or of another text of many lines."""

PRINTED = 4_000
"""Number of characters that are kept of what a rank prints: the last ones."""

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
"""Characters that control a terminal, reorder others, end lines, are invisible, or that XML or UTF-8 cannot write."""

_BREAKS = re.compile("[\t\n]")
_COMMAND = re.compile(r"^(\s*):(?=:)|(?<=#)#(?=\w*\[)", re.MULTILINE)
"""What a CI service would take for a command: a line that begins with "::", and "##[" anywhere (GitHub, Azure)."""


def legible(text: object) -> str:
    """Return a text as one line, with invisible characters, line breaks and the marks of CI commands escaped."""
    return _BREAKS.sub(_escaped, legible_lines(text))


def legible_lines(text: object) -> str:
    """Escape a text as `legible` does, but keep its line feeds and tabs."""
    seen = UNSEEN.sub(_escaped, str(text))
    return _COMMAND.sub(lambda found: f"{found[1]}\\x3a" if found[1] is not None else "\\x23", seen)


def cut(text: str, most: int = LINE) -> str:
    """Shorten a text to its beginning and its end if it is too long, and say how much was left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


def plural(noun: str, count: int) -> str:
    """Return a noun as it follows a number: with an "s" unless the number is 1."""
    return noun if count == 1 else f"{noun}s"


def say_on(file: IO[str]) -> Callable[[str], None]:
    """Return a function that prints texts to a file: escaped, each on a line of its own, at once."""
    return lambda text: print(legible(text), file=file, flush=True)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
