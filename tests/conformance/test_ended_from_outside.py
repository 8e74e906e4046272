"""Runs that somebody ends: Ctrl-C and SIGKILL leave no process behind, and a report that nobody takes for whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import miniature
from processes import assert_nobody_is_left, session

from ringverify.cli.main import NOBODY_READS
from ringverify.reports.jsonl import ReportError, read_report

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc"),
]

# Long enough to be under way still when they are ended.
RUNS = {
    "simulated": ("check", "ring", "--jobs", "1", "--report", "report.jsonl"),
    "side by side": ("check", "ring", "--jobs", "2", "--report", "report.jsonl"),
    "gloo": ("check", miniature("right:attend_in_processes"), "--suite", "nightly", "--report", "report.jsonl"),
}


def under_way(process):
    """Wait until the first property's examples run: its world exists then."""
    for line in process.stdout:
        if "suite" in line:
            break
    until, seen, since = time.monotonic() + 60, 0, time.monotonic()
    while time.monotonic() < until and process.poll() is None:
        now = len(session(process.pid))
        if now != seen:
            seen, since = now, time.monotonic()
        # A fork server and a worker, and nobody who is still starting.
        if seen > 2 and time.monotonic() - since > 1.5:
            return
        time.sleep(0.02)
    raise AssertionError("no run ever began")


@pytest.mark.parametrize("world", ["gloo", "side by side", pytest.param("simulated", marks=pytest.mark.nightly)])
def test_ctrl_c_ends_a_run_with_130_and_leaves_nobody(world, ringverify):
    """One line, the older report intact, the partial one kept."""
    Path("report.jsonl").write_text("an older report\n")
    process = ringverify.apart(*RUNS[world])
    under_way(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that have not left the group
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "ringverify: interrupted\n"
    assert_nobody_is_left(process)
    assert Path("report.jsonl").read_text() == "an older report\n"
    with pytest.raises(ReportError, match="no footer"):
        read_report(Path("report.jsonl.partial"))


@pytest.mark.nightly
def test_a_reader_who_leaves_ends_the_run_silently_and_without_a_verdict(ringverify):
    """`ringverify check … | head -1` ends with 141: 1 would say that something is wrong with the implementation."""
    process = ringverify.apart(
        "check", "ring", "--report", "report.jsonl", "--max-examples", "3", "--only", "forward,gradients"
    )
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == NOBODY_READS
    assert err == ""
    assert not Path("report.jsonl").exists()


@pytest.mark.parametrize(
    "arguments", [("list", "implementations"), ("list", "mutants"), ("--help",), ("plan", "--help")]
)
@pytest.mark.by_day(1)
def test_a_list_that_nobody_reads_ends_silently(arguments, ringverify):
    """`ringverify list … | head`, also where all of it is written at the end of the process only."""
    reads, writes = os.pipe()
    os.close(reads)  # the reader has gone before the first line
    command = [sys.executable, "-m", "ringverify", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, env=buffered, timeout=60, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (NOBODY_READS, b"")


@pytest.fixture
def temporary(tmp_path_factory, monkeypatch):
    """Where a tool that is started makes its temporary files."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def becomes_empty(folder):
    """What is still in a folder after some seconds."""
    until = time.monotonic() + 20
    while (left := list(folder.iterdir())) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(
    ("world", "number"),
    [
        ("gloo", signal.SIGKILL),
        pytest.param("simulated", signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param("side by side", signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param("gloo", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("simulated", signal.SIGHUP, marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_ended_leaves_an_incomplete_report_and_nothing_else(world, number, ringverify, temporary):
    """Nothing of the tool runs after the signal: no worker stays, no temporary folder, and no reader is deceived."""
    memory = set(Path("/dev/shm").glob("*")) if Path("/dev/shm").is_dir() else set()
    process = ringverify.apart(*RUNS[world])
    under_way(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    assert_nobody_is_left(process)
    assert becomes_empty(temporary) == []
    assert [file for file in set(Path("/dev/shm").glob("*")) - memory if "torch" in file.name] == []
    assert not Path("report.jsonl").exists()
    with pytest.raises(ReportError, match=r"no footer|cut off"):
        read_report(Path("report.jsonl.partial"))


@pytest.mark.nightly
def test_a_run_that_is_ended_while_it_starts_leaves_nothing(ringverify, temporary):
    """While Python imports, while the fork server does, and when the first rank comes."""
    started = [ringverify.apart(*RUNS["gloo"]) for _ in range(3)]
    for process, seen in zip(started, (1, 2, 3), strict=True):
        until = time.monotonic() + 60
        while len(session(process.pid)) < seen and time.monotonic() < until:
            time.sleep(0.005)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
        assert_nobody_is_left(process)
    assert becomes_empty(temporary) == []
