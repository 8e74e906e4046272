"""What is published about packages: verdicts as they were found, and facts as people wrote them down.

Verdicts are JSON, made from reports and from the results of `ringverify confirm`. Facts are TOML: which package an
adapter runs, and findings, each of which explains some violations in words. A violation that no finding explains cannot
be published, nor a finding without a violation that shows it. Where the package's documentation has two readings, the
facts say so as a doubt, and nobody is accused of the violation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from ringverify.confirm.confirming import Outcome
from ringverify.environments import ELSEWHERE
from ringverify.events import CounterexampleEvent, ImplementationVerdict, Rules, Verdict, from_json
from ringverify.files import read_json, read_toml
from ringverify.lab.stored import read_back
from ringverify.reports.jsonl import ReportError
from ringverify.reports.results import ImplementationResult
from ringverify.reports.story import presentable, story
from ringverify.targets import MERGES

SCHEMA: Literal[1] = 1
Labelled = Annotated[tuple[str, ...], Rules({"minItems": 2, "maxItems": 2})]
"""A label and a text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyConditions:
    """With what, where and when the packages were surveyed; see `HeaderEvent`."""

    ringverify: str
    torch: str
    python: str
    platform: str
    suite: str
    seed: int
    date: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedProperty:
    """The verdict on one property of one target; see `PropertyEvent`."""

    verdict: Verdict
    margin: float | None
    examples: int
    reason: str | None
    figures: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedViolation:
    """A violation of one property by one target.

    Attributes:
        summary: what is wrong, in a line.
        case: the smallest case, in words.
        file: name of its case file.
        story: the counterexample in lines, each with its label.
        diagnosis: the cause, if it was found.
        outcome: whether a script showed the violation without the suite.
        said: what the script printed.
    """

    summary: str
    case: str
    file: str
    story: tuple[Labelled, ...]
    diagnosis: str | None
    outcome: Outcome
    said: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedTarget:
    """What is kept of the verdict on a target.

    Attributes:
        verdict: on the target.
        examples: cases tried, over all properties.
        seconds: how long that took.
        undeclared: capabilities that are not declared.
        properties: by id.
        violations: by the property's id.
    """

    verdict: ImplementationVerdict
    examples: int
    seconds: float | None
    undeclared: tuple[str, ...]
    properties: Mapping[str, PublishedProperty]
    violations: Mapping[str, PublishedViolation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All verdicts that were found.

    Attributes:
        schema: version of the file's format.
        made: how they were found.
        targets: by name.
        scripts: lines that each script of the facts printed, by file name.
    """

    schema: Literal[1]
    made: SurveyConditions
    targets: Mapping[str, PublishedTarget]
    scripts: Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package, as people describe it.

    Attributes:
        name: its name in the registry.
        version: the version that was run.
        source: address of its code.
        adapter: file of its adapter in `ringverify/peers`.
        targets: the targets that run it, merges of partial results among them.
        about: which part of it is run, and what replaces its GPU kernels on a CPU.
    """

    name: str
    version: str
    source: str
    adapter: str
    targets: tuple[str, ...]
    about: str

    @property
    def attention(self) -> tuple[str, ...]:
        """The targets that are implementations of attention."""
        return tuple(one for one in self.targets if one not in MERGES)

    @property
    def merges(self) -> tuple[str, ...]:
        """The targets that are merges, which have properties of their own."""
        return tuple(one for one in self.targets if one in MERGES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """One thing that is wrong, which may show in many violations.

    Attributes:
        title: the defect in a line.
        targets: the targets whose violations it explains.
        properties: the properties whose violations it explains.
        text: what is wrong and where in the package's code, as a person read it.
        since: the first version that has it, as its code's history has it; "" where that was not looked up.
        upstream: address of a report by others, if one is known.
        reports: reports to the package's authors, ready to be filed, in the folder `reports`. The Python script in each
            ends with 3 if it shows the defect; for programs, whose violations `confirm` cannot show, it decides.
        settings: for each of `targets`, what in those scripts makes them run it; needed for programs.
    """

    title: str
    targets: tuple[str, ...]
    properties: tuple[str, ...]
    text: str
    since: str = ""
    upstream: str | None = None
    reports: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def explains(self, target: str, property: str) -> bool:
        """Whether the defect explains a target's violation of a property."""
        return target in self.targets and property in self.properties


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubt:
    """Violations of what the suite asks for, but no sentence of the package promises: nobody is accused of them.

    Attributes:
        title: what happens, in a line.
        targets: the targets concerned.
        properties: the properties that the suite sees violated.
        text: the two readings, and where in the code it happens.
    """

    title: str
    targets: tuple[str, ...]
    properties: tuple[str, ...]
    text: str

    def explains(self, target: str, property: str) -> bool:
        """Whether a target's violation of a property is in doubt."""
        return target in self.targets and property in self.properties


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A fault that was found outside the packages, and the script that shows it.

    Attributes:
        title: the fault in a line.
        file: name of the script, in the folder of the facts.
        text: what it means for those who run into it.
        reports: as those of a defect.
    """

    title: str
    file: str
    text: str
    reports: tuple[str, ...] = ()


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
class AtLength:
    """What a run of the suite scale said of a target.

    Attributes:
        name: the target.
        command: the command that was run.
        said: lines of what it printed: the verdict on each property, and its figures.
    """

    name: str
    command: str
    said: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that people wrote in the file of facts."""

    packages: tuple[Package, ...]
    findings: tuple[Defect, ...]
    scripts: tuple[Demonstration, ...]
    elsewhere: tuple[Elsewhere, ...] = ()
    at_length: tuple[AtLength, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    def doubts_of(self, target: str, property: str) -> tuple[Doubt, ...]:
        """The doubts about a target's violation of a property."""
        return tuple(one for one in self.doubts if one.explains(target, property))


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
    kinds = {
        "package": Package,
        "finding": Defect,
        "doubt": Doubt,
        "script": Demonstration,
        "elsewhere": Elsewhere,
        "at_length": AtLength,
    }
    if unknown := content.keys() - kinds:
        raise ReportError(f"{path}: unknown table {sorted(unknown)[0]!r}, expected {', '.join(kinds)}")
    read = {name: tuple(_made(kind, entry, path) for entry in content.get(name, [])) for name, kind in kinds.items()}
    return Facts(read["package"], read["finding"], read["script"], read["elsewhere"], read["at_length"], read["doubt"])


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


def told_of(one: ImplementationResult, confirmed: Mapping[str, tuple[Outcome, Sequence[str]]]) -> PublishedTarget:
    """Return what is kept of the verdict on an implementation.

    Args:
        one: the implementation's results.
        confirmed: by property, whether a script showed the violation without the suite, and what the script printed.
    """
    shown = [(outcome.id, outcome.counterexample) for outcome in one.failures]
    return PublishedTarget(
        verdict=one.verdict.verdict,
        examples=one.examples,
        seconds=one.verdict.seconds,
        undeclared=one.verdict.undeclared or (),
        properties={
            outcome.id: PublishedProperty(
                verdict=outcome.verdict.verdict,
                margin=outcome.verdict.margin,
                examples=outcome.verdict.examples,
                reason=outcome.verdict.reason,
                figures=outcome.verdict.figures,
            )
            for outcome in one.outcomes.values()
        },
        violations={
            id: _violation(event, *confirmed.get(id, ("not shown", ()))) for id, event in shown if event is not None
        },
    )


def _violation(event: CounterexampleEvent, outcome: Outcome, said: Sequence[str]) -> PublishedViolation:
    return PublishedViolation(
        summary=event.summary or "",
        case=event.case_text or "",
        file=Path(event.file or "").name,
        story=tuple(row for row in story(event) if row[0] not in ("same", "next", "replay", "shrunk")),
        diagnosis=event.diagnosis,
        outcome=outcome,
        said=tuple(said),
    )


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
    try:
        read_back(Verdicts, content)
        return from_json(Verdicts, presentable(content))
    except ValueError as error:
        raise ReportError(f"{path}: {error} is missing or of another type: gather them again") from None


def violations(verdicts: Verdicts, outcome: Outcome) -> list[tuple[str, str]]:
    """Return target and property of every violation with this outcome: "shown" or "not shown"."""
    return [
        (target, property)
        for target, told in verdicts.targets.items()
        for property, violation in told.violations.items()
        if violation.outcome == outcome
    ]


def accusations(verdicts: Verdicts, facts: Facts, outcome: Outcome) -> list[tuple[str, str]]:
    """Return target and property of every violation with this outcome that is not in doubt."""
    return [pair for pair in violations(verdicts, outcome) if not facts.doubts_of(*pair)]


def unexplained(verdicts: Verdicts, facts: Facts) -> list[str]:
    """Return a line for each contradiction of verdicts and facts; with any, the page cannot be published."""
    lines = []
    shown = accusations(verdicts, facts, "shown")
    for target, property in shown:
        by = [finding.title for finding in facts.findings if finding.explains(target, property)]
        if len(by) != 1:
            lines.append(
                f"{target} violates {property}; {len(by)} findings in packages.toml explain it, expected exactly 1"
            )
    seen = [*violations(verdicts, "shown"), *violations(verdicts, "not shown")]
    lines += [
        f"the doubt {doubt.title!r} is about no violation"
        for doubt in facts.doubts
        if not any(doubt.explains(*pair) for pair in seen)
    ]
    lines += [
        f"the finding {finding.title!r} has no settings: say what in its reports' scripts runs {target}"
        for finding in facts.findings
        for target in finding.targets
        if target in ELSEWHERE and len(finding.settings) != len(finding.targets)
    ]
    for finding in facts.findings:
        if not any(finding.explains(*pair) for pair in shown):
            lines.append(f"the finding {finding.title!r} explains no violation that a script shows")
    known = [target for package in facts.packages for target in package.targets]
    lines += [
        f"{target} has a verdict, but no [[package]] in packages.toml lists it under targets"
        for target in verdicts.targets
        if target not in known
    ]
    lines += [
        f"{target} is a target of a [[package]] in packages.toml, but has no verdict: survey it, too"
        for target in known
        if target not in verdicts.targets
    ]
    lines += [
        f"{script.file} is a [[script]] in packages.toml, but was not run: make the page with the survey's folder"
        for script in facts.scripts
        if script.file not in verdicts.scripts
    ]
    return lines
