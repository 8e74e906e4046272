"""The file of expected kills, JSON: the property that kills each mutant, with which seed, in how many examples."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from ringverify.errors import UsageError
from ringverify.faults.catalogue import MUTANTS
from ringverify.files import laid_out, read_json, write_named
from ringverify.properties.catalogue import PROPERTIES

PATIENCE = 3
"""Factor on the examples that a kill once took, before `GRACE` is added: the drawing of cases changes over time."""

GRACE = 20
"""Examples that are added for every expected kill."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """A property that is known to kill a mutant.

    Attributes:
        mutant: the mutant's id.
        property: id of the property.
        seed: seed of the examples.
        examples: how many examples the kill took.
    """

    mutant: str
    property: str
    seed: int
    examples: int

    def patience(self) -> int:
        """Return the number of examples after which the mutant counts as a survivor."""
        return PATIENCE * self.examples + GRACE


def read(path: Path, mutants: Collection[str] = MUTANTS.keys()) -> list[Expected]:
    """Read the file of expected kills, which has to name every mutant and nothing else.

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
        raise UsageError(f"{path} is no list of expected kills: {_again(path)}") from None
    for one in found:
        if one.mutant not in mutants:
            raise UsageError(f"unknown mutant {one.mutant!r} in {path}: {_again(path)}")
        if one.property not in PROPERTIES:
            raise UsageError(
                f"unknown property {one.property!r} in {path}, expected to kill {one.mutant}: {_again(path)}"
            )
    missing = [id for id in mutants if id not in content]
    if missing:
        raise UsageError(f"{path} has no expected kill of {', '.join(missing)}: {_again(path)}")
    return found


def _again(path: Path) -> str:
    """Return how to make the file again, as the end of an error message."""
    return f"write it again with ringverify mutants --matrix --write-expected {shlex.quote(str(path))}"


def write(path: Path, expected: Sequence[Expected]) -> None:
    """Write the file, one line per mutant.

    Raises:
        UsageError: the path cannot be written.
    """
    fields = ("property", "seed", "examples")
    content = {one.mutant: {name: getattr(one, name) for name in fields} for one in expected}
    write_named(path, laid_out(content) + "\n")
