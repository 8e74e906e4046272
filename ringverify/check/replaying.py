"""Running a recorded counterexample again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from ringverify import targets
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.check import casefile
from ringverify.check.beside import Hint
from ringverify.check.hunting import Counterexample, judged
from ringverify.check.planning import find_device, open_world
from ringverify.check.run import told
from ringverify.check.snippet import needs_the_tool, snippet
from ringverify.errors import Inconclusive, UsageError
from ringverify.files import write_whole
from ringverify.properties.catalogue import select
from ringverify.properties.property import Property, judge_everything
from ringverify.reports.jsonl import Event
from ringverify.worlds import reproducible
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import World, WorldUnavailable


def _world(name: str, path: Path) -> World:
    """The recorded world. Simulated ranks are threads of this very process: what they print is seen, debuggers work.

    What they print is shown as they print it, each line with its rank.
    """
    match name:
        case "simulated":
            torch.set_num_threads(1)  # as in the process that check runs them in, for the same bits
            return SimulatedWorld(show="labelled")
        case "gloo" | "nccl" as processes:
            return open_world(processes)
        case other:
            raise UsageError(f"case {path} names the unknown world {other!r}")


def _wrong_alone(property: Property, case: Case, runner: Runner) -> Case:
    """Of several cases that a property compares the first whose results are wrong by themselves, if one has such."""
    several = property.compared(case, runner.capabilities)
    if len(several) == 1:
        return case
    return next((one for one in several if judge_everything(one, runner).violation is not None), case)


@reproducible.as_in_a_rank()
def replay(
    path: Path,
    *,
    edited: bool,
    target: str | None,
    written: Path | None = None,
    say: Callable[[str], None],
    show: Callable[[Event], None],
) -> int:
    """Run the case of a file, show what is wrong, and say whether it is the same, bit for bit.

    Args:
        path: a case file.
        edited: accept a file that was changed after it was written.
        target: another implementation than the recorded one.
        written: where to write the case as a stand-alone script too, if anywhere.
        say: takes a line of text.
        show: takes a counterexample event.

    Returns:
        1 if the property is violated, 0 if it holds now.

    Raises:
        UsageError: the file or the target is wrong.
        Inconclusive: the world could not be set up.
    """
    recorded = casefile.read(path, edited=edited)
    find_device(recorded.device)
    (property,) = select((recorded.property,), ())
    name = recorded.target if target is None else target
    implementation = targets.load(name)
    if (reason := why_unsupported(recorded.case, implementation.capabilities)) is not None:
        raise UsageError(f"{name} does not declare what case {path} needs: {reason}")
    world = _world(recorded.world, path)
    try:
        sent = None if world.name == "simulated" else name
        runner = Runner(implementation, world, target=sent, device=recorded.device)
        if written is not None:
            alone = dataclasses.replace(recorded, case=_wrong_alone(property, recorded.case, runner))
            try:
                write_whole(written, snippet(alone, name, implementation))
            except OSError as error:
                raise UsageError(
                    f"cannot write {written}: {error.strerror}; name another file with --snippet"
                ) from None
            without = f"with ringverify installed, where {name} lives" if needs_the_tool(name) else "without ringverify"
            say(f"written to {written}: python {written} shows it {without}")
        if not property.applies(recorded.case, implementation.capabilities):
            say(f"the case does not put {property.id} to the test: its results are held to what is right, and no more")
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
        say(f"the property holds: what was recorded ({recorded.summary}) does not happen")
        return 0
    again = Counterexample(
        recorded.case,
        judgement.violation,
        judgement.digest,
        recorded.case,
        tried=0,
        smallest=False,
        repeats=True,
        hints=tuple(Hint(note) for note in runner.notes),
        printed=() if world.name == "simulated" else runner.printed,  # simulated ranks' lines have been seen
    )
    shown = told(again)
    del shown["takes"]
    show({"event": "counterexample", **shown})
    if judgement.digest == recorded.digest:
        say("the same bits as recorded")
    else:
        say(f"fails, with other bits than recorded (by {recorded.made_with}; this is {casefile.environment()})")
    return 1
