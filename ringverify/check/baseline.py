"""A baseline: known violations, each with a reason and a link, so that a run fails only for new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ringverify.errors import UsageError, instead
from ringverify.events import Known, PropertyEvent
from ringverify.files import read_toml, refusing
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.suites import METHODS

TABLE = "violation"
REQUIRED = ("implementation", "property", "reason", "link")
FOUND = ("always", "sometimes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownViolation:
    """One `[[violation]]` of a baseline.

    Attributes:
        implementation: name of the implementation, as in reports.
        property: the id of the property that it violates.
        reason: what is wrong, in words.
        link: where that is tracked, an http or https address.
        found: `always`: every run finds it, so a pass makes the baseline out of date. `sometimes`: not every run does.
    """

    implementation: str
    property: str
    reason: str
    link: str
    found: str = "always"

    def told(self) -> Known:
        """Return the violation as a field of an event."""
        return Known(reason=self.reason, link=self.link)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The known violations of a file, by implementation name and property id."""

    path: Path
    violations: Mapping[tuple[str, str], KnownViolation]

    def known(self, implementation: str, property: str) -> KnownViolation | None:
        """Return the known violation of a property by an implementation, or `None`."""
        return self.violations.get((implementation, property))

    def surprise(self, implementation: str, property: str) -> str | None:
        """Return the message for a pass of this property; `None` if a pass was to be expected."""
        known = self.known(implementation, property)
        if known is None or known.found != "always":
            return None
        return (
            f"baseline {self.path}: {property} of {implementation} passes, but is listed as violated "
            f'({known.reason}); remove the entry, or write found = "sometimes" if not every run finds it'
        )

    def elsewhere(self, implementations: Collection[str]) -> list[str]:
        """Return the names in the baseline that are not among these implementations, sorted."""
        return sorted({known.implementation for known in self.violations.values()} - {*implementations})


def expected(event: PropertyEvent, baseline: Baseline, *, whole: bool = True) -> PropertyEvent:
    """Add to an event what the baseline says; a pass of an incomplete trial (not `whole`) is never unexpected."""
    id = (event.implementation, event.property)
    known, surprise = baseline.known(*id), baseline.surprise(*id)
    if event.verdict == "fail" and known is not None:
        return dataclasses.replace(event, known=known.told())
    return dataclasses.replace(event, unexpected=surprise) if event.verdict == "pass" and whole else event


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from a TOML file, and check its keys, properties and values.

    An entry may name any implementation: one file serves several runs.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has an entry that is unknown, incomplete or a duplicate.
    """
    try:
        with refusing(f"read baseline {path}", "name another file"):
            content = read_toml(path)
    except UnicodeDecodeError:
        raise UsageError(f"baseline {path} is not TOML: it is not UTF-8") from None
    except ValueError as error:
        raise UsageError(f"baseline {path} is not TOML: {error}") from None
    for key in content:
        if key != TABLE:
            raise UsageError(f"baseline {path}: unknown key {key!r}; each known violation is a table [[{TABLE}]]")
    entries = content.get(TABLE, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"baseline {path}: {TABLE} is not a list of tables; begin each with [[{TABLE}]]")
    violations: dict[tuple[str, str], KnownViolation] = {}
    for number, entry in enumerate(entries, 1):
        known = _known(entry, _place(path, number))
        id = (known.implementation, known.property)
        if id in violations:
            first = list(violations).index(id) + 1
            raise UsageError(
                f"baseline {path}: violations {first} and {number} are both {known.property} of "
                f"{known.implementation}; one of them is enough"
            )
        violations[id] = known
    return Baseline(path, violations)


def _place(path: Path, number: int) -> str:
    return f"baseline {path}, {TABLE} {number}"


def _known(entry: dict[str, Any], place: str) -> KnownViolation:
    for key, value in entry.items():
        if key not in (*REQUIRED, "found"):
            raise UsageError(f"{place}: unknown key {key!r}{instead(key, (*REQUIRED, 'found'))}")
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{place}: {key} is {value!r}; expected a text")
    for key in REQUIRED:
        if key not in entry:
            raise UsageError(f"{place}: {key} is missing; expected {', '.join(REQUIRED)}")
    known = KnownViolation(**{key: " ".join(value.split()) for key, value in entry.items()})  # a reason may span lines
    if known.found not in FOUND:
        raise UsageError(f"{place}: found is {known.found!r}; expected {' or '.join(map(repr, FOUND))}")
    if not known.link.startswith(("https://", "http://")):
        raise UsageError(f"{place}: link is {known.link!r}; expected an http or https address")
    properties = (*PROPERTIES, *METHODS)
    if known.property not in properties:
        raise UsageError(f"{place}: unknown property {known.property!r}{instead(known.property, properties)}")
    return known
