"""The options of a run, and where they come from. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ringverify.check.option_table import ARGUMENTS
from ringverify.errors import UsageError
from ringverify.implementation import Implementation
from ringverify.option_types import AUTO
from ringverify.properties.suites import SCALE, Suite
from ringverify.worlds.world import LOAD_SECONDS

if TYPE_CHECKING:
    from ringverify.check.baseline import Baseline
    from ringverify.check.planning import WorldName
    from ringverify.properties.property import Property

MOST_DRAWN = 2**32
"""Seeds that are drawn are below this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run, defaults filled in.

    Attributes:
        suite: decides how many examples are tried.
        world: world in which ranks run; `None` chooses by what an implementation declares.
        world_sizes: world sizes to use; `None` means all that suit.
        device: device of the tensors.
        seed: decides which cases are tried.
        max_examples: most examples of each property, or `None`.
        time_budget: seconds for the whole run, shared among its properties, or `None`.
        deadline: seconds for one run of one case; `None` is what suits the world.
        load_deadline: seconds that a process may take to load the target.
        cases: folder for counterexamples; those of earlier runs are tried first.
        jobs: processes that try cases side by side; `None` is one for each core, fewer for few examples.
        stop_early: stop at the first violation.
        verbose: also report the traffic between ranks and peak memory.
        baseline: known violations, which do not fail the run.
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
    jobs: int | None = None
    stop_early: bool = False
    verbose: bool = False
    baseline: Baseline | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What a user asked for, from any source; `None` is not given, and `Options` holds the default.

    Sources are the command line, `[tool.ringverify]`, options and settings of pytest, and arguments of a call.

    Attributes:
        only: ids of the properties to try.
        skip: ids of the properties to leave out.
        suite: smoke, quick, full, nightly or scale.
        world: simulated, gloo or nccl.
        world_sizes: world sizes to test.
        device: device of the tensors.
        seed: decides which cases are tried.
        max_examples: most examples of each property.
        time_budget: seconds for the whole run.
        deadline: seconds for one run of a case.
        load_deadline: seconds that a process may take to load an implementation.
        jobs: processes that try cases side by side, or "auto".
        cases: folder for counterexamples.
        baseline: file of known violations.
    """

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] | None = None
    suite: str | None = None
    world: str | None = None
    world_sizes: tuple[int, ...] | None = None
    device: str | None = None
    seed: int | None = None
    max_examples: int | None = None
    time_budget: float | None = None
    deadline: float | None = None
    load_deadline: float | None = None
    jobs: int | str | None = None
    cases: Path | None = None
    baseline: Path | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any], where: Callable[[str], str]) -> CheckRequest:
        """Build a request from values, each validated.

        Args:
            said: values by name, as text or as Python values; `None` is not given.
            where: returns how a message names the source of the value with that name.

        Raises:
            UsageError: a value is not valid; the message names its source, the value and what is expected.
        """
        request = {}
        for name, value in said.items():
            if value is None:
                continue
            text = ",".join(map(str, value)) if isinstance(value, (tuple, list, set, frozenset)) else str(value)
            try:
                request[name] = ARGUMENTS[name].value(text)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{where(name)} {error}") from None
        return cls(**request)

    def over(self, other: CheckRequest) -> CheckRequest:
        """Return this request, completed with the values of another one where it has none."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(other, **said)

    def properties(self) -> list[Property]:
        """The properties to try.

        Raises:
            UsageError: a name is unknown, nothing is left, or the suite is `scale`, which has properties of its own.
        """
        from ringverify.properties.catalogue import select

        if self.suite == SCALE:
            raise UsageError(f"suite {SCALE}: it is one of ringverify check alone; name another one")
        return select(self.only, self.skip or ())

    def settings(self, drawn: int) -> dict[str, Any]:
        """Return what the header of a whole pytest session says: device, suite and seed.

        Args:
            drawn: the seed to use in the nightly suite if none was given.

        Raises:
            UsageError: device and world contradict each other.
        """
        suite, device = cast("Suite", self.suite or "quick"), device_for(self.device, self.world)
        return {"device": device, "suite": suite, "seed": seed_for(suite, self.seed, drawn)}

    def options(
        self,
        *,
        drawn: int | None = None,
        stop_early: bool = False,
        verbose: bool = False,
        baseline: Baseline | None = None,
    ) -> Options:
        """Return the options of a run, with defaults filled in and the baseline read.

        Args:
            drawn: the seed to use in the nightly suite if none was given; by default, one is drawn now.
            stop_early: stop at the first violation.
            verbose: also report the traffic between ranks and peak memory.
            baseline: the baseline, if it was read before.

        Raises:
            UsageError: options contradict one another, or the baseline cannot be read or is invalid.
        """
        from ringverify.check.baseline import read_baseline

        suite, world = cast("Suite", self.suite or "quick"), cast("WorldName | None", self.world)
        default = Options()
        return Options(
            suite=suite,
            world=world,
            world_sizes=self.world_sizes,
            device=device_for(self.device, world),
            seed=seed_for(suite, self.seed, drawn),
            max_examples=self.max_examples,
            time_budget=self.time_budget,
            deadline=self.deadline,
            load_deadline=self.load_deadline or default.load_deadline,
            jobs=None if self.jobs in (None, AUTO) else int(self.jobs),
            cases=default.cases if self.cases is None else self.cases,
            stop_early=stop_early,
            verbose=verbose,
            baseline=read_baseline(self.baseline) if baseline is None and self.baseline is not None else baseline,
        )


@dataclasses.dataclass(frozen=True)
class Subject:
    """An implementation to check, and the target by which it was named."""

    target: str
    implementation: Implementation


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """A target that cannot be checked on this machine, and the reason in one line."""

    target: str
    reason: str


def device_for(asked: str | None, world: str | None, *, on_gpus: bool = False) -> str:
    """Return the device of the tensors.

    Args:
        asked: the device asked for, or `None`.
        world: the world asked for, or `None`.
        on_gpus: whether each rank has a GPU of its own whatever world was asked for.

    Raises:
        UsageError: device and world contradict each other.
    """
    if world == "nccl" and asked not in (None, "cuda"):
        raise UsageError(f"--device {asked}: in the nccl world each rank has a GPU of its own; leave it out")
    return asked or ("cuda" if on_gpus or world == "nccl" else "cpu")


def seed_for(suite: str, asked: int | None, drawn: int | None = None) -> int:
    """Return the seed of a run: the one asked for, else 0, or a random one in the suites nightly and scale.

    Args:
        suite: the suite that is run.
        asked: the seed asked for, or `None`.
        drawn: a random seed drawn before; by default, one is drawn now.
    """
    if asked is not None:
        return asked
    if suite not in ("nightly", SCALE):
        return 0
    return secrets.randbelow(MOST_DRAWN) if drawn is None else drawn
