"""Ranks that take turns share a core, where the system can say which, and leave the caller's cores as they were."""

import os
import sys

import pytest
import torch
from simulated_runs import results

from ringverify.worlds.simulated import one_core

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to cores on Linux"),
]


@pytest.fixture(autouse=True)
def cores():
    """The caller's cores, which no run may change."""
    before = os.sched_getaffinity(0)
    yield before
    assert os.sched_getaffinity(0) == before


@pytest.fixture
def threads():
    """Sets torch's number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def cores_of_ranks() -> list[set[int]]:
    """On which cores each of three ranks may run."""
    return results(lambda: os.sched_getaffinity(0), 3)


def test_ranks_share_one_core(threads, cores):
    """One of the caller's cores, the same for all ranks."""
    threads(1)
    first, *others = cores_of_ranks()
    assert len(first) == 1
    assert first <= cores
    assert others == [first, first]


def test_ranks_keep_all_cores_where_torch_has_several_threads(threads, cores):
    """Threads that ranks make torch start would share the one core."""
    threads(2)
    assert cores_of_ranks() == [cores] * 3


def test_ranks_keep_all_cores_where_nobody_says_which_one_is_theirs(threads, cores, monkeypatch):
    """Without `sched_getcpu`, as elsewhere than on Linux."""
    threads(1)
    monkeypatch.setattr(one_core, "_sched_getcpu", lambda: None)
    assert cores_of_ranks() == [cores] * 3


def test_ranks_keep_all_cores_where_a_container_forbids_to_bind_them(threads, cores, monkeypatch):
    """What is refused is gone without."""

    def refuse(process, wanted):
        raise PermissionError("Operation not permitted")

    threads(1)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert cores_of_ranks() == [cores] * 3
