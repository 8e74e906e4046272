"""Overlapping calls of an implementation, as layers, recomputation and frozen weights cause them in training."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs
from ringverify.cases.local import Local, RankResult, backward, forward, local_part, result_of
from ringverify.cases.running import Observation, Runner, Task, rows_of
from ringverify.targets import load
from ringverify.worlds import torch_private
from ringverify.worlds.foreign_text import refuses_second_backward
from ringverify.worlds.whose import ours

Step = Literal["first", "second", "first_later", "again"]
"""Names of the results that are compared, in the order of comparison; see `Reentered`."""

LATE_SECONDS = 0.25
"""Seconds to wait for the threads that a call left behind; the idle thread of a pool would never end."""
MORE_CALLS = 3
"""Further calls, after which what is kept for two or three calls in turn is no longer new."""
_IDLE: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that did not end in that time, and are not waited for again."""


@dataclasses.dataclass(frozen=True)
class Reentered:
    """What one rank returned and noticed in overlapping calls.

    Attributes:
        steps: results by name. "first": forward of the case, with the backward run after the second call's forward.
            "second": a second call, `next_of` the case. "first_later": out and lse of the first call
            once all other steps are done. "again": a second backward through the first call.
        refused: message of the error that refused the second backward; `None` if none did.
        groups: number of process groups before the first call, and after each call.
        late: whether a thread that a call left behind communicated after the call had returned.
    """

    steps: dict[Step, RankResult]
    refused: str | None = None
    groups: tuple[int, ...] = ()
    late: bool = False


def second_of(case: Case) -> Case:
    """Return the case of the second call: the same problem on other inputs."""
    return case.replace(seed=case.seed + 1)


def next_of(case: Case) -> Case:
    """Return the case of a second call on the same group: other inputs, and for every second seed another mask.

    Batches of training differ in their documents, and layers of one model in their window: what is kept for one must
    not be taken for the next.
    """
    second, p = second_of(case), case.problem
    changes: list[dict[str, Any]] = []
    if p.documents is not None:
        changes.append({"documents": tuple(p.nk - cut for cut in reversed(p.documents))})
    if p.key_lengths is not None:
        changes.append({"key_lengths": tuple(max(0, length - 1) or p.nk for length in p.key_lengths)})
    if p.window is not None:
        changes.append({"window": None})
    turn, other_mask = divmod(case.seed, 2)
    return second.replace(**changes[turn % len(changes)]) if other_mask and changes else second


def run_rank(task: Task) -> Reentered:
    """The program of one rank.

    Raises:
        ContractError: the implementation returned something other than the contract asks for.
    """
    with ours():
        return _reentered(task)


def _reentered(task: Task) -> Reentered:
    """Make the overlapping calls on one rank, and collect what they return."""
    implementation = load(task.implementation) if isinstance(task.implementation, str) else task.implementation
    case, capabilities = task.case, implementation.capabilities
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None

    def part(of: Case) -> Local:
        rows = rows_of(of, capabilities, rank)
        local = local_part(of, capabilities, make_inputs(of), rows, group, rank, task.device)
        if task.gradients:
            local.require_gradients()
        return local

    def called(local: Local) -> tuple[torch.Tensor, torch.Tensor | None]:
        results = forward(implementation, local)
        groups.append(torch_private.groups())
        late.append(_communicate(set(threading.enumerate()) - threads))
        return results

    groups, late, threads = [torch_private.groups()], [False], set(threading.enumerate())
    other = next_of(case)
    one, two = part(case), part(other)
    out, lse = called(one)
    returned = result_of(one, capabilities, out, lse)
    steps: dict[Step, RankResult] = {}
    out_of_two, lse_of_two = called(two)
    steps["second"] = result_of(two, capabilities, out_of_two, lse_of_two)
    refused = None
    if task.gradients:
        found = backward(one, case, out, lse, keep=True)
        returned = dataclasses.replace(
            result_of(one, capabilities, out, lse, found), out=returned.out, lse=returned.lse
        )
        found = backward(two, other, out_of_two, lse_of_two)
        steps["second"] = result_of(two, capabilities, out_of_two, lse_of_two, found)
        once_more, refused = _again(one, case, out, lse)
        if once_more is not None:
            steps["again"] = result_of(one, capabilities, out, lse, once_more)
    steps["first"] = returned
    for _ in range(MORE_CALLS):
        called(two)
    steps["first_later"] = result_of(one, capabilities, out, lse)
    return Reentered(steps, refused, tuple(groups), any(late))


def _communicate(threads: set[threading.Thread]) -> bool:
    """Return whether threads that calls left behind communicate; wait up to `LATE_SECONDS` for them, once a thread."""
    before, until = torch_private.operations(), time.monotonic() + LATE_SECONDS
    for thread in threads - set(_IDLE):
        with contextlib.suppress(AssertionError, RuntimeError):  # it is not one of `threading`
            thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _IDLE.add(thread)
    return torch_private.operations() > before


def _again(
    local: Local, case: Case, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | None, ...] | None, str | None]:
    """Run a second backward: its gradients and `None`, or `None` and the message that refused it.

    Only an error of autograd about a second backward is a refusal; any other exception is raised.
    """
    try:
        return backward(local, case, out, lse), None
    except RuntimeError as error:
        if not refuses_second_backward(str(error)):
            raise
        return None, str(error)


def reenter(
    runner: Runner, case: Case, *, gradients: bool
) -> tuple[dict[Step, Observation], Observation, tuple[Reentered, ...]]:
    """Run overlapping calls on every rank.

    Returns:
        an observation for each step, empty after a failure; the observation of step "first", or of the failure; and
        what each rank noticed.

    Raises:
        WorldUnavailable: the world could not be set up; nothing was learned.
    """
    task = Task(runner.named, case, gradients, runner.device)
    make_inputs(next_of(case))
    ranks, failure, run = runner.launch(run_rank, task)
    if failure is not None:
        return {}, Observation((), failure, run), ()
    seen: tuple[Reentered, ...] = ranks
    steps: dict[Step, Observation] = {
        name: Observation(tuple(one.steps[name] for one in seen), None, run)
        for name in seen[0].steps
        if all(name in one.steps for one in seen)
    }
    return steps, steps["first"], seen
