"""The options of `ringverify check`, in one table.

The command line, the options `--ringverify-…` and settings `ringverify_…` of pytest, the keys of `[tool.ringverify]`
and docs/options.md come from it; `run_conformance` takes arguments of the same names. Importing this module imports
little: pytest does so in every project in which ringverify is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringverify.option_types import OUTPUTS, Repeatable, count, jobs, names, positive, seconds, sizes
from ringverify.properties.suites import SCALE, SMOKE_EXAMPLES, SUITES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option of `check`.

    Attributes:
        name: the name of the argument of `run_conformance`; elsewhere with dashes for underscores.
        meaning: what it sets, for `--help`.
        default: the default in words, for `--help`; empty if there is none to name.
        read: converts the text of a value; `None` for a flag, which takes no value.
        metavar: placeholder of the value in `--help`.
        choices: the possible values; empty if they are not a fixed list.
        short: its short name on the command line.
        pytest: whether it is an option of pytest too. Those that are not exist in pytest itself, or write a page or
            summary of the report.
        in_pytest: what it sets in pytest, if that differs from `meaning`.
        argument: whether it is an argument of `run_conformance` too.
    """

    name: str
    meaning: str
    default: str = ""
    read: Callable[[str], Any] | None = str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    short: str | None = None
    pytest: bool = True
    in_pytest: str | None = None
    argument: bool = True

    @property
    def key(self) -> str:
        """The key in `[tool.ringverify]`: the long name without the leading dashes."""
        return self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """The text for `ringverify check --help`."""
        return self._with_default(self.meaning)

    @property
    def pytest_help(self) -> str:
        """The text for `pytest --help`."""
        return self._with_default(self.in_pytest or self.meaning)

    @property
    def pytest_metavar(self) -> str | None:
        """The placeholder of its value in `pytest --help`."""
        return "|".join(self.choices) or self.metavar or self.name.upper()

    def _with_default(self, text: str) -> str:
        return f"{text} (default: {self.default})" if self.default else text

    def value(self, text: str) -> Any:
        """Convert the text of a value.

        Raises:
            argparse.ArgumentTypeError: the text is not a valid value; the message quotes it and says what is expected.
        """
        if self.choices and text not in self.choices:
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(self.choices)}")
        assert self.read is not None
        return self.read(text)


OPTIONS: tuple[Option, ...] = (
    Option(
        name="world",
        choices=("simulated", "gloo", "nccl"),
        meaning="where ranks run",
        default="what the target declares",
    ),
    Option(name="world_sizes", read=sizes, metavar="1,2,3", meaning="world sizes to test"),
    Option(name="device", meaning="device of the tensors", default="cpu; nccl world: cuda"),
    Option(
        name="suite",
        choices=(*SUITES, SCALE),
        meaning="number of examples per property; scale: one long case, verified whole, instead",
        default=f"quick; smoke: at most {SMOKE_EXAMPLES}",
    ),
    Option(
        name="length",
        read=positive,
        metavar="N",
        meaning="suite scale: positions",
        default="131072",
        pytest=False,
        argument=False,
    ),
    Option(
        name="problem",
        metavar="JSON",
        meaning='suite scale: fields of the problem, such as \'{"causal": true, "window": [4096, 0]}\'',
        default="what the target declares, 1 head of 64",
        pytest=False,
        argument=False,
    ),
    Option(
        name="sharding",
        metavar="NAME",
        meaning="suite scale: which rank holds which positions",
        default="zigzag if causal, or the first that is declared",
        pytest=False,
        argument=False,
    ),
    Option(name="only", read=names, metavar="ID,…", meaning="these properties only"),
    Option(name="skip", read=names, metavar="ID,…", meaning="not these properties"),
    Option(
        name="seed",
        read=count,
        metavar="N",
        meaning="decides which cases are tried",
        default="0; nightly, scale: a new one each run, printed at the start",
    ),
    Option(name="max_examples", read=positive, metavar="N", meaning="examples of each property, at most"),
    Option(
        name="time_budget",
        read=seconds,
        metavar="SECONDS",
        meaning="time for the run, shared among properties",
        in_pytest="time for all properties together; with -n, of each worker",
    ),
    Option(
        name="deadline",
        read=seconds,
        metavar="SECONDS",
        meaning="time for one run of a case",
        default="10, gloo 30, on cuda 60, a program 120",
    ),
    Option(
        name="load_deadline",
        read=seconds,
        metavar="SECONDS",
        meaning="time to import the target in a process",
        default="120",
    ),
    Option(
        name="jobs",
        read=jobs,
        metavar="N|auto",
        meaning="processes that try cases side by side, in the simulated world",
        default="auto: one for each core, fewer for few examples",
        in_pytest="processes that try cases of a property side by side; auto is 1 with -n",
    ),
    Option(name="report", read=Path, metavar="FILE.jsonl", meaning="write events as JSON lines", argument=False),
    *(
        Option(name=name, read=Path, metavar=metavar, meaning=meaning, pytest=False, argument=False)
        for name, (metavar, meaning) in OUTPUTS.items()
    ),
    Option(
        name="cases",
        read=Path,
        metavar="DIR",
        meaning="folder for counterexamples; those of earlier runs are tried first",
        default=".ringverify",
    ),
    Option(
        name="baseline",
        read=Path,
        metavar="FILE.toml",
        meaning="known violations: reported, but they do not fail the run",
        in_pytest="known violations: xfail, and a failure once one is fixed",
    ),
    Option(
        name="exitfirst",
        short="-x",
        read=None,
        meaning="stop at the first violation; a few examples of each property come first",
        pytest=False,
        argument=False,
    ),
    Option(
        name="verbose",
        short="-v",
        read=None,
        meaning="show full tracebacks, what was tried, traffic between ranks and peak memory",
        pytest=False,
        argument=False,
    ),
    Option(
        name="quiet",
        short="-q",
        read=None,
        meaning="print only what did not pass, and the verdict",
        pytest=False,
        argument=False,
    ),
)

EXCLUSIVE = ("verbose", "quiet")
"""Flags of which only one may be given."""

ARGUMENTS: dict[str, Option] = {option.name: option for option in OPTIONS if option.argument}
"""The arguments of `run_conformance`, which are also the settings of pytest."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add all options to a parser; an option that is not given is `None`, or False for a flag."""
    exclusive = parser.add_mutually_exclusive_group()
    for option in OPTIONS:
        group = exclusive if option.name in EXCLUSIVE else parser
        flags = [flag for flag in (option.short, f"--{option.key}") if flag is not None]
        if option.read is None:
            group.add_argument(*flags, action="store_true", help=option.help)
        else:
            group.add_argument(
                *flags,
                action=Repeatable if option.read in (names, sizes) else "store",
                type=option.read,
                choices=option.choices or None,
                metavar=option.metavar,
                help=option.help,
            )
