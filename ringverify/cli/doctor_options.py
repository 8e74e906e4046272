"""The command `ringverify doctor`: its options. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="say what this machine can run",
        description="Says in three lines which versions are here, which worlds work, and whether checks can run.",
        epilog="Exit codes: 0 checks can run here, 3 they cannot.",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also report on each world, kernel and built-in implementation"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    del console
    from ringverify.cli.doctor import examine

    return examine(print, verbose=options.verbose)
