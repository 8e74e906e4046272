"""The errors that end a command, each with the exit code of the published contract (0 and 1 are verdicts)."""

import sys

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
