"""What a run is asked for, and who watches it. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ringverify.implementation import Implementation
from ringverify.properties.suites import Suite
from ringverify.worlds.world import LOAD_SECONDS

if TYPE_CHECKING:
    from ringverify.check.baseline import Baseline
    from ringverify.check.planning import WorldName

MOST_DRAWN = 2**32
"""Seeds of nightly runs are drawn below this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asked of a run.

    Attributes:
        suite: how many examples.
        world: where ranks run; `None` chooses by what an implementation declares.
        world_sizes: world sizes to use; `None` means all that suit.
        device: device of the tensors.
        seed: decides which cases are tried.
        max_examples: examples of each property at most.
        time_budget: seconds for the whole run, shared among its properties, or `None`.
        deadline: seconds for one run of one case; `None` is what suits the world.
        load_deadline: seconds that a process may take to load the target.
        cases: folder for counterexamples; those of earlier runs are tried first.
        stop_early: stop at the first violation.
        verbose: also tell what is exchanged and what memory peaks at.
        baseline: the violations that are known, which do not count.
    """

    suite: Suite = "quick"
    world: WorldName | None = None
    world_sizes: tuple[int, ...] | None = None
    device: str = "cpu"
    seed: int = 0
    max_examples: int | None = None
    time_budget: float | None = None
    deadline: float | None = None
    load_deadline: float = LOAD_SECONDS
    cases: Path = Path(".ringverify")
    stop_early: bool = False
    verbose: bool = False
    baseline: Baseline | None = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """An implementation to check, and what to type to get it."""

    target: str
    implementation: Implementation


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """A target that cannot be checked on this machine, and why, in a line."""

    target: str
    reason: str


class Watch(Protocol):
    """Is told how far a run has come."""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """A property is about to be tried."""
        ...

    def step(self, done: int) -> None:
        """So many of its cases have been tried."""
        ...

    def loading(self, what: str | None) -> None:
        """A process is loading that; `None`: it is no more."""
        ...

    def stop(self) -> None:
        """It is done."""
        ...


def seed_for(suite: Suite, asked: int | None, drawn: int | None = None) -> int:
    """The seed of a run: the one asked for; else 0, or in the nightly suite, which is to see other cases, a drawn one.

    Args:
        suite: what is run.
        asked: the seed asked for.
        drawn: one that was drawn before; one is drawn now by default.
    """
    if asked is not None:
        return asked
    if suite != "nightly":
        return 0
    return secrets.randbelow(MOST_DRAWN) if drawn is None else drawn
