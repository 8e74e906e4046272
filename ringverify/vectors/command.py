"""The command `ringverify vectors`: its options and what it does. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.errors import UsageError
from ringverify.implementation import Implementation
from ringverify.merge_contract import MergeImplementation
from ringverify.option_types import AUTO, Repeatable, jobs, names
from ringverify.reports.command import Outputs, add_outputs, with_missing
from ringverify.reports.terminal import ProgressBar, Terminal
from ringverify.words import say_on

FOLDER = Path("fixtures")
"""Default folder, in which vectors are made and first looked for."""

OURS = (Path(__file__).parent / "fixtures", Path(__file__).parents[2] / "fixtures")
"""Folders of the vectors that come with ringverify: inside the installed package, or beside it in a checkout."""


def add_parser(commands: Any) -> None:
    """Add the command `vectors`."""
    parser = commands.add_parser(
        "vectors",
        help="golden vectors: generate them, check them, run implementations on them",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="check the files and their checksums, and compute their results again; with --target, run an "
        "implementation on them",
    )
    check.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder of vectors (default: ./fixtures if it has an index, else those that ringverify ships)",
    )
    check.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGET",
        help="run this implementation on the vectors; may be repeated",
    )
    check.add_argument("--only", dest="ids", action=Repeatable, type=names, metavar="ID,…", help="these vectors only")
    check.add_argument(
        "--world", choices=("simulated", "gloo", "nccl"), help="where a target's ranks run (default: what it declares)"
    )
    check.add_argument("--device", help="device of a target's tensors (default: cpu; nccl world: cuda)")
    check.add_argument(
        "--jobs",
        type=jobs,
        metavar="N|auto",
        help="processes that try vectors on a target side by side, in the simulated world (default: auto, one for each "
        "core, fewer for few vectors)",
    )
    check.add_argument(
        "--report", type=Path, metavar="FILE.jsonl", help="write the result of each vector as JSON lines"
    )
    add_outputs(check)
    how_much = check.add_mutually_exclusive_group()
    how_much.add_argument("-v", "--verbose", action="store_true", help="show full tracebacks")
    how_much.add_argument("-q", "--quiet", action="store_true", help="print only what did not pass, and the verdict")
    check.set_defaults(action=_check)
    generate = actions.add_parser("generate", help="make every vector, the same bits on every machine")
    generate.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=FOLDER,
        metavar="DIR",
        help="folder to write them to (default: fixtures)",
    )
    generate.add_argument(
        "--force", action="store_true", help="overwrite vectors that differ, and delete files of unknown ids"
    )
    generate.set_defaults(action=_generate)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    code: int = options.action(options, console)
    return code


def _brought_along() -> Path:
    """Return the folder of vectors to check when none is named."""
    from ringverify.vectors import index

    return next((folder for folder in (FOLDER, *OURS) if (folder / index.NAME).is_file()), FOLDER)


def _check(options: argparse.Namespace, console: Console) -> int:
    from ringverify.describing import describe_any
    from ringverify.worlds.processes.rank import start_fork_server

    if not options.target:
        for name in ("world", "device", "jobs"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for a --target: name one, or leave it out")
        return _look(options, console)
    if options.world == "nccl" and options.device not in (None, "cuda"):
        raise UsageError(f"--device {options.device}: in the nccl world each rank has a GPU of its own; leave it out")
    with contextlib.suppress(OSError):  # if it cannot be started, the first run that needs it says so
        start_fork_server("ringverify.worlds.processes.contained" if options.jobs == 1 else "ringverify.check.units")
    # A mistyped target is reported before torch is imported, which takes seconds.
    implementations = [describe_any(target) for target in options.target]

    from ringverify.check.options import Subject
    from ringverify.merging.run import MergeSubject
    from ringverify.vectors import index
    from ringverify.vectors.merge_trial import try_merges
    from ringverify.vectors.recording import Recorded
    from ringverify.vectors.running import VectorOptions
    from ringverify.vectors.running import run as try_on

    found = index.read(options.folder or _brought_along())
    terminal = Terminal(console, verbose=options.verbose, quiet=options.quiet)
    asked = VectorOptions(
        ids=options.ids,
        world=options.world,
        device=options.device or ("cuda" if options.world == "nccl" else "cpu"),
        jobs=None if options.jobs == AUTO else options.jobs,
    )
    pairs = list(zip(options.target, implementations, strict=True))
    subjects = [Subject(target, one) for target, one in pairs if isinstance(one, Implementation)]
    merges = [MergeSubject(target, one) for target, one in pairs if isinstance(one, MergeImplementation)]
    if subjects and merges:
        raise UsageError(
            f"{merges[0].target} is a merge and {subjects[0].target} an implementation of attention: "
            "check them in two runs"
        )
    if merges and (option := next((name for name in ("world", "jobs") if getattr(options, name) is not None), None)):
        raise UsageError(f"--{option} is for implementations of attention, and this is a merge; leave it out")
    record = Recorded(options.report, Outputs.of(options))
    code = 0
    try:
        if merges:
            code = try_merges(
                found,
                merges,
                ids=options.ids,
                device=asked.device,
                tell=terminal.tell,
                progress=ProgressBar(console),
                record=record,
            )
        else:
            code = try_on(found, subjects, asked, terminal.tell, ProgressBar(console), record)
    finally:
        code = with_missing(code, record.close())
    return code


def _look(options: argparse.Namespace, console: Console) -> int:
    """Check the files and their checksums, and compute the answers again with the oracle."""
    from ringverify.vectors import checking, index, long, merges
    from ringverify.vectors.recording import Recorded

    started = time.monotonic()
    outputs = Outputs.of(options)
    record = Recorded(options.report, outputs)
    code = 0
    try:
        found = index.read(options.folder or _brought_along())
        checking.look_at_files(found)
        of_merges, at_length = merges.read(found.folder), long.read(found.folder)
        stories = found.chosen(options.ids, (*of_merges, *at_length))
        beside = [
            [one for id, one in there.items() if options.ids is None or id in options.ids]
            for there in (of_merges, at_length)
        ]
        # A report or another output names every vector; without one, the first wrong vector ends the check.
        everything = bool(options.report or outputs.named)
        checking.look_into(found, stories, record, all_of_them=everything, of_merges=beside[0], at_length=beside[1])
    finally:
        code = with_missing(code, record.close())
    say_on(console.file)(
        f"{len(stories) + sum(map(len, beside))} vectors in {found.folder}: files complete and unedited, "
        f"results reproduced by the oracle ({time.monotonic() - started:.1f} s)"
    )
    return code


def _generate(options: argparse.Namespace, console: Console) -> int:
    from ringverify.vectors.generating import generate

    return generate(options.folder, force=options.force, say=say_on(console.file))
