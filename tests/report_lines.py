"""Reports and case files as the tests look at them: JSON values."""

import hashlib
import json
from pathlib import Path

from jsonschema import Draft202012Validator

from ringverify import reports
from ringverify.events import as_json
from ringverify.reports.jsonl import read_report

PUBLISHED = Path(reports.__file__).parent / "schema" / "report-1.json"
VALIDATOR = Draft202012Validator(json.loads(PUBLISHED.read_text(encoding="utf-8")))
"""Of the schema that is published, of one event."""

TIMES = ("started", "seconds", "seconds_inside", "seal")
"""Fields that differ from run to run; the seal is a digest of the whole report."""


def report_lines(path):
    """The events of a whole report as JSON values."""
    return [as_json(event) for event in read_report(path)]


def without_times(events):
    """The events of a report, without what differs from run to run."""
    return [{name: value for name, value in event.items() if name not in TIMES} for event in events]


def resealed(content):
    """The content of a case file that was changed, as text, with a seal that fits it."""
    content = {name: value for name, value in content.items() if name != "seal"}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "seal": seal})
