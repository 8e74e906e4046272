"""What a run is asked for, and who watches it. Importing this module does not import torch."""

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
from ringverify.properties.suites import Suite
from ringverify.worlds.world import LOAD_SECONDS

if TYPE_CHECKING:
    from ringverify.check.baseline import Baseline
    from ringverify.check.planning import WorldName
    from ringverify.properties.property import Property

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What was asked of a run, wherever that was said; `None` is not said, and `Options` has what is done then.

    It is said by the command line, `[tool.ringverify]`, options and settings of pytest, or arguments of a call.

    Attributes:
        only: ids of the properties to try.
        skip: ids of those to leave out.
        suite: smoke, quick, full or nightly.
        world: simulated, gloo or nccl.
        world_sizes: numbers of ranks.
        device: of the tensors.
        seed: decides which cases are tried.
        max_examples: of each property, at most.
        time_budget: seconds for the whole run.
        deadline: seconds for one run of a case.
        load_deadline: seconds that a process may take to load an implementation.
        cases: folder for counterexamples.
        baseline: file of the violations that are known.
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
    cases: Path | None = None
    baseline: Path | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any], where: Callable[[str], str]) -> CheckRequest:
        """The request that these values are, each looked at.

        Args:
            said: values by name, as text or as Python has them; `None` is not said.
            where: how a message names the place of a value.

        Raises:
            UsageError: a value is impossible; names the place, the value and what was expected.
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
        """This request, and where it says nothing, the other one."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(other, **said)

    def properties(self) -> list[Property]:
        """The properties to try.

        Raises:
            UsageError: a name is unknown, or nothing is left.
        """
        from ringverify.properties.catalogue import select

        return select(self.only, self.skip or ())

    def settings(self, drawn: int) -> dict[str, Any]:
        """What a header says that all of a session has in common: device, suite and seed.

        Args:
            drawn: the seed of a nightly run that names none.
        """
        suite = cast("Suite", self.suite or "quick")
        device = self.device or ("cuda" if self.world == "nccl" else "cpu")
        return {"device": device, "suite": suite, "seed": seed_for(suite, self.seed, drawn)}

    def options(
        self,
        *,
        drawn: int | None = None,
        stop_early: bool = False,
        verbose: bool = False,
        baseline: Baseline | None = None,
    ) -> Options:
        """The options of a run.

        Args:
            drawn: the seed of a nightly run that names none; drawn now by default.
            stop_early: stop at the first violation.
            verbose: also tell what is exchanged and what memory peaks at.
            baseline: the one that is asked for, if it was read before.

        Raises:
            UsageError: options contradict one another, or the baseline is wrong.
        """
        from ringverify.check.baseline import read_baseline
        from ringverify.check.planning import device_for

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
            cases=default.cases if self.cases is None else self.cases,
            stop_early=stop_early,
            verbose=verbose,
            baseline=read_baseline(self.baseline) if baseline is None and self.baseline is not None else baseline,
        )


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
