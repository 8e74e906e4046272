"""What is written: whole or not at all, never in the place of a device or of a link, and never by two runs at once."""

import errno
import io
import os
import socket
import stat
import threading
from pathlib import Path

import pytest
import sample_events
from hunts import unexplained

import ringverify.check.run
from ringverify import files
from ringverify.cli.main import main
from ringverify.events import CounterexampleEvent
from ringverify.files import write_whole
from ringverify.reports.jsonl import ReportError, ReportWriter, read_report

LINES = sample_events.everything()
EVENTS = sample_events.typed(LINES)


def in_thread(read):
    """Something that waits for what is written, and its answer."""
    found = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    return lambda: (thread.join(10), found[0])[1]


# -- what is no regular file -------------------------------------------------------------------------------------------


def test_a_fifo_is_written_to_and_stays_one(tmp_path):
    """As of a shell's `>(…)`."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, "text\n")
    assert os.read(reader, 100) == b"text\n"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["fifo"]


def test_a_fifo_that_nobody_reads_is_refused_at_once(tmp_path):
    """To open it would wait for ever."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device"):
        write_whole(tmp_path / "fifo", "text")
    with pytest.raises(ReportError, match="cannot write report"):
        ReportWriter(tmp_path / "fifo")


def test_a_terminal_is_written_to(tmp_path):
    """Through a link to it."""
    primary, secondary = os.openpty()
    (tmp_path / "link").symlink_to(os.ttyname(secondary))
    write_whole(tmp_path / "link", "text")
    assert os.read(primary, 100) == b"text"
    assert (tmp_path / "link").is_symlink()
    os.close(primary), os.close(secondary)


def test_a_socket_is_written_to(tmp_path, monkeypatch):
    """Somebody listens there."""
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        listener.listen()
        write_whole(Path("socket"), "text")
        assert listener.accept()[0].recv(100) == b"text"
    assert stat.S_ISSOCK(Path("socket").stat().st_mode)


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_descriptor_of_ours_is_written_to_even_where_it_is_a_file(folder, tmp_path):
    """As /dev/stdout is under `> out.txt`: a file in its place would not have what is printed."""
    with (tmp_path / "out.txt").open("w+b", buffering=0) as file:
        (tmp_path / "link").symlink_to(f"{folder}/{file.fileno()}")
        file.write(b"before ")
        write_whole(tmp_path / "link", "text")
        file.write(b" after")
    assert (tmp_path / "out.txt").read_text() == "before text after"


def test_a_report_goes_to_a_fifo_with_its_footer(tmp_path):
    """Sealed as any other."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    whole = in_thread(path.read_text)
    while True:
        try:
            writer = ReportWriter(path)
            break
        except ReportError:  # the reader has not opened it yet
            continue
    with writer:
        for event in EVENTS:
            writer.write(event)
    assert writer.failure is None
    (tmp_path / "report.jsonl").write_text(whole())
    assert len(read_report(tmp_path / "report.jsonl")) == len(EVENTS)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["fifo", "report.jsonl"]


def test_a_folder_and_a_disk_are_refused(tmp_path):
    """Neither can be written to."""
    with pytest.raises(OSError, match="it is a folder"):
        write_whole(tmp_path, "text")
    assert files.look_at_place(tmp_path) == " is a folder: name a file"


def test_outputs_may_be_the_null_device(tmp_path, monkeypatch, capsys):
    """Several of them, named before any work is done; nothing is put in its place."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(sample_events.sealed(LINES))
    assert main(["report", "a.jsonl", "--html", "/dev/null", "--junit", "/dev/null", "--markdown", "/dev/stdout"]) == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


# -- links and other runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_file_stays_a_link(there, tmp_path):
    """The file that it leads to is written, with the permissions that it had."""
    file, link = tmp_path / "file", tmp_path / "link"
    if there:
        file.write_text("before")
        file.chmod(0o600)
    link.symlink_to("file")
    write_whole(link, "after")
    with ReportWriter(link) as writer:
        writer.write(EVENTS[0])
        writer.write(EVENTS[-1])
    assert link.is_symlink()
    assert len(read_report(file)) == 2
    assert not there or stat.S_IMODE(file.stat().st_mode) in (0o600, 0o644)


def test_a_written_file_keeps_its_permissions(tmp_path):
    """A secret stays one."""
    (tmp_path / "file").touch(0o600)
    write_whole(tmp_path / "file", b"text")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


@pytest.mark.parametrize("laid", ["link", "second name"])
def test_a_partial_file_that_leads_elsewhere_is_not_written_to(laid, tmp_path):
    """Somebody laid it there, in a folder that all may write to."""
    victim, partial = tmp_path / "victim", tmp_path / "report.jsonl.partial"
    victim.write_text("precious")
    partial.symlink_to(victim) if laid == "link" else partial.hardlink_to(victim)
    with pytest.raises(ReportError, match=r"cannot write report .*report\.jsonl: "):
        ReportWriter(tmp_path / "report.jsonl")
    write_whole(tmp_path / "report.jsonl", "text")
    assert victim.read_text() == "precious"


def test_a_second_run_with_the_same_report_is_told_so_before_it_starts(tmp_path):
    """Also by another name of it; when the first has ended, it may be written again."""
    report = tmp_path / "report.jsonl"
    (tmp_path / "link").symlink_to("report.jsonl")
    with ReportWriter(report) as first:
        first.write(EVENTS[0])
        for name in ("report.jsonl", "link"):
            with pytest.raises(ReportError, match="is being written by another run: name another file"):
                ReportWriter(tmp_path / name)
        first.write(EVENTS[-1])
    assert len(read_report(report)) == 2
    with ReportWriter(report) as second:
        second.write(EVENTS[0])
    assert len(read_report(report)) == 2


# -- a disk that fills -------------------------------------------------------------------------------------------------


class Disk:
    """Has room for so many bytes."""

    def __init__(self, room, monkeypatch):
        self.room, self._write = room, os.write
        monkeypatch.setattr(files.os, "write", self.write)

    def write(self, opened, data):
        """As `os.write`: part of it while there is room, and then an error."""
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(opened, bytes(data[: self.room]))
        self.room -= taken
        return taken


def test_a_disk_that_fills_at_any_byte_leaves_the_older_file(tmp_path, monkeypatch):
    """And nothing beside it."""
    path = tmp_path / "file"
    path.write_text("before")
    for room in range(12):
        with monkeypatch.context() as patch:
            Disk(room, patch)
            with pytest.raises(OSError, match="No space left"):
                write_whole(path, "twelve bytes")
        assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_report_that_does_not_fit_goes_on_without_its_rest(tmp_path, monkeypatch):
    """At any byte: the run is not ended, the older report stays, and what was told is kept."""
    path = tmp_path / "report.jsonl"
    path.write_text("before")
    events = [EVENTS[0], EVENTS[1], EVENTS[-1]]
    with ReportWriter(tmp_path / "whole.jsonl") as writer:
        for event in events:
            writer.write(event)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for room in range(0, len(whole), 7):
        with monkeypatch.context() as patch, ReportWriter(path) as writer:
            Disk(room, patch)
            for event in events:
                writer.write(event)
        assert writer.failure is not None
        assert "No space left on device; the events before that are in" in writer.failure
        assert path.read_text() == "before"
        assert (tmp_path / "report.jsonl.partial").read_bytes() == whole[:room]


@pytest.fixture
def verdict(tmp_path, monkeypatch, capsys):
    """A run of `check` that comes to a verdict on a disk with so much room, and its exit code and lines."""
    monkeypatch.chdir(tmp_path)

    def run(code, room, *outputs):
        def check(subjects, properties, options, tell, progress, crew):
            for event in EVENTS:
                tell(event)
            return code

        with monkeypatch.context() as patch:
            patch.setattr(ringverify.check.run, "check", check)
            if room is not None:
                Disk(room, patch)
            exit_code = main(["check", "ring", *outputs])
        return exit_code, capsys.readouterr().err.splitlines()

    return run


OUTPUTS = ("--report", "r.jsonl", "--html", "p.html", "--junit", "j.xml", "--markdown", "m.md")


@pytest.mark.parametrize(("code", "after"), [(1, 1), (0, 2), (3, 3)])
def test_outputs_that_cannot_be_written_do_not_change_a_verdict(code, after, verdict):
    """Only 0, which says that all that was asked for was done, becomes 2: a line on each output that is missing."""
    exit_code, lines = verdict(code, 100, *OUTPUTS)
    assert exit_code == after
    missing = [f"cannot write {name}" for name in ("p.html", "j.xml", "m.md")] + ["report r.jsonl is incomplete"]
    assert sorted(line.partition(": No space left on device")[0] for line in lines) == sorted(
        f"ringverify: {one}" for one in missing
    )
    assert verdict(code, None, *OUTPUTS)[0] == code


def test_an_output_that_cannot_be_made_does_not_change_a_verdict(verdict, monkeypatch):
    """An error of ours, in the last thing that is done."""
    monkeypatch.setattr("ringverify.reports.command.junit", lambda results: 1 / 0)
    exit_code, lines = verdict(1, None, "--junit", "j.xml", "--markdown", "m.md")
    assert exit_code == 1
    assert len(lines) == 1
    assert "cannot write j.xml: ZeroDivisionError" in lines[0]
    assert Path("m.md").exists()


class Full(io.StringIO):
    """A standard output without room."""

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("code", "after"), [(1, 1), (0, 2)])
def test_a_standard_output_without_room_does_not_change_a_verdict(code, after, verdict, monkeypatch):
    """As of `> /dev/full`."""
    monkeypatch.setattr("sys.stdout", Full())
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    exit_code, lines = verdict(code, None)
    assert exit_code == after
    assert lines == ["ringverify: cannot write to standard output: No space left on device"]


def test_a_case_that_cannot_be_kept_is_a_violation_all_the_same(tmp_path, monkeypatch):
    """With the reason, and the command that shows it again."""
    from ringverify.check import casefile
    from ringverify.errors import UsageError

    def full(*rest, **fields):
        raise UsageError("cannot write case x.json: No space left on device; name another folder with --cases")

    monkeypatch.setattr(casefile, "save", full)
    unexplained(monkeypatch)
    monkeypatch.chdir(tmp_path)
    target = f"{Path(__file__).resolve().parents[1] / 'miniatures' / 'faulty_rings.py'}:wrong_scale"
    assert main(["check", target, "--only", "forward", "--max-examples", "5", "--report", "r.jsonl"]) == 1
    (event,) = [event for event in read_report(Path("r.jsonl")) if isinstance(event, CounterexampleEvent)]
    assert "No space left on device" in event.note
    assert event.replay.startswith("ringverify check ")
    assert event.file is None
