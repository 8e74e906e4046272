"""`ringverify init`: what it writes runs as it is, and nothing that was there is lost."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import assert_one_line

from ringverify.cli.init import FOLDER, KINDS

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.by_day(1)
def test_what_is_written_gets_a_verdict_as_it_is(kind, ringverify):
    """By the command that is printed: the adapter is right, so that a failure is that of what is put into it."""
    written = ringverify("init", "theirs.py", "--kind", kind)
    assert written.code == 0
    (line,) = [line for line in written.out.splitlines() if line.startswith("  ringverify ")]
    assert line.split() == ["ringverify", "check", "theirs.py:attend", "--suite", "smoke"]
    outcome = ringverify.check(*line.split()[2:], "--max-examples", 3)
    assert outcome.code == 0, outcome.out
    assert outcome.verdicts()["gradients"] == "pass"
    assert "ringverify check theirs.py:attend" in Path("theirs.py").read_text()
    assert "adapter.py:" not in Path("theirs.py").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_clean(kind, ringverify):
    """By the rules of this project, as a file of somebody else's."""
    assert ringverify("init", "--kind", kind).code == 0
    ruff = shutil.which("ruff", path=Path(sys.executable).parent)
    for arguments in (("check", "--isolated", "--select", "E,F,W,B,D1"), ("format", "--check")):
        ended = subprocess.run(
            [ruff, *arguments, "--config", "line-length=120", "adapter.py"], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_kind_has_its_file():
    """And no file is there that no kind names."""
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *KINDS}


def test_what_was_there_is_not_written_over(ringverify):
    """One line, exit code 2."""
    Path("mine.py").write_text("precious\n")
    outcome = ringverify("init", "mine.py")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["mine.py exists and was not changed", "name another file"])
    assert Path("mine.py").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere/a.py",), ["nowhere/a.py", "name another file"]),
        (("adapter.txt",), ["adapter.txt", "FILE.py"]),
        (("a.py", "--kind", "ring"), ["'ring'", "ulysses"]),
    ],
)
def test_bad_input_is_one_line(arguments, words, ringverify):
    """And nothing is written."""
    outcome = ringverify("init", *arguments)
    assert outcome.code == 2
    assert_one_line(outcome.err, words)
    assert list(ringverify.folder.iterdir()) == []
