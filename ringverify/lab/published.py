"""What is published about packages: verdicts as they were found, and facts as people wrote them down.

Verdicts are JSON, made from reports and from the results of `ringverify confirm`. Facts are TOML: which package an
adapter runs, and findings, each of which explains some violations in words. A violation that no finding explains cannot
be published, nor a finding without a violation that shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringverify.events import CounterexampleEvent
from ringverify.files import read_json, read_toml
from ringverify.reports.jsonl import ReportError
from ringverify.reports.results import ImplementationResult
from ringverify.reports.story import presentable, story

SCHEMA = 1
Verdicts = dict[str, Any]
"""Verdicts as JSON values: "made" holds date and versions, "targets" is by target, "scripts" by file name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package, as people describe it.

    Attributes:
        name: its name in the registry.
        version: the version that was run.
        source: address of its code.
        adapter: file of its adapter in `ringverify/peers`.
        targets: the targets that run it.
        about: which part of it is run, and what replaces its GPU kernels on a CPU.
    """

    name: str
    version: str
    source: str
    adapter: str
    targets: tuple[str, ...]
    about: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """One thing that is wrong, which may show in many violations.

    Attributes:
        title: the defect in a line.
        targets: the targets whose violations it explains.
        properties: the properties whose violations it explains.
        text: what is wrong and where in the package's code, as a person read it.
        upstream: address of a report by others, if one is known.
    """

    title: str
    targets: tuple[str, ...]
    properties: tuple[str, ...]
    text: str
    upstream: str | None = None

    def explains(self, target: str, property: str) -> bool:
        """Whether the defect explains a target's violation of a property."""
        return target in self.targets and property in self.properties


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A fault that was found outside the packages, and the script that shows it.

    Attributes:
        title: the fault in a line.
        file: name of the script, in the folder of the facts.
        text: what it means for those who run into it.
    """

    title: str
    file: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A package without a verdict.

    Attributes:
        name: name of the package, or of several.
        reason: why there is no verdict; a text that continues the sentence begun by the name.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that people wrote in the file of facts."""

    packages: tuple[Package, ...]
    findings: tuple[Defect, ...]
    scripts: tuple[Demonstration, ...]
    elsewhere: tuple[Elsewhere, ...] = ()


def read_facts(path: Path) -> Facts:
    """Read the facts from a TOML file.

    Raises:
        ReportError: the file cannot be read, or a field is missing, unknown or of another type.
    """
    try:
        content = read_toml(path)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path} is not TOML: {error}") from None
    kinds = {"package": Package, "finding": Defect, "script": Demonstration, "elsewhere": Elsewhere}
    if unknown := content.keys() - kinds:
        raise ReportError(f"{path}: unknown table {sorted(unknown)[0]!r}, expected {', '.join(kinds)}")
    read = {name: tuple(_made(kind, entry, path) for entry in content.get(name, [])) for name, kind in kinds.items()}
    return Facts(read["package"], read["finding"], read["script"], read["elsewhere"])


def _made(kind: type[Any], entry: dict[str, Any], path: Path) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    told = entry.get("title", entry.get("name", "?"))
    if unknown := entry.keys() - fields:
        raise ReportError(f"{path}: {kind.__name__.lower()} {told!r} has the unknown field {sorted(unknown)[0]!r}")
    for name, field in fields.items():
        several = str(field.type).startswith("tuple")
        if name in entry:
            if not isinstance(entry[name], list if several else str):
                raise ReportError(
                    f"{path}: {kind.__name__.lower()} {told!r}: {name}={entry[name]!r} is of another type"
                )
        elif field.default is dataclasses.MISSING:
            raise ReportError(f"{path}: {kind.__name__.lower()} {told!r} lacks {name!r}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})


def told_of(one: ImplementationResult, confirmed: dict[str, tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """Return what is kept of the verdict on an implementation.

    Args:
        one: the implementation's results.
        confirmed: by property, whether a script showed the violation without the suite, and what the script printed.
    """
    violations = {}
    for outcome in one.failures:
        event = outcome.counterexample
        if event is not None:
            shown, said = confirmed.get(outcome.id, ("not shown", ()))
            violations[outcome.id] = _violation(event) | {"outcome": shown, "said": list(said)}
    return {
        "verdict": one.verdict.verdict,
        "examples": one.examples,
        "seconds": one.verdict.seconds,
        "undeclared": list(one.verdict.undeclared or ()),
        "properties": {
            outcome.id: {name: getattr(outcome.verdict, name) for name in ("verdict", "margin", "examples", "reason")}
            for outcome in one.outcomes.values()
        },
        "violations": violations,
    }


def _violation(event: CounterexampleEvent) -> dict[str, Any]:
    return {
        "summary": event.summary,
        "case": event.case_text,
        "file": Path(event.file or "").name,
        "story": [list(row) for row in story(event) if row[0] not in ("same", "next", "replay", "shrunk")],
        "diagnosis": event.diagnosis,
    }


def read_verdicts(path: Path) -> Verdicts:
    """Read verdicts that were gathered before.

    Raises:
        ReportError: the file cannot be read, or does not hold verdicts.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ReportError(f"{path} is not JSON") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ReportError(f"{path} does not hold verdicts of schema {SCHEMA}: gather them again")
    if not _are_verdicts(content):
        raise ReportError(f"{path} lacks a field of its verdicts, or has one of another type: gather them again")
    shown: Verdicts = presentable(content)
    return shown


def _are_verdicts(content: dict[str, Any]) -> bool:
    """Whether every field that the page shows is present and of the right type."""
    made = ("date", "ringverify", "torch", "python", "platform", "suite", "seed")
    told = {"verdict": str, "examples": int, "properties": dict, "violations": dict}
    property = {"verdict": str, "margin": (float, int, str, type(None)), "reason": (str, type(None))}
    violation = {"summary": str, "case": str, "file": str, "outcome": str, "story": list, "said": list}
    if not _has(content, {"made": dict, "targets": dict, "scripts": dict}) or not _has(
        content["made"], dict.fromkeys(made, (str, int))
    ):
        return False
    return (
        all(_has(one, told) for one in content["targets"].values())
        and all(_has(of, property) for one in content["targets"].values() for of in one["properties"].values())
        and all(_has(of, violation) for one in content["targets"].values() for of in one["violations"].values())
        and all(_are_texts(said) for said in content["scripts"].values())
        and all(
            _are_texts(of["said"]) and all(isinstance(row, list) and len(row) == 2 for row in of["story"])
            for one in content["targets"].values()
            for of in one["violations"].values()
        )
    )


def _has(content: Any, fields: Mapping[str, Any]) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(name, ...), kind) for name, kind in fields.items())


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(line, str) for line in content)


def violations(verdicts: Verdicts, outcome: str) -> list[tuple[str, str]]:
    """Return target and property of every violation with this outcome: "shown" or "not shown"."""
    return [
        (target, property)
        for target, told in verdicts["targets"].items()
        for property, violation in told["violations"].items()
        if violation["outcome"] == outcome
    ]


def unexplained(verdicts: Verdicts, facts: Facts) -> list[str]:
    """Return a line for each contradiction of verdicts and facts; with any, the page cannot be published."""
    lines = []
    shown = violations(verdicts, "shown")
    for target, property in shown:
        by = [finding.title for finding in facts.findings if finding.explains(target, property)]
        if len(by) != 1:
            lines.append(f"{target}: {property} is violated, and {len(by)} findings explain it")
    for finding in facts.findings:
        if not any(finding.explains(*pair) for pair in shown):
            lines.append(f"nothing shows the finding {finding.title!r}")
    known = [target for package in facts.packages for target in package.targets]
    lines += [f"{target} has a verdict, and no package has it" for target in verdicts["targets"] if target not in known]
    lines += [f"{target} is of a package, and has no verdict" for target in known if target not in verdicts["targets"]]
    lines += [f"{script.file} was not run" for script in facts.scripts if script.file not in verdicts["scripts"]]
    return lines


def used(values: Iterable[str]) -> list[str]:
    """Return each value once, in the order of first use."""
    return list(dict.fromkeys(values))
