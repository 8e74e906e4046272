"""The kills that are expected: for each mutant a property, a seed and how many examples it took. Committed as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from ringverify.errors import UsageError
from ringverify.faults.catalogue import MUTANTS
from ringverify.files import read_json, write_whole
from ringverify.properties.catalogue import PROPERTIES

PATIENCE = 3
"""What once killed within n examples is given this many times as many, and `GRACE` more: strategies change a little."""

GRACE = 20
"""Examples that every expected kill is given on top."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is known to kill a mutant.

    Attributes:
        mutant: its id.
        property: id of the property.
        seed: of the examples.
        examples: how many it took.
    """

    mutant: str
    property: str
    seed: int
    examples: int

    def patience(self) -> int:
        """Examples after which the mutant counts as one that survives."""
        return PATIENCE * self.examples + GRACE


def read(path: Path, mutants: Collection[str] = MUTANTS.keys()) -> list[Expected]:
    """What the file expects: every mutant is in it, and nothing else is.

    Raises:
        UsageError: the file cannot be read, a mutant is missing from it, or a mutant or property in it is unknown.
    """
    try:
        content = read_json(path)
        found = [Expected(id, one["property"], one["seed"], one["examples"]) for id, one in content.items()]
        if not all(isinstance(one.property, str) and type(one.seed) is type(one.examples) is int for one in found):
            raise ValueError("a field of another type")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is no list of expected kills: write it with --write-expected") from None
    for one in found:
        if one.mutant not in mutants:
            raise UsageError(f"unknown mutant {one.mutant!r} in {path}: write it anew with --write-expected")
        if one.property not in PROPERTIES:
            raise UsageError(f"unknown property {one.property!r} in {path}, which is to kill {one.mutant}")
    missing = [id for id in mutants if id not in content]
    if missing:
        raise UsageError(f"nothing in {path} is to kill {', '.join(missing)}: add what does, by --write-expected")
    return found


def write(path: Path, expected: Sequence[Expected]) -> None:
    """Write the file, a line a mutant.

    Raises:
        UsageError: the path cannot be written.
    """
    lines = [
        f"{json.dumps(one.mutant)}: "
        + json.dumps({"property": one.property, "seed": one.seed, "examples": one.examples})
        for one in expected
    ]
    try:
        write_whole(path, "{\n" + ",\n".join(f" {line}" for line in lines) + "\n}\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from None
