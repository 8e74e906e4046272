"""The command `ringverify worker`: a worker to fill in, as a file. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.cli.init import write_to_fill_in

FOLDER = Path(__file__).parent / "workers"
FLAVOURS = ("numpy", "jax")
WRITTEN = "worker.py"
"""Name of the file within the text of each worker."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "worker",
        help="write a worker to fill in, for a program in an environment of its own",
        description="Writes a single file that needs neither ringverify nor torch: the loop that answers cases, and a "
        "place for code of your own. check gives a verdict on it as it is, as on any program that speaks the protocol.",
    )
    parser.add_argument("--write", type=Path, required=True, metavar="FILE.py", help="the file to write")
    parser.add_argument(
        "--flavour",
        choices=FLAVOURS,
        default="numpy",
        help="numpy: needs numpy and safetensors; jax: shards over host devices, and takes gradients with jax.vjp "
        "(default: numpy)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Write the worker, say how to try it, and return 0.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    file: Path = options.write
    text = (FOLDER / f"{options.flavour}_worker.py").read_text(encoding="utf-8")
    target = shlex.quote(f"program: python {shlex.quote(str(file))}")
    text = text.replace(f"'program: python {WRITTEN}'", target)
    place = {"jax": "ring", "numpy": "attend"}[options.flavour]
    do = f"Put your own code into {place}, then run, with its environment's python"
    write_to_fill_in(file, text, do, target, console)
    return 0
