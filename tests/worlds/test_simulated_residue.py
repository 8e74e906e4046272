"""What a run of the simulated world leaves behind: nothing."""

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from simulated_runs import WORLD, failure, results
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.timeout(30)


def busy():
    """Groups, a mesh, messages left lying, a coalescing context left open, gradients off."""
    dist.new_group([0, 1])
    init_device_mesh("cpu", (dist.get_world_size(),))
    dist.isend(torch.empty(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=3)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    c10d._world.pg_coalesce_state[dist.group.WORLD] = []
    return dist.get_rank()


def test_torch_is_as_before():
    """Nothing initialised, the same bookkeeping object, autograd's threads, gradients and the default dtype."""
    world, helper = c10d._world, c10d._new_process_group_helper
    results(busy, 3)
    assert not dist.is_initialized()
    assert c10d._world is world
    assert c10d._new_process_group_helper is helper
    assert (c10d._pg_map, c10d._pg_names, c10d._group_count) == ({}, {}, 0)
    assert torch._C._is_multithreading_enabled()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_every_run_is_fresh():
    """Groups, names, counters and mail start again; so does what a rank did to its thread."""

    def program():
        assert torch.is_grad_enabled()
        assert not torch._C._is_multithreading_enabled()  # or backward of tensors on a GPU would run where no rank is
        assert c10d._world.group_count == 0
        assert list(c10d._world.pg_names.values()) == ["simulated"]
        before = dist.irecv(torch.empty(1), 1 - dist.get_rank(), tag=3).is_completed()
        dist.barrier()
        dist.isend(torch.empty(1), 1 - dist.get_rank(), tag=3)  # beside the one that busy leaves lying
        busy()
        return before

    for _ in range(3):
        assert results(program, 2) == [False, False]


def test_a_rank_may_leave_its_world_and_found_another():
    """`destroy_process_group`, then `init_process_group` with a store, then groups of the new world."""
    store = dist.HashStore()

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.all_reduce(total := torch.ones(1))
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(total, group=group)
        return total.item()

    assert results(program, 3) == [6, 6, 3]


EXIT = """
import os
from simulated_runs import failure
called = []
os._exit = mine = called.append
failure(lambda: os._exit(4), 2)
assert os._exit is mine
assert called == []
"""


def test_an_exit_that_somebody_else_has_replaced_is_theirs_again():
    """The caller's `os._exit` is put back, whatever it was; on a thread that is no rank it is called.

    In a process of its own: as long as a thread that some rank has left lives on, it is not.
    """
    subprocess.run([sys.executable, "-c", EXIT], cwd=Path(__file__).parent, timeout=25, check=True)


def test_no_thread_is_left():
    """After success and after failure."""
    before = set(threading.enumerate())
    results(busy, 4)
    failure(lambda: dist.recv(torch.empty(1), 0, tag=9) if dist.get_rank() else None, 4)
    assert set(threading.enumerate()) == before


def test_tensors_of_a_run_are_freed():
    """Also those that were sent and never received, and those of ranks that failed."""
    seen = []

    def program(fails):
        tensor = torch.ones(1000)
        seen.append(weakref.ref(tensor))
        dist.isend(tensor, 1 - dist.get_rank())
        group = dist.new_group([0, 1])
        seen.append(weakref.ref(group))
        if fails and dist.get_rank() == 1:
            raise ValueError("over")
        dist.barrier()

    results(lambda: program(False), 2)
    failure(lambda: program(True), 2)
    gc.collect()
    assert len(seen) >= 6
    assert all(one() is None for one in seen)


def test_groups_do_not_outlive_their_run():
    """A group that a rank returns is refused outside, by name."""
    (group, _) = results(lambda: dist.group.WORLD, 2)
    with pytest.raises(RuntimeError, match="only the thread of rank 0 may use the process groups of rank 0"):
        group.barrier()


def test_a_thread_that_a_rank_starts_is_no_rank():
    """It finds torch.distributed not initialised, and cannot use the rank's group."""

    def program():
        found = []

        def other(group):
            found.append(dist.is_initialized())
            try:
                dist.barrier(group=group)
            except (RuntimeError, ValueError) as error:
                found.append(str(error))

        thread = threading.Thread(target=other, args=(dist.group.WORLD,))
        thread.start()
        thread.join()
        return found

    for found in results(program, 2):
        assert found[0] is False
        assert len(found) == 2


@pytest.fixture
def outer():
    """A real gloo world of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_real_world_of_the_calling_process_is_kept(outer):
    """Ranks see the simulated one; before and after, the caller's is the same and works, by handle and by name."""
    group = dist.new_group([0])

    def program():
        assert dist.group.WORLD is not outer
        dist.all_reduce(total := torch.ones(1))
        reduced = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()
        return total.item(), reduced.item(), dist.get_backend()

    assert results(program, 3) == [(3, 3, "gloo")] * 3
    failure(lambda: dist.destroy_process_group() or dist.get_rank(), 2)
    assert dist.group.WORLD is outer
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    for one in (outer, group):
        dist.all_reduce(total := torch.ones(1), group=one)
        assert functional.all_reduce(total, "sum", one).wait().item() == 1
    assert dist.get_rank(dist.new_group([0])) == 0
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(functional.all_reduce(total, "sum", group).wait().item()))
    thread.start()
    thread.join()
    assert elsewhere == [1]


def test_a_real_world_is_visible_to_threads_that_were_there_before_a_run(outer):
    """A thread that a rank starts does not see it, and cannot found another one in its place."""
    asked, answered, found = threading.Event(), threading.Event(), []

    def ask():
        asked.wait(20)
        found.append((dist.get_rank(), dist.get_world_size()))
        answered.set()

    def send():
        found.append(dist.is_initialized())
        try:
            dist.send(torch.zeros(1), 7)  # gloo would look for the address of a rank 7 beyond its table of one
        except ValueError as error:
            found.append(str(error))
        c10d._world.default_pg = "another"

    def program():
        asked.set()
        answered.wait(20)
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()

    before = threading.Thread(target=ask)
    before.start()
    results(program, 1)
    before.join()
    assert found[:2] == [(0, 1), False]
    assert "not been initialized" in found[2]
    assert dist.group.WORLD is outer


def test_a_thread_that_wakes_after_its_run_cannot_reach_the_real_world(outer):
    """Nor can one that it starts then. The last of them gives the caller's bookkeeping back."""
    world, over, found = c10d._world, threading.Event(), []

    def late(further):
        over.wait(20)
        found.append(dist.is_initialized())
        if further:
            thread = threading.Thread(target=late, args=(further - 1,))
            thread.start()
            thread.join()

    def program():
        thread = threading.Thread(target=late, args=(2,), name="late")
        thread.start()

    results(program, 1)
    (left,) = [thread for thread in threading.enumerate() if thread.name == "late"]
    assert results(dist.get_world_size, 2) == [2, 2]
    assert dist.get_world_size() == 1
    over.set()
    left.join(5)
    assert found == [False] * 3
    results(dist.get_rank, 1)
    assert c10d._world is world
    assert dist.group.WORLD is outer


def test_a_thread_left_behind_cannot_reach_the_real_world(outer):
    """It wakes when its run is long over, and the process has a world of its own."""
    awake, found = threading.Event(), []

    def program(_):
        try:
            awake.wait(20)
        except BaseException:  # it refuses to be unwound
            found.append("woken")
        found.append(dist.is_initialized())
        dist.barrier()
        found.append("reached")

    run = WORLD.run(program, None, world_size=1, seed=0, deadline=0.1)
    assert run.failure.kind == "deadline"
    (left,) = [thread for thread in threading.enumerate() if thread.name == "rank 0"]
    awake.set()
    left.join(5)
    assert not left.is_alive()
    assert found == ["woken", False]
    dist.all_reduce(torch.ones(1), group=outer)
    assert functional.all_reduce(torch.ones(1), "sum", outer).wait().item() == 1


def test_warnings_filters_are_as_before():
    """Ranks that enter and leave `catch_warnings` in turns would otherwise leave one another's filters."""
    filters, show = warnings.filters, warnings.showwarning

    def program():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.barrier()

    for seed in range(6):
        results(program, 3, seed=seed)
    assert warnings.filters is filters
    assert warnings.showwarning is show


def test_runs_from_two_threads_take_turns():
    """Two callers at once, each with its own result."""
    found = {}

    def caller(name):
        found[name] = [results(lambda: (name, dist.get_rank()), 2) for _ in range(5)]

    threads = [threading.Thread(target=caller, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [[(name, 0), (name, 1)]] * 5 for name in "ab"}
