"""Ctrl-C during a session of pytest: it ends at once and leaves nobody behind, and what was found is kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import assert_nobody_is_left

from ringverify.reports.jsonl import ReportError, read_report

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

INTERRUPTED = 2
SECONDS = 10
"""Within which a session has ended."""
FIRST = """
import ringverify
from right import attend


@ringverify.conformance(attend, only="forward", suite="quick", world="simulated", max_examples=1)
def test_first():
    pass
"""


def found(project):
    """The verdicts in the partial report, by implementation and property."""
    partial = "report.jsonl.partial"
    if not (project.folder / partial).exists():
        return []
    events = project.events(partial)
    return [(one["implementation"], one["property"], one["verdict"]) for one in events if one["event"] == "property"]


@pytest.mark.parametrize("target", ["right.py:attend_in_processes", "right.py:attend"])
@pytest.mark.nightly
def test_ctrl_c_ends_a_session_and_keeps_what_was_found(target, project):
    """With ranks in threads and in processes; the report of what came before is no whole one."""
    project.write(test_first=FIRST)
    long = ("--ringverify", target, "--ringverify-only", "forward", "--ringverify-suite", "nightly")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *long, "--ringverify-report", "report.jsonl"],
        cwd=project.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 90
    while not found(project) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(2)  # the target's property is under way then, or its world is being set up
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < SECONDS
    assert process.returncode == INTERRUPTED, out
    assert "KeyboardInterrupt" in out
    assert "Traceback" not in out
    assert_nobody_is_left(process)
    (verdict,) = found(project)
    assert verdict[1:] == ("forward", "pass")
    with pytest.raises(ReportError, match="the run was cut off"):
        read_report(project.folder / "report.jsonl")


def test_a_call_that_was_over_is_kept_too(project):
    """Though its test has no report any more."""
    project.write(
        test_calls="import ringverify\nfrom right import attend\n\n\ndef test_it():\n"
        "    ringverify.run_conformance(attend, only='forward', max_examples=1)\n    raise KeyboardInterrupt\n"
    )
    ran = project.pytest("--ringverify-report", "report.jsonl")
    assert ran.code == INTERRUPTED
    assert found(project) == [("right (test_calls.py::test_it)", "forward", "pass")]
