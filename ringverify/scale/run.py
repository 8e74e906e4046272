"""The suite `scale`: one run of one problem at the length that is asked for, verified where its results lie."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ringref.classes import BLOCK
from ringref.problem import Problem
from ringverify.bench.machine import PROCESS_BYTES, TENSORS_A_SIDE
from ringverify.cases.case import Case, even_multiple, why_unsupported
from ringverify.cases.comparing import Finding, worst
from ringverify.cases.running import Runner, shards
from ringverify.check import casefile
from ringverify.check.budget import Budget
from ringverify.check.hunting import hunt
from ringverify.check.options import CheckRequest, Options, Subject, Unavailable
from ringverify.check.outcome import (
    ImplementationOutcome,
    TriedProperty,
    footer_event,
    implementation_event,
    unavailable,
)
from ringverify.check.planning import RunPlan, WorldName, find_device, open_world, planned
from ringverify.check.run import DEADLINES, header, violation_event
from ringverify.check.searching import Counterexample
from ringverify.errors import UsageError, instead
from ringverify.events import CounterexampleEvent, Event, Hint, PropertyEvent, PropertyOutcome, TensorName, Where
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.memory import MEMORY
from ringverify.properties.property import Violation
from ringverify.reports.progress import Progress
from ringverify.scale.checksums import RESULTS
from ringverify.scale.comparison import Difference
from ringverify.scale.numbers import MOST_CLASSES, QUERY_CLASSES
from ringverify.scale.rank import LongTask, Method, RankReport, rows_to_sample, verify
from ringverify.targets import from_anywhere, load
from ringverify.worlds.limits import available_memory, sentence
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.rank import ThisMachine
from ringverify.worlds.processes.torchrun import Crew
from ringverify.worlds.world import Load, Run, World, WorldUnavailable

LENGTH = 131_072
"""Positions where none are asked for."""
RANKS = 2
SECONDS = 6 * 3600.0
"""Default deadline of a run."""
SAMPLED = 96
"""Rows that are sampled, about."""
SMALL = (64, 512)
"""Lengths of the ordinary suite at which a fault is looked for again."""
SEARCH_SECONDS = 10.0
"""For the search of a smaller case, of one property."""
ORDINARY = dict(zip(RESULTS, ("forward", "lse", "gradients", "gradients", "gradients"), strict=True))
"""The property of the ordinary suites that compares a result."""
MEMORY_LENGTH = 16_384
"""Positions at which the claim about memory is held, at most: a watched run takes several times as long."""
MEMORY_RANKS = 4
METHODS: dict[str, str] = {
    "every_row": "every row equals the oracle's, on queries and keys from codebooks",
    "sampled_rows": "sampled rows, and all gradients of keys through them, equal the oracle's on ordinary inputs",
    "identities": "sums of out and gradients over all rows agree with one another and the inputs, on ordinary inputs",
    MEMORY.id: MEMORY.meaning,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """What of the suite is asked for.

    Attributes:
        problem: fields of the problem as JSON, without its length, or empty for what suits the implementation.
        length: positions.
        methods: how results are verified.
        sharding: which rank holds which positions; `None` is zigzag for a causal problem, or what is declared first.
    """

    problem: dict[str, Any]
    length: int
    methods: tuple[str, ...]
    sharding: str | None = None


def wanted(request: CheckRequest, length: int | None, problem: str | None, sharding: str | None) -> ScaleRequest:
    """Read the options of the suite.

    Raises:
        UsageError: one of them is wrong, or has no meaning here.
    """
    for option in ("max_examples", "time_budget", "baseline"):
        if getattr(request, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} is not for the suite scale, which is one long case a method; leave it out")
    names = tuple(METHODS)
    for name in (*(request.only or ()), *(request.skip or ())):
        if name not in names:
            raise UsageError(f"no property {name!r} in the suite scale{instead(name, names)}")
    methods = tuple(one for one in names if one in (request.only or names) and one not in (request.skip or ()))
    if not methods:
        raise UsageError("--only and --skip leave no property of the suite scale")
    try:
        fields = json.loads(problem) if problem else {}
        one = Problem.from_json({"query_length": length or LENGTH, **fields})
        one.without_sinks("the suite scale")
    except (ValueError, TypeError) as error:
        raise UsageError(f"--problem {problem}: expected fields of a problem as a JSON object: {error}") from None
    if length is not None and fields.get("query_length", length) != length:
        raise UsageError(f"--length {length} contradicts query_length={one.nq} in --problem: leave one of them out")
    return ScaleRequest(problem=fields, length=one.nq, methods=methods, sharding=sharding)


def check_scale(
    subjects: Sequence[Subject | Unavailable],
    options: Options,
    asked: ScaleRequest,
    tell: Callable[[Event], None],
    progress: Progress,
    crew: Crew | None = None,
) -> int:
    """Check implementations at length, report the results event by event, and return the exit code.

    Raises:
        UsageError: options contradict what an implementation declares, or the length does not fit into memory.
        Inconclusive: the device or the world asked for does not exist here.
    """
    find_device(options.device)
    tried: list[tuple[Unavailable | RunPlan, list[Case]]] = []
    for subject in subjects:
        if isinstance(subject, Unavailable):
            tried.append((subject, []))
            continue
        plan = planned(
            subject.target, subject.implementation, world=options.world, world_sizes=options.world_sizes, crew=crew
        )
        if plan.world == "external":
            raise UsageError(
                f"{subject.target}: a program makes its own ranks, and --suite scale needs ours; leave it out"
            )
        sizes = _sizes(plan, options, crew)
        tried.append((plan, [_case(plan.implementation.capabilities, asked, size, options.seed) for size in sizes]))
        for case in tried[-1][1]:
            refuse_too_long(case, plan, case.world_size if crew is None else crew.here)
    tell(header(options))
    outcomes = []
    for one, cases in tried:
        if isinstance(one, Unavailable):
            outcomes.append(_told([unavailable(one.target, one.reason)], one.target, 1, tell))
            continue
        with contextlib.closing(open_fast(one.world) if crew is None else GlooWorld(crew)) as world:
            checked = Checked(one, world, options, asked.length, progress)
            tries = {name: partial(checked.by, name) for name in get_args(Method)} | {MEMORY.id: checked.memory}
            found = (tries[method](cases) for method in asked.methods)
            name, early = one.implementation.name, options.stop_early
            outcomes.append(_told(found, name, len(asked.methods), tell, stop_early=early))
        if options.stop_early and outcomes[-1].exit_code == 1:
            break
    footer = footer_event(outcomes, baseline=False)
    tell(footer)
    return footer.exit_code


def open_fast(name: WorldName) -> World:
    """Return a world in which bits need not be the same on every run."""
    return GlooWorld(ThisMachine(reproducible=False)) if name == "gloo" else open_world(name)


def _told(
    results: Iterable[TriedProperty], name: str, asked: int, tell: Callable[[Event], None], *, stop_early: bool = False
) -> ImplementationOutcome:
    """Report results as they come, and then the verdict on an implementation."""
    began, found = time.monotonic(), []
    for one in results:
        found.append(one)
        for event in one.outcome.events:
            tell(event)
        if stop_early and one.verdict.is_new_violation():
            break
    tell(implementation_event(found, implementation=name, asked=asked, seconds=time.monotonic() - began))
    return ImplementationOutcome.of([one.verdict for one in found])


def _sizes(plan: RunPlan, options: Options, crew: Crew | None) -> tuple[int, ...]:
    """Return the world sizes to try: those asked for, else all processes of torchrun, else two ranks if that may be."""
    declared = plan.implementation.capabilities.world_sizes
    if options.world_sizes is not None:
        return tuple(one for one in options.world_sizes if one in (declared or (one,))) or options.world_sizes
    if declared is None:
        return (crew.size if crew is not None else RANKS,)
    return (max(declared),) if crew is not None else (RANKS if RANKS in declared else declared[-1],)


def _case(capabilities: Capabilities, asked: ScaleRequest, size: int, seed: int) -> Case:
    """Return the case: what is not asked for is what the implementation declares."""
    c, fields = capabilities, dict(asked.problem)
    fields.setdefault("dtype", "float32" if "float32" in c.dtypes else c.dtypes[0])
    fields.setdefault("causal", c.causal != "never")
    fields.setdefault("head_dim", 64 if c.head_dims is None else c.head_dims[0])
    multiples = [one for one in (c.heads_multiple, c.key_heads_multiple) if one is not None]
    fields.setdefault("heads", math.lcm(*(size if one == "world_size" else int(one) for one in multiples)))
    names = [sharding_name(one) for one in c.shardings]
    sharding = asked.sharding or ("zigzag" if fields["causal"] and "zigzag" in names else names[0])
    if sharding not in names:
        raise UsageError(f"--sharding {sharding} is not declared: {', '.join(names)}{instead(sharding, names)}")
    length, bound = asked.length, {"documents", "key_lengths", "key_length"} & fields.keys()
    if not bound and (not c.uneven or c.length_multiple):
        step = math.lcm(even_multiple(sharding, size), size * (c.length_multiple or 1))
        if length < step:
            raise UsageError(f"--length {length}: what is declared needs a multiple of {step} on {size} ranks")
        length = length // step * step
    problem = Problem.from_json({**fields, "query_length": length})
    return Case(
        problem=problem,
        sharding=sharding,
        world_size=size,
        cotangent="both" if c.lse_gradient else "out",
        seed=seed,
    )


def refuse_too_long(case: Case, plan: RunPlan, here: int) -> None:
    """Refuse a length for which this machine has too little memory for the ranks that it hosts, `here` at most.

    Raises:
        UsageError: with the estimate.
    """
    p = case.problem
    numbers = p.batch * p.heads * (p.nq + p.nk) // 2 * max(p.head_dim, p.dv)
    width = {"float64": 8}.get(p.dtype, 4)
    sums = 2 * (p.nq + p.nk) // BLOCK * (MOST_CLASSES + QUERY_CLASSES) * (p.dv + 3) * 8 * p.group_size
    of_rank = TENSORS_A_SIDE * width * numbers // case.world_size + sums + 64 * (p.nq + p.nk)
    ranks = min(case.world_size, here)
    processes = 1 if plan.world == "simulated" else ranks
    needed, available = of_rank * ranks + PROCESS_BYTES * processes, available_memory()
    if plan.world != "nccl" and available is not None and needed > available:
        raise UsageError(
            f"--length {p.nq}: about {needed / 2**30:.1f} GiB are needed for {ranks} ranks, and "
            f"{available / 2**30:.1f} GiB are available; use a shorter length, fewer heads or fewer ranks"
        )


class Checked:
    """The check of one implementation in one world.

    Args:
        plan: of the implementation.
        world: where its ranks run.
        options: of the run.
        length: positions that were asked for.
        progress: is told how far it has come.
        recording: whether a failure is looked for at smaller lengths, and written to a file.

    Attributes:
        digest: SHA-256 of what the last run found wrong.
    """

    def __init__(
        self,
        plan: RunPlan,
        world: World,
        options: Options,
        length: int,
        progress: Progress,
        *,
        recording: bool = True,
    ) -> None:
        self.plan, self.world, self.options, self.progress = plan, world, options, progress
        self.capabilities = plan.implementation.capabilities
        self.digest = ""
        self._length, self._recording = length, recording

    def by(self, method: Method, cases: Sequence[Case]) -> TriedProperty:
        """Run the cases, and verify them by a method; the first that is wrong decides."""
        began, rows, margin, figures, inside = time.monotonic(), 0, 0.0, list[str](), 0.0
        outcome: PropertyOutcome | None = None
        for case in cases:
            lacks = why_unsupported(case, self.capabilities)
            if lacks is not None or (method == "identities" and not self.capabilities.gradients):
                reason = "gradients are not declared" if lacks is None else lacks.text
                outcome = PropertyOutcome(self._event(method, "unsupported", 0, began, reason=reason))
                break
            try:
                run, noted = self._run(method, case)
            except WorldUnavailable as error:
                outcome = PropertyOutcome(self._event(method, "inconclusive", rows, began, reason=str(error)))
                break
            if run.failure is not None:
                outcome = self._ended(method, case, run, noted, began)
                break
            reports: Sequence[RankReport] = run.results
            rows += sum(sum(report.rows.values()) for report in reports)
            inside += max(report.inside[0] for report in reports)
            margin = max(margin, *(one for report in reports for one in report.margins.values()))
            figures += self._figures(case, reports)
            wrong = [(rank, one) for rank, report in enumerate(reports) for one in report.differences]
            if wrong:
                event = self._event(method, "fail", rows, began, margin=margin, figures=figures)
                outcome = PropertyOutcome(event, self._counterexample(method, case, wrong, reports))
                break
        if outcome is None:
            outcome = PropertyOutcome(self._event(method, "pass", rows, began, margin=margin, figures=figures))
        return TriedProperty(outcome=outcome, world=self.world.name, runs=len(cases), seconds_inside=inside)

    def memory(self, cases: Sequence[Case]) -> TriedProperty:
        """Hold what is claimed of memory in a simulated world, which watches its ranks: at a length and twice it."""
        began, c = time.monotonic(), load(self.plan.target).capabilities  # not narrowed to the world sizes asked for
        reason = MEMORY.unsupported(c)
        p, size = cases[0].problem, max(cases[0].world_size, MEMORY_RANKS)
        if reason is None:
            # Where a mask decides how many blocks a rank attends, a peak need not be in proportion: all are attended.
            masks = dict.fromkeys(("key_length", "window", "documents", "key_lengths", "dilation"))
            shorter = p.replace(query_length=min(p.nq, MEMORY_LENGTH) // (4 * size) * 2 * size, **masks)
            case = dataclasses.replace(cases[0], problem=shorter, world_size=size)
            lacks = why_unsupported(case, c)
            small = None if MEMORY.applies(case, c) else "its tensors are too small to tell"
            reason = small if lacks is None else lacks.text
        if c.processes or cases[0].sharding == "replicated_query":
            reason = "ranks share a process in a simulated world" if c.processes else "each rank holds all queries"
        if reason is not None:
            event = self._event(MEMORY.id, "unsupported", 0, began, reason=reason)
            return TriedProperty(outcome=PropertyOutcome(event), world=self.world.name)
        with contextlib.closing(open_world("simulated")) as world:
            runner = Runner(load(self.plan.target), world, target=self.plan.target, deadline=SECONDS)
            try:
                judged = MEMORY.judge(case, runner)
            except WorldUnavailable as error:
                event = self._event(MEMORY.id, "inconclusive", 0, began, reason=str(error))
                return TriedProperty(outcome=PropertyOutcome(event), world="simulated")
        told = (f"{case.describe()}, the same on twice the ranks and twice as long",)
        verdict = "pass" if judged.violation is None else "fail"
        event = self._event(MEMORY.id, verdict, 0, began, margin=judged.margin, figures=told)
        event = dataclasses.replace(event, world=None if self.world.name == "simulated" else "simulated")
        if judged.violation is None:
            return TriedProperty(outcome=PropertyOutcome(event), world="simulated", runs=3)
        found = self._violation(MEMORY.id, judged.violation, case)
        found = dataclasses.replace(found, scale=self._again(MEMORY.id, cases[0]))
        return TriedProperty(outcome=PropertyOutcome(event, found), world="simulated", runs=3)

    def _violation(self, method: str, violation: Violation, case: Case) -> CounterexampleEvent:
        name, text = self.plan.implementation.name, case.describe()
        return violation_event(violation, implementation=name, property=method, case=case, case_text=text)

    def _event(
        self,
        method: str,
        verdict: Any,
        rows: int,
        began: float,
        *,
        margin: float | None = None,
        reason: str | None = None,
        figures: Sequence[str] = (),
    ) -> PropertyEvent:
        return PropertyEvent(
            implementation=self.plan.implementation.name,
            property=method,
            meaning=METHODS[method],
            verdict=verdict,
            examples=rows,
            seconds=round(time.monotonic() - began, 3),
            margin=margin,
            reason=reason,
            figures=tuple(figures) or None,
        )

    def _run(self, method: Method, case: Case) -> tuple[Run, dict[int, Any]]:
        """Run the case on all ranks, showing how far rank 0 is; return also what each rank noted last."""
        sampled = rows_to_sample(case, self.capabilities, max(SAMPLED, 16 * case.world_size))
        target = from_anywhere(self.plan.target)
        with tempfile.TemporaryDirectory(prefix="ringverify-scale-") as notes:
            task = LongTask(target, case, method, self.options.device, sampled, notes)
            with _shown(self.progress, self.plan.implementation.name, method, self._rows(method, case), Path(notes)):
                run = self.world.run(
                    verify,
                    task,
                    world_size=case.world_size,
                    seed=case.schedule,
                    deadline=self.options.deadline or SECONDS,
                    load=Load(target, load, self.options.load_deadline, self.progress.loading),
                )
            return run, {rank: _noted(Path(notes), rank) for rank in range(case.world_size)}

    def _rows(self, method: Method, case: Case) -> int:
        """Return how many rows of results rank 0 verifies, about."""
        p, c = case.problem, self.capabilities
        queries, keys = (len(of[0]) for of in shards(case, c))
        of_queries = 1 + c.lse + c.gradients if method == "every_row" else int(c.gradients)
        return p.batch * (p.heads * queries * of_queries + p.hk * keys * 2 * c.gradients)

    def _figures(self, case: Case, reports: Sequence[RankReport]) -> Iterator[str]:
        p = case.problem
        names = [f"{name} {margin:.2g}" for name, margin in _largest(reports).items()]
        yield f"{case.describe()}; largest margins: {', '.join(names)}"
        errors = [f"{name} {rho:.3g} ({right:.3g})" for name, (rho, right) in _mean_errors(reports).items()]
        if errors:
            yield f"root mean square errors in u (of right results, rounded once): {', '.join(errors)}"
        times = []
        for name in ("inside", "verifying"):
            seconds = [getattr(one, name) for one in reports]
            wall, worked = max(of[0] for of in seconds), sum(of[1] for of in seconds)
            times.append(f"{wall:.1f} s ({worked:.1f} s of processor time of the ranks' threads)")
        figure = f"implementation {times[0]}, verification {times[1]}"
        peaks = [one.memory for one in reports if one.memory is not None]
        if peaks:
            most, after = (max(of) >> 20 for of in zip(*peaks, strict=True))
            whose = "of the process of all ranks" if self.plan.world == "simulated" else "of a rank"
            figure += f"; peak memory {whose} {most} MiB in the implementation, {after} MiB in verification"
        yield figure
        if p.nq != self._length:
            yield f"{p.nq:,} of {self._length:,} positions: the rest would not divide as is declared"
        yield from (line for one in reports for line in one.worth)

    def _ended(self, method: Method, case: Case, run: Run, noted: dict[int, Any], began: float) -> PropertyOutcome:
        """Return the outcome of a run that gave no results, with what was verified until then."""
        failure = run.failure
        assert failure is not None
        rows = sum(sum(note.get("rows", {}).values()) for note in noted.values())
        wrong = sum(sum(note.get("wrong", {}).values()) for note in noted.values())
        until = f"until then {rows:,} rows were verified, {wrong:,} of them wrong"
        if not wrong and (failure.kind in ("died", "deadline") or failure.limit is not None):
            why = failure.message if failure.limit is None else f"{sentence(failure.limit)}: {failure.message}"
            return PropertyOutcome(self._event(method, "inconclusive", rows, began, reason=f"{why}; {until}"))
        violation = Violation(
            (failure.kind,), failure.rank, f"{failure.message}; {until}", failure.detail, failure=failure
        )
        self.digest = _digest(f"{failure.kind} on {failure.rank}")
        event = dataclasses.replace(self._violation(method, violation, case), scale=self._again(method, case))
        return PropertyOutcome(self._event(method, "fail", rows, began), self._kept(method, case, violation, event))

    def _kept(self, method: str, case: Case, violation: Violation, event: CounterexampleEvent) -> CounterexampleEvent:
        """Write a failure to a file that `ringverify replay` reads, and name it in the event."""
        shown = Counterexample(case, violation, self.digest, first=case, tried=0, smallest=False, repeats=True)
        if not self._recording:
            return event
        file, note = self._saved(method, shown, self.plan.world)
        return dataclasses.replace(event, file=file, note=note)

    def _saved(self, property: str, shown: Counterexample, world: str) -> tuple[str | None, str | None]:
        """Write a counterexample, and return the path of its file, or why there is none."""
        try:
            path = casefile.save(
                self.options.cases,
                target=self.plan.target,
                property=property,
                world=world,
                device=self.options.device,
                counterexample=shown,
            )
        except UsageError as error:
            return None, str(error)
        return str(path), None

    def _again(self, method: str, case: Case) -> tuple[str, ...]:
        """Return the arguments of `ringverify check` that show the case again."""
        problem = {name: value for name, value in case.problem.to_json().items() if name != "query_length"}
        world = ("--world", self.plan.world) if self.plan.world != "simulated" else ()
        return (
            self.plan.target,
            *("--suite", "scale", "--only", method, "--length", str(case.problem.nq)),
            *("--problem", json.dumps(problem), "--world-sizes", str(case.world_size), "--seed", str(case.seed)),
            *("--sharding", case.sharding),
            *world,
        )

    def _counterexample(
        self,
        method: Method,
        case: Case,
        wrong: Sequence[tuple[int, Difference]],
        reports: Sequence[RankReport],
    ) -> Any:
        """Return the event of what is wrong: the first result that is, in the order in which results depend."""
        order = {name: number for number, name in enumerate(RESULTS)}
        first = min(order[one.tensor] for _, one in wrong)
        mine = [(rank, one) for rank, one in wrong if order[one.tensor] == first]
        rank, one = max(mine, key=lambda found: found[1].margin)
        tensors = tuple(dict.fromkeys(name for name in order if any(o.tensor == name for _, o in wrong)))
        finding = Finding(
            tensor=one.tensor,
            rank=rank,
            index=one.index,
            position=one.position,
            actual=one.actual,
            expected=one.expected,
            error=abs(one.actual - one.expected),
            allowed=one.allowed,
            margin=one.margin,
            wrong={rank: one.rows for rank, one in mine},
            of=sum(report.rows.get(one.tensor, 0) for report in reports),
            tensors=tensors,
        )
        summary = f"{one.tensor} differs from the oracle, wrong: {', '.join(tensors)}"
        if one.identity is not None:
            summary = f"the sum of {one.identity}, where {one.allowed:.3g} is allowed"
        self.digest = _digest(repr([(rank, other) for rank, other in wrong]))
        violation = Violation(("value", one.tensor), rank, summary, finding=None if one.identity else finding)
        event = self._kept(method, case, violation, self._violation(method, violation, case))
        hints = (Hint(self._smaller(method, case, tensors)),) if self._recording else ()
        again = self._again(method, case)
        if one.identity is not None:
            names = ("tensor", "actual", "expected", "error", "allowed", "margin")
            numbers = {name: getattr(finding, name) for name in names}
            return dataclasses.replace(event, hints=hints, scale=again, **numbers)
        places = "; ".join(
            f"rank {rank}, {one.rows:,} rows, positions {', '.join(f'{a}-{z}' for a, z in one.ranges)}"
            f"{', …' if sum(z - a + 1 for a, z in one.ranges) < one.rows // case.problem.heads else ''}"
            for rank, one in mine[:4]
        )
        pair, text = one.pair, f"{one.tensor} is wrong on {places}"
        if pair is not None:
            hop = "" if pair.hop is None else f", hop {pair.hop},"
            whose = f"keys of rank {pair.owner}{hop} are"
            if one.tensor in ("dk", "dv"):
                whose = f"the part of rank {pair.rank}'s queries{hop} is"
            text += f"; in row {one.position} {whose} {pair.what}"
        where = Where(
            one.tensor, {}, (one.index[1 if one.tensor == "lse" else 2],), () if pair is None else (pair,), (text,)
        )
        return dataclasses.replace(event, where=where, hop=where.hop, hints=hints, scale=again)

    def _smaller(self, method: Method, case: Case, tensors: Sequence[TensorName]) -> str:
        """Say whether the fault shows at small lengths of the problem, and which case the ordinary suite then finds.

        If it does not, the length is halved until the suite lets it pass too.
        """
        if case.problem.documents is not None or case.problem.key_lengths is not None:
            return "at small lengths it was not tried"
        shows, needs = case.problem.nq, 0
        with contextlib.closing(open_world("simulated")) as world:
            runner = Runner(self.plan.implementation, world, target=self.plan.target, deadline=DEADLINES["simulated"])
            for length in () if self.capabilities.processes else SMALL:
                small = self._shorter(case, length)
                if small is None:
                    continue
                try:
                    observation = runner.run(small, gradients=self.capabilities.gradients)
                except WorldUnavailable:
                    break
                if observation.failure is None and worst(small, self.capabilities, observation, RESULTS)[1] is None:
                    needs = length
                    continue
                return f"it shows at {length} positions too{self._shrunk(runner, tensors)}"
        while (half := self._shorter(case, shows // 2)) is not None and half.problem.nq > needs:
            with contextlib.suppress(WorldUnavailable):
                run, _ = self._run(method, half)
                if run.failure is None and any(report.differences for report in run.results):
                    shows = half.problem.nq
                    continue
                needs = half.problem.nq if run.failure is None else needs
            break
        least = f"it needs more than {needs:,} positions" if needs else "at small lengths it was not tried"
        return least if shows == case.problem.nq else f"it shows at {shows:,} positions too; {least}"

    def _shorter(self, case: Case, length: int) -> Case | None:
        """Return the case at a length; `None` if it is no shorter, or its implementation cannot do it."""
        p = case.problem
        problem = p.replace(query_length=length, key_length=None if p.nq == p.nk else length)
        small = dataclasses.replace(case, problem=problem)
        return small if 0 < length < p.nq and why_unsupported(small, self.capabilities) is None else None

    def _shrunk(self, runner: Runner, tensors: Sequence[TensorName]) -> str:
        """Say which case the search of the ordinary suite finds and shrinks, for the first result that is wrong."""
        for name in dict.fromkeys(ORDINARY[tensor] for tensor in tensors):
            property = PROPERTIES[name]
            if property.unsupported(self.capabilities) is None:
                hunted = hunt(
                    property,
                    runner.for_another_property(),
                    examples=property.examples,
                    seed=self.options.seed,
                    share=Budget(SEARCH_SECONDS, 1).share(),
                    progress=lambda _: None,
                )
                if (found := hunted.counterexample) is not None:
                    again = ["ringverify", "check", self.plan.target, "--only", name]
                    if (path := self._saved(name, found, "simulated")[0]) is not None:
                        again = ["ringverify", "replay", path]
                    return f": {found.case.describe()} is a smaller case of it, which `{shlex.join(again)}` shows"
        return ", and the ordinary suite finds no smaller case"


def _digest(found: str) -> str:
    return hashlib.sha256(found.encode()).hexdigest()


def _mean_errors(reports: Sequence[RankReport]) -> dict[TensorName, tuple[float, float]]:
    """Return root mean square errors in units of u, and those of right results, rounded once."""
    none = np.zeros((2, 2))
    found = {name: np.sum([one.squares.get(name, none) for one in reports], axis=0) for name in reports[0].squares}
    means = {name: np.sqrt(x[:, 0] / np.maximum(x[:, 1], 1)) for name, x in found.items()}
    return {name: (float(x[0]), float(x[1])) for name, x in means.items()}


def _largest(reports: Sequence[RankReport]) -> dict[TensorName, float]:
    found = {name: [one.margins[name] for one in reports if name in one.margins] for name in RESULTS}
    return {name: max(margins) for name, margins in found.items() if margins}


def _noted(notes: Path, rank: int) -> dict[str, Any]:
    """Return what a rank noted last; empty where it noted nothing, or on another machine."""
    with contextlib.suppress(OSError, ValueError):
        noted: dict[str, Any] = json.loads((notes / f"{rank}.json").read_text())
        return noted
    return {}


@contextlib.contextmanager
def _shown(progress: Progress, name: str, method: str, rows: int, notes: Path) -> Iterator[None]:
    """Show how many rows rank 0 has verified."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            progress.step(min(rows, sum(_noted(notes, 0).get("rows", {}).values())))

    progress.start(name, method, rows)
    watching = threading.Thread(target=watch, name="ringverify-scale", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        progress.stop()
