"""Standard files that are closed, as some daemons and CI services start programs: no implementation is to blame."""

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import miniature

from ringverify.reports.jsonl import read_report

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", pytest.param("<&-", marks=pytest.mark.nightly)])
def test_closed_standard_files_change_no_verdict(closed, tmp_path):
    """Pipes of ranks would have their numbers, and a rank's process would end over them."""
    command = [sys.executable, "-m", "ringverify", "check", miniature("right:attend"), "--only", "forward"]
    limited = [*command, "--max-examples", "1", "--report", "report.jsonl"]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *limited], cwd=tmp_path, check=False, timeout=100)
    assert ended.returncode == 0
    assert read_report(Path(tmp_path, "report.jsonl"))[-1].verdict == "conformant"
