"""What a run is asked for, wherever that was said: arguments of a call, options of pytest, its configuration file.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ringverify.check.options import Options, seed_for
from ringverify.errors import UsageError
from ringverify.option_types import count, names, positive, seconds, sizes
from ringverify.properties.suites import SUITES

if TYPE_CHECKING:
    from ringverify.properties.property import Property
    from ringverify.properties.suites import Suite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for; `None` is what `ringverify check` does when it is not told.

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
    def of(cls, said: Mapping[str, Any], where: Callable[[str], str]) -> Wish:
        """The wish that these values are, each looked at.

        Args:
            said: values by name, as text or as Python has them; `None` is not said.
            where: how a message names the place of a value.

        Raises:
            UsageError: a value is impossible; names the place, the value and what was expected.
        """
        wish = {}
        for name, value in said.items():
            if value is None:
                continue
            text = ",".join(map(str, value)) if isinstance(value, (tuple, list, set, frozenset)) else str(value)
            try:
                wish[name] = PARSERS[name](text)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{where(name)} {error}") from None
        return cls(**wish)

    def over(self, other: Wish) -> Wish:
        """This wish, and where it says nothing, the other one."""
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

    def options(self, *, drawn: int | None = None) -> Options:
        """The options of a run.

        Args:
            drawn: the seed of a nightly run that names none; drawn now by default.

        Raises:
            UsageError: options contradict one another, or the baseline is wrong.
        """
        from ringverify.check.baseline import read_baseline
        from ringverify.check.planning import WorldName, device_for

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
            baseline=None if self.baseline is None else read_baseline(self.baseline),
        )


def one_of(*known: str) -> Callable[[str], str]:
    """A parser of a word."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(known)}")
        return text

    return parse


PARSERS: dict[str, Callable[[str], Any]] = {
    "only": names,
    "skip": names,
    "suite": one_of(*SUITES),
    "world": one_of("simulated", "gloo", "nccl"),
    "world_sizes": sizes,
    "device": str,
    "seed": count,
    "max_examples": positive,
    "time_budget": seconds,
    "deadline": seconds,
    "load_deadline": seconds,
    "cases": Path,
    "baseline": Path,
}
