"""Verdicts under load: the same targets over and over, more at a time than there are cores, and no verdict changes.

    python tests/misbehaviour/under_load.py [--verdicts 1000] [--at-once 6]

What a target's verdict is, property by property, is known beforehand; a run that says anything else is printed, with
what it said. The tool is forked from this process, as in `table.py`. Prints a line a hundred verdicts, and at the end a
table in Markdown; exit code 1 if a verdict changed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import table

MINIATURES = Path(__file__).resolve().parent.parent / "miniatures"
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
RIGHT = {"forward": "pass", "gradients": "pass"}
TOLD_EVERY = 100
WRONG = {"forward": "fail", "gradients": "fail"}


@dataclasses.dataclass(frozen=True)
class Known:
    """A target whose verdict is known, property by property."""

    file: Path
    name: str
    verdicts: dict[str, str]


KNOWN = (
    Known(MINIATURES / "right.py", "attend", RIGHT),
    Known(EXAMPLES / "my_ring.py", "attend", RIGHT),
    Known(MINIATURES / "faulty_rings.py", "wrong_scale", WRONG),
    Known(MINIATURES / "faulty_rings.py", "swapped_gradients", RIGHT | {"gradients": "fail"}),
    Known(MINIATURES / "faults.py", "raises_in_the_middle", WRONG),
    Known(MINIATURES / "faults.py", "raises_in_backward", RIGHT | {"gradients": "fail"}),
    Known(MINIATURES / "faults.py", "calls_os_exit", WRONG),
    Known(MINIATURES / "faults.py", "raises_memory_error", dict.fromkeys(RIGHT, "inconclusive")),
)
"""Right ones, wrong values, exceptions, an end of the process, and a limit of the machine."""
HANGING = (
    Known(MINIATURES / "faults.py", "skips_a_collective", WRONG),
    Known(MINIATURES / "faults.py", "sleeps_for_ever", WRONG),
)
"""A deadlock, and a hang: with a short deadline."""
THREADS = (("simulated", KNOWN, ()), ("simulated", HANGING, ("--deadline", "2")))
RUNS = (*THREADS * 3, *THREADS, ("gloo", KNOWN, ()), ("gloo", HANGING, ("--deadline", "2")))
"""Runs of the tool, over and over: world, targets, options. The world that is the default comes oftener."""


@dataclasses.dataclass(frozen=True)
class Started:
    """A run of the tool that goes on."""

    number: int
    folder: Path
    since: float

    @property
    def run(self) -> tuple[str, tuple[Known, ...], tuple[str, ...]]:
        """Of `RUNS`."""
        return RUNS[self.number % len(RUNS)]

    def become(self) -> NoReturn:
        """Be the tool."""
        world, targets, options = self.run
        arguments = ["check", *(f"{one.file}:{one.name}" for one in targets), "--world", world, *options]
        arguments += ["--only", ",".join(RIGHT), "--max-examples", "5"]
        arguments += ["--seed", str(self.number), "--report", "r.jsonl"]
        (self.folder / "tmp").mkdir()
        table._become_the_tool(arguments, self.folder, self.folder / "tmp", plugin=False)

    def verdicts(self) -> list[dict[str, str]]:
        """What was said, a verdict a property, in the order of the targets."""
        found: dict[str, dict[str, str]] = {}
        for event in table._events(self.folder / "r.jsonl"):
            if event["event"] == "property":
                found.setdefault(event["implementation"], {})[event["property"]] = event["verdict"]
        return [*found.values(), *[{}] * len(self.run[1])][: len(self.run[1])]


def main() -> int:
    """Run, and print what changed."""
    parser = argparse.ArgumentParser(description="Verdicts under load, as Markdown.")
    parser.add_argument("--verdicts", type=int, default=1000, help="at least so many")
    parser.add_argument("--at-once", type=int, default=3 * (os.cpu_count() or 1), help="runs of the tool")
    options = parser.parse_args()
    from ringverify.cases.shrinking import Shrunk
    from ringverify.check import finishing

    finishing.shrink = lambda case, *_, **__: Shrunk(case, 0, complete=False)  # the smallest case has its own tests
    going: dict[int, Started] = {}
    seen, changed = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    begun = told = slowest = number = 0
    while begun < options.verdicts or going:
        while begun < options.verdicts and len(going) < options.at_once:
            started = Started(number, Path(tempfile.mkdtemp(prefix="under-load-")), time.monotonic())
            begun, number = begun + len(started.run[1]), number + 1
            sys.stdout.flush()
            if (process := os.fork()) == 0:
                started.become()
            going[process] = started
        process, status = os.wait()
        if (done := going.pop(process, None)) is None:
            continue
        slowest = max(slowest, round(time.monotonic() - done.since))
        for known, verdicts in zip(done.run[1], done.verdicts(), strict=True):
            key = known.name if known.file.parent == MINIATURES else known.file.stem, done.run[0]
            seen[key] += 1
            if verdicts != known.verdicts:
                changed[key] += 1
                output = (done.folder / "output").read_text(errors="replace")
                errors = (done.folder / "errors").read_text(errors="replace")
                print(f"{key}: {verdicts}, status {status}\n{output}{errors}", file=sys.stderr, flush=True)
        if seen.total() - told >= TOLD_EVERY:
            told = seen.total()
            print(f"{told} verdicts, {changed.total()} changed", file=sys.stderr, flush=True)
        shutil.rmtree(done.folder, ignore_errors=True)
    print("| target | world | verdicts | changed |\n|---|---|---|---|")
    for key, count in sorted(seen.items()):
        print(f"| {' | '.join(key)} | {count} | {changed[key]} |")
    how = f"{number} runs, {options.at_once} at once on {os.cpu_count()} cores, the slowest {slowest} s"
    print(f"\n{seen.total()} verdicts in {how}: {changed.total()} changed")
    return int(bool(changed.total()))


if __name__ == "__main__":
    sys.exit(main())
