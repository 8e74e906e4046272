"""The JSON Lines report: one event on each line, complete only with its footer. Its schema is `schema/report-1.json`.

The footer holds a SHA-256 of the report, the footer included: this does not stop a forger, but a report that was edited
by hand is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringverify import events, files, words
from ringverify.events import Event, FooterEvent, as_json, from_json

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

ERRORS = 100
"""Largest number of schema violations of an event among which the most telling one is chosen."""

VALUES = 30_000
"""Largest number of values in an event: the schema check visits each of them."""

EVENTS = 50_000
"""Largest number of events in a report."""

MESSAGE = 160
"""Largest number of characters in a message about one event."""


class ReportError(Exception):
    """A report cannot be written, or a file is not a complete report; the message is one line."""


def _line(event: dict[str, Any]) -> str:
    """Return an event as a line of a report, with long texts cut and invisible characters as JSON escapes."""
    text = json.dumps(_cut(event), ensure_ascii=False, allow_nan=False)
    return words.UNSEEN.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n"


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return words.cut(value, words.TEXT)
    if isinstance(value, dict):
        return {words.cut(key): _cut(item) for key, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else value


class ReportWriter:
    """Writes events as they come to `<path>.partial`, and renames that file to `<path>` after the footer.

    A run that is cut off leaves the partial file with all events so far, and an older report of that name untouched.
    Anything but a regular file, such as a FIFO, is written to as it is.

    Attributes:
        path: the path as the user named it.
        failure: why the report is incomplete, for example a full disk, or `None`; the run goes on without it.

    Raises:
        ReportError: the path cannot be written, or another run is writing it; found out before any work is done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        self._place = files.destination(path)
        self.partial = partial_of(self._place)
        self._begun = False
        self._digest = hashlib.sha256()
        try:
            stream = files.open_stream(path)
            # The partial file of an earlier run is kept until this run writes its first event.
            self._file = files.claim(self.partial) if stream is None else stream
        except files.Taken:
            raise ReportError(f"report {path} is being written by another run: name another file") from None
        except OSError as error:
            way_out = "name a file" if path.is_dir() else "name another file"
            raise ReportError(f"cannot write report {path}: {error.strerror}; {way_out}") from None
        self._is_stream = stream is not None

    def __enter__(self) -> ReportWriter:
        return self

    def write(self, event: Event) -> None:
        """Add an event; the footer completes the report."""
        if self.failure is not None:
            return
        try:
            if not self._begun and not self._is_stream:
                os.ftruncate(self._file, 0)
            self._begun = True
            content, is_last = as_json(event), isinstance(event, FooterEvent)
            line = _line(content)
            self._digest.update(line.encode())
            if is_last:
                line = _line({**content, "seal": self._digest.hexdigest()})
            files.write_all(self._file, line.encode())
            if is_last and not self._is_stream:
                os.replace(self.partial, self._place)
        except OSError as error:
            kept = "" if self._is_stream else f"; the events before that are in {self.partial}"
            self.failure = f"report {self.path} is incomplete: {error.strerror}{kept}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._begun and not self._is_stream and not os.fstat(self._file).st_size:
            self.partial.unlink(missing_ok=True)
        os.close(self._file)


def partial_of(path: Path) -> Path:
    """Return the path of a report while it is incomplete."""
    return path.with_name(path.name + ".partial")


def read_report(path: Path) -> list[Event]:
    """Return the events of a complete report; events of unknown kinds are left out.

    Raises:
        ReportError: the file cannot be read, is cut off, was edited, has another schema or does not follow it.
    """
    found: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    for number, line in enumerate(_lines(path), 1):
        try:
            files.look_at_values(line, VALUES)
            event = files.parsed(line)
        except json.JSONDecodeError:
            raise ReportError(f"report {path} is cut off or damaged at line {number}: run check again") from None
        except ValueError as error:
            raise ReportError(f"report {path}, line {number}: {error}; name a file that check wrote") from None
        if number > EVENTS:
            raise ReportError(f"report {path} has more than {EVENTS:,} events: name a file that check wrote")
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ReportError(f"report {path}, line {number}: not an event")
        if not found and event["event"] == "header" and event.get("schema") != events.SCHEMA:
            # Checked first: all else may differ in a report of another schema.
            raise ReportError(
                f"report {path} has schema {event.get('schema')!r}, this reads {events.SCHEMA}: upgrade ringverify, or "
                "make all reports with one version of it"
            )
        if event["event"] != "footer":
            digest.update(f"{line}\n".encode())
        found.append(event)
    if not found or found[0]["event"] != "header":
        raise ReportError(f"{path} is not a report: it does not begin with a header")
    if any(event["event"] in ("header", "footer") for event in found[1:-1]):
        raise ReportError(f"{path} holds more than one report: keep each in a file of its own")
    if found[-1]["event"] != "footer":
        raise ReportError(f"report {path} is incomplete: it has no footer, so the run was cut off; run check again")
    footer = {name: value for name, value in found[-1].items() if name != "seal"}
    digest.update(_line(footer).encode())
    if found[-1].get("seal") != digest.hexdigest():
        raise ReportError(f"report {path} was edited after it was written: run check again, or get the file as it was")
    for number, event in enumerate(found, 1):
        if event["event"] in events.KINDS and (wrong := _breach(event)) is not None:
            raise ReportError(f"report {path}, line {number}: {event['event']} {wrong}; run check again")
    return [from_json(events.KINDS[event["event"]], event) for event in found if event["event"] in events.KINDS]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a report file, whatever its line ends are."""
    try:
        text = files.read_text(path)
        files.look_at_values(text)
    except FileNotFoundError:
        partial = partial_of(files.destination(path))
        if partial.is_file():
            raise ReportError(
                f"no report {path}, only {partial}: the run was cut off before its end; run check again"
            ) from None
        raise ReportError(f"no report {path}: name a file that check --report wrote") from None
    except OSError as error:
        raise ReportError(f"cannot read report {path}: {error.strerror}; name a file that check wrote") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path} is not a report: it is not UTF-8 text") from None
    except ValueError as error:
        raise ReportError(f"cannot read report {path}: {error}") from None
    # Not splitlines(): it also splits at characters such as U+2028, which JSON texts may hold.
    end = len(text.rstrip("\n")) if text.strip() else 0
    start = 0
    while start < end:
        stop = text.find("\n", start, end)
        stop = end if stop < 0 else stop
        yield text[start:stop]
        start = stop + 1


@functools.cache
def _validators() -> dict[str, Draft202012Validator]:
    """Return the schema validator for each kind of event."""
    from jsonschema import Draft202012Validator  # only readers need it, and it takes a tenth of a second

    definitions = events.schema()["$defs"]
    return {kind: Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": definitions}) for kind in events.KINDS}


def _breach(event: dict[str, Any]) -> str | None:
    """Return how an event breaks the schema, or `None` if it does not."""
    from jsonschema.exceptions import best_match

    error = best_match(islice(_validators()[event["event"]].iter_errors(event), ERRORS))
    if error is None:
        return None
    place = ".".join(str(step) for step in error.absolute_path)
    told = " ".join(f"{f'field {place}: ' if place else ''}{error.message}".split())
    return told if len(told) <= MESSAGE else told[: MESSAGE - 1] + "…"
