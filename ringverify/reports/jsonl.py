"""The JSON Lines report: an event a line, whole only with its footer. Its schema is `schema/report-1.json`.

The footer seals what comes before it, and itself: no protection against malice, but what was edited by hand is not
taken for what was seen.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

Event = dict[str, Any]
SCHEMA = 1
ILLEGIBLE = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Signs that XML has no way to write, not even escaped, and that do as they please on a terminal or a page."""

MESSAGE = 160
"""Characters of a message about one event, at most."""


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


def legible(value: Any) -> Any:
    """The value with control characters in its text, and what no file format has, written as Python would."""
    if isinstance(value, str):
        return ILLEGIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
    if isinstance(value, Mapping):
        return {key: legible(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [legible(item) for item in value]
    return value


def replay_line(event: Event) -> str:
    """The command that shows a failure again; "" if there is none.

    It is made here of the case file's name, or of the words for the vectors: a line that a report holds is never shown
    as something to type.
    """
    if "file" in event:
        file = str(event["file"])
        return shlex.join(["ringverify", "replay", f"./{file}" if file.startswith("-") else file])
    words = [str(word) for word in event.get("vectors", ())]
    return shlex.join(["ringverify", "vectors", "check", *words]) if words else ""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is seen whole or not at all.

    Raises:
        OSError: it cannot be written; a file that was there is as it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _line(event: Event) -> str:
    """An event as a line of a report."""
    return json.dumps(finite(event), ensure_ascii=False, allow_nan=False) + "\n"


def _bytes(text: str) -> bytes:
    """A text as a report holds it: half a surrogate pair, which UTF-8 lacks, becomes JSON's escape for it."""
    return text.encode(errors="backslashreplace")


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
        self._digest = hashlib.sha256()
        try:
            # What an earlier run left is kept until this one has something to say.
            # Half a surrogate pair, which UTF-8 lacks, becomes the escape that JSON has for it.
            self._file: TextIO = self.partial.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
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
            line = _line(event)
            self._digest.update(_bytes(line))
            if event["event"] == "footer":
                line = _line({**event, "seal": self._digest.hexdigest()})
            self._file.write(line)
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
    """The events of a whole report as they were told: without its seal, and without kinds that are not known here.

    Raises:
        ReportError: the file cannot be read, is cut off, was edited, has another schema or does not follow it.
    """
    lines = _lines(path)
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            raise ReportError(f"report {path} is cut off or damaged at line {number}: run check again") from None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ReportError(f"report {path}, line {number}: not an event")
        if not events and event["event"] == "header" and event.get("schema") != SCHEMA:
            # Before anything else of it is looked at: it may be written in another way.
            raise ReportError(
                f"report {path} has schema {event.get('schema')!r}, this reads {SCHEMA}: upgrade ringverify, or make "
                "all reports with one version of it"
            )
        events.append(event)
    if not events or events[0]["event"] != "header":
        raise ReportError(f"{path} is not a report: it does not begin with a header")
    if any(event["event"] in ("header", "footer") for event in events[1:-1]):
        raise ReportError(f"{path} holds more than one report: keep each in a file of its own")
    if events[-1]["event"] != "footer":
        raise ReportError(f"report {path} is incomplete: it has no footer, so the run was cut off; run check again")
    footer = {name: value for name, value in events[-1].items() if name != "seal"}
    whole = "".join(f"{line}\n" for line in lines[:-1]) + _line(footer)
    if events[-1].get("seal") != hashlib.sha256(_bytes(whole)).hexdigest():
        raise ReportError(f"report {path} was edited after it was written: run check again, or get the file as it was")
    for number, event in enumerate(events, 1):
        if event["event"] in _validators() and (wrong := _breach(event)) is not None:
            raise ReportError(f"report {path}, line {number}: {event['event']} {wrong}; run check again")
    return [event for event in [*events[:-1], footer] if event["event"] in _validators()]


def _lines(path: Path) -> list[str]:
    """The lines of a file, whatever they end with."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        partial = path.with_name(path.name + ".partial")
        if partial.is_file():
            raise ReportError(
                f"no report {path}, only {partial}: the run was cut off before its end; run check again"
            ) from None
        raise ReportError(f"no report {path}: name a file that check --report wrote") from None
    except OSError as error:
        raise ReportError(f"cannot read report {path}: {error.strerror}; name a file that check wrote") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path} is not a report: it is not UTF-8 text") from None
    # Not splitlines(): messages may hold separators that JSON leaves as they are.
    return text.rstrip("\n").split("\n") if text.strip() else []


@functools.cache
def _validators() -> dict[str, Draft202012Validator]:
    """What an event of each kind has to follow."""
    from jsonschema import Draft202012Validator  # only readers need it, and it takes a tenth of a second

    text = (Path(__file__).parent / "schema" / f"report-{SCHEMA}.json").read_text(encoding="utf-8")
    definitions = json.loads(text)["$defs"]
    kinds = [name for name, told in definitions.items() if "event" in told.get("properties", ())]
    return {kind: Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": definitions}) for kind in kinds}


def _breach(event: Event) -> str | None:
    """How an event breaks the schema."""
    from jsonschema.exceptions import best_match

    error = best_match(_validators()[event["event"]].iter_errors(event))
    if error is None:
        return None
    place = ".".join(str(step) for step in error.absolute_path)
    told = " ".join(f"{f'field {place}: ' if place else ''}{error.message}".split())
    return told if len(told) <= MESSAGE else told[: MESSAGE - 1] + "…"
