"""A machine that has too little of something: every limit is a real one, set for one run of the tool."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ringverify.worlds.foreign_text import last_words
from ringverify.worlds.limits import limit_in
from ringverify.worlds.processes.wire import NotReady

RIGHT = """
import sys

sys.path.insert(0, {miniatures!r})
from right import attention

from ringverify import implementation


@implementation(world_sizes=(4,))
def attend(q, k, v, call):
    return attention(q, k, v, call)
"""
NOBODY = 64123
"""A user of whom there are no other processes, for they count too."""
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"),
)
"""Root has as many processes as it wants. The right to read files is kept: the tool may be installed in root's home."""


def can_be_nobody() -> bool:
    """Whether this process may become another user that finds Python."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*AS_NOBODY, sys.executable, "-c", ""], capture_output=True).returncode == 0


needs_root = pytest.mark.skipif(not can_be_nobody(), reason="only root becomes nobody, and not in every container")


def checked(folder: Path, kind: int, most: int, *before: str) -> subprocess.CompletedProcess[str]:
    """`check --world gloo` of a right implementation by a process that has at most so much of something."""
    (folder / "mine.py").write_text(RIGHT.format(miniatures=str(Path(__file__).parents[1] / "miniatures")))
    command = [*before, sys.executable, "-m", "ringverify", "check", "mine.py:attend", "--world", "gloo"]
    limited = [sys.executable, "-c", f"import os, resource, sys; resource.setrlimit({kind}, ({most}, {most})); "
               "os.execvp(sys.argv[1], sys.argv[1:])"]  # fmt: skip
    few = ["--only", "forward", "--max-examples", "2"]
    environment = os.environ | {"HOME": str(folder), "OPENBLAS_NUM_THREADS": "1"}  # it sends SIGINT where it lacks one
    return subprocess.run([*limited, *command, *few], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("most", [8, 16, 28])
@pytest.mark.by_day(1)
def test_a_right_implementation_is_inconclusive_where_file_descriptors_run_out(tmp_path: Path, most: int) -> None:
    """For the tool as it starts, for the first process, for the second: the limit is named, without a traceback."""
    ran = checked(tmp_path, resource.RLIMIT_NOFILE, most)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert f"this machine is out of file descriptors (the limit is {most}: ulimit -n)" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@needs_root
@pytest.mark.timeout(300)
def test_a_right_implementation_is_inconclusive_where_processes_run_out() -> None:
    """A thread of gloo's, or a process of ours: what is missed first differs from run to run, the verdict does not."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is root's alone
        os.chmod(folder, 0o777)
        ran = checked(Path(folder), resource.RLIMIT_NPROC, 16, *AS_NOBODY)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "the gloo world could not start" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_what_a_rank_could_not_have_is_told_and_what_it_missed_with_it_is_a_consequence() -> None:
    """The one is the reason why a world does not start, the other waits for it."""
    refused = NotReady.of(RuntimeError(os.strerror(errno.EAGAIN)))
    assert refused.reason.startswith("this machine is out of threads")
    assert not refused.consequence
    assert NotReady.of(OSError(errno.EMFILE, "no more")).reason.startswith("this machine is out of file descriptors")
    assert NotReady.of(RuntimeError("Connection closed by peer [127.0.0.1]:1")).consequence


def test_limits_are_found_in_what_a_process_printed() -> None:
    """EAGAIN only where something was started; the last line is the process's own."""
    printed = "one\nterminate called: what(): Resource temporarily unavailable\nFatal Python error: Aborted\n\nmore"
    assert last_words(printed) == "terminate called: what(): Resource temporarily unavailable"
    assert (limit_in(printed, starting=True), limit_in(printed)) == ("threads", None)
    assert limit_in("libtorch_cpu.so: failed to map segment from shared object") == "memory"
    assert last_words("") == ""
