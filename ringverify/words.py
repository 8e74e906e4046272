"""What others say, as text to be shown: escaped for terminals, logs and pages, and cut at a stated length.

Names, messages, printed lines and whatever a file says go through here before a person or a CI service sees them.
Importing this module imports little.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import IO

LINE = 2_000
"""Characters of a message or a name, at most: of more, the beginning and the end are kept."""

TEXT = 16_000
"""Characters of a traceback, or of another text of many lines, at most."""

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
"""Signs that do as they please on a terminal or a page, change the order of others, end lines, or cannot be seen, and
those that XML or UTF-8 has no way to write."""

_BREAKS = re.compile("[\t\n]")
_COMMAND = re.compile(r"^(\s*):(?=:)|(?<=#)#(?=\w*\[)", re.MULTILINE)
"""What a CI service would take for an order: a line that begins with "::", and "##[" anywhere (GitHub, Azure)."""


def legible(text: object) -> str:
    """A text on one line: what cannot be seen, line breaks and the marks of a CI service's orders are escaped."""
    return _BREAKS.sub(_escaped, legible_lines(text))


def legible_lines(text: object) -> str:
    """The same of a text whose lines stay lines, and whose tabs stay tabs."""
    seen = UNSEEN.sub(_escaped, str(text))
    return _COMMAND.sub(lambda found: f"{found[1]}\\x3a" if found[1] is not None else "\\x23", seen)


def cut(text: str, most: int = LINE) -> str:
    """The beginning and the end of a text that is too long, with how much of it was left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


def say_on(file: IO[str]) -> Callable[[str], None]:
    """A function that prints texts to a file: each legible, on a line of its own, at once."""
    return lambda text: print(legible(text), file=file, flush=True)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
