"""Run a model on several ranks and on one, and judge what came back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.sharding import SHARDINGS
from ringverify.errors import Inconclusive, UsageError
from ringverify.reach.declared import ModelDeclaration, load_model
from ringverify.reach.judging import Deviation, Evidence, ReachVerdict, judge
from ringverify.reach.rank import (
    Computed,
    ComputedAlone,
    Probed,
    ReachTask,
    compute,
    compute_alone,
    describe_model,
    first_nan,
    probe,
    recount,
)
from ringverify.targets import from_anywhere
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.world import Failure, Load, Run, World, WorldUnavailable

BAD_INPUT = ("type", "per_token", "vocabulary", "dropout", "statistics")
"""Rules of `rank` that a model breaks which `reach` is not for."""


@dataclasses.dataclass(frozen=True)
class ReachOptions:
    """What the command was asked for; `None` leaves it to what the builder declares.

    Attributes:
        target: names the function that builds the model.
        ranks: how many ranks are compared with one.
        length: tokens of the whole sequence.
        world: "simulated" or "gloo".
        seed: decides weights, tokens and labels.
        deadline: seconds of one run.
        load_deadline: seconds of an import.
    """

    target: str
    ranks: int | None = None
    length: int | None = None
    world: str | None = None
    seed: int = 0
    deadline: float = 60.0
    load_deadline: float = 120.0


@dataclasses.dataclass(frozen=True)
class ReachResult:
    """The verdict, and what it is about.

    Attributes:
        target, world, length, ranks: what was run, where.
        sharding: its name.
        shards: positions of each rank.
        sent: bytes that each rank sent in the forward and in the backward.
        findings: what is wrong; empty if ranks and one process agree.
        causes: known faults that reproduce it.
        pairs: what became of each pair of an output and a token; `None` where the ranks failed.
        expectation: what the pairs are compared with.
        allowed, differ: by how much outputs may differ, and do.
        detail: of ranks that failed.
    """

    target: str
    world: str
    length: int
    ranks: int
    sharding: str
    shards: tuple[NDArray[np.int64], ...]
    sent: tuple[tuple[int, int], ...] = ()
    findings: tuple[Deviation, ...] = ()
    causes: tuple[str, ...] = ()
    pairs: NDArray[np.int8] | None = None
    expectation: str = ""
    allowed: float = 0.0
    differ: float = 0.0
    detail: str = ""

    @property
    def verdict(self) -> str:
        """Whether ranks and one process agree, as verdicts are called."""
        return "violations" if self.findings else "conformant"


def reach(options: ReachOptions) -> ReachResult:
    """Run the model and judge it.

    Raises:
        UsageError: the target cannot be imported, or is not what `reach` is for.
        Inconclusive: a package or a GPU is missing, or a process could not be started, or took too long.
    """
    with contextlib.ExitStack() as worlds:

        def opened(world: World) -> World:
            return worlds.enter_context(contextlib.closing(world))

        try:
            return _Reaching(options, opened).result()
        except WorldUnavailable as error:
            raise Inconclusive(f"{options.target}: {error}") from None


class _RanksFailed(Exception):
    """The ranks failed where one process does not."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run


class _Reaching:
    def __init__(self, options: ReachOptions, opened: Callable[[World], World]) -> None:
        self.options = options
        self.target = from_anywhere(options.target)
        self.one_process = opened(ContainedWorld())
        told = self._alone(describe_model, self.target)
        match told:
            case {"wrong": str(message)}:
                raise UsageError(message)
            case {"inconclusive": str(message)}:
                raise Inconclusive(message)
        self.sharding: str = told["sharding"]
        # A sharding function stays in the ranks' processes.
        self.declared = ModelDeclaration(**told | ({} if self.sharding in SHARDINGS else {"sharding": "contiguous"}))
        length, ranks = options.length or self.declared.length, options.ranks or self.declared.ranks
        if ranks < 2:
            raise UsageError(f"--ranks {ranks}: ranks are compared with one process, so it takes at least 2")
        try:
            self.problem = self.declared.problem(length)
        except ValueError as error:
            raise UsageError(f"{options.target} at --length {length}: {error}") from None
        self.name = options.world or ("gloo" if self.declared.processes else "simulated")
        if self.name == "simulated" and self.declared.processes:
            raise UsageError(f"{options.target} declares processes=True: use --world gloo, or leave --world out")
        self.ranks = opened(GlooWorld() if self.name == "gloo" else ContainedWorld())
        self.task = ReachTask(self.target, length, ranks, options.seed)
        if self.declared.processes:
            self.one_process = opened(GlooWorld())

    # -- running

    def _run(
        self, world: World, program: Callable[[Any], Any], argument: Any, size: int, *, watch: bool = False
    ) -> Run:
        load = Load(self.target, _loaded, self.options.load_deadline)
        return world.run(
            program, argument, world_size=size, seed=0, deadline=self.options.deadline, watch=watch, load=load
        )

    def _alone(self, program: Callable[[Any], Any], argument: Any) -> Any:
        run = self._run(self.one_process, program, argument, 1)
        if run.failure is None:
            return run.results[0]
        self._refuse(run.failure)
        said = f"{self.options.target} in one process: {run.failure.message}"
        if run.failure.kind == "deadline":
            raise Inconclusive(f"{said}; allow more with --deadline")
        raise UsageError(said)

    def _together(self, program: Callable[[Any], Any], task: ReachTask, *, watch: bool = False) -> tuple[Any, ...]:
        run = self._run(self.ranks, program, task, task.ranks, watch=watch)
        if run.failure is None:
            return run.results
        self._refuse(run.failure)
        raise _RanksFailed(run)

    def _refuse(self, failure: Failure) -> None:
        if failure.rule == "gpu":
            raise Inconclusive(f"{self.options.target}: {failure.message}")
        if failure.rule in BAD_INPUT:
            raise UsageError(f"{self.options.target}: {failure.message}")

    # -- the verdict

    def result(self) -> ReachResult:
        """Run everything, and judge."""
        alone: ComputedAlone = self._alone(compute_alone, self.task)
        self._repeats([alone.plain, *([alone.exact] if alone.exact is not None else [])], "in one process")
        ranks = self.task.ranks
        shards = alone.shards
        result = ReachResult(self.options.target, self.name, self.task.length, ranks, self.sharding, tuple(shards))
        try:
            together: tuple[Computed, ...] = self._together(compute, self.task, watch=True)
            self._weights(alone, together)
            self._repeats(together, f"on {ranks} ranks")
            alone_probed, together_probed, task = self._probed(alone)
        except _RanksFailed as failed:
            return self._failed(result, failed.run)
        judgement: ReachVerdict = judge(
            Evidence(
                self.problem,
                self.declared.layers,
                self.declared.whole,
                self.declared.loss,
                self.declared.gradients,
                task.precision,
                shards,
                alone,
                together,
                alone_probed,
                together_probed,
                lambda: list(self._alone(recount, self.task)),
                self._first_nan,
            )
        )
        return dataclasses.replace(result, sent=tuple(one.sent for one in together), **vars(judgement))

    def _probed(self, alone: ComputedAlone) -> tuple[Probed, tuple[Probed, ...], ReachTask]:
        """Probe in float64, where tiny shares show; in float32 if the model or its communication has no float64."""
        for precision in ("float64", "float32") if alone.exact is not None else ("float32",):
            task = dataclasses.replace(self.task, precision=precision)
            one: Probed = self._alone(probe, task)
            rows = min(self.declared.batch, task.length) if one.independent else 1
            try:
                return one, self._together(probe, dataclasses.replace(task, rows=rows)), task
            except _RanksFailed:
                if precision == "float32":
                    raise
        raise AssertionError("unreachable: the last precision returns or raises")

    def _first_nan(self) -> str | None:
        """Where numbers of ranks first become NaN that do not in one process, the lowest rank's first place."""
        alone = {origin for origin, _ in self._alone(first_nan, self.task)}
        try:
            together = self._together(first_nan, self.task)
        except _RanksFailed:  # under a mode of torch, and not without
            return None
        for rank, found in enumerate(together):
            for (function, line), inputs in found:
                if (function, line) not in alone:
                    return f"NaN begins on rank {rank} in {function} (at {line.short}), whose {inputs}"
        return None

    def _repeats(self, computed: Sequence[Computed], where: str) -> None:
        """Refuse a model that is not deterministic."""
        if all(one.repeats for one in computed):
            return
        off = (
            "it draws random numbers in its forward: call model.eval(), or pass a dropout probability of 0 where it "
            "calls dropout or attention"
            if any(one.draws for one in computed)
            else "switch off what changes from call to call, such as a running average, a cache, or random numbers "
            "that are not torch's (Python's, NumPy's), or call torch.use_deterministic_algorithms(True) in the builder"
        )
        raise UsageError(
            f"{self.options.target} gives other outputs the second time {where}, on the same tokens: {off}"
        )

    def _weights(self, alone: ComputedAlone, together: Sequence[Computed]) -> None:
        other = [str(rank) for rank, one in enumerate(together) if one.weights != alone.plain.weights]
        if other:
            raise UsageError(
                f"{self.options.target} builds other weights on rank {', '.join(other)} than in one process: call "
                "torch.manual_seed in the builder, just before the model is made, and do not shard parameters"
            )

    def _failed(self, result: ReachResult, run: Run) -> ReachResult:
        failure = run.failure
        assert failure is not None
        text = " ".join([f"the ranks fail where one process does not: {failure.message}", *run.notes])
        return dataclasses.replace(result, findings=(Deviation("failed", text),), detail=failure.detail)


def _loaded(target: str) -> None:
    """Import the target when a process starts; what goes wrong is told by the run that follows."""
    with contextlib.suppress(UsageError, Inconclusive):
        load_model(target)
