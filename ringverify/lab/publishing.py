"""`python -m ringverify.lab.publishing`: make docs/published-packages.md from reports and from what `confirm` saw.

To make it again, in an environment with the peers' packages:

    mkdir survey && cd survey
    for peer in $(ringverify list peers); do ringverify check $peer --report ${peer#peer:}.jsonl; done
    ringverify confirm *.jsonl --json confirmed.json
    cd .. && python -m ringverify.lab.publishing survey

The case files of violations go to docs/published/cases, what is kept of the verdicts to docs/published/verdicts.json.
Without the argument, here `survey`, the page is made from the verdicts that are kept there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringverify import targets
from ringverify.confirm import confirming
from ringverify.confirm.confirming import Outcome
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import as_json
from ringverify.files import read_text, write_whole
from ringverify.lab.published import (
    SCHEMA,
    Facts,
    SurveyConditions,
    Verdicts,
    read_facts,
    read_verdicts,
    told_of,
    unexplained,
    violations,
)
from ringverify.lab.published_page import published_page
from ringverify.reports.jsonl import ReportError
from ringverify.reports.results import Source, read_results

PAGE = Path("docs/published-packages.md")
FOLDER = Path("docs/published")
FACTS, VERDICTS, CASES = FOLDER / "packages.toml", FOLDER / "verdicts.json", FOLDER / "cases"
PATIENCE = 300
"""Seconds that a script of the facts may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in the root of the project and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ringverify.lab.publishing", description=__doc__)
    parser.add_argument("survey", nargs="?", type=Path, help="folder of reports and confirmed.json")
    options = parser.parse_args(arguments)
    try:
        facts = read_facts(FACTS)
        verdicts, cases = (read_verdicts(VERDICTS), None) if options.survey is None else gather(options.survey, facts)
        for line in (amiss := unexplained(verdicts, facts)):
            print(f"cannot publish: {line}")
        if amiss:
            return 1
        if cases is not None:
            _keep(cases)
            write_whole(VERDICTS, json.dumps(as_json(verdicts), indent=1, ensure_ascii=False) + "\n")
        write_whole(PAGE, published_page(verdicts, facts, FOLDER.name))
    except (UsageError, Inconclusive, ReportError) as error:
        print(f"publishing: {error}", file=sys.stderr)
        return 2
    shown, withheld = (len(violations(verdicts, outcome)) for outcome in ("shown", "not shown"))
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
    for one in confirming.read(survey / "confirmed.json"):
        seen.setdefault(one.implementation, {})[one.property] = (one.outcome, one.said)
    found = {one.name: told_of(one, seen.get(one.name, {})) for one in results.implementations}
    _same_versions(facts)
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


def _keep(cases: Mapping[str, str]) -> None:
    """Replace the case files that are kept."""
    CASES.mkdir(parents=True, exist_ok=True)
    for path in CASES.glob("*.json"):
        if path.name not in cases:
            path.unlink()
    for name, text in cases.items():
        write_whole(CASES / name, text)


def _same_versions(facts: Facts) -> None:
    for package in facts.packages:
        for target in package.targets:
            module = targets.BUILT_IN[target].partition(":")[0]
            targets.load(target)
            version = sys.modules[module].VERSION
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
