"""The options of `ringverify plan`. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ringref.problem import DTYPES
from ringverify.implementation import SHARDING_NAMES
from ringverify.option_types import branches, positive


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="draw what our ring would send and compute, rank by rank and hop by hop",
        description="Prints what each rank of our ring would compute and receive at each step, and how evenly the work "
        "is shared. All of it is counted from the plan: nothing is run.",
    )
    parser.add_argument("--length", type=int, required=True, metavar="N", help="positions over all ranks")
    parser.add_argument("--key-length", type=int, metavar="N", help="number of keys, if not --length (cross lengths)")
    parser.add_argument("--ranks", type=positive, required=True, metavar="P", help="ranks of the ring")
    parser.add_argument("--sharding", choices=SHARDING_NAMES, default="contiguous", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="bottom-right aligned")
    parser.add_argument("--window", metavar="LEFT,RIGHT", help="both inclusive; 'none' is unbounded")
    parser.add_argument("--documents", metavar="0,N1,…", help="cumulative document lengths")
    parser.add_argument("--dilation", type=branches, metavar="W:R,…", help="branches, segment length and dilation rate")
    parser.add_argument("--head-mode", choices=("split", "shared"), default="split", help="default: %(default)s")
    parser.add_argument("--head-offset", choices=("cyclic", "block"), default="cyclic", help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=8, metavar="H", help="default: %(default)s")
    parser.add_argument("--key-heads", type=int, metavar="K", help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--bucket", type=positive, metavar="ROWS", help="longest side of a tile; default: the CPU kernel's"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.cli.plan_table import plan_table

    return plan_table(options, console)
