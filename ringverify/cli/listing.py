"""The command `ringverify list`. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("list", help="list implementations, properties, mutants or peers")
    parser.add_argument("what", choices=("implementations", "properties", "merge-properties", "mutants", "peers"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    del console  # one name a line, for other programs to read
    from ringverify.environments import ELSEWHERE, PEER
    from ringverify.targets import BUILT_IN, MERGES, MUTANT

    match options.what:
        case "properties":
            from ringverify.properties.catalogue import PROPERTIES

            for property in PROPERTIES.values():
                print(f"{property.id:<24}{property.meaning}")
        case "merge-properties":
            from ringverify.merging.properties import PROPERTIES as OF_MERGES

            for one in OF_MERGES.values():
                print(f"{one.id:<24}{one.meaning}")
        case "mutants":
            from ringverify.faults.catalogue import MUTANTS

            for mutant in MUTANTS.values():
                print(f"{MUTANT}{mutant.id:<8}{mutant.kind:<13}{mutant.sentence}")
        case "peers":
            for name in (*BUILT_IN, *ELSEWHERE):
                if name.startswith(PEER):
                    print(name)
        case _:
            for name in (*BUILT_IN, *MERGES, *ELSEWHERE):
                print(name)
    return 0
