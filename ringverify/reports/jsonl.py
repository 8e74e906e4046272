"""The JSON Lines report: an event a line, whole only with its footer. Its schema is `schema/report-1.json`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Event = dict[str, Any]
SCHEMA = 1


class ReportError(Exception):
    """A report cannot be written, or a file is not a whole report; the message is one line."""


def finite(value: Any) -> Any:
    """The value with numbers that JSON lacks as text: "inf", "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is seen whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


class ReportWriter:
    """Writes events as they come to `<path>.partial`, and gives the file its name with the footer.

    A run that is cut off leaves the partial file with all that was known, and an older report of that name untouched.

    Raises:
        ReportError: the path cannot be written; found out before any work is done.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise ReportError(f"cannot write report {path}: it is a folder; name a file")
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self._begun = False
        try:
            # What an earlier run left is kept until this one has something to say.
            # Half a surrogate pair, which UTF-8 lacks, becomes the escape that JSON has for it.
            self._file: TextIO = self.partial.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ReportError(f"cannot write report {path}: {error.strerror}; name another file") from None

    def __enter__(self) -> ReportWriter:
        return self

    def write(self, event: Event) -> None:
        """Add an event; the footer completes the report.

        Raises:
            ReportError: the disk is full, or went away.
        """
        try:
            if not self._begun:
                self._begun = True
                self._file.truncate(0)
            self._file.write(json.dumps(finite(event), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
            if event["event"] == "footer":
                self._file.close()
                os.replace(self.partial, self.path)
        except OSError as error:
            raise ReportError(
                f"cannot go on with report {self.path}: {error.strerror}; what was told is in it"
            ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if not self._begun and not self.partial.stat().st_size:
            self.partial.unlink()


def read_report(path: Path) -> list[Event]:
    """The events of a whole report.

    Raises:
        ReportError: the file cannot be read, is cut off, or has another schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read report {path}: {error}") from None
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            raise ReportError(f"report {path} is cut off or damaged at line {number}: run check again") from None
        if not isinstance(event, dict) or "event" not in event:
            raise ReportError(f"report {path}, line {number}: not an event")
        events.append(event)
    if not events or events[0]["event"] != "header":
        raise ReportError(f"{path} is not a report: it does not begin with a header")
    if events[0].get("schema") != SCHEMA:
        raise ReportError(
            f"report {path} has schema {events[0].get('schema')!r}, this reads {SCHEMA}: upgrade ringverify"
        )
    if events[-1]["event"] != "footer":
        raise ReportError(f"report {path} is incomplete: it has no footer, so the run was cut off; run check again")
    return events
