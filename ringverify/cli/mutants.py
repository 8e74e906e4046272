"""The command `ringverify mutants`: its options. Its work is done in `ringverify.lab`, which no other command loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.option_types import Renamed, count, names, positive
from ringverify.words import legible_lines


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "mutants",
        help="try the suite on implementations broken on purpose",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="these mutants only (ringverify list mutants)")
    parser.add_argument("--matrix", action="store_true", help="every property on every mutant, not only the first kill")
    parser.add_argument("--variants", action="store_true", help="correct implementations instead: false alarms")
    parser.add_argument("--only", type=names, metavar="ID,…", help="these properties only")
    parser.add_argument("--skip", type=names, metavar="ID,…", default=(), help="not these properties")
    parser.add_argument("--expected", type=Path, metavar="FILE", help="only the kills that this file expects")
    parser.add_argument("--write-expected", type=Path, metavar="FILE", help="with --matrix: write the cheapest kills")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="decides which cases are tried (default: 0)")
    parser.add_argument(
        "--max-examples", type=positive, metavar="N", help="examples of each property (--variants: in all), at most"
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes side by side (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="add what is found to this file")
    parser.add_argument("--report", action=Renamed, now="--json")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="run nothing, make tables of the file of --json")


def run(options: argparse.Namespace, console: Console) -> int:
    """Try the suite on mutants or on correct variants, and return the exit code."""
    del console
    from ringverify.lab.zoo import MutantsRequest
    from ringverify.lab.zoo import run as try_them

    request = MutantsRequest(
        ids=tuple(options.ids),
        only=options.only,
        skip=options.skip,
        every=options.matrix,
        variants=options.variants,
        expected=options.expected,
        write_expected=options.write_expected,
        report=options.json,
        table=options.table,
        seed=options.seed,
        most=options.max_examples,
        jobs=options.jobs,
    )
    return try_them(request, lambda text: print(legible_lines(text), flush=True))
