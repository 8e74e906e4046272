"""The command line as the tests of this folder use it."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from report_lines import report_lines

from ringverify.cli.main import main

MINIATURES = Path(__file__).resolve().parent.parent / "miniatures"


def miniature(name):
    """The target of an implementation in `tests/miniatures`: "right:attend" is `attend` of `right.py`."""
    module, _, attribute = name.partition(":")
    return f"{MINIATURES / module}.py:{attribute}"


def another_version_of(package, folder, monkeypatch):
    """Put metadata of a version that no adapter was written for on the module path, before any that is installed."""
    metadata = folder / "another" / f"{package.replace('-', '_')}-0.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.0\n")
    monkeypatch.syspath_prepend(folder / "another")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command returned, printed and reported."""

    code: int
    out: str
    err: str
    events: list[dict[str, Any]]

    def told(self, kind, **fields):
        """The events of a kind whose fields have these values."""
        return [
            event
            for event in self.events
            if event["event"] == kind and all(event[name] == value for name, value in fields.items())
        ]

    def verdicts(self):
        """Verdict by property, of one implementation."""
        return {event["property"]: event["verdict"] for event in self.told("property")}


class CommandLine:
    """Runs commands in this process or another, in a folder that is theirs."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self._capsys = capsys
        self._reports = (folder / f"report-{number}.jsonl" for number in itertools.count(1))

    def __call__(self, *arguments):
        """The outcome of a command in this process."""
        code = main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        return Outcome(code, printed.out, printed.err, [])

    def check(self, *arguments):
        """The outcome of `check` in this process, with the events of its report."""
        path = next(self._reports)
        outcome = self("check", *arguments, "--report", path)
        return dataclasses.replace(outcome, events=report_lines(path) if path.exists() else [])

    def apart(self, *arguments):
        """A command in a process and a session of its own, started and not waited for."""
        return subprocess.Popen(
            [sys.executable, "-m", "ringverify", *map(str, arguments)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which the tests may ignore, under nohup
        )


def assert_one_line(err, words):
    """One line, of ringverify's, that has all the words."""
    assert err.startswith("ringverify: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
