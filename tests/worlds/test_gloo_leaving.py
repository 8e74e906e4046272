"""Ranks of a tool that was killed tidy up behind it, and none does so while another one still starts."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ringverify.worlds.gloo_rank import LOOPBACK, LocalRank
from ringverify.worlds.gloo_wire import Seat

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform == "win32", reason="there is no fork server"),
]


def started(directory: Path, number: int) -> LocalRank:
    """A rank of two that waits for the other one."""
    rank = LocalRank(Seat(number, 2, number, 2, "gloo", interface=LOOPBACK), str(directory), "gloo_programs")
    until = time.monotonic() + 60
    while not (directory / "store").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (directory / "store").exists()
    return rank


def left_alone(rank: LocalRank) -> None:
    """What a rank sees of the tool's end; then wait for its own."""
    rank._lifeline.close()
    rank._process.join(60)
    assert rank._process.exitcode == 0


def test_the_last_rank_to_leave_removes_the_directory(tmp_path: Path) -> None:
    """And no earlier one: torch's `FileStore` looks minutes for a directory that is gone and lets nobody interrupt."""
    directory = tmp_path / "meeting"
    directory.mkdir()
    first = started(directory, 0)
    coming = directory / "stacks-1"
    coming.touch()  # another rank is there and about to make its store
    left_alone(first)
    assert directory.exists()
    dist.FileStore(str(directory / "store"), 2)  # type: ignore[attr-defined]  # documented, but not in __all__
    coming.unlink()
    left_alone(started(directory, 1))
    assert not directory.exists()
