"""`ringverify confirm`: violations of a report, seen once more without this tool.

Each counterexample is written as a script of its own (`ringverify.confirm.script`), which runs the implementation in
processes over gloo and compares with dense attention by autograd. Nothing of the simulated world, of the oracle or of a
property has a part in it: what it shows is no error of ours.
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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal

from ringverify.cases.case import why_unsupported
from ringverify.check import casefile
from ringverify.check.casefile import CaseFile
from ringverify.check.trusting import agree
from ringverify.confirm.script import Script, snippet
from ringverify.describing import describe
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import CounterexampleEvent, as_json, from_json
from ringverify.files import read_json, write_whole
from ringverify.properties.catalogue import select
from ringverify.reports.command import look_at_file
from ringverify.reports.jsonl import read_report
from ringverify.reports.story import replay_of

Outcome = Literal["shown", "not shown"]

SCHEMA = 1
SAID = 8
"""Lines that are kept of what a script says."""
LETTERS = 200
"""Of each of them."""
OUTPUT = 65_536
"""Bytes that are kept of the end of each output of a script, ranks' included."""
STARTING = 180.0
"""Seconds that a script is given beside its deadline: to start, to import the implementation in ranks, and to end."""


@dataclasses.dataclass(frozen=True)
class Said:
    """The last line of a script.

    Attributes:
        wrong: the results that are wrong, if all ranks gave results.
        failures: kind and exception of each rank's failure.
        lines: the same in words.
    """

    wrong: tuple[str, ...]
    failures: tuple[tuple[str, str | None], ...]
    lines: tuple[str, ...]


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
    events = [event for path in options.reports for event in read_report(path)]
    found = [event for event in events if isinstance(event, CounterexampleEvent)]
    if not found:
        raise Inconclusive("there is no violation in these reports, so there is nothing to confirm")
    recorded = [_recorded(event) for event in found]
    files = [(Path(str(event.file)), one) for event, one in zip(found, recorded, strict=True) if one is not None]
    agree(files, trust=options.trust, say=say)
    seen: list[Confirmation] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.scripts is None else options.scripts
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write scripts to {folder}: {error.strerror}; name another --scripts") from None
        scripts = Scripts(folder, options.deadline, names_of(event.file or "" for event in found))
        with ThreadPoolExecutor(options.jobs) as pool:
            for one in pool.map(scripts.confirmed, found, recorded):
                seen.append(one)
                if options.quiet and one.outcome == "shown":
                    continue
                say(f"{one.outcome:<10}  {one.implementation}  {one.property}: {one.said[0] if one.said else ''}")
    if options.json is not None:
        content = as_json({"schema": SCHEMA, "confirmations": seen})
        try:
            write_whole(options.json, json.dumps(content, indent=1) + "\n")
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
        return [from_json(Confirmation, one) for one in content["confirmations"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not what ringverify confirm --json writes") from None


def _recorded(event: CounterexampleEvent) -> CaseFile | None:
    """The case of a violation; golden vectors have none.

    Raises:
        UsageError: the case file is gone, or it is none.
    """
    if event.file is None:
        return None
    if not Path(event.file).is_file():
        raise UsageError(f"no case {event.file}: run this from the folder that check was run in")
    return casefile.read(Path(event.file))


def names_of(files: Iterable[str]) -> dict[str, str]:
    """A name for the scripts of each case file: that of the file, with a number where files of two folders share it."""
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for file in dict.fromkeys(files):
        stem = Path(file).stem
        seen[stem] += 1
        names[file] = stem if seen[stem] == 1 else f"{stem}.{seen[stem]}"
    return names


class Scripts:
    """Writes scripts, runs each once however many properties its case violates, and says what they show.

    Args:
        folder: where they go.
        deadline: seconds for one.
        names: what the scripts of each case file are called; by default as the file is.
    """

    def __init__(self, folder: Path, deadline: float, names: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._deadline = deadline
        self._names = names or {}
        self._ran: dict[str, Future[Said | str]] = {}
        self._lock = threading.Lock()

    def confirmed(self, event: CounterexampleEvent, recorded: CaseFile | None) -> Confirmation:
        """What the script of a counterexample shows; of several cases that are compared, each has one."""
        if recorded is None or event.file is None:
            again = replay_of(event)
            told = "there is no case file to make a script of"
            return _not_shown(event, told + (again and f"; this shows it again: {again}"))
        try:
            capabilities = describe(recorded.target).capabilities
        except Inconclusive as error:
            return _not_shown(event, str(error))
        (property,) = select((recorded.property,), ())
        if (reason := why_unsupported(recorded.case, capabilities)) is not None:
            return _not_shown(event, f"{recorded.target} does not declare what the case needs: {reason}")
        name, seen = self._names.get(event.file, Path(event.file).stem), None
        for number, case in enumerate(property.compared(recorded.case, capabilities)):
            script = self._folder / f"{name}{f'-{number}' if number else ''}.py"
            said = self._run(snippet(dataclasses.replace(recorded, case=case), capabilities), script)
            shown = not isinstance(said, str) and shows(said, event)
            if seen is None or shown:
                lines = (said,) if isinstance(said, str) else said.lines or ("nothing is wrong here",)
                kept = tuple(line.rstrip()[:LETTERS] for line in lines[:SAID])
                outcome: Outcome = "shown" if shown else "not shown"
                seen = Confirmation(event.implementation, event.property, event.file, outcome, kept)
            if shown:
                break
        assert seen is not None
        return seen

    def _run(self, script: Script, path: Path) -> Said | str:
        """What a script says, or why it said nothing; for another title of the same program, the same."""
        with self._lock:
            mine = script.program not in self._ran
            future = self._ran.setdefault(script.program, Future())
        try:
            write_whole(path, script.text)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; name another --scripts") from None
        if mine:
            try:
                future.set_result(_ran(path, self._deadline))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def shows(said: Said, event: CounterexampleEvent) -> bool:
    """Whether what a script says is of the kind that a counterexample tells of: a wrong result, or the same failure."""
    failure = event.failure
    if failure is None:
        return bool(said.wrong)
    kinds = {kind for kind, _ in said.failures}
    match failure.kind:
        case "raised" if failure.exception is not None:
            return ("raised", failure.exception) in said.failures
        case "raised" | "died":  # simulated ranks that end their process are stopped before they do
            return bool(kinds & {"exited", "died"})
        case _:
            return "deadline" in kinds


def _not_shown(event: CounterexampleEvent, reason: str) -> Confirmation:
    """What became of a violation for which no script can run."""
    return Confirmation(event.implementation, event.property, event.file or "", "not shown", (reason,))


def _ran(script: Path, deadline: float) -> Said | str:
    """Run it in a process group of its own, which is ended with all its ranks: what it says, or why it said nothing."""
    process = subprocess.Popen(
        [sys.executable, str(script), str(deadline)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    ends = [bytearray(), bytearray()]
    # What a rank leaves behind may hold the outputs open: they are read beside, and not to their end.
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
    """Read a stream, and keep the end of it."""
    while part := os.read(stream.fileno(), OUTPUT):
        end += part
        del end[:-OUTPUT]


def _said(line: str) -> Said | None:
    """What the last line of a script says; `None` if that is no such line."""
    try:
        told = json.loads(line)
        failures = tuple((str(one["kind"]), one["exception"]) for one in told["failures"])
        return Said(tuple(map(str, told["wrong"])), failures, tuple(map(str, told["lines"])))
    except (ValueError, KeyError, TypeError):
        return None
