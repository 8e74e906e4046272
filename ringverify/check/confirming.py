"""`ringverify confirm`: violations of a report, seen once more without this tool.

Each counterexample is written as a script of its own (`ringverify.check.snippet`), which runs the implementation in
processes over gloo and compares with dense attention by autograd. Nothing of the simulated world, of the oracle or of a
property has a part in it: what it shows is no error of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from ringverify import targets
from ringverify.check import casefile
from ringverify.check.casefile import CaseFile
from ringverify.check.snippet import snippet
from ringverify.errors import Inconclusive, UsageError
from ringverify.files import read_json, write_whole
from ringverify.properties.catalogue import select
from ringverify.reports.command import look_at_file
from ringverify.reports.jsonl import Event, finite, read_report

Outcome = Literal["shown", "not shown"]
Ran = tuple[list[str], list[str]] | None
"""The lines that a script printed, to both outputs; `None` if it did not end."""

SCHEMA = 1
RAISED = re.compile(r"[A-Za-z_.]*(Error|Exception|Interrupt|Exit)\b")
"""The last line of a traceback."""
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


def confirm(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the command and return its exit code: 0 if every violation is shown by its script, 1 if one is not.

    A violation is not shown, whatever the reason: its script shows something else, there is no script for it, or its
    implementation cannot run here.

    Raises:
        UsageError: a case file is gone, or an output cannot be written.
        ReportError: a file is not a whole report, or `--json` could not be written: found out before any work.
        Inconclusive: there is no violation to confirm.
    """
    if options.json is not None:
        look_at_file("--json", options.json)
    found = [event for path in options.reports for event in read_report(path) if event["event"] == "counterexample"]
    if not found:
        raise Inconclusive("there is no violation in these reports, so there is nothing to confirm")
    for event in found:
        if "file" in event and not Path(event["file"]).is_file():
            raise UsageError(f"no case {event['file']}: run this from the folder that check was run in")
    seen: list[Confirmation] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.scripts is None else options.scripts
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write scripts to {folder}: {error.strerror}; name another --scripts") from None
        scripts = Scripts(folder, options.deadline)
        with ThreadPoolExecutor(options.jobs) as pool:
            for one in pool.map(scripts.confirmed, found):
                seen.append(one)
                if options.quiet and one.outcome == "shown":
                    continue
                say(f"{one.outcome:<10}  {one.implementation}  {one.property}: {one.said[0] if one.said else ''}")
    if options.json is not None:
        content = {"schema": SCHEMA, "confirmations": [dataclasses.asdict(one) for one in seen]}
        try:
            write_whole(options.json, json.dumps(finite(content), indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {options.json}: {error.strerror}; name another --json") from None
    shown = sum(one.outcome == "shown" for one in seen)
    say(f"{shown} of {len(seen)} violations are shown without ringverify")
    return 0 if shown == len(seen) else 1


def read(path: Path) -> list[Confirmation]:
    """What an earlier run wrote.

    Raises:
        UsageError: the file is something else.
    """
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise UsageError(f"{path} has schema {content['schema']!r}, this reads {SCHEMA}: run confirm again")
        return [Confirmation(**{**one, "said": tuple(one["said"])}) for one in content["confirmations"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not what ringverify confirm --json writes") from None


class Scripts:
    """Writes scripts, runs each once however many properties its case violates, and says what they show.

    Args:
        folder: where they go.
        deadline: seconds for one.
    """

    def __init__(self, folder: Path, deadline: float) -> None:
        self._folder = folder
        self._deadline = deadline
        self._ran: dict[str, Future[Ran]] = {}
        self._lock = threading.Lock()

    def confirmed(self, event: Event) -> Confirmation:
        """What the script of a counterexample shows; of several cases that are compared, each has one."""
        if "file" not in event:
            return _not_shown(
                event, f"there is no case file to make a script of; this shows it again: {event['replay']}"
            )
        recorded = casefile.read(Path(event["file"]))
        try:
            capabilities = targets.load(recorded.target).capabilities
        except Inconclusive as error:
            return _not_shown(event, str(error))
        (property,) = select((recorded.property,), ())
        seen = None
        for number, case in enumerate(property.compared(recorded.case, capabilities)):
            script = self._folder / f"{Path(event['file']).stem}{f'-{number}' if number else ''}.py"
            outcome, said = self._shown(event, dataclasses.replace(recorded, case=case), script)
            lines = tuple(line.rstrip()[:LETTERS] for line in said[:SAID])
            if seen is None or outcome == "shown":
                seen = Confirmation(event["implementation"], event["property"], event["file"], outcome, lines)
            if outcome == "shown":
                break
        assert seen is not None
        return seen

    def _shown(self, event: Event, recorded: CaseFile, script: Path) -> tuple[Outcome, Sequence[str]]:
        ran = self._run(snippet(recorded, recorded.target, targets.load(recorded.target)), script)
        if ran is None:
            return "shown" if ends_never(event) else "not shown", [f"the script did not end in {self._deadline:g} s"]
        out, err = ran
        raised = [line for line in err if RAISED.match(line)]
        if ended_early(event):
            if raised and raises(event, raised[-1]):
                return "shown", raised[-1:]
        elif lines := [line for line in out if tells(line)]:
            return "shown", sorted(lines, key=lambda line: not line.startswith("wrong: "))
        return "not shown", raised[-1:] or out[-1:] or ["the script said nothing"]

    def _run(self, text: str, script: Path) -> Ran:
        """The lines of both outputs, or `None` if it did not end; for another title of the same program, the same."""
        program = text.split('"""', 2)[2]
        with self._lock:
            mine = program not in self._ran
            future = self._ran.setdefault(program, Future())
        try:
            write_whole(script, text)
        except OSError as error:
            raise UsageError(f"cannot write {script}: {error.strerror}; name another --scripts") from None
        if mine:
            try:
                future.set_result(_ran(script, self._deadline))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def _not_shown(event: Event, reason: str) -> Confirmation:
    """What became of a violation for which no script can run."""
    return Confirmation(event["implementation"], event["property"], event.get("file", ""), "not shown", (reason,))


def _ran(script: Path, deadline: float) -> Ran:
    """Run it in a process group of its own, which is ended with all its ranks if it does not end by itself."""
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return out.splitlines(), err.splitlines()


def tells(line: str) -> bool:
    """Whether a line that a script printed tells of something wrong."""
    return line.startswith("wrong: ") or re.search(r"beyond what is allowed in [1-9]", line) is not None


def ended_early(event: Event) -> bool:
    """Whether a counterexample tells of a run that gave no results."""
    return event["tensor"] is None and re.search(r"\braised \w|^deadlock", str(event["summary"])) is not None


def raises(event: Event, line: str) -> bool:
    """Whether an exception's line, as Python prints it, is of the kind that the counterexample tells of."""
    kind = line.split(":")[0].rpartition(".")[2]
    return re.search(rf"\b{re.escape(kind)}\b", str(event["summary"])) is not None


def ends_never(event: Event) -> bool:
    """Whether a counterexample tells of a run that did not end."""
    return ended_early(event) and str(event["summary"]).startswith("deadlock")
