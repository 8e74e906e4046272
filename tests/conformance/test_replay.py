"""`ringverify replay` is a run like any other: contained, with a deadline, and by the exit codes of `check`."""

import os
from pathlib import Path

import pytest
from command_line import assert_one_line

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check import casefile
from ringverify.check.searching import Counterexample
from ringverify.properties.property import Violation

pytestmark = pytest.mark.timeout(120)

USAGE = 2
TARGETS = """
import ctypes
import os
import sys

from ringverify import implementation


def ends(how):
    @implementation(name=how, world_sizes=(2,))
    def attend(q, k, v, call):
        print("rank", call.rank, "of", os.getpid(), "was here")
        if call.rank == 1:
            DO[how]()
        return 2 * v

    return attend


def forever():
    while True:
        pass


DO = {
    "returns": lambda: None,
    "exits": lambda: sys.exit(0),
    "ends_the_process": lambda: os._exit(0),
    "ends_it_unseen": lambda: ctypes.CDLL(None)._exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "hangs": forever,
}
returns, exits, ends_the_process, ends_it_unseen, crashes, hangs = map(ends, DO)
"""


@pytest.fixture
def recorded(ringverify):
    """Makes the case file of one of these, as a run in this folder writes it."""
    Path("bad.py").write_text(TARGETS)

    def write(name, world="simulated"):
        case = Case(problem=Problem(query_length=2), world_size=2)
        wrong = Violation(("value", "out"), 0, "wrong")
        found = Counterexample(case, wrong, "", first=case, tried=0, smallest=True, repeats=True)
        folder = Path(".ringverify")
        return casefile.save(
            folder, target=f"bad.py:{name}", property="forward", world=world, device="cpu", counterexample=found
        )

    return write


ENDS = {
    "exits": ((), "rank 1 called sys.exit(0)"),
    "ends_the_process": ((), "rank 1 called os._exit(0)"),
    "ends_it_unseen": ((), "the process of the simulated ranks ended with exit code 0"),
    "crashes": ((), "the process of the simulated ranks was ended by signal SIGSEGV"),
    "hangs": (("--deadline", "0.5"), "after 0.5 s rank 1 had not returned"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_its_process_or_never_returns_is_a_violation(how, ringverify, recorded):
    """Exit code 1, whatever the process's is, and in words; what ranks printed until then is shown with the rank."""
    options, words = ENDS[how]
    outcome = ringverify("replay", recorded(how), *options)
    assert (outcome.code, outcome.err) == (1, "")
    first, *lines = outcome.out.splitlines()
    assert first == f"imports {how} of {Path('bad.py').resolve()}"
    assert any(line.startswith("[rank 1] rank 1 of ") and line.endswith(" was here") for line in lines)
    assert any(line.strip().startswith(words) for line in lines)
    assert f"{os.getpid()} was here" not in outcome.out


def test_in_process_ranks_are_threads_of_the_replay_itself(ringverify, recorded):
    """As debuggers need it; with the same verdict and the same bits."""
    path = recorded("returns")
    apart, here = ringverify("replay", path), ringverify("replay", path, "--in-process")
    assert (apart.code, here.code) == (1, 1)
    assert f"[rank 1] rank 1 of {os.getpid()} was here" in here.out.splitlines()
    assert f"{os.getpid()} was here" not in apart.out
    assert apart.out.splitlines()[-1] == here.out.splitlines()[-1]


def test_in_process_is_for_simulated_ranks(ringverify, recorded):
    """A rank of another world is a process."""
    outcome = ringverify("replay", recorded("returns", world="gloo"), "--in-process")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["--in-process", "gloo", "leave it out"])
