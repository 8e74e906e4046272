"""Run one case on an implementation in a world: what every rank returned, or why the run ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ringref.sharding import Positions, key_positions, query_positions
from ringverify.cases.case import Case, sharding_of
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.local import ContractError, RankResult, backward, forward, joined, local_part, result_of
from ringverify.cases.outside import question
from ringverify.cases.unwritten import Unwritten
from ringverify.implementation import Capabilities, Implementation, TensorLayout
from ringverify.targets import from_anywhere, load
from ringverify.worlds.limits import sentence
from ringverify.worlds.whose import ours, theirs
from ringverify.worlds.world import LOAD_SECONDS, Conditions, Failure, Load, LoadTooLong, OurError, Run, TooEarly, World

GradMode = Literal["enable_grad", "no_grad", "inference_mode"]
"""Names of torch's context managers under which ranks may run."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The argument of a rank's program. If it names a target instead of a function, another process can be given it.

    Attributes:
        implementation: the implementation, or the target that names it.
        case: the case to run.
        gradients: whether to take gradients too.
        device: device of the tensors.
        inputs: inputs to use instead of the case's own.
        unwritten: fill uninitialised memory (`torch.empty`) with NaN; see `Unwritten`.
        layout: tensor layout to use instead of the declared one.
        mode: the mode of autograd in which inputs are made and the implementation is called.
        requiring: those of q, k and v that require gradients, if gradients are taken.
    """

    implementation: Implementation | str
    case: Case
    gradients: bool
    device: str
    inputs: Inputs | None = None
    unwritten: bool = False
    layout: TensorLayout | None = None
    mode: GradMode = "enable_grad"
    requiring: str = "qkv"


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a run of one case returned, or how it failed.

    Attributes:
        ranks: the result of each rank, in ring order; empty after a failure.
        failure: why the run ended without results; `None` if it did not.
        watched: the world's record of the run: hazards, traffic and memory if it was watched, unreceived messages.
    """

    ranks: tuple[RankResult, ...]
    failure: Failure | None
    watched: Run | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of every bit that came back on every rank, or of the kind of failure.

        The failure's message and rank are left out: a message may hold a port, an address or a time, and when several
        ranks fail, any of them may be the first.
        """
        digest = hashlib.sha256()
        if self.failure is not None:
            digest.update(f"{self.failure.kind} {self.failure.exception} {self.failure.refusal}".encode())
        for rank in self.ranks:
            for tensor in (rank.out, rank.lse, rank.dq, rank.dk, rank.dv):
                digest.update(b"-" if tensor is None else np.ascontiguousarray(tensor).tobytes())
            digest.update(b"" if rank.dsinks is None else rank.dsinks.tobytes())
        return digest.hexdigest()

    @property
    def delayed(self) -> tuple[int, ...]:
        """Numbers of the messages that the simulated world held back in this run."""
        return () if self.watched is None else self.watched.delayed


LONGER = 4
"""Factor on the deadline of a second attempt, made if the first one passed in our own code: the machine was busy."""


@dataclasses.dataclass
class RunLog:
    """What the runs of one implementation in one world counted and noticed, for the report.

    Attributes:
        runs: number of runs so far.
        seconds_inside: CPU time inside the implementation, over all ranks and runs.
        printed: what each rank printed in the latest run; `None` stands for a process that ranks share.
        notes: what ranks tried that cannot be done in this world, a sentence each.
        history: the latest cases run, for other properties too: module state that they left may still be there.
        findings: what worked in a simulated world but gloo refuses, by name, with an example of each.
        load_failure: why loading the target exceeded its deadline; it is not tried again, for that would take as long.
        refused: the reasons for which a program did not run a case that it was asked for, one for each.
    """

    runs: int = 0
    seconds_inside: float = 0.0
    printed: tuple[tuple[int | None, str], ...] = ()
    notes: list[str] = dataclasses.field(default_factory=list)
    history: deque[Case] = dataclasses.field(default_factory=lambda: deque(maxlen=256))
    findings: dict[str, str] = dataclasses.field(default_factory=dict)
    load_failure: str | None = None
    refused: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: RunLog) -> None:
        """Add what was counted and noticed later, by a log that began empty."""
        self.runs += other.runs
        self.seconds_inside += other.seconds_inside
        self.notes += [note for note in other.notes if note not in self.notes]
        self.refused += other.refused
        self.findings.update({name: text for name, text in other.findings.items() if name not in self.findings})


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs cases of one implementation in one world. Immutable; each property gets one of its own, with its own log.

    Attributes:
        implementation: the implementation under test.
        world: the world in which its ranks run.
        target: the name by which another process imports the implementation; needed by worlds of processes.
        device: device of the tensors.
        most_ranks: largest world that can be run; `None` if there is no limit.
        deadline: seconds that one run may take.
        load_deadline: seconds that a process may take to load the target; not part of a run's deadline.
        loading: called with the target when a process begins to load it, and with `None` at the end.
        log: where runs are counted and what they noticed is kept.
    """

    implementation: Implementation
    world: World
    target: str | None = None
    device: str = "cpu"
    most_ranks: int | None = None
    deadline: float = 30.0
    load_deadline: float = LOAD_SECONDS
    loading: Callable[[str | None], None] = lambda what: None
    log: RunLog = dataclasses.field(default_factory=RunLog)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that the implementation declares."""
        return self.implementation.capabilities

    def run(
        self,
        case: Case,
        *,
        gradients: bool,
        watch: bool | Literal["memory"] = False,
        inputs: Inputs | None = None,
        unwritten: bool = False,
        layout: TensorLayout | None = None,
        mode: GradMode = "enable_grad",
        requiring: str = "qkv",
    ) -> Observation:
        """Run one case.

        Args:
            case: the case to run.
            gradients: whether to run a backward pass too.
            watch: have a simulated world record hazards and traffic, or ("memory") these and memory.
            inputs: inputs to use instead of the case's own.
            unwritten: fill uninitialised memory (`torch.empty`) with NaN.
            layout: tensor layout to use instead of the declared one.
            mode: the mode of autograd in which the ranks run; no choice of a program's.
            requiring: those of q, k and v that require gradients; likewise.

        Raises:
            WorldUnavailable: nothing was learned: the world could not be set up, the target could not be loaded, a
                limit of the machine was reached, or an error of ours ended the run.
        """
        task = Task(self.named, case, gradients, self.device, inputs, unwritten, layout, mode, requiring)
        program = question if self.world.name == "external" else run_rank
        results, failure, run = self.launch(program, task, watch=watch)
        self.log.seconds_inside += sum(rank.seconds for rank in results)
        return Observation(results, failure, run)

    @functools.cached_property
    def named(self) -> Implementation | str:
        """The implementation as a `Task` names it: its target with an absolute path, or the implementation itself."""
        if self.target is None or self.world.name == "external":
            return self.implementation
        return from_anywhere(self.target)

    def launch(
        self, program: Callable[[Task], Any], task: Task, *, watch: bool | Literal["memory"] = False
    ) -> tuple[tuple[Any, ...], Failure | None, Run]:
        """Run a program on every rank.

        Returns:
            what each rank of the ring returned, empty after a failure; the failure, or `None`; and the world's record.

        Raises:
            WorldUnavailable: as in `run`.
        """
        case = task.case
        if self.log.load_failure is not None:
            raise LoadTooLong(self.log.load_failure)
        make_inputs(case)  # drawn once here, not once a rank
        if task.gradients and self.target is None:
            _import_for_gradients()

        def attempt(deadline: float) -> Run:
            return self.world.run(
                program,
                task,
                world_size=case.ranks,
                seed=case.schedule,
                deadline=deadline,
                conditions=Conditions(case.transport, case.delayed),
                watch=watch,
                load=None if self.target is None else Load(self.target, load, self.load_deadline, self.loading),
            )

        try:
            try:
                run = attempt(self.deadline)
            except TooEarly as error:
                if error.importing:
                    raise
                run = attempt(LONGER * self.deadline)
        except LoadTooLong as error:
            self.log.load_failure = str(error)
            raise
        self.log.runs += 1
        self.log.history.append(case)
        for name, example in run.findings:
            self.log.findings.setdefault(name, f"{example}, on {case.describe()}")
        self.log.printed = run.printed
        self.log.notes += [note for note in run.notes if note not in self.log.notes]
        if run.failure is not None:
            if run.failure.limit is not None:
                met = f"{sentence(run.failure.limit)}: {run.failure.message}, on {case.describe()}"
                raise OurError(met, run.failure.detail)
            return (), run.failure, run
        return tuple(run.results[rank] for rank in case.ring_ranks), None, run

    def within(self, seconds: float) -> Runner:
        """Return a runner whose deadline is at most `seconds`; it shares this one's log."""
        return dataclasses.replace(self, deadline=min(self.deadline, seconds))

    def for_another_property(self) -> Runner:
        """Return a runner with a new log, which keeps what outlasts a property: history, findings and load failure."""
        log = self.log
        fresh = RunLog(history=log.history, findings=log.findings, load_failure=log.load_failure)
        return dataclasses.replace(self, log=fresh)


@functools.cache
def _import_for_gradients() -> None:
    """Make torch import now, outside of any rank, the modules that it imports at the first backward pass.

    Ranks that are threads share this process's modules. A deadline that ended such a thread in the middle of an import
    would leave a half-initialised module behind for every later run.
    """
    one = torch.ones(1, requires_grad=True)
    torch.autograd.grad(one * 1, one, torch.ones(1))


@functools.lru_cache(maxsize=64)
def shards(case: Case, capabilities: Capabilities) -> tuple[list[Positions], list[Positions]]:
    """Return the global query positions of each rank, and the key positions of each rank.

    Of a case of several calls, a rank's queries are those of the first call, then those of the second, and so on.
    """
    sharding = sharding_of(case, capabilities)
    p, size = case.problem, case.world_size
    if case.chunks:
        calls = [(call.problem.diagonal, shards(call, capabilities)[0]) for call in case.calls]
        queries = [np.concatenate([before + rows[rank] for before, rows in calls]) for rank in range(size)]
    else:
        queries = query_positions(sharding, p.nq, size, p.documents)
    return queries, key_positions(sharding, p.nk, size, p.documents)


def rows_of(case: Case, capabilities: Capabilities, rank: int) -> tuple[Positions, Positions]:
    """Return one rank's query and key positions; a declared sharding function counts as the implementation's code."""
    with theirs():
        queries, keys = shards(case, capabilities)
    return queries[rank], keys[rank]


def run_rank(task: Task) -> RankResult | None:
    """The program of one rank: its part in the ring, or, for a rank outside the ring, other communication meanwhile.

    Raises:
        ContractError: the implementation returned something other than the contract asks for, or disturbed the ranks
            outside its group.
    """
    with ours(), getattr(torch, task.mode)():
        case = task.case
        if case.group == "world":
            assert dist.group.WORLD is not None
            return _run_in_ring(task, dist.group.WORLD, dist.get_rank())
        ring, rank = case.ring_ranks, dist.get_rank()
        outside = tuple(other for other in range(case.ranks) if other not in ring)
        groups = [dist.new_group(list(ranks)) for ranks in (ring, outside)]
        if rank in ring:
            result = _run_in_ring(task, groups[0], ring.index(rank))
        else:
            result = None
            with theirs():  # what goes wrong here is the ring's doing
                _run_outside(groups[1], outside, task.device)
        with theirs():
            dist.destroy_process_group(groups[0 if rank in ring else 1])
        return result


def _run_outside(group: dist.ProcessGroup, ranks: tuple[int, ...], device: str) -> None:
    """Send blocks three times round a ring of the ranks outside, and all-reduce: notice messages that are not theirs.

    Raises:
        ContractError: something arrived that these ranks did not send to one another.
    """
    place, size = ranks.index(dist.get_rank()), len(ranks)
    block = torch.full((3,), float(place), device=device)
    for hop in range(3 * size):
        arriving = torch.empty_like(block)
        sends = dist.P2POp(dist.isend, block, ranks[(place + 1) % size], group)
        receives = dist.P2POp(dist.irecv, arriving, ranks[(place - 1) % size], group)
        if size > 1:
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
            block = arriving
            if not bool((block == (place - hop - 1) % size).all()):
                raise ContractError(
                    "is not in the ring's group, but received a message from the ring: pass group=call.group to send "
                    "and receive, and translate ranks with torch.distributed.get_global_rank",
                    rule="message from outside",
                )
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=group)
    if float(total) != size:
        raise ContractError(
            f"is not in the ring's group, and its own all_reduce gave {float(total):g} instead of {size}: pass "
            "group=call.group to every collective",
            rule="reduction from outside",
        )


_loaded = functools.lru_cache(maxsize=8)(load)
"""Finding a target that is a file takes as long as making a rank's shards, and every rank of every run names it."""


def _run_calls(
    task: Task, implementation: Implementation, inputs: Inputs, group: dist.ProcessGroup, rank: int
) -> RankResult:
    """Call the implementation on this rank once for every call of a case, on a cache that grows; no gradients."""
    capabilities, parts = implementation.capabilities, []
    for call in task.case.calls:
        start, end = call.problem.diagonal, call.problem.nk
        queries, keys = (slice(None), slice(start, end)), (slice(None), slice(end))
        given = Inputs(
            q=inputs.q[queries], k=inputs.k[keys], v=inputs.v[keys], dout=inputs.dout[queries],
            dlse=inputs.dlse[:, :, start:end], sinks=inputs.sinks,
        )  # fmt: skip
        local = local_part(call, capabilities, given, rows_of(call, capabilities, rank), group, rank, task.device)
        started = time.thread_time()
        out, lse = forward(implementation, local)
        parts.append(result_of(local, capabilities, out, lse, seconds=time.thread_time() - started))
    return joined(parts)


def _run_in_ring(task: Task, group: dist.ProcessGroup, rank: int) -> RankResult:
    """Make this rank's shards, call the implementation, take gradients and copy the results."""
    implementation = _loaded(task.implementation) if isinstance(task.implementation, str) else task.implementation
    if task.layout is not None:
        capabilities = dataclasses.replace(implementation.capabilities, tensor_layout=task.layout)
        implementation = dataclasses.replace(implementation, capabilities=capabilities)
    case, capabilities = task.case, implementation.capabilities
    inputs = make_inputs(case) if task.inputs is None else task.inputs
    if case.chunks:
        return _run_calls(task, implementation, inputs, group, rank)
    local = local_part(case, capabilities, inputs, rows_of(case, capabilities, rank), group, rank, task.device)
    if task.gradients:
        local.require_gradients(task.requiring)

    started = time.thread_time()
    with Unwritten() if task.unwritten else contextlib.nullcontext():
        out, lse = forward(implementation, local)
        gradients: tuple[torch.Tensor | None, ...] = (None, None, None)
        if task.gradients:
            gradients = backward(local, case, out, lse)
    seconds = time.thread_time() - started

    return result_of(local, capabilities, out, lse, gradients, seconds)
