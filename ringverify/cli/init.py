"""The command `ringverify init`: an adapter to fill in, as a file. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.errors import UsageError
from ringverify.files import write_named
from ringverify.words import say_on

FOLDER = Path(__file__).parent / "adapters"
KINDS = ("function", "module", "ulysses")
WRITTEN = Path("adapter.py")
"""Default name of the file to write, which is also the name within the text of each adapter."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "init",
        help="write an adapter to fill in",
        description="Writes a file that check gives a verdict on as it is, with a place for a call of your own code.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=WRITTEN, metavar="FILE.py", help="the file to write (default: adapter.py)"
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="function",
        help="function: code that is called with shards of q, k and v; module: a torch module that is built with a "
        "process group; ulysses: all-to-all over heads (default: function)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Write the adapter, say how to try it, and return 0.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    target = shlex.quote(f"{options.file}:attend")
    text = (FOLDER / f"{options.kind}.py").read_text(encoding="utf-8").replace(f"{WRITTEN}:attend", target)
    write_to_fill_in(options.file, text, "Put a call of your own into attend, then run", target, console)
    return 0


def write_to_fill_in(file: Path, text: str, do: str, target: str, console: Console) -> None:
    """Write a file of Python with a place for the user's code, and say what to `do` with it and how to check `target`.

    Raises:
        UsageError: the file exists, does not end in .py, or cannot be written.
    """
    if file.suffix != ".py":
        raise UsageError(f"{file} does not end in .py: name FILE.py")
    if os.path.lexists(file):
        raise UsageError(f"{file} exists and was not changed: name another file")
    write_named(file, text)
    say = say_on(console.file)
    say(f"wrote {file}, which passes as it is. {do}:")
    say(f"  ringverify check {target} --suite smoke")
