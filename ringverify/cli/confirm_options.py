"""The options of `ringverify confirm`. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.option_types import Renamed, positive, seconds
from ringverify.words import say_on

RULE = (
    "Exit codes: 0 every violation of the reports is shown by its script, 1 at least one is not, whatever the reason, "
    "2 wrong usage, 3 the reports hold no violation."
)
"""The exit codes of the command, as `--help` says them; they are no verdict on an implementation."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "confirm",
        help="show the violations of a report by stand-alone scripts",
        description="Writes a script for each violation of the reports, runs it, and says whether it shows the same.",
        epilog=RULE,
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE.jsonl", help="what check --report wrote")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help="keep the scripts there")
    parser.add_argument(
        "--trust", action="store_true", help="import and run what the cases name without asking, whoever wrote them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write what was seen as JSON")
    parser.add_argument("--report", dest="json", action=Renamed, now="--json")
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print only the imported targets, the violations not shown, and the summary",
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="time for one script (default: 120; of the suite scale: 3600)",
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="scripts side by side (default: 1)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.confirm.confirming import confirm

    return confirm(options, say_on(console.file))
