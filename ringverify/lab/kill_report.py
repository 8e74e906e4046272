"""The results of `ringverify mutants` in one file: first kills, the matrix, false alarms. A run writes its section.

The file is JSON, one line per mutant. `ringverify.lab.kill_tables` makes docs/mutants.md from it.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import ringverify
from ringverify import events
from ringverify.errors import UsageError
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.fault import FaultKind
from ringverify.files import read_json, write_whole
from ringverify.lab.false_alarms import Acquittal
from ringverify.lab.killing import Effort, Kill, as_json

SCHEMA = 2
Section = Literal["first", "matrix", "variants"]
Book = dict[str, Any]

BY_VALUE: tuple[FaultKind, ...] = ("value",)
"""Kinds of mutants that return a wrong result on ordinary inputs, whose shrunk cases have to be small."""


def about(effort: Effort, seconds: float) -> dict[str, Any]:
    """Return how and when a run was made: date, versions, options, seconds."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "ringverify": ringverify.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": effort.seed,
        "max_examples": effort.most,
        "jobs": effort.jobs,
        "properties": list(effort.properties),
        "seconds": round(seconds, 1),
    }


def of_first_kills(kills: Sequence[Kill], effort: Effort, seconds: float) -> dict[str, Any]:
    """Return the section with the first kill of each mutant."""
    killed = [one for one in kills if one.verdict == "killed"]
    by_value = [one for one in killed if MUTANTS[one.mutant].kind in BY_VALUE]
    small = [one for one in by_value if (one.ranks or 0) <= 3 and (one.tokens or 0) <= 6]
    return about(effort, seconds) | {
        "mutants": len(kills),
        "killed": len(killed),
        "survivors": [one.mutant for one in kills if one.verdict != "killed"],
        "median_seconds": round(statistics.median(one.seconds for one in killed), 2) if killed else None,
        "median_examples": statistics.median(one.examples for one in killed) if killed else None,
        "value_mutants": len(by_value),
        "value_mutants_shrunk_small": len(small),
        "columns": ["property", "examples", "seconds", "ranks", "tokens"],
        "kills": {one.mutant: as_json(one) for one in kills},
    }


def of_matrix(rows: Sequence[Sequence[Kill]], effort: Effort, seconds: float) -> dict[str, Any]:
    """Return the section with all pairs: examples until the kill, by mutant and by each property that kills it."""
    killed = {row[0].mutant: {one.property: one.examples for one in row if one.verdict == "killed"} for row in rows}
    unsupported = {row[0].mutant: [one.property for one in row if one.verdict == "unsupported"] for row in rows}
    return _matrix(about(effort, seconds), killed, unsupported)


def _matrix(
    how: dict[str, Any], killed: dict[str, dict[str, int]], unsupported: dict[str, list[str]]
) -> dict[str, Any]:
    return how | {
        "mutants": len(killed),
        "killed": sum(bool(kills) for kills in killed.values()),
        "survivors": [id for id, kills in killed.items() if not kills],
        "pairs": sum(len(how["properties"]) - len(unsupported.get(id, [])) for id in killed),
        "unsupported": {id: properties for id, properties in unsupported.items() if properties},
        "kills": killed,
    }


def _with_earlier(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Add an earlier matrix's other mutants, if it was made with the same versions, seed, examples and properties."""
    how = {name: now[name] for name in ("ringverify", "torch", "python", "seed", "max_examples", "properties")}
    kept = [id for id in MUTANTS if id in {**earlier.get("kills", {}), **now["kills"]}]
    if kept == list(now["kills"]) or any(earlier[name] != value for name, value in how.items()):
        return now
    about = {
        "date": now["date"],
        **how,
        "jobs": earlier["jobs"],
        "seconds": round(earlier["seconds"] + now["seconds"], 1),
    }
    killed, unsupported = ({**earlier[name], **now[name]} for name in ("kills", "unsupported"))
    return _matrix(about, {id: killed[id] for id in kept}, {id: unsupported.get(id, []) for id in kept})


def of_variants(found: Sequence[Acquittal], effort: Effort, seconds: float) -> dict[str, Any]:
    """Return the section with the correct implementations."""
    return about(effort, seconds) | {
        "implementations": len(found),
        "examples": sum(sum(one.examples.values()) for one in found),
        "fewest": min((sum(one.examples.values()) for one in found), default=0),
        "alarms": [{"name": one.name, **vars(alarm)} for one in found for alarm in one.alarms],
        "by_property": {
            property: sum(one.examples.get(property, 0) for one in found) for property in effort.properties
        },
        "largest_margin": {
            property: max((one.margin.get(property, 0.0) for one in found), default=0.0)
            for property in effort.properties
        },
        "each": {one.name: sum(one.examples.values()) for one in found},
    }


def read(path: Path) -> Book:
    """Read what earlier runs wrote; if there is no such file, there are no sections.

    Raises:
        UsageError: the file cannot be read, or is not such a file.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {"schema": SCHEMA}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is not a report of `ringverify mutants --json`") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a report of `ringverify mutants --json` of schema {SCHEMA}: name another")
    return content


def add(path: Path, section: Section, content: dict[str, Any]) -> None:
    """Write a section to the file, in place of an older one; other sections stay.

    A matrix of some mutants is added to that of the others.

    Raises:
        UsageError: the file is not such a file, or cannot be written.
    """
    book = read(path)
    if section == "matrix" and "matrix" in book:
        content = _with_earlier(book["matrix"], content)
    book[section] = content
    try:
        write_whole(path, _text(events.as_json(book)))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from None


def _text(book: Book) -> str:
    """Return JSON with a line for each field of a section, and for each entry of a field that is an object."""
    sections = []
    for name, content in book.items():
        if not isinstance(content, dict):
            sections.append(f"{json.dumps(name)}: {json.dumps(content)}")
            continue
        fields = []
        for field, value in content.items():
            shown = json.dumps(value)
            if isinstance(value, dict) and value:
                inner = ",\n".join(f"   {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
                shown = "{\n" + inner + "\n  }"
            fields.append(f"  {json.dumps(field)}: {shown}")
        sections.append(f"{json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n }")
    return "{\n" + ",\n".join(f" {section}" for section in sections) + "\n}\n"
