"""`memory` at length: what is claimed of a rank's peak, held by watched runs at short lengths, and at the run's own.

A simulated world counts every tensor of a watched rank, but such a run takes several times as long. At the run's own
length the peak is that of the processes, or of the GPUs, as the system says it, beside that of half the length. Under
torchrun, whose processes go on from run to run and keep what they held, it is a figure and no verdict, which says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.check.outcome import TriedProperty
from ringverify.check.planning import open_world
from ringverify.events import PropertyOutcome
from ringverify.properties.memory import BESIDE, FEWEST_RANKS, MEMORY
from ringverify.properties.property import Violation
from ringverify.scale.finding import violated
from ringverify.scale.trials import SECONDS, Trials, open_fast
from ringverify.targets import load
from ringverify.worlds.processes import torchrun
from ringverify.worlds.world import WorldUnavailable

LONGEST = 16_384
"""Positions of a watched run, at most."""
RANKS = 4
MASKS = ("key_length", "window", "documents", "key_lengths", "dilation")
"""Where one decides how many blocks a rank attends, a peak need not be in proportion to the length."""
ALLOCATOR = 32 << 20
"""Bytes by which the peaks of a process differ from what its tensors take."""


NO_CASE = "a peak of memory is that of a run of the suite, which no script without it can measure"


class _Held(NamedTuple):
    """What came of a claim: the violation of it on a case, if there is one, the margin, and a line that says how."""

    case: Case
    violation: Violation | None
    margin: float
    figure: str


def memory(trials: Trials, cases: Sequence[Case]) -> TriedProperty:
    """Hold what is claimed of memory: in a simulated world, and then at the length of each case."""
    began, world = time.monotonic(), trials.world.name
    declared = load(trials.plan.target).capabilities  # not narrowed to the world sizes asked for
    reason, held = MEMORY.unsupported(declared), list[_Held]()
    if reason is None and cases[0].sharding == "replicated_query":
        reason = "each rank holds all queries"
    try:
        if reason is None:
            watched = _short(trials, cases[0])
            held += [watched] if isinstance(watched, _Held) else []
            held += [one for case in cases for one in (_at_length(trials, case),) if one is not None]
            reason = None if held else str(watched)
    except WorldUnavailable as error:
        event = trials.event(MEMORY.id, "inconclusive", 0, began, reason=str(error))
        return TriedProperty(outcome=PropertyOutcome(event), world=world)
    if reason is not None:
        event = trials.event(MEMORY.id, "unsupported", 0, began, reason=reason)
        return TriedProperty(outcome=PropertyOutcome(event), world=world)
    margin, figures = max(one.margin for one in held), (*(one.figure for one in held), *_no_verdict(trials, cases))
    if not margin:
        event = trials.event(MEMORY.id, "inconclusive", 0, began, reason=held[0].figure)
        return TriedProperty(outcome=PropertyOutcome(event), world=world)
    wrong = next((one for one in held if one.violation is not None), None)
    event = trials.event(MEMORY.id, "fail" if wrong else "pass", 0, began, margin=margin, figures=figures)
    if len(held) == 1 and not wrong and world != "simulated":
        event = dataclasses.replace(event, world="simulated")
    found = None
    if wrong is not None and wrong.violation is not None:
        # The line that shows it again asks for the length that was asked for: the shorter ones follow from it.
        shown = violated(trials, MEMORY.id, wrong.violation, cases[0])
        found = dataclasses.replace(
            violated(trials, MEMORY.id, wrong.violation, wrong.case), scale=shown.scale, note=NO_CASE
        )
    return TriedProperty(outcome=PropertyOutcome(event, found), world=world, runs=3)


def _short(trials: Trials, case: Case) -> _Held | str:
    """Judge the ordinary property at a short length, on twice the ranks and twice as long, or say why that cannot be.

    Raises:
        WorldUnavailable: the ranks could not be started.
    """
    implementation, p, size = load(trials.plan.target), case.problem, max(case.world_size, RANKS)
    c = implementation.capabilities
    if c.processes:
        return "ranks share a process in a simulated world"
    length = min(p.nq, LONGEST) // (4 * size) * 2 * size
    short = dataclasses.replace(case, problem=p.replace(query_length=length, **dict.fromkeys(MASKS)), world_size=size)
    if (lacks := why_unsupported(short, c)) is not None:
        return lacks.text
    if not MEMORY.applies(short, c):
        return "its tensors are too small to tell"
    with contextlib.closing(open_world("simulated")) as world:
        runner = Runner(implementation, world, target=trials.plan.target, deadline=SECONDS)
        judged = MEMORY.judge(short, runner)
    told = f"{short.describe()}, the same on twice the ranks and twice as long, in a simulated world"
    if not judged.applies:
        told = f"too short to decide: {told}; peaks grow faster than positions, as those of a tile that is not full do"
    return _Held(short, judged.violation, judged.margin, told)


def _at_length(trials: Trials, case: Case) -> _Held | None:
    """Compare the peak of the case with that of half its length; `None` where that says nothing of the claim.

    Raises:
        WorldUnavailable: the ranks could not be started.
    """
    p, c, size = case.problem, trials.capabilities, case.world_size
    if torchrun.placement() is not None or p.nq <= LONGEST or any(getattr(p, mask) is not None for mask in MASKS):
        return None
    half = trials.shorter(case, p.nq // 2)
    times, there = 2.0, f"at {p.nq // 2:,} positions"
    if c.memory == "sharded":  # twice the positions on twice the ranks
        times, there = 1.0, f"at {p.nq // 2:,} positions on {size // 2} ranks"
        half = None if half is None or size % 2 or size // 2 < FEWEST_RANKS else half.replace(world_size=size // 2)
        half = None if half is None or why_unsupported(half, c) is not None else half
    if half is None:
        return None
    whole_peak, half_peak = _peak(trials, case), _peak(trials, half)
    if whole_peak is None or half_peak is None:
        return None
    allowed = times * BESIDE * half_peak + ALLOCATOR
    figure = (
        f"the peak of a rank at {p.nq:,} positions is {whole_peak >> 20} MiB, {there} {half_peak >> 20} MiB: "
        f"{int(allowed) >> 20} MiB are allowed"
    )
    violation = Violation(("grows",), None, figure) if whole_peak > allowed else None
    return _Held(case, violation, whole_peak / allowed, figure)


def _no_verdict(trials: Trials, cases: Sequence[Case]) -> Iterator[str]:
    """Yield why the peak at the length of a case decides nothing under torchrun, and how to have it decide."""
    for case in cases if torchrun.placement() is not None else ():
        if case.problem.nq > LONGEST:
            peak = trials.peaks.get(case)
            known = "" if not peak else f" is {peak >> 20} MiB, which"
            yield (
                f"the peak of a rank at {case.problem.nq:,} positions{known} decides nothing under torchrun, whose "
                "processes keep what earlier runs held; --world gloo without torchrun holds it to the claim"
            )


def _peak(trials: Trials, case: Case) -> int | None:
    """Return the largest peak of a rank in the implementation; `None` if there is none, as of a run that failed.

    Where the case did not run yet it does so in processes of its own: in one that has held more before, that memory is
    at hand, and no peak is seen.
    """
    if case not in trials.peaks:
        with contextlib.closing(open_fast(trials.plan.world)) as world:
            alone = Trials(trials.plan, world, trials.options, trials.progress)
            alone.run("alone", case)
        trials.peaks |= alone.peaks
    return trials.peaks.get(case) or None
