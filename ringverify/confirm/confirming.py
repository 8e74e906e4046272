"""`ringverify confirm`: reproduce the violations of a report without this tool.

Each counterexample is written as a stand-alone script (`ringverify.confirm.script`), which runs the implementation in
processes over gloo and compares it with dense attention by autograd; of a long case of the suite scale it computes some
rows again. It runs no code of the simulated world, the oracle or a property, so what it shows is no error there;
multiplicities and errors allowed stand in it as literals.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal

from ringverify.cases.case import why_unsupported
from ringverify.check import casefile
from ringverify.check.casefile import CaseFile
from ringverify.check.trusting import agree
from ringverify.confirm.long_script import long_script
from ringverify.confirm.script import snippet
from ringverify.confirm.source import Script
from ringverify.describing import describe
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import CounterexampleEvent, as_json, from_json
from ringverify.files import read_json, refusing, write_whole
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import select
from ringverify.properties.suites import METHODS
from ringverify.reports.command import look_at_file
from ringverify.reports.jsonl import read_report
from ringverify.reports.story import replay_of
from ringverify.targets import is_program

Outcome = Literal["shown", "not shown"]

SCHEMA = 1
SAID = 8
"""Most lines that are kept of a script's result."""
LETTERS = 200
"""Most characters that are kept of each of these lines."""
OUTPUT = 65_536
"""Bytes that are kept of the end of each output stream of a script, including what its ranks print."""
RIGHT = "every result is within the allowed error on this machine"
"""The line for a script that shows nothing wrong, as the script prints it."""
DEADLINE, LONG_DEADLINE = 120.0, 3600.0
"""Seconds that a script gets where none are asked for, and one of a long case."""
STARTING = 180.0
"""Seconds that a script gets on top of its deadline: to start, to import the implementation in ranks, and to end."""


@dataclasses.dataclass(frozen=True)
class Said:
    """The result of a script, from the JSON in the last line of its output.

    Attributes:
        wrong: the results that are wrong, such as "dk on rank 1", if all ranks returned results.
        failures: kind and exception of each failure.
        lines: the same in words, a line each.
    """

    wrong: tuple[str, ...]
    failures: tuple[tuple[str, str | None], ...]
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """Whether one violation was reproduced outside the tool.

    Attributes:
        implementation: name of the implementation.
        property: id of the violated property.
        case: path of the case file; empty if there is none.
        outcome: "shown" if the script shows the same kind of failure: a wrong result, the same exception, or a hang.
        said: lines of the script's result, or why there is none.
    """

    implementation: str
    property: str
    case: str
    outcome: Outcome
    said: tuple[str, ...]


def confirm(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the command and return its exit code: 0 if every violation is shown by its script, 1 if one is not.

    Reasons for "not shown" are: the script shows something else, there is no script for the violation, or the
    implementation cannot run here.

    Raises:
        UsageError: a case file is missing, its import is not agreed to, or an output cannot be written.
        ReportError: a file is not a complete report, or `--json` cannot be written; raised before any work.
        Inconclusive: there is no violation to confirm.
    """
    if options.json is not None:
        look_at_file("--json", options.json)
    events = [event for path in options.reports for event in read_report(path)]
    found = [one for event in events if isinstance(event, CounterexampleEvent) for one in _with_smaller(event)]
    if not found:
        raise Inconclusive("there is no violation in these reports, so there is nothing to confirm")
    recorded = [_recorded(event) for event in found]
    files = [(Path(str(event.file)), one) for event, one in zip(found, recorded, strict=True) if one is not None]
    agree(files, trust=options.trust, say=say)
    seen: list[Confirmation] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.scripts is None else options.scripts
        with refusing(f"write scripts to {folder}", "name another folder with --scripts"):
            folder.mkdir(parents=True, exist_ok=True)
        scripts = Scripts(folder, options.deadline, names_of(event.file or "" for event in found))
        with ThreadPoolExecutor(options.jobs) as pool:
            for one in pool.map(scripts.confirmed, found, recorded):
                seen.append(one)
                if options.quiet and one.outcome == "shown":
                    continue
                say(f"{one.outcome:<10}  {one.implementation}  {one.property}: {one.said[0] if one.said else ''}")
    if options.json is not None:
        content = as_json({"schema": SCHEMA, "confirmations": seen})
        with refusing(f"write {options.json}", "name another file with --json"):
            write_whole(options.json, json.dumps(content, indent=1) + "\n")
    shown = sum(one.outcome == "shown" for one in seen)
    say(f"{shown} of {len(seen)} violations are shown without ringverify")
    return 0 if shown == len(seen) else 1


def read(path: Path) -> list[Confirmation]:
    """Read the confirmations that an earlier `ringverify confirm --json` wrote.

    Raises:
        UsageError: the file cannot be read, or is not such a file.
    """
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise UsageError(f"{path} has schema {content['schema']!r}, this reads {SCHEMA}: run confirm again")
        return [from_json(Confirmation, one) for one in content["confirmations"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not what ringverify confirm --json writes") from None


def _with_smaller(event: CounterexampleEvent) -> list[CounterexampleEvent]:
    """Return a violation, and that of the smaller case which the suite scale found of it, if it did."""
    if event.smaller is None or event.smaller_property is None:
        return [event]
    smaller = dataclasses.replace(event, property=event.smaller_property, file=event.smaller, smaller=None, sum=None)
    return [event, smaller]


def _recorded(event: CounterexampleEvent) -> CaseFile | None:
    """Read the case file of a violation; `None` for violations without one, as of golden vectors.

    Raises:
        UsageError: the file is missing, or is not a case file.
    """
    if event.file is None:
        return None
    if not Path(event.file).is_file():
        raise UsageError(f"no case {event.file}: run this from the folder that check was run in")
    return casefile.read(Path(event.file))


def names_of(files: Iterable[str]) -> dict[str, str]:
    """Return a script name for each case file: its stem, numbered if files in different folders share it."""
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for file in dict.fromkeys(files):
        stem = Path(file).stem
        seen[stem] += 1
        names[file] = stem if seen[stem] == 1 else f"{stem}.{seen[stem]}"
    return names


class Scripts:
    """Writes scripts, runs each once however many properties its case violates, and compares with the reports.

    Args:
        folder: folder for the scripts.
        deadline: seconds for one script, loading not included; `None` is what suits its case.
        names: script name by case file, as from `names_of`; by default the file's stem.
    """

    def __init__(self, folder: Path, deadline: float | None, names: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._deadline = deadline
        self._names = names or {}
        self._ran: dict[str, Future[Said | str]] = {}
        self._lock = threading.Lock()

    def confirmed(self, event: CounterexampleEvent, recorded: CaseFile | None) -> Confirmation:
        """Run a counterexample's scripts, one for each case that the property compares, until one shows the failure."""
        if recorded is None or event.file is None:
            again = replay_of(event)
            told = "this violation has no case file, so no script can be made"
            beside = f". {event.note}" if event.note else ""
            return _not_shown(event, told + (again and f"; to see it again: {again}") + beside)
        if is_program(recorded.target):
            again = replay_of(event)
            told = "a script can only call a function, and this is a program"
            return _not_shown(event, told + (again and f"; to see it again: {again}"))
        try:
            capabilities = describe(recorded.target).capabilities
        except Inconclusive as error:
            return _not_shown(event, str(error))
        if (reason := why_unsupported(recorded.case, capabilities)) is not None:
            return _not_shown(event, f"{recorded.target} does not declare what the case needs: {reason}")
        name, seen = self._names.get(event.file, Path(event.file).stem), None
        for number, source in enumerate(_sources(recorded, event, capabilities)):
            said = self._run(source, self._folder / f"{name}{f'-{number}' if number else ''}.py", recorded.property)
            shown = not isinstance(said, str) and shows(said, event)
            if seen is None or shown:
                lines = (said,) if isinstance(said, str) else said.lines or (RIGHT,)
                kept = tuple(line.rstrip()[:LETTERS] for line in lines[:SAID])
                outcome: Outcome = "shown" if shown else "not shown"
                seen = Confirmation(event.implementation, event.property, event.file, outcome, kept)
            if shown:
                break
        assert seen is not None
        return seen

    def _run(self, script: Script, path: Path, property: str) -> Said | str:
        """Run a script and return its result, or why it has none; scripts with equal programs are run once."""
        with self._lock:
            mine = script.program not in self._ran
            future = self._ran.setdefault(script.program, Future())
        with refusing(f"write {path}", "name another folder with --scripts"):
            write_whole(path, script.text)
        if mine:
            try:
                future.set_result(_ran(path, self._deadline or (LONG_DEADLINE if property in METHODS else DEADLINE)))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def _sources(recorded: CaseFile, event: CounterexampleEvent, capabilities: Capabilities) -> Iterator[Script]:
    """Yield the scripts of a violation: one for each case that its property compares, and one of a long case."""
    if recorded.property in METHODS:
        yield long_script(recorded, event, capabilities)
        return
    (property,) = select((recorded.property,), ())
    for case in property.compared(recorded.case, capabilities):
        yield snippet(dataclasses.replace(recorded, case=case), capabilities)


def shows(said: Said, event: CounterexampleEvent) -> bool:
    """Return whether a script shows the kind of failure in the event: a wrong result, or the same kind of exit."""
    failure = event.failure
    if failure is None:
        return bool(said.wrong)
    kinds = {kind for kind, _ in said.failures}
    match failure.kind:
        case "raised" if failure.exception is not None:
            return ("raised", failure.exception) in said.failures
        case "raised" | "died":  # a simulated rank that ends its process is stopped before, and recorded as raised
            return bool(kinds & {"exited", "died"})
        case _:
            return "deadline" in kinds


def _not_shown(event: CounterexampleEvent, reason: str) -> Confirmation:
    """Return the confirmation of a violation for which no script can run."""
    return Confirmation(event.implementation, event.property, event.file or "", "not shown", (reason,))


def _ran(script: Path, deadline: float) -> Said | str:
    """Run a script in a Unix process group that is killed at the end; return its result, or why there is none."""
    process = subprocess.Popen(
        [sys.executable, str(script), str(deadline)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    ends = [bytearray(), bytearray()]
    # A process that a rank leaves behind may keep the pipes open: threads read them, and are not waited for.
    readers = [
        threading.Thread(target=_keep_end, args=(stream, end), daemon=True)
        for stream, end in zip((process.stdout, process.stderr), ends, strict=True)
    ]
    for reader in readers:
        reader.start()
    try:
        process.wait(deadline + STARTING)
    except subprocess.TimeoutExpired:
        return f"the script did not end in {deadline + STARTING:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for reader in readers:
            reader.join(1.0)
    out, err = (end.decode(errors="backslashreplace").splitlines() for end in ends)
    said = _said(out[-1]) if out else None
    return said or next(iter([*err[-1:], *out[-1:]]), "the script said nothing")


def _keep_end(stream: IO[bytes], end: bytearray) -> None:
    """Read a stream to its end, keeping its last `OUTPUT` bytes."""
    while part := os.read(stream.fileno(), OUTPUT):
        end += part
        del end[:-OUTPUT]


def _said(line: str) -> Said | None:
    """Parse the last line of a script's output; `None` if it is not a script's result."""
    try:
        told = json.loads(line)
        failures = tuple((str(one["kind"]), one["exception"]) for one in told["failures"])
        return Said(tuple(map(str, told["wrong"])), failures, tuple(map(str, told["lines"])))
    except (ValueError, KeyError, TypeError):
        return None
