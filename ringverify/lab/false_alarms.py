"""Run the suite on correct implementations that look wrong: every violation that it reports is a false alarm.

`python -m ringverify.lab.false_alarms FILE.jsonl 200` does so with the suite `scale`, and goes on where it was ended; a
third number draws other runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.errors import Inconclusive
from ringverify.implementation import sharding_name
from ringverify.lab.killing import Effort, side_by_side
from ringverify.lab.variants import VARIANTS
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.suites import Method
from ringverify.scale.precision import rounded_more
from ringverify.scale.rank import verify
from ringverify.scale.sampling import rows_to_sample
from ringverify.scale.task import LongTask
from ringverify.targets import load
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.world import WorldUnavailable

DEADLINE = 30.0
"""Seconds for one run: long, so that a busy machine causes no false alarm."""


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A violation that the suite reports of a correct implementation.

    Attributes:
        name: the implementation's.
        property: its id.
        case: the case in words.
        summary: what is said to be wrong.
    """

    name: str
    property: str
    case: str
    summary: str


@dataclasses.dataclass(frozen=True)
class Acquittal:
    """Results of the suite on one correct implementation.

    Attributes:
        name: the variant's id, or a built-in name.
        examples: how many cases were tried, by property; properties that do not apply are absent.
        margin: largest error over error allowed, by property.
        alarms: the false alarms.
    """

    name: str
    examples: dict[str, int]
    margin: dict[str, float]
    alarms: tuple[Alarm, ...]


CORRECT: dict[str, str] = {
    **{one.implementation.name: f"ringverify.lab.variants:{name}" for name, one in VARIANTS.items()},
    "plain ring": "ringverify.faults.ring:PLAIN",
    "ring": "ring",
    "allgather": "allgather",
}
"""Targets by name: every variant, the plain ring from which mutants are made, and the built-in implementations."""


def acquittals(names: Sequence[str], effort: Effort) -> Iterator[Acquittal]:
    """Yield the results of each implementation, with `effort.most` examples in all, divided as in the quick suite."""
    yield from side_by_side(functools.partial(_tried, effort), names, effort.jobs)


def _tried(effort: Effort, name: str) -> Acquittal:
    """Try one implementation; one process runs its ranks for all properties.

    Raises:
        Inconclusive: the world could not be set up, or the machine gave up.
    """
    target = CORRECT[name]
    implementation = load(target)
    applicable = [
        PROPERTIES[id] for id in effort.properties if PROPERTIES[id].unsupported(implementation.capabilities) is None
    ]
    quick = sum(property.examples for property in applicable)
    examples, margin, alarms = {}, {}, []
    with contextlib.closing(ContainedWorld()) as world:
        runner = Runner(implementation, world, target=target, deadline=DEADLINE)
        for property in applicable:
            share = property.examples if effort.most is None else -(-property.examples * effort.most // quick)
            try:
                found = hunt(
                    property, runner.for_another_property(), examples=share, seed=effort.seed, progress=lambda _: None
                )
            except WorldUnavailable as error:
                raise Inconclusive(str(error)) from None
            examples[property.id], margin[property.id] = found.examples, round(found.margin, 3)
            if (shown := found.counterexample) is not None:
                alarms.append(Alarm(name, property.id, shown.case.describe(), shown.violation.summary))
    return Acquittal(name, examples, margin, tuple(alarms))


# -- at length ---------------------------------------------------------------------------------------------------------

AT_LENGTH: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "everything": {},
    "window": {"causal": True, "window": (300, 0)},
    "documents": {"causal": True, "documents": (0, 900, 901, 3900)},
    "key_lengths": {"key_lengths": (3000,)},
    "gqa": {"causal": True, "heads": 4, "key_heads": 2, "value_dim": 8},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "cross": {"causal": True, "key_length": 3000},
    "split": {"heads": 2, "causal": True, "dilation": Dilation(((512, 1), (4096, 8)))},
    "shared": {"heads": 2, "causal": True, "dilation": Dilation(((512, 1), (4096, 8)), "shared")},
    "sinks": {"causal": True, "heads": 2, "sinks": True},
}
"""Fields of the problems that the suite `scale` is tried on."""
LONG = 4096
LONGER = 16_384
"""Positions of one run in eight, of the ring, which alone holds no scores of all pairs."""
LONGEST = 131_072
"""Likewise, where the pattern makes its time linear in the length."""
LINEAR = ("window", "split", "shared")


def runs_at_length(kept: Path, runs: int, drawn: int = 0) -> Iterator[dict[str, Any]]:
    """Try the suite `scale` on correct implementations, a record a run; those that are `kept` are not repeated.

    Targets, patterns, shardings, dtypes, ranks and seeds are drawn by the number of the run and `drawn`; a draw that
    asks for more than is declared is drawn again.
    """
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    yield from done[:runs]
    for number in range(len(done), runs):
        rng = np.random.default_rng([number, drawn] if drawn else number)
        while True:
            target = list(CORRECT.values())[rng.integers(len(CORRECT))] if number % 2 else "ring"
            c, name = load(target).capabilities, list(AT_LENGTH)[rng.integers(len(AT_LENGTH))]
            length = LONG
            if target == "ring" and not rng.integers(4):
                length = LONGEST if name in LINEAR else LONGER
            dtype = c.dtypes[rng.integers(len(c.dtypes))]
            sharding = sharding_name(c.shardings[rng.integers(len(c.shardings))])
            problem = Problem(query_length=length, **{"head_dim": 16, "dtype": dtype, **AT_LENGTH[name]})
            size = int(rng.integers(1, 5))
            case = Case(problem=problem, sharding=sharding, world_size=size, seed=number + drawn)
            case = dataclasses.replace(case, cotangent="both" if c.lse_gradient else "out")
            if why_unsupported(case, c) is None and not c.processes:
                break
        method = get_args(Method)[number % 3]
        with tempfile.TemporaryDirectory() as notes, contextlib.closing(ContainedWorld()) as world:
            task = LongTask(target, case, method, "cpu", rows_to_sample(case, c, 96), notes)
            run = world.run(verify, task, world_size=size, seed=0, deadline=600.0)
        found = {"run": number, "target": target, "pattern": name, "method": method, "case": case.describe()}
        if run.failure is not None:
            found["alarm"] = run.failure.message
        else:
            found["margins"] = {k: max(one.margins.get(k, 0.0) for one in run.results) for k in run.results[0].margins}
            wrong = [one for report in run.results for one in report.differences]
            found |= {"alarm": str(wrong[0])} if wrong else {}
            mean, rounded = rounded_more(case, run.results, c.probabilities)
            found |= {"mean": mean} if mean else {}
            found |= {"alarm": rounded.summary} if rounded is not None else {}
        with kept.open("a") as file:
            file.write(json.dumps(found) + "\n")
        yield found


if __name__ == "__main__":
    records = list(runs_at_length(Path(sys.argv[1]), *map(int, sys.argv[2:])))
    alarms = [one for one in records if "alarm" in one]
    print(f"{len(records)} runs at length, {len(alarms)} false alarms", *alarms, sep="\n")
