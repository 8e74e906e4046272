"""Reports as the tests look at them: JSON values."""

from ringverify.events import as_json
from ringverify.reports.jsonl import read_report


def report_lines(path):
    """The events of a whole report as JSON values."""
    return [as_json(event) for event in read_report(path)]
