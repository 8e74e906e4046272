"""The command `ringverify replay`: its options. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.option_types import seconds
from ringverify.reports.terminal import Terminal
from ringverify.words import say_on


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="run a recorded counterexample again",
        description="Runs the case of a file once more, in processes of their own as check does, shows what ranks "
        "print and what is wrong, and says whether the bits are the same. A case that no run in this folder wrote is "
        "asked about before what it names is imported.",
        epilog="Exit codes: 0 the property holds now, 1 it is violated, 2 wrong usage, 3 inconclusive.",
    )
    parser.add_argument("case", type=Path, metavar="CASE", help="a file that check wrote")
    parser.add_argument("--edited", action="store_true", help="accept a file that was changed by hand")
    parser.add_argument(
        "--trust", action="store_true", help="import and run what the case names without asking, whoever wrote it"
    )
    parser.add_argument("--target", help="run the case on another implementation")
    parser.add_argument("--snippet", type=Path, metavar="FILE.py", help="also write the case as a stand-alone script")
    parser.add_argument(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="time for one run (default: 10, gloo 30, on cuda 60, a program 120)",
    )
    parser.add_argument(
        "--load-deadline", type=seconds, metavar="SECONDS", help="time to import the target in a process (default: 120)"
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="for debuggers: run simulated ranks in this very process, as long as they take. A breakpoint() works; a "
        "rank that crashes or ends its process ends the replay with it, and that exit code is no verdict",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show full tracebacks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.cli.replay import replay
    from ringverify.worlds.world import LOAD_SECONDS

    return replay(
        options.case,
        edited=options.edited,
        trust=options.trust,
        target=options.target,
        written=options.snippet,
        deadline=options.deadline,
        load_deadline=options.load_deadline or LOAD_SECONDS,
        in_process=options.in_process,
        say=say_on(console.file),
        show=Terminal(console, verbose=options.verbose, printed=True).tell,
    )
