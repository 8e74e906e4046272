"""What is said of a failure at length: the event, the file that shows it again, and the command that does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from ringverify.cases.case import Case
from ringverify.cases.comparing import Finding
from ringverify.check import casefile
from ringverify.check.run import violation_event
from ringverify.check.searching import Counterexample
from ringverify.errors import UsageError
from ringverify.events import CounterexampleEvent, Where
from ringverify.properties.property import Violation
from ringverify.properties.suites import Method
from ringverify.scale.comparison import EVERY, Difference
from ringverify.scale.task import RankReport
from ringverify.scale.trials import Trials


def again(trials: Trials, method: str, case: Case) -> tuple[str, ...]:
    """Return the arguments of `ringverify check` that show the case again."""
    problem = {name: value for name, value in case.problem.to_json().items() if name != "query_length"}
    world = ("--world", trials.plan.world) if trials.plan.world != "simulated" else ()
    return (
        trials.plan.target,
        *("--suite", "scale", "--only", method, "--length", str(case.problem.nq)),
        *("--problem", json.dumps(problem), "--world-sizes", str(case.world_size), "--seed", str(case.seed)),
        *("--sharding", case.sharding),
        *world,
    )


def kept(
    trials: Trials, method: str, case: Case, violation: Violation, digest: str, event: CounterexampleEvent
) -> CounterexampleEvent:
    """Write a failure to a file that `ringverify replay` reads, and name it in the event."""
    shown = Counterexample(case, violation, digest, first=case, tried=0, smallest=False, repeats=True)
    file, note = saved(trials, method, shown, trials.plan.world)
    return dataclasses.replace(event, file=file, note=note)


def saved(trials: Trials, property: str, shown: Counterexample, world: str) -> tuple[str | None, str | None]:
    """Write a counterexample, and return the path of its file, or why there is none."""
    try:
        path = casefile.save(
            trials.options.cases,
            target=trials.plan.target,
            property=property,
            world=world,
            device=trials.options.device,
            counterexample=shown,
        )
    except UsageError as error:
        return None, str(error)
    return str(path), None


def wrong_results(
    trials: Trials,
    method: Method,
    case: Case,
    wrong: Sequence[tuple[int, Difference]],
    reports: Sequence[RankReport],
) -> tuple[CounterexampleEvent, Violation]:
    """Return the event of what is wrong: the first result that is, in the order in which results depend."""
    order = {name: number for number, name in enumerate(EVERY)}
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
    violation = Violation(("value", one.tensor), rank, summary, finding=None if one.identity else finding)
    event = violated(trials, method, violation, case)
    if one.identity is not None:
        names = ("tensor", "actual", "expected", "error", "allowed", "margin")
        numbers = {name: getattr(finding, name) for name in names}
        return dataclasses.replace(event, sum=one.sum, **numbers), violation
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
    return dataclasses.replace(event, where=where, hop=where.hop), violation


def violated(trials: Trials, method: str, violation: Violation, case: Case) -> CounterexampleEvent:
    """Return the event of a violation, with what shows it again."""
    name, text = trials.plan.implementation.name, case.describe()
    event = violation_event(violation, implementation=name, property=method, case=case, case_text=text)
    return dataclasses.replace(event, scale=again(trials, method, case))


def digest_of(found: str) -> str:
    """Return the SHA-256 of what is wrong."""
    return hashlib.sha256(found.encode()).hexdigest()
