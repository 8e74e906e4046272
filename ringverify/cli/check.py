"""The command `ringverify check`: its options and what it does. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ringverify import targets
from ringverify.check.configuration import TABLE, configured
from ringverify.check.option_table import ARGUMENTS, add_to
from ringverify.check.options import CheckRequest, Subject, Unavailable, device_for
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import Event
from ringverify.merge_contract import MergeImplementation
from ringverify.option_types import AUTO
from ringverify.properties.suites import SCALE
from ringverify.reports.command import Outputs, with_missing
from ringverify.reports.jsonl import ReportWriter
from ringverify.reports.results import results_of
from ringverify.reports.terminal import ProgressBar, Terminal

if TYPE_CHECKING:
    from ringverify.merging.run import MergeSubject

EXIT_CODES = "Exit codes: 0 conformant, 1 violations, 2 wrong usage, 3 inconclusive."


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check",
        help="give a verdict on implementations",
        description="Runs implementations on generated cases in a world of several ranks, and holds every rank to a "
        "float64 oracle. Options that are not typed are those of [tool.ringverify] in the nearest pyproject.toml.",
        epilog=EXIT_CODES,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command.

    Every default means "not given": `configured` then fills in the value of pyproject.toml, and `Options` the default.
    """
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="a built-in name (ringverify list implementations), module:attribute, path/to/file.py:attribute, "
        "'program: COMMAND' or peer:NAME (ringverify peers)",
    )
    add_to(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.worlds.limits import cores
    from ringverify.worlds.processes import torchrun
    from ringverify.worlds.processes.rank import one_thread_for_numpy, start_fork_server
    from ringverify.worlds.world import WorldUnavailable

    options = configured(options, Path.cwd())
    here = torchrun.placement()
    if here is not None and here.rank > 0:
        # Only rank 0 prints, writes reports and returns the verdict; the other ranks serve it.
        return 0 if options.world == "simulated" else torchrun.serve(here)

    if not options.targets:
        raise UsageError(
            f"no TARGET to check: name one, or targets = […] under [{TABLE}] of pyproject.toml; "
            "see ringverify check --help"
        )
    # Before torch is imported, which takes seconds: a target is easily mistyped.
    _look(options.targets)
    alone = options.jobs == 1 or (options.jobs in (None, AUTO) and cores() == 1)
    with contextlib.suppress(OSError):  # if it cannot be started, the first run that needs it says so
        # It imports torch, and what workers need, while this process does.
        start_fork_server("ringverify.worlds.processes.contained" if alone else "ringverify.check.units")

    with one_thread_for_numpy():  # the oracle's, where this process has no workers
        from ringverify.check.run import check
        from ringverify.merging.run import asked_of_merges, check_merges
        from ringverify.scale.request import wanted
        from ringverify.scale.run import check_scale

    subjects, merges = _subjects(options.targets, options.load_deadline, console)
    request = CheckRequest(**{name: getattr(options, name) for name in ARGUMENTS})
    of_merges = asked_of_merges(request) if merges else []
    asked = request.options(stop_early=options.exitfirst, verbose=options.verbose)
    long = wanted(request, options.length, options.problem, options.sharding) if options.suite == SCALE else None
    if long is None and (options.length or options.problem or options.sharding):
        raise UsageError(f"--length, --problem and --sharding are options of --suite {SCALE}: add it or leave them out")
    properties = [] if long is not None or merges else request.properties()
    outputs = Outputs.of(options)
    outputs.look(written=[options.report] if options.report else [])
    terminal = Terminal(console, verbose=options.verbose, quiet=options.quiet)
    bar = ProgressBar(console, quiet=options.quiet)
    events: list[Event] = []
    with contextlib.ExitStack() as stack:
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
        if crew is not None and crew.name == "nccl":
            asked = dataclasses.replace(asked, device=device_for(options.device, options.world, on_gpus=True))
        if merges:
            code = check_merges(merges, of_merges, asked, tell, bar)
        elif long is not None:
            code = check_scale(subjects, asked, long, tell, bar, crew)
        else:
            code = check(subjects, properties, asked, tell, bar, crew)
    missing = outputs.write(results_of(events))[1]
    if writer is not None and writer.failure is not None:
        missing.append(writer.failure)
    return with_missing(code, missing)


def _look(wanted: Sequence[str]) -> None:
    """Look for the targets, without importing anything.

    Raises:
        UsageError: there is no such target, or one is named twice.
    """
    for place, target in enumerate(wanted):
        if target in wanted[:place]:
            raise UsageError(f"the target {target!r} is named twice: leave one out")
        targets.located(target)


def _subjects(
    wanted: Sequence[str], seconds: float | None, console: Console
) -> tuple[list[Subject | Unavailable], list[MergeSubject | Unavailable]]:
    """Return what is to be checked, implementations or merges; targets that cannot be checked here have the reason.

    Targets are imported in other processes, one after the other; a terminal shows the one that is being imported.

    Raises:
        UsageError: a target is wrong, or some are implementations and some are merges.
        Inconclusive: none of the targets can be checked here.
    """
    from ringverify.describing import describe_any
    from ringverify.merging.run import MergeSubject

    subjects: list[Subject] = []
    merges: list[MergeSubject] = []
    missing: list[Unavailable] = []
    for target in wanted:
        try:
            with console.status(Text(f"loading {target}")):
                found = describe_any(target, seconds=seconds)
            if isinstance(found, MergeImplementation):
                merges.append(MergeSubject(target, found))
            else:
                subjects.append(Subject(target, found))
        except Inconclusive as error:
            missing.append(Unavailable(target, str(error)))
    if subjects and merges:
        raise UsageError(
            f"{merges[0].target} is a merge and {subjects[0].target} an implementation of attention: "
            "check them in two runs"
        )
    if not subjects and not merges:
        raise Inconclusive("; ".join(subject.reason for subject in missing))
    in_turn = {target: place for place, target in enumerate(wanted)}
    return (
        sorted([*subjects, *missing], key=lambda one: in_turn[one.target]) if subjects else [],
        sorted([*merges, *missing], key=lambda one: in_turn[one.target]) if merges else [],
    )
