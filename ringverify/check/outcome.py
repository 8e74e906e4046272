"""What came of properties, of an implementation and of a run. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from ringverify.errors import Inconclusive
from ringverify.reports.jsonl import Event, finite

CODES = (1, 2, 3)
"""Exit codes but 0, the one that tells most first: a new violation, a baseline out of date, nothing learned."""

ELSEWHERE = ("gloo",)
"""Worlds of which a verdict says that it was not reached there: the one of real processes that every machine has."""

LOADS = "loads"
"""What stands for all properties of a target that cannot be checked on this machine."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What came of one property of one implementation, with all that is needed to tell of it elsewhere.

    Attributes:
        implementation: name of the implementation.
        world: where its ranks ran.
        undeclared: optional features that it does not declare.
        events: the event of the property, and that of its counterexample if there is one.
        runs: runs of the world that it took.
        seconds_inside: processor time spent inside the implementation.
    """

    implementation: str
    world: str
    undeclared: list[str]
    events: list[Event]
    runs: int
    seconds_inside: float

    @property
    def verdict(self) -> Event:
        """The event of the property."""
        return self.events[0]

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps(finite(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> Told:
        """From such text."""
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one implementation.

    Attributes:
        verdict: `conformant`, `violations` or `inconclusive`; a known violation is a violation.
        exit_code: what it comes to for the run, where a known violation does not count.
        known: how many violations are known.
        unexpected: a line for each property that passes where the baseline has it violated.
    """

    verdict: str
    exit_code: int
    known: int
    unexpected: list[str]

    @classmethod
    def of(cls, properties: Sequence[Event]) -> Outcome:
        """From the events of its properties."""
        seen = {event["verdict"] for event in properties}
        verdict = "violations" if "fail" in seen else "inconclusive"
        if verdict != "violations" and "inconclusive" not in seen and "pass" in seen:
            verdict = "conformant"
        unexpected = [event["unexpected"] for event in properties if "unexpected" in event]
        code = 3 if "inconclusive" in seen or not seen & {"pass", "fail"} else 0
        if unexpected:
            code = 2
        if any(is_new_violation(event) for event in properties):
            code = 1
        return cls(verdict, code, sum("known" in event for event in properties), unexpected)

    def without_a_word(self) -> Outcome:
        """The same where something could not be told that was to be: a violation stays one, and nothing else does."""
        if self.exit_code == 1:
            return self
        return dataclasses.replace(self, verdict="inconclusive", exit_code=Inconclusive.exit_code)


def is_new_violation(event: Event) -> bool:
    """Whether an event of a property tells of a violation that no baseline knows."""
    return event["verdict"] == "fail" and "known" not in event


def implementation_event(told: Sequence[Told], *, implementation: str, asked: int, seconds: float) -> Event:
    """The event that tells of an implementation.

    Args:
        told: what came of its properties.
        implementation: its name.
        asked: how many properties were to be tried.
        seconds: wall-clock time of it all.
    """
    properties = [one.verdict for one in told]
    seen, outcome = [event["verdict"] for event in properties], Outcome.of(properties)
    worlds = {told[0].world, *(one.verdict["world"] for one in told if "world" in one.verdict)}
    refuses = sorted({text for one in told for text in one.verdict.get("gloo_refuses", ())})
    beside = sum(one.runs for one in told if "world" in one.verdict)
    return {
        "event": "implementation",
        "implementation": implementation,
        "verdict": outcome.verdict,
        "world": told[0].world,
        "not_run_in": [name for name in ELSEWHERE if name not in worlds],
        **({"gloo_refuses": refuses} if refuses else {}),
        "undeclared": told[0].undeclared,
        "properties": {kind: seen.count(kind) for kind in ("pass", "fail", "unsupported", "inconclusive")},
        "known": outcome.known,
        "not_run": asked - len(seen),
        "examples": sum(event["examples"] for event in properties),
        "runs": sum(one.runs for one in told) - beside,
        **({"simulated_runs": beside} if beside else {}),
        "seconds": round(seconds, 3),
        "seconds_inside": round(sum(one.seconds_inside for one in told), 3),
    }


def told_of_unavailable(target: str, reason: str) -> Told:
    """What came of a target that cannot be checked on this machine.

    Args:
        target: as it was typed.
        reason: why, in a line.
    """
    event: Event = {
        "event": "property",
        "implementation": target,
        "property": LOADS,
        "meaning": "what the target needs is on this machine",
        "verdict": "inconclusive",
        "examples": 0,
        "seconds": 0.0,
        "margin": None,
        "reason": reason,
    }
    return Told(target, "none", [], [event], 0, 0.0)


def footer_event(outcomes: Sequence[Outcome], *, baseline: bool, elsewhere: Sequence[str] = ()) -> Event:
    """The event that ends a run.

    Args:
        outcomes: what came of each implementation.
        baseline: whether there is a baseline.
        elsewhere: implementations that the baseline names and that this run does not check.
    """
    verdicts, codes = ({getattr(outcome, name) for outcome in outcomes} for name in ("verdict", "exit_code"))
    verdict = next((v for v in ("violations", "inconclusive") if v in verdicts), "conformant")
    footer: Event = {
        "event": "footer",
        "verdict": verdict,
        "exit_code": next((code for code in CODES if code in codes), 0),
    }
    if baseline:
        footer["known"] = sum(outcome.known for outcome in outcomes)
        footer["unexpected"] = [line for outcome in outcomes for line in outcome.unexpected]
        if elsewhere:
            footer["elsewhere"] = list(elsewhere)
    return footer
