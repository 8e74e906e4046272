"""Verdicts under load: the same targets over and over, more at a time than there are cores, and no verdict changes.

    python tests/misbehaviour/under_load.py [--runs 1000] [--at-once 8]

What a target's verdict is, property by property, is known beforehand; a run that says anything else is printed, with
what it said. The tool is forked from this process, as in `table.py`. Prints a line a hundred runs, and at the end a
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

import table

MINIATURES = Path(__file__).resolve().parent.parent / "miniatures"
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
RIGHT = {"forward": "pass", "gradients": "pass"}
WRONG = {"forward": "fail", "gradients": "fail"}


@dataclasses.dataclass(frozen=True)
class Known:
    """A target whose verdict is known.

    Attributes:
        target: file and function.
        world: where its ranks run.
        verdicts: of each property that is tried.
        options: of `check`, besides.
    """

    target: str
    world: str
    verdicts: dict[str, str]
    options: tuple[str, ...] = ()


def _both(file: str, name: str, verdicts: dict[str, str], *options: str) -> list[Known]:
    return [Known(f"{MINIATURES / file}:{name}", world, verdicts, options) for world in ("simulated", "gloo")]


KNOWN = (
    *_both("right.py", "attend", RIGHT),
    *[Known(f"{EXAMPLES / 'my_ring.py'}:attend", world, RIGHT) for world in ("simulated", "gloo")],
    *_both("faulty_rings.py", "wrong_scale", WRONG),
    *_both("faulty_rings.py", "swapped_gradients", RIGHT | {"gradients": "fail"}),
    *_both("faults.py", "raises_in_the_middle", WRONG),
    *_both("faults.py", "raises_in_backward", RIGHT | {"gradients": "fail"}),
    *_both("faults.py", "calls_os_exit", WRONG),
    *_both("faults.py", "skips_a_collective", WRONG, "--deadline", "2"),
    *_both("faults.py", "sleeps_for_ever", WRONG, "--deadline", "2"),
    *_both("faults.py", "raises_memory_error", {"forward": "inconclusive", "gradients": "inconclusive"}),
)
"""Right ones, wrong values, exceptions, an end of the process, a deadlock, a hang, and a limit of the machine."""


TURNS = 4
"""How often targets run in the simulated world, the one that is the default, for each time over gloo."""


@dataclasses.dataclass(frozen=True)
class Started:
    """A run of the tool that goes on."""

    index: int
    folder: Path
    since: float


def start(index: int, seed: int) -> tuple[int, Started]:
    """Start a run of the tool: its process, and what it is about."""
    known, folder = KNOWN[index], Path(tempfile.mkdtemp(prefix="under-load-"))
    arguments = ["check", known.target, "--world", known.world, *known.options, "--only", ",".join(RIGHT)]
    arguments += ["--max-examples", "5", "--seed", str(seed), "--report", "r.jsonl"]
    (folder / "tmp").mkdir()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        table._become_the_tool(arguments, folder, folder / "tmp", plugin=False)
    return process, Started(index, folder, time.monotonic())


def verdicts_of(folder: Path) -> dict[str, str]:
    """What a run said, a verdict a property."""
    events = table._events(folder / "r.jsonl")
    return {event["property"]: event["verdict"] for event in events if event["event"] == "property"}


def main() -> int:
    """Run, and print what changed."""
    parser = argparse.ArgumentParser(description="Verdicts under load, as Markdown.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=4 * (os.cpu_count() or 1))
    options = parser.parse_args()
    from ringverify.cases.shrinking import Shrunk
    from ringverify.check import hunting

    hunting.shrink = lambda case, *_, **__: Shrunk(case, 0, complete=False)  # the smallest case has its own tests
    threads = [index for index, known in enumerate(KNOWN) if known.world == "simulated"]
    order = [*threads * (TURNS - 1), *range(len(KNOWN))]
    waiting = collections.deque((order[number % len(order)], number) for number in range(options.runs))
    going: dict[int, Started] = {}
    counts, changed, slowest = (collections.Counter[int]() for _ in range(3))
    while waiting or going:
        while waiting and len(going) < options.at_once:
            process, started = start(*waiting.popleft())
            going[process] = started
        process, status = os.wait()
        if (done := going.pop(process, None)) is None:
            continue
        index, known = done.index, KNOWN[done.index]
        counts[index] += 1
        slowest[index] = max(slowest[index], round(time.monotonic() - done.since))
        if (verdicts := verdicts_of(done.folder)) != known.verdicts:
            changed[index] += 1
            said = [(done.folder / name).read_text(errors="replace")[-2000:] for name in ("output", "errors")]
            print(f"{known.target} {known.world}: {verdicts}, status {status}\n{''.join(said)}", file=sys.stderr)
        if counts.total() % 100 == 0:
            print(f"{counts.total()} of {options.runs} runs, {changed.total()} changed", file=sys.stderr, flush=True)
        shutil.rmtree(done.folder, ignore_errors=True)
    print("| target | world | runs | changed | slowest, s |\n|---|---|---|---|---|")
    for index, known in enumerate(KNOWN):
        name = Path(known.target).name
        print(f"| {name} | {known.world} | {counts[index]} | {changed[index]} | {slowest[index]} |")
    print(f"\n{options.runs} runs, {options.at_once} at once on {os.cpu_count()} cores: {changed.total()} changed")
    return int(bool(changed.total()))


if __name__ == "__main__":
    sys.exit(main())
