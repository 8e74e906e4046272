"""One rank's part in calls that overlap: as layers, recomputation and frozen weights make them in training."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from typing import Literal

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

Step = Literal[
    "first", "second", "first_later", "again", "without_grad", "only_q", "only_kv"
]  # fmt: skip
"""Results of one call, in the order in which they are looked at; see `Reentered`."""

LATE_SECONDS = 0.25
"""How long a thread that a call has left behind is watched; a thread of a pool waits for work as long as it lives."""
_IDLE: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that have been watched."""


@dataclasses.dataclass(frozen=True)
class Reentered:
    """What one rank saw.

    Attributes:
        steps: by name. "first": forward of the case, its backward after a second call's forward. "second": that call,
            on other inputs of the same shapes. "first_later": out and lse of the first call once all of this is over.
            "again": the gradients of a second backward of the first call. "without_grad": the second call under
            `no_grad`, as recomputation has it; "only_q", "only_kv": then with gradients of some inputs only.
        refused: what the second backward was refused with, if it was.
        groups: how many process groups there were before the first call, and after each that followed.
        late: whether a thread that a call left behind communicated when the call had returned.
    """

    steps: dict[Step, RankResult]
    refused: str | None = None
    groups: tuple[int, ...] = ()
    late: bool = False


def second_of(case: Case) -> Case:
    """The same problem on other inputs."""
    return case.replace(seed=case.seed + 1)


def run_rank(task: Task) -> Reentered:
    """The program of one rank.

    Raises:
        ContractError: the implementation returned something else than the contract asks for.
    """
    with ours():
        return _reentered(task)


def _reentered(task: Task) -> Reentered:
    """The same, in code that is known to be ours but for the calls."""
    implementation = load(task.implementation) if isinstance(task.implementation, str) else task.implementation
    case, capabilities = task.case, implementation.capabilities
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    rows = rows_of(case, capabilities, rank)

    def part(of: Case, *wanted: int) -> Local:
        local = local_part(of, capabilities, make_inputs(of), rows, group, rank, task.device)
        for leaf in wanted if task.gradients else ():
            local.leaves[leaf].requires_grad_()
        return local

    def called(local: Local) -> tuple[torch.Tensor, torch.Tensor | None]:
        results = forward(implementation, local)
        groups.append(torch_private.groups())
        late.append(_communicate(set(threading.enumerate()) - threads))
        return results

    groups, late, threads = [torch_private.groups()], [False], set(threading.enumerate())
    other = second_of(case)
    one, two = part(case, 0, 1, 2), part(other, 0, 1, 2)
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
        with torch.no_grad():
            local = part(other)
            steps["without_grad"] = result_of(local, capabilities, *called(local))
        for name, wanted in (("only_q", (0,)), ("only_kv", (1, 2))):
            local = part(other, *wanted)
            results = called(local)
            steps[name] = result_of(local, capabilities, *results, backward(local, other, *results))  # type: ignore[index]
        once_more, refused = _again(one, case, out, lse)
        if once_more is not None:
            steps["again"] = result_of(one, capabilities, out, lse, once_more)
    steps["first"] = returned
    steps["first_later"] = result_of(one, capabilities, out, lse)
    return Reentered(steps, refused, tuple(groups), any(late))


def _communicate(threads: set[threading.Thread]) -> bool:
    """Whether threads that calls have left behind communicate; those that are idle are given a moment, once."""
    before, until = torch_private.operations(), time.monotonic() + LATE_SECONDS
    for thread in threads - set(_IDLE):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _IDLE.add(thread)
    return torch_private.operations() > before


def _again(
    local: Local, case: Case, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | None, ...] | None, str | None]:
    """Gradients of a second backward, or what it was refused with.

    A refusal is an exception that speaks of a second backward; anything else that is raised is an error of the code.
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
    """Calls that overlap, step by step; how the run ended; and what else each rank saw.

    Raises:
        WorldUnavailable: the world could not be set up; nothing was learned.
    """
    task = Task(runner.named, case, gradients, runner.device)
    make_inputs(second_of(case))
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
