"""`python -m ringverify.lab.publishing`: make docs/published-packages.md from reports and from what `confirm` saw.

To make it again, in an environment with the peers' packages:

    mkdir survey && cd survey
    for peer in $(ringverify list peers); do ringverify check $peer --report ${peer#peer:}.jsonl; done
    ringverify check merge:ring-flash-attn merge:yunchang merge:torch-cp --report merges.jsonl
    ringverify confirm *.jsonl --json confirmed.json
    cd .. && python -m ringverify.lab.publishing survey

A survey may hold some targets only, or some properties of a target (`--only`): what is kept of the others stays. Of
packages in environments of their own, the scripts in the reports to their authors (`docs/published/reports`) show
violations, where `confirm` cannot.

`--reports` runs these scripts again for the violations that are kept, after a report has been changed.

The case files of violations go to docs/published/cases, what is kept of the verdicts to docs/published/verdicts.json.
Without the argument, here `survey`, the page is made from the verdicts that are kept there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ringverify import targets
from ringverify.confirm import confirming
from ringverify.confirm.confirming import Outcome
from ringverify.environments import ELSEWHERE
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import as_json
from ringverify.files import read_text, write_whole
from ringverify.lab.published import (
    SCHEMA,
    Facts,
    PublishedTarget,
    SurveyConditions,
    Verdicts,
    accusations,
    read_facts,
    read_verdicts,
    told_of,
    unexplained,
)
from ringverify.lab.published_page import published_page
from ringverify.reports.jsonl import ReportError
from ringverify.reports.results import Source, read_results

PAGE = Path("docs/published-packages.md")
FOLDER = Path("docs/published")
FACTS, VERDICTS, CASES = FOLDER / "packages.toml", FOLDER / "verdicts.json", FOLDER / "cases"
REPORTS = FOLDER / "reports"
SHOWN = 3
"""Exit code of a report's script that shows the defect: no exception ends Python with it."""
PATIENCE = 300
"""Seconds that a script of the facts may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in the root of the project and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ringverify.lab.publishing", description=__doc__)
    parser.add_argument("survey", nargs="?", type=Path, help="folder of reports and confirmed.json")
    parser.add_argument("--reports", action="store_true", help="run the reports' scripts again for what is kept")
    options = parser.parse_args(arguments)
    try:
        facts = read_facts(FACTS)
        verdicts, cases = (read_verdicts(VERDICTS), None) if options.survey is None else gather(options.survey, facts)
        if cases is not None and VERDICTS.is_file():
            verdicts = _with_the_others(verdicts, read_verdicts(VERDICTS), facts)
        if options.reports:
            verdicts = _shown_again(verdicts, facts)
        for line in (amiss := unexplained(verdicts, facts)):
            print(f"cannot publish: {line}")
        if amiss:
            return 1
        if cases is not None:
            _keep(cases, verdicts)
        if cases is not None or options.reports:
            write_whole(VERDICTS, json.dumps(as_json(verdicts), indent=1, ensure_ascii=False) + "\n")
        write_whole(PAGE, published_page(verdicts, facts, FOLDER.name))
    except (UsageError, Inconclusive, ReportError) as error:
        print(f"publishing: {error}", file=sys.stderr)
        return 2
    shown, withheld = (len(accusations(verdicts, facts, outcome)) for outcome in ("shown", "not shown"))
    print(f"{PAGE}: {len(verdicts.targets)} targets, {shown} violations shown by their scripts, {withheld} withheld")
    return 0


def gather(survey: Path, facts: Facts) -> tuple[Verdicts, dict[str, str]]:
    """Collect the verdicts of the reports in a folder and the violations' case files, and run the facts' scripts.

    Returns:
        The verdicts, and the texts of the case files by name.

    Raises:
        UsageError: the folder holds no reports, or there are verdicts on another version than the facts name.
        ReportError: a report is not whole.
    """
    reports = sorted(survey.glob("*.jsonl"))
    if not reports:
        raise UsageError(f"{survey} holds no reports")
    results = read_results([Source(path) for path in reports])
    seen: dict[str, dict[str, tuple[Outcome, Sequence[str]]]] = {}
    failed = any(one.failures for one in results.implementations)  # without any, `confirm` has nothing to write
    for one in confirming.read(survey / "confirmed.json") if failed else ():
        seen.setdefault(one.implementation, {})[one.property] = (one.outcome, one.said)
    violated = [(one.name, outcome.id) for one in results.implementations for outcome in one.failures]
    for name, property, told in _shown_by_reports(violated, facts):
        seen.setdefault(name, {})[property] = told
    found = {one.name: told_of(one, seen.get(one.name, {})) for one in results.implementations}
    _same_versions(facts, found)
    named = [
        Path(outcome.counterexample.file)
        for one in results.implementations
        for outcome in one.failures
        if outcome.counterexample is not None and outcome.counterexample.file is not None
    ]
    cases = {path.name: read_text(path if path.is_file() else survey / path) for path in named}
    header = results.headers[0]
    made = SurveyConditions(
        ringverify=header.ringverify,
        torch=header.torch,
        python=header.python,
        platform=header.platform,
        suite=header.suite,
        seed=header.seed,
        date=max(str(one.started) for one in results.headers)[:10],
    )
    known = [target for package in facts.packages for target in package.targets]
    ordered = [*(target for target in known if target in found), *(target for target in found if target not in known)]
    scripts = {script.file: _output(FOLDER / script.file) for script in facts.scripts}
    return Verdicts(schema=SCHEMA, made=made, targets={name: found[name] for name in ordered}, scripts=scripts), cases


def _with_the_others(found: Verdicts, kept: Verdicts, facts: Facts) -> Verdicts:
    """Return the verdicts that were found, and those that are kept of other targets, in the order of the facts."""
    both = {**kept.targets, **found.targets}
    for name, new in found.targets.items():
        old = kept.targets.get(name)
        if old is not None and not old.properties.keys() <= new.properties.keys():
            both[name] = _with_other_properties(new, old)
    known = [target for package in facts.packages for target in package.targets]
    ordered = [*(name for name in known if name in both), *(name for name in found.targets if name not in known)]
    return dataclasses.replace(found, targets={name: both[name] for name in ordered})


def _with_other_properties(new: PublishedTarget, old: PublishedTarget) -> PublishedTarget:
    """Return what was found of some properties of a target, and what is kept of its others."""
    others = {id: told for id, told in old.violations.items() if id not in new.properties}
    properties = {**old.properties, **new.properties}
    verdicts = {one.verdict for one in properties.values()}
    return PublishedTarget(
        verdict="violations" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "conformant",
        examples=sum(one.examples for one in properties.values()),
        seconds=None if None in (old.seconds, new.seconds) else (old.seconds or 0) + (new.seconds or 0),
        undeclared=new.undeclared,
        properties=properties,
        violations={**others, **new.violations},
    )


def _shown_by_reports(
    failed: Iterable[tuple[str, str]], facts: Facts
) -> Iterator[tuple[str, str, tuple[Outcome, Sequence[str]]]]:
    """Yield target, property, and what the reports' scripts show of each violation in an environment of its own."""
    ran: dict[str, tuple[bool, Sequence[str]]] = {}
    for target, property in failed:
        if target not in ELSEWHERE:
            continue
        by = [name for finding in facts.findings if finding.explains(target, property) for name in finding.reports]
        for name in by:
            ran[name] = ran.get(name) or _report(name, ELSEWHERE[target].python)
        shown = bool(by) and all(ran[name][0] for name in by)
        said = [line for name in by for line in ran[name][1]]
        yield target, property, ("shown" if shown else "not shown", said)


def _shown_again(verdicts: Verdicts, facts: Facts) -> Verdicts:
    """Return the verdicts with what the reports' scripts show today of violations in environments of their own."""
    targets = dict(verdicts.targets)
    failed = [(target, property) for target, told in targets.items() for property in told.violations]
    for target, property, (outcome, said) in _shown_by_reports(failed, facts):
        told = targets[target]
        violation = dataclasses.replace(told.violations[property], outcome=outcome, said=tuple(said))
        targets[target] = dataclasses.replace(told, violations={**told.violations, property: violation})
    return dataclasses.replace(verdicts, targets=targets)


def _report(name: str, python: Path) -> tuple[bool, Sequence[str]]:
    """Run the script in a report; return whether it shows the defect, and what it printed."""
    script = re.search(r"```python\n(.*?)```", read_text(REPORTS / name), re.DOTALL)
    if script is None:
        raise UsageError(f"{REPORTS / name} holds no Python script")
    words = [str(python), "-c", script[1]]
    run = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return run.returncode == SHOWN, run.stdout.splitlines()


def _keep(cases: Mapping[str, str], verdicts: Verdicts) -> None:
    """Write case files, and remove those that no violation names."""
    CASES.mkdir(parents=True, exist_ok=True)
    named = {violation.file for told in verdicts.targets.values() for violation in told.violations.values()}
    for path in CASES.glob("*.json"):
        if path.name not in named:
            path.unlink()
    for name, text in cases.items():
        write_whole(CASES / name, text)


def _same_versions(facts: Facts, found: Container[str]) -> None:
    for package in facts.packages:
        for target in (one for one in package.targets if one in found):
            if target in ELSEWHERE:
                version = ELSEWHERE[target].version
            else:
                targets.load_any(target)
                version = sys.modules[targets.location_of(target).partition(":")[0]].VERSION
            if version != package.version:
                raise UsageError(f"{target} runs {package.name} {version}, {FACTS} says {package.version}")


def _output(script: Path) -> tuple[str, ...]:
    """Run a script, and return the lines that it prints.

    Raises:
        UsageError: the script fails.
    """
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    if run.returncode:
        last = "".join(run.stderr.splitlines()[-1:]) or "nothing on standard error"
        raise UsageError(f"{script} ended with exit code {run.returncode}: {last}")
    return tuple(run.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
