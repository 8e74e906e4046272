"""`ringverify confirm`: violations of a report, seen once more without this tool.

Each counterexample is written as a script of its own (`ringverify.check.snippet`), which runs the implementation in
processes over gloo and compares with dense attention by autograd. Nothing of the simulated world, of the oracle or of a
property has a part in it: what it shows is no error of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from ringverify.check.option_types import positive, seconds
from ringverify.errors import Inconclusive, UsageError
from ringverify.reports.jsonl import Event, finite, read_report, write_whole

Outcome = Literal["shown", "not shown"]
SCHEMA = 1
DEADLINE = 120.0
SAID = 8
"""Lines that are kept of what a script says."""
LETTERS = 200
"""Of each of them."""


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """What became of one violation outside the tool.

    Attributes:
        implementation: its name.
        property: id of the property.
        case: the case file.
        outcome: "shown" if the script shows the same kind of failure: a wrong result, the same exception, or no end.
        said: what the script said, as far as it tells of something wrong.
    """

    implementation: str
    property: str
    case: str
    outcome: Outcome
    said: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command."""
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE.jsonl", help="what check --report wrote")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help="keep the scripts there")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write what was seen as JSON")
    parser.add_argument(
        "--deadline", type=seconds, default=DEADLINE, metavar="SECONDS", help="time for one script (default: 120)"
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="scripts side by side (default: 1)")


def confirm(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the command and return its exit code: 0 if every violation is shown by its script, 1 if one is not.

    Raises:
        UsageError: a case file is gone, or an output cannot be written.
        ReportError: a file is not a whole report.
        Inconclusive: there is no violation to confirm.
    """
    found = [event for path in options.reports for event in read_report(path) if event["event"] == "counterexample"]
    if not found:
        raise Inconclusive("there is no violation in these reports, so there is nothing to confirm")
    for event in found:
        if not Path(event["file"]).is_file():
            raise UsageError(f"no case {event['file']}: run this from the folder that check was run in")
    seen: list[Confirmation] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.scripts is None else options.scripts
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write scripts to {folder}: {error.strerror}; name another --scripts") from None
        for one in _side_by_side(found, folder, options):
            seen.append(one)
            say(f"{one.outcome:<10}  {one.implementation}  {one.property}: {one.said[0] if one.said else ''}")
    if options.report is not None:
        content = {"schema": SCHEMA, "confirmations": [dataclasses.asdict(one) for one in seen]}
        try:
            write_whole(options.report, json.dumps(finite(content), indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {options.report}: {error.strerror}; name another --report") from None
    shown = sum(one.outcome == "shown" for one in seen)
    say(f"{shown} of {len(seen)} violations are shown without ringverify")
    return 0 if shown == len(seen) else 1


def read(path: Path) -> list[Confirmation]:
    """What an earlier run wrote.

    Raises:
        UsageError: the file is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise UsageError(f"{path} has schema {content['schema']!r}, this reads {SCHEMA}: run confirm again")
        return [Confirmation(**{**one, "said": tuple(one["said"])}) for one in content["confirmations"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not what ringverify confirm --report writes") from None


def _side_by_side(events: Sequence[Event], folder: Path, options: argparse.Namespace) -> Iterator[Confirmation]:
    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(lambda event: confirmed(event, folder, options.deadline), events)


def confirmed(event: Event, folder: Path, deadline: float) -> Confirmation:
    """Write the script of one counterexample, run it, and say what it shows."""
    script = folder / f"{Path(event['file']).stem}.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            env=environment,
            timeout=deadline,
            check=False,
        )

    def told(outcome: Outcome, *said: str) -> Confirmation:
        lines = tuple(line.rstrip()[:LETTERS] for line in said[:SAID])
        return Confirmation(event["implementation"], event["property"], event["file"], outcome, lines)

    try:
        written = run("-m", "ringverify", "replay", event["file"], "--snippet", str(script))
    except subprocess.TimeoutExpired:
        return told("not shown", f"the replay that writes the script did not end in {deadline:g} s")
    if not script.is_file() or written.returncode not in (0, 1):
        return told("not shown", *(written.stderr.splitlines()[-1:] or ["no script was written"]))
    try:
        ran = run(str(script))
    except subprocess.TimeoutExpired:
        outcome: Outcome = "shown" if ends_never(event) else "not shown"
        return told(outcome, f"the script did not end in {deadline:g} s")
    if (lines := [line for line in ran.stdout.splitlines() if tells(line)]) and event["tensor"] is not None:
        return told("shown", *sorted(lines, key=lambda line: not line.startswith("wrong: ")))
    raised = [
        line for line in ran.stderr.splitlines() if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt|Exit)\b", line)
    ]
    if raised and event["tensor"] is None and raises(event, raised[-1]):
        return told("shown", raised[-1])
    return told("not shown", *(raised[-1:] or ran.stdout.splitlines()[-1:] or ["the script said nothing"]))


def tells(line: str) -> bool:
    """Whether a line that a script printed tells of something wrong."""
    return line.startswith("wrong: ") or re.search(r"beyond what is allowed in [1-9]", line) is not None


def raises(event: Event, line: str) -> bool:
    """Whether an exception's line, as Python prints it, is of the kind that the counterexample tells of."""
    kind = line.split(":")[0].rpartition(".")[2]
    return re.search(rf"\b{re.escape(kind)}\b", str(event["summary"])) is not None


def ends_never(event: Event) -> bool:
    """Whether a counterexample tells of a run that did not end."""
    return event["tensor"] is None and str(event["summary"]).startswith("deadlock")
