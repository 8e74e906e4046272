"""`hazards`, `progress`, `determinism`: faults that show when messages are delayed, reordered or sent by rendezvous.

A simulated world may hold messages back, deliver them out of order across peers and tags, and let a send wait for its
receive, as real transports do when messages are large. Correct code still gives the same answer; code that depends on
timing reads a buffer too early, overwrites one in flight, or waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringverify.cases.case import TRANSPORTS, Case, Delayed, Group
from ringverify.cases.running import Observation, Runner
from ringverify.cases.strategies import Scope, cases, widest
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.property import (
    Judgement,
    Property,
    Violation,
    all_tensors,
    always,
    failed,
    judge_observation,
    needs,
)
from ringverify.worlds.watch.hazards import Hazard

WORLD_SIZES = (1, 2, 3, 4, 5)
DELAYED: tuple[Delayed, ...] = ("some", ())
SCHEDULES = 3
"""Number of further runs of a case in `determinism`; in the simulated world each has another schedule."""


def _scope(c: Capabilities, *, longest: int = 16) -> Scope:
    groups: tuple[Group, ...] = ("world", "offset", "strided") if c.subgroups else ("world",)
    return Scope(
        dtypes=widest(c),
        world_sizes=WORLD_SIZES,
        groups=groups,
        transports=TRANSPORTS,
        delayed=DELAYED,
        longest=longest,
    )


def _judge_hazards(case: Case, runner: Runner) -> Judgement:
    """Check that the watched run reports no hazard and that all results are right."""
    c = runner.capabilities
    observation = runner.run(case, gradients=c.gradients, watch=True)
    hazards = () if observation.watched is None else observation.watched.hazards
    if hazards:
        return Judgement(0.0, _hazard(hazards, case), observation.digest, delayed=observation.delayed)
    return judge_observation(case, c, observation, all_tensors(c))


def _hazard(hazards: Sequence[Hazard], case: Case) -> Violation:
    first = hazards[0]
    rank = case.ring_ranks.index(first.rank) if first.rank in case.ring_ranks else None
    others = [hazard.message for hazard in hazards[1:]]
    also = tuple({("hazard", hazard.kind) for hazard in hazards})
    return Violation(("hazard", first.kind), rank, first.message, "\n".join(others), also=also, cause=first.cause)


def _judge_progress(case: Case, runner: Runner) -> Judgement:
    """Check that the run ends by itself and leaves no message unreceived."""
    observation = runner.run(case, gradients=runner.capabilities.gradients)
    if (judgement := failed(observation)) is not None:
        return judgement
    left = () if observation.watched is None else observation.watched.unreceived
    violation = None
    if left:
        rest = "\n".join(one.describe() for one in left[1:])
        violation = Violation(("orphan", left[0].kind), None, left[0].describe(), rest)
    return Judgement(0.0, violation, observation.digest, delayed=observation.delayed)


def _judge_determinism(case: Case, runner: Runner) -> Judgement:
    """Check that the case returns the same bits on every rank when it is run on other schedules and transports."""
    gradients = runner.capabilities.gradients
    first = runner.run(case, gradients=gradients)
    for turn in range(1, SCHEDULES + 1):
        other = case
        if runner.world.name == "simulated":
            other = case.replace(
                schedule=case.schedule + turn, delayed="some" if turn % 2 else (), transport=TRANSPORTS[turn // 2]
            )
        again = runner.run(other, gradients=gradients)
        if (judgement := failed(first, again)) is not None:
            return judgement
        if again.digest != first.digest:
            rank, tensor, numbers = _first_difference(first, again, all_tensors(runner.capabilities))
            summary = f"{tensor} on rank {rank} has other bits when the same case is run again"
            if other != case:
                summary += f" on schedule {other.schedule} ({other.transport})"
            if not numbers:
                summary += "; its numbers are equal: only the sign of a zero or the bits of a NaN differ"
            return Judgement(0.0, Violation(("other_bits", tensor), rank, summary), first.digest)
    return Judgement(0.0, None, first.digest)


def _first_difference(
    one: Observation, other: Observation, names: Sequence[TensorName]
) -> tuple[int, TensorName, bool]:
    """Return the first rank and result whose numbers differ, and True; or whose bits do, and False.

    The two runs must have different digests.
    """
    other_bits: list[tuple[int, TensorName]] = []
    for rank, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        for name in names:
            was, now = getattr(a, name), getattr(b, name)
            if was is None:  # of sinks, on a case without
                continue
            if not np.array_equal(was, now, equal_nan=True):
                return rank, name, True
            if was.tobytes() != now.tobytes():
                other_bits.append((rank, name))
    return *other_bits[0], False


HAZARDS = Property(
    id="hazards",
    meaning=(
        "no buffer in flight is touched, every handle is waited for, only the ring's group is used, also when messages "
        "are delayed"
    ),
    examples=100,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge_hazards,
    unsupported=always,
    simulated_only=True,
)
PROGRESS = Property(
    id="progress",
    meaning="no deadlock, also where a send waits for its receive; no message is left over",
    examples=80,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge_progress,
    unsupported=always,
    simulated_only=True,
    results=(),
)
DETERMINISM = Property(
    id="determinism",
    meaning="where claimed: running a case again gives the same bits, on any schedule",
    examples=30,
    cases=lambda c: cases(c, Scope(dtypes=c.dtypes)),
    judge=_judge_determinism,
    unsupported=needs("deterministic"),
)
