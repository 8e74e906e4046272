"""What simulated ranks print is kept by rank, and shown with the rank before each line."""

import io
import os
import sys
import time

import pytest
import torch.distributed as dist

from ringverify.words import PRINTED
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld


def talk(_):
    """Every rank prints, in turns, to both streams; rank 1 more than is kept."""
    rank = dist.get_rank()
    print("first of", rank)
    dist.barrier()
    sys.stderr.write(f"second of {rank}")
    dist.barrier()
    print(" and its end")
    if rank == 1:
        print("x" * 2 * PRINTED)
    return rank


def run(world):
    """What came of the program on two ranks."""
    try:
        return world.run(talk, None, world_size=2, seed=0, deadline=30)
    finally:
        world.close()


def test_lines_are_kept_by_rank_in_order(capfd):
    """The end of a rank that prints too much, and nothing on the screen."""
    told = run(SimulatedWorld(show="kept")).printed
    assert told[0] == (0, "first of 0\nsecond of 0 and its end\n")
    assert told[1][0] == 1
    assert len(told[1][1]) == PRINTED
    assert capfd.readouterr() == ("", "")


def test_labelled_lines_name_their_rank(monkeypatch):
    """A line that another rank breaks into is ended first, and a line goes on where its rank goes on."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    run(SimulatedWorld(show="labelled"))
    lines = screen.getvalue().splitlines()
    assert {"[rank 0] first of 0", "[rank 1] first of 1"} <= set(lines)
    assert all(line.startswith("[rank ") for line in lines)
    assert sys.stdout is screen


def test_a_world_in_another_process_keeps_them_too():
    """As data of its run."""
    assert run(ContainedWorld()).printed[0] == (0, "first of 0\nsecond of 0 and its end\n")


def wait_to_be_heard(path):
    """Rank 1 prints, and goes on when somebody who has heard it has made a file."""
    if dist.get_rank() == 1:
        print("is anybody there?")
        while not os.path.exists(path):
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("world", "words"), [(ContainedWorld, b"[rank 1] is anybody there?\n"), (GlooWorld, b"is anybody there?\n")]
)
def test_what_ranks_print_is_heard_while_they_run(world, words, tmp_path):
    """Who listens need not wait for the end of the run, or of the process."""
    heard = []

    def listen(rank, text):
        heard.append(text)
        (tmp_path / "heard").touch()

    one = world(heard=listen)
    try:
        run = one.run(wait_to_be_heard, str(tmp_path / "heard"), world_size=2, seed=0, deadline=30)
    finally:
        one.close()
    assert run.failure is None
    assert b"".join(heard) == words
