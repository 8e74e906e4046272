"""The errors that end a command, each with the exit code of the published contract (0 and 1 are verdicts)."""

import difflib
import sys
from collections.abc import Iterable

from ringverify.words import LINE, cut, legible


class UsageError(Exception):
    """The target, an option or a file is wrong; the message is one line that says which and how to fix it."""

    exit_code = 2


class Inconclusive(Exception):
    """Infrastructure failed, so nothing was learned about the implementation; never a pass, never a violation."""

    exit_code = 3


def complain(error: object) -> None:
    """Print what is wrong on standard error, in one line."""
    print(f"ringverify: {legible(cut(str(error), 2 * LINE))}", file=sys.stderr)


def instead(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them."""
    close = difflib.get_close_matches(name, known := list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
