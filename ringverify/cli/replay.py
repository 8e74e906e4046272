"""Run a recorded counterexample again, in the worlds and by the rules of `check`."""

from __future__ import annotations

import codecs
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch

from ringverify import targets
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.check import casefile, trusting
from ringverify.check.explaining import judged
from ringverify.check.options import Options
from ringverify.check.planning import WorldName, find_device, open_world
from ringverify.check.run import counterexample_event, usual_deadline
from ringverify.check.searching import as_found
from ringverify.confirm.script import snippet
from ringverify.describing import describe
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import Event, Hint
from ringverify.files import refusing, write_whole
from ringverify.properties.catalogue import select
from ringverify.properties.property import Property, judge_everything
from ringverify.properties.suites import Method
from ringverify.scale.replaying import replay_at_length
from ringverify.words import legible_lines
from ringverify.worlds import reproducible
from ringverify.worlds.printing import Labelled
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import LOAD_SECONDS, World, WorldUnavailable

A_DAY = 86400.0
"""Default deadline in seconds of a run in this process, where somebody may be at a breakpoint."""


class _Heard:
    """Shows what ranks print while they print it, each line with its rank.

    Args:
        labelled: whether the lines that arrive name their rank already.
    """

    def __init__(self, *, labelled: bool) -> None:
        self._labels = None if labelled else Labelled()
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def __call__(self, rank: int, printed: bytes) -> None:
        """Show a piece of what a rank prints."""
        decoder = self._decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("replace"))
        text = legible_lines(decoder.decode(printed))
        if self._labels is None:
            sys.stdout.write(text)
        else:
            self._labels.write(rank, text, sys.stdout)
        sys.stdout.flush()


def _world_name(recorded: str, path: Path, *, in_process: bool) -> WorldName:
    """Return the recorded world; refuse an unknown one, and one of real processes where `in_process` is asked for."""
    match recorded:
        case "simulated":
            return recorded
        case "gloo" | "nccl" if in_process:
            raise UsageError(
                f"--in-process: case {path} was recorded in the {recorded} world, where every rank is a process of its "
                "own; leave it out"
            )
        case "external" if in_process:
            raise UsageError(
                f"--in-process: case {path} is one of a program, which is no part of this process; leave it out"
            )
        case "gloo" | "nccl" | "external":
            return recorded
    raise UsageError(f"case {path} names the unknown world {recorded!r}")


def _wrong_alone(property: Property, case: Case, runner: Runner) -> Case:
    """Return the first of the cases that a property compares whose own results are wrong, else `case`."""
    several = property.compared(case, runner.capabilities)
    if len(several) == 1:
        return case
    return next((one for one in several if judge_everything(one, runner).violation is not None), case)


@reproducible.as_in_a_rank()
def replay(
    path: Path,
    *,
    edited: bool = False,
    trust: bool = False,
    target: str | None = None,
    written: Path | None = None,
    deadline: float | None = None,
    load_deadline: float = LOAD_SECONDS,
    in_process: bool = False,
    say: Callable[[str], None],
    show: Callable[[Event], None],
) -> int:
    """Run the case of a file, show what is wrong, and say whether the results have the recorded bits.

    What ranks print is shown as they print it, each line with its rank.

    Args:
        path: a case file.
        edited: accept a file that was changed after it was written.
        trust: import what the file names without asking, whoever wrote it.
        target: another implementation than the recorded one.
        written: file to write with the case as a stand-alone script; `None` writes none.
        deadline: seconds for one run; by default those of `check`, and in this process a day.
        load_deadline: seconds that a process may take to import the target.
        in_process: run simulated ranks in this process, where a debugger sees them; a rank that ends its process then
            ends this one.
        say: takes a line of text.
        show: takes the event of the counterexample.

    Returns:
        1 if the property is violated, 0 if it holds now.

    Raises:
        UsageError: the file or the target is wrong, or the user does not agree to import what the file names.
        Inconclusive: the world could not be set up.
    """
    recorded = casefile.read(path, edited=edited)
    find_device(recorded.device)
    world_name = _world_name(recorded.world, path, in_process=in_process)
    long: tuple[Method, ...] = tuple(one for one in get_args(Method) if one == recorded.property)
    if long and (in_process or written is not None):
        what = "--in-process" if in_process else "--snippet"
        way = "" if in_process else "; ringverify confirm REPORT.jsonl --scripts FOLDER writes a script of it"
        raise UsageError(f"{what}: case {path} is one of the suite scale, which needs its ranks; leave it out{way}")
    properties = [] if long else select((recorded.property,), ())
    if target is not None:
        recorded = dataclasses.replace(recorded, target=target)
    trusting.agree([(path, recorded)], trust=trust or target is not None, say=say)
    name = recorded.target
    implementation = targets.load(name) if in_process else describe(name, seconds=load_deadline)
    if written is not None and targets.is_program(name):
        raise UsageError(f"--snippet: {name} is a program, and a script can only call a function; leave it out")
    if target is not None and (world_name == "external") != targets.is_program(name):
        world_name = "gloo" if implementation.capabilities.processes else "simulated"
        world_name = "external" if targets.is_program(name) else world_name
    if (reason := why_unsupported(recorded.case, implementation.capabilities)) is not None:
        raise UsageError(f"{name} does not declare what case {path} needs: {reason}")
    for method in long:
        options = Options(device=recorded.device, deadline=deadline, load_deadline=load_deadline)
        found = replay_at_length(recorded, method, world_name, implementation, options, say=say, show=show)
        return _said(recorded, found, say)
    (property,) = properties
    world: World
    if in_process:
        torch.set_num_threads(1)  # as in the process that check runs them in, for the same bits
        world = SimulatedWorld(show="labelled")
        seconds = A_DAY if deadline is None else deadline
    else:
        world = open_world(world_name, _Heard(labelled=world_name in ("simulated", "external")))
        seconds = usual_deadline(world_name, recorded.device) if deadline is None else deadline
    sent = None if in_process else name
    runner = Runner(
        implementation, world, target=sent, device=recorded.device, deadline=seconds, load_deadline=load_deadline
    )
    try:
        if written is not None:
            alone = dataclasses.replace(recorded, case=_wrong_alone(property, recorded.case, runner))
            with refusing(f"write {written}", "name another file with --snippet"):
                write_whole(written, snippet(alone, implementation.capabilities).text)
            without = (
                f"with ringverify installed, where {name} lives" if targets.is_built_in(name) else "without ringverify"
            )
            say(f"written to {written}: python {written} shows the violation {without}")
        if not property.applies(recorded.case, implementation.capabilities):
            say(f"property {property.id} does not apply to this case: only its results are compared with the oracle")
            property = dataclasses.replace(property, judge=judge_everything, applies=lambda case, c: True)
        for earlier in recorded.after:
            judged(property, earlier, runner)
        judgement = judged(property, recorded.case, runner)
    except WorldUnavailable as error:
        raise Inconclusive(str(error)) from None
    finally:
        world.close()
    say(f"{name}: {property.id} on {recorded.case.describe()}")
    if judgement.violation is None:
        return _said(recorded, None, say)
    hints = tuple(Hint(note) for note in runner.log.notes)
    again = dataclasses.replace(as_found(recorded.case, judgement), hints=hints)
    show(counterexample_event(again, implementation=name, property=property.id))
    return _said(recorded, judgement.digest, say)


def _said(recorded: casefile.CaseFile, digest: str | None, say: Callable[[str], None]) -> int:
    """Say what became of the recorded violation, and return the exit code; without a digest it did not occur."""
    if digest is None:
        say(f"the property holds now: the recorded violation ({recorded.summary}) did not occur")
        return 0
    if digest == recorded.digest:
        say("still violated, with exactly the recorded bits")
    else:
        say(
            f"still violated, but with other bits than recorded: recorded with {recorded.made_with}, replayed with "
            f"{casefile.environment()}"
        )
    return 1
