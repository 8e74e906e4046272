"""The command `ringverify check`: its options and what it does. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ringverify.check.configuration import TABLE, configured
from ringverify.check.interrupts import Progress, interrupts
from ringverify.check.options import Options, Subject, Unavailable, seed_for
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import Event
from ringverify.option_types import count, names, positive, seconds, sizes
from ringverify.properties.suites import SUITES
from ringverify.reports.command import Outputs, add_outputs, with_missing
from ringverify.reports.jsonl import ReportWriter
from ringverify.reports.results import results_of
from ringverify.reports.terminal import Terminal


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command.

    Their defaults are all "not said": `configured` fills in what pyproject.toml says, and `Options` what nobody says.
    """
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="a built-in name (ringverify list implementations), module:attribute or path/to/file.py:attribute",
    )
    parser.add_argument(
        "--world", choices=("simulated", "gloo", "nccl"), help="where ranks run (default: what the target declares)"
    )
    parser.add_argument("--world-sizes", type=sizes, metavar="1,2,3", help="numbers of ranks")
    parser.add_argument("--device", help="device of the tensors (default: cpu; nccl world: cuda)")
    parser.add_argument("--suite", choices=SUITES, help="how many examples (default: quick; smoke takes seconds)")
    parser.add_argument("--only", type=names, metavar="ID,…", help="these properties only")
    parser.add_argument("--skip", type=names, metavar="ID,…", help="not these properties")
    parser.add_argument(
        "--seed",
        type=count,
        metavar="N",
        help="decides which cases are tried (default: 0; nightly: a new one each run, printed at the start)",
    )
    parser.add_argument("--max-examples", type=positive, metavar="N", help="examples of each property, at most")
    parser.add_argument(
        "--time-budget", type=seconds, metavar="SECONDS", help="time for the run, shared among properties"
    )
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="time for one run of a case (default: 10, gloo 30)"
    )
    parser.add_argument(
        "--load-deadline", type=seconds, metavar="SECONDS", help="time to import the target in a process (default: 120)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE.jsonl", help="write events as JSON lines")
    add_outputs(parser)
    parser.add_argument(
        "--cases",
        type=Path,
        metavar="DIR",
        help="folder for counterexamples; those of earlier runs are tried first (default: .ringverify)",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE.toml", help="violations that are known: shown, but the run does not fail"
    )
    parser.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first violation")
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument(
        "-v", "--verbose", action="store_true", help="whole tracebacks; who sends how much to whom; memory at its peak"
    )
    how_much.add_argument("-q", "--quiet", action="store_true", help="print only what did not pass, and the verdict")
    parser.set_defaults(said_in=parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.worlds.processes import torchrun
    from ringverify.worlds.world import WorldUnavailable

    options = configured(options, options.said_in, Path.cwd())
    here = torchrun.placement()
    if here is not None and here.rank > 0:
        # One process speaks for all: the verdict, the reports and the exit code are rank 0's.
        return 0 if options.world == "simulated" else torchrun.serve(here)

    if not options.targets:
        raise UsageError(
            f"no TARGET to check: name one, or targets = […] under [{TABLE}] of pyproject.toml; "
            "see ringverify check --help"
        )
    # Before torch is imported, which takes seconds: a target is easily mistyped.
    subjects = _subjects(options.targets, options.load_deadline, console)

    from ringverify.check.baseline import read_baseline
    from ringverify.check.planning import device_for
    from ringverify.check.profiles import home_of_our_own
    from ringverify.check.run import check
    from ringverify.properties.catalogue import select

    device_for(options.device, options.world)  # refused before torchrun's other processes are met
    properties = select(options.only, options.skip or ())
    baseline = None if options.baseline is None else read_baseline(options.baseline)
    outputs = Outputs.of(options)
    outputs.look(written=[options.report] if options.report else [])
    terminal = Terminal(console, verbose=options.verbose, quiet=options.quiet)
    default = Options()
    suite = options.suite or default.suite
    events: list[Event] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(home_of_our_own())
        writer = stack.enter_context(ReportWriter(options.report)) if options.report else None

        def tell(event: Event) -> None:
            terminal.tell(event)
            if writer is not None:
                writer.write(event)
            events.append(event)

        crew = None
        if here is not None and options.world != "simulated":
            try:
                crew = stack.enter_context(contextlib.closing(torchrun.Crew(here, options.world)))
            except WorldUnavailable as error:
                raise Inconclusive(str(error)) from None
            console.print(f"under torchrun: {crew.remark}", highlight=False, markup=False, soft_wrap=True)
        on_gpus = crew is not None and crew.name == "nccl"
        code = check(
            subjects,
            properties,
            Options(
                suite=suite,
                world=options.world,
                world_sizes=options.world_sizes,
                device=device_for(options.device, options.world, on_gpus=on_gpus),
                seed=seed_for(suite, options.seed),
                max_examples=options.max_examples,
                time_budget=options.time_budget,
                deadline=options.deadline,
                load_deadline=options.load_deadline or default.load_deadline,
                cases=options.cases or default.cases,
                stop_early=options.exitfirst,
                verbose=options.verbose,
                baseline=baseline,
            ),
            tell,
            Progress(console, stack.enter_context(interrupts())),
            crew,
        )
    missing = outputs.write(results_of(events))[1]
    if writer is not None and writer.failure is not None:
        missing.append(writer.failure)
    return with_missing(code, missing)


def _subjects(wanted: Sequence[str], seconds: float | None, console: Console) -> list[Subject | Unavailable]:
    """What is to be checked; what cannot be checked here is told of, if there is something else to check.

    The targets are imported elsewhere, one after the other, and on a terminal the one whose turn it is is shown.

    Raises:
        UsageError: a target is wrong.
        Inconclusive: nothing can be checked here.
    """
    from ringverify.describing import describe

    subjects: list[Subject | Unavailable] = []
    for place, target in enumerate(wanted):
        if target in wanted[:place]:
            raise UsageError(f"the target {target!r} is asked for twice: once is enough")
        try:
            with console.status(Text(f"loading {target}")):
                subjects.append(Subject(target, describe(target, seconds=seconds)))
        except Inconclusive as error:
            subjects.append(Unavailable(target, str(error)))
    reasons = [subject.reason for subject in subjects if isinstance(subject, Unavailable)]
    if len(reasons) == len(subjects):
        raise Inconclusive("; ".join(reasons))
    return subjects
