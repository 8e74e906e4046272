"""A counterexample as a file: JSON, with a checksum, and all that is needed to reproduce the failure.

The field `seal` is the SHA-256 of the other fields. It shows that a file was changed since it was recorded, by accident
or on purpose, but does not prove who wrote it. The field `signature` does; see `ringverify.check.trusting`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ringverify
from ringverify.cases.case import Case
from ringverify.check import trusting
from ringverify.check.searching import Counterexample
from ringverify.errors import UsageError
from ringverify.events import as_json
from ringverify.files import parsed, read_text, refusing, write_whole
from ringverify.words import cut

SCHEMA = 1
MOST = 1 << 20
"""Largest case file that is read, in bytes."""
MOST_REMEMBERED = 10
"""Most cases of earlier runs that are tried first, for each property."""


@dataclasses.dataclass(frozen=True)
class CaseFile:
    """The content of a case file.

    Attributes:
        target: the target of the implementation, as typed on the command line.
        property: id of the violated property.
        world: name of the world that it was run in.
        device: device of the tensors.
        case: the failing case.
        after: cases to run before it in the same process; mostly none.
        digest: SHA-256 of the results, as in `Observation.digest`.
        summary: what was wrong, in one line.
        made_with: versions and platform of the recording, in one line.
        ours: whether a run in this working directory wrote the file, and it is unchanged.
    """

    target: str
    property: str
    world: str
    device: str
    case: Case
    after: tuple[Case, ...]
    digest: str
    summary: str
    made_with: str
    ours: bool = False


def environment() -> str:
    """Return versions and platform in one line; on another one, results may differ in their last bits."""
    return (
        f"ringverify {ringverify.__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    )


def look_at(folder: Path) -> None:
    """Check, before any work is done, that counterexamples can be saved in a folder.

    Raises:
        UsageError: the folder cannot be written, or cannot be made.
    """
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise UsageError(f"cannot write cases to {folder}: {nearest} is not a folder; name another with --cases")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write cases to {folder}: no permission in {nearest}; name another with --cases")


def save(folder: Path, *, target: str, property: str, world: str, device: str, counterexample: Counterexample) -> Path:
    """Write a counterexample atomically, and return the path of its file.

    Raises:
        UsageError: the folder cannot be written.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "made_with": environment(),
        "target": target,
        "property": property,
        "world": world,
        "device": device,
        "case": counterexample.case.to_json(),
        "after": [case.to_json() for case in counterexample.after],
        "digest": counterexample.digest,
        "summary": cut(counterexample.violation.summary),
    }
    if (finding := counterexample.violation.finding) is not None:
        content["finding"] = as_json({k: v for k, v in dataclasses.asdict(finding).items() if k != "wrong"})
    if counterexample.diagnosis.text is not None:
        content["diagnosis"] = cut(counterexample.diagnosis.text)
    if (signed := trusting.signature(content, make_key=True)) is not None:
        content["signature"] = signed
    content["seal"] = _seal(content)
    path = folder / f"{_stem(target, property)}-{counterexample.case.identity}.json"
    with refusing(f"write case {path}", "name another folder with --cases"):
        trusting.make_folder(folder)
        write_whole(path, json.dumps(content, indent=2) + "\n")
    return path


def read(path: Path, *, edited: bool = False) -> CaseFile:
    """Read a case file.

    Args:
        path: the file.
        edited: accept a file that was changed after it was written.

    Raises:
        UsageError: the file cannot be read, is truncated, edited, of another schema or not a case.
    """
    try:
        with refusing(f"read case {path}", "name a file that check wrote"):
            text = read_text(path, MOST)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a case file: it is not UTF-8 text") from None
    try:
        content = parsed(text)
    except ValueError as error:
        if text.startswith('{"event": '):
            raise UsageError(
                f"{path} is a report, not a case file: ringverify report {path} shows it, and the replay line of a "
                "failure names its case"
            ) from None
        raise UsageError(
            f"case {path} is truncated or not JSON ({error}): get the whole file, or run check again"
        ) from None
    if not isinstance(content, Mapping) or "schema" not in content:
        raise UsageError(f"{path} is not a case file: it names no schema")
    if (schema := content["schema"]) != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        raise UsageError(
            f"case {path} has schema {schema!r}, and ringverify {ringverify.__version__} reads schema {SCHEMA}: "
            + ("upgrade ringverify" if newer else "replay it with the version that wrote it, or run check again")
        )
    content = dict(content)
    if content.pop("seal", None) != _seal(content) and not edited:
        raise UsageError(f"case {path} was edited after it was recorded: pass --edited to run it as it is now")
    signed = content.pop("signature", None)
    ours = trusting.is_signed(content, signed)
    try:
        case = Case.from_json(content["case"])
        after = tuple(Case.from_json(earlier) for earlier in content["after"])
        texts = {name: content[name] for name in ("target", "property", "world", "device", "digest", "summary")}
        made_with = content["made_with"]
    except KeyError as error:
        raise UsageError(f"case {path} lacks the field {error.args[0]!r}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"case {path} does not describe a case: {error}") from None
    for name, value in texts.items():
        if not isinstance(value, str):
            raise UsageError(f"case {path}: {name}={value!r}, expected text")
    return CaseFile(case=case, after=after, made_with=str(made_with), ours=ours, **texts)


def remembered(folder: Path, *, target: str, property: str) -> tuple[list[tuple[Path, CaseFile]], list[str]]:
    """Return the latest counterexamples to a property by a target, and a message for each file that cannot be read.

    At most `MOST_REMEMBERED`, sorted by file name. Files stay where they are even if their case passes by now: a report
    may name them, and a bug that was fixed may come back.
    """
    found, passed_over = [], []
    paths = folder.glob(f"{_stem(target, property)}-*.json") if folder.is_dir() else ()
    latest = sorted(paths, key=_written_at, reverse=True)[:MOST_REMEMBERED]
    for path in sorted(latest):
        try:
            file = read(path)
        except UsageError as error:
            passed_over.append(f"an earlier case is passed over: {error}")
            continue
        if (file.target, file.property) == (target, property):
            found.append((path, file))
    return found, passed_over


def _written_at(path: Path) -> float:
    """Return the time of the last change; 0 for a link to nothing, and for what another run has removed meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stem(target: str, property: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', target).strip('-')}-{property}"


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
