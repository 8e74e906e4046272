"""The command `ringverify mutants`: its options. Its work is done in `ringverify.lab`, which no other command loads."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.option_types import AUTO, Renamed, Repeatable, count, jobs, names, positive
from ringverify.words import legible_lines


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "mutants",
        help="try the suite on implementations broken on purpose",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="these mutants only (ringverify list mutants)")
    parser.add_argument(
        "--matrix",
        dest="every",
        action="store_true",
        help="every property on every mutant, not only the first kill",
    )
    parser.add_argument("--variants", action="store_true", help="correct implementations instead: false alarms")
    parser.add_argument(
        "--merges", action="store_true", help="merges of partial results instead: wrong ones and correct ones"
    )
    parser.add_argument("--only", action=Repeatable, type=names, metavar="ID,…", help="these properties only")
    parser.add_argument(
        "--skip", action=Repeatable, type=names, metavar="ID,…", default=(), help="not these properties"
    )
    parser.add_argument("--expected", type=Path, metavar="FILE", help="only the kills that this file expects")
    parser.add_argument("--write-expected", type=Path, metavar="FILE", help="with --matrix: write the cheapest kills")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="decides which cases are tried (default: 0)")
    parser.add_argument(
        "--max-examples",
        dest="most",
        type=positive,
        metavar="N",
        help="examples of each property (--variants: in all), at most",
    )
    parser.add_argument(
        "--jobs",
        type=jobs,
        default=AUTO,
        metavar="N|auto",
        help="processes that try mutants side by side (default: auto, one for each core)",
    )
    parser.add_argument("--json", dest="report", type=Path, metavar="FILE.json", help="add what is found to this file")
    parser.add_argument("--report", action=Renamed, now="--json")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="run nothing, make tables of the file of --json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Try the suite on mutants or on correct variants, and return the exit code."""
    del console
    from ringverify.lab.mutant_runs import MutantsRequest
    from ringverify.lab.mutant_runs import run as try_them
    from ringverify.worlds.limits import cores

    options.jobs = cores() if options.jobs == AUTO else options.jobs
    request = MutantsRequest(**{field.name: getattr(options, field.name) for field in fields(MutantsRequest)})
    return try_them(request, lambda text: print(legible_lines(text), flush=True))
