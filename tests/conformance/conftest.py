"""An empty folder for every test that uses the command line, and violations without their explanation."""

import sys

import hunts
import pytest
from command_line import CommandLine


@pytest.fixture
def ringverify(tmp_path, monkeypatch, capsys):
    """The command line in an empty folder. Module paths that targets add are taken off again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield CommandLine(tmp_path, capsys)
    assert not (tmp_path / ".hypothesis").exists(), "a cache in the user's folder"


@pytest.fixture
def unexplained(monkeypatch):
    """For tests that are about something else; only of violations that are found in this process."""
    hunts.unexplained(monkeypatch)
