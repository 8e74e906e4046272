"""The command line: `ringverify check | replay | list | doctor`, and the exit codes of the published contract."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

import ringverify
from ringverify.bench.command import add_options as add_bench_options
from ringverify.check.plan_options import add_options as add_plan_options
from ringverify.errors import Inconclusive, UsageError
from ringverify.reports.jsonl import Event, ReportError, ReportWriter
from ringverify.reports.terminal import ProgressBar, Terminal

INTERRUPTED = 130
"""Exit status of a command ended by Ctrl-C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 conformant, 1 violations, 2 usage, 3 inconclusive."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What an implementation says may hold what the terminal's encoding lacks; that must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        code: int = options.command(options)
    except (UsageError, Inconclusive) as error:
        print(f"ringverify: {error}", file=sys.stderr)
        return error.exit_code
    except ReportError as error:
        print(f"ringverify: {error}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        print("ringverify: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more when it flushes at its end
        print("ringverify: nobody reads the output any more, so the run was ended", file=sys.stderr)
        return Inconclusive.exit_code
    except Exception:
        traceback.print_exc()
        print(
            "ringverify: this is an error of ringverify itself, nothing was learned about the implementation; "
            "please report it with the lines above",
            file=sys.stderr,
        )
        return Inconclusive.exit_code
    return code


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises `KeyboardInterrupt`, and what this gives raises it once more, should it have been lost.

    Python ignores what is raised while it collects garbage, and Hypothesis has it call a function then.
    """
    came: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def look() -> None:
        if came:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield look
        return

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if not (came and unraisable.exc_type is KeyboardInterrupt):  # that one is not lost: `look` finds it
            tell(unraisable)

    before, tell = signal.signal(signal.SIGINT, interrupt), sys.unraisablehook
    sys.unraisablehook = lost
    try:
        yield look
    finally:
        sys.unraisablehook = tell
        signal.signal(signal.SIGINT, before)


class _Progress(ProgressBar):
    """The bar, which also is where a lost interrupt is found."""

    def __init__(self, console: Console, look: Callable[[], None]) -> None:
        super().__init__(console)
        self._look = look

    def step(self, done: int) -> None:
        """So many cases have been tried."""
        self._look()
        super().step(done)


class _Output(Console):
    """Standard output, for people."""

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
        epilog="Exit codes: 0 conformant, 1 violations, 2 wrong usage, 3 inconclusive.",
    )
    parser.add_argument("--version", action="version", version=f"ringverify {ringverify.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_check(commands.add_parser("check", help="give a verdict on implementations"))
    replay = commands.add_parser("replay", help="run a recorded counterexample again")
    replay.add_argument("case", type=Path, metavar="CASE", help="a file that check wrote")
    replay.add_argument("--edited", action="store_true", help="accept a file that was changed by hand")
    replay.add_argument("--target", help="run the case on another implementation")
    replay.add_argument("--snippet", type=Path, metavar="FILE.py", help="also write a script that shows it by itself")
    replay.add_argument("-v", "--verbose", action="store_true", help="whole tracebacks")
    replay.set_defaults(command=_replay)
    listing = commands.add_parser("list", help="list what there is")
    listing.add_argument("what", choices=("implementations", "properties", "mutants", "peers"))
    listing.set_defaults(command=_list)
    _add_mutants(commands.add_parser("mutants", help="try the suite on implementations broken on purpose"))
    bench = commands.add_parser("bench", help="measure our ring's speed and memory beside all it can be compared with")
    add_bench_options(bench)
    bench.set_defaults(command=_bench)
    plan = commands.add_parser("plan", help="draw what our ring would send and compute, rank by rank and hop by hop")
    add_plan_options(plan)
    plan.set_defaults(command=_plan)
    doctor = commands.add_parser("doctor", help="say what this machine can run")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="a built-in name (ringverify list implementations), module:attribute or path/to/file.py:attribute",
    )
    parser.add_argument(
        "--world", choices=("simulated", "gloo", "nccl"), help="where ranks run (default: what the target declares)"
    )
    parser.add_argument("--world-sizes", type=_sizes, metavar="1,2,3", help="numbers of ranks")
    parser.add_argument("--device", help="device of the tensors (default: cpu; nccl world: cuda)")
    parser.add_argument("--suite", choices=("quick", "full", "nightly"), default="quick", help="how many examples")
    parser.add_argument("--only", type=_names, metavar="ID,…", help="these properties only")
    parser.add_argument("--skip", type=_names, metavar="ID,…", default=(), help="not these properties")
    parser.add_argument(
        "--seed", type=_count, default=0, metavar="N", help="decides which cases are tried (default: 0)"
    )
    parser.add_argument("--max-examples", type=_positive, metavar="N", help="examples of each property, at most")
    parser.add_argument("--time-budget", type=_seconds, metavar="SECONDS", help="time for the whole run")
    parser.add_argument(
        "--deadline", type=_seconds, metavar="SECONDS", help="time for one run of a case (default: 10, gloo 30)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.jsonl", help="write events as JSON lines")
    parser.add_argument(
        "--cases", type=Path, default=Path(".ringverify"), metavar="DIR", help="folder for counterexamples"
    )
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first violation")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="whole tracebacks; who sends how much to whom; memory at its peak"
    )
    parser.set_defaults(command=_check)


def _add_mutants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="ID", help="these mutants only (ringverify list mutants)")
    parser.add_argument("--matrix", action="store_true", help="every property on every mutant, not only the first kill")
    parser.add_argument("--variants", action="store_true", help="correct implementations instead: false alarms")
    parser.add_argument("--only", type=_names, metavar="ID,…", help="these properties only")
    parser.add_argument("--skip", type=_names, metavar="ID,…", default=(), help="not these properties")
    parser.add_argument("--expected", type=Path, metavar="FILE", help="only the kills that this file expects")
    parser.add_argument("--write-expected", type=Path, metavar="FILE", help="with --matrix: write the cheapest kills")
    parser.add_argument(
        "--seed", type=_count, default=0, metavar="N", help="decides which cases are tried (default: 0)"
    )
    parser.add_argument(
        "--max-examples", type=_positive, metavar="N", help="examples of each property (--variants: in all), at most"
    )
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="processes side by side (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="add what is found to this file")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="run nothing, make tables of the report")
    parser.set_defaults(command=_mutants)


def _mutants(options: argparse.Namespace) -> int:
    from ringverify.check.zoo import Wish, run

    wish = Wish(
        ids=tuple(options.ids),
        only=options.only,
        skip=options.skip,
        every=options.matrix,
        variants=options.variants,
        expected=options.expected,
        write_expected=options.write_expected,
        report=options.report,
        table=options.table,
        seed=options.seed,
        most=options.max_examples,
        jobs=options.jobs,
    )
    return run(wish, lambda text: print(text, flush=True))


def _check(options: argparse.Namespace) -> int:
    from ringverify import targets
    from ringverify.worlds import torchrun
    from ringverify.worlds.world import WorldUnavailable

    here = torchrun.placement()
    if here is not None and here.rank > 0:
        # One process speaks for all: the verdict, the reports and the exit code are rank 0's.
        return 0 if options.world == "simulated" else torchrun.serve(here)

    # Before torch is imported, which takes seconds: a target is easily mistyped.
    implementations = [targets.load(target) for target in options.targets]

    from hypothesis.configuration import set_hypothesis_home_dir

    from ringverify.check.run import Options, Subject, check
    from ringverify.properties.catalogue import select

    if options.world == "nccl" and options.device not in (None, "cuda"):
        raise UsageError(f"--device {options.device}: in the nccl world each rank has a GPU of its own; leave it out")
    properties = select(options.only, options.skip)
    subjects = [Subject(*pair) for pair in zip(options.targets, implementations, strict=True)]
    console = _Output()
    terminal = Terminal(console, verbose=options.verbose)
    with contextlib.ExitStack() as stack:
        # Hypothesis keeps a cache under the current directory, which is the user's.
        set_hypothesis_home_dir(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(set_hypothesis_home_dir, None)
        writer = stack.enter_context(ReportWriter(options.report)) if options.report else None

        def tell(event: Event) -> None:
            terminal.tell(event)
            if writer is not None:
                writer.write(event)

        crew = None
        if here is not None and options.world != "simulated":
            try:
                crew = stack.enter_context(contextlib.closing(torchrun.Crew(here, options.world)))
            except WorldUnavailable as error:
                raise Inconclusive(str(error)) from None
            console.print(f"under torchrun: {crew.remark}", highlight=False, markup=False, soft_wrap=True)
        on_gpus = options.world == "nccl" or (crew is not None and crew.name == "nccl")
        return check(
            subjects,
            properties,
            Options(
                suite=options.suite,
                world=options.world,
                world_sizes=options.world_sizes,
                device=options.device or ("cuda" if on_gpus else "cpu"),
                seed=options.seed,
                max_examples=options.max_examples,
                time_budget=options.time_budget,
                deadline=options.deadline,
                cases=options.cases,
                stop_early=options.exitfirst,
                verbose=options.verbose,
            ),
            tell,
            _Progress(console, stack.enter_context(_interrupts())),
            crew,
        )


def _replay(options: argparse.Namespace) -> int:
    from ringverify.check.replaying import replay

    console = _Output()
    return replay(
        options.case,
        edited=options.edited,
        target=options.target,
        written=options.snippet,
        say=lambda text: console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True),
        show=Terminal(console, verbose=options.verbose).counterexample,
    )


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


def _plan(options: argparse.Namespace) -> int:
    from ringverify.check.plan_table import plan_table

    return plan_table(options, _Output())


def _doctor(options: argparse.Namespace) -> int:
    from ringverify.check.doctor import examine

    return examine(print)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names separated by commas")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected world sizes of at least 1, separated by commas")
    return sizes


def _count(text: str) -> int:
    return _whole(text, 0)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, minimum: int) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {minimum}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number of seconds")
    return seconds
