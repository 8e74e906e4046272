"""The command line: its commands, and the exit codes of the published contract."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from rich.console import Console

import ringverify
from ringverify.bench.command import add_options as add_bench_options
from ringverify.cli.check import add_options as add_check_options
from ringverify.cli.confirm_options import RULE as CONFIRM_RULE
from ringverify.cli.confirm_options import add_options as add_confirm_options
from ringverify.cli.init import add_options as add_init_options
from ringverify.cli.plan_options import add_options as add_plan_options
from ringverify.errors import Inconclusive, UsageError, complain
from ringverify.option_types import Renamed, count, names, positive, seconds
from ringverify.reports.command import add_options as add_report_options
from ringverify.reports.command import with_missing
from ringverify.reports.jsonl import ReportError
from ringverify.reports.terminal import Terminal
from ringverify.vectors.command import add_options as add_vectors_options
from ringverify.words import TEXT, cut, legible, legible_lines
from ringverify.worlds.standard_files import keep_standard_streams

INTERRUPTED = 130
"""Exit status of a command ended by Ctrl-C, as shells have it."""

NOBODY_READS = 141
"""Exit status of a command whose output nobody reads to its end, as in `ringverify list … | head`: as shells have it
for SIGPIPE, and no verdict."""

EXIT_CODES = "Exit codes: 0 conformant, 1 violations, 2 wrong usage, 3 inconclusive."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 conformant, 1 violations, 2 usage, 3 inconclusive."""
    keep_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What an implementation says may hold what the terminal's encoding lacks; that must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more when it flushes at its end
        return NOBODY_READS
    except Exception:
        print(legible_lines(cut(traceback.format_exc(), TEXT)), file=sys.stderr, end="")
        complain(
            "this is an error of ringverify itself, nothing was learned about the implementation; "
            "please report it with the lines above"
        )
        return Inconclusive.exit_code


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command. Short output is written at its end, and only then a reader who has gone is noticed."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
    except SystemExit:  # of --help and --version
        sys.stdout.flush()
        raise
    output = _Stdout()
    output.flush()
    if _Stdout.lost is None:
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more at its end
    lost, _Stdout.lost = _Stdout.lost, None
    return with_missing(code, [f"cannot write to standard output: {lost}"])


class _Stdout:
    """Standard output, for people: a disk that is full there takes no verdict away, and is told of at the end.

    Attributes:
        lost: why it could not be written to.
    """

    lost: str | None = None

    def write(self, text: str) -> int:
        """Write a text, unless an earlier one could not be written."""
        self._unless_lost(lambda: sys.stdout.write(text))
        return len(text)

    def flush(self) -> None:
        """Write all that waits."""
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


def _say(text: str) -> None:
    print(legible(text), file=cast(TextIO, _Stdout()), flush=True)


class _Output(Console):
    """Standard output, for people."""

    def __init__(self) -> None:
        super().__init__(file=cast(TextIO, _Stdout()))

    def on_broken_pipe(self) -> None:
        """Leave it to `main`: rich would exit with 1, which is a verdict."""
        raise BrokenPipeError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse would print the usage first."""

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
    check = commands.add_parser(
        "check",
        help="give a verdict on implementations",
        description="Runs implementations on generated cases in a world of several ranks, and holds every rank to a "
        "float64 oracle. Options that are not typed are those of [tool.ringverify] in the nearest pyproject.toml.",
        epilog=EXIT_CODES,
    )
    add_check_options(check)
    check.set_defaults(command=_check)
    replay = commands.add_parser(
        "replay",
        help="run a recorded counterexample again",
        description="Runs the case of a file once more, in processes of their own as check does, shows what ranks "
        "print and what is wrong, and says whether the bits are the same. A case that no run in this folder wrote is "
        "asked about before what it names is imported.",
        epilog="Exit codes: 0 the property holds now, 1 it is violated, 2 wrong usage, 3 inconclusive.",
    )
    replay.add_argument("case", type=Path, metavar="CASE", help="a file that check wrote")
    replay.add_argument("--edited", action="store_true", help="accept a file that was changed by hand")
    replay.add_argument(
        "--trust", action="store_true", help="import and run what the case names without asking, whoever wrote it"
    )
    replay.add_argument("--target", help="run the case on another implementation")
    replay.add_argument("--snippet", type=Path, metavar="FILE.py", help="also write a script that shows it by itself")
    replay.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="time for one run (default: 10, gloo 30, nccl 60)"
    )
    replay.add_argument(
        "--load-deadline", type=seconds, metavar="SECONDS", help="time to import the target in a process (default: 120)"
    )
    replay.add_argument(
        "--in-process",
        action="store_true",
        help="for debuggers: run simulated ranks in this very process, as long as they take. A breakpoint() works; a "
        "rank that crashes or ends its process ends the replay with it, and that exit code is no verdict",
    )
    replay.add_argument("-v", "--verbose", action="store_true", help="whole tracebacks")
    replay.set_defaults(command=_replay)
    confirm = commands.add_parser(
        "confirm",
        help="show the violations of a report once more, without ringverify",
        description="Writes a script for each violation of the reports, runs it, and says whether it shows the same.",
        epilog=CONFIRM_RULE,
    )
    add_confirm_options(confirm)
    confirm.set_defaults(command=_confirm)
    init = commands.add_parser(
        "init",
        help="write an adapter to fill in",
        description="Writes a file that check gives a verdict on as it is, with a place for a call of your own code.",
    )
    add_init_options(init)
    init.set_defaults(command=_init)
    listing = commands.add_parser("list", help="list what there is")
    listing.add_argument("what", choices=("implementations", "properties", "mutants", "peers"))
    listing.set_defaults(command=_list)
    _add_mutants(commands.add_parser("mutants", help="try the suite on implementations broken on purpose"))
    bench = commands.add_parser("bench", help="measure our ring's speed and memory beside all it can be compared with")
    add_bench_options(bench)
    bench.set_defaults(command=_bench)
    report = commands.add_parser("report", help="make a page, JUnit, Markdown and badges of what check wrote")
    add_report_options(report)
    report.set_defaults(command=_report)
    plan = commands.add_parser("plan", help="draw what our ring would send and compute, rank by rank and hop by hop")
    add_plan_options(plan)
    plan.set_defaults(command=_plan)
    vectors = commands.add_parser("vectors", help="golden vectors: make them, check them, hold implementations to them")
    add_vectors_options(vectors)
    vectors.set_defaults(command=_vectors)
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can run",
        description="Says in three lines which versions are here, which worlds work, and whether checks can run.",
        epilog="Exit codes: 0 checks can run here, 3 they cannot.",
    )
    doctor.add_argument(
        "-v", "--verbose", action="store_true", help="also say it of each world, kernel and built-in implementation"
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _add_mutants(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(command=_mutants)


def _mutants(options: argparse.Namespace) -> int:
    from ringverify.lab.zoo import Wish, run

    wish = Wish(
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
    return run(wish, lambda text: print(legible_lines(text), flush=True))


def _check(options: argparse.Namespace) -> int:
    from ringverify.cli.check import run

    return run(options, _Output())


def _replay(options: argparse.Namespace) -> int:
    from ringverify.cli.replay import replay
    from ringverify.worlds.world import LOAD_SECONDS

    console = _Output()
    return replay(
        options.case,
        edited=options.edited,
        trust=options.trust,
        target=options.target,
        written=options.snippet,
        deadline=options.deadline,
        load_deadline=options.load_deadline or LOAD_SECONDS,
        in_process=options.in_process,
        say=lambda text: console.print(legible(text), highlight=False, markup=False, emoji=False, soft_wrap=True),
        show=Terminal(console, verbose=options.verbose, printed=True).tell,
    )


def _confirm(options: argparse.Namespace) -> int:
    from ringverify.confirm.confirming import confirm

    return confirm(options, _say)


def _init(options: argparse.Namespace) -> int:
    from ringverify.cli.init import write

    return write(options, _say)


def _list(options: argparse.Namespace) -> int:
    from ringverify.targets import BUILT_IN, MUTANT

    match options.what:
        case "properties":
            from ringverify.properties.catalogue import PROPERTIES

            for property in PROPERTIES.values():
                print(f"{property.id:<24}{property.meaning}")
        case "mutants":
            from ringverify.mutants.catalogue import MUTANTS

            for mutant in MUTANTS.values():
                print(f"{MUTANT}{mutant.id:<8}{mutant.kind:<13}{mutant.title}")
        case "peers":
            for name in BUILT_IN:
                if name.startswith("peer:"):
                    print(name)
        case _:
            for name in BUILT_IN:
                print(name)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from ringverify.bench.command import bench

    return bench(options, _Output())


def _report(options: argparse.Namespace) -> int:
    from ringverify.reports.command import report

    return report(options, _say)


def _plan(options: argparse.Namespace) -> int:
    from ringverify.cli.plan_table import plan_table

    return plan_table(options, _Output())


def _vectors(options: argparse.Namespace) -> int:
    from ringverify.vectors.command import run

    return run(options, _Output())


def _doctor(options: argparse.Namespace) -> int:
    from ringverify.cli.doctor import examine

    return examine(print, verbose=options.verbose)
