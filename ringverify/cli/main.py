"""The command line: its commands, and the exit codes of the published contract."""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO, cast

from rich.console import Console

import ringverify
from ringverify.bench import command as bench
from ringverify.cli import (
    check,
    confirm_options,
    doctor_options,
    init,
    listing,
    mutants,
    peers,
    plan_options,
    replay_options,
    worker,
)
from ringverify.cli.check import EXIT_CODES
from ringverify.errors import Inconclusive, UsageError, complain
from ringverify.interrupts import interrupts
from ringverify.reach import command as reach
from ringverify.reports import command as report
from ringverify.reports.command import with_missing
from ringverify.reports.jsonl import ReportError
from ringverify.vectors import command as vectors
from ringverify.words import TEXT, cut, legible_lines
from ringverify.worlds.exceptions import one_line
from ringverify.worlds.limits import limit_of, sentence
from ringverify.worlds.standard_files import keep_standard_streams

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in shells."""

NOBODY_READS = 141
"""Exit status of a command whose output was closed by its reader, as in `ringverify list … | head`.

Shells have it for SIGPIPE; it is no verdict.
"""

COMMANDS = (
    check,
    replay_options,
    confirm_options,
    init,
    worker,
    peers,
    listing,
    mutants,
    bench,
    report,
    plan_options,
    vectors,
    reach,
    doctor_options,
)
"""Modules of the commands: each adds a parser that names the function to run, and none imports torch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 conformant, 1 violations, 2 usage, 3 inconclusive."""
    keep_standard_streams()
    atexit.register(gc.freeze)  # or the interpreter, as it ends, looks for garbage among all that torch has made
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An implementation's text may hold characters that the terminal's encoding lacks; that must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interrupts():
            return _run(arguments)
    except (UsageError, Inconclusive) as error:
        complain(error)
        return error.exit_code
    except ReportError as error:
        complain(error)
        return UsageError.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains again when it flushes at exit
        return NOBODY_READS
    except Exception as error:
        if (limit := limit_of(error)) is not None:
            complain(f"nothing was learned: {sentence(limit)}: {one_line(error)}")
            return Inconclusive.exit_code
        print(legible_lines(cut(traceback.format_exc(), TEXT)), file=sys.stderr, end="")
        complain(
            "an error of ringverify itself, and no verdict on the implementation; please report it with the traceback "
            "above"
        )
        return Inconclusive.exit_code


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command and flush its output: for short output, only that shows that its reader has gone."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options, _StandardOutput())
    except SystemExit:  # of --help and --version
        sys.stdout.flush()
        raise
    output = _Stdout()
    output.flush()
    if _Stdout.lost is None:
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries to flush again at exit
    lost, _Stdout.lost = _Stdout.lost, None
    return with_missing(code, [f"cannot write to standard output: {lost}"])


class _Stdout:
    """Standard output that outlives a failed write, such as to a full disk: the command goes on to its verdict.

    Attributes:
        lost: why a write failed; `None` while none has.
    """

    lost: str | None = None

    def write(self, text: str) -> int:
        """Write a text, unless an earlier write failed."""
        self._unless_lost(lambda: sys.stdout.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the output, unless an earlier write failed."""
        self._unless_lost(sys.stdout.flush)

    def _unless_lost(self, act: Callable[[], object]) -> None:
        if _Stdout.lost is None:
            try:
                act()
            except BrokenPipeError:
                raise
            except OSError as error:
                _Stdout.lost = error.strerror

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class _StandardOutput(Console):
    """A rich console on standard output."""

    def __init__(self) -> None:
        super().__init__(file=cast(TextIO, _Stdout()))

    def on_broken_pipe(self) -> None:
        """Raise for `main` to handle: rich would exit with 1, which is a verdict."""
        raise BrokenPipeError


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, where argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ringverify",
        description="Does this ring attention compute attention?",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ringverify {ringverify.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
